// The table of functions of a level, included at the end of each level_*.cc. MAXJAX_LEVEL is its
// name.
#pragma once
#include "product.h"
#ifdef MAXJAX_TILES
#include "tiles.h"
#endif
#include "attend.h"
#include "delta.h"
#include "ssd.h"
#include "packed.h"

namespace {

#ifdef MAXJAX_PAIRS
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

#ifndef MAXJAX_TILES
constexpr void (*tile_rows)(const void*, int64_t, int64_t, void*) = nullptr;
#endif

bool in_order(Type w_type) { return w_type != Type::bf16 || place<bf16>(1) == 1; }

}  // namespace

#define MAXJAX_DEFINE_LEVEL(name, ...)                                                  \
  namespace maxjax {                                                                    \
  extern const Level level_##name;                                                      \
  const Level level_##name = {#name, maxjax::Cpu __VA_ARGS__, kPairs, in_order, widen,         \
                              narrow_row, product, attend, combine, packed_product, quantise, \
                              delta, silu, ssd, tile_rows};                                    \
  }
