// The two units that multiply bfloat16 pairs: the vector dot product and the matrix tiles.
//
// Kernels call these few functions; a build of a test double takes them from emulate/ instead, so
// that a kernel's own source is tested on a machine without the units.
#pragma once

#include "vector.h"

#if OCTAVO_EMULATED

#include "../emulate/bf16_units.h"

#else

namespace octavo::OCTAVO_SET {

#if OCTAVO_DOT

// sums[i] + a[2i+1] · b[2i+1] + a[2i] · b[2i], in this order.
OCTAVO_INLINE Floats dot_pairs(Words a, Words b, Floats sums) {
  return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
}

// Pairs of numbers rounded to bfloat16, ties to even; subnormal ones become zero.
OCTAVO_INLINE Words pair_bf16(Floats even, Floats odd) {
  typedef std::int16_t Halves __attribute__((vector_size(LANES * 4)));
  const Halves halves = (Halves)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  const Halves order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (Words)__builtin_shuffle(halves, order);
}

// 2 · LANES numbers one after the other, rounded in the same way.
OCTAVO_INLINE Words run_bf16(Floats first, Floats second) {
  return (Words)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}

#endif

#if OCTAVO_TILES

// What each of eight tiles holds, 16 rows of 64 bytes at most.
struct TileShapes {
  std::uint8_t rows[8];
  std::uint16_t row_bytes[8];
};

constexpr TileShapes WHOLE_TILES = {{16, 16, 16, 16, 16, 16, 16, 16},
                                    {64, 64, 64, 64, 64, 64, 64, 64}};

// The calling thread's tiles hold nothing before and after.
OCTAVO_INLINE void open_tiles(const TileShapes& shapes = WHOLE_TILES) {
  alignas(64) struct {
    std::uint8_t palette, start_row, reserved[14];
    std::uint16_t row_bytes[16];
    std::uint8_t rows[16];
  } all = {1, 0, {}, {}, {}};
  for (int i = 0; i < 8; ++i) {
    all.row_bytes[i] = shapes.row_bytes[i];
    all.rows[i] = shapes.rows[i];
  }
  // The compiler may not see that the instruction reads all of it.
  __asm__ volatile("" : : "r"(&all) : "memory");
  _tile_loadconfig(&all);
}

OCTAVO_INLINE void close_tiles() { _tile_release(); }

// Tile numbers are part of the instruction.
template <int TILE>
OCTAVO_INLINE void zero_tile() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(TILE));
}

template <int TILE>
OCTAVO_INLINE void load_tile(const void* from, Index stride_bytes) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2"
                   :
                   : "r"(from), "r"(stride_bytes), "i"(TILE)
                   : "memory");
}

template <int TILE>
OCTAVO_INLINE void store_tile(void* to, Index stride_bytes) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)"
                   :
                   : "r"(to), "r"(stride_bytes), "i"(TILE)
                   : "memory");
}

// sums += a · b, pairs of a row of `a` with pairs of a column of `b`.
template <int SUMS, int A, int B>
OCTAVO_INLINE void dot_tiles() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(A), "i"(B));
}

#endif

}  // namespace octavo::OCTAVO_SET

#endif
