// Hardware primitives of kernels that tests also run on a CPU, as thin wrappers with the names that CUDA or PTX give them.
//
// The decode kernels (decode/codegen/kernels), the one-launch GLA layer (ops/gla_layer/kernels) and the kernels for few rows
// of output_chain and linear_rnn (ops/*/kernels/few_rows.cu) include it before their other files. These are plain C++ over clock64(), the functions below, and
// a few that hopper.cuh already gives (bar_sync, cluster_..., fence_mbarrier_init, fence_proxy_async_shared, griddepcontrol_...,
// shared_address, tma_prefetch_3d, tma_store_commit_group, tma_store_wait_group_read).
// tests/decode/host/machine.cuh implements all of them for a CPU, so that tests run the kernels' own source on a host. A primitive that is added here must be added there too.
//
// Memory orders: "relaxed" and "acquire"/"release" are those of the PTX memory model, at GPU scope. A relaxed access is atomic (each
// scalar word is read or written whole; a vector access is one of several words) but orders no other access.
#pragma once
#include "hopper.cuh"

#define DEVICE __device__ __forceinline__

extern __shared__ __align__(128) char dynamic_shared[];
DEVICE char* shared_memory() { return dynamic_shared; }
DEVICE int cta_index() { return blockIdx.x; }
DEVICE int thread_index() { return threadIdx.x; }
// Wall-clock time in nanoseconds, for profile markers.
DEVICE u64 globaltimer() {
  u64 v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
  return v;
}
// Called once per iteration of a spin loop. Every such loop times out after about two seconds (waiting.cuh), so a word that is never
// stored gives an error and not a hung GPU. On the GPU this function is empty: polls that were 50 or 200 ns apart were not faster. On
// the host it lets other threads run.
DEVICE void spin_pause() {}
// End the launch with an error of the CUDA context.
DEVICE void trap() { __trap(); }

// mbarriers in shared memory, by pointer, and bulk copies (cp.async.bulk) that complete on them.

