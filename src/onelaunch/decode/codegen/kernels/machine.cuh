// What the decode kernels ask of the machine. All else is plain C++ over these functions, so that the same source runs on a host with
// another version of this file.
#pragma once
#include "hopper.cuh"

#define DEVICE __device__ __forceinline__

extern __shared__ __align__(128) char dynamic_shared[];
DEVICE char* shared_memory() { return dynamic_shared; }
DEVICE int cta_index() { return blockIdx.x; }
DEVICE int thread_index() { return threadIdx.x; }
DEVICE long long ticks() { return clock64(); }
DEVICE u64 nanoseconds() {
  u64 v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
  return v;
}
DEVICE void breathe() {}

// Barriers in shared memory, by pointer. A wait gives up now and then, to look whether all is well.

DEVICE void ring_init(u64* bar, u32 count) { mbarrier_init(shared_address(bar), count); }
DEVICE void ring_fence() { fence_mbarrier_init(); }
DEVICE void ring_expect(u64* bar, u32 bytes) { mbarrier_arrive_expect_tx(shared_address(bar), bytes); }
DEVICE void ring_arrive(u64* bar) { mbarrier_arrive(shared_address(bar)); }
DEVICE bool ring_passed(u64* bar, u32 phase) {
  u32 there;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(there)
      : "r"(shared_address(bar)), "r"(phase)
      : "memory");
  return there;
}
// A policy for what is read once a token: it should not push out what is read more often.
DEVICE u64 used_once() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE void ring_copy(void* to, const void* from, u32 bytes, u64* bar, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(bar)), "l"(policy)
               : "memory");
}

// Threads of a warp, threads of a block.

DEVICE void warp_meets() { __syncwarp(); }
DEVICE float from_lane_xor(float v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
DEVICE u64 from_lane_xor(u64 v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
DEVICE void block_meets() { __syncthreads(); }
DEVICE void workers_meet(int threads) { bar_sync(1, threads); }

// Memory that other blocks write. Relaxed: nothing else is ordered by it; a word is there whole or not at all.

DEVICE uint4 load_relaxed(const uint4* at) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}
DEVICE u32 load_relaxed(const u32* at) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
DEVICE u64 load_acquire(const u64* at) {
  u64 v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
  return v;
}
DEVICE void store_relaxed(uint4* at, const uint4& v) {  // word by word
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE u64 load_relaxed(const u64* at) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
  return v;
}
DEVICE void load_relaxed(const u64* at, u64 (&v)[2]) {  // each whole
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v[0]), "=l"(v[1]) : "l"(at) : "memory");
}
DEVICE void add_relaxed(u64* at, u64 v) { asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory"); }
// In shared memory, by threads of a block: what was there before.
DEVICE u32 add_shared(u32* at, u32 v) {
  u32 before;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(shared_address(at)), "r"(v) : "memory");
  return before;
}
DEVICE void store_relaxed(u32* at, u32 v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory"); }
// What this thread, and those it met before, wrote is seen by who acquires the word.
DEVICE void store_release(u64* at, u64 v) { asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory"); }
DEVICE void bump(u32* counter) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory"); }
DEVICE u32 load_acquire(const u32* counter) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
  return v;
}
// Written by this launch too, so never through the cache for constants.
DEVICE uint4 load_plain(const uint4* at) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}
// What other threads wrote, and this one was told of, is seen by copies that it asks for.
DEVICE void see_for_copies() {
  __threadfence();
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
DEVICE void begin_after_earlier_launches() { griddepcontrol_wait(); }
DEVICE void let_next_launch_begin() { griddepcontrol_launch_dependents(); }

// Numbers.

// The same, of which the compiler knows nothing: what is made of it is made here, and not kept in registers from layer to layer.
DEVICE int afresh(int v) {
  asm volatile("" : "+r"(v));
  return v;
}
DEVICE float as_float(u32 v) { return __uint_as_float(v); }
DEVICE u32 as_bits(float v) { return __float_as_uint(v); }
// Two numbers rounded to bfloat16, the first in the lower half.
DEVICE u32 round_pair(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
// Two to the power of v; a result below the smallest normal number is 0. Like the next three an instruction, right to 22 bits or so.
DEVICE float power(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
DEVICE float logarithm(float v) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
DEVICE float inverse(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
DEVICE float inverse_root(float v) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
// Sums of 16 rows by 8 columns over 16 channels of bfloat16, float32 sums: m16n8k16 of the PTX manual.
DEVICE void product(float (&d)[4], const uint4& a, const uint2& b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}
