// The products of attention: some rows of queries by the tiles of one partition of a context, all
// sums in registers.
//
//   scores [rows, 256] = queries · keysᵀ      tile by tile, sums over E in ascending order
//   weights = 2^(scale · log2 e · scores - max), and their sum in a fixed order of lanes
//   result [rows, E] = weights · values       sums over positions in ascending order
//
// A row takes part from the first position it sees to the last and not one further: nothing is
// masked by multiplying with zero, and its bits do not depend on the other rows.
#pragma once

#include "attention_part.h"

namespace octavo::OCTAVO_SET {

namespace {

constexpr int WIDTH = TILE / LANES;  // vectors across a tile
constexpr int REGISTERS = LANES == 16 ? 32 : 16;

// Registers for R · C · WIDTH sums, some vectors of the columns, one row's factor, and one to
// spare. One register too many costs a third of the speed: sums are then spilled in the inner loop.
constexpr bool fit(int rows, int columns, int loaded) {
  return rows * columns * WIDTH + loaded + 2 <= REGISTERS;
}

constexpr int least_loaded() { return WIDTH < 2 ? WIDTH : 2; }

// Vectors of C columns to hold at a time, for all rows to meet: the fewer, the more often the
// factors of rows are read.
constexpr int loaded(int rows, int columns) {
  int vectors = columns * WIDTH;
  while (vectors > 1 && !fit(rows, columns, vectors)) vectors /= 2;
  return vectors;
}

// Tiles side by side that fill the registers when only R rows share them.
constexpr int beside(int rows) {
  int columns = static_cast<int>(GROUP);
  while (columns > 1 && !fit(rows, columns, least_loaded())) columns /= 2;
  return columns;
}

// More than eight rows keep no unit busier, they only make more code.
constexpr int most_rows() {
  int rows = 1;
  while (rows < 8 && fit(rows + 1, 1, least_loaded())) ++rows;
  return rows;
}

constexpr int MOST_ROWS = most_rows();
constexpr Index ITEM_ROWS = 48;  // of a head: so many keep a partition's tiles in cache

// sums[r][c] += left[r][0] · even(right[c]) + left[r][1] · odd(right[c]): R rows with a pair of
// rows of C times 16 columns, `at` bytes on.
template <typename Tile, int R, int C>
OCTAVO_INLINE void multiply_pair(const float* left, Index left_stride, const Byte* const* right,
                                 Index pair_bytes, Index at, Floats (&sums)[R][C * WIDTH]) {
  constexpr int LOADED = loaded(R, C);
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; ++odd) {
#pragma GCC unroll 16
    for (int first = 0; first < C * WIDTH; first += LOADED) {
      Floats columns[LOADED];
#pragma GCC unroll 16
      for (int i = 0; i < LOADED; ++i) {
        const int c = first + i;
        const Byte* const pair = right[c / WIDTH] + at + c % WIDTH * LANES * Tile::COLUMN;
        columns[i] = Tile::row_of(pair, pair_bytes, odd);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        multiply_row(left + r * left_stride + odd, columns, sums[r] + first);
      }
    }
  }
}

// sums[r][c] += Σ_j left[r][j] · right[c][j], pair by pair in ascending order, and for each line of
// `right` asks for one that lies `ahead`.
template <typename Tile, int R, int C>
OCTAVO_INLINE void multiply(const float* left, Index left_stride, const Byte* const* right,
                            Index pair_bytes, Index pairs, Floats (&sums)[R][C * WIDTH],
                            Ahead& ahead) {
  constexpr int LINES = GROUP / C, PAIRS = Tile::PAIRS_A_LINE;
  Index j = 0;
  for (; j + LINES * PAIRS <= pairs; ahead.offset += ahead.step) {
#pragma GCC unroll 16
    for (int line = 0; line < LINES; ++line) {
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) {
        __builtin_prefetch(ahead.places[line * C + c] + ahead.offset, 0, 2);
      }
#pragma GCC unroll 2
      for (int pair = 0; pair < PAIRS; ++pair, ++j) {
        multiply_pair<Tile, R, C>(left + 2 * j, left_stride, right, pair_bytes, j * pair_bytes,
                                  sums);
      }
    }
  }
  for (; j < pairs; ++j) {
    multiply_pair<Tile, R, C>(left + 2 * j, left_stride, right, pair_bytes, j * pair_bytes, sums);
  }
}