DEVICE void mbarrier_init(u64* bar, u32 count) { mbarrier_init(shared_address(bar), count); }
DEVICE void mbarrier_arrive_expect_tx(u64* bar, u32 bytes) { mbarrier_arrive_expect_tx(shared_address(bar), bytes); }
DEVICE void mbarrier_arrive(u64* bar) { mbarrier_arrive(shared_address(bar)); }
// Return whether the phase with this parity has completed. The hardware may suspend the thread for a while before it answers no.
DEVICE bool mbarrier_try_wait(u64* bar, u32 phase) {
  u32 completed;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(completed)
      : "r"(shared_address(bar)), "r"(phase)
      : "memory");
  return completed;
}
// Return whether the phase with this parity has completed, at once.
DEVICE bool mbarrier_test_wait(u64* bar, u32 phase) {
  u32 completed;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(completed)
      : "r"(shared_address(bar)), "r"(phase)
      : "memory");
  return completed;
}
// L2 cache policy for data that is read once per token, so that it does not evict data that is read more often.
DEVICE u64 createpolicy_evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Copy `bytes` from global to shared memory; addresses and size are multiples of 16. One thread issues it, and the copy subtracts its
// bytes from the transaction count of `bar` when it has landed.
DEVICE void cp_async_bulk(void* to, const void* from, u32 bytes, u64* bar, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(bar)), "l"(policy)
               : "memory");
}
// The same with the usual policy of L2.
DEVICE void cp_async_bulk(void* to, const void* from, u32 bytes, u64* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(bar))
               : "memory");
}
// Copy `bytes` from shared to global memory, as part of this thread's next group of stores (tma_store_commit_group); addresses and size are
// multiples of 16. See hopper.cuh for the fence before it and the wait before its source is overwritten.
DEVICE void cp_async_bulk_store(void* to, const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}
// Store 16 bytes to the same shared-memory address of CTA `rank` of the cluster, which may be the own one. The store subtracts its bytes
// from the transaction count of that CTA's mbarrier at the address of `bar` when it is visible there.
DEVICE void st_async(uint4* to, u32 rank, const uint4& v, u64* bar) {
  asm volatile(
      "{\n.reg .b32 there, bar;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 bar, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {%3, %4, %5, %6}, [bar];\n}" ::"r"(shared_address(to)),
      "r"(shared_address(bar)), "r"(rank), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}
// Copy a box of a tensor of three dimensions by TMA, see tma_load_3d() of hopper.cuh.
DEVICE void tma_load_3d(void* to, const TensorMap* map, int c0, int c1, int c2, u64* bar) {
  tma_load_3d(shared_address(to), map, c0, c1, c2, shared_address(bar));
}
// Copy a box into both CTAs of a cluster of two, to the same address of each, and complete on the barrier at the same address of each.
DEVICE void tma_load_3d_multicast(void* to, const TensorMap* map, int c0, int c1, int c2, u64* bar) {
  tma_load_3d_multicast(shared_address(to), map, c0, c1, c2, shared_address(bar));
}
// Copy 16 bytes to shared memory by the calling thread, and wait for all copies of this thread.
DEVICE void cp_async_16(void* to, const void* from) { cp_async<16>(shared_address(to), from); }
DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Read `bytes` of global memory into L2; address and size are multiples of 16.
DEVICE void prefetch_l2(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Read the 32 bytes of global memory around an address into L2.
DEVICE void prefetch_sector_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory"); }

// Threads of a warp, threads of a block. The named barrier of some threads of a block is bar_sync() of hopper.cuh.

DEVICE void syncwarp() { __syncwarp(); }
DEVICE float shfl_xor(float v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
DEVICE u64 shfl_xor(u64 v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
DEVICE void syncthreads() { __syncthreads(); }

// Global memory that other CTAs write.

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
// Each of the four 32-bit words is atomic; the 16 bytes as a whole are not.
DEVICE void store_relaxed(uint4* at, const uint4& v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE u64 load_relaxed(const u64* at) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
  return v;
}
// Each of the two 64-bit words is atomic.
DEVICE void load_relaxed(const u64* at, u64 (&v)[2]) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v[0]), "=l"(v[1]) : "l"(at) : "memory");
}
DEVICE void red_add_relaxed(u64* at, u64 v) { asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory"); }
// Add to a word of global memory and return its previous value.
DEVICE u32 atomic_add_relaxed(u32* at, u32 v) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(v) : "memory");
  return before;
}
// Add to a word of shared memory and return its previous value.
DEVICE u32 atomic_add_shared(u32* at, u32 v) {
  u32 before;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(shared_address(at)), "r"(v) : "memory");
  return before;
}
DEVICE void store_relaxed(u32* at, u32 v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory"); }
// A thread that acquires the word sees the writes of this thread, and of the threads that it had synchronized with before.
DEVICE void store_release(u64* at, u64 v) { asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory"); }
DEVICE void red_increment_release(u32* counter) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory"); }
DEVICE u32 load_acquire(const u32* counter) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
  return v;
}
// A plain load of 16 bytes. It never takes the non-coherent path (ld.global.nc), since this launch writes the data too.
DEVICE uint4 load_weak(const uint4* at) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}
// Load what no launch writes while this one runs, and what this CTA reads only once: past L1. A launch that begins while the one before
// it ends must not (griddepcontrol.wait does not order the non-coherent path): it takes load_streamed().
DEVICE uint4 load_once(const uint4* at) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}
DEVICE uint2 load_once(const uint2* at) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at) : "memory");
  return v;
}
DEVICE u32 load_once(const u32* at) {
  u32 v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
// Load past L1 what this CTA reads only once, and what the launch before may still write while this one begins.
DEVICE uint4 load_streamed(const uint4* at) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}
DEVICE uint2 load_streamed(const uint2* at) {
  uint2 v;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at) : "memory");
  return v;
}
DEVICE u32 load_streamed(const u32* at) {
  u32 v;
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
// Order writes of other threads that this thread has acquired before the bulk copies that it issues next: these read memory through the
// async proxy, which an ordinary fence does not cover.
DEVICE void fence_proxy_async() {
  __threadfence();
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
// The proxy's part of it alone. Where writers execute it as well, between their stores and a release, it orders these before the bulk copies
// of a thread that has acquired; the whole fence also waits for everything that the SM has stored (MEMBAR.SC.GPU).
DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Numbers.

// Return v unchanged, but hide its value from the compiler. Addresses computed from the result are recomputed at the place of use;
// without this the compiler hoists them out of the loop over layers and keeps them in registers, which then spill.
DEVICE int opaque(int v) {
  asm volatile("" : "+r"(v));
  return v;
}
DEVICE float uint_as_float(u32 v) { return __uint_as_float(v); }
DEVICE u32 float_as_uint(float v) { return __float_as_uint(v); }
// Round two floats to bfloat16 and pack them, the first in the lower half.
DEVICE u32 floats_to_bf16x2(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
// exp2, log2, 1/x and 1/sqrt(x) as one instruction each, correct to about 22 bits. Subnormal arguments and
// results are flushed to zero.
DEVICE float exp2_approx(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
DEVICE float log2_approx(float v) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
DEVICE float rcp_approx(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
DEVICE float rsqrt_approx(float v) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
// D += A * B of one warp: A is 16 x 16, B is 16 x 8, both bfloat16; D is 16 x 8 float32. Fragments are laid out over the lanes as the
// PTX manual says for mma.m16n8k16.
DEVICE void mma_m16n8k16(float (&d)[4], const uint4& a, const uint2& b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}
