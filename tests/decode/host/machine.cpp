// The machine of the decode kernels on a host: threads are fibers that take turns, copies arrive late, blocks and warps fall behind at random.
// It is the same for all kernels, and with WATCHED it looks for races (races.cuh).
#include "machine.cuh"
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>
#include <sys/mman.h>
#include <ucontext.h>
#ifdef WATCHED
#include "races.cuh"
#define IF_WATCHED(...) __VA_ARGS__
#else
#define IF_WATCHED(...)
#endif

namespace host {
constexpr int LANES = 32;
// Where threads wait for others: until the turn is another.
struct Meeting {
  int arrived = 0;
  u32 turn = 0;
  IF_WATCHED(std::vector<int> threads;)
};
struct Warp {
  bool behind = false;
  Meeting meeting;
  u64 in[LANES], out[LANES];
  u32 a[LANES][6];
  float d[LANES][4];
};
struct Block {
  std::vector<char> shared;
  std::vector<Warp> warps;
  Meeting all, workers;
  bool behind = false;
  IF_WATCHED(std::unique_ptr<races::Watch> watch;)
};
struct Fiber : Place {
  bool done = false, begun = false;
  const Meeting* meeting = nullptr;  // where it waits
  u32 turn;
  Block* block;
  jmp_buf at;
};
struct Copy {
  void* to;
  const void* from;
  u32 bytes;
  u64* bar;
  Block* block;
  IF_WATCHED(races::Clock knowing;)
};
const Place* here = nullptr;
long long clock;
static jmp_buf scheduler;
static std::vector<Copy> copies;
static std::mt19937 dice;
static void (*body)();

static Fiber& now() { return *(Fiber*)here; }
static Warp& warp() { return now().block->warps[here->thread / LANES]; }
IF_WATCHED(static races::Watch& watch() { return *now().block->watch; })

void yield() {
  if (!_setjmp(now().at)) _longjmp(scheduler, 1);
}
// So many threads bring something, the last one works for all. Who waits is not resumed before the turn is another.
template <class Work>
static void together(Meeting& m, int threads, Work work) {
  const u32 turn = m.turn;
  if (++m.arrived == threads) {
    work();
    m.arrived = 0, ++m.turn;
    return;
  }
  now().meeting = &m, now().turn = turn;
  yield();
}
static void meet(Meeting& m, int threads) {
  IF_WATCHED(m.threads.push_back(here->thread);)
  together(m, threads, [&] { IF_WATCHED(watch().meet(m.threads); m.threads.clear();) });
}
// A barrier in shared memory: phase, threads wanted, threads missing, bytes on their way.
struct Bar { u32 phase : 1, wanted : 15, missing : 16; int bytes; };
static_assert(sizeof(Bar) == 8, "as large as the machine's");
static void settle(Bar& b, Block& block) {
  if (b.missing || b.bytes) return;
  b.phase ^= 1, b.missing = b.wanted;
  IF_WATCHED(block.watch->complete(&b);)
}
static void arrive(u64* bar, int bytes) {
  Bar& b = *(Bar*)bar;
  if (b.missing == 0) fprintf(stderr, "an arrival too many at a barrier\n"), abort();
  --b.missing, b.bytes += bytes;
  IF_WATCHED(watch().arrive(bar, watch().clocks[here->thread]); watch().next(here->thread);)
  settle(b, *now().block);
}
static char* aligned(Block& block) {
  char* at = block.shared.data();
  return at + (1024 - (uintptr_t)at % 1024) % 1024;
}
static void trampoline() {
  body();
  now().done = true;
  _longjmp(scheduler, 1);
}

// Stacks are kept from launch to launch, and begin in other lines of the cache.
constexpr size_t STACK = 32768, BETWEEN_STACKS = STACK + 1088;
static char* stack_of(size_t fiber) {
  constexpr size_t AT_ONCE = 256;
  static std::vector<char*> pieces;
  while (pieces.size() <= fiber / AT_ONCE) {
    void* piece = mmap(nullptr, AT_ONCE * BETWEEN_STACKS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (piece == MAP_FAILED) fprintf(stderr, "no memory for stacks\n"), abort();
    pieces.push_back((char*)piece);
  }
  return pieces[fiber / AT_ONCE] + fiber % AT_ONCE * BETWEEN_STACKS;
}
static void resume(Fiber& f, size_t number) {
  here = &f;
  if (_setjmp(scheduler)) return;
  if (f.begun) _longjmp(f.at, 1);
  f.begun = true;
  static ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stack_of(number), context.uc_stack.ss_size = STACK, context.uc_link = nullptr;
  makecontext(&context, trampoline, 0);
  setcontext(&context);
}
static void land() {
  std::uniform_int_distribution<int> percent(0, 99);
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
}

// Runs blocks to their end. At any time some blocks and some warps stand still, and copies land when it pleases them.
bool launch(const Launch& of, void (*what)()) {
  dice.seed(of.seed);
  body = what;
  clock = 0;
  copies.clear();
  std::vector<Block> blocks(of.ctas);
  std::vector<Fiber> fibers(of.ctas * of.threads);
  for (int cta = 0; cta < of.ctas; ++cta) {
    Block& block = blocks[cta];
    block.shared.assign(of.shared_bytes + 1024, (char)0xFF);  // NaN, if it is read before it is written
    block.warps.resize(of.threads / LANES);
    IF_WATCHED(block.watch.reset(new races::Watch(aligned(block), of.unwatched, of.barriers, of.threads));)
    for (int thread = 0; thread < of.threads; ++thread) {
      Fiber& f = fibers[cta * of.threads + thread];
      f.shared = aligned(block), f.cta = cta, f.thread = thread, f.block = &block;
    }
  }
  size_t left = fibers.size();
  std::uniform_int_distribution<int> percent(0, 99);
  for (long long sweep = 0; left && sweep < of.most_sweeps; ++sweep, ++clock) {
    if (sweep % 64 == 0)
      for (Block& block : blocks) block.behind = percent(dice) < 40;
    if (sweep % 8 == 0)
      for (Block& block : blocks)
        for (Warp& warp : block.warps) warp.behind = percent(dice) < 50;
    land();
    for (size_t first = 0; first < fibers.size(); first += LANES) {
      const Block& block = *fibers[first].block;
      if (block.behind || block.warps[fibers[first].thread / LANES].behind) continue;
      for (size_t number = first; number < first + LANES; ++number) {
        Fiber& f = fibers[number];
        if (f.done || (f.meeting && f.meeting->turn == f.turn)) continue;
        f.meeting = nullptr;
        resume(f, number);
        if (f.done) --left;
      }
    }
  }
  here = nullptr;
  return left == 0 && copies.empty();
}

// What lanes have brought is overwritten, and what they are given, once all of them have come to the next such instruction.
u64 exchange(u64 v, int mask) {
  Warp& w = warp();
  const int lane = here->thread % LANES;
  w.in[lane] = v;
  together(w.meeting, LANES, [&] { memcpy(w.out, w.in, sizeof w.in); });
  return w.out[lane ^ mask];
}

// m16n8k16 as the PTX manual lays its operands over lanes.
void multiply(float (&d)[4], const u32 (&operands)[6]) {
  Warp& w = warp();
  const int lane = here->thread % LANES;
  memcpy(w.a[lane], operands, sizeof operands);
  together(w.meeting, LANES, [&] {
    static float A[16][16], B[16][8], D[16][8];
    for (int l = 0; l < 32; ++l) {
      for (int i = 0; i < 8; ++i) A[l / 4 + 8 * (i / 2 % 2)][l % 4 * 2 + i % 2 + 8 * (i / 4)] = as_float(w.a[l][i / 2] >> 16 * (i % 2) << 16);
      for (int i = 0; i < 4; ++i) B[l % 4 * 2 + i % 2 + 8 * (i / 2)][l / 4] = as_float(w.a[l][4 + i / 2] >> 16 * (i % 2) << 16);
    }
    for (int row = 0; row < 16; ++row) {
      float sums[8] = {};
      for (int k = 0; k < 16; ++k)
        for (int column = 0; column < 8; ++column) sums[column] += A[row][k] * B[k][column];
      memcpy(D[row], sums, sizeof sums);
    }
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i) w.d[l][i] = D[l / 4 + 8 * (i / 2)][l % 4 * 2 + i % 2];
  });
  for (int i = 0; i < 4; ++i) d[i] += w.d[lane][i];
}
}  // namespace host

