// Weight matrices in the order in which kernels stream them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "octavo/pool.h"

namespace octavo {

using Bf16 = std::uint16_t;  // the upper half of a float32
using Half = std::uint16_t;  // a float16

constexpr Index PANEL = 16;  // columns of the product in one panel
constexpr Index DEPTH = 32;  // inputs to whose multiple K is padded; those that share a scale

// What an element is. d and m are float16, one for each row and group of DEPTH inputs; s and t
// small integers, -128 … 127.
enum class Encoding : int {
  bf16 = 0,
  int8 = 1,         // d · q            −128 ≤ q ≤ 127
  int4 = 2,         // d · (q − 8)      0 ≤ q ≤ 15
  int4_offset = 3,  // d · q + m        0 ≤ q ≤ 15
  int6 = 4,         // d · s · (q − 32)           0 ≤ q ≤ 63; each half of a group has its s
  int6_offset = 5,  // d · s · (q − 32) + m · t   one s and one t for a group
};

int bits_of(Encoding encoding);  // of an element
bool has_offsets(Encoding encoding);
bool has_multiples(Encoding encoding);

// A matrix [N, K] as panels of 16 rows of it, zero padded. Of bfloat16 `[ceil(N / 16)][K /
// 2][16][2]`:
//
//   panel p, pair j:   w[16p][2j] w[16p][2j+1] │ w[16p+1][2j] w[16p+1][2j+1] │ … │ w[16p+15] …
//
// 64 bytes, a vector of pairs as bfloat16 dot products want them. Of integers a panel is the
// integers of all groups, then the factors of all groups:
//
//   int8   [K / 32][8][16][4]   row i of a group holds inputs 4i … 4i+3, as byte products want them
//   int4   [K / 32][4][16][4]   the same in the low halves of bytes; inputs 16+4i … in the high
//   ones int6   [K / 16][3][16][4]   the same in the low six bits of bytes; row i has bits 2i and
//   2i+1 of
//                               inputs 12 … 15 above them
//
//   factors [K / 32]([16] d, then [16] m if there are offsets, then of int6 [2][16] s, or s and t)
//
// A gated pair [F, K], [F, K] has panel 2p of the gate beside panel 2p+1 of the up matrix, so that
// one piece computes both.
struct PackedView {
  const unsigned char* panels;
  Index panel_bytes;   // from a panel to the next
  Index factors_at;    // bytes from the start of a panel to its factors
  Index group_bytes;   // of DEPTH inputs of a panel
  Index factor_bytes;  // of a group of a panel
  Encoding encoding;
  Index rows;     // N; 2F for a gated pair
  Index columns;  // K
  bool gated;
};

// Rows of a matrix of integers: `values` one byte for each input, or for inputs j and 16 + j of a
// group (byte j), or three bytes for four inputs as they lie in a panel; K is padded to whole
// groups. `offsets` and `multiples`, two for each group, are null unless the encoding has them.
struct QuantisedRows {
  const unsigned char* values;
  const Half* scales;
  const Half* offsets;
  const signed char* multiples;
};

struct EncodedRows;  // of encoded.h

// Plain products and sums, not functions: a header that kernels include must leave no shared
// inline code behind.
#define OCTAVO_PADDED(size, step) (((size) + (step) - 1) / (step) * (step))

class Arena;

// A matrix in an arena's memory; zeros until it is written.
class Packed {
 public:
  Packed(Index rows, Index columns, bool gated, Encoding encoding, Arena& arena);
  ~Packed();
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;

  const PackedView& view() const { return view_; }
  std::size_t bytes() const { return bytes_; }

  // Puts a matrix [rows, K] in rows first … first + rows - 1, or copies all of them back. For a
  // gated pair, rows are those of the gate, then those of the up matrix. Encoded rows are rounded
  // to bfloat16; returns whether all of them are finite then.
  bool write(const EncodedRows& matrix, Index first, Index rows, Pool& pool);
  void write(const QuantisedRows& matrix, Index first, Index rows, Pool& pool);
  void read(Bf16* matrix, Pool& pool) const;

 private:
  struct Memory;
  Memory* memory_;
  unsigned char* panels_;
  PackedView view_;
  std::size_t bytes_;
};

}  // namespace octavo
