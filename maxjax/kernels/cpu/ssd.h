// One token of Mamba 2's recurrence for one head, written with a level's own vectors.
#pragma once
#include "kernels.h"

namespace {

using maxjax::Ssd;

void ssd(const Ssd& of) {
  const int64_t whole = of.size / kLanes * kLanes;
  const vec kept = all(of.kept);
  for (int64_t p = 0; p < of.rows; p++) {
    float* state = of.state + p * of.size;
    const float x = of.x[p];
    const vec wide = all(x);
    vec total = zero();
    for (int64_t n = 0; n < whole; n += kLanes) {
      const vec s = fma(kept, load(state + n), mul(wide, load(of.b + n)));
      store(state + n, s);
      total = fma(s, load(of.c + n), total);
    }
    float y = sum(total);
    for (int64_t n = whole; n < of.size; n++) {
      state[n] = of.kept * state[n] + x * of.b[n];
      y += state[n] * of.c[n];
    }
    of.y[p] = y;
  }
}

}  // namespace
