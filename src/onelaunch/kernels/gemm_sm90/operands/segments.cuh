// Operands of projections: A has rows of x, B rows of the weight of one segment of columns, whole heads where heads are
// normalized.
//
// Where few columns are left of a segment, as of a decay of one column per head, WGMMAs are NARROW columns wide. Of few rows of
// x no more are loaded than there are; products of what lies beside them are never stored. With MULTICAST each CTA of a cluster
// loads a half of the common operand into both. The NARROW rows of a weight are not halved: a half of a swizzled box has to
// have eight rows.
#pragma once
#include "layout.cuh"  // generated: segments, and the tile at each place
#include "scheduler.cuh"

#define PARAMETERS \
  const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap narrow, \
      const __grid_constant__ TensorMap y, const __grid_constant__ TensorMap kept, const unsigned short *bias, float *rstd, \
      unsigned short *y_at, unsigned short *kept_at, int M, int K, int a_bytes, float eps

#define ARGUMENTS { &x, &weight, &narrow, &y, &kept, bias, rstd, y_at, kept_at, M, K, a_bytes, eps, nullptr, nullptr, false }

constexpr int COLUMN_UNITS = (COLUMN_TILES + CLUSTER_COLUMNS - 1) / CLUSTER_COLUMNS;
constexpr bool TILE_HAS_WIDTH = true;  // a tile can have fewer columns than B_ROWS
constexpr bool MAY_LOAD_EARLY = false;
constexpr bool WHOLE_WARP_LOADS = false;

struct Arguments {
  const TensorMap *x, *weight, *narrow, *y, *kept;
  const unsigned short* bias;
  float* rstd;
  unsigned short *y_at, *kept_at;  // the memory of the maps, for what no box can store
  int M, K;
  int a_bytes;  // of x in a k-block
  float eps;
  float* partials;  // of schedules and loads that are not used here
  u32* counters;
  bool early;
};

struct Tile {
  int row;  // of x
  Columns columns;
  __device__ __forceinline__ int width() const { return columns.count; }  // columns of D that are wanted
};

__device__ __forceinline__ Scheduler scheduler_of(const Arguments& a) {
  const int k_blocks = (a.K + K_BLOCK - 1) / K_BLOCK, row_tiles = (a.M + A_ROWS * CLUSTER_ROWS - 1) / (A_ROWS * CLUSTER_ROWS);
  const int tiles = row_tiles * COLUMN_UNITS, stride = gridDim.x / CLUSTER;
  return {k_blocks, row_tiles, tiles, 0, 0, 0, 0, stride, (tiles + stride - 1) / stride};
}

__device__ __forceinline__ Tile tile_at(const Scheduler& scheduler, int tile) {
  const Coordinates at = scheduler.coordinates(tile, COLUMN_UNITS);
  return {at.row * A_ROWS, columns_of(at.column)};
}

__device__ __forceinline__ void prefetch_tensormaps(const Arguments& a, int warp) {
  if (warp < 5) prefetch_tensormap(warp == 0 ? a.x : warp == 1 ? a.weight : warp == 2 ? a.narrow : warp == 3 ? a.y : a.kept);
}

// Load operand A of a k-block into a stage, and expect the bytes of both operands.
__device__ __forceinline__ void load_a(const Arguments& a, const SharedMemory& smem, Tile tile, int k_block, int stage) {
  const u32 bar = smem.full + 8 * stage, to = smem.stages + stage * STAGE_BYTES;
  mbarrier_arrive_expect_tx(bar, a.a_bytes + (NARROW < B_ROWS && tile.width() <= NARROW ? NARROW : B_ROWS) * 128);
  if constexpr (MULTICAST == OPERAND_A) {
    const u32 half = cluster_ctarank() * (A_ROWS / 2);
    tma_load_2d_multicast(to + half * 128, a.x, k_block * K_BLOCK, tile.row + half, bar);
  } else {
    tma_load_2d(to, a.x, k_block * K_BLOCK, tile.row, bar);
  }
}

__device__ __forceinline__ void load_b(const Arguments& a, const SharedMemory& smem, Tile tile, int k_block, int stage) {
  const u32 bar = smem.full + 8 * stage, to = smem.stages + stage * STAGE_BYTES + A_BYTES;
  if (NARROW < B_ROWS && tile.width() <= NARROW) {
    tma_load_2d(to, a.narrow, k_block * K_BLOCK, tile.columns.row, bar);
  } else if constexpr (MULTICAST == OPERAND_B) {
    const u32 half = cluster_ctarank() * (B_ROWS / 2);
    tma_load_2d_multicast(to + half * 128, a.weight, k_block * K_BLOCK, tile.columns.row + half, bar);
  } else {
    tma_load_2d(to, a.weight, k_block * K_BLOCK, tile.columns.row, bar);
  }
}
