// The matmul with weights in ggml's blocks, written with a level's own codes and vectors.
#pragma once
#include <type_traits>

#include "formats.h"
#include "product.h"

namespace {

using maxjax::Int8;
using maxjax::PackedRows;

constexpr int64_t kUnit = 256, kGroups = kUnit / 32;

template <int N>
using Number = std::integral_constant<int, N>;

// Bytes of a unit, and of a row.
template <class F>
constexpr int64_t unit_bytes() {
  return kUnit / maxjax::kBlocks[int(F::kFormat)].elements * maxjax::kBlocks[int(F::kFormat)].bytes;
}
template <class F>
int64_t row_bytes(int64_t depth) {
  return depth / maxjax::kBlocks[int(F::kFormat)].elements * maxjax::kBlocks[int(F::kFormat)].bytes;
}

template <class F>
inline void prefetch_unit(const uint8_t* p) {
  for (int64_t line = 0; line < unit_bytes<F>(); line += 64) __builtin_prefetch(p + line, 0, 3);
}

// The rest of a row after its whole units, followed by zeros.
template <class F>
struct Rest {
  uint8_t bytes[unit_bytes<F>()];
  Rest() {}
  Rest(const uint8_t* p, int64_t depth) {
    const int64_t there = row_bytes<F>(depth);
    memcpy(bytes, p, there);
    memset(bytes + there, 0, sizeof bytes - there);
  }
};

// --- one token: int8 activations ------------------------------------------------------------------

// Sums of one row of weights: of scaled dot products, and of offsets.
struct Total {
  vec a, b;
  eight rest;
};

// One token from one of its groups of 32 on.
struct Token {
  const int8_t* codes;
  const float* scales;
  const float* sums;
  const float* half_sums;
  Token at(int64_t group) const {
    return {codes + 32 * group, scales + group, sums + group, half_sums + 2 * group};
  }
};

// Zeros, then ones: from place n on there are 8 - n zeros.
alignas(64) static const float kLast[16] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};

// Adds a unit; or, of a unit that was partly added already, its last `last` groups of 32.
template <class F, bool is_whole = true>
inline __attribute__((always_inline)) void add_unit(const uint8_t* p, const Token& x, Total& sum,
                                                    int64_t last = kGroups) {
  constexpr int kParts = 32 / F::kGroup;
  static_assert(is_whole || kParts == 1, "only units of several blocks are added in part");
  eight s[kParts], o[kParts], f[kParts];
  F::factors(p, s, o);
  const eight scales = load8(x.scales);
  if (kParts == 1) {
    f[0] = mul8(s[0], scales);
    eight sums = load8(x.sums);
    if (!is_whole) {
      f[0] = mul8(f[0], load8(kLast + last));
      sums = mul8(sums, load8(kLast + last));
    }
    sum.rest = fma8(F::kOffsets ? o[0] : s[0], sums, sum.rest);
  } else {
    f[0] = mul8(s[0], doubled_low(scales));
    f[kParts - 1] = mul8(s[kParts - 1], doubled_high(scales));
    sum.rest = fma8(s[0], load8(x.half_sums), sum.rest);
    sum.rest = fma8(s[kParts - 1], load8(x.half_sums + 8), sum.rest);
  }
  const auto chunk = [&](auto number, vec& sums) __attribute__((always_inline)) {
    constexpr int I = decltype(number)::value;
    sums = scaled<F::kGroup, I>(sums, dot<F::kWide>(F::template codes<I>(p), x.codes + 64 * I), f);
  };
  if (is_whole || last > 6) chunk(Number<0>(), sum.a);
  if (is_whole || last > 4) chunk(Number<1>(), sum.b);
  if (is_whole || last > 2) chunk(Number<2>(), sum.a);
  chunk(Number<3>(), sum.b);
}

template <class F>
inline float total(const Total& sum) {
  vec v = add(sum.a, sum.b);
  if (F::kOffsets || F::kZero) v = add(v, folded(mul8(sum.rest, all8(F::kOffsets ? 1 : -F::kZero))));
  return ::sum(v);
}

