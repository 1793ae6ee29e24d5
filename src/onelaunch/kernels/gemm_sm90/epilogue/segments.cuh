// Epilogue of projections: y = activation(x weight^T + bias) with the activation of the tile's segment, stored by TMA.
//
// Given:      d, the float32 totals of 64 rows of x for this warpgroup, in the layout of WGMMA accumulators: element i belongs
//             to the thread's row i / 2 % 2 of two, 8 apart, and to column i / 4 * 8 + lane % 4 * 2 + i % 2. A thread holds a
//             quarter of the columns of its rows, so a norm over a head is a sum over its own elements and those of three other
//             lanes.
// Caller:     gemm.cu calls Epilogue::store() for each total, in kernels that ops/projections/launch_hopper.py makes.
// Leaves:     y in 16 bits; with KEEP also what the backward pass cannot derive from y: the inputs of SiLU, and 1 / norm of
//             heads. TMA stores may still be in flight on return; gemm.cu waits for them at the end.
// Shared:     `staging`: per warpgroup, PANELS panels of 64 rows and 64 columns with the 128-byte swizzle.
// Barriers:   one named barrier per warpgroup (bar_sync(EPILOGUE_BARRIER + m_block, 128)); warpgroups do not wait for each
//             other.
// Generated:  layout.cuh (ops/projections/configure_hopper.py) describes the segments of the weight, such as q, k, v and gates.
//             Columns (of a tile)  kind     index in KINDS_OF_SEGMENTS
//                                  count    columns of the tile that belong to the segment; 0 if the tile is only padding
//                                  column, kept, norm, bias   first column in y and `kept`, first head in rstd, first bias
//             Kind (of segments)   activation, bias (has one), ragged (see store_rows)
//                                  head     columns of a normalized head, 1 for other activations
//                                  by       factor of LOGSIGMOID
//             PITCH, KEPT, NORMS   elements of a row of y, of `kept` and of rstd, for all segments together
//             KEEP, a macro of launch_hopper.py, is 1 if a backward pass follows.
// Numerics:   float32 until the stores; ex2.approx and rcp.approx for the sigmoid; a series for log(1 + e) of small e.
#pragma once
#include "mainloop.cuh"

constexpr int PANEL = 64, PANEL_BYTES = 64 * 128;  // columns of one TMA store of a warpgroup (64 rows), and its bytes
constexpr int PANELS = 2;                          // panels of a warpgroup: one is stored while the next is written
static_assert(STORE_BYTES >= WARPGROUPS * PANELS * PANEL_BYTES, "the staging buffer holds the panels of all warpgroups");

// Return a 16-bit element (ELEMENT) as float32.
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
// Return min(z, 0) - log(1 + e^-|z|). A series serves small e = e^-|z|, which the sum 1 + e would lose.
__device__ __forceinline__ float logsigmoid(float z) {
  const float e = exp_approx(-fabsf(z));
  const float log1p = e < 0.02f ? e * (1.0f - e * (0.5f - e * (1.0f / 3.0f - 0.25f * e))) : __logf(1.0f + e);
  return fminf(z, 0.0f) - log1p;
}

// Apply an elementwise activation; `factor` multiplies the log-sigmoid. NONE and L2NORM leave z as it is: normalize() has
// applied the norm before.
template <int ACTIVATION>
__device__ __forceinline__ float activated(float z, float factor) {
  if (ACTIVATION == SILU) return z * sigmoid(z);
  if (ACTIVATION == SIGMOID) return sigmoid(z);
  if (ACTIVATION == LOGSIGMOID) return logsigmoid(z) * factor;
  return z;
}

// Store `left` (at most two) neighbouring elements without TMA.
__device__ __forceinline__ void store_pair(unsigned short* at, u32 pair, int left) {
  if (left > 1)
    *reinterpret_cast<u32*>(at) = pair;
  else if (left == 1)
    *at = (unsigned short)pair;
}

