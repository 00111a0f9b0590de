// Encoders of ggml's blocks: the choice of a level, the exported functions, and the portable level.
#include "encode.h"

#include "cpu.h"

MAXJAX_DEFINE_ENCODERS(portable)

namespace maxjax {
// The build defines MAXJAX_HAS_* for each level that it compiles.
extern const EncodeLevel encode_avx2, encode_avx512;

namespace {

const EncodeLevel& chosen() {
  [[maybe_unused]] static const Cpu cpu = this_cpu();
#ifdef MAXJAX_HAS_LEVEL_ENCODE_AVX512
  if (cpu.avx512) return encode_avx512;
#endif
#ifdef MAXJAX_HAS_LEVEL_ENCODE_AVX2
  if (cpu.avx2) return encode_avx2;
#endif
  return encode_portable;
}

const EncodeLevel* level_of(const char* name) {
  const EncodeLevel& best = chosen();
  if (!name || !std::strcmp(name, best.name)) return &best;
  if (!std::strcmp(name, "portable")) return &encode_portable;
#ifdef MAXJAX_HAS_LEVEL_ENCODE_AVX2
  if (!std::strcmp(name, "avx2") && this_cpu().avx2) return &encode_avx2;
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
