// 64 codes of packed weights in a vector: AVX-512 F, BW, DQ and VL; with VNNI its dot products.
#pragma once
#include "codes_x86.h"
#include "vector_avx512.h"

namespace {

struct Codes {
  __m512i v;
};
struct Dots {
  __m512i v;
};
typedef __m512i ivec;
// Vectors of rows in a panel, and tokens whose sums are in registers at a time.
constexpr int kPanelVectors = 2, kPanelTokens = 6;

#ifdef __AVX512VNNI__
// The instruction multiplies unsigned bytes by signed ones, so 128 is added to codes of eight bits.
constexpr int kWideZero = 128;
#else
constexpr int kWideZero = 0;
#endif

inline __m256i load32(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline __m512i joined(__m256i low, __m256i high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
inline __m512i twice(const uint8_t* p) { return _mm512_broadcast_i64x4(load32(p)); }
inline __m512i all_bytes(int b) { return _mm512_set1_epi8(char(b)); }

// The low nibbles of 32 bytes, then the high ones.
inline Codes nibbles(const uint8_t* p) {
  const __m256i packed = load32(p);
  return {_mm512_and_si512(joined(packed, _mm256_srli_epi16(packed, 4)), all_bytes(15))};
}

// The same of 16 bytes at p, then of those at q.
inline Codes nibbles(const uint8_t* p, const uint8_t* q) {
  const __m256i first = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
  const __m512i packed = _mm512_mask_broadcast_i32x4(_mm512_castsi256_si512(first), 0xff00,
                                                     _mm_loadu_si128((const __m128i*)q));
  const __m512i by = _mm512_set_epi64(0x4000400040004, 0x4000400040004, 0, 0, 0x4000400040004,
                                      0x4000400040004, 0, 0);
  return {_mm512_and_si512(_mm512_srlv_epi16(packed, by), all_bytes(15))};
}

// 32 signed bytes at p, then those at q.
inline Codes signed_bytes(const uint8_t* p, const uint8_t* q) {
  const __m512i v = joined(load32(p), load32(q));
  return {kWideZero ? _mm512_xor_si512(v, all_bytes(0x80)) : v};
}

// The bytes of a table of 16 at the codes.
inline Codes looked_up(Codes c, const uint8_t* table) {
  const __m128i sixteen = _mm_loadu_si128((const __m128i*)table);
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(sixteen), c.v)};
}

// Adds 16 to codes i whose bit in byte i of `high` is set: bit B for the first 32, B + 1 for the others.
template <int B>
inline Codes with_fifth_bit(Codes c, const uint8_t* high) {
  const __m512i bits = joined(_mm256_set1_epi8(char(1 << B)), _mm256_set1_epi8(char(2 << B)));
  const __mmask64 set = _mm512_test_epi8_mask(twice(high), bits);
  return {_mm512_mask_add_epi8(c.v, set, c.v, all_bytes(16))};
}

// Adds 16 to codes i whose bit i is set, in `low` for the first 32 and in `high` for the others.
inline Codes with_fifth_bits(Codes c, uint32_t low, uint32_t high) {
  const __mmask64 set = uint64_t(high) << 32 | low;
  return {_mm512_mask_add_epi8(c.v, set, c.v, all_bytes(16))};
}

// Six bits each: the low (or high) nibbles of 64 bytes, and two bits from 32 bytes, of which H = 0
// takes the lower four bits and H = 1 the upper four.
template <int H>
inline Codes six_bits(const uint8_t* low, const uint8_t* high) {
  __m512i v = _mm512_loadu_si512(low);
  if (H) v = _mm512_srli_epi16(v, 4);
  const __m512i by = H ? joined(_mm256_set1_epi32(0), _mm256_set1_epi32(30))
                       : joined(_mm256_set1_epi32(4), _mm256_set1_epi32(2));
  const __m512i top = _mm512_rolv_epi32(twice(high), by);
  return {_mm512_ternarylogic_epi64(_mm512_and_si512(v, all_bytes(15)), top, all_bytes(0x30), 0xf8)};
}

// The products of four codes with four numbers each, summed. `wide` codes have eight bits.
template <bool wide>
inline ivec dot4(ivec sums, ivec codes, ivec x) {
#ifdef __AVX512VNNI__
  return _mm512_dpbusd_epi32(sums, codes, x);
#else
  if (wide) {  // |codes| times x with the sign of the code
    x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), x);
    codes = _mm512_abs_epi8(codes);
  }
  const __m512i pairs = _mm512_maddubs_epi16(codes, x);
  return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
}

