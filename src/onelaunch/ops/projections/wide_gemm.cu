// y = activation(x w^T + b) on Hopper GPUs in one launch: every segment of columns has an activation of its own, applied to sums in
// registers.
//
// Tile       BLOCK_M rows of x and up to BLOCK_N rows of the weight, all of one segment and, where heads are normalized, whole heads.
//            Segments, their tiles and what they are: segments.cuh, written for a layout. Products are BLOCK_N columns wide, or NARROW
//            where so few are left of a segment: a head's decay is one column.
// Warps      one copies tiles in. Two warpgroups multiply 64 rows of x each, channels in steps of 64, and end a tile each by itself.
// On chip    sums, in registers; a thread has 2 rows and a quarter of their columns, so that the norm of a head is a sum over its own
//            and three neighbours'.
// Memory     x and the weight where they lie; results leave by the copy engine, 64 columns at once. KEEP: also what a backward pass
//            needs and cannot make of them, z of SiLU and 1 / norm.
// Schedule   programs stay and take a tile of each round; neighbours share rows of x and of the weight in the L2 cache. SHARED: two
//            programs side by side have tiles of the same rows of x, or of the same columns, and each copies a half of what is
//            the same, to both.
//            Launches overlap: programs set themselves up beside the end of the launch before, and then wait for it.
// Source     experiment 058; the epilogue in registers as CUTLASS's visitor trees have it.
#include "hopper.cuh"
#include "products.cuh"
#include "segments.cuh"

enum { BFLOAT16, FLOAT16 };  // ELEMENT
enum { NOTHING, X, WEIGHT };  // SHARED
constexpr int CLUSTER = SHARED == NOTHING ? 1 : 2;
constexpr int STEP = 64;     // channels: 128 bytes a row
constexpr int GROUPS = 2, BLOCK_M = 64 * GROUPS, MULTIPLIERS = 128 * GROUPS, THREADS = MULTIPLIERS + 128;
constexpr int X_BYTES = BLOCK_M * 128, STAGE = X_BYTES + BLOCK_N * 128;
constexpr int PANEL = 64, PANEL_BYTES = 64 * 128, PANELS = 2;  // columns of a result that leave at once; of a warpgroup on their way
constexpr int COPY_REGISTERS = 40, MULTIPLY_REGISTERS = 232;
constexpr int SWATH = 16;  // tiles of rows that neighbours share
// Of a program, or of a cluster: tiles of rows and of columns.
constexpr int UNIT_ROWS = SHARED == WEIGHT ? CLUSTER : 1, UNIT_COLUMNS = SHARED == X ? CLUSTER : 1;
constexpr int COLUMN_UNITS = (COLUMN_TILES + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
enum { OUT = 1 };          // named barriers: one for each warpgroup

extern __shared__ __align__(128) char raw[];

struct Arguments {
  const TensorMap *x, *weight, *narrow, *y, *kept;
  const unsigned short* bias;
  float* rstd;
  unsigned short *y_at, *kept_at;
  int M, K, x_bytes;  // of x that a step brings
  float eps;
};

// Where things lie in shared memory.
struct Room {
  u32 stages, out, full, empty;
  __device__ __forceinline__ explicit Room(u32 base) {
    stages = (base + 1023) & ~1023u;
    out = stages + STAGES * STAGE;
    full = out + GROUPS * PANELS * PANEL_BYTES;
    empty = full + 8 * STAGES;
  }
};

struct Ring {
  int stage = 0;
  u32 phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

// Tiles of a program: rows of x and columns, of which there may be none in a cluster.
struct Work {
  int steps, row_units, units, stride, rounds;
  __device__ __forceinline__ explicit Work(const Arguments& a)
      : steps((a.K + STEP - 1) / STEP), row_units((a.M + BLOCK_M * UNIT_ROWS - 1) / (BLOCK_M * UNIT_ROWS)),
        units(row_units * COLUMN_UNITS), stride(gridDim.x / CLUSTER), rounds((units + stride - 1) / stride) {}
  // Of a round; none if it is behind the last one. Turned by three each time: else tiles of few columns could always fall to the
  // same programs.
  __device__ __forceinline__ int unit(int round) const { return round * stride + (blockIdx.x / CLUSTER + 3 * round) % stride; }
  __device__ __forceinline__ void place(int unit, int& row, int& tile) const {
    const int swath = unit / (SWATH * COLUMN_UNITS), begin = swath * SWATH, rows = min(SWATH, row_units - begin);
    const int at = unit - begin * COLUMN_UNITS, rank = CLUSTER > 1 ? cluster_ctarank() : 0;
    row = ((begin + at % rows) * UNIT_ROWS + (UNIT_ROWS > 1 ? rank : 0)) * BLOCK_M;
    tile = at / rows * UNIT_COLUMNS + (UNIT_COLUMNS > 1 ? rank : 0);
  }
};

// Copies: one thread commands the copy engine. Of few rows of x no more are copied than there are: what a product reads beside them
// are sums that nobody wants. A weight's few rows are not halved: a swizzled half would have to have eight.

__device__ __forceinline__ void copy_all(const Arguments& a, const Work& work, const Room& room) {
  Ring ring;
  for (int round = 0; round < work.rounds; ++round) {
    const int unit = work.unit(round);
    if (unit >= work.units) continue;
    int row, tile;
    work.place(unit, row, tile);
    const Columns columns = columns_of(tile);
    const bool few = NARROW < BLOCK_N && columns.count <= NARROW;
    for (int k = 0; k < work.steps; ++k, ring.advance()) {
      mbarrier_wait(room.empty + 8 * ring.stage, ring.phase ^ 1);  // in a cluster, of both
      const u32 at = room.stages + ring.stage * STAGE, bar = room.full + 8 * ring.stage;
      mbarrier_arrive_expect_tx(bar, a.x_bytes + (few ? NARROW : BLOCK_N) * 128);
      if constexpr (SHARED == X) {
        const u32 half = cluster_ctarank() * (BLOCK_M / 2);
        tma_load_2d_multicast(at + half * 128, a.x, k * STEP, row + half, bar);
      } else {
        tma_load_2d(at, a.x, k * STEP, row, bar);
      }
      if (few) {
        tma_load_2d(at + X_BYTES, a.narrow, k * STEP, columns.row, bar);
      } else if constexpr (SHARED == WEIGHT) {
        const u32 half = cluster_ctarank() * (BLOCK_N / 2);
        tma_load_2d_multicast(at + X_BYTES + half * 128, a.weight, k * STEP, columns.row + half, bar);
      } else {
        tma_load_2d(at + X_BYTES, a.weight, k * STEP, columns.row, bar);
      }
    }
  }
}

__device__ __forceinline__ void release(const Room& room, int stage) {
  mbarrier_arrive(room.empty + 8 * stage);
  if constexpr (CLUSTER > 1) mbarrier_arrive_cluster(room.empty + 8 * stage, cluster_ctarank() ^ 1);
}

// Sums of 64 rows of x by WIDTH columns.
template <int WIDTH>
__device__ __forceinline__ void multiply(float (&d)[WIDTH / 2], const Work& work, const Room& room, Ring& ring, int group) {
  const bool first_lane = threadIdx.x % 32 == 0;
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) d[i] = 0.0f;
  int before = -1;
  for (int k = 0; k < work.steps; ++k, ring.advance()) {
    mbarrier_wait(room.full + 8 * ring.stage, ring.phase);
    const u32 at = room.stages + ring.stage * STAGE;
    const u64 x = wgmma_descriptor(at + group * (64 * 128)), w = wgmma_descriptor(at + X_BYTES);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < 4; ++part) product(d, x + 2 * part, w + 2 * part);
    wgmma_commit_group();
    wgmma_wait_group<1>();  // the next one is under way when this one's stage goes back
    if (before >= 0 && first_lane) release(room, before);
    before = ring.stage;
  }
  wgmma_wait_group<0>();
  if (first_lane) release(room, before);
}

