// The machine of the decode kernels on a host: threads are fibers that take turns, copies arrive late, blocks and warps fall behind at random.
// Enough to run the kernels' own source: warps' collective instructions, barriers, the copy engine, words shared between blocks.
#pragma once
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>
#include <ucontext.h>
#ifdef WATCHED
#include "races.cuh"
#define IF_WATCHED(...) __VA_ARGS__
#else
#define IF_WATCHED(...)
#endif

#define DEVICE inline
typedef unsigned int u32;
typedef unsigned long long u64;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };

namespace host {
constexpr int LANES = 32;
struct Warp {
  bool behind = false;
  int arrived = 0;
  u32 turn = 0;
  u64 in[LANES], out[LANES];
  u32 a[LANES][6];
  float d[LANES][4];
};
struct Meeting { int arrived = 0; u32 turn = 0; std::vector<int> threads; };
struct Block {
  std::vector<char> shared;
  std::vector<Warp> warps;
  Meeting all, workers;
  bool behind = false;
  IF_WATCHED(std::unique_ptr<races::Watch> watch;)
};
struct Fiber {
  Block* block;
  int cta, thread;
  bool done = false, begun = false;
  jmp_buf at;
  ucontext_t context;
  std::vector<char> stack;
};
struct Copy { void* to; const void* from; u32 bytes; u64* bar; Block* block; IF_WATCHED(races::Clock knowing;) };
inline Fiber* now = nullptr;
inline jmp_buf scheduler;
inline std::vector<Copy> copies;
inline long long clock;
inline std::mt19937 dice;
inline std::function<void()> body;

inline void yield() {
  if (!_setjmp(now->at)) _longjmp(scheduler, 1);
}
inline Warp& warp() { return now->block->warps[now->thread / LANES]; }
// All lanes bring something, the last one works for all.
template <class Work>
void together(Warp& w, Work work) {
  const u32 turn = w.turn;
  if (++w.arrived == LANES) {
    w.arrived = 0;
    work();
    ++w.turn;
  }
  while (w.turn == turn) yield();
}
inline void meet(Meeting& m, int threads) {
  const u32 turn = m.turn;
  m.threads.push_back(now->thread);
  if (++m.arrived == threads) {
    IF_WATCHED(now->block->watch->meet(m.threads);)
    m.arrived = 0, m.threads.clear(), ++m.turn;
  }
  while (m.turn == turn) yield();
}
// A barrier in shared memory: phase, threads wanted, threads missing, bytes on their way.
struct Bar { u32 phase : 1, wanted : 15, missing : 16; int bytes; };
static_assert(sizeof(Bar) == 8, "as large as the machine's");
inline void settle(Bar& b, Block& block) {
  if (b.missing || b.bytes) return;
  b.phase ^= 1, b.missing = b.wanted;
  IF_WATCHED(block.watch->complete(&b);)
}
inline char* aligned(Block& block) {
  char* at = block.shared.data();
  return at + (1024 - (uintptr_t)at % 1024) % 1024;
}
inline void enter() {
  body();
  now->done = true;
  _longjmp(scheduler, 1);
}
inline void trampoline() { enter(); }

// Runs blocks to their end. At any time some blocks and some warps stand still, and copies land when it pleases them.
inline bool launch(int ctas, int threads, int shared_bytes, u32 seed, long long most_sweeps, std::function<void()> what) {
  dice.seed(seed);
  body = what;
  clock = 0;
  copies.clear();
  std::vector<Block> blocks(ctas);
  std::vector<Fiber> fibers(ctas * threads);
  for (int cta = 0; cta < ctas; ++cta) {
    blocks[cta].shared.assign(shared_bytes + 1024, (char)0xFF);  // NaN, if it is read before it is written
    blocks[cta].warps.resize(threads / LANES);
    IF_WATCHED(blocks[cta].watch.reset(new races::Watch(aligned(blocks[cta]), threads));)
    for (int thread = 0; thread < threads; ++thread) {
      Fiber& f = fibers[cta * threads + thread];
      f.block = &blocks[cta], f.cta = cta, f.thread = thread;
      f.stack.resize(32768);
    }
  }
  size_t left = fibers.size();
  std::uniform_int_distribution<int> percent(0, 99);
  std::vector<int> order(ctas);
  for (long long sweep = 0; left && sweep < most_sweeps; ++sweep, ++clock) {
    if (sweep % 64 == 0)
      for (Block& block : blocks) block.behind = percent(dice) < 40;
    if (sweep % 8 == 0)
      for (Block& block : blocks)
        for (Warp& warp : block.warps) warp.behind = percent(dice) < 50;
    for (size_t i = 0; i < copies.size();) {
      if (percent(dice) >= 25) { ++i; continue; }
      const Copy c = copies[i];
      copies[i] = copies.back(), copies.pop_back();
      memcpy(c.to, c.from, c.bytes);
      Bar& b = *(Bar*)c.bar;
      b.bytes -= c.bytes;
      IF_WATCHED(c.block->watch->arrive(c.bar, c.knowing);)
      settle(b, *c.block);
    }
    for (Fiber& f : fibers) {
      if (f.done || f.block->behind || f.block->warps[f.thread / LANES].behind) continue;
      now = &f;
      if (_setjmp(scheduler) == 0) {
        if (f.begun) _longjmp(f.at, 1);
        f.begun = true;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size(), f.context.uc_link = nullptr;
        makecontext(&f.context, trampoline, 0);
        setcontext(&f.context);
      }
      if (f.done) --left;
    }
  }
  now = nullptr;
  return left == 0 && copies.empty();
}
}  // namespace host

