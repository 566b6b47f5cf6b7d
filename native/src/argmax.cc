// The greatest logit of each row and its log-probability.
//
// A row is cut into partitions counted from its start; each gives its maximum and the sum of
// e^(x - maximum), both found while it lies in the first-level cache. The caller joins them in
// order, so that the bits depend on the row alone.
#include "octavo/kernels.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

namespace {

constexpr Index PARTITION = 4096;

struct Part {
  float maximum;
  float sum;
  bool finite;  // neither NaN nor +inf; -inf is a logit ruled out
};

struct Work {
  const ArgmaxArgs* args;
  Part* parts;  // [rows, partitions]
  Index partitions;
};

const float NEVER = -__builtin_inff();

Part examine(const float* x, Index count) {
  const Floats infinity = splat(__builtin_inff());
  Floats highest[2] = {splat(NEVER), splat(NEVER)};
  Ints finite = ~Ints{};
  Index i = 0;
  for (; i + 2 * LANES <= count; i += 2 * LANES) {
    for (int half = 0; half < 2; ++half) {
      const Floats v = load(x + i + half * LANES);
      highest[half] = max(v, highest[half]);
      finite &= (Ints)(v < infinity);
    }
  }
  for (; i < count; i += LANES) {
    const Floats v = load_first(x + i, count - i < LANES ? count - i : LANES, NEVER);
    highest[0] = max(v, highest[0]);
    finite &= (Ints)(v < infinity);
  }
  Part part{max(max(highest[0], highest[1])), 0.0f, true};
  for (int lane = 0; lane < LANES; ++lane) part.finite = part.finite && finite[lane] != 0;
  if (!part.finite || part.maximum == NEVER) return part;

  Floats sums[2] = {};
  for (i = 0; i + 2 * LANES <= count; i += 2 * LANES) {
    for (int half = 0; half < 2; ++half) {
      sums[half] += exp(load(x + i + half * LANES) - splat(part.maximum));
    }
  }
  for (; i < count; i += LANES) {
    const Floats v = load_first(x + i, count - i < LANES ? count - i : LANES, NEVER);
    sums[0] += exp(v - splat(part.maximum));
  }
  part.sum = sum(sums[0] + sums[1]);
  return part;
}

void examine_piece(void* state, Index piece, int) {
  const Work& work = *static_cast<const Work*>(state);
  const Index row = piece / work.partitions, start = piece % work.partitions * PARTITION;
  const Index rest = work.args->vocabulary - start;
  const float* const logits = work.args->logits + row * work.args->vocabulary + start;
  work.parts[piece] = examine(logits, rest < PARTITION ? rest : PARTITION);
}

void join(const Work& work, Index row) {
  const Part* const parts = work.parts + row * work.partitions;
  std::int32_t& out = work.args->out[row];
  float& logprob = work.args->logprob[row];
  out = -1;
  logprob = __builtin_nanf("");
  Index best = 0;
  for (Index p = 0; p < work.partitions; ++p) {
    if (!parts[p].finite) return;
    if (parts[p].maximum > parts[best].maximum) best = p;
  }
  const float maximum = parts[best].maximum;
  if (maximum == NEVER) return;
  float total = 0.0f;
  for (Index p = 0; p < work.partitions; ++p) {
    total = fma(parts[p].sum, exp(splat(parts[p].maximum - maximum))[0], total);
  }
  const float* const logits = work.args->logits + row * work.args->vocabulary;
  Index token = best * PARTITION;
  while (logits[token] != maximum) ++token;
  out = static_cast<std::int32_t>(token);
  logprob = -__builtin_logf(total);
}

}  // namespace

void argmax(const ArgmaxArgs& args, Pool& pool) {
  const Index partitions = (args.vocabulary + PARTITION - 1) / PARTITION;
  const Index pieces = args.rows * partitions;
  Work work{&args, nullptr, partitions};
  work.parts = static_cast<Part*>(pool.shared(static_cast<std::size_t>(pieces) * sizeof(Part)));
  pool.run(pieces, examine_piece, &work);
  for (Index row = 0; row < args.rows; ++row) join(work, row);
}

}  // namespace octavo::OCTAVO_SET
