"""The crank lets a request in when its grammar is compiled, and holds nobody else up."""

from concurrent.futures import Future

import pytest
from tests.engine.noisy import TOKENIZER, VOCABULARY, Noisy

from octavo.core.events import Finished
from octavo.engine.crank import Crank
from octavo.engine.wire import Cancel, News, Submit
from octavo.text.grammar import Compiled, Grammars
from octavo.text.structured import Structured


class Held(Grammars):
    """Compiles nothing until the test says so."""

    def __init__(self) -> None:
        super().__init__(lambda: TOKENIZER, VOCABULARY)
        self.asked: dict[str, Future[Compiled]] = {}

    def prepare(self, grammar):  # type: ignore[no-untyped-def]
        return self.asked.setdefault(grammar.text, Future())


def texts(news: News) -> dict[str, int]:
    """How many tokens came, by the request."""
    return {name: sum(one.request_id == name for one in news.tokens) for name in ("plain", "held")}


@pytest.fixture
def cranked() -> tuple[Noisy, Held, Crank]:
    noisy, grammars = Noisy(), Held()
    return noisy, grammars, Crank(noisy.engine, grammars=grammars)


def run(crank: Crank) -> tuple[dict[str, int], list[Finished]]:
    """Turn until nothing is left."""
    tokens, ends = {"plain": 0, "held": 0}, []
    while not crank.idle:
        news = crank.step()
        tokens = {name: count + texts(news)[name] for name, count in tokens.items()}
        ends += news.ends
    return tokens, ends


def test_others_go_on_while_a_grammar_is_compiled(cranked: tuple[Noisy, Held, Crank]) -> None:
    noisy, grammars, crank = cranked
    held = noisy.ask("held", structured=Structured(regex="[ab]{5}"), logprobs=0)
    crank.obey([Submit(held), Submit(noisy.ask("plain", max_tokens=10, ignore_eos=True))])
    for _ in range(4):
        assert texts(crank.step()) == {"plain": 1, "held": 0}
    (compiled,) = grammars.asked.values()
    compiled.set_result(Compiled(None))
    tokens, ends = run(crank)
    assert tokens == {"plain": 6, "held": 5}
    assert {(end.request_id, end.reason) for end in ends} == {("plain", "length"), ("held", "stop")}


def test_with_nothing_else_to_do_the_crank_waits_and_is_not_idle(
    cranked: tuple[Noisy, Held, Crank],
) -> None:
    noisy, _, crank = cranked
    crank.obey([Submit(noisy.ask("held", structured=Structured(regex="[ab]{5}"), logprobs=0))])
    assert not crank.idle
    waited = []

    class Slow(Future):  # type: ignore[type-arg]
        def result(self, timeout: float | None = None) -> Compiled:
            waited.append(timeout)
            self.set_result(Compiled(None))
            return super().result(timeout)

    crank._held = [(request, Slow()) for request, _ in crank._held]
    tokens, _ = run(crank)
    assert (tokens["held"], waited) == (5, [None])


def test_a_held_request_can_be_cancelled(cranked: tuple[Noisy, Held, Crank]) -> None:
    noisy, _, crank = cranked
    held = noisy.ask("held", structured=Structured(regex="[ab]{5}"), n=2)
    crank.obey([Submit(held)])
    news = crank.obey([Cancel("other"), Cancel("held")])
    assert [(end.request_id, end.reason, end.branch) for end in news.ends] == [
        ("held", "abort", 0),
        ("held", "abort", 1),
    ]
    assert crank.idle


def test_one_branch_of_a_held_request_can_be_cancelled(cranked: tuple[Noisy, Held, Crank]) -> None:
    noisy, _, crank = cranked
    crank.obey([Submit(noisy.ask("held", structured=Structured(regex="[ab]{5}"), n=2))])
    news = crank.obey([Cancel("held", 1)])
    assert [(end.reason, end.branch) for end in news.ends] == [("abort", 1)]
    _, ends = run(crank)
    assert [(end.reason, end.branch) for end in ends] == [("stop", 0)]


def test_a_grammar_that_is_there_holds_nothing() -> None:
    noisy = Noisy()
    crank = Crank(noisy.engine, grammars=noisy.door.grammars)
    crank.obey([Submit(noisy.ask("held", structured=Structured(regex="[ab]{5}")))])
    assert not crank.engine.idle


def test_who_waits_for_a_grammar_is_work_that_waits(cranked: tuple[Noisy, Held, Crank]) -> None:
    """Else nobody would notice that an engine hangs over one."""
    noisy, grammars, crank = cranked
    held = noisy.ask("held", structured=Structured(regex="[ab]{5}"), n=3)
    assert crank.obey([Submit(held)]).status.waiting == 3
    (compiled,) = grammars.asked.values()
    compiled.set_result(Compiled(None))
    assert crank.step().status.waiting + crank.engine.status().running == 3
    run(crank)
    assert crank.status().waiting == 0
