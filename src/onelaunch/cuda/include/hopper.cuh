// PTX instructions of Hopper (sm_90a) as functions: mbarriers, clusters, TMA, WGMMA, and shared memory by address.
//
// Most functions wrap one instruction and have its name (tma_*: cp.async.bulk.tensor), so the PTX manual is their documentation. Comments
// say only what is easily missed.
// Shared memory is addressed by 32 bits (shared_address), as the instructions take it. Included by the GEMMs in kernels/gemm_sm90, the
// decode kernels (through their machine.cuh) and the read benchmark of device/read_rate.cu.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {
  char bytes[128];
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Barriers: mbarriers in shared memory, and the named barriers of a CTA.
//
// A phase of an mbarrier completes when all its arrivals have come and all expected bytes of copies have landed (expect_tx). Waiters pass
// the parity of the phase that they wait for; it flips with each phase. The first phase has parity 0. A wait for parity 1 of a new mbarrier
// returns at once, as if a phase before the first had completed.

__device__ __forceinline__ void mbarrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
// Make this thread's mbarrier_init visible to TMA and to the other CTAs of the cluster. A barrier of the threads must follow before any of
// them uses the mbarriers.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Arrive, after adding `bytes` to those that the current phase expects.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// Arrive at the same barrier of another CTA of the cluster. No scope is named: one would add a fence over the whole GPU.
__device__ __forceinline__ void mbarrier_arrive_cluster(u32 bar, u32 rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(bar),
      "r"(rank)
      : "memory");
}
// Spin until the phase with this parity has completed, without a time-out. The braces make the labels local to each inlined copy.
__device__ __forceinline__ void mbarrier_wait(u32 bar, u32 phase) {
  asm volatile(
      "{\n.reg .pred completed;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 completed, [%0], %1;\n"
      "@completed bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(bar), "r"(phase)
      : "memory");
}
// Named barrier of `threads` threads of the CTA, whole warps. Barrier 0 is __syncthreads().
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Clusters: CTAs that reach each other's shared memory.

__device__ __forceinline__ u32 cluster_ctarank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Wait for all threads of the cluster; their earlier writes, also to each other's shared memory, are visible afterwards.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Wait for all threads of the cluster without ordering memory accesses.
__device__ __forceinline__ void cluster_sync_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// The same in two halves: arrive, go on, and wait later.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Store to the same shared-memory address of another CTA of the cluster.
__device__ __forceinline__ void st_shared_cluster_v4(u32 at, u32 rank, float a, float b, float c, float d) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "st.shared::cluster.v4.f32 [there], {%2, %3, %4, %5};\n}" ::"r"(at), "r"(rank), "f"(a), "f"(b), "f"(c), "f"(d)
      : "memory");
}

// Programmatic dependent launch: wait until earlier launches have ended and their writes are visible; let the next one begin.

__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// TMA. Coordinates are in elements, innermost dimension first. One thread issues a copy. A load completes on an mbarrier that expects its
// bytes. Stores complete in groups (tma_store_commit_group, tma_store_wait_group_read, by the thread that issued them). Before a store,
// each thread that wrote the shared memory executes fence_proxy_async_shared(), and then a barrier lets the issuing thread go on.

__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void tma_load_2d(u32 to, const TensorMap* map, int c0, int c1, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(bar)
      : "memory");
}
// Load into the same address of both CTAs of a cluster of two (mask 3), and complete on the barrier at the same address of each.
__device__ __forceinline__ void tma_load_2d_multicast(u32 to, const TensorMap* map, int c0, int c1, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(bar), "h"((unsigned short)3)
      : "memory");
}
__device__ __forceinline__ void tma_load_3d(u32 to, const TensorMap* map, int c0, int c1, int c2, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(bar)
      : "memory");
}
// Load into both CTAs of a cluster of two, as tma_load_2d_multicast() does.
__device__ __forceinline__ void tma_load_3d_multicast(u32 to, const TensorMap* map, int c0, int c1, int c2, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(bar), "h"((unsigned short)3)
      : "memory");
}
// Read the box of tma_load_3d() into L2. Nothing waits for it, and nobody needs to.
__device__ __forceinline__ void tma_prefetch_3d(const TensorMap* map, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
__device__ __forceinline__ void tma_load_4d(u32 to, const TensorMap* map, int c0, int c1, int c2, int c3, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(bar)
      : "memory");
}
__device__ __forceinline__ void tma_store_2d(const TensorMap* map, u32 from, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(c0), "r"(c1), "r"(from)
               : "memory");
}
__device__ __forceinline__ void tma_store_3d(const TensorMap* map, u32 from, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map), "r"(c0), "r"(c1),
               "r"(c2), "r"(from)
               : "memory");
}
// Copy BYTES (4, 8 or 16) by each calling thread, without TMA; addresses are multiples of BYTES.
template <int BYTES>
__device__ __forceinline__ void cp_async(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}
// Arrive at a barrier when all earlier cp.async of this thread have completed. "noinc": the barrier's count includes this arrival.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
// Close the group of all TMA stores that this thread has issued since its last group.
__device__ __forceinline__ void tma_store_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Wait until the shared memory of all but the PENDING most recent groups of stores may be overwritten.
template <int PENDING>
__device__ __forceinline__ void tma_store_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// Order this thread's writes to shared memory before later TMA and WGMMA accesses, which use the async proxy.
__device__ __forceinline__ void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// WGMMA. The instruction itself is generated for its shape, in wgmma.cuh (kernels/gemm_sm90/wgmma.py). Whole warpgroups call these.

// Order earlier accesses to registers before the WGMMAs that follow and use them as accumulators or as operand A.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait until all but the PENDING most recent groups of WGMMAs have ended: their accumulators may be read, their operands overwritten.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Descriptor of a K-major operand in shared memory: rows of 128 bytes with 128-byte swizzle. Addresses and strides are in units of 16
// bytes, so adding 2 advances K by 32 bytes. Fields: start address; leading offset 1 (not used with a swizzle); 1024 bytes from 8 rows to
// the next 8; 1 in the two highest bits, the 128-byte swizzle. `at` is a multiple of 1024, where the swizzle's pattern begins.
__device__ __forceinline__ u64 wgmma_descriptor(u32 at) {
  return (u64)((at & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
// Change the number of registers per thread of a warpgroup: the producer gives some back, the consumers take them.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Shared memory by address.

__device__ __forceinline__ u32 ld_shared_u32(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ uint4 ld_shared_v4_u32(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ float4 ld_shared_v4_f32(u32 at) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void st_shared_v4_f32(u32 at, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
__device__ __forceinline__ void st_shared_v4_u32(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// Store four 8 x 8 matrices of 16-bit elements, one per register. Lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(u32 at, const u32 (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]),
               "r"(v[3])
               : "memory");
}
// Store four matrices, or one, each transposed. Lane l gives the address of row l % 8 of matrix l / 8; for one matrix lanes 0 to 7 do.
__device__ __forceinline__ void stmatrix_trans(u32 at, const u32 (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v[0]), "r"(v[1]),
               "r"(v[2]), "r"(v[3])
               : "memory");
}
__device__ __forceinline__ void stmatrix_trans(u32 at, const u32 (&v)[1]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(at), "r"(v[0]) : "memory");
}
