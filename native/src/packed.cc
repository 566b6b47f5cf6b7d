#include "octavo/packed.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "octavo/arena.h"
#include "octavo/encoded.h"

namespace octavo {

int bits_of(Encoding encoding) {
  if (encoding == Encoding::bf16) return 16;
  if (encoding == Encoding::int8) return 8;
  return has_multiples(encoding) ? 6 : 4;
}

bool has_offsets(Encoding encoding) {
  return encoding == Encoding::int4_offset || encoding == Encoding::int6_offset;
}

bool has_multiples(Encoding encoding) {
  return encoding == Encoding::int6 || encoding == Encoding::int6_offset;
}

namespace {

struct Transfer {
  const PackedView* view;
  unsigned char* panels;
  Bf16* matrix;
  EncodedRows encoded;
  QuantisedRows quantised;
  Index first;
  Index rows;
  std::atomic<bool>* finite;
};

Index panel_of(const PackedView& view, Index row) {
  if (!view.gated) return row / PANEL;
  const Index half = view.rows / 2;
  return row < half ? row / PANEL * 2 : (row - half) / PANEL * 2 + 1;
}

Index lane_of(const PackedView& view, Index row) {
  const Index half = view.rows / 2;
  return (view.gated && row >= half ? row - half : row) % PANEL;
}

// Where element (row, 0) of a bfloat16 matrix lies; (row, k) is at + k / 2 * 2 * PANEL + k % 2.
Index row_offset(const PackedView& view, Index row) {
  const Index elements = view.panel_bytes / static_cast<Index>(sizeof(Bf16));
  return panel_of(view, row) * elements + lane_of(view, row) * 2;
}

constexpr Index PIECE_ROWS = PANEL;

constexpr Index LINE = 4 * PANEL;  // bytes from a word of a row to its next

using Words = std::uint32_t[PIECE_ROWS][STRETCH / 2];

// Words first … stop - 1 of `count` rows. A word is two elements of bfloat16, or four or eight
// integers.
void write_words(const Words& from, Index count, Index first, Index stop,
                 unsigned char* const* to) {
  for (Index word = first; word < stop; ++word) {
    for (Index r = 0; r < count; ++r) std::memcpy(to[r] + word * LINE, &from[r][word], 4);
  }
}

#if defined(__SSE2__)
// The same of the rows of one panel: four by four are transposed in registers. Returns how many
// words of each row are written.
Index write_panel(const Words& from, Index stop, unsigned char* to) {
  const auto row = [&](Index r, Index word) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(&from[r][word]));
  };
  Index word = 0;
  for (; word + 4 <= stop; word += 4) {
    for (Index r = 0; r < PIECE_ROWS; r += 4) {
      const __m128i a = row(r, word), b = row(r + 1, word);
      const __m128i c = row(r + 2, word), d = row(r + 3, word);
      const __m128i ab[] = {_mm_unpacklo_epi32(a, b), _mm_unpackhi_epi32(a, b)};
      const __m128i cd[] = {_mm_unpacklo_epi32(c, d), _mm_unpackhi_epi32(c, d)};
      for (int i = 0; i < 2; ++i) {
        unsigned char* const at = to + (word + 2 * i) * LINE + 4 * r;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm_unpacklo_epi64(ab[i], cd[i]));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(at + LINE), _mm_unpackhi_epi64(ab[i], cd[i]));
      }
    }
  }
  return word;
}
#else
Index write_panel(const Words&, Index, unsigned char*) { return 0; }
#endif

constexpr Index STRETCH_GROUPS = STRETCH / DEPTH;

void write_factors(const Transfer& job, Index row, Index group, const Factors& from) {
  const PackedView& view = *job.view;
  const Index lane = lane_of(view, row);
  unsigned char* to = job.panels + panel_of(view, row) * view.panel_bytes + view.factors_at +
                      group * view.factor_bytes;
  std::memcpy(to + lane * 2, &from.scale, 2);
  to += PANEL * 2;
  if (has_offsets(view.encoding)) {
    std::memcpy(to + lane * 2, &from.offset, 2);
    to += PANEL * 2;
  }
  if (!has_multiples(view.encoding)) return;
  for (int i = 0; i < 2; ++i) std::memcpy(to + i * PANEL + lane, from.multiples + i, 1);
}

// Elements k … k + width - 1 of a row as words; the factors of integers go to their place.
bool read_row(const Transfer& job, Index row, Index k, Index width, std::uint32_t* words) {
  const EncodedRows& from = job.encoded;
  const unsigned char* const bytes = from.bytes + row * from.row_bytes;
  const Encoding encoding = job.view->encoding;
  if (encoding == Encoding::bf16) {
    if (width % 2 != 0) words[width / 2] = 0;
    return read_bf16(from.kind, bytes, k, width, reinterpret_cast<Bf16*>(words));
  }
  Factors factors[STRETCH_GROUPS] = {};
  const bool finite = read_integers(from.kind, encoding, bytes, k, width,
                                    reinterpret_cast<unsigned char*>(words), factors);
  const Index groups = (width + DEPTH - 1) / DEPTH;
  for (Index g = 0; g < groups; ++g) {
    write_factors(job, job.first + row, k / DEPTH + g, factors[g]);
  }
  return finite;
}

// How many words hold `width` elements of a row.
Index words_of(const PackedView& view, Index width) {
  if (view.encoding == Encoding::bf16) return (width + 1) / 2;
  return (width + DEPTH - 1) / DEPTH * (view.group_bytes / LINE);
}

