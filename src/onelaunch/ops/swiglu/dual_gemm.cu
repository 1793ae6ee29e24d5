// h = silu(x w_gate^T) * (x w_up^T) on Hopper GPUs in one launch, by the copy engine and products of warpgroups.
//
// Computes   h^T: 64 rows of weights are one operand of a product, ROWS rows of x the other, so that few rows of x waste nothing.
//            CUDA C++, for Triton knows no widths but powers of two, and there the channels that a thread decodes for a product
//            are not ours to choose.
// Tile       COLUMNS of h, i.e. 2 COLUMNS rows of weights, times ROWS of x. STEP channels at once.
// Warps      one copies tiles in. A warpgroup multiplies 32 rows of w_gate and the same of w_up in turns of 8: rows r and
//            r + 8 of a product, which one thread holds, so that the gate meets its partner in registers. SPLIT warpgroups
//            share such rows and take turns: every SPLIT-th step. Codes of NVFP4 they decode in registers (nvfp4.cuh).
// Memory     weights are read where they lie: a copy takes 8 rows of one, 8 of the other, and so on, whether they are stacked or
//            not: their distance is a stride. Sums stay in registers; h leaves by the copy engine.
// Schedule   TAKEN 0: the steps of all tiles are cut into as many runs as there are programs, equal to a grain. Whose run begins
//            a tile but does not finish it adds what later runs left in ``partials``, always in the same order. Runs are handed
//            out from the last to the first: nobody waits for a program that starts later, whatever else the GPU is doing.
//            TAKEN 1: programs take whole tiles from a counter. Words are zero before and after a launch.
//            TAKEN 2: two programs of a cluster have half of the steps of a tile each, hand each other the sums of half of its rows
//            through shared memory, and finish the other half.
//            Launches overlap: programs set themselves up beside the end of the launch before, and then wait for it.
// Elsewhere  what a program has to do, and where things lie: work.cuh. How sums come together: sums.cuh. The end of a tile: results.cuh.
// Source     Stream-K: Osama et al., 2023.
#include "hopper.cuh"
#include "products.cuh"

enum { BFLOAT16, FLOAT16, E4M3 };  // ELEMENT of x, RESULT
constexpr int STEP = ELEMENT == E4M3 ? 128 : 64 * X_TILES;  // X_TILES: matrices of x in a step, 128 bytes a row
#if NVFP4
#include "nvfp4.cuh"
#else
constexpr int TABLE_BYTES = 0;
#endif

constexpr int SIDES = COLUMNS / 32, GROUPS = SIDES * SPLIT, FINISHERS = 128 * SIDES;
constexpr int W_BYTES = 2 * COLUMNS * (NVFP4 ? STEP / 2 : 128), X_BYTES = X_TILES * ROWS * 128, STAGE = W_BYTES + X_BYTES;
constexpr int HELD = ROWS / 2;                                // sums of a thread
constexpr int FINISHED = TAKEN == 2 ? ROWS / 2 : ROWS;        // rows that a program finishes of a tile
constexpr int OUT_BYTES = (ROWS * COLUMNS * 2 + 1023) / 1024 * 1024;
constexpr int HANDED = (SPLIT - 1) * FINISHERS * HELD * 4;    // bytes
constexpr int SWATH = 8;                                      // tiles of rows that neighbours share
// Warpgroups that multiply come first, then a warp that copies, then three that convert scales, if there are any.
constexpr int MULTIPLIERS = 128 * GROUPS, THREADS = MULTIPLIERS + 128, CONVERTERS = NVFP4 ? 3 : 0;
constexpr int COPY_REGISTERS = GROUPS > 2 ? 56 : 40, MULTIPLY_REGISTERS = GROUPS == 4 ? 104 : GROUPS == 3 ? 152 : 232;
enum { ALL = 1, HAND, TAKEN_OVER, ALL_GROUPS, OUT };  // named barriers; OUT: the first of as many as there are sides
static_assert(2 <= GROUPS && GROUPS <= 4, "registers are handed over for these");
static_assert(STAGES % SPLIT == 0, "see Ring");
static_assert(TAKEN != 2 || (FINISHED % 8 == 0 && FINISHERS * HELD * 2 <= STAGES * STAGE), "halves are handed over in eights");
static_assert(TAKEN != 1 || SPLIT == 1, "who adds up what must not depend on which tiles a program takes");
static_assert(GROUPS != 3 || ROWS <= 128, "three warpgroups have no registers for more sums");

