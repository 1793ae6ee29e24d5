// Main loop: a producer warp loads k-blocks into a ring of STAGES stages by TMA; consumer warpgroups multiply them by WGMMA.
//
// Given:     a Scheduler, the kernel's Arguments, and the mbarriers of SharedMemory, initialized and visible (gemm.cu).
// Caller:    gemm.cu calls produce() in the producer's warpgroup and multiply() in the consumers.
// Stage s:   STAGE_BYTES of shared memory: a k-block of A, then the same k-block of B, with the 128-byte swizzle (codes of
//            NVFP4: swizzled over their shorter row).
// full[s]:   completes when TMA has written all bytes that load_a announced by arrive.expect_tx. Consumers wait for it. TMA
//            writes and WGMMA reads through the async proxy, so the mbarrier alone orders them.
// empty[s]:  counts one arrival of each consumer warp that reads the stage (with MULTICAST, of both CTAs), after
//            wgmma.wait_group has shown that the WGMMAs have read it. The producer waits for it before it loads again. The
//            first wait, for phase 1 of a new mbarrier, returns at once.
// NVFP4:     the producer warp also copies block scales with cp.async, whose completion arrives at scales_full[s]. Three
//            converter warps turn them into 16-bit factors and arrive at scales_converted[s], for which consumers wait before
//            they use the factors. The buffers of scales and factors are freed by empty[s] together with the stage.
// Constants: the OPERANDS header defines MAY_LOAD_EARLY, and WHOLE_WARP_LOADS (whether all 32 lanes of the producer warp run
//            load_item, as NVFP4's block scales need, or lane 0 alone). tile.cuh explains the macros.
// Leaves:    d, the float32 sums over the k-blocks of an item that this warpgroup has taken; reduction.cuh adds them up.
#pragma once
#include "scheduler.cuh"

