// What `linear` must know of an encoding of the weights: how rows of x are prepared for it, and the
// innermost products. Each encoding and instruction set brings its own.
#pragma once

#include "octavo/kernels.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

template <Encoding ENCODING>
constexpr bool OFFSETS = ENCODING == Encoding::int4_offset || ENCODING == Encoding::int6_offset;

template <Encoding ENCODING>
constexpr bool SIXES = ENCODING == Encoding::int6 || ENCODING == Encoding::int6_offset;

// Of a group of a panel.
template <Encoding ENCODING>
constexpr Index FACTOR_BYTES =
    PANEL * (2 + (OFFSETS<ENCODING> ? 2 : 0) + (SIXES<ENCODING> ? 2 : 0));

// Beside a group of DEPTH inputs of a prepared row whose elements are integers: x ≈ scale · q.
struct RowGroup {
  float scale;
  std::int32_t start;  // of the sums of products, as `integer_units.h` says
  float total;         // scale · Σ q, for weights that have offsets
};

// A run of inputs for one tile of rows. Strides are in bytes but for that of the sums
// `sums[r · sums_stride + p · PANEL + n]`. `first`: the sums start from zero.
//
// `fetch` are values of a panel that is needed next, and of as many panels after it as the tile
// has. For each cache line of values that a tile multiplies it asks for one, `fetch_step` bytes on:
// of all tiles of a block, each asks for its share. `fetch_factors` are the factors of that panel.
// Panels are as far apart there as they are packed, `fetch_stride`; those that a tile multiplies
// may have been expanded.
struct TileArgs {
  const unsigned char* x;  // row r is at x + r · x_stride; its groups lie groups_at bytes on
  Index x_stride;
  Index groups_at;
  const unsigned char* panels;
  const unsigned char* factors;
  Index panel_stride;
  const unsigned char* fetch;
  Index fetch_stride;
  Index fetch_step;
  const unsigned char* fetch_factors;
  Index inputs;  // a multiple of DEPTH
  float* sums;
  Index sums_stride;
  bool first;
};

using MultiplyTile = void (*)(const TileArgs&);

// A run of inputs of `count` panels of integers, to be written as bfloat16 panels one after the
// other, `[inputs / 2][PANEL][2]` each. What is fetched is as far apart as what is read.
struct ExpandArgs {
  const unsigned char* panels;
  const unsigned char* factors;
  Index panel_stride;
  Index count;
  Index inputs;  // a multiple of DEPTH
  const unsigned char* fetch;
  const unsigned char* fetch_factors;
  Index fetch_step;  // bytes to ask for, for each cache line of values
  unsigned char* to;
};

constexpr Index EXPANDED_GROUP_BYTES = PANEL * DEPTH * 2;

struct Tiles {
  MultiplyTile group;   // `panels` panels
  MultiplyTile single;  // one panel
  Index panels;
};

struct Format {
  const Tiles* tiles;  // of 1 … max_steps steps of rows
  Index max_steps;
  Index row_step;         // rows are counted in steps of so many
  Index x_bytes;          // of DEPTH prepared inputs
  Index row_group_bytes;  // of the RowGroup beside them, or 0
  Index run_inputs;       // of one panel, at most: they stay in the first-level cache
  void (*open)();         // before the first product of a piece, and after the last; or null
  void (*close)();
  // Expands panels for the tiles of a block of rows; or null: tiles take them as they are packed.
  void (*expand)(const ExpandArgs&);
  // Prepares inputs 0 … inputs-1 of a row: `count` come from `from`, the rest are zeros.
  void (*prepare)(const float* from, Index count, Index inputs, unsigned char* to,
                  RowGroup* groups);
};

// Asks for the cache lines of so many bytes.
OCTAVO_INLINE void fetch_lines(const unsigned char* from, Index bytes) {
  for (Index at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
}

const Format& bf16_format();
const Format& quantised_format(Encoding encoding);

}  // namespace octavo::OCTAVO_SET
