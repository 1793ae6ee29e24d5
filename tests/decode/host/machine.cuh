// The primitives of cuda/include/machine.cuh for a CPU, with the same names, so that the kernels' own source runs in tests without a GPU.
//
// Every CUDA thread is a fiber; machine.cpp schedules the fibers on one CPU thread, delays blocks, warps and bulk copies at random, and
// implements barriers, warp collectives and mbarriers. It is compiled once for all kernels. As only one fiber runs at a time, plain
// loads and stores have all memory orders. A new primitive of the kernels must be added here under its name.
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS  // Bessel functions and the like, which take a seventh of a kernel's compilation
#include <cmath>

#define DEVICE inline
#define EXPORTED extern "C" __attribute__((visibility("default")))
typedef unsigned int u32;
typedef unsigned long long u64;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };

namespace host {
// Identity of a CUDA thread. `current` is the one that runs.
struct Thread {
  char* shared;
  int cta, thread;
};
extern const Thread* current;
extern int traps;        // threads that have trapped since the launch began
extern long long clock;  // sweeps of the scheduler since the launch began

void yield();                        // let other fibers run
u64 exchange(u64 v, int mask);       // return the value of the lane whose number is this lane's ^ mask
void multiply(float (&d)[4], const u32 (&operands)[6]);  // mma.m16n8k16 of a warp: four registers of A, then two of B
// A launch: its grid; bytes of shared memory, of which the race detector checks those before offset `unwatched`; the number of mbarriers
// at that offset; the seed of all delays; the sweeps after which the launch counts as hanging; and the CTAs of a cluster. The detector
// does not see stores to the shared memory of another CTA.
struct Launch {
  int ctas, threads, shared_bytes, unwatched, barriers;
  u32 seed;
  long long most_sweeps;
  int cluster = 1;
};
bool launch(const Launch& of, void (*body)());  // body() is the kernel, with its arguments in variables of the library
// The launch before, which has not ended when a launch begins that overlaps with it. What it writes is not there yet: the memory that was
// given to hide() has other bytes until threads have waited for it, and what is stored to it before is lost.
struct Hidden {
  char* at;
  std::vector<char> bytes;
};
inline std::vector<Hidden> hidden;
inline bool waited;  // a thread has begun to wait for the launch before, in this launch
inline void hide(void* at, u64 bytes) {
  if (!at || !bytes) return;
  hidden.push_back({(char*)at, std::vector<char>((char*)at, (char*)at + bytes)});
  memset(at, 0xFF, bytes);
}
// griddepcontrol.wait: the first thread that waits ends the launch before, some time later.
inline void wait_for_launch_before() {
  if (!waited) {
    waited = true;
    for (int i = 0; i < 32; ++i) yield();
    for (; !hidden.empty(); hidden.pop_back()) memcpy(hidden.back().at, hidden.back().bytes.data(), hidden.back().bytes.size());
  }
  while (!hidden.empty()) yield();
}
}  // namespace host

DEVICE char* shared_memory() { return host::current->shared; }
DEVICE int cta_index() { return host::current->cta; }
DEVICE int thread_index() { return host::current->thread; }
// A sweep counts as 65,536 clock cycles and 32,768 ns.
DEVICE long long clock64() { return host::clock << 16; }
DEVICE u64 globaltimer() { return host::clock << 15; }
DEVICE void spin_pause() { host::yield(); }
[[noreturn]] void trap();  // the launch does not end, see host::traps

