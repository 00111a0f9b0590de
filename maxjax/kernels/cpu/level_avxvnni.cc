// x86 with AVX2, FMA, F16C and AVX-VNNI (dot products of bytes).
#include "codes_avx2.h"
#include "rows.h"
#include "level.h"

MAXJAX_DEFINE_LEVEL(avxvnni, {true, false, false, false, true, false})
