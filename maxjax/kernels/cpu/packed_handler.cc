// The FFI handler of the matmul with weights in blocks; the arithmetic is in packed.h.
#include "handlers.h"

namespace maxjax {
namespace {

// The activations quantised.
Int8 int8_of(ffi::ThreadPool& pool, const Level& level, const Tokens& x) {
  const int64_t stride = (x.depth + 255) / 256 * 256, of_row = stride + stride * 3 / 4;
  // Tiles read the codes of whole tiles of tokens; what is in those that are not there does not matter.
  const int64_t count = (x.count + kTokensOfTile - 1) / kTokensOfTile * kTokensOfTile;
  char* memory = scratch<1>(x.count * (of_row - stride) + count * stride);
  int8_t* codes = reinterpret_cast<int8_t*>(memory);
  float* scales = reinterpret_cast<float*>(memory + count * stride);
  float* sums = scales + x.count * stride / 32;
  float* half_sums = sums + x.count * stride / 32;
  int32_t* code_sums = reinterpret_cast<int32_t*>(half_sums + x.count * stride / 16);
  const bool as_is = x.type == Type::f32 && x.depth == stride;
  parallel_tokens(pool, x.count, 4 * stride, [&](int64_t t) {
    const char* from = x.data + t * x.depth * size_of(x.type);
    float* own = as_is ? nullptr : reinterpret_cast<float*>(scratch<2>(stride * 4));
    if (!as_is) level.widen(from, x.type, x.depth, Type::f32, own, stride);
    level.quantise(as_is ? reinterpret_cast<const float*>(from) : own, stride, codes + t * stride,
                   scales + t * stride / 32, sums + t * stride / 32, half_sums + t * stride / 16,
                   code_sums + t * stride / 16);
  });
  return {codes, scales, sums, half_sums, code_sums, stride};
}

// Operands: x [..., depth], then blocks [out, bytes] or stacks [n, out, bytes] of the formats given,
// then the layer index of each. Results: [..., out] for each of them.
ffi::Error packed_matmul(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets results,
                         ffi::Span<const int64_t> formats, bool is_int8) {
  const int64_t count = results.size();
  if (count < 1 || int64_t(args.size()) != 1 + 2 * count || int64_t(formats.size()) != count)
    return wrong("as many weights and formats as results");
  const auto operand = args.get<ffi::AnyBuffer>(0);
  Tokens x;
  if (operand.has_error() || !tokens_of(*operand, &x)) return wrong("activations are floats [..., in]");
  std::vector<Weights> weights(count);
  int64_t rows = 0;
  for (int64_t i = 0; i < count; i++) {
    const auto w = args.get<ffi::AnyBuffer>(1 + i);
    if (formats[i] < 0 || formats[i] >= kFormats) return wrong("a format of blocks");
    const Block& block = kBlocks[formats[i]];
    const int64_t bytes = x.depth / block.elements * block.bytes;
    if (w.has_error() || w->element_type() != ffi::U8 || x.depth % block.elements != 0 ||
        w->dimensions().size() < 1 || w->dimensions().back() != bytes ||
        !weights_of(args, results, i, count, x.count, bytes, &weights[i]))
      return wrong("blocks [out, bytes of a row], or results of a product");
    weights[i].kind = int(formats[i]);
    rows += weights[i].rows;
  }
  if (rows == 0 || x.count == 0) return ffi::Error::Success();

  const Level& level = active_level();
  const Int8 quantised = is_int8 ? int8_of(pool, level, x) : Int8{};
  const Activations floats =
      is_int8 ? Activations{} : prepared(pool, level, x.data, x.type, x.count, x.depth, Type::f32);
  parallel_rows(pool, weights, x.count, 32, 128, [&](const Weights& w, int64_t begin, int64_t end) {
    char* own = is_int8 ? nullptr : scratch<3>(kPackedScratch);
    level.packed_product({Format(w.kind), reinterpret_cast<const uint8_t*>(w.data), x.depth, is_int8, quantised,
                          static_cast<const float*>(floats.data), floats.stride, x.count, w.y, w.y_type, w.rows,
                          begin, end, own});
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace maxjax

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(maxjax_packed_matmul, maxjax::packed_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("formats")
                                  .Attr<bool>("is_int8"));
#pragma GCC visibility pop
