// The bfloat16 units in plain C++, with the rounding that the manual gives: every product and sum
// to nearest even, subnormal inputs and results taken as zero.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, vol. 2: VCVTNE2PS2BF16,
// VDPBF16PS, TDPBF16PS.
#pragma once

#include "../src/vector.h"

namespace octavo::OCTAVO_SET {

OCTAVO_INLINE float flushed(float value) {
  return __builtin_fabsf(value) < 1.17549435e-38f ? __builtin_copysignf(0.0f, value) : value;
}

OCTAVO_INLINE float add_product(std::uint16_t a, std::uint16_t b, float sum) {
  return flushed(__builtin_fmaf(flushed(widen(a)), flushed(widen(b)), sum));
}

#if OCTAVO_DOT

OCTAVO_INLINE Floats dot_pairs(Words a, Words b, Floats sums) {
  for (int i = 0; i < LANES; ++i) {
    const std::uint32_t x = a[i], y = b[i];
    float sum = flushed(sums[i]);
    sum =
        add_product(static_cast<std::uint16_t>(x >> 16), static_cast<std::uint16_t>(y >> 16), sum);
    sum = add_product(static_cast<std::uint16_t>(x), static_cast<std::uint16_t>(y), sum);
    sums[i] = sum;
  }
  return sums;
}

OCTAVO_INLINE Words pair_bf16(Floats even, Floats odd) {
  Words pairs;
  for (int i = 0; i < LANES; ++i) {
    const std::uint32_t lower = round_bf16(flushed(even[i])), upper = round_bf16(flushed(odd[i]));
    pairs[i] = lower | upper << 16;
  }
  return pairs;
}

#endif

#if OCTAVO_TILES

struct Tile {
  unsigned char bytes[16][64];
};

// One set of tiles a thread, as in the machine.
static thread_local Tile tiles[8];
static thread_local bool tiles_are_open = false;

OCTAVO_INLINE void open_tiles() {
  if (tiles_are_open) __builtin_trap();
  tiles_are_open = true;
  __builtin_memset(tiles, 0, sizeof tiles);
}

OCTAVO_INLINE void close_tiles() {
  if (!tiles_are_open) __builtin_trap();
  tiles_are_open = false;
}

static inline void load_tile(int tile, const void* from, Index stride_bytes) {
  if (!tiles_are_open) __builtin_trap();
  for (int row = 0; row < 16; ++row) {
    __builtin_memcpy(tiles[tile].bytes[row],
                     static_cast<const unsigned char*>(from) + row * stride_bytes, 64);
  }
}

static inline void store_tile(int tile, void* to, Index stride_bytes) {
  if (!tiles_are_open) __builtin_trap();
  for (int row = 0; row < 16; ++row) {
    __builtin_memcpy(static_cast<unsigned char*>(to) + row * stride_bytes, tiles[tile].bytes[row],
                     64);
  }
}

// The odd and the even products of a row are summed apart, then added to each other and to `sums`.
static inline void dot_tiles(int sums, int a, int b) {
  if (!tiles_are_open) __builtin_trap();
  std::uint16_t left[16][32], right[16][32];
  float total[16][16];
  __builtin_memcpy(left, tiles[a].bytes, sizeof left);
  __builtin_memcpy(right, tiles[b].bytes, sizeof right);
  __builtin_memcpy(total, tiles[sums].bytes, sizeof total);
  for (int row = 0; row < 16; ++row) {
    float even[16] = {}, odd[16] = {};
    for (int pair = 0; pair < 16; ++pair) {
      for (int n = 0; n < 16; ++n) {
        even[n] = add_product(left[row][2 * pair], right[pair][2 * n], even[n]);
        odd[n] = add_product(left[row][2 * pair + 1], right[pair][2 * n + 1], odd[n]);
      }
    }
    for (int n = 0; n < 16; ++n) {
      total[row][n] = flushed(flushed(total[row][n]) + flushed(even[n] + odd[n]));
    }
  }
  __builtin_memcpy(tiles[sums].bytes, total, sizeof total);
}

#define OCTAVO_TILE_ZERO(tile) __builtin_memset(&tiles[tile], 0, sizeof(Tile))
#define OCTAVO_TILE_LOAD(tile, from, stride_bytes) load_tile(tile, from, stride_bytes)
#define OCTAVO_TILE_STORE(tile, to, stride_bytes) store_tile(tile, to, stride_bytes)
#define OCTAVO_TILE_DOT(sums, a, b) dot_tiles(sums, a, b)

#endif

}  // namespace octavo::OCTAVO_SET
