// One token drawn from each row of logits: temperature, top_k, top_p, min_p, then the draw.
//
//   weight = e^((logit - greatest) / temperature), in (0, 1]: the greatest has 1, and 0 what lies
//            further below the greatest than `top_n_sigma` standard deviations of the logits
//   kept   = the `top_k` largest; of these those whose surprise is nearest to the mean, `typical_p`
//            of their sum; of these the fewest, largest first, that have `top_p` of their sum; of
//            these all that have `min_p` of the largest weight; of these, where more than one has
//            `xtc_threshold` of their sum, none of those but the last and what weighs less
//            among equals the lowest id comes first
//   token  = the first of those kept, by id, at which the running sum exceeds point · sum
//
// Filters look only at those of some weight. Which ones: the first of a few thresholds above which
// there are enough, counted by vectors. Sums that decide are in double, in ascending order of
// something the row alone determines. What typical_p keeps can be anything: with it all that weigh
// something are sorted.
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
  double typical_p;
  double xtc_threshold;

  bool more() const { return typical_p < 1.0 || xtc_threshold <= 0.5; }
};

// How logits became weights.
struct Scale {
  double top;
  double temperature;

  double below(const Row& row, std::int32_t id) const {
    return (top - static_cast<double>(row.logits[id])) / temperature;
  }
};

Index padded(Index size, Index step) { return (size + step - 1) / step * step; }

float greatest(const float* x, Index count) {
  Floats high = splat(NEVER);
  Index i = 0;
  for (; i + LANES <= count; i += LANES) high = max(load(x + i), high);
  return max(max(load_first(x + i, count - i, NEVER), high));
}

// Sums of what `term` gives for each vector of logits and a mask of those not ruled out.
template <typename Term>
double sum_over(const Row& row, Term term) {
  double total = 0.0;
  for (Index start = 0; start < row.count; start += PARTITION) {
    const Index stop = start + PARTITION < row.count ? start + PARTITION : row.count;
    Floats part = {};
    Index i = start;
    for (; i + LANES <= stop; i += LANES) {
      const Floats logits = load(row.logits + i);
      part += term(logits, (Ints)(logits > splat(NEVER)));
    }
    if (i < stop) {
      const Floats last = load_first(row.logits + i, stop - i, NEVER);
      part += term(last, (Ints)(last > splat(NEVER)));
    }
    total += static_cast<double>(sum(part));
  }
  return total;
}

// The least logit within so many standard deviations of the greatest. What is ruled out is not
// counted among the logits.
float cutoff_of(const Row& row, float top, float deviations) {
  const double counted =
      sum_over(row, [](Floats, Ints there) { return select(there, splat(1.0f), Floats{}); });
  const double mean =
      sum_over(row, [top](Floats logits,
                          Ints there) { return select(there, logits - splat(top), Floats{}); }) /
      counted;
  const float middle = static_cast<float>(static_cast<double>(top) + mean);
  const double squares = sum_over(row, [middle](Floats logits, Ints there) {
    const Floats off = select(there, logits - splat(middle), Floats{});
    return off * off;
  });
  const double deviation = __builtin_sqrt(squares / counted);
  return static_cast<float>(static_cast<double>(top) - static_cast<double>(deviations) * deviation);
}

