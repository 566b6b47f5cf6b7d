// RMS normalisation of one row, shared by `rms_norm` and the prologue of `linear`.
#pragma once

#include "octavo/kernels.h"
#include "vector.h"

namespace octavo::OCTAVO_SET {

// 1 / sqrt(mean(x²) + eps). Four partial sums over vectors, joined in a fixed order; the few last
// elements one by one.
OCTAVO_INLINE float inverse_rms(const float* x, Index width, float eps) {
  constexpr Index STEP = 4 * LANES;
  Floats part[4] = {};
  Index k = 0;
  for (; k + STEP <= width; k += STEP) {
    for (int i = 0; i < 4; ++i) {
      const Floats v = load(x + k + i * LANES);
      part[i] = fma(v, v, part[i]);
    }
  }
  float total = sum((part[0] + part[1]) + (part[2] + part[3]));
  for (; k < width; ++k) total = fma(x[k], x[k], total);
  return 1.0f / __builtin_sqrtf(total / static_cast<float>(width) + eps);
}

OCTAVO_INLINE void normalise(const float* x, Index width, const NormArgs& norm, float* out) {
  const float scale = inverse_rms(x, width, norm.eps);
  Index k = 0;
  for (; k + LANES <= width; k += LANES) {
    store(out + k, load(x + k) * splat(scale) * load(norm.weight + k));
  }
  for (; k < width; ++k) out[k] = x[k] * scale * norm.weight[k];
}

}  // namespace octavo::OCTAVO_SET