extern __shared__ __align__(128) char raw[];

#include "work.cuh"
#include "sums.cuh"
#include "results.cuh"

// Copies: one warp, of which a thread commands the copy engine. Block scales go past the engine, which would need a box of 16 bytes a
// row for them, and K in multiples of 256.

__device__ __forceinline__ void copy_weights(const Arguments& a, const Room& room, int column, int k, int stage) {
  const u32 bar = room.full + 8 * stage;
  mbarrier_arrive_expect_tx(bar, W_BYTES + a.x_bytes);
  tma_load_4d(room.stages + stage * STAGE, a.weights, k * (NVFP4 ? STEP / 2 : STEP), 0, 0, column / 8, bar);  // as the map counts
}

__device__ __forceinline__ void copy_x(const Arguments& a, const Room& room, int row, int k, int stage) {
  const u32 bar = room.full + 8 * stage, at = room.stages + stage * STAGE + W_BYTES;
  if (NVFP4)
    tma_load_3d(at, a.x, 0, row, k * X_TILES, bar);
  else
    tma_load_2d(at, a.x, k * STEP, row, bar);
}

// ``early``: earlier launches have not been waited for, but weights may be read; block scales are so few that they can come with x.
__device__ __forceinline__ void copy_item(
    const Arguments& a, const Work& work, const Room& room, Item item, Ring& ring, int lane, bool early = false) {
  const int steps = item.last - item.first;
  int row, column, ahead = 0;
  work.place(item.tile, row, column);
  if (early) {
    for (Ring first = ring; ahead < min(steps, STAGES); ++ahead, first.advance())
      if (lane == 0) copy_weights(a, room, column, item.first + ahead, first.stage);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
  }
  for (int i = 0; i < steps; ++i, ring.advance()) {
    if (i >= ahead) mbarrier_wait(room.empty + 8 * ring.stage, ring.phase ^ 1);
    if (lane == 0) {
      if (i >= ahead) copy_weights(a, room, column, item.first + i, ring.stage);
      copy_x(a, room, row, item.first + i, ring.stage);
    }
#if NVFP4
    const unsigned char* blocks = lane / 8 % 2 ? a.blocks[1] : a.blocks[0];
    copy_scales(room.table, ring.stage, blocks, column, item.first + i, a.N, a.K, lane);
    cp_async_mbarrier_arrive_noinc(room.scaled + 8 * ring.stage);
#endif
  }
}

__device__ __forceinline__ void copy_all(const Arguments& a, const Work& work, const Room& room, int lane) {
  const bool early = TAKEN != 1 && a.early;
  if (!early) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
  }
  Ring ring;
  if constexpr (TAKEN == 2) {
    copy_item(a, work, room, work.half(), ring, lane, early);
  } else if constexpr (TAKEN == 0) {
    for (int first = work.begin(work.run), unit = first, end = work.begin(work.run + 1); unit < end;) {
      const Item item = work.at(unit, end);
      copy_item(a, work, room, item, ring, lane, early && unit == first);
      unit += item.last - item.first;
    }
  } else {
    for (int turn = 0, tile = 0; tile < work.tiles; ++turn) {
      const int slot = turn & 1;
      mbarrier_wait(room.heard + 8 * slot, (turn / 2 & 1) ^ 1);
      if (lane == 0) {
        tile = atomicAdd(a.words, 1);
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(room.next + 4 * slot), "r"(tile) : "memory");
        mbarrier_arrive(room.told + 8 * slot);
      }
      tile = __shfl_sync(~0u, tile, 0);
      if (tile < work.tiles) copy_item(a, work, room, {tile, 0, work.steps}, ring, lane);
    }
    if (lane == 0 && atomicAdd(a.words + 1, 1) == work.runs - 1) {  // all others have taken their last
      a.words[0] = 0;
      a.words[1] = 0;
    }
  }
}

// The tile that the copying thread took, heard by a warp.
__device__ __forceinline__ int next_tile(const Room& room, int turn, int lane) {
  const int slot = turn & 1;
  mbarrier_wait(room.told + 8 * slot, turn / 2 & 1);
  const int tile = ld_shared_u32(room.next + 4 * slot);
  __syncwarp();
  if (lane == 0) mbarrier_arrive(room.heard + 8 * slot);
  return tile;
}

