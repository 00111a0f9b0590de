// CRC-32 on x86 with PCLMULQDQ and SSE 4.1: four times 16 bytes at a time.
#include <immintrin.h>

#include "crc.h"

namespace maxjax {
namespace {

inline __m128i load(const uint8_t* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

// Moves x forward to the position of `next`, and adds `next`.
inline __m128i fold(__m128i x, __m128i factors, __m128i next) {
  const __m128i first = _mm_clmulepi64_si128(x, factors, 0x00);
  const __m128i second = _mm_clmulepi64_si128(x, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(first, second), next);
}

inline __m128i factors(uint64_t first, uint64_t second) {
  return _mm_set_epi64x(static_cast<long long>(second), static_cast<long long>(first));
}

}  // namespace

uint32_t crc_clmul(uint32_t crc, const uint8_t* data, size_t nbytes) {
  if (nbytes < 64) return crc_portable(crc, data, nbytes);
  constexpr uint64_t kFirst = first_factor(512), kSecond = second_factor(512);
  constexpr uint64_t kFirst1 = first_factor(128), kSecond1 = second_factor(128);
  const __m128i four = factors(kFirst, kSecond), one = factors(kFirst1, kSecond1);
  __m128i x0 = _mm_xor_si128(load(data), _mm_cvtsi32_si128(static_cast<int>(crc)));
  __m128i x1 = load(data + 16), x2 = load(data + 32), x3 = load(data + 48);
  for (data += 64, nbytes -= 64; nbytes >= 64; data += 64, nbytes -= 64) {
    x0 = fold(x0, four, load(data));
    x1 = fold(x1, four, load(data + 16));
    x2 = fold(x2, four, load(data + 32));
    x3 = fold(x3, four, load(data + 48));
  }
  x0 = fold(fold(fold(x0, one, x1), one, x2), one, x3);
  for (; nbytes >= 16; data += 16, nbytes -= 16) x0 = fold(x0, one, load(data));
  // The folded value has the same remainder as the whole message.
  alignas(16) uint8_t rest[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(rest), x0);
  return crc_portable(crc_portable(0, rest, 16), data, nbytes);
}

}  // namespace maxjax
