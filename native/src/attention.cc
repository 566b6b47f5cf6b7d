// Causal attention through the block table: prefill, chunked prefill and decode in one call.
//
// The queries of one KV head and a few consecutive tokens form an item, so that all of them use a
// tile of keys or values while it is in cache. An item goes through the context in partitions of
// 256 positions:
//
//   scores [rows, 256] = queries · keysᵀ      tile by tile, sums over E in ascending order
//   weights = 2^(scale · log2 e · scores - max), and their sum in a fixed order of lanes
//   result [rows, E] = weights · values       sums over positions in ascending order
//
// and the results of partitions are merged in ascending order. A row takes part from the first
// position in its window up to its own and not one further: nothing is masked by multiplying with
// zero, and its bits depend neither on the other rows of the item nor on who computed which
// partition. Table entries before the window of an item's first row are not followed.
//
// Bytes of a decoded token: 4 E Hk for each position seen. Operations: 4 E Hq for each row and
// position that it sees.
// Source: Kwon et al. 2023 (arXiv:2309.06180); Milakov & Gimelshein 2018 (arXiv:1805.02867).
#include "octavo/paging.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

void paged_attention(const AttentionArgs& args, Pool& pool);

namespace {

constexpr Index TILE = 16;        // tokens
constexpr Index PARTITION = 256;  // positions
constexpr Index PARTITION_TILES = PARTITION / TILE;
constexpr Index ITEM_ROWS = 48;       // about as many rows as keep a partition's tiles in cache
constexpr Index ALONE = 1 << 17;      // products of a batch that one thread does sooner alone
constexpr Index PIECES_A_THREAD = 4;  // fewer items than that are cut into runs of partitions
constexpr int WIDTH = TILE / LANES;   // vectors across a tile
constexpr int REGISTERS = LANES == 16 ? 32 : 16;

// Registers for R · C · WIDTH sums, one row's factor, the mask of halves, and the columns that rows
// share. One register too many costs a third of the speed: sums are then spilled in the inner loop.
constexpr int registers(int rows, int columns) {
  return rows * columns * WIDTH + 2 + (rows > 1 ? columns * WIDTH : 1);
}

// Tiles side by side that fill the registers when only R rows share them: 1, 2 or 4.
constexpr int beside(int rows) {
  if (registers(rows, 4) <= REGISTERS) return 4;
  return registers(rows, 2) <= REGISTERS ? 2 : 1;
}

// More than eight rows keep no unit busier, they only make more code.
constexpr int most_rows() {
  int rows = 1;
  while (rows < 8 && registers(rows + 1, 1) <= REGISTERS) ++rows;
  return rows;
}

constexpr int MOST_ROWS = most_rows();

// Some tokens of one sequence and all query heads of one KV head. Row r is token first + r / group,
// query head r % group of the KV head.
struct Item {
  Index sequence;
  Index head;
  Index first;  // row of the batch
  Index tokens;
  Index position;  // of the first token
  Index begin;     // partitions begin … end - 1 are seen
  Index end;
  float* results;  // when it is cut into runs: [end - begin][rows] of records
  Index missing;   // partitions not yet computed
};

// Of one partition the positions that a row sees, counted from its first one: first … last - 1.
struct Seen {
  Index first;
  Index last;
};

// Partitions first … last - 1 of an item.
struct Run {
  Item* item;
  Index first;
  Index last;
};

struct Call {
  const AttentionArgs& args;
  Pool& pool;
  Index group;   // query heads a KV head
  Index width;   // E padded to tiles
  Index record;  // floats of one row's result: RESULT_HEAD, then `width` of output
  Item* items;
  Run* runs;
};

constexpr Index RESULT_HEAD = 16;  // max, sum, and room that keeps outputs aligned

// The memory of one thread.
struct Bench {
  float* queries;  // [rows, E]
  float* scores;   // [MOST_ROWS, 256]
  float* results;  // [rows] of records, of one partition
  float* totals;   // [rows] of records, merged
  Bf16* values;    // [16] tiles padded to `width`, used when E is no multiple of 16
};

// Where the tiles of one partition lie.
struct Tiles {
  const Bf16* keys[PARTITION_TILES];
  const Bf16* values[PARTITION_TILES];
};

// Tiles to fetch from memory meanwhile, or null: values of this partition, keys of the next one.
struct Ahead {
  const Bf16* const* values;
  const Bf16* const* keys;
};

Index smaller(Index a, Index b) { return a < b ? a : b; }
Index within(Index value, Index high) { return value < 0 ? 0 : smaller(value, high); }
Index padded(Index size, Index step) { return (size + step - 1) / step * step; }

// 2^x for x up to a little over 0; 0 below -126, NaN stays NaN. Polynomial of degree 6 for 2^f,
// |f| ≤ 1/2, fitted to the smallest relative error (3e-9).
OCTAVO_INLINE Floats exp2_down(Floats x) {
  const Floats magic = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer
  const Floats shifted = x + magic;
  const Floats f = x - (shifted - magic);
  Floats p = splat(1.53533614e-4f);
  p = fma(p, f, splat(1.339887457e-3f));
  p = fma(p, f, splat(9.618437361e-3f));
  p = fma(p, f, splat(5.5503324706e-2f));
  p = fma(p, f, splat(2.40226479136e-1f));
  p = fma(p, f, splat(6.93147202855e-1f));
  p = fma(p, f, splat(1.0f));
  const Floats power = as_floats((as_words(shifted) + 127u) << 23);
  return select(x < splat(-126.0f), splat(0.0f), p * power);
}

// sums[r][c] += Σ_j left[r][2j] · lower(right[c][j]) + left[r][2j + 1] · upper(right[c][j]):
// products of R rows with C columns of 16, pair by pair in ascending order.
template <int R, int C>
OCTAVO_INLINE void multiply(const float* left, Index left_stride, const Bf16* const* right,
                            Index right_stride, Index pairs, Floats (&sums)[R][C * WIDTH]) {
  for (Index j = 0; j < pairs; ++j) {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      Floats columns[C * WIDTH];
#pragma GCC unroll 16
      for (int c = 0; c < C * WIDTH; ++c) {
        const Bf16* from = right[c / WIDTH] + j * right_stride + c % WIDTH * LANES * 2;
        const Words words = load_words(from);
        columns[c] = odd ? upper_bf16(words) : lower_bf16(words);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Floats factor = splat(left[r * left_stride + 2 * j + odd]);
#pragma GCC unroll 16
        for (int c = 0; c < C * WIDTH; ++c) sums[r][c] = fma(factor, columns[c], sums[r][c]);
      }
    }
  }
}

