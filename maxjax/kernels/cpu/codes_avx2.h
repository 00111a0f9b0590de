// 64 codes of packed weights in two vectors: AVX2; with AVX-VNNI its dot products.
#pragma once
#include "codes_x86.h"
#include "vector_avx2.h"

namespace {

struct Codes {
  __m256i v[2];
};
struct Dots {
  __m256i v[2];
};
typedef __m256i ivec;
constexpr int kPanelVectors = 1, kPanelTokens = 4;
constexpr int kWideZero = 0;

inline __m256i load32(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline __m256i nibbles16(const uint8_t* p) {
  const __m128i packed = _mm_loadu_si128((const __m128i*)p);
  const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(packed), _mm_srli_epi16(packed, 4), 1);
  return _mm256_and_si256(both, _mm256_set1_epi8(15));
}

// The low nibbles of 32 bytes, then the high ones.
inline Codes nibbles(const uint8_t* p) {
  const __m256i packed = load32(p), low = _mm256_set1_epi8(15);
  return {_mm256_and_si256(packed, low), _mm256_and_si256(_mm256_srli_epi16(packed, 4), low)};
}

// The same of 16 bytes at p, then of those at q.
inline Codes nibbles(const uint8_t* p, const uint8_t* q) { return {nibbles16(p), nibbles16(q)}; }

// 32 signed bytes at p, then those at q.
inline Codes signed_bytes(const uint8_t* p, const uint8_t* q) { return {load32(p), load32(q)}; }

// The bytes of a table of 16 at the codes.
inline Codes looked_up(Codes c, const uint8_t* table) {
  const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return {_mm256_shuffle_epi8(t, c.v[0]), _mm256_shuffle_epi8(t, c.v[1])};
}

// Adds 16 to codes i whose bit in byte i of `high` is set: bit B for the first 32, B + 1 for the others.
template <int B>
inline Codes with_fifth_bit(Codes c, const uint8_t* high) {
  const __m256i bits = load32(high);
  for (int i = 0; i < 2; i++) {
    const __m256i of_i = _mm256_set1_epi8(char(1 << B << i));
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(bits, of_i), of_i);
    c.v[i] = _mm256_or_si256(c.v[i], _mm256_and_si256(set, _mm256_set1_epi8(16)));
  }
  return c;
}

// Adds 16 to codes i whose bit i is set, in `low` for the first 32 and in `high` for the others.
inline Codes with_fifth_bits(Codes c, uint32_t low, uint32_t high) {
  // Byte i gets the byte of bits that has bit i, and looks for bit i % 8 in it.
  const __m256i places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i own = _mm256_set1_epi64x(int64_t(0x8040201008040201));
  const uint32_t words[2] = {low, high};
  for (int i = 0; i < 2; i++) {
    const __m256i bits = _mm256_shuffle_epi8(_mm256_set1_epi32(int(words[i])), places);
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(bits, own), own);
    c.v[i] = _mm256_or_si256(c.v[i], _mm256_and_si256(set, _mm256_set1_epi8(16)));
  }
  return c;
}

// Six bits each: the low (or high) nibbles of 64 bytes, and two bits from 32 bytes, of which H = 0
// takes the lower four bits and H = 1 the upper four.
template <int H>
inline Codes six_bits(const uint8_t* low, const uint8_t* high) {
  const __m256i bits = load32(high), nibble = _mm256_set1_epi8(15), top = _mm256_set1_epi8(0x30);
  __m256i a = load32(low), b = load32(low + 32);
  if (H) a = _mm256_srli_epi16(a, 4), b = _mm256_srli_epi16(b, 4);
  const __m256i first = H ? bits : _mm256_slli_epi16(bits, 4);
  const __m256i second = H ? _mm256_srli_epi16(bits, 2) : _mm256_slli_epi16(bits, 2);
  return {_mm256_or_si256(_mm256_and_si256(a, nibble), _mm256_and_si256(first, top)),
          _mm256_or_si256(_mm256_and_si256(b, nibble), _mm256_and_si256(second, top))};
}