// Position in the ring: a stage, and the parity of the number of times that the ring has been passed through.
//
// A warpgroup takes every SPLIT-th stage, whatever tile it belongs to, and STAGES is a multiple of SPLIT. So it waits for every
// phase of its stages. That is necessary: an mbarrier tells only whether its phase is even or odd, and loads need not complete
// in the order of issue. A warpgroup that skipped a phase could pass two phases early and read stale data.
struct PipelineState {
  int stage = 0;
  u32 phase = 0;
  // Return the number of k-blocks from here to the first one of warpgroup `split`, whose stages are `split` modulo SPLIT.
  __device__ __forceinline__ int k_blocks_until(int split) const { return (split + SPLIT - stage % SPLIT) % SPLIT; }
  // Move on by `count` k-blocks. STATIC_PERSISTENT calls this for one k-block only, which needs no division.
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

// Load all k-blocks of an item into the ring; every lane of the producer warp calls this (lane 0 only, if !WHOLE_WARP_LOADS).
// load_a() and load_b() of the OPERANDS header issue the TMA loads; load_a() also announces the bytes of both at full[s].
//
// With `early`, griddepcontrol_wait() has not been executed yet, but A does not depend on earlier launches: load A into all
// free stages, then wait, then load B. The block scales of A are so few that they are loaded with B. Without `early`,
// griddepcontrol_wait() must precede. Loads wait for empty[s], except those of the early stages, which are known to be free.
//
// `smem` is passed by value: by reference, the compiler computes its addresses again for each k-block of STREAM_K.
__device__ __forceinline__ void load_item(
    const Arguments& a, const Scheduler& scheduler, const SharedMemory smem, WorkItem item, PipelineState& state, int lane,
    bool early) {
  const int count = item.last - item.first;
  const Tile tile = tile_at(scheduler, item.tile);
  int ahead = 0;  // number of stages whose A is already loading
  if (early) {
    for (PipelineState at = state; ahead < min(count, STAGES); ++ahead, at.advance())
      if (lane == 0) load_a(a, smem, tile, item.first + ahead, at.stage);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
  }
  for (int i = 0; i < count; ++i, state.advance()) {
    if (i >= ahead) mbarrier_wait(smem.empty + 8 * state.stage, state.phase ^ 1);  // MULTICAST: free in both CTAs
    if (lane == 0) {
      if (i >= ahead) load_a(a, smem, tile, item.first + i, state.stage);
      load_b(a, smem, tile, item.first + i, state.stage);
    }
#if NVFP4
    // Rows of A are 8 of one weight, 8 of the other in turn. A lane copies rows that are 32 apart, so all are of one weight.
    const unsigned char* blocks = lane / 8 % 2 ? a.blocks[1] : a.blocks[0];
    copy_scales(smem.table, state.stage, blocks, tile.column, item.first + i, a.N, a.K, lane);
    cp_async_mbarrier_arrive_noinc(smem.scales_full + 8 * state.stage);
#endif
  }
}

#if NVFP4
// Convert the block scales of the next `count` k-blocks to factors. `thread` is the thread's index among the three converter
// warps.
__device__ __forceinline__ void convert_k_blocks(const SharedMemory& smem, int count, PipelineState& state, int thread) {
  for (int k = 0; k < count; ++k, state.advance()) {
    mbarrier_wait(smem.scales_full + 8 * state.stage, state.phase);
    convert_scales(smem.table, state.stage, thread, 32 * CONVERTER_WARPS);
    __syncwarp();  // all lanes have written their factors before lane 0 arrives
    if (thread % 32 == 0) mbarrier_arrive(smem.scales_converted + 8 * state.stage);
  }
}
#endif

// Run the last warpgroup: the producer warp, and for NVFP4 the warps that convert block scales. Returns when all loads of this
// CTA have been issued; the consumers wait for their completion.
//
// griddepcontrol.launch_dependents follows griddepcontrol.wait: the next launch may set itself up from then on. If A may be
// loaded early, only the producer warp executes both (at the latest in load_item); the converter warps touch no global memory.
__device__ __forceinline__ void produce(
    const Arguments& a, const Scheduler& scheduler, const SharedMemory& smem, int warp, int lane) {
  const bool early = MAY_LOAD_EARLY && SCHEDULE != PERSISTENT && a.early;  // PERSISTENT must wait: it reads a counter first
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
  if (!WHOLE_WARP_LOADS) __syncwarp();  // lane 0 was alone; the cluster barrier that follows is .aligned: it needs whole warps
#if NVFP4
  if (warp > PRODUCER_WARP) {
    const int thread = threadIdx.x - 32 * (PRODUCER_WARP + 1);
    PipelineState state;
    scheduler.for_each_count(smem, thread % 32, [&](int count) INLINE { convert_k_blocks(smem, count, state, thread); });
  }
#endif
}

// Consumers. A warpgroup multiplies the 64 rows of A with index `m_block`, and those k-blocks whose stage is `split` modulo
// SPLIT.

// Release a stage to the producer, with MULTICAST to those of both CTAs; called by one lane of each consumer warp, after
// wgmma_wait_group() has shown that the warp's WGMMAs have read the stage.
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
// Set d to the products summed over this warpgroup's share of the next `count` k-blocks, with A dequantized into registers.
// fill_table() and a barrier must precede. All stages are released and all WGMMAs have ended on return.
template <int WIDTH>
__device__ __forceinline__ void multiply(
    float (&d)[WIDTH / 2], const SharedMemory& smem, int count, PipelineState& state, int m_block, int split) {
  const int lane = threadIdx.x % 32, r = m_block * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int first = state.k_blocks_until(split);
  PipelineState mine = state;
  mine.advance(first);
  zero(d);
  for (int k = first; k < count; k += SPLIT) {
    const u32 at = smem.stages + mine.stage * STAGE_BYTES;
    const u64 b = wgmma_descriptor(at + A_BYTES);
    // A fragments of two chunks of 64 channels: one is multiplied while the other is decoded. The second index numbers the four
    // WGMMAs of a chunk, which have 16 channels each.
    u32 w[2][4][4];
    Decoder decoder(dynamic_shared, at, mine.stage, r, lane);
    mbarrier_wait(smem.full + 8 * mine.stage, mine.phase);
    decoder.load(0);
    mbarrier_wait(smem.scales_converted + 8 * mine.stage, mine.phase);
    decoder.look_up();
    if (CHUNKS > 1) decoder.load(1);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      decoder.load_factors(smem.table, c);
      if (c > 1) wgmma_wait_group<1>();  // the WGMMAs that read w[c % 2] have ended
      decoder.scale(w[c % 2], c);
      if (c + 1 < CHUNKS) decoder.look_up();
      if (c + 2 < CHUNKS) decoder.load(c + 2);
      wgmma_fence();
      // A descriptor's address is in units of 16 bytes: a chunk of B is B_ROWS rows of 128 bytes; a WGMMA reads 32 of each.
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
// Set d to the products summed over this warpgroup's share of the next `count` k-blocks, with both operands in shared memory.
// All stages are released and all WGMMAs have ended on return.
template <int WIDTH>
__device__ __forceinline__ void multiply(
    float (&d)[WIDTH / 2], const SharedMemory& smem, int count, PipelineState& state, int m_block, int split) {
  const int lane = threadIdx.x % 32;
  const int first = SCHEDULE == STATIC_PERSISTENT ? 0 : state.k_blocks_until(split);
  PipelineState mine = state;
  if constexpr (SCHEDULE != STATIC_PERSISTENT) mine.advance(first);
  int previous = -1;  // SPLIT == 1: stage of the k-block before, not released yet
  zero(d);
  for (int k = first; k < count; k += SPLIT) {
    mbarrier_wait(smem.full + 8 * mine.stage, mine.phase);
    const u32 at = smem.stages + mine.stage * STAGE_BYTES;
    const u64 first_a = wgmma_descriptor(at + m_block * (A_BYTES / M_BLOCKS)), first_b = wgmma_descriptor(at + A_BYTES);
    wgmma_fence();
    // Four WGMMAs, each of 32 bytes of the rows (2 in units of 16 bytes).
#pragma unroll
    for (int part = 0; part < 4; ++part) wgmma(d, first_a + 2 * part, first_b + 2 * part);
    wgmma_commit_group();
    if constexpr (SPLIT == 1) {  // keep one group of WGMMAs in flight: release the stage before this one
      wgmma_wait_group<1>();
      if (previous >= 0 && lane == 0) release(smem, previous);
      previous = mine.stage;
    } else {  // the other warpgroups' WGMMAs keep the tensor cores busy meanwhile
      wgmma_wait_group<0>();
      if (lane == 0) release(smem, mine.stage);
    }
    mine.advance(SPLIT);
  }
  wgmma_wait_group<0>();
  // SPLIT == 1: release the last stage. An item of STATIC_PERSISTENT always has a k-block; SPLIT_K_CLUSTER's may have none.
  if ((SCHEDULE == STATIC_PERSISTENT || previous >= 0) && lane == 0) release(smem, previous);
  if constexpr (SCHEDULE == STATIC_PERSISTENT)
    state = mine;
  else
    state.advance(count);
}
#endif
