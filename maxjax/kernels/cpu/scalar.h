// Scalar conversion of float16 and bfloat16 to and from float, rounding to nearest even.
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

using maxjax::Type;

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};
// Used in KV caches only; the scales are stored in arrays of their own.
struct i8 {
  int8_t bits;
};

inline float of_bits(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline uint32_t to_bits(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return bits;
}

inline float widen(float f) { return f; }

inline float widen(i8 n) { return float(n.bits); }

inline float widen(bf16 h) { return of_bits(uint32_t(h.bits) << 16); }

inline float widen(f16 h) {
  const uint32_t sign = uint32_t(h.bits & 0x8000) << 16, rest = h.bits & 0x7fff;
  if (rest >= 0x7c00) return of_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);  // Inf, NaN
  // Below 2^-14 the exponent is 0 and the number rest * 2^-24, which is a normal float.
  const float size = rest < 0x400 ? float(rest) * 0x1p-24f : of_bits((rest << 13) + 0x38000000);
  return of_bits(to_bits(size) | sign);
}

inline void narrow(float f, float* out) { *out = f; }

inline void narrow(float f, bf16* out) {
  const uint32_t bits = to_bits(f);
  if ((bits & 0x7fffffff) > 0x7f800000) {  // NaN: rounding could make it Inf
    out->bits = uint16_t(bits >> 16 | 0x40);
  } else {
    out->bits = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

inline void narrow(float f, f16* out) {
  const uint32_t bits = to_bits(f), size = bits & 0x7fffffff;
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  uint32_t half;
  if (size > 0x7f800000) {
    half = 0x7e00 | (size >> 13 & 0x3ff);
  } else if (size >= 0x477ff000) {  // 65520 and more round to Inf
    half = 0x7c00;
  } else if (size >= 0x38800000) {
    half = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
  } else {
    // Adding 2^-1 rounds to multiples of 2^-24, the unit of a float16 below 2^-14.
    half = to_bits(of_bits(size) + 0.5f) - 0x3f000000;
  }
  out->bits = uint16_t(sign | half);
}

}  // namespace
