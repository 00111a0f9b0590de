// What each level_*.cc ends with: its table. MAXJAX_LEVEL is its name.
#pragma once
#include "product.h"
#include "attend.h"

namespace {

#ifdef MAXJAX_PAIRS
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

// For one token the memory is slower than either way.
bool narrow_tokens(int64_t tokens) { return kPairs && tokens > 1; }

bool in_order(Type w_type) { return w_type != Type::bf16 || place<bf16>(1) == 1; }

}  // namespace

#define MAXJAX_DEFINE_LEVEL(name, supported)                                            \
  namespace maxjax {                                                                    \
  extern const Level level_##name;                                                      \
  const Level level_##name = {#name, supported, narrow_tokens, in_order, widen,         \
                              narrow_row, product, attend};                             \
  }
