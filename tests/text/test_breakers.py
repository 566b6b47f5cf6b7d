"""Texts that end a repetition, in the vocabulary of the demo model."""

from tests.serve.scripted import byte_tokenizer

from octavo.text.breakers import Breakers
from octavo.text.tokenizer import Tokenizer


def test_all_tokens_that_contain_a_text_stand_for_it(demo_tokenizer: Tokenizer) -> None:
    found = Breakers(demo_tokenizer).of(["\n", ":"])
    pieces = [demo_tokenizer.token_bytes(token) for token in range(demo_tokenizer.vocab_size)]
    expected = {(t,) for t, piece in enumerate(pieces) if b"\n" in piece or b":" in piece}
    assert set(found) == expected
    assert len(expected) > 50


def test_a_text_may_begin_with_the_end_of_a_token(demo_tokenizer: Tokenizer) -> None:
    found = Breakers(demo_tokenizer).of(["the end"])
    texts = {sequence: demo_tokenizer.decode(sequence) for sequence in found}
    assert found
    assert all("the end" in text for text in texts.values())
    usual = demo_tokenizer.encode("the end", parse_special=False, add_special=False)
    spaced = demo_tokenizer.encode(" the end", parse_special=False, add_special=False)
    assert {tuple(usual), tuple(spaced)} <= set(found)
    assert any(not text.startswith(("the", " the")) for text in texts.values())


def test_bytes_are_tokens_too() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("aé", parse_special=False, add_special=False)
    assert Breakers(tokenizer).of(["aé", "aé"]) == (tuple(ids),)