void ring_init(u64* bar, u32 count) { *(host::Bar*)bar = {0, count, count, 0}; }
void ring_expect(u64* bar, u32 bytes) { host::arrive(bar, bytes); }
void ring_arrive(u64* bar) { host::arrive(bar, 0); }
bool ring_passed(u64* bar, u32 phase) {
  if (((host::Bar*)bar)->phase == phase) return false;
  IF_WATCHED(host::watch().pass(bar, host::here->thread);)
  return true;
}
void ring_copy(void* to, const void* from, u32 bytes, u64* bar, u64) {
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || bytes % 16 || !bytes) fprintf(stderr, "a copy that is not aligned\n"), abort();
  memset(to, 0xFF, bytes);  // from now on nobody may read what was there
  IF_WATCHED(races::Watch& watch = host::watch(); const int me = host::here->thread;)
  IF_WATCHED(watch.access(to, bytes, true, me, __builtin_return_address(0));)
  host::copies.push_back({to, from, bytes, bar, host::now().block, IF_WATCHED(watch.clocks[me])});
  IF_WATCHED(watch.next(me);)
}
void warp_meets() { host::meet(host::warp().meeting, host::LANES); }
void block_meets() { host::meet(host::now().block->all, (int)host::now().block->warps.size() * host::LANES); }
void workers_meet(int threads) { host::meet(host::now().block->workers, threads); }

#ifdef WATCHED
// What the compiler calls at each load and store of a kernel where it was told to, with addresses in the kernel.
static void access(void* at, size_t bytes, bool writes, void* code) {
  if (host::here) host::watch().access(at, bytes, writes, host::here->thread, code);
}
#define OF(BYTES)                                                                                                 \
  EXPORTED void __tsan_read##BYTES(void* at) { access(at, BYTES, false, __builtin_return_address(0)); }            \
  EXPORTED void __tsan_write##BYTES(void* at) { access(at, BYTES, true, __builtin_return_address(0)); }            \
  EXPORTED void __tsan_unaligned_read##BYTES(void* at) { access(at, BYTES, false, __builtin_return_address(0)); }  \
  EXPORTED void __tsan_unaligned_write##BYTES(void* at) { access(at, BYTES, true, __builtin_return_address(0)); }
OF(1) OF(2) OF(4) OF(8) OF(16)
EXPORTED void __tsan_read_range(void* at, size_t bytes) { access(at, bytes, false, __builtin_return_address(0)); }
EXPORTED void __tsan_write_range(void* at, size_t bytes) { access(at, bytes, true, __builtin_return_address(0)); }
EXPORTED void __tsan_init() {}
EXPORTED void __tsan_func_entry(void*) {}
EXPORTED void __tsan_func_exit() {}
#endif