#if NVFP4
// Scales of the next steps, whatever tiles they belong to: three warps.
__device__ __forceinline__ void convert_steps(const Room& room, int count, Ring& ring, int thread) {
  for (int k = 0; k < count; ++k, ring.advance()) {
    mbarrier_wait(room.scaled + 8 * ring.stage, ring.phase);
    convert_scales(room.table, ring.stage, thread, 32 * CONVERTERS);
    __syncwarp();
    if (thread % 32 == 0) mbarrier_arrive(room.converted + 8 * ring.stage);
  }
}

__device__ __forceinline__ void convert_all(const Work& work, const Room& room, int thread) {
  Ring ring;
  if constexpr (TAKEN == 2) {
    convert_steps(room, work.half().last - work.half().first, ring, thread);
  } else if constexpr (TAKEN == 0) {
    convert_steps(room, work.begin(work.run + 1) - work.begin(work.run), ring, thread);
  } else {
    for (int turn = 0; next_tile(room, turn, thread % 32) < work.tiles; ++turn) convert_steps(room, work.steps, ring, thread);
  }
}
#endif

__device__ __forceinline__ void zero(float (&d)[HELD]) {
#pragma unroll
  for (int i = 0; i < HELD; ++i) d[i] = 0.0f;
}

// Products: warpgroups. ``side``: which 32 columns of the tile; ``split``: which of SPLIT that take every SPLIT-th step each.

#if NVFP4
__device__ __forceinline__ void multiply(
    float (&d)[HELD], const Arguments& a, const Work& work, const Room& room, Item item, Ring& ring, int side, int split) {
  const int lane = threadIdx.x % 32, r = side * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4, count = item.last - item.first;
  const int first = ring.steps_until(split);
  Ring mine = ring;
  mine.advance(first);
  zero(d);
  for (int k = first; k < count; k += SPLIT) {
    const u32 at = room.stages + mine.stage * STAGE;
    const u64 x = wgmma_descriptor(at + W_BYTES);
    u32 w[2][4][4];  // one set is multiplied while the other is made
    Decoder decoder(raw, at, mine.stage, r, lane);
    mbarrier_wait(room.full + 8 * mine.stage, mine.phase);
    decoder.load(0);
    mbarrier_wait(room.converted + 8 * mine.stage, mine.phase);
    decoder.look_up();
    if (X_TILES > 1) decoder.load(1);
#pragma unroll
    for (int c = 0; c < X_TILES; ++c) {
      decoder.load_factors(room.table, c);
      if (c > 1) wgmma_wait_group<1>();  // of what read these registers
      decoder.scale(w[c % 2], c);
      if (c + 1 < X_TILES) decoder.look_up();
      if (c + 2 < X_TILES) decoder.load(c + 2);
      wgmma_fence();
#pragma unroll
      for (int part = 0; part < 4; ++part) product(d, w[c % 2][part], x + c * (ROWS * 128 / 16) + 2 * part);
      wgmma_commit_group();
    }
    wgmma_wait_group<0>();
    if (lane == 0) mbarrier_arrive(room.empty + 8 * mine.stage);
    mine.advance(SPLIT);
  }
  ring.advance(count);
}
#else
__device__ __forceinline__ void multiply(
    float (&d)[HELD], const Arguments& a, const Work& work, const Room& room, Item item, Ring& ring, int side, int split) {
  const int lane = threadIdx.x % 32, count = item.last - item.first;
  const int first = ring.steps_until(split);
  Ring mine = ring;
  mine.advance(first);
  int before = -1;
  zero(d);
  for (int k = first; k < count; k += SPLIT) {
    mbarrier_wait(room.full + 8 * mine.stage, mine.phase);
    const u32 at = room.stages + mine.stage * STAGE;
    const u64 w = wgmma_descriptor(at + side * (W_BYTES / SIDES)), x = wgmma_descriptor(at + W_BYTES);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < 4; ++part) product(d, w + 2 * part, x + 2 * part);
    wgmma_commit_group();
    if constexpr (SPLIT == 1) {  // the next product is under way when this one's stage goes back
      wgmma_wait_group<1>();
      if (before >= 0 && lane == 0) mbarrier_arrive(room.empty + 8 * before);
      before = mine.stage;
    } else {  // another warpgroup's is
      wgmma_wait_group<0>();
      if (lane == 0) mbarrier_arrive(room.empty + 8 * mine.stage);
    }
    mine.advance(SPLIT);
  }
  wgmma_wait_group<0>();
  if (before >= 0 && lane == 0) mbarrier_arrive(room.empty + 8 * before);
  ring.advance(count);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
