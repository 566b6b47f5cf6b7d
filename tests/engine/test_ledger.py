"""The ledger without an engine: what goes to the next one, who is suspected, what it cost."""

from dataclasses import replace
from random import Random

import pytest

from octavo.core.events import Finished, Interruption, Receipt, Token
from octavo.core.request import Beams, Request, Sampling
from octavo.engine.ledger import KILLED, TRIAL_TOKENS, Ledger
from octavo.engine.wire import Cancel, Command, Submit

NOW = 30.0

RECEIPT = Receipt(
    prompt_tokens=3,
    completion_tokens=9,
    cached_tokens=2,
    recomputed_tokens=5,
    preemptions=1,
    arrival_s=20.0,
    admitted_s=21.0,
    first_token_s=22.0,
    finished_s=23.0,
    peak_blocks=4,
)


def request(name: str, **fields: int) -> Request:
    return Request(id=name, prompt=(1, 2, 3), max_tokens=9, **fields)  # type: ignore[arg-type]


def opened(*names: str, branches: int = 1) -> Ledger:
    ledger = Ledger()
    for name in names:
        ledger.open(request(name, branches=branches), 10.0)
    return ledger


def submitted(commands: tuple[Command, ...]) -> list[str]:
    return [command.request.id for command in commands if isinstance(command, Submit)]


def test_a_request_goes_on_from_what_was_emitted() -> None:
    ledger = opened("a", "b")
    for number, token in enumerate((7, 8)):
        assert ledger.token(Token("a", number, token, -1.0), 11.0) == "a"
    assert ledger.died([("a", 0)]) is None
    first, second = ledger.resubmit(NOW)
    assert isinstance(first, Submit)
    assert isinstance(second, Submit)
    assert first.request == replace(request("a"), emitted=(7, 8), accepted=True)
    assert second.request == replace(request("b"), accepted=True)
    assert ledger.token(Token("a", 2, 9, -1.0), 30.0) == "a"


def test_what_is_left_of_a_timeout_goes_on() -> None:
    ledger = Ledger()
    for name, timeout_s in (("a", 25.0), ("b", 5.0)):
        ledger.open(replace(request(name), timeout_s=timeout_s), 10.0)
    ledger.died([])
    again = [command.request for command in ledger.resubmit(30.0) if isinstance(command, Submit)]
    assert [one.timeout_s for one in again] == [5.0, 0.0]


def test_branches_go_on_by_themselves_under_the_names_they_had() -> None:
    ledger = opened("a", branches=3)
    ledger.token(Token("a", 0, 7, -1.0, 2), 11.0)
    assert ledger.end(Finished("a", "stop", None, "", RECEIPT, 1)) is not None
    ledger.died([])
    commands = ledger.resubmit(NOW)
    assert submitted(commands) == ["a", "a#2"]
    last = commands[-1]
    assert isinstance(last, Submit)
    assert (last.request.branches, last.request.sampling) == (1, Sampling(branch=2))
    assert ledger.token(Token("a#2", 1, 8, -1.0, 2), 12.0) == "a"
    assert ledger.close("a") == (Cancel("a"), Cancel("a#2"))
    assert ledger.token(Token("a#2", 2, 8, -1.0, 2), 12.0) is None


def test_what_the_front_has_stopped_stays_stopped() -> None:
    ledger = opened("a")
    ledger.token(Token("a", 0, 7, -1.0), 11.0)
    assert ledger.stop("a", 0) == (Cancel("a", 0, "stop"),)
    assert ledger.stop("a", 0) == ()
    ledger.died([("a", 0)])
    assert ledger.resubmit(NOW)[1:] == (Cancel("a", 0, "stop"),)


