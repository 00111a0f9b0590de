// Vectors of four floats on ARM.
#pragma once
#include <arm_neon.h>

#include "scalar.h"

namespace {

typedef float32x4_t vec;
constexpr int kLanes = 4;
constexpr int kTileRows = 4, kTileTokens = 4, kMixed = 2;
// Number of additions to one vector until its sum is added to the total, two numbers each time.
constexpr int kInARow = 8;

inline vec zero() { return vdupq_n_f32(0); }
inline vec all(float f) { return vdupq_n_f32(f); }
inline vec load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, vec v) { vst1q_f32(p, v); }
inline vec fma(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }
inline vec add(vec a, vec b) { return vaddq_f32(a, b); }
inline vec mul(vec a, vec b) { return vmulq_f32(a, b); }
inline vec div(vec a, vec b) { return vdivq_f32(a, b); }
// Returns b where a or b is NaN.
inline vec max(vec a, vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline float sum(vec v) { return vaddvq_f32(v); }

template <int N>
inline void sums(const vec* v, float* out) {
  for (int i = 0; i < N; i++) out[i] = sum(v[i]);
}

inline void load2(const float* p, vec& a, vec& b) {
  a = vld1q_f32(p);
  b = vld1q_f32(p + 4);
}
inline void load2(const f16* p, vec& a, vec& b) {
  const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(&p->bits));
  a = vcvt_f32_f16(vget_low_f16(h));
  b = vcvt_high_f32_f16(h);
}
inline void load2(const bf16* p, vec& a, vec& b) {
  const uint16x8_t h = vld1q_u16(&p->bits);
  a = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16));
  b = vreinterpretq_f32_u32(vshll_high_n_u16(h, 16));
}
inline void load2(const i8* p, vec& a, vec& b) {
  const int16x8_t n = vmovl_s8(vld1_s8(&p->bits));
  a = vcvtq_f32_s32(vmovl_s16(vget_low_s16(n)));
  b = vcvtq_f32_s32(vmovl_high_s16(n));
}
// The position of the i-th of 2 * kLanes numbers after load2.
template <class T>
inline int place(int i) {
  return i;
}

inline vec nearest(vec v) { return vrndnq_f32(v); }
inline vec power_of_two(vec n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
inline vec zero_below(vec x, float limit, vec v) {
  return vbslq_f32(vcltq_f32(x, all(limit)), zero(), v);
}
inline vec abs(vec v) { return vabsq_f32(v); }
inline vec copysign(vec size, vec sign) { return vbslq_f32(vdupq_n_u32(0x80000000), sign, size); }

// Enables subnormal numbers in its scope: XLA's threads treat those below 2^-126 as zeros.
// "memory" keeps what is loaded, computed and stored in between from moving out of it.
struct Exact {
  uint64_t before;
  Exact() {
    asm volatile("mrs %0, fpcr" : "=r"(before));
    asm volatile("msr fpcr, %0" ::"r"(before & ~(uint64_t(1) << 24)) : "memory");
  }
  ~Exact() { asm volatile("msr fpcr, %0" ::"r"(before) : "memory"); }
};

}  // namespace

#include "exp.h"
