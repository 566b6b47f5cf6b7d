// The products of attention with matrix tiles: what attention_tile.h computes, with queries and
// weights rounded to bfloat16 as keys and values are.
//
//   scores [rows, 256] = queries · keysᵀ      tile by tile, 32 elements of E a product
//   weights = 2^(scale · log2 e · scores - max), rounded, and their sum
//   result [rows, E] = weights · values       32 positions a product, in ascending order
//
// One or two blocks of 16 rows meet each tile of keys, and each two tiles of values, which are
// copied together if they lie apart. A product adds up the same terms for a row whoever its
// neighbours are. Where not all rows see a whole tile of values, weights of the others are zero,
// and what nobody sees is zero in a copy of the tile; if such a tile holds numbers that are not
// finite, each row gets a copy of what it sees. So a row takes part in what it sees and in nothing
// else, and its bits do not depend on the other rows.
#pragma once

#include "attention_part.h"
#include "bf16_units.h"

namespace octavo::OCTAVO_SET {

namespace {

static_assert(LANES == TILE, "a vector is a line of a tile");

constexpr Index BLOCK_ROWS = 16;
constexpr Index MOST_ROWS = 2 * BLOCK_ROWS;
constexpr Index ITEM_ROWS = 2 * MOST_ROWS;
constexpr Index STEP = 32;           // elements of E, or positions, of one product
constexpr Index PAIR = STEP / TILE;  // tiles of values of one product
constexpr Index BLENDED = 8;         // tiles of values of one head that are made ready together

// Rows lie an odd number of cache lines apart: products read and write sixteen at a time.
constexpr Index SCORES_STRIDE = PARTITION + 16;           // floats
constexpr Index WEIGHTS_STRIDE = (PARTITION + STEP) * 2;  // bytes

constexpr Index depth_of(Index head_dim) { return (head_dim + STEP - 1) / STEP * STEP; }

// The memory of one call, for all of its heads and rows.
struct Room {
  Byte* queries;  // [heads, rows, depth] bfloat16
  float* scores;  // [heads, rows, SCORES_STRIDE]
  Byte* weights;  // [heads, rows, WEIGHTS_STRIDE]
  Byte* tiles;    // BLENDED tiles of keys or values, when they cannot be used in place
  Index bytes;    // of all of it
};

Room room_of(const Shape& shape, Index heads, Index rows, Byte* memory) {
  const Index depth = depth_of(shape.head_dim), most = heads * smaller(rows, MOST_ROWS);
  const Index widest = depth > shape.width ? depth : shape.width;
  Room room;
  room.queries = memory;
  Byte* const scores = room.queries + padded(most * depth * 2, LINE);
  room.scores = reinterpret_cast<float*>(scores);
  room.weights = scores + most * SCORES_STRIDE * 4;
  room.tiles = room.weights + most * WEIGHTS_STRIDE;
  room.bytes = room.tiles + BLENDED * widest * TILE * 2 - memory;
  return room;
}

Index scratch_bytes(const Shape& shape, Index heads, Index rows) {
  return room_of(shape, heads, rows, nullptr).bytes;
}

// Left operands of some blocks of rows: those of one product are `step` bytes on from those of the
// product before.
struct Left {
  const Byte* rows;
  Index stride;
  Index step;
};

OCTAVO_INLINE void fetch(Ahead& ahead, int rounds) {
  for (int round = 0; round < rounds; ++round, ahead.offset += ahead.step) {
#pragma GCC unroll 4
    for (Index i = 0; i < GROUP; ++i) __builtin_prefetch(ahead.places[i] + ahead.offset, 0, 2);
  }
}

// Columns side by side: with the operands they fill the tiles.
constexpr int columns_for(int blocks) { return blocks == 1 ? 4 : 2; }

template <int COUNT, typename Each>
OCTAVO_INLINE void each_of(Each each) {
  each.template operator()<0>();
  if constexpr (COUNT > 1) each.template operator()<1>();
  if constexpr (COUNT > 2) each.template operator()<2>();
  if constexpr (COUNT > 3) each.template operator()<3>();
}

// sums[r][16 c …] = Σ left[r] · right(step, c) over the steps, added to what they hold if `onward`;
// each right operand asks for `rounds` times four lines that lie ahead.
template <int BLOCKS, int COLUMNS, typename Right>
OCTAVO_INLINE void multiply(const Left& left, Index steps, Index right_stride, Right right,
                            float* sums, Index sums_stride, bool onward, int rounds, Ahead& ahead) {
  constexpr int WIDEST = columns_for(BLOCKS), LEFT = BLOCKS * WIDEST, RIGHT = LEFT + BLOCKS;
  const auto each_sum = [&](auto each) __attribute__((always_inline)) {
    each_of<BLOCKS>([&]<int BLOCK>() __attribute__((always_inline)) {
      each_of<COLUMNS>([&]<int COLUMN>() __attribute__((always_inline)) {
        each.template operator()<BLOCK * WIDEST + COLUMN>(sums + BLOCK * BLOCK_ROWS * sums_stride +
                                                          COLUMN * TILE);
      });
    });
  };
  each_sum([&]<int SUM>(float* place) __attribute__((always_inline)) {
    if (onward) {
      load_tile<SUM>(place, sums_stride * 4);
    } else {
      zero_tile<SUM>();
    }
  });
  for (Index step = 0; step < steps; ++step) {
    const Byte* const rows = left.rows + step * left.step;
    each_of<BLOCKS>([&]<int BLOCK>() __attribute__((always_inline)) {
      load_tile<LEFT + BLOCK>(rows + BLOCK * BLOCK_ROWS * left.stride, left.stride);
    });
    each_of<COLUMNS>([&]<int COLUMN>() __attribute__((always_inline)) {
      constexpr int B = RIGHT + COLUMN % 2;
      load_tile<B>(right(step, COLUMN), right_stride);
      each_of<BLOCKS>([&]<int BLOCK>() __attribute__((always_inline)) {
        dot_tiles<BLOCK * WIDEST + COLUMN, LEFT + BLOCK, B>();
      });
      fetch(ahead, rounds);
    });
  }
  each_sum([&]<int SUM>(float* place)
               __attribute__((always_inline)) { store_tile<SUM>(place, sums_stride * 4); });
}

// The sums of each block of rows side by side, then the left operands, then the right ones.
template <int BLOCKS>
TileShapes shapes_of(Index rows) {
  constexpr int COLUMNS = columns_for(BLOCKS), LEFT = BLOCKS * COLUMNS;
  TileShapes shapes = WHOLE_TILES;
  for (int block = 0; block < BLOCKS; ++block) {
    const auto some = static_cast<std::uint8_t>(smaller(BLOCK_ROWS, rows - block * BLOCK_ROWS));
    for (int column = 0; column < COLUMNS; ++column) shapes.rows[block * COLUMNS + column] = some;
    shapes.rows[LEFT + block] = some;
  }
  return shapes;
}

void round_rows(const float* from, Index rows, Index head_dim, Byte* to) {
  const Index depth = depth_of(head_dim);
  for (Index r = 0; r < rows; ++r, from += head_dim, to += depth * 2) {
    for (Index e = 0; e < depth; e += STEP) {
      const auto half = [&](Index at) __attribute__((always_inline)) {
        if (at + LANES <= head_dim) return load(from + at);
        return at < head_dim ? load_first(from + at, head_dim - at) : Floats{};
      };
      store_words(to + e * 2, run_bf16(half(e), half(e + LANES)));
    }
  }
}

// Pairs of rows of integers, as bfloat16; zeros up to `padded_pairs`.
void expand_pairs(const Byte* from, Index pairs, Index padded_pairs, Index width, Byte* to) {
  for (Index pair = 0; pair < pairs; ++pair, from += 2 * width, to += 4 * width) {
    for (Index column = 0; column < width; column += TILE) {
      store_words(to + column * 4,
                  pair_bf16(widen_bytes(from + column), widen_bytes(from + width + column)));
    }
  }
  __builtin_memset(to, 0, static_cast<std::size_t>((padded_pairs - pairs) * width * 4));
}

// A tile of keys as products take it: in place, or copied to `to`.
template <typename Tile>
const Byte* keys_for(const Byte* tile, Index head_dim, Byte* to) {
  const Index depth = depth_of(head_dim);
  if constexpr (Tile::SCALED) {
    expand_pairs(tile + Tile::START, head_dim / 2, depth / 2, TILE, to);
    return to;
  }
  if (depth == head_dim) return tile;
  __builtin_memcpy(to, tile, static_cast<std::size_t>(head_dim * TILE * 2));
  __builtin_memset(to + head_dim * TILE * 2, 0,
                   static_cast<std::size_t>((depth - head_dim) * TILE * 2));
  return to;
}

// scores[r][16 t …] = queries[r] · keys of tile t, for `tiles` tiles, GROUP at most.
template <typename Tile, int BLOCKS>
void score(const Byte* queries, Index head_dim, const Byte* const* keys, Index offset, Index tiles,
           Byte* copies, float* scores, Ahead ahead) {
  constexpr int COLUMNS = columns_for(BLOCKS), ROUNDS = Tile::SCALED ? 2 : 4;
  const Index depth = depth_of(head_dim), steps = depth / STEP;
  const Byte* right[GROUP];
  for (Index t = 0; t < tiles; ++t) {
    right[t] = keys_for<Tile>(keys[t] + offset, head_dim, copies + t * depth * TILE * 2);
  }
  const Left left = {queries, depth * 2, STEP * 2};
  const auto run = [&]<int SOME>(Index t) __attribute__((always_inline)) {
    multiply<BLOCKS, SOME>(
        left, steps, LINE, [&](Index step, int c) { return right[t + c] + step * STEP * TILE * 2; },
        scores + t * TILE, SCORES_STRIDE, false, ROUNDS, ahead);
  };
  Index t = 0;
  for (; t + COLUMNS <= tiles; t += COLUMNS) run.template operator()<COLUMNS>(t);
  for (; t < tiles; ++t) run.template operator()<1>(t);
}

// 2^x for x up to a little over 0, as weights that are then rounded: relative error 3e-6, 0 below
// -126 once rounded, NaN stays NaN.
OCTAVO_INLINE Floats exp2_rounded(Floats x) {
  const Floats magic = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer
  const Floats bounded = max(splat(-150.0f), x);
  const Floats n = (bounded + magic) - magic;
  const Floats f = bounded - n;
  Floats p = splat(9.5701e-3f);
  p = fma(p, f, splat(5.591786e-2f));
  p = fma(p, f, splat(2.4024745e-1f));
  p = fma(p, f, splat(6.9312181e-1f));
  p = fma(p, f, splat(9.9999926e-1f));
  return scale_by(p, n);
}

// Scores of the positions seen become weights relative to their maximum, rounded; zeros before and
// after, in the pairs of tiles from `begin` to `end`. result[0] is the maximum, in powers of two,
// result[1] the sum of the weights.
template <typename Tile>
void weigh(float* scores, Seen seen, float scale, const Tiles& tiles, Index offset, Index begin,
           Index end, Byte* weights, float* result) {
  const Index low = seen.first / STEP * STEP, high = padded(seen.last, STEP);
  if constexpr (Tile::SCALED) {
    for (Index t = seen.first / TILE; t * TILE < seen.last; ++t) {
      float* const some = scores + t * TILE;
      store(some, load(some) * Tile::scales(tiles.keys[t] + offset, 0));
    }
  }
  for (Index i = low; i < seen.first; ++i) scores[i] = -__builtin_inff();
  for (Index i = seen.last; i < high; ++i) scores[i] = -__builtin_inff();
  Floats most = splat(-__builtin_inff());
  for (Index i = low; i < high; i += LANES) most = max(load(scores + i), most);
  const float top = max(most) * scale;
  Floats total = {};
  for (Index i = low; i < high; i += STEP) {
    Floats each[2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const Floats score = load(scores + i + half * LANES);
      each[half] = exp2_rounded(fma(score, splat(scale), splat(-top)));
    }
    total += each[0] + each[1];
    if constexpr (Tile::SCALED) {
      for (int half = 0; half < 2; ++half) {
        const Index t = i / TILE + half;
        if (t < begin || t >= end) continue;
        const Floats scaled = each[half] * Tile::scales(tiles.values[t] + offset, 0);
        each[half] = select(each[half] == Floats{}, Floats{}, scaled);
      }
    }
    store_words(weights + i * 2, run_bf16(each[0], each[1]));
  }
  for (Index i = begin / PAIR * STEP; i < low; i += STEP) store_words(weights + i * 2, Words{});
  for (Index i = high; i < end * TILE; i += STEP) store_words(weights + i * 2, Words{});
  result[0] = top;
  result[1] = sum(total);
}

// What positions first … last - 1 of a tile of values hold, zeros elsewhere. False if any of that
// is not finite.
bool copy_seen(const Byte* tile, Index width, Index first, Index last, Byte* to) {
  Ints broken = {};
  for (Index pair = 0; pair < TILE / 2; ++pair) {
    const bool even = 2 * pair >= first && 2 * pair < last;
    const bool odd = 2 * pair + 1 >= first && 2 * pair + 1 < last;
    const Words mask = splat_word((even ? 0xffffu : 0u) | (odd ? 0xffff0000u : 0u));
    for (Index column = 0; column < width; column += TILE) {
      const Index at = (pair * width + column) * 4;
      const Words kept = load_words(tile + at) & mask;
      broken |= ((kept & 0x7f80u) == 0x7f80u) | ((kept & 0x7f800000u) == 0x7f800000u);
      store_words(to + at, kept);
    }
  }
  Ints any = broken;
  bool finite = true;
  for (int i = 0; i < LANES; ++i) finite = finite && any[i] == 0;
  return finite;
}

// One head's part in a call: some rows, what they see, and where their sums go.
struct Blend {
  const Byte* weights;  // [rows, WEIGHTS_STRIDE]
  const Seen* seen;     // [rows]
  Index rows;
  float* results;  // of the first row; `record` floats each
  Index record;
  Index width;
};

// results[r] = Σ weights[r][i] · values[i] over the positions of some pairs of tiles, the first of
// them tile `first`; added to what it holds if `onward`.
template <int BLOCKS>
void blend_pairs(const Blend& blend, const Byte* const* values, Index first, Index pairs,
                 bool onward, int rounds, Ahead& ahead) {
  constexpr int COLUMNS = columns_for(BLOCKS);
  const Left left = {blend.weights + first * TILE * 2, WEIGHTS_STRIDE, STEP * 2};
  const auto run = [&]<int SOME>(Index column) __attribute__((always_inline)) {
    multiply<BLOCKS, SOME>(
        left, pairs, blend.width * 4,
        [&](Index step, int c) { return values[step] + (column + c * TILE) * 4; },
        blend.results + column, blend.record, onward, rounds, ahead);
  };
  Index column = 0;
  for (; column + COLUMNS * TILE <= blend.width; column += COLUMNS * TILE)
    run.template operator()<COLUMNS>(column);
  for (; column < blend.width; column += TILE) run.template operator()<1>(column);
}

// Makes tiles t and t + 1 of values ready for one product: what rows of `blend` see of them. Zeros
// for what they do not, and for tiles outside begin … end - 1. `finite` as in copy_seen.
struct Pair {
  const Byte* values;
  bool finite;
};

template <typename Tile>
Pair ready(const Blend& blend, Seen seen, Seen whole, const Byte* const* values, Index offset,
           Index t, Byte* copy) {
  const Index tile_bytes = blend.width * TILE * 2;
  const auto interior = [&](Index tile) {
    return tile * TILE >= whole.first && (tile + 1) * TILE <= whole.last;
  };
  const bool inside = interior(t) && interior(t + 1);
  if constexpr (!Tile::SCALED) {
    if (inside && values[t + 1] == values[t] + tile_bytes) return {values[t] + offset, true};
  }
  bool finite = true;
  for (Index i = 0; i < PAIR; ++i, copy += tile_bytes) {
    const Index start = (t + i) * TILE;
    if (start + TILE <= seen.first || start >= seen.last) {
      __builtin_memset(copy, 0, static_cast<std::size_t>(tile_bytes));
      continue;
    }
    const Byte* const tile = values[t + i] + offset;
    if constexpr (Tile::SCALED) {
      expand_pairs(tile + Tile::START, TILE / 2, TILE / 2, blend.width, copy);
    } else if (interior(t + i)) {
      for (Index at = 0; at < tile_bytes; at += LINE) store_words(copy + at, load_words(tile + at));
    } else {
      finite &= copy_seen(tile, blend.width, seen.first - start, seen.last - start, copy);
    }
  }
  return {copy - PAIR * tile_bytes, finite};
}

// What blend_pairs does, for one pair and row by row, each with a copy of what it sees.
template <typename Tile>
void blend_apart(const Blend& blend, const Byte* const* values, Index offset, Index t, bool onward,
                 Byte* copy, Ahead& ahead) {
  for (Index r = 0; r < blend.rows; ++r) {
    const Blend row = {blend.weights + r * WEIGHTS_STRIDE, blend.seen + r, 1,
                       blend.results + r * blend.record,   blend.record,   blend.width};
    const Pair pair = ready<Tile>(row, *row.seen, {0, 0}, values, offset, t, copy);
    open_tiles(shapes_of<1>(1));
    blend_pairs<1>(row, &pair.values, t, 1, onward, 0, ahead);
    close_tiles();
  }
}

// Some tiles of values for one head, from the even tile t on, BLENDED at most. `copies` has room
// for them.
template <typename Tile, int BLOCKS>
void blend_group(const Blend& blend, const Byte* const* values, Index offset, Index t, Index tiles,
                 bool onward, Byte* copies, Ahead ahead) {
  constexpr int ROUNDS = Tile::SCALED ? 2 : 4;
  const Seen first = blend.seen[0], last = blend.seen[blend.rows - 1];
  const Index pairs = quotient_up(tiles, PAIR), pair_bytes = blend.width * STEP * 2;
  const Byte* right[BLENDED / PAIR];
  bool finite = true;
  for (Index i = 0; i < pairs; ++i) {
    const Pair pair = ready<Tile>(blend, {first.first, last.last}, {last.first, first.last}, values,
                                  offset, t + i * PAIR, copies + i * pair_bytes);
    right[i] = pair.values;
    finite &= pair.finite;
  }
  if (finite) {
    blend_pairs<BLOCKS>(blend, right, t, pairs, onward, ROUNDS, ahead);
    return;
  }
  close_tiles();
  for (Index i = 0; i < pairs; ++i) {
    blend_apart<Tile>(blend, values, offset, t + i * PAIR, onward || i > 0, copies, ahead);
  }
  open_tiles(shapes_of<BLOCKS>(blend.rows));
}

// Keys, then values: group by group of tiles all heads, so that memory is used page by page. While
// one group is used the one after is fetched.
template <typename Tile, int BLOCKS>
void attend_rows(const Shape& shape, const Part& part, Index rows, const float* queries,
                 const Seen* seen, Byte* scratch, float* results) {
  const Index head_dim = shape.head_dim, depth = depth_of(head_dim);
  const Index tile_bytes = Tile::tile_bytes(head_dim);
  const Byte *const *keys = part.tiles.keys, *const *values = part.tiles.values;
  const Index begin = seen[0].first / TILE, end = padded(seen[rows - 1].last, TILE) / TILE;
  const Room room = room_of(shape, part.heads, rows, scratch);
  open_tiles(shapes_of<BLOCKS>(rows));
  for (Index t = begin; t < end; t += GROUP) {
    const Group next = t + GROUP < end ? group_at(keys, t + GROUP, end, tile_bytes)
                                       : group_at(values, begin, end, tile_bytes);
    for (Index h = 0; h < part.heads; ++h) {
      const Index offset = h * part.head_stride;
      Byte* const rounded = room.queries + h * rows * depth * 2;
      if (t == begin) round_rows(queries + h * part.rows * head_dim, rows, head_dim, rounded);
      score<Tile, BLOCKS>(rounded, head_dim, keys + t, offset, smaller(GROUP, end - t), room.tiles,
                          room.scores + h * rows * SCORES_STRIDE + t * TILE, next.of_head(offset));
    }
  }
  for (Index h = 0; h < part.heads; ++h) {
    for (Index r = 0; r < rows; ++r) {
      Byte* const weights = room.weights + (h * rows + r) * WEIGHTS_STRIDE;
      if (seen[r].first >= seen[r].last) {
        __builtin_memset(weights, 0, PARTITION * 2);
        continue;
      }
      weigh<Tile>(room.scores + (h * rows + r) * SCORES_STRIDE, seen[r], shape.scale, part.tiles,
                  h * part.head_stride, begin, end, weights,
                  results + (h * part.rows + r) * shape.record);
    }
  }
  const Index start = begin / PAIR * PAIR, length = part.heads > 1 ? GROUP : BLENDED;
  for (Index t = start; t < end; t += length) {
    const Group next = group_at(values, smaller(t + length, end), end, tile_bytes, part.next);
    for (Index h = 0; h < part.heads; ++h) {
      const Blend blend = {room.weights + h * rows * WEIGHTS_STRIDE,
                           seen,
                           rows,
                           results + h * part.rows * shape.record + RESULT_HEAD,
                           shape.record,
                           shape.width};
      const Index offset = h * part.head_stride;
      blend_group<Tile, BLOCKS>(blend, values, offset, t, smaller(length, end - t), t > start,
                                room.tiles, next.of_head(offset));
    }
  }
  close_tiles();
}

template <typename Tile>
AttendRows attend_rows_of(Index rows) {
  return rows <= BLOCK_ROWS ? attend_rows<Tile, 1> : attend_rows<Tile, 2>;
}

}  // namespace

}  // namespace octavo::OCTAVO_SET