template <typename Tile, int R, int C>
OCTAVO_INLINE void score_tiles(const float* queries, Index head_dim, const Byte* const* keys,
                               Index offset, float* scores, Ahead& ahead) {
  Floats sums[R][C * WIDTH] = {};
  const Byte* right[C];
#pragma GCC unroll 16
  for (int c = 0; c < C; ++c) right[c] = keys[c] + offset + Tile::START;
  multiply<Tile, R, C>(queries, head_dim, right, Tile::pair_bytes(TILE), head_dim / 2, sums, ahead);
#pragma GCC unroll 16
  for (int c = 0; c < C * WIDTH; ++c) {
    if constexpr (Tile::SCALED) {
      const Floats scales = Tile::scales(keys[c / WIDTH] + offset, c % WIDTH);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sums[r][c] *= scales;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) store(scores + r * PARTITION + c * LANES, sums[r][c]);
  }
}

// scores[r][16 t …] = queries[r] · keys of tile t, for `tiles` tiles.
template <typename Tile, int R>
void score(const float* queries, Index head_dim, const Byte* const* keys, Index offset, Index tiles,
           float* scores, Ahead ahead) {
  constexpr int C = beside(R);
  Index t = 0;
  for (; t + C <= tiles; t += C) {
    score_tiles<Tile, R, C>(queries, head_dim, keys + t, offset, scores + t * TILE, ahead);
  }
  for (; t < tiles; ++t) {
    score_tiles<Tile, R, 1>(queries, head_dim, keys + t, offset, scores + t * TILE, ahead);
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

// Weights of positions become weights of the integers that stand for their values.
template <typename Tile>
OCTAVO_INLINE void scale_weights(float* weights, const Byte* const* values, Index offset,
                                 Seen seen) {
  for (Index t = seen.first / TILE; t * TILE < seen.last; ++t) {
    for (int w = 0; w < WIDTH; ++w) {
      float* const some = weights + t * TILE + w * LANES;
      store(some, load(some) * Tile::scales(values[t] + offset, w));
    }
  }
}

template <typename Tile, int R, int C>
OCTAVO_INLINE void blend_columns(const float* weights, const Byte* const* values, Index offset,
                                 Index pair_bytes, Index tiles, float* results, Index record,
                                 bool onward, Ahead& ahead) {
  Floats sums[R][C * WIDTH] = {};
  if (onward) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
      for (int c = 0; c < C * WIDTH; ++c) sums[r][c] = load(results + r * record + c * LANES);
    }
  }
  for (Index t = 0; t < tiles; ++t) {
    const Byte* right[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) right[c] = values[t] + offset + c * TILE * Tile::COLUMN;
    multiply<Tile, R, C>(weights + t * TILE, PARTITION, right, pair_bytes, TILE / 2, sums, ahead);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int c = 0; c < C * WIDTH; ++c) store(results + r * record + c * LANES, sums[r][c]);
  }
}

// results[r] = Σ weights[r][i] · values[i] over the positions of `tiles` tiles, added to what it
// holds if `onward`.
template <typename Tile, int R>
void blend(const float* weights, const Byte* const* values, Index offset, Index width, Index tiles,
           float* results, Index record, bool onward, Ahead ahead) {
  constexpr int C = beside(R);
  const Index pair_bytes = Tile::pair_bytes(width), start = offset + Tile::START;
  Index column = 0;
  for (; column + C * TILE <= width; column += C * TILE) {
    blend_columns<Tile, R, C>(weights, values, start + column * Tile::COLUMN, pair_bytes, tiles,
                              results + column, record, onward, ahead);
  }
  for (; column < width; column += TILE) {
    blend_columns<Tile, R, 1>(weights, values, start + column * Tile::COLUMN, pair_bytes, tiles,
                              results + column, record, onward, ahead);
  }
}

// What `blend` does, for some positions of one row: first … last - 1. Goes on from `result`.
template <typename Tile>
void blend_row(const float* weights, const Byte* const* values, Index offset, Index width,
               Index first, Index last, float* result) {
  const Index pair_bytes = Tile::pair_bytes(width);
  for (Index column = 0; column < width; column += TILE) {
    Floats sums[WIDTH];
    for (int w = 0; w < WIDTH; ++w) sums[w] = load(result + column + w * LANES);
    for (Index i = first; i < last; ++i) {
      const Byte* const tile = values[i / TILE] + offset + Tile::START + column * Tile::COLUMN;
      const Byte* const pair = tile + i % TILE / 2 * pair_bytes;
      for (int w = 0; w < WIDTH; ++w) {
        const Byte* const some = pair + w * LANES * Tile::COLUMN;
        const Floats value = Tile::row_of(some, pair_bytes, static_cast<int>(i % 2));
        accumulate(sums[w], splat(weights[i]), value);
      }
    }
    for (int w = 0; w < WIDTH; ++w) store(result + column + w * LANES, sums[w]);
  }
}

