// CRC-32 as in zlib, at the speed of the memory: declarations that its levels share.
//
// A message is a polynomial over GF(2); its CRC is the remainder modulo P. Bits are reflected:
// the highest power is the lowest bit. See Gopal et al., "Fast CRC Computation for Generic
// Polynomials Using PCLMULQDQ Instruction" (Intel, 2009).
#pragma once
#include <cstddef>
#include <cstdint>

namespace maxjax {

constexpr uint32_t kPolynomial = 0xEDB88320u;

// x to the n modulo P.
constexpr uint32_t power(int n) {
  uint32_t value = 0x80000000u;
  for (; n > 0; n--) value = value >> 1 ^ (value & 1 ? kPolynomial : 0);
  return value;
}

// The factors that move 128 bits forward by n bits: for the first 64 bits and for the others.
// A product of reflected numbers is shifted right by one bit, so each factor is shifted left.
constexpr uint64_t first_factor(int n) { return uint64_t{power(n + 32)} << 1; }
constexpr uint64_t second_factor(int n) { return uint64_t{power(n - 32)} << 1; }

// Each takes and returns the CRC in its internal form, with all bits inverted; `nbytes` may be any.
using Crc = uint32_t (*)(uint32_t crc, const uint8_t* data, size_t nbytes);

uint32_t crc_portable(uint32_t crc, const uint8_t* data, size_t nbytes);
uint32_t crc_clmul(uint32_t crc, const uint8_t* data, size_t nbytes);
uint32_t crc_wide_clmul(uint32_t crc, const uint8_t* data, size_t nbytes);
uint32_t crc_arm(uint32_t crc, const uint8_t* data, size_t nbytes);

}  // namespace maxjax
