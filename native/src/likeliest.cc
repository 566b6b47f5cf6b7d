// The greatest logits of a row, in order: those that answers name beside the token drawn.
//
// A list of the greatest so far is kept sorted. After the first few hundred elements hardly any
// vector holds one that is greater than the last of the list, so that a row costs one reading of
// it.
#include "octavo/kernels.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

void likeliest(const LikeliestArgs& args, Pool& pool);

namespace {

// A list of `size` at most, sorted: the greatest first, of equals the lowest id.
struct Best {
  float* logits;
  std::int32_t* ids;
  Index size;
  Index held = 0;

  // An element takes its place after its equals: they come in ascending order of their ids.
  void take(float logit, std::int32_t id) {
    if (held == size && !(logit > logits[held - 1])) return;
    Index place = held < size ? held++ : size - 1;
    for (; place > 0 && logits[place - 1] < logit; --place) {
      logits[place] = logits[place - 1];
      ids[place] = ids[place - 1];
    }
    logits[place] = logit;
    ids[place] = id;
  }
};

bool any_above(Floats v, float least) {
  const Ints above = (Ints)(v > splat(least));
  std::int64_t words[LANES / 2], all = 0;
  __builtin_memcpy(words, &above, sizeof above);
  for (int i = 0; i < LANES / 2; ++i) all |= words[i];
  return all != 0;
}

void examine_row(void* state, Index n, int) {
  const LikeliestArgs& args = *static_cast<const LikeliestArgs*>(state);
  const float* const row = args.logits + args.rows[n] * args.vocabulary;
  Best best{args.out_logits + n * args.wanted, args.out_ids + n * args.wanted, args.wanted};
  Index i = 0;
  for (; i < args.wanted; ++i) best.take(row[i], static_cast<std::int32_t>(i));
  for (; i + LANES <= args.vocabulary; i += LANES) {
    if (!any_above(load(row + i), best.logits[args.wanted - 1])) continue;
    for (int lane = 0; lane < LANES; ++lane) {
      best.take(row[i + lane], static_cast<std::int32_t>(i + lane));
    }
  }
  for (; i < args.vocabulary; ++i) best.take(row[i], static_cast<std::int32_t>(i));
}

}  // namespace

void likeliest(const LikeliestArgs& args, Pool& pool) {
  LikeliestArgs state = args;
  pool.run(args.chosen, examine_row, &state);
}

}  // namespace octavo::OCTAVO_SET
