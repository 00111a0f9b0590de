// ARM: every 64-bit processor has these.
#include "vector_neon.h"
#include "rows.h"
#include "level.h"

MAXJAX_DEFINE_LEVEL(neon, {})
