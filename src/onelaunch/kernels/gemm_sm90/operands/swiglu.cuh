// Operands of swiglu: A has 8 rows of one weight, 8 of the other, and so on; B has rows of x.
//
// A thread of a WGMMA holds rows r and r + 8 of D, so that a gate meets its partner in registers. A TMA map of four dimensions
// interleaves the weights as it reads them where they lie, stacked or not: their distance is a stride. Few rows of x waste no
// products, for they are the width of a WGMMA, which is a multiple of 8.
#pragma once
#include "scheduler.cuh"

#define PARAMETERS \
  const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap h, \
      const __grid_constant__ TensorMap products, const unsigned char *gate_blocks, const unsigned char *up_blocks, \
      const float *x_scale, const float *gate_scale, const float *up_scale, float *partials, u32 *counters, int M, int N, int K, \
      int each, int more, int grain, int flip, int x_scales, int w_scales, int early

#define ARGUMENTS \
  { \
    &x, &weights, &h, &products, {flip ? up_blocks : gate_blocks, flip ? gate_blocks : up_blocks}, x_scale, gate_scale, up_scale, \
        partials, counters, M, N, K, each, more, grain, CHUNKS * 128 * (NVFP4 ? B_ROWS : min(B_ROWS, M)), flip != 0, x_scales != 0, \
        w_scales != 0, early != 0 \
  }

constexpr int COLUMNS = A_ROWS / 2;                   // of h in a tile
constexpr bool TILE_HAS_WIDTH = false;
constexpr bool MAY_LOAD_EARLY = true;                 // weights that are constant, before earlier launches have ended
constexpr bool WHOLE_WARP_LOADS = true;               // its lanes copy block scales

struct Arguments {
  const TensorMap *x, *weights, *h, *products;
  const unsigned char* blocks[2];  // block scales of both weights, in the order in which the weights lie
  const float *x_scale, *gate_scale, *up_scale;
  float* partials;  // STREAM_K: sums that units leave
  u32* counters;    // STREAM_K: a flag of each unit; PERSISTENT: tiles taken, CTAs that have finished
  int M, N, K, each, more, grain;
  int b_bytes;  // of x in a k-block: beside plain weights, rows that are not there are not copied
  bool flip, x_scales, w_scales;  // up lies before gate; rows have scales of their own
  bool early;                     // weights may be read before earlier launches have ended
};

struct Tile {
  int row, column;  // of h
  __device__ __forceinline__ int width() const { return B_ROWS; }
};

__device__ __forceinline__ Scheduler scheduler_of(const Arguments& a) {
  const int k_blocks = (a.K + K_BLOCK - 1) / K_BLOCK, row_tiles = (a.M + B_ROWS - 1) / B_ROWS;
  const int tiles = row_tiles * ((a.N + COLUMNS - 1) / COLUMNS);
  return {k_blocks, row_tiles, tiles, a.each, a.more, a.grain, SCHEDULE == STREAM_K ? (int)(gridDim.x - 1 - blockIdx.x) : 0, 0, 0};
}

__device__ __forceinline__ Tile tile_at(const Scheduler& scheduler, int tile) {
  const Coordinates at = scheduler.coordinates(tile, scheduler.tiles / scheduler.row_tiles);
  return {at.row * B_ROWS, at.column * COLUMNS};
}

__device__ __forceinline__ void prefetch_tensormaps(const Arguments& a, int warp) {
  if (warp == 0) {
    prefetch_tensormap(a.weights);
    prefetch_tensormap(a.x);
  }
}

// Load operand A of a k-block into a stage, and expect the bytes of both operands.
__device__ __forceinline__ void load_a(const Arguments& a, const SharedMemory& smem, Tile tile, int k_block, int stage) {
  const u32 bar = smem.full + 8 * stage;
  mbarrier_arrive_expect_tx(bar, A_BYTES + a.b_bytes);
  const int channel = k_block * (NVFP4 ? K_BLOCK / 2 : K_BLOCK);  // in elements of the map
  tma_load_4d(smem.stages + stage * STAGE_BYTES, a.weights, channel, 0, 0, tile.column / 8, bar);
}

__device__ __forceinline__ void load_b(const Arguments& a, const SharedMemory& smem, Tile tile, int k_block, int stage) {
  const u32 bar = smem.full + 8 * stage, to = smem.stages + stage * STAGE_BYTES + A_BYTES;
  if (NVFP4)
    tma_load_3d(to, a.x, 0, tile.row, k_block * CHUNKS, bar);
  else
    tma_load_2d(to, a.x, k_block * K_BLOCK, tile.row, bar);
}
