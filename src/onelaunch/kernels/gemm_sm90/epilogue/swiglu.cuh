// Epilogue of swiglu: h = silu(gate) * up from both products of a tile, with the scales of their operands, stored by TMA.
#pragma once
#include "mainloop.cuh"

constexpr int FINISHED = SCHEDULE == SPLIT_K_CLUSTER ? B_ROWS / 2 : B_ROWS;  // rows of a tile that a CTA finishes
// Rows that are stored at once: a tile leaves in parts, so that one is on its way while the next is made.
constexpr int PART = FINISHED % 64 == 0 ? 64 : FINISHED % 32 == 0 ? 32 : FINISHED, PARTS = FINISHED / PART;
static_assert(STORE_BYTES >= B_ROWS * COLUMNS * 2, "results of a tile, in 16 bits");

__device__ __forceinline__ float gated(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

// Store the 32 columns of a warpgroup to one of the matrices of a map, independently of other warpgroups, which may still
// multiply. value(i) is the i-th of FINISHED / 4 results of the thread.
template <typename Value>
__device__ __forceinline__ void store_columns(
    const TensorMap* map, int matrix, const SharedMemory& smem, int row, int column, int side, Value value) {
  const int lane = threadIdx.x % 32, piece = threadIdx.x / 32 % 4;
  const bool stores = threadIdx.x % 128 == 0;
  constexpr int AT_ONCE = PART % 32 == 0 ? 4 : 1;  // matrices of 8 x 8
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    const u32 from = smem.store + (side * PARTS + part) * (PART * 64);
    if (stores) tma_store_wait_group_read<PARTS - 1>();  // the store that last read this part
    bar_sync(EPILOGUE_BARRIER + side, 128);
#pragma unroll
    for (int j = 0; j < PART / 8; j += AT_ONCE) {
      u32 v[AT_ONCE];
#pragma unroll
      for (int q = 0; q < AT_ONCE; ++q) {
        const int i = 2 * (part * (PART / 8) + j + q);
        v[q] = pack(value(i), value(i + 1));
      }
      const u32 r = 8 * j + lane % (8 * AT_ONCE);
      stmatrix_trans(from + r * 64 + (piece ^ (r / 2 % 4)) * 16, v);  // swizzled over 64 bytes
    }
    fence_proxy_async_shared();
    bar_sync(EPILOGUE_BARRIER + side, 128);
    if (stores) {
      tma_store_3d(map, from, column + side * 32, matrix, row + part * PART);
      tma_store_commit_group();
    }
  }
}

struct Epilogue {
  // Scales that all rows have in common, or 1. They are read before the first tile, where no result waits for them.
  float x = 1.0f, gate = 1.0f, up = 1.0f;

  __device__ __forceinline__ explicit Epilogue(const Arguments& a) {
    if (!SCALED) return;
    if (a.x_scale && !a.x_scales) x = *a.x_scale;
    if (!a.w_scales) gate = *a.gate_scale, up = *a.up_scale;
  }

  // Store h, and with KEEP both products, of a tile's totals.
  template <int WIDTH>
  __device__ __forceinline__ void store(
      float (&d)[WIDTH / 2], const Arguments& a, const SharedMemory& smem, Tile tile, int side) const {
    const int row = tile.row + (SCHEDULE == SPLIT_K_CLUSTER ? cluster_ctarank() * FINISHED : 0);
    const int lane = threadIdx.x % 32, n = tile.column + side * 32 + threadIdx.x / 32 % 4 * 8 + lane / 4;
    float gate_by = gate, up_by = up;
    if (SCALED && a.w_scales && n < a.N) {
      gate_by = a.gate_scale[n];
      up_by = a.up_scale[n];
    }
    // the i-th of FINISHED / 4 that the thread has of each product, in pairs of neighbouring rows
    auto row_of = [&](int i) { return row + i / 2 * 8 + lane % 4 * 2 + i % 2; };
    auto by_row = [&](int i) { return SCALED && a.x_scales ? a.x_scale[min(row_of(i), a.M - 1)] : x; };
    auto gate_at = [&](int i) {
      const float sum = a.flip ? d[i / 2 * 4 + i % 2 + 2] : d[i / 2 * 4 + i % 2];
      return SCALED ? sum * (gate_by * by_row(i)) : sum;
    };
    auto up_at = [&](int i) {
      const float sum = a.flip ? d[i / 2 * 4 + i % 2] : d[i / 2 * 4 + i % 2 + 2];
      return SCALED ? sum * (up_by * by_row(i)) : sum;
    };
    store_columns(a.h, 0, smem, row, tile.column, side, [&](int i) { return gated(gate_at(i), up_at(i)); });
    if constexpr (KEEP) {
      store_columns(a.products, 0, smem, row, tile.column, side, gate_at);
      store_columns(a.products, 1, smem, row, tile.column, side, up_at);
    }
  }
};