template <int R, int C>
OCTAVO_INLINE void score_tiles(const float* queries, Index head_dim, const Bf16* const* keys,
                               float* scores) {
  Floats sums[R][C * WIDTH] = {};
  multiply<R, C>(queries, head_dim, keys, 2 * TILE, head_dim / 2, sums);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int c = 0; c < C * WIDTH; ++c) store(scores + r * PARTITION + c * LANES, sums[r][c]);
  }
}

// Asks for memory that is needed about one partition later: the hardware sees only 2 KB runs here.
OCTAVO_INLINE void fetch(const Bf16* from, Index elements) {
  for (Index i = 0; i < elements; i += 32) __builtin_prefetch(from + i, 0, 2);
}

// scores[r][16 t …] = queries[r] · keys of tile t, from tile `t` on. Fetches tiles `ahead`, if not
// null.
template <int R>
void score(const float* queries, Index head_dim, const Bf16* const* keys, Index t, Index tiles,
           float* scores, const Bf16* const* ahead) {
  constexpr int C = beside(R);
  for (; t + C <= tiles; t += C) {
    for (int c = 0; ahead != nullptr && c < C; ++c) fetch(ahead[t + c], TILE * head_dim);
    score_tiles<R, C>(queries, head_dim, keys + t, scores + t * TILE);
  }
  for (; t < tiles; ++t) {
    if (ahead != nullptr) fetch(ahead[t], TILE * head_dim);
    score_tiles<R, 1>(queries, head_dim, keys + t, scores + t * TILE);
  }
}

