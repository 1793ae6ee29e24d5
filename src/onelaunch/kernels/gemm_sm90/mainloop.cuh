// Main loop: a producer warp loads k-blocks into a ring of stages by TMA, and consumer warpgroups multiply them by WGMMA.
//
// Each stage has an mbarrier that TMA completes (full) and one at which consumer warps arrive (empty). A is read from shared
// memory or, for NVFP4, decoded into registers; then three more warps convert block scales, which the producer copies beside
// the codes.
#pragma once
#include "scheduler.cuh"

// Position in the ring of stages. A warpgroup takes every SPLIT-th stage, whatever tile it belongs to. Who waits for a stage
// must have seen its round before: an mbarrier tells only whether a round is even or odd, and loads need not complete in the
// order of issue.
struct PipelineState {
  int stage = 0;
  u32 phase = 0;
  __device__ __forceinline__ int k_blocks_until(int split) const { return (split + SPLIT - stage % SPLIT) % SPLIT; }
  __device__ __forceinline__ void advance(int count = 1) {
    if constexpr (SCHEDULE == STATIC_PERSISTENT) {
      if (++stage == STAGES) stage = 0, phase ^= 1;
    } else {
      stage += count;
      if (stage >= STAGES) {
        phase ^= stage / STAGES & 1;
        stage %= STAGES;
      }
    }
  }
};

// Producer

// Load all k-blocks of an item. With ``early``, earlier launches have not been waited for, but A may be read; the block scales
// of A are so few that they can come with B.
__device__ __forceinline__ void load_item(
    const Arguments& a, const Scheduler& scheduler, const SharedMemory& smem, WorkItem item, PipelineState& state, int lane,
    bool early) {
  const int count = item.last - item.first;
  const Tile tile = tile_at(scheduler, item.tile);
  int ahead = 0;
  if (early) {
    for (PipelineState first = state; ahead < min(count, STAGES); ++ahead, first.advance())
      if (lane == 0) load_a(a, smem, tile, item.first + ahead, first.stage);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
  }
  for (int i = 0; i < count; ++i, state.advance()) {
    if (i >= ahead) mbarrier_wait(smem.empty + 8 * state.stage, state.phase ^ 1);  // with MULTICAST, of both CTAs
    if (lane == 0) {
      if (i >= ahead) load_a(a, smem, tile, item.first + i, state.stage);
      load_b(a, smem, tile, item.first + i, state.stage);
    }
#if NVFP4
    const unsigned char* blocks = lane / 8 % 2 ? a.blocks[1] : a.blocks[0];
    copy_scales(smem.table, state.stage, blocks, tile.column, item.first + i, a.N, a.K, lane);
    cp_async_mbarrier_arrive_noinc(smem.scaled + 8 * state.stage);
#endif
  }
}

#if NVFP4
// Convert the block scales of the next k-blocks, by three warps.
__device__ __forceinline__ void convert_k_blocks(const SharedMemory& smem, int count, PipelineState& state, int thread) {
  for (int k = 0; k < count; ++k, state.advance()) {
    mbarrier_wait(smem.scaled + 8 * state.stage, state.phase);
    convert_scales(smem.table, state.stage, thread, 32 * CONVERTERS);
    __syncwarp();
    if (thread % 32 == 0) mbarrier_arrive(smem.converted + 8 * state.stage);
  }
}
#endif

// Run the last warpgroup: the producer warp, and those that convert block scales.
__device__ __forceinline__ void produce(
    const Arguments& a, const Scheduler& scheduler, const SharedMemory& smem, int warp, int lane) {
  const bool early = MAY_LOAD_EARLY && SCHEDULE != PERSISTENT && a.early;
  if (!MAY_LOAD_EARLY) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
  }
  if (warp == PRODUCER_WARP && (WHOLE_WARP_LOADS || lane == 0)) {
    if (MAY_LOAD_EARLY && !early) {
      griddepcontrol_wait();
      griddepcontrol_launch_dependents();
    }
    scheduler.produce(smem, a.counters, lane, early, [&, state = PipelineState()](WorkItem item, bool early) mutable INLINE {
      load_item(a, scheduler, smem, item, state, lane, early);
    });
  }
  if (!WHOLE_WARP_LOADS) __syncwarp();
