// Attention of the query heads that share one KV head, written with a level's own vectors.
#pragma once
#include "kernels.h"

namespace {

constexpr int kQueries = 4;

inline vec capped(vec s, float cap) {
  // tanh(y) = (1 - e) / (1 + e) with e = exp(-2 |y|), and the sign of y
  const vec y = mul(s, all(1.0f / cap));
  const vec e = exp(mul(abs(y), all(-2.0f)));
  const vec t = div(fma(e, all(-1.0f), all(1.0f)), add(e, all(1.0f)));
  return copysign(mul(t, all(cap)), y);
}

// Adds slope * (first + p) to each s[p] (ALiBi, arXiv:2108.12409).
inline void biased(float* s, int64_t count, float slope, int64_t first) {
  for (int64_t p = 0; p < count; p++) s[p] += slope * float(int32_t(first + p));
}

// Replaces s by exp(s - max s) and returns the sum; `padded` is `count` rounded up to full vectors.
inline float softened(float* s, int64_t count, int64_t padded, float cap, const float* slope, int64_t first,
                      float* top) {
  for (int64_t p = count; p < padded; p++) s[p] = -__builtin_inff();
  if (cap > 0) {
    for (int64_t p = 0; p < count; p += kLanes) store(s + p, capped(load(s + p), cap));
    for (int64_t p = count; p < padded; p++) s[p] = -__builtin_inff();
  }
  if (slope) biased(s, count, *slope, first);
  vec highest = load(s);
  for (int64_t p = kLanes; p < padded; p += kLanes) highest = max(load(s + p), highest);
  float lanes[kLanes];
  store(lanes, highest);
  *top = lanes[0];
  for (int i = 1; i < kLanes; i++) *top = lanes[i] > *top ? lanes[i] : *top;
  // If all scores are -Inf, all results are exp(-Inf) = 0, not exp(-Inf + Inf) = NaN.
  const vec base = all(*top == -__builtin_inff() ? 0.0f : -*top);
  vec total = zero();
  for (int64_t p = 0; p < padded; p += kLanes) {
    const vec e = exp(add(load(s + p), base));
    total = add(total, e);
    store(s + p, e);
  }
  return sum(total);
}

// out[g][d] = sum over p of weights[g][p] values[p][d], for the first 2 N kLanes elements d.
template <class T, int G, int N>
void mixed(const float* weights, const T* values, int64_t stride, int64_t count, float* out,
           int64_t out_stride) {
  vec acc[G][2 * N];
  #pragma GCC unroll 64
  for (int g = 0; g < G; g++)
    #pragma GCC unroll 64
    for (int i = 0; i < 2 * N; i++) acc[g][i] = zero();
  for (int64_t p = 0; p < count; p++) {
    vec v[2 * N];
    #pragma GCC unroll 64
    for (int i = 0; i < N; i++) load2(values + p * stride + i * 2 * kLanes, v[2 * i], v[2 * i + 1]);
    #pragma GCC unroll 64
    for (int g = 0; g < G; g++) {
      const vec weight = all(weights[g * maxjax::kPart + p]);
      #pragma GCC unroll 64
      for (int i = 0; i < 2 * N; i++) acc[g][i] = fma(weight, v[i], acc[g][i]);
    }
  }
  #pragma GCC unroll 64
  for (int g = 0; g < G; g++)
    #pragma GCC unroll 64
    for (int i = 0; i < 2 * N; i++) store(out + g * out_stride + i * kLanes, acc[g][i]);
}

// For an int8 cache: multiplies the number s[g][p] of each row p by the scale of the row.
template <int G>
inline void scaled(float* s, const float* scales, int64_t count) {
  for (int g = 0; g < G; g++)
    for (int64_t p = 0; p < count; p++) s[g * maxjax::kPart + p] *= scales[p];
}

// As mixed, for all `depth` elements d.
template <class T, int G>
void mixed_rows(const float* weights, const T* values, int64_t depth, int64_t count, float* out,
                int64_t out_stride) {
  int64_t d = 0;
  for (; d + kMixed * 2 * kLanes <= depth; d += kMixed * 2 * kLanes)
    mixed<T, G, kMixed>(weights, values + d, depth, count, out + d, out_stride);
  for (; d + 2 * kLanes <= depth; d += 2 * kLanes)
    mixed<T, G, 1>(weights, values + d, depth, count, out + d, out_stride);
  if (d == depth) return;
  alignas(64) T rest[maxjax::kPart * 2 * kLanes] = {};
  for (int64_t i = 0; i < count; i++)
    for (int64_t j = d; j < depth; j++) rest[i * 2 * kLanes + j - d] = values[i * depth + j];
  mixed<T, G, 1>(weights, rest, 2 * kLanes, count, out + d, out_stride);
}

template <class T, int G>
void attend_group(const Attend& part, int64_t first) {
  alignas(64) float scores[G * maxjax::kPart];
  const int64_t count = part.end - part.begin, depth = part.depth;
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  const T* keys = static_cast<const T*>(part.keys) + part.begin * depth;
  const T* values = static_cast<const T*>(part.values) + part.begin * depth;
  const float* q = part.q + first * part.q_stride;
  float* out = part.out + first * part.q_stride;
  memset(scores, 0, sizeof scores);
  int64_t p = 0;
  for (; p + kTileRows <= count; p += kTileRows)
    tile<Wide<T>, kTileRows, G>(keys + p * depth, depth, q, part.q_stride, depth, scores + p,
                                maxjax::kPart);
  for (; p < count; p++)
    tile<Wide<T>, 1, G>(keys + p * depth, depth, q, part.q_stride, depth, scores + p,
                        maxjax::kPart);
  if (part.key_scales) scaled<G>(scores, part.key_scales + part.begin, count);
  #pragma GCC unroll 64
  for (int g = 0; g < G; g++)
    part.sum[first + g] = softened(scores + g * maxjax::kPart, count, padded, part.cap,
                                   part.slopes ? part.slopes + first + g : nullptr, part.first,
                                   part.top + first + g);
  if (part.value_scales) scaled<G>(scores, part.value_scales + part.begin, count);
  mixed_rows<T, G>(scores, values, depth, count, out, part.q_stride);
}

template <class T>
void attend_as(const Attend& part) {
  int64_t g = 0;
  for (; g + kQueries <= part.queries; g += kQueries) attend_group<T, kQueries>(part, g);
  switch (part.queries - g) {
    case 3:
      return attend_group<T, 3>(part, g);
    case 2:
      return attend_group<T, 2>(part, g);
    case 1:
      return attend_group<T, 1>(part, g);
  }
}

template <class T, int G>
void combine_group(const Combined& of, int64_t first) {
  alignas(64) float weights[G * maxjax::kPart];
  for (int g = 0; g < G; g++)
    memcpy(weights + g * maxjax::kPart, of.x + (first + g) * of.x_stride, sizeof(float) * of.rows);
  mixed_rows<T, G>(weights, static_cast<const T*>(of.w), of.depth, of.rows, of.y + first * of.y_stride,
                   of.y_stride);
}

template <class T>
void combine_as(const Combined& of) {
  int64_t t = 0;
  for (; t + kQueries <= of.tokens; t += kQueries) combine_group<T, kQueries>(of, t);
  for (; t < of.tokens; t++) combine_group<T, 1>(of, t);
}

void combine(const Combined& of) {
  const Exact exact;
  switch (of.w_type) {
    case Type::f32:
      return combine_as<float>(of);
    case Type::f16:
      return combine_as<f16>(of);
    case Type::bf16:
      return combine_as<bf16>(of);
  }
}

void attend(const Attend& part) {
  const Exact exact;
  if (part.key_scales) return attend_as<i8>(part);
  switch (part.type) {
    case Type::f32:
      return attend_as<float>(part);
    case Type::f16:
      return attend_as<f16>(part);
    case Type::bf16:
      return attend_as<bf16>(part);
  }
}

}  // namespace
