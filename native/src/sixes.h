// Integers of six bits, out of the three lines of a panel that hold sixteen of each column.
#pragma once

#include "linear_format.h"
#include "octavo/packed.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

constexpr Index SIXES_LINE = 4 * PANEL;  // bytes: a word of each column
constexpr int SIXES_ZERO = 32;           // the integer that means 0

// Four inputs of a column are a word, one in each byte, 0 … 63.
typedef Words Sixteen[4];

OCTAVO_INLINE void unpack_sixes(const unsigned char* lines, Sixteen& quads) {
  constexpr std::uint32_t LOW = 0x3f3f3f3fu, TOP = 0xc0c0c0c0u;
  const Words first = load_words(lines), second = load_words(lines + SIXES_LINE);
  const Words third = load_words(lines + 2 * SIXES_LINE);
  quads[0] = first & LOW;
  quads[1] = second & LOW;
  quads[2] = third & LOW;
  quads[3] = (first & TOP) >> 6 | (second & TOP) >> 4 | (third & TOP) >> 2;
}

// What a group's vector of columns is multiplied by beside its scale and offset.
struct SixFactors {
  Floats halves[2];  // of inputs 0 … 15, and of the others
  Floats offset;
};

// `factors` are those of a group, of a vector whose first column is `lane`.
template <Encoding ENCODING>
OCTAVO_INLINE SixFactors six_factors(const unsigned char* factors, Index lane) {
  const unsigned char* const multiples = factors + FACTOR_BYTES<ENCODING> - 2 * PANEL + lane;
  const Floats first = widen_bytes(multiples), second = widen_bytes(multiples + PANEL);
  if constexpr (OFFSETS<ENCODING>) {
    const Half* const offsets = reinterpret_cast<const Half*>(factors) + PANEL + lane;
    return {{first, first}, widen_halves(offsets) * second};
  } else {
    return {{first, second}, Floats{}};
  }
}

}  // namespace octavo::OCTAVO_SET