#if NVFP4
  if (warp > PRODUCER_WARP) {
    const int thread = threadIdx.x - 32 * (PRODUCER_WARP + 1);
    PipelineState state;
    scheduler.for_each_count(smem, thread % 32, [&](int count) INLINE { convert_k_blocks(smem, count, state, thread); });
  }
#endif
}

// Consumers. ``side``: which 64 rows of A; ``split``: which of the SPLIT warpgroups that take every SPLIT-th k-block each.

// One lane of each consumer warp gives a stage back, in a cluster that multicasts to both producers.
__device__ __forceinline__ void release(const SharedMemory& smem, int stage) {
  mbarrier_arrive(smem.empty + 8 * stage);
  if constexpr (MULTICAST) mbarrier_arrive_cluster(smem.empty + 8 * stage, cluster_ctarank() ^ 1);
}

template <int COUNT>
__device__ __forceinline__ void zero(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) d[i] = 0.0f;
}

#if NVFP4
// Set d to the sums over the next ``count`` k-blocks, with A decoded into registers.
template <int WIDTH>
__device__ __forceinline__ void multiply(
    float (&d)[WIDTH / 2], const SharedMemory& smem, int count, PipelineState& state, int side, int split) {
  const int lane = threadIdx.x % 32, r = side * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int first = state.k_blocks_until(split);
  PipelineState mine = state;
  mine.advance(first);
  zero(d);
  for (int k = first; k < count; k += SPLIT) {
    const u32 at = smem.stages + mine.stage * STAGE_BYTES;
    const u64 b = wgmma_descriptor(at + A_BYTES);
    u32 w[2][4][4];  // one set is multiplied while the other is decoded
    Decoder decoder(dynamic_shared, at, mine.stage, r, lane);
    mbarrier_wait(smem.full + 8 * mine.stage, mine.phase);
    decoder.load(0);
    mbarrier_wait(smem.converted + 8 * mine.stage, mine.phase);
    decoder.look_up();
    if (CHUNKS > 1) decoder.load(1);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      decoder.load_factors(smem.table, c);
      if (c > 1) wgmma_wait_group<1>();  // the WGMMAs that read these registers have ended
      decoder.scale(w[c % 2], c);
      if (c + 1 < CHUNKS) decoder.look_up();
      if (c + 2 < CHUNKS) decoder.load(c + 2);
      wgmma_fence();
#pragma unroll
      for (int part = 0; part < 4; ++part) wgmma(d, w[c % 2][part], b + c * (B_ROWS * 128 / 16) + 2 * part);
      wgmma_commit_group();
    }
    wgmma_wait_group<0>();
    if (lane == 0) release(smem, mine.stage);
    mine.advance(SPLIT);
  }
  state.advance(count);
}
#else
// Set d to the sums over the next ``count`` k-blocks, with both operands in shared memory.
template <int WIDTH>
__device__ __forceinline__ void multiply(
    float (&d)[WIDTH / 2], const SharedMemory& smem, int count, PipelineState& state, int side, int split) {
  const int lane = threadIdx.x % 32;
  const int first = SCHEDULE == STATIC_PERSISTENT ? 0 : state.k_blocks_until(split);
  PipelineState mine = state;
  if constexpr (SCHEDULE != STATIC_PERSISTENT) mine.advance(first);
  int before = -1;
  zero(d);
  for (int k = first; k < count; k += SPLIT) {
    mbarrier_wait(smem.full + 8 * mine.stage, mine.phase);
    const u32 at = smem.stages + mine.stage * STAGE_BYTES;
    const u64 first_a = wgmma_descriptor(at + side * (A_BYTES / SIDES)), first_b = wgmma_descriptor(at + A_BYTES);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < 4; ++part) wgmma(d, first_a + 2 * part, first_b + 2 * part);
    wgmma_commit_group();
    if constexpr (SPLIT == 1) {  // the next WGMMAs are under way when this stage goes back
      wgmma_wait_group<1>();
      if (before >= 0 && lane == 0) release(smem, before);
      before = mine.stage;
    } else {  // another warpgroup's are
      wgmma_wait_group<0>();
      if (lane == 0) release(smem, mine.stage);
    }
    mine.advance(SPLIT);
  }
  wgmma_wait_group<0>();
  if ((SCHEDULE == STATIC_PERSISTENT || before >= 0) && lane == 0) release(smem, before);
  if constexpr (SCHEDULE == STATIC_PERSISTENT)
    state = mine;
  else
    state.advance(count);
}
#endif
