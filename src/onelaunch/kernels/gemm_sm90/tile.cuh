// Sizes of a tile, of its pipeline and of its shared memory, for the configuration that the host defines (config.py).
#pragma once
#include "hopper.cuh"

#define INLINE __attribute__((always_inline))  // for lambdas

enum { BFLOAT16, FLOAT16, E4M3 };                                   // ELEMENT, RESULT
enum { STREAM_K, PERSISTENT, SPLIT_K_CLUSTER, STATIC_PERSISTENT };  // SCHEDULE
enum { NOTHING, OPERAND_A, OPERAND_B };                             // MULTICAST

constexpr int K_BLOCK = ELEMENT == E4M3 ? 128 : 64 * CHUNKS;  // channels of a stage; CHUNKS: 128-byte pieces of each row of B
constexpr int SIDES = A_ROWS / 64;                            // consumer warpgroups that multiply different rows of A
constexpr int WARPGROUPS = SIDES * SPLIT;                     // SPLIT of them share rows of A and take turns with k-blocks
constexpr int CONSUMERS = 128 * WARPGROUPS, THREADS = CONSUMERS + 128;
constexpr int OWNERS = 128 * SIDES;                           // threads that hold the sums of a tile in the end
constexpr int ACCUMULATORS = B_ROWS / 2;                      // of a consumer thread
constexpr int PRODUCER_WARP = CONSUMERS / 32, CONVERTERS = NVFP4 ? 3 : 0;  // warps that convert block scales follow the producer
constexpr int PRODUCER_REGISTERS = WARPGROUPS > 2 ? 56 : 40;
constexpr int CONSUMER_REGISTERS = WARPGROUPS == 4 ? 104 : WARPGROUPS == 3 ? 152 : 232;

constexpr int A_BYTES = A_ROWS * (NVFP4 ? K_BLOCK / 2 : 128), B_BYTES = CHUNKS * B_ROWS * 128, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int TABLE_BYTES = NVFP4 ? 256 * 256 : 0;                    // values of NVFP4 codes and block scales: nvfp4.cuh
constexpr int SPLIT_BYTES = (SPLIT - 1) * OWNERS * ACCUMULATORS * 4;  // sums that warpgroups hand to the one that finishes

constexpr int CLUSTER = MULTICAST || SCHEDULE == SPLIT_K_CLUSTER ? 2 : 1;
constexpr int EMPTY_ARRIVALS = 4 * SIDES * (MULTICAST ? CLUSTER : 1);  // consumer warps that release a stage

// Named barriers of the CTA. Those of the epilogue, one for each side, follow the ones that are in use.
enum { OWNER_WARPGROUPS = 1, SUMS_WRITTEN, SUMS_READ, ALL_WARPGROUPS };
constexpr int EPILOGUE_BARRIER = SCHEDULE == STATIC_PERSISTENT ? 1 : 5;

static_assert(A_ROWS % 64 == 0 && B_ROWS % 8 == 0 && B_ROWS <= 256, "the shape of a WGMMA");
static_assert(NARROW % 8 == 0 && NARROW <= B_ROWS, "the shape of a narrow WGMMA");
static_assert(2 <= WARPGROUPS && WARPGROUPS <= 4, "registers are handed over for these");
static_assert(STAGES % SPLIT == 0, "a warpgroup must see every round of its stages: PipelineState");
static_assert(SCHEDULE != SPLIT_K_CLUSTER || (B_ROWS % 16 == 0 && OWNERS * ACCUMULATORS * 2 <= STAGES * STAGE_BYTES),
              "halves of whole eights are exchanged, in the room of the stages");
static_assert(SPLIT == 1 || SCHEDULE == STREAM_K || SCHEDULE == SPLIT_K_CLUSTER,
              "the order of a sum must not depend on which tiles a CTA had before");
static_assert(WARPGROUPS != 3 || B_ROWS <= 128, "three warpgroups have no registers for more accumulators");
static_assert(NARROW == B_ROWS || SCHEDULE == STATIC_PERSISTENT, "reductions count on tiles of one width");

extern __shared__ __align__(128) char dynamic_shared[];

// Addresses in shared memory. The stages begin at a multiple of 1024 bytes, where the pattern of the 128-byte swizzle begins.
struct SharedMemory {
  u32 table, stages, store, sums;             // store: results on their way out
  u32 full, empty, scaled, converted;         // mbarriers of each stage
  u32 told, heard, next;                      // two slots for tiles taken from the counter: their mbarriers, and the tiles
  __device__ __forceinline__ explicit SharedMemory(u32 base) {
    table = base;
    stages = (base + TABLE_BYTES + 1023) & ~1023u;
    store = stages + STAGES * STAGE_BYTES;
    sums = store + STORE_BYTES;
    full = sums + SPLIT_BYTES;
    empty = full + 8 * STAGES;
    scaled = empty + 8 * STAGES;
    converted = scaled + 8 * STAGES;
    told = converted + 8 * STAGES;
    heard = told + 16;
    next = heard + 16;
  }
};

__device__ __forceinline__ u32 pack(float low, float high) {  // as two elements of the result
  u32 r;
  if (RESULT == BFLOAT16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
