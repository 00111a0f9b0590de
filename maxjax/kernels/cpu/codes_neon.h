// 64 codes of packed weights in four vectors on ARM; with the dot product extension its dot products.
#pragma once
#include <cmath>

#include "vector_neon.h"

namespace {

struct eight {
  float32x4_t a, b;
};

inline eight all8(float f) { return {vdupq_n_f32(f), vdupq_n_f32(f)}; }
inline eight zero8() { return all8(0); }
inline eight load8(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline void store8(float* p, eight v) {
  vst1q_f32(p, v.a);
  vst1q_f32(p + 4, v.b);
}
inline eight mul8(eight a, eight b) { return {vmulq_f32(a.a, b.a), vmulq_f32(a.b, b.b)}; }
inline eight fma8(eight a, eight b, eight c) { return {vfmaq_f32(c.a, a.a, b.a), vfmaq_f32(c.b, a.b, b.b)}; }
inline float sum8(eight v) { return vaddvq_f32(vaddq_f32(v.a, v.b)); }
// Each of the first (or last) four of eight floats twice.
inline eight doubled_low(eight v) { return {vzip1q_f32(v.a, v.a), vzip2q_f32(v.a, v.a)}; }
inline eight doubled_high(eight v) { return {vzip1q_f32(v.b, v.b), vzip2q_f32(v.b, v.b)}; }

inline float half_at(const uint8_t* p) {
  uint16_t h;
  memcpy(&h, p, 2);
  return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h))), 0);
}
// float16 at p, p + stride, ..., p + 7 * stride.
inline eight halves8(const uint8_t* p, int stride) {
  uint16_t h[8];
  for (int i = 0; i < 8; i++) memcpy(h + i, p + i * stride, 2);
  const float16x8_t v = vreinterpretq_f16_u16(vld1q_u16(h));
  return {vcvt_f32_f16(vget_low_f16(v)), vcvt_high_f32_f16(v)};
}
// 2^(e - 128) for the bytes e at the same places; 2^-128 and 2^-127 are subnormal.
inline eight powers8(const uint8_t* p, int stride) {
  float v[8];
  for (int i = 0; i < 8; i++) {
    const uint32_t e = p[i * stride];
    v[i] = of_bits(e < 2 ? uint32_t(0x200000) << e : (e - 1) << 23);
  }
  return load8(v);
}
inline eight of_signed_bytes8(const uint8_t* p) {
  const int16x8_t n = vmovl_s8(vld1_s8((const int8_t*)p));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(n))), vcvtq_f32_s32(vmovl_high_s16(n))};
}
// Eight unsigned bytes in a word, the lowest first.
inline eight of_word8(uint64_t bytes) {
  const uint16x8_t n = vmovl_u8(vcreate_u8(bytes));
  return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(n))), vcvtq_f32_u32(vmovl_high_u16(n))};
}

// Quantises 32 floats to int8: x is nearly codes * scale. Returns the scale, which is not finite if
// one of them is not; the codes are zeros then.
inline float quantise32(const float* x, int8_t* codes) {
  float32x4_t top = vdupq_n_f32(0);
  for (int i = 0; i < 32; i += 4) top = vmaxq_f32(top, vabsq_f32(vld1q_f32(x + i)));  // keeps NaN
  const float largest = vmaxvq_f32(top), by = 127 / largest;
  if (!std::isfinite(largest) || !std::isfinite(by)) {
    memset(codes, 0, 32);
    return largest / 127;
  }
  for (int i = 0; i < 32; i += 8) {
    const int32x4_t a = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i), by));
    const int32x4_t b = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i + 4), by));
    vst1_s8(codes + i, vqmovn_s16(vcombine_s16(vqmovn_s32(a), vqmovn_s32(b))));
  }
  return largest / 127;
}

struct Codes {
  uint8x16_t v[4];  // those of eight bits are signed
};
typedef int32x4_t ivec;
// Sums of four products each.
struct Dots {
  ivec v[4];
};
constexpr int kPanelVectors = 2, kPanelTokens = 4;
constexpr int kWideZero = 0;

// The low nibbles of 32 bytes, then the high ones.
inline Codes nibbles(const uint8_t* p) {
  const uint8x16_t a = vld1q_u8(p), b = vld1q_u8(p + 16), low = vdupq_n_u8(15);
  return {{vandq_u8(a, low), vandq_u8(b, low), vshrq_n_u8(a, 4), vshrq_n_u8(b, 4)}};
}
// The same of 16 bytes at p, then of those at q.
inline Codes nibbles(const uint8_t* p, const uint8_t* q) {
  const uint8x16_t a = vld1q_u8(p), b = vld1q_u8(q), low = vdupq_n_u8(15);
  return {{vandq_u8(a, low), vshrq_n_u8(a, 4), vandq_u8(b, low), vshrq_n_u8(b, 4)}};
}
// 32 signed bytes at p, then those at q.
inline Codes signed_bytes(const uint8_t* p, const uint8_t* q) {
  return {{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(q), vld1q_u8(q + 16)}};
}
// The bytes of a table of 16 at the codes.
inline Codes looked_up(Codes c, const uint8_t* table) {
  const uint8x16_t t = vld1q_u8(table);
  for (int i = 0; i < 4; i++) c.v[i] = vqtbl1q_u8(t, c.v[i]);
  return c;
}
// Adds 16 to codes i whose bit in byte i of `high` is set: bit B for the first 32, B + 1 for the others.
template <int B>
inline Codes with_fifth_bit(Codes c, const uint8_t* high) {
  for (int i = 0; i < 4; i++) {
    const uint8x16_t set = vtstq_u8(vld1q_u8(high + i % 2 * 16), vdupq_n_u8(uint8_t(1 << B << i / 2)));
    c.v[i] = vorrq_u8(c.v[i], vandq_u8(set, vdupq_n_u8(16)));
  }
  return c;
}
// Adds 16 to codes i whose bit i is set, in `low` for the first 32 and in `high` for the others.
inline Codes with_fifth_bits(Codes c, uint32_t low, uint32_t high) {
  const uint8x16_t own = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
  for (int i = 0; i < 4; i++) {
    const uint32_t word = (i < 2 ? low : high) >> i % 2 * 16;
    const uint8x16_t bits = vcombine_u8(vdup_n_u8(uint8_t(word)), vdup_n_u8(uint8_t(word >> 8)));
    c.v[i] = vorrq_u8(c.v[i], vandq_u8(vtstq_u8(bits, own), vdupq_n_u8(16)));
  }
  return c;
}

