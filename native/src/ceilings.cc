// What the machine can do at most in this instruction set: products and sums on registers, or tiles
// loaded and multiplied, and reading memory. Kernels are compared with it; nothing is computed.
#include "bf16_units.h"
#include "octavo/kernels.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

namespace {

// As many chains of sums as hide the latency of two units, and registers hold.
constexpr int CHAINS = LANES == 16 ? 14 : 10;

#if OCTAVO_TILES

constexpr Index BLOCK_BYTES = 32 * 64;  // two tiles of x, or two of weights

// Two tiles of x by two of weights, four loads for four products, along operands that the
// second-level cache holds.
void multiply_floats(const CeilingArgs& args, float* out) {
  const unsigned char* const end = args.operands + args.operand_bytes;
  const unsigned char* at = args.operands;
  open_tiles();
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
  for (Index round = 0; round < args.rounds; ++round) {
    load_tile<4>(at, 64);
    load_tile<6>(at + BLOCK_BYTES, 64);
    dot_tiles<0, 4, 6>();
    load_tile<5>(at + BLOCK_BYTES / 2, 64);
    dot_tiles<2, 5, 6>();
    load_tile<7>(at + BLOCK_BYTES + BLOCK_BYTES / 2, 64);
    dot_tiles<1, 4, 7>();
    dot_tiles<3, 5, 7>();
    at += 2 * BLOCK_BYTES;
    if (at + 2 * BLOCK_BYTES > end) at = args.operands;
  }
  alignas(64) float sums[16 * 16];
  store_tile<0>(sums, 64);
  *out = sums[0];
  store_tile<1>(sums, 64);
  *out += sums[0];
  store_tile<2>(sums, 64);
  *out += sums[0];
  store_tile<3>(sums, 64);
  *out += sums[0];
  close_tiles();
}

constexpr double FLOAT_OPERATIONS = 4.0 * 2 * 16 * 16 * 32;

#else

// Chains begin with different values, so that the compiler cannot make one of them.
void multiply_floats(const CeilingArgs& args, float* out) {
  Floats sums[CHAINS];
#pragma GCC unroll 16
  for (int i = 0; i < CHAINS; ++i) sums[i] = splat(static_cast<float>(i + 1));
#if OCTAVO_DOT
  const Words a = splat_word(0x3f803f80u), b = load_words(args.operands);
#else
  const Floats a = splat(0.9999999f), b = splat(1e-7f);
#endif
  for (Index round = 0; round < args.rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; ++i) {
#if OCTAVO_DOT
      sums[i] = dot_pairs(a, b, sums[i]);
#else
      sums[i] = fma(sums[i], a, b);
#endif
    }
  }
#pragma GCC unroll 16
  for (int i = 1; i < CHAINS; ++i) sums[0] += sums[i];
  *out = sum(sums[0]);
}

constexpr double FLOAT_OPERATIONS = 2.0 * (OCTAVO_DOT ? 2 : 1) * LANES * CHAINS;

#endif

// Products with integers as `linear` takes them: with tiles those of the bfloat16 that they are
// expanded to; else of bytes, sums of four in 32 bits each, or of two in 16 bits where weights have
// four bits and the set has no unit for the first.
#if OCTAVO_TILES

void multiply_bytes(const CeilingArgs& args, float* out) { multiply_floats(args, out); }
void multiply_nibbles(const CeilingArgs& args, float* out) { multiply_floats(args, out); }
constexpr double BYTE_OPERATIONS = FLOAT_OPERATIONS;

#elif (OCTAVO_VNNI || (OCTAVO_LANES >= 8 && OCTAVO_FMA)) && !OCTAVO_EMULATED

#if OCTAVO_LANES == 16
#define OCTAVO_VECTOR "v"
#define OCTAVO_XOR "vpxord"
#else
#define OCTAVO_VECTOR "x"
#define OCTAVO_XOR "vpxor"
#endif

