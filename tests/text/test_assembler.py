"""Stop strings, stop ids, length: one order, the same answer for every split into tokens."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.vocabulary import tokenizer_of

from octavo.core.events import Finished, FinishReason, Receipt, Token
from octavo.text.assembler import Assembler, Delta, Ended, StopRules

RECEIPT = Receipt(
    prompt_tokens=3,
    completion_tokens=99,
    cached_tokens=0,
    recomputed_tokens=0,
    preemptions=0,
    arrival_s=1.0,
    admitted_s=2.0,
    first_token_s=3.0,
    finished_s=4.0,
    peak_blocks=1,
)


def finished(reason: FinishReason, stop_id: int | None = None) -> Finished:
    return Finished("r", reason, stop_id, "", RECEIPT)


class Answer:
    """An assembler fed with pieces, one token each, as an engine would."""

    def __init__(
        self, pieces: list[str], rules: StopRules, end: Finished, *, skip_special: bool = True
    ) -> None:
        tokenizer, ids = tokenizer_of([piece.encode() for piece in pieces])
        assembler = Assembler(tokenizer, rules, skip_special=skip_special)
        self.deltas: list[Delta] = []
        self.tokens_until_ended: int | None = None
        out: list[Delta | Ended] = []
        for index, token in enumerate(ids):
            out.extend(assembler.take(Token("r", index, token, -0.5 * index)))
            if assembler.ended and self.tokens_until_ended is None:
                self.tokens_until_ended = index + 1
        out.extend(assembler.take(end))
        *deltas, self.ended = out
        for delta in deltas:
            assert isinstance(delta, Delta)
            self.deltas.append(delta)
        assert isinstance(self.ended, Ended)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


def cut(text: str, cuts: set[int]) -> list[str]:
    edges = [0, *sorted(cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges) if b > a]


CASES = (
    # text, stops, what is left, the stop that ended it
    ("kilo lima mike", ("o lima",), "kil", "o lima"),
    ("kilo lix", ("o lima",), "kilo lix", None),
    ("kilo lima", ("o lima mike",), "kilo lima", None),
    ("kilo lima", ("lima", "lim"), "kilo ", "lim"),
    ("kilo lima", ("lim", "lima"), "kilo ", "lim"),
    ("abcd", ("bc", "abcd"), "a", "bc"),
    ("xabc", ("c", "abc"), "x", "abc"),
    ("a river", ("rive",), "a ", "rive"),
    ("aaab", ("aab",), "a", "aab"),
    ("x [/note] y;;z", (";;",), "x [/note] y", ";;"),
    ("👩‍👧 und ;", ("\u200d👧",), "👩", "\u200d👧"),
)


@given(st.sampled_from(CASES), st.sets(st.integers(0, 20)), st.booleans())
def test_every_split_ends_alike(
    case: tuple[str, tuple[str, ...], str, str | None], cuts: set[int], include: bool
) -> None:
    text, stops, left, stop = case
    rules = StopRules(strings=stops, include_string=include)
    answer = Answer(cut(text, {c for c in cuts if c < len(text)}), rules, finished("length"))
    assert answer.text == (left + (stop or "") if include else left)
    assert answer.ended.stop_reason == stop
    assert answer.ended.finish_reason == ("length" if stop is None else "stop")


@given(
    st.text("ab;", max_size=24),
    st.lists(st.text("ab;", min_size=1, max_size=4), max_size=3).map(tuple),
    st.sets(st.integers(0, 24)),
)
def test_only_what_may_become_a_stop_is_held(
    text: str, stops: tuple[str, ...], cuts: set[int]
) -> None:
    pieces = cut(text, {c for c in cuts if c < len(text)})
    one = Answer(list(text), StopRules(strings=stops), finished("length"))
    many = Answer(pieces, StopRules(strings=stops), finished("length"))
    assert (one.text, one.ended.stop_reason) == (many.text, many.ended.stop_reason)
    out = ""
    for n, delta in enumerate(many.deltas[: many.tokens_until_ended or len(pieces)]):
        out += delta.text
        seen = "".join(pieces[: n + 1])
        if many.tokens_until_ended == n + 1:
            break
        held = seen[len(out) :]
        assert seen.startswith(out)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_the_stop_says_so_at_once_and_drops_what_follows() -> None:
    rules = StopRules(strings=("st",))
    answer = Answer(["a", "s", "top", "b", "c"], rules, finished("abort"))
    assert answer.tokens_until_ended == 3
    assert [delta.text for delta in answer.deltas] == ["a", "", ""]
    assert [len(delta.token_ids) for delta in answer.deltas] == [1, 1, 1]
    assert answer.ended == Ended("stop", "st", replace(RECEIPT, completion_tokens=3))


def test_a_stop_string_goes_before_length() -> None:
    answer = Answer(["a", "b;"], StopRules(strings=(";",)), finished("length"))
    assert (answer.text, answer.ended.finish_reason) == ("ab", "stop")


def test_no_stop_before_min_tokens() -> None:
    pieces = [";", "a", ";", "b", ";"]
    for min_tokens, left, count in ((0, "", 1), (1, "", 1), (2, ";a", 3), (4, ";a;b", 5)):
        rules = StopRules(strings=(";",), min_tokens=min_tokens)
        answer = Answer(pieces, rules, finished("length"))
        assert (answer.text, answer.tokens_until_ended) == (left, count)
    answer = Answer(pieces, StopRules(strings=(";",), min_tokens=6), finished("length"))
    assert (answer.text, answer.ended.finish_reason) == (";a;b;", "length")


def test_a_stop_may_begin_before_min_tokens() -> None:
    rules = StopRules(strings=("ab", "abcd"), min_tokens=3)
    answer = Answer(["x", "ab", "c", "d"], rules, finished("length"))
    assert (answer.text, answer.ended.stop_reason) == ("x", "abcd")


@pytest.mark.parametrize("include", [False, True])
def test_the_text_of_a_stop_id_is_left_out_unless_included(include: bool) -> None:
    _tokenizer, ids = tokenizer_of([b"one", b"two"])
    stop = ids[1]
    rules = StopRules(
        end_ids=frozenset({0, stop}), stop_token_ids=frozenset({stop}), include_string=include
    )
    answer = Answer(["one", "two"], rules, finished("stop", stop))
    assert answer.text == ("onetwo" if include else "one")
    assert answer.ended.stop_reason == stop
    assert answer.ended.receipt.completion_tokens == 2
    assert answer.deltas[1].token_ids == (stop,)


def test_the_models_own_end_gives_no_stop_reason() -> None:
    tokenizer, ids = tokenizer_of([b"one"])
    assembler = Assembler(tokenizer, StopRules(end_ids=frozenset({0})), skip_special=False)
    out = [*assembler.take(Token("r", 0, ids[0], 0.0)), *assembler.take(Token("r", 1, 0, 0.0))]
    out += assembler.take(finished("stop", 0))
    assert [item.text for item in out[:2] if isinstance(item, Delta)] == ["one", ""]
    assert out[2] == Ended("stop", None, replace(RECEIPT, completion_tokens=2))


def test_held_text_and_half_a_character_come_out_at_the_end() -> None:
    tokenizer, ids = tokenizer_of([b"xs", "é".encode()[:1]])
    assembler = Assembler(tokenizer, StopRules(strings=("st",)), skip_special=True)
    out = [item for n, token in enumerate(ids) for item in assembler.take(Token("r", n, token, 0))]
    out += assembler.take(finished("length"))
    assert [item.text for item in out if isinstance(item, Delta)] == ["x", "", "s\ufffd"]


def test_long_random_answers(seed: int) -> None:
    """Against the plain definition: cut at the stop that is complete first."""
    draw = random.Random(seed)
    for _ in range(200):
        text = "".join(draw.choice("abc") for _ in range(200))
        stops = tuple(
            "".join(draw.choice("abc") for _ in range(draw.randrange(2, 8))) for _ in range(3)
        )
        ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
        wanted = (text[: min(ends)[0] + min(ends)[1]], min(ends)[2]) if ends else (text, None)
        pieces = cut(text, {draw.randrange(200) for _ in range(60)})
        answer = Answer(pieces, StopRules(strings=stops), finished("length"))
        assert (answer.text, answer.ended.stop_reason) == wanted
