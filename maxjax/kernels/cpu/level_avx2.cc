// x86 with AVX2, FMA and F16C.
#include "vector_avx2.h"
#include "rows.h"
#include "level.h"

namespace {

bool supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

}  // namespace

MAXJAX_DEFINE_LEVEL(avx2, supported)