template <bool wide>
inline Dots dot(Codes c, const int8_t* x) {
  return {dot4<wide>(_mm512_setzero_si512(), c.v, _mm512_loadu_si512(x))};
}

// Eight floats as a vector with the same sum.
inline vec folded(eight v) { return _mm512_zextps256_ps512(v); }

// Adds the dot products of chunk I of four, each times the factor of its group of G codes.
template <int G, int I>
inline vec scaled(vec sums, Dots d, const eight* factors) {
  const __m512 first = _mm512_castps256_ps512(factors[0]);
  __m512 spread;
  if (G == 32) {
    spread = _mm512_permutexvar_ps(
        joined(_mm256_set1_epi32(2 * I), _mm256_set1_epi32(2 * I + 1)), first);
  } else {
    const __m512i index = _mm512_setr_epi32(4 * I, 4 * I, 4 * I, 4 * I, 4 * I + 1, 4 * I + 1, 4 * I + 1,
                                            4 * I + 1, 4 * I + 2, 4 * I + 2, 4 * I + 2, 4 * I + 2,
                                            4 * I + 3, 4 * I + 3, 4 * I + 3, 4 * I + 3);
    spread = _mm512_permutexvar_ps(index, _mm512_insertf32x8(first, factors[G == 16], 1));
  }
  return fma(_mm512_cvtepi32_ps(d.v), spread, sums);
}

// out[i] = code i times the scale, plus the offset, of its group of G.
template <int G, bool wide>
inline void expand(Codes c, const float* scales, const float* offsets, float* out) {
  alignas(64) uint8_t bytes[64];
  _mm512_store_si512(bytes, c.v);
  for (int i = 0; i < 4; i++) {
    const __m128i sixteen = _mm_load_si128((const __m128i*)(bytes + 16 * i));
    const __m512i n = wide && !kWideZero ? _mm512_cvtepi8_epi32(sixteen) : _mm512_cvtepu8_epi32(sixteen);
    const int g = 16 * i / G;
    store(out + 16 * i, fma(_mm512_cvtepi32_ps(n), all(scales[g]), all(offsets[g])));
  }
}

inline ivec all_sums(int32_t n) { return _mm512_set1_epi32(n); }
inline ivec load_codes(const int32_t* p) { return _mm512_load_si512(p); }
inline ivec four_of(const int8_t* x) {
  int32_t four;
  memcpy(&four, x, 4);
  return _mm512_set1_epi32(four);
}
inline vec to_float(ivec v) { return _mm512_cvtepi32_ps(v); }

// Four codes of 16 rows side by side: out[k * stride + r] has codes 4k to 4k + 3 of row r.
inline void transposed(const Codes* rows, int32_t* out, int stride) {
  __m512i a[16], b[16];
  #pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i].v, rows[i + 1].v);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i].v, rows[i + 1].v);
  }
  #pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4)
    #pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
  // b[4 q + k] has in lane l of 128 bits the codes 4 l + k of rows 4 q to 4 q + 3.
  #pragma GCC unroll 4
  for (int k = 0; k < 4; k++) {
    const __m512i x = _mm512_shuffle_i32x4(b[k], b[4 + k], 0x88), y = _mm512_shuffle_i32x4(b[k], b[4 + k], 0xdd);
    const __m512i z = _mm512_shuffle_i32x4(b[8 + k], b[12 + k], 0x88), w = _mm512_shuffle_i32x4(b[8 + k], b[12 + k], 0xdd);
    _mm512_store_si512(out + k * stride, _mm512_shuffle_i32x4(x, z, 0x88));
    _mm512_store_si512(out + (8 + k) * stride, _mm512_shuffle_i32x4(x, z, 0xdd));
    _mm512_store_si512(out + (4 + k) * stride, _mm512_shuffle_i32x4(y, w, 0x88));
    _mm512_store_si512(out + (12 + k) * stride, _mm512_shuffle_i32x4(y, w, 0xdd));
  }
}

}  // namespace
