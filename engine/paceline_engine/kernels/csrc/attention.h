// Causal attention over a paged cache, in chunks of keys with a running maximum and sum (Milakov and
// Gimelshein, 2018; Dao et al., 2022).
//
// Chunks begin at multiples of CHUNK positions and are merged in order, whether one thread walks through
// them or several take one each; so a row's result is the same bits alone, in a batch, in a prefill cut
// anywhere, and for every number of threads.
#pragma once

#include "linear_float.h"

namespace {

constexpr int CHUNK = 64;      // keys
constexpr int TILE_ROWS = 48;  // query rows (tokens times heads of a group) that share the reading of a chunk

struct AttentionArgs {
  const float* q;         // [n_tokens, n_heads, head_dim]
  const void* k;          // [n_blocks, block_size, n_kv_heads, head_dim]
  const void* v;
  const int32_t* starts;  // [n_sequences + 1]
  const int32_t* positions;
  const int32_t* tables;  // [n_sequences, max_blocks]
  float* out;
  int64_t n_sequences, n_heads, n_kv_heads, head_dim, n_blocks, block_size, max_blocks;
  int64_t window;  // 0 for none
  float scale;
};

// Some consecutive tokens of one sequence with the query heads that share one key head.
struct Tile {
  int64_t sequence, first_token, n_tokens, first_position, kv_head;
};

struct RowState {
  float peak, sum;
};

// What one thread works with.
struct Room {
  Scratch<float> scores, wide_v, wide_k;
  Scratch<const float*> q_rows;
  Room(int64_t rows, int64_t head_dim)
      : scores(rows * CHUNK), wide_v(CHUNK * head_dim), wide_k(NR * head_dim), q_rows(rows) {}
};

PK_INLINE int64_t group_of(const AttentionArgs& a) { return a.n_heads / a.n_kv_heads; }
PK_INLINE int64_t last_position(const Tile& t) { return t.first_position + t.n_tokens - 1; }
PK_INLINE int64_t first_key(const AttentionArgs& a, int64_t position) {
  return a.window ? max_of(0, position - a.window + 1) : 0;
}

template <class W>
PK_INLINE const typename W::T* cache_row(const AttentionArgs& a, const void* cache, const Tile& t, int64_t key) {
  const int64_t block = a.tables[t.sequence * a.max_blocks + key / a.block_size];
  const int64_t slot = block * a.block_size + key % a.block_size;
  return (const typename W::T*)cache + (slot * a.n_kv_heads + t.kv_head) * a.head_dim;
}

// out[r] = sum over keys of p[r][key] * v[key], for M rows.
template <int M, class W>
PK_INLINE void mix_rows(const float* p, const typename W::T* const* v, int n_keys, int64_t head_dim, float* out) {
  int64_t d = 0;
  for (; d + 2 * L <= head_dim; d += 2 * L) {
    vf sums[M][2] = {};
    for (int key = 0; key < n_keys; key++) {
      const vf v0 = W::widen(v[key] + d), v1 = W::widen(v[key] + d + L);
      for (int i = 0; i < M; i++) {
        const vf weight = splat(p[i * CHUNK + key]);
        sums[i][0] += weight * v0;
        sums[i][1] += weight * v1;
      }
    }
    for (int i = 0; i < M; i++) {
      store(out + i * head_dim + d, sums[i][0]);
      store(out + i * head_dim + d + L, sums[i][1]);
    }
  }
  for (; d < head_dim; d += L) {
    const int n = (int)min_of(L, head_dim - d);
    vf sums[M] = {};
    for (int key = 0; key < n_keys; key++) {
      const vf values = W::widen_part(v[key] + d, n);
      for (int i = 0; i < M; i++) sums[i] += splat(p[i * CHUNK + key]) * values;
    }
    for (int i = 0; i < M; i++) memcpy(out + i * head_dim + d, &sums[i], n * sizeof(float));
  }
}

template <class W>
PK_INLINE void mix_all(const float* p, const typename W::T* const* v, int n_rows, int n_keys, int64_t head_dim,
                       float* out) {
  int i = 0;
  for (; i + 4 <= n_rows; i += 4) mix_rows<4, W>(p + i * CHUNK, v, n_keys, head_dim, out + i * head_dim);
  for (; i < n_rows; i++) mix_rows<1, W>(p + i * CHUNK, v, n_keys, head_dim, out + i * head_dim);
}

// Turn a row's scores into weights e^(score - peak); keys outside [from, to) of the chunk get none.
PK_INLINE RowState soften(float* scores, int from, int to, float scale) {
  float peak = -INFINITY;
  for (int key = from; key < to; key++) {
    scores[key] *= scale;
    peak = scores[key] > peak ? scores[key] : peak;
  }
  for (int key = 0; key < from; key++) scores[key] = -INFINITY;
  for (int key = max_of(from, to); key < CHUNK; key++) scores[key] = -INFINITY;
  if (from >= to) {
    memset(scores, 0, CHUNK * sizeof(float));
    return {-INFINITY, 0};
  }
  vf sum = {};
  for (int key = 0; key < CHUNK; key += L) {
    const vf e = exp_approx(load<vf>(scores + key) - peak);
    store(scores + key, e);
    sum += e;
  }
  return {peak, hsum(sum)};
}

// The tile over one chunk by itself. states: [rows], out: [rows, head_dim], rows = tokens * group.
template <class W>
__attribute__((noinline)) void attend_chunk(const AttentionArgs& a, const Tile& t, int64_t chunk, Room& room,
                                            RowState* states, float* out) {
  const int64_t group = group_of(a), origin = chunk * CHUNK;
  const int n_rows = (int)(t.n_tokens * group);
  const int from = (int)max_of(0, first_key(a, t.first_position) - origin);
  const int to = (int)min_of(CHUNK, last_position(t) + 1 - origin);
  const typename W::T *k_rows[CHUNK], *v_rows[CHUNK];
  for (int key = from; key < to; key++) {
    k_rows[key] = cache_row<W>(a, a.k, t, origin + key);
    v_rows[key] = cache_row<W>(a, a.v, t, origin + key);
  }
  for (int r = 0; r < n_rows; r++)
    room.q_rows.data[r] =
        a.q + ((t.first_token + r / group) * a.n_heads + t.kv_head * group + r % group) * a.head_dim;
  Scratch<float> dots(n_rows * NR);
  for (int key = from; key < to; key += NR) {
    const typename W::T* keys[NR];
    for (int j = 0; j < NR; j++) keys[j] = k_rows[min_of(key + j, to - 1)];
    dot_block<W>(room.q_rows.data, n_rows, keys, a.head_dim, room.wide_k.data, (float (*)[NR])dots.data);
    for (int r = 0; r < n_rows; r++)
      for (int j = 0; j < NR && key + j < to; j++) room.scores.data[r * CHUNK + key + j] = dots.data[r * NR + j];
  }
  for (int r = 0; r < n_rows; r++) {
    const int64_t position = t.first_position + r / group;
    // The window of a tile's later rows may begin beyond this chunk.
    const int row_from = (int)min_of(CHUNK, max_of(from, first_key(a, position) - origin));
    states[r] = soften(room.scores.data + r * CHUNK, row_from, (int)min_of(to, position + 1 - origin), a.scale);
  }
  if (n_rows <= 4) return mix_all<W>(room.scores.data + from, v_rows + from, n_rows, to - from, a.head_dim, out);
  const float* wide[CHUNK];
  for (int key = from; key < to; key++) {
    wide[key] = room.wide_v.data + key * a.head_dim;
    widen_row<W>(v_rows[key], a.head_dim, room.wide_v.data + key * a.head_dim);
  }
  mix_all<F32>(room.scores.data + from, wide + from, n_rows, to - from, a.head_dim, out);
}

// Fold one chunk's part into what the chunks before it gave.
__attribute__((noinline)) void merge_chunk(RowState* states, float* out, const RowState* part_states,
                                           const float* part, int64_t n_rows, int64_t head_dim) {
  for (int64_t r = 0; r < n_rows; r++) {
    const RowState old = states[r], add = part_states[r];
    if (add.peak == -INFINITY && add.sum == 0) continue;
    const float peak = old.peak > add.peak ? old.peak : add.peak;
    const float keep = exp_approx(old.peak - peak), take = exp_approx(add.peak - peak);
    states[r] = {peak, old.sum * keep + add.sum * take};
    for (int64_t d = 0; d < head_dim; d++)
      out[r * head_dim + d] = out[r * head_dim + d] * keep + part[r * head_dim + d] * take;
  }
}

void start_rows(RowState* states, float* out, int64_t n_rows, int64_t head_dim) {
  for (int64_t r = 0; r < n_rows; r++) states[r] = {-INFINITY, 0};
  memset(out, 0, n_rows * head_dim * sizeof(float));
}

void finish_rows(const AttentionArgs& a, const Tile& t, const RowState* states, const float* rows) {
  const int64_t group = group_of(a);
  for (int64_t r = 0; r < t.n_tokens * group; r++) {
    float* out = a.out + ((t.first_token + r / group) * a.n_heads + t.kv_head * group + r % group) * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; d++) out[d] = rows[r * a.head_dim + d] / states[r].sum;
  }
}

