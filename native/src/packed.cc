#include "octavo/packed.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace octavo {

namespace {

constexpr std::size_t HUGE_PAGE = std::size_t{2} << 20;

std::size_t rounded(std::size_t bytes, std::size_t step) {
  return (bytes + step - 1) / step * step;
}

// Zeroed, straight from the system; the unused head and tail of the mapping go back at once.
void* map_zeroed(std::size_t bytes) {
  const std::size_t span = bytes + HUGE_PAGE;
  void* mapping = mmap(nullptr, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  char* const start = static_cast<char*>(mapping);
  const std::size_t head = rounded(reinterpret_cast<std::uintptr_t>(start), HUGE_PAGE) -
                           reinterpret_cast<std::uintptr_t>(start);
  if (head != 0) munmap(start, head);
  if (head != HUGE_PAGE) munmap(start + head + bytes, HUGE_PAGE - head);
#if defined(MADV_HUGEPAGE)
  if (bytes >= HUGE_PAGE) madvise(start + head, bytes, MADV_HUGEPAGE);
#endif
  return start + head;
}

struct Transfer {
  const Packed* packed;
  Bf16* panels;
  Bf16* matrix;
  const Bf16* source;
  Index first;
  Index rows;
};

Index panel_elements(const PackedView& view) { return OCTAVO_PADDED(view.columns, DEPTH) * PANEL; }

Index panel_of(const PackedView& view, Index row) {
  if (!view.gated) return row / PANEL;
  const Index half = view.rows / 2;
  return row < half ? row / PANEL * 2 : (row - half) / PANEL * 2 + 1;
}

Index lane_of(const PackedView& view, Index row) {
  const Index half = view.rows / 2;
  return (view.gated && row >= half ? row - half : row) % PANEL;
}

// Where element (row, 0) lies; (row, k) is at + k / 2 * 2 * PANEL + k % 2.
Index row_offset(const PackedView& view, Index row) {
  return panel_of(view, row) * panel_elements(view) + lane_of(view, row) * 2;
}

constexpr Index PIECE_ROWS = PANEL;

void write_rows(void* state, Index piece, int) {
  const Transfer& job = *static_cast<Transfer*>(state);
  const PackedView view = job.packed->view();
  const Index stop = std::min(job.rows, (piece + 1) * PIECE_ROWS);
  const Index pairs = view.columns / 2;
  Bf16* target[PIECE_ROWS];
  const Bf16* source[PIECE_ROWS];
  const Index start = piece * PIECE_ROWS;
  const Index count = stop - start;
  for (Index r = 0; r < count; ++r) {
    target[r] = job.panels + row_offset(view, job.first + start + r);
    source[r] = job.source + (start + r) * view.columns;
  }
  for (Index pair = 0; pair < pairs; ++pair) {
    for (Index r = 0; r < count; ++r) {
      std::memcpy(target[r] + pair * 2 * PANEL, source[r] + pair * 2, 2 * sizeof(Bf16));
    }
  }
  if (view.columns % 2 != 0) {
    for (Index r = 0; r < count; ++r) target[r][pairs * 2 * PANEL] = source[r][pairs * 2];
  }
}

void read_rows(void* state, Index piece, int) {
  const Transfer& job = *static_cast<Transfer*>(state);
  const PackedView view = job.packed->view();
  const Index stop = std::min(job.rows, (piece + 1) * PIECE_ROWS);
  for (Index row = piece * PIECE_ROWS; row < stop; ++row) {
    const Bf16* source = view.panels + row_offset(view, row);
    Bf16* target = job.matrix + row * view.columns;
    for (Index k = 0; k < view.columns; ++k) target[k] = source[k / 2 * 2 * PANEL + k % 2];
  }
}

Index pieces_of(Index rows) { return (rows + PIECE_ROWS - 1) / PIECE_ROWS; }

}  // namespace

Packed::Packed(Index rows, Index columns, bool gated)
    : rows_(rows), columns_(columns), gated_(gated) {
  const Index padded = gated ? 2 * OCTAVO_PADDED(rows / 2, PANEL) : OCTAVO_PADDED(rows, PANEL);
  bytes_ = static_cast<std::size_t>(padded * OCTAVO_PADDED(columns, DEPTH)) * sizeof(Bf16);
  bytes_ = rounded(bytes_, 4096);
  panels_ = static_cast<Bf16*>(map_zeroed(bytes_));
}

Packed::~Packed() { munmap(panels_, bytes_); }

void Packed::write(const Bf16* matrix, Index first, Index rows, Pool& pool) {
  Transfer job{this, panels_, nullptr, matrix, first, rows};
  pool.run(pieces_of(rows), write_rows, &job);
}

void Packed::read(Bf16* matrix, Pool& pool) const {
  Transfer job{this, nullptr, matrix, nullptr, 0, rows_};
  pool.run(pieces_of(rows_), read_rows, &job);
}

}  // namespace octavo
