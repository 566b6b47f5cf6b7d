"""Virtual token counters: what is charged, what is lifted, and what may be forgotten."""

from random import Random

from octavo.core.fairness import ServiceCounters


def counters(**charged: int) -> ServiceCounters:
    service = ServiceCounters()
    for tenant, tokens in charged.items():
        service.prompt(tenant, tokens)
    return service


def test_an_answer_token_counts_as_two_of_a_prompt() -> None:
    service = counters(a=10)
    for _ in range(3):
        service.answer("a")
    assert service.of("a") == 16
    assert service.of("nobody") == 0


def test_who_comes_back_is_lifted_to_the_least_of_those_that_wait() -> None:
    """Else it would be owed all that others were served while it wanted nothing."""
    service = counters(a=100, b=70, c=5)
    service.join("c", {"a", "b"})
    assert service.of("c") == 70


def test_who_waits_already_or_is_ahead_is_not_lifted() -> None:
    service = counters(a=100, b=70, c=5)
    service.join("c", {"a", "b", "c"})
    assert service.of("c") == 5
    service.join("a", {"b", "c"})
    assert service.of("a") == 100


def test_when_nobody_waits_the_last_one_served_is_the_measure() -> None:
    service = counters(a=100, b=70, c=5)
    service.leave("b")
    service.join("c", set())
    assert service.of("c") == 70


def test_forgetting_tenants_changes_nothing_for_those_that_come_back(seed: int) -> None:
    """Beside it runs a counter of its own for each tenant, which is never forgotten."""
    random, service = Random(seed), ServiceCounters()
    kept: dict[str, int] = {}
    waiting: set[str] = set()
    last, forgotten = "", 0
    for _ in range(5000):
        tenant = f"t{random.randint(0, 400)}"
        if tenant not in waiting:
            least = min((kept[one] for one in waiting), default=kept.get(last, 0))
            kept[tenant] = max(kept.get(tenant, 0), least)
        service.join(tenant, waiting)
        waiting.add(tenant)
        if len(waiting) > 5:
            last = min(waiting, key=lambda one: (service.of(one), one))
            waiting.remove(last)
            service.leave(last)
            tokens = random.randint(1, 50)
            service.prompt(last, tokens)
            kept[last] += tokens
        assert {one: service.of(one) for one in waiting} == {one: kept[one] for one in waiting}
        forgotten += len(service) < len(kept)
    assert forgotten


def test_names_without_end_do_not_fill_the_memory() -> None:
    """Names come from callers; each is seen once."""
    service = ServiceCounters()
    for number in range(20_000):
        service.join(f"t{number}", {"steady"})
        service.leave(f"t{number}")
        service.prompt(f"t{number}", 3)
        service.prompt("steady", 3)
    assert len(service) < 200
