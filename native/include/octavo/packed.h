// Weight matrices in the order in which kernels stream them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "octavo/pool.h"

namespace octavo {

using Bf16 = std::uint16_t;  // the upper half of a float32

constexpr Index PANEL = 16;  // columns of the product in one panel
constexpr Index DEPTH = 32;  // inputs to whose multiple K is padded: one step of the matrix unit

// A matrix [N, K] as panels of 16 rows of it, `[ceil(N / 16)][K / 2][16][2]`, zero padded:
//
//   panel p, pair j:   w[16p][2j] w[16p][2j+1] │ w[16p+1][2j] w[16p+1][2j+1] │ … │ w[16p+15] …
//
// 64 bytes, a vector of pairs as bfloat16 dot products want them. A gated pair [F, K], [F, K] has
// panel 2p of the gate beside panel 2p+1 of the up matrix, so that one piece computes both.
struct PackedView {
  const Bf16* panels;
  Index rows;     // N; 2F for a gated pair
  Index columns;  // K
  bool gated;
};

// Plain products and sums, not functions: a header that kernels include must leave no shared
// inline code behind.
#define OCTAVO_PADDED(size, step) (((size) + (step) - 1) / (step) * (step))

// Owns one zeroed buffer, aligned to a cache line; large ones to 2 MiB, in huge pages if offered.
class Packed {
 public:
  Packed(Index rows, Index columns, bool gated);
  ~Packed();
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;

  PackedView view() const { return {panels_, rows_, columns_, gated_}; }
  std::size_t bytes() const { return bytes_; }

  // Copies matrix [rows, K] to rows first … first + rows - 1, or back. For a gated pair, rows are
  // those of the gate, then those of the up matrix.
  void write(const Bf16* matrix, Index first, Index rows, Pool& pool);
  void read(Bf16* matrix, Pool& pool) const;

 private:
  Bf16* panels_;
  Index rows_;
  Index columns_;
  bool gated_;
  std::size_t bytes_;
};

}  // namespace octavo
