"""Sequences in a pool full of NaN: the common ground of the tests of everything that touches KV."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tests.ops.arrays import expands

from octavo.ops.api import F32, Batch, KVLayout, KVPages, Ops, Rope
from octavo.ops.reference import write_token
from octavo.units import ceil_div

NEVER = np.iinfo(np.int32).max // 2
"""Fills the table entries that no op may follow."""


@dataclass(frozen=True, slots=True)
class Story:
    """What one sequence would feed to attention, position by position: qkv [length, width]."""

    qkv: F32

    def __len__(self) -> int:
        return len(self.qkv)


@dataclass(frozen=True, slots=True)
class Part:
    """Positions [start, stop) of story number `story`."""

    story: int
    start: int
    stop: int


class PagedStories:
    """Stories with block tables drawn at random from a pool of NaN: its elements, of int8 the
    scales. `dtype` of the pool is that of the layout, unless a wider one is asked for."""

    def __init__(
        self,
        rng: np.random.Generator,
        stories: Sequence[Story],
        layout: KVLayout,
        layer: int,
        dtype: npt.DTypeLike = None,
    ) -> None:
        counts = [ceil_div(len(story), layout.block_size) for story in stories]
        blocks = sum(counts) + 3
        self.pool = np.empty((blocks, *layout.shape), layout.element if dtype is None else dtype)
        self.poison()
        self.tables = np.full((len(stories), max(counts) + 1), NEVER, np.int32)
        ids = rng.permutation(blocks).astype(np.int32)
        for table, count in zip(self.tables, counts, strict=True):
            table[:count], ids = ids[:count], ids[count:]
        self.stories, self.layout, self.layer = stories, layout, layer

    def poison(self) -> None:
        self.pool.view(np.uint8).fill(0xFF)

    def batch(self, parts: Sequence[Part]) -> tuple[F32, Batch, KVPages]:
        """The rows of `parts` back to back, the batch that names them, and their pages."""
        lengths = [part.stop - part.start for part in parts]
        table = self.tables[[part.story for part in parts]]
        positions = np.concatenate([np.arange(part.start, part.stop) for part in parts])
        batch = Batch(
            tokens=np.zeros(sum(lengths), np.int32),
            positions=positions.astype(np.int32),
            query_start=np.cumsum([0, *lengths]).astype(np.int32),
            context=np.array([part.stop for part in parts], np.int32),
            tables=(table,),
            logit_rows=np.zeros(0, np.int32),
        )
        rows = [self.stories[part.story].qkv[part.start : part.stop] for part in parts]
        pages = KVPages(pool=self.pool, layout=self.layout, layer=self.layer, table=table)
        return np.ascontiguousarray(np.concatenate(rows)), batch, pages

    def share(self, child: int, parent: int, blocks: int) -> None:
        """Let `child`, whose story begins like that of `parent`, have its first blocks."""
        self.tables[child, :blocks] = self.tables[parent, :blocks]

    def give_back(self, story: int, first: int, entry: int = NEVER) -> None:
        """What stands before position `first` is lost: whole blocks, whose table entries say
        `entry` now, and the positions before it in the block that it stands in."""
        index, offset = divmod(first, self.layout.block_size)
        for block in self.tables[story][:index]:
            if 0 <= block < len(self.pool):
                self.pool[block, self.layer].view(np.uint8).fill(0xFF)
        self.tables[story][:index] = entry
        lost = np.full((self.layout.kv_heads, self.layout.head_dim), np.nan)
        for slot in range(offset):
            block = int(self.tables[story][index])
            write_token(self.pool, self.layout, block, self.layer, slot, lost, lost)

    def write(self, ops: Ops, part: Part) -> None:
        """Write the KV of `part`, without rotation."""
        qkv, batch, pages = self.batch([part])
        ops.rope_write_kv(qkv, batch, None, pages)

    def attend(
        self,
        ops: Ops,
        parts: Sequence[Part],
        *,
        scale: float,
        rope: Rope | None = None,
        window: int | None = None,
    ) -> list[F32]:
        """Write the KV of `parts` and attend, in one step; the output rows of each part."""
        qkv, batch, pages = self.batch(parts)
        query_heads = qkv.shape[1] // self.layout.head_dim - 2 * self.layout.kv_heads
        out = np.full((len(qkv), query_heads * self.layout.head_dim), np.nan, np.float32)
        ops.rope_write_kv(qkv, batch, rope, pages)
        ops.paged_attention(qkv, batch, pages, out, scale=scale, window=window)
        return np.split(out, batch.query_start[1:-1])


def random_stories(
    rng: np.random.Generator, lengths: Sequence[int], *, query_heads: int, layout: KVLayout
) -> list[Story]:
    """Stories of the given lengths with normal queries, keys and values."""
    width = (query_heads + 2 * layout.kv_heads) * layout.head_dim
    return [Story(rng.standard_normal((length, width), np.float32)) for length in lengths]


def random_rope(rng: np.random.Generator, positions: int, rotary_dim: int) -> Rope:
    """Tables of random angles: each pair and position has its own."""
    angles = rng.uniform(0, 2 * np.pi, (positions, rotary_dim // 2))
    return Rope(cos=np.cos(angles).astype(np.float32), sin=np.sin(angles).astype(np.float32))


def assert_near(ops: Ops, outs: Sequence[F32], truths: Sequence[F32]) -> None:
    """Attention beside the truth. Matrix tiles round queries and weights to bfloat16, 2^-9 of each:
    values here are of order 1, the largest of a hundred thousand errors is 2^-5."""
    tiles = expands(ops.name.removeprefix("native-"))
    rtol, atol = (2**-8, 2**-5) if tiles else (2e-5, 4e-6)
    for out, truth in zip(outs, truths, strict=True):
        np.testing.assert_allclose(out, truth, rtol=rtol, atol=atol)


def exact_stories(
    rng: np.random.Generator, lengths: Sequence[int], *, query_heads: int, layout: KVLayout
) -> list[Story]:
    """Stories whose scores are whole numbers: with a scale of log 2 all weights are powers of two,
    which no rounding changes."""
    stories = random_stories(rng, lengths, query_heads=query_heads, layout=layout)
    scored = (query_heads + layout.kv_heads) * layout.head_dim
    for story in stories:
        story.qkv[:, :scored] = rng.integers(-1, 2, (len(story), scored))
    return stories