// Adds what follows the last whole unit of R rows: with the end of that unit, which counts nothing, or
// if there is none, with zeros.
template <class F, int R>
inline __attribute__((always_inline)) void add_rest(const uint8_t* p, int64_t apart, const Token& x, int64_t depth, Total* sums) {
  const int64_t groups = depth / 32;
  #pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    const uint8_t* row = p + r * apart;
    if (groups < kGroups) {
      const Rest<F> copy(row, depth);
      add_unit<F>(copy.bytes, x, sums[r]);
    } else {
      const int64_t first = groups - kGroups;
      add_unit<F, false>(row + first * unit_bytes<F>() / kGroups, x.at(first), sums[r], groups % kGroups);
    }
  }
}

// R rows of weights, `apart` bytes from each other, are read at a time.
template <class F, int R>
void rows_of_one(const uint8_t* p, int64_t apart, const Token& x, int64_t depth, float* out) {
  Total sums[R];
  #pragma GCC unroll 4
  for (int r = 0; r < R; r++) sums[r] = {zero(), zero(), zero8()};
  const int64_t units = depth / kUnit, rest = depth % kUnit / 32;
  const uint8_t* row = p;
  for (int64_t u = 0; u < units; u++, row += unit_bytes<F>()) {
    const Token here = x.at(u * kGroups);
    #pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      prefetch_unit<F>(row + r * apart + kStreamAhead);
      add_unit<F>(row + r * apart, here, sums[r]);
    }
  }
  if constexpr (F::kGroup == 32)
    if (rest) add_rest<F, R>(p, apart, x, depth, sums);
  #pragma GCC unroll 4
  for (int r = 0; r < R; r++) out[r] = total<F>(sums[r]);
}

template <class F>
void one_token(const PackedRows& rows, int64_t token) {
  const int64_t bytes = row_bytes<F>(rows.depth), at = token * rows.y_stride;
  const Int8& all = rows.x;
  const Token x = Token{all.codes, all.scales, all.sums, all.half_sums}.at(token * all.stride / 32);
  // Two distant rows at a time, as in the product of floats.
  const int64_t count = rows.end - rows.begin, pairs = count / 2, apart = count - pairs;
  for (int64_t o = rows.begin; o < rows.begin + apart; o++) {
    float sums[2];
    if (o - rows.begin < pairs) {
      rows_of_one<F, 2>(rows.w + o * bytes, apart * bytes, x, rows.depth, sums);
      put(sums + 1, 1, rows, at + o + apart);
    } else {
      rows_of_one<F, 1>(rows.w + o * bytes, 0, x, rows.depth, sums);
    }
    put(sums, 1, rows, at + o);
  }
}

// --- several tokens: int8 activations -------------------------------------------------------------

constexpr int kPanel = kPanelVectors * kLanes;  // rows
constexpr int64_t kPanelBatch = 512;            // tokens for which a unit is unpacked once

// One unit of kPanel rows: codes with four of each row side by side, and factors and offsets. For tiles
// the codes are signed, without the zero of the format.
template <class F, bool is_tiled>
struct Panel {
  static constexpr int kParts = 32 / F::kGroup, kSteps = F::kGroup / 4;
  static_assert(kParts == 1 || !F::kOffsets, "no format has offsets of half groups");
  alignas(64) int32_t codes[kUnit / 4][kPanel];
  alignas(64) float factors[kUnit / F::kGroup][kPanel];
  alignas(64) float offsets[F::kOffsets ? kGroups : 1][kPanel];

  // The first `groups` groups of 32 of the unit at p of each row.
  void unpack(const uint8_t* const* p, int64_t groups) {
    for (int r = 0; r < kPanel; r++) {
      eight s[kParts], o[kParts];
      F::factors(p[r], s, o);
      #pragma GCC unroll 2
      for (int i = 0; i < kParts; i++) {
        float of_row[8];
        store8(of_row, s[i]);
        #pragma GCC unroll 8
        for (int g = 0; g < 8; g++) factors[8 * i + g][r] = of_row[g];
        if (!F::kOffsets) continue;
        store8(of_row, o[i]);
        #pragma GCC unroll 8
        for (int g = 0; g < 8; g++) offsets[g][r] = of_row[g];
      }
    }
    // A weight that is too large for a float is infinite, even where integers cancel each other.
    if (F::kZero != 0)
      for (int g = 0; g < kUnit / F::kGroup; g++)
        for (int r = 0; r < kPanel; r++) {
          const float zero = F::kZero * factors[g][r];
          factors[g][r] += zero - zero;
        }
    chunk<0>(p);
    if (groups > 2) chunk<1>(p);
    if (groups > 4) chunk<2>(p);
    if (groups > 6) chunk<3>(p);
  }

