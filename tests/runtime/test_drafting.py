"""Draws count up to the first that was not guessed."""

from octavo.core.plan import Drawn, RowFailed, Sampled
from octavo.runtime.drafting import Chain, accept


def drawn(*tokens: int) -> list[Sampled | RowFailed]:
    return [Sampled(4, token, -token / 8, ((token, -0.5),)) for token in tokens]


def test_without_guesses_there_is_one() -> None:
    assert accept(Chain(4, 9, ()), drawn(7)) == Sampled(4, 7, -0.875, ((7, -0.5),))


def test_right_guesses_bring_the_next_draw() -> None:
    outcome = accept(Chain(4, 9, (7, 8, 5)), drawn(7, 8, 6, 1))
    assert isinstance(outcome, Sampled)
    assert (outcome.row, outcome.token, outcome.kept, outcome.drafted) == (4, 7, 2, 3)
    assert outcome.more == (Drawn(8, -1.0, ((8, -0.5),)), Drawn(6, -0.75, ((6, -0.5),)))
    every = accept(Chain(4, 9, (7, 8, 6)), drawn(7, 8, 6, 1))
    assert isinstance(every, Sampled)
    assert (every.kept, [one.token for one in every.more]) == (3, [8, 6, 1])


def test_a_wrong_guess_costs_nothing_but_itself() -> None:
    outcome = accept(Chain(4, 9, (5, 6)), drawn(7, 6, 6))
    assert outcome == Sampled(4, 7, -0.875, ((7, -0.5),), (), 0, 2)


def test_a_failure_is_of_its_own_position() -> None:
    failed = RowFailed(4, "not finite")
    assert accept(Chain(4, 9, (7, 8)), [failed, *drawn(8, 9)]) == failed
    later = accept(Chain(4, 9, (7, 8)), [*drawn(7), failed, *drawn(9)])
    assert isinstance(later, Sampled)
    assert (later.more, later.kept) == ((), 0)
