// What all products of attention share: one partition of a context, and where its tiles lie.
#pragma once

#include "kv_tile.h"
#include "octavo/paging.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

namespace {

constexpr Index PARTITION = 256;  // positions
constexpr Index PARTITION_TILES = PARTITION / TILE;
constexpr Index GROUP = 4;  // tiles that are asked for together
constexpr Index LINE = 64;  // bytes of a cache line

// Of one partition the positions that a row sees, counted from its first one: first … last - 1.
struct Seen {
  Index first;
  Index last;
};

constexpr Index RESULT_HEAD = 16;  // max, sum, and room that keeps outputs aligned

struct Shape {
  Index head_dim;
  Index width;   // E padded to tiles
  Index record;  // floats of one row's result: RESULT_HEAD, then `width` of output
  float scale;   // of scores, in powers of two
};

// Where the tiles of one partition lie, those of one head.
struct Tiles {
  const Byte* keys[PARTITION_TILES];
  const Byte* values[PARTITION_TILES];
};

// One partition of some heads. `next`: GROUP tiles of keys that are used after it, or null.
struct Part {
  Tiles tiles;  // of the first head; those of each other `head_stride` bytes on
  const Byte* const* next;
  Index heads;
  Index head_stride;
  Index rows;  // of each head
};

// Lines to ask memory for meanwhile, one for each line that is used: `offset` on from each place in
// turn, then `step` further.
struct Ahead {
  const Byte* const* places;  // [GROUP]
  Index step;
  Index offset;
};

Index smaller(Index a, Index b) { return a < b ? a : b; }
Index within(Index value, Index high) { return value < 0 ? 0 : smaller(value, high); }
Index quotient_up(Index a, Index b) { return (a + b - 1) / b; }
Index padded(Index size, Index step) { return quotient_up(size, step) * step; }

// 2^x for x up to a little over 0; 0 below -126, NaN stays NaN. Polynomial of degree 6 for 2^f,
// |f| ≤ 1/2, fitted to the smallest relative error (3e-9).
OCTAVO_INLINE Floats exp2_down(Floats x) {
  const Floats magic = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer
  const Floats shifted = x + magic;
  const Floats f = x - (shifted - magic);
  Floats p = splat(1.53533614e-4f);
  p = fma(p, f, splat(1.339887457e-3f));
  p = fma(p, f, splat(9.618437361e-3f));
  p = fma(p, f, splat(5.5503324706e-2f));
  p = fma(p, f, splat(2.40226479136e-1f));
  p = fma(p, f, splat(6.93147202855e-1f));
  p = fma(p, f, splat(1.0f));
  const Floats power = as_floats((as_words(shifted) + 127u) << 23);
  return select(x < splat(-126.0f), splat(0.0f), p * power);
}

// Where the lines of a group of tiles lie, in the order to ask for them. Tiles in pages of their
// own take turns: pages of a few KB come as fast as memory in one piece if several are on their
// way.
struct Group {
  const Byte* places[GROUP];
  Index step;

  Ahead of_head(Index offset) const { return {places, step, offset}; }
};

// The tiles from `t` on, filled up with those of `next`, or without it with the last one before
// `end`.
Group group_at(const Byte* const* tiles, Index t, Index end, Index tile_bytes,
               const Byte* const* next = nullptr) {
  Group group = {{}, LINE};
  for (Index i = 0; i < GROUP; ++i) {
    const bool beyond = next != nullptr && t + i >= end;
    group.places[i] = beyond ? next[t + i - end] : tiles[smaller(t + i, end - 1)];
  }
  if (group.places[GROUP - 1] - group.places[0] == (GROUP - 1) * tile_bytes) {
    for (Index i = 0; i < GROUP; ++i) group.places[i] = group.places[0] + i * LINE;
    group.step = GROUP * LINE;
  }
  return group;
}

// One partition for some rows of each head, of which each sees as much or a little further than the
// one before: queries, what each row sees, scratch, results. Rows that see nothing get no result.
using AttendRows = void (*)(const Shape&, const Part&, Index rows, const float*, const Seen*, Byte*,
                            float*);

// A tile of values, padded with zeros to `width` columns.
template <typename Tile>
void widen(const Byte* from, Index head_dim, Index width, Byte* to) {
  __builtin_memcpy(to, from, Tile::START);
  const Index row = head_dim * Tile::COLUMN, padded_row = width * Tile::COLUMN;
  from += Tile::START;
  to += Tile::START;
  for (Index r = 0; r < Tile::ROWS; ++r, from += row, to += padded_row) {
    __builtin_memcpy(to, from, static_cast<std::size_t>(row));
    __builtin_memset(to + row, 0, static_cast<std::size_t>(padded_row - row));
  }
}

// What attention must know of the type of the elements.
struct Format {
  AttendRows (*attend_rows)(Index rows);
  Index (*tile_bytes)(Index width);
  void (*widen)(const Byte* from, Index head_dim, Index width, Byte* to);
};

}  // namespace

}  // namespace octavo::OCTAVO_SET
