// The small operators between the matrices, each in one pass.
#pragma once

#include "linear_float.h"

namespace {

// The lanes of x[k..] that exist, zeros in the others.
PK_INLINE vf lanes(const float* x, int64_t k, int64_t n) {
  return k + L <= n ? load<vf>(x + k) : load_part<vf>(x + k, (int)(n - k));
}

PK_INLINE void put(float* to, int64_t k, int64_t n, vf v) {
  if (k + L <= n)
    store(to + k, v);
  else
    memcpy(to + k, &v, (n - k) * sizeof(float));
}

// 1 / sqrt(mean(x^2) + eps)
PK_INLINE float inverse_rms(const float* x, int64_t n, float eps) {
  vf sum = {};
  for (int64_t k = 0; k < n; k += L) {
    const vf v = lanes(x, k, n);
    sum += v * v;
  }
  return 1.0f / sqrtf(hsum(sum) / (float)n + eps);
}

PK_INLINE void norm_row(const float* x, const float* weight, float* out, int64_t n, float eps) {
  const float factor = inverse_rms(x, n, eps);
  for (int64_t k = 0; k < n; k += L) put(out, k, n, lanes(x, k, n) * factor * lanes(weight, k, n));
}

void rms_norm(const float* x, const float* weight, float* out, int64_t m_size, int64_t n, float eps,
              int n_threads) {
#pragma omp parallel for schedule(static) num_threads(n_threads) if (m_size * n > SMALL)
  for (int64_t m = 0; m < m_size; m++) norm_row(x + m * n, weight, out + m * n, n, eps);
}

// residual += post ? norm(x, post) : x; out = norm(residual, weight)
void residual_norm(const float* x, float* residual, const float* weight, const float* post, float* out,
                   int64_t m_size, int64_t n, float eps, int n_threads) {
#pragma omp parallel for schedule(static) num_threads(n_threads) if (m_size * n > SMALL)
  for (int64_t m = 0; m < m_size; m++) {
    const float* row = x + m * n;
    float* stream = residual + m * n;
    const float factor = post ? inverse_rms(row, n, eps) : 1.0f;
    for (int64_t k = 0; k < n; k += L) {
      vf v = lanes(row, k, n);
      if (post) v = v * factor * lanes(post, k, n);
      put(stream, k, n, lanes(stream, k, n) + v);
    }
    norm_row(stream, weight, out + m * n, n, eps);
  }
}

struct RopeArgs {
  const float* qkv;  // [n_tokens, (n_heads + 2 * n_kv_heads) * head_dim]
  const float *cos, *sin;  // [n_tokens, head_dim / 2]
  const int64_t* slots;
  const float *bias, *q_norm, *k_norm;  // or null
  float* q;                             // [n_tokens, n_heads, head_dim]
  void *k, *v;                          // [n_slots, n_kv_heads, head_dim]
  int64_t n_tokens, n_heads, n_kv_heads, head_dim, n_slots;
  float eps;
  int cache_is_bf16;
};

// head: [head_dim], changed in place; dimension i turns with dimension i + head_dim / 2.
PK_INLINE void rotate(float* head, const float* cos, const float* sin, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  for (int64_t k = 0; k < half; k += L) {
    const vf a = lanes(head, k, half), b = lanes(head + half, k, half);
    const vf c = lanes(cos, k, half), s = lanes(sin, k, half);
    put(head, k, half, a * c - b * s);
    put(head + half, k, half, b * c + a * s);
  }
}

PK_INLINE void to_cache(const RopeArgs& a, void* cache, int64_t slot, int64_t kv_head, const float* head) {
  const int64_t at = (slot * a.n_kv_heads + kv_head) * a.head_dim;
  if (!a.cache_is_bf16) {
    memcpy((float*)cache + at, head, a.head_dim * sizeof(float));
    return;
  }
  for (int64_t d = 0; d < a.head_dim; d++) ((uint16_t*)cache)[at + d] = narrow_bf16(head[d]);
}

PK_INLINE void rope_token(const RopeArgs& a, int64_t t, float* head) {
  const int64_t n_all = a.n_heads + 2 * a.n_kv_heads, n = a.head_dim;
  for (int64_t h = 0; h < n_all; h++) {
    const float* from = a.qkv + (t * n_all + h) * n;
    for (int64_t d = 0; d < n; d += L) {
      vf v = lanes(from, d, n);
      if (a.bias) v += lanes(a.bias + h * n, d, n);
      put(head, d, n, v);
    }
    const bool is_q = h < a.n_heads, is_k = !is_q && h < a.n_heads + a.n_kv_heads;
    const float* norm = is_q ? a.q_norm : is_k ? a.k_norm : nullptr;
    if (norm) norm_row(head, norm, head, n, a.eps);
    if (is_q || is_k) rotate(head, a.cos + t * n / 2, a.sin + t * n / 2, n);
    if (is_q)
      memcpy(a.q + (t * a.n_heads + h) * n, head, n * sizeof(float));
    else if (is_k)
      to_cache(a, a.k, a.slots[t], h - a.n_heads, head);
    else
      to_cache(a, a.v, a.slots[t], h - a.n_heads - a.n_kv_heads, head);
  }
}

// 0, or 1 where a slot lies outside the cache.
int rope_and_cache(const RopeArgs& a, int n_threads) {
  for (int64_t t = 0; t < a.n_tokens; t++)
    if (a.slots[t] < 0 || a.slots[t] >= a.n_slots) return 1;
  const int64_t width = (a.n_heads + 2 * a.n_kv_heads) * a.head_dim;
#pragma omp parallel num_threads(n_threads) if (a.n_tokens * width > SMALL)
  {
    Scratch<float> head(a.head_dim);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < a.n_tokens; t++) rope_token(a, t, head.data);
  }
  return 0;
}

// out = act(gate) * up for rows [gate | up]. Both activations are x * sigmoid(y): y = x for SiLU, and
// y = 2 * sqrt(2 / pi) * (x + 0.044715 x^3) for the tanh form of GELU (Hendrycks and Gimpel, 2016).
void gated_activation(const float* gate_up, float* out, int64_t m_size, int64_t n, int is_gelu, int n_threads) {
#pragma omp parallel for schedule(static) num_threads(n_threads) if (m_size * n > SMALL / 4)
  for (int64_t m = 0; m < m_size; m++) {
    const float *gate = gate_up + m * 2 * n, *up = gate + n;
    for (int64_t k = 0; k < n; k += L) {
      const vf x = lanes(gate, k, n);
      const vf y = is_gelu ? (x + x * x * x * 0.044715f) * 1.5957691216f : x;
      put(out + m * n, k, n, x / (exp_approx(-y) + 1.0f) * lanes(up, k, n));
    }
  }
}

}  // namespace
