// Products with weights of eight, six and four bits. x is rounded to eight bits in groups of DEPTH
// inputs. (Sets with tiles expand such weights to bfloat16: `linear_bf16.cc`.)
#if !OCTAVO_TILES

#include "quantised_tile.h"
#include "six_tile.h"

namespace octavo::OCTAVO_SET {

namespace {

constexpr Index RUN_INPUTS = 1280;  // of one panel: 20 KiB of bytes

template <Encoding ENCODING, int ROWS>
constexpr Tiles tiles_of() {
  constexpr int PANELS = panels_for(ROWS);
  if constexpr (SIXES<ENCODING>) {
    constexpr int FEWER = PANELS < MAX_SIXES_PANELS ? PANELS : MAX_SIXES_PANELS;
    return {multiply_sixes<ENCODING, ROWS, FEWER>, multiply_sixes<ENCODING, ROWS, 1>, FEWER};
  } else {
    return {multiply_quantised<ENCODING, ROWS, PANELS>, multiply_quantised<ENCODING, ROWS, 1>,
            PANELS};
  }
}

template <Encoding ENCODING>
struct TileTable {
  static constexpr int MOST = MAX_ROWS<ENCODING>;
  Tiles of[MOST + 1] = {};

  constexpr TileTable() { fill<MOST>(); }

  template <int ROWS>
  constexpr void fill() {
    of[ROWS] = tiles_of<ENCODING, ROWS>();
    if constexpr (ROWS > 1) fill<ROWS - 1>();
  }
};

template <Encoding ENCODING>
constexpr TileTable<ENCODING> TILES;

// Below it, 1 / scale overflows: such inputs are taken as zeros.
constexpr float LEAST_MAGNITUDE = 0x1p-100f;
constexpr float LARGEST = 127.0f;

// The largest |x| of a group; NaN, whose bits are above those of infinity, if there is one.
OCTAVO_INLINE float magnitude(const float* from) {
  Ints largest = {};
  for (Index k = 0; k < DEPTH; k += LANES) {
    const Ints bits = (Ints)(as_words(load(from + k)) & 0x7fffffffu);
    largest = bits > largest ? bits : largest;
  }
  return __builtin_bit_cast(float, max(largest));
}

// x ≈ scale · q, scale = max |x| / 127, q rounded to nearest even. A group that is not finite gets
// a scale that is not, and so do its sums.
template <Encoding ENCODING>
OCTAVO_INLINE void quantise_group(const float* from, unsigned char* to, RowGroup* group) {
  const float most = magnitude(from);
  const bool usual = most >= LEAST_MAGNITUDE && most <= 0x1.fffffep127f;
  const Floats inverse = splat(usual ? LARGEST / most : 0.0f);
  const Floats magic = splat(0x1.8p23f);  // adding it rounds to an integer
  Group integers;
  for (int i = 0; i < GROUP_VECTORS; ++i) {
    const Words shifted = as_words(load(from + i * LANES) * inverse + magic);
    integers[i] = (Ints)(shifted - as_words(magic));
    if (!usual) integers[i] = Ints{};
  }
  group->scale = usual ? most / LARGEST : most * 0.0f;
  group->start =
      lay_out(typename Kernel<ENCODING>::Products{}, integers, Kernel<ENCODING>::ZERO, to);
  if constexpr (OFFSETS<ENCODING>) {
    group->total = group->scale * static_cast<float>(sum_of(integers));
  }
}

template <Encoding ENCODING>
void prepare(const float* from, Index count, Index inputs, unsigned char* to, RowGroup* groups) {
  for (Index k = 0; k < inputs; k += DEPTH, ++groups) {
    if (count - k >= DEPTH) {
      quantise_group<ENCODING>(from + k, to, groups);
    } else {
      float last[DEPTH] = {};
      for (Index i = 0; k + i < count; ++i) last[i] = from[k + i];
      quantise_group<ENCODING>(last, to, groups);
    }
    to += Kernel<ENCODING>::Products::X_BYTES;
  }
}

template <Encoding ENCODING>
constexpr Format FORMAT = {
    .tiles = TILES<ENCODING>.of,
    .max_steps = MAX_ROWS<ENCODING>,
    .row_step = 1,
    .x_bytes = Kernel<ENCODING>::Products::X_BYTES,
    .row_group_bytes = sizeof(RowGroup),
    .run_inputs = RUN_INPUTS,
    .open = nullptr,
    .close = nullptr,
    .expand = nullptr,
    .prepare = prepare<ENCODING>,
};

}  // namespace

const Format& quantised_format(Encoding encoding) {
  if (encoding == Encoding::int8) return FORMAT<Encoding::int8>;
  if (encoding == Encoding::int6) return FORMAT<Encoding::int6>;
  if (encoding == Encoding::int6_offset) return FORMAT<Encoding::int6_offset>;
  if (encoding == Encoding::int4) return FORMAT<Encoding::int4>;
  return FORMAT<Encoding::int4_offset>;
}

}  // namespace octavo::OCTAVO_SET

#endif
