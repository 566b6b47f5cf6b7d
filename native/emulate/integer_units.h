// The products of bytes in plain C++, as the manual gives them.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, vol. 2: VPDPBUSD,
// VPMADDUBSW, VPMADDWD.
#pragma once

#include "../src/vector.h"

namespace octavo::OCTAVO_SET {

typedef std::int16_t EmulatedShorts __attribute__((vector_size(LANES * 4)));

// Byte number `byte` of a word, unsigned and signed.
OCTAVO_INLINE int unsigned_byte(std::uint32_t word, int byte) {
  return static_cast<std::uint8_t>(word >> 8 * byte);
}
OCTAVO_INLINE int signed_byte(std::uint32_t word, int byte) {
  return static_cast<std::int8_t>(word >> 8 * byte);
}

// Not inlined: a tile has hundreds of them, and compilers would take minutes over it.
#define OCTAVO_APART static inline __attribute__((noinline))

#if OCTAVO_VNNI

OCTAVO_APART Ints dot_quads(Words unsigned_bytes, Words signed_bytes, Ints sums) {
  for (int i = 0; i < LANES; ++i) {
    const std::uint32_t a = unsigned_bytes[i], b = signed_bytes[i];
    for (int byte = 0; byte < 4; ++byte) sums[i] += unsigned_byte(a, byte) * signed_byte(b, byte);
  }
  return sums;
}

#else

// The unit would saturate where this one stops: kernels are not to come there.
OCTAVO_APART EmulatedShorts dot_bytes(Words unsigned_bytes, Words signed_bytes) {
  EmulatedShorts sums;
  for (int i = 0; i < 2 * LANES; ++i) {
    const std::uint32_t a = unsigned_bytes[i / 2], b = signed_bytes[i / 2];
    const int low = i % 2 * 2;
    const int sum = unsigned_byte(a, low) * signed_byte(b, low) +
                    unsigned_byte(a, low + 1) * signed_byte(b, low + 1);
    if (sum < -32768 || sum > 32767) __builtin_trap();
    sums[i] = static_cast<std::int16_t>(sum);
  }
  return sums;
}

OCTAVO_APART Ints add_pairs(EmulatedShorts v) {
  Ints sums;
  for (int i = 0; i < LANES; ++i) sums[i] = v[2 * i] + v[2 * i + 1];
  return sums;
}

#endif

#undef OCTAVO_APART

}  // namespace octavo::OCTAVO_SET
