// Encoders of ggml's blocks on x86 with AVX-512.
#include "encode.h"

MAXJAX_DEFINE_ENCODERS(avx512)
