// Decodes what checkpoints hold. Products and sums are rounded one by one, as numpy rounds them, so
// that the bits are those of the formulas in `octavo.ops.encodings`.
//
// Source: ggml's block structures (github.com/ggml-org/ggml, src/ggml-common.h).
#include "octavo/encoded.h"

#include <algorithm>
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

std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// A float16. The exponent moves by 127 - 15 as a product, so that subnormal numbers come out right;
// the exponent of infinity and NaN becomes that of float32.
float half(Bytes at) {
  const std::uint32_t bits = half_bits(at);
  const std::uint32_t magnitude = (bits & 0x7fffu) << 13;
  const std::uint32_t special = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  const std::uint32_t scaled = bits_of(as_float(magnitude) * 0x1p112f);
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

// Of sub-block s of a Q4_K or Q5_K block, which starts with d, m, and six-bit scales and minimums.
struct Multiples {
  int scale;
  int minimum;
};

Multiples multiples_k(Bytes block, int s) {
  const Bytes packed = block + 4;
  return {
      s < 4 ? packed[s] & 63 : (packed[s + 4] & 15) | (packed[s - 4] >> 2 & 48),
      s < 4 ? packed[s + 4] & 63 : packed[s + 4] >> 4 | (packed[s] >> 2 & 48),
  };
}

void scaled_k(Bytes block, int s, const Small* __restrict q, float* __restrict to) {
  const Multiples of = multiples_k(block, s);
  const float minimum = static_cast<float>(of.minimum) * -half(block + 2);
  scaled<32>(q, static_cast<float>(of.scale) * half(block), minimum, to);
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
    const std::uint32_t bits = bits_of(from[i]);
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

bool finite(Half factor) { return (factor & 0x7c00u) != 0x7c00u; }

// Rounded to the nearest float16, ties to even.
Half to_half(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  std::uint32_t rounded;
  if (magnitude > 0x7f800000u) {
    rounded = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // 65520 and more
    rounded = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {
    rounded = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
  } else {  // steps of 2^-24; the sum rounds to an integer
    rounded = bits_of(as_float(magnitude) * 0x1p24f + 0x1p23f) & 0x7fffu;
  }
  return static_cast<Half>(sign | rounded);
}

float half_value(Half bits) { return half(reinterpret_cast<const unsigned char*>(&bits)); }

constexpr int GROUP = static_cast<int>(DEPTH);

// Numbers below 16 as 16 bytes: input j beside input 16 + j.
void join_nibbles(const unsigned char* __restrict q, unsigned char* __restrict to) {
  for (int j = 0; j < 16; ++j) to[j] = static_cast<unsigned char>(q[j] | q[16 + j] << 4);
}

// Numbers below 64 as 24 bytes: of each half of a group, inputs 4i … 4i + 3 in the low six bits of
// word i, and bits 2i and 2i + 1 of inputs 12 … 15 above them.
void join_sixes(const unsigned char* __restrict q, unsigned char* __restrict to) {
  for (int half = 0; half < 2; ++half, to += 12) {
    std::uint32_t quads[4];
    std::memcpy(quads, q + 16 * half, sizeof quads);
    for (int i = 0; i < 3; ++i) quads[i] |= (quads[3] >> 2 * i & 0x03030303u) << 6;
    std::memcpy(to, quads, 12);
  }
}

// One group as it is stored: d · s · q, or d · s · q + m · t.
struct StoredGroup {
  Small q[GROUP];
  Half scale;
  Half offset;
  Small multiples[2];  // s of each half, or s and t
};

// Sub-block s of a Q4_K or Q5_K block.
void affine_group(Bytes block, int s, Bytes packed, StoredGroup* to) {
  const Multiples of = multiples_k(block, s);
  for (int i = 0; i < GROUP; ++i) to->q[i] = static_cast<Small>(packed[i] >> s % 2 * 4 & 15);
  to->scale = half_bits(block);
  to->offset = half_bits(block + 2) ^ 0x8000u;
  to->multiples[0] = static_cast<Small>(of.scale);
  to->multiples[1] = static_cast<Small>(of.minimum);
}

void stored_k(Kind kind, Bytes row, Index group, StoredGroup* to) {
  const Bytes block = row + group / 8 * block_shape(kind).bytes;
  const int s = static_cast<int>(group % 8);
  if (kind == Kind::q4_k) return affine_group(block, s, block + 16 + s / 2 * 32, to);
  if (kind == Kind::q5_k) {
    affine_group(block, s, block + 48 + s / 2 * 32, to);
    return top_bits(block + 16, s, 1, to->q);
  }
  const int half = s / 4, run = s % 4;
  const Bytes packed = block + 64 * half + run % 2 * 32;
  for (int i = 0; i < GROUP; ++i) {
    to->q[i] = static_cast<Small>((packed[i] >> run / 2 * 4 & 15) - 32);
  }
  top_bits(block + 128 + 32 * half, 2 * run, 3, to->q);
  to->scale = half_bits(block + 208);
  std::memcpy(to->multiples, block + 192 + 2 * s, 2);
}

StoredGroup stored_group(Kind kind, Bytes row, Index group) {
  StoredGroup to{};
  if (block_shape(kind).elements > GROUP) {
    stored_k(kind, row, group, &to);
    return to;
  }
  const Bytes block = row + group * block_shape(kind).bytes;
  to.scale = half_bits(block);
  to.multiples[0] = to.multiples[1] = 1;
  switch (kind) {
    case Kind::q8_0:
      std::memcpy(to.q, block + 2, GROUP);
      break;
    case Kind::q5_0:
      nibbles<16>(block + 6, 16, to.q);
      fifth_bits(block + 2, to.q);
      break;
    case Kind::q5_1:
      to.offset = half_bits(block + 2);
      nibbles<16>(block + 8, 0, to.q);
      fifth_bits(block + 4, to.q);
      break;
    case Kind::q4_1:
      to.offset = half_bits(block + 2);
      nibbles<16>(block + 4, 0, to.q);
      break;
    default:  // q4_0
      nibbles<16>(block + 2, 8, to.q);
  }
  return to;
}

Half product(Half factor, Small multiple) {
  return multiple == 1 ? factor : to_half(half_value(factor) * static_cast<float>(multiple));
}

// Four and eight bits have no multiples: scales and offsets are the products.
Factors kept_group(Kind kind, Encoding encoding, Bytes row, Index group, unsigned char* values) {
  const StoredGroup from = stored_group(kind, row, group);
  if (encoding == Encoding::int8) {
    std::memcpy(values, from.q, GROUP);
    return {from.scale, 0, {}};
  }
  const bool sixes = has_multiples(encoding);
  const int zero = sixes ? 32 : encoding == Encoding::int4 ? 8 : 0;
  unsigned char q[GROUP];
  for (int i = 0; i < GROUP; ++i) q[i] = static_cast<unsigned char>(from.q[i] + zero);
  if (sixes) {
    join_sixes(q, values);
    return {from.scale, from.offset, {from.multiples[0], from.multiples[1]}};
  }
  join_nibbles(q, values);
  return {product(from.scale, from.multiples[0]), product(from.offset, from.multiples[1]), {}};
}

// Whether integers of that kind are kept as they are.
bool keeps(Kind kind, Encoding encoding) {
  const auto is_any = [&](auto... kinds) { return ((kind == kinds) || ...); };
  switch (encoding) {
    case Encoding::int8:
      return is_any(Kind::q8_0, Kind::q5_0, Kind::q4_0);
    case Encoding::int6:
      return is_any(Kind::q6_k, Kind::q5_0, Kind::q4_0);
    case Encoding::int6_offset:
      return is_any(Kind::q5_k, Kind::q5_1, Kind::q5_0, Kind::q4_k, Kind::q4_1, Kind::q4_0);
    case Encoding::int4:
      return kind == Kind::q4_0;
    case Encoding::int4_offset:
      return is_any(Kind::q4_1, Kind::q4_k);
    default:
      return false;
  }
}

struct Extremes {
  float high;  // NaN if there is one
  float low;
};

#if defined(__SSE2__)
// Of four floats, the one that `pick` picks.
template <__m128 (*pick)(__m128, __m128)>
float across(__m128 v) {
  v = pick(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(pick(v, _mm_shuffle_ps(v, v, 1)));
}

__m128 greater(__m128 a, __m128 b) { return _mm_max_ps(a, b); }
__m128 lesser(__m128 a, __m128 b) { return _mm_min_ps(a, b); }

Extremes extremes(const float* x) {
  __m128 high = _mm_loadu_ps(x), low = high, strange = _mm_cmpunord_ps(high, high);
  for (int i = 4; i < GROUP; i += 4) {
    const __m128 v = _mm_loadu_ps(x + i);
    high = greater(high, v);
    low = lesser(low, v);
    strange = _mm_or_ps(strange, _mm_cmpunord_ps(v, v));
  }
  if (_mm_movemask_ps(strange) != 0) return {as_float(0x7fc00000u), 0.0f};
  return {across<greater>(high), across<lesser>(low)};
}

// x / scale rounded to nearest even, plus `zero`, kept within low … high.
void round_group(const float* x, float inverse, int zero, int low, int high, Small* to) {
  const __m128 factor = _mm_set1_ps(inverse);
  const auto rounded = [&](int i) {
    return _mm_cvtps_epi32(_mm_mul_ps(_mm_loadu_ps(x + i), factor));
  };
  const auto eight = [&](int i) {
    const __m128i q = _mm_packs_epi32(rounded(i), rounded(i + 4));
    const __m128i moved = _mm_add_epi16(q, _mm_set1_epi16(static_cast<short>(zero)));
    return _mm_max_epi16(_mm_min_epi16(moved, _mm_set1_epi16(static_cast<short>(high))),
                         _mm_set1_epi16(static_cast<short>(low)));
  };
  for (int i = 0; i < GROUP; i += 16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm_packs_epi16(eight(i), eight(i + 8)));
  }
}
#else
Extremes extremes(const float* x) {
  Extremes found{x[0], x[0]};
  for (int i = 0; i < GROUP; ++i) {
    if (x[i] != x[i]) return {x[i], 0.0f};
    found = {std::max(found.high, x[i]), std::min(found.low, x[i])};
  }
  return found;
}

void round_group(const float* x, float inverse, int zero, int low, int high, Small* to) {
  for (int i = 0; i < GROUP; ++i) {
    // 1.5 · 2^23: adding it rounds to an integer, in the low bits.
    const std::uint32_t sum = bits_of(x[i] * inverse + 12582912.0f);
    to[i] = static_cast<Small>(std::clamp(static_cast<int>(sum - 0x4b400000u) + zero, low, high));
  }
}
#endif

// max |w| / 127, rounded up.
Half scale8(Extremes of) {
  // The order matters where one is NaN.
  const float exact = (-of.low > of.high ? -of.low : of.high) / 127.0f + 0.0f;
  const Half rounded = to_half(exact);
  return static_cast<Half>(half_value(rounded) < exact ? rounded + 1 : rounded);
}

// w / -8 for the w of largest magnitude; 0 has no sign.
Half scale4(Extremes of) { return to_half((-of.low >= of.high ? of.low : of.high) / -8.0f + 0.0f); }

// Returns the scale.
Half rounded_group(const float* x, Encoding encoding, unsigned char* values) {
  const bool bytes = encoding == Encoding::int8;
  const Half scale = bytes ? scale8(extremes(x)) : scale4(extremes(x));
  const float wide = half_value(scale);
  const float inverse = wide != 0.0f && finite(scale) ? 1.0f / wide : 0.0f;
  Small q[GROUP];
  if (bytes) {
    round_group(x, inverse, 0, -127, 127, q);
    std::memcpy(values, q, sizeof q);
  } else {
    round_group(x, inverse, 8, 0, 15, q);
    join_nibbles(reinterpret_cast<const unsigned char*>(q), values);
  }
  return scale;
}

// `count` elements from the first of a block on.
void read_floats(Kind kind, Bytes from, Index count, float* to) {
  if (kind == Kind::bf16) {
    for (Index i = 0; i < count; ++i) {
      to[i] = as_float(static_cast<std::uint32_t>(half_bits(from + 2 * i)) << 16);
    }
    return;
  }
  const Format& format = FORMATS[static_cast<int>(kind)];
  format.decode(from, count / format.shape.elements, format.shape, to);
}

}  // namespace

BlockShape block_shape(Kind kind) { return FORMATS[static_cast<int>(kind)].shape; }

bool packs_as(Kind kind, Encoding encoding) {
  const bool stored = has_offsets(encoding) || has_multiples(encoding);
  return !stored || keeps(kind, encoding);
}

bool read_bf16(Kind kind, Bytes row, Index first, Index count, Bf16* out) {
  const BlockShape shape = block_shape(kind);
  const Bytes from = row + first / shape.elements * shape.bytes;
  if (kind == Kind::bf16) {
    std::memcpy(out, from, static_cast<std::size_t>(count) * sizeof *out);
    return all_finite(out, count);
  }
  float floats[STRETCH];
  read_floats(kind, from, count, floats);
  return round_all(floats, count, out);
}

bool read_integers(Kind kind, Encoding encoding, Bytes row, Index first, Index count,
                   unsigned char* values, Factors* factors) {
  const Index groups = (count + GROUP - 1) / GROUP;
  const bool kept = keeps(kind, encoding);
  const Index bytes = GROUP / 8 * bits_of(encoding);
  float floats[STRETCH];
  if (!kept) {
    const BlockShape shape = block_shape(kind);
    read_floats(kind, row + first / shape.elements * shape.bytes, count, floats);
    for (Index i = count; i < groups * GROUP; ++i) floats[i] = 0.0f;
  }
  bool sound = true;
  for (Index g = 0; g < groups; ++g) {
    unsigned char* const at = values + g * bytes;
    if (kept) {
      factors[g] = kept_group(kind, encoding, row, first / GROUP + g, at);
    } else {
      factors[g] = {rounded_group(floats + g * GROUP, encoding, at), 0, {}};
    }
    sound = sound && finite(factors[g].scale) && finite(factors[g].offset);
  }
  return sound;
}

}  // namespace octavo
