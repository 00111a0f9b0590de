// x86 with AVX-512 and AVX-512 VNNI (dot products of bytes).
#include "codes_avx512.h"
#include "rows.h"
#include "level.h"

MAXJAX_DEFINE_LEVEL(avx512vnni, {true, true, false, true, false, false})
