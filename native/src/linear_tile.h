// The innermost product of `linear`: a few rows of x by a few panels of weights, all sums in
// registers. Every set brings its own element type, tile shapes and loop.
//
// Each sum runs over the inputs in ascending order, starting from what `sums` holds: a row's bits
// depend neither on the shape of the tile nor on where the inputs are cut into runs.
#pragma once

#include "bf16_units.h"
#include "linear_format.h"
#include "octavo/kernels.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

#if OCTAVO_TILES

using Element = Bf16;
constexpr Index ROW_STEP = 16;  // rows come in such groups, the last filled up with zeros
constexpr int MAX_STEPS = 2;

constexpr int panels_for(int steps) { return steps == 1 ? 3 : 2; }

// Tiles 0 … 3 are sums. One group of rows: tile 4 is x, 5 … 7 the panels. Two groups: 4 and 5 are
// x, 6 and 7 the panels.
template <int STEPS, int PANELS>
void multiply_tile(const TileArgs& args) {
  constexpr bool TWO_ROWS = STEPS == 2, TWO = PANELS >= 2, THREE = PANELS == 3 && STEPS == 1;
  const Index sums_bytes = args.sums_stride * 4, x_bytes = args.x_stride;
  float* const lower = args.sums + ROW_STEP * args.sums_stride;
  if (args.first) {
    zero_tile<0>();
    if constexpr (TWO) zero_tile<1>();
    if constexpr (TWO_ROWS || THREE) zero_tile<2>();
    if constexpr (TWO_ROWS && TWO) zero_tile<3>();
  } else {
    load_tile<0>(args.sums, sums_bytes);
    if constexpr (TWO) load_tile<1>(args.sums + PANEL, sums_bytes);
    if constexpr (THREE) load_tile<2>(args.sums + 2 * PANEL, sums_bytes);
    if constexpr (TWO_ROWS) load_tile<2>(lower, sums_bytes);
    if constexpr (TWO_ROWS && TWO) load_tile<3>(lower + PANEL, sums_bytes);
  }
  const unsigned char* fetch = args.fetch;
  const Index fetched = DEPTH / 2 * args.fetch_step;
  for (Index k = 0; k < args.inputs; k += DEPTH, fetch += fetched) {
    const unsigned char* const x = args.x + k * 2;
    const unsigned char* const panel = args.panels + k * PANEL * 2;
    load_tile<4>(x, x_bytes);
    if constexpr (TWO_ROWS) {
      load_tile<6>(panel, 64);
      dot_tiles<0, 4, 6>();
      load_tile<5>(x + ROW_STEP * args.x_stride, x_bytes);
      dot_tiles<2, 5, 6>();
      fetch_lines(fetch, fetched);
      if constexpr (TWO) {
        load_tile<7>(panel + args.panel_stride, 64);
        dot_tiles<1, 4, 7>();
        dot_tiles<3, 5, 7>();
        fetch_lines(fetch + args.fetch_stride, fetched);
      }
    } else {
      load_tile<5>(panel, 64);
      dot_tiles<0, 4, 5>();
      fetch_lines(fetch, fetched);
      if constexpr (TWO) {
        load_tile<6>(panel + args.panel_stride, 64);
        dot_tiles<1, 4, 6>();
        fetch_lines(fetch + args.fetch_stride, fetched);
      }
      if constexpr (THREE) {
        load_tile<7>(panel + 2 * args.panel_stride, 64);
        dot_tiles<2, 4, 7>();
        fetch_lines(fetch + 2 * args.fetch_stride, fetched);
      }
    }
  }
  store_tile<0>(args.sums, sums_bytes);
  if constexpr (TWO) store_tile<1>(args.sums + PANEL, sums_bytes);
  if constexpr (THREE) store_tile<2>(args.sums + 2 * PANEL, sums_bytes);
  if constexpr (TWO_ROWS) store_tile<2>(lower, sums_bytes);
  if constexpr (TWO_ROWS && TWO) store_tile<3>(lower + PANEL, sums_bytes);
}

#else

constexpr Index ROW_STEP = 1;
constexpr int VECTORS = PANEL / LANES;  // in a panel

// Each vector of each row is a chain of sums. Eight keep two units busy that take four cycles; more
// leave room for delays. Few enough leave registers for weights and inputs.
#if OCTAVO_LANES == 16
constexpr int MAX_STEPS = 12;
constexpr int panels_for(int rows) { return rows == 1 ? 8 : rows <= 4 ? 4 : 2; }
#elif OCTAVO_LANES == 8
constexpr int MAX_STEPS = 6;
constexpr int panels_for(int rows) { return rows == 1 ? 4 : rows <= 3 ? rows : 1; }
#else
constexpr int MAX_STEPS = 3;
constexpr int panels_for(int) { return 1; }
#endif

