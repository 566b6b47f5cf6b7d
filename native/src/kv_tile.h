// How the keys or values of 16 tokens of one head lie in a page, as `octavo.ops.api.KVLayout` says,
// and how they become floats. Keys are columns of tokens, values columns of elements of a head;
// both come in pairs of rows, of 16 columns for keys and of a head's width for values.
//
// Each struct is one type of element. Positions are in bytes.
#pragma once

#include "octavo/paging.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

namespace {

using Byte = unsigned char;

constexpr Index TILE = 16;  // tokens

struct Bf16Tile {
  static constexpr bool SCALED = false;
  static constexpr Index START = 0;         // of the elements
  static constexpr Index COLUMN = 4;        // from one column of a pair to the next
  static constexpr Index PAIRS_A_LINE = 1;  // of 16 columns
  static constexpr Index ROWS = TILE / 2;   // of values that lie together: pairs

  static Index pair_bytes(Index width) { return 4 * width; }
  static Index tile_bytes(Index width) { return TILE * 2 * width; }

  // LANES columns of the even or the odd row of a pair.
  OCTAVO_INLINE Floats row_of(const Byte* pair, Index, int odd) {
    const Words pairs = load_words(pair);
    return odd ? upper_in_place(pairs) : lower_bf16(pairs);
  }
};

// 16 scales stand before the elements.
struct Int8Tile {
  static constexpr bool SCALED = true;
  static constexpr Index START = TILE * 4;
  static constexpr Index COLUMN = 1;
  static constexpr Index PAIRS_A_LINE = 2;
  static constexpr Index ROWS = TILE;

  static Index pair_bytes(Index width) { return 2 * width; }
  static Index tile_bytes(Index width) { return START + TILE * width; }

  OCTAVO_INLINE Floats row_of(const Byte* pair, Index pair_bytes, int odd) {
    return widen_bytes(pair + odd * (pair_bytes / 2));
  }

  OCTAVO_INLINE Floats scales(const Byte* tile, int vector) {
    return load(reinterpret_cast<const float*>(tile) + vector * LANES);
  }
};

}  // namespace

}  // namespace octavo::OCTAVO_SET
