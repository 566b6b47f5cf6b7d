"""What the cells of an oracle must hold while a core is at rest between two calls.

Every plan made must have been carried out: then each position that a running sequence has computed,
each that is held, and each block that the prefix cache publishes, holds what its tokens say.
"""

from functools import cache

from octavo.core.prefix_cache import Context, Prefix
from octavo.core.scheduler import Scheduler
from octavo.simulate.oracle import ROOT, Cell, OracleRunner, digest


def check_contents(scheduler: Scheduler, oracle: OracleRunner) -> None:
    """What any sequence or any later request may read is there, where the runner will look.

    Raises  AssertionError (WrongContent among them) naming the request or the block.
    """
    for sequence in scheduler.running:
        if sequence in scheduler._searches._turned:
            continue  # the next plan binds its row again
        row = oracle._rows[sequence.row]
        assert row.request == sequence.request, f"row {sequence.row} is not {sequence.id}'s"
        for group, table in enumerate(sequence.tables):
            held = row.tables[group]
            assert all(held.get(index) == block for index, block in table.live()), (
                f"{sequence.id}: the runner's table is not the core's"
            )
            oracle._read(row, group, sequence.computed)
    size = scheduler.manager.block_size
    for hold in scheduler.holds:
        for group, table in enumerate(hold.tables):
            cells = _cells(hold.context.salt, group, ROOT, hold.tokens)
            for index, block in table.live():
                held = cells[index * size : (index + 1) * size]
                assert oracle._cells[block][: len(held)] == held, f"{hold.id}: position in {block}"
    cache = scheduler.manager.cache
    for block, (node, group) in ({} if cache is None else cache.published()).items():
        salt, before = _before(node)
        assert oracle._cells[block] == _cells(salt, group, before, node.tokens), (
            f"block {block} is published for what it does not hold"
        )


def empty_what_nobody_reads(scheduler: Scheduler, oracle: OracleRunner) -> None:
    """Whoever reads a cell that is not theirs from now on finds nothing in it."""
    size, cache = scheduler.manager.block_size, scheduler.manager.cache
    keep = [0] * len(oracle._cells)
    """How many cells of each block, from its start, may be read."""
    for block in {} if cache is None else cache.published():
        keep[block] = size
    owners = [(sequence.tables, sequence.scheduled) for sequence in scheduler.running]
    owners += [(hold.tables, len(hold.tokens)) for hold in scheduler.holds]
    for tables, written in owners:
        for table in tables:
            for index, block in table.live():
                keep[block] = max(keep[block], min(size, max(0, written - index * size)))
    for block, count in enumerate(keep):
        oracle._cells[block][count:] = [None] * (size - count)


def _before(node: Prefix) -> tuple[str, bytes]:
    """(salt, what stands for all tokens before those of `node`)."""
    if isinstance(node.parent, Context):
        return node.parent.salt, ROOT
    salt, last = _before(node.parent)
    return salt, _after(last, node.parent.tokens)[-1]


@cache
def _after(before: bytes, tokens: tuple[int, ...]) -> tuple[bytes, ...]:
    held = [before]
    for token in tokens:
        held.append(digest(held[-1], token))
    return tuple(held[1:])


def _cells(salt: str, group: int, before: bytes, tokens: tuple[int, ...]) -> list[Cell | None]:
    return [(salt, group, one) for one in _after(before, tokens)]
