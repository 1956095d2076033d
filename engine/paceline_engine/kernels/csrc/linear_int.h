// out = x @ w.T with whole numbers: rows of x are rounded to 16 bits or a little less, so that the 32-bit
// sums of int8 weights over all of K, and of 4-bit weights over a group, are exact.
#pragma once

#include "linear_float.h"

namespace {

constexpr int GROUP = 32;  // 4-bit weights that share a scale and a minimum
constexpr int UNPACK_EACH_TIME = 6;  // rows of x up to which unpacking again costs less than storing

// One row to codes within ±limit, padded with zeros to padded_k; returns the scale (0 for a row that is all
// but zero, NaN for one that holds NaN or infinity).
inline float quantize_row(const float* x, int64_t k_size, int64_t padded_k, float limit, int16_t* codes) {
  vf peaks = {};
  vi bad = {};
  for (int64_t k = 0; k < k_size; k += L) {
    const vf v = k + L <= k_size ? load<vf>(x + k) : load_part<vf>(x + k, (int)(k_size - k));
    const vf a = (vf)((vu)v & 0x7FFFFFFFu);
    peaks = a > peaks ? a : peaks;
    bad |= ~(vi)(a <= splat(FLT_MAX));
  }
  float peak = 0;
  int any_bad = 0;
  for (int i = 0; i < L; i++) {
    peak = peaks[i] > peak ? peaks[i] : peak;
    any_bad |= bad[i];
  }
  const float scale = peak / limit;
  memset(codes, 0, padded_k * sizeof(int16_t));
  if (any_bad) return NAN;
  if (!(scale >= FLT_MIN)) return 0;
  const vf shift = splat(12582912.0f);  // rounds to whole numbers, ties to even
  for (int64_t k = 0; k < k_size; k += L) {
    const int n = (int)min_of(L, k_size - k);
    const vf v = n == L ? load<vf>(x + k) : load_part<vf>(x + k, n);
    vf r = (v / scale + shift) - shift;
    r = r > limit ? splat(limit) : r;
    r = r < -limit ? splat(-limit) : r;
    const vi16 c = __builtin_convertvector(__builtin_convertvector(r, vi), vi16);
    memcpy(codes + k, &c, n * sizeof(int16_t));
  }
  return scale;
}

struct Int8 {
  typedef int8_t T;
  static PK_INLINE vh widen(const T* p) { return widen_i8(load<vi8h>(p)); }
  static PK_INLINE vh widen_part(const T* p, int n) { return widen_i8(load_part<vi8h>(p, n)); }
};

struct Int16 {
  typedef int16_t T;
  static PK_INLINE vh widen(const T* p) { return load<vh>(p); }
  static PK_INLINE vh widen_part(const T* p, int n) { return load_part<vh>(p, n); }
};

// Rows of x are padded to whole vectors; rows of w are not. FROM_MEMORY as for dot_tile.
template <int M, class W, bool FROM_MEMORY>
PK_INLINE void dot_tile_int(const int16_t* x, int64_t stride, const typename W::T* const* w, int64_t k_size,
                            int32_t (*out)[NR]) {
  const int64_t size = sizeof(typename W::T), ahead = ahead_of(k_size * size);
  vi sums[M][NR] = {};
  int64_t k = 0;
  for (; k + LH <= k_size; k += LH) {
    vh a[M];
    for (int i = 0; i < M; i++) a[i] = load<vh>(x + i * stride + k);
    for (int j = 0; j < NR; j++) {
      if (FROM_MEMORY) fetch_ahead(w[j], k, size, ahead);
      const vh b = W::widen(w[j] + k);
      for (int i = 0; i < M; i++) sums[i][j] = dot2(sums[i][j], a[i], b);
    }
  }
  if (const int rest = (int)(k_size - k)) {
    for (int j = 0; j < NR; j++) {
      const vh b = W::widen_part(w[j] + k, rest);
      for (int i = 0; i < M; i++) sums[i][j] = dot2(sums[i][j], load<vh>(x + i * stride + k), b);
    }
  }
  for (int i = 0; i < M; i++)
    for (int j = 0; j < NR; j++) out[i][j] = hsum(sums[i][j]);
}

template <class W, bool FROM_MEMORY>
PK_INLINE void dot_rows_int(const int16_t* x, int m, int64_t stride, const typename W::T* const* w, int64_t k_size,
                            int32_t (*out)[NR]) {
  int i = 0;
  for (; i + MR <= m; i += MR) dot_tile_int<MR, W, FROM_MEMORY>(x + i * stride, stride, w, k_size, out + i);
  if (m - i == 2) dot_tile_int<2, W, FROM_MEMORY>(x + i * stride, stride, w, k_size, out + i);
  if (m - i == 1) dot_tile_int<1, W, FROM_MEMORY>(x + i * stride, stride, w, k_size, out + i);
}

// Quantize all rows of x. codes: [m_size, padded_k], scales: [m_size].
inline void quantize_rows(const float* x, int64_t m_size, int64_t k_size, int64_t padded_k, float limit,
                          int16_t* codes, float* scales, int n_threads) {
#pragma omp parallel for schedule(static) num_threads(n_threads) if (m_size * k_size > SMALL)
  for (int64_t m = 0; m < m_size; m++)
    scales[m] = quantize_row(x + m * k_size, k_size, padded_k, limit, codes + m * padded_k);
}

void linear_int8(const float* x, const int8_t* w, const float* w_scale, float* out, int64_t m_size, int64_t n_size,
                 int64_t k_size, int limit, int n_threads) {
  const int64_t padded_k = round_up(k_size, LH), ahead = ahead_of(k_size);
  const int64_t n_tiles = (n_size + NR - 1) / NR, share = share_of(n_tiles, n_threads);
  Scratch<int16_t> codes(m_size * padded_k);
  Scratch<float> scales(m_size);
  quantize_rows(x, m_size, k_size, padded_k, (float)limit, codes.data, scales.data, n_threads);
#pragma omp parallel num_threads(n_threads) if (m_size * n_size * k_size > SMALL)
  {
    Scratch<int16_t> buffer(NR * padded_k);
    int32_t dots[M_BLOCK][NR];
    for (int64_t m0 = 0; m0 < m_size; m0 += M_BLOCK) {
      const int m = (int)min_of(M_BLOCK, m_size - m0);
      const int16_t* rows = codes.data + m0 * padded_k;
#pragma omp for schedule(dynamic, share) nowait
      for (int64_t tile = 0; tile < n_tiles; tile++) {
        const int64_t n0 = tile * NR;
        const int8_t* weights[NR];
        for (int j = 0; j < NR; j++) weights[j] = w + min_of(n0 + j, n_size - 1) * k_size;
        if (m <= MR) {
          dot_rows_int<Int8, true>(rows, m, padded_k, weights, k_size, dots);
        } else {
          const int16_t* wide[NR];
          for (int j = 0; j < NR; j++) {
            wide[j] = buffer.data + j * padded_k;
            for (int64_t k = 0; k < k_size; k += LH) {
              fetch_ahead(weights[j], k, 1, ahead);
              const int n = (int)min_of(LH, k_size - k);
              store(buffer.data + j * padded_k + k,
                    n == LH ? Int8::widen(weights[j] + k) : Int8::widen_part(weights[j] + k, n));
            }
          }
          dot_rows_int<Int16, false>(rows, m, padded_k, wide, padded_k, dots);
        }
        for (int i = 0; i < m; i++)
          for (int64_t n = n0; n < min_of(n0 + NR, n_size); n++)
            out[(m0 + i) * n_size + n] = (float)dots[i][n - n0] * scales.data[m0 + i] * w_scale[n];
      }
    }
  }
}

// A group's codes in their order, as 16-bit numbers: vectors of codes 0.., one after the other.
constexpr int GROUP_VECTORS = GROUP / LH;

PK_INLINE void unpack_group(const uint8_t* packed, vh* codes) {
#if PK_BYTES == 64
  const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)packed));
  const __m256i low = _mm256_and_si256(bytes, _mm256_set1_epi16(15)), high = _mm256_srli_epi16(bytes, 4);
  codes[0] = (vh)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
