"""Answers of a vocabulary that spells rare characters byte by byte: pieces join to the text, and
stop strings are found wherever tokens meet."""

from pathlib import Path
from tempfile import TemporaryDirectory

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tests.text.test_assembler import finished
from tokenizers import AddedToken, decoders, models

from octavo.core.events import Token
from octavo.text.assembler import Assembler, Delta, Ended, StopRules
from octavo.text.tokenizer import Tokenizer

PIECES = ["▁he", "▁", "llo", "é", "e", "\u0301", "👩", "\u200d", "👧", "漢字", "▁\ufffd", "a▁b"]
SPELLED = [bytes([byte]) for byte in range(256)] + [
    piece.replace("▁", " ").encode() for piece in PIECES
]
SPECIAL = len(SPELLED)
"""The id of the one special token."""
OF_EMOJI = sorted({*"👩‍👧é漢".encode()})


def tokenizer() -> Tokenizer:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {piece: 256 + number for number, piece in enumerate(PIECES)}
    parsing = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    parsing.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    parsing.add_special_tokens([AddedToken("<end>", special=True)])
    with TemporaryDirectory() as folder:
        parsing.save(f"{folder}/tokenizer.json")
        return Tokenizer.from_folder(Path(folder))


TOKENIZER = tokenizer()
ANSWERS = st.lists(
    st.one_of(
        st.integers(256, SPECIAL),
        st.sampled_from(OF_EMOJI),
        st.sampled_from(["👩", "👧", "é", "漢"]).map(str.encode),  # spelled by bytes
    ),
    max_size=14,
).map(
    lambda parts: [token for part in parts for token in ([part] if isinstance(part, int) else part)]
)


@given(ANSWERS, st.data(), st.booleans(), st.booleans(), st.integers(0, 6))
def test_every_answer_is_cut_by_the_plain_definition(
    ids: list[int], data: st.DataObject, skip: bool, include: bool, min_tokens: int
) -> None:
    spelled = [*SPELLED, b"" if skip else b"<end>"]
    texts = [
        b"".join(spelled[token] for token in ids[:count]).decode(errors="replace")
        for count in range(len(ids) + 1)
    ]
    whole = texts[-1]
    places = st.integers(0, max(len(whole) - 1, 0))
    stops = tuple(
        stop
        for at, length in data.draw(st.lists(st.tuples(places, st.integers(1, 4)), max_size=3))
        if (stop := whole[at : at + length].rstrip("\ufffd"))
    )
    rules = StopRules(strings=stops, include_string=include, min_tokens=min_tokens)
    assembler = Assembler(TOKENIZER, rules, skip_special=skip)
    out: list[Delta | Ended] = []
    for index, token in enumerate(ids):
        out += assembler.take(Token("r", index, token, 0.0))
        said = "".join(item.text for item in out if isinstance(item, Delta))
        assert whole.startswith(said)
    out += assembler.take(finished("length"))
    *deltas, last = out
    assert isinstance(last, Ended)
    text = "".join(item.text for item in deltas if isinstance(item, Delta))

    # The bytes so far may end in the middle of a character, which is no text yet.
    certain = [one.rstrip("\ufffd") for one in texts]
    earliest = len(certain[min(max(min_tokens - 1, 0), len(ids))])
    ends = [
        (at + len(stop), -len(stop), stop)
        for stop in stops
        for at in range(len(whole))
        if whole.startswith(stop, at) and at + len(stop) > earliest
    ]
    if "\ufffd" in whole and min_tokens > 1:
        return  # what was said before min_tokens is not so easily told
    if not ends or len(ids) < min_tokens:
        assert (text, last.stop_reason, last.finish_reason) == (whole, None, "length")
    else:
        at, length, stop = min(ends)
        assert (text, last.stop_reason) == (whole[: at if include else at + length], stop)