// Fills `weights` and `sums`; returns the sum of all.
template <bool CUT>
double weigh(const Row& row, float top, float temperature, float cutoff) {
  const Floats highest = splat(top), divisor = splat(temperature), least = splat(cutoff);
  double total = 0.0;
  for (Index start = 0; start < row.count; start += PARTITION) {
    const Index stop = start + PARTITION < row.count ? start + PARTITION : row.count;
    Floats part = {};
    Index i = start;
    for (; i + LANES <= stop; i += LANES) {
      const Floats logits = load(row.logits + i);
      Floats weight = exp((logits - highest) / divisor);
      if (CUT) weight = select((Ints)(logits >= least), weight, Floats{});
      store(row.weights + i, weight);
      part += weight;
    }
    if (i < stop) {
      const Floats last = load_first(row.logits + i, stop - i, NEVER);
      Floats weight = exp((last - highest) / divisor);
      if (CUT) weight = select((Ints)(last >= least), weight, Floats{});
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

// A byte of the weight: weights are not negative, so their bits rise with them.
int rising(const Candidate& one, int shift) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &one.weight, sizeof bits);
  return static_cast<int>(bits >> shift & 255);
}

int falling(const Candidate& one, int shift) { return 255 - rising(one, shift); }

int by_id(const Candidate& one, int shift) { return one.id >> shift & 255; }

// Sorts by a key of four bytes, equals as they stand, a byte at a time. After four passes the
// result is where it began.
template <int (*KEY)(const Candidate&, int)>
void sort(Candidate* from, Candidate* to, Index count) {
  for (int shift = 0; shift < 32; shift += 8) {
    Index places[257] = {};
    for (Index i = 0; i < count; ++i) ++places[KEY(from[i], shift) + 1];
    for (int key = 0; key < 256; ++key) places[key + 1] += places[key];
    for (Index i = 0; i < count; ++i) to[places[KEY(from[i], shift)]++] = from[i];
    Candidate* const other = from;
    from = to;
    to = other;
  }
}

double sum_of(const Candidate* some, Index count) {
  double total = 0.0;
  for (Index i = 0; i < count; ++i) total += static_cast<double>(some[i].weight);
  return total;
}

// How many of the sorted candidates top_k, top_p and min_p leave: a head of that list. All weights
// together are `total`.
Index head(const Candidate* sorted, Index count, const Filters& filters, double total) {
  if (filters.top_k > 0) {
    if (filters.top_k < count) count = filters.top_k;
    total = sum_of(sorted, count);
  }
  if (filters.top_p < 1.0) {
    double before = 0.0;
    Index kept = 0;
    while (kept < count && (kept == 0 || before < filters.top_p * total)) {
      before += static_cast<double>(sorted[kept++].weight);
    }
    count = kept;
  }
  const float least = filters.min_p * sorted[0].weight;
  while (count > 1 && sorted[count - 1].weight < least) --count;
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

// Leaves of the sorted candidates those whose surprise, -log of their share, is nearest to the
// entropy: the fewest, nearest first, whose shares exceed typical_p. Returns how many. A surprise
// is that of the likeliest and what the logit lies below, over the temperature.
Index typical(const Row& row, Index count, double typical_p, const Scale& scale) {
  const double total = sum_of(row.sorted, count);
  double below = 0.0;
  for (Index i = 0; i < count; ++i) {
    below += static_cast<double>(row.sorted[i].weight) * scale.below(row, row.sorted[i].id);
  }
  const double mean = below / total;
  for (Index i = 0; i < count; ++i) {
    const double off = scale.below(row, row.sorted[i].id) - mean;
    row.candidates[i] = {static_cast<float>(off < 0.0 ? -off : off), static_cast<std::int32_t>(i)};
  }
  sort<rising>(row.candidates, row.scrap, count);
  double reached = 0.0;
  Index kept = 0;
  while (kept < count && (kept == 0 || !(reached > typical_p * total))) {
    reached += static_cast<double>(row.sorted[row.candidates[kept++].id].weight);
  }
  sort<by_id>(row.candidates, row.scrap, kept);
  for (Index i = 0; i < kept; ++i) row.sorted[i] = row.sorted[row.candidates[i].id];
  return kept;
}

// How many of the first of the sorted candidates are left out: all that have such a share but one.
Index excluded(const Candidate* sorted, Index count, double threshold) {
  if (threshold > 0.5) return 0;
  const double bound = threshold * sum_of(sorted, count);
  Index above = 0;
  while (above < count && static_cast<double>(sorted[above].weight) >= bound) ++above;
  return above > 1 ? above - 1 : 0;
}

// As `filter`, for xtc with no other filter than min_p: only those above the threshold are sorted.
Index filter_top(const Row& row, float least, double threshold) {
  const float bound = static_cast<float>(threshold * above(row, least).sum);
  const Index choices = gather(row, bound > least ? bound : least);
  __builtin_memcpy(row.sorted, row.candidates,
                   static_cast<std::size_t>(choices) * sizeof(Candidate));
  sort<falling>(row.sorted, row.scrap, choices);
  const Index count = gather(row, least);
  if (choices < 2) return count;
  const Candidate last = row.sorted[choices - 1];
  Index kept = 0;
  for (Index i = 0; i < count; ++i) {
    const Candidate one = row.candidates[i];
    if (one.weight > last.weight || (one.weight == last.weight && one.id < last.id)) continue;
    row.candidates[kept++] = one;
  }
  return kept;
}

// As `filter`, where more than a head of those sorted is left out.
Index filter_more(const Row& row, Filters filters, double total, const Scale& scale) {
  const bool few = filters.top_k > 0, nearest = filters.typical_p < 1.0;
  if (!few && !nearest && filters.top_p >= 1.0) {
    return filter_top(row, filters.min_p, filters.xtc_threshold);
  }
  Index count = gather(row, few || !nearest ? threshold_for(row, filters, total) : 0.0f);
  __builtin_memcpy(row.sorted, row.candidates, static_cast<std::size_t>(count) * sizeof(Candidate));
  sort<falling>(row.sorted, row.scrap, count);
  if (few && filters.top_k < count) count = filters.top_k;
  if (nearest) count = typical(row, count, filters.typical_p, scale);
  if (few || nearest) total = sum_of(row.sorted, count);
  filters.top_k = 0;
  count = head(row.sorted, count, filters, total);
  const Index first = excluded(row.sorted, count, filters.xtc_threshold);
  count -= first;
  __builtin_memcpy(row.candidates, row.sorted + first,
                   static_cast<std::size_t>(count) * sizeof(Candidate));
  sort<by_id>(row.candidates, row.scrap, count);
  return count;
}

// Gathers what the filters keep, by id; returns how many there are, at least one.
Index filter(const Row& row, const Filters& filters, double total, const Scale& scale) {
  if (filters.more()) return filter_more(row, filters, total, scale);
  if (filters.top_k == 0 && filters.top_p >= 1.0) return gather(row, filters.min_p);
  const Index count = gather(row, threshold_for(row, filters, total));
  __builtin_memcpy(row.sorted, row.candidates, static_cast<std::size_t>(count) * sizeof(Candidate));
  sort<falling>(row.sorted, row.scrap, count);
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
  const double total = sum_of(kept, count);
  double sum = 0.0;
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
  const float temperature = args.temperature[n], deviations = args.top_n_sigma[n];
  const Scale scale = {static_cast<double>(top), static_cast<double>(temperature)};
  const double total = deviations > 0.0f
                           ? weigh<true>(row, top, temperature, cutoff_of(row, top, deviations))
                           : weigh<false>(row, top, temperature, NEVER);
  const Index top_k = args.top_k[n] < row.count ? args.top_k[n] : 0;
  const Filters filters = {top_k, args.top_p[n], args.min_p[n], args.typical_p[n],
                           args.xtc_threshold[n]};
  if (!filters.more() && top_k == 0 && filters.top_p >= 1.0 && filters.min_p <= 0.0f) {
    args.out[n] = draw_any(row, total, args.point[n]);
  } else {
    args.out[n] = draw_kept(row.candidates, filter(row, filters, total, scale), args.point[n]);
  }
}

}  // namespace

void draw(const DrawArgs& args, Pool& pool) {
  Call call = {args, pool};
  pool.run(args.draws, draw_row, &call);
}

}  // namespace octavo::OCTAVO_SET
