// ARM: every 64-bit processor has these.
#include "vector_neon.h"
#include "rows.h"
#include "level.h"

namespace {

bool supported() {
  return true;
}

}  // namespace

MAXJAX_DEFINE_LEVEL(neon, supported)