  template <int I>
  void chunk(const uint8_t* const* p) {
    for (int v = 0; v < kPanel; v += kLanes) {
      Codes rows[kLanes];
      #pragma GCC unroll 16
      for (int r = 0; r < kLanes; r++) {
        rows[r] = F::template codes<I>(p[v + r]);
#ifdef MAXJAX_TILES
        if (is_tiled && F::kZero) rows[r] = less(rows[r], F::kZero);
#endif
      }
      transposed(rows, &codes[16 * I][v], kPanel);
    }
  }

  // Adds the integer product of part i of a group with a token to its total. `half` is the first half of
  // a group with two factors.
  static inline __attribute__((always_inline)) void weigh(int64_t i, vec number, vec factor, vec offset, float scale,
                                                          float sum, vec& half, vec& total) {
    if (kParts == 1) {
      total = fma(number, mul(factor, all(scale)), total);
      if (F::kOffsets) total = fma(offset, all(sum), total);
    } else if (i % 2 == 0) {
      half = mul(number, factor);
    } else {
      total = fma(fma(number, factor, half), all(scale), total);
    }
  }

  // Adds the products with T tokens to their totals [T][kPanel].
  //
  // The multiplications of floats take the same units of a processor as those of codes. So the zero
  // of a format is subtracted from the integers, at the start; and of a group that has two factors
  // the products are added before they are multiplied by the scale of the activations.
  template <int T>
  void add(const Int8& x, int64_t token, int64_t unit, int64_t groups, float* totals) const {
    const int64_t first = (token * x.stride + unit * kUnit) / 32, apart = x.stride / 32;
    const int8_t* at = x.codes + 32 * first;
    const float *scales = x.scales + first, *sums = x.sums + first;
    const int32_t* code_sums = x.code_sums + 2 * first;
    vec sum[T][kPanelVectors];
    #pragma GCC unroll 16
    for (int t = 0; t < T; t++)
      #pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; v++) sum[t][v] = load(totals + t * kPanel + v * kLanes);
    for (int64_t g = 0; g < groups; g++) {
      vec half[T][kPanelVectors];
      #pragma GCC unroll 2
      for (int64_t i = kParts * g; i < kParts * (g + 1); i++) {
        ivec n[T][kPanelVectors];
        #pragma GCC unroll 16
        for (int t = 0; t < T; t++) {
          const int32_t* of_x = code_sums + 2 * (t * apart + g);
          const int32_t counted = F::kZero == 0 ? 0 : kParts == 1 ? of_x[0] + of_x[1] : of_x[i % 2];
          const ivec start = all_sums(-F::kZero * counted);
          #pragma GCC unroll 4
          for (int v = 0; v < kPanelVectors; v++) n[t][v] = start;
        }
        #pragma GCC unroll 8
        for (int k = 0; k < kSteps; k++) {
          ivec c[kPanelVectors];
          #pragma GCC unroll 4
          for (int v = 0; v < kPanelVectors; v++) c[v] = load_codes(&codes[i * kSteps + k][v * kLanes]);
          #pragma GCC unroll 16
          for (int t = 0; t < T; t++) {
            const ivec four = four_of(at + t * x.stride + i * F::kGroup + 4 * k);
            #pragma GCC unroll 4
            for (int v = 0; v < kPanelVectors; v++) n[t][v] = dot4<F::kWide>(n[t][v], c[v], four);
          }
        }
        #pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; v++) {
          const vec factor = load(&factors[i][v * kLanes]);
          const vec offset = F::kOffsets ? load(&offsets[g][v * kLanes]) : zero();
          #pragma GCC unroll 16
          for (int t = 0; t < T; t++)
            weigh(i, to_float(n[t][v]), factor, offset, scales[t * apart + g], sums[t * apart + g], half[t][v], sum[t][v]);
        }
      }
    }
    #pragma GCC unroll 16
    for (int t = 0; t < T; t++)
      #pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; v++) store(totals + t * kPanel + v * kLanes, sum[t][v]);
  }

  template <int T>
  void add_up_to(int64_t tokens, const Int8& x, int64_t token, int64_t unit, int64_t groups, float* totals) const {
    if constexpr (T > 1)
      if (tokens < T) return add_up_to<T - 1>(tokens, x, token, unit, groups, totals);
    add<T>(x, token, unit, groups, totals);
  }

