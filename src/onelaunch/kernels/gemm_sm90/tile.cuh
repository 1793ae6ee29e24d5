// Sizes of a tile, of its pipeline and of its shared memory. gemm_of() in kernel.py defines the configuration as macros.
// GemmConfig in config.py computes the same sizes for the launch. The other CUDA files use them.
//
// Roles:   every 64 rows of A have SPLIT consumer warpgroups. One more warpgroup consists of the producer warp and three warps
//          that convert block scales for NVFP4.
// Macros:  A_ROWS, B_ROWS  rows of both operands in a tile
//          STAGES          stages of the ring
//          STORE_BYTES     bytes of shared memory in which the epilogue prepares TMA stores
//          CHUNKS          128-byte pieces of each row of B in a k-block (more than 1 for NVFP4 only)
//          SPLIT           consumer warpgroups that share rows of A and take every SPLIT-th k-block (split-K within a CTA)
//          NARROW          width of the WGMMAs for tiles of few columns, B_ROWS if there are none
//          NVFP4           1 if A consists of NVFP4 codes, 0 otherwise
//          ELEMENT         type of the operands, an enumerator below; with NVFP4 that of B, to which A is decoded
//          RESULT          type of the stored results, an enumerator below: 16 bits
//          SCHEDULE        scheduler.cuh explains the enumerators
//          MULTICAST       operand that both CTAs of a cluster have in common, of which each loads half into both; or NOTHING
#pragma once
#include "hopper.cuh"

#define INLINE __attribute__((always_inline))  // for lambdas, which __forceinline__ does not reach

// kernel.py passes these enumerators as numbers: its tables must have the same order.
enum { BFLOAT16, FLOAT16, E4M3 };                                   // ELEMENT, RESULT
enum { STREAM_K, PERSISTENT, SPLIT_K_CLUSTER, STATIC_PERSISTENT };  // SCHEDULE
enum { NOTHING, OPERAND_A, OPERAND_B };                             // MULTICAST

constexpr int K_BLOCK = ELEMENT == E4M3 ? 128 : 64 * CHUNKS;  // channels of a k-block, which fills one stage
constexpr int M_BLOCKS = A_ROWS / 64;                         // blocks of 64 rows of A, each for SPLIT consumer warpgroups
constexpr int WARPGROUPS = M_BLOCKS * SPLIT;                  // consumer warpgroups
constexpr int CONSUMERS = 128 * WARPGROUPS, THREADS = CONSUMERS + 128;  // consumer threads; threads of the CTA
constexpr int EPILOGUE_THREADS = 128 * M_BLOCKS;              // consumer threads that hold the tile's total after the reduction
constexpr int ACCUMULATORS = B_ROWS / 2;                      // float32 accumulators of a consumer thread
constexpr int PRODUCER_WARP = CONSUMERS / 32, CONVERTER_WARPS = NVFP4 ? 3 : 0;  // the converters follow the producer warp
// Registers per thread after setmaxnreg. All threads together must not have more than they had at launch, because
// setmaxnreg.inc waits until enough registers are free.
constexpr int PRODUCER_REGISTERS = WARPGROUPS > 2 ? 56 : 40;
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 4 ? 104 : WARPGROUPS == 3 ? 152 : 232;

constexpr int A_BYTES = A_ROWS * (NVFP4 ? K_BLOCK / 2 : 128), B_BYTES = CHUNKS * B_ROWS * 128, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int TABLE_BYTES = NVFP4 ? 256 * 256 : 0;                              // look-up table and scale factors (nvfp4.cuh)
constexpr int SPLIT_BYTES = (SPLIT - 1) * EPILOGUE_THREADS * ACCUMULATORS * 4;  // sums of all warpgroups but those with split 0

constexpr int CLUSTER = MULTICAST || SCHEDULE == SPLIT_K_CLUSTER ? 2 : 1;  // CTAs of a cluster
// Arrivals that free a stage: one by each consumer warp that reads it, with MULTICAST those of both CTAs.
constexpr int EMPTY_ARRIVALS = 4 * M_BLOCKS * (MULTICAST ? CLUSTER : 1);

// Named barriers of the CTA (0 is __syncthreads). The epilogue has one for each block of 64 rows, from EPILOGUE_BARRIER on.
// STATIC_PERSISTENT uses no other one.
enum { EPILOGUE_WARPGROUPS = 1, SUMS_WRITTEN, SUMS_READ, ALL_WARPGROUPS };
constexpr int EPILOGUE_BARRIER = SCHEDULE == STATIC_PERSISTENT ? 1 : 5;

static_assert(A_ROWS % 64 == 0 && B_ROWS % 8 == 0 && B_ROWS <= 256, "WGMMA multiplies 64 rows by 8 to 256 columns");
static_assert(NARROW % 8 == 0 && NARROW <= B_ROWS, "a narrow WGMMA has a multiple of 8 columns, at most B_ROWS");
static_assert(2 <= WARPGROUPS && WARPGROUPS <= 4, "setmaxnreg has register counts for 2, 3 and 4 consumer warpgroups only");
static_assert(STAGES % SPLIT == 0, "a warpgroup must see every phase of its stages: see PipelineState");
static_assert(SCHEDULE != SPLIT_K_CLUSTER || (B_ROWS % 16 == 0 && EPILOGUE_THREADS * ACCUMULATORS * 2 <= STAGES * STAGE_BYTES),
              "a cluster exchanges halves of whole groups of 8 columns, through the memory of the stages");
// The stage decides which warpgroup takes a k-block, and so the order of the tile's sum. It follows from the number of k-blocks
// that the CTA computed before, which varies with PERSISTENT, since tiles are taken from a counter.
// The main loop of STATIC_PERSISTENT assumes SPLIT == 1.
static_assert(SPLIT == 1 || SCHEDULE == STREAM_K || SCHEDULE == SPLIT_K_CLUSTER,
              "the order of a sum must not depend on the tiles that a CTA computed before");
static_assert(WARPGROUPS != 3 || B_ROWS <= 128, "three consumer warpgroups have no registers for more than 64 accumulators");
static_assert(NARROW == B_ROWS || SCHEDULE == STATIC_PERSISTENT, "the reductions assume tiles of one width");

extern __shared__ __align__(128) char dynamic_shared[];

// Byte addresses of a CTA's buffers in shared memory. The stages begin at a multiple of 1024 bytes, the period of the 128-byte
// swizzle, which TMA and WGMMA compute from address bits.
struct SharedMemory {
  // table: where NVFP4's block scales and factors are addressed; fill_table() and look-ups use dynamic_shared, the same memory.
  // staging: results that TMA stores read.
  u32 table, stages, staging, split_sums;
  u32 full, empty, scales_full, scales_converted;    // mbarriers of 8 bytes, one of each kind per stage
  u32 tile_full, tile_empty, tile_slots;             // PERSISTENT: mbarriers of two slots, and the tile numbers in them
  __device__ __forceinline__ explicit SharedMemory(u32 base) {
    table = base;
    stages = (base + TABLE_BYTES + 1023) & ~1023u;
    staging = stages + STAGES * STAGE_BYTES;
    split_sums = staging + STORE_BYTES;
    full = split_sums + SPLIT_BYTES;
    empty = full + 8 * STAGES;
    scales_full = empty + 8 * STAGES;
    scales_converted = scales_full + 8 * STAGES;
    tile_full = scales_converted + 8 * STAGES;
    tile_empty = tile_full + 16;
    tile_slots = tile_empty + 16;
  }
};

// Round two float32 numbers to two neighbouring 16-bit elements of the result.
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 r;
  if (RESULT == BFLOAT16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
