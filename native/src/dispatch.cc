#include "octavo/dispatch.h"

#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// X(name, condition): every set, the quickest first.
#define OCTAVO_SETS(X)                  \
  X(amx, machine.amx)                   \
  X(avx512_bf16, machine.avx512_bf16)   \
  X(avx512_vnni, machine.avx512_vnni)   \
  X(avx512, machine.avx512)             \
  X(avx2, machine.avx2)                 \
  X(portable, true)                     \
  X(amx_emulated, machine.avx2)         \
  X(avx512_bf16_emulated, machine.avx2) \
  X(avx512_emulated, machine.avx2)

namespace octavo {

// Null if the set was not built.
#define OCTAVO_DECLARE(name, condition)               \
  namespace name {                                    \
  extern const Kernels kernels __attribute__((weak)); \
  }
OCTAVO_SETS(OCTAVO_DECLARE)

namespace {

struct Machine {
  bool avx2 = false;
  bool avx512 = false;
  bool avx512_vnni = false;
  bool avx512_bf16 = false;
  bool amx = false;
};

#if defined(__x86_64__)

// The register state that the system saves for us: a set is of use only with CPU and system.
std::uint64_t saved_state() {
  std::uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return std::uint64_t{high} << 32 | low;
}

bool has(std::uint64_t value, std::uint64_t mask) { return (value & mask) == mask; }

bool permit_tiles() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl: ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

Machine examine() {
  Machine machine;
  std::uint32_t a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return machine;
  constexpr std::uint32_t FMA = 1u << 12, OSXSAVE = 1u << 27, AVX = 1u << 28, F16C = 1u << 29;
  if (!has(c, FMA | OSXSAVE | AVX | F16C)) return machine;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return machine;
  const std::uint32_t features = b, products = c, matrix = d;
  std::uint32_t bf16 = 0;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) bf16 = a;
  constexpr std::uint64_t YMM = 0x6, ZMM = 0xe6, TILES = 0x60000;
  constexpr std::uint32_t AVX2 = 1u << 5, AVX512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
  constexpr std::uint32_t VNNI = 1u << 11, AVX512_BF16 = 1u << 5, AMX_BF16 = 1u << 22,
                          AMX_TILE = 1u << 24;
  const std::uint64_t saved = saved_state();
  machine.avx2 = has(saved, YMM) && has(features, AVX2);
  machine.avx512 = machine.avx2 && has(saved, ZMM) && has(features, AVX512);
  machine.avx512_vnni = machine.avx512 && has(products, VNNI);
  machine.avx512_bf16 = machine.avx512_vnni && has(bf16, AVX512_BF16);
  machine.amx = machine.avx512_bf16 && has(saved, TILES) && has(matrix, AMX_BF16 | AMX_TILE) &&
                permit_tiles();
  return machine;
}

#else

Machine examine() { return {}; }

#endif

std::vector<Choice> runnable() {
  [[maybe_unused]] const Machine machine = examine();
  std::vector<Choice> sets;
#define OCTAVO_LIST(name, condition) \
  if (&name::kernels != nullptr && (condition)) sets.push_back({#name, &name::kernels});
  OCTAVO_SETS(OCTAVO_LIST)
  return sets;
}

}  // namespace

std::vector<std::string> available_sets() {
  std::vector<std::string> names;
  for (const Choice& set : runnable()) names.push_back(set.name);
  return names;
}

Choice choose_set(const std::string& name) {
  const std::vector<Choice> sets = runnable();
  if (name.empty()) return sets.front();
  std::string names;
  for (const Choice& set : sets) {
    if (set.name == name) return set;
    names += (names.empty() ? "" : ", ") + set.name;
  }
  throw std::invalid_argument("instruction set '" + name +
                              "' was not built or this machine lacks it; it runs " + names);
}

}  // namespace octavo
