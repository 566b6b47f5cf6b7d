"""Words as tokens, in the real vocabulary of the demo model."""

from tests.serve.scripted import byte_tokenizer

from octavo.text.tokenizer import Tokenizer
from octavo.text.words import spellings


def test_a_word_is_spelled_with_and_without_a_space_before(demo_tokenizer: Tokenizer) -> None:
    for word in ("hello", "the", "Paris", "unbelievable", "Zwölf", "two words"):
        found = spellings([word, " " + word], demo_tokenizer)
        assert [demo_tokenizer.decode(ids) for ids in found] == [word, " " + word]
        assert len(set(found)) == 2


def test_a_space_that_is_a_token_of_its_own_adds_nothing() -> None:
    assert spellings(["ab", "c"], byte_tokenizer()) == (
        tuple(byte_tokenizer().encode("ab", parse_special=True, add_special=False)),
        tuple(byte_tokenizer().encode("c", parse_special=True, add_special=False)),
    )


def test_nothing_but_a_space_is_a_space(demo_tokenizer: Tokenizer) -> None:
    (ids,) = spellings([" "], demo_tokenizer)
    assert demo_tokenizer.decode(ids) == " "
