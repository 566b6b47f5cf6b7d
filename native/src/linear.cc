// out = act(norm(x) · weightᵀ + bias) (+ out), in any number of rows.
//
//   prepare   each row of x, normed if asked, goes to scratch in the element type of set and
//             encoding, zero padded and cut into runs of inputs: `x[run][row][inputs of the run]`
//   pieces    (block of rows) × (chunk of panels), rows fast to stay in the second-level cache;
//             within a piece: run of inputs → group of panels → tile of rows, sums in scratch; a
//             group is expanded first if the format asks for it
//   finish    bias, activation and addition as a piece's sums are written out
#include "activation.h"
#include "linear_format.h"
#include "octavo/kernels.h"
#include "rows.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

namespace {

// Measured on Zen 3 (32 KiB and 512 KiB of cache a core).
constexpr Index BLOCK_BYTES = 192 * 1024;    // of x in one block and run
constexpr Index GROUP_BYTES = 20 * 1024;     // of weights that a run keeps for all its rows
constexpr Index CHUNK_BYTES = 64 * 1024;     // of weights in a piece, at least
constexpr Index CHUNK_PANELS = 16;           // in a piece, at most
constexpr Index RUNS_ALONE = 4;              // one tile of rows takes so many runs' inputs in one,
                                             // of panels that it reads from memory itself
constexpr Index PIECES_PER_THREAD = 6;       // wanted, so that a slow thread holds nobody up
constexpr Index PREPARED_ALONE = 16 * 1024;  // elements of x; more are shared out

// Counted for AMX (48 KiB and 2 MiB), not measured.
constexpr Index SHARING_BYTES = 512 * 1024;  // of x in one block, whose rows share expanded panels
constexpr Index EXPANDING = 2;               // tiles of rows: expanding takes as long as they do

constexpr Index least(Index a, Index b) { return a < b ? a : b; }
constexpr Index most(Index a, Index b) { return a > b ? a : b; }
constexpr Index quotient_up(Index a, Index b) { return (a + b - 1) / b; }

// The way a product is cut up. Rows are counted in steps of the format's row_step.
struct Plan {
  const LinearArgs* args;
  const Format* format;
  Pool* pool;
  unsigned char* x;  // prepared: [runs, steps · row_step, x_stride]
  Index x_stride;    // bytes, an odd number of cache lines: rows spread over all cache sets
  Index groups_at;   // bytes from the start of a prepared row to its groups
  Index inputs;      // K, padded
  Index run;         // inputs of one run
  Index runs;
  Index taken;  // bytes of DEPTH inputs of a panel, as tiles take them
  Index steps;  // of rows
  Index tiles;  // of rows; their sizes differ by one step at most
  Index block;  // tiles in a block
  Index blocks;
  Index panels;
  Index widest;  // panels of a tile
  Index chunk;   // panels in a piece
  Index chunks;
  Index widest_block;  // rows in the largest block
};

Index tile_start(const Plan& plan, Index tile) {
  const Index extra = plan.steps % plan.tiles;
  return tile * (plan.steps / plan.tiles) + least(tile, extra);
}

Index odd_lines(Index bytes) { return (quotient_up(bytes, 64) | 1) * 64; }

// How many blocks have at most so many bytes of x, if each but the last has as many tiles.
Index blocks_of(Index tiles, Index tile_bytes, Index most_bytes) {
  const Index fewest = quotient_up(tiles, most(1, most_bytes / tile_bytes));
  return quotient_up(tiles, quotient_up(tiles, fewest));
}

Plan make_plan(const LinearArgs& args, Pool& pool) {
  Plan plan{};
  const PackedView& weight = args.weight;
  const Format& format =
      weight.encoding == Encoding::bf16 ? bf16_format() : quantised_format(weight.encoding);
  plan.args = &args;
  plan.format = &format;
  plan.pool = &pool;
  plan.inputs = OCTAVO_PADDED(weight.columns, DEPTH);
  plan.steps = quotient_up(args.rows, format.row_step);
  plan.tiles = quotient_up(plan.steps, format.max_steps);
  const bool alone = plan.tiles == 1 && format.expand == nullptr;
  const Index run_inputs = format.run_inputs * (alone ? RUNS_ALONE : 1);
  const Index runs = quotient_up(plan.inputs, run_inputs);
  plan.run = OCTAVO_PADDED(quotient_up(plan.inputs, runs), DEPTH);
  plan.runs = quotient_up(plan.inputs, plan.run);
  plan.groups_at = plan.run / DEPTH * format.x_bytes;
  const Index row_bytes = plan.groups_at + plan.run / DEPTH * format.row_group_bytes;
  plan.x_stride = odd_lines(row_bytes);
  plan.taken = format.expand != nullptr ? EXPANDED_GROUP_BYTES : weight.group_bytes;

  const Index unit = weight.gated ? 2 : 1;
  const Index units = quotient_up(weight.rows, unit * PANEL);
  plan.panels = units * unit;
  plan.widest = most(format.tiles[plan.steps / plan.tiles].panels,
                     format.tiles[quotient_up(plan.steps, plan.tiles)].panels);
  const Index tile_rows = quotient_up(plan.steps, plan.tiles) * format.row_step;
  const Index tile_bytes = tile_rows * row_bytes;
  const Index all_pieces = pool.threads() * PIECES_PER_THREAD;
  const Index blocks = blocks_of(plan.tiles, tile_bytes, BLOCK_BYTES);
  plan.blocks = blocks;
  if (format.expand != nullptr) {
    // Fewer and larger ones, as long as there are pieces for all threads.
    const Index needed = quotient_up(all_pieces, quotient_up(plan.panels, plan.widest * unit));
    plan.blocks = most(blocks_of(plan.tiles, tile_bytes, SHARING_BYTES), least(needed, blocks));
  }
  plan.block = quotient_up(plan.tiles, plan.blocks);
  plan.blocks = quotient_up(plan.tiles, plan.block);
  plan.widest_block = plan.block * tile_rows;

  const Index pieces = quotient_up(all_pieces, plan.blocks);
  const Index wanted =
      most(plan.panels / pieces, quotient_up(CHUNK_BYTES, weight.panel_bytes * blocks));
  plan.chunk = OCTAVO_PADDED(least(most(wanted, 1), CHUNK_PANELS), plan.widest * unit);
  plan.chunks = quotient_up(plan.panels, plan.chunk);
  return plan;
}

Index prepared_rows(const Plan& plan) { return plan.steps * plan.format->row_step; }

unsigned char* prepared(const Plan& plan, Index run, Index row) {
  return plan.x + (run * prepared_rows(plan) + row) * plan.x_stride;
}

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
    unsigned char* const to = prepared(plan, run, row);
    RowGroup* const groups = reinterpret_cast<RowGroup*>(to + plan.groups_at);
    const Index count = most(0, least(stop, filled) - start);
    plan.format->prepare(from + start, count, stop - start, to, groups);
  }
}

