// Eight floats, and the factors of blocks, on x86 with AVX2 and F16C.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

typedef __m256 eight;

inline eight zero8() { return _mm256_setzero_ps(); }
inline eight all8(float f) { return _mm256_set1_ps(f); }
inline eight load8(const float* p) { return _mm256_loadu_ps(p); }
inline void store8(float* p, eight v) { _mm256_storeu_ps(p, v); }
inline eight mul8(eight a, eight b) { return _mm256_mul_ps(a, b); }
inline eight fma8(eight a, eight b, eight c) { return _mm256_fmadd_ps(a, b, c); }
inline float sum8(eight v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
// Each of the first (or last) four of eight floats twice.
inline eight doubled_low(eight v) {
  return _mm256_permutevar8x32_ps(v, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
}
inline eight doubled_high(eight v) {
  return _mm256_permutevar8x32_ps(v, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7));
}

inline uint16_t half_bits(const uint8_t* p) {
  uint16_t h;
  memcpy(&h, p, 2);
  return h;
}
inline float half_at(const uint8_t* p) { return _cvtsh_ss(half_bits(p)); }

// float16 at p, p + stride, ..., p + 7 * stride.
inline eight halves8(const uint8_t* p, int stride) {
#ifdef __AVX512BW__
  if (stride == 18) {  // all of them lie in 128 bytes
    const __m512i places = _mm512_castsi128_si512(_mm_setr_epi16(0, 9, 18, 27, 36, 45, 54, 63));
    const __m512i found = _mm512_permutex2var_epi16(_mm512_loadu_si512(p), places, _mm512_loadu_si512(p + 64));
    return _mm256_cvtph_ps(_mm512_castsi512_si128(found));
  }
#endif
  const auto h = [&](int i) { return short(half_bits(p + i * stride)); };
  return _mm256_cvtph_ps(_mm_setr_epi16(h(0), h(1), h(2), h(3), h(4), h(5), h(6), h(7)));
}
// 2^(e - 128) for the bytes e at the same places; 2^-128 and 2^-127 are subnormal.
inline eight powers8(const uint8_t* p, int stride) {
  const auto b = [&](int i) { return int(p[i * stride]); };
  const __m256i e = _mm256_setr_epi32(b(0), b(1), b(2), b(3), b(4), b(5), b(6), b(7));
  const __m256i low = _mm256_min_epi32(e, _mm256_set1_epi32(2));
  const __m256i least = _mm256_sllv_epi32(_mm256_set1_epi32(0x200000), low);
  const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
  const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
  return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, least, is_small));
}
inline eight of_bytes8(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)); }
inline eight of_signed_bytes8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
// Eight unsigned bytes in a word.
inline eight of_word8(uint64_t bytes) { return of_bytes8(_mm_cvtsi64_si128(int64_t(bytes))); }

// Converts 16 codes to floats, times a scale plus an offset.
template <bool is_signed>
inline void expand16(__m128i codes, float scale, float offset, float* out) {
  const __m256 s = _mm256_set1_ps(scale), o = _mm256_set1_ps(offset);
  const __m128i high = _mm_srli_si128(codes, 8);
  const __m256i a = is_signed ? _mm256_cvtepi8_epi32(codes) : _mm256_cvtepu8_epi32(codes);
  const __m256i b = is_signed ? _mm256_cvtepi8_epi32(high) : _mm256_cvtepu8_epi32(high);
  _mm256_storeu_ps(out, _mm256_fmadd_ps(_mm256_cvtepi32_ps(a), s, o));
  _mm256_storeu_ps(out + 8, _mm256_fmadd_ps(_mm256_cvtepi32_ps(b), s, o));
}

// Quantises 32 floats to int8: x is nearly codes * scale. Returns the scale, which is not finite if
// one of them is not; the codes are zeros then.
inline float quantise32(const float* x, int8_t* codes) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 v[4], top = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
  for (int i = 0; i < 4; i++) {
    v[i] = _mm256_loadu_ps(x + 8 * i);
    top = _mm256_max_ps(top, _mm256_andnot_ps(sign, v[i]));
    odd = _mm256_or_ps(odd, _mm256_cmp_ps(v[i], v[i], _CMP_UNORD_Q));
  }
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  const float largest = _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
  const float infinite = __builtin_inff();
  if (_mm256_movemask_ps(odd) != 0 || largest == infinite) {
    memset(codes, 0, 32);
    return _mm256_movemask_ps(odd) != 0 ? __builtin_nanf("") : infinite;
  }
  const __m256 by = _mm256_set1_ps(largest > 0 ? 127 / largest : 0);
  __m256i n[4];
  // 127 / largest is infinite for subnormal numbers: they become zeros.
  const bool tiny = !(_mm256_cvtss_f32(by) < infinite);
  for (int i = 0; i < 4; i++)
    n[i] = tiny ? _mm256_setzero_si256() : _mm256_cvtps_epi32(_mm256_mul_ps(v[i], by));
  const __m256i low = _mm256_packs_epi32(n[0], n[1]), high = _mm256_packs_epi32(n[2], n[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
  _mm256_storeu_si256((__m256i*)codes, bytes);
  return largest / 127;
}

}  // namespace
