// The innermost product of `linear` with weights of eight or four bits: a few rows of x by a few
// panels, the integer sums of a group of DEPTH inputs in registers.
//
// Each sum adds one term a group, in ascending order and rounded once or twice, starting from what
// `sums` holds; the integers in it are exact. A row's bits depend neither on the shape of the tile
// nor on where the inputs are cut into runs.
#pragma once

#include <cstddef>

#include "integer_units.h"
#include "linear_format.h"
#include "octavo/kernels.h"
#include "sixes.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

constexpr int VECTORS = PANEL / LANES;  // in a panel

template <Encoding ENCODING>
struct Kernel {
  using Products = Nibbles;
  static constexpr int ZERO = ENCODING == Encoding::int4 ? 8 : 0;  // the integer that means 0
};

template <>
struct Kernel<Encoding::int8> {
  using Products = Bytes;
  static constexpr int ZERO = 0;
};

template <Encoding ENCODING>
  requires SIXES<ENCODING>
struct Kernel<ENCODING> {
  using Products = Sixes;
  static constexpr int ZERO = SIXES_ZERO;
};

// Sums fill the registers but for those that a part of the weights and the inputs need.
#if OCTAVO_LANES == 16
template <Encoding>
constexpr int MAX_ROWS = 12;
constexpr int panels_for(int rows) { return rows == 1 ? 8 : rows <= 4 ? 4 : 2; }
#elif OCTAVO_LANES == 8
template <Encoding ENCODING>
constexpr int MAX_ROWS = ENCODING == Encoding::int8 || SIXES<ENCODING> ? 5 : 6;
constexpr int panels_for(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#else
template <Encoding>
constexpr int MAX_ROWS = 3;
constexpr int panels_for(int) { return 1; }
#endif

// Vector n of the panels of a tile, the first at `panel`.
OCTAVO_INLINE const unsigned char* vector_at(const unsigned char* panel, Index panel_stride, int n,
                                             Index lane_bytes) {
  return panel + n / VECTORS * panel_stride + n % VECTORS * LANES * lane_bytes;
}

// Sums start from zero.
template <int ROWS, int WIDTH>
OCTAVO_INLINE void clear(const TileArgs& args) {
  for (int r = 0; r < ROWS; ++r) {
    for (int n = 0; n < WIDTH; ++n) store(args.sums + r * args.sums_stride + n * LANES, Floats{});
  }
}

// Adds the products of one group, and asks for as many lines at `fetch`.
template <typename Products, int ROWS, int WIDTH>
OCTAVO_INLINE void multiply_group(const TileArgs& args, const unsigned char* x,
                                  const unsigned char* panel, const unsigned char* fetch,
                                  typename Products::Sums (&sums)[ROWS][WIDTH]) {
#pragma GCC unroll 2
  for (int line = 0; line < Products::LINES; ++line) {
#pragma GCC unroll 2
    for (int part = 0; part < Products::PARTS; ++part) {
      decltype(part_of(Products{}, panel, part)) weights[WIDTH];
#pragma GCC unroll 16
      for (int n = 0; n < WIDTH; ++n) {
        const unsigned char* const from =
            vector_at(panel + line * 4 * PANEL, args.panel_stride, n, 4);
        weights[n] = part_of(Products{}, from, part);
        // A panel is too short a stream for what the machine fetches ahead by itself.
        if (part == 0 && n % VECTORS == 0) {
          __builtin_prefetch(fetch + line * args.fetch_step + n / VECTORS * args.fetch_stride);
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        const auto inputs = inputs_of(Products{}, x + r * args.x_stride, line, part);
        accumulate(Products{}, sums[r], weights, inputs);
      }
    }
  }
}

// sums += d · scale · products, and + m · total where there are offsets.
template <Encoding ENCODING, int ROWS, int WIDTH, typename Sums>
OCTAVO_INLINE void settle(const TileArgs& args, const unsigned char* row_groups,
                          const unsigned char* factors, const Sums (&products)[ROWS][WIDTH]) {
  float* const sums = args.sums;
  const Index sums_stride = args.sums_stride, x_stride = args.x_stride;
  Floats scales[WIDTH], offsets[WIDTH];
#pragma GCC unroll 16
  for (int n = 0; n < WIDTH; ++n) {
    const unsigned char* const beside = factors + n / VECTORS * args.panel_stride;
    const Index lane = n % VECTORS * LANES;
    scales[n] = widen_halves(reinterpret_cast<const Half*>(beside) + lane);
    if constexpr (OFFSETS<ENCODING>) offsets[n] = offsets_at<ENCODING>(beside, lane);
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    const RowGroup& group = *reinterpret_cast<const RowGroup*>(row_groups + r * x_stride);
#pragma GCC unroll 16
    for (int n = 0; n < WIDTH; ++n) {
      float* const at = sums + r * sums_stride + n * LANES;
      Floats sum = fma(total(products[r][n]), scales[n] * splat(group.scale), load(at));
      if constexpr (OFFSETS<ENCODING>) sum = fma(offsets[n], splat(group.total), sum);
      store(at, sum);
    }
  }
}

template <Encoding ENCODING, int ROWS, int PANELS>
void multiply_quantised(const TileArgs& args) {
  using Products = typename Kernel<ENCODING>::Products;
  constexpr int WIDTH = PANELS * VECTORS;
  if (args.first) clear<ROWS, WIDTH>(args);
  const unsigned char *x = args.x, *panel = args.panels, *factors = args.factors;
  const unsigned char* row_groups = args.x + args.groups_at;
  const unsigned char *fetch = args.fetch, *fetch_factors = args.fetch_factors;
  for (Index k = 0; k < args.inputs; k += DEPTH) {
    typename Products::Sums products[ROWS][WIDTH];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const unsigned char* const group = row_groups + r * args.x_stride;
      const Words start = splat_from(group + offsetof(RowGroup, start));
#pragma GCC unroll 16
      for (int n = 0; n < WIDTH; ++n) products[r][n] = (typename Products::Sums)start;
    }
    multiply_group<Products>(args, x, panel, fetch, products);
    settle<ENCODING>(args, row_groups, factors, products);
#pragma GCC unroll 16
    for (int p = 0; p < PANELS; ++p) {
      __builtin_prefetch(fetch_factors + p * args.fetch_stride);
    }
    x += Products::X_BYTES, panel += Products::LINES * 4 * PANEL;
    factors += FACTOR_BYTES<ENCODING>, row_groups += sizeof(RowGroup);
    fetch += Products::LINES * args.fetch_step, fetch_factors += FACTOR_BYTES<ENCODING>;
  }
}

}  // namespace octavo::OCTAVO_SET
