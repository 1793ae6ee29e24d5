// Tile scheduler: which CTA computes which k-blocks of which tiles (SCHEDULE).
//
// STREAM_K:          the k-blocks of all tiles, in order, are cut into one contiguous work unit per CTA. Units are equally long
//                    to within one granule; a granule is one k-block, or all k-blocks of a tile (then no tile is shared). The
//                    CTA that owns a tile's first k-block adds the other CTAs' partial sums in the order of units (fix-up,
//                    reduction.cuh). CTA 0 has the last unit: a CTA waits only for later units, which belong to CTAs with
//                    smaller numbers and therefore started no later, so no CTA waits for one that has no SM yet.
// PERSISTENT:        CTAs take whole tiles from a counter in global memory, which is zero before and after a launch.
// SPLIT_K_CLUSTER:   the two CTAs of a cluster each compute one half of the k-blocks of one tile. They exchange sums through
//                    distributed shared memory, and each finishes one half of the columns of D.
// STATIC_PERSISTENT: a CTA, or with MULTICAST a cluster whose tiles have one operand in common, takes one tile per round of
//                    gridDim.x / CLUSTER tiles.
//
// mainloop.cuh calls produce() in the producer warp, and gemm.cu consume() in every consumer warp; both see the same items in
// the same order. mainloop.cuh also calls for_each_count() in the converter warps, and reduction.cuh begin(). The OPERANDS header
// fills in a Scheduler (scheduler_of), and turns a tile's number into its place in the result (tile_at, by coordinates()).
#pragma once
#include "tile.cuh"

struct WorkItem { int tile, first, last; };  // k-blocks [first, last) of a tile

struct Coordinates { int row, column; };  // of a tile in the result, counted in tiles

constexpr int RASTER_GROUP = SCHEDULE == STATIC_PERSISTENT ? 16 : 8;  // rows of tiles in a group: see coordinates()

// Shape of a cluster in tiles: two tiles of a row share their rows of A, two tiles of a column their rows of B.
constexpr int CLUSTER_ROWS = MULTICAST == OPERAND_B ? 2 : 1, CLUSTER_COLUMNS = MULTICAST == OPERAND_A ? 2 : 1;

struct Scheduler {
  int k_blocks;          // k-blocks of a tile
  int row_tiles, tiles;  // rows of tiles in the result, and tiles in all; with MULTICAST, counted in clusters of tiles
  // STREAM_K: granules of a unit, number of units with one granule more, k-blocks of a granule, this CTA's unit
  int unit_granules, longer_units, granule, unit;
  int stride, rounds;    // STATIC_PERSISTENT: number of CTAs or clusters, and most tiles of any of them

  // Return the coordinates of a tile in a result of `columns` tiles per row. The order is that of a grouped raster: within a
  // group of RASTER_GROUP rows of tiles, consecutive tiles go down a column first. So CTAs that run at the same time share both
  // operands in L2. With MULTICAST, `tile` and `columns` count clusters, and the CTA's rank selects its tile in the cluster.
  __device__ __forceinline__ Coordinates coordinates(int tile, int columns) const {
    const int group = tile / (RASTER_GROUP * columns), first_row = group * RASTER_GROUP;
    const int rows = min(RASTER_GROUP, row_tiles - first_row), in_group = tile - first_row * columns;
    const int rank = MULTICAST ? cluster_ctarank() : 0;
    return {(first_row + in_group % rows) * CLUSTER_ROWS + (CLUSTER_ROWS > 1 ? rank : 0),
            in_group / rows * CLUSTER_COLUMNS + (CLUSTER_COLUMNS > 1 ? rank : 0)};
  }

  // STREAM_K: return the first k-block of a unit, counted over all tiles.
  __device__ __forceinline__ int begin(int unit) const { return (unit * unit_granules + min(unit, longer_units)) * granule; }
  // STREAM_K: return the item of a unit that begins at k-block `k_block`. It ends with the tile, or at `end` with the unit.
  // Both arguments are counted over all tiles; the item's k-blocks are counted within its tile.
  __device__ __forceinline__ WorkItem item_at(int k_block, int end) const {
    const int tile = k_block / k_blocks, first = k_block - tile * k_blocks;
    return {tile, first, min(k_blocks, first + end - k_block)};
  }

