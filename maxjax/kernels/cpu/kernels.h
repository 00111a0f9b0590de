// The interface between handlers and arithmetic: plain structs, and one table of functions for
// each instruction set (level). It has no types of XLA, so that levels are compiled separately.
#pragma once
#include <cstdint>

namespace maxjax {

enum class Type : int { f32, f16, bf16 };

inline int64_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }

// Activations as the matmuls read them: rows of `stride` elements, padded with zeros after `depth`.
// Either floats, in the order in which the weights' type is widened to float, or plain bf16.
struct Activations {
  const void* data;
  int64_t stride;
  bool narrow;  // bf16, for the instruction that multiplies pairs of them
};

// y[t][o] = sum over k of x[t][k] w[o][k], for the rows from `begin` to `end` of w.
struct Rows {
  Activations x;
  int64_t tokens;
  const void* w;  // [*, depth]
  Type w_type;
  int64_t depth;
  void* y;  // [tokens, y_stride]
  Type y_type;
  int64_t y_stride;
  int64_t begin, end;
};

// One KV head and the query heads that share it, over a part of the cache.
// With s[g][p] = cap(q[g] . keys[p]):
//   top[g] = max over p of s[g][p],  sum[g] = sum over p of exp(s[g][p] - top[g]),
//   out[g][d] = sum over p of exp(s[g][p] - top[g]) values[p][d]
struct Attend {
  const float* q;  // [queries, q_stride], scaled, in the order of the cache's type
  int64_t q_stride;
  int64_t queries;
  const void* keys;    // [*, depth]
  const void* values;  // [*, depth]
  // [*] each: the scales of the rows of an int8 cache; null for other caches.
  const float* key_scales;
  const float* value_scales;
  Type type;  // f32 for int8, which has the same order
  int64_t depth;
  int64_t begin, end;  // slots
  float cap;           // 0: none
  float* top;
  float* sum;
  float* out;  // [queries, q_stride], in the order of the cache's type
};

// The instruction sets that a level needs on an x86 processor.
struct Cpu {
  bool avx2;    // with FMA and F16C
  bool avx512;  // F, BW, DQ and VL
  bool bf16;    // AVX-512 BF16
};

struct Level {
  const char* name;
  Cpu needs;
  // Whether bf16 activations stay bf16 for bf16 weights.
  bool pairs;
  // Whether `widen` keeps the order of the elements for weights of this type.
  bool (*in_order)(Type w_type);
  // Converts one row of activations to floats, in the order of weights of w_type, and pads it with
  // zeros up to `stride`.
  void (*widen)(const void* x, Type x_type, int64_t depth, Type w_type, float* out, int64_t stride);
  // The inverse for one row of results: floats in the order of w_type → `depth` elements of y_type.
  void (*narrow_row)(const float* x, Type w_type, int64_t depth, void* y, Type y_type);
  void (*product)(const Rows& rows);
  void (*attend)(const Attend& part);
};

// Up to this number of tokens each row of weights is read once and used for all tokens.
constexpr int64_t kFew = 16;

// The maximum number of slots in one call of `attend`.
constexpr int64_t kPart = 256;

// Rows of activations are padded to this many elements, twice the longest vector.
constexpr int64_t kPad = 32;

inline int64_t padded(int64_t depth) { return (depth + kPad - 1) / kPad * kPad; }

// The levels that were compiled, the best first, terminated by null.
extern const Level* const levels[];

}  // namespace maxjax