#ifdef MAXJAX_TILES
  // As `add`, for up to kTileSide tokens: the integers of up to eight parts of all rows and tokens come
  // first, then what is done with them, as both take about as long.
  void add_tiles(const Int8& x, int64_t token, int64_t tokens, int64_t unit, int64_t groups, float* totals) const {
    static_assert(kPanel == 2 * kTileSide, "two tiles are the rows of a panel");
    constexpr int64_t kBatch = 8;
    const int64_t first = (token * x.stride + unit * kUnit) / 32, apart = x.stride / 32;
    const int8_t* at = x.codes + 32 * first;
    alignas(64) int32_t numbers[kBatch][kTileSide][kPanel];
    for (int64_t begin = 0; begin < kParts * groups; begin += kBatch) {
      const int64_t end = begin + kBatch < kParts * groups ? begin + kBatch : kParts * groups;
      for (int64_t i = begin; i < end; i++) {
        const int8_t* part = at + i * F::kGroup;
        (i % 2 ? products_of_part<true> : products_of_part<false>)(part, x.stride, codes[i * kSteps], numbers[i - begin][0]);
      }
      for (int64_t t = 0; t < tokens; t++) {
        const float *scales = x.scales + first + t * apart, *sums = x.sums + first + t * apart;
        vec sum[kPanelVectors], half[kPanelVectors];
        for (int v = 0; v < kPanelVectors; v++) sum[v] = load(totals + t * kPanel + v * kLanes);
        for (int64_t i = begin; i < end; i++)
          #pragma GCC unroll 4
          for (int v = 0; v < kPanelVectors; v++) {
            const int64_t g = i / kParts;
            const vec offset = F::kOffsets ? load(&offsets[g][v * kLanes]) : zero();
            weigh(i, to_float(load_codes(&numbers[i - begin][t][v * kLanes])), load(&factors[i][v * kLanes]), offset,
                  scales[g], sums[g], half[v], sum[v]);
          }
        for (int v = 0; v < kPanelVectors; v++) store(totals + t * kPanel + v * kLanes, sum[v]);
      }
    }
  }
#endif
};

