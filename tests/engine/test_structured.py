"""Structured answers from door to end: masks, forced tokens, ends, and whom they touch."""

import json
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from tests.engine.noisy import (
    END,
    GRAMMARS,
    TOKENIZER,
    VOCABULARY,
    Noisy,
    Told,
    likes_to_end,
)

from octavo.core.acceptance import Acceptance
from octavo.core.events import Finished, Token
from octavo.core.request import Request
from octavo.engine.params import SamplingParams
from octavo.runtime.lookup import Drafters
from octavo.text.assembler import Delta, Ended
from octavo.text.grammar import Grammars, Matcher
from octavo.text.structured import Structured

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["the", "name"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TIGHT = Structured(json=PERSON, disable_any_whitespace=True)
FORMS = {
    "loose": Structured(json=PERSON),
    "tight": TIGHT,
    "object": Structured(json_object=True),
    "regex": Structured(regex=r"[a-f]{3,20}-\d{2}"),
    "choice": Structured(choice=["name", "names", "na me", "the end"]),
    "grammar": Structured(grammar='root ::= "so " ("the " | "name ")* "end"'),
    "tag": Structured(
        structural_tag={
            "triggers": ["<f="],
            "structures": [{"begin": "<f=a>", "schema": PERSON, "end": "</f>"}],
        }
    ),
}


def requests(noisy: Noisy) -> list[Request]:
    """Of each form, greedy and drawn, with other edits beside it."""
    asked = []
    for name, form in FORMS.items():
        asked += [
            noisy.ask(f"{name} greedy", structured=form, temperature=0, max_tokens=60),
            noisy.ask(f"{name} drawn", structured=form, seed=3, max_tokens=60),
            noisy.ask(
                f"{name} penalised",
                structured=form,
                seed=4,
                max_tokens=60,
                repetition_penalty=1.3,
                presence_penalty=0.5,
                bad_words=["the"] if name == "object" else [],
                dry_multiplier=0.5,
                logit_bias={40: 2.0},
            ),
        ]
    return asked


def plain(noisy: Noisy) -> list[Request]:
    return [
        noisy.ask("plain greedy", temperature=0, max_tokens=60),
        noisy.ask("plain drawn", seed=5, max_tokens=60),
        noisy.ask("plain penalised", seed=6, max_tokens=60, frequency_penalty=1.0),
    ]


def alone(asked: Request, **noisy: object) -> dict[str, Told]:
    return Noisy(**noisy).answers(asked)  # type: ignore[arg-type]


def test_neighbours_are_not_touched_and_do_not_touch() -> None:
    noisy = Noisy()
    everybody = [*requests(noisy), *plain(noisy)]
    together = noisy.answers(*everybody)
    for request in everybody:
        assert alone(request)[request.id] == together[request.id]
    backwards = Noisy().answers(*reversed(everybody))
    assert backwards == together


@pytest.mark.parametrize(
    ("sizes", "preempts"),
    [
        ({"tokens": 3, "sequences": 3}, False),
        ({"tokens": 16, "sequences": 8, "blocks": 14}, True),
        ({"tokens": 64, "sequences": 24, "blocks": 28}, True),
    ],
    ids=["chunked", "preempted", "crowded"],
)
def test_chunks_and_preemptions_change_nothing(sizes: dict[str, int], preempts: bool) -> None:
    """A row is bound to another request again and again, and its matcher with it."""
    noisy = Noisy(**sizes)  # type: ignore[arg-type]
    asked = requests(noisy)
    told = noisy.answers(*asked)
    assert told == Noisy().answers(*asked)
    assert bool(noisy.engine.status().preemptions) == preempts


def test_a_restart_goes_on_in_the_grammar_wherever_it_was() -> None:
    """Also in the middle of a run of forced tokens, and when all was said but the end."""
    noisy, other = Noisy(), Noisy()
    for request in requests(noisy):
        whole = noisy.answers(request)[request.id]
        for count in range(1, len(whole.tokens) + 1):
            again = replace(request, emitted=whole.tokens[:count])
            rest = other.answers(again)[request.id]
            if rest.reason != "stop" or rest.stop_id is None or count < len(whole.tokens):
                assert whole.tokens[:count] + rest.tokens == whole.tokens
            assert rest.reason == whole.reason


def test_branches_are_answers_of_their_own() -> None:
    noisy = Noisy()
    asked = noisy.ask("branches", structured=TIGHT, n=5, seed=9)
    told = noisy.answers(asked)
    assert len({answer.text for answer in told.values()}) > 1
    for number, own in enumerate(asked.split()):
        name = f"branches#{number}" if number else "branches"
        assert alone(own)[name] == told[name]


@pytest.mark.parametrize("form", FORMS)
def test_forced_tokens_are_those_that_would_be_drawn(form: str) -> None:
    """With log-probabilities each token is computed: the same tokens, in more steps."""
    noisy, slowly = Noisy(), Noisy()
    for seed in range(20):
        fields = {"structured": FORMS[form], "seed": seed, "max_tokens": 60}
        told = noisy.answers(noisy.ask("a", **fields))["a"]
        drawn = slowly.answers(slowly.ask("a", **fields, logprobs=0))["a"]
        assert (told.tokens, told.reason) == (drawn.tokens, drawn.reason)
    assert noisy.steps <= slowly.steps
    if form == "tight":
        assert noisy.steps < 0.8 * slowly.steps


def test_the_steps_of_a_forced_answer_are_few() -> None:
    """One token is drawn, all others follow; the answer ends with them, without an end token."""
    noisy = Noisy()
    asked = noisy.ask("a", structured=Structured(choice=["the name of the name"]))
    told = noisy.answers(asked)["a"]
    assert told.text == "the name of the name"
    assert (told.reason, told.stop_id, noisy.steps) == ("stop", None, 1)
    assert told.logprobs == (0.0,) * len(told.tokens)


def test_log_probabilities_are_those_of_the_model_if_they_are_asked_for() -> None:
    noisy = Noisy()
    asked = noisy.ask("a", structured=TIGHT, logprobs=0)
    told = noisy.answers(asked)["a"]
    tokens = [*asked.prompt, *told.tokens]
    for place, score in enumerate(told.logprobs, len(asked.prompt)):
        logits = noisy.network.of(tokens[place - 1], place - 1).astype(np.float64)
        expected = logits[tokens[place]] - np.log(np.exp(logits).sum())
        assert score == pytest.approx(expected, abs=1e-4)


def test_b092_whitespace_has_an_end() -> None:
    """The network wants nothing but line breaks and spaces."""

    def blank(piece: bytes) -> float:
        return 99.0 if piece and not piece.strip(b" \n\t\r") else likes_to_end(piece)

    noisy = Noisy(likes=blank)
    nested = {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 2}
    outer = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
    schema = Structured(json=outer | {"additionalProperties": False})
    longest = []
    for form in (Structured(json_object=True), schema):
        for temperature in (0.0, 1.0):
            asked = noisy.ask("a", structured=form, temperature=temperature, max_tokens=1500)
            told = noisy.answers(asked)["a"]
            outside = "x".join(told.text.split('"')[::2])
            longest.append(max(map(len, _blanks(outside))))
            if form is schema:  # free text may be blank for ever
                assert told.reason == "stop"
                json.loads(told.text)
    assert 20 < max(longest) <= 34
    within = noisy.answers(noisy.ask("a", structured=Structured(regex='"[ \n]{60}"')))["a"]
    assert len(within.text) == 62, "what is no JSON has as much as it says"


def _blanks(text: str) -> list[list[str]]:
    runs: list[list[str]] = [[]]
    for character in text:
        if character.isspace():
            runs[-1].append(character)
        elif runs[-1]:
            runs.append([])
    return runs


def test_b094_a_cut_answer_says_so_and_is_a_beginning() -> None:
    noisy = Noisy()
    long = Structured(json={"type": "string", "minLength": 100})
    for form, most in ((long, 10), (TIGHT, 1), (TIGHT, 2), (TIGHT, 5)):
        asked = noisy.ask("a", structured=form, max_tokens=most)
        told = noisy.answers(asked)["a"]
        assert (told.reason, len(told.tokens)) == ("length", most)
        grammar = asked.sampling.grammar
        assert grammar is not None
        matcher = GRAMMARS.matcher(grammar, told.tokens, frozenset({END}))
        assert not matcher.error
        assert not matcher.ended


def test_what_is_complete_with_its_last_token_has_stopped() -> None:
    """The limit and the end of the grammar meet: it is whole, and the reason says length, as it
    does where an end token would have come next."""
    noisy = Noisy()
    whole = noisy.answers(noisy.ask("a", structured=TIGHT, logprobs=0))["a"]
    asked = noisy.ask("a", structured=TIGHT, logprobs=0, max_tokens=len(whole.tokens))
    told = noisy.answers(asked)["a"]
    assert told.tokens == whole.tokens
    json.loads(told.text)


def test_a_complete_answer_ends_whatever_min_tokens_says() -> None:
    noisy = Noisy()
    for more in ({}, {"ignore_eos": True}, {"logprobs": 0}):
        asked = noisy.ask("a", structured=Structured(regex="abc"), min_tokens=50, **more)
        told = noisy.answers(asked)["a"]
        assert (told.text, told.reason, told.stop_id) == ("abc", "stop", None)


def test_before_min_tokens_an_answer_that_may_go_on_does() -> None:
    noisy = Noisy(likes=lambda piece: 0.0)
    form = Structured(regex="(ab)*")
    short = noisy.answers(noisy.ask("a", structured=form, logit_bias={END: 50}, max_tokens=40))["a"]
    asked = noisy.ask("a", structured=form, logit_bias={END: 50}, max_tokens=40, min_tokens=11)
    long = noisy.answers(asked)["a"]
    assert (short.text, short.stop_id) == ("", END)
    assert (long.text, long.stop_id) == ("ab" * 6, END), "it ends where it may: after ab, not a"


def test_with_ignore_eos_only_the_grammar_ends_an_answer() -> None:
    noisy = Noisy(likes=lambda piece: 0.0)
    fields = {"structured": Structured(regex="(ab){0,9}"), "logit_bias": {END: 50}}
    told = noisy.answers(noisy.ask("a", **fields, ignore_eos=True))["a"]
    assert (told.text, told.reason, told.stop_id) == ("ab" * 9, "stop", None)
    assert END not in told.tokens


def test_an_own_stop_token_ends_an_answer_in_the_middle() -> None:
    """Also where it would be forced: then it is drawn."""
    noisy = Noisy()
    (colon,) = TOKENIZER.encode(":", parse_special=False, add_special=False)
    asked = noisy.ask("a", structured=TIGHT, stop_token_ids=[colon])
    told = noisy.answers(asked)["a"]
    assert (told.text, told.reason, told.stop_id) == ('{"name"', "stop", colon)


def test_before_min_tokens_an_own_stop_token_is_text_where_nothing_else_may_be() -> None:
    noisy = Noisy()
    (colon,) = TOKENIZER.encode(":", parse_special=False, add_special=False)
    for drawn in ({"temperature": 0}, {}):
        asked = noisy.ask("a", structured=TIGHT, stop_token_ids=[colon], min_tokens=9, **drawn)
        told = noisy.answers(asked)["a"]
        assert told.reason == "stop", told.message
        assert told.tokens.index(colon) < 9
        assert told.text.count(":") > 1 or len(told.tokens) > 9


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_an_answer_in_the_middle(include: bool) -> None:
    """Also in the middle of a run: the rest of it is not told."""
    noisy = Noisy()
    params = SamplingParams(
        structured=Structured(choice=["the name of the name"]),
        stop=("me of",),
        include_stop_str_in_output=include,
    )
    ticket = noisy.door.completion("a", params)
    items: list[Delta | Ended] = []
    for event in (*noisy.engine.submit(ticket.request), *noisy.engine.step()):
        assert isinstance(event, Token | Finished)
        items += ticket.assembler_of(event).take(event)
    *deltas, end = items
    assert isinstance(end, Ended)
    assert (end.finish_reason, end.stop_reason) == ("stop", "me of")
    told = "".join(one.text for one in deltas if isinstance(one, Delta))
    assert told == ("the name of" if include else "the na")
    assert end.receipt.completion_tokens == len(told.encode()) + (0 if include else len("me of"))


class Prophet:
    """Guesses how an answer goes on; each third guess is wrong, and it goes on beyond the end."""

    def __init__(self, tokens: Iterable[int], told: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        self._tokens = list(tokens)
        self._told = told

    def append(self, token: int) -> None:
        self._tokens.append(token)

    def guess(self, count: int) -> tuple[int, ...]:
        there = tuple(self._tokens)
        for prompt, answer in self._told.items():
            if there == (prompt + answer)[: len(there)]:
                first = len(there) - len(prompt)
                rest = (*answer[first : first + count], END, 99)
                places = range(first, first + count)
                return tuple(
                    (token + place) % VOCABULARY if place % 3 == 2 else token
                    for place, token in zip(places, rest, strict=False)
                )
        return (END, 99)[:count]


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("sizes", [{}, {"sequences": 5, "blocks": 14}], ids=["roomy", "crowded"])
def test_b096_guesses_change_nothing(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], checked: bool
) -> None:
    """Right and wrong ones, in every place, beyond the end of the grammar, and beside forced
    tokens; also if nobody looks whether the grammar allows them before they are computed."""
    monkeypatch.setattr(Acceptance, "worth", lambda self, price, debt: 4)
    if not checked:
        monkeypatch.setattr(Matcher, "valid", lambda self, tokens: len(tokens))
    noisy = Noisy()
    asked = [*requests(noisy), *plain(noisy), noisy.ask("many", structured=TIGHT, n=3, seed=1)]
    whole = noisy.answers(*asked)
    known = {one.prompt: whole[one.id].tokens for one in asked}
    guesser = Drafters(lambda tokens: Prophet(tokens, known))
    guessing = Noisy(drafts=4, guesser=guesser, **sizes)  # type: ignore[arg-type]
    assert guessing.answers(*asked) == whole
    counters = guessing.engine.scheduler.counters
    assert 0 < counters.tokens_accepted < counters.tokens_drafted
    if not sizes:
        assert guessing.steps < noisy.steps


def test_a_row_of_which_nothing_may_be_drawn_fails_alone() -> None:
    noisy = Noisy()
    stuck = noisy.ask("stuck", structured=Structured(regex="name"), bad_words=["n", "na", "name"])
    assert stuck.sampling.grammar is not None
    others = [*plain(noisy), noisy.ask("tight", structured=TIGHT)]
    told = noisy.answers(stuck, *others)
    assert told["stuck"].reason == "error"
    assert "masked" in told["stuck"].message
    for request in others:
        assert told[request.id] == alone(request)[request.id]
        assert told[request.id].reason != "error"


def grammars_of(states: int) -> Grammars:
    return Grammars(lambda: TOKENIZER, VOCABULARY, states=states)


def test_a_grammar_that_breaks_in_a_step_ends_its_request_alone() -> None:
    """It needs an automaton larger than any may be."""
    noisy = Noisy(grammars=grammars_of(300))
    broken = noisy.ask("broken", structured=Structured(regex="[a-z]{500}"), max_tokens=600)
    others = [*plain(noisy), noisy.ask("tight", structured=TIGHT)]
    told = noisy.answers(broken, *others)
    assert told["broken"].reason == "error"
    assert "too many states" in told["broken"].message
    assert 150 < len(told["broken"].tokens) < 500
    for request in others:
        assert told[request.id] == alone(request)[request.id]


def test_answers_share_an_automaton_and_not_its_limit() -> None:
    """Each of ten goes where the others do not, and stays below the limit."""
    form = Structured(regex="|".join(f"{letter}{{90}}" for letter in "abcdefghij"))
    asked = [
        Noisy().ask(f"only {letter}", structured=form, logit_bias={3 + ord(letter): 50}, logprobs=0)
        for letter in "abcdefghij"
    ]
    whole = Noisy().answers(*asked)
    assert {answer.text[0] for answer in whole.values()} == set("abcdefghij")
    for grammars in (grammars_of(150), grammars_of(400)):
        assert Noisy(grammars=grammars).answers(*asked) == whole
        for request in asked:  # one after the other
            assert Noisy(grammars=grammars).answers(request)[request.id] == whole[request.id]


def test_a_request_without_a_grammar_begins_no_thread() -> None:
    noisy = Noisy()
    noisy.answers(*plain(noisy))
    assert noisy.engine._runner._masks._threads is None  # type: ignore[attr-defined]
