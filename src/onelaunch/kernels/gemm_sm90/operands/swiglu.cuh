// Operands of swiglu, h = silu(x gate^T) * (x up^T): A interleaves both weights, 8 rows of each in turn; B has rows of x.
//
// Interleaving: a thread of a WGMMA holds rows r and r + 8 of D, which are the gate and the up value of one element of h. So
//     the epilogue needs no exchange between threads. A four-dimensional TMA map (channels, 8 rows, weight, groups of 8 rows)
//     interleaves the weights as it reads them. They need not be stored in one tensor: the distance between their addresses is
//     the stride of the dimension `weight`. A box is one k-block of A_ROWS / 16 groups of 8 rows of both weights.
// Orientation: the rows of x are the N dimension of WGMMA, a multiple of 8. With few rows of x, fewer products are wasted than
//     if they were the M dimension, which is 64. D is therefore transposed: its rows are columns of h.
// NVFP4: an element of A's map is a byte of two codes. A row of x in a k-block has CHUNKS pieces of 128 bytes, because the
//     swizzle spans 128 bytes. A stage holds piece 0 of all B_ROWS rows, then piece 1; a three-dimensional map loads them.
// Host code: ops/swiglu/launch_hopper.py makes the maps and passes PARAMETERS in this order.
// Callers: gemm.cu includes this file as OPERANDS and calls scheduler_of, prefetch_tensormaps and tile_at; mainloop.cuh calls
//     load_a, load_b and tile_at.
#pragma once
#include "scheduler.cuh"

#define PARAMETERS \
  const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap h, \
      const __grid_constant__ TensorMap products, const unsigned char *gate_blocks, const unsigned char *up_blocks, \
      const float *x_scale, const float *gate_scale, const float *up_scale, float *workspace, u32 *counters, int M, int N, \
      int K, int unit_granules, int longer_units, int granule, int up_first, int x_scales, int w_scales, int early

#define ARGUMENTS \
  { \
    &x, &weights, &h, &products, {up_first ? up_blocks : gate_blocks, up_first ? gate_blocks : up_blocks}, x_scale, \
        gate_scale, up_scale, workspace, counters, M, N, K, unit_granules, longer_units, granule, \
        CHUNKS * 128 * (NVFP4 ? B_ROWS : min(B_ROWS, M)), up_first != 0, x_scales != 0, w_scales != 0, early != 0 \
  }

constexpr int COLUMNS = A_ROWS / 2;       // columns of h in a tile
constexpr bool TILE_WIDTHS_VARY = false;  // all tiles are B_ROWS wide
constexpr bool MAY_LOAD_EARLY = true;     // `early`, below, lets A be loaded before earlier launches have ended
constexpr bool WHOLE_WARP_LOADS = true;   // all lanes of the producer warp run the main loop's loads, to copy block scales

struct Arguments {
  const TensorMap *x, *weights, *h, *products;
  const unsigned char* blocks[2];  // NVFP4: e4m3 block scales [N, K / 16] of each weight, in the order of A's rows (up_first)
  const float *x_scale, *gate_scale, *up_scale;
  float* workspace;  // STREAM_K: partial sums, one slot for each unit
  u32* counters;     // STREAM_K: a flag for each unit; PERSISTENT: tiles taken, CTAs that have finished. 0 between launches
  int M, N, K;       // x [M, K], each weight [N, K], h [M, N]
  int unit_granules, longer_units, granule;  // STREAM_K: see Scheduler
  int b_bytes;       // bytes of x that TMA writes per k-block; without NVFP4 the box has no more than M rows
  bool up_first;            // w_up lies at a lower address than w_gate, so it is the first of each pair of 8 rows
  bool x_scales, w_scales;  // x, or the weights, have one scale per row instead of one in all
  bool early;               // weights may be read before earlier launches have ended
};

struct Tile {
  int row, column;  // first row and column of h
  __device__ __forceinline__ int width() const { return B_ROWS; }
};

__device__ __forceinline__ Scheduler scheduler_of(const Arguments& a) {
  const int k_blocks = (a.K + K_BLOCK - 1) / K_BLOCK, row_tiles = (a.M + B_ROWS - 1) / B_ROWS;
  const int tiles = row_tiles * ((a.N + COLUMNS - 1) / COLUMNS);
  const int unit = SCHEDULE == STREAM_K ? (int)(gridDim.x - 1 - blockIdx.x) : 0;  // the last unit goes to the first CTA
  return {k_blocks, row_tiles, tiles, a.unit_granules, a.longer_units, a.granule, unit, 0, 0};
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

// Load operand A of a k-block into a stage, and announce the bytes of both operands at full[stage]. Must precede load_b.
__device__ __forceinline__ void load_a(const Arguments& a, const SharedMemory& smem, Tile tile, int k_block, int stage) {
  const u32 bar = smem.full + 8 * stage;
  mbarrier_arrive_expect_tx(bar, A_BYTES + a.b_bytes);
  const int channel = k_block * (NVFP4 ? K_BLOCK / 2 : K_BLOCK);  // in elements of the map: bytes for NVFP4
  tma_load_4d(smem.stages + stage * STAGE_BYTES, a.weights, channel, 0, 0, tile.column / 8, bar);
}

// Load operand B of a k-block into a stage, behind A.
__device__ __forceinline__ void load_b(const Arguments& a, const SharedMemory& smem, Tile tile, int k_block, int stage) {
  const u32 bar = smem.full + 8 * stage, to = smem.stages + stage * STAGE_BYTES + A_BYTES;
  if (NVFP4)
    tma_load_3d(to, a.x, 0, tile.row, k_block * CHUNKS, bar);
  else
    tma_load_2d(to, a.x, k_block * K_BLOCK, tile.row, bar);
}