#if OCTAVO_DOT
using Element = Bf16;
#else
using Element = float;
#endif

// The products of one pair of inputs with vectors FIRST … FIRST + WIDTH - 1 of the panels.
template <int FIRST, int ROWS, int WIDTH>
OCTAVO_INLINE void multiply_pair(const Element* x, Index x_stride, const Bf16* panel,
                                 Index panel_stride, Floats (&sums)[ROWS][WIDTH]) {
  const auto pairs = [&](int n) __attribute__((always_inline)) {
    const int vector = FIRST + n;
    return panel + vector / VECTORS * panel_stride + vector % VECTORS * 2 * LANES;
  };
#if OCTAVO_DOT
  Words weights[WIDTH];
#pragma GCC unroll 16
  for (int n = 0; n < WIDTH; ++n) weights[n] = load_words(pairs(n));
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    std::uint32_t pair;
    __builtin_memcpy(&pair, x + r * x_stride, sizeof pair);
#pragma GCC unroll 16
    for (int n = 0; n < WIDTH; ++n)
      sums[r][n] = dot_pairs(splat_word(pair), weights[n], sums[r][n]);
  }
#else
  if constexpr (ROWS == 1) {
    const Floats even = splat(x[0]), odd = splat(x[1]);
#pragma GCC unroll 16
    for (int n = 0; n < WIDTH; ++n) {
      const Words weights = load_words(pairs(n));
      sums[0][n] = fma(even, lower_bf16(weights), sums[0][n]);
      sums[0][n] = fma(odd, upper_bf16(weights), sums[0][n]);
    }
  } else {
    Floats weights[WIDTH];
#pragma GCC unroll 16
    for (int n = 0; n < WIDTH; ++n) weights[n] = lower_bf16(load_words(pairs(n)));
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) multiply_row(x + r * x_stride, weights, sums[r]);
#pragma GCC unroll 16
    for (int n = 0; n < WIDTH; ++n) weights[n] = upper_in_place(load_words(pairs(n)));
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) multiply_row(x + r * x_stride + 1, weights, sums[r]);
  }
#endif
}

// Vectors FIRST … FIRST + WIDTH - 1 of the panels; FETCHED panels are fetched.
template <int ROWS, int FIRST, int WIDTH, int FETCHED>
OCTAVO_INLINE void multiply_vectors(const TileArgs& args, const unsigned char* fetch) {
  Floats sums[ROWS][WIDTH] = {};
  float* const target = args.sums + FIRST * LANES;
  if (!args.first) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 16
      for (int n = 0; n < WIDTH; ++n) sums[r][n] = load(target + r * args.sums_stride + n * LANES);
    }
  }
  const Element* x = reinterpret_cast<const Element*>(args.x);
  const Bf16* panel = reinterpret_cast<const Bf16*>(args.panels);
  const Index x_stride = args.x_stride / static_cast<Index>(sizeof(Element));
  const Index panel_stride = args.panel_stride / static_cast<Index>(sizeof(Bf16));
  const Index inputs = args.inputs, fetch_step = args.fetch_step;
  for (Index k = 0; k < inputs; k += 2, x += 2, panel += 2 * PANEL, fetch += fetch_step) {
#pragma GCC unroll 16
    for (int p = 0; p < FETCHED; ++p) __builtin_prefetch(fetch + p * args.fetch_stride, 0, 2);
    multiply_pair<FIRST>(x, x_stride, panel, panel_stride, sums);
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 16
    for (int n = 0; n < WIDTH; ++n) store(target + r * args.sums_stride + n * LANES, sums[r][n]);
  }
}

template <int ROWS, int PANELS>
void multiply_tile(const TileArgs& args) {
  constexpr int WIDTH = PANELS * VECTORS;
  if constexpr (ROWS == 3 && WIDTH == 6) {
    // 3 × 3 twice: 3 × 4 sums, three inputs and a weight are sixteen registers, of which gcc 12
    // makes no use.
    multiply_vectors<ROWS, 0, 3, 2>(args, args.fetch);
    multiply_vectors<ROWS, 3, 3, 1>(args, args.fetch + 2 * args.fetch_stride);
  } else {
    // The machine by itself reads ahead well enough for one row.
    multiply_vectors<ROWS, 0, WIDTH, ROWS == 1 ? 0 : PANELS>(args, args.fetch);
  }
}

#endif

}  // namespace octavo::OCTAVO_SET