def tokens(ledger: Ledger, name: str, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        assert ledger.token(Token(name, number, 7, -1.0), 11.0) == name


def test_two_deaths_alone_end_a_request_whatever_came_between() -> None:
    ledger = opened("a", "b")
    assert ledger.died([("a", 0)]) is None
    ledger.resubmit(NOW)
    tokens(ledger, "a", 6)
    assert ledger.died([("b", 0)]) is None, "the first of b"
    ledger.resubmit(NOW)
    assert ledger.died([("a", 0)]) == "a"


def test_kills_between_which_tokens_come_never_end_a_request() -> None:
    ledger = opened("a")
    for number in range(30):
        assert ledger.died([("a", 0)], KILLED) is None
        ledger.resubmit(NOW)
        tokens(ledger, "a", 1, number)


@pytest.mark.parametrize("lived", [0, 1, 3, 30])
def test_a_suspect_must_come_further_alone_than_it_did_in_the_engine_that_died(lived: int) -> None:
    ledger, both = opened("a", "b"), [("a", 0), ("b", 0)]
    ledger.died(both)
    ledger.resubmit(NOW)
    tokens(ledger, "a", lived)
    ledger.died(both)
    assert submitted(ledger.resubmit(NOW)) == ["a"]
    enough = min(lived + 1, TRIAL_TOKENS)
    for number in range(enough):
        assert ledger.release(NOW) == ()
        tokens(ledger, "a", 1, lived + number)
    assert submitted(ledger.release(NOW)) == ["b"]


def test_who_has_passed_a_trial_is_tried_for_longer_at_the_next_death() -> None:
    ledger, both, count = opened("a", "b"), [("a", 0), ("b", 0)], 0
    ledger.died(both)
    for trial in range(6):
        ledger.resubmit(NOW)
        ledger.died(both)
        inside = submitted(ledger.resubmit(NOW))
        for name in "ab":
            assert inside == [name]
            tokens(ledger, name, (1 << trial) - 1, count)
            assert ledger.release(NOW) == ()
            tokens(ledger, name, 1, count + (1 << trial) - 1)
            inside = submitted(ledger.release(NOW))
        count += 1 << trial


def test_kills_from_outside_weigh_little() -> None:
    ledger = opened("a", "b")
    for _ in range(7):
        assert ledger.died([("a", 0)], KILLED) is None
        assert submitted(ledger.resubmit(NOW)) == ["a", "b"]
    assert ledger.died([("a", 0)], KILLED) == "a", "it must end some time"


@pytest.mark.parametrize("culprit", range(4))
def test_of_several_suspects_the_next_death_tells_which_it_is(culprit: int) -> None:
    names = [f"r{n}" for n in range(4)]
    ledger, together = opened(*names, "beside"), [(name, 0) for name in names]
    for _ in range(2):
        assert ledger.died(together) is None
        inside = submitted(ledger.resubmit(NOW))
    for name in names:
        assert inside == [name], "alone"
        assert ledger.release(NOW) == (), "not before it is cleared"
        assert ledger.open(request("new"), 20.0) == ()
        assert ledger.close("new") == ()
        if name == names[culprit]:
            assert ledger.died([(name, 0)]) == name
            ledger.close(name)
            inside = submitted(ledger.resubmit(NOW))
        else:
            assert ledger.token(Token(name, 0, 7, -1.0), 11.0) == name
            inside = submitted(ledger.release(NOW))
    others = [name for name in names if name != names[culprit]]
    assert set(inside) >= {"beside"}
    assert set(inside) <= {*others, "beside"}


def test_a_held_request_can_be_closed_and_makes_no_way_for_two() -> None:
    ledger = opened("a", "b", "c")
    for _ in range(2):
        ledger.died([("a", 0), ("b", 0), ("c", 0)])
        ledger.resubmit(NOW)
    assert ledger.close("b") == (), "the engine does not have it"
    assert ledger.release(NOW) == ()
    assert ledger.close("a") == (Cancel("a"),)
    assert submitted(ledger.release(NOW)) == ["c"]


def test_branches_of_a_request_that_comes_while_a_suspect_is_computed_come_later() -> None:
    ledger = opened("a", "b")
    for _ in range(2):
        ledger.died([("a", 0), ("b", 0)])
        ledger.resubmit(NOW)
    assert ledger.open(request("new", branches=2), 20.0) == ()
    assert ledger.close("a") == (Cancel("a"),)
    assert submitted(ledger.release(NOW)) == ["b"]
    ledger.token(Token("b", 0, 7, -1.0), 11.0)
    assert submitted(ledger.release(NOW)) == ["new", "new#1"]
    assert ledger.token(Token("new#1", 0, 7, -1.0, 1), 11.0) == "new"


LENGTH = 40


def test_every_answer_ends_whatever_kills_the_engine(seed: int) -> None:
    """Some requests kill every engine after so many of their tokens; the others need luck. One that
    comes far in each may reach its end before it is found."""
    random = Random(seed)
    for _ in range(50):
        names = [f"r{n}" for n in range(random.randint(1, 9))]
        culprits = {
            name: random.choice([0, 1, 2, 5, 9])
            for name in random.sample(names, random.randint(0, min(2, len(names))))
        }
        failed, deaths = lived_through(names, culprits, random)
        assert failed <= set(culprits)
        assert failed >= {name for name, tokens in culprits.items() if tokens < TRIAL_TOKENS}
        assert deaths <= 6 * len(culprits)


def lived_through(
    names: list[str], culprits: dict[str, int], random: Random
) -> tuple[set[str], int]:
    """Who ended with an error when all others are done, and how many engines that took."""
    ledger, live, inside = opened(*names), dict.fromkeys(names, 0), list(names)
    failed, deaths, came = set[str](), 0, dict.fromkeys(names, 0)
    while live:
        step = random.sample(inside, random.randint(1, len(inside)))
        if any(came[name] == culprits.get(name) for name in step):
            deaths += 1
            if name := ledger.died([(name, 0) for name in step]):
                failed.add(name)
                ledger.close(name)
                live.pop(name)
            inside, came = submitted(ledger.resubmit(NOW)), dict.fromkeys(names, 0)
            continue
        for name in step:
            tokens(ledger, name, 1, live[name])
            live[name] += 1
            came[name] += 1
            if live[name] == LENGTH:
                assert ledger.end(Finished(name, "length", None, "", RECEIPT)) is not None
                live.pop(name)
                inside.remove(name)
        inside += submitted(ledger.release(NOW))
    return failed, deaths


DEATHS = (Interruption(13.0, "engine_died"), Interruption(14.0, "engine_died"))


def test_deaths_are_preemptions_in_the_receipt() -> None:
    ledger = opened("a", branches=2)
    ledger.token(Token("a", 0, 7, -1.0), 12.0)
    ledger.died([], now=13.0)
    ledger.resubmit(NOW)
    ledger.died([], now=14.0)
    ledger.resubmit(NOW)
    name, first = ledger.end(Finished("a", "length", None, "", RECEIPT)) or ("", None)
    assert first is not None
    assert name == "a"
    assert first.receipt == replace(
        RECEIPT,
        preemptions=1 + 2,
        recomputed_tokens=5 + 2 * (3 + 1) - 2,
        arrival_s=10.0,
        admitted_s=12.0,
        first_token_s=12.0,
        interruptions=DEATHS,
    )
    _, second = ledger.end(Finished("a#1", "length", None, "", RECEIPT, 1)) or ("", None)
    assert second is not None
    assert second.receipt == replace(
        RECEIPT,
        prompt_tokens=0,
        cached_tokens=0,
        preemptions=3,
        arrival_s=10.0,
        interruptions=DEATHS,
    )


def test_a_death_between_two_steps_blames_all_that_the_engine_had() -> None:
    ledger = opened("a", "b")
    for _ in range(2):
        assert ledger.died([]) is None
        inside = submitted(ledger.resubmit(0.0))
    assert inside == ["a"], "one at a time, to tell who it is"
    assert ledger.died([]) == "a"


def searched(name: str) -> Request:
    return replace(request(name), branches=2, beams=Beams(width=2), prompt_logprobs=0)


def test_a_search_goes_on_as_the_one_request_that_it_is() -> None:
    """Nothing of it is known before its end, and its beams cannot be told apart before that."""
    ledger = Ledger()
    ledger.open(request("a"), 10.0)
    ledger.open(searched("b"), 10.0)
    ledger.died([])
    again = [command.request for command in ledger.resubmit(NOW) if isinstance(command, Submit)]
    assert again == [
        replace(request("a"), accepted=True),
        replace(searched("b"), accepted=True),
    ]
    assert ledger.token(Token("b", 0, 7, -1.0, 1), NOW) == "b"
    assert ledger.end(Finished("b", "stop", None, "", RECEIPT, 1)) is not None
    assert ledger.close("b") == (Cancel("b"),)


def test_a_search_that_is_suspected_is_computed_alone_and_whole() -> None:
    ledger = Ledger()
    ledger.open(request("a"), 10.0)
    ledger.open(searched("b"), 10.0)
    for _ in range(2):
        assert ledger.died([("a", 0), ("b", 1)]) is None
        commands = ledger.resubmit(NOW)
    assert submitted(commands) == ["a"]
    assert ledger.open(request("c"), NOW) == ()
    ledger.close("a")
    assert ledger.release(NOW) == (Submit(replace(searched("b"), accepted=True)),)
    assert ledger.release(NOW) == ()
    assert [ledger.end(Finished("b", "stop", None, "", RECEIPT, n)) is None for n in (0, 1)] == [
        False,
        False,
    ]
    assert submitted(ledger.release(NOW)) == ["c"]
