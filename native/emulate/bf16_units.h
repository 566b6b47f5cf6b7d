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

OCTAVO_INLINE Words run_bf16(Floats first, Floats second) {
  std::uint16_t run[2 * LANES];
  for (int i = 0; i < LANES; ++i) {
    run[i] = round_bf16(flushed(first[i]));
    run[LANES + i] = round_bf16(flushed(second[i]));
  }
  return load_words(run);
}

#endif

#if OCTAVO_TILES

struct Tile {
  int rows;
  int row_bytes;
  unsigned char bytes[16][64];
};

struct TileShapes {
  std::uint8_t rows[8];
  std::uint16_t row_bytes[8];
};

constexpr TileShapes WHOLE_TILES = {{16, 16, 16, 16, 16, 16, 16, 16},
                                    {64, 64, 64, 64, 64, 64, 64, 64}};

// One set of tiles a thread, as in the machine.
static thread_local Tile tiles[8];
static thread_local bool tiles_are_open = false;

OCTAVO_INLINE void open_tiles(const TileShapes& shapes = WHOLE_TILES) {
  if (tiles_are_open) __builtin_trap();
  tiles_are_open = true;
  __builtin_memset(tiles, 0, sizeof tiles);
  for (int i = 0; i < 8; ++i) {
    if (shapes.rows[i] > 16 || shapes.row_bytes[i] > 64 || shapes.row_bytes[i] % 4 != 0)
      __builtin_trap();
    tiles[i].rows = shapes.rows[i];
    tiles[i].row_bytes = shapes.row_bytes[i];
  }
}

OCTAVO_INLINE void close_tiles() {
  if (!tiles_are_open) __builtin_trap();
  tiles_are_open = false;
}

static inline Tile& tile_in_use(int number) {
  if (!tiles_are_open || tiles[number].rows == 0) __builtin_trap();
  return tiles[number];
}

template <int TILE>
void zero_tile() {
  Tile& tile = tile_in_use(TILE);
  __builtin_memset(tile.bytes, 0, sizeof tile.bytes);
}

template <int TILE>
void load_tile(const void* from, Index stride_bytes) {
  zero_tile<TILE>();
  Tile& tile = tiles[TILE];
  for (int row = 0; row < tile.rows; ++row) {
    __builtin_memcpy(tile.bytes[row], static_cast<const unsigned char*>(from) + row * stride_bytes,
                     static_cast<std::size_t>(tile.row_bytes));
  }
}

template <int TILE>
void store_tile(void* to, Index stride_bytes) {
  const Tile& tile = tile_in_use(TILE);
  for (int row = 0; row < tile.rows; ++row) {
    __builtin_memcpy(static_cast<unsigned char*>(to) + row * stride_bytes, tile.bytes[row],
                     static_cast<std::size_t>(tile.row_bytes));
  }
}

// The odd and the even products of a row are summed apart, then added to each other and to `sums`.
static inline void multiply_tiles(Tile& sums, const Tile& a, const Tile& b) {
  if (sums.rows != a.rows || a.row_bytes != 4 * b.rows || sums.row_bytes != b.row_bytes)
    __builtin_trap();
  std::uint16_t left[16][32], right[16][32];
  float total[16][16];
  __builtin_memcpy(left, a.bytes, sizeof left);
  __builtin_memcpy(right, b.bytes, sizeof right);
  __builtin_memcpy(total, sums.bytes, sizeof total);
  for (int row = 0; row < sums.rows; ++row) {
    float even[16] = {}, odd[16] = {};
    for (int pair = 0; pair < b.rows; ++pair) {
      for (int n = 0; n < 16; ++n) {
        even[n] = add_product(left[row][2 * pair], right[pair][2 * n], even[n]);
        odd[n] = add_product(left[row][2 * pair + 1], right[pair][2 * n + 1], odd[n]);
      }
    }
    for (int n = 0; n < 16; ++n) {
      total[row][n] = flushed(flushed(total[row][n]) + flushed(even[n] + odd[n]));
    }
  }
  __builtin_memcpy(sums.bytes, total, sizeof total);
}

template <int SUMS, int A, int B>
void dot_tiles() {
  multiply_tiles(tile_in_use(SUMS), tile_in_use(A), tile_in_use(B));
}

#endif

}  // namespace octavo::OCTAVO_SET
