// ggml's formats of blocks: each unpacks a unit of 256 weights into codes (unsigned numbers of up to
// eight bits) in the order of the weights, one factor and one offset for each group of 16 or 32 of them:
//   w = factor * code + offset, or w = factor * (code - zero) for the formats without offsets.
// The layouts are those of ggml-common.h of https://github.com/ggml-org/llama.cpp.
#pragma once
#include "kernels.h"

namespace {

using maxjax::Format;

inline uint32_t word_at(const uint8_t* p) {
  uint32_t word;
  memcpy(&word, p, 4);
  return word;
}

// --- formats: unit of 256 weights, in one block or in eight ---------------------------------------

// Eight blocks of 32: a float16 and 32 signed bytes.
struct Q8_0 {
  static constexpr Format kFormat = Format::q8_0;
  static constexpr int kGroup = 32, kZero = kWideZero;
  static constexpr bool kWide = true, kOffsets = false;
  template <int I>
  static Codes codes(const uint8_t* p) {
    return signed_bytes(p + 2 * I * 34 + 2, p + (2 * I + 1) * 34 + 2);
  }
  static void factors(const uint8_t* p, eight* s, eight*) { s[0] = halves8(p, 34); }
};

// Eight blocks of 32: a float16; 16 bytes, weight i low in byte i, weight 16 + i high.
struct Q4_0 {
  static constexpr Format kFormat = Format::q4_0;
  static constexpr int kGroup = 32, kZero = 8;
  static constexpr bool kWide = false, kOffsets = false;
  template <int I>
  static Codes codes(const uint8_t* p) {
    return nibbles(p + 2 * I * 18 + 2, p + (2 * I + 1) * 18 + 2);
  }
  static void factors(const uint8_t* p, eight* s, eight*) { s[0] = halves8(p, 18); }
};

// Eight blocks of 32: an exponent; 16 bytes as in Q4_0 with numbers of E2M1, doubled, and 12 more.
struct Mxfp4 {
  static constexpr Format kFormat = Format::mxfp4;
  static constexpr int kGroup = 32, kZero = 12;
  static constexpr bool kWide = false, kOffsets = false;
  template <int I>
  static Codes codes(const uint8_t* p) {
    alignas(16) static const uint8_t table[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    return looked_up(nibbles(p + 2 * I * 17 + 1, p + (2 * I + 1) * 17 + 1), table);
  }
  static void factors(const uint8_t* p, eight* s, eight*) { s[0] = powers8(p, 17); }
};

// As Q4_0 with a minimum after the scale.
struct Q4_1 {
  static constexpr Format kFormat = Format::q4_1;
  static constexpr int kGroup = 32, kZero = 0;
  static constexpr bool kWide = false, kOffsets = true;
  template <int I>
  static Codes codes(const uint8_t* p) {
    return nibbles(p + 2 * I * 20 + 4, p + (2 * I + 1) * 20 + 4);
  }
  static void factors(const uint8_t* p, eight* s, eight* o) {
    s[0] = halves8(p, 20);
    o[0] = halves8(p + 2, 20);
  }
};

// As Q4_0 with 4 bytes before the nibbles: bit j is the fifth bit of weight j.
struct Q5_0 {
  static constexpr Format kFormat = Format::q5_0;
  static constexpr int kGroup = 32, kZero = 16;
  static constexpr bool kWide = false, kOffsets = false;
  template <int I>
  static Codes codes(const uint8_t* p) {
    const uint8_t *a = p + 2 * I * 22, *b = a + 22;
    return with_fifth_bits(nibbles(a + 6, b + 6), word_at(a + 2), word_at(b + 2));
  }
  static void factors(const uint8_t* p, eight* s, eight*) { s[0] = halves8(p, 22); }
};

// As Q5_0 with a minimum after the scale.
struct Q5_1 {
  static constexpr Format kFormat = Format::q5_1;
  static constexpr int kGroup = 32, kZero = 0;
  static constexpr bool kWide = false, kOffsets = true;
  template <int I>
  static Codes codes(const uint8_t* p) {
    const uint8_t *a = p + 2 * I * 24, *b = a + 24;
    return with_fifth_bits(nibbles(a + 8, b + 8), word_at(a + 4), word_at(b + 4));
  }
  static void factors(const uint8_t* p, eight* s, eight* o) {
    s[0] = halves8(p, 24);
    o[0] = halves8(p + 2, 24);
  }
};

// The numbers that nibbles of IQ4 stand for, as codes of eight bits.
inline Codes iq4(Codes places) {
  constexpr int z = kWideZero;
  alignas(16) static const uint8_t table[16] = {
      uint8_t(z - 127), uint8_t(z - 104), uint8_t(z - 83), uint8_t(z - 65), uint8_t(z - 49), uint8_t(z - 35),
      uint8_t(z - 22),  uint8_t(z - 10),  uint8_t(z + 1),  uint8_t(z + 13), uint8_t(z + 25), uint8_t(z + 38),
      uint8_t(z + 53),  uint8_t(z + 69),  uint8_t(z + 89), uint8_t(z + 113)};
  return looked_up(places, table);
}

// As Q4_0 with places in a table.
struct Iq4_nl {
  static constexpr Format kFormat = Format::iq4_nl;
  static constexpr int kGroup = 32, kZero = kWideZero;
  static constexpr bool kWide = true, kOffsets = false;
  template <int I>
  static Codes codes(const uint8_t* p) {
    return iq4(nibbles(p + 2 * I * 18 + 2, p + (2 * I + 1) * 18 + 2));
  }
  static void factors(const uint8_t* p, eight* s, eight*) { s[0] = halves8(p, 18); }
};

// d float16; 2 bytes with the high two bits of 8 scales, 4 bytes with their low four; 8 times 16 bytes.
struct Iq4_xs {
  static constexpr Format kFormat = Format::iq4_xs;
  static constexpr int kGroup = 32, kZero = kWideZero;
  static constexpr bool kWide = true, kOffsets = false;
  template <int I>
  static Codes codes(const uint8_t* p) {
    return iq4(nibbles(p + 8 + 32 * I, p + 24 + 32 * I));
  }
  static void factors(const uint8_t* p, eight* s, eight*) {
    // Four bytes, each followed by a zero.
    const auto apart = [](uint64_t x) {
      x = (x | x << 16) & 0x0000ffff0000ffff;
      return (x | x << 8) & 0x00ff00ff00ff00ff;
    };
    const uint32_t low = word_at(p + 4), nibble = 0x0f0f0f0f;
    uint64_t high = p[2] | p[3] << 8;  // eight pairs of bits, one to each byte
    high = (high | high << 24) & 0x000000ff000000ff;
    high = (high | high << 12) & 0x000f000f000f000f;
    high = (high | high << 6) & 0x0303030303030303;
    const float d = half_at(p);
    const uint64_t steps = apart(low & nibble) | apart(low >> 4 & nibble) << 8 | high << 4;
    s[0] = fma8(of_word8(steps), all8(d), all8(-32 * d));
  }
};

// The scales and minima of Q4_K and Q5_K: d, dmin float16; 8 + 8 numbers of six bits in 12 bytes,
// see kernels/blocks.py.
inline void affine(const uint8_t* p, eight* s, eight* o) {
  const uint32_t a = word_at(p + 4), b = word_at(p + 8), c = word_at(p + 12);
  constexpr uint32_t kSix = 0x3f3f3f3f, kFour = 0x0f0f0f0f, kTop = 0x30303030;
  const uint64_t scales = uint64_t((c & kFour) | (a >> 2 & kTop)) << 32 | (a & kSix);
  const uint64_t minima = uint64_t((c >> 4 & kFour) | (b >> 2 & kTop)) << 32 | (b & kSix);
  s[0] = mul8(of_word8(scales), all8(half_at(p)));
  o[0] = mul8(of_word8(minima), all8(-half_at(p + 2)));
}

struct Q4_K {
  static constexpr Format kFormat = Format::q4_k;
  static constexpr int kGroup = 32, kZero = 0;
  static constexpr bool kWide = false, kOffsets = true;
  template <int I>
  static Codes codes(const uint8_t* p) {
    return nibbles(p + 16 + 32 * I);
  }
  static void factors(const uint8_t* p, eight* s, eight* o) { affine(p, s, o); }
};

struct Q5_K {
  static constexpr Format kFormat = Format::q5_k;
  static constexpr int kGroup = 32, kZero = 0;
  static constexpr bool kWide = false, kOffsets = true;
  template <int I>
  static Codes codes(const uint8_t* p) {
    return with_fifth_bit<2 * I>(nibbles(p + 48 + 32 * I), p + 16);
  }
  static void factors(const uint8_t* p, eight* s, eight* o) { affine(p, s, o); }
};

// 128 bytes of low nibbles, 64 bytes of high pairs, 16 scales of int8, d float16.
struct Q6_K {
  static constexpr Format kFormat = Format::q6_k;
  static constexpr int kGroup = 16, kZero = 32;
  static constexpr bool kWide = false, kOffsets = false;
  template <int I>
  static Codes codes(const uint8_t* p) {
    return six_bits<I % 2>(p + I / 2 * 64, p + 128 + I / 2 * 32);
  }
  static void factors(const uint8_t* p, eight* s, eight*) {
    const eight d = all8(half_at(p + 208));
    s[0] = mul8(of_signed_bytes8(p + 192), d);
    s[1] = mul8(of_signed_bytes8(p + 200), d);
  }
};

}  // namespace