template <class F, bool is_tiled>
void several_tokens(const PackedRows& rows) {
#ifdef MAXJAX_TILES
  constexpr int64_t kTokens = is_tiled ? kTileSide : kPanelTokens;
#else
  constexpr int64_t kTokens = kPanelTokens;
#endif
  const int64_t bytes = row_bytes<F>(rows.depth), units = (rows.depth + kUnit - 1) / kUnit;
  Panel<F, is_tiled> panel;
  alignas(64) float totals[kPanelBatch * kPanel];
  for (int64_t o = rows.begin; o < rows.end; o += kPanel) {
    const int64_t height = rows.end - o < kPanel ? rows.end - o : kPanel;
    for (int64_t t = 0; t < rows.tokens; t += kPanelBatch) {
      const int64_t width = rows.tokens - t < kPanelBatch ? rows.tokens - t : kPanelBatch;
      memset(totals, 0, sizeof(float) * width * kPanel);
      for (int64_t u = 0; u < units; u++) {
        const int64_t left = rows.depth - u * kUnit, groups = left < kUnit ? left / 32 : kGroups;
        const uint8_t* p[kPanel];
        // A panel that is not full repeats its last row.
        for (int64_t r = 0; r < kPanel; r++)
          p[r] = rows.w + (o + (r < height ? r : height - 1)) * bytes + u * unit_bytes<F>();
        if (groups == kGroups) {
          panel.unpack(p, groups);
        } else {
          unpack_rest(panel, p, left, groups);
        }
        // The units that follow, of these rows or of the next ones, are in places that a processor
        // does not foresee: they are prefetched beside the work, a part for every tile of tokens.
        const int64_t ahead = u + 1 < units ? (u + 1) * unit_bytes<F>() : kPanel * bytes;
        const uint8_t* following = rows.w + o * bytes + ahead;
        int64_t next = 0;
#ifdef MAXJAX_TILES
        written();
#endif
        for (int64_t c = 0; c < width; c += kTokens) {
          for (const int64_t end = kPanel * (c + kTokens) / width; next < end && next < kPanel; next++)
            prefetch_unit<F>(following + next * bytes);
          float* to = totals + c * kPanel;
#ifdef MAXJAX_TILES
          if constexpr (is_tiled) {
            panel.add_tiles(rows.x, t + c, width - c < kTokens ? width - c : kTokens, u, groups, to);
            continue;
          }
#endif
          panel.template add_up_to<kPanelTokens>(width - c, rows.x, t + c, u, groups, to);
        }
      }
      for (int64_t c = 0; c < width; c++)
        put(totals + c * kPanel, height, rows, (t + c) * rows.y_stride + o);
    }
  }
}

template <class F, bool is_tiled>
__attribute__((noinline)) void unpack_rest(Panel<F, is_tiled>& panel, const uint8_t** p, int64_t depth, int64_t groups) {
  Rest<F> rest[kPanel];
  for (int r = 0; r < kPanel; r++) {
    rest[r] = Rest<F>(p[r], depth);
    p[r] = rest[r].bytes;
  }
  panel.unpack(p, groups);
}

// --- float activations ----------------------------------------------------------------------------

// The weights of a unit as floats.
template <class F>
void dequantise_unit(const uint8_t* p, float* out) {
  constexpr int kParts = 32 / F::kGroup, n = 64 / F::kGroup;
  eight s[kParts], o[kParts];
  F::factors(p, s, o);
  float scales[8 * kParts], offsets[8 * kParts];
  for (int i = 0; i < kParts; i++) {
    store8(scales + 8 * i, s[i]);
    store8(offsets + 8 * i, F::kOffsets ? o[i] : mul8(s[i], all8(-F::kZero)));
  }
  expand<F::kGroup, F::kWide>(F::template codes<0>(p), scales, offsets, out);
  expand<F::kGroup, F::kWide>(F::template codes<1>(p), scales + n, offsets + n, out + 64);
  expand<F::kGroup, F::kWide>(F::template codes<2>(p), scales + 2 * n, offsets + 2 * n, out + 128);
  expand<F::kGroup, F::kWide>(F::template codes<3>(p), scales + 3 * n, offsets + 3 * n, out + 192);
}

// `count` weights of a row as floats, from the beginning of a unit on; count is whole blocks.
template <class F>
void dequantise(const uint8_t* p, int64_t count, float* out) {
  for (; count >= kUnit; count -= kUnit, p += unit_bytes<F>(), out += kUnit) dequantise_unit<F>(p, out);
  if (count) {
    float last[kUnit];
    dequantise_unit<F>(Rest<F>(p, count).bytes, last);
    memcpy(out, last, sizeof(float) * count);
  }
}

