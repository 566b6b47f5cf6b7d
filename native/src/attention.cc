// Causal attention through the block table: prefill, chunked prefill and decode in one call.
//
// The queries of one KV head and a few consecutive tokens form an item, so that all of them use a
// tile of keys or values while it is in cache. An item goes through the context in partitions of
// 256 positions, each computed for itself (attention_tile.h), and their results are merged in
// ascending order. A row's bits depend neither on the other rows nor on who computed which
// partition. Table entries before the window of an item's first row are not followed.
//
// Sequences that decode and begin with the same blocks (sharing.h) read those once: a partition
// that all of them see whole is computed for the rows of several items at a time.
//
//     item a   ├──────────┬──────────┤───┤
//     item b   │  run 1   │  run 2   ├───┼──┤       runs 1 and 2 have the rows of a, b and c
//     item c   └──────────┴──────────┴─┤
//
// Bytes of a decoded token: 4 E Hk for each position seen. Operations: 4 E Hq for each row and
// position that it sees.
// Source: Kwon et al. 2023 (arXiv:2309.06180); Milakov & Gimelshein 2018 (arXiv:1805.02867);
// Juravsky et al. 2024 (arXiv:2402.05099).
#include "attention_tile.h"
#include "octavo/paging.h"
#include "sharing.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

void paged_attention(const AttentionArgs& args, Pool& pool);

