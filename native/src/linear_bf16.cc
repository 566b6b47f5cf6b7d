// Products with bfloat16 weights.
#include "linear_tile.h"

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

constexpr Format FORMAT = {
    .tiles = TILES.of,
    .max_steps = MAX_STEPS,
    .row_step = ROW_STEP,
    .x_bytes = DEPTH * static_cast<Index>(sizeof(Element)),
    .row_group_bytes = 0,
    .run_inputs = RUN_INPUTS,
    .open = open,
    .close = close,
    .prepare = prepare,
};

}  // namespace

const Format& bf16_format() { return FORMAT; }

}  // namespace octavo::OCTAVO_SET
