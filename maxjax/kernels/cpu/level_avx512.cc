// x86 with AVX-512 F, BW, DQ and VL.
#include "vector_avx512.h"
#include "rows.h"
#include "level.h"

namespace {

bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

}  // namespace

MAXJAX_DEFINE_LEVEL(avx512, supported)
