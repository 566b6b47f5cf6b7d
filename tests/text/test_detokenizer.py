"""Joined deltas are the whole text, for every split of its bytes into tokens."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from tests.text.vocabulary import tokenizer_of

from octavo.text.detokenizer import Detokenizer

TEXTS = (
    "👩‍👩‍👧‍👦 family and 🏳️‍🌈 flag",
    "漢字かな交じり文",
    "e\u0301 combining, é composed",
    "plain",
)


@st.composite
def splits(draw: st.DrawFn) -> list[bytes]:
    """Bytes, valid or not, cut into pieces anywhere."""
    whole = draw(
        st.one_of(
            st.sampled_from(TEXTS).map(str.encode),
            st.text(max_size=20).map(str.encode),
            st.binary(max_size=20),
            st.tuples(st.sampled_from(TEXTS), st.binary(max_size=3)).map(
                lambda pair: pair[0].encode()[:-1] + pair[1]
            ),
        )
    )
    cuts = sorted(draw(st.sets(st.integers(0, len(whole)), max_size=len(whole))))
    edges = [0, *cuts, len(whole)]
    return [whole[a:b] for a, b in itertools.pairwise(edges) if b > a]


@given(splits())
def test_deltas_join_to_the_full_decode(pieces: list[bytes]) -> None:
    tokenizer, ids = tokenizer_of(pieces)
    whole = b"".join(pieces).decode("utf-8", errors="replace")
    assert tokenizer.decode(ids) == whole
    detokenizer = Detokenizer(tokenizer, skip_special=False)
    deltas = [detokenizer.push(token) for token in ids]
    deltas.append(detokenizer.flush())
    assert "".join(deltas) == whole
    if "\ufffd" not in whole:
        assert all("\ufffd" not in delta for delta in deltas)
        assert deltas[-1] == ""


@given(splits())
def test_a_character_comes_with_its_last_byte(pieces: list[bytes]) -> None:
    """What is out after each token is all that the bytes so far say for certain."""
    tokenizer, ids = tokenizer_of(pieces)
    detokenizer = Detokenizer(tokenizer, skip_special=False)
    out, seen = "", b""
    for token, piece in zip(ids, pieces, strict=True):
        out += detokenizer.push(token)
        seen += piece
        certain = seen.decode("utf-8", errors="replace")
        assert certain in (out, out + "\ufffd")


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    tokenizer, (first, second) = tokenizer_of(["é".encode()[:1], "é".encode()[1:]])
    for skip, text in ((True, "é"), (False, "\ufffd<|end|>\ufffd")):
        detokenizer = Detokenizer(tokenizer, skip_special=skip)
        deltas = [detokenizer.push(token) for token in (first, 0, second)]
        assert "".join(deltas) + detokenizer.flush() == text
