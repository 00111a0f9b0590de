// All FFI handlers in one translation unit: most of the time goes into XLA's headers, which are read once here.
#include "handlers.cc"

#include "cache_handler.cc"
#include "delta_handler.cc"
#include "packed_handler.cc"
#include "ssd_handler.cc"
