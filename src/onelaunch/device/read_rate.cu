// Two kernels that read a buffer once and write almost nothing, to measure the rate at which a GPU reads its memory.
// read_rate.py compiles and launches them for device/peaks.py.
//
// Computes:  sums[CTA * WARPS + warp] = sum of the 32-bit words that this warp read, modulo 2^32. The host compares the total of
//            `sums` with the sum that PyTorch computes. This proves that every byte arrived and that the compiler removed no load.
// Macros:    WARPS (consumer warps of a CTA), VECTORS (16-byte loads in flight per thread), CHUNK (bytes of one bulk copy),
//            STAGES (bulk copies in flight per CTA). read_rate.py sets them and the grids.
// Memory:    every kernel reads the whole buffer once and writes 4 bytes per warp.
//
// read_vectors, for every NVIDIA GPU
//   Grid:    any number of CTAs of 32 * WARPS threads, in a grid-stride loop.
//   Loads:   ld.global.nc.L1::no_allocate of 16 bytes, VECTORS of them in flight per thread. Shared memory is not used.
//
// read_bulk, for Hopper and later
//   Grid:    one CTA per SM, of 32 * (WARPS + 1) threads. CTA c reads a set of chunks, see the kernel.
//   Warps:   warp WARPS is the producer, of which lane 0 issues cp.async.bulk; warps 0 to WARPS - 1 are the consumers.
//   Shared:  ring[STAGES][CHUNK] (dynamic) and two mbarriers per stage.
//   Sync:    full[stage] completes when the bulk copy has written CHUNK bytes. The consumers wait for it before they read the
//            stage. empty[stage] completes when all WARPS consumer warps have arrived after their reads. The producer waits for it
//            before it overwrites the stage. In use number t = i / STAGES of a stage, the consumers wait for parity t & 1 of
//            full[stage], and the producer waits for parity (t - 1) & 1 of empty[stage], except in use 0.
//
// Source:    docs/notebook/peaks.md.

// Return the sum over the warp, modulo 2^32, to every lane. All 32 lanes must call.
__device__ __forceinline__ unsigned int warp_sum(unsigned int sum) {
  for (int mask = 16; mask; mask >>= 1) sum += __shfl_xor_sync(~0u, sum, mask);
  return sum;
}

// `from`: the buffer, aligned to 16 bytes. `count`: its length in vectors of 16 bytes. `sums`: one word per warp of the grid.
// In each step of the grid-stride loop a CTA reads VECTORS rows of blockDim.x adjacent vectors.
extern "C" __global__ void __launch_bounds__(32 * WARPS) read_vectors(const uint4* from, long long count, unsigned int* sums) {
  const long long step = (long long)gridDim.x * blockDim.x * VECTORS;
  unsigned int sum = 0;
  for (long long base = (long long)blockIdx.x * blockDim.x * VECTORS + threadIdx.x; base < count; base += step) {
    uint4 v[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      v[i] = {0, 0, 0, 0};
      const uint4* at = from + base + i * (int)blockDim.x;
      if (base + i * (int)blockDim.x < count)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w)
                     : "l"(at));
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) sum += v[i].x + v[i].y + v[i].z + v[i].w;
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sums[blockIdx.x * WARPS + threadIdx.x / 32] = sum;
}

#if __CUDA_ARCH__ >= 900
#include "hopper.cuh"

extern __shared__ __align__(128) char ring[];  // [STAGES][CHUNK]

// `from`: the buffer of `chunks` chunks of CHUNK bytes. `sums`: WARPS words per CTA.
// CTA c reads the chunks c * first, c * first + stride, ...: at most `each` of them, all below `chunks`. With first = 1 and
// stride = gridDim.x the chunks are interleaved over the CTAs; with first = each and stride = 1 each CTA reads a contiguous range.
extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1), 1)
    read_bulk(const char* from, long long chunks, long long first, long long stride, long long each, unsigned int* sums) {
  __shared__ alignas(8) u64 full[STAGES], empty[STAGES];
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(shared_address(full + stage), 1);
      mbarrier_init(shared_address(empty + stage), WARPS);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  const long long begin = blockIdx.x * first;
  const long long left = begin < chunks ? (chunks - begin + stride - 1) / stride : 0;
  const int count = (int)(left < each ? left : each), warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (warp == WARPS) {  // producer
    if (lane) return;
    u64 once;  // cache policy: no byte is read twice, so none needs to stay in L2
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    for (int i = 0; i < count; ++i) {
      const int stage = i % STAGES, turn = i / STAGES;
      const u32 bar = shared_address(full + stage);
      if (turn) mbarrier_wait(shared_address(empty + stage), (turn - 1) & 1);
      mbarrier_arrive_expect_tx(bar, CHUNK);
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
              shared_address(ring + stage * CHUNK)),
          "l"(from + (begin + i * stride) * CHUNK), "r"(CHUNK), "r"(bar), "l"(once)
          : "memory");
    }
    return;
  }
  u32 sum = 0;
  for (int i = 0; i < count; ++i) {
    const int stage = i % STAGES;
    mbarrier_wait(shared_address(full + stage), (i / STAGES) & 1);
    const u32 at = shared_address(ring + stage * CHUNK) + 16 * threadIdx.x;
#pragma unroll
    for (int row = 0; row < CHUNK / (512 * WARPS); ++row) {
      const uint4 v = ld_shared_v4_u32(at + row * 512 * WARPS);
      sum += v.x + v.y + v.z + v.w;
    }
    __syncwarp();  // all lanes must have read the stage before lane 0 releases it to the producer
    if (lane == 0) mbarrier_arrive(shared_address(empty + stage));
  }
  sum = warp_sum(sum);
  if (lane == 0) sums[blockIdx.x * WARPS + warp] = sum;
}
#endif
