// Attention of the query heads that share one KV head, written with a level's own vectors.
#pragma once
#include "kernels.h"

namespace {

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

// Consecutive rows of an array.
struct Run {
  int64_t row, count;
};

// The size of a run: while it is read the next one is prefetched, as the processor's own prefetching stops at the end
// of every page of memory, and of every page of a cache. Its rows are complete tiles.
constexpr int64_t kRunBytes = 4096, kRunRows = 8;

// Prefetches numbers of the next run.
template <class T>
inline void ahead(const T* next, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(next + i, 0, 3);
}

// acc[g] += sum over p of weights[g][p] rows[p], for the first 2 N kLanes elements of `count` rows; prefetches those of
// `next`, unless it is null.
template <class T, int G, int N, bool kNext>
__attribute__((always_inline)) inline void add_rows(const float* weights, const T* rows, const T* next, int64_t stride,
                                                    int64_t count, vec (&acc)[G][2 * N]) {
  for (int64_t p = 0; p < count; p++) {
    vec v[2 * N];
    if (kNext) ahead(next + p * stride, N * 2 * kLanes);
    #pragma GCC unroll 64
    for (int i = 0; i < N; i++) load2(rows + p * stride + i * 2 * kLanes, v[2 * i], v[2 * i + 1]);
    #pragma GCC unroll 64
    for (int g = 0; g < G; g++) {
      const vec weight = all(weights[g * maxjax::kPart + p]);
      #pragma GCC unroll 64
      for (int i = 0; i < 2 * N; i++) acc[g][i] = fma(weight, v[i], acc[g][i]);
    }
  }
}

// out[g][d] = sum over p of weights[g][p] values[p][d], for the first 2 N kLanes elements d, where the rows p of
// `values` are those of the runs, one after the other.
template <class T, int G, int N>
void mixed(const float* weights, const T* values, int64_t stride, const Run* runs, const Run* end, float* out,
           int64_t out_stride) {
  vec acc[G][2 * N];
  #pragma GCC unroll 64
  for (int g = 0; g < G; g++)
    #pragma GCC unroll 64
    for (int i = 0; i < 2 * N; i++) acc[g][i] = zero();
  for (; runs + 1 < end; weights += runs->count, runs++)
    add_rows<T, G, N, true>(weights, values + runs->row * stride, values + runs[1].row * stride, stride, runs->count, acc);
  add_rows<T, G, N, false>(weights, values + runs->row * stride, nullptr, stride, runs->count, acc);
  #pragma GCC unroll 64
  for (int g = 0; g < G; g++)
    #pragma GCC unroll 64
    for (int i = 0; i < 2 * N; i++) store(out + g * out_stride + i * kLanes, acc[g][i]);
}

// For an int8 cache: multiplies the number s[g][p] of each row p by the scale of the row.
template <int G>
inline void scaled(float* s, const float* scales, const Run* run, const Run* end) {
  for (; run < end; s += run->count, run++)
    for (int g = 0; g < G; g++)
      for (int64_t p = 0; p < run->count; p++) s[g * maxjax::kPart + p] *= scales[run->row + p];
}

// As mixed, for all `depth` elements d.
template <class T, int G>
void mixed_rows(const float* weights, const T* values, int64_t depth, const Run* runs, const Run* end, float* out,
                int64_t out_stride) {
  int64_t d = 0;
  for (; d + kMixed * 2 * kLanes <= depth; d += kMixed * 2 * kLanes)
    mixed<T, G, kMixed>(weights, values + d, depth, runs, end, out + d, out_stride);
  for (; d + 2 * kLanes <= depth; d += 2 * kLanes)
    mixed<T, G, 1>(weights, values + d, depth, runs, end, out + d, out_stride);
  if (d == depth) return;
  alignas(64) T rest[maxjax::kPart * 2 * kLanes] = {};
  Run all{0, 0};
  for (const Run* run = runs; run < end; run++)
    for (int64_t i = run->row; i < run->row + run->count; i++, all.count++)
      for (int64_t j = d; j < depth; j++) rest[all.count * 2 * kLanes + j - d] = values[i * depth + j];
  mixed<T, G, 1>(weights, rest, 2 * kLanes, &all, &all + 1, out + d, out_stride);
}

// The rows of a part's tokens, in at most kPart runs of at most `most` rows; returns the end of the runs.
inline const Run* runs_of(const Attend& part, int64_t most, Run* run) {
  int64_t number = part.begin / part.block, at = part.begin % part.block;
  for (int64_t left = part.end - part.begin; left > 0; run++) {
    if (at == part.block) number++, at = 0;
    int64_t count = left < part.block - at ? left : part.block - at;
    if (count > most) count = most;
    *run = {part.blocks[number] * part.block_rows + at, count};
    left -= count;
    at += count;
  }
  return run;
}

template <class T, int G>
void attend_group(const Attend& part, int64_t first) {
  alignas(64) float scores[G * maxjax::kPart];
  const int64_t count = part.end - part.begin, depth = part.depth;
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  const T* values = static_cast<const T*>(part.values);
  Run runs[maxjax::kPart];
  const int64_t most = kRunBytes / (depth * int64_t(sizeof(T))) / kRunRows * kRunRows;
  const Run* end = runs_of(part, most > kRunRows ? most : kRunRows, runs);
  const float* q = part.q + first * part.q_stride;
  float* out = part.out + first * part.q_stride;
  memset(scores, 0, sizeof scores);
  float* s = scores;
  for (const Run* run = runs; run < end; s += run->count, run++) {
    const T* keys = static_cast<const T*>(part.keys) + run->row * depth;
    int64_t p = 0;
    const T* next = run + 1 < end ? static_cast<const T*>(part.keys) + run[1].row * depth : nullptr;
    for (; p + kTileRows <= run->count; p += kTileRows) {
      if (next) ahead(next + p * depth, kTileRows * depth);
      tile<Wide<T>, kTileRows, G>(keys + p * depth, depth, q, part.q_stride, depth, s + p, maxjax::kPart);
    }
    for (; p < run->count; p++)
      tile<Wide<T>, 1, G>(keys + p * depth, depth, q, part.q_stride, depth, s + p, maxjax::kPart);
  }
  if (part.key_scales) scaled<G>(scores, part.key_scales, runs, end);
  #pragma GCC unroll 64
  for (int g = 0; g < G; g++)
    part.sum[first + g] = softened(scores + g * maxjax::kPart, count, padded, part.cap,
                                   part.slopes ? part.slopes + first + g : nullptr, part.first,
                                   part.top + first + g);
  if (part.value_scales) scaled<G>(scores, part.value_scales, runs, end);
  mixed_rows<T, G>(scores, values, depth, runs, end, out, part.q_stride);
}

template <class T>
void attend_as(const Attend& part) {
  int64_t g = 0;
  for (; g + maxjax::kQueries <= part.queries; g += maxjax::kQueries) attend_group<T, maxjax::kQueries>(part, g);
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
  const Run rows{0, of.rows};
  mixed_rows<T, G>(weights, static_cast<const T*>(of.w), of.depth, &rows, &rows + 1, of.y + first * of.y_stride,
                   of.y_stride);
}

template <class T>
void combine_as(const Combined& of) {
  int64_t t = 0;
  for (; t + maxjax::kQueries <= of.tokens; t += maxjax::kQueries) combine_group<T, maxjax::kQueries>(of, t);
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
