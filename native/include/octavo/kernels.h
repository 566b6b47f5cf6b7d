// What a kernel is given, and the table of kernels of one instruction set.
//
// Raw pointers only: no Python, no numpy. Arguments have been checked; a kernel checks nothing.
// Shapes are those of `octavo.ops.api`: T rows, K inputs, N outputs, D hidden size, V vocabulary.
#pragma once

#include <cstdint>

#include "octavo/packed.h"
#include "octavo/paging.h"
#include "octavo/pool.h"

namespace octavo {

enum class Gate : int { none = 0, silu = 1, gelu_tanh = 2 };

struct NormArgs {
  const float* weight;  // [D], or null: no norm
  float eps;
};

struct LinearArgs {
  const float* x;  // [T, K]
  Index rows;      // T
  PackedView weight;
  NormArgs norm;
  const float* bias;  // [N] or null
  bool add;
  Gate gate;
  float* out;  // [T, N], or [T, N / 2] when gated
  Index out_stride;
};

struct EmbedArgs {
  PackedView table;
  const std::int32_t* tokens;  // [T]
  Index rows;                  // T
  float* out;                  // [T, D]
};

struct RmsNormArgs {
  const float* x;  // [T, D]
  Index rows;
  Index width;
  NormArgs norm;
  float* out;  // [T, D], may be x
};

struct ArgmaxArgs {
  const float* logits;  // [R, V]
  Index rows;
  Index vocabulary;
  std::int32_t* out;  // [R]
  float* logprob;     // [R]
};

struct DrawArgs {
  const float* logits;  // [R, V]
  Index vocabulary;
  const std::int32_t* rows;     // [D] of logits
  Index draws;                  // D
  const float* temperature;     // [D], > 0
  const std::int32_t* top_k;    // [D], 0: off
  const double* top_p;          // [D]
  const float* min_p;           // [D]
  const double* point;          // [D], in [0, 1)
  const float* top_n_sigma;     // [D], 0: off
  const double* typical_p;      // [D], 1: off
  const double* xtc_threshold;  // [D], above 0.5: off
  std::int32_t* out;            // [D]
};

// Some tokens of each of E rows. Of entry n they are ids[start[n]] … ids[start[n + 1] - 1], each
// once; no row stands in two entries.
struct EntryArgs {
  float* logits;  // [R, V]
  Index vocabulary;
  const std::int32_t* rows;   // [E] of logits
  Index count;                // E
  const std::int32_t* start;  // [E + 1]
  const std::int32_t* ids;    // [N]
  float* before;              // [N], the logits that were there
};

struct BiasArgs {
  EntryArgs entries;
  const float* bias;  // [N]
};

struct PenaltyArgs {
  EntryArgs entries;
  const std::int32_t* counts;  // [N]
  const float* repetition;     // [E], > 0
  const float* presence;       // [E]
  const float* frequency;      // [E]
};

// Of row rows[n] only the tokens v may be drawn for which bit v % 32 of allowed[n][v / 32] is set.
struct MaskArgs {
  float* logits;  // [R, V]
  Index vocabulary;
  const std::int32_t* rows;     // [E] of logits, no row twice
  Index count;                  // E
  const std::int32_t* allowed;  // [E, words]
  Index words;                  // V / 32, rounded up
};

struct LikeliestArgs {
  const float* logits;  // [R, V]
  Index vocabulary;
  const std::int32_t* rows;  // [C] of logits
  Index chosen;              // C
  Index wanted;              // K, 1 to V
  std::int32_t* out_ids;     // [C, K]
  float* out_logits;         // [C, K]
};

// Loops that only multiply, or only read.
struct CeilingArgs {
  Encoding encoding;  // the products that are taken with such weights
  const unsigned char* operands;
  Index operand_bytes;
  Index rounds;  // of each piece
  Index pieces;
  float* out;  // [pieces], what keeps the compiler from leaving a loop out
};

struct Kernels {
  void (*embed)(const EmbedArgs&, Pool&);
  void (*linear)(const LinearArgs&, Pool&);
  void (*rms_norm)(const RmsNormArgs&, Pool&);
  void (*argmax)(const ArgmaxArgs&, Pool&);
  void (*likeliest)(const LikeliestArgs&, Pool&);
  void (*add_bias)(const BiasArgs&, Pool&);
  void (*penalise)(const PenaltyArgs&, Pool&);
  void (*mask)(const MaskArgs&, Pool&);
  void (*draw)(const DrawArgs&, Pool&);
  void (*rope_write_kv)(const RopeArgs&, Pool&);
  void (*paged_attention)(const AttentionArgs&, Pool&);
  double (*multiply)(const CeilingArgs&, Pool&);  // operations done; 0: there are no such products
  void (*read)(const CeilingArgs&, Pool&);
};

}  // namespace octavo