// As `several` of product.h, with weights that are dequantised for up to 128 tokens.
template <class F>
void float_activations(const PackedRows& rows) {
  typedef Wide<float> P;
  constexpr int64_t kTokens = 128, kHeight = 64, kBlock = 1024;
  static_assert(kHeight * kBlock * sizeof(float) <= maxjax::kPackedScratch, "scratch");
  const int64_t bytes = row_bytes<F>(rows.depth);
  float* w = reinterpret_cast<float*>(rows.scratch);
  alignas(64) double totals[kTokens * kHeight];
  for (int64_t o = rows.begin; o < rows.end; o += kHeight) {
    const int64_t height = rows.end - o < kHeight ? rows.end - o : kHeight;
    for (int64_t t = 0; t < rows.tokens; t += kTokens) {
      const int64_t width = rows.tokens - t < kTokens ? rows.tokens - t : kTokens;
      memset(totals, 0, sizeof(double) * width * kHeight);
      for (int64_t k = 0; k < rows.depth; k += kBlock) {
        const int64_t depth = rows.depth - k < kBlock ? rows.depth - k : kBlock;
        for (int64_t r = 0; r < height; r++)
          dequantise<F>(rows.w + (o + r) * bytes + k / kUnit * unit_bytes<F>(), depth, w + r * kBlock);
        for (int64_t r = 0; r < height;) {
          const bool full = height - r >= kTileRows;
          for (int64_t c = 0; c < width; c += kTileTokens) {
            const int64_t n = width - c < kTileTokens ? width - c : kTileTokens;
            const float* at = rows.floats + (t + c) * rows.stride + k;
            const Tile f = full ? tile_of<P, kTileRows, kTileTokens>(n) : tile_of<P, 1, kTileTokens>(n);
            f(w + r * kBlock, kBlock, at, rows.stride, depth, totals + c * kHeight + r, kHeight);
          }
          r += full ? kTileRows : 1;
        }
      }
      for (int64_t c = 0; c < width; c++)
        put(totals + c * kHeight, height, rows, (t + c) * rows.y_stride + o);
    }
  }
}

// --- choice ---------------------------------------------------------------------------------------

// From this number of tokens on a unit's codes are transposed for all of them.
constexpr int64_t kTransposedFrom = 4;
// From this number on they are multiplied in tiles, where there are any.
constexpr int64_t kTilesFrom = 24;

template <class F>
void packed_product_of(const PackedRows& rows) {
  if (!rows.is_int8) return float_activations<F>(rows);
#ifdef MAXJAX_TILES
  if (rows.tokens >= kTilesFrom) {
    const Tiles tiles(kTileSide, F::kGroup);
    return several_tokens<F, true>(rows);
  }
#endif
  if (rows.tokens >= kTransposedFrom) return several_tokens<F, false>(rows);
  for (int64_t t = 0; t < rows.tokens; t++) one_token<F>(rows, t);
}

void packed_product(const PackedRows& rows) {
  const Exact exact;
  switch (rows.format) {
    case Format::q4_0:
      return packed_product_of<Q4_0>(rows);
    case Format::q8_0:
      return packed_product_of<Q8_0>(rows);
    case Format::q4_k:
      return packed_product_of<Q4_K>(rows);
    case Format::q5_k:
      return packed_product_of<Q5_K>(rows);
    case Format::q6_k:
      return packed_product_of<Q6_K>(rows);
    case Format::mxfp4:
      return packed_product_of<Mxfp4>(rows);
    case Format::q4_1:
      return packed_product_of<Q4_1>(rows);
    case Format::q5_0:
      return packed_product_of<Q5_0>(rows);
    case Format::q5_1:
      return packed_product_of<Q5_1>(rows);
    case Format::iq4_nl:
      return packed_product_of<Iq4_nl>(rows);
    case Format::iq4_xs:
      return packed_product_of<Iq4_xs>(rows);
  }
}

void quantise(const float* x, int64_t stride, int8_t* codes, float* scales, float* sums, float* half_sums,
              int32_t* code_sums) {
  const Exact exact;
  for (int64_t g = 0; g < stride / 32; g++) {
    const float scale = quantise32(x + 32 * g, codes + 32 * g);
    int32_t* sum = code_sums + 2 * g;
    scales[g] = scale;
    for (int i = 0; i < 2; i++) {
      int all = 0;
      for (int j = 0; j < 16; j++) all += codes[32 * g + 16 * i + j];
      sum[i] = all;
      half_sums[2 * g + i] = scale * float(all);
    }
    sums[g] = scale * float(sum[0] + sum[1]);
  }
}

}  // namespace
