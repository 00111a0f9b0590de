// Conversion of rows to and from float, written with a level's own vectors.
#pragma once
#include "kernels.h"

namespace {

using maxjax::Rows;

// Converts a group of 2 * kLanes numbers of type X to floats, in the order of weights of type W.
template <class X, class W>
inline void widen_group(const X* x, float* out) {
  float natural[2 * kLanes];
  vec a, b;
  load2(x, a, b);
  store(natural, a);
  store(natural + kLanes, b);
  for (int i = 0; i < 2 * kLanes; i++) out[place<W>(i)] = natural[place<X>(i)];
}

template <class X, class W>
void widen_row(const void* x_, int64_t depth, float* out, int64_t stride) {
  const X* x = static_cast<const X*>(x_);
  int64_t k = 0;
  for (; k + 2 * kLanes <= depth; k += 2 * kLanes) widen_group<X, W>(x + k, out + k);
  for (; k < stride; k += 2 * kLanes) {
    X rest[2 * kLanes] = {};
    for (int64_t i = 0; k + i < depth && i < 2 * kLanes; i++) rest[i] = x[k + i];
    widen_group<X, W>(rest, out + k);
  }
}

template <class X>
void widen_to(const void* x, int64_t depth, Type w_type, float* out, int64_t stride) {
  // There are two orders: that of bf16, and the natural one of float32 and float16.
  if (w_type == Type::bf16) return widen_row<X, bf16>(x, depth, out, stride);
  return widen_row<X, float>(x, depth, out, stride);
}

void widen(const void* x, Type x_type, int64_t depth, Type w_type, float* out, int64_t stride) {
  const Exact exact;
  switch (x_type) {
    case Type::f32:
      return widen_to<float>(x, depth, w_type, out, stride);
    case Type::f16:
      return widen_to<f16>(x, depth, w_type, out, stride);
    case Type::bf16:
      return widen_to<bf16>(x, depth, w_type, out, stride);
  }
}

template <class Y>
void narrow_to(const float* x, Type w_type, int64_t depth, void* y_) {
  Y* y = static_cast<Y*>(y_);
  for (int64_t k = 0; k < depth; k++) {
    const int i = int(k % (2 * kLanes));
    narrow(x[k - i + (w_type == Type::bf16 ? place<bf16>(i) : i)], y + k);
  }
}

void narrow_row(const float* x, Type w_type, int64_t depth, void* y, Type y_type) {
  switch (y_type) {
    case Type::f32:
      return narrow_to<float>(x, w_type, depth, y);
    case Type::f16:
      return narrow_to<f16>(x, w_type, depth, y);
    case Type::bf16:
      return narrow_to<bf16>(x, w_type, depth, y);
  }
}

// Writes `count` results to y from position `at` on; `rows` are a Rows or a PackedRows.
template <class Sum, class AnyRows>
inline void put(const Sum* totals, int64_t count, const AnyRows& rows, int64_t at) {
  switch (rows.y_type) {
    case Type::f32:
      for (int64_t i = 0; i < count; i++) static_cast<float*>(rows.y)[at + i] = float(totals[i]);
      return;
    case Type::f16:
      for (int64_t i = 0; i < count; i++) narrow(float(totals[i]), static_cast<f16*>(rows.y) + at + i);
      return;
    case Type::bf16:
      for (int64_t i = 0; i < count; i++) narrow(float(totals[i]), static_cast<bf16*>(rows.y) + at + i);
      return;
  }
}

}  // namespace
