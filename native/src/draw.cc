// One token drawn from each row of logits: temperature, top_k, top_p, min_p, then the draw.
//
//   weight = e^((logit - greatest) / temperature)                       in (0, 1], the greatest has
//   1 kept   = the `top_k` largest; of these the fewest, largest first, that have `top_p` of their
//   sum;
//            of these all that have `min_p` of the largest weight       among equals the lowest id
//   token  = the first of those kept, by id, at which the running sum exceeds point · sum
//
// Filters look only at those of some weight. Which ones: the first of a few thresholds above which
// there are enough, counted by vectors. Sums that decide are in double, in ascending order of
// something the row alone determines.
//
// Operations: two passes over the row for the weights and their sum, one for each threshold tried,
// one to gather; a sort of those gathered, in four counting passes.
#include "octavo/kernels.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

void draw(const DrawArgs& args, Pool& pool);

namespace {

constexpr Index PARTITION = 4096;  // a draw without filters skips whole ones
constexpr float THRESHOLDS[] = {1e-2f, 1e-4f, 1e-6f, 0.0f};
const float NEVER = -__builtin_inff();

struct Candidate {
  float weight;
  std::int32_t id;
};

// One row, and the memory of the thread that draws from it.
struct Row {
  const float* logits;
  Index count;
  float* weights;         // [V], the last vector filled up with zeros
  double* sums;           // of each partition
  Candidate* candidates;  // [V], ascending by id
  Candidate* sorted;      // [V]
  Candidate* scrap;       // [V]
};

struct Filters {
  Index top_k;
  double top_p;
  float min_p;
};

Index padded(Index size, Index step) { return (size + step - 1) / step * step; }

float greatest(const float* x, Index count) {
  Floats high = splat(NEVER);
  Index i = 0;
  for (; i + LANES <= count; i += LANES) high = max(load(x + i), high);
  return max(max(load_first(x + i, count - i, NEVER), high));
}

// Fills `weights` and `sums`; returns the sum of all.
double weigh(const Row& row, float top, float temperature) {
  const Floats highest = splat(top), divisor = splat(temperature);
  double total = 0.0;
  for (Index start = 0; start < row.count; start += PARTITION) {
    const Index stop = start + PARTITION < row.count ? start + PARTITION : row.count;
    Floats part = {};
    Index i = start;
    for (; i + LANES <= stop; i += LANES) {
      const Floats weight = exp((load(row.logits + i) - highest) / divisor);
      store(row.weights + i, weight);
      part += weight;
    }
    if (i < stop) {
      const Floats last = load_first(row.logits + i, stop - i, NEVER);
      const Floats weight = exp((last - highest) / divisor);
      store(row.weights + i, weight);
      part += weight;
    }
    total += row.sums[start / PARTITION] = sum(part);
  }
  return total;
}

struct Above {
  Index count;
  double sum;
};

// Those of weight `threshold` or more, but none that weigh nothing.
Above above(const Row& row, float threshold) {
  const Floats bound = splat(threshold);
  Above found = {0, 0.0};
  for (Index start = 0; start < row.count; start += PARTITION) {
    const Index rest = padded(row.count - start, LANES);
    const Index stop = start + (rest < PARTITION ? rest : PARTITION);
    Floats part = {};
    Ints counts = {};
    for (Index i = start; i < stop; i += LANES) {
      const Floats weight = load(row.weights + i);
      const Ints kept = (Ints)(weight >= bound) & (Ints)(weight > Floats{});
      part += select(kept, weight, Floats{});
      counts -= kept;
    }
    found.sum += sum(part);
    for (int lane = 0; lane < LANES; ++lane) found.count += counts[lane];
  }
  return found;
}

OCTAVO_INLINE bool any(Ints mask) {
  std::int64_t words[LANES / 2], all = 0;
  __builtin_memcpy(words, &mask, sizeof mask);
  for (int i = 0; i < LANES / 2; ++i) all |= words[i];
  return all != 0;
}

// Gathers those of weight `threshold` or more, by id; returns how many there are.
Index gather(const Row& row, float threshold) {
  const Floats bound = splat(threshold);
  Index count = 0;
  for (Index start = 0; start < row.count; start += LANES) {
    const Floats weight = load(row.weights + start);
    const Ints kept = (Ints)(weight >= bound) & (Ints)(weight > Floats{});
    if (!any(kept)) continue;
    for (int lane = 0; lane < LANES; ++lane) {
      if (kept[lane] == 0) continue;
      row.candidates[count++] = {weight[lane], static_cast<std::int32_t>(start + lane)};
    }
  }
  return count;
}

// A byte of the weight, the greatest first: weights are not negative, so their bits rise with them.
int key_of(float weight, int shift) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &weight, sizeof bits);
  return static_cast<int>(255 - (bits >> shift & 255));
}

// Sorts by falling weight, equals as they stand, a byte at a time. After four passes the result is
// where it began.
void sort(Candidate* from, Candidate* to, Index count) {
  for (int shift = 0; shift < 32; shift += 8) {
    Index places[257] = {};
    for (Index i = 0; i < count; ++i) ++places[key_of(from[i].weight, shift) + 1];
    for (int key = 0; key < 256; ++key) places[key + 1] += places[key];
    for (Index i = 0; i < count; ++i) to[places[key_of(from[i].weight, shift)]++] = from[i];
    Candidate* const other = from;
    from = to;
    to = other;
  }
}

