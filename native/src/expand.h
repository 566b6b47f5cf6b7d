// Panels of integers as panels of bfloat16, for sets whose tiles multiply those: each weight
// becomes d · q, or d · q + m, rounded to float32 and then to bfloat16, ties to even.
//
// An integer is put into the mantissa of a float as it lies in a word, one byte up or down at most,
// so that its lowest bit counts 1: of two operations the float is BASE + integer, exactly. `zero`
// is such a float for the weight 0. d · float - d · zero is exact too: neither has more than 24
// bits.
#pragma once

#include "bf16_units.h"
#include "linear_format.h"
#include "octavo/kernels.h"
#include "sixes.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

static_assert(LANES == PANEL, "a vector is a line of a panel");

// The integers in byte 1 of each word: as_floats((word & mask) ^ bits).
struct Integers {
  std::uint32_t mask;
  std::uint32_t bits;
  float zero;
};

template <Encoding ENCODING>
struct Lines {
  static constexpr float ZERO = OFFSETS<ENCODING> ? 0.0f : 8.0f;
  static constexpr int COUNT = 4;  // inputs 0 … 15 in the low halves of bytes, then 16 …
  static constexpr Integers PART[] = {{0x0f00u, 0x47000000u, 0x1p15f + ZERO},
                                      {0xf000u, 0x45000000u, 0x1p11f + ZERO}};
};

template <>
struct Lines<Encoding::int8> {
  static constexpr int COUNT = 8;
  static constexpr Integers PART[] = {{0xff00u, 0x47008000u, 0x1p15f + 128.0f}};  // q + 128
};

constexpr Index LINE = 4 * PANEL;  // bytes: a word of each column

// One group of a panel.
constexpr Integers SIX = {0xff00u, 0x47000000u, 0x1p15f + SIXES_ZERO};

template <Encoding ENCODING>
OCTAVO_INLINE void expand_sixes(const unsigned char* from, const unsigned char* factors,
                                unsigned char* to) {
  const Floats scale = widen_halves(reinterpret_cast<const Half*>(factors));
  [[maybe_unused]] Floats offset = {};
  if constexpr (OFFSETS<ENCODING>) offset = offsets_at<ENCODING>(factors, 0);
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half, from += SIXES_LINES / 2 * LINE) {
    const Floats times = scale * widen_bytes(multiples_of<ENCODING>(factors, half));
    const auto weights = [&](Words words) __attribute__((always_inline)) {
      const Floats integers = as_floats((words & SIX.mask) ^ SIX.bits) - SIX.zero;
      if constexpr (OFFSETS<ENCODING>) return fma(integers, times, offset);
      return integers * times;
    };
#pragma GCC unroll 4
    for (int quad = 0; quad < 4; ++quad, to += 2 * LINE) {
      const Words second = sixes_at(from, quad);
      const Words first = second << 8, third = second >> 8, fourth = second >> 16;
      store_words(to, pair_bf16(weights(first), weights(second)));
      store_words(to + LINE, pair_bf16(weights(third), weights(fourth)));
    }
  }
}

template <Encoding ENCODING>
OCTAVO_INLINE void expand_group(const unsigned char* from, const Half* factors, unsigned char* to) {
  using Of = Lines<ENCODING>;
  const Floats scale = widen_halves(factors);
  [[maybe_unused]] Floats offset = {};
  if constexpr (OFFSETS<ENCODING>) offset = widen_halves(factors + PANEL);
  const auto weights = [&](Words words, const Integers& integers) __attribute__((always_inline)) {
    const Floats held = as_floats((words & integers.mask) ^ integers.bits);
    if constexpr (OFFSETS<ENCODING>) return fma(held - integers.zero, scale, offset);
    return fma(held, scale, scale * -integers.zero);
  };
#pragma GCC unroll 8
  for (int line = 0; line < Of::COUNT; ++line) {
    const Words second = load_words(from + line * LINE);
    const Words first = second << 8, third = second >> 8, fourth = second >> 16;
    unsigned char* target = to + 2 * line * LINE;
#pragma GCC unroll 2
    for (const Integers& part : Of::PART) {
      store_words(target, pair_bf16(weights(first, part), weights(second, part)));
      store_words(target + LINE, pair_bf16(weights(third, part), weights(fourth, part)));
      target += 2 * Of::COUNT * LINE;
    }
  }
}

template <Encoding ENCODING>
void expand(const ExpandArgs& args) {
  constexpr Index LINES = SIXES<ENCODING> ? SIXES_LINES : Lines<ENCODING>::COUNT;
  const Index fetched = LINES * args.fetch_step;
  unsigned char* to = args.to;
  for (Index p = 0; p < args.count; ++p) {
    const Index panel = p * args.panel_stride;
    const unsigned char *from = args.panels + panel, *factors = args.factors + panel;
    const unsigned char *fetch = args.fetch + panel, *fetch_factors = args.fetch_factors + panel;
    for (Index k = 0; k < args.inputs; k += DEPTH) {
      fetch_lines(fetch, fetched);
      fetch_lines(fetch_factors, FACTOR_BYTES<ENCODING>);
      if constexpr (SIXES<ENCODING>) {
        expand_sixes<ENCODING>(from, factors, to);
      } else {
        expand_group<ENCODING>(from, reinterpret_cast<const Half*>(factors), to);
      }
      from += LINES * LINE, factors += FACTOR_BYTES<ENCODING>, to += EXPANDED_GROUP_BYTES;
      fetch += fetched, fetch_factors += FACTOR_BYTES<ENCODING>;
    }
  }
}

}  // namespace octavo::OCTAVO_SET
