// From sums to results: bias, the activation of the tile's segment, and out by the copy engine.
#pragma once

__device__ __forceinline__ u32 pair_of(float low, float high) {
  u32 r;
  if (ELEMENT == BFLOAT16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

__device__ __forceinline__ float number_of(unsigned short bits) {
  if (ELEMENT == BFLOAT16) return __uint_as_float((u32)bits << 16);
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
  return r;
}

__device__ __forceinline__ float power(float z) {  // e^z
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(z * 1.4426950408889634f));
  return r;
}
__device__ __forceinline__ float sigmoid(float z) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + power(-z)));
  return r;
}
// min(z, 0) - log(1 + e^-|z|); where e is small, by its series: the sum would have lost it.
__device__ __forceinline__ float logsigmoid(float z) {
  const float e = power(-fabsf(z));
  const float log1p = e < 0.02f ? e * (1.0f - e * (0.5f - e * (1.0f / 3.0f - 0.25f * e))) : __logf(1.0f + e);
  return fminf(z, 0.0f) - log1p;
}

// Of an element; a norm is not.
template <int ACTIVATION>
__device__ __forceinline__ float activated(float z, float by) {
  if (ACTIVATION == SILU) return z * sigmoid(z);
  if (ACTIVATION == SIGMOID) return sigmoid(z);
  if (ACTIVATION == LOGSIGMOID) return logsigmoid(z) * by;
  return z;
}

// The i-th sum of a thread is of its row i / 2 % 2 of two, 8 apart, and of column i / 4 * 8 + lane % 4 * 2 + i % 2.

// One half of a word of results, or both, past the copy engine.
__device__ __forceinline__ void store_pair(unsigned short* at, u32 pair, int left) {
  if (left > 1)
    *reinterpret_cast<u32*>(at) = pair;
  else if (left == 1)
    *at = (unsigned short)pair;
}

// 64 rows of a warpgroup, activated, 64 columns at once; what is left of a segment by plain stores, for a box would reach into the next
// one. RAGGED: whether there can be such.
template <int WIDTH, int ACTIVATION, bool RAGGED>
__device__ __forceinline__ void send(
    const float (&d)[WIDTH / 2], float by, const TensorMap* map, unsigned short* matrix, int pitch, const Arguments& a,
    const Room& room, int column, int count, int row, int group) {
  auto pair = [&](int i) { return pair_of(activated<ACTIVATION>(d[i], by), activated<ACTIVATION>(d[i + 1], by)); };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const bool sends = threadIdx.x % 128 == 0;
#pragma unroll
  for (int panel = 0; panel < (WIDTH + PANEL - 1) / PANEL; ++panel) {
    const int left = count - panel * PANEL;
    if (left >= PANEL && WIDTH >= (panel + 1) * PANEL) {
      const u32 from = room.out + (group * PANELS + panel % PANELS) * PANEL_BYTES;
      if (sends) {  // what was sent from there before; by an earlier call it may have been the last of all
        if (panel == 0)
          tma_store_wait_group_read<0>();
        else
          tma_store_wait_group_read<PANELS - 1>();
      }
      bar_sync(OUT + group, 128);
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const int i = 4 * (panel * 8 + j), r = warp * 16 + lane % 16, chunk = j + lane / 16;
        if (i + 7 < WIDTH / 2) {
          const u32 v[4] = {pair(i), pair(i + 2), pair(i + 4), pair(i + 6)};
          stmatrix_x4(from + r * 128 + (chunk ^ r % 8) * 16, v);  // swizzled over 128 bytes
        }
      }
      fence_proxy_async_shared();
      bar_sync(OUT + group, 128);
      if (sends) {
        tma_store_2d(map, from, column + panel * PANEL, row);
        tma_store_commit_group();
      }
    } else if (RAGGED && left > 0) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int i = 4 * (panel * 8 + j), c = 8 * j + lane % 4 * 2, r = row + warp * 16 + lane / 4;
        if (i < WIDTH / 2) {
          unsigned short* at = matrix + (long long)r * pitch + column + panel * PANEL + c;
          if (r < a.M) store_pair(at, pair(i), left - c);
          if (r + 8 < a.M) store_pair(at + 8LL * pitch, pair(i + 2), left - c);
        }
      }
    }
  }
}

// Heads of a tile, each to length 1.
template <int WIDTH, int HEAD>
__device__ __forceinline__ void normalize(float (&d)[WIDTH / 2], const Arguments& a, const Columns& columns, int row) {
  const int lane = threadIdx.x % 32, r = row + threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int head = 0; head < WIDTH / HEAD; ++head) {
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = head * (HEAD / 8); j < (head + 1) * (HEAD / 8); ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) sum[i] += d[4 * j + 2 * i] * d[4 * j + 2 * i] + d[4 * j + 2 * i + 1] * d[4 * j + 2 * i + 1];
    float by[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
      sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
      by[i] = rsqrtf(sum[i] + a.eps);
      if (KEEP && lane % 4 == 0 && r + 8 * i < a.M && head * HEAD < columns.count)
        a.rstd[(long long)(r + 8 * i) * NORMS + columns.norm + head] = by[i];
    }
#pragma unroll
    for (int j = head * (HEAD / 8); j < (head + 1) * (HEAD / 8); ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) d[4 * j + i] *= by[i / 2];
  }
}

template <int WIDTH>
__device__ __forceinline__ void add_bias(float (&d)[WIDTH / 2], const Arguments& a, const Columns& columns) {
#pragma unroll
  for (int j = 0; j < WIDTH / 8; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = 8 * j + threadIdx.x % 4 * 2 + i;
      const float b = c < columns.count ? number_of(a.bias[columns.bias + c]) : 0.0f;
      d[4 * j + i] += b;
      d[4 * j + i + 2] += b;
    }
}

// A tile of the KIND-th of the segments' kinds.
template <int WIDTH, int KIND>
__device__ __forceinline__ void finish_as(
    float (&d)[WIDTH / 2], const Arguments& a, const Room& room, const Columns& columns, int row, int group) {
  constexpr Kind kind = KINDS_OF_SEGMENTS[KIND];
  if constexpr (kind.bias) add_bias<WIDTH>(d, a, columns);
  if constexpr (kind.activation == L2NORM && WIDTH >= kind.head) normalize<WIDTH, kind.head>(d, a, columns, row);
  if constexpr (kind.activation == SILU && KEEP)
    send<WIDTH, NONE, kind.ragged>(d, 1.0f, a.kept, a.kept_at, KEPT, a, room, columns.kept, columns.count, row, group);
  send<WIDTH, kind.activation, kind.ragged>(
      d, kind.by, a.y, a.y_at, PITCH, a, room, columns.column, columns.count, row, group);
}

template <int WIDTH, int KIND = 0>
__device__ __forceinline__ void finish(
    float (&d)[WIDTH / 2], const Arguments& a, const Room& room, const Columns& columns, int row, int group) {
  if (columns.kind == KIND)
    finish_as<WIDTH, KIND>(d, a, room, columns, row, group);
  else if constexpr (KIND + 1 < KIND_COUNT)
    finish<WIDTH, KIND + 1>(d, a, room, columns, row, group);
}