// Scores of the positions seen become weights relative to their maximum; result[0] is the maximum,
// in powers of two, result[1] the sum of the weights. What lies before and after is not used.
void weigh(float* scores, Seen seen, float scale, float* result) {
  const Index count = seen.last, begin = seen.first / LANES * LANES;
  Floats lane = {};
  for (int i = 0; i < LANES; ++i) lane[i] = static_cast<float>(i);
  const Floats lowest = splat(-__builtin_inff());
  for (Index i = begin; i < seen.first; ++i) scores[i] = -__builtin_inff();
  for (Index i = count; i < padded(count, LANES); ++i) scores[i] = -__builtin_inff();
  Floats high = lowest;
  for (Index i = begin; i < count; i += LANES) high = max(load(scores + i), high);
  const float top = max(high) * scale;
  Floats total = {};
  for (Index i = begin; i < count; i += LANES) {  // -inf gives exactly zero
    const Floats weight = exp2_down(fma(load(scores + i), splat(scale), splat(-top)));
    const Floats kept = select(lane < splat(static_cast<float>(count - i)), weight, Floats{});
    store(scores + i, kept);
    total = total + kept;
  }
  result[0] = top;
  result[1] = sum(total);
}

template <int R, int C>
OCTAVO_INLINE void blend_columns(const float* weights, const Bf16* const* values, Index stride,
                                 Index first, Index tiles, Index column, float* results,
                                 Index record, const Bf16* const* ahead) {
  Floats sums[R][C * WIDTH] = {};
  if (first > 0) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
      for (int c = 0; c < C * WIDTH; ++c) {
        sums[r][c] = load(results + r * record + column + c * LANES);
      }
    }
  }
  for (Index t = first; t < tiles; ++t) {
    if (ahead != nullptr) fetch(ahead[t] + column * TILE, C * TILE * TILE);
    const Bf16* right[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) right[c] = values[t] + 2 * (column + c * TILE);
    multiply<R, C>(weights + t * TILE, PARTITION, right, stride, TILE / 2, sums);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int c = 0; c < C * WIDTH; ++c) {
      store(results + r * record + column + c * LANES, sums[r][c]);
    }
  }
}

// results[r] = Σ weights[r][i] · values[i] over the positions of the first `tiles` tiles, or goes
// on from what it holds of those before tile `first`. Fetches tiles `ahead`, if not null, a share
// with each block of columns.
template <int R>
void blend(const float* weights, const Bf16* const* values, Index width, Index first, Index tiles,
           float* results, Index record, const Bf16* const* ahead) {
  constexpr int C = beside(R);
  Index column = 0;
  for (; column + C * TILE <= width; column += C * TILE) {
    blend_columns<R, C>(weights, values, 2 * width, first, tiles, column, results, record, ahead);
  }
  for (; column < width; column += TILE) {
    blend_columns<R, 1>(weights, values, 2 * width, first, tiles, column, results, record, ahead);
  }
}

// One position of one row: `pair` is the pair of values that holds it, `odd` which of the two.
OCTAVO_INLINE void blend_one(float weight, const Bf16* pair, Index odd, Floats (&sums)[1][WIDTH]) {
  for (int w = 0; w < WIDTH; ++w) {
    const Words words = load_words(pair + w * LANES * 2);
    const Floats value = odd ? upper_bf16(words) : lower_bf16(words);
    sums[0][w] = fma(splat(weight), value, sums[0][w]);
  }
}

