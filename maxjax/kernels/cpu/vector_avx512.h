// Vectors of sixteen floats: AVX-512 F, BW, DQ and VL; with BF16 the product of pairs of them.
#pragma once
#include <immintrin.h>

#include "scalar.h"

namespace {

typedef __m512 vec;
constexpr int kLanes = 16;
constexpr int kTileRows = 4, kTileTokens = 4, kMixed = 2;
// Number of additions to one vector until its sum is added to the total, two numbers each time.
constexpr int kInARow = 16;

inline vec zero() { return _mm512_setzero_ps(); }
inline vec all(float f) { return _mm512_set1_ps(f); }
inline vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, vec v) { _mm512_storeu_ps(p, v); }
inline vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
inline vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
inline vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
inline vec div(vec a, vec b) { return _mm512_div_ps(a, b); }
// Returns b where a or b is NaN.
inline vec max(vec a, vec b) { return _mm512_max_ps(a, b); }
inline float sum(vec v) { return _mm512_reduce_add_ps(v); }

// Adds pairs of elements: half the elements of the result are sums of a's, half of b's.
inline vec halved1(vec a, vec b) { return add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); }
inline vec halved2(vec a, vec b) {
  const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
  return add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}

// In each 128-bit lane, the sums of that lane of the four vectors.
inline vec quartered(const vec* v) { return halved2(halved1(v[0], v[1]), halved1(v[2], v[3])); }

template <int N>
inline void sums(const vec* v, float* out) {
  int i = 0;
  for (; i + 16 <= N; i += 16) {
    const vec a = quartered(v + i), b = quartered(v + i + 4), c = quartered(v + i + 8),
              d = quartered(v + i + 12);
    const vec ab = add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const vec cd = add(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    store(out + i, add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd)));
  }
  for (; i + 4 <= N; i += 4) {
    const vec a = quartered(v + i);
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    _mm_storeu_ps(out + i, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }
  for (; i < N; i++) out[i] = sum(v[i]);
}

inline void load2(const float* p, vec& a, vec& b) {
  a = _mm512_loadu_ps(p);
  b = _mm512_loadu_ps(p + 16);
}
inline void load2(const f16* p, vec& a, vec& b) {
  a = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
  b = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(p + 16)));
}
inline void load2(const i8* p, vec& a, vec& b) {
  a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
  b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(p + 16))));
}
// Loads even and odd elements separately: a bf16 is the upper half of a float.
inline void load2(const bf16* p, vec& a, vec& b) {
  const __m512i h = _mm512_loadu_si512(p);
  a = _mm512_castsi512_ps(_mm512_slli_epi32(h, 16));
  b = _mm512_castsi512_ps(_mm512_and_si512(h, _mm512_set1_epi32(int(0xffff0000))));
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

inline vec nearest(vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vec power_of_two(vec n) {
  const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
}
inline vec zero_below(vec x, float limit, vec v) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, all(limit), _CMP_NLT_UQ), v);
}
inline vec abs(vec v) { return _mm512_abs_ps(v); }
inline vec copysign(vec size, vec sign) { return _mm512_or_ps(size, _mm512_and_ps(all(-0.0f), sign)); }

// Enables subnormal numbers in its scope: XLA's threads treat those below 2^-126 as zeros.
struct Exact {
  const unsigned before = _mm_getcsr();
  Exact() { _mm_setcsr(before & ~0x8040u); }
  ~Exact() { _mm_setcsr(before); }
};

}  // namespace

#include "exp.h"
