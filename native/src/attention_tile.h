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

#include "octavo/paging.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

namespace {

constexpr Index TILE = 16;        // tokens
constexpr Index PARTITION = 256;  // positions
constexpr Index PARTITION_TILES = PARTITION / TILE;
constexpr int WIDTH = TILE / LANES;  // vectors across a tile
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

// Of one partition the positions that a row sees, counted from its first one: first … last - 1.
struct Seen {
  Index first;
  Index last;
};

constexpr Index RESULT_HEAD = 16;  // max, sum, and room that keeps outputs aligned

struct Shape {
  Index head_dim;
  Index width;   // E padded to tiles
  Index record;  // floats of one row's result: RESULT_HEAD, then `width` of output
  float scale;   // of scores, in powers of two
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
void attend_rows(const Shape& shape, const Tiles& tiles, const Ahead& ahead, const float* queries,
                 const Seen* seen, float* scores, float* results) {
  const Index head_dim = shape.head_dim, width = shape.width, record = shape.record;
  score<R>(queries, head_dim, tiles.keys, seen[0].first / TILE,
           padded(seen[R - 1].last, TILE) / TILE, scores, ahead.values);
  const Index first = padded(seen[R - 1].first, TILE), last = seen[0].last / TILE * TILE;
  const bool shares = first < last;
  for (int r = 0; r < R; ++r) {
    if (seen[r].first >= seen[r].last) continue;
    float *weights = scores + r * PARTITION, *result = results + r * record;
    weigh(weights, seen[r], shape.scale, result);
    if (shares && first == 0) continue;
    for (Index i = 0; i < width; ++i) result[RESULT_HEAD + i] = 0.0f;
    blend_row(weights, tiles.values, width, seen[r].first, shares ? first : seen[r].last,
              result + RESULT_HEAD);
  }
  if (!shares) return;
  blend<R>(scores, tiles.values, width, first / TILE, last / TILE, results + RESULT_HEAD, record,
           ahead.keys);
  for (int r = 0; r < R; ++r) {
    blend_row(scores + r * PARTITION, tiles.values, width, last, seen[r].last,
              results + r * record + RESULT_HEAD);
  }
}

using AttendRows = void (*)(const Shape&, const Tiles&, const Ahead&, const float*, const Seen*,
                            float*, float*);

template <int R = 1>
AttendRows attend_rows_of(Index rows) {
  if constexpr (R < MOST_ROWS) {
    if (rows != R) return attend_rows_of<R + 1>(rows);
  }
  return attend_rows<R>;
}

}  // namespace

}  // namespace octavo::OCTAVO_SET
