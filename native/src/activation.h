// Activations of gated layers.
#pragma once

#include "vector.h"

namespace octavo::OCTAVO_SET {

// x / (1 + e^-x)
OCTAVO_INLINE Floats silu(Floats x) { return x / (exp(-x) + 1.0f); }

// x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))), as x · sigmoid of twice the argument: nothing
// cancels. Source: D. Hendrycks & K. Gimpel 2016 (arXiv:1606.08415) §2.
OCTAVO_INLINE Floats gelu_tanh(Floats x) {
  const Floats cube = x * x * splat(0.0713548162726f);
  return x / (exp(-(x * (cube + splat(1.59576912161f)))) + 1.0f);
}

}  // namespace octavo::OCTAVO_SET
