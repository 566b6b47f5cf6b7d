// Causal attention through the block table: prefill, chunked prefill and decode in one call.
//
// A few consecutive tokens form an item, so that all their queries of a KV head use a tile of keys
// or values while it is in cache. A run goes through the context in partitions of 256 positions,
// each computed for itself (attention_tile.h, attention_matrix.h), and their results are merged in
// ascending order. A token that decodes goes through it with several KV heads side by side, block
// by block: what it reads of a block lies together. A row's bits depend neither on the other rows
// nor on who computed which partition. Table entries before the window of an item's first row are
// not followed.
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
#include "octavo/paging.h"
#include "sharing.h"
#include "vector.h"

#if OCTAVO_TILES
#include "attention_matrix.h"
#else
#include "attention_tile.h"
#endif

namespace octavo::OCTAVO_SET {

void paged_attention(const AttentionArgs& args, Pool& pool);

namespace {

constexpr Index ALONE = 1 << 15;      // products of a batch that one thread does sooner alone
constexpr Index PIECES_A_THREAD = 4;  // fewer are cut into runs of partitions
constexpr Index TOGETHER = 512;       // E · heads of a token that are fetched in turn, at most

// Some tokens of one sequence. Row r of a head is token first + r / group, query head r % group of
// the KV head.
struct Item {
  Index sequence;
  Index first;  // row of the batch
  Index tokens;
  Index position;  // of the first token
  Index begin;     // partitions begin … end - 1 are seen
  Index end;
  float* results;  // when it is cut into runs: [end - begin][Hk][rows] of records
  Index missing;   // partitions of heads not yet computed
};

// Partitions first … last - 1 of some KV heads of `count` items. Of several each is one token, and
// sees them whole, in the same blocks.
struct Run {
  Item* const* items;
  Index count;
  Index head;
  Index heads;
  Index first;
  Index last;
};

struct Call {
  const AttentionArgs& args;
  Pool& pool;
  const Format& format;
  Index group;  // query heads a KV head
  Shape shape;
  Index together;  // KV heads of a token in one run
  Item* items;
  Run* runs;
  Index run_count;
  Index takers;  // threads that take runs, likely in turn
};

// The memory of one thread, for the heads of one run.
struct Bench {
  Byte* scratch;   // of the products
  float* queries;  // [heads, rows, E]
  float* results;  // [heads, rows] of records, of one partition
  float* totals;   // [Hk, rows] of records, merged
  Byte* values;    // [16] tiles padded to `width`, used when E is no multiple of 16
};

Index rows_of(const Call& call, const Item& item) { return item.tokens * call.group; }

Index rows_of(const Call& call, const Run& run) { return run.count * rows_of(call, **run.items); }

// Heads of one run. Rows of several tokens use each tile often enough to go head by head.
Index heads_of(const Call& call, const Item& item) { return item.tokens == 1 ? call.together : 1; }

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

// queries[head][row of the run]
void gather_queries(const Call& call, const Run& run, float* queries) {
  const AttentionArgs& args = call.args;
  const Index floats = call.group * args.pages.head_dim;
  const Index row_stride = (args.heads + 2 * args.pages.kv_heads) * args.pages.head_dim;
  for (Index head = run.head; head < run.head + run.heads; ++head) {
    for (Index i = 0; i < run.count; ++i) {
      const Item& item = *run.items[i];
      for (Index token = item.first; token < item.first + item.tokens; ++token, queries += floats) {
        __builtin_memcpy(queries, args.qkv + token * row_stride + head * floats,
                         static_cast<std::size_t>(floats) * sizeof(float));
      }
    }
  }
}

// The tile of keys that begins at `position`.
const Byte* keys_at(const Call& call, const Item& item, Index head, Index position) {
  const PagesView& pages = call.args.pages;
  const Index tile = call.format.tile_bytes(pages.head_dim), run = pages.block_size / TILE * tile;
  const std::int32_t* table = pages.table + item.sequence * pages.table_width;
  const Byte* page = pages.pool + table[position / pages.block_size] * pages.block_stride;
  return page + head * run + position % pages.block_size / TILE * tile;
}

// Bytes from a head's keys or values in a page to those of the next.
Index head_stride(const Call& call) {
  const PagesView& pages = call.args.pages;
  return pages.block_size / TILE * call.format.tile_bytes(pages.head_dim);
}

Tiles find_tiles(const Call& call, const Item& item, Index head, Index partition) {
  const Index first = seen(call, item, 0, partition).first;
  const Index last = seen(call, item, rows_of(call, item) - 1, partition).last;
  Tiles tiles = {};
  for (Index t = first / TILE; t * TILE < last; ++t) {
    tiles.keys[t] = keys_at(call, item, head, partition * PARTITION + t * TILE);
    tiles.values[t] = tiles.keys[t] + call.args.pages.kv_heads * head_stride(call);
  }
  return tiles;
}

// Copies the tiles of values to tiles padded with zeros to whole blocks of columns.
void widen_values(const Call& call, Tiles& tiles, Byte* to) {
  const Index head_dim = call.shape.head_dim, width = call.shape.width;
  for (const Byte*& values : tiles.values) {
    if (values == nullptr) continue;
    call.format.widen(values, head_dim, width, to);
    values = to;
    to += call.format.tile_bytes(width);
  }
}

// One partition for all rows of a run; a record for each row that sees any of it.
void attend_partition(const Call& call, const Run& run, Index partition, const Part& part,
                      const Bench& bench, float* results) {
  const Index chunks = (part.rows + MOST_ROWS - 1) / MOST_ROWS;
  const Index chunk_rows = (part.rows + chunks - 1) / chunks;
  for (Index row = 0; row < part.rows; row += chunk_rows) {
    const Index some = smaller(chunk_rows, part.rows - row);
    Seen each[MOST_ROWS] = {};
    for (Index r = 0; r < some; ++r) each[r] = seen(call, run, row + r, partition);
    if (each[some - 1].last == 0 || each[0].first == PARTITION) continue;
    call.format.attend_rows(some)(call.shape, part, some, bench.queries + row * call.shape.head_dim,
                                  each, bench.scratch, results + row * call.shape.record);
  }
}

// The first GROUP tiles of keys of a partition; the last one again where there are fewer.
struct FirstKeys {
  const Byte* tiles[GROUP];
};

FirstKeys first_keys(const Call& call, const Item& item, Index head, Index partition) {
  const Index first = seen(call, item, 0, partition).first / TILE;
  const Index last = seen(call, item, rows_of(call, item) - 1, partition).last;
  FirstKeys keys;
  for (Index i = 0; i < GROUP; ++i) {
    const Index tile = smaller(first + i, quotient_up(last, TILE) - 1);
    keys.tiles[i] = keys_at(call, item, head, partition * PARTITION + tile * TILE);
  }
  return keys;
}

// All partitions of a run; done(partition) after each, its records in place(partition). `after`:
// what this thread is likely to do next, or null.
template <typename Place, typename Done>
OCTAVO_INLINE void attend_partitions(const Call& call, const Run& run, const Run* after,
                                     const Bench& bench, Place place, Done done) {
  const Item& item = **run.items;
  const Shape& shape = call.shape;
  gather_queries(call, run, bench.queries);
  Tiles next = find_tiles(call, item, run.head, run.first);
  for (Index partition = run.first; partition < run.last; ++partition) {
    Part part = {next, nullptr, run.heads, head_stride(call), rows_of(call, run)};
    FirstKeys keys;
    if (partition + 1 < run.last) {
      next = find_tiles(call, item, run.head, partition + 1);
      keys = first_keys(call, item, run.head, partition + 1);
      part.next = keys.tiles;
    } else if (after != nullptr) {
      keys = first_keys(call, **after->items, after->head, after->first);
      part.next = keys.tiles;
    }
    if (shape.width != shape.head_dim) {
      widen_values(call, part.tiles, bench.values);
    }
    attend_partition(call, run, partition, part, bench, place(partition));
    done(partition);
  }
}

// Adds the result of the next partition to what the partitions before it gave.
void merge(float* total, const float* result, Index width) {
  const float top = result[0] > total[0] ? result[0] : total[0];
  Floats below = splat(total[0] - top);
  below[1] = result[0] - top;
  const Floats factors = exp2_down(below);
  const Floats before = splat(factors[0]), now = splat(factors[1]);
  total[0] = top;
  total[1] = fma(total[1], before[0], result[1] * now[0]);
  total += RESULT_HEAD;
  result += RESULT_HEAD;
  for (Index i = 0; i < width; i += LANES) {
    store(total + i, fma(load(total + i), before, load(result + i) * now));
  }
}

// results, totals: [heads][rows] of records.
void merge_partition(const Call& call, const Item& item, Index heads, Index partition,
                     const float* results, float* totals) {
  const Index record = call.shape.record, rows = rows_of(call, item);
  for (Index i = 0; i < heads * rows; ++i, results += record, totals += record) {
    const Index row = i % rows;
    const Seen part = seen(call, item, row, partition);
    if (part.first >= part.last) continue;
    if (partition == window_start(call, item.position + row / call.group) / PARTITION) {
      __builtin_memcpy(totals, results, static_cast<std::size_t>(record) * sizeof(float));
    } else {
      merge(totals, results, call.shape.width);
    }
  }
}

void write_out(const Call& call, const Item& item, Index head, Index heads, const float* totals) {
  const Index head_dim = call.shape.head_dim, rows = rows_of(call, item);
  for (Index i = 0; i < heads * rows; ++i, totals += call.shape.record) {
    const Index row = i % rows;
    const Index query_head = (head + i / rows) * call.group + row % call.group;
    const Index token = item.first + row / call.group;
    float* out = call.args.out + (token * call.args.heads + query_head) * head_dim;
    for (Index e = 0; e < head_dim; ++e) out[e] = totals[RESULT_HEAD + e] / totals[1];
  }
}

// For runs of `heads` heads; totals for `merged` of them.
Bench bench_of(const Call& call, Index heads, Index rows, Index merged, int thread) {
  const Shape& shape = call.shape;
  const Index queries = padded(heads * rows * shape.head_dim, TILE);
  const Index scratch = padded(scratch_bytes(shape, heads, rows), LINE);
  const Index records = rows * shape.record;
  const Index values =
      shape.width == shape.head_dim ? 0 : PARTITION_TILES * call.format.tile_bytes(shape.width);
  const Index bytes = scratch + (queries + (heads + merged) * records) * 4 + values;
  Byte* memory = static_cast<Byte*>(call.pool.local(thread, static_cast<std::size_t>(bytes)));
  Bench bench;
  bench.scratch = memory;
  bench.queries = reinterpret_cast<float*>(memory + scratch);
  bench.results = bench.queries + queries;
  bench.totals = bench.results + heads * records;
  bench.values = reinterpret_cast<Byte*>(bench.totals + merged * records);
  return bench;
}

// The run that whoever takes this one is likely to take next.
const Run* run_after(const Call& call, Index run) {
  const Index next = run + call.takers;
  return next < call.run_count ? call.runs + next : nullptr;
}

// A whole run of one item.
void attend_whole(void* state, Index piece, int thread) {
  const Call& call = *static_cast<const Call*>(state);
  const Run& run = call.runs[piece];
  const Item& item = **run.items;
  const Bench bench = bench_of(call, run.heads, rows_of(call, item), run.heads, thread);
  attend_partitions(
      call, run, run_after(call, piece), bench, [&](Index) { return bench.results; },
      [&](Index partition) {
        merge_partition(call, item, run.heads, partition, bench.results, bench.totals);
      });
  write_out(call, item, run.head, run.heads, bench.totals);
}

// Where an item keeps the records of a partition and KV head until all are there.
float* kept(const Call& call, const Item& item, Index partition, Index head) {
  const Index place = (partition - item.begin) * call.args.pages.kv_heads + head;
  return item.results + place * rows_of(call, item) * call.shape.record;
}

// Gives each item of a run its records.
void hand_out(const Call& call, const Run& run, Index partition, const float* results) {
  const Index floats = call.group * call.shape.record;
  for (Index head = run.head; head < run.head + run.heads; ++head) {
    for (Index i = 0; i < run.count; ++i, results += floats) {
      __builtin_memcpy(kept(call, *run.items[i], partition, head), results,
                       static_cast<std::size_t>(floats) * sizeof(float));
    }
  }
}

// So many partitions of heads more are computed; whoever computed the last ones merges them all.
void account(const Call& call, Item& item, Index computed, float* totals) {
  if (__atomic_sub_fetch(&item.missing, computed, __ATOMIC_ACQ_REL) != 0) return;
  const Index heads = call.args.pages.kv_heads;
  for (Index partition = item.begin; partition < item.end; ++partition) {
    merge_partition(call, item, heads, partition, kept(call, item, partition, 0), totals);
  }
  write_out(call, item, 0, heads, totals);
}

// Some partitions of an item, or of several that share them.
void attend_run(void* state, Index piece, int thread) {
  const Call& call = *static_cast<const Call*>(state);
  const Run& run = call.runs[piece];
  const Index heads = call.args.pages.kv_heads;
  const Bench bench = bench_of(call, run.heads, rows_of(call, run), heads, thread);
  const Run* const after = run_after(call, piece);
  if (run.count == 1) {
    attend_partitions(
        call, run, after, bench,
        [&](Index partition) { return kept(call, **run.items, partition, run.head); },
        [](Index) {});
  } else {
    attend_partitions(
        call, run, after, bench, [&](Index) { return bench.results; },
        [&](Index partition) { hand_out(call, run, partition, bench.results); });
  }
  for (Index i = 0; i < run.count; ++i) {
    account(call, *run.items[i], (run.last - run.first) * run.heads, bench.totals);
  }
}

Index tokens_an_item(const Call& call) {
  return call.group < ITEM_ROWS ? ITEM_ROWS / call.group : 1;
}

// Sizes of a step: its items, their partitions times heads, the records of those, products of rows
// and keys.
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
    for (Index block = (stop - start + most - 1) / most; block-- > 0;) {
      Item item = {};
      item.sequence = sequence;
      item.first = start + block * most;
      item.tokens = smaller(most, stop - item.first);
      item.position = batch.positions[item.first];
      item.begin = window_start(call, item.position) / PARTITION;
      item.end = padded(item.position + item.tokens, PARTITION) / PARTITION;
      item.missing = (item.end - item.begin) * call.args.pages.kv_heads;
      visit(item);
    }
  }
}

