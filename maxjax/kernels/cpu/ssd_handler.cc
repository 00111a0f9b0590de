// The FFI handler of one token of Mamba 2's recurrence; the arithmetic of a head is in ssd.h.
#include <cmath>

#include "handlers.h"

namespace maxjax {
namespace {

// Operands and results as of ssd_token.py; the last result is the states, in place.
ffi::Error ssd(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> g, ffi::Buffer<ffi::F32> b,
               ffi::Buffer<ffi::F32> c, ffi::Buffer<ffi::F32> state, ffi::Buffer<ffi::S32> layer,
               ffi::Buffer<ffi::S32> used, ffi::Result<ffi::Buffer<ffi::F32>> y,
               ffi::Result<ffi::Buffer<ffi::F32>> state_out) {
  const auto shape = state.dimensions(), written = b.dimensions();
  if (shape.size() != 5 || written.size() != 3) return wrong("axes of a state space");
  const int64_t layers = shape[0], batch = shape[1], heads = shape[2], rows = shape[3], size = shape[4];
  const int64_t groups = written[1];
  if (layers < 1 || groups < 1 || heads % groups || int64_t(x.element_count()) != batch * heads * rows ||
      y->element_count() != x.element_count() || int64_t(g.element_count()) != batch * heads ||
      int64_t(b.element_count()) != batch * groups * size || c.element_count() != b.element_count() ||
      layer.element_count() != 1 || int64_t(used.element_count()) != batch)
    return wrong("shapes of a state space");
  if (state_out->untyped_data() != state.untyped_data())
    return ffi::Error::Internal("maxjax: the state was copied, not updated in place");
  const int64_t number = most(0, least(layer.typed_data()[0], layers - 1)) * batch * heads;
  const Level& level = active_level();
  const int64_t bytes = 4 * batch * heads * rows * size;
  parallel(pool, batch * heads, bytes < kChunkBytes ? 1 : pool.num_threads(), [&](int64_t i) {
    float* to = y->typed_data() + i * rows;
    if (!used.typed_data()[i / heads]) {
      memset(to, 0, 4 * rows);
      return;
    }
    const int64_t group = i / (heads / groups) * size;
    level.ssd({x.typed_data() + i * rows, std::exp(g.typed_data()[i]), b.typed_data() + group,
               c.typed_data() + group, state.typed_data() + (number + i) * rows * size, rows, size, to});
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace maxjax

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(maxjax_ssd, maxjax::ssd,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
#pragma GCC visibility pop
