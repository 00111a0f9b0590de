// Encoders of ggml's blocks: the arithmetic, over vectors whose lanes are blocks.
//
// Each lane computes what NumPy computes in storage/blocks (encode_k.py, encode_simple.py, and the
// searches in search.py, which document the formulas), in the same order and without fused operations, so that
// blocks are equal in every byte. Compile with -ffp-contract=off.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "scalar.h"

namespace maxjax {

// Encodes `count` blocks of a type. `importance` is null, or has the weights of a row of
// `row` blocks, which `values` then starts with. False if a value or a scale is not finite.
using Encode = bool (*)(const float* values, const float* importance, int64_t row, int64_t count,
                        uint8_t* blocks);

struct Encoder {
  const char* type;
  Encode run;
};

constexpr int kEncoders = 11;

struct EncodeLevel {
  const char* name;
  Encoder encoders[kEncoders];
};

}  // namespace maxjax

namespace {

#if defined(__AVX512F__)
constexpr int N = 16;
#elif defined(__AVX2__)
constexpr int N = 8;
#else
constexpr int N = 4;
#endif

typedef float F __attribute__((vector_size(4 * N)));
typedef int32_t I __attribute__((vector_size(4 * N)));

constexpr float kEpsilon = 1e-15f;

inline F all(float v) { return v - F{}; }
inline I all(int32_t v) { return v + I{}; }
inline F to_float(I v) { return __builtin_convertvector(v, F); }
inline I to_int(F v) { return __builtin_convertvector(v, I); }
inline F lower(F a, F b) { return a < b ? a : b; }
inline F upper(F a, F b) { return a > b ? a : b; }
inline I lower(I a, I b) { return a < b ? a : b; }
inline I upper(I a, I b) { return a > b ? a : b; }
inline F magnitude(F v) { return (F)((I)v & 0x7fffffff); }

inline F root(F v) {
  F result;
  for (int b = 0; b < N; b++) result[b] = __builtin_sqrtf(v[b]);
  return result;
}

inline bool any(I mask) {
  int32_t found = 0;
  for (int b = 0; b < N; b++) found |= mask[b];
  return found != 0;
}

// ggml's nearest_int: halves to even, NaN gives 0, and numbers of 2^22 or more wrap around.
inline I nearest(F v) { return ((I)(v + 12582912.0f) & 0x7fffff) - 0x400000; }

// The same as a float, for numbers below 2^22.
inline F round_small(F v) { return (v + 12582912.0f) - 12582912.0f; }

// An infinite inverse gives the integers that ggml computes from it, 0.
inline F finite(F inverse) {
  return magnitude(inverse) == __builtin_inff() ? F{} : inverse;
}

inline F half_of(F v, uint16_t* bits) {
  F rounded;
  for (int b = 0; b < N; b++) {
    f16 half;
    narrow(v[b], &half);
    bits[b] = half.bits;
    rounded[b] = widen(half);
  }
  return rounded;
}

// --- searches ---------------------------------------------------------------------------------

// x is about scale * q + minimum, with q of 0 to top.
struct Affine {
  F scale, minimum, inverse, origin;
  float top;