DEVICE char* shared_memory() { return host::aligned(*host::now->block); }
DEVICE int cta_index() { return host::now->cta; }
DEVICE int thread_index() { return host::now->thread; }
DEVICE long long ticks() { return host::clock << 16; }
DEVICE u64 nanoseconds() { return host::clock << 15; }
DEVICE void breathe() { host::yield(); }

DEVICE void ring_init(u64* bar, u32 count) { *(host::Bar*)bar = {0, count, count, 0}; }
DEVICE void ring_fence() {}
DEVICE void arrive(u64* bar, int bytes) {
  host::Bar& b = *(host::Bar*)bar;
  if (b.missing == 0) fprintf(stderr, "an arrival too many at a barrier\n"), abort();
  --b.missing, b.bytes += bytes;
  IF_WATCHED(races::Watch& watch = *host::now->block->watch; const int me = host::now->thread;)
  IF_WATCHED(watch.arrive(bar, watch.clocks[me]); watch.next(me);)
  host::settle(b, *host::now->block);
}
DEVICE void ring_expect(u64* bar, u32 bytes) { arrive(bar, bytes); }
DEVICE void ring_arrive(u64* bar) { arrive(bar, 0); }
DEVICE bool ring_passed(u64* bar, u32 phase) {
  if (((host::Bar*)bar)->phase == phase) return false;
  IF_WATCHED(host::now->block->watch->pass(bar, host::now->thread);)
  return true;
}
DEVICE u64 used_once() { return 0; }
DEVICE void ring_copy(void* to, const void* from, u32 bytes, u64* bar, u64) {
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || bytes % 16 || !bytes) fprintf(stderr, "a copy that is not aligned\n"), abort();
  memset(to, 0xFF, bytes);  // from now on nobody may read what was there
  IF_WATCHED(races::Watch& watch = *host::now->block->watch; const int me = host::now->thread;)
  IF_WATCHED(watch.access(to, bytes, true, me, __builtin_return_address(0));)
  host::copies.push_back({to, from, bytes, bar, host::now->block, IF_WATCHED(watch.clocks[me])});
  IF_WATCHED(watch.next(me);)
}

DEVICE void warp_meets() {
  host::together(host::warp(), [] {
    IF_WATCHED(std::vector<int> lanes(32); for (int i = 0; i < 32; ++i) lanes[i] = host::now->thread / 32 * 32 + i;)
    IF_WATCHED(host::now->block->watch->meet(lanes);)
  });
}
DEVICE u64 exchange(u64 v, int mask) {
  host::Warp& w = host::warp();
  const int lane = host::now->thread % 32;
  w.in[lane] = v;
  host::together(w, [&] { memcpy(w.out, w.in, sizeof w.in); });
  const u64 found = w.out[lane ^ mask];
  return found;
}
DEVICE u64 from_lane_xor(u64 v, int mask) {
  const u64 found = exchange(v, mask);
  host::together(host::warp(), [] {});  // all have read
  return found;
}
DEVICE float from_lane_xor(float v, int mask) {
  u32 bits;
  memcpy(&bits, &v, 4);
  bits = (u32)from_lane_xor((u64)bits, mask);
  memcpy(&v, &bits, 4);
  return v;
}
DEVICE void block_meets() { host::meet(host::now->block->all, (int)host::now->block->warps.size() * 32); }
DEVICE void workers_meet(int threads) { host::meet(host::now->block->workers, threads); }

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

// m16n8k16 as the PTX manual lays its operands over lanes.
DEVICE void product(float (&d)[4], const uint4& a, const uint2& b) {
  host::Warp& w = host::warp();
  const int lane = host::now->thread % 32;
  const u32 in[6] = {a.x, a.y, a.z, a.w, b.x, b.y};
  memcpy(w.a[lane], in, sizeof in);
  host::together(w, [&] {
    static float A[16][16], B[16][8];
    for (int l = 0; l < 32; ++l) {
      for (int i = 0; i < 8; ++i) A[l / 4 + 8 * (i / 2 % 2)][l % 4 * 2 + i % 2 + 8 * (i / 4)] = as_float(w.a[l][i / 2] >> 16 * (i % 2) << 16);
      for (int i = 0; i < 4; ++i) B[l % 4 * 2 + i % 2 + 8 * (i / 2)][l / 4] = as_float(w.a[l][4 + i / 2] >> 16 * (i % 2) << 16);
    }
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i) {
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += A[l / 4 + 8 * (i / 2)][k] * B[k][l % 4 * 2 + i % 2];
        w.d[l][i] = sum;
      }
  });
  float own[4];
  memcpy(own, w.d[lane], sizeof own);
  host::together(w, [] {});
  for (int i = 0; i < 4; ++i) d[i] += own[i];
}