#elif PK_BYTES == 32
  const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)packed));
  codes[0] = (vh)_mm256_and_si256(words, _mm256_set1_epi16(15));
  codes[1] = (vh)_mm256_srli_epi16(words, 4);
#else
  typedef uint8_t bytes_t __attribute__((vector_size(PK_BYTES / 2)));
  typedef uint16_t words_t __attribute__((vector_size(PK_BYTES)));
  for (int i = 0; i < GROUP_VECTORS / 2; i++) {
    const words_t words = __builtin_convertvector(load<bytes_t>(packed + i * LH), words_t);
    codes[i] = (vh)(words & 15);
    codes[i + GROUP_VECTORS / 2] = (vh)(words >> 4);
  }
#endif
}

struct Int4View {
  const uint8_t* codes;     // [n_size, n_groups * 16]
  const uint16_t* scale;    // bf16 [n_size, n_groups]
  const uint16_t* minimum;  // bf16 [n_size, n_groups]
  int64_t n_groups, padded_groups;  // padded to whole vectors
  int64_t codes_ahead, groups_ahead;  // in bytes, as of ahead_of
};

// One row's bf16 scales or minimums; what lies between n_groups and padded_groups is left as it is.
PK_INLINE void widen_groups(const Int4View& w, const uint16_t* from, float* to) {
  __builtin_prefetch((const char*)from + w.groups_ahead);
  int64_t g = 0;
  for (; g + L <= w.n_groups; g += L) store(to + g, Bf16::widen(from + g));
  for (; g < w.n_groups; g++) {
    const uint32_t bits = (uint32_t)from[g] << 16;
    memcpy(to + g, &bits, 4);
  }
}

