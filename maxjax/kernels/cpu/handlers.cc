// The FFI handlers that XLA calls: they check buffers, choose the instruction set and divide the
// work. The arithmetic is in product.h and attend.h.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu.h"
#include "handlers.h"

namespace maxjax {

// The build defines MAXJAX_HAS_* for each level that it compiles.
extern const Level level_amx, level_avx512bf16, level_avx512vnni, level_avx512, level_avxvnni, level_avx2;
extern const Level level_neondot, level_neon, level_portable;

const Level* const levels[] = {
#ifdef MAXJAX_HAS_LEVEL_AMX
    &level_amx,
#endif
#ifdef MAXJAX_HAS_LEVEL_AVX512BF16
    &level_avx512bf16,
#endif
#ifdef MAXJAX_HAS_LEVEL_AVX512VNNI
    &level_avx512vnni,
#endif
#ifdef MAXJAX_HAS_LEVEL_AVX512
    &level_avx512,
#endif
#ifdef MAXJAX_HAS_LEVEL_AVXVNNI
    &level_avxvnni,
#endif
#ifdef MAXJAX_HAS_LEVEL_AVX2
    &level_avx2,
#endif
#ifdef MAXJAX_HAS_LEVEL_NEONDOT
    &level_neondot,
#endif
#ifdef MAXJAX_HAS_LEVEL_NEON
    &level_neon,
#endif
    &level_portable, nullptr};

namespace {

// This is not in the levels' own files, as these are compiled with instructions that the processor
// may not have.
bool is_supported(const Level& level) {
  const Cpu cpu = this_cpu();
  return (cpu.avx2 || !level.needs.avx2) && (cpu.avx512 || !level.needs.avx512) &&
         (cpu.bf16 || !level.needs.bf16) && (cpu.vnni || !level.needs.vnni) &&
         (cpu.avx_vnni || !level.needs.avx_vnni) && (cpu.neon_dot || !level.needs.neon_dot) &&
         (cpu.amx || !level.needs.amx);
}

const Level* best() {
  for (const Level* const* level = levels;; level++)
    if (is_supported(**level)) return *level;
}

std::atomic<const Level*>& active() {
  static std::atomic<const Level*> level{best()};
  return level;
}

}  // namespace

const Level& active_level() { return *active().load(std::memory_order_relaxed); }

Activations prepared(ffi::ThreadPool& pool, const Level& level, const char* x, Type x_type,
                     int64_t tokens, int64_t depth, Type w_type, bool may_tile) {
  const bool narrow = x_type == Type::bf16 && w_type == Type::bf16 && level.pairs;
  const bool as_is = narrow || (x_type == Type::f32 && level.in_order(w_type));
  const int64_t stride = padded(depth), item = narrow ? 2 : 4;
  if (narrow && may_tile && level.tile_rows && tokens >= kTiledFrom) {
    const int64_t blocks = (tokens + kTokensOfTile - 1) / kTokensOfTile;
    char* tiles = scratch<0>(blocks * kTokensOfTile * stride * item);
    parallel(pool, blocks, pool.num_threads(), [&](int64_t i) {
      const int64_t t = i * kTokensOfTile;
      level.tile_rows(x + t * depth * item, least(tokens - t, kTokensOfTile), depth, tiles + t * stride * item);
    });
    return {tiles, stride, narrow, true};
  }
  if (as_is && depth % kPad == 0) return {x, depth, narrow, false};
  char* rows = scratch<0>(tokens * stride * item);
  parallel_tokens(pool, tokens, 4 * stride, [&](int64_t t) {
    const char* from = x + t * depth * size_of(x_type);
    char* to = rows + t * stride * item;
    if (narrow) {
      memcpy(to, from, 2 * depth);
      memset(to + 2 * depth, 0, 2 * (stride - depth));
    } else {
      level.widen(from, x_type, depth, w_type, reinterpret_cast<float*>(to), stride);
    }
  });
  return {rows, stride, narrow, false};
}

namespace {

// --- matmul ------------------------------------------------------------------------------------

// Operands: x [..., depth], then weights [out, depth] or stacks [n, out, depth], all of one type,
// then the layer index of each weight. Results: [..., out] for each weight.
ffi::Error matmul(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets results) {
  const int64_t count = results.size();
  if (count < 1 || int64_t(args.size()) != 1 + 2 * count) return wrong("as many weights as results");
  const auto operand = args.get<ffi::AnyBuffer>(0);
  Tokens x;
  if (operand.has_error() || !tokens_of(*operand, &x)) return wrong("activations are floats [..., in]");
  std::vector<Weights> weights(count);
  Type w_type{};
  int64_t rows = 0;
  for (int64_t i = 0; i < count; i++) {
    const auto w = args.get<ffi::AnyBuffer>(1 + i);
    Type type;
    if (w.has_error() || !type_of(w->element_type(), &type) || (i && type != w_type))
      return wrong("one type of weights");
    if (w->dimensions().size() < 1 || w->dimensions().back() != x.depth ||
        !weights_of(args, results, i, count, x.count, x.depth * size_of(type), &weights[i]))
      return wrong("weights [out, in], or results of a product");
    w_type = type;
    rows += weights[i].rows;
  }
  if (rows == 0 || x.count == 0) return ffi::Error::Success();

  const Level& level = active_level();
  const Activations activations = prepared(pool, level, x.data, x.type, x.count, x.depth, w_type, true);
  parallel_rows(pool, weights, x.count, activations.tiled ? 32 : 16, 64, [&](const Weights& w, int64_t begin, int64_t end) {
    level.product({activations, x.count, w.data, w_type, x.depth, w.y, w.y_type, w.rows, begin, end});
  });
  return ffi::Error::Success();
}

// --- a matrix of each head -----------------------------------------------------------------------

// Operands: x [B, H, n], w [H, P, C] or [L, H, P, C], layer []. Result: of rows `first` to `first + rows` of
// each head's matrix, [B, H, rows], or with `transposed`, where n is rows, their sum weighted by x, [B, H, C].
ffi::Error heads(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32> layer,
                 ffi::Result<ffi::AnyBuffer> y, int64_t first, int64_t rows, bool transposed) {
  Type x_type, w_type, y_type;
  if (!type_of(x.element_type(), &x_type) || !type_of(w.element_type(), &w_type) ||
      !type_of(y->element_type(), &y_type))
    return wrong("types of a product of each head");
  const auto shape = w.dimensions();
  const size_t rank = shape.size();
  if (rank < 3 || rank > 4 || x.dimensions().size() != 3 || y->dimensions().size() != 3)
    return wrong("axes of a product of each head");
  const int64_t layers = rank == 4 ? shape[0] : 1, count = shape[rank - 3], height = shape[rank - 2],
                depth = shape[rank - 1];
  const int64_t batch = x.dimensions()[0], width = transposed ? rows : depth, out = transposed ? depth : rows;
  if (x.dimensions()[1] != count || x.dimensions()[2] != width || y->dimensions()[0] != batch ||
      y->dimensions()[1] != count || y->dimensions()[2] != out || first < 0 || rows < 0 ||
      first + rows > height || layers < 1 || layer.element_count() != 1 || (transposed && rows > kPart))
    return wrong("shapes of a product of each head");
  if (y->element_count() == 0) return ffi::Error::Success();

  const Level& level = active_level();
  const int64_t before = most(0, least(layer.typed_data()[0], layers - 1)) * count;
  const char* data = static_cast<const char*>(w.untyped_data());
  const auto matrix = [&](int64_t h) { return data + ((before + h) * height + first) * depth * size_of(w_type); };
  char* to = static_cast<char*>(y->untyped_data());
  const char* from = static_cast<const char*>(x.untyped_data());
  const int64_t helpers = count * rows * depth < kChunkBytes ? 1 : pool.num_threads();
  if (!transposed) {
    const Activations all = prepared(pool, level, from, x_type, batch * count, depth, w_type);
    const int64_t item = all.narrow ? 2 : 4;
    parallel(pool, count, helpers, [&](int64_t h) {
      const char* own = static_cast<const char*>(all.data) + h * all.stride * item;
      level.product({{own, count * all.stride, all.narrow, false}, batch, matrix(h), w_type, depth,
                     to + h * rows * size_of(y_type), y_type, count * rows, 0, rows});
    });
    return ffi::Error::Success();
  }
  const int64_t stride = padded(depth), floats = padded(rows);
  parallel(pool, count, helpers, [&](int64_t h) {
    float* results = reinterpret_cast<float*>(scratch<1>(4 * batch * (stride + floats)));
    float* weights = results + batch * stride;
    for (int64_t b = 0; b < batch; b++)
      level.widen(from + (b * count + h) * rows * size_of(x_type), x_type, rows, Type::f32, weights + b * floats, floats);
    level.combine({weights, floats, batch, matrix(h), w_type, rows, depth, results, stride});
    for (int64_t b = 0; b < batch; b++)
      level.narrow_row(results + b * stride, w_type, depth, to + (b * count + h) * depth * size_of(y_type), y_type);
  });
  return ffi::Error::Success();
}

// --- attention ---------------------------------------------------------------------------------

struct Rope {
  const float* cos;  // [B, pairs]
  const float* sin;
  int64_t pairs;
  bool interleaved;

