// Matrix product D = A B^T for Hopper GPUs (sm_90a): warp-specialized, persistent, float32 accumulators, fused epilogue.
//
// Computes:   for each tile, D [A_ROWS, B_ROWS] = A [A_ROWS, K] B [B_ROWS, K]^T; both operands are K-major. EPILOGUE turns D
//             into results. A supplies the M dimension of WGMMA (64 rows for each consumer warpgroup), B its N dimension.
// Used by:    swiglu (A: rows of both weights, B: rows of x) and projections (A: rows of x, B: rows of the packed weight). The
//             host function gemm_of() in kernel.py makes one kernel of this file per configuration. It defines the macros in
//             capitals (tile.cuh lists them), among them OPERANDS and EPILOGUE, the paths of two headers of the operation.
// Files:      tile.cuh       tile sizes, the layout of shared memory, named barriers
//             scheduler.cuh  assignment of k-blocks and tiles to CTAs (SCHEDULE)
//             mainloop.cuh   TMA producer, mbarrier ring of STAGES stages, WGMMA consumers
//             nvfp4.cuh      dequantization of an NVFP4 operand A into registers
//             reduction.cuh  split-K: sums of warpgroups, stream-K fix-up, exchange through distributed shared memory
//             OPERANDS       operands/*.cuh: PARAMETERS of the kernel and ARGUMENTS made of them, tile coordinates, TMA loads
//             EPILOGUE       epilogue/*.cuh: results of a tile, stored by TMA
// Schedules:  SCHEDULE is STREAM_K, PERSISTENT, SPLIT_K_CLUSTER or STATIC_PERSISTENT. scheduler.cuh describes them. MULTICAST
//             names the operand that both CTAs of a cluster have in common, if there is one: each loads half of it into both.
// Grid:       one-dimensional, 1 CTA per SM at most; __launch_bounds__(THREADS, 1). Clusters of 2 CTAs for SPLIT_K_CLUSTER and
//             for MULTICAST.
// Warps:      A_ROWS / 64 * SPLIT consumer warpgroups (2 to 4), then one warpgroup with the producer warp and three warps that
//             convert block scales (NVFP4 only; idle otherwise).
// Registers:  B_ROWS / 2 float32 accumulators per consumer thread. setmaxnreg moves registers from the producer's warpgroup to
//             the consumers.
// Shared:     STAGES * STAGE_BYTES of operands, STORE_BYTES of results, sums of SPLIT warpgroups, 64 KiB of dequantization
//             tables for NVFP4, mbarriers. SharedMemory in tile.cuh has the offsets.
// Memory:     TMA reads operands where they lie, once per tile (with MULTICAST, once per cluster). TMA stores write the
//             results. Stream-K also writes and reads float32 partial sums of tiles that CTAs share.
// Protocol:   stage ring    full[s]: TMA completes the bytes of a stage; consumers wait. empty[s]: one lane of each consumer
//                           warp arrives when its WGMMAs have read the stage; the producer waits. NVFP4 adds scales_full[s]
//                           (cp.async has copied the block scales) and scales_converted[s] (converter warps have written the
//                           factors).
//             tile counter  PERSISTENT: tile_full / tile_empty guard two slots through which the producer tells the other warps
//                           which tile it has taken.
//             CTAs          STREAM_K: a release store to a flag per unit after its partial sums; the owner of the tile acquires
//                           it. SPLIT_K_CLUSTER: cluster barriers around the exchange. MULTICAST: empty[s] counts both CTAs'
//                           warps.
// Launches:   programmatic dependent launch. The CTA sets itself up while the previous launch ends. Then every warp that reads
//             or writes global memory executes griddepcontrol.wait first. The one exception is operand A, if the argument
//             `early` is set: the caller promises that no earlier launch writes it.
// Numerics:   WGMMA accumulates in float32. Every sum has a fixed order, so that a configuration gives the same bits each time.
// Source:     warp-specialized persistent kernels after CUTLASS 3; stream-K after Osama et al. (2023). Measurements:
//             docs/notebook/swiglu.md.
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

