// Matrices as checkpoints encode them, on their way into panels.
#pragma once

#include "octavo/packed.h"

namespace octavo {

// How elements are stored; `octavo.ops.encodings` has the formulas, in the same order.
enum class Kind : int { f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k };
constexpr int KINDS = 11;

// `elements` of a row lie in `bytes` bytes. A row is whole blocks.
struct BlockShape {
  Index elements;
  Index bytes;
};

BlockShape block_shape(Kind kind);

// The rows of a matrix, back to back. No alignment is asked for.
struct EncodedRows {
  Kind kind;
  const unsigned char* bytes;
  Index row_bytes;
};

// Elements of a row that are read at a time; a multiple of every kind's block.
constexpr Index STRETCH = 256;

// Whether a matrix of that kind can be packed so. Six bits and offsets must be stored: they are not
// found.
bool packs_as(Kind kind, Encoding encoding);

// Elements first … first + count - 1 of a row; `first` is a multiple of STRETCH, `count` at most
// that. Returns whether all of them are finite; what becomes of others is not said.

// As bfloat16 rounded to nearest even.
bool read_bf16(Kind kind, const unsigned char* row, Index first, Index count, Bf16* out);

// What belongs to a group of a row beside its integers.
struct Factors {
  Half scale;
  Half offset;
  signed char multiples[2];
};

// As integers, padded with zeros to whole groups: their values as in `QuantisedRows`, and the
// factors of each group. Integers that are stored are kept if the encoding holds them.
bool read_integers(Kind kind, Encoding encoding, const unsigned char* row, Index first, Index count,
                   unsigned char* values, Factors* factors);

}  // namespace octavo
