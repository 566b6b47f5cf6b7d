#include "octavo/arena.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace octavo {

namespace {

constexpr std::size_t LINE = 64;
constexpr std::size_t HUGE_PAGE = std::size_t{2} << 20;
constexpr std::size_t SLAB = 16 * HUGE_PAGE;
constexpr std::size_t ALONE = SLAB / 2;  // more is mapped for itself

std::size_t rounded(std::size_t bytes, std::size_t step) {
  return (bytes + step - 1) / step * step;
}

// Straight from the system, from the start of a large page on; what is mapped before and after goes
// back at once.
std::shared_ptr<unsigned char> map_zeroed(std::size_t bytes) {
  const std::size_t span = bytes + HUGE_PAGE;
  void* mapping = mmap(nullptr, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  unsigned char* const start = static_cast<unsigned char*>(mapping);
  const auto address = reinterpret_cast<std::uintptr_t>(start);
  const std::size_t head = rounded(address, HUGE_PAGE) - address;
  if (head != 0) munmap(start, head);
  if (head != HUGE_PAGE) munmap(start + head + bytes, HUGE_PAGE - head);
#if defined(MADV_HUGEPAGE)
  madvise(start + head, bytes, MADV_HUGEPAGE);
#endif
  return {start + head, [bytes](unsigned char* memory) { munmap(memory, bytes); }};
}

}  // namespace

std::shared_ptr<unsigned char> Arena::allocate(std::size_t bytes) {
  const std::size_t size = rounded(bytes, LINE);
  if (size > ALONE) return map_zeroed(rounded(size, 4096));
  if (size > left_) {
    slab_ = map_zeroed(SLAB);
    left_ = SLAB;
  }
  unsigned char* const part = slab_.get() + (SLAB - left_);
  left_ -= size;
  return {slab_, part};
}

}  // namespace octavo
