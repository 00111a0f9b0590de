// What the FFI handlers have in common.
#pragma once
#include <cstring>
#include <string>
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace maxjax {

// The instruction set in use.
const Level& active_level();

inline bool type_of(ffi::DataType data_type, Type* type) {
  switch (data_type) {
    case ffi::F32:
      *type = Type::f32;
      return true;
    case ffi::F16:
      *type = Type::f16;
      return true;
    case ffi::BF16:
      *type = Type::bf16;
      return true;
    default:
      return false;
  }
}

inline ffi::Error wrong(const char* what) { return ffi::Error::InvalidArgument(std::string("maxjax: ") + what); }

// Memory that a thread keeps between calls, as allocating it can take longer than a matmul.
template <int>
char* scratch(int64_t bytes) {
  static thread_local std::vector<char> memory;
  constexpr int64_t kAlign = 64, kKept = 1 << 22;
  const int64_t there = memory.size(), wanted = bytes + kAlign;
  // The memory for a long prompt is released in the decode steps after it.
  if (there < wanted || (there > kKept && there / 8 > wanted)) {
    memory.clear();
    memory.shrink_to_fit();
    memory.resize(wanted);
  }
  char* p = memory.data();
  return p + (kAlign - reinterpret_cast<uintptr_t>(p) % kAlign) % kAlign;
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// The smallest amount of work, in bytes, that is worth passing to another thread.
constexpr int64_t kChunkBytes = 1 << 15;

// An array of activations [..., depth].
struct Tokens {
  const char* data;
  Type type;
  int64_t count, depth;
};

inline bool tokens_of(const ffi::AnyBuffer& x, Tokens* tokens) {
  const auto dims = x.dimensions();
  if (dims.size() < 1 || !type_of(x.element_type(), &tokens->type)) return false;
  tokens->data = static_cast<const char*>(x.untyped_data());
  tokens->depth = dims.back();
  tokens->count = 1;
  for (size_t i = 0; i + 1 < dims.size(); i++) tokens->count *= dims[i];
  return true;
}

// One of the weights of a matmul, and its result.
struct Weights {
  const char* data;  // [rows, bytes of a row]
  int64_t rows;
  void* y;
  Type y_type;
  int64_t row_bytes;
  int kind;  // a Type, or a Format
};

// Checks weights i of `count` that follow the activations, [rows, *] or [n, rows, *], and finds those
// of the layer in its operand.
inline bool weights_of(const ffi::RemainingArgs& args, const ffi::RemainingRets& results, int64_t i,
                       int64_t count, int64_t tokens, int64_t row_bytes, Weights* weights) {
  const auto w = args.get<ffi::AnyBuffer>(1 + i);
  const auto layer = args.get<ffi::AnyBuffer>(1 + count + i);
  auto y = results.get<ffi::AnyBuffer>(i);
  if (w.has_error() || layer.has_error() || y.has_error()) return false;
  const auto dims = w->dimensions();
  if (dims.size() < 2 || dims.size() > 3) return false;
  if (layer->element_type() != ffi::S32 || layer->element_count() != 1) return false;
  weights->rows = dims[dims.size() - 2];
  weights->row_bytes = row_bytes;
  if (!type_of((*y)->element_type(), &weights->y_type) ||
      int64_t((*y)->element_count()) != tokens * weights->rows)
    return false;
  weights->y = (*y)->untyped_data();
  weights->data = static_cast<const char*>(w->untyped_data());
  if (dims.size() == 3 && dims[0] > 0) {
    const int64_t n = *static_cast<const int32_t*>(layer->untyped_data());
    weights->data += most(0, least(n, dims[0] - 1)) * weights->rows * row_bytes;
  }
  return true;
}

// Calls run(weights, begin, end) on several threads for parts of the rows of all weights: long
// streams for few tokens, a block that stays in the cache for many. Each thread gets more than one
// part, as some threads start late.
template <class Run>
void parallel_rows(ffi::ThreadPool& pool, const std::vector<Weights>& weights, int64_t tokens, int64_t unit,
                   int64_t many, const Run& run) {
  struct Chunk {
    const Weights* weights;
    int64_t begin, end;
  };
  int64_t rows = 0, bytes = 1;
  for (const Weights& w : weights) rows += w.rows, bytes = most(bytes, w.row_bytes);
  const int64_t threads = most(1, pool.num_threads());
  const bool is_few = tokens <= kFew;
  const int64_t least_rows = is_few ? kChunkBytes / bytes : unit;
  const int64_t wanted = is_few ? rows / (2 * threads) : least(many, rows / (4 * threads));
  const int64_t chunk = most(unit, most(least_rows, wanted) / unit * unit);
  std::vector<Chunk> chunks;
  for (const Weights& w : weights)
    for (int64_t o = 0; o < w.rows; o += chunk) chunks.push_back({&w, o, least(o + chunk, w.rows)});
  parallel(pool, chunks.size(), threads, [&](int64_t i) { run(*chunks[i].weights, chunks[i].begin, chunks[i].end); });
}

// Calls run(t) for each of `count` tokens, whose rows have so many bytes, on several threads.
template <class Run>
void parallel_tokens(ffi::ThreadPool& pool, int64_t count, int64_t bytes, const Run& run) {
  const int64_t chunk = most(1, kChunkBytes / most(1, bytes));
  parallel(pool, (count + chunk - 1) / chunk, pool.num_threads(), [&](int64_t i) {
    for (int64_t t = i * chunk; t < least((i + 1) * chunk, count); t++) run(t);
  });
}

// Activations [tokens, depth] as products with weights of a type read them: as they are, or in scratch<0>.
Activations prepared(ffi::ThreadPool& pool, const Level& level, const char* x, Type x_type, int64_t tokens,
                     int64_t depth, Type w_type, bool may_tile = false);

}  // namespace maxjax
