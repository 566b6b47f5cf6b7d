// The memory of weights.
#pragma once

#include <cstddef>
#include <memory>

namespace octavo {

// Zeroed memory out of pages of 2 MiB, where the system offers them, shared by what is smaller.
//
// A model's matrices of one or two MiB each would lie in pages of 4 KiB if each were mapped for
// itself: the processor would look up an address for every 64 cache lines that it reads, and its
// own fetching ahead would end at each. A part keeps all of the slab that it comes from alive.
// One call at a time.
class Arena {
 public:
  // `bytes` bytes, aligned to a cache line. Throws std::bad_alloc.
  std::shared_ptr<unsigned char> allocate(std::size_t bytes);

 private:
  std::shared_ptr<unsigned char> slab_;
  std::size_t left_ = 0;  // at the end of it
};

}  // namespace octavo
