// x86 with AVX-512, AVX-512 VNNI and AVX-512 BF16 (dot products of bytes and of bfloat16).
#define MAXJAX_PAIRS
#include "codes_avx512.h"
#include "rows.h"
#include "level.h"

MAXJAX_DEFINE_LEVEL(avx512bf16, {true, true, true, true, false, false})
