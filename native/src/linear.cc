// out = act(norm(x) · weightᵀ + bias) (+ out), in any number of rows.
//
//   prepare   each row of x, normed if asked, goes to a scratch array in the set's element type,
//             zero padded and cut into runs of inputs: `x[run][row][inputs of the run]`
//   pieces    (block of rows) × (chunk of panels), rows fast to stay in the second-level cache;
//             within a piece: run of inputs → group of panels → tile of rows, sums in scratch
//   finish    bias, activation and addition as a piece's sums are written out
#include "activation.h"
#include "linear_tile.h"
#include "octavo/kernels.h"
#include "rows.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

namespace {

// Measured on Zen 3 (32 KiB and 512 KiB of cache a core).
constexpr Index RUN_INPUTS = 640;            // of one panel: 20 KiB
constexpr Index BLOCK_BYTES = 192 * 1024;    // of x in one block and run
constexpr Index CHUNK_BYTES = 64 * 1024;     // of weights in a piece, at least
constexpr Index CHUNK_PANELS = 16;           // in a piece, at most
constexpr Index PIECES_PER_THREAD = 6;       // wanted, so that a slow thread holds nobody up
constexpr Index PREPARED_ALONE = 16 * 1024;  // elements of x; more are shared out

constexpr Index least(Index a, Index b) { return a < b ? a : b; }
constexpr Index most(Index a, Index b) { return a > b ? a : b; }
constexpr Index quotient_up(Index a, Index b) { return (a + b - 1) / b; }

using MultiplyTile = void (*)(const TileArgs<Element>&);

struct Tiles {
  MultiplyTile group;   // panels_for(steps) panels
  MultiplyTile single;  // one panel
  Index panels;
};

template <int STEPS>
constexpr Tiles tiles_of() {
  return {multiply_tile<STEPS, panels_for(STEPS)>, multiply_tile<STEPS, 1>, panels_for(STEPS)};
}

template <int... STEPS>
struct TileTable {
  Tiles of[sizeof...(STEPS) + 1] = {{}, tiles_of<STEPS>()...};
};

#if OCTAVO_TILES
constexpr TileTable<1, 2> TILES;
#elif OCTAVO_LANES == 16
constexpr TileTable<1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12> TILES;
#elif OCTAVO_LANES == 8
constexpr TileTable<1, 2, 3, 4, 5, 6> TILES;
#else
constexpr TileTable<1, 2, 3> TILES;
#endif

// The way a product is cut up. Rows are counted in steps of ROW_STEP.
struct Plan {
  const LinearArgs* args;
  Pool* pool;
  Element* x;      // prepared: [runs, steps · ROW_STEP, x_stride]
  Index x_stride;  // an odd number of cache lines: rows spread over all cache sets
  Index inputs;    // K, padded
  Index run;       // inputs of one run
  Index runs;
  Index steps;  // of rows
  Index tiles;  // of rows; their sizes differ by one step at most
  Index block;  // tiles in a block
  Index blocks;
  Index panels;
  Index chunk;  // panels in a piece
  Index chunks;
  Index widest_block;  // rows in the largest block
};

Index tile_start(const Plan& plan, Index tile) {
  const Index extra = plan.steps % plan.tiles;
  return tile * (plan.steps / plan.tiles) + least(tile, extra);
}

Index odd_lines(Index elements) {
  constexpr Index LINE = 64 / static_cast<Index>(sizeof(Element));
  return (quotient_up(elements, LINE) | 1) * LINE;
}

Plan make_plan(const LinearArgs& args, Pool& pool) {
  Plan plan{};
  plan.args = &args;
  plan.pool = &pool;
  plan.inputs = OCTAVO_PADDED(args.weight.columns, DEPTH);
  plan.steps = quotient_up(args.rows, ROW_STEP);
  plan.tiles = quotient_up(plan.steps, MAX_STEPS);
  const Index runs = plan.tiles == 1 ? 1 : quotient_up(plan.inputs, RUN_INPUTS);
  plan.run = OCTAVO_PADDED(quotient_up(plan.inputs, runs), DEPTH);
  plan.runs = quotient_up(plan.inputs, plan.run);
  plan.x_stride = odd_lines(plan.run);
  const Index tile_rows = quotient_up(plan.steps, plan.tiles) * ROW_STEP;
  const Index tile_bytes = tile_rows * plan.run * static_cast<Index>(sizeof(Element));
  plan.blocks = quotient_up(plan.tiles, most(1, BLOCK_BYTES / tile_bytes));
  plan.block = quotient_up(plan.tiles, plan.blocks);
  plan.blocks = quotient_up(plan.tiles, plan.block);
  plan.widest_block = plan.block * tile_rows;

  const Index unit = args.weight.gated ? 2 : 1;
  const Index units = quotient_up(args.weight.rows, unit * PANEL);
  plan.panels = units * unit;
  const Index group = TILES.of[least(plan.steps, MAX_STEPS)].panels;
  const Index pieces = quotient_up(pool.threads() * PIECES_PER_THREAD, plan.blocks);
  const Index panel_bytes = plan.inputs * PANEL * 2;
  const Index wanted =
      most(plan.panels / pieces, quotient_up(CHUNK_BYTES, panel_bytes * plan.blocks));
  plan.chunk = OCTAVO_PADDED(least(most(wanted, 1), CHUNK_PANELS), group * unit);
  plan.chunks = quotient_up(plan.panels, plan.chunk);
  return plan;
}

Element* prepared(const Plan& plan, Index run, Index row) {
  return plan.x + (run * plan.steps * ROW_STEP + row) * plan.x_stride;
}

OCTAVO_INLINE float to_element(float value, float) { return value; }
OCTAVO_INLINE Bf16 to_element(float value, Bf16) { return round_bf16(value); }

// `row_scratch` holds K floats. Rows beyond the last are zeros.
void prepare_row(const Plan& plan, Index row, float* row_scratch) {
  const LinearArgs& args = *plan.args;
  const Index width = args.weight.columns;
  const float* from = args.x + row * width;
  if (row < args.rows && args.norm.weight != nullptr) {
    normalise(from, width, args.norm, row_scratch);
    from = row_scratch;
  }
  const Index filled = row < args.rows ? width : 0;
  for (Index run = 0; run < plan.runs; ++run) {
    const Index start = run * plan.run, stop = least(start + plan.run, plan.inputs);
    Element* const to = prepared(plan, run, row) - start;
    Index k = start;
    for (; k < least(stop, filled); ++k) to[k] = to_element(from[k], Element{});
    for (; k < stop; ++k) to[k] = Element{};
  }
}

constexpr Index PREPARED_ROWS = 8;

void prepare_piece(void* state, Index piece, int thread) {
  const Plan& plan = *static_cast<const Plan*>(state);
  const std::size_t bytes = static_cast<std::size_t>(plan.inputs) * sizeof(float);
  float* const scratch = static_cast<float*>(plan.pool->local(thread, bytes));
  const Index stop = least((piece + 1) * PREPARED_ROWS, plan.steps * ROW_STEP);
  for (Index row = piece * PREPARED_ROWS; row < stop; ++row) prepare_row(plan, row, scratch);
}

void prepare(Plan& plan) {
  const Index rows = plan.steps * ROW_STEP;
  const Index elements = plan.runs * rows * plan.x_stride;
  plan.x = static_cast<Element*>(
      plan.pool->shared(static_cast<std::size_t>(elements) * sizeof(Element)));
  const Index pieces = quotient_up(rows, PREPARED_ROWS);
  if (rows * plan.inputs > PREPARED_ALONE) {
    plan.pool->run(pieces, prepare_piece, &plan);
  } else {
    for (Index piece = 0; piece < pieces; ++piece) prepare_piece(&plan, piece, 0);
  }
}

// One vector of outputs from column `first` on; `count` of its lanes are columns of the matrix.
OCTAVO_INLINE void finish_plain(const LinearArgs& args, Floats sums, Index first, Index count,
                                float* out) {
  if (count >= LANES) {
    if (args.bias != nullptr) sums += load(args.bias + first);
    if (args.add) sums = load(out) + sums;
    store(out, sums);
  } else {
    if (args.bias != nullptr) sums += load_first(args.bias + first, count);
    if (args.add) sums = load_first(out, count) + sums;
    store_first(out, sums, count);
  }
}

OCTAVO_INLINE void finish_gated(const LinearArgs& args, Floats gate, Floats up, Index first,
                                Index count, float* out) {
  const Index half = args.weight.rows / 2;
  const Index lanes = least(count, LANES);
  if (args.bias != nullptr) {
    gate += load_first(args.bias + first, lanes);
    up += load_first(args.bias + half + first, lanes);
  }
  Floats value = args.gate == Gate::silu ? silu(gate) : gelu_tanh(gate);
  value *= up;
  if (count >= LANES) {
    if (args.add) value = load(out) + value;
    store(out, value);
  } else {
    if (args.add) value = load_first(out, count) + value;
    store_first(out, value, count);
  }
}

void finish(const Plan& plan, const float* sums, Index sums_stride, Index row, Index rows,
            Index panel, Index panels) {
  const LinearArgs& args = *plan.args;
  const bool gated = args.weight.gated;
  const Index width = gated ? args.weight.rows / 2 : args.weight.rows;
  const Index start = (gated ? panel / 2 : panel) * PANEL;
  const Index stop = least(start + (gated ? panels / 2 : panels) * PANEL, width);
  for (Index r = 0; r < rows; ++r, sums += sums_stride) {
    float* const out = args.out + (row + r) * width;
    for (Index n = start; n < stop; n += LANES) {
      const Index offset = n - start;
      if (gated) {
        const float* const pair = sums + offset / PANEL * 2 * PANEL + offset % PANEL;
        finish_gated(args, load(pair), load(pair + PANEL), n, stop - n, out + n);
      } else {
        finish_plain(args, load(sums + offset), n, stop - n, out + n);
      }
    }
  }
}

// One run of inputs for all tiles of a block: group by group, each panel read once from memory
// and then from cache.
void multiply_run(const Plan& plan, Index first_tile, Index last_tile, Index panel, Index panels,
                  Index run, float* sums, Index sums_stride) {
  const Index input = run * plan.run;
  const Index top = tile_start(plan, first_tile);
  const Index group = TILES.of[tile_start(plan, first_tile + 1) - top].panels;
  TileArgs<Element> tile{};
  tile.x_stride = plan.x_stride;
  tile.panel_stride = plan.inputs * PANEL;
  tile.inputs = least(plan.run, plan.inputs - input);
  tile.sums_stride = sums_stride;
  tile.first = run == 0;
  for (Index p = 0; p < panels; p += group) {
    for (Index t = first_tile; t < last_tile; ++t) {
      const Index step = tile_start(plan, t);
      const Tiles& shape = TILES.of[tile_start(plan, t + 1) - step];
      tile.x = prepared(plan, run, step * ROW_STEP);
      for (Index q = p; q < least(p + group, panels);) {
        const bool whole = q + shape.panels <= least(p + group, panels);
        tile.panels = plan.args->weight.panels + (panel + q) * tile.panel_stride + input * PANEL;
        tile.sums = sums + (step - top) * ROW_STEP * sums_stride + q * PANEL;
        (whole ? shape.group : shape.single)(tile);
        q += whole ? shape.panels : 1;
      }
    }
  }
}

void multiply_piece(void* state, Index piece, int thread) {
  const Plan& plan = *static_cast<const Plan*>(state);
  const Index first_tile = piece / plan.chunks * plan.block;
  const Index last_tile = least(first_tile + plan.block, plan.tiles);
  const Index panel = piece % plan.chunks * plan.chunk;
  const Index panels = least(plan.chunk, plan.panels - panel);
  const Index sums_stride = panels * PANEL;
  const Index sums_bytes =
      plan.widest_block * plan.chunk * PANEL * static_cast<Index>(sizeof(float));
  float* const sums =
      static_cast<float*>(plan.pool->local(thread, static_cast<std::size_t>(sums_bytes)));
  open_tiles();
  for (Index run = 0; run < plan.runs; ++run) {
    multiply_run(plan, first_tile, last_tile, panel, panels, run, sums, sums_stride);
  }
  close_tiles();
  const Index row = tile_start(plan, first_tile) * ROW_STEP;
  const Index stop = least(tile_start(plan, last_tile) * ROW_STEP, plan.args->rows);
  finish(plan, sums, sums_stride, row, stop - row, panel, panels);
}

}  // namespace

void linear(const LinearArgs& args, Pool& pool) {
  if (args.rows == 0) return;
  Plan plan = make_plan(args, pool);
  prepare(plan);
  pool.run(plan.blocks * plan.chunks, multiply_piece, &plan);
}

}  // namespace octavo::OCTAVO_SET
