// Vectors of four floats in the compilers' own notation: for any processor.
#pragma once
#include "scalar.h"

namespace {

typedef float vec __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kTileRows = 2, kTileTokens = 4, kMixed = 1;
// Number of additions to one vector until its sum is added to the total, two numbers each time.
constexpr int kInARow = 8;

inline vec zero() { return vec{}; }
inline vec all(float f) { return vec{f, f, f, f}; }
inline vec load(const float* p) {
  vec v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, vec v) { memcpy(p, &v, sizeof v); }
inline vec fma(vec a, vec b, vec c) { return a * b + c; }
inline vec add(vec a, vec b) { return a + b; }
inline vec mul(vec a, vec b) { return a * b; }
inline vec div(vec a, vec b) { return a / b; }
// Returns b where a or b is NaN.
inline vec max(vec a, vec b) {
  for (int i = 0; i < kLanes; i++) b[i] = a[i] > b[i] ? a[i] : b[i];
  return b;
}
inline float sum(vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }

template <int N>
inline void sums(const vec* v, float* out) {
  for (int i = 0; i < N; i++) out[i] = sum(v[i]);
}

template <class T>
inline void load2(const T* p, vec& a, vec& b) {
  a = vec{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])};
  b = vec{widen(p[4]), widen(p[5]), widen(p[6]), widen(p[7])};
}
// The position of the i-th of 2 * kLanes numbers after load2.
template <class T>
inline int place(int i) {
  return i;
}

inline vec exp(vec x) {
  for (int i = 0; i < kLanes; i++) x[i] = __builtin_expf(x[i]);
  return x;
}
inline vec copysign(vec size, vec sign) {
  for (int i = 0; i < kLanes; i++) size[i] = __builtin_copysignf(size[i], sign[i]);
  return size;
}
inline vec abs(vec v) {
  for (int i = 0; i < kLanes; i++) v[i] = __builtin_fabsf(v[i]);
  return v;
}

struct Exact {  // no flag is known to this path
  Exact() {}
};

}  // namespace