// What `blend` does, for some positions of one row: first … last - 1. Goes on from `result`.
void blend_row(const float* weights, const Bf16* const* values, Index width, Index first,
               Index last, float* result) {
  for (Index column = 0; column < width; column += TILE) {
    Floats sums[1][WIDTH];
    for (int w = 0; w < WIDTH; ++w) sums[0][w] = load(result + column + w * LANES);
    for (Index i = first; i < last;) {
      const Bf16* tile = values[i / TILE] + 2 * column;
      const Index stop = smaller(last, (i / TILE + 1) * TILE);
      if (i % 2 == 1) {
        blend_one(weights[i], tile + i % TILE / 2 * 2 * width, 1, sums);
        ++i;
      }
      const Bf16* right = tile + i % TILE / 2 * 2 * width;
      const Index pairs = (stop - i) / 2;
      if (pairs > 0) multiply<1, 1>(weights + i, 0, &right, 2 * width, pairs, sums);
      i += 2 * pairs;
      if (i < stop) {
        blend_one(weights[i], right + pairs * 2 * width, 0, sums);
        ++i;
      }
    }
    for (int w = 0; w < WIDTH; ++w) store(result + column + w * LANES, sums[0][w]);
  }
}

// One partition for R rows, of which each sees as much or a little further than the one before. The
// tiles that all of them see are shared. Rows that see nothing get no result.
//
//     row 0       ▒▒██████████▒▒▒
//     row 1        ▒██████████▒▒▒▒         █ shared tiles
//     row 2         ██████████▒▒▒▒▒        ▒ row by row
template <int R>
void attend_rows(const Call& call, const Tiles& tiles, const Ahead& ahead, const float* queries,
                 const Seen* seen, float* scores, float* results) {
  const Index head_dim = call.args.pages.head_dim;
  const float scale = call.args.scale * 1.44269504f;  // log2 e
  score<R>(queries, head_dim, tiles.keys, seen[0].first / TILE,
           padded(seen[R - 1].last, TILE) / TILE, scores, ahead.values);
  const Index first = padded(seen[R - 1].first, TILE), last = seen[0].last / TILE * TILE;
  const bool shares = first < last;
  for (int r = 0; r < R; ++r) {
    if (seen[r].first >= seen[r].last) continue;
    float *weights = scores + r * PARTITION, *result = results + r * call.record;
    weigh(weights, seen[r], scale, result);
    if (shares && first == 0) continue;
    for (Index i = 0; i < call.width; ++i) result[RESULT_HEAD + i] = 0.0f;
    blend_row(weights, tiles.values, call.width, seen[r].first, shares ? first : seen[r].last,
              result + RESULT_HEAD);
  }
  if (!shares) return;
  blend<R>(scores, tiles.values, call.width, first / TILE, last / TILE, results + RESULT_HEAD,
           call.record, ahead.keys);
  for (int r = 0; r < R; ++r) {
    blend_row(scores + r * PARTITION, tiles.values, call.width, last, seen[r].last,
              results + r * call.record + RESULT_HEAD);
  }
}

using AttendRows = void (*)(const Call&, const Tiles&, const Ahead&, const float*, const Seen*,
                            float*, float*);

template <int R = 1>
AttendRows attend_rows_of(Index rows) {
  if constexpr (R < MOST_ROWS) {
    if (rows != R) return attend_rows_of<R + 1>(rows);
  }
  return attend_rows<R>;
}

Index rows_of(const Call& call, const Item& item) { return item.tokens * call.group; }

// The first position that whoever stands at `position` sees.
Index window_start(const Call& call, Index position) {
  const Index window = call.args.window;
  return window == 0 || window > position ? 0 : position + 1 - window;
}

Seen seen(const Call& call, const Item& item, Index row, Index partition) {
  const Index position = item.position + row / call.group, start = partition * PARTITION;
  return {within(window_start(call, position) - start, PARTITION),
          within(position + 1 - start, PARTITION)};
}

