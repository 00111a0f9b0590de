// x86 with AVX-512 F, BW, DQ and VL.
#include "codes_avx512.h"
#include "rows.h"
#include "level.h"

MAXJAX_DEFINE_LEVEL(avx512, {true, true, false, false, false, false})
