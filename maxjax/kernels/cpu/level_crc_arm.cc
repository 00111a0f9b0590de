// CRC-32 on 64-bit ARM with its CRC instructions. Three runs of bytes are processed in parallel, as
// each instruction depends on the one before it in its run but not on the other runs.
#include <cstring>

#include "crc.h"

namespace maxjax {
namespace {

constexpr size_t kRun = 4096;

inline uint64_t load(const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, 8);
  return word;
}

// In assembly, as compilers differ in the flags that enable the CRC instructions.
inline uint32_t add8(uint32_t crc, uint64_t word) {
  asm(".arch_extension crc\n\tcrc32x %w0, %w0, %x1" : "+r"(crc) : "r"(word));
  return crc;
}

inline uint32_t add1(uint32_t crc, uint8_t byte) {
  asm(".arch_extension crc\n\tcrc32b %w0, %w0, %w1" : "+r"(crc) : "r"(uint32_t{byte}));
  return crc;
}

// The product modulo P.
inline uint32_t product(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
  for (int bit = 31; bit >= 0; bit--) {
    sum ^= b & (0u - (a >> bit & 1u));
    b = b >> 1 ^ (kPolynomial & (0u - (b & 1u)));
  }
  return sum;
}

}  // namespace

uint32_t crc_arm(uint32_t crc, const uint8_t* data, size_t nbytes) {
  constexpr uint32_t kOne = power(8 * kRun), kTwo = power(16 * kRun);
  for (; nbytes >= 3 * kRun; data += 3 * kRun, nbytes -= 3 * kRun) {
    uint32_t second = 0, third = 0;
    for (size_t at = 0; at < kRun; at += 8) {
      crc = add8(crc, load(data + at));
      second = add8(second, load(data + kRun + at));
      third = add8(third, load(data + 2 * kRun + at));
    }
    crc = product(kTwo, crc) ^ product(kOne, second) ^ third;
  }
  for (; nbytes >= 8; data += 8, nbytes -= 8) crc = add8(crc, load(data));
  for (; nbytes; nbytes--) crc = add1(crc, *data++);
  return crc;
}

}  // namespace maxjax