// Row i of x: sum over groups of scale * (codes . x) + minimum * sum(x). group_sums: [m, padded_groups];
// scales, minimums: [NR, padded_groups], those of the tile's rows of w; zeros in the padding. A group's
// whole numbers stay below 2^24, so their conversion to fp32 is exact.
template <int M, int N, class Codes>
PK_INLINE void dot_tile_int4(const int16_t* x, const float* group_sums, const float* scales,
                             const float* minimums, const Int4View& w, Codes codes_of, float (*out)[NR]) {
  const int64_t n_groups = w.n_groups, stride = n_groups * GROUP;
  vf sums[M][N] = {};
  for (int64_t g = 0; g < n_groups; g++) {
    for (int j = 0; j < N; j++) {
      vh codes[GROUP_VECTORS];
      codes_of(j, g, codes);
      const vf scale = splat(scales[j * w.padded_groups + g]);
      for (int i = 0; i < M; i++) {
        vi dot = {};
        for (int v = 0; v < GROUP_VECTORS; v++)
          dot = dot2(dot, codes[v], load<vh>(x + i * stride + g * GROUP + v * LH));
        sums[i][j] += __builtin_convertvector(dot, vf) * scale;
      }
    }
  }
  for (int64_t g = 0; g < w.padded_groups; g += L)
    for (int j = 0; j < N; j++) {
      const vf base = load<vf>(minimums + j * w.padded_groups + g);
      for (int i = 0; i < M; i++) sums[i][j] += base * load<vf>(group_sums + i * w.padded_groups + g);
    }
  for (int i = 0; i < M; i++)
    for (int j = 0; j < N; j++) out[i][j] = hsum(sums[i][j]);
}

template <class Codes>
PK_INLINE void dot_rows_int4(const int16_t* x, int m, const float* group_sums, const float* scales,
                             const float* minimums, const Int4View& w, Codes codes_of, float (*out)[NR]) {
  const int64_t stride = w.n_groups * GROUP;
  int i = 0;
  for (; i + 2 <= m; i += 2)
    dot_tile_int4<2, NR>(x + i * stride, group_sums + i * w.padded_groups, scales, minimums, w, codes_of,
                          out + i);
  if (i < m) dot_tile_int4<1, NR>(x + i * stride, group_sums + i * w.padded_groups, scales, minimums, w, codes_of,
                          out + i);
}