namespace {

constexpr Index ITEM_ROWS = 48;       // about as many rows as keep a partition's tiles in cache
constexpr Index ALONE = 1 << 17;      // products of a batch that one thread does sooner alone
constexpr Index PIECES_A_THREAD = 4;  // fewer items than that are cut into runs of partitions

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

// Partitions first … last - 1 of `count` items. Of several each is one token, and sees them whole,
// in the same blocks.
struct Run {
  Item* const* items;
  Index count;
  Index first;
  Index last;
};

struct Call {
  const AttentionArgs& args;
  Pool& pool;
  Index group;  // query heads a KV head
  Shape shape;
  Item* items;
  Run* runs;
};

// The memory of one thread.
struct Bench {
  float* queries;  // [rows, E]
  float* scores;   // [MOST_ROWS, 256]
  float* results;  // [rows] of records, of one partition
  float* totals;   // [rows] of records, merged
  Bf16* values;    // [16] tiles padded to `width`, used when E is no multiple of 16
};

Index rows_of(const Call& call, const Item& item) { return item.tokens * call.group; }

Index rows_of(const Call& call, const Run& run) { return run.count * rows_of(call, **run.items); }

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

Seen seen(const Call& call, const Run& run, Index row, Index partition) {
  return run.count == 1 ? seen(call, **run.items, row, partition) : Seen{0, PARTITION};
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

// One partition for all rows of a run; a record for each row that sees any of it.
void attend_partition(const Call& call, const Run& run, Index partition, const Tiles& tiles,
                      const Tiles& next, const Bench& bench, float* results) {
  const Index rows = rows_of(call, run);
  const Index chunks = (rows + MOST_ROWS - 1) / MOST_ROWS;
  const Index chunk_rows = (rows + chunks - 1) / chunks;
  Ahead ahead = {tiles.values, next.keys[PARTITION_TILES - 1] == nullptr ? nullptr : next.keys};
  for (Index row = 0; row < rows; row += chunk_rows) {
    const Index some = smaller(chunk_rows, rows - row);
    Seen each[MOST_ROWS] = {};
    for (Index r = 0; r < some; ++r) each[r] = seen(call, run, row + r, partition);
    if (each[some - 1].last == 0 || each[0].first == PARTITION) continue;
    attend_rows_of(some)(call.shape, tiles, ahead, bench.queries + row * call.shape.head_dim, each,
                         bench.scores, results + row * call.shape.record);
    ahead = {};
  }
}

// All partitions of a run; done(partition) after each, its records in place(partition).
template <typename Place, typename Done>
OCTAVO_INLINE void attend_partitions(const Call& call, const Run& run, const Bench& bench,
                                     Place place, Done done) {
  const Item& item = **run.items;
  const Shape& shape = call.shape;
  for (Index i = 0; i < run.count; ++i) {
    gather_queries(call, *run.items[i], bench.queries + i * call.group * shape.head_dim);
  }
  Tiles next = find_tiles(call, item, run.first);
  for (Index partition = run.first; partition < run.last; ++partition) {
    Tiles tiles = next;
    next = partition + 1 < run.last ? find_tiles(call, item, partition + 1) : Tiles{};
    if (shape.width != shape.head_dim) {
      widen_values(tiles, shape.head_dim, shape.width, bench.values);
    }
    attend_partition(call, run, partition, tiles, next, bench, place(partition));
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
  const Index record = call.shape.record;
  for (Index row = 0; row < rows_of(call, item); ++row) {
    const Seen part = seen(call, item, row, partition);
    if (part.first >= part.last) continue;
    float* total = totals + row * record;
    const float* result = results + row * record;
    if (partition == window_start(call, item.position + row / call.group) / PARTITION) {
      __builtin_memcpy(total, result, static_cast<std::size_t>(record) * sizeof(float));
    } else {
      merge(total, result, call.shape.width);
    }
  }
}

void write_out(const Call& call, const Item& item, const float* totals) {
  const Index head_dim = call.shape.head_dim;
  for (Index row = 0; row < rows_of(call, item); ++row) {
    const float* total = totals + row * call.shape.record;
    const Index head = item.head * call.group + row % call.group;
    const Index token = item.first + row / call.group;
    float* out = call.args.out + (token * call.args.heads + head) * head_dim;
    for (Index i = 0; i < head_dim; ++i) out[i] = total[RESULT_HEAD + i] / total[1];
  }
}

Bench bench_of(const Call& call, Index rows, int thread) {
  const Shape& shape = call.shape;
  const Index queries = padded(rows * shape.head_dim, TILE), scores = MOST_ROWS * PARTITION;
  const Index records = rows * shape.record;
  const Index values = shape.width == shape.head_dim ? 0 : PARTITION * shape.width;
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
  Item* const item = call.items + piece;
  const Bench bench = bench_of(call, rows_of(call, *item), thread);
  attend_partitions(
      call, {&item, 1, item->begin, item->end}, bench, [&](Index) { return bench.results; },
      [&](Index partition) {
        merge_partition(call, *item, partition, bench.results, bench.totals);
      });
  write_out(call, *item, bench.totals);
}

// Where an item keeps the records of a partition until all are there.
float* kept(const Call& call, const Item& item, Index partition) {
  return item.results + (partition - item.begin) * rows_of(call, item) * call.shape.record;
}

// Gives each item of a run its records.
void hand_out(const Call& call, const Run& run, Index partition, const float* results) {
  const Index floats = call.group * call.shape.record;
  for (Index i = 0; i < run.count; ++i) {
    __builtin_memcpy(kept(call, *run.items[i], partition), results + i * floats,
                     static_cast<std::size_t>(floats) * sizeof(float));
  }
}

// So many partitions more are computed; whoever computed the last ones merges them all.
void account(const Call& call, Item& item, Index computed, float* totals) {
  if (__atomic_sub_fetch(&item.missing, computed, __ATOMIC_ACQ_REL) != 0) return;
  for (Index partition = item.begin; partition < item.end; ++partition) {
    merge_partition(call, item, partition, kept(call, item, partition), totals);
  }
  write_out(call, item, totals);
}

// Some partitions of an item, or of several that share them.
void attend_run(void* state, Index piece, int thread) {
  const Call& call = *static_cast<const Call*>(state);
  const Run& run = call.runs[piece];
  const Bench bench = bench_of(call, rows_of(call, run), thread);
  if (run.count == 1) {
    attend_partitions(
        call, run, bench, [&](Index partition) { return kept(call, **run.items, partition); },
        [](Index) {});
  } else {
    attend_partitions(
        call, run, bench, [&](Index) { return bench.results; },
        [&](Index partition) { hand_out(call, run, partition, bench.results); });
  }
  for (Index i = 0; i < run.count; ++i) {
    account(call, *run.items[i], run.last - run.first, bench.totals);
  }
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
    sizes.floats += item.missing * rows * call.shape.record;
    const Index positions = item.position + item.tokens - window_start(call, item.position);
    sizes.products += rows * positions * call.shape.width;
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

// Appends runs of up to `length` partitions.
Run* cut(Run* run, Item* const* items, Index count, Index first, Index last, Index length) {
  for (; first < last; first += length) {
    *run++ = {items, count, first, smaller(first + length, last)};
  }
  return run;
}

// Lists items, what some of them share, and the rest of each, into shared memory, with room for
// results. Returns the number of runs, of up to `length` partitions each.
Index list_runs(Call& call, const Sizes& sizes, const Sharing& sharing, Index length) {
  const Index heads = call.args.pages.kv_heads;
  const auto bytes = [](Index count, std::size_t size) {
    return padded(count * static_cast<Index>(size), 64);
  };
  const Index items = bytes(sizes.items, sizeof(Item));
  const Index places = bytes(sizes.items + sharing.count * heads, sizeof(Item*));
  const Index runs = bytes(sizes.partitions, sizeof(Run));
  char* memory = static_cast<char*>(
      call.pool.shared(static_cast<std::size_t>(items + places + runs + sizes.floats * 4)));
  call.items = reinterpret_cast<Item*>(memory);
  Item** const all = reinterpret_cast<Item**>(memory + items);
  Item** const sharers = all + sizes.items;  // [heads][members]
  call.runs = reinterpret_cast<Run*>(memory + items + places);
  float* results = reinterpret_cast<float*>(memory + items + places + runs);
  Index made = 0;
  each_item(call, [&](const Item& item) {
    call.items[made] = item;
    call.items[made].results = results;
    results += item.missing * rows_of(call, item) * call.shape.record;
    all[made] = call.items + made;
    ++made;
  });
  Run* run = call.runs;
  for (Index head = 0; head < heads; ++head) {
    Item** const members = sharers + head * sharing.count;
    for (Index m = 0; m < sharing.count; ++m) members[m] = all[sharing.members[m].item + head];
    for (Index i = 0; i < sharing.segment_count; ++i) {
      const Segment& segment = sharing.segments[i];
      for (Index m = segment.begin; m < segment.end; m += tokens_an_item(call)) {
        const Index count = smaller(tokens_an_item(call), segment.end - m);
        run = cut(run, members + m, count, segment.first, segment.last, length);
      }
    }
  }
  for (Index i = 0; i < sizes.items; ++i) {
    const Item& item = call.items[i];
    run = cut(run, all + i, 1, item.begin + sharing.depth[item.sequence], item.end, length);
  }
  return run - call.runs;
}

}  // namespace

void paged_attention(const AttentionArgs& args, Pool& pool) {
  const Index head_dim = args.pages.head_dim, width = padded(head_dim, TILE);
  const Shape shape = {head_dim, width, RESULT_HEAD + width, args.scale * 1.44269504f};  // log2 e
  Call call = {args, pool, args.heads / args.pages.kv_heads, shape, nullptr, nullptr};
  const Sizes sizes = measure(call);
  const Index wanted = PIECES_A_THREAD * pool.threads();
  const Index length = (sizes.partitions + wanted - 1) / wanted;
  const Sharing sharing = find_sharing(args, PARTITION, tokens_an_item(call), pool);
  if (sharing.segment_count > 0) {
    pool.run(list_runs(call, sizes, sharing, length), attend_run, &call);
  } else if (pool.threads() == 1 || sizes.products <= ALONE) {
    list_items(call, sizes);
    for (Index item = 0; item < sizes.items; ++item) attend_item(&call, item, 0);
  } else if (sizes.items >= wanted) {
    list_items(call, sizes);
    pool.run(sizes.items, attend_item, &call);
  } else {
    pool.run(list_runs(call, sizes, sharing, length), attend_run, &call);
  }
}

}  // namespace octavo::OCTAVO_SET
