// Products with bfloat16 weights; where tiles multiply those, also with integers, expanded to them.
#include "linear_tile.h"

#if OCTAVO_TILES
#include "expand.h"
#endif

namespace octavo::OCTAVO_SET {

namespace {

constexpr Index RUN_INPUTS = 640;  // of one panel: 20 KiB; measured on Zen 3, 32 KiB of cache

template <int STEPS>
constexpr Tiles tiles_of() {
  return {multiply_tile<STEPS, panels_for(STEPS)>, multiply_tile<STEPS, 1>, panels_for(STEPS)};
}

template <int... STEPS>
struct TileTable {
  Tiles of[sizeof...(STEPS) + 1] = {{}, tiles_of<STEPS>()...};
};

#if OCTAVO_TILES
constexpr TileTable<1, 2> TILES;
#elif OCTAVO_LANES == 16
constexpr TileTable<1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12> TILES;
#elif OCTAVO_LANES == 8
constexpr TileTable<1, 2, 3, 4, 5, 6> TILES;
#else
constexpr TileTable<1, 2, 3> TILES;
#endif

OCTAVO_INLINE float to_element(float value, float) { return value; }
OCTAVO_INLINE Bf16 to_element(float value, Bf16) { return round_bf16(value); }

void prepare(const float* from, Index count, Index inputs, unsigned char* to, RowGroup*) {
  Element* const elements = reinterpret_cast<Element*>(to);
  Index k = 0;
  for (; k < count; ++k) elements[k] = to_element(from[k], Element{});
  for (; k < inputs; ++k) elements[k] = Element{};
}

#if OCTAVO_TILES
void open() { open_tiles(); }
void close() { close_tiles(); }
#else
constexpr void (*open)() = nullptr;
constexpr void (*close)() = nullptr;
#endif

constexpr Format format_of(Index run_inputs, void (*expand)(const ExpandArgs&)) {
  return {
      .tiles = TILES.of,
      .max_steps = MAX_STEPS,
      .row_step = ROW_STEP,
      .x_bytes = DEPTH * static_cast<Index>(sizeof(Element)),
      .row_group_bytes = 0,
      .run_inputs = run_inputs,
      .open = open,
      .close = close,
      .expand = expand,
      .prepare = prepare,
  };
}

constexpr Format FORMAT = format_of(RUN_INPUTS, nullptr);

#if OCTAVO_TILES

// Counted, not measured: two expanded panels of 24 KiB stay in 48 KiB of cache, while x comes from
// the second level.
constexpr Index EXPANDED_INPUTS = 384;

template <Encoding ENCODING>
constexpr Format EXPANDED = format_of(EXPANDED_INPUTS, expand<ENCODING>);

#endif

}  // namespace

const Format& bf16_format() { return FORMAT; }

#if OCTAVO_TILES

const Format& quantised_format(Encoding encoding) {
  if (encoding == Encoding::int8) return EXPANDED<Encoding::int8>;
  if (encoding == Encoding::int6) return EXPANDED<Encoding::int6>;
  if (encoding == Encoding::int6_offset) return EXPANDED<Encoding::int6_offset>;
  if (encoding == Encoding::int4) return EXPANDED<Encoding::int4>;
  return EXPANDED<Encoding::int4_offset>;
}

#endif

}  // namespace octavo::OCTAVO_SET
