// Products of tiles, AMX: up to 16 rows of 64 bytes, multiplied with the columns of another tile
// (https://www.intel.com/content/www/us/en/docs/intrinsics-guide, AMX).
#pragma once
#include "product.h"

namespace {

constexpr int64_t kTileSide = maxjax::kTokensOfTile, kTileStep = 32, kTileBytes = 1024;

// The shapes of the eight tiles of this thread, which are given back at the end of the scope. Tiles 0
// to 3 are sums, 4 and 5 left operands of `rows` rows of `width` bytes, 6 and 7 right ones.
class Tiles {
 public:
  Tiles(int rows, int width) { set(rows, width); }
  ~Tiles() { _tile_release(); }
  void set(int rows, int width) {
    struct {
      uint8_t palette, start_row, reserved[14];
      uint16_t bytes[16];
      uint8_t rows[16];
    } shapes = {};
    shapes.palette = 1;
    for (int i = 0; i < 8; i++) {
      shapes.bytes[i] = uint16_t(i == 4 || i == 5 ? width : 64);
      shapes.rows[i] = uint8_t(i < 6 ? rows : width / 4);
    }
    _tile_loadconfig(&shapes);
  }
};

// What a tile is loaded from has been written: GCC does not see that the loads read memory.
inline void written() { asm volatile("" ::: "memory"); }

// Codes as signed numbers, less the zero of their format.
inline Codes less(Codes c, int zero) { return {_mm512_sub_epi8(c.v, all_bytes(zero))}; }

// The integer products of the codes of 16 tokens, `stride` bytes apart, with those of 32 rows of weights, of
// which four each lie side by side. Calls for odd and even parts use different tiles, so that one can begin
// before the other has ended.
template <bool is_odd>
inline __attribute__((always_inline)) void products_of_part(const int8_t* x, int64_t stride, const int32_t* codes, int32_t* out) {
  constexpr int64_t kRow = 4 * 2 * kTileSide;  // bytes
  // GCC's intrinsics take numbers of tiles that are written as such.
  if constexpr (is_odd) {
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(5, x, stride);
    _tile_loadd(6, codes, kRow);
    _tile_dpbssd(2, 5, 6);
    _tile_loadd(7, codes + kTileSide, kRow);
    _tile_dpbssd(3, 5, 7);
    _tile_stored(2, out, kRow);
    _tile_stored(3, out + kTileSide, kRow);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(4, x, stride);
    _tile_loadd(6, codes, kRow);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, codes + kTileSide, kRow);
    _tile_dpbssd(1, 4, 7);
    _tile_stored(0, out, kRow);
    _tile_stored(1, out + kTileSide, kRow);
  }
}

// Activations of up to 16 tokens, bf16 [tokens, depth], as the right operands of products: for every 32
// of a token's numbers a tile of 16 rows, each a pair of numbers of the 16 tokens, padded with zeros.
void tile_rows(const void* x_, int64_t tokens, int64_t depth, void* out_) {
  const char* x = static_cast<const char*>(x_);
  int32_t* out = static_cast<int32_t*>(out_);
  for (int64_t k = 0; k < depth; k += kTileStep, out += kTileBytes / 4) {
    const __mmask32 there = depth - k < kTileStep ? (__mmask32(1) << (depth - k)) - 1 : ~__mmask32(0);
    Codes rows[kTileSide];
    #pragma GCC unroll 16
    for (int t = 0; t < kTileSide; t++)
      rows[t].v = _mm512_maskz_loadu_epi16(t < tokens ? there : 0, x + 2 * (t * depth + k));
    transposed(rows, out, kTileSide);
  }
}

// The most numbers whose products are summed in float: each step adds the sum of 32 products. Longer
// products add up such sums in double.
constexpr int64_t kTileDepth = 4096;

// The sums of 16 rows of weights and 16 tokens.
struct Sums {
  alignas(64) float now[kTileSide][kTileSide];  // [rows, tokens]
  double before[kTileSide][kTileSide];
};

inline void add_before(Sums& sums, bool is_first) {
  for (int r = 0; r < kTileSide; r++)
    for (int t = 0; t < kTileSide; t++)
      sums.before[r][t] = is_first ? double(sums.now[r][t]) : sums.before[r][t] + double(sums.now[r][t]);
}

// Writes the results of `height` rows from o on and `tokens` tokens from t on.
inline void put_tile(Sums& sums, bool has_before, int64_t height, int64_t tokens, const Rows& rows, int64_t o, int64_t t) {
  if (has_before)
    for (int r = 0; r < kTileSide; r++)
      for (int c = 0; c < kTileSide; c++) sums.now[r][c] = float(sums.before[r][c] + double(sums.now[r][c]));
  alignas(64) int32_t turned[kTileSide][kTileSide];
  Codes of_rows[kTileSide];
  #pragma GCC unroll 16
  for (int r = 0; r < kTileSide; r++) of_rows[r].v = _mm512_load_si512(sums.now[r]);
  transposed(of_rows, turned[0], kTileSide);
  const __mmask16 there = __mmask16((1u << height) - 1);
  for (int64_t c = 0; c < tokens; c++) {
    const int64_t at = (t + c) * rows.y_stride + o;
    const __m512 y = _mm512_castsi512_ps(_mm512_load_si512(turned[c]));
    if (rows.y_type == Type::bf16) {
      _mm256_mask_storeu_epi16(static_cast<bf16*>(rows.y) + at, there, (__m256i)_mm512_cvtneps_pbh(y));
    } else if (rows.y_type == Type::f32) {
      _mm512_mask_storeu_ps(static_cast<float*>(rows.y) + at, there, y);
    } else {
      const __m256i half = _mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      _mm256_mask_storeu_epi16(static_cast<f16*>(rows.y) + at, there, half);
    }
  }
}

