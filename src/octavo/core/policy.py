"""Who goes first and who yields: pure functions over sequences."""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from operator import attrgetter

from octavo.core.budget import AdmissionRule
from octavo.core.sequence import Sequence


def service_order(running: Iterable[Sequence]) -> list[Sequence]:
    """The order in which running sequences are offered the token budget.

    Decodes first, those that waited longest before the others, so that each gets its turn when
    the budget is smaller than their number; then the rest by rank.
    """

    decodes: list[Sequence] = []
    others: list[Sequence] = []
    for sequence in running:
        (decodes if sequence.demand == 1 else others).append(sequence)
    decodes.sort(key=attrgetter("last_served", "rank"))
    return decodes + by_rank(others)


def by_rank(sequences: Iterable[Sequence]) -> list[Sequence]:
    return sorted(sequences, key=attrgetter("rank"))


def victim_for(sequence: Sequence, running: Items[Sequence]) -> Sequence | None:
    """The latest arrival of the lowest priority, if it ranks below `sequence`, which must grow."""
    last = max(running, key=lambda candidate: candidate.rank, default=None)
    return last if last is not None and last.rank > sequence.rank else None


def yielding_to(sequence: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
    """Who may be preempted to admit `sequence`: only lower priorities, the latest arrival first."""
    lower = [other for other in running if other.request.priority > sequence.request.priority]
    return sorted(lower, key=lambda other: other.rank, reverse=True)


def crowds(siblings: int, running: int) -> bool:
    """Whether the next of `siblings` that have started queues behind all others.

    It keeps the place of its request while they are less than half of what runs: so a request with
    many answers neither waits once for each, nor stands in the way of those that came after it.
    """
    return 2 * siblings >= running


def reserved(sequence: Sequence, admission: AdmissionRule) -> int:
    """Below which position blocks are reserved when `sequence` is admitted, whatever its chunk.

    Chunk-wise admission reserves no more than the first chunk needs. Who was preempted once has
    all reserved: or it would be let in because that fits, and thrown out in the next step, again
    and again.
    """
    return len(sequence.tokens) if admission == "full" or sequence.preemptions else 0


def headroom(sequence: Sequence, *, watermark: int, alone: bool, blocks: int) -> int:
    """How many blocks must stay available when `sequence` is admitted.

    Doubles with each preemption it has suffered, so that the number of preemptions of one request
    is bounded by the logarithm of the pool. Nothing is held back from a sequence that runs alone.
    """
    least = max(watermark, 1) if sequence.preemptions else watermark
    return 0 if alone else min(least << sequence.preemptions, blocks)
