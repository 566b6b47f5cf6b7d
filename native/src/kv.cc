// Rotary embedding, and the writing of keys and values to their pages.
//
// Bytes of a row: 4 (Hq + 2 Hk) E read, 4 (Hq + Hk) E written back, 4 Hk E written to pages, or in
// int8 2 Hk (E + 4). The elements of one token's key lie apart in a tile, so a head is rounded in
// one go and then scattered.
#include "kv_tile.h"
#include "octavo/paging.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

void rope_write_kv(const RopeArgs& args, Pool& pool);

namespace {

constexpr Index MOST_ROWS = 16;    // of a piece: a tile, where they follow each other
constexpr Index ALONE = 1 << 12;   // elements of a batch that one thread does sooner alone
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

// The greatest |x|, infinity if one of them is NaN.
OCTAVO_INLINE float magnitude(const float* x, Index count) {
  const Floats infinity = splat(__builtin_inff());
  Floats most = {};
  for (Index i = 0; i < count; i += LANES) {
    const Floats some = count - i < LANES ? load_first(x + i, count - i) : load(x + i);
    const Floats sizes = as_floats(as_words(some) & 0x7fffffffu);
    most = max(min(sizes, infinity), most);
  }
  return max(most);
}

// The low byte of to[i] becomes x[i] · inverse, rounded to nearest even.
OCTAVO_INLINE void round_words(const float* x, Index count, float inverse, std::uint32_t* to) {
  const Floats magic = splat(0x1.8p23f);  // adding it rounds to an integer
  for (Index i = 0; i < count; i += LANES) {
    const Floats some = count - i < LANES ? load_first(x + i, count - i) : load(x + i);
    store_words(to + i, as_words(some * inverse + magic));
  }
}

// head ≈ scale · q: to[i · step] = q[i], scale = max |head| / 127, q rounded to nearest even. A
// head that is not finite gets the scale NaN, one below 2^-100 zeros.
OCTAVO_INLINE void write_scaled(const float* head, Index width, Byte* tile, Index slot, Byte* to,
                                Index step) {
  const float most = magnitude(head, width);
  const bool usual = most >= 0x1p-100f && most < __builtin_inff();
  const float scale = usual ? most / 127.0f : most * 0.0f;
  __builtin_memcpy(tile + slot * 4, &scale, sizeof scale);
  if (!usual) {
    for (Index i = 0; i < width; ++i) to[i * step] = 0;
    return;
  }
  const float inverse = 127.0f / most;
  std::uint32_t rounded[HEAD_CHUNK];
  for (Index first = 0; first < width; first += HEAD_CHUNK) {
    const Index count = width - first < HEAD_CHUNK ? width - first : HEAD_CHUNK;
    round_words(head + first, count, inverse, rounded);
    for (Index i = 0; i < count; ++i) to[(first + i) * step] = static_cast<Byte>(rounded[i]);
  }
}

void write_token(KvType type, const float* key, const float* value, Index width, Byte* keys,
                 Byte* values, Index slot) {
  if (type == KvType::bf16) {
    write_key(key, width, reinterpret_cast<Bf16*>(keys), slot);
    write_value(value, width, reinterpret_cast<Bf16*>(values), slot);
  } else {
    write_scaled(key, width, keys, slot, keys + Int8Tile::START + slot, TILE);
    write_scaled(value, width, values, slot, values + Int8Tile::START + slot * width, 1);
  }
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
  const Index bytes =
      pages.type == KvType::bf16 ? Bf16Tile::tile_bytes(width) : Int8Tile::tile_bytes(width);
  Byte* tile = pages.pool + block * pages.block_stride + offset / TILE * bytes;
  const Index run = pages.block_size / TILE * bytes;
  for (Index head = 0; head < kv_heads; ++head) {
    const float* key = qkv + (heads + head) * width;
    write_token(pages.type, key, key + kv_heads * width, width, tile + head * run,
                tile + (kv_heads + head) * run, offset % TILE);
  }
}

void write_rows(const RopeArgs& args, Index first, Index last) {
  Index sequence = 0;
  for (Index row = first; row < last; ++row) {
    while (args.batch.query_start[sequence + 1] <= row) ++sequence;
    write_row(args, sequence, row);
  }
}

struct Call {
  const RopeArgs& args;
  Index rows;  // of a piece
};

void write_piece(void* state, Index piece, int) {
  const Call& call = *static_cast<const Call*>(state);
  const Index first = piece * call.rows, rest = call.args.batch.rows - first;
  write_rows(call.args, first, first + (rest < call.rows ? rest : call.rows));
}

}  // namespace

void rope_write_kv(const RopeArgs& args, Pool& pool) {
  const Index rows = args.batch.rows;
  if (rows * (args.heads + 2 * args.pages.kv_heads) * args.pages.head_dim <= ALONE) {
    write_rows(args, 0, rows);
  } else {
    const Index share = (rows + 2 * pool.threads() - 1) / (2 * pool.threads());
    Call call = {args, share < MOST_ROWS ? share : MOST_ROWS};
    pool.run((rows + call.rows - 1) / call.rows, write_piece, &call);
  }
}

}  // namespace octavo::OCTAVO_SET
