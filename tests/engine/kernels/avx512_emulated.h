// Lets the kernels' AVX-512 code run on processors with AVX2 alone: included before the sources, it offers the
// few AVX-512 intrinsics that they use as loops over lanes (Intel 64 and IA-32 Architectures Software
// Developer's Manual, volume 2). The compiler splits arithmetic on 64-byte vectors by itself.
//
// A new intrinsic in the sources does not compile here until it is added.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

// After <immintrin.h>, which would declare the real ones otherwise.
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VNNI__ 1

#define _mm512_set1_ps emulated_set1_ps
#define _mm512_reduce_add_ps emulated_reduce_add_ps
#define _mm512_reduce_add_epi32 emulated_reduce_add_epi32
#define _mm512_dpwssd_epi32 emulated_dpwssd_epi32
#define _mm512_cvtepu8_epi32 emulated_cvtepu8_epi32
#define _mm512_cvtepi8_epi16 emulated_cvtepi8_epi16
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_castsi256_si512 emulated_castsi256_si512
#define _mm512_inserti64x4 emulated_inserti64x4

#define EMULATED static inline __attribute__((always_inline))

// A vector's lanes as an array, and back.
template <class T, class V>
struct EmulatedLanes {
  T lane[sizeof(V) / sizeof(T)];
  EmulatedLanes() {}
  EmulatedLanes(V v) { memcpy(lane, &v, sizeof v); }
  operator V() const {
    V v;
    memcpy(&v, lane, sizeof v);
    return v;
  }
};

EMULATED __m512 emulated_set1_ps(float value) {
  EmulatedLanes<float, __m512> out;
  for (int i = 0; i < 16; i++) out.lane[i] = value;
  return out;
}

// Upper half onto lower half, four times: the order in which GCC and Clang write this sequence out.
template <class T, class V>
EMULATED T emulated_reduce_add(V v) {
  EmulatedLanes<T, V> sums = v;
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) sums.lane[i] = sums.lane[i + half] + sums.lane[i];
  return sums.lane[0];
}

EMULATED float emulated_reduce_add_ps(__m512 v) { return emulated_reduce_add<float>(v); }
EMULATED int emulated_reduce_add_epi32(__m512i v) { return (int)emulated_reduce_add<uint32_t>(v); }

// VPDPWSSD: two products of signed words onto each doubleword, wrapping around.
EMULATED __m512i emulated_dpwssd_epi32(__m512i sums, __m512i a, __m512i b) {
  EmulatedLanes<uint32_t, __m512i> out = sums;
  const EmulatedLanes<int16_t, __m512i> x = a, y = b;
  for (int i = 0; i < 16; i++)
    out.lane[i] += (uint32_t)(x.lane[2 * i] * y.lane[2 * i]) + (uint32_t)(x.lane[2 * i + 1] * y.lane[2 * i + 1]);
  return out;
}

template <class From, class To, class V>
EMULATED __m512i emulated_widen(V v) {
  const EmulatedLanes<From, V> from = v;
  EmulatedLanes<To, __m512i> out;
  for (size_t i = 0; i < sizeof(V) / sizeof(From); i++) out.lane[i] = from.lane[i];
  return out;
}

EMULATED __m512i emulated_cvtepu8_epi32(__m128i v) { return emulated_widen<uint8_t, uint32_t>(v); }
EMULATED __m512i emulated_cvtepi8_epi16(__m256i v) { return emulated_widen<int8_t, int16_t>(v); }
EMULATED __m512i emulated_cvtepu16_epi32(__m256i v) { return emulated_widen<uint16_t, uint32_t>(v); }

// The upper half is undefined; here it is never what a caller could hope for.
EMULATED __m512i emulated_castsi256_si512(__m256i v) {
  EmulatedLanes<__m256i, __m512i> out;
  out.lane[0] = v;
  out.lane[1] = _mm256_set1_epi32(0x5AA5C33C);
  return out;
}

EMULATED __m512i emulated_inserti64x4(__m512i into, __m256i v, int half) {
  EmulatedLanes<__m256i, __m512i> out = into;
  out.lane[half & 1] = v;
  return out;
}
