// What the kernels that read and write pages are given. Layouts are those of `octavo.ops.api`.
#pragma once

#include "octavo/packed.h"
#include "octavo/pool.h"

namespace octavo {

enum class KvType { bf16, int8 };

// The pages of one layer. A page holds the keys of all heads, then their values; those of one head
// are a run of tiles, which `kv_tile.h` describes.
struct PagesView {
  KvType type;
  unsigned char* pool;        // the page of this layer in block 0
  Index block_stride;         // bytes from a page to that of the next block
  Index kv_heads;             // Hk
  Index head_dim;             // E
  Index block_size;           // B
  const std::int32_t* table;  // [S, table_width]
  Index table_width;
};

struct BatchView {
  const std::int32_t* positions;    // [T]
  const std::int32_t* query_start;  // [S + 1]
  const std::int32_t* context;      // [S]
  Index sequences;                  // S
  Index rows;                       // T
};

struct RopeArgs {
  float* qkv;        // [T, (Hq + 2 Hk) · E]
  Index heads;       // Hq
  const float* cos;  // [positions, pairs], or null: nothing turns
  const float* sin;
  Index pairs;  // E_rot / 2
  BatchView batch;
  PagesView pages;
};

struct AttentionArgs {
  const float* qkv;  // [T, (Hq + 2 Hk) · E]
  Index heads;       // Hq
  float scale;       // > 0
  Index window;      // positions that a row sees, its own the last of them; 0: all
  BatchView batch;
  PagesView pages;
  float* out;  // [T, Hq · E]
};

struct CopyArgs {
  unsigned char* pool;
  Index block_bytes;
  const std::int32_t* sources;  // [copies]
  const std::int32_t* targets;  // [copies]
  Index copies;
};

// pool[targets[i]] = pool[sources[i]], one after the other.
void copy_blocks(const CopyArgs& args, Pool& pool);

}  // namespace octavo