// Six bits each: the low (or high) nibbles of 64 bytes, and two bits from 32 bytes, of which H = 0
// takes the lower four bits and H = 1 the upper four.
template <int H>
inline Codes six_bits(const uint8_t* low, const uint8_t* high) {
  Codes c;
  for (int i = 0; i < 4; i++) {
    const uint8x16_t nibble = vld1q_u8(low + 16 * i), bits = vld1q_u8(high + i % 2 * 16);
    const int8x16_t by = vdupq_n_s8(int8_t(4 - 4 * H - i / 2 * 2));
    c.v[i] = vorrq_u8(H ? vshrq_n_u8(nibble, 4) : vandq_u8(nibble, vdupq_n_u8(15)),
                      vandq_u8(vshlq_u8(bits, by), vdupq_n_u8(0x30)));
  }
  return c;
}

// The products of four codes with four numbers each, summed. `wide` codes have eight bits; all
// others are below 128, so they are signed numbers too.
template <bool wide>
inline ivec dot4(ivec sums, ivec codes, ivec x) {
  const int8x16_t a = vreinterpretq_s8_s32(codes), b = vreinterpretq_s8_s32(x);
#ifdef __ARM_FEATURE_DOTPROD
  return vdotq_s32(sums, a, b);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
  return vaddq_s32(sums, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}

template <bool wide>
inline Dots dot(const Codes& c, const int8_t* x) {
  Dots d;
  for (int i = 0; i < 4; i++)
    d.v[i] = dot4<wide>(vdupq_n_s32(0), vreinterpretq_s32_u8(c.v[i]),
                        vreinterpretq_s32_s8(vld1q_s8(x + 16 * i)));
  return d;
}

// Eight floats as a vector with the same sum.
inline vec folded(eight v) { return vaddq_f32(v.a, v.b); }

// Adds the dot products of chunk I of four, each times the factor of its group of G codes.
template <int G, int I>
inline vec scaled(vec sums, const Dots& d, const eight* factors) {
  #pragma GCC unroll 4
  for (int i = 0; i < 64; i += G) {
    const int g = (64 * I + i) / G, lane = g % 4;
    const ivec n = G == 32 ? vaddq_s32(d.v[i / 16], d.v[(i / 16 + 1) % 4]) : d.v[i / 16];
    const eight& of = factors[g / 8];
    const float32x4_t four = g % 8 < 4 ? of.a : of.b;
    sums = vfmaq_n_f32(sums, vcvtq_f32_s32(n), four[lane]);
  }
  return sums;
}

// out[i] = code i times the scale, plus the offset, of its group of G.
template <int G, bool wide>
inline void expand(const Codes& c, const float* scales, const float* offsets, float* out) {
  for (int i = 0; i < 4; i++) {
    const float32x4_t scale = vdupq_n_f32(scales[16 * i / G]), offset = vdupq_n_f32(offsets[16 * i / G]);
    const int8x16_t n = vreinterpretq_s8_u8(c.v[i]);
    const int16x8_t low = vmovl_s8(vget_low_s8(n)), high = vmovl_high_s8(n);
    const int32x4_t four[4] = {vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low),
                               vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)};
    for (int j = 0; j < 4; j++)
      vst1q_f32(out + 16 * i + 4 * j, vfmaq_f32(offset, vcvtq_f32_s32(four[j]), scale));
  }
}

inline ivec all_sums(int32_t n) { return vdupq_n_s32(n); }
inline ivec load_codes(const int32_t* p) { return vld1q_s32(p); }
inline ivec four_of(const int8_t* x) {
  int32_t four;
  memcpy(&four, x, 4);
  return vdupq_n_s32(four);
}
inline vec to_float(ivec v) { return vcvtq_f32_s32(v); }

// Four codes of 4 rows side by side: out[k * stride + r] has codes 4k to 4k + 3 of row r.
inline void transposed(const Codes* rows, int32_t* out, int stride) {
  for (int i = 0; i < 4; i++) {
    const auto row = [&](int r) { return vreinterpretq_s32_u8(rows[r].v[i]); };
    const int32x4_t a = vzip1q_s32(row(0), row(2)), b = vzip2q_s32(row(0), row(2));
    const int32x4_t c = vzip1q_s32(row(1), row(3)), d = vzip2q_s32(row(1), row(3));
    int32_t* to = out + 4 * i * stride;
    vst1q_s32(to, vzip1q_s32(a, c));
    vst1q_s32(to + stride, vzip2q_s32(a, c));
    vst1q_s32(to + 2 * stride, vzip1q_s32(b, d));
    vst1q_s32(to + 3 * stride, vzip2q_s32(b, d));
  }
}

}  // namespace
