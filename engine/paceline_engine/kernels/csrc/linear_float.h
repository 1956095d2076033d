// out = x @ w.T with fp32 sums, for weights that are widened to fp32 on the way in.
//
// Every output is one dot product with one vector of partial sums that runs over K in order. Tiles only
// choose how many such products share their loads, so a row's result is the same bits for every M.
#pragma once

#include "simd.h"

namespace {

constexpr int MR = 3, NR = 4;      // rows of x and of w in a tile: 12 sums in 16 registers
constexpr int MR_WIDE = 6;         // rows of x in a tile with half as many rows of w
constexpr int64_t AHEAD = 4096;    // bytes that are asked from memory before they are needed, at least
constexpr int64_t LINE = 64;
constexpr int M_BLOCK = 48;        // rows of x that stay in the second-level cache
constexpr int64_t SMALL = 1 << 15; // products below which a second thread costs more than it gives

// Tiles that a thread takes at a time: few enough that a thread whose core is busy elsewhere is not waited
// for long, and enough that each runs through its own stretch of memory.
PK_INLINE int64_t share_of(int64_t n_tiles, int n_threads) { return max_of(4, n_tiles / (16 * n_threads)); }

// From a byte of a tile's rows to the one that is read as many tiles later as lie AHEAD: a row by itself is
// too short for the processor to see where the next reads will be.
PK_INLINE int64_t ahead_of(int64_t row_bytes) {
  return round_up(AHEAD, max_of(1, NR * row_bytes));
}

// Once for each line of memory that a loop over elements of size `size` at p + k comes to.
PK_INLINE void fetch_ahead(const void* p, int64_t k, int64_t size, int64_t ahead) {
  if (k * size % LINE == 0) __builtin_prefetch((const char*)p + k * size + ahead);
}

struct F32 {
  typedef float T;
  static PK_INLINE vf widen(const T* p) { return load<vf>(p); }
  static PK_INLINE vf widen_part(const T* p, int n) { return load_part<vf>(p, n); }
};

struct Bf16 {
  typedef uint16_t T;
  static PK_INLINE vf widen(const T* p) { return widen_bf16(load<vu16>(p)); }
  static PK_INLINE vf widen_part(const T* p, int n) { return widen_bf16(load_part<vu16>(p, n)); }
};

// e4m3fn: exponent bias 7, no infinity, NaN where all seven low bits are set.
struct Fp8 {
  typedef uint8_t T;
  static PK_INLINE vf decode(vu8 codes) {
    const vu c = widen_u8(codes);
    const vu magnitude = c & 0x7F;
    // A subnormal m / 8 * 2^-6 is made as (1 + m / 8) * 2^-6 - 2^-6: no fp32 subnormal on the way, which
    // would be slow, and wrong where the caller flushes them to zero.
    const vu subnormal = (vu)(magnitude < 8);
    const vu bits = (magnitude << 20) + (120u << 23) + (subnormal & (1u << 23));
    const vf value = (vf)bits - (vf)(subnormal & 0x3C800000u);
    const vu nan = (vu)(magnitude == 0x7F) & 0x7FC00000u;
    return (vf)((vu)value | nan | ((c & 0x80) << 24));
  }
  static PK_INLINE vf widen(const T* p) { return decode(load<vu8>(p)); }
  static PK_INLINE vf widen_part(const T* p, int n) { return decode(load_part<vu8>(p, n)); }
};

// FROM_MEMORY: w is read for the first time, so what comes after it is asked for in time.
template <int M, int N, class W, bool FROM_MEMORY>
PK_INLINE void dot_tile(const float* const* x, const typename W::T* const* w, int64_t k_size, float (*out)[NR]) {
  const int64_t size = sizeof(typename W::T), ahead = ahead_of(k_size * size);
  vf sums[M][N] = {};
  int64_t k = 0;
  for (; k + L <= k_size; k += L) {
    vf b[N];
    for (int j = 0; j < N; j++) {
      if (FROM_MEMORY) fetch_ahead(w[j], k, size, ahead);
      b[j] = W::widen(w[j] + k);
    }
    for (int i = 0; i < M; i++) {
      const vf a = load<vf>(x[i] + k);
      for (int j = 0; j < N; j++) sums[i][j] += a * b[j];
    }
  }
  if (const int rest = (int)(k_size - k)) {
    for (int j = 0; j < N; j++) {
      const vf b = W::widen_part(w[j] + k, rest);
      for (int i = 0; i < M; i++) sums[i][j] += load_part<vf>(x[i] + k, rest) * b;
    }
  }
  for (int i = 0; i < M; i++)
    for (int j = 0; j < N; j++) out[i][j] = hsum(sums[i][j]);
}

template <class W>
PK_INLINE void widen_row(const typename W::T* from, int64_t n, float* to) {
  const int64_t size = sizeof(typename W::T), ahead = ahead_of(n * size);
  int64_t k = 0;
  for (; k + L <= n; k += L) {
    fetch_ahead(from, k, size, ahead);
    store(to + k, W::widen(from + k));
  }
  if (k < n) {
    const vf rest = W::widen_part(from + k, (int)(n - k));
    memcpy(to + k, &rest, (n - k) * sizeof(float));
  }
}

// out[i][j] = x[i] . w[j] for m rows of x and NR rows of w.
template <class W, bool FROM_MEMORY>
PK_INLINE void dot_rows(const float* const* x, int m, const typename W::T* const* w, int64_t k_size, float (*out)[NR]) {
  int i = 0;
  for (; i + MR <= m; i += MR) dot_tile<MR, NR, W, FROM_MEMORY>(x + i, w, k_size, out + i);
  if (m - i == 2) dot_tile<2, NR, W, FROM_MEMORY>(x + i, w, k_size, out + i);
  if (m - i == 1) dot_tile<1, NR, W, FROM_MEMORY>(x + i, w, k_size, out + i);
}

// The same for M rows of x, between MR and MR_WIDE: each row of w is widened once, and never stored.
template <int M, class W>
PK_INLINE void dot_wide(const float* const* x, const typename W::T* const* w, int64_t k_size, float (*out)[NR]) {
  for (int j = 0; j < NR; j += 2) {
    float part[M][NR];
    dot_tile<M, 2, W, true>(x, w + j, k_size, part);
    for (int i = 0; i < M; i++) memcpy(out[i] + j, part[i], 2 * sizeof(float));
  }
}

// As dot_rows, with the rows of w widened once where several tiles share them. buffer: [NR * k_size].
template <class W>
PK_INLINE void dot_block(const float* const* x, int m, const typename W::T* const* w, int64_t k_size, float* buffer,
                         float (*out)[NR]) {
  switch (m) {
    case 4: return dot_wide<4, W>(x, w, k_size, out);
    case 5: return dot_wide<5, W>(x, w, k_size, out);
    case MR_WIDE: return dot_wide<MR_WIDE, W>(x, w, k_size, out);
  }
  if (m <= MR) return dot_rows<W, true>(x, m, w, k_size, out);
  const float* wide[NR];
  for (int j = 0; j < NR; j++) {
    widen_row<W>(w[j], k_size, buffer + j * k_size);
    wide[j] = buffer + j * k_size;
  }
  dot_rows<F32, false>(x, m, wide, k_size, out);
}

// x: [m_size, k_size], w: [n_size, k_size], out: [m_size, n_size]; scale: [n_size] or null.
template <class W>
void linear_float(const float* x, const typename W::T* w, const float* scale, float* out, int64_t m_size,
                  int64_t n_size, int64_t k_size, int n_threads) {
  const int64_t n_tiles = (n_size + NR - 1) / NR, share = share_of(n_tiles, n_threads);
#pragma omp parallel num_threads(n_threads) if (m_size * n_size * k_size > SMALL)
  {
    Scratch<float> buffer(NR * k_size);
    const float* rows[M_BLOCK];
    float dots[M_BLOCK][NR];
    for (int64_t m0 = 0; m0 < m_size; m0 += M_BLOCK) {
      const int m = (int)min_of(M_BLOCK, m_size - m0);
      for (int i = 0; i < m; i++) rows[i] = x + (m0 + i) * k_size;
#pragma omp for schedule(dynamic, share) nowait
      for (int64_t tile = 0; tile < n_tiles; tile++) {
        const int64_t n0 = tile * NR;
        const typename W::T* weights[NR];
        for (int j = 0; j < NR; j++) weights[j] = w + min_of(n0 + j, n_size - 1) * k_size;
        dot_block<W>(rows, m, weights, k_size, buffer.data, dots);
        for (int i = 0; i < m; i++)
          for (int64_t n = n0; n < min_of(n0 + NR, n_size); n++)
            out[(m0 + i) * n_size + n] = dots[i][n - n0] * (scale ? scale[n] : 1.0f);
      }
    }
  }
}

}  // namespace