void multiply_bytes(const CeilingArgs& args, float* out) {
  Words sums[CHAINS] = {};
  const Words a = load_words(args.operands);
  [[maybe_unused]] const Words ones = splat_word(0x00010001u);
  for (Index round = 0; round < args.rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; ++i) {
#if OCTAVO_VNNI
      __asm__ volatile("vpdpbusd %1, %1, %0" : "+" OCTAVO_VECTOR(sums[i]) : OCTAVO_VECTOR(a));
#else
      Words product;
      __asm__ volatile(OCTAVO_XOR
                       " %2, %2, %1\n\tvpmaddubsw %1, %2, %1\n\t"
                       "vpmaddwd %3, %1, %1\n\tvpaddd %1, %0, %0"
                       : "+" OCTAVO_VECTOR(sums[i]), "=&" OCTAVO_VECTOR(product)
                       : OCTAVO_VECTOR(a), OCTAVO_VECTOR(ones));
#endif
    }
  }
#pragma GCC unroll 16
  for (int i = 1; i < CHAINS; ++i) sums[0] += sums[i];
  *out = sum(as_floats(sums[0]));
}

void multiply_nibbles(const CeilingArgs& args, float* out) {
#if OCTAVO_VNNI
  multiply_bytes(args, out);
#else
  Words sums[CHAINS] = {};
  const Words a = load_words(args.operands);
  for (Index round = 0; round < args.rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; ++i) {
      Words product;
      __asm__ volatile("vpmaddubsw %2, %2, %1\n\tvpaddw %1, %0, %0"
                       : "+" OCTAVO_VECTOR(sums[i]), "=&" OCTAVO_VECTOR(product)
                       : OCTAVO_VECTOR(a));
    }
  }
#pragma GCC unroll 16
  for (int i = 1; i < CHAINS; ++i) sums[0] += sums[i];
  *out = sum(as_floats(sums[0]));
#endif
}

constexpr double BYTE_OPERATIONS = 2.0 * 4 * LANES * CHAINS;

#else

void multiply_bytes(const CeilingArgs&, float* out) { *out = 0.0f; }
void multiply_nibbles(const CeilingArgs&, float* out) { *out = 0.0f; }
constexpr double BYTE_OPERATIONS = 0.0;

#endif

void multiply_piece(void* state, Index piece, int) {
  const CeilingArgs& args = *static_cast<const CeilingArgs*>(state);
  float* const out = args.out + piece;
  if (args.encoding == Encoding::bf16) return multiply_floats(args, out);
  if (args.encoding == Encoding::int8) return multiply_bytes(args, out);
  return multiply_nibbles(args, out);
}

constexpr int STREAMS = 8;
constexpr Index LINE_BYTES = LANES * 4 * STREAMS;

// Adds up a share of the operands, cut at whole lines.
void read_piece(void* state, Index piece, int) {
  const CeilingArgs& args = *static_cast<const CeilingArgs*>(state);
  const Index lines = args.operand_bytes / LINE_BYTES;
  const Index first = lines * piece / args.pieces, last = lines * (piece + 1) / args.pieces;
  Floats sums[STREAMS] = {};
  for (Index line = first; line < last; ++line) {
    const float* const from = reinterpret_cast<const float*>(args.operands + line * LINE_BYTES);
#pragma GCC unroll 8
    for (int i = 0; i < STREAMS; ++i) sums[i] += load(from + i * LANES);
  }
  for (int i = 1; i < STREAMS; ++i) sums[0] += sums[i];
  args.out[piece] = sum(sums[0]);
}

}  // namespace

double multiply(const CeilingArgs& args, Pool& pool) {
  pool.run(args.pieces, multiply_piece, const_cast<CeilingArgs*>(&args));
  const double each = args.encoding == Encoding::bf16 ? FLOAT_OPERATIONS : BYTE_OPERATIONS;
  return each * static_cast<double>(args.rounds * args.pieces);
}

void read(const CeilingArgs& args, Pool& pool) {
  pool.run(args.pieces, read_piece, const_cast<CeilingArgs*>(&args));
}

}  // namespace octavo::OCTAVO_SET
