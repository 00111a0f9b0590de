// x86 with AVX-512, its dot products of bytes and of bfloat16, and AMX (products of tiles of both).
#define MAXJAX_PAIRS
#define MAXJAX_TILES
#include "codes_avx512.h"
#include "rows.h"
#include "level.h"

MAXJAX_DEFINE_LEVEL(amx, {true, true, true, true, false, false, true})
