// Decodes what checkpoints hold. Products and sums are rounded one by one, as numpy rounds them, so
// that the bits are those of the formulas in `octavo.ops.encodings`.
//
// Source: ggml's block structures (github.com/ggml-org/ggml, src/ggml-common.h).
#include "octavo/encoded.h"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace octavo {

namespace {

using Bytes = const unsigned char* __restrict;

std::uint16_t half_bits(Bytes at) {
  std::uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return bits;
}

float as_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A float16. The exponent moves by 127 - 15 as a product, so that subnormal numbers come out right;
// the exponent of infinity and NaN becomes that of float32.
float half(Bytes at) {
  const std::uint32_t bits = half_bits(at);
  const std::uint32_t magnitude = (bits & 0x7fffu) << 13;
  const std::uint32_t special = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  std::uint32_t scaled;
  const float value = as_float(magnitude) * 0x1p112f;
  std::memcpy(&scaled, &value, sizeof scaled);
  return as_float(scaled | special | (bits & 0x8000u) << 16);
}

void decode_f32(Bytes from, float* to) { std::memcpy(to, from, sizeof *to); }
void decode_f16(Bytes from, float* to) { *to = half(from); }

using Small = signed char;

// Four bits of q in each half of `count` bytes, all lower ones first; less `zero`.
template <int count>
void nibbles(Bytes packed, int zero, Small* __restrict q) {
  for (int i = 0; i < count; ++i) q[i] = static_cast<Small>((packed[i] & 15) - zero);
  for (int i = 0; i < count; ++i) q[count + i] = static_cast<Small>((packed[i] >> 4) - zero);
}

template <int count>
void scaled(const Small* __restrict q, float d, float* __restrict to) {
  for (int i = 0; i < count; ++i) to[i] = static_cast<float>(q[i]) * d;
}

template <int count>
void scaled(const Small* __restrict q, float d, float m, float* __restrict to) {
  for (int i = 0; i < count; ++i) to[i] = static_cast<float>(q[i]) * d + m;
}

void decode_q4_0(Bytes from, float* to) {
  Small q[32];
  nibbles<16>(from + 2, 8, q);
  scaled<32>(q, half(from), to);
}

void decode_q4_1(Bytes from, float* to) {
  Small q[32];
  nibbles<16>(from + 4, 0, q);
  scaled<32>(q, half(from), half(from + 2), to);
}

// Adds 16 to q[i] if bit i of four bytes is set.
void fifth_bits(Bytes packed, Small* __restrict q) {
  unsigned char spread[32];
  for (int i = 0; i < 4; ++i) {
    const std::uint64_t bits = packed[i] * 0x0101010101010101u & 0x8040201008040201u;
    std::memcpy(spread + 8 * i, &bits, sizeof bits);
  }
  for (int i = 0; i < 32; ++i) q[i] = static_cast<Small>(q[i] + (spread[i] != 0 ? 16 : 0));
}

void decode_q5_0(Bytes from, float* to) {
  Small q[32];
  nibbles<16>(from + 6, 16, q);
  fifth_bits(from + 2, q);
  scaled<32>(q, half(from), to);
}

void decode_q5_1(Bytes from, float* to) {
  Small q[32];
  nibbles<16>(from + 8, 0, q);
  fifth_bits(from + 4, q);
  scaled<32>(q, half(from), half(from + 2), to);
}

void decode_q8_0(Bytes from, float* to) {
  Small q[32];
  std::memcpy(q, from + 2, sizeof q);
  scaled<32>(q, half(from), to);
}

// Sub-block s of a Q4_K or Q5_K block, which starts with d, m, and six-bit scales and minimums.
void scaled_k(Bytes block, int s, const Small* __restrict q, float* __restrict to) {
  const Bytes packed = block + 4;
  const int scale = s < 4 ? packed[s] & 63 : (packed[s + 4] & 15) | (packed[s - 4] >> 2 & 48);
  const int minimum = s < 4 ? packed[s + 4] & 63 : packed[s + 4] >> 4 | (packed[s] >> 2 & 48);
  const float d = static_cast<float>(scale) * half(block);
  const float m = static_cast<float>(minimum) * half(block + 2);
  scaled<32>(q, d, -m, to);
}

void decode_q4_k(Bytes from, float* to) {
  for (int s = 0; s < 8; s += 2) {
    Small q[64];
    nibbles<32>(from + 16 + 16 * s, 0, q);
    scaled_k(from, s, q, to + 32 * s);
    scaled_k(from, s + 1, q + 32, to + 32 * (s + 1));
  }
}

// Adds bits `shift` … of 32 bytes, those of `mask`, above the four bits of q.
void top_bits(Bytes high, int shift, int mask, Small* __restrict q) {
  for (int i = 0; i < 32; ++i) q[i] = static_cast<Small>(q[i] + ((high[i] >> shift & mask) << 4));
}

void decode_q5_k(Bytes from, float* to) {
  for (int s = 0; s < 8; s += 2) {
    Small q[64];
    nibbles<32>(from + 48 + 16 * s, 0, q);
    for (int i = 0; i < 2; ++i) {
      top_bits(from + 16, s + i, 1, q + 32 * i);
      scaled_k(from, s + i, q + 32 * i, to + 32 * (s + i));
    }
  }
}

// Two halves of 128: 64 bytes of low nibbles and 32 bytes of two-bit tops, for four runs of 32.
void decode_q6_k(Bytes from, float* to) {
  const float d = half(from + 208);
  for (int h = 0; h < 2; ++h) {
    Small q[128];
    nibbles<64>(from + 64 * h, 32, q);
    for (int run = 0; run < 4; ++run) top_bits(from + 128 + 32 * h, 2 * run, 3, q + 32 * run);
    for (int s = 0; s < 8; ++s) {
      const int scale = static_cast<Small>(from[192 + 8 * h + s]);
      scaled<16>(q + 16 * s, static_cast<float>(scale) * d, to + 128 * h + 16 * s);
    }
  }
}

template <void (*decode)(Bytes, float*)>
void decode_all(Bytes from, Index blocks, BlockShape shape, float* to) {
  for (Index i = 0; i < blocks; ++i) decode(from + i * shape.bytes, to + i * shape.elements);
}

struct Format {
  BlockShape shape;
  void (*decode)(Bytes from, Index blocks, BlockShape shape, float* to);
};

constexpr Format FORMATS[KINDS] = {
    {{1, 4}, decode_all<decode_f32>},
    {{1, 2}, decode_all<decode_f16>},
    {{1, 2}, nullptr},
    {{32, 18}, decode_all<decode_q4_0>},
    {{32, 20}, decode_all<decode_q4_1>},
    {{32, 22}, decode_all<decode_q5_0>},
    {{32, 24}, decode_all<decode_q5_1>},
    {{32, 34}, decode_all<decode_q8_0>},
    {{256, 144}, decode_all<decode_q4_k>},
    {{256, 176}, decode_all<decode_q5_k>},
    {{256, 210}, decode_all<decode_q6_k>},
};

// The bits of the largest float32 that a finite bfloat16 is nearest to.
constexpr std::int32_t LARGEST = 0x7f7f7fff;

bool round_all(const float* from, Index count, std::uint16_t* to) {
  std::int32_t beyond = 0;
  Index i = 0;
#if defined(__SSE2__)
  // gcc 12 narrows with shuffles where one instruction does.
  __m128i found = _mm_setzero_si128();
  const auto rounded = [&](Index at) {
    const __m128i bits = _mm_castps_si128(_mm_loadu_ps(from + at));
    const __m128i magnitude = _mm_and_si128(bits, _mm_set1_epi32(0x7fffffff));
    found = _mm_or_si128(found, _mm_cmpgt_epi32(magnitude, _mm_set1_epi32(LARGEST)));
    const __m128i odd = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
    const __m128i sum = _mm_add_epi32(bits, _mm_add_epi32(odd, _mm_set1_epi32(0x7fff)));
    return _mm_srai_epi32(sum, 16);
  };
  for (; i + 8 <= count; i += 8) {
    const __m128i low = rounded(i), high = rounded(i + 4);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm_packs_epi32(low, high));
  }
  beyond = _mm_movemask_epi8(found);
#endif
  for (; i < count; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, from + i, sizeof bits);
    beyond |= static_cast<std::int32_t>(bits & 0x7fffffffu) > LARGEST;
    to[i] = static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
  return beyond == 0;
}

bool all_finite(const std::uint16_t* values, Index count) {
  std::uint32_t found = 0;
  for (Index i = 0; i < count; ++i) found |= (values[i] & 0x7f80u) + 0x80u;
  return (found & 0x8000u) == 0;
}

}  // namespace

BlockShape block_shape(Kind kind) { return FORMATS[static_cast<int>(kind)].shape; }

bool read_bf16(Kind kind, Bytes row, Index first, Index count, std::uint16_t* out) {
  const Format& format = FORMATS[static_cast<int>(kind)];
  const BlockShape shape = format.shape;
  const Bytes from = row + first / shape.elements * shape.bytes;
  if (kind == Kind::bf16) {
    std::memcpy(out, from, static_cast<std::size_t>(count) * sizeof *out);
    return all_finite(out, count);
  }
  float floats[STRETCH];
  format.decode(from, count / shape.elements, shape, floats);
  return round_all(floats, count, out);
}

}  // namespace octavo
