// What a program of dual_gemm.cu works on: its part of all steps, the ring of stages, and where things lie.
#pragma once
#include "hopper.cuh"

struct Arguments {
  const TensorMap *x, *weights, *h, *kept;
  const unsigned char* blocks[2];  // block scales of both weights, in the order in which they lie
  const float *x_scale, *gate_scale, *up_scale;
  float* partials;
  u32* words;
  int M, N, K, x_bytes;  // of x in a step: beside plain weights, rows that are not there are not copied
  bool flip, x_scales, w_scales, early;  // up lies before gate; rows have scales of their own; weights may be read at once
};

struct Item { int tile, first, last; };  // steps [first, last) of a tile

// All work of a launch, and which part of it is a program's.
struct Work {
  int steps, tiles, row_tiles, each, more, grain, runs, run;
  __device__ __forceinline__ int begin(int r) const { return (r * each + min(r, more)) * grain; }
  __device__ __forceinline__ Item at(int unit, int end) const {
    const int tile = unit / steps, first = unit - tile * steps;
    return {tile, first, min(steps, first + end - unit)};
  }
  __device__ __forceinline__ Item half() const {  // of this program of a pair; of one step the first has none
    const int middle = steps / 2;
    return cluster_ctarank() ? Item{(int)(blockIdx.x / 2), middle, steps} : Item{(int)(blockIdx.x / 2), 0, middle};
  }
  __device__ __forceinline__ void place(int tile, int& row, int& column) const {
    const int columns = tiles / row_tiles, swath = tile / (SWATH * columns), first = swath * SWATH;
    const int rows = min(SWATH, row_tiles - first), at = tile - first * columns;
    row = (first + at % rows) * ROWS;
    column = at / rows * COLUMNS;
  }
};

// Where things lie in shared memory: what codes stand for, stages, the tile of h, sums that are handed over, barriers, tiles taken from
// the counter.
struct Room {
  u32 table, stages, out, handed, full, empty, scaled, converted, told, heard, next;
  __device__ __forceinline__ explicit Room(u32 base) {
    table = base;
    stages = (base + TABLE_BYTES + 1023) & ~1023u;
    out = stages + STAGES * STAGE;
    handed = out + OUT_BYTES;
    full = handed + HANDED;
    empty = full + 8 * STAGES;
    scaled = empty + 8 * STAGES;
    converted = scaled + 8 * STAGES;
    told = converted + 8 * STAGES;
    heard = told + 16;
    next = heard + 16;
  }
};

// A place in the ring of stages. A warpgroup takes what lies in every SPLIT-th stage, whatever tile it belongs to: who waits for a
// stage must have seen what was there before, for a barrier tells only whether it is in an even or an odd round, and copies need not
// arrive in the order in which they were sent.
struct Ring {
  int stage = 0;
  u32 phase = 0;
  __device__ __forceinline__ int steps_until(int split) const { return (split + SPLIT - stage % SPLIT) % SPLIT; }
  __device__ __forceinline__ void advance(int steps = 1) {
    stage += steps;
    if (stage >= STAGES) {
      phase ^= stage / STAGES & 1;
      stage %= STAGES;
    }
  }
};