template <class W>
void attend_tile(const AttentionArgs& a, const Tile& t, Room& room, RowState* states, RowState* part_states,
                 float* rows, float* part) {
  const int64_t n_rows = t.n_tokens * group_of(a);
  start_rows(states, rows, n_rows, a.head_dim);
  for (int64_t c = first_key(a, t.first_position) / CHUNK; c <= last_position(t) / CHUNK; c++) {
    attend_chunk<W>(a, t, c, room, part_states, part);
    merge_chunk(states, rows, part_states, part, n_rows, a.head_dim);
  }
  finish_rows(a, t, states, rows);
}

// Few tiles: the threads share each tile's chunks.
template <class W>
void attend_tile_together(const AttentionArgs& a, const Tile& t, int n_threads) {
  const int64_t n_rows = t.n_tokens * group_of(a), row_floats = n_rows * a.head_dim;
  const int64_t first = first_key(a, t.first_position) / CHUNK, n = last_position(t) / CHUNK - first + 1;
  Scratch<RowState> part_states(n * n_rows), states(n_rows);
  Scratch<float> parts(n * row_floats), rows(row_floats);
#pragma omp parallel num_threads(n_threads) if (n > 1)
  {
    Room room(n_rows, a.head_dim);
#pragma omp for schedule(static)
    for (int64_t c = 0; c < n; c++)
      attend_chunk<W>(a, t, first + c, room, part_states.data + c * n_rows, parts.data + c * row_floats);
  }
  start_rows(states.data, rows.data, n_rows, a.head_dim);
  for (int64_t c = 0; c < n; c++)
    merge_chunk(states.data, rows.data, part_states.data + c * n_rows, parts.data + c * row_floats, n_rows,
                a.head_dim);
  finish_rows(a, t, states.data, rows.data);
}

