// 64 codes of packed weights in an array: for any processor. The compiler finds the vectors.
#pragma once
#include <cmath>
#include <limits>

#include "vector_portable.h"

namespace {

struct eight {
  float of[8];
};

inline eight all8(float f) { return {{f, f, f, f, f, f, f, f}}; }
inline eight zero8() { return all8(0); }
inline eight load8(const float* p) {
  eight v;
  memcpy(v.of, p, sizeof v.of);
  return v;
}
inline void store8(float* p, eight v) { memcpy(p, v.of, sizeof v.of); }
inline eight mul8(eight a, eight b) {
  for (int i = 0; i < 8; i++) a.of[i] *= b.of[i];
  return a;
}
inline eight fma8(eight a, eight b, eight c) {
  for (int i = 0; i < 8; i++) c.of[i] += a.of[i] * b.of[i];
  return c;
}
inline float sum8(eight v) {
  return ((v.of[0] + v.of[4]) + (v.of[1] + v.of[5])) + ((v.of[2] + v.of[6]) + (v.of[3] + v.of[7]));
}
// Each of the first (or last) four of eight floats twice.
inline eight doubled_low(eight v) {
  for (int i = 7; i >= 0; i--) v.of[i] = v.of[i / 2];
  return v;
}
inline eight doubled_high(eight v) {
  for (int i = 0; i < 8; i++) v.of[i] = v.of[4 + i / 2];
  return v;
}

inline float half_at(const uint8_t* p) {
  f16 h;
  memcpy(&h.bits, p, 2);
  return widen(h);
}
// float16 at p, p + stride, ..., p + 7 * stride.
inline eight halves8(const uint8_t* p, int stride) {
  eight v;
  for (int i = 0; i < 8; i++) v.of[i] = half_at(p + i * stride);
  return v;
}
// 2^(e - 128) for the bytes e at the same places; 2^-128 and 2^-127 are subnormal.
inline eight powers8(const uint8_t* p, int stride) {
  eight v;
  for (int i = 0; i < 8; i++) {
    const uint32_t e = p[i * stride];
    v.of[i] = of_bits(e < 2 ? uint32_t(0x200000) << e : (e - 1) << 23);
  }
  return v;
}
inline eight of_signed_bytes8(const uint8_t* p) {
  eight v;
  for (int i = 0; i < 8; i++) v.of[i] = float(int8_t(p[i]));
  return v;
}
// Eight unsigned bytes in a word, the lowest first.
inline eight of_word8(uint64_t bytes) {
  eight v;
  for (int i = 0; i < 8; i++) v.of[i] = float(bytes >> 8 * i & 255);
  return v;
}

// Quantises 32 floats to int8: x is nearly codes * scale. Returns the scale, which is not finite if
// one of them is not; the codes are zeros then.
inline float quantise32(const float* x, int8_t* codes) {
  float largest = 0;
  for (int i = 0; i < 32; i++) {
    const float size = std::fabs(x[i]);
    if (!(size <= largest)) largest = std::isnan(largest) ? largest : size;
  }
  const float by = 127 / largest;
  if (!std::isfinite(largest) || !std::isfinite(by)) {
    memset(codes, 0, 32);
    return largest / 127;
  }
  for (int i = 0; i < 32; i++) codes[i] = int8_t(std::nearbyint(x[i] * by));
  return largest / 127;
}

struct Codes {
  uint8_t v[64];  // those of eight bits are signed
};
// Sums of four products each.
struct Dots {
  int32_t v[16];
};
struct ivec {
  int32_t v[kLanes];
};
constexpr int kPanelVectors = 1, kPanelTokens = 2;
constexpr int kWideZero = 0;

// The low nibbles of 32 bytes, then the high ones.
inline Codes nibbles(const uint8_t* p) {
  Codes c;
  for (int i = 0; i < 32; i++) c.v[i] = p[i] & 15, c.v[32 + i] = p[i] >> 4;
  return c;
}
// The same of 16 bytes at p, then of those at q.
inline Codes nibbles(const uint8_t* p, const uint8_t* q) {
  Codes c;
  for (int i = 0; i < 16; i++) {
    c.v[i] = p[i] & 15, c.v[16 + i] = p[i] >> 4;
    c.v[32 + i] = q[i] & 15, c.v[48 + i] = q[i] >> 4;
  }
  return c;
}
// 32 signed bytes at p, then those at q.
inline Codes signed_bytes(const uint8_t* p, const uint8_t* q) {
  Codes c;
  memcpy(c.v, p, 32);
  memcpy(c.v + 32, q, 32);
  return c;
}
// The bytes of a table of 16 at the codes.
inline Codes looked_up(Codes c, const uint8_t* table) {
  for (int i = 0; i < 64; i++) c.v[i] = table[c.v[i]];
  return c;
}
// Adds 16 to codes i whose bit in byte i of `high` is set: bit B for the first 32, B + 1 for the others.
template <int B>
inline Codes with_fifth_bit(Codes c, const uint8_t* high) {
  for (int i = 0; i < 64; i++) c.v[i] |= (high[i % 32] >> (B + i / 32) & 1) << 4;
  return c;
}
// Adds 16 to codes i whose bit i is set, in `low` for the first 32 and in `high` for the others.
inline Codes with_fifth_bits(Codes c, uint32_t low, uint32_t high) {
  for (int i = 0; i < 64; i++) c.v[i] |= ((i < 32 ? low : high) >> i % 32 & 1) << 4;
  return c;
}

// Six bits each: the low (or high) nibbles of 64 bytes, and two bits from 32 bytes, of which H = 0
// takes the lower four bits and H = 1 the upper four.
template <int H>
inline Codes six_bits(const uint8_t* low, const uint8_t* high) {
  Codes c;
  for (int i = 0; i < 64; i++)
    c.v[i] = uint8_t((low[i] >> 4 * H & 15) | (high[i % 32] >> (4 * H + i / 32 * 2) & 3) << 4);
  return c;
}

template <bool wide>
inline int code_of(uint8_t byte) {
  return wide ? int(int8_t(byte)) : int(byte);
}

template <bool wide>
inline Dots dot(const Codes& c, const int8_t* x) {
  Dots d{};
  for (int i = 0; i < 64; i++) d.v[i / 4] += code_of<wide>(c.v[i]) * int(x[i]);
  return d;
}

// Eight floats as a vector with the same sum.
inline vec folded(eight v) {
  return vec{v.of[0] + v.of[4], v.of[1] + v.of[5], v.of[2] + v.of[6], v.of[3] + v.of[7]};
}

// Adds the dot products of chunk I of four, each times the factor of its group of G codes.
template <int G, int I>
inline vec scaled(vec sums, const Dots& d, const eight* factors) {
  for (int i = 0; i < 64; i += G) {
    int32_t n = 0;
    for (int j = 0; j < G / 4; j++) n += d.v[i / 4 + j];
    const int g = (64 * I + i) / G;
    sums[i / G % kLanes] += float(n) * factors[g / 8].of[g % 8];
  }
  return sums;
}

// out[i] = code i times the scale, plus the offset, of its group of G.
template <int G, bool wide>
inline void expand(const Codes& c, const float* scales, const float* offsets, float* out) {
  for (int i = 0; i < 64; i++)
    out[i] = float(code_of<wide>(c.v[i])) * scales[i / G] + offsets[i / G];
}

inline ivec all_sums(int32_t n) {
  ivec v;
  for (int i = 0; i < kLanes; i++) v.v[i] = n;
  return v;
}
inline ivec load_codes(const int32_t* p) {
  ivec v;
  memcpy(v.v, p, sizeof v.v);
  return v;
}
inline ivec four_of(const int8_t* x) {
  ivec v;
  for (int i = 0; i < kLanes; i++) memcpy(&v.v[i], x, 4);
  return v;
}
inline vec to_float(ivec v) {
  vec f;
  for (int i = 0; i < kLanes; i++) f[i] = float(v.v[i]);
  return f;
}
// The products of four codes with four numbers each, summed. `wide` codes have eight bits.
template <bool wide>
inline ivec dot4(ivec sums, const ivec& codes, const ivec& x) {
  for (int i = 0; i < kLanes; i++)
    for (int j = 0; j < 4; j++)
      sums.v[i] += code_of<wide>(uint8_t(codes.v[i] >> 8 * j)) * int(int8_t(x.v[i] >> 8 * j));
  return sums;
}

// Four codes of kLanes rows side by side: out[k * stride + r] has codes 4k to 4k + 3 of row r.
inline void transposed(const Codes* rows, int32_t* out, int stride) {
  for (int k = 0; k < 16; k++)
    for (int r = 0; r < kLanes; r++) memcpy(out + k * stride + r, rows[r].v + 4 * k, 4);
}

}  // namespace
