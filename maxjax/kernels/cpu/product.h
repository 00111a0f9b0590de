// The matmul: rows of weights times rows of activations, written with a level's own vectors.
#pragma once
#include "kernels.h"

namespace {

using maxjax::Activations;
using maxjax::Attend;
using maxjax::Combined;
using maxjax::Rows;

// Weights of type T, widened to float, times floats in the order of load2<T>.
template <class T>
struct Wide {
  typedef T W;
  typedef float X;
  static constexpr int64_t kStep = 2 * kLanes;
  vec a, b;
  inline void load(const T* w) { load2(w, a, b); }
  inline vec accumulate(const float* x, vec acc) const {
    return fma(b, ::load(x + kLanes), fma(a, ::load(x), acc));
  }
};

#ifdef MAXJAX_PAIRS
// bfloat16 times bfloat16: two products and their sum in one instruction. It treats numbers below
// 2^-126 as zeros, as XLA does.
struct Pairs {
  typedef bf16 W;
  typedef bf16 X;
  static constexpr int64_t kStep = 2 * kLanes;
  __m512bh w;
  inline void load(const bf16* p) { w = (__m512bh)_mm512_loadu_si512(p); }
  inline vec accumulate(const bf16* x, vec acc) const {
    return _mm512_dpbf16_ps(acc, w, (__m512bh)_mm512_loadu_si512(x));
  }
};
#endif

// What a tile prefetches while it works: nothing, the next R rows of weights, or the bytes that
// follow in each of its rows, which are read as streams.
enum class Ahead { none, rows, stream };

// Prefetch distance in a stream, in bytes. The processor's own prefetching stops at the end of
// every page, and a row of a small model is shorter than a page.
constexpr int64_t kStreamAhead = 2048;

// out[c][r] += sum over k of w[r][k] x[c][k], for R rows of weights and C of activations.
//
// A sum is kept in one vector, or in several vectors if there are few sums: an addition takes about
// four times as long as it takes until the next one can start. After kRun elements it is added to
// `total` and starts again, as adding a number to a large sum loses more of its bits. Tiles with the
// same kSums add in the same order.
template <class P, int R, int C, Ahead ahead = Ahead::none, class Out = double, int kSums = R * C>
void tile(const void* w_, int64_t w_stride, const void* x_, int64_t x_stride, int64_t depth,
          Out* out, int64_t out_stride) {
  typedef typename P::W W;
  const W* w = static_cast<const W*>(w_);
  const typename P::X* x = static_cast<const typename P::X*>(x_);
  constexpr int kSplit = kSums == 1 ? 4 : kSums < 4 ? 2 : 1;
  constexpr int64_t kStride = kSplit * P::kStep, kRun = (kSplit > 1 ? 8 : kInARow) * kStride;
  vec acc[kSplit][C * R], total[C * R];
  #pragma GCC unroll 64
  for (int i = 0; i < C * R; i++) total[i] = zero();
  const auto start = [&]() __attribute__((always_inline)) {
    #pragma GCC unroll 64
    for (int s = 0; s < kSplit; s++)
      #pragma GCC unroll 64
      for (int i = 0; i < C * R; i++) acc[s][i] = zero();
  };
  const auto stop = [&]() __attribute__((always_inline)) {
    #pragma GCC unroll 64
    for (int s = 1; s < kSplit; s++)
      #pragma GCC unroll 64
      for (int i = 0; i < C * R; i++) acc[0][i] = add(acc[0][i], acc[s][i]);
    #pragma GCC unroll 64
    for (int i = 0; i < C * R; i++) total[i] = add(total[i], acc[0][i]);
  };
  const auto step = [&](int64_t k, vec* sums) __attribute__((always_inline)) {
    P p[R];
    #pragma GCC unroll 64
    for (int r = 0; r < R; r++) {
      p[r].load(w + r * w_stride + k);
      if (ahead != Ahead::none) {
        const W* next = w + r * w_stride + k;
        next += ahead == Ahead::rows ? R * w_stride : kStreamAhead / int64_t(sizeof(W));
        for (size_t line = 0; line < sizeof(W) * P::kStep; line += 64)
          __builtin_prefetch((const char*)next + line, 0, ahead == Ahead::rows ? 2 : 3);
      }
    }
    #pragma GCC unroll 64
    for (int c = 0; c < C; c++)
      #pragma GCC unroll 64
      for (int r = 0; r < R; r++)
        sums[c * R + r] = p[r].accumulate(x + c * x_stride + k, sums[c * R + r]);
  };
  const int64_t whole = depth / kStride * kStride;
  int64_t k = 0;
  while (k < whole) {
    start();
    for (const int64_t end = whole - k < kRun ? whole : k + kRun; k < end; k += kStride)
      #pragma GCC unroll 64
      for (int s = 0; s < kSplit; s++) step(k + s * P::kStep, acc[s]);
    stop();
  }
  if (k < depth) {
    start();
    for (; k + P::kStep <= depth; k += P::kStep) step(k, acc[0]);
    if (k < depth) {  // the activations are padded with zeros
      W rest[R][P::kStep] = {};
      #pragma GCC unroll 64
      for (int r = 0; r < R; r++)
        for (int64_t i = 0; i < depth - k; i++) rest[r][i] = w[r * w_stride + k + i];
      P p[R];
      #pragma GCC unroll 64
      for (int r = 0; r < R; r++) p[r].load(rest[r]);
      #pragma GCC unroll 64
      for (int c = 0; c < C; c++)
        #pragma GCC unroll 64
        for (int r = 0; r < R; r++)
          acc[0][c * R + r] = p[r].accumulate(x + c * x_stride + k, acc[0][c * R + r]);
    }
    stop();
  }
  float totals[C * R];
  sums<C * R>(total, totals);
  #pragma GCC unroll 64
  for (int c = 0; c < C; c++)
    #pragma GCC unroll 64
    for (int r = 0; r < R; r++) out[c * out_stride + r] += totals[c * R + r];
}

typedef void (*Tile)(const void*, int64_t, const void*, int64_t, int64_t, double*, int64_t);

// The tile function of R rows of weights and `tokens` rows of activations, at most C. The last tokens,
// of which there may be fewer, get the same bits as the others: an answer must not depend on its place.
template <class P, int R, int C, Ahead ahead = Ahead::none>
inline Tile tile_of(int64_t tokens) {
  if constexpr (C > 1)
    if (tokens < C) return tile_of<P, R, C - 1, ahead>(tokens);
  return tile<P, R, C, ahead, double, R * kTileTokens>;
}

// Number of products that are summed in float; longer sums add up such sums in double.
constexpr int64_t kDepth = 64 * kLanes;

// y of one token: every row of weights is read once, from its beginning to its end, at the speed
// of the memory. Two distant rows are read at a time, as processors prefetch two long streams best.
template <class P>
void one(const Rows& rows) {
  typedef typename P::W W;
  const int64_t block = 4 * kDepth;
  const typename P::X* x = static_cast<const typename P::X*>(rows.x.data);
  const int64_t count = rows.end - rows.begin, pairs = count / 2, apart = count - pairs;
  for (int64_t o = rows.begin; o < rows.begin + apart; o++) {
    const W* w = static_cast<const W*>(rows.w) + o * rows.depth;
    const bool both = o - rows.begin < pairs;
    double totals[2] = {};
    for (int64_t k = 0; k < rows.depth; k += block) {
      const int64_t depth = rows.depth - k < block ? rows.depth - k : block;
      (both ? tile<P, 2, 1, Ahead::stream, double> : tile<P, 1, 1, Ahead::none, double>)(
          w + k, apart * rows.depth, x + k, 0, depth, totals, 1);
    }
    put(totals, 1, rows, o);
    if (both) put(totals + 1, 1, rows, o + apart);
  }
}

// y of several tokens, block by block: activations that are used again are still in the nearest
// cache, and the next rows of weights are prefetched.
template <class P>
void several(const Rows& rows) {
  typedef typename P::W W;
  constexpr int64_t kTokens = 128, kHeight = 64, kNearest = 1 << 14;
  int64_t block = kDepth;
  if (rows.tokens <= maxjax::kFew)
    while (block > 512 && rows.tokens * block * int64_t(sizeof(typename P::X)) > kNearest) block /= 2;
  const char* x = static_cast<const char*>(rows.x.data);
  alignas(64) double totals[kTokens * kHeight];
  for (int64_t o = rows.begin; o < rows.end; o += kHeight) {
    const int64_t height = rows.end - o < kHeight ? rows.end - o : kHeight;
    for (int64_t t = 0; t < rows.tokens; t += kTokens) {
      const int64_t width = rows.tokens - t < kTokens ? rows.tokens - t : kTokens;
      memset(totals, 0, sizeof(double) * width * kHeight);
      for (int64_t k = 0; k < rows.depth; k += block) {
        const int64_t depth = rows.depth - k < block ? rows.depth - k : block;
        for (int64_t r = 0; r < height;) {
          const bool full = height - r >= kTileRows;
          const W* w = static_cast<const W*>(rows.w) + (o + r) * rows.depth + k;
          for (int64_t c = 0; c < width; c += kTileTokens) {
            const int64_t n = width - c < kTileTokens ? width - c : kTileTokens;
            const void* at = x + ((t + c) * rows.x.stride + k) * sizeof(typename P::X);
            const Tile f = !full  ? tile_of<P, 1, kTileTokens>(n)
                           : c == 0 ? tile_of<P, kTileRows, kTileTokens, Ahead::rows>(n)
                                    : tile_of<P, kTileRows, kTileTokens>(n);
            f(w, rows.depth, at, rows.x.stride, depth, totals + c * kHeight + r, kHeight);
          }
          r += full ? kTileRows : 1;
        }
      }
      for (int64_t c = 0; c < width; c++)
        put(totals + c * kHeight, height, rows, (t + c) * rows.y_stride + o);
    }
  }
}

template <class P>
void one_or_several(const Rows& rows) {
  rows.tokens == 1 ? one<P>(rows) : several<P>(rows);
}

#ifdef MAXJAX_TILES
void many(const Rows& rows);
#endif

void product(const Rows& rows) {
  const Exact exact;
#ifdef MAXJAX_TILES
  if (rows.x.tiled) return many(rows);
#endif
#ifdef MAXJAX_PAIRS
  if (rows.x.narrow) return one_or_several<Pairs>(rows);
#endif
  switch (rows.w_type) {
    case Type::f32:
      return one_or_several<Wide<float>>(rows);
    case Type::f16:
      return one_or_several<Wide<f16>>(rows);
    case Type::bf16:
      return one_or_several<Wide<bf16>>(rows);
  }
}

}  // namespace
