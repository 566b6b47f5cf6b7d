// What the machine can do at most: fused multiply-adds and products of bytes on registers, and
// reading memory.
// Compiled by linear.py for the machine at hand (-march=native), used through ctypes.
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int CHAINS = 10;

typedef float Floats __attribute__((vector_size(LANES * 4)));

}  // namespace

// Returns the floating-point operations done.
extern "C" double multiply_add(std::int64_t rounds) {
  Floats a = Floats{} + 1.0f, b = a, c = a, d = a, e = a, f = a, g = a, h = a, i = a, j = a;
  const Floats factor = Floats{} + 0.9999999f, term = Floats{} + 1e-7f;
  for (std::int64_t round = 0; round < rounds; ++round) {
    a = a * factor + term;
    b = b * factor + term;
    c = c * factor + term;
    d = d * factor + term;
    e = e * factor + term;
    f = f * factor + term;
    g = g * factor + term;
    h = h * factor + term;
    i = i * factor + term;
    j = j * factor + term;
    // Ten chains that the compiler may neither join nor drop.
    __asm__ volatile(""
                     : "+x"(a), "+x"(b), "+x"(c), "+x"(d), "+x"(e), "+x"(f), "+x"(g), "+x"(h),
                       "+x"(i), "+x"(j));
  }
  return 2.0 * LANES * CHAINS * static_cast<double>(rounds);
}

// Products of bytes as `linear` takes them with weights of eight bits and of four: sums of four
// products in 32 bits each, and sums of two in 16 bits where the set has no unit for the first.
// Return the operations done, 0 where the set has no such products.
#if defined(__AVX512VNNI__)

extern "C" double multiply_bytes(std::int64_t rounds) {
  __m512i sums[CHAINS] = {};
  __m512i a = _mm512_set1_epi8(1), b = a;
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; ++i) {
      __asm__ volatile("vpdpbusd %1, %2, %0" : "+v"(sums[i]) : "v"(a), "v"(b));
    }
  }
  return 2.0 * 64 * CHAINS * static_cast<double>(rounds);
}

extern "C" double multiply_nibbles(std::int64_t rounds) { return multiply_bytes(rounds); }

#elif defined(__AVX2__)

extern "C" double multiply_bytes(std::int64_t rounds) {
  __m256i sums[CHAINS] = {};
  const __m256i a = _mm256_set1_epi8(1), ones = _mm256_set1_epi16(1);
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; ++i) {
      __m256i product;
      __asm__ volatile(
          "vpxor %2, %2, %1\n\tvpmaddubsw %1, %2, %1\n\tvpmaddwd %3, %1, %1\n\tvpaddd %1, %0, %0"
          : "+x"(sums[i]), "=&x"(product)
          : "x"(a), "x"(ones));
    }
  }
  return 2.0 * 32 * CHAINS * static_cast<double>(rounds);
}

extern "C" double multiply_nibbles(std::int64_t rounds) {
  __m256i sums[CHAINS] = {};
  const __m256i a = _mm256_set1_epi8(1);
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; ++i) {
      __m256i product;
      __asm__ volatile("vpmaddubsw %2, %2, %1\n\tvpaddw %1, %0, %0"
                       : "+x"(sums[i]), "=&x"(product)
                       : "x"(a));
    }
  }
  return 2.0 * 32 * CHAINS * static_cast<double>(rounds);
}

#else

extern "C" double multiply_bytes(std::int64_t) { return 0.0; }
extern "C" double multiply_nibbles(std::int64_t) { return 0.0; }

#endif

// Adds up `count` floats, a multiple of 128.
extern "C" float read_floats(const float* values, std::int64_t count) {
  Floats sums[8] = {};
  for (std::int64_t i = 0; i < count; i += 8 * LANES) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      Floats v;
      __builtin_memcpy(&v, values + i + j * LANES, sizeof v);
      sums[j] += v;
    }
  }
  float total = 0.0f;
  for (const Floats& sum : sums) {
    for (int lane = 0; lane < LANES; ++lane) total += sum[lane];
  }
  return total;
}
