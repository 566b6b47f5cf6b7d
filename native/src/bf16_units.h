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

#endif

#if OCTAVO_TILES

// Eight tiles of 16 rows by 64 bytes. The calling thread's tiles hold nothing before and after.
OCTAVO_INLINE void open_tiles() {
  alignas(64) struct {
    std::uint8_t palette, start_row, reserved[14];
    std::uint16_t row_bytes[16];
    std::uint8_t rows[16];
  } shape = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  // The compiler may not see that the instruction reads all of it.
  __asm__ volatile("" : : "r"(&shape) : "memory");
  _tile_loadconfig(&shape);
}

OCTAVO_INLINE void close_tiles() { _tile_release(); }

// Tile numbers are part of the instruction.
#define OCTAVO_TILE_ZERO(tile) _tile_zero(tile)
#define OCTAVO_TILE_LOAD(tile, from, stride_bytes) _tile_loadd(tile, from, stride_bytes)
#define OCTAVO_TILE_STORE(tile, to, stride_bytes) _tile_stored(tile, to, stride_bytes)
#define OCTAVO_TILE_DOT(sums, a, b) _tile_dpbf16ps(sums, a, b)

#endif

}  // namespace octavo::OCTAVO_SET

#endif
