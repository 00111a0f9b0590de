// The FFI handlers that write tokens into a cache [L, B, K, S, ...] in place, and read some of its slots; or into a
// pool of pages [L, N, K, P, ...], and read pages. They copy bytes, of any type.
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

// Calls copy(row, head) for all heads of `rows` rows, on several threads if so many bytes of each are worth it.
template <class Copy>
void for_heads(ffi::ThreadPool& pool, const CacheLayer& layer, int64_t rows, int64_t bytes, const Copy& copy) {
  const int64_t count = rows * layer.heads;
  const int64_t threads = count * bytes < 8 * kChunkBytes ? 1 : pool.num_threads();
  parallel(pool, count, threads, [&](int64_t i) { copy(i / layer.heads, i % layer.heads); });
}

// The pages of sequences in a pool: [B, M]; other numbers than those of its pages are no page.
struct Table {
  const int32_t* pages;
  int64_t rows, each;
};

bool table_of(const ffi::Buffer<ffi::S32>& table, Table* found) {
  if (table.dimensions().size() != 2) return false;
  *found = {table.typed_data(), table.dimensions()[0], table.dimensions()[1]};
  return true;
}

// Operands: the cache, tokens [B, T, K, ...], layer [], the slot of each token [B, T]; for a pool of pages their
// positions, and a table of pages. Result: the cache, updated in place; tokens without a slot in it are dropped.
ffi::Error write_tokens(ffi::ThreadPool pool, ffi::AnyBuffer cache, ffi::AnyBuffer tokens, ffi::Buffer<ffi::S32> layer,
                        ffi::Buffer<ffi::S32> place, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out) {
  CacheLayer to;
  Table table{};
  const bool is_pool = rest.size() > 0;
  if (is_pool) {
    const auto given = rest.get<ffi::Buffer<ffi::S32>>(0);
    if (rest.size() > 1 || given.has_error() || !table_of(*given, &table)) return wrong("one table of pages");
  }
  if (!layer_of(cache, layer, &to) || place.dimensions().size() != 2 || tokens.dimensions().size() < 3)
    return wrong("a cache and tokens for it");
  const int64_t rows = is_pool ? table.rows : to.rows, count = place.dimensions()[1];
  if (tokens.element_type() != cache.element_type() || place.dimensions()[0] != rows ||
      tokens.dimensions()[0] != rows || tokens.dimensions()[1] != count || tokens.dimensions()[2] != to.heads ||
      int64_t(tokens.size_bytes()) != rows * count * to.heads * to.bytes)
    return wrong("tokens as a cache has them");
  if (out->untyped_data() != cache.untyped_data())
    return ffi::Error::Internal("maxjax: the cache was copied, not updated in place");
  const char* from = static_cast<const char*>(tokens.untyped_data());
  const int32_t* slots = place.typed_data();
  const int64_t size = is_pool ? table.each * to.slots : to.slots;
  for_heads(pool, to, rows, count * to.bytes, [&](int64_t row, int64_t head) {
    for (int64_t t = row * count; t < (row + 1) * count; t++) {
      if (slots[t] < 0 || slots[t] >= size) continue;
      int64_t page = row, slot = slots[t];
      if (is_pool) {
        page = table.pages[row * table.each + slot / to.slots];
        slot %= to.slots;
      }
      if (page >= 0 && page < to.rows)
        memcpy(to.slot(page, head, slot), from + (t * to.heads + head) * to.bytes, to.bytes);
    }
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
  for_heads(pool, from, from.rows, count * from.bytes, [&](int64_t row, int64_t head) {
    memcpy(to + (row * from.heads + head) * count * from.bytes, from.slot(row, head, first), count * from.bytes);
  });
  return ffi::Error::Success();
}

// Operands: the pool, layer [], a table of pages. Result: the pages of each sequence, [B, K, M * P, ...]; for a
// number that is no page the nearest.
ffi::Error read_pages(ffi::ThreadPool pool, ffi::AnyBuffer cache, ffi::Buffer<ffi::S32> layer,
                      ffi::Buffer<ffi::S32> pages, ffi::Result<ffi::AnyBuffer> out) {
  CacheLayer from;
  Table table;
  if (!layer_of(cache, layer, &from) || !table_of(pages, &table) || from.rows < 1) return wrong("a pool and a table");
  const int64_t bytes = from.slots * from.bytes;
  if (out->element_type() != cache.element_type() ||
      int64_t(out->size_bytes()) != table.rows * from.heads * table.each * bytes)
    return wrong("pages as a pool has them");
  char* to = static_cast<char*>(out->untyped_data());
  for_heads(pool, from, table.rows, table.each * bytes, [&](int64_t row, int64_t head) {
    for (int64_t m = 0; m < table.each; m++) {
      const int64_t page = most(0, least(table.pages[row * table.each + m], from.rows - 1));
      memcpy(to + ((row * from.heads + head) * table.each + m) * bytes, from.slot(page, head, 0), bytes);
    }
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
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(maxjax_read_pages, maxjax::read_pages,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
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
