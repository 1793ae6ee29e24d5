// Split-K reductions: add up the partial sums of a tile that several warpgroups or CTAs have computed.
// gemm.cu calls reduce() after the main loop of each work item.
//
// Warpgroups of a CTA (SPLIT > 1): those with split > 0 write their accumulators to split_sums in shared memory, the one with
//     split 0 adds them in the order of `split`. Two named barriers: SUMS_READ, after which the buffer may be overwritten, and
//     SUMS_WRITTEN.
// Stream-K fix-up: a CTA whose unit begins inside a tile stores its accumulators in its slot of the workspace in global memory
//     (float32, ACCUMULATORS * EPILOGUE_THREADS numbers), then sets the flag of its unit with st.release.gpu. The CTA that owns
//     the tile's first k-block spins on the flags of the later units with ld.acquire.gpu, one after the other, and adds their
//     sums in that order, so that the result does not depend on timing. It resets each flag to 0 for the next launch. Only the
//     first item of a unit can begin inside a tile, so a unit has one slot at most to fill, and fills it before it waits for
//     others; scheduler.cuh says why its CTA is running by then.
// Cluster (SPLIT_K_CLUSTER): each CTA sends the sums of one half of the columns of D to the other CTA by distributed shared
//     memory, into the memory of the stages, and finishes the other half: rank 0 the first columns, rank 1 the last ones.
//
// An accumulator d[4 j + 2 h + e] of a thread belongs to row r + 8 h and column 8 j + c + e of D, where r and c depend only on
// the thread's index among the EPILOGUE_THREADS threads with its `split`. Threads with the same index hold the same elements,
// so a buffer of partial sums is simply [ACCUMULATORS / 4][EPILOGUE_THREADS] vectors of four sums.
#pragma once
#include "scheduler.cuh"

// Add four numbers to the accumulators with indices 4 * four to 4 * four + 3.
template <int COUNT>
__device__ __forceinline__ void add(float (&d)[COUNT], int four, float4 other) {
  d[4 * four] += other.x;
  d[4 * four + 1] += other.y;
  d[4 * four + 2] += other.z;
  d[4 * four + 3] += other.w;
}

// Add the sums of the warpgroups that share rows of A. All consumer warpgroups must call this. Returns whether this warpgroup
// (the one with split 0) holds the total; the others are done with the item.
__device__ __forceinline__ bool reduce_warpgroups(float (&d)[ACCUMULATORS], const SharedMemory& smem, int split) {
  if constexpr (SPLIT > 1) {
    const u32 mine = smem.split_sums + threadIdx.x % EPILOGUE_THREADS * 16;
    constexpr int FOURS = ACCUMULATORS / 4, PITCH = EPILOGUE_THREADS * 16;  // PITCH: bytes between groups of four sums
    bar_sync(SUMS_READ, CONSUMERS);
    if (split > 0) {
#pragma unroll
      for (int i = 0; i < FOURS; ++i)
        st_shared_v4_f32(mine + ((split - 1) * FOURS + i) * PITCH, d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
    }
    bar_sync(SUMS_WRITTEN, CONSUMERS);
    if (split > 0) return false;
#pragma unroll
    for (int i = 0; i < (SPLIT - 1) * FOURS; ++i) add(d, i % FOURS, ld_shared_v4_f32(mine + i * PITCH));
  }
  return true;
}

// Stream-K: store the partial sums of a tile that an earlier unit owns in this unit's slot of the workspace, and set its flag.
// The named barrier makes all threads' stores precede thread 0's release. EPILOGUE_THREADS threads must call this.
__device__ __forceinline__ void store_partials(const float (&d)[ACCUMULATORS], const Arguments& a, const Scheduler& scheduler) {
  float* slot = a.workspace + (long long)scheduler.unit * (ACCUMULATORS * EPILOGUE_THREADS);
  float4* to = reinterpret_cast<float4*>(slot) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < ACCUMULATORS / 4; ++i)
    __stcg(to + i * EPILOGUE_THREADS, make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
  bar_sync(EPILOGUE_WARPGROUPS, EPILOGUE_THREADS);
  if (threadIdx.x == 0) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(a.counters + scheduler.unit), "r"(1) : "memory");
  }
}