  F integer(F x) const {
    return lower(upper(round_small(inverse * (x - origin)), F{}), all(top));
  }
};

template <int S, bool kAbsolute = false>
inline Affine search_affine(const F* x, const F* w, float top, float first, float step, int count) {
  F low = x[0], high = x[0], sum_w = w[0], sum_x = w[0] * x[0];
  for (int i = 1; i < S; i++) {
    low = lower(x[i], low);
    high = upper(x[i], high);
    sum_w += w[i];
    sum_x += w[i] * x[i];
  }
  low = low > 0.0f ? F{} : low;
  const F range = high - low;
  F inverse = top / range;
  Affine best{1.0f / inverse, low, finite(inverse), low, top};
  const F highest = all(top);
  F least = F{};
  for (int i = 0; i < S; i++) {
    const F wrong = (best.scale * best.integer(x[i]) + low) - x[i];
    least += w[i] * (kAbsolute ? magnitude(wrong) : wrong * wrong);
  }
  F q[S];
  for (int k = 0; k <= count; k++) {
    inverse = finite(((first + step * float(k)) + top) / (high - best.minimum));
    F sum_q = F{}, sum_qq = F{}, sum_qx = F{};
    for (int i = 0; i < S; i++) {
      q[i] = lower(upper(round_small(inverse * (x[i] - best.minimum)), F{}), highest);
      const F wq = w[i] * q[i];
      sum_q += wq;
      sum_qq += wq * q[i];
      sum_qx += wq * x[i];
    }
    const F determinant = sum_w * sum_qq - sum_q * sum_q;
    F scale = (sum_w * sum_qx - sum_x * sum_q) / determinant;
    F minimum = (sum_qq * sum_x - sum_q * sum_qx) / determinant;
    const I above = minimum > 0.0f;
    minimum = above ? F{} : minimum;
    scale = above ? sum_qx / sum_qq : scale;
    F error = F{};
    for (int i = 0; i < S; i++) {
      const F wrong = (scale * q[i] + minimum) - x[i];
      error += w[i] * (kAbsolute ? magnitude(wrong) : wrong * wrong);
    }
    const I better = (determinant > 0.0f) & (error < least);
    best.origin = better ? best.minimum : best.origin;
    best.inverse = better ? inverse : best.inverse;
    best.scale = better ? scale : best.scale;
    best.minimum = better ? minimum : best.minimum;
    least = better ? error : least;
  }
  return best;
}

// x is about scale * q, with q of -top to top - 1.
struct Linear {
  F scale, inverse;
  I is_zero;
  int top;