Sizes measure(const Call& call) {
  const Index heads = call.args.pages.kv_heads;
  Sizes sizes;
  each_item(call, [&](const Item& item) {
    const Index rows = rows_of(call, item);
    sizes.items += 1;
    sizes.partitions += item.missing;
    sizes.floats += item.missing * rows * call.shape.record;
    const Index positions = item.position + item.tokens - window_start(call, item.position);
    sizes.products += rows * heads * positions * call.shape.width;
  });
  return sizes;
}

// KV heads of a token in one run: as many as can be fetched in turn, but all threads get work.
Index heads_together(const Call& call, Index each) {
  const Index heads = call.args.pages.kv_heads;
  if (call.shape.width != call.shape.head_dim) return 1;
  const Index most = smaller(smaller(TOGETHER / call.shape.head_dim, each), heads);
  return most <= 1 ? 1 : quotient_up(heads, quotient_up(heads, most));
}

// Lays items into shared memory, room for runs behind them, and room for results behind those.
struct Lists {
  Item** places;
  Run* runs;
  float* results;
};

Lists lay_out(Call& call, const Sizes& sizes, Index places, Index runs, Index floats) {
  const auto bytes = [](Index count, std::size_t size) {
    return padded(count * static_cast<Index>(size), 64);
  };
  const Index items_end = bytes(sizes.items, sizeof(Item));
  const Index places_end = items_end + bytes(sizes.items + places, sizeof(Item*));
  const Index runs_end = places_end + bytes(runs, sizeof(Run));
  char* memory =
      static_cast<char*>(call.pool.shared(static_cast<std::size_t>(runs_end + floats * 4)));
  call.items = reinterpret_cast<Item*>(memory);
  call.runs = reinterpret_cast<Run*>(memory + places_end);
  Lists lists = {reinterpret_cast<Item**>(memory + items_end), call.runs,
                 reinterpret_cast<float*>(memory + runs_end)};
  Index made = 0;
  each_item(call, [&](const Item& item) {
    call.items[made] = item;
    lists.places[made] = call.items + made;
    ++made;
  });
  return lists;
}

