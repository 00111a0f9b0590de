// The FFI handler of one token of a layer with the gated delta rule; the arithmetic of a head is in delta.h.
#include <algorithm>
#include <cmath>

#include "handlers.h"

namespace maxjax {
namespace {

// An operand of floats of any type, of which parts are widened.
struct Floats {
  const char* data;
  Type type;
  const float* widened(const Level& level, int64_t first, int64_t count, float* to) const {
    level.widen(data + first * size_of(type), type, count, Type::f32, to, padded(count));
    return to;
  }
  float at(const Level& level, int64_t i) const {
    alignas(64) float one[kPad];
    return *widened(level, i, 1, one);
  }
};

bool floats_of(const ffi::AnyBuffer& x, int64_t count, Floats* floats) {
  floats->data = static_cast<const char*>(x.untyped_data());
  return type_of(x.element_type(), &floats->type) && int64_t(x.element_count()) == count;
}

// Numbers of heads and so on, the names of kernels/delta_token.py.
struct Sizes {
  int64_t layers, batch, keys, values, key_dim, value_dim, channels, taps;
};

// One layer's operands, from the first sequence on.
struct Layer {
  Floats x, gate, share, decay, taps, rate, offset, weight;
  float *conv, *state;
};

// The convolution of `count` channels from `first` on and SiLU, and their last inputs.
void convolved(const Level& level, const Sizes& n, const Layer& of, int64_t b, int64_t first, int64_t count,
               float* out) {
  const int64_t room = padded(count), before = n.taps - 1;
  float* x = reinterpret_cast<float*>(scratch<1>(4 * (room + padded(count * n.taps))));
  of.x.widened(level, b * n.channels + first, count, x);
  const float* taps = of.taps.widened(level, first * n.taps, count * n.taps, x + room);
  float* last = of.conv + b * before * n.channels + first;
  std::fill(out, out + room, 0.0f);
  for (int64_t k = 0; k < n.taps; k++) {
    const float* from = k < before ? last + k * n.channels : x;
    for (int64_t c = 0; c < count; c++) out[c] += from[c] * taps[c * n.taps + k];
  }
  for (int64_t k = 0; k < before; k++) {
    const float* from = k + 1 < before ? last + (k + 1) * n.channels : x;
    memcpy(last + k * n.channels, from, 4 * count);
  }
  level.silu(out, room);
}

// x / |x| times a factor, in place.
void unit(float* x, int64_t count, float factor) {
  float squares = 0;
  for (int64_t i = 0; i < count; i++) squares += x[i] * x[i];
  const float scale = factor / std::sqrt(squares + 1e-6f);
  for (int64_t i = 0; i < count; i++) x[i] *= scale;
}

// One head of keys of one sequence, and the heads of values that share it; results are written to y.
void head(const Level& level, const Sizes& n, const Layer& of, int64_t b, int64_t g, float epsilon, char* y) {
  const int64_t each = n.values / n.keys, keys = n.keys * n.key_dim, wide = each * n.value_dim;
  const int64_t k_room = padded(n.key_dim), v_room = padded(n.value_dim);
  float* q = reinterpret_cast<float*>(scratch<0>(4 * (2 * k_room + padded(wide) + 3 * v_room)));
  float *k = q + k_room, *v = k + k_room, *weight = v + padded(wide), *gate = weight + v_room,
        *result = gate + v_room;
  convolved(level, n, of, b, g * n.key_dim, n.key_dim, q);
  convolved(level, n, of, b, keys + g * n.key_dim, n.key_dim, k);
  convolved(level, n, of, b, 2 * keys + g * wide, wide, v);
  unit(q, n.key_dim, 1 / std::sqrt(float(n.key_dim)));
  unit(k, n.key_dim, 1);
  of.weight.widened(level, 0, n.value_dim, weight);
  for (int64_t h = g * each; h < (g + 1) * each; h++) {
    const int64_t at = b * n.values + h;
    const float logit = of.decay.at(level, at) + of.offset.at(level, h);
    const float soft = std::max(logit, 0.0f) + std::log1p(std::exp(-std::abs(logit)));
    const float kept = std::exp(-std::exp(of.rate.at(level, h)) * soft);
    const float beta = 1 / (1 + std::exp(-of.share.at(level, at)));
    level.delta({q, k, v + (h - g * each) * n.value_dim, kept, beta, of.state + at * n.key_dim * n.value_dim,
                 n.key_dim, n.value_dim, result});
    of.gate.widened(level, at * n.value_dim, n.value_dim, gate);
    level.silu(gate, v_room);
    float squares = 0;
    for (int64_t i = 0; i < n.value_dim; i++) squares += result[i] * result[i];
    const float scale = 1 / std::sqrt(squares / float(n.value_dim) + epsilon);
    for (int64_t i = 0; i < n.value_dim; i++) result[i] = result[i] * scale * weight[i] * gate[i];
    level.narrow_row(result, Type::f32, n.value_dim, y + at * n.value_dim * size_of(of.x.type), of.x.type);
  }
}

// Operands and results as of delta_token.py; the last two results are the states, in place.
ffi::Error delta(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer gate, ffi::AnyBuffer share,
                 ffi::AnyBuffer decay, ffi::AnyBuffer taps, ffi::AnyBuffer rate, ffi::AnyBuffer offset,
                 ffi::AnyBuffer weight, ffi::Buffer<ffi::F32> conv, ffi::Buffer<ffi::F32> state,
                 ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> used, ffi::Result<ffi::AnyBuffer> y,
                 ffi::Result<ffi::AnyBuffer> conv_out, ffi::Result<ffi::AnyBuffer> state_out,
                 int64_t key_heads, float epsilon) {
  const auto shape = state.dimensions(), last = conv.dimensions();
  if (shape.size() != 5 || last.size() != 4 || key_heads < 1) return wrong("axes of the delta rule");
  const Sizes n{shape[0], shape[1], key_heads, shape[2], shape[3], shape[4], last[3], last[2] + 1};
  Layer of;
  if (n.values % n.keys || n.channels != 2 * n.keys * n.key_dim + n.values * n.value_dim ||
      last[0] != n.layers || last[1] != n.batch || n.layers < 1 ||
      !floats_of(x, n.batch * n.channels, &of.x) ||
      !floats_of(gate, n.batch * n.values * n.value_dim, &of.gate) ||
      !floats_of(share, n.batch * n.values, &of.share) || !floats_of(decay, n.batch * n.values, &of.decay) ||
      !floats_of(taps, n.channels * n.taps, &of.taps) || !floats_of(rate, n.values, &of.rate) ||
      !floats_of(offset, n.values, &of.offset) || !floats_of(weight, n.value_dim, &of.weight) ||
      layer.element_count() != 1 || int64_t(used.element_count()) != n.batch ||
      y->element_type() != x.element_type() || y->element_count() != gate.element_count())
    return wrong("shapes or types of the delta rule");
  if (conv_out->untyped_data() != conv.untyped_data() || state_out->untyped_data() != state.untyped_data())
    return ffi::Error::Internal("maxjax: the state was copied, not updated in place");
  const int64_t number = most(0, least(layer.typed_data()[0], n.layers - 1)) * n.batch;
  of.conv = conv.typed_data() + number * (n.taps - 1) * n.channels;
  of.state = state.typed_data() + number * n.values * n.key_dim * n.value_dim;
  const Level& level = active_level();
  char* to = static_cast<char*>(y->untyped_data());
  const int64_t bytes = 4 * n.batch * n.values * n.key_dim * n.value_dim;
  parallel(pool, n.batch * n.keys, bytes < kChunkBytes ? 1 : pool.num_threads(), [&](int64_t i) {
    const int64_t b = i / n.keys, g = i % n.keys, wide = n.values / n.keys * n.value_dim * size_of(of.x.type);
    if (used.typed_data()[b]) {
      head(level, n, of, b, g, epsilon, to);
    } else {
      memset(to + i * wide, 0, wide);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace maxjax

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(maxjax_delta, maxjax::delta,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("key_heads")
                                  .Attr<float>("epsilon"));
#pragma GCC visibility pop
