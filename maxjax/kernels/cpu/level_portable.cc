// The level for any processor.
#include "codes_portable.h"
#include "rows.h"
#include "level.h"

MAXJAX_DEFINE_LEVEL(portable, {})
