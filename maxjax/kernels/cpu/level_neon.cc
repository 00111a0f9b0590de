// NEON, which every 64-bit ARM processor has.
#include "codes_neon.h"
#include "rows.h"
#include "level.h"

MAXJAX_DEFINE_LEVEL(neon, {})