// Activate and store the 64 rows of a warpgroup from `row` on, `count` columns from `column` on, one panel at a time. `map` and
// `matrix` are the tensor map and the address of the result (y or `kept`), a row of which has `pitch` elements. The last
// columns of a tile that fill no panel are stored by plain stores, because a TMA box would reach into the next tile or segment;
// RAGGED says whether a segment of this kind can have such tiles. TMA leaves out rows behind the last one. All 128 threads of
// the warpgroup must call this.
template <int WIDTH, int ACTIVATION, bool RAGGED>
__device__ __forceinline__ void store_rows(
    const float (&d)[WIDTH / 2], float factor, const TensorMap* map, unsigned short* matrix, int pitch, const Arguments& a,
    const SharedMemory& smem, int column, int count, int row, int m_block) {
  // Activated elements i and i + 1 of d, which are neighbours in a row, in 16 bits.
  auto pair = [&](int i) { return pack(activated<ACTIVATION>(d[i], factor), activated<ACTIVATION>(d[i + 1], factor)); };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const bool issues_tma = threadIdx.x % 128 == 0;
#pragma unroll
  for (int panel = 0; panel < (WIDTH + PANEL - 1) / PANEL; ++panel) {
    const int left = count - panel * PANEL;
    if (left >= PANEL && WIDTH >= (panel + 1) * PANEL) {  // the second condition drops this code for an incomplete last panel
      const u32 from = smem.staging + (m_block * PANELS + panel % PANELS) * PANEL_BYTES;
      if (issues_tma) {  // wait for the store that last read this panel; one of an earlier call may be the most recent store
        if (panel == 0)
          tma_store_wait_group_read<0>();
        else
          tma_store_wait_group_read<PANELS - 1>();
      }
      bar_sync(EPILOGUE_BARRIER + m_block, 128);
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        // Four 8 x 8 matrices: rows 0 to 7 and 8 to 15 of the warp's 16, in 8 columns, then both in the next 8 columns.
        const int i = 4 * (panel * 8 + j), r = warp * 16 + lane % 16, chunk = j + lane / 16;
        if (i + 7 < WIDTH / 2) {
          const u32 v[4] = {pair(i), pair(i + 2), pair(i + 4), pair(i + 6)};
          stmatrix_x4(from + r * 128 + (chunk ^ r % 8) * 16, v);  // 128-byte swizzle
        }
      }
      fence_proxy_async_shared();  // the TMA store reads through the async proxy
      bar_sync(EPILOGUE_BARRIER + m_block, 128);
      if (issues_tma) {
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

// Divide each head of a tile by its norm, sqrt(sum of squares + eps); with KEEP store 1 / norm. `row` is the warpgroup's first
// row. Four lanes share a row and exchange sums by shuffles, so whole warps must call this. Heads of d behind the tile's
// `count` columns are divided as well, but nothing of them is stored.
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
    float rstd[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
      sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
      rstd[i] = rsqrtf(sum[i] + a.eps);
      if (KEEP && lane % 4 == 0 && r + 8 * i < a.M && head * HEAD < columns.count)
        a.rstd[(long long)(r + 8 * i) * NORMS + columns.norm + head] = rstd[i];
    }
#pragma unroll
    for (int j = head * (HEAD / 8); j < (head + 1) * (HEAD / 8); ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) d[4 * j + i] *= rstd[i / 2];
  }
}

// Add the bias of the tile's columns to d: to columns c and c + 1 of every 8, in both rows of this thread.
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

// Finish a tile whose segment is of kind KIND: bias, norm, activation, stores.
template <int WIDTH, int KIND>
__device__ __forceinline__ void finish_as(
    float (&d)[WIDTH / 2], const Arguments& a, const SharedMemory& smem, const Columns& columns, int row, int m_block) {
  constexpr Kind kind = KINDS_OF_SEGMENTS[KIND];
  // A tile of normalized heads has whole heads, so a narrow WGMMA (WIDTH < head) never has one: no code is made for it.
  if constexpr (kind.bias) add_bias<WIDTH>(d, a, columns);
  if constexpr (kind.activation == L2NORM && WIDTH >= kind.head) normalize<WIDTH, kind.head>(d, a, columns, row);
  if constexpr (kind.activation == SILU && KEEP)
    store_rows<WIDTH, NONE, kind.ragged>(d, 1.0f, a.kept, a.kept_at, KEPT, a, smem, columns.kept, columns.count, row, m_block);
  store_rows<WIDTH, kind.activation, kind.ragged>(
      d, kind.by, a.y, a.y_at, PITCH, a, smem, columns.column, columns.count, row, m_block);
}

// Call finish_as with the kind of the tile's segment, which is known at run time only.
template <int WIDTH, int KIND = 0>
__device__ __forceinline__ void finish_tile(
    float (&d)[WIDTH / 2], const Arguments& a, const SharedMemory& smem, const Columns& columns, int row, int m_block) {
  if (columns.kind == KIND)
    finish_as<WIDTH, KIND>(d, a, smem, columns, row, m_block);
  else if constexpr (KIND + 1 < KIND_COUNT)
    finish_tile<WIDTH, KIND + 1>(d, a, smem, columns, row, m_block);
}

struct Epilogue {
  __device__ __forceinline__ explicit Epilogue(const Arguments&) {}  // nothing has to be read before the first tile

  // Finish a tile from its totals d; called by every consumer warpgroup. m_block is the index of its 64 rows in the tile. WIDTH
  // is the number of columns of D that its WGMMAs have computed, NARROW or B_ROWS.
  template <int WIDTH>
  __device__ __forceinline__ void store(
      float (&d)[WIDTH / 2], const Arguments& a, const SharedMemory& smem, Tile tile, int m_block) const {
    finish_tile<WIDTH>(d, a, smem, tile.columns, tile.row + m_block * 64, m_block);
  }
};
