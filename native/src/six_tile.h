// The innermost product of `linear` with weights of six bits: as `quantised_tile.h`, but half a
// group at a time, whose sums meet its multiples before the group's meet the scale.
//
// Σ s · q · x over a group is exact in float32: 32 · 128 · 32 · 127 < 2^24.
#pragma once

#include "integer_units.h"
#include "linear_format.h"
#include "octavo/kernels.h"
#include "quantised_tile.h"
#include "sixes.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

// Four panels for one row leave too few registers to unpack in: 91 G/s in place of 100.
constexpr int MAX_SIXES_PANELS = LANES == 8 ? 2 : 8;

// The products of half a group.
template <int ROWS, int WIDTH>
OCTAVO_INLINE void multiply_half(const TileArgs& args, const unsigned char* x,
                                 const unsigned char* panel, Sixes::Sums (&sums)[ROWS][WIDTH]) {
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    const Sixes::Sums start = start_of(Sixes{}, x + r * args.x_stride);
#pragma GCC unroll 16
    for (int n = 0; n < WIDTH; ++n) sums[r][n] = start;
  }
#pragma GCC unroll 4
  for (int quad = 0; quad < 4; ++quad) {
    Words weights[WIDTH];
#pragma GCC unroll 16
    for (int n = 0; n < WIDTH; ++n) {
      weights[n] = sixes_at(vector_at(panel, args.panel_stride, n, 4), quad);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      accumulate(Sixes{}, sums[r], weights, x + r * args.x_stride, quad);
    }
  }
}

// sums += s · products: of both halves of a group all that its scale is yet to meet.
template <int ROWS, int WIDTH>
OCTAVO_INLINE void add_half(const TileArgs& args, const unsigned char* multiples,
                            const Sixes::Sums (&products)[ROWS][WIDTH],
                            Floats (&sums)[ROWS][WIDTH]) {
#pragma GCC unroll 16
  for (int n = 0; n < WIDTH; ++n) {
    const Floats s = widen_bytes(vector_at(multiples, args.panel_stride, n, 1));
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) sums[r][n] = fma(total(products[r][n]), s, sums[r][n]);
  }
}

// Asks for the lines of a group of the panels that are needed next.
template <Encoding ENCODING, int PANELS>
OCTAVO_INLINE void fetch_group(const TileArgs& args, const unsigned char* values,
                               const unsigned char* factors) {
#pragma GCC unroll 16
  for (int p = 0; p < PANELS; ++p) {
#pragma GCC unroll 8
    for (int line = 0; line < SIXES_LINES; ++line) {
      __builtin_prefetch(values + p * args.fetch_stride + line * args.fetch_step);
    }
    fetch_lines(factors + p * args.fetch_stride, FACTOR_BYTES<ENCODING>);
  }
}

template <Encoding ENCODING, int ROWS, int PANELS>
void multiply_sixes(const TileArgs& args) {
  constexpr int WIDTH = PANELS * VECTORS;
  if (args.first) clear<ROWS, WIDTH>(args);
  const unsigned char *x = args.x, *panel = args.panels, *factors = args.factors;
  const unsigned char* row_groups = args.x + args.groups_at;
  const unsigned char *fetch = args.fetch, *fetch_factors = args.fetch_factors;
  for (Index k = 0; k < args.inputs; k += DEPTH) {
    fetch_group<ENCODING, PANELS>(args, fetch, fetch_factors);
    Floats sums[ROWS][WIDTH] = {};
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Sixes::Sums products[ROWS][WIDTH];
      multiply_half(args, x + half * Sixes::HALF_BYTES, panel + half * SIXES_LINES / 2 * SIXES_LINE,
                    products);
      add_half(args, multiples_of<ENCODING>(factors, half), products, sums);
    }
    settle<ENCODING>(args, row_groups, factors, sums);
    x += Sixes::X_BYTES, panel += SIXES_LINES * SIXES_LINE;
    factors += FACTOR_BYTES<ENCODING>, row_groups += sizeof(RowGroup);
    fetch += SIXES_LINES * args.fetch_step, fetch_factors += FACTOR_BYTES<ENCODING>;
  }
}

}  // namespace octavo::OCTAVO_SET
