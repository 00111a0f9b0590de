// Encoders of ggml's blocks: the choice of a level, the exported functions, and the portable level.
#include "encode.h"

#include "cpu.h"

MAXJAX_DEFINE_ENCODERS(portable)

namespace maxjax {
#if defined(__x86_64__)
extern const EncodeLevel encode_avx2, encode_avx512;
#endif

namespace {

const EncodeLevel& chosen() {
#if defined(__x86_64__)
  static const Cpu cpu = this_cpu();
  if (cpu.avx512) return encode_avx512;
  if (cpu.avx2) return encode_avx2;
#endif
  return encode_portable;
}

const EncodeLevel* level_of(const char* name) {
  const EncodeLevel& best = chosen();
  if (!name || !std::strcmp(name, best.name)) return &best;
  if (!std::strcmp(name, "portable")) return &encode_portable;
#if defined(__x86_64__)
  if (!std::strcmp(name, "avx2") && &best == &encode_avx512) return &encode_avx2;
#endif
  return nullptr;
}

}  // namespace
}  // namespace maxjax

#define MAXJAX_EXPORT extern "C" __attribute__((visibility("default")))

// Encodes `count` blocks of a type. `importance` is null, or has a weight for each value of a row of
// `row` blocks. `level` is null for the best one. 0: done; 1: a value or a scale is not finite;
// 2: there is no such type or level here.
MAXJAX_EXPORT int maxjax_encode_blocks(const char* level, const char* type, const float* values,
                                       const float* importance, int64_t row, int64_t count,
                                       uint8_t* blocks) {
  const maxjax::EncodeLevel* found = maxjax::level_of(level);
  if (!found) return 2;
  for (const maxjax::Encoder& one : found->encoders)
    if (!std::strcmp(one.type, type)) return one.run(values, importance, row, count, blocks) ? 0 : 1;
  return 2;
}

// The level that is used: "avx512", "avx2" or "portable".
MAXJAX_EXPORT const char* maxjax_encode_level() { return maxjax::chosen().name; }
