// Split-K: how partial sums of a tile come together: of warpgroups, of CTAs that share it (stream-K), of the CTAs of a cluster.
#pragma once
#include "scheduler.cuh"

template <int COUNT>
__device__ __forceinline__ void add(float (&d)[COUNT], int four, float4 more) {
  d[4 * four] += more.x;
  d[4 * four + 1] += more.y;
  d[4 * four + 2] += more.z;
  d[4 * four + 3] += more.w;
}

// Add the sums of warpgroups that share rows of A. Returns whether this warpgroup goes on with the total.
__device__ __forceinline__ bool reduce_warpgroups(float (&d)[ACCUMULATORS], const SharedMemory& smem, int split) {
  if constexpr (SPLIT > 1) {
    const u32 mine = smem.sums + threadIdx.x % OWNERS * 16;
    constexpr int FOURS = ACCUMULATORS / 4, PITCH = OWNERS * 16;  // bytes from four sums of each thread to the next four
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

// Stream-K: store the partial sums of a tile that an earlier unit began, in the workspace of this unit, and set its flag.
__device__ __forceinline__ void store_partials(const float (&d)[ACCUMULATORS], const Arguments& a, const Scheduler& scheduler) {
  float4* to = reinterpret_cast<float4*>(a.partials + (long long)scheduler.unit * (ACCUMULATORS * OWNERS)) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < ACCUMULATORS / 4; ++i)
    __stcg(to + i * OWNERS, make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
  bar_sync(OWNER_WARPGROUPS, OWNERS);
  if (threadIdx.x == 0) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(a.counters + scheduler.unit), "r"(1) : "memory");
  }
}

// Stream-K fix-up: add the partial sums that later units stored of a tile that this one began, in the order of units.
__device__ __forceinline__ void add_partials(float (&d)[ACCUMULATORS], const Arguments& a, const Scheduler& scheduler, int tile) {
  const int end = (tile + 1) * scheduler.k_blocks;
  for (int unit = scheduler.unit + 1; scheduler.begin(unit) < end; ++unit) {
    if (threadIdx.x == 0) {
      u32 stored = 0;
      while (!stored) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(stored) : "l"(a.counters + unit) : "memory");
      a.counters[unit] = 0;  // as the next launch must find it
    }
    bar_sync(OWNER_WARPGROUPS, OWNERS);
    const float4* from = reinterpret_cast<const float4*>(a.partials + (long long)unit * (ACCUMULATORS * OWNERS)) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < ACCUMULATORS / 4; ++i) add(d, i, __ldcg(from + i * OWNERS));
  }
}

// Split-K of a cluster: send the other CTA the sums of its half of D's columns, and add what it sends to those of this CTA,
// which are the first ones afterwards.
__device__ __forceinline__ void exchange_halves(float (&d)[ACCUMULATORS], const SharedMemory& smem, bool owns) {
  constexpr int HALF = ACCUMULATORS / 2;
  const u32 rank = cluster_ctarank(), mine = smem.stages + threadIdx.x * 16;
  cluster_sync_relaxed();  // no stage is in use any more
  if (owns) {
#pragma unroll
    for (int i = 0; i < HALF; i += 4) {
      float out[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) out[e] = rank ? d[i + e] : d[HALF + i + e];
      st_shared_cluster_v4(mine + i * (OWNERS * 4), rank ^ 1, out[0], out[1], out[2], out[3]);
    }
  }
  cluster_sync();
  if (owns) {
#pragma unroll
    for (int i = 0; i < HALF; ++i) d[i] = rank ? d[HALF + i] : d[i];
#pragma unroll
    for (int i = 0; i < HALF / 4; ++i) add(d, i, ld_shared_v4_f32(mine + i * (OWNERS * 16)));
  }
}

// Bring the partial sums of an item together. Returns whether this warpgroup has the tile's total, or its half, to finish.
template <int COUNT>
__device__ __forceinline__ bool reduce(
    float (&d)[COUNT], const Arguments& a, const Scheduler& scheduler, const SharedMemory& smem, WorkItem item, int split) {
  if constexpr (SCHEDULE == STATIC_PERSISTENT) {
    return true;
  } else if constexpr (SCHEDULE == SPLIT_K_CLUSTER) {
    const bool owns = reduce_warpgroups(d, smem, split);
    exchange_halves(d, smem, owns);
    return owns;
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