// 0, or 1 where a block table names a block that does not exist.
inline int check_tables(const AttentionArgs& a) {
  for (int64_t s = 0; s < a.n_sequences; s++) {
    const int64_t n_new = a.starts[s + 1] - a.starts[s];
    if (n_new < 0 || a.positions[s] < 0) return 1;
    if (!n_new) continue;
    const int64_t last = (a.positions[s] + n_new - 1) / a.block_size;
    if (last >= a.max_blocks) return 1;
    for (int64_t b = first_key(a, a.positions[s]) / a.block_size; b <= last; b++) {
      const int32_t block = a.tables[s * a.max_blocks + b];
      if (block < 0 || block >= a.n_blocks) return 1;
    }
  }
  return 0;
}

template <class W>
int attention(const AttentionArgs& a, int n_threads) {
  if (check_tables(a)) return 1;
  const int64_t group = group_of(a), tile_tokens = max_of(1, TILE_ROWS / group);
  int64_t n_tiles = 0;
  for (int64_t s = 0; s < a.n_sequences; s++)
    n_tiles += (a.starts[s + 1] - a.starts[s] + tile_tokens - 1) / tile_tokens * a.n_kv_heads;
  Scratch<Tile> tiles(n_tiles);
  Tile* next = tiles.data;
  for (int64_t s = 0; s < a.n_sequences; s++)
    for (int64_t token = a.starts[s]; token < a.starts[s + 1]; token += tile_tokens)
      for (int64_t head = 0; head < a.n_kv_heads; head++)
        *next++ = {s, token, min_of(tile_tokens, a.starts[s + 1] - token), a.positions[s] + token - a.starts[s],
                   head};
  if (n_tiles < n_threads) {
    for (int64_t i = 0; i < n_tiles; i++) attend_tile_together<W>(a, tiles.data[i], n_threads);
    return 0;
  }
  const int64_t rows = tile_tokens * group;
#pragma omp parallel num_threads(n_threads)
  {
    Room room(rows, a.head_dim);
    Scratch<RowState> states(rows), part_states(rows);
    Scratch<float> out(rows * a.head_dim), part(rows * a.head_dim);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < n_tiles; i++)
      attend_tile<W>(a, tiles.data[i], room, states.data, part_states.data, out.data, part.data);
  }
  return 0;
}

}  // namespace
