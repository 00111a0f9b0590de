// The FFI handlers that write tokens into a cache [L, B, K, S, ...] in place, and read some of its slots.
// They copy bytes, of any type.
#include "handlers.h"

namespace maxjax {
namespace {

// One layer of a cache: `rows` sequences times `heads` heads of `slots` slots of so many bytes.
struct CacheLayer {
  char* data;
  int64_t rows, heads, slots, bytes;

  char* slot(int64_t row, int64_t head, int64_t number) const {
    return data + ((row * heads + head) * slots + number) * bytes;
  }
};

bool layer_of(const ffi::AnyBuffer& cache, const ffi::Buffer<ffi::S32>& layer, CacheLayer* found) {
  const auto shape = cache.dimensions();
  if (shape.size() < 4 || layer.element_count() != 1) return false;
  int64_t bytes = ffi::ByteWidth(cache.element_type());
  for (size_t i = 4; i < shape.size(); i++) bytes *= shape[i];
  const int64_t number = most(0, least(layer.typed_data()[0], shape[0] - 1));
  char* data = static_cast<char*>(cache.untyped_data());
  *found = {data + number * shape[1] * shape[2] * shape[3] * bytes, shape[1], shape[2], shape[3], bytes};
  return true;
}

// Calls copy(row, head), on several threads if so many bytes of each are worth it.
template <class Copy>
void for_heads(ffi::ThreadPool& pool, const CacheLayer& layer, int64_t bytes, const Copy& copy) {
  const int64_t count = layer.rows * layer.heads;
  const int64_t threads = count * bytes < 8 * kChunkBytes ? 1 : pool.num_threads();
  parallel(pool, count, threads, [&](int64_t i) { copy(i / layer.heads, i % layer.heads); });
}

// Operands: the cache, tokens [B, T, K, ...], layer [], the slot of each token [B, T]. Result: the cache, updated in
// place; tokens with a slot that it does not have are dropped.
ffi::Error write_tokens(ffi::ThreadPool pool, ffi::AnyBuffer cache, ffi::AnyBuffer tokens, ffi::Buffer<ffi::S32> layer,
                        ffi::Buffer<ffi::S32> place, ffi::Result<ffi::AnyBuffer> out) {
  CacheLayer to;
  if (!layer_of(cache, layer, &to) || place.dimensions().size() != 2 || tokens.dimensions().size() < 3)
    return wrong("a cache and tokens for it");
  const int64_t count = place.dimensions()[1];
  if (tokens.element_type() != cache.element_type() || place.dimensions()[0] != to.rows ||
      tokens.dimensions()[0] != to.rows || tokens.dimensions()[1] != count || tokens.dimensions()[2] != to.heads ||
      int64_t(tokens.size_bytes()) != to.rows * count * to.heads * to.bytes)
    return wrong("tokens as a cache has them");
  if (out->untyped_data() != cache.untyped_data())
    return ffi::Error::Internal("maxjax: the cache was copied, not updated in place");
  const char* from = static_cast<const char*>(tokens.untyped_data());
  const int32_t* slots = place.typed_data();
  for_heads(pool, to, count * to.bytes, [&](int64_t row, int64_t head) {
    for (int64_t t = row * count; t < (row + 1) * count; t++)
      if (slots[t] >= 0 && slots[t] < to.slots)
        memcpy(to.slot(row, head, slots[t]), from + (t * to.heads + head) * to.bytes, to.bytes);
  });
  return ffi::Error::Success();
}

// Operands: the cache, layer [], first slot []. Result: slots from the first on, [B, K, n, ...].
ffi::Error read_slots(ffi::ThreadPool pool, ffi::AnyBuffer cache, ffi::Buffer<ffi::S32> layer,
                      ffi::Buffer<ffi::S32> start, ffi::Result<ffi::AnyBuffer> out) {
  CacheLayer from;
  const auto shape = out->dimensions();
  if (!layer_of(cache, layer, &from) || shape.size() < 3 || start.element_count() != 1) return wrong("a cache and slots of it");
  const int64_t count = shape[2];
  if (out->element_type() != cache.element_type() || count > from.slots ||
      int64_t(out->size_bytes()) != from.rows * from.heads * count * from.bytes)
    return wrong("slots as a cache has them");
  const int64_t first = most(0, least(start.typed_data()[0], from.slots - count));
  char* to = static_cast<char*>(out->untyped_data());
  for_heads(pool, from, count * from.bytes, [&](int64_t row, int64_t head) {
    memcpy(to + (row * from.heads + head) * count * from.bytes, from.slot(row, head, first), count * from.bytes);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace maxjax

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(maxjax_write_tokens, maxjax::write_tokens,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(maxjax_read_slots, maxjax::read_slots,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());
#pragma GCC visibility pop
