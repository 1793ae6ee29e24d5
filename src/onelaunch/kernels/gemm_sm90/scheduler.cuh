// Which CTA computes which k-blocks of which tiles.
//
// STREAM_K:          the k-blocks of all tiles are cut into one contiguous unit per CTA, of equal length in multiples of a
//                    grain. The CTA that owns a tile's first k-block adds the partial sums of the others in a fixed order
//                    (reduction.cuh). Units are handed out from the last to the first, so that no CTA waits for one that starts
//                    later.
// PERSISTENT:        CTAs take whole tiles from a counter in memory, which is zero before and after a launch.
// SPLIT_K_CLUSTER:   the two CTAs of a cluster compute half of the k-blocks of one tile each, exchange the sums of half of its
//                    columns of D through distributed shared memory, and finish the other half.
// STATIC_PERSISTENT: CTAs, or clusters whose tiles have an operand in common (MULTICAST), take every gridDim-th tile.
#pragma once
#include "tile.cuh"

struct WorkItem { int tile, first, last; };  // k-blocks [first, last) of a tile

struct Coordinates { int row, column; };  // in tiles

constexpr int SWATH = SCHEDULE == STATIC_PERSISTENT ? 16 : 8;  // tiles of rows whose neighbours share operands in the L2 cache

// Tiles of a cluster that multicasts an operand: side by side where they share the rows of A, else one above the other.
constexpr int CLUSTER_ROWS = MULTICAST == OPERAND_B ? 2 : 1, CLUSTER_COLUMNS = MULTICAST == OPERAND_A ? 2 : 1;

struct Scheduler {
  int k_blocks;          // of a tile
  int row_tiles, tiles;  // of the result; with MULTICAST counted by clusters
  int each, more, grain, unit;  // STREAM_K: grains of a unit, units that have one more, k-blocks of a grain, this CTA's unit
  int stride, rounds;    // STATIC_PERSISTENT: CTAs or clusters, and tiles of each of them

  // Return the place of a tile of a result with so many tiles of columns. Neighbours in time are neighbours in a swath of rows.
  __device__ __forceinline__ Coordinates coordinates(int tile, int columns) const {
    const int swath = tile / (SWATH * columns), first = swath * SWATH;
    const int rows = min(SWATH, row_tiles - first), at = tile - first * columns;
    const int rank = MULTICAST ? cluster_ctarank() : 0;
    return {(first + at % rows) * CLUSTER_ROWS + (CLUSTER_ROWS > 1 ? rank : 0),
            at / rows * CLUSTER_COLUMNS + (CLUSTER_COLUMNS > 1 ? rank : 0)};
  }

  // STREAM_K: the first k-block of a unit, counted over all tiles, and the part of the tile at a k-block that a unit has.
  __device__ __forceinline__ int begin(int unit) const { return (unit * each + min(unit, more)) * grain; }
  __device__ __forceinline__ WorkItem item_at(int k_block, int end) const {
    const int tile = k_block / k_blocks, first = k_block - tile * k_blocks;
    return {tile, first, min(k_blocks, first + end - k_block)};
  }

  // SPLIT_K_CLUSTER: the half of this CTA; of a single k-block the first CTA has none.
  __device__ __forceinline__ WorkItem half() const {
    const int middle = k_blocks / 2;
    return cluster_ctarank() ? WorkItem{(int)(blockIdx.x / 2), middle, k_blocks} : WorkItem{(int)(blockIdx.x / 2), 0, middle};
  }

  // STATIC_PERSISTENT: call body(item) with each tile. Tiles are rotated by three each round, else those of few columns could
  //                    always fall to the same CTAs.
  template <typename Body>
  __device__ __forceinline__ void for_each_static(Body body) const {
    for (int round = 0; round < rounds; ++round) {
      const int tile = round * stride + (blockIdx.x / CLUSTER + 3 * round) % stride;
      if (tile >= tiles) continue;
      body(WorkItem{tile, 0, k_blocks});
    }
  }

  // Call load(item, early) with every item of this CTA, in the producer warp; early is false for all but the first item.
  template <typename Load>
  __device__ __forceinline__ void produce(const SharedMemory& smem, u32* counters, int lane, bool early, Load load) const {
    if constexpr (SCHEDULE == SPLIT_K_CLUSTER) {
      load(half(), early);
    } else if constexpr (SCHEDULE == STREAM_K) {
      for (int first = begin(unit), at = first, end = begin(unit + 1); at < end;) {
        const WorkItem item = item_at(at, end);
        load(item, early && at == first);
        at += item.last - item.first;
      }
    } else if constexpr (SCHEDULE == PERSISTENT) {
      for (int turn = 0, tile = 0; tile < tiles; ++turn) {
        const int slot = turn & 1;
        mbarrier_wait(smem.heard + 8 * slot, (turn / 2 & 1) ^ 1);
        if (lane == 0) {
          tile = atomicAdd(counters, 1);
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem.next + 4 * slot), "r"(tile) : "memory");
          mbarrier_arrive(smem.told + 8 * slot);
        }
        tile = __shfl_sync(~0u, tile, 0);
        if (tile < tiles) load(WorkItem{tile, 0, k_blocks}, false);
      }
      if (lane == 0 && atomicAdd(counters + 1, 1) == (int)gridDim.x - 1) {  // all others have taken their last
        counters[0] = 0;
        counters[1] = 0;
      }
    } else {
      for_each_static([&](WorkItem item) INLINE { load(item, false); });
    }
  }

  // PERSISTENT: the tile that the producer took, as a consumer warp hears of it.
  __device__ __forceinline__ int next_tile(const SharedMemory& smem, int turn, int lane) const {
    const int slot = turn & 1;
    mbarrier_wait(smem.told + 8 * slot, turn / 2 & 1);
    const int tile = ld_shared_u32(smem.next + 4 * slot);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem.heard + 8 * slot);
    return tile;
  }

  // Call body(item) with every item of this CTA, in a consumer warp.
  template <typename Body>
  __device__ __forceinline__ void consume(const SharedMemory& smem, int lane, Body body) const {
    if constexpr (SCHEDULE == SPLIT_K_CLUSTER) {
      body(half());
    } else if constexpr (SCHEDULE == STREAM_K) {
      for (int at = begin(unit), end = begin(unit + 1); at < end;) {
        const WorkItem item = item_at(at, end);
        at += item.last - item.first;
        body(item);
      }
    } else if constexpr (SCHEDULE == PERSISTENT) {
      for (int turn = 0, tile; (tile = next_tile(smem, turn, lane)) < tiles; ++turn) body(WorkItem{tile, 0, k_blocks});
    } else {
      for_each_static(body);
    }
  }

  // Call body(count) until the sum of counts is the number of k-blocks of this CTA, whatever tiles they belong to.
  template <typename Body>
  __device__ __forceinline__ void for_each_count(const SharedMemory& smem, int lane, Body body) const {
    if constexpr (SCHEDULE == STREAM_K)
      body(begin(unit + 1) - begin(unit));
    else
      consume(smem, lane, [&](WorkItem item) INLINE { body(item.last - item.first); });
  }
};