// Adds the products of 32 numbers of R times 16 rows of weights at w and C times 16 tokens at x.
template <int R, int C>
inline __attribute__((always_inline)) void step_of_tiles(const char* w, int64_t w_stride, const char* x, int64_t x_stride) {
  _tile_loadd(4, w, w_stride);
  _tile_loadd(6, x, 64);
  _tile_dpbf16ps(0, 4, 6);
  if (C > 1) {
    _tile_loadd(7, x + x_stride, 64);
    _tile_dpbf16ps(1, 4, 7);
  }
  if (R > 1) {
    _tile_loadd(5, w + kTileSide * w_stride, w_stride);
    _tile_dpbf16ps(2, 5, 6);
    if (C > 1) _tile_dpbf16ps(3, 5, 7);
  }
}

// The products of R times 16 rows of weights at w and C times 16 tokens at x, for `steps` steps of 32
// numbers, in tiles.
template <int R, int C>
inline void run_of_tiles(const char* w, int64_t w_stride, const char* x, int64_t x_stride, int64_t steps, bool is_ahead) {
  _tile_zero(0);
  if (C > 1) _tile_zero(1);
  if (R > 1) _tile_zero(2);
  if (R > 1 && C > 1) _tile_zero(3);
  for (int64_t s = 0; s < steps; s++, w += 2 * kTileStep, x += kTileBytes) {
    if (is_ahead)
      for (int r = 0; r < R * kTileSide; r++) __builtin_prefetch(w + r * w_stride + 512, 0, 2);
    step_of_tiles<R, C>(w, w_stride, x, x_stride);
  }
}

// The last step of a product whose depth is no multiple of 32, with zeros after it.
template <int R, int C>
inline void rest_of_tiles(const char* w, int64_t w_stride, int64_t height, int64_t left, const char* x, int64_t x_stride) {
  alignas(64) char padded[2 * kTileBytes] = {};
  for (int64_t r = 0; r < height; r++) memcpy(padded + r * 64, w + r * w_stride, 2 * left);
  written();
  step_of_tiles<R, C>(padded, 64, x, x_stride);
}

template <int R, int C>
void product_of_tiles(const Rows& rows, int64_t o, int64_t t, bool is_ahead) {
  constexpr int64_t kRun = kTileDepth / kTileStep;
  const int64_t height = rows.end - o < R * kTileSide ? rows.end - o : R * kTileSide;
  const int64_t w_stride = 2 * rows.depth, x_stride = kTileSide * 2 * rows.x.stride;
  const char* w = static_cast<const char*>(rows.w) + o * w_stride;
  const char* x = static_cast<const char*>(rows.x.data) + t / kTileSide * x_stride;
  const int64_t whole = rows.depth / kTileStep, left = rows.depth % kTileStep;
  Sums sums[R][C];
  for (int64_t s = 0; s < whole || s == 0; s += kRun) {
    const int64_t steps = whole - s < kRun ? whole - s : kRun;
    run_of_tiles<R, C>(w + s * 2 * kTileStep, w_stride, x + s * kTileBytes, x_stride, steps, is_ahead);
    const bool is_last = s + kRun >= whole;
    if (is_last && left)
      rest_of_tiles<R, C>(w + whole * 2 * kTileStep, w_stride, height, left, x + whole * kTileBytes, x_stride);
    _tile_stored(0, sums[0][0].now, 64);
    if (C > 1) _tile_stored(1, sums[0][C - 1].now, 64);
    if (R > 1) _tile_stored(2, sums[R - 1][0].now, 64);
    if (R > 1 && C > 1) _tile_stored(3, sums[R - 1][C - 1].now, 64);
    if (!is_last)
      for (int i = 0; i < R * C; i++) add_before(sums[i / C][i % C], s == 0);
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) {
      const int64_t there = height - r * kTileSide, tokens = rows.tokens - t - c * kTileSide;
      put_tile(sums[r][c], whole > kRun, there < kTileSide ? there : kTileSide,
               tokens < kTileSide ? tokens : kTileSide, rows, o + r * kTileSide, t + c * kTileSide);
    }
}

// y of many tokens, whose activations are in tiles: those of 32 stay in the cache for all rows.
void many(const Rows& rows) {
  Tiles tiles(kTileSide, 64);
  for (int64_t t = 0; t < rows.tokens; t += 2 * kTileSide) {
    const bool is_wide = rows.tokens - t > kTileSide;
    for (int64_t o = rows.begin; o < rows.end;) {
      const int64_t height = rows.end - o;
      if (height >= 2 * kTileSide) {
        (is_wide ? product_of_tiles<2, 2> : product_of_tiles<2, 1>)(rows, o, t, t == 0);
        o += 2 * kTileSide;
        continue;
      }
      const int64_t there = height < kTileSide ? height : kTileSide;
      if (there < kTileSide) tiles.set(int(there), 64);
      (is_wide ? product_of_tiles<1, 2> : product_of_tiles<1, 1>)(rows, o, t, t == 0);
      if (there < kTileSide) tiles.set(kTileSide, 64);
      o += there;
    }
  }
}

}  // namespace