  // SPLIT_K_CLUSTER: return this CTA's half of the k-blocks. If there is a single k-block, CTA 0 of the cluster has none.
  __device__ __forceinline__ WorkItem half() const {
    const int middle = k_blocks / 2;
    return cluster_ctarank() ? WorkItem{(int)(blockIdx.x / 2), middle, k_blocks} : WorkItem{(int)(blockIdx.x / 2), 0, middle};
  }

  // STATIC_PERSISTENT: call body(item) with each tile of this CTA. The assignment is rotated by three tiles each round, because
  //                    tiles of few columns, which are cheaper, could otherwise always fall to the same CTAs.
  template <typename Body>
  __device__ __forceinline__ void for_each_static(Body body) const {
    for (int round = 0; round < rounds; ++round) {
      const int tile = round * stride + (blockIdx.x / CLUSTER + 3 * round) % stride;
      if (tile >= tiles) continue;
      body(WorkItem{tile, 0, k_blocks});
    }
  }

  // Call load(item, early) with every item of this CTA, in the producer warp. With `early`, griddepcontrol_wait() has not been
  // executed yet: load() loads A before it, which no earlier launch writes, and then executes it, so only the first item gets
  // `early`. PERSISTENT, whose counters earlier launches use, and STATIC_PERSISTENT need griddepcontrol_wait() before.
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
      // Two slots let the producer take the next tile, and load it, while consumers still compute the one before. The first
      // number behind the last tile is passed on as well: it ends the consumers' loop.
      for (int turn = 0, tile = 0; tile < tiles; ++turn) {
        const int slot = turn & 1;
        mbarrier_wait(smem.tile_empty + 8 * slot, (turn / 2 & 1) ^ 1);
        if (lane == 0) {
          tile = atomicAdd(counters, 1);
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem.tile_slots + 4 * slot), "r"(tile) : "memory");
          mbarrier_arrive(smem.tile_full + 8 * slot);
        }
        tile = __shfl_sync(~0u, tile, 0);
        if (tile < tiles) load(WorkItem{tile, 0, k_blocks}, false);
      }
      // The CTA that comes here last resets both counters for the next launch: all others have taken their last tile.
      // counters[0] is the number of tiles taken, counters[1] the number of CTAs that have come here.
      if (lane == 0 && atomicAdd(counters + 1, 1) == (int)gridDim.x - 1) {
        counters[0] = 0;
        counters[1] = 0;
      }
    } else {
      for_each_static([&](WorkItem item) INLINE { load(item, false); });
    }
  }

  // PERSISTENT: wait for the producer to take a tile, return its number and release the slot; for every consumer and converter
  // warp. A number of `tiles` or more means that there is no tile left.
  __device__ __forceinline__ int next_tile(const SharedMemory& smem, int turn, int lane) const {
    const int slot = turn & 1;
    mbarrier_wait(smem.tile_full + 8 * slot, turn / 2 & 1);
    const int tile = ld_shared_u32(smem.tile_slots + 4 * slot);
    __syncwarp();  // all lanes have read the slot before lane 0 releases it
    if (lane == 0) mbarrier_arrive(smem.tile_empty + 8 * slot);
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

  // Call body(count) until the counts add up to the number of k-blocks of this CTA. This is for the converter warps, to which
  // it does not matter which tile a k-block belongs to.
  template <typename Body>
  __device__ __forceinline__ void for_each_count(const SharedMemory& smem, int lane, Body body) const {
    if constexpr (SCHEDULE == STREAM_K)
      body(begin(unit + 1) - begin(unit));
    else
      consume(smem, lane, [&](WorkItem item) INLINE { body(item.last - item.first); });
  }
};
