// Vectors of eight floats: AVX2, FMA and F16C, in every x86 processor since 2013.
#pragma once
#include <immintrin.h>

#include "scalar.h"

namespace {

typedef __m256 vec;
constexpr int kLanes = 8;
constexpr int kTileRows = 2, kTileTokens = 4, kMixed = 1;
// Number of additions to one vector until its sum is added to the total, two numbers each time.
constexpr int kInARow = 8;

inline vec zero() { return _mm256_setzero_ps(); }
inline vec all(float f) { return _mm256_set1_ps(f); }
inline vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, vec v) { _mm256_storeu_ps(p, v); }
inline vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
inline vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
inline vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
inline vec div(vec a, vec b) { return _mm256_div_ps(a, b); }
// Returns b where a or b is NaN.
inline vec max(vec a, vec b) { return _mm256_max_ps(a, b); }
inline float sum(vec v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

template <int N>
inline void sums(const vec* v, float* out) {
  for (int i = 0; i < N; i++) out[i] = sum(v[i]);
}

inline void load2(const float* p, vec& a, vec& b) {
  a = _mm256_loadu_ps(p);
  b = _mm256_loadu_ps(p + 8);
}
inline void load2(const f16* p, vec& a, vec& b) {
  a = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
  b = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)));
}
inline void load2(const i8* p, vec& a, vec& b) {
  const __m128i n = _mm_loadu_si128((const __m128i*)p);
  a = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(n));
  b = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(n, 8)));
}
// Loads even and odd elements separately: a bf16 is the upper half of a float.
inline void load2(const bf16* p, vec& a, vec& b) {
  const __m256i h = _mm256_loadu_si256((const __m256i*)p);
  a = _mm256_castsi256_ps(_mm256_slli_epi32(h, 16));
  b = _mm256_castsi256_ps(_mm256_and_si256(h, _mm256_set1_epi32(int(0xffff0000))));
}
// The position of the i-th of 2 * kLanes numbers after load2.
template <class T>
inline int place(int i) {
  return i;
}
template <>
inline int place<bf16>(int i) {
  return i / 2 + i % 2 * kLanes;
}

inline vec nearest(vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vec power_of_two(vec n) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
inline vec zero_below(vec x, float limit, vec v) {
  return _mm256_andnot_ps(_mm256_cmp_ps(x, all(limit), _CMP_LT_OQ), v);
}
inline vec abs(vec v) { return _mm256_andnot_ps(all(-0.0f), v); }
inline vec copysign(vec size, vec sign) { return _mm256_or_ps(size, _mm256_and_ps(all(-0.0f), sign)); }

// Enables subnormal numbers in its scope: XLA's threads treat those below 2^-126 as zeros.
struct Exact {
  const unsigned before = _mm_getcsr();
  Exact() { _mm_setcsr(before & ~0x8040u); }
  ~Exact() { _mm_setcsr(before); }
};

}  // namespace

#include "exp.h"
