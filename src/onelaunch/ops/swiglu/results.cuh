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

// One tile of 16-bit numbers through shared memory to one of the matrices of a map: value(i) is the thread's i-th of FINISHED / 4.
template <typename Value>
__device__ __forceinline__ void send(const TensorMap* map, int matrix, const Room& room, int row, int column, int piece, Value value) {
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) copies_out_read();  // what was sent before
  named_barrier(ALL, FINISHERS);
  constexpr int AT_ONCE = FINISHED % 32 == 0 ? 4 : 1;  // matrices of 8 x 8
#pragma unroll
  for (int j = 0; j < FINISHED / 8; j += AT_ONCE) {
    u32 v[AT_ONCE];
#pragma unroll
    for (int q = 0; q < AT_ONCE; ++q) v[q] = pair_of(value(2 * (j + q)), value(2 * (j + q) + 1));
    const u32 r = 8 * j + lane % (8 * AT_ONCE), at = room.out + r * (2 * COLUMNS) + (SIDES == 2 ? piece ^ (r % 8) : piece) * 16;
    store_transposed(at, v);
  }
  fence_to_copies();
  named_barrier(ALL, FINISHERS);
  if (threadIdx.x == 0) {
    copy_out_3d(map, room.out, column, matrix, row);
    copies_out_commit();
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
  if constexpr (TAKEN == 2) row += cluster_rank() * FINISHED;
  const int lane = threadIdx.x % 32, piece = side * 4 + threadIdx.x / 32 % 4, n = column + piece * 8 + lane / 4;
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
  send(a.h, 0, room, row, column, piece, [&](int i) { return gated(gate(i), up(i)); });
  if constexpr (KEEP) {
    send(a.kept, 0, room, row, column, piece, gate);
    send(a.kept, 1, room, row, column, piece, up);
  }
}
