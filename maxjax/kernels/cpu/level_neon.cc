// NEON, which every 64-bit ARM processor has.
#include "vector_neon.h"
#include "rows.h"
#include "level.h"

MAXJAX_DEFINE_LEVEL(neon, {})