  I integer(F x) const {
    const I q = lower(upper(nearest(inverse * x), all(-top)), all(top - 1)) + top;
    return is_zero ? I{} : q;
  }
};

// The value of largest magnitude, the first of several; 0 if all are 0.
template <int S>
inline F largest(const F* x) {
  F size = F{}, value = F{};
  for (int i = 0; i < S; i++) {
    const I more = magnitude(x[i]) > size;
    size = more ? magnitude(x[i]) : size;
    value = more ? x[i] : value;
  }
  return value;
}

// `w` is null for weights x * x.
template <int S>
inline Linear search_linear(const F* x, const F* w, int top) {
  const F extreme = largest<S>(x);
  const I is_zero = magnitude(extreme) < kEpsilon;
  F wx[S], ww[S];
  for (int i = 0; i < S; i++) {
    ww[i] = w ? w[i] : x[i] * x[i];
    wx[i] = ww[i] * x[i];
  }
  Linear best{F{}, -float(top) / extreme, is_zero, top};
  F most = F{};
  const F lowest = all(-float(top)), highest = all(float(top - 1));
  for (int k = -10; k <= 9; k++) {
    if (k == 0) continue;
    // The first attempt, -10, has no offset, and counts whatever it gives.
    const bool is_first = k == -10;
    const F inverse = is_first ? best.inverse : -(float(top) + 0.1f * float(k)) / extreme;
    F moment = F{}, square = F{};
    for (int i = 0; i < S; i++) {
      const F q = lower(upper(round_small(inverse * x[i]), lowest), highest);
      moment += wx[i] * q;
      square += (ww[i] * q) * q;
    }
    const I better = is_first ? square != 0.0f : (square > 0.0f) & (moment * moment > most * square);
    const F scale = moment / square;
    best.scale = better ? scale : best.scale;
    best.inverse = better ? inverse : best.inverse;
    most = better ? scale * moment : most;
  }
  best.scale = is_zero ? F{} : best.scale;
  return best;
}

// A scale of numbers that are not negative, and their integers of 0 to top in `q`.
template <int S>
inline F search_positive(const F* x, const F* w, int top, I* q) {
  F high = F{};
  for (int i = 0; i < S; i++) high = upper(high, x[i]);
  const I is_zero = high < kEpsilon;
  F inverse = float(top) / high, scale = 1.0f / inverse, least = F{};
  for (int i = 0; i < S; i++) {
    const F wrong = x[i] - scale * to_float(nearest(inverse * x[i]));
    least += w[i] * wrong * wrong;
  }
  for (int k = -4; k <= 4; k++) {
    if (k == 0) continue;
    const F other = (0.1f * float(k) + float(top)) / high, step = 1.0f / other;
    F error = F{};
    for (int i = 0; i < S; i++) {
      const F wrong = x[i] - step * to_float(lower(nearest(other * x[i]), all(top)));
      error += w[i] * wrong * wrong;
    }
    const I better = error < least;
    least = better ? error : least;
    inverse = better ? other : inverse;
  }
  F moment = F{}, square = F{};
  for (int i = 0; i < S; i++) {
    q[i] = upper(lower(nearest(inverse * x[i]), all(top)), I{});
    moment += w[i] * x[i] * to_float(q[i]);
    square += w[i] * to_float(q[i]) * to_float(q[i]);
  }
  for (int round = 0; round < 5; round++) {
    I changed = I{};
    for (int i = 0; i < S; i++) {
      const F old = to_float(q[i]);
      F m = moment - w[i] * x[i] * old, s = square - w[i] * old * old;
      I take = (m > 0.0f) & (s > 0.0f);
      const I next = upper(lower(nearest(x[i] * s / m), all(top)), I{});
      m += w[i] * x[i] * to_float(next);
      s += w[i] * to_float(next) * to_float(next);
      take &= (next != q[i]) & (m * m * square > moment * moment * s);
      q[i] = take ? next : q[i];
      moment = take ? m : moment;
      square = take ? s : square;
      changed |= take;
    }
    if (!any(changed)) break;
  }
  for (int i = 0; i < S; i++) q[i] = is_zero ? I{} : q[i];
  return (is_zero | (square == 0.0f)) ? F{} : moment / square;
}

// Q3_K: a signed scale, and integers of 0 to 7 in `q`, changed one by one while that helps.
inline F search_descent(const F* x, I* q) {
  const F extreme = largest<16>(x);
  const I is_zero = magnitude(extreme) < kEpsilon;
  const F inverse = -4.0f / extreme;
  F moment = F{}, square = F{};
  for (int i = 0; i < 16; i++) {
    q[i] = lower(upper(nearest(inverse * x[i]), all(-4)), all(3));
    const F w = x[i] * x[i];
    moment += w * x[i] * to_float(q[i]);
    square += w * to_float(q[i]) * to_float(q[i]);
  }
  for (int round = 0; round < 5; round++) {
    I changed = I{};
    for (int i = 0; i < 16; i++) {
      const F w = x[i] * x[i], old = to_float(q[i]);
      F m = moment - w * x[i] * old, s = square - w * old * old;
      I take = m > 0.0f;
      const I next = lower(upper(nearest(x[i] * s / m), all(-4)), all(3));
      m += w * x[i] * to_float(next);
      s += w * to_float(next) * to_float(next);
      take &= (next != q[i]) & (s > 0.0f) & (m * m * square > moment * moment * s);
      q[i] = take ? next : q[i];
      moment = take ? m : moment;
      square = take ? s : square;
      changed |= take;
    }
    if (!any(changed)) break;
  }
  for (int i = 0; i < 16; i++) q[i] = is_zero ? I{} : q[i] + 4;
  return (is_zero | (square == 0.0f)) ? F{} : moment / square;
}

// --- output -----------------------------------------------------------------------------------

// The blocks of all lanes, `size` bytes each.
struct Blocks {
  uint8_t* data;
  int size;

