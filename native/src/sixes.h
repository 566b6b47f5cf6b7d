// Integers of six bits, out of the three lines of a panel that hold sixteen of each column, and
// what they are multiplied by.
#pragma once

#include "linear_format.h"
#include "octavo/packed.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

constexpr Index SIXES_LINE = 4 * PANEL;  // bytes: a word of each column
constexpr int SIXES_LINES = 6;           // of a group
constexpr int SIXES_ZERO = 32;           // the integer that means 0

// Inputs 4 · quad … 4 · quad + 3 of each column, one in each byte, 0 … 63.
OCTAVO_INLINE Words sixes_at(const unsigned char* lines, int quad) {
  constexpr std::uint32_t LOW = 0x3f3f3f3fu, TOP = 0xc0c0c0c0u;
  if (quad < 3) return load_words(lines + quad * SIXES_LINE) & LOW;
  return (load_words(lines) & TOP) >> 6 | (load_words(lines + SIXES_LINE) & TOP) >> 4 |
         (load_words(lines + 2 * SIXES_LINE) & TOP) >> 2;
}

// What multiplies the scale in half a group, signed bytes [16].
template <Encoding ENCODING>
OCTAVO_INLINE const unsigned char* multiples_of(const unsigned char* factors, int half) {
  return factors + FACTOR_BYTES<ENCODING> - (OFFSETS<ENCODING> ? 2 : 2 - half) * PANEL;
}

// The offsets of a group's columns from `lane` on.
template <Encoding ENCODING>
OCTAVO_INLINE Floats offsets_at(const unsigned char* factors, Index lane) {
  const Half* const halves = reinterpret_cast<const Half*>(factors) + PANEL + lane;
  if constexpr (!SIXES<ENCODING>) return widen_halves(halves);
  return widen_halves(halves) * widen_bytes(factors + FACTOR_BYTES<ENCODING> - PANEL + lane);
}

}  // namespace octavo::OCTAVO_SET