// The products of four codes with four numbers each, summed. `wide` codes have eight bits.
template <bool wide>
inline ivec dot4(ivec sums, ivec codes, ivec x) {
  if (wide) {  // |codes| times x with the sign of the code
    x = _mm256_sign_epi8(x, codes);
    codes = _mm256_abs_epi8(codes);
  }
#ifdef __AVXVNNI__
  return _mm256_dpbusd_avx_epi32(sums, codes, x);
#else
  const __m256i pairs = _mm256_maddubs_epi16(codes, x);
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

template <bool wide>
inline Dots dot(Codes c, const int8_t* x) {
  const __m256i none = _mm256_setzero_si256();
  return {dot4<wide>(none, c.v[0], load32(x)), dot4<wide>(none, c.v[1], load32(x + 32))};
}

// Eight floats as a vector with the same sum.
inline vec folded(eight v) { return v; }

// Adds the dot products of chunk I of four, each times the factor of its group of G codes.
template <int G, int I>
inline vec scaled(vec sums, Dots d, const eight* factors) {
  for (int i = 0; i < 2; i++) {
    const int g = (64 * I + 32 * i) / G, next = g + (G == 16);
    const __m256i index = _mm256_setr_epi32(g, g, g, g, next, next, next, next);
    const __m256 spread = _mm256_permutevar8x32_ps(factors[g / 8], index);
    sums = fma(_mm256_cvtepi32_ps(d.v[i]), spread, sums);
  }
  return sums;
}

// out[i] = code i times the scale, plus the offset, of its group of G.
template <int G, bool wide>
inline void expand(Codes c, const float* scales, const float* offsets, float* out) {
  for (int i = 0; i < 2; i++) {
    const int g = 32 * i / G, next = (32 * i + 16) / G;
    expand16<wide>(_mm256_castsi256_si128(c.v[i]), scales[g], offsets[g], out + 32 * i);
    expand16<wide>(_mm256_extracti128_si256(c.v[i], 1), scales[next], offsets[next], out + 32 * i + 16);
  }
}

inline ivec all_sums(int32_t n) { return _mm256_set1_epi32(n); }
inline ivec load_codes(const int32_t* p) { return _mm256_load_si256((const __m256i*)p); }
inline ivec four_of(const int8_t* x) {
  int32_t four;
  memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}
inline vec to_float(ivec v) { return _mm256_cvtepi32_ps(v); }

// Four codes of 8 rows side by side: out[k * stride + r] has codes 4k to 4k + 3 of row r.
inline void transposed(const Codes* rows, int32_t* out, int stride) {
  #pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    __m256i a[8], b[8];
    #pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      a[i] = _mm256_unpacklo_epi32(rows[i].v[half], rows[i + 1].v[half]);
      a[i + 1] = _mm256_unpackhi_epi32(rows[i].v[half], rows[i + 1].v[half]);
    }
    #pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4)
      #pragma GCC unroll 2
      for (int j = 0; j < 2; j++) {
        b[i + 2 * j] = _mm256_unpacklo_epi64(a[i + j], a[i + j + 2]);
        b[i + 2 * j + 1] = _mm256_unpackhi_epi64(a[i + j], a[i + j + 2]);
      }
    // b[4 q + k] has in lane l of 128 bits the codes 4 l + k of rows 4 q to 4 q + 3.
    int32_t* to = out + 8 * half * stride;
    #pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
      _mm256_store_si256((__m256i*)(to + k * stride), _mm256_permute2x128_si256(b[k], b[4 + k], 0x20));
      _mm256_store_si256((__m256i*)(to + (4 + k) * stride), _mm256_permute2x128_si256(b[k], b[4 + k], 0x31));
    }
  }
}

}  // namespace