constexpr Index PREPARED_ROWS = 8;

void prepare_piece(void* state, Index piece, int thread) {
  const Plan& plan = *static_cast<const Plan*>(state);
  const std::size_t bytes = static_cast<std::size_t>(plan.inputs) * sizeof(float);
  float* const scratch = static_cast<float*>(plan.pool->local(thread, bytes));
  const Index stop = least((piece + 1) * PREPARED_ROWS, prepared_rows(plan));
  for (Index row = piece * PREPARED_ROWS; row < stop; ++row) prepare_row(plan, row, scratch);
}

void prepare(Plan& plan) {
  const Index rows = prepared_rows(plan);
  plan.x = static_cast<unsigned char*>(
      plan.pool->shared(static_cast<std::size_t>(plan.runs * rows * plan.x_stride)));
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
    float* const out = args.out + (row + r) * args.out_stride;
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

// Tiles of rows by panels.
struct Piece {
  Index first_tile;
  Index last_tile;
  Index panel;
  Index panels;
  Index next_panel;  // of the piece that this thread likely takes next
};

Piece piece_at(const Plan& plan, Index index) {
  Piece piece{};
  piece.first_tile = index / plan.chunks * plan.block;
  piece.last_tile = least(piece.first_tile + plan.block, plan.tiles);
  piece.panel = index % plan.chunks * plan.chunk;
  piece.panels = least(plan.chunk, plan.panels - piece.panel);
  const Index next = index + plan.pool->threads();
  const bool last = next >= plan.blocks * plan.chunks;
  piece.next_panel = last ? piece.panel : next % plan.chunks * plan.chunk;
  return piece;
}

// Where a run of inputs of a panel lies.
struct Place {
  const unsigned char* values;
  const unsigned char* factors;
};

Place place_of(const Plan& plan, Index panel, Index run) {
  const PackedView& weight = plan.args->weight;
  const unsigned char* const start = weight.panels + panel * weight.panel_bytes;
  const Index groups = run * (plan.run / DEPTH);
  return {start + groups * weight.group_bytes,
          start + weight.factors_at + groups * weight.factor_bytes};
}

// What comes after group `p`, `group` panels wide, of a piece and run.
Place place_after(const Plan& plan, const Piece& piece, Index run, Index p, Index group) {
  if (p + group < piece.panels) return place_of(plan, piece.panel + p + group, run);
  if (run + 1 < plan.runs) return place_of(plan, piece.panel, run + 1);
  return place_of(plan, piece.next_panel, 0);
}

Index expanded_bytes(const Plan& plan) {
  if (plan.format->expand == nullptr) return 0;
  return most(GROUP_BYTES, plan.widest * plan.run / DEPTH * EXPANDED_GROUP_BYTES);
}

// One run of inputs for all tiles of a block: group by group of panels, each read once from memory
// and then from the first-level cache, and so are the rows of x within a group. Memory is read
// while a group is multiplied: its tiles, one after the other, fetch the next. `expanded` has room
// for a group of panels if the format wants it expanded, and then that fetches a share as well.
void multiply_run(const Plan& plan, const Piece& piece, Index run, float* sums, Index sums_stride,
                  unsigned char* expanded) {
  const PackedView& weight = plan.args->weight;
  const Format& format = *plan.format;
  const Index row_step = format.row_step;
  const Index tiles = piece.last_tile - piece.first_tile;
  const Index top = tile_start(plan, piece.first_tile);
  const Index inputs = least(plan.run, plan.inputs - run * plan.run);
  const bool expands = format.expand != nullptr;
  const Index before = expands ? EXPANDING : 0, shares = before + tiles;
  TileArgs tile{};
  tile.x_stride = plan.x_stride;
  tile.groups_at = plan.groups_at;
  tile.panel_stride = expands ? inputs / DEPTH * EXPANDED_GROUP_BYTES : weight.panel_bytes;
  tile.fetch_stride = weight.panel_bytes;
  tile.fetch_step = quotient_up(64 * weight.group_bytes, plan.taken * shares);
  tile.inputs = inputs;
  tile.sums_stride = sums_stride;
  tile.first = run == 0;
  const Index run_bytes = inputs / DEPTH * weight.group_bytes;
  const Index taken_bytes = inputs / DEPTH * plan.taken;
  const Index group = most(1, GROUP_BYTES / taken_bytes / plan.widest) * plan.widest;
  for (Index p = 0; p < piece.panels; p += group) {
    const Index stop = least(p + group, piece.panels);
    const Place here = place_of(plan, piece.panel + p, run);
    const Place next = place_after(plan, piece, run, p, group);
    if (expands) {
      format.expand({
          .panels = here.values,
          .factors = here.factors,
          .panel_stride = weight.panel_bytes,
          .count = stop - p,
          .inputs = inputs,
          .fetch = next.values,
          .fetch_factors = next.factors,
          .fetch_step = quotient_up(64 * before, shares),
          .to = expanded,
      });
    }
    const unsigned char* const panels = expands ? expanded : here.values;
    for (Index t = piece.first_tile; t < piece.last_tile; ++t) {
      const Index step = tile_start(plan, t);
      const Tiles& shape = format.tiles[tile_start(plan, t + 1) - step];
      const Index share = before + t - piece.first_tile;
      tile.x = prepared(plan, run, step * row_step);
      for (Index q = p; q < stop;) {
        const bool whole = q + shape.panels <= stop;
        tile.panels = panels + (q - p) * tile.panel_stride;
        tile.factors = here.factors + (q - p) * weight.panel_bytes;
        tile.fetch = next.values + share * run_bytes / shares + (q - p) * weight.panel_bytes;
        tile.fetch_factors = next.factors + (q - p) * weight.panel_bytes;
        tile.sums = sums + (step - top) * row_step * sums_stride + q * PANEL;
        (whole ? shape.group : shape.single)(tile);
        q += whole ? shape.panels : 1;
      }
    }
  }
}

void multiply_piece(void* state, Index index, int thread) {
  const Plan& plan = *static_cast<const Plan*>(state);
  const Piece piece = piece_at(plan, index);
  const Index sums_stride = piece.panels * PANEL;
  const Index sums_bytes =
      plan.widest_block * plan.chunk * PANEL * static_cast<Index>(sizeof(float));
  const std::size_t bytes = static_cast<std::size_t>(sums_bytes + expanded_bytes(plan));
  unsigned char* const scratch = static_cast<unsigned char*>(plan.pool->local(thread, bytes));
  float* const sums = reinterpret_cast<float*>(scratch);
  if (plan.format->open != nullptr) plan.format->open();
  for (Index run = 0; run < plan.runs; ++run) {
    multiply_run(plan, piece, run, sums, sums_stride, scratch + sums_bytes);
  }
  if (plan.format->close != nullptr) plan.format->close();
  const Index row_step = plan.format->row_step;
  const Index row = tile_start(plan, piece.first_tile) * row_step;
  const Index stop = least(tile_start(plan, piece.last_tile) * row_step, plan.args->rows);
  finish(plan, sums, sums_stride, row, stop - row, piece.panel, piece.panels);
}

}  // namespace

void linear(const LinearArgs& args, Pool& pool) {
  if (args.rows == 0) return;
  Plan plan = make_plan(args, pool);
  prepare(plan);
  pool.run(plan.blocks * plan.chunks, multiply_piece, &plan);
}

}  // namespace octavo::OCTAVO_SET