// One partition for R rows of each head, of which each sees as much or a little further than the
// one before. The tiles that all of them see are shared. Rows that see nothing get no result.
//
//     row 0       ▒▒██████████▒▒▒
//     row 1        ▒██████████▒▒▒▒         █ shared tiles
//     row 2         ██████████▒▒▒▒▒        ▒ row by row
//
// Keys, then values: group by group of tiles all heads, so that memory is used page by page. While
// one group is used the one after is fetched.
template <typename Tile, int R>
void attend_rows(const Shape& shape, const Part& part, Index, const float* queries,
                 const Seen* seen, Byte* scratch, float* results) {
  float* const scores = reinterpret_cast<float*>(scratch);  // [heads, R, 256]
  const Index head_dim = shape.head_dim, width = shape.width, record = shape.record;
  const Index tile_bytes = Tile::tile_bytes(head_dim);
  const Byte *const *keys = part.tiles.keys, *const *values = part.tiles.values;
  const Index begin = seen[0].first / TILE, end = padded(seen[R - 1].last, TILE) / TILE;
  const Index first = padded(seen[R - 1].first, TILE), last = seen[0].last / TILE * TILE;
  const bool shares = first < last;
  for (Index t = begin; t < end; t += GROUP) {
    const Group next = t + GROUP < end ? group_at(keys, t + GROUP, end, tile_bytes)
                       : shares        ? group_at(values, first / TILE, last / TILE, tile_bytes)
                                       : group_at(values, begin, end, tile_bytes);
    for (Index h = 0; h < part.heads; ++h) {
      const Index offset = h * part.head_stride;
      score<Tile, R>(queries + h * part.rows * head_dim, head_dim, keys + t, offset,
                     smaller(GROUP, end - t), scores + h * R * PARTITION + t * TILE,
                     next.of_head(offset));
    }
  }
  for (Index h = 0; h < part.heads; ++h) {
    for (int r = 0; r < R; ++r) {
      if (seen[r].first >= seen[r].last) continue;
      float* const weights = scores + (h * R + r) * PARTITION;
      float* const result = results + (h * part.rows + r) * record;
      weigh(weights, seen[r], shape.scale, result);
      if constexpr (Tile::SCALED) {
        scale_weights<Tile>(weights, values, h * part.head_stride, seen[r]);
      }
      if (shares && first == 0) continue;
      for (Index i = 0; i < width; ++i) result[RESULT_HEAD + i] = 0.0f;
      blend_row<Tile>(weights, values, h * part.head_stride, width, seen[r].first,
                      shares ? first : seen[r].last, result + RESULT_HEAD);
    }
  }
  if (!shares) return;
  for (Index t = first / TILE; t < last / TILE; t += GROUP) {
    const Group next = group_at(values, smaller(t + GROUP, end), end, tile_bytes, part.next);
    for (Index h = 0; h < part.heads; ++h) {
      const Index offset = h * part.head_stride;
      blend<Tile, R>(scores + h * R * PARTITION + t * TILE, values + t, offset, width,
                     smaller(GROUP, last / TILE - t),
                     results + h * part.rows * record + RESULT_HEAD, record, t > 0,
                     next.of_head(offset));
    }
  }
  for (Index h = 0; h < part.heads; ++h) {
    for (int r = 0; r < R; ++r) {
      blend_row<Tile>(scores + (h * R + r) * PARTITION, values, h * part.head_stride, width, last,
                      seen[r].last, results + (h * part.rows + r) * record + RESULT_HEAD);
    }
  }
}

template <typename Tile, int R = 1>
AttendRows attend_rows_of(Index rows) {
  if constexpr (R < MOST_ROWS) {
    if (rows != R) return attend_rows_of<Tile, R + 1>(rows);
  }
  return attend_rows<Tile, R>;
}

Index scratch_bytes(const Shape&, Index heads, Index rows) {
  return heads * smaller(rows, MOST_ROWS) * PARTITION * 4;
}

}  // namespace

}  // namespace octavo::OCTAVO_SET
