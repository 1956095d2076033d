// The kernels of one instruction set, as plain C functions. The build compiles this file once for each set
// with PK_SET naming it.

#include "attention.h"
#include "fused.h"
#include "linear_int.h"

#define PK_JOIN2(a, b, c) a##b##_##c
#define PK_JOIN(a, b, c) PK_JOIN2(a, b, c)
#define PK_EXPORT(name) extern "C" __attribute__((visibility("default"))) int PK_JOIN(pk_, PK_SET, name)

PK_EXPORT(linear_fp32)
(const float* x, const float* w, float* out, int64_t m, int64_t n, int64_t k, int threads) {
  linear_float<F32>(x, w, nullptr, out, m, n, k, threads);
  return 0;
}

PK_EXPORT(linear_bf16)
(const float* x, const uint16_t* w, float* out, int64_t m, int64_t n, int64_t k, int threads) {
  linear_float<Bf16>(x, w, nullptr, out, m, n, k, threads);
  return 0;
}

PK_EXPORT(linear_fp8)
(const float* x, const uint8_t* w, const float* scale, float* out, int64_t m, int64_t n, int64_t k, int threads) {
  linear_float<Fp8>(x, w, scale, out, m, n, k, threads);
  return 0;
}

PK_EXPORT(linear_int8)
(const float* x, const int8_t* w, const float* scale, float* out, int64_t m, int64_t n, int64_t k, int limit,
 int threads) {
  linear_int8(x, w, scale, out, m, n, k, limit, threads);
  return 0;
}

PK_EXPORT(linear_int4)
(const float* x, const uint8_t* w, const uint16_t* scale, const uint16_t* minimum, float* out, int64_t m,
 int64_t n, int64_t k, int threads) {
  linear_int4(x, w, scale, minimum, out, m, n, k, threads);
  return 0;
}

PK_EXPORT(attention)
(const float* q, const void* k, const void* v, const int32_t* starts, const int32_t* positions,
 const int32_t* tables, float* out, int64_t n_sequences, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim,
 int64_t n_blocks, int64_t block_size, int64_t max_blocks, int64_t window, float scale, int cache_is_bf16,
 int threads) {
  const AttentionArgs args = {q,          k,        v,        starts,     positions,  tables, out,  n_sequences, n_heads,
                              n_kv_heads, head_dim, n_blocks, block_size, max_blocks, window, scale};
  return cache_is_bf16 ? attention<Bf16>(args, threads) : attention<F32>(args, threads);
}

PK_EXPORT(rms_norm)
(const float* x, const float* weight, float* out, int64_t m, int64_t n, float eps, int threads) {
  rms_norm(x, weight, out, m, n, eps, threads);
  return 0;
}

PK_EXPORT(residual_norm)
(const float* x, float* residual, const float* weight, const float* post, float* out, int64_t m, int64_t n,
 float eps, int threads) {
  residual_norm(x, residual, weight, post, out, m, n, eps, threads);
  return 0;
}

PK_EXPORT(rope_and_cache)
(const float* qkv, const float* cos, const float* sin, const int64_t* slots, const float* bias,
 const float* q_norm, const float* k_norm, float* q, void* k, void* v, int64_t n_tokens, int64_t n_heads,
 int64_t n_kv_heads, int64_t head_dim, int64_t n_slots, float eps, int cache_is_bf16, int threads) {
  const RopeArgs args = {qkv, cos,      sin,     slots,      bias,     q_norm,  k_norm, q,
                         k,   v,        n_tokens, n_heads,    n_kv_heads, head_dim, n_slots, eps,
                         cache_is_bf16};
  return rope_and_cache(args, threads);
}

PK_EXPORT(gated_activation)
(const float* gate_up, float* out, int64_t m, int64_t n, int is_gelu, int threads) {
  gated_activation(gate_up, out, m, n, is_gelu, threads);
  return 0;
}
