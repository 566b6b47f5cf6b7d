// Copies of whole blocks: memory to memory, the same for every instruction set.
#include <cstring>

#include "octavo/paging.h"

namespace octavo {

namespace {

constexpr Index SLICE = 32 * 1024;  // bytes; a slice of all copies in turn keeps their order

void copy_slice(void* state, Index slice, int) {
  const CopyArgs& args = *static_cast<const CopyArgs*>(state);
  const Index first = slice * SLICE, rest = args.block_bytes - first;
  const std::size_t bytes = static_cast<std::size_t>(rest < SLICE ? rest : SLICE);
  for (Index i = 0; i < args.copies; ++i) {
    const unsigned char* from = args.pool + args.sources[i] * args.block_bytes + first;
    std::memmove(args.pool + args.targets[i] * args.block_bytes + first, from, bytes);
  }
}

}  // namespace

void copy_blocks(const CopyArgs& args, Pool& pool) {
  pool.run((args.block_bytes + SLICE - 1) / SLICE, copy_slice, const_cast<CopyArgs*>(&args));
}

}  // namespace octavo
