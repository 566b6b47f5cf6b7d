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

void embed_piece(void* state, Index row, int) {
  const EmbedArgs& args = *static_cast<const EmbedArgs*>(state);
  const Index width = args.table.columns;
  const Index token = args.tokens[row];
  const Bf16* source =
      args.table.panels + token / PANEL * PANEL * OCTAVO_PADDED(width, DEPTH) + token % PANEL * 2;
  float* out = args.out + row * width;
  for (Index k = 0; k + 1 < width; k += 2) {
    out[k] = widen(source[k * PANEL]);
    out[k + 1] = widen(source[k * PANEL + 1]);
  }
  if (width % 2 != 0) out[width - 1] = widen(source[(width - 1) * PANEL]);
}

}  // namespace

void rms_norm(const RmsNormArgs& args, Pool& pool) {
  pool.run(args.rows, norm_piece, const_cast<RmsNormArgs*>(&args));
}

void embed(const EmbedArgs& args, Pool& pool) {
  pool.run(args.rows, embed_piece, const_cast<EmbedArgs*>(&args));
}

}  // namespace octavo::OCTAVO_SET
