// Epilogue of projections: bias and the activation of the tile's segment, applied in registers, stored by TMA.
//
// A thread holds two rows of D, 8 apart, and a quarter of their columns, so that the norm of a head is a sum over its own and
// three neighbours' values. KEEP: store also what a backward pass cannot make of y, the input of SiLU and 1 / norm.
#pragma once
#include "mainloop.cuh"

constexpr int PANEL = 64, PANEL_BYTES = 64 * 128;  // columns of a result that a warpgroup stores at once
constexpr int PANELS = 2;                          // stores of a warpgroup that are under way at once
static_assert(STORE_BYTES >= WARPGROUPS * PANELS * PANEL_BYTES, "panels on their way out");

__device__ __forceinline__ float element_to_float(unsigned short bits) {
  if (ELEMENT == BFLOAT16) return __uint_as_float((u32)bits << 16);
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
  return r;
}

__device__ __forceinline__ float exp_approx(float z) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(z * 1.4426950408889634f));
  return r;
}
__device__ __forceinline__ float sigmoid(float z) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + exp_approx(-z)));
  return r;
}
// min(z, 0) - log(1 + e^-|z|); where e is small, by its series: the sum would have lost it.
__device__ __forceinline__ float logsigmoid(float z) {
  const float e = exp_approx(-fabsf(z));
  const float log1p = e < 0.02f ? e * (1.0f - e * (0.5f - e * (1.0f / 3.0f - 0.25f * e))) : __logf(1.0f + e);
  return fminf(z, 0.0f) - log1p;
}

// Apply an activation of single elements.
template <int ACTIVATION>
__device__ __forceinline__ float activated(float z, float by) {
  if (ACTIVATION == SILU) return z * sigmoid(z);
  if (ACTIVATION == SIGMOID) return sigmoid(z);
  if (ACTIVATION == LOGSIGMOID) return logsigmoid(z) * by;
  return z;
}

// The i-th sum of a thread is of its row i / 2 % 2 of two, 8 apart, and of column i / 4 * 8 + lane % 4 * 2 + i % 2.

// Store one or two neighbouring elements without TMA.
__device__ __forceinline__ void store_pair(unsigned short* at, u32 pair, int left) {
  if (left > 1)
    *reinterpret_cast<u32*>(at) = pair;
  else if (left == 1)
    *at = (unsigned short)pair;
}

// Store the 64 rows of a warpgroup, activated, a panel at a time; what is left of a segment by plain stores, for a box would
// reach into the next segment. RAGGED: whether a segment can have such a rest.
template <int WIDTH, int ACTIVATION, bool RAGGED>
__device__ __forceinline__ void store_rows(
    const float (&d)[WIDTH / 2], float by, const TensorMap* map, unsigned short* matrix, int pitch, const Arguments& a,
    const SharedMemory& smem, int column, int count, int row, int side) {
  auto pair = [&](int i) { return pack(activated<ACTIVATION>(d[i], by), activated<ACTIVATION>(d[i + 1], by)); };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const bool stores = threadIdx.x % 128 == 0;
#pragma unroll
  for (int panel = 0; panel < (WIDTH + PANEL - 1) / PANEL; ++panel) {
    const int left = count - panel * PANEL;
    if (left >= PANEL && WIDTH >= (panel + 1) * PANEL) {
      const u32 from = smem.store + (side * PANELS + panel % PANELS) * PANEL_BYTES;
      if (stores) {  // the store that last read this panel: by an earlier call, it may be the most recent one
        if (panel == 0)
          tma_store_wait_group_read<0>();
        else
          tma_store_wait_group_read<PANELS - 1>();
      }
      bar_sync(EPILOGUE_BARRIER + side, 128);
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const int i = 4 * (panel * 8 + j), r = warp * 16 + lane % 16, chunk = j + lane / 16;
        if (i + 7 < WIDTH / 2) {
          const u32 v[4] = {pair(i), pair(i + 2), pair(i + 4), pair(i + 6)};
          stmatrix_x4(from + r * 128 + (chunk ^ r % 8) * 16, v);  // swizzled over 128 bytes
        }
      }
      fence_proxy_async_shared();
      bar_sync(EPILOGUE_BARRIER + side, 128);
      if (stores) {
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

// Normalize each head of a tile to length 1.
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
      const float b = c < columns.count ? element_to_float(a.bias[columns.bias + c]) : 0.0f;
      d[4 * j + i] += b;
      d[4 * j + i + 2] += b;
    }
}

// Finish a tile of the KIND-th kind of segments.
template <int WIDTH, int KIND>
__device__ __forceinline__ void finish_as(
    float (&d)[WIDTH / 2], const Arguments& a, const SharedMemory& smem, const Columns& columns, int row, int side) {
  constexpr Kind kind = KINDS_OF_SEGMENTS[KIND];
  if constexpr (kind.bias) add_bias<WIDTH>(d, a, columns);
  if constexpr (kind.activation == L2NORM && WIDTH >= kind.head) normalize<WIDTH, kind.head>(d, a, columns, row);
  if constexpr (kind.activation == SILU && KEEP)
    store_rows<WIDTH, NONE, kind.ragged>(d, 1.0f, a.kept, a.kept_at, KEPT, a, smem, columns.kept, columns.count, row, side);
  store_rows<WIDTH, kind.activation, kind.ragged>(
      d, kind.by, a.y, a.y_at, PITCH, a, smem, columns.column, columns.count, row, side);
}

template <int WIDTH, int KIND = 0>
__device__ __forceinline__ void finish_tile(
    float (&d)[WIDTH / 2], const Arguments& a, const SharedMemory& smem, const Columns& columns, int row, int side) {
  if (columns.kind == KIND)
    finish_as<WIDTH, KIND>(d, a, smem, columns, row, side);
  else if constexpr (KIND + 1 < KIND_COUNT)
    finish_tile<WIDTH, KIND + 1>(d, a, smem, columns, row, side);
}

struct Epilogue {
  __device__ __forceinline__ explicit Epilogue(const Arguments&) {}

  template <int WIDTH>
  __device__ __forceinline__ void store(
      float (&d)[WIDTH / 2], const Arguments& a, const SharedMemory& smem, Tile tile, int side) const {
    finish_tile<WIDTH>(d, a, smem, tile.columns, tile.row + side * 64, side);
  }
};
