// The machine of the decode kernels on a host, as a kernel sees it: what machine.cpp does, which is compiled once for all kernels.
// Enough to run the kernels' own source: warps' collective instructions, barriers, the copy engine, words shared between blocks.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define DEVICE inline
#define EXPORTED extern "C" __attribute__((visibility("default")))
typedef unsigned int u32;
typedef unsigned long long u64;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };

namespace host {
// The thread that runs.
struct Place {
  char* shared;
  int cta, thread;
};
extern const Place* here;
extern long long clock;

void yield();
u64 exchange(u64 v, int mask);
void multiply(float (&d)[4], const u32 (&operands)[6]);
// A watch for races looks at shared memory below `unwatched`, where so many barriers begin.
struct Launch {
  int ctas, threads, shared_bytes, unwatched, barriers;
  u32 seed;
  long long most_sweeps;
};
bool launch(const Launch& of, void (*body)());
}  // namespace host

DEVICE char* shared_memory() { return host::here->shared; }
DEVICE int cta_index() { return host::here->cta; }
DEVICE int thread_index() { return host::here->thread; }
DEVICE long long ticks() { return host::clock << 16; }
DEVICE u64 nanoseconds() { return host::clock << 15; }
DEVICE void breathe() { host::yield(); }

void ring_init(u64* bar, u32 count);
DEVICE void ring_fence() {}
void ring_expect(u64* bar, u32 bytes);
void ring_arrive(u64* bar);
bool ring_passed(u64* bar, u32 phase);
DEVICE u64 used_once() { return 0; }
void ring_copy(void* to, const void* from, u32 bytes, u64* bar, u64);

void warp_meets();
DEVICE u64 from_lane_xor(u64 v, int mask) { return host::exchange(v, mask); }
DEVICE float from_lane_xor(float v, int mask) {
  u32 bits;
  memcpy(&bits, &v, 4);
  bits = (u32)from_lane_xor((u64)bits, mask);
  memcpy(&v, &bits, 4);
  return v;
}
void block_meets();
void workers_meet(int threads);

DEVICE uint4 load_relaxed(const uint4* at) { return *(const volatile u64*)at, *at; }
DEVICE u32 load_relaxed(const u32* at) { return *(const volatile u32*)at; }
DEVICE u64 load_relaxed(const u64* at) { return *(const volatile u64*)at; }
DEVICE void load_relaxed(const u64* at, u64 (&v)[2]) { v[0] = at[0], v[1] = at[1]; }
DEVICE void add_relaxed(u64* at, u64 v) { *at += v; }
DEVICE u32 add_shared(u32* at, u32 v) { return *at += v, *at - v; }
DEVICE void store_relaxed(uint4* at, const uint4& v) { *at = v; }
DEVICE void store_relaxed(u32* at, u32 v) { *(volatile u32*)at = v; }
DEVICE void store_release(u64* at, u64 v) { *(volatile u64*)at = v; }
DEVICE void bump(u32* counter) { ++*counter; }
DEVICE u32 load_acquire(const u32* counter) { return *(const volatile u32*)counter; }
DEVICE u64 load_acquire(const u64* at) { return *(const volatile u64*)at; }
DEVICE uint4 load_plain(const uint4* at) { return *at; }
DEVICE void see_for_copies() {}
DEVICE void begin_after_earlier_launches() {}
DEVICE void let_next_launch_begin() {}

DEVICE int afresh(int v) { return v; }
DEVICE float as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
DEVICE u32 as_bits(float v) { u32 b; memcpy(&b, &v, 4); return b; }
DEVICE float power(float v) { return v < -126.0f ? 0.0f : exp2f(v); }
DEVICE float logarithm(float v) { return log2f(v); }
DEVICE float inverse(float v) { return 1.0f / v; }
DEVICE float inverse_root(float v) { return 1.0f / sqrtf(v); }
DEVICE u32 round_one(float v) {
  u32 b = as_bits(v);
  if ((b & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
  return (b + 0x7FFF + (b >> 16 & 1)) >> 16;
}
DEVICE u32 round_pair(float low, float high) { return round_one(low) | round_one(high) << 16; }

DEVICE void product(float (&d)[4], const uint4& a, const uint2& b) { host::multiply(d, {a.x, a.y, a.z, a.w, b.x, b.y}); }
