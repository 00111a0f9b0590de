// One token of the gated delta rule for one head, and SiLU, written with a level's own vectors.
#pragma once
#include "kernels.h"

namespace {

using maxjax::Delta;

// x / (1 + exp(-x)) in place; `exp` takes numbers up to 0 only.
void silu(float* x, int64_t padded) {
  for (int64_t i = 0; i < padded; i += kLanes) {
    const vec v = load(x + i), minus = all(-1.0f);
    const vec below = mul(max(zero(), mul(v, minus)), minus);  // min(x, 0), NaN if x is
    const vec share = div(exp(below), add(all(1.0f), exp(mul(abs(v), minus))));
    store(x + i, mul(v, share));
  }
}

// For N vectors of columns from `column` on. They are read from memory once: what the second loop reads
// and writes is in the first cache.
template <int N>
void delta_columns(const Delta& of, int64_t column, float qk) {
  float* state = of.state + column;
  vec known[N], found[N], change[N];
  #pragma GCC unroll 64
  for (int i = 0; i < N; i++) known[i] = found[i] = zero();
  for (int64_t j = 0; j < of.key_dim; j++) {
    const vec k = all(of.k[j]), q = all(of.q[j]);
    #pragma GCC unroll 64
    for (int i = 0; i < N; i++) {
      const vec s = load(state + j * of.value_dim + i * kLanes);
      known[i] = fma(k, s, known[i]);
      found[i] = fma(q, s, found[i]);
    }
  }
  const vec kept = all(of.kept);
  #pragma GCC unroll 64
  for (int i = 0; i < N; i++) {
    const vec wrong = fma(all(-of.kept), known[i], load(of.v + column + i * kLanes));
    change[i] = mul(all(of.beta), wrong);
    store(of.y + column + i * kLanes, fma(all(qk), change[i], mul(kept, found[i])));
  }
  for (int64_t j = 0; j < of.key_dim; j++) {
    const vec k = all(of.k[j]);
    #pragma GCC unroll 64
    for (int i = 0; i < N; i++) {
      float* s = state + j * of.value_dim + i * kLanes;
      store(s, fma(k, change[i], mul(kept, load(s))));
    }
  }
}

void delta(const Delta& of) {
  float qk = 0;
  for (int64_t j = 0; j < of.key_dim; j++) qk += of.q[j] * of.k[j];
  int64_t c = 0;
  for (; c + 4 * kLanes <= of.value_dim; c += 4 * kLanes) delta_columns<4>(of, c, qk);
  for (; c + kLanes <= of.value_dim; c += kLanes) delta_columns<1>(of, c, qk);
  for (; c < of.value_dim; c++) {
    float known = 0, found = 0;
    float* state = of.state + c;
    for (int64_t j = 0; j < of.key_dim; j++) {
      known += of.k[j] * state[j * of.value_dim];
      found += of.q[j] * state[j * of.value_dim];
    }
    const float change = of.beta * (of.v[c] - of.kept * known);
    of.y[c] = of.kept * found + qk * change;
    for (int64_t j = 0; j < of.key_dim; j++) {
      float* s = state + j * of.value_dim;
      *s = of.kept * *s + of.k[j] * change;
    }
  }
}

}  // namespace
