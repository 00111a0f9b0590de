// CRC-32: the choice of a level, the exported functions, and the portable level.
#include "crc.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace maxjax {
namespace {

// Table k: the contribution of a byte that is followed by k more bytes.
struct Tables {
  uint32_t of[8][256];
};

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; byte++) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? kPolynomial : 0);
    tables.of[0][byte] = crc;
  }
  for (int k = 1; k < 8; k++)
    for (uint32_t byte = 0; byte < 256; byte++) {
      const uint32_t before = tables.of[k - 1][byte];
      tables.of[k][byte] = before >> 8 ^ tables.of[0][before & 255];
    }
  return tables;
}

constexpr Tables kTables = make_tables();

struct Choice {
  const char* name;
  Crc run;
};

// The best of the compiled levels that this processor has; the build defines MAXJAX_HAS_* for each.
Choice choose() {
#if defined(__x86_64__)
  // Uses CPUID and XGETBV, as cpu.h does.
  unsigned a, b, c, d;
  const auto has = [](unsigned word, int bit) { return (word >> bit & 1) != 0; };
  const bool clmul = __get_cpuid(1, &a, &b, &c, &d) && has(c, 1) && has(c, 19);
#ifdef MAXJAX_HAS_LEVEL_CRC_WIDE
  if (clmul && has(c, 27)) {  // OSXSAVE
    unsigned kept, high;
    asm volatile("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
    if ((kept & 0xe6) == 0xe6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && has(b, 16) && has(b, 17) &&
        has(b, 30) && has(b, 31) && has(c, 10))
      return {"wide_clmul", crc_wide_clmul};
  }
#endif
#ifdef MAXJAX_HAS_LEVEL_CRC_CLMUL
  if (clmul) return {"clmul", crc_clmul};
#endif
#elif defined(MAXJAX_HAS_LEVEL_CRC_ARM)
#if defined(__linux__)
  const bool there = (getauxval(AT_HWCAP) >> 7 & 1) != 0;  // HWCAP_CRC32
#else
  const bool there = true;  // every processor of Apple's
#endif
  if (there) return {"arm", crc_arm};
#endif
  return {"portable", crc_portable};
}

const Choice& chosen() {
  static const Choice choice = choose();
  return choice;
}

}  // namespace

// Eight bytes at a time, each with its own table. The bytes are combined one by one, which is
// correct in any byte order; compilers make one load of them.
uint32_t crc_portable(uint32_t crc, const uint8_t* data, size_t nbytes) {
  const auto& of = kTables.of;
  for (; nbytes >= 8; nbytes -= 8, data += 8) {
    const uint32_t low = crc ^ (uint32_t{data[0]} | uint32_t{data[1]} << 8 |
                                uint32_t{data[2]} << 16 | uint32_t{data[3]} << 24);
    crc = of[7][low & 255] ^ of[6][low >> 8 & 255] ^ of[5][low >> 16 & 255] ^ of[4][low >> 24] ^
          of[3][data[4]] ^ of[2][data[5]] ^ of[1][data[6]] ^ of[0][data[7]];
  }
  for (; nbytes; nbytes--) crc = crc >> 8 ^ of[0][(crc ^ *data++) & 255];
  return crc;
}

}  // namespace maxjax

#define MAXJAX_EXPORT extern "C" __attribute__((visibility("default")))

// The same as zlib's crc32: `crc` is the CRC of the bytes before, 0 at the start.
MAXJAX_EXPORT uint32_t maxjax_crc32(uint32_t crc, const void* data, size_t nbytes) {
  return ~maxjax::chosen().run(~crc, static_cast<const uint8_t*>(data), nbytes);
}

// The level that is used: "wide_clmul", "clmul", "arm" or "portable".
MAXJAX_EXPORT const char* maxjax_crc32_level() { return maxjax::chosen().name; }

// The same with a level by its name; false if this processor does not have it.
MAXJAX_EXPORT bool maxjax_crc32_on(const char* level, uint32_t* crc, const void* data,
                                   size_t nbytes) {
  const maxjax::Choice best = maxjax::chosen();
  maxjax::Crc run = nullptr;
  if (!std::strcmp(level, "portable")) run = maxjax::crc_portable;
  if (!std::strcmp(level, best.name)) run = best.run;
#ifdef MAXJAX_HAS_LEVEL_CRC_CLMUL
  if (!std::strcmp(level, "clmul") && std::strcmp(best.name, "portable")) run = maxjax::crc_clmul;
#endif
  if (!run) return false;
  *crc = ~run(~*crc, static_cast<const uint8_t*>(data), nbytes);
  return true;
}
