// Encoders of ggml's blocks on x86 with AVX2.
#include "encode.h"

MAXJAX_DEFINE_ENCODERS(avx2)