// Appends runs of up to `length` partitions and `together` heads.
Run* cut(const Call& call, Run* run, Item* const* items, Index count, Index together, Index first,
         Index last, Index length) {
  const Index heads = call.args.pages.kv_heads;
  for (Index head = 0; head < heads; head += together) {
    for (Index start = first; start < last; start += length) {
      *run++ = {items, count,
                head,  smaller(together, heads - head),
                start, smaller(start + length, last)};
    }
  }
  return run;
}

// One run for all partitions of an item and the heads that go together.
void list_whole(Call& call, const Sizes& sizes) {
  const Lists lists = lay_out(call, sizes, 0, sizes.items * call.args.pages.kv_heads, 0);
  Run* run = call.runs;
  for (Index i = 0; i < sizes.items; ++i) {
    const Item& item = call.items[i];
    const Index length = item.end - item.begin;
    run = cut(call, run, lists.places + i, 1, heads_of(call, item), item.begin, item.end, length);
  }
  call.run_count = run - call.runs;
}

// Runs of up to `length` partitions: first what several items share, then the rest of each.
void list_runs(Call& call, const Sizes& sizes, const Sharing& sharing, Index length) {
  const Lists lists = lay_out(call, sizes, sharing.count, sizes.partitions, sizes.floats);
  float* results = lists.results;
  for (Index i = 0; i < sizes.items; ++i) {
    call.items[i].results = results;
    results += call.items[i].missing * rows_of(call, call.items[i]) * call.shape.record;
  }
  Item** const members = lists.places + sizes.items;
  for (Index m = 0; m < sharing.count; ++m) members[m] = lists.places[sharing.members[m].item];
  Run* run = call.runs;
  for (Index i = 0; i < sharing.segment_count; ++i) {
    const Segment& segment = sharing.segments[i];
    for (Index m = segment.begin; m < segment.end; m += tokens_an_item(call)) {
      const Index count = smaller(tokens_an_item(call), segment.end - m);
      run = cut(call, run, members + m, count, 1, segment.first, segment.last, length);
    }
  }
  for (Index i = 0; i < sizes.items; ++i) {
    const Item& item = call.items[i];
    const Index first = item.begin + sharing.depth[item.sequence];
    run = cut(call, run, lists.places + i, 1, heads_of(call, item), first, item.end, length);
  }
  call.run_count = run - call.runs;
}

}  // namespace

