// Any processor.
#include "vector_portable.h"
#include "rows.h"
#include "level.h"

namespace {

bool supported() {
  return true;
}

}  // namespace

MAXJAX_DEFINE_LEVEL(portable, supported)
