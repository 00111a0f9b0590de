// CRC-32 on x86 with AVX-512 and VPCLMULQDQ: four times 64 bytes at a time.
#include <immintrin.h>

#include "crc.h"

namespace maxjax {
namespace {

inline __m512i load(const uint8_t* data) { return _mm512_loadu_si512(data); }

inline __m512i fold(__m512i x, __m512i factors, __m512i next) {
  const __m512i first = _mm512_clmulepi64_epi128(x, factors, 0x00);
  const __m512i second = _mm512_clmulepi64_epi128(x, factors, 0x11);
  return _mm512_ternarylogic_epi64(first, second, next, 0x96);  // the sum of the three
}

inline __m512i factors(uint64_t first, uint64_t second) {
  return _mm512_broadcast_i32x4(
      _mm_set_epi64x(static_cast<long long>(second), static_cast<long long>(first)));
}

}  // namespace

uint32_t crc_wide_clmul(uint32_t crc, const uint8_t* data, size_t nbytes) {
  if (nbytes < 256) return crc_clmul(crc, data, nbytes);
  constexpr uint64_t kFirst = first_factor(2048), kSecond = second_factor(2048);
  constexpr uint64_t kFirst1 = first_factor(512), kSecond1 = second_factor(512);
  const __m512i four = factors(kFirst, kSecond), one = factors(kFirst1, kSecond1);
  const __m128i start = _mm_cvtsi32_si128(static_cast<int>(crc));
  __m512i x0 = _mm512_xor_si512(load(data), _mm512_zextsi128_si512(start));
  __m512i x1 = load(data + 64), x2 = load(data + 128), x3 = load(data + 192);
  for (data += 256, nbytes -= 256; nbytes >= 256; data += 256, nbytes -= 256) {
    x0 = fold(x0, four, load(data));
    x1 = fold(x1, four, load(data + 64));
    x2 = fold(x2, four, load(data + 128));
    x3 = fold(x3, four, load(data + 192));
  }
  x0 = fold(fold(fold(x0, one, x1), one, x2), one, x3);
  for (; nbytes >= 64; data += 64, nbytes -= 64) x0 = fold(x0, one, load(data));
  // The folded value has the same remainder as the whole message.
  alignas(64) uint8_t rest[64];
  _mm512_store_si512(rest, x0);
  return crc_clmul(crc_clmul(0, rest, 64), data, nbytes);
}

}  // namespace maxjax
