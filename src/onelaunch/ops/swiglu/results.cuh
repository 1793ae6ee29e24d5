// From sums to results: scales, the gate, and out by the copy engine.
#pragma once
#include "work.cuh"

__device__ __forceinline__ float gated(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

__device__ __forceinline__ u32 pair_of(float low, float high) {
  u32 r;
  if (RESULT == BFLOAT16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// Of a tile of 16-bit numbers through shared memory to one of the matrices of a map, the 32 columns of a warpgroup, by itself: another may
// still multiply. In parts, so that one is on its way while the next is made. value(i) is the thread's i-th of FINISHED / 4.
constexpr int PART = FINISHED % 64 == 0 ? 64 : FINISHED % 32 == 0 ? 32 : FINISHED, PARTS = FINISHED / PART;  // rows

template <typename Value>
__device__ __forceinline__ void send(const TensorMap* map, int matrix, const Room& room, int row, int column, int side, Value value) {
  const int lane = threadIdx.x % 32, piece = threadIdx.x / 32 % 4;
  const bool sends = threadIdx.x % 128 == 0;
  constexpr int AT_ONCE = PART % 32 == 0 ? 4 : 1;  // matrices of 8 x 8
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    const u32 from = room.out + (side * PARTS + part) * (PART * 64);
    if (sends) tma_store_wait_group_read<PARTS - 1>();  // what was sent from there before
    bar_sync(OUT + side, 128);
#pragma unroll
    for (int j = 0; j < PART / 8; j += AT_ONCE) {
      u32 v[AT_ONCE];
#pragma unroll
      for (int q = 0; q < AT_ONCE; ++q) {
        const int i = 2 * (part * (PART / 8) + j + q);
        v[q] = pair_of(value(i), value(i + 1));
      }
      const u32 r = 8 * j + lane % (8 * AT_ONCE);
      stmatrix_trans(from + r * 64 + (piece ^ (r / 2 % 4)) * 16, v);  // swizzled over 64 bytes
    }
    fence_proxy_async_shared();
    bar_sync(OUT + side, 128);
    if (sends) {
      tma_store_3d(map, from, column + side * 32, matrix, row + part * PART);
      tma_store_commit_group();
    }
  }
}

// Scales that all rows have in common, or 1: read before there is a result to be scaled, which would wait for the memory.
struct Common {
  float x = 1.0f, gate = 1.0f, up = 1.0f;
  __device__ __forceinline__ explicit Common(const Arguments& a) {
    if (!SCALED) return;
    if (a.x_scale && !a.x_scales) x = *a.x_scale;
    if (!a.w_scales) gate = *a.gate_scale, up = *a.up_scale;
  }
};

// Scales, gate, and out.
__device__ __forceinline__ void finish(
    float (&d)[HELD], const Arguments& a, const Work& work, const Room& room, int tile, int side, const Common& common) {
  int row, column;
  work.place(tile, row, column);
  if constexpr (TAKEN == 2) row += cluster_ctarank() * FINISHED;
  const int lane = threadIdx.x % 32, n = column + side * 32 + threadIdx.x / 32 % 4 * 8 + lane / 4;
  float gate_by = common.gate, up_by = common.up;
  if (SCALED && a.w_scales && n < a.N) {
    gate_by = a.gate_scale[n];
    up_by = a.up_scale[n];
  }
  // the i-th of FINISHED / 4 that the thread has of each product, in pairs of neighbouring rows
  auto row_of = [&](int i) { return row + i / 2 * 8 + lane % 4 * 2 + i % 2; };
  auto by_row = [&](int i) { return SCALED && a.x_scales ? a.x_scale[min(row_of(i), a.M - 1)] : common.x; };
  auto gate = [&](int i) {
    const float sum = a.flip ? d[i / 2 * 4 + i % 2 + 2] : d[i / 2 * 4 + i % 2];
    return SCALED ? sum * (gate_by * by_row(i)) : sum;
  };
  auto up = [&](int i) {
    const float sum = a.flip ? d[i / 2 * 4 + i % 2] : d[i / 2 * 4 + i % 2 + 2];
    return SCALED ? sum * (up_by * by_row(i)) : sum;
  };
  send(a.h, 0, room, row, column, side, [&](int i) { return gated(gate(i), up(i)); });
  if constexpr (KEEP) {
    send(a.kept, 0, room, row, column, side, gate);
    send(a.kept, 1, room, row, column, side, up);
  }
}