// Compute one work item in a consumer warpgroup, with WGMMAs of WIDTH columns. If this warpgroup ends up with the tile's total,
// run the epilogue on it. tile_of_item() returns the tile's coordinates.
template <int WIDTH, typename TileOfItem>
__device__ __forceinline__ void compute(
    const Arguments& a, const Scheduler& scheduler, const SharedMemory& smem, WorkItem item, PipelineState& state, int m_block,
    int split, const Epilogue& epilogue, TileOfItem tile_of_item) {
  float d[WIDTH / 2];
  multiply<WIDTH>(d, smem, item.last - item.first, state, m_block, split);
  if (reduce(d, a, scheduler, smem, item, split)) epilogue.template store<WIDTH>(d, a, smem, tile_of_item(), m_block);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gemm_sm90(PARAMETERS) {
  const Arguments a = ARGUMENTS;
  const SharedMemory smem(shared_address(dynamic_shared));
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;  // the shuffle makes them uniform
  const Scheduler scheduler = scheduler_of(a);
  const int lane = threadIdx.x % 32;
  if (lane == 0) {
    prefetch_tensormaps(a, warp);
    // An mbarrier.init takes 64 cycles, and those of diverged lanes run one after the other. So one lane per warp takes part.
    for (int s = warp; s < STAGES; s += THREADS / 32) {
      mbarrier_init(smem.full + 8 * s, 1);  // the producer's arrive.expect_tx
      mbarrier_init(smem.empty + 8 * s, EMPTY_ARRIVALS);
      if (NVFP4) {
        mbarrier_init(smem.scales_full + 8 * s, 32);  // every lane of the producer warp copies with cp.async
        mbarrier_init(smem.scales_converted + 8 * s, CONVERTER_WARPS);
      }
    }
    // Warp s initializes slot s of the tile counter. Only PERSISTENT uses the slots; SPLIT_K_CLUSTER initializes them in vain.
    if ((SCHEDULE == PERSISTENT || SCHEDULE == SPLIT_K_CLUSTER) && warp < 2) {
      mbarrier_init(smem.tile_full + 8 * warp, 1);  // lane 0 of the producer warp
      mbarrier_init(smem.tile_empty + 8 * warp, 4 * WARPGROUPS + CONVERTER_WARPS);  // lane 0 of each warp that reads it
    }
    fence_mbarrier_init();
  }
  if constexpr (MULTICAST)
    cluster_sync();  // the other CTA's loads and warps arrive at these mbarriers as well
  else
    __syncthreads();

  if (warpgroup == WARPGROUPS) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();  // before anything else: the consumers' setmaxnreg.inc waits for these registers
    produce(a, scheduler, smem, warp, lane);
    if constexpr (SCHEDULE == SPLIT_K_CLUSTER) {  // a cluster barrier counts all threads: join the two of exchange_halves
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
    // This warpgroup multiplies the m_block-th 64 rows of A by the k-blocks that fall to `split`, as described in mainloop.cuh.
    // STATIC_PERSISTENT has SPLIT == 1, so that m_block is simply the warpgroup's number.
    const int m_block = SCHEDULE == STATIC_PERSISTENT ? warpgroup : warpgroup % M_BLOCKS, split = warpgroup / M_BLOCKS;
    PipelineState state;
    scheduler.consume(smem, lane, [&](WorkItem item) INLINE {
      if constexpr (TILE_WIDTHS_VARY) {  // the coordinates tell the width, so they are needed before the main loop
        const Tile tile = tile_at(scheduler, item.tile);
        auto tile_of_item = [&]() INLINE { return tile; };
        if (NARROW < B_ROWS && tile.width() <= NARROW)
          compute<NARROW>(a, scheduler, smem, item, state, m_block, split, epilogue, tile_of_item);
        else
          compute<B_ROWS>(a, scheduler, smem, item, state, m_block, split, epilogue, tile_of_item);
      } else {  // only the epilogue needs the coordinates: they are computed after the main loop, which needs the registers
        auto tile_of_item = [&]() INLINE { return tile_at(scheduler, item.tile); };
        compute<B_ROWS>(a, scheduler, smem, item, state, m_block, split, epilogue, tile_of_item);
      }
    });
    // Shared memory must outlive the TMA stores that read it. The thread of each warpgroup that has issued them waits for them.
    if (threadIdx.x % 128 == 0) tma_store_wait_group_read<0>();
  }
  if constexpr (MULTICAST) cluster_sync();  // shared memory must outlive the other CTA's multicast loads and arrivals
}
