// One persistent matrix product for Hopper GPUs: D = A B^T with float32 accumulators, followed by an epilogue in registers.
//
// Computes:   per tile, D [A_ROWS, B_ROWS] = A [A_ROWS, K] B [B_ROWS, K]^T, both operands K-major; then what EPILOGUE makes of D.
//             A is the operand whose rows are multiplied 64 at a time, B the one whose rows are the width of a WGMMA.
// Parts:      tile.cuh       sizes of a tile, its pipeline and its shared memory
//             scheduler.cuh  which CTA computes which k-blocks of which tiles (SCHEDULE)
//             mainloop.cuh   TMA producer, ring of stages, WGMMA consumers; nvfp4.cuh decodes A in registers
//             reduction.cuh  partial sums of warpgroups, of CTAs through memory, of CTAs through distributed shared memory
//             OPERANDS       kernel parameters, coordinates of a tile, its TMA loads (operands/*.cuh)
//             EPILOGUE       results of a tile (epilogue/*.cuh)
// Grid:       at most one CTA per SM; along x. Clusters of two CTAs for SPLIT_K_CLUSTER and MULTICAST.
// Warps:      A_ROWS / 64 * SPLIT consumer warpgroups, a producer warp, and three warps that convert block scales (NVFP4 only).
// Registers:  B_ROWS / 2 accumulators per consumer thread. setmaxnreg moves registers from the producer's warpgroup to consumers.
// Memory:     operands are read where they lie, by TMA; results leave by TMA stores.
// Launches:   overlap (programmatic dependent launch): CTAs set themselves up while the launch before ends, then wait for it.
// Source:     warp-specialized persistent kernels after CUTLASS 3; stream-K after Osama et al. (2023).
#include "hopper.cuh"
#include "wgmma.cuh"
#include "tile.cuh"
#include "scheduler.cuh"
#if NVFP4
#include "nvfp4.cuh"
#endif
#include OPERANDS
#include "mainloop.cuh"
#include "reduction.cuh"
#include EPILOGUE

// Compute a work item with WGMMAs of WIDTH columns, and store the tile's results if they are complete here; place() is the tile.
template <int WIDTH, typename Place>
__device__ __forceinline__ void compute(
    const Arguments& a, const Scheduler& scheduler, const SharedMemory& smem, WorkItem item, PipelineState& state, int side,
    int split, const Epilogue& epilogue, Place place) {
  float d[WIDTH / 2];
  multiply<WIDTH>(d, smem, item.last - item.first, state, side, split);
  if (reduce(d, a, scheduler, smem, item, split)) epilogue.template store<WIDTH>(d, a, smem, place(), side);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gemm_sm90(PARAMETERS) {
  const Arguments a = ARGUMENTS;
  const SharedMemory smem(shared_address(dynamic_shared));
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;  // known to be uniform
  const Scheduler scheduler = scheduler_of(a);
  const int lane = threadIdx.x % 32;
  if (lane == 0) {
    prefetch_tensormaps(a, warp);
    for (int s = warp; s < STAGES; s += THREADS / 32) {  // 64 cycles each, so all warps take part
      mbarrier_init(smem.full + 8 * s, 1);
      mbarrier_init(smem.empty + 8 * s, EMPTY_ARRIVALS);
      if (NVFP4) {
        mbarrier_init(smem.scaled + 8 * s, 32);  // by the lanes that copy
        mbarrier_init(smem.converted + 8 * s, CONVERTERS);
      }
    }
    if ((SCHEDULE == PERSISTENT || SCHEDULE == SPLIT_K_CLUSTER) && warp < 2) {  // the latter does not use them
      mbarrier_init(smem.told + 8 * warp, 1);
      mbarrier_init(smem.heard + 8 * warp, 4 * WARPGROUPS + CONVERTERS);
    }
    fence_mbarrier_init();
  }
  if constexpr (MULTICAST)
    cluster_sync();  // the other CTA arrives at these barriers, too
  else
    __syncthreads();

  if (warpgroup == WARPGROUPS) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();  // first, for the consumers wait for these registers
    produce(a, scheduler, smem, warp, lane);
    if constexpr (SCHEDULE == SPLIT_K_CLUSTER) {  // the barriers of exchange_halves
      __syncwarp();
      cluster_sync_relaxed();
      cluster_sync();
    }
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
#if NVFP4
    fill_table(dynamic_shared, threadIdx.x);
    bar_sync(ALL_WARPGROUPS, CONSUMERS);
#endif
    griddepcontrol_wait();
    const Epilogue epilogue(a);
    const int side = SCHEDULE == STATIC_PERSISTENT ? warpgroup : warpgroup % SIDES, split = warpgroup / SIDES;
    PipelineState state;
    scheduler.consume(smem, lane, [&](WorkItem item) INLINE {
      if constexpr (TILE_HAS_WIDTH) {
        const Tile tile = tile_at(scheduler, item.tile);
        auto place = [&]() INLINE { return tile; };
        if (NARROW < B_ROWS && tile.width() <= NARROW)
          compute<NARROW>(a, scheduler, smem, item, state, side, split, epilogue, place);
        else
          compute<B_ROWS>(a, scheduler, smem, item, state, side, split, epilogue, place);
      } else {  // the place is computed after the main loop, which needs the registers
        auto place = [&]() INLINE { return tile_at(scheduler, item.tile); };
        compute<B_ROWS>(a, scheduler, smem, item, state, side, split, epilogue, place);
      }
    });
    if (threadIdx.x % 128 == 0) tma_store_wait_group_read<0>();  // shared memory must outlive the stores that read it
  }
  if constexpr (MULTICAST) cluster_sync();  // and what the other CTA sends to it
}