void mbarrier_init(u64* bar, u32 count);
DEVICE void fence_mbarrier_init() {}
void mbarrier_arrive_expect_tx(u64* bar, u32 bytes);
void mbarrier_arrive(u64* bar);
bool mbarrier_try_wait(u64* bar, u32 phase);
DEVICE bool mbarrier_test_wait(u64* bar, u32 phase) { return mbarrier_try_wait(bar, phase) || (host::yield(), false); }
DEVICE u64 createpolicy_evict_first() { return 0; }
void cp_async_bulk(void* to, const void* from, u32 bytes, u64* bar, u64);
DEVICE void cp_async_bulk(void* to, const void* from, u32 bytes, u64* bar) { cp_async_bulk(to, from, bytes, bar, 0); }
void cp_async_bulk_store(void* to, const void* from, u32 bytes);
void tma_store_commit_group();
bool stores_have_read(u32 pending);  // all groups of stores of this thread but the latest `pending` ones have read shared memory
template <int PENDING>
void tma_store_wait_group_read() {
  while (!stores_have_read(PENDING)) host::yield();
}
DEVICE void fence_proxy_async_shared() {}
void cluster_arrive_relaxed();
void cluster_wait();
void cluster_sync();
void st_async(uint4* to, u32 rank, const uint4& v, u64* bar);
// Tensor map of 16-bit elements in three dimensions, innermost first. Boxes of 64 columns have the 128-byte swizzle, those of 256 columns have
// none. Strides are in bytes.
struct TensorMap {
  const char* base;
  u64 sizes[3], strides[2];
  u32 box[3];
};
void tma_load_3d(void* to, const TensorMap* map, int c0, int c1, int c2, u64* bar);
void tma_load_3d_multicast(void* to, const TensorMap* map, int c0, int c1, int c2, u64* bar);
DEVICE void prefetch_tensormap(const TensorMap*) {}
DEVICE void tma_prefetch_3d(const TensorMap*, int, int, int) {}
DEVICE void cp_async_16(void* to, const void* from) { *(uint4*)to = *(const uint4*)from; }
DEVICE void cp_async_wait_all() {}
DEVICE void prefetch_l2(const void*, u32) {}
DEVICE void prefetch_sector_l2(const void*) {}
DEVICE u32 shared_address(const void* p) { return (u32)(uintptr_t)p; }

void syncwarp();
DEVICE u64 shfl_xor(u64 v, int mask) { return host::exchange(v, mask); }
DEVICE float shfl_xor(float v, int mask) {
  u32 bits;
  memcpy(&bits, &v, 4);
  bits = (u32)shfl_xor((u64)bits, mask);
  memcpy(&v, &bits, 4);
  return v;
}
void syncthreads();
void bar_sync(int id, int threads);

DEVICE uint4 load_relaxed(const uint4* at) { return *(const volatile u64*)at, *at; }
DEVICE u32 load_relaxed(const u32* at) { return *(const volatile u32*)at; }
DEVICE u64 load_relaxed(const u64* at) { return *(const volatile u64*)at; }
DEVICE void load_relaxed(const u64* at, u64 (&v)[2]) { v[0] = at[0], v[1] = at[1]; }
DEVICE void red_add_relaxed(u64* at, u64 v) { *at += v; }
DEVICE u32 atomic_add_relaxed(u32* at, u32 v) { return *at += v, *at - v; }
DEVICE u32 atomic_add_shared(u32* at, u32 v) { return *at += v, *at - v; }
DEVICE void store_relaxed(uint4* at, const uint4& v) { *at = v; }
DEVICE void store_relaxed(u32* at, u32 v) { *(volatile u32*)at = v; }
DEVICE void store_release(u64* at, u64 v) { *(volatile u64*)at = v; }
DEVICE void red_increment_release(u32* counter) { ++*counter; }
DEVICE u32 load_acquire(const u32* counter) { return *(const volatile u32*)counter; }
DEVICE u64 load_acquire(const u64* at) { return *(const volatile u64*)at; }
DEVICE uint4 load_weak(const uint4* at) { return *at; }
// A launch that waits for the one before it must not load by the non-coherent path: it traps.
template <class Unit>
DEVICE Unit load_once(const Unit* at) { return host::waited ? trap() : void(), *at; }
template <class Unit>
DEVICE Unit load_streamed(const Unit* at) { return *at; }
DEVICE void fence_proxy_async() {}
DEVICE void fence_proxy_async_global() {}
DEVICE void griddepcontrol_wait() { host::wait_for_launch_before(); }
DEVICE void griddepcontrol_launch_dependents() {}

DEVICE int opaque(int v) { return v; }
DEVICE float uint_as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
DEVICE u32 float_as_uint(float v) { u32 b; memcpy(&b, &v, 4); return b; }
DEVICE float exp2_approx(float v) { return v < -126.0f ? 0.0f : exp2f(v); }
DEVICE float log2_approx(float v) { return log2f(v); }
DEVICE float rcp_approx(float v) { return 1.0f / v; }
DEVICE float rsqrt_approx(float v) { return 1.0f / sqrtf(v); }
DEVICE u32 float_to_bf16(float v) {
  u32 b = float_as_uint(v);
  if ((b & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
  return (b + 0x7FFF + (b >> 16 & 1)) >> 16;
}
DEVICE u32 floats_to_bf16x2(float low, float high) { return float_to_bf16(low) | float_to_bf16(high) << 16; }

DEVICE void mma_m16n8k16(float (&d)[4], const uint4& a, const uint2& b) { host::multiply(d, {a.x, a.y, a.z, a.w, b.x, b.y}); }
