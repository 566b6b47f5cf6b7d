// Products of bytes, as each instruction set has them. All are exact, so that no order of summing
// matters within a group of DEPTH inputs, and sets agree on the sum.
//
// A group of a panel is LINES lines of 64 bytes, each taken in PARTS parts: LANES columns by the
// few inputs that one product takes of each. For `Bytes` and `Nibbles` a set says
//
//   part_of        a part of the weights
//   inputs_of      what it is multiplied by, from a prepared group of X_BYTES
//   lay_out        how a group is prepared; `zero` is the integer of a weight that means 0. Gives
//                  the word that the sums of the group start from
//   total          the sums as floats
//
//   VNNI           vpdpbusd: unsigned bytes by signed ones, added to 32 bits. Weights of eight bits
//                  are taken as w + 128, so sums start from -128 · Σ x
//   AVX2, 512BW    vpmaddubsw: the same, added in pairs to 16 bits, where 2 · 127 · 128 has room.
//                  Weights of eight bits are negated where x is: |x| · (w ^ mask) is x · w - |x|
//                  for a negative x, so sums start from Σ |x| of those. (199 GOP/s on a core of Zen
//                  3; vpsignb would want the unit that the products want: 165.) Of four bits all of
//                  a group fits: |Σ (q - 4) x| + |4 Σ x| < 2^15
//   others         float32, whose integers are exact up to 2^24: 32 · 128 · 127 < 2^19
//
// `Sixes` are unpacked by `sixes.h` and multiplied half a group at a time with the products of
// `Nibbles`: 8 · 32 · 127 < 2^15. Each half has a start of its own, before its inputs.
#pragma once

#include "octavo/packed.h"
#include "vector.h"

#if OCTAVO_EMULATED
#include "../emulate/integer_units.h"
#endif