void gather_queries(const Call& call, const Item& item, float* queries) {
  const AttentionArgs& args = call.args;
  const Index head_dim = args.pages.head_dim, floats = call.group * head_dim;
  const Index row_stride = (args.heads + 2 * args.pages.kv_heads) * head_dim;
  for (Index token = 0; token < item.tokens; ++token) {
    __builtin_memcpy(queries + token * floats,
                     args.qkv + (item.first + token) * row_stride + item.head * floats,
                     static_cast<std::size_t>(floats) * sizeof(float));
  }
}

Tiles find_tiles(const Call& call, const Item& item, Index partition) {
  const PagesView& pages = call.args.pages;
  const Index tile = TILE * pages.head_dim, run = pages.block_size * pages.head_dim;
  const std::int32_t* table = pages.table + item.sequence * pages.table_width;
  const Index first = seen(call, item, 0, partition).first;
  const Index last = seen(call, item, rows_of(call, item) - 1, partition).last;
  Tiles tiles = {};
  for (Index t = first / TILE; t * TILE < last; ++t) {
    const Index position = partition * PARTITION + t * TILE;
    const Bf16* page = pages.pool + table[position / pages.block_size] * pages.block_stride;
    tiles.keys[t] = page + item.head * run + position % pages.block_size / TILE * tile;
    tiles.values[t] = tiles.keys[t] + pages.kv_heads * run;
  }
  return tiles;
}

// Copies the tiles of values to tiles padded with zeros to whole blocks of columns.
void widen_values(Tiles& tiles, Index head_dim, Index width, Bf16* to) {
  for (Index t = 0; t < PARTITION_TILES; ++t) {
    const Bf16* from = tiles.values[t];
    if (from == nullptr) continue;
    tiles.values[t] = to;
    for (Index pair = 0; pair < TILE / 2; ++pair, from += 2 * head_dim, to += 2 * width) {
      for (Index i = 0; i < 2 * width; ++i) to[i] = i < 2 * head_dim ? from[i] : Bf16{0};
    }
  }
}

// One partition for all rows of an item; a record for each row that sees any of it.
void attend_partition(const Call& call, const Item& item, Index partition, const Tiles& tiles,
                      const Tiles& next, const Bench& bench, float* results) {
  const Index rows = rows_of(call, item);
  const Index chunks = (rows + MOST_ROWS - 1) / MOST_ROWS;
  const Index chunk_rows = (rows + chunks - 1) / chunks;
  Ahead ahead = {tiles.values, next.keys[PARTITION_TILES - 1] == nullptr ? nullptr : next.keys};
  for (Index row = 0; row < rows; row += chunk_rows) {
    const Index some = smaller(chunk_rows, rows - row);
    Seen each[MOST_ROWS] = {};
    for (Index r = 0; r < some; ++r) each[r] = seen(call, item, row + r, partition);
    if (each[some - 1].last == 0 || each[0].first == PARTITION) continue;
    attend_rows_of(some)(call, tiles, ahead, bench.queries + row * call.args.pages.head_dim, each,
                         bench.scores, results + row * call.record);
    ahead = {};
  }
}

// Partitions first … last - 1 of an item; done(partition) after each, its records in
// place(partition).
template <typename Place, typename Done>
OCTAVO_INLINE void attend_partitions(const Call& call, const Item& item, Index first, Index last,
                                     const Bench& bench, Place place, Done done) {
  const Index head_dim = call.args.pages.head_dim;
  gather_queries(call, item, bench.queries);
  Tiles next = find_tiles(call, item, first);
  for (Index partition = first; partition < last; ++partition) {
    Tiles tiles = next;
    next = partition + 1 < last ? find_tiles(call, item, partition + 1) : Tiles{};
    if (call.width != head_dim) widen_values(tiles, head_dim, call.width, bench.values);
    attend_partition(call, item, partition, tiles, next, bench, place(partition));
    done(partition);
  }
}