template <typename Tile>
constexpr Format FORMAT = {attend_rows_of<Tile>, Tile::tile_bytes, widen<Tile>};

void paged_attention(const AttentionArgs& args, Pool& pool) {
  const Index head_dim = args.pages.head_dim, width = padded(head_dim, TILE);
  const Shape shape = {head_dim, width, RESULT_HEAD + width, args.scale * 1.44269504f};  // log2 e
  const Index heads = args.pages.kv_heads, wanted = PIECES_A_THREAD * pool.threads();
  const Format& format = args.pages.type == KvType::bf16 ? FORMAT<Bf16Tile> : FORMAT<Int8Tile>;
  Call call = {args,    pool,    format, args.heads / heads, shape, 1,
               nullptr, nullptr, 0,      pool.threads()};
  const Sizes sizes = measure(call);
  const bool alone = pool.threads() == 1 || sizes.products <= ALONE;
  call.together = heads_together(call, alone ? heads : sizes.partitions / wanted);
  const Index parts = sizes.partitions / call.together;
  const Sharing sharing = find_sharing(args, PARTITION, tokens_an_item(call), pool);
  if (sharing.segment_count > 0 || (!alone && sizes.items * heads / call.together < wanted)) {
    const Index length = quotient_up(parts, wanted);
    list_runs(call, sizes, sharing, length);
    pool.run(call.run_count, attend_run, &call);
  } else if (alone) {
    list_whole(call, sizes);
    call.takers = 1;
    for (Index run = 0; run < call.run_count; ++run) attend_whole(&call, run, 0);
  } else {
    list_whole(call, sizes);
    pool.run(call.run_count, attend_whole, &call);
  }
}

}  // namespace octavo::OCTAVO_SET
