// The innermost product of `linear` with weights of six bits: vector by vector of columns, whose
// weights of a group are unpacked once for all rows of the tile.
//
// Sums are those of `quantised_tile.h`: one term a group, whose integers are exact, Σ s · q · x as
// well: 2^24 has room for 32 · 128 · 32 · 127.
#pragma once

#include "integer_units.h"
#include "linear_format.h"
#include "octavo/kernels.h"
#include "quantised_tile.h"
#include "sixes.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

template <Encoding ENCODING, int ROWS, int PANELS>
void multiply_sixes(const TileArgs& args) {
  constexpr int WIDTH = PANELS * VECTORS, LINES = 6;
  if (args.first) {
    for (int r = 0; r < ROWS; ++r) {
      for (int n = 0; n < WIDTH; ++n) store(args.sums + r * args.sums_stride + n * LANES, Floats{});
    }
  }
  const unsigned char *x = args.x, *panel = args.panels, *factors = args.factors;
  const unsigned char* row_groups = args.x + args.groups_at;
  const unsigned char *fetch = args.fetch, *fetch_factors = args.fetch_factors;
  for (Index k = 0; k < args.inputs; k += DEPTH) {
    for (int n = 0; n < WIDTH; ++n) {
      const Index lane = n % VECTORS * LANES, at = n / VECTORS * args.panel_stride;
      if (n % VECTORS == 0) {
        const Index ahead = n / VECTORS * args.fetch_stride;
        for (int line = 0; line < LINES; ++line) {
          __builtin_prefetch(fetch + ahead + line * args.fetch_step);
        }
        fetch_lines(fetch_factors + ahead, FACTOR_BYTES<ENCODING>);
      }
      Sixteen halves[2];
      for (int h = 0; h < 2; ++h) {
        unpack_sixes(panel + at + h * 3 * SIXES_LINE + 4 * lane, halves[h]);
      }
      const unsigned char* const beside = factors + at;
      const Floats scale = widen_halves(reinterpret_cast<const Half*>(beside) + lane);
      const SixFactors of = six_factors<ENCODING>(beside, lane);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        const unsigned char* const inputs = x + r * args.x_stride;
        const RowGroup& group = *reinterpret_cast<const RowGroup*>(row_groups + r * args.x_stride);
        const Floats first = total(dot_sixteen(Sixes{}, halves[0], inputs));
        const Floats second = total(dot_sixteen(Sixes{}, halves[1], inputs + Sixes::HALF_BYTES));
        const Floats integers = fma(second, of.halves[1], first * of.halves[0]);
        float* const sums = args.sums + r * args.sums_stride + n * LANES;
        Floats sum = fma(integers, scale * splat(group.scale), load(sums));
        if constexpr (OFFSETS<ENCODING>) sum = fma(of.offset, splat(group.total), sum);
        store(sums, sum);
      }
    }
    x += Sixes::X_BYTES, panel += LINES * SIXES_LINE;
    factors += FACTOR_BYTES<ENCODING>, row_groups += sizeof(RowGroup);
    fetch += LINES * args.fetch_step, fetch_factors += FACTOR_BYTES<ENCODING>;
  }
}

}  // namespace octavo::OCTAVO_SET