// Adds the result of the next partition to what the partitions before it gave.
void merge(float* total, const float* result, Index width) {
  const float top = result[0] > total[0] ? result[0] : total[0];
  const Floats before = exp2_down(splat(total[0] - top));
  const Floats now = exp2_down(splat(result[0] - top));
  total[0] = top;
  total[1] = fma(total[1], before[0], result[1] * now[0]);
  total += RESULT_HEAD;
  result += RESULT_HEAD;
  for (Index i = 0; i < width; i += LANES) {
    store(total + i, fma(load(total + i), before, load(result + i) * now));
  }
}

void merge_partition(const Call& call, const Item& item, Index partition, const float* results,
                     float* totals) {
  for (Index row = 0; row < rows_of(call, item); ++row) {
    const Seen part = seen(call, item, row, partition);
    if (part.first >= part.last) continue;
    float* total = totals + row * call.record;
    const float* result = results + row * call.record;
    if (partition == window_start(call, item.position + row / call.group) / PARTITION) {
      __builtin_memcpy(total, result, static_cast<std::size_t>(call.record) * sizeof(float));
    } else {
      merge(total, result, call.width);
    }
  }
}

void write_out(const Call& call, const Item& item, const float* totals) {
  const Index head_dim = call.args.pages.head_dim;
  for (Index row = 0; row < rows_of(call, item); ++row) {
    const float* total = totals + row * call.record;
    const Index head = item.head * call.group + row % call.group;
    const Index token = item.first + row / call.group;
    float* out = call.args.out + (token * call.args.heads + head) * head_dim;
    for (Index i = 0; i < head_dim; ++i) out[i] = total[RESULT_HEAD + i] / total[1];
  }
}

Bench bench_of(const Call& call, const Item& item, int thread) {
  const Index head_dim = call.args.pages.head_dim, rows = rows_of(call, item);
  const Index queries = padded(rows * head_dim, TILE), scores = MOST_ROWS * PARTITION;
  const Index records = rows * call.record;
  const Index values = call.width == head_dim ? 0 : PARTITION * call.width;
  const Index bytes = (queries + scores + 2 * records) * 4 + values * 2;
  float* memory = static_cast<float*>(call.pool.local(thread, static_cast<std::size_t>(bytes)));
  Bench bench;
  bench.queries = memory;
  bench.scores = bench.queries + queries;
  bench.results = bench.scores + scores;
  bench.totals = bench.results + records;
  bench.values = reinterpret_cast<Bf16*>(bench.totals + records);
  return bench;
}

// A whole item.
void attend_item(void* state, Index piece, int thread) {
  const Call& call = *static_cast<const Call*>(state);
  const Item& item = call.items[piece];
  const Bench bench = bench_of(call, item, thread);
  attend_partitions(
      call, item, item.begin, item.end, bench, [&](Index) { return bench.results; },
      [&](Index partition) {
        merge_partition(call, item, partition, bench.results, bench.totals);
      });
  write_out(call, item, bench.totals);
}

// Some partitions of an item; whoever ends its last one merges them all.
void attend_run(void* state, Index piece, int thread) {
  const Call& call = *static_cast<const Call*>(state);
  const Run& run = call.runs[piece];
  Item& item = *run.item;
  const Bench bench = bench_of(call, item, thread);
  const Index floats = rows_of(call, item) * call.record;
  attend_partitions(
      call, item, run.first, run.last, bench,
      [&](Index partition) { return item.results + (partition - item.begin) * floats; },
      [](Index) {});
  const Index computed = run.last - run.first;
  if (__atomic_sub_fetch(&item.missing, computed, __ATOMIC_ACQ_REL) != 0) return;
  for (Index partition = item.begin; partition < item.end; ++partition) {
    merge_partition(call, item, partition, item.results + (partition - item.begin) * floats,
                    bench.totals);
  }
  write_out(call, item, bench.totals);
}

Index tokens_an_item(const Call& call) {
  return call.group < ITEM_ROWS ? ITEM_ROWS / call.group : 1;
}

// Sizes of a step: its items, their partitions, the records of those, products of rows and keys.
struct Sizes {
  Index items = 0;
  Index partitions = 0;
  Index floats = 0;
  Index products = 0;
};