  void byte(int at, I value) const {
    for (int b = 0; b < N; b++) data[b * size + at] = uint8_t(value[b]);
  }
  // `count` bytes, a multiple of 4, each of 0 to 255.
  template <class Value>
  void bytes(int at, int count, const Value& value) const {
    for (int k = 0; k < count; k += 4) {
      const I word = value(k) | value(k + 1) << 8 | value(k + 2) << 16 | value(k + 3) << 24;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
      for (int b = 0; b < N; b++) {
        const int32_t lane = word[b];
        memcpy(data + b * size + at + k, &lane, 4);
      }
#else
      for (int i = 0; i < 4; i++) byte(at + k + i, word >> 8 * i);
#endif
    }
  }
  // Stores float16; returns what they are worth.
  F half(int at, F value) const {
    uint16_t bits[N];
    const F rounded = half_of(value, bits);
    for (int b = 0; b < N; b++) {
      data[b * size + at] = uint8_t(bits[b]);
      data[b * size + at + 1] = uint8_t(bits[b] >> 8);
    }
    return rounded;
  }
};

inline bool is_finite(F v) { return !any(~(magnitude(v) <= 0x1.fffffep127f)); }

// A sum over values that are too large gives no finite scale.
template <int S>
inline bool are_finite(const F* v) {
  I wrong = I{};
  for (int i = 0; i < S; i++) wrong |= ~(magnitude(v[i]) <= 0x1.fffffep127f);
  return !any(wrong);
}

// Weights of an importance matrix: of each value, times the root of sigma2 + x * x.
template <int S>
inline void weigh(const F* x, const F* importance, F sigma2, F* w) {
  for (int i = 0; i < S; i++) w[i] = importance[i] * root(sigma2 + x[i] * x[i]);
}

template <int S>
inline F sum(const F* x) {
  F total = F{};
  for (int i = 0; i < S; i++) total += x[i];
  return total;
}

template <int S>
inline F sum_of_squares(const F* x) {
  F total = F{};
  for (int i = 0; i < S; i++) total += x[i] * x[i];
  return total;
}

// --- blocks of 32 with one scale --------------------------------------------------------------

inline void pack_halves(const I* q, const Blocks& out, int at) {
  out.bytes(at, 16, [&](int j) { return (q[j] & 15) | (q[j + 16] & 15) << 4; });
}

inline void pack_fifth(const I* q, const Blocks& out, int at) {
  out.bytes(at, 4, [&](int k) {
    I bits = I{};
    for (int j = 0; j < 8; j++) bits |= (q[8 * k + j] >> 4 & 1) << j;
    return bits;
  });
}

// Q4_0 and Q5_0, which differ in `top`: 8 and 16.
template <int kTop>
inline bool encode_signed(const F* x, const F* importance, F sigma2, const Blocks& out) {
  I q[32];
  F scale;
  if (importance) {
    F w[32];
    weigh<32>(x, importance, sigma2, w);
    const Linear found = search_linear<32>(x, w, kTop);
    scale = found.scale;
    for (int i = 0; i < 32; i++) q[i] = found.integer(x[i]);
  } else {
    scale = largest<32>(x) / -float(kTop);
    const F inverse = finite(1.0f / scale);
    const I is_none = (inverse == 0.0f) & (scale != 0.0f);
    for (int i = 0; i < 32; i++) {
      const F step = x[i] * inverse + (float(kTop) + 0.5f);
      const I found = to_int(lower(upper(step, F{}), all(float(2 * kTop - 1))));
      q[i] = is_none ? I{} : found;
    }
  }
  const F d = out.half(0, scale);
  if (kTop == 16) pack_fifth(q, out, 2);
  pack_halves(q, out, kTop == 16 ? 6 : 2);
  return is_finite(d);
}

// Q4_1 and Q5_1, with integers up to `kTop`.
template <int kTop>
inline bool encode_shifted(const F* x, const F* importance, F sigma2, const Blocks& out) {
  I q[32];
  F scale, least;
  if (importance) {
    F w[32];
    weigh<32>(x, importance, sigma2, w);
    const Affine found = search_affine<32>(x, w, kTop, -0.9f, 0.05f, 36);
    scale = found.scale;
    least = found.minimum;
    for (int i = 0; i < 32; i++) q[i] = to_int(found.integer(x[i]));
  } else {
    F high = x[0];
    least = x[0];
    for (int i = 1; i < 32; i++) {
      least = x[i] < least ? x[i] : least;
      high = x[i] > high ? x[i] : high;
    }
    scale = (high - least) / float(kTop);
    const F inverse = finite(1.0f / scale);
    const I is_none = (inverse == 0.0f) & (scale != 0.0f);
    for (int i = 0; i < 32; i++) {
      const F step = (x[i] - least) * inverse + 0.5f;
      const I found = to_int(lower(upper(step, F{}), all(float(kTop))));
      q[i] = is_none ? I{} : found;
    }
  }
  const F d = out.half(0, scale), m = out.half(2, least);
  if (kTop == 31) pack_fifth(q, out, 4);
  pack_halves(q, out, kTop == 31 ? 8 : 4);
  return is_finite(d) && is_finite(m);
}

inline bool encode_q8_0(const F* x, const F*, F, const Blocks& out) {
  const F scale = magnitude(largest<32>(x)) / 127.0f;
  const F d = out.half(0, scale), inverse = finite(1.0f / scale);
  out.bytes(2, 32, [&](int i) {
    const F step = x[i] * inverse;
    const I whole = to_int(step);
    // Halves away from zero: doubling the fraction is exact.
    const F rest = step - to_float(whole);
    return (whole + to_int(rest + rest)) & 255;
  });
  return is_finite(d);
}

inline bool encode_mxfp4(const F* x, const F*, F, const Blocks& out) {
  // The exponent of the largest value is that of the scale plus 2, as 4 is the largest power of two in E2M1.
  const I exponent = upper(((I)magnitude(largest<32>(x)) >> 23) - 2, I{});
  out.byte(0, exponent);
  // 1 / scale as two factors, neither of which overflows.
  const I first = exponent >> 1, rest = exponent - first;
  const F a = (F)((190 - first) << 23), b = (F)((192 - rest) << 23);
  constexpr float kMiddles[] = {0.5f, 1.5f, 2.5f, 3.5f, 5.0f, 7.0f, 10.0f};
  I q[32];
  for (int i = 0; i < 32; i++) {
    // Twice the value in units of the scale; the middles between the numbers of E2M1.
    const F size = magnitude(x[i]) * a * b;
    I index = I{};
    for (const float middle : kMiddles) index -= size > middle;
    q[i] = index | (((I)x[i] < 0) & (index != 0) & 8);
  }
  pack_halves(q, out, 1);
  return true;
}

// --- blocks of 256 in sub-blocks --------------------------------------------------------------

// Q2_K, Q4_K and Q5_K: sub-blocks of kSize values with a scale and a minimum.
struct SubBlock {
  F divisor, shift;
};

template <int kSize, int kTop, class Search>
inline void quantise_again(const F* x, const SubBlock& sub, const Search& search, I* q) {
  const I is_zero = sub.divisor == 0.0f;
  for (int i = 0; i < kSize; i++)
    q[i] = upper(lower(nearest((x[i] + sub.shift) / sub.divisor), all(kTop)), I{});
  if (any(is_zero))
    for (int i = 0; i < kSize; i++) q[i] = is_zero ? to_int(search.integer(x[i])) : q[i];
}

// The integers of scales of 0 to kTop, and the factor in `*d`.
template <int kCount, int kTop>
inline void round_scales(const F* x, I* q, F* d) {
  F high = F{};
  for (int j = 0; j < kCount; j++) high = upper(x[j], high);
  const F inverse = high > 0.0f ? float(kTop) / high : F{};
  for (int j = 0; j < kCount; j++) q[j] = lower(nearest(inverse * x[j]) & 255, all(kTop));
  *d = high / float(kTop);
}

template <int kSize, int kTop, int kScale, bool kAbsolute>
inline bool search_blocks(const F* x, const F* importance, float first, int count, F* d, F* dmin,
                          I* scales, I* minima, I* q, const Blocks& out, int at) {
  constexpr int kCount = 256 / kSize;
  Affine found[kCount];
  F scale[kCount], minimum[kCount], totals[kCount], w[kSize];
  if (importance) {
    const F squares = sum_of_squares<256>(x);
    const F sigma2 = (kSize == 32 ? 2.0f : 1.0f) * squares / 256.0f;
    for (int j = 0; j < kCount; j++) {
      const F* part = x + kSize * j;
      weigh<kSize>(part, importance + kSize * j, sigma2, w);
      totals[j] = sum<kSize>(w);
      found[j] = search_affine<kSize>(part, w, kTop, -0.9f, 0.05f, 36);
    }
  } else {
    for (int j = 0; j < kCount; j++) {
      const F* part = x + kSize * j;
      const F mean =
          kAbsolute ? F{} : root(sum_of_squares<kSize>(part) / float(kSize));
      for (int i = 0; i < kSize; i++) w[i] = magnitude(part[i]) + mean;
      found[j] = search_affine<kSize, kAbsolute>(part, w, kTop, first, 0.1f, count);
    }
  }
  for (int j = 0; j < kCount; j++) {
    scale[j] = found[j].scale;
    minimum[j] = -found[j].minimum;
  }
  if (importance) {
    *d = search_positive<kCount>(scale, totals, kScale, scales);
    *dmin = search_positive<kCount>(minimum, totals, kScale, minima);
  } else {
    round_scales<kCount, kScale>(scale, scales, d);
    round_scales<kCount, kScale>(minimum, minima, dmin);
  }
  *d = out.half(at, *d);
  *dmin = out.half(at + 2, *dmin);
  for (int j = 0; j < kCount; j++) {
    const SubBlock sub{*d * to_float(scales[j]), *dmin * to_float(minima[j])};
    quantise_again<kSize, kTop>(x + kSize * j, sub, found[j], q + kSize * j);
  }
  return is_finite(*d) && is_finite(*dmin);
}

inline void pack_six_bits(const I* scales, const I* minima, const Blocks& out, int at) {
  for (int j = 0; j < 4; j++) {
    out.byte(at + j, scales[j] | scales[j + 4] >> 4 << 6);
    out.byte(at + 4 + j, minima[j] | minima[j + 4] >> 4 << 6);
    out.byte(at + 8 + j, (scales[j + 4] & 15) | (minima[j + 4] & 15) << 4);
  }
}

inline void pack_pairs(const I* q, const Blocks& out, int at) {
  for (int g = 0; g < 4; g++) {
    const I* p = q + 64 * g;
    out.bytes(at + 32 * g, 32, [&](int l) { return (p[l] & 15) | (p[l + 32] & 15) << 4; });
  }
}

// Two bits of each integer, in each half of the block those of l, l + 32, l + 64 and l + 96.
inline void pack_twos(const I* q, const Blocks& out, int at, int shift) {
  for (int h = 0; h < 2; h++)
    out.bytes(at + 32 * h, 32, [&](int l) {
      const I* p = q + 128 * h + l;
      return (p[0] >> shift & 3) | (p[32] >> shift & 3) << 2 | (p[64] >> shift & 3) << 4 |
             (p[96] >> shift & 3) << 6;
    });
}

// Bit k of byte l is bit `bit` of the integer 32 * k + l.
inline void pack_ones(const I* q, const Blocks& out, int at, int bit) {
  out.bytes(at, 32, [&](int l) {
    I bits = I{};
    for (int k = 0; k < 8; k++) bits |= (q[32 * k + l] >> bit & 1) << k;
    return bits;
  });
}

inline bool encode_q2_k(const F* x, const F* importance, F, const Blocks& out) {
  F d, dmin;
  I scales[16], minima[16], q[256];
  const bool good = search_blocks<16, 3, 15, true>(x, importance, -0.5f, 15, &d, &dmin, scales,
                                                   minima, q, out, 80);
  for (int j = 0; j < 16; j++) out.byte(j, scales[j] | minima[j] << 4);
  pack_twos(q, out, 16, 0);
  return good;
}

inline bool encode_q4_k(const F* x, const F* importance, F, const Blocks& out) {
  F d, dmin;
  I scales[8], minima[8], q[256];
  const bool good = search_blocks<32, 15, 63, false>(x, importance, -1.0f, 20, &d, &dmin, scales,
                                                     minima, q, out, 0);
  pack_six_bits(scales, minima, out, 4);
  pack_pairs(q, out, 16);
  return good;
}

inline bool encode_q5_k(const F* x, const F* importance, F, const Blocks& out) {
  F d, dmin;
  I scales[8], minima[8], q[256];
  const bool good = search_blocks<32, 31, 63, false>(x, importance, -0.5f, 15, &d, &dmin, scales,
                                                     minima, q, out, 0);
  pack_six_bits(scales, minima, out, 4);
  pack_ones(q, out, 16, 4);
  pack_pairs(q, out, 48);
  return good;
}

inline bool encode_q3_k(const F* x, const F* importance, F, const Blocks& out) {
  F scale[16], factor;
  I q[256], steps[16];
  if (importance) {
    const F sigma2 = 2.0f * sum_of_squares<256>(x) / 256.0f;
    F w[16], totals[16];
    for (int j = 0; j < 16; j++) {
      weigh<16>(x + 16 * j, importance + 16 * j, sigma2, w);
      totals[j] = sum<16>(w);
      const Linear found = search_linear<16>(x + 16 * j, w, 4);
      scale[j] = found.scale;
      for (int i = 0; i < 16; i++) q[16 * j + i] = found.integer(x[16 * j + i]);
    }
    const Linear found = search_linear<16>(scale, totals, 32);
    factor = found.scale;
    for (int j = 0; j < 16; j++) steps[j] = found.integer(scale[j]);
  } else {
    for (int j = 0; j < 16; j++) scale[j] = search_descent(x + 16 * j, q + 16 * j);
    const F extreme = largest<16>(scale);
    const I is_zero = extreme == 0.0f;
    const F inverse = -32.0f / extreme;
    factor = is_zero ? F{} : 1.0f / inverse;
    for (int j = 0; j < 16; j++) {
      // In a byte with a sign, as in ggml.
      const I step = nearest(inverse * scale[j]) << 24 >> 24;
      steps[j] = is_zero ? I{} : lower(upper(step, all(-32)), all(31)) + 32;
    }
  }
  const F d = out.half(108, factor);
  for (int j = 0; j < 16; j++) {
    const F divisor = d * to_float(steps[j] - 32);
    const I is_zero = divisor == 0.0f;
    for (int i = 0; i < 16; i++) {
      I* to = q + 16 * j + i;
      const I found = lower(upper(nearest(x[16 * j + i] / divisor), all(-4)), all(3)) + 4;
      *to = is_zero ? *to : found;
    }
  }
  pack_ones(q, out, 0, 2);
  pack_twos(q, out, 32, 0);
  for (int j = 0; j < 8; j++) out.byte(96 + j, (steps[j] & 15) | (steps[j + 8] & 15) << 4);
  for (int j = 0; j < 4; j++)
    out.byte(104 + j, steps[j] >> 4 | steps[j + 4] >> 4 << 2 | steps[j + 8] >> 4 << 4 |
                          steps[j + 12] >> 4 << 6);
  return is_finite(d) && are_finite<16>(scale);
}

inline bool encode_q6_k(const F* x, const F* importance, F, const Blocks& out) {
  Linear found[16];
  F scale[16];
  for (int j = 0; j < 16; j++) {
    found[j] = search_linear<16>(x + 16 * j, importance ? importance + 16 * j : nullptr, 32);
    scale[j] = found[j].scale;
  }
  const F extreme = largest<16>(scale);
  const I is_zero = magnitude(extreme) < kEpsilon;
  const F inverse = -128.0f / extreme;
  const F d = out.half(208, is_zero ? F{} : 1.0f / inverse);
  I q[256];
  for (int j = 0; j < 16; j++) {
    I step = lower(nearest(inverse * scale[j]), all(127)) << 24 >> 24;
    step = is_zero ? I{} : step;
    out.byte(192 + j, step);
    const F divisor = d * to_float(step);
    const I keeps = divisor == 0.0f;
    for (int i = 0; i < 16; i++) {
      const F value = x[16 * j + i];
      const I again = lower(upper(nearest(value / divisor), all(-32)), all(31)) + 32;
      const I best = any(keeps) ? (keeps ? found[j].integer(value) : again) : again;
      q[16 * j + i] = is_zero ? I{} : best;
    }
  }
  for (int h = 0; h < 2; h++) {
    const I* p = q + 128 * h;
    out.bytes(64 * h, 64, [&](int l) { return (p[l] & 15) | (p[l + 64] & 15) << 4; });
  }
  pack_twos(q, out, 128, 4);
  return is_finite(d) && are_finite<16>(scale);
}

// --- rows of blocks ---------------------------------------------------------------------------

#if defined(__clang__) || __GNUC__ >= 12
// The lanes of a and b by turns: of their first halves, and of their second halves.
#if defined(__AVX512F__)
inline F first_halves(F a, F b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline F second_halves(F a, F b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#elif defined(__AVX2__)
inline F first_halves(F a, F b) {
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
}
inline F second_halves(F a, F b) {
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}
#else
inline F first_halves(F a, F b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
inline F second_halves(F a, F b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
#endif

// N rows of N numbers from `i` on, transposed by log2 N rounds of interleaving.
inline void transpose_square(const float* const* from, int i, F* to) {
  F rows[N], next[N];
  for (int b = 0; b < N; b++) memcpy(&rows[b], from[b] + i, sizeof(F));
  for (int round = 1; round < N; round *= 2) {
    for (int b = 0; b < N / 2; b++) {
      next[2 * b] = first_halves(rows[b], rows[b + N / 2]);
      next[2 * b + 1] = second_halves(rows[b], rows[b + N / 2]);
    }
    for (int b = 0; b < N; b++) rows[b] = next[b];
  }
  for (int b = 0; b < N; b++) to[b] = rows[b];
}
#else
inline void transpose_square(const float* const* from, int i, F* to) {
  for (int b = 0; b < N; b++)
    for (int k = 0; k < N; k++) to[k][b] = from[b][i + k];
}
#endif

// Block b of `from` becomes lane b; `from` has N pointers to kSize values each.
template <int kSize>
inline void transpose(const float* const* from, F* to) {
  for (int i = 0; i < kSize; i += N) transpose_square(from, i, to + i);
}

using One = bool (*)(const F* x, const F* importance, F sigma2, const Blocks& out);

template <int kSize, int kBytes, One kEncode>
bool encode_rows(const float* values, const float* importance, int64_t row, int64_t count,
                 uint8_t* blocks) {
  F x[kSize], weights[kSize], sigma2 = F{};
  uint8_t rest[N * kBytes];
  const float* from[N];
  float mean = 0.0f;
  int64_t known = -1;
  for (int64_t at = 0; at < count; at += N) {
    const int lanes = count - at < N ? int(count - at) : N;
    // Lanes beyond the end repeat the last block.
    const auto block = [&](int b) { return at + (b < lanes ? b : lanes - 1); };
    for (int b = 0; b < N; b++) from[b] = values + block(b) * kSize;
    transpose<kSize>(from, x);
    if (!are_finite<kSize>(x)) return false;
    if (importance) {
      for (int b = 0; b < N; b++) {
        const int64_t number = block(b);
        from[b] = importance + number % row * kSize;
        if (kSize == 32 && number / row != known) {  // the mean square of the row
          known = number / row;
          const float* start = values + known * row * kSize;
          float squares = 0.0f;
          for (int64_t i = 0; i < row * kSize; i++) squares += start[i] * start[i];
          mean = squares / float(row * kSize);
        }
        sigma2[b] = mean;
      }
      transpose<kSize>(from, weights);
    }
    uint8_t* to = lanes == N ? blocks + at * kBytes : rest;
    if (!kEncode(x, importance ? weights : nullptr, sigma2, {to, kBytes})) return false;
    if (to == rest) memcpy(blocks + at * kBytes, rest, size_t(lanes) * kBytes);
  }
  return true;
}

}  // namespace

#define MAXJAX_DEFINE_ENCODERS(name)                                           \
  namespace maxjax {                                                           \
  extern const EncodeLevel encode_##name;                                      \
  const EncodeLevel encode_##name = {                                          \
      #name,                                                                   \
      {{"Q4_0", encode_rows<32, 18, encode_signed<8>>},                        \
       {"Q4_1", encode_rows<32, 20, encode_shifted<15>>},                      \
       {"Q5_0", encode_rows<32, 22, encode_signed<16>>},                       \
       {"Q5_1", encode_rows<32, 24, encode_shifted<31>>},                      \
       {"Q8_0", encode_rows<32, 34, encode_q8_0>},                             \
       {"MXFP4", encode_rows<32, 17, encode_mxfp4>},                           \
       {"Q2_K", encode_rows<256, 84, encode_q2_k>},                            \
       {"Q3_K", encode_rows<256, 110, encode_q3_k>},                           \
       {"Q4_K", encode_rows<256, 144, encode_q4_k>},                           \
       {"Q5_K", encode_rows<256, 176, encode_q5_k>},                           \
       {"Q6_K", encode_rows<256, 210, encode_q6_k>}}};                         \
  }
