// What requests add to, or take from, the logits of some tokens. A row has a few entries: only
// these are touched, however large the vocabulary, and what was there before is kept beside them.
// A mask goes over whole rows.
#include <algorithm>
#include <limits>

#include "octavo/kernels.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

void add_bias(const BiasArgs& args, Pool& pool);
void penalise(const PenaltyArgs& args, Pool& pool);
void mask(const MaskArgs& args, Pool& pool);

namespace {

float* row_of(const EntryArgs& args, Index n) {
  return args.logits + args.rows[n] * args.vocabulary;
}

void bias_row(void* state, Index n, int) {
  const BiasArgs& args = *static_cast<const BiasArgs*>(state);
  const EntryArgs& entries = args.entries;
  float* const logits = row_of(entries, n);
  for (Index i = entries.start[n]; i < entries.start[n + 1]; ++i) {
    float& logit = logits[entries.ids[i]];
    entries.before[i] = logit;
    logit += args.bias[i];
  }
}

void penalise_row(void* state, Index n, int) {
  const PenaltyArgs& args = *static_cast<const PenaltyArgs*>(state);
  const EntryArgs& entries = args.entries;
  float* const logits = row_of(entries, n);
  const float repetition = args.repetition[n];
  const float presence = args.presence[n], frequency = args.frequency[n];
  for (Index i = entries.start[n]; i < entries.start[n + 1]; ++i) {
    float& logit = logits[entries.ids[i]];
    entries.before[i] = logit;
    const float scaled = logit > 0.0f ? logit / repetition : logit * repetition;
    const std::int32_t count = args.counts[i];
    const float often = frequency * static_cast<float>(count);
    logit = scaled - often - (count > 0 ? presence : 0.0f);
  }
}

constexpr Index WORD = 32;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

void mask_row(void* state, Index n, int) {
  const MaskArgs& args = *static_cast<const MaskArgs*>(state);
  float* const logits = args.logits + args.rows[n] * args.vocabulary;
  const std::int32_t* const allowed = args.allowed + n * args.words;
  for (Index word = 0; word < args.words; ++word) {
    const std::uint32_t bits = static_cast<std::uint32_t>(allowed[word]);
    float* const first = logits + word * WORD;
    const Index count = std::min(WORD, args.vocabulary - word * WORD);
    if (bits == 0) {
      std::fill_n(first, count, NEVER);
    } else if (~bits != 0) {
      for (Index i = 0; i < count; ++i) first[i] = (bits >> i & 1u) != 0 ? first[i] : NEVER;
    }
  }
}

}  // namespace

void add_bias(const BiasArgs& args, Pool& pool) {
  BiasArgs state = args;
  pool.run(args.entries.count, bias_row, &state);
}

void penalise(const PenaltyArgs& args, Pool& pool) {
  PenaltyArgs state = args;
  pool.run(args.entries.count, penalise_row, &state);
}

void mask(const MaskArgs& args, Pool& pool) {
  MaskArgs state = args;
  pool.run(args.count, mask_row, &state);
}

}  // namespace octavo::OCTAVO_SET