namespace octavo::OCTAVO_SET {

using Byte = std::int8_t;
typedef std::int16_t Shorts __attribute__((vector_size(LANES * 4)));

OCTAVO_INLINE Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

OCTAVO_INLINE Floats total(Floats sums) { return sums; }

OCTAVO_INLINE Words splat_from(const void* from) {
  std::uint32_t word;
  __builtin_memcpy(&word, from, sizeof word);
  return splat_word(word);
}

// The integers of a group of inputs, as vectors.
constexpr int GROUP_VECTORS = DEPTH / LANES;
typedef Ints Group[GROUP_VECTORS];

typedef std::int32_t Quad __attribute__((vector_size(16)));

OCTAVO_INLINE int sum(Ints v) {
  Quad quads[LANES / 4];
  __builtin_memcpy(quads, &v, sizeof v);
  for (int i = 1; i < LANES / 4; ++i) quads[0] += quads[i];
  const Quad pairs = quads[0] + __builtin_shuffle(quads[0], Quad{2, 3, 0, 1});
  return pairs[0] + pairs[1];
}

OCTAVO_INLINE int max(Ints v) {
  Quad quads[LANES / 4];
  __builtin_memcpy(quads, &v, sizeof v);
  Quad most = quads[0];
  for (int i = 1; i < LANES / 4; ++i) most = most > quads[i] ? most : quads[i];
  const Quad other = __builtin_shuffle(most, Quad{2, 3, 0, 1});
  most = most > other ? most : other;
  return most[0] > most[1] ? most[0] : most[1];
}

OCTAVO_INLINE int sum_of(const Group& integers) {
  Ints total = integers[0];
  for (int i = 1; i < GROUP_VECTORS; ++i) total += integers[i];
  return sum(total);
}

// As bytes, in order.
OCTAVO_INLINE void narrow(const Group& integers, void* to) {
#if OCTAVO_LANES == 8 && OCTAVO_FMA
  const __m256i low = _mm256_packs_epi32((__m256i)integers[0], (__m256i)integers[1]);
  const __m256i high = _mm256_packs_epi32((__m256i)integers[2], (__m256i)integers[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
  __builtin_memcpy(to, &bytes, sizeof bytes);
#elif OCTAVO_LANES == 16 && !OCTAVO_EMULATED
  typedef Byte LaneBytes __attribute__((vector_size(LANES)));
  for (int i = 0; i < GROUP_VECTORS; ++i) {
    const LaneBytes bytes = __builtin_convertvector(integers[i], LaneBytes);
    __builtin_memcpy(static_cast<Byte*>(to) + i * LANES, &bytes, sizeof bytes);
  }
#else
  for (Index k = 0; k < DEPTH; ++k) {
    static_cast<Byte*>(to)[k] = static_cast<Byte>(integers[k / LANES][k % LANES]);
  }
#endif
}

// The lower halves of a line's bytes, or the upper ones.
OCTAVO_INLINE Words halves_of(const void* line, int upper) {
  const Words bytes = load_words(line);
  return (upper != 0 ? bytes >> 4 : bytes) & 0x0f0f0f0fu;
}

#if OCTAVO_VNNI

#if !OCTAVO_EMULATED
OCTAVO_INLINE Ints dot_quads(Words unsigned_bytes, Words signed_bytes, Ints sums) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
}
#endif

struct Bytes {
  using Sums = Ints;
  using Inputs = Words;
  static constexpr int LINES = 8, PARTS = 1;
  static constexpr Index X_BYTES = DEPTH;
};

OCTAVO_INLINE Words part_of(Bytes, const void* line, int) { return load_words(line) ^ 0x80808080u; }

OCTAVO_INLINE Words inputs_of(Bytes, const unsigned char* x, int line, int) {
  return splat_from(x + 4 * line);
}

OCTAVO_INLINE int lay_out(Bytes, const Group& integers, int, unsigned char* to) {
  narrow(integers, to);
  return -128 * sum_of(integers);
}

struct Nibbles {
  using Sums = Ints;
  using Inputs = Words;
  static constexpr int LINES = 4, PARTS = 2;
  static constexpr Index X_BYTES = DEPTH;
};

OCTAVO_INLINE int lay_out(Nibbles, const Group& integers, int zero, unsigned char* to) {
  narrow(integers, to);
  return -zero * sum_of(integers);
}

template <typename Products, int WIDTH>
OCTAVO_INLINE void accumulate(Products, Ints (&sums)[WIDTH], const Words (&weights)[WIDTH],
                              Words x) {
#pragma GCC unroll 16
  for (int n = 0; n < WIDTH; ++n) sums[n] = dot_quads(weights[n], x, sums[n]);
}

OCTAVO_INLINE Floats total(Ints sums) { return to_floats(sums); }

OCTAVO_INLINE void add_products(Ints& sums, Words weights, Words x) {
  sums = dot_quads(weights, x, sums);
}

OCTAVO_INLINE std::uint32_t start_of(const Quad& sums, int zero) {
  return static_cast<std::uint32_t>(-zero * (sums[0] + sums[1] + sums[2] + sums[3]));
}

#elif OCTAVO_LANES >= 8

#if OCTAVO_LANES == 8

OCTAVO_INLINE Shorts dot_bytes(Words unsigned_bytes, Words signed_bytes) {
  return (Shorts)_mm256_maddubs_epi16((__m256i)unsigned_bytes, (__m256i)signed_bytes);
}
OCTAVO_INLINE Ints add_pairs(Shorts v) {
  return (Ints)_mm256_madd_epi16((__m256i)v, (__m256i)(Shorts{} + 1));
}

#elif !OCTAVO_EMULATED

OCTAVO_INLINE Shorts dot_bytes(Words unsigned_bytes, Words signed_bytes) {
  return (Shorts)_mm512_maddubs_epi16((__m512i)unsigned_bytes, (__m512i)signed_bytes);
}
OCTAVO_INLINE Ints add_pairs(Shorts v) {
  return (Ints)_mm512_madd_epi16((__m512i)v, (__m512i)(Shorts{} + 1));
}

#endif

struct SignedQuads {
  Words magnitudes;
  Words masks;  // all ones where an input is negative
};

struct Bytes {
  using Sums = Ints;
  using Inputs = SignedQuads;
  static constexpr int LINES = 8, PARTS = 1;
  static constexpr Index X_BYTES = 2 * DEPTH;
};

OCTAVO_INLINE Words part_of(Bytes, const void* line, int) { return load_words(line); }

OCTAVO_INLINE SignedQuads inputs_of(Bytes, const unsigned char* x, int line, int) {
  return {splat_from(x + 8 * line), splat_from(x + 8 * line + 4)};
}

// Eight quads of magnitudes, each followed by its masks.
OCTAVO_INLINE int lay_out(Bytes, const Group& integers, int, unsigned char* to) {
  typedef Byte GroupBytes __attribute__((vector_size(DEPTH)));
  typedef std::int32_t GroupQuads __attribute__((vector_size(DEPTH)));
  GroupBytes bytes;
  narrow(integers, &bytes);
  const GroupBytes masks = bytes < 0, magnitudes = (bytes ^ masks) - masks;
  const GroupQuads pairs[2] = {
      __builtin_shuffle((GroupQuads)magnitudes, (GroupQuads)masks,
                        GroupQuads{0, 8, 1, 9, 2, 10, 3, 11}),
      __builtin_shuffle((GroupQuads)magnitudes, (GroupQuads)masks,
                        GroupQuads{4, 12, 5, 13, 6, 14, 7, 15}),
  };
  __builtin_memcpy(to, pairs, sizeof pairs);
  Ints negative = {};
  for (const Ints& v : integers) negative -= v < 0 ? v : Ints{};
  return sum(negative);
}

// Two columns' vectors side by side and in one block: gcc 12 by itself moves products away from
// their sums until tiles outgrow the registers, and one chain after the other is a third slower.
#if OCTAVO_LANES == 8
template <int WIDTH>
OCTAVO_INLINE void accumulate(Bytes, Ints (&sums)[WIDTH], const Words (&weights)[WIDTH],
                              const SignedQuads& x) {
#pragma GCC unroll 8
  for (int n = 0; n < WIDTH; n += 2) {
    Words first, second = x.masks;
    __asm__(
        "vpxor %4, %3, %2\n\tvpxor %5, %3, %3\n\t"
        "vpmaddubsw %2, %6, %2\n\tvpmaddubsw %3, %6, %3\n\t"
        "vpmaddwd %7, %2, %2\n\tvpmaddwd %7, %3, %3\n\t"
        "vpaddd %2, %0, %0\n\tvpaddd %3, %1, %1"
        : "+x"(sums[n]), "+x"(sums[n + 1]), "=&x"(first), "+x"(second)
        : "x"(weights[n]), "x"(weights[n + 1]), "x"(x.magnitudes), "x"(Shorts{} + 1));
  }
}
#else
template <int WIDTH>
OCTAVO_INLINE void accumulate(Bytes, Ints (&sums)[WIDTH], const Words (&weights)[WIDTH],
                              const SignedQuads& x) {
#pragma GCC unroll 16
  for (int n = 0; n < WIDTH; ++n) {
    sums[n] += add_pairs(dot_bytes(x.magnitudes, weights[n] ^ x.masks));
  }
}
#endif

OCTAVO_INLINE Floats total(Ints sums) { return to_floats(sums); }

struct Nibbles {
  using Sums = Shorts;
  using Inputs = Words;
  static constexpr int LINES = 4, PARTS = 2;
  static constexpr Index X_BYTES = DEPTH;
};

OCTAVO_INLINE int lay_out(Nibbles, const Group& integers, int zero, unsigned char* to) {
  narrow(integers, to);
  return (-zero / 2 * sum_of(integers) & 0xffff) * 0x10001;  // one half in each of two sums
}

OCTAVO_INLINE void add_products(Shorts& sums, Words weights, Words x) {
#if OCTAVO_LANES == 8
  Words product;
  __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0"
          : "+x"(sums), "=&x"(product)
          : "x"(weights), "x"(x));
#else
  sums += dot_bytes(weights, x);
#endif
}

template <int WIDTH>
OCTAVO_INLINE void accumulate(Nibbles, Shorts (&sums)[WIDTH], const Words (&weights)[WIDTH],
                              Words x) {
#pragma GCC unroll 16
  for (int n = 0; n < WIDTH; ++n) add_products(sums[n], weights[n], x);
}

OCTAVO_INLINE Floats total(Shorts sums) { return to_floats(add_pairs(sums)); }

// Each of two sums has its own inputs: 8 · 32 · 127 < 2^15.
OCTAVO_INLINE std::uint32_t start_of(const Quad& sums, int zero) {
  return static_cast<std::uint32_t>(-zero * (sums[0] + sums[1]) & 0xffff) |
         static_cast<std::uint32_t>(-zero * (sums[2] + sums[3])) << 16;
}

#else

struct Bytes {
  using Sums = Floats;
  using Inputs = Floats;
  static constexpr int LINES = 8, PARTS = 4;
  static constexpr Index X_BYTES = 4 * DEPTH;
};

struct Nibbles {
  using Sums = Floats;
  using Inputs = Floats;
  static constexpr int LINES = 4, PARTS = 8;
  static constexpr Index X_BYTES = 4 * DEPTH;
};

OCTAVO_INLINE Floats part_of(Bytes, const void* line, int part) {
  return to_floats((Ints)(load_words(line) << (24 - 8 * part)) >> 24);
}

OCTAVO_INLINE Floats part_of(Nibbles, const void* line, int part) {
  return to_floats((Ints)(halves_of(line, part / 4) >> part % 4 * 8 & 15u));
}

OCTAVO_INLINE Floats inputs_of(Bytes, const unsigned char* x, int line, int part) {
  return as_floats(splat_from(x + 16 * line + 4 * part));
}

OCTAVO_INLINE Floats inputs_of(Nibbles, const unsigned char* x, int line, int part) {
  return as_floats(splat_from(x + part / 4 * 64 + 16 * line + part % 4 * 4));
}

template <typename Products>
OCTAVO_INLINE int lay_out(Products, const Group& integers, int zero, unsigned char* to) {
  for (int i = 0; i < GROUP_VECTORS; ++i) {
    store(reinterpret_cast<float*>(to) + i * LANES, to_floats(integers[i]));
  }
  return __builtin_bit_cast(int, static_cast<float>(-zero * sum_of(integers)));
}

template <typename Products, int WIDTH>
OCTAVO_INLINE void accumulate(Products, Floats (&sums)[WIDTH], const Floats (&weights)[WIDTH],
                              Floats x) {
  for (int n = 0; n < WIDTH; ++n) sums[n] += weights[n] * x;
}

struct Sixes {
  using Sums = Floats;
  static constexpr Index HALF_BYTES = 4 + 4 * DEPTH / 2, X_BYTES = 2 * HALF_BYTES;
};

OCTAVO_INLINE int lay_out(Sixes, const Group& integers, int zero, unsigned char* to) {
  for (int half = 0; half < 2; ++half, to += Sixes::HALF_BYTES) {
    float* const floats = reinterpret_cast<float*>(to);
    floats[0] = 0.0f;
    for (int i = 0; i < GROUP_VECTORS / 2; ++i) {
      const Floats values = to_floats(integers[half * GROUP_VECTORS / 2 + i]);
      store(floats + 1 + i * LANES, values);
      floats[0] -= static_cast<float>(zero) * sum(values);
    }
  }
  return 0;
}

OCTAVO_INLINE Floats start_of(Sixes, const unsigned char* x) { return as_floats(splat_from(x)); }

template <int WIDTH>
OCTAVO_INLINE void accumulate(Sixes, Floats (&sums)[WIDTH], const Words (&weights)[WIDTH],
                              const unsigned char* x, int quad) {
  for (int byte = 0; byte < 4; ++byte) {
    const Floats inputs = as_floats(splat_from(x + 4 + 16 * quad + 4 * byte));
    for (int n = 0; n < WIDTH; ++n) {
      sums[n] += to_floats((Ints)(weights[n] >> 8 * byte & 255u)) * inputs;
    }
  }
}

#endif

#if OCTAVO_LANES >= 8

// Of each half of a group the word that its sums start from, then its inputs.
struct Sixes {
  using Sums = Nibbles::Sums;
  static constexpr Index HALF_BYTES = 4 + DEPTH / 2, X_BYTES = 2 * HALF_BYTES;
};

OCTAVO_INLINE int lay_out(Sixes, const Group& integers, int zero, unsigned char* to) {
  Byte bytes[DEPTH];
  narrow(integers, bytes);
  for (int half = 0; half < 2; ++half, to += Sixes::HALF_BYTES) {
    Ints all = {};
    for (int i = 0; i < GROUP_VECTORS / 2; ++i) all += integers[half * GROUP_VECTORS / 2 + i];
    Quad quads[LANES / 4];
    __builtin_memcpy(quads, &all, sizeof all);
    for (int i = 1; i < LANES / 4; ++i) quads[0] += quads[i];
    const std::uint32_t start = start_of(quads[0], zero);
    __builtin_memcpy(to, &start, sizeof start);
    __builtin_memcpy(to + sizeof start, bytes + half * DEPTH / 2, DEPTH / 2);
  }
  return 0;
}

OCTAVO_INLINE Sixes::Sums start_of(Sixes, const unsigned char* x) {
  return (Sixes::Sums)splat_from(x);
}

template <int WIDTH>
OCTAVO_INLINE void accumulate(Sixes, Sixes::Sums (&sums)[WIDTH], const Words (&weights)[WIDTH],
                              const unsigned char* x, int quad) {
  const Words inputs = splat_from(x + 4 + 4 * quad);
#pragma GCC unroll 16
  for (int n = 0; n < WIDTH; ++n) add_products(sums[n], weights[n], inputs);
}

OCTAVO_INLINE Words part_of(Nibbles, const void* line, int part) { return halves_of(line, part); }

OCTAVO_INLINE Words inputs_of(Nibbles, const unsigned char* x, int line, int part) {
  return splat_from(x + 16 * part + 4 * line);
}

#endif

}  // namespace octavo::OCTAVO_SET
