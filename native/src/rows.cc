// Kernels that treat rows one by one: norm and embedding.
#include "rows.h"

#include "octavo/kernels.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

namespace {

void norm_piece(void* state, Index row, int) {
  const RmsNormArgs& args = *static_cast<const RmsNormArgs*>(state);
  normalise(args.x + row * args.width, args.width, args.norm, args.out + row * args.width);
}

void embed_bf16(const PackedView& table, Index token, float* out) {
  const Bf16* const panel =
      reinterpret_cast<const Bf16*>(table.panels + token / PANEL * table.panel_bytes);
  const Bf16* const source = panel + token % PANEL * 2;
  const Index width = table.columns;
  for (Index k = 0; k + 1 < width; k += 2) {
    out[k] = widen(source[k * PANEL]);
    out[k + 1] = widen(source[k * PANEL + 1]);
  }
  if (width % 2 != 0) out[width - 1] = widen(source[(width - 1) * PANEL]);
}

// The integer of input k of a group, less what stands for zero.
OCTAVO_INLINE int integer_of(const PackedView& table, const unsigned char* group, Index k) {
  if (table.encoding == Encoding::int8) {
    return static_cast<std::int8_t>(group[k / 4 * 4 * PANEL + k % 4]);
  }
  if (has_multiples(table.encoding)) {
    const unsigned char* const half = group + k / 16 * 3 * 4 * PANEL;
    const Index word = k % 16 / 4;
    if (word < 3) return (half[word * 4 * PANEL + k % 4] & 63) - 32;
    int integer = 0;
    for (Index i = 0; i < 3; ++i) integer |= half[i * 4 * PANEL + k % 4] >> 6 << 2 * i;
    return integer - 32;
  }
  const int pair = group[k % 16 / 4 * 4 * PANEL + k % 4];
  return (k < 16 ? pair & 15 : pair >> 4) - (table.encoding == Encoding::int4 ? 8 : 0);
}

void embed_quantised(const PackedView& table, Index token, float* out) {
  const unsigned char* const panel = table.panels + token / PANEL * table.panel_bytes;
  const Index lane = token % PANEL;
  const bool offsets = has_offsets(table.encoding), multiples = has_multiples(table.encoding);
  for (Index k = 0; k < table.columns; ++k) {
    const Index group = k / DEPTH;
    const Half* const factors =
        reinterpret_cast<const Half*>(panel + table.factors_at + group * table.factor_bytes);
    const unsigned char* const values = panel + group * table.group_bytes + lane * 4;
    const Index inner = k % DEPTH;
    float scale = widen_half(factors[lane]);
    float offset = offsets ? widen_half(factors[PANEL + lane]) : 0.0f;
    if (multiples) {
      const std::int8_t* const of =
          reinterpret_cast<const std::int8_t*>(factors + (offsets ? 2 : 1) * PANEL) + lane;
      scale *= static_cast<float>(of[offsets ? 0 : inner / 16 * PANEL]);
      offset *= static_cast<float>(of[PANEL]);
    }
    out[k] = scale * static_cast<float>(integer_of(table, values, inner));
    if (offsets) out[k] += offset;
  }
}

void embed_piece(void* state, Index row, int) {
  const EmbedArgs& args = *static_cast<const EmbedArgs*>(state);
  float* const out = args.out + row * args.table.columns;
  if (args.table.encoding == Encoding::bf16) {
    embed_bf16(args.table, args.tokens[row], out);
  } else {
    embed_quantised(args.table, args.tokens[row], out);
  }
}

}  // namespace

void rms_norm(const RmsNormArgs& args, Pool& pool) {
  pool.run(args.rows, norm_piece, const_cast<RmsNormArgs*>(&args));
}

void embed(const EmbedArgs& args, Pool& pool) {
  pool.run(args.rows, embed_piece, const_cast<EmbedArgs*>(&args));
}

}  // namespace octavo::OCTAVO_SET
