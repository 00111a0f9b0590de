// The interface between handlers and arithmetic: plain structs, and one table of functions for
// each instruction set (level). It has no types of XLA, so that levels are compiled separately.
#pragma once
#include <cstdint>

namespace maxjax {

enum class Type : int { f32, f16, bf16 };

inline int64_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }

// Activations as the matmuls read them: rows of `stride` elements, padded with zeros after `depth`.
// Either floats, in the order in which the weights' type is widened to float, or plain bf16, or bf16 in
// the order of `Level::tile_rows`, 16 rows after the other.
struct Activations {
  const void* data;
  int64_t stride;
  bool narrow;  // bf16, for the instruction that multiplies pairs of them
  bool tiled;
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

// ggml's blocks of quantised weights; kernels/packed_product.py has the same order.
enum class Format : int { q4_0, q8_0, q4_k, q5_k, q6_k, mxfp4, q4_1, q5_0, q5_1, iq4_nl, iq4_xs };
constexpr int kFormats = 11;

// Number of weights in a block, and its bytes.
struct Block {
  int64_t elements, bytes;
};
constexpr Block kBlocks[kFormats] = {{32, 18}, {32, 34}, {256, 144}, {256, 176}, {256, 210}, {32, 17},
                                      {32, 20}, {32, 22}, {32, 24}, {32, 18}, {256, 136}};

// Activations quantised to int8 in groups of 32: x = codes * scale. Rows are padded with zeros to
// `stride` elements, a multiple of 256.
struct Int8 {
  const int8_t* codes;    // [tokens, stride]
  const float* scales;    // [tokens, stride / 32]
  const float* sums;      // [tokens, stride / 32], of 32 elements each
  const float* half_sums; // [tokens, stride / 16], of 16
  const int32_t* code_sums;  // [tokens, stride / 16], of the codes of 16, without the scale
  int64_t stride;
};

// The product as of Rows, with weights in blocks.
struct PackedRows {
  Format format;
  const uint8_t* w;  // [*, depth / elements of a block * bytes of a block]
  int64_t depth;
  bool is_int8;
  Int8 x;               // if is_int8,
  const float* floats;  // otherwise [tokens, stride], padded with zeros
  int64_t stride;
  int64_t tokens;
  void* y;  // [tokens, y_stride]
  Type y_type;
  int64_t y_stride;
  int64_t begin, end;
  char* scratch;  // kPackedScratch bytes, if floats
};
constexpr int64_t kPackedScratch = 64 * 1024 * 4;

// One KV head and the query heads that share it, over a part of the cache: tokens `begin` to `end` of a sequence,
// which lie in blocks. Without a table of pages the sequence is one block.
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
  int64_t begin, end;
  const int32_t* blocks;  // token t is in block blocks[t / block]
  int64_t block;          // tokens in a block
  int64_t block_rows;     // rows from one block to the next
  float cap;              // 0: none
  const float* slopes;  // [queries]: times the distance of a key, added to its score; null: none
  int64_t first;        // distance of token `begin` from the new token, at most 0
  float* top;
  float* sum;
  float* out;  // [queries, q_stride], in the order of the cache's type
};

// y[t][d] = sum over r of x[t][r] w[r][d], for at most kPart rows r.
struct Combined {
  const float* x;  // [tokens, x_stride]
  int64_t x_stride;
  int64_t tokens;
  const void* w;  // [rows, depth]
  Type w_type;
  int64_t rows, depth;
  float* y;  // [tokens, y_stride], in the order of w_type, padded
  int64_t y_stride;
};

// One token of the gated delta rule for one head, with its state S [key_dim, value_dim]:
//   change = beta (v - kept S^T k),  y = kept S^T q + (q . k) change,  S = kept S + k change^T
struct Delta {
  const float *q, *k, *v;
  float kept, beta;
  float* state;
  int64_t key_dim, value_dim;
  float* y;
};

// One token of Mamba 2's recurrence for one head, with its state S [rows, size]:
//   S = kept S + x b^T,  y = S c
struct Ssd {
  const float* x;
  float kept;
  const float *b, *c;
  float* state;
  int64_t rows, size;
  float* y;
};

// The instruction sets that a level needs. A level need not name those that came after it.
struct Cpu {
  bool avx2 = false;    // with FMA and F16C
  bool avx512 = false;  // F, BW, DQ and VL
  bool bf16 = false;    // AVX-512 BF16
  bool vnni = false;    // AVX-512 VNNI
  bool avx_vnni = false;
  bool neon_dot = false;  // dot products of bytes
  bool amx = false;       // AMX, with products of int8 and of bf16
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
  void (*combine)(const Combined& of);
  void (*packed_product)(const PackedRows& rows);
  // Quantises a row of floats, padded with zeros to a multiple of 256, for `packed_product`.
  void (*quantise)(const float* x, int64_t stride, int8_t* codes, float* scales, float* sums, float* half_sums,
                   int32_t* code_sums);
  void (*delta)(const Delta& of);
  // x / (1 + exp(-x)) in place; `padded` is a multiple of kPad.
  void (*silu)(float* x, int64_t padded);
  void (*ssd)(const Ssd& of);
  // Arranges bf16 activations [tokens, depth] of up to kTokensOfTile tokens as the products of many tokens
  // read them, in kTokensOfTile * padded(depth) numbers; null if they read rows.
  void (*tile_rows)(const void* x, int64_t tokens, int64_t depth, void* out);
};

constexpr int64_t kTokensOfTile = 16;

// From this number of tokens on bf16 is multiplied in tiles, where there are any.
constexpr int64_t kTiledFrom = 4;

// Up to this number of tokens each row of weights is read once and used for all tokens.
constexpr int64_t kFew = 16;

// The number of query heads of a KV head that `attend` computes together, and of tokens in `combine`.
constexpr int kQueries = 4;

// The maximum number of tokens in one call of `attend`, and of rows in one of `combine`.
constexpr int64_t kPart = 256;

// Rows of activations are padded to this many elements, twice the longest vector.
constexpr int64_t kPad = 32;

inline int64_t padded(int64_t depth) { return (depth + kPad - 1) / kPad * kPad; }

// The levels that were compiled, the best first, terminated by null.
extern const Level* const levels[];

}  // namespace maxjax