// Calls visit(item) for each item of the batch, those that see most of a sequence first.
template <typename Visit>
OCTAVO_INLINE void each_item(const Call& call, Visit visit) {
  const BatchView& batch = call.args.batch;
  const Index most = tokens_an_item(call);
  for (Index sequence = 0; sequence < batch.sequences; ++sequence) {
    const Index start = batch.query_start[sequence], stop = batch.query_start[sequence + 1];
    for (Index head = 0; head < call.args.pages.kv_heads; ++head) {
      for (Index block = (stop - start + most - 1) / most; block-- > 0;) {
        Item item = {};
        item.sequence = sequence;
        item.head = head;
        item.first = start + block * most;
        item.tokens = smaller(most, stop - item.first);
        item.position = batch.positions[item.first];
        item.begin = window_start(call, item.position) / PARTITION;
        item.end = padded(item.position + item.tokens, PARTITION) / PARTITION;
        item.missing = item.end - item.begin;
        visit(item);
      }
    }
  }
}

Sizes measure(const Call& call) {
  Sizes sizes;
  each_item(call, [&](const Item& item) {
    const Index rows = rows_of(call, item);
    sizes.items += 1;
    sizes.partitions += item.missing;
    sizes.floats += item.missing * rows * call.record;
    const Index positions = item.position + item.tokens - window_start(call, item.position);
    sizes.products += rows * positions * call.width;
  });
  return sizes;
}

// Lays the list of items into shared memory.
void list_items(Call& call, const Sizes& sizes) {
  const Index bytes = sizes.items * static_cast<Index>(sizeof(Item));
  call.items = static_cast<Item*>(call.pool.shared(static_cast<std::size_t>(bytes)));
  Item* item = call.items;
  each_item(call, [&](const Item& made) { *item++ = made; });
}

// Lays the list of items, that of runs of up to `length` partitions, and the room for their results
// into shared memory. Returns the number of runs.
Index list_runs(Call& call, const Sizes& sizes, Index length) {
  const Index items = padded(sizes.items * static_cast<Index>(sizeof(Item)), 64);
  const Index runs = padded(sizes.partitions * static_cast<Index>(sizeof(Run)), 64);
  const std::size_t bytes = static_cast<std::size_t>(items + runs + sizes.floats * 4);
  char* memory = static_cast<char*>(call.pool.shared(bytes));
  call.items = reinterpret_cast<Item*>(memory);
  call.runs = reinterpret_cast<Run*>(memory + items);
  float* results = reinterpret_cast<float*>(memory + items + runs);
  Item* item = call.items;
  Run* run = call.runs;
  each_item(call, [&](const Item& made) {
    *item = made;
    item->results = results;
    results += made.missing * rows_of(call, made) * call.record;
    for (Index first = made.begin; first < made.end; first += length) {
      *run++ = {item, first, smaller(first + length, made.end)};
    }
    ++item;
  });
  return run - call.runs;
}

}  // namespace

void paged_attention(const AttentionArgs& args, Pool& pool) {
  const Index width = padded(args.pages.head_dim, TILE);
  Call call = {args,    pool,   args.heads / args.pages.kv_heads, width, RESULT_HEAD + width,
               nullptr, nullptr};
  const Sizes sizes = measure(call);
  const Index wanted = PIECES_A_THREAD * pool.threads();
  if (pool.threads() == 1 || sizes.products <= ALONE) {
    list_items(call, sizes);
    for (Index item = 0; item < sizes.items; ++item) attend_item(&call, item, 0);
  } else if (sizes.items >= wanted) {
    list_items(call, sizes);
    pool.run(sizes.items, attend_item, &call);
  } else {
    const Index length = (sizes.partitions + wanted - 1) / wanted;
    pool.run(list_runs(call, sizes, length), attend_run, &call);
  }
}

}  // namespace octavo::OCTAVO_SET