dual_gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weights,
          const __grid_constant__ TensorMap h, const __grid_constant__ TensorMap kept, const unsigned char* gate_blocks,
          const unsigned char* up_blocks, const float* x_scale, const float* gate_scale, const float* up_scale,
          float* partials, u32* words, int M, int N, int K, int each, int more, int grain, int flip, int x_scales,
          int w_scales, int early) {
  const Arguments a = {&x, &weights, &h, &kept, {flip ? up_blocks : gate_blocks, flip ? gate_blocks : up_blocks},
                       x_scale, gate_scale, up_scale, partials, words, M, N, K, X_TILES * 128 * (NVFP4 ? ROWS : min(ROWS, M)),
                       flip != 0, x_scales != 0, w_scales != 0, early != 0};
  const Room room(shared_address(raw));
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4, lane = threadIdx.x % 32;  // known to be uniform
  Work work;
  work.steps = (K + STEP - 1) / STEP;
  work.row_tiles = (M + ROWS - 1) / ROWS;
  work.tiles = work.row_tiles * ((N + COLUMNS - 1) / COLUMNS);
  work.each = each;
  work.more = more;
  work.grain = grain;
  work.runs = gridDim.x;
  work.run = gridDim.x - 1 - blockIdx.x;
  if (lane == 0) {
    if (warp == 0) {
      prefetch_tensormap(a.weights);
      prefetch_tensormap(a.x);
    }
    for (int s = warp; s < STAGES; s += THREADS / 32) {  // 64 clocks each: by all warps
      mbarrier_init(room.full + 8 * s, 1);
      mbarrier_init(room.empty + 8 * s, 4 * SIDES);
      if (NVFP4) {
        mbarrier_init(room.scaled + 8 * s, 32);  // by lanes that copy
        mbarrier_init(room.converted + 8 * s, CONVERTERS);
      }
    }
    if (TAKEN && warp < 2) {
      mbarrier_init(room.told + 8 * warp, 1);
      mbarrier_init(room.heard + 8 * warp, 4 * GROUPS + CONVERTERS);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  if (group == GROUPS) {
    setmaxnreg_dec<COPY_REGISTERS>();  // first: the others wait for them
    if (warp == MULTIPLIERS / 32) copy_all(a, work, room, lane);
#if NVFP4
    if (warp > MULTIPLIERS / 32) convert_all(work, room, threadIdx.x - MULTIPLIERS - 32);
#endif
    if constexpr (TAKEN == 2) {  // as in exchange
      __syncwarp();
      cluster_sync_relaxed();
      cluster_sync();
    }
    return;
  }
  setmaxnreg_inc<MULTIPLY_REGISTERS>();
#if NVFP4
  fill_table(raw, threadIdx.x);
  bar_sync(ALL_GROUPS, MULTIPLIERS);
#endif
  griddepcontrol_wait();
  const Common common(a);
  const int side = group % SIDES, split = group / SIDES;
  float d[HELD];
  Ring ring;
  if constexpr (TAKEN == 2) {
    const Item item = work.half();
    multiply(d, a, work, room, item, ring, side, split);
    const bool finishes = gather(d, room, split);
    exchange(d, room, finishes);
    if (finishes) finish(d, a, work, room, item.tile, side, common);
  } else if constexpr (TAKEN == 0) {
    for (int unit = work.begin(work.run), end = work.begin(work.run + 1); unit < end;) {
      const Item item = work.at(unit, end);
      unit += item.last - item.first;
      multiply(d, a, work, room, item, ring, side, split);
      if (!gather(d, room, split)) continue;
      if (item.first > 0) {
        leave(d, a, work);
        continue;
      }
      if (item.last < work.steps) collect(d, a, work, item.tile);
      finish(d, a, work, room, item.tile, side, common);
    }
  } else {
    for (int turn = 0, tile; (tile = next_tile(room, turn, lane)) < work.tiles; ++turn) {
      multiply(d, a, work, room, {tile, 0, work.steps}, ring, side, split);
      if (gather(d, room, split)) finish(d, a, work, room, tile, side, common);
    }
  }
  if (threadIdx.x % 128 == 0) tma_store_wait_group_read<0>();  // shared memory must outlive what is sent from it
}
