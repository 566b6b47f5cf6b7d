// Rotary embedding, and the writing of keys and values to their pages.
//
// Bytes of a row: 4 (Hq + 2 Hk) E read, 4 (Hq + Hk) E written back, 4 Hk E written to pages. Keys
// and values of one token lie 64 and 4 bytes apart in a tile, so a head is rounded in one go and
// then scattered.
#include "octavo/paging.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

void rope_write_kv(const RopeArgs& args, Pool& pool);

namespace {

constexpr Index TILE = 16;         // tokens
constexpr Index PIECE = 16;        // rows
constexpr Index ALONE = 1 << 15;   // elements of a batch that one thread does sooner alone
constexpr Index HEAD_CHUNK = 256;  // elements of a head rounded at a time

// Products and sums are rounded one by one, so that vectors and single lanes give the same bits.
void turn(float* __restrict head, const float* __restrict cos, const float* __restrict sin,
          Index pairs) {
  float* __restrict other = head + pairs;
  for (Index i = 0; i < pairs; ++i) {
    const float a = head[i], b = other[i];
    head[i] = a * cos[i] - b * sin[i];
    other[i] = b * cos[i] + a * sin[i];
  }
}

// tile[i / 2][slot][i % 2] = key[i]
void write_key(const float* key, Index width, Bf16* tile, Index slot) {
  Bf16 rounded[HEAD_CHUNK];
  for (Index first = 0; first < width; first += HEAD_CHUNK) {
    const Index count = width - first < HEAD_CHUNK ? width - first : HEAD_CHUNK;
    for (Index i = 0; i < count; ++i) rounded[i] = round_bf16(key[first + i]);
    Bf16* to = tile + first * TILE + 2 * slot;
    for (Index i = 0; i < count; i += 2) __builtin_memcpy(to + i * TILE, rounded + i, 4);
  }
}

// tile[slot / 2][i][slot % 2] = value[i]
void write_value(const float* value, Index width, Bf16* tile, Index slot) {
  Bf16* to = tile + slot / 2 * 2 * width + slot % 2;
  for (Index i = 0; i < width; ++i) to[2 * i] = round_bf16(value[i]);
}

void write_row(const RopeArgs& args, Index sequence, Index row) {
  const PagesView& pages = args.pages;
  const Index width = pages.head_dim, heads = args.heads, kv_heads = pages.kv_heads;
  const Index position = args.batch.positions[row];
  float* qkv = args.qkv + row * (heads + 2 * kv_heads) * width;
  if (args.cos != nullptr) {
    const Index first = position * args.pairs;
    for (Index head = 0; head < heads + kv_heads; ++head) {
      turn(qkv + head * width, args.cos + first, args.sin + first, args.pairs);
    }
  }
  const Index offset = position % pages.block_size;
  const Index block = pages.table[sequence * pages.table_width + position / pages.block_size];
  Bf16* tile = pages.pool + block * pages.block_stride + offset / TILE * TILE * width;
  const Index run = pages.block_size * width;
  for (Index head = 0; head < kv_heads; ++head) {
    const float* key = qkv + (heads + head) * width;
    write_key(key, width, tile + head * run, offset % TILE);
    write_value(key + kv_heads * width, width, tile + (kv_heads + head) * run, offset % TILE);
  }
}

void write_rows(const RopeArgs& args, Index first, Index last) {
  Index sequence = 0;
  for (Index row = first; row < last; ++row) {
    while (args.batch.query_start[sequence + 1] <= row) ++sequence;
    write_row(args, sequence, row);
  }
}

void write_piece(void* state, Index piece, int) {
  const RopeArgs& args = *static_cast<const RopeArgs*>(state);
  const Index first = piece * PIECE, rest = args.batch.rows - first;
  write_rows(args, first, first + (rest < PIECE ? rest : PIECE));
}

}  // namespace

void rope_write_kv(const RopeArgs& args, Pool& pool) {
  const Index rows = args.batch.rows;
  if (rows * (args.heads + 2 * args.pages.kv_heads) * args.pages.head_dim <= ALONE) {
    write_rows(args, 0, rows);
  } else {
    pool.run((rows + PIECE - 1) / PIECE, write_piece, const_cast<RopeArgs*>(&args));
  }
}

}  // namespace octavo::OCTAVO_SET
