// NEON with the dot product extension, in ARM processors since 2018.
#include "codes_neon.h"
#include "rows.h"
#include "level.h"

MAXJAX_DEFINE_LEVEL(neondot, {false, false, false, false, false, true})
