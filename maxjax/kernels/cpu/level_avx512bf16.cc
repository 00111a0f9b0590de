// x86 with AVX-512 and AVX-512 BF16 (dot products of bfloat16).
#define MAXJAX_PAIRS
#include "vector_avx512.h"
#include "rows.h"
#include "level.h"

MAXJAX_DEFINE_LEVEL(avx512bf16, {true, true, true})
