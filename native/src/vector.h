// Vectors of one instruction set: the same source for every width.
//
// Included by kernel sources only, which are compiled once per set with OCTAVO_SET (the namespace),
// OCTAVO_LANES and OCTAVO_FMA. Everything is static and always inlined, so that no code of one set
// can be linked into another. Kernel sources use no standard library beyond <cstdint>.
//
// The order of every sum is written out: `fma` is fused where the set has it and is never left to
// the compiler; `sum` adds halves, always in the same order.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "octavo/pool.h"

#define OCTAVO_INLINE static inline __attribute__((always_inline))

namespace octavo::OCTAVO_SET {

constexpr int LANES = OCTAVO_LANES;

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef std::int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef std::uint32_t Words __attribute__((vector_size(LANES * 4)));

OCTAVO_INLINE Floats splat(float value) { return value - Floats{}; }
OCTAVO_INLINE Words splat_word(std::uint32_t value) { return value - Words{}; }

OCTAVO_INLINE Floats load(const float* from) {
  Floats v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

OCTAVO_INLINE Words load_words(const void* from) {
  Words v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

OCTAVO_INLINE void store(float* to, Floats v) { __builtin_memcpy(to, &v, sizeof v); }
OCTAVO_INLINE void store_words(void* to, Words v) { __builtin_memcpy(to, &v, sizeof v); }

// The first `count` < LANES floats; the other lanes are `rest`. Nothing beyond them is touched.
OCTAVO_INLINE Floats load_first(const float* from, Index count, float rest = 0.0f) {
  Floats v = splat(rest);
  for (Index i = 0; i < count; ++i) v[i] = from[i];
  return v;
}

OCTAVO_INLINE void store_first(float* to, Floats v, Index count) {
  for (Index i = 0; i < count; ++i) to[i] = v[i];
}

// a · b + c, rounded once where the set has FMA, else twice.
OCTAVO_INLINE float fma(float a, float b, float c) {
#if OCTAVO_FMA
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

OCTAVO_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if OCTAVO_FMA && OCTAVO_LANES == 8
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif OCTAVO_FMA && OCTAVO_LANES == 16 && !OCTAVO_EMULATED
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif OCTAVO_FMA && OCTAVO_LANES == 16
  union Halves {
    Floats whole;
    __m256 half[2];
  } x{a}, y{b}, z{c};
  z.half[0] = _mm256_fmadd_ps(x.half[0], y.half[0], z.half[0]);
  z.half[1] = _mm256_fmadd_ps(x.half[1], y.half[1], z.half[1]);
  return z.whole;
#else
  return a * b + c;
#endif
}

OCTAVO_INLINE Floats as_floats(Words v) { return (Floats)v; }
OCTAVO_INLINE Words as_words(Floats v) { return (Words)v; }

// Lane by lane `mask ? a : b`; a mask lane is all ones or all zeros, as comparisons give it.
OCTAVO_INLINE Floats select(Ints mask, Floats a, Floats b) { return mask ? a : b; }

// The greater of two; b where either is NaN.
OCTAVO_INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }
OCTAVO_INLINE Floats min(Floats a, Floats b) { return a < b ? a : b; }

// a · 2^n for whole n from -150 to 0; what is subnormal may be zero.
OCTAVO_INLINE Floats scale_by(Floats a, Floats n) {
#if OCTAVO_LANES == 16 && !OCTAVO_EMULATED
  return (Floats)_mm512_maskz_scalef_ps(0xffff, (__m512)a, (__m512)n);
#else
  const Words exponent = as_words(n + splat(12582912.0f + 127.0f)) << 23;
  return select(n < splat(-126.0f), splat(0.0f) * a, a * as_floats(exponent));
#endif
}

// Lane i with lane i + half, for the lower half of the lanes, until one is left.
template <typename Join>
OCTAVO_INLINE float join_lanes(Floats v, Join join) {
#if OCTAVO_LANES == 16
  v = join(v, __builtin_shuffle(v, Ints{8, 9, 10, 11, 12, 13, 14, 15}));
#endif
#if OCTAVO_LANES >= 8
  v = join(v, __builtin_shuffle(v, Ints{4, 5, 6, 7}));
#endif
  v = join(v, __builtin_shuffle(v, Ints{2, 3}));
  return join(v, __builtin_shuffle(v, Ints{1}))[0];
}

OCTAVO_INLINE float sum(Floats v) {
  return join_lanes(v, [](auto a, auto b) { return a + b; });
}

OCTAVO_INLINE float max(Floats v) {
  return join_lanes(v, [](auto a, auto b) { return a > b ? a : b; });
}

// Words that hold two bfloat16 each: the lower one (even index), the upper one (odd index).
OCTAVO_INLINE Floats lower_bf16(Words pairs) { return (Floats)(pairs << 16); }
OCTAVO_INLINE Floats upper_bf16(Words pairs) { return (Floats)(pairs & 0xffff0000u); }
// `upper_bf16` and `fma` for tiles of sums that leave no register free. Written out for sixteen
// registers, since gcc 12 by itself picks operand orders that cost a move, and keeps the mask in a
// register: with it three of twelve sums were spilled (65 GFLOP/s in place of 93).
#if OCTAVO_FMA && OCTAVO_LANES == 8

alignas(32) static const std::uint32_t UPPER_HALVES[LANES] = {0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                              0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                              0xffff0000u, 0xffff0000u};

OCTAVO_INLINE Floats upper_in_place(Words pairs) {
  Floats upper;
  __asm__("vpand %2, %1, %0"
          : "=x"(upper)
          : "x"(pairs), "m"(*reinterpret_cast<const Words*>(UPPER_HALVES)));
  return upper;
}

OCTAVO_INLINE void accumulate(Floats& sum, Floats a, Floats b) {
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
}

// sum += factor · a, next += factor · b. One block: gcc keeps twelve sums in registers then.
OCTAVO_INLINE void accumulate_two(Floats& sum, Floats& next, const float* factor, Floats a,
                                  Floats b) {
  Floats all;
  __asm__("vbroadcastss %3, %2\n\tvfmadd231ps %4, %2, %0\n\tvfmadd231ps %5, %2, %1"
          : "+x"(sum), "+x"(next), "=&x"(all)
          : "m"(*factor), "x"(a), "x"(b));
}

#else

OCTAVO_INLINE Floats upper_in_place(Words pairs) { return upper_bf16(pairs); }
OCTAVO_INLINE void accumulate(Floats& sum, Floats a, Floats b) { sum = fma(a, b, sum); }
OCTAVO_INLINE void accumulate_two(Floats& sum, Floats& next, const float* factor, Floats a,
                                  Floats b) {
  const Floats all = splat(*factor);
  sum = fma(all, a, sum);
  next = fma(all, b, next);
}

#endif

// sums[n] += *factor · columns[n]
template <int N>
OCTAVO_INLINE void multiply_row(const float* factor, const Floats (&columns)[N], Floats* sums) {
  if constexpr (N == 2) {
    accumulate_two(sums[0], sums[1], factor, columns[0], columns[1]);
  } else {
    const Floats all = splat(*factor);
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) accumulate(sums[n], all, columns[n]);
  }
}

OCTAVO_INLINE float widen(std::uint16_t value) {
  const std::uint32_t word = static_cast<std::uint32_t>(value) << 16;
  float widened;
  __builtin_memcpy(&widened, &word, sizeof widened);
  return widened;
}

// A float16 number; infinity and NaN are not expected. The exponent moves by 127 - 15: as a
// product, so that subnormal numbers come out right.
OCTAVO_INLINE float widen_half(std::uint16_t value) {
  const std::uint32_t bits = std::uint32_t{value & 0x7fffu} << 13;
  float magnitude;
  __builtin_memcpy(&magnitude, &bits, sizeof magnitude);
  return value >> 15 != 0 ? -(magnitude * 0x1p112f) : magnitude * 0x1p112f;
}

// LANES signed bytes.
OCTAVO_INLINE Floats widen_bytes(const void* from) {
#if OCTAVO_LANES == 8 && OCTAVO_FMA
  return (Floats)_mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from))));