#include "activations.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
wide_gemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap narrow,
          const __grid_constant__ TensorMap y, const __grid_constant__ TensorMap kept, const unsigned short* bias, float* rstd,
          unsigned short* y_at, unsigned short* kept_at, int M, int K, int x_bytes, float eps) {
  const Arguments a = {&x, &weight, &narrow, &y, &kept, bias, rstd, y_at, kept_at, M, K, x_bytes, eps};
  const Room room(shared_address(raw));
  const Work work(a);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4, lane = threadIdx.x % 32;  // known to be uniform
  if (lane == 0) {
    if (warp < 5) prefetch_tensormap(warp == 0 ? a.x : warp == 1 ? a.weight : warp == 2 ? a.narrow : warp == 3 ? a.y : a.kept);
    for (int s = warp; s < STAGES; s += THREADS / 32) {
      mbarrier_init(room.full + 8 * s, 1);
      mbarrier_init(room.empty + 8 * s, 4 * GROUPS * CLUSTER);
    }
    fence_mbarrier_init();
  }
  if constexpr (CLUSTER > 1)
    cluster_sync();  // the other's barriers stand, too
  else
    __syncthreads();

  if (group == GROUPS) {
    setmaxnreg_dec<COPY_REGISTERS>();  // first: the others wait for them
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (warp == MULTIPLIERS / 32 && lane == 0) copy_all(a, work, room);
    __syncwarp();
  } else {
    setmaxnreg_inc<MULTIPLY_REGISTERS>();
    griddepcontrol_wait();
    Ring ring;
    for (int round = 0; round < work.rounds; ++round) {
      const int unit = work.unit(round);
      if (unit >= work.units) continue;
      int row, tile;
      work.place(unit, row, tile);
      const Columns columns = columns_of(tile);
      if (NARROW < BLOCK_N && columns.count <= NARROW) {
        float d[NARROW / 2];
        multiply<NARROW>(d, work, room, ring, group);
        finish<NARROW>(d, a, room, columns, row + group * 64, group);
      } else {
        float d[BLOCK_N / 2];
        multiply<BLOCK_N>(d, work, room, ring, group);
        finish<BLOCK_N>(d, a, room, columns, row + group * 64, group);
      }
    }
    if (threadIdx.x % 128 == 0) tma_store_wait_group_read<0>();  // shared memory must outlive what is sent from it
  }
  if constexpr (CLUSTER > 1) cluster_sync();  // and what the other sends to it
}