void write_encoded_rows(void* state, Index piece, int) {
  Transfer& job = *static_cast<Transfer*>(state);
  const PackedView& view = *job.view;
  const Index start = piece * PIECE_ROWS;
  const Index count = std::min(job.rows - start, PIECE_ROWS);
  Words words = {};
  unsigned char* target[PIECE_ROWS];
  for (Index r = 0; r < count; ++r) {
    const Index row = job.first + start + r;
    target[r] = job.panels + panel_of(view, row) * view.panel_bytes + lane_of(view, row) * 4;
  }
  const bool whole = count == PIECE_ROWS && target[count - 1] - target[0] == 4 * (count - 1);
  bool finite = true;
  for (Index k = 0; k < view.columns; k += STRETCH) {
    const Index width = std::min(view.columns - k, STRETCH);
    for (Index r = 0; r < count; ++r) {
      finite = read_row(job, start + r, k, width, words[r]) && finite;
    }
    const Index stop = words_of(view, width);
    write_words(words, count, whole ? write_panel(words, stop, target[0]) : 0, stop, target);
    for (Index r = 0; r < count; ++r) target[r] += stop * LINE;
  }
  if (!finite) job.finite->store(false, std::memory_order_relaxed);
}

void write_quantised_row(const Transfer& job, Index row) {
  const PackedView& view = *job.view;
  const Index groups = OCTAVO_PADDED(view.columns, DEPTH) / DEPTH;
  const Index quads = view.group_bytes / (4 * PANEL);
  const Index lane = lane_of(view, job.first + row);
  unsigned char* const panel = job.panels + panel_of(view, job.first + row) * view.panel_bytes;
  const QuantisedRows& from = job.quantised;
  const unsigned char* source = from.values + row * groups * quads * 4;
  for (Index quad = 0; quad < groups * quads; ++quad) {
    std::memcpy(panel + (quad * PANEL + lane) * 4, source + quad * 4, 4);
  }
  for (Index group = 0; group < groups; ++group) {
    const Index at = row * groups + group;
    Factors factors{};
    factors.scale = from.scales[at];
    if (from.offsets != nullptr) factors.offset = from.offsets[at];
    if (from.multiples != nullptr) std::memcpy(factors.multiples, from.multiples + 2 * at, 2);
    write_factors(job, job.first + row, group, factors);
  }
}

void write_quantised_rows(void* state, Index piece, int) {
  const Transfer& job = *static_cast<Transfer*>(state);
  const Index stop = std::min(job.rows, (piece + 1) * PIECE_ROWS);
  for (Index row = piece * PIECE_ROWS; row < stop; ++row) write_quantised_row(job, row);
}

void read_rows(void* state, Index piece, int) {
  const Transfer& job = *static_cast<Transfer*>(state);
  const PackedView& view = *job.view;
  const Index stop = std::min(job.rows, (piece + 1) * PIECE_ROWS);
  for (Index row = piece * PIECE_ROWS; row < stop; ++row) {
    const Bf16* source = reinterpret_cast<const Bf16*>(view.panels) + row_offset(view, row);
    Bf16* target = job.matrix + row * view.columns;
    for (Index k = 0; k < view.columns; ++k) target[k] = source[k / 2 * 2 * PANEL + k % 2];
  }
}

Index pieces_of(Index rows) { return (rows + PIECE_ROWS - 1) / PIECE_ROWS; }

PackedView layout(Index rows, Index columns, bool gated, Encoding encoding) {
  PackedView view{};
  view.encoding = encoding;
  view.rows = rows;
  view.columns = columns;
  view.gated = gated;
  view.group_bytes = PANEL * DEPTH / 8 * bits_of(encoding);
  view.factor_bytes = 0;
  if (encoding != Encoding::bf16) {
    view.factor_bytes =
        PANEL * (2 + (has_offsets(encoding) ? 2 : 0) + (has_multiples(encoding) ? 2 : 0));
  }
  const Index groups = OCTAVO_PADDED(columns, DEPTH) / DEPTH;
  view.factors_at = groups * view.group_bytes;
  view.panel_bytes = OCTAVO_PADDED(groups * (view.group_bytes + view.factor_bytes), 64);
  return view;
}

}  // namespace

struct Packed::Memory {
  std::shared_ptr<unsigned char> part;
};

Packed::Packed(Index rows, Index columns, bool gated, Encoding encoding, Arena& arena)
    : view_(layout(rows, columns, gated, encoding)) {
  const Index padded = gated ? 2 * OCTAVO_PADDED(rows / 2, PANEL) : OCTAVO_PADDED(rows, PANEL);
  bytes_ = static_cast<std::size_t>(padded / PANEL * view_.panel_bytes);
  memory_ = new Memory{arena.allocate(bytes_)};
  panels_ = memory_->part.get();
  view_.panels = panels_;
}

Packed::~Packed() { delete memory_; }

bool Packed::write(const EncodedRows& matrix, Index first, Index rows, Pool& pool) {
  std::atomic<bool> finite{true};
  Transfer job{&view_, panels_, nullptr, matrix, {}, first, rows, &finite};
  pool.run(pieces_of(rows), write_encoded_rows, &job);
  return finite.load(std::memory_order_relaxed);
}

void Packed::write(const QuantisedRows& matrix, Index first, Index rows, Pool& pool) {
  Transfer job{&view_, panels_, nullptr, {}, matrix, first, rows, nullptr};
  pool.run(pieces_of(rows), write_quantised_rows, &job);
}

void Packed::read(Bf16* matrix, Pool& pool) const {
  Transfer job{&view_, nullptr, matrix, {}, {}, 0, view_.rows, nullptr};
  pool.run(pieces_of(view_.rows), read_rows, &job);
}

}  // namespace octavo