#elif OCTAVO_LANES == 16 && !OCTAVO_EMULATED
  // With a mask: gcc 12 warns of the plain ones.
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(from));
  return (Floats)_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, bytes));
#else
  Floats widened;
  for (int i = 0; i < LANES; ++i) widened[i] = static_cast<const signed char*>(from)[i];
  return widened;
#endif
}

// LANES of them.
OCTAVO_INLINE Floats widen_halves(const std::uint16_t* from) {
#if OCTAVO_LANES == 8 && OCTAVO_FMA
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif OCTAVO_LANES == 16 && !OCTAVO_EMULATED
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Floats)_mm512_maskz_cvtph_ps(0xffff, halves);
#else
  Floats widened;
  for (int i = 0; i < LANES; ++i) widened[i] = widen_half(from[i]);
  return widened;
#endif
}

// Rounded to the nearest bfloat16, ties to even, in the lower half of each word. NaN stays NaN.
OCTAVO_INLINE Words round_bf16(Floats v) {
  const Words bits = (Words)v;
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Words quiet = (bits >> 16) | 0x40u;
  return (Words)(v == v ? (Ints)rounded : (Ints)quiet);
}

OCTAVO_INLINE std::uint16_t round_bf16(float value) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  if (value != value) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// e^x to about 1 ulp. Below -87.3 the result is 0, above 88.7 +inf; NaN stays NaN.
//
// x = n·ln 2 + r, |r| ≤ ln 2 / 2; e^r by its Taylor polynomial of degree 7 (next term 5e-9).
// Source: W. Cody & W. Waite 1980, Software Manual for the Elementary Functions, ch. 6.
OCTAVO_INLINE Floats exp(Floats x) {
  const Floats magic = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer
  const Floats low = splat(-87.33654f), high = splat(88.722839f);
  const Floats clamped = select(x < low, low, select(x > high, high, x));
  const Floats shifted = fma(clamped, splat(1.44269504f), magic);
  const Floats n = shifted - magic;
  Floats r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  Floats p = splat(1.9841270e-4f);
  p = fma(p, r, splat(1.3888889e-3f));
  p = fma(p, r, splat(8.3333333e-3f));
  p = fma(p, r, splat(4.1666667e-2f));
  p = fma(p, r, splat(1.6666667e-1f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r * r, r) + 1.0f;
  // 2^n in two factors: n reaches 128, one more than an exponent holds.
  const Words whole = as_words(shifted) - as_words(magic);
  const Words half = (Words)((Ints)whole >> 1);
  const Floats first = as_floats((half + 127u) << 23);
  const Floats second = as_floats((whole - half + 127u) << 23);
  const Floats power = p * first * second;
  return select(x < low, splat(0.0f), select(x > high, splat(__builtin_inff()), power));
}

}  // namespace octavo::OCTAVO_SET