  // Rotates one head of floats in place, and multiplies it by `scale`.
  void turn(float* x, int64_t b, float scale, int64_t depth) const {
    const float* c = cos + b * pairs;
    const float* s = sin + b * pairs;
    if (interleaved) {
      for (int64_t i = 0; i < pairs; i++) turn_pair(x[2 * i], x[2 * i + 1], c[i], s[i]);
    } else {
      for (int64_t i = 0; i < pairs; i++) turn_pair(x[i], x[i + pairs], c[i], s[i]);
    }
    for (int64_t i = 0; i < depth; i++) x[i] *= scale;
  }

  static void turn_pair(float& a, float& b, float c, float s) {
    const float turned = a * c - b * s;
    b = b * c + a * s;
    a = turned;
  }
};

// Less work than this many elements is done before another thread would start.
constexpr int64_t kLeastWork = 4096;

// Where the tokens of the sequences are in one layer of a cache [B, K, S, D], or with `table` in a pool of pages
// [N, K, P, D]: in blocks of S or of P rows.
struct Places {
  const int32_t* table;  // [B, each], or null
  int64_t each, pages, heads, block;

  // The number of tokens that a sequence can have.
  int64_t slots() const { return table ? each * block : block; }
  // The first row of a KV head of sequence b in its first block, if that is number 0.
  int64_t start(int64_t b, int64_t head) const { return ((table ? 0 : b * heads) + head) * block; }
  // The blocks of sequence b, from `start` on.
  const int32_t* blocks(int64_t b) const {
    static constexpr int32_t kOnly = 0;
    return table ? table + b * each : &kOnly;
  }
  // Whether a slot is in a page.
  bool has(int64_t b, int64_t slot) const {
    if (!table) return true;
    const int32_t page = blocks(b)[slot / block];
    return page >= 0 && page < pages;
  }
  int64_t row(int64_t b, int64_t head, int64_t slot) const {
    return start(b, head) + blocks(b)[slot / block] * heads * block + slot % block;
  }
};

// A part of the cache of one unit, which is a KV head of a sequence. The first slot holds the token that came `age`
// tokens before the new one.
struct Part {
  int64_t unit, begin, end, age;
};

// The slots that sequence b, of n tokens, attends to, in parts: up to two ranges of a rotating cache; without tokens
// whose pages are missing.
void add_parts(const Places& places, int64_t b, int64_t unit, int64_t n, int64_t window, std::vector<Part>* parts) {
  const int64_t slots = places.slots(), seen = least(n, window > 0 ? least(window, slots) : slots);
  for (int64_t at = n - seen; at < n;) {
    const int64_t slot = at % slots, limit = least(least(n - at, slots - slot), kPart);
    int64_t length = places.table ? 0 : limit;
    while (length < limit && places.has(b, slot + length))
      length += places.block - (slot + length) % places.block;
    length = least(length, limit);
    if (length) parts->push_back({unit, slot, slot + length, n - 1 - at});
    at += length ? length : places.block - slot % places.block;
  }
}

// Combines the parts of query g into its result: each is weighted by exp(its top score - the top). The
// sink is one more score, of a value of zeros; without one it is null.
template <class OfPart>
void summed(const OfPart& of_part, size_t begin, size_t end, int64_t group, int64_t g, int64_t stride,
            const float* sink, float* head) {
  float top = sink ? *sink : -std::numeric_limits<float>::infinity();
  for (size_t i = begin; i < end; i++) top = std::fmax(top, of_part(i)[group * stride + g]);
  float total = sink ? std::exp(*sink - top) : 0;
  std::fill(head, head + stride, 0.0f);
  for (size_t i = begin; i < end; i++) {
    const float* result = of_part(i);
    const float factor = std::exp(result[group * stride + g] - top);
    total += factor * result[group * (stride + 1) + g];
    for (int64_t d = 0; d < stride; d++) head[d] += factor * result[g * stride + d];
  }
  for (int64_t d = 0; d < stride; d++) head[d] /= total;
}

// Quantises one row to int8 and returns its scale: the largest magnitude becomes 127. The scale of
// a row that contains NaN or Inf is not finite.
float quantised(const float* x, int64_t depth, int8_t* out) {
  float highest = 0;
  for (int64_t d = 0; d < depth; d++) {
    const float size = std::fabs(x[d]);
    if (!(size <= highest)) highest = std::isnan(highest) ? highest : size;
  }
  const float scale = highest / 127;
  for (int64_t d = 0; d < depth; d++) {
    const float ratio = std::nearbyint(x[d] / scale);
    out[d] = std::isfinite(ratio) ? int8_t(ratio) : 0;
  }
  return scale;
}

// The scales of an int8 cache, float [.., S] for keys and for values; null for other caches. Where keys are
// the values too, there are those of the keys only.
struct Scales {
  float* keys = nullptr;
  float* values = nullptr;
};

bool scales_of(const ffi::RemainingArgs& args, const ffi::RemainingRets& results, bool shared, int64_t count,
               int64_t offset, Scales* scales) {
  float** const to[] = {&scales->keys, &scales->values};
  for (size_t i = 0; i < results.size(); i++) {
    const auto arg = args.get<ffi::Buffer<ffi::F32>>(i);
    auto result = results.get<ffi::Buffer<ffi::F32>>(i);
    if (arg.has_error() || result.has_error() || int64_t(arg->element_count()) != count ||
        (*result)->untyped_data() != arg->untyped_data())
      return false;
    *to[i] = arg->typed_data() + offset;
  }
  if (shared) scales->values = scales->keys;
  return true;
}

// Operands: q [B, H, D], k, v [B, K, D], keys, values [B, K, S, D] or [L, B, K, S, D], layer [],
// lengths [B], cos, sin [B, pairs], sinks [K, H / K] or [K, 0], slopes alike,
// and for an int8 cache its two scales, shaped as it without D; then, if the caches are pools of pages
// [(L,) N, K, P, D], the table [B, M] of the pages of each sequence, where other numbers than 0 to N - 1 are no page.
// If v and values are scalars, which are not looked at, the keys are the values too, and there is one array of scales.
// Results: out [B, H, D], and the caches and scales, updated in place.
ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                     ffi::AnyBuffer keys, ffi::AnyBuffer values, ffi::Buffer<ffi::S32> layer,
                     ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                     ffi::Buffer<ffi::F32> sinks, ffi::Buffer<ffi::F32> slopes, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                     ffi::Result<ffi::AnyBuffer> keys_out, ffi::Result<ffi::AnyBuffer> values_out,
                     ffi::RemainingRets scales_out, float scale, int64_t window, float cap,
                     bool interleaved, bool rotating) {
  Type type, new_type, cache_type = Type::f32;
  const bool is_int8 = keys.element_type() == ffi::S8;
  if (!type_of(q.element_type(), &type) || !type_of(k.element_type(), &new_type) ||
      (!is_int8 && !type_of(keys.element_type(), &cache_type)) || v.element_type() != k.element_type() ||
      values.element_type() != keys.element_type() || out->element_type() != q.element_type())
    return wrong("types of attention");
  const auto shape = keys.dimensions();
  const size_t rank = shape.size();
  const bool shared = values.dimensions().size() == 0;
  if (rank < 4 || rank > 5 || q.dimensions().size() != 3 || k.dimensions().size() != 3)
    return wrong("axes of attention");
  const size_t scale_count = !is_int8 ? 0 : shared ? 1 : 2;
  if (scales_out.size() != scale_count || rest.size() < scale_count || rest.size() > scale_count + 1)
    return wrong("scales of attention");
  const int64_t layers = rank == 5 ? shape[0] : 1, kv_heads = shape[rank - 3], depth = shape[rank - 1];
  const int64_t batch = q.dimensions()[0], heads = q.dimensions()[1];
  Places places{nullptr, 1, shape[rank - 4], kv_heads, shape[rank - 2]};
  if (rest.size() > scale_count) {
    const auto table = rest.get<ffi::Buffer<ffi::S32>>(scale_count);
    if (table.has_error() || table->dimensions().size() != 2 || table->dimensions()[0] != batch ||
        table->dimensions()[1] < 1 || places.block < 1)
      return wrong("the table of attention");
    places.table = table->typed_data();
    places.each = table->dimensions()[1];
  } else if (places.pages != batch) {
    return wrong("shapes of attention");
  }
  if (q.dimensions()[2] != depth || k.dimensions()[0] != batch ||
      k.dimensions()[1] != kv_heads || k.dimensions()[2] != depth ||
      (!shared && (v.element_count() != k.element_count() || values.element_count() != keys.element_count())) || out->element_count() != q.element_count() ||
      int64_t(lengths.element_count()) != batch || layer.element_count() != 1 || layers < 1 ||
      cos.dimensions().size() != 2 || cos.dimensions()[0] != batch ||
      sin.element_count() != cos.element_count() || 2 * cos.dimensions()[1] > depth ||
      (kv_heads == 0 ? heads != 0 : heads % kv_heads != 0) ||
      (sinks.element_count() != 0 && int64_t(sinks.element_count()) != heads) ||
      (slopes.element_count() != 0 && int64_t(slopes.element_count()) != heads))
    return wrong("shapes of attention");
  if (keys_out->untyped_data() != keys.untyped_data() ||
      (!shared && values_out->untyped_data() != values.untyped_data()))
    return ffi::Error::Internal("maxjax: the cache was copied, not updated in place");
  if (q.element_count() == 0) return ffi::Error::Success();
  const Level& level = active_level();
  const int64_t item = is_int8 ? 1 : size_of(cache_type), group = heads / kv_heads, stride = padded(depth);
  const int64_t rows = places.pages * kv_heads * places.block;  // of one layer
  const int64_t before = most(0, least(layer.typed_data()[0], layers - 1)) * rows;
  char* key_cache = static_cast<char*>(keys.untyped_data()) + before * depth * item;
  char* value_cache = shared ? key_cache : static_cast<char*>(values.untyped_data()) + before * depth * item;
  Scales scales;
  if (is_int8 && !scales_of(rest, scales_out, shared, layers * rows, before, &scales))
    return wrong("scales of attention");
  const Rope rope{cos.typed_data(), sin.typed_data(), int64_t(cos.dimensions()[1]), interleaved};
  const int32_t* length = lengths.typed_data();
  const int64_t slots = places.slots();
  // Whether row b of the batch is in use, and its new token fits into the cache.
  const auto runs = [&](int64_t b) {
    return length[b] >= 0 && slots > 0 && (rotating || (length[b] < slots && places.has(b, length[b])));
  };

  // First, for each KV head of each sequence: write the new key and value into the cache, and
  // convert the queries to floats in the order of the cache. Then all parts of the cache, and last
  // their combination.
  float* queries = reinterpret_cast<float*>(scratch<0>(4 * batch * heads * stride));
  const int64_t units = batch * kv_heads;
  const int64_t helpers = units * group * depth < kLeastWork ? 1 : pool.num_threads();
  parallel(pool, units, helpers, [&](int64_t unit) {
    const int64_t b = unit / kv_heads;
    if (!runs(b)) return;
    float* head = reinterpret_cast<float*>(scratch<2>(4 * stride));
    const auto widened = [&](const ffi::AnyBuffer& x, Type x_type, int64_t row) {
      const char* from = static_cast<const char*>(x.untyped_data()) + row * depth * size_of(x_type);
      level.widen(from, x_type, depth, Type::f32, head, stride);
    };
    const int64_t row = places.row(b, unit % kv_heads, length[b] % slots);
    const auto put = [&](char* cache, float* of_rows) {
      char* to = cache + row * depth * item;
      if (is_int8) {
        of_rows[row] = quantised(head, depth, reinterpret_cast<int8_t*>(to));
      } else {
        level.narrow_row(head, Type::f32, depth, to, cache_type);
      }
    };
    widened(k, new_type, unit);
    rope.turn(head, b, 1, depth);
    put(key_cache, scales.keys);
    if (!shared) {
      widened(v, new_type, unit);
      put(value_cache, scales.values);
    }
    for (int64_t g = unit * group; g < (unit + 1) * group; g++) {
      widened(q, type, g);
      rope.turn(head, b, scale, depth);
      level.widen(head, Type::f32, depth, cache_type, queries + g * stride, stride);
    }
  });
  std::vector<Part> parts;
  std::vector<size_t> first;  // of the parts of each unit
  for (int64_t unit = 0; unit < units; unit++) {
    first.push_back(parts.size());
    const int64_t b = unit / kv_heads;
    if (runs(b)) add_parts(places, b, unit, int64_t(length[b]) + 1, window, &parts);
  }
  first.push_back(parts.size());
  float* sums = reinterpret_cast<float*>(scratch<1>(4 * int64_t(parts.size()) * group * (stride + 2)));
  const auto of_part = [&](int64_t i) { return sums + i * group * (stride + 2); };
  const int64_t bytes = 2 * int64_t(parts.size()) * kPart * depth * item;
  const int64_t threads = bytes < kChunkBytes ? 1 : pool.num_threads();
  // Where there are fewer parts than threads and many query heads share each, these are divided too, so that the
  // same heads are always computed together: a result does not depend on the other sequences.
  const int64_t few = most(1, least(2 * threads / most(1, parts.size()), group / kQueries));
  const int64_t sharers = ((group + few - 1) / few + kQueries - 1) / kQueries * kQueries;
  const bool has_slopes = slopes.element_count() != 0;
  parallel(pool, parts.size() * few, threads, [&](int64_t i) {
    const Part& part = parts[i / few];
    const int64_t g = i % few * sharers, b = part.unit / kv_heads;
    if (g >= group) return;
    const int64_t row = places.start(b, part.unit % kv_heads), from = row * depth * item;
    float* result = of_part(i / few);
    level.attend({queries + (part.unit * group + g) * stride, stride, least(sharers, group - g),
                  key_cache + from, value_cache + from, is_int8 ? scales.keys + row : nullptr,
                  is_int8 ? scales.values + row : nullptr, cache_type, depth, part.begin, part.end,
                  places.blocks(b), places.block, kv_heads * places.block, cap,
                  has_slopes ? slopes.typed_data() + part.unit % kv_heads * group + g : nullptr, -part.age,
                  result + group * stride + g, result + group * (stride + 1) + g, result + g * stride});
  });
  char* to = static_cast<char*>(out->untyped_data());
  const bool has_sinks = sinks.element_count() != 0;
  parallel(pool, units, helpers, [&](int64_t unit) {
    const int32_t n = length[unit / kv_heads];
    float* head = reinterpret_cast<float*>(scratch<2>(4 * stride));
    for (int64_t g = 0; g < group; g++) {
      if (runs(unit / kv_heads)) {
        const float* sink = has_sinks ? sinks.typed_data() + unit % kv_heads * group + g : nullptr;
        summed(of_part, first[unit], first[unit + 1], group, g, stride, sink, head);
      } else {  // zeros for an unused row of the batch, NaN for a token beyond the cache
        std::fill(head, head + stride, n < 0 ? 0 : std::numeric_limits<float>::quiet_NaN());
      }
      level.narrow_row(head, cache_type, depth, to + (unit * group + g) * depth * size_of(type), type);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace maxjax

#define MAXJAX_EXPORT extern "C" __attribute__((visibility("default")))

// The instruction sets that were compiled and this processor has, best first, comma-separated.
MAXJAX_EXPORT const char* maxjax_levels() {
  static const std::string names = [] {
    std::string s;
    for (const maxjax::Level* const* level = maxjax::levels; *level; level++)
      if (maxjax::is_supported(**level)) s += (s.empty() ? "" : ",") + std::string((*level)->name);
    return s;
  }();
  return names.c_str();
}

MAXJAX_EXPORT const char* maxjax_level() { return maxjax::active().load()->name; }

// Selects an instruction set by its name; false if this machine does not have it.
MAXJAX_EXPORT bool maxjax_use_level(const char* name) {
  for (const maxjax::Level* const* level = maxjax::levels; *level; level++) {
    if (strcmp((*level)->name, name) == 0 && maxjax::is_supported(**level)) {
      maxjax::active().store(*level);
      return true;
    }
  }
  return false;
}

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(maxjax_matmul, maxjax::matmul,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(maxjax_heads, maxjax::heads,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("first")
                                  .Attr<int64_t>("rows")
                                  .Attr<bool>("transposed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(maxjax_decode_attention, maxjax::attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("cap")
                                  .Attr<bool>("interleaved")
                                  .Attr<bool>("rotating"));
#pragma GCC visibility pop
