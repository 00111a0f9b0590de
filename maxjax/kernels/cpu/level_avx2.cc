// x86 with AVX2, FMA and F16C.
#include "codes_avx2.h"
#include "rows.h"
#include "level.h"

MAXJAX_DEFINE_LEVEL(avx2, {true, false, false, false, false, false})
