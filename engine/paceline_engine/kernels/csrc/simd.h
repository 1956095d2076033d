// Vectors as wide as the instruction set that this translation unit is compiled for.
//
// Everything is in an anonymous namespace: the sources are compiled once for each instruction set, and the
// linker must never merge the copies.
#pragma once

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define PK_BYTES 64
#elif defined(__AVX2__)
#define PK_BYTES 32
#else
#define PK_BYTES 16
#endif

#define PK_INLINE inline __attribute__((always_inline))
#define PK_INLINE_LAMBDA __attribute__((always_inline))

namespace {

constexpr int L = PK_BYTES / 4;  // fp32 or int32 lanes
constexpr int LH = 2 * L;        // int16 lanes

typedef float vf __attribute__((vector_size(PK_BYTES)));
typedef int32_t vi __attribute__((vector_size(PK_BYTES)));
typedef uint32_t vu __attribute__((vector_size(PK_BYTES)));
typedef int16_t vh __attribute__((vector_size(PK_BYTES)));
typedef uint16_t vu16 __attribute__((vector_size(PK_BYTES / 2)));  // L lanes
typedef int16_t vi16 __attribute__((vector_size(PK_BYTES / 2)));   // L lanes
typedef uint8_t vu8 __attribute__((vector_size(PK_BYTES / 4)));    // L lanes
typedef int8_t vi8h __attribute__((vector_size(PK_BYTES / 2)));    // LH lanes

template <class V>
PK_INLINE V load(const void* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
PK_INLINE void store(void* to, V v) {
  memcpy(to, &v, sizeof v);
}

// The first n lanes from memory, zeros in the others.
template <class V, class T>
PK_INLINE V load_part(const T* from, int n) {
  V v = {};
  memcpy(&v, from, n * sizeof(T));
  return v;
}

PK_INLINE vf splat(float value) {
#if PK_BYTES == 64
  return (vf)_mm512_set1_ps(value);
#elif PK_BYTES == 32
  return (vf)_mm256_set1_ps(value);
#else
  return vf{value, value, value, value};
#endif
}

PK_INLINE float hsum(vf v) {
#if PK_BYTES == 64
  return _mm512_reduce_add_ps((__m512)v);
#elif PK_BYTES == 32
  __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

PK_INLINE int32_t hsum(vi v) {
#if PK_BYTES == 64
  return _mm512_reduce_add_epi32((__m512i)v);
#elif PK_BYTES == 32
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  s = _mm_add_epi32(s, _mm_unpackhi_epi64(s, s));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 1)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

// acc[i] + a[2i] * b[2i] + a[2i+1] * b[2i+1]
PK_INLINE vi dot2(vi acc, vh a, vh b) {
#if PK_BYTES == 64
  return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif PK_BYTES == 32
  return acc + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return acc + (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  for (int i = 0; i < L; i++) acc[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
  return acc;
#endif
}

// Widening by name, since compilers split a generic conversion in two.
PK_INLINE vu widen_u8(vu8 bytes) {
#if PK_BYTES == 64
  return (vu)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif PK_BYTES == 32
  return (vu)_mm256_cvtepu8_epi32(_mm_set_epi64x(0, (int64_t)bytes));
#else
  return __builtin_convertvector(bytes, vu);
#endif
}

PK_INLINE vh widen_i8(vi8h bytes) {
#if PK_BYTES == 64
  return (vh)_mm512_cvtepi8_epi16((__m256i)bytes);
#elif PK_BYTES == 32
  return (vh)_mm256_cvtepi8_epi16((__m128i)bytes);
#else
  return __builtin_convertvector(bytes, vh);
#endif
}

// bf16 keeps the upper half of an fp32.
PK_INLINE vf widen_bf16(vu16 bits) {
#if PK_BYTES == 64
  return (vf)((vu)_mm512_cvtepu16_epi32((__m256i)bits) << 16);
#elif PK_BYTES == 32
  return (vf)((vu)_mm256_cvtepu16_epi32((__m128i)bits) << 16);
#else
  return (vf)(__builtin_convertvector(bits, vu) << 16);
#endif
}

// To nearest, ties to even; any NaN becomes the quiet one.
PK_INLINE uint16_t narrow_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return (uint16_t)(value != value ? 0x7FC0 : rounded);
}

// e^x with a relative error of about 2e-7 (the polynomial of Cephes, Moshier 1989); NaN stays NaN.
PK_INLINE vf exp_approx(vf x) {
  const vf low = splat(-87.33654f), high = splat(88.72283f), shift = splat(12582912.0f);
  vf c = x < low ? low : x;
  c = c > high ? high : c;
  const vf n = (c * 1.44269504f + shift) - shift;
  const vf r = (c - n * 0.693359375f) + n * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // Two factors, since 2^128 alone is no fp32. Lanes with NaN take a factor of no meaning and stay NaN.
  const vi e = __builtin_convertvector(n == n ? n : vf{}, vi);
  const vi half = e >> 1;
  p = p * (vf)((half + 127) << 23) * (vf)((e - half + 127) << 23);
  p = x < low ? vf{} : p;
  return x > high ? splat(INFINITY) : p;
}

PK_INLINE float exp_approx(float x) { return exp_approx(splat(x))[0]; }

inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Scratch memory, freed with its scope; 64-byte aligned.
template <class T>
struct Scratch {
  T* data;
  explicit Scratch(int64_t n) {
    const size_t bytes = ((size_t)n * sizeof(T) + 127) / 64 * 64;
    data = (T*)aligned_alloc(64, bytes);
    if (!data) abort();
  }
  ~Scratch() { free(data); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
};

}  // namespace