// How many of the sorted candidates the filters leave: a head of that list. All weights together
// are `total`.
Index head(const Candidate* sorted, Index count, const Filters& filters, double total) {
  if (filters.top_k > 0) {
    if (filters.top_k < count) count = filters.top_k;
    total = 0.0;
    for (Index i = 0; i < count; ++i) total += static_cast<double>(sorted[i].weight);
  }
  if (filters.top_p < 1.0) {
    double before = 0.0;
    Index kept = 0;
    while (kept < count && (kept == 0 || before < filters.top_p * total)) {
      before += static_cast<double>(sorted[kept++].weight);
    }
    count = kept;
  }
  while (count > 1 && sorted[count - 1].weight < filters.min_p) --count;
  return count;
}

// A threshold that leaves out nothing that `top_k`, or else `top_p`, may keep.
float threshold_for(const Row& row, const Filters& filters, double total) {
  for (const float threshold : THRESHOLDS) {
    const Above found = above(row, threshold);
    const bool enough =
        filters.top_k > 0 ? found.count >= filters.top_k : found.sum >= filters.top_p * total;
    if (enough) return threshold;
  }
  return 0.0f;
}

// Gathers what the filters keep, by id; returns how many there are, at least one.
Index filter(const Row& row, const Filters& filters, double total) {
  if (filters.top_k == 0 && filters.top_p >= 1.0) return gather(row, filters.min_p);
  const Index count = gather(row, threshold_for(row, filters, total));
  __builtin_memcpy(row.sorted, row.candidates, static_cast<std::size_t>(count) * sizeof(Candidate));
  sort(row.sorted, row.scrap, count);
  const Candidate last = row.sorted[head(row.sorted, count, filters, total) - 1];
  Index kept = 0;
  for (Index i = 0; i < count; ++i) {
    const Candidate one = row.candidates[i];
    if (one.weight < last.weight || (one.weight == last.weight && one.id > last.id)) continue;
    row.candidates[kept++] = one;
  }
  return kept;
}

std::int32_t draw_kept(const Candidate* kept, Index count, double point) {
  double total = 0.0, sum = 0.0;
  for (Index i = 0; i < count; ++i) total += static_cast<double>(kept[i].weight);
  for (Index i = 0; i + 1 < count; ++i) {
    sum += static_cast<double>(kept[i].weight);
    if (sum > point * total) return kept[i].id;
  }
  return kept[count - 1].id;
}

std::int32_t draw_any(const Row& row, double total, double point) {
  const double until = point * total;
  double sum = 0.0;
  std::int32_t last = -1;
  for (Index start = 0; start < row.count; start += PARTITION) {
    const double part = row.sums[start / PARTITION];
    if (part == 0.0) continue;
    if (sum + part <= until && sum + part < total) {
      sum += part;
      continue;
    }
    const Index stop = start + PARTITION < row.count ? start + PARTITION : row.count;
    for (Index i = start; i < stop; ++i) {
      if (row.weights[i] == 0.0f) continue;
      last = static_cast<std::int32_t>(i);
      sum += static_cast<double>(row.weights[i]);
      if (sum > until) break;
    }
    return last;
  }
  return last;
}

Row row_of(const DrawArgs& args, Pool& pool, Index n, int thread) {
  const Index count = args.vocabulary, partitions = (count + PARTITION - 1) / PARTITION;
  const Index weights = padded(count, 16), candidates = padded(count, 8);
  const Index bytes = weights * 4 + padded(partitions, 8) * 8 + 3 * candidates * 8;
  char* const memory = static_cast<char*>(pool.local(thread, static_cast<std::size_t>(bytes)));
  Row row;
  row.logits = args.logits + args.rows[n] * count;
  row.count = count;
  row.weights = reinterpret_cast<float*>(memory);
  row.sums = reinterpret_cast<double*>(row.weights + weights);
  row.candidates = reinterpret_cast<Candidate*>(row.sums + padded(partitions, 8));
  row.sorted = row.candidates + candidates;
  row.scrap = row.sorted + candidates;
  return row;
}

struct Call {
  const DrawArgs& args;
  Pool& pool;
};

void draw_row(void* state, Index n, int thread) {
  const Call& call = *static_cast<const Call*>(state);
  const DrawArgs& args = call.args;
  const Row row = row_of(args, call.pool, n, thread);
  const float top = greatest(row.logits, row.count);
  args.out[n] = -1;
  if (!(top > NEVER) || !(top < -NEVER)) return;
  const double total = weigh(row, top, args.temperature[n]);
  const Index top_k = args.top_k[n] < row.count ? args.top_k[n] : 0;
  const Filters filters = {top_k, args.top_p[n], args.min_p[n]};
  if (top_k == 0 && filters.top_p >= 1.0 && filters.min_p <= 0.0f) {
    args.out[n] = draw_any(row, total, args.point[n]);
  } else {
    args.out[n] = draw_kept(row.candidates, filter(row, filters, total), args.point[n]);
  }
}

}  // namespace

void draw(const DrawArgs& args, Pool& pool) {
  Call call = {args, pool};
  pool.run(args.draws, draw_row, &call);
}

}  // namespace octavo::OCTAVO_SET
