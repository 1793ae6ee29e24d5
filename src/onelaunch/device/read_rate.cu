// Two kernels that read a buffer once and write almost nothing, to measure the rate at which a GPU reads its memory.
//
// read_vectors: 16-byte loads past the L1 cache, VECTORS of them in flight per thread; for every GPU.
// read_bulk:    one producer thread per CTA keeps STAGES copies of CHUNK bytes (cp.async.bulk) in flight into a ring in shared
//               memory, and WARPS consumer warps read them there; for Hopper and later.
// Checksum:     each warp writes the sum of the 32-bit words that it read, modulo 2^32, to sums[CTA * WARPS + warp]. The host
//               compares the total with PyTorch's, which proves that every byte arrived and that no load was removed.

__device__ __forceinline__ unsigned int sum_of_warp(unsigned int sum) {
  for (int mask = 16; mask; mask >>= 1) sum += __shfl_xor_sync(~0u, sum, mask);
  return sum;
}

// Grid-stride loop over `count` vectors of 16 bytes; each step of a CTA reads VECTORS rows of blockDim.x neighbouring vectors.
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
  sum = sum_of_warp(sum);
  if (threadIdx.x % 32 == 0) sums[blockIdx.x * WARPS + threadIdx.x / 32] = sum;
}

#if __CUDA_ARCH__ >= 900
#include "hopper.cuh"

extern __shared__ __align__(128) char ring[];  // [STAGES][CHUNK]

// CTA c reads the chunks c * first, c * first + stride, ...: at most `each` of them, all below `chunks`.
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

  if (warp == WARPS) {  // the producer
    if (lane) return;
    u64 once;  // nothing is read twice, so nothing needs to stay in L2
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
    __syncwarp();  // all lanes have read before the stage may be overwritten
    if (lane == 0) mbarrier_arrive(shared_address(empty + stage));
  }
  sum = sum_of_warp(sum);
  if (lane == 0) sums[blockIdx.x * WARPS + warp] = sum;
}
#endif