// Stream-K fix-up: add the partial sums that later units have stored for this unit's tile to d, in the order of units. Thread 0
// acquires the flag, and the named barrier lets the other threads read after it. EPILOGUE_THREADS threads must call this.
__device__ __forceinline__ void add_partials(
    float (&d)[ACCUMULATORS], const Arguments& a, const Scheduler& scheduler, int tile) {
  const int end = (tile + 1) * scheduler.k_blocks;
  for (int unit = scheduler.unit + 1; scheduler.begin(unit) < end; ++unit) {
    if (threadIdx.x == 0) {
      u32 stored = 0;
      while (!stored) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(stored) : "l"(a.counters + unit) : "memory");
      a.counters[unit] = 0;  // the next launch must find it cleared
    }
    bar_sync(EPILOGUE_WARPGROUPS, EPILOGUE_THREADS);
    const float* slot = a.workspace + (long long)unit * (ACCUMULATORS * EPILOGUE_THREADS);
    const float4* from = reinterpret_cast<const float4*>(slot) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < ACCUMULATORS / 4; ++i) add(d, i, __ldcg(from + i * EPILOGUE_THREADS));
  }
}

// Split-K of a cluster: send the other CTA this CTA's sums for the columns of D that the other finishes, and add those that it
// sends for this CTA's columns. Afterwards the first ACCUMULATORS / 2 elements of d are the totals of this CTA's half.
//
// All threads of both CTAs must execute the two cluster barriers (those of the producer do so in gemm.cu); only threads with
// `has_total` hold sums. The first barrier shows that neither CTA uses its stages any longer, since sums overwrite them. It
// orders no memory accesses, because none have to be. The second one (release, acquire) makes the sums visible.
__device__ __forceinline__ void exchange_halves(float (&d)[ACCUMULATORS], const SharedMemory& smem, bool has_total) {
  constexpr int HALF = ACCUMULATORS / 2;
  const u32 rank = cluster_ctarank(), mine = smem.stages + threadIdx.x * 16;  // the thread's first vector in either CTA
  cluster_sync_relaxed();
  if (has_total) {
#pragma unroll
    for (int i = 0; i < HALF; i += 4) {
      float out[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) out[e] = rank ? d[i + e] : d[HALF + i + e];
      st_shared_cluster_v4(mine + i * (EPILOGUE_THREADS * 4), rank ^ 1, out[0], out[1], out[2], out[3]);
    }
  }
  cluster_sync();
  if (has_total) {
#pragma unroll
    for (int i = 0; i < HALF; ++i) d[i] = rank ? d[HALF + i] : d[i];
#pragma unroll
    for (int i = 0; i < HALF / 4; ++i) add(d, i, ld_shared_v4_f32(mine + i * (EPILOGUE_THREADS * 16)));
  }
}

// Reduce the partial sums of an item as the schedule requires. All consumer warpgroups must call this with every item. Returns
// whether d now holds the tile's total (SPLIT_K_CLUSTER: of this CTA's half) and this warpgroup must run the epilogue.
// PERSISTENT and STATIC_PERSISTENT have SPLIT == 1 and items that are whole tiles, so d is the total already. A narrow tile of
// STATIC_PERSISTENT has fewer than ACCUMULATORS elements (COUNT), which the other reductions do not take.
template <int COUNT>
__device__ __forceinline__ bool reduce(
    float (&d)[COUNT], const Arguments& a, const Scheduler& scheduler, const SharedMemory& smem, WorkItem item, int split) {
  if constexpr (SCHEDULE == STATIC_PERSISTENT) {
    return true;
  } else if constexpr (SCHEDULE == SPLIT_K_CLUSTER) {
    const bool has_total = reduce_warpgroups(d, smem, split);
    exchange_halves(d, smem, has_total);
    return has_total;
  } else if constexpr (SCHEDULE == STREAM_K) {
    if (!reduce_warpgroups(d, smem, split)) return false;
    if (item.first > 0) {
      store_partials(d, a, scheduler);
      return false;
    }
    if (item.last < scheduler.k_blocks) add_partials(d, a, scheduler, item.tile);
    return true;
  } else {
    return reduce_warpgroups(d, smem, split);
  }
}