void linear_int4(const float* x, const uint8_t* w_codes, const uint16_t* w_scale, const uint16_t* w_minimum,
                 float* out, int64_t m_size, int64_t n_size, int64_t k_size, int n_threads) {
  const int64_t n_groups = (k_size + GROUP - 1) / GROUP, ahead = ahead_of(n_groups * (GROUP / 2));
  const Int4View w = {w_codes, w_scale, w_minimum, n_groups, round_up(n_groups, L), ahead, ahead / 8};
  const int64_t padded_k = n_groups * GROUP;
  const int64_t n_tiles = (n_size + NR - 1) / NR, share = share_of(n_tiles, n_threads);
  Scratch<int16_t> codes(m_size * padded_k);
  Scratch<float> scales(m_size), group_sums(m_size * w.padded_groups);
  quantize_rows(x, m_size, k_size, padded_k, 32767.0f, codes.data, scales.data, n_threads);
  for (int64_t m = 0; m < m_size; m++)
    for (int64_t g = 0; g < w.padded_groups; g++) {
      int32_t sum = 0;
      for (int i = 0; i < GROUP && g < n_groups; i++) sum += codes.data[(m * n_groups + g) * GROUP + i];
      group_sums.data[m * w.padded_groups + g] = (float)sum;
    }
#pragma omp parallel num_threads(n_threads) if (m_size * n_size * k_size > SMALL)
  {
    Scratch<vh> buffer(NR * n_groups * GROUP_VECTORS);
    Scratch<float> row_scales(NR * w.padded_groups), row_minimums(NR * w.padded_groups);
    memset(row_minimums.data, 0, NR * w.padded_groups * sizeof(float));
    float dots[M_BLOCK][NR];
    for (int64_t m0 = 0; m0 < m_size; m0 += M_BLOCK) {
      const int m = (int)min_of(M_BLOCK, m_size - m0);
      const int16_t* x_rows = codes.data + m0 * padded_k;
      const float* x_sums = group_sums.data + m0 * w.padded_groups;
#pragma omp for schedule(dynamic, share) nowait
      for (int64_t tile = 0; tile < n_tiles; tile++) {
        const int64_t n0 = tile * NR;
        int64_t rows[NR];
        for (int j = 0; j < NR; j++) {
          rows[j] = min_of(n0 + j, n_size - 1);
          widen_groups(w, w.scale + rows[j] * n_groups, row_scales.data + j * w.padded_groups);
          widen_groups(w, w.minimum + rows[j] * n_groups, row_minimums.data + j * w.padded_groups);
        }
        const auto packed = [&](int j, int64_t g, vh* to) PK_INLINE_LAMBDA {
          const uint8_t* row = w.codes + rows[j] * n_groups * (GROUP / 2);
          fetch_ahead(row, g, GROUP / 2, w.codes_ahead);
          unpack_group(row + g * (GROUP / 2), to);
        };
        if (m <= UNPACK_EACH_TIME) {
          dot_rows_int4(x_rows, m, x_sums, row_scales.data, row_minimums.data, w, packed, dots);
        } else {
          vh* wide = buffer.data;
          for (int j = 0; j < NR; j++)
            for (int64_t g = 0; g < n_groups; g++) packed(j, g, wide + (j * n_groups + g) * GROUP_VECTORS);
          const auto unpacked = [&](int j, int64_t g, vh* to) PK_INLINE_LAMBDA {
            for (int v = 0; v < GROUP_VECTORS; v++) to[v] = wide[(j * n_groups + g) * GROUP_VECTORS + v];
          };
          dot_rows_int4(x_rows, m, x_sums, row_scales.data, row_minimums.data, w, unpacked, dots);
        }
        for (int i = 0; i < m; i++)
          for (int64_t n = n0; n < min_of(n0 + NR, n_size); n++)
            out[(m0 + i) * n_size + n] = dots[i][n - n0] * scales.data[m0 + i];
      }
    }
  }
}

}  // namespace
