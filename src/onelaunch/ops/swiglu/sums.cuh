// How sums of products come together: those of warpgroups, of the programs that share a tile, of two programs of a cluster.
#pragma once
#include "work.cuh"

__device__ __forceinline__ void add(float (&d)[HELD], int four, float4 more) {
  d[4 * four] += more.x;
  d[4 * four + 1] += more.y;
  d[4 * four + 2] += more.z;
  d[4 * four + 3] += more.w;
}

// Adds up what warpgroups that share rows have; true for the one that goes on with the sum.
__device__ __forceinline__ bool gather(float (&d)[HELD], const Room& room, int split) {
  if constexpr (SPLIT > 1) {
    const u32 mine = room.handed + threadIdx.x % FINISHERS * 16;
    constexpr int FOURS = HELD / 4, PLACE = FINISHERS * 16;  // of each thread, four sums
    bar_sync(TAKEN_OVER, MULTIPLIERS);
    if (split > 0) {
#pragma unroll
      for (int i = 0; i < FOURS; ++i)
        st_shared_v4_f32(mine + ((split - 1) * FOURS + i) * PLACE, d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
    }
    bar_sync(HAND, MULTIPLIERS);
    if (split > 0) return false;
#pragma unroll
    for (int i = 0; i < (SPLIT - 1) * FOURS; ++i) add(d, i % FOURS, ld_shared_v4_f32(mine + i * PLACE));
  }
  return true;
}

// Leaves the sums of a tile that an earlier run began.
__device__ __forceinline__ void leave(const float (&d)[HELD], const Arguments& a, const Work& work) {
  float4* to = reinterpret_cast<float4*>(a.partials + (long long)work.run * (HELD * FINISHERS)) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < HELD / 4; ++i) __stcg(to + i * FINISHERS, make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
  bar_sync(ALL, FINISHERS);
  if (threadIdx.x == 0) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(a.words + work.run), "r"(1) : "memory");
  }
}

// Adds what later runs left of a tile that this one began.
__device__ __forceinline__ void collect(float (&d)[HELD], const Arguments& a, const Work& work, int tile) {
  const int end = (tile + 1) * work.steps;
  for (int run = work.run + 1; work.begin(run) < end; ++run) {
    if (threadIdx.x == 0) {
      u32 there = 0;
      while (!there) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(a.words + run) : "memory");
      a.words[run] = 0;  // as the next launch must find it
    }
    bar_sync(ALL, FINISHERS);
    const float4* from = reinterpret_cast<const float4*>(a.partials + (long long)run * (HELD * FINISHERS)) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < HELD / 4; ++i) add(d, i, __ldcg(from + i * FINISHERS));
  }
}

// Hands the sums of the other program's rows to it, and adds what it hands back to those of this one, which then come first.
__device__ __forceinline__ void exchange(float (&d)[HELD], const Room& room, bool finishes) {
  constexpr int HALF = HELD / 2;
  const u32 rank = cluster_ctarank(), mine = room.stages + threadIdx.x * 16;
  cluster_sync_relaxed();  // nobody's stages are in use
  if (finishes) {
#pragma unroll
    for (int i = 0; i < HALF; i += 4) {
      float out[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) out[e] = rank ? d[i + e] : d[HALF + i + e];
      st_shared_cluster_v4(mine + i * (FINISHERS * 4), rank ^ 1, out[0], out[1], out[2], out[3]);
    }
  }
  cluster_sync();
  if (finishes) {
#pragma unroll
    for (int i = 0; i < HALF; ++i) d[i] = rank ? d[HALF + i] : d[i];
#pragma unroll
    for (int i = 0; i < HALF / 4; ++i) add(d, i, ld_shared_v4_f32(mine + i * (FINISHERS * 16)));
  }
}
