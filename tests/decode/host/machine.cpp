// Emulation of a GPU for the kernels that include machine.cuh, on one CPU thread: see machine.cuh.
//
// Threads are fibers that run until they wait: at a barrier, in a warp collective, or in one iteration of a spin loop. A scheduler sweeps
// over all of them; at any time some blocks and warps are delayed at random, and bulk copies land at random, so that a missing wait gives
// wrong results for some seed. With WATCHED the accesses to shared memory are checked for races (races.cuh).
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
#define IF_WATCHED(...) __VA_ARGS__  // code of the race detector only
#else
#define IF_WATCHED(...)
#endif

namespace host {
constexpr int LANES = 32;
// A barrier: threads wait until its generation changes.
struct Barrier {
  int arrived = 0;
  u32 generation = 0;
  IF_WATCHED(std::vector<int> threads;)  // those that have arrived
};
// State of a warp, with the values of all lanes in the current collective: of a shuffle, and the operands and results of an mma.
struct Warp {
  bool delayed = false;
  Barrier barrier;
  u64 in[LANES], out[LANES];
  u32 a[LANES][6];
  float d[LANES][4];
};
struct Block {
  std::vector<char> shared;
  std::vector<Warp> warps;
  Barrier all, workers;  // of all threads, and of the consumer warps: the kernels' only named barrier
  bool delayed = false;
  int begun = 0, ended = 0;  // threads
  std::shared_ptr<Barrier> cluster;  // of all threads of the CTAs of its cluster
  std::vector<Block*> members;  // the CTAs of its cluster
  IF_WATCHED(std::unique_ptr<races::Detector> watch;)
};
struct Fiber : Thread {
  u32 groups = 0;  // of bulk stores, that it has committed
  bool done = false, begun = false;
  const Barrier* barrier = nullptr;  // the one at which it waits
  u32 generation;  // of that barrier, when it began to wait
  u32 cluster_generation;  // of the barrier of the cluster, when it arrived there
  Block* block;
  jmp_buf at;  // where it continues
};
// A bulk copy that has been issued and has not landed.
struct Copy {
  void* to;
  const void* from;
  u32 bytes;
  u64* bar;
  Block* block;
  std::shared_ptr<std::vector<char>> box;  // what a TMA load has gathered, to which `from` points
  IF_WATCHED(races::Clock knowing;)  // of the thread that issued it
};
// A bulk store that has been issued and has not read shared memory, with the number of its thread's groups before it.
struct Store {
  void* to;
  const void* from;
  u32 bytes, group;
  const Fiber* of;
};
const Thread* current = nullptr;
int traps;
long long clock;
static jmp_buf scheduler;
static std::vector<Copy> copies;
static std::vector<Store> stores;
static std::mt19937 rng;
static void (*body)();

static Fiber& fiber() { return *(Fiber*)current; }
static Warp& warp() { return fiber().block->warps[current->thread / LANES]; }
IF_WATCHED(static races::Detector& watch() { return *fiber().block->watch; })

// Leave the running fiber for the scheduler. It continues here when it is resumed.
void yield() {
  if (!_setjmp(fiber().at)) _longjmp(scheduler, 1);
}
// Wait for `threads` threads. The last one to arrive runs work() for all. A waiting fiber is not resumed before the generation has changed.
template <class Work>
static void rendezvous(Barrier& m, int threads, Work work) {
  const u32 generation = m.generation;
  if (++m.arrived == threads) {
    work();
    m.arrived = 0, ++m.generation;
    return;
  }
  fiber().barrier = &m, fiber().generation = generation;
  yield();
}
static void synchronize(Barrier& m, int threads) {
  IF_WATCHED(m.threads.push_back(current->thread);)
  rendezvous(m, threads, [&] { IF_WATCHED(watch().synchronize(m.threads); m.threads.clear();) });
}
// An mbarrier in shared memory: phase, arrivals expected per phase, arrivals missing, and bytes of copies in flight.
struct Mbarrier { u32 phase : 1, wanted : 15, missing : 16; int bytes; };
static_assert(sizeof(Mbarrier) == 8, "as large as the machine's");
static void complete_if_done(Mbarrier& b, Block& block) {
  if (b.missing || b.bytes) return;
  b.phase ^= 1, b.missing = b.wanted;
  IF_WATCHED(block.watch->complete(&b);)
}
static void arrive(u64* bar, int bytes) {
  Mbarrier& b = *(Mbarrier*)bar;
  if (b.missing == 0) fprintf(stderr, "too many arrivals at an mbarrier\n"), abort();
  --b.missing, b.bytes += bytes;
  IF_WATCHED(watch().arrive(bar, watch().clocks[current->thread]); watch().next(current->thread);)
  complete_if_done(b, *fiber().block);
}
// Return a block's shared memory, aligned to 1024 bytes.
static char* aligned(Block& block) {
  char* at = block.shared.data();
  return at + (1024 - (uintptr_t)at % 1024) % 1024;
}
// The function that a fiber's stack begins with.
static void trampoline() {
  body();
  fiber().done = true, ++fiber().block->ended;
  _longjmp(scheduler, 1);
}

// Return a fiber's stack. Stacks are reused by later launches, and their offsets avoid conflicts in the CPU's cache.
constexpr size_t STACK = 32768, BETWEEN_STACKS = STACK + 1088;
static char* stack_of(size_t fiber) {
  constexpr size_t AT_ONCE = 256;
  static std::vector<char*> pieces;
  while (pieces.size() <= fiber / AT_ONCE) {
    void* piece = mmap(nullptr, AT_ONCE * BETWEEN_STACKS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (piece == MAP_FAILED) fprintf(stderr, "out of memory for stacks of fibers\n"), abort();
    pieces.push_back((char*)piece);
  }
  return pieces[fiber / AT_ONCE] + fiber % AT_ONCE * BETWEEN_STACKS;
}
// Run a fiber until it waits or ends. `number` is its index among all fibers of the launch.
static void resume(Fiber& f, size_t number) {
  current = &f;
  if (_setjmp(scheduler)) return;
  if (f.begun) _longjmp(f.at, 1);
  f.begun = true, ++f.block->begun;
  static ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stack_of(number), context.uc_stack.ss_size = STACK, context.uc_link = nullptr;
  makecontext(&context, trampoline, 0);
  setcontext(&context);
}
// Let each bulk copy and store land with a probability of a quarter, in any order.
static void land_copies() {
  std::uniform_int_distribution<int> percent(0, 99);
  for (size_t i = 0; i < stores.size();) {
    if (percent(rng) >= 25) { ++i; continue; }
    memcpy(stores[i].to, stores[i].from, stores[i].bytes);
    stores[i] = stores.back(), stores.pop_back();
  }
  for (size_t i = 0; i < copies.size();) {
    if (percent(rng) >= 25) { ++i; continue; }
    const Copy c = copies[i];
    copies[i] = copies.back(), copies.pop_back();
    memcpy(c.to, c.from, c.bytes);
    Mbarrier& b = *(Mbarrier*)c.bar;
    b.bytes -= c.bytes;
    IF_WATCHED(c.block->watch->arrive(c.bar, c.knowing);)
    complete_if_done(b, *c.block);
  }
}

// Run all blocks of a launch to their end; return whether they ended within the given number of sweeps and no copy was left.
bool launch(const Launch& options, void (*what)()) {
  rng.seed(options.seed);
  body = what;
  clock = 0, traps = 0;
  copies.clear(), stores.clear();
  std::vector<Block> blocks(options.ctas);
  std::vector<Fiber> fibers(options.ctas * options.threads);
  for (int cta = 0; cta < options.ctas; ++cta) {
    Block &block = blocks[cta], &leader = blocks[cta / options.cluster * options.cluster];
    block.cluster = &block == &leader ? std::make_shared<Barrier>() : leader.cluster;
    for (int member = 0; member < options.cluster; ++member) block.members.push_back(&leader + member);
    block.shared.assign(options.shared_bytes + 1024, (char)0xFF);  // NaN, so that a read of memory that was not written shows
    block.warps.resize(options.threads / LANES);
    IF_WATCHED(block.watch.reset(new races::Detector(aligned(block), options.unwatched, options.barriers, options.threads));)
    for (int thread = 0; thread < options.threads; ++thread) {
      Fiber& f = fibers[cta * options.threads + thread];
      f.shared = aligned(block), f.cta = cta, f.thread = thread, f.block = &block;
    }
  }
  size_t left = fibers.size();
  std::uniform_int_distribution<int> percent(0, 99);
  for (long long sweep = 0; left && sweep < options.most_sweeps; ++sweep, ++clock) {
    // Delays are drawn anew after some sweeps, so that one block or warp gets far ahead of another.
    if (sweep % 64 == 0)
      for (Block& block : blocks) block.delayed = percent(rng) < 40;
    if (sweep % 8 == 0)
      for (Block& block : blocks)
        for (Warp& warp : block.warps) warp.delayed = percent(rng) < 50;
    land_copies();
    for (size_t first = 0; first < fibers.size(); first += LANES) {
      const Block& block = *fibers[first].block;
      if (block.delayed || block.warps[fibers[first].thread / LANES].delayed) continue;
      for (size_t number = first; number < first + LANES; ++number) {
        Fiber& f = fibers[number];
        if (f.done || (f.barrier && f.barrier->generation == f.generation)) continue;
        f.barrier = nullptr;
        resume(f, number);
        if (f.done) --left;
      }
    }
  }
  current = nullptr;
  // A thread waits for its stores to read shared memory before it ends. This machine reads and writes at once.
  return left == 0 && copies.empty() && stores.empty();
}

// Exchange values within a warp. Inputs and outputs stay valid until all lanes have come to the next collective.
u64 exchange(u64 v, int mask) {
  Warp& w = warp();
  const int lane = current->thread % LANES;
  w.in[lane] = v;
  rendezvous(w.barrier, LANES, [&] { memcpy(w.out, w.in, sizeof w.in); });
  return w.out[lane ^ mask];
}

// mma.m16n8k16 in bfloat16, d += A B, with the fragment layout of the PTX manual.
void multiply(float (&d)[4], const u32 (&operands)[6]) {
  Warp& w = warp();
  const int lane = current->thread % LANES;
  memcpy(w.a[lane], operands, sizeof operands);
  rendezvous(w.barrier, LANES, [&] {
    static float A[16][16], B[16][8], D[16][8];
    for (int l = 0; l < 32; ++l) {
      for (int i = 0; i < 8; ++i) A[l / 4 + 8 * (i / 2 % 2)][l % 4 * 2 + i % 2 + 8 * (i / 4)] = uint_as_float(w.a[l][i / 2] >> 16 * (i % 2) << 16);
      for (int i = 0; i < 4; ++i) B[l % 4 * 2 + i % 2 + 8 * (i / 2)][l / 4] = uint_as_float(w.a[l][4 + i / 2] >> 16 * (i % 2) << 16);
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

void mbarrier_init(u64* bar, u32 count) { *(host::Mbarrier*)bar = {0, count, count, 0}; }
void mbarrier_arrive_expect_tx(u64* bar, u32 bytes) { host::arrive(bar, bytes); }
void mbarrier_arrive(u64* bar) { host::arrive(bar, 0); }
// Return whether the phase with this parity is complete: then the current one has the other parity.
bool mbarrier_try_wait(u64* bar, u32 phase) {
  if (((host::Mbarrier*)bar)->phase == phase) return false;
  IF_WATCHED(host::watch().pass(bar, host::current->thread);)
  return true;
}
// Enqueue a copy of the running thread, whose kernel called at `code`.
static void enqueue(void* to, const void* from, u32 bytes, u64* bar, std::shared_ptr<std::vector<char>> box, void* code) {
  memset(to, 0xFF, bytes);  // NaN until the copy lands: nobody may read the stage in between
  IF_WATCHED(races::Detector& watch = host::watch(); const int me = host::current->thread;)
  IF_WATCHED(watch.access(to, bytes, true, me, code);)
  host::copies.push_back({to, from, bytes, bar, host::fiber().block, box, IF_WATCHED(watch.clocks[me])});
  IF_WATCHED(watch.next(me);)
}
void cp_async_bulk(void* to, const void* from, u32 bytes, u64* bar, u64) {
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || bytes % 16 || !bytes) fprintf(stderr, "a bulk copy is not aligned to 16 bytes, or empty\n"), abort();
  enqueue(to, from, bytes, bar, nullptr, __builtin_return_address(0));
}
void cp_async_bulk_store(void* to, const void* from, u32 bytes) {
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || bytes % 16 || !bytes) fprintf(stderr, "a bulk store is not aligned to 16 bytes, or empty\n"), abort();
  IF_WATCHED(host::watch().access((void*)from, bytes, false, host::current->thread, __builtin_return_address(0));)
  host::stores.push_back({to, from, bytes, host::fiber().groups, &host::fiber()});
}
void tma_store_commit_group() { ++host::fiber().groups; }
bool stores_have_read(u32 pending) {
  for (const host::Store& store : host::stores)
    if (store.of == &host::fiber() && store.group + pending < host::fiber().groups) return false;
  return true;
}
// Return a box as it lies in shared memory, `to` or in another CTA.
// Elements outside the tensor are zero. Lines of 128 bytes, the box's innermost dimension, follow each other; 16-byte units are permuted.
static std::shared_ptr<std::vector<char>> gather(void* to, const TensorMap* map, int c0, int c1, int c2) {
  const u32 width = map->box[0], bytes = 2 * width;
  if ((uintptr_t)to % 1024 || (width != 64 && width != 256) || c0 % width) fprintf(stderr, "a box is not of whole lines, or not aligned\n"), abort();
  auto box = std::make_shared<std::vector<char>>(bytes * map->box[1] * map->box[2], (char)0);
  for (u32 z = 0; z < map->box[2]; ++z)
    for (u32 y = 0; y < map->box[1]; ++y) {
      const u64 line = z * map->box[1] + y, at[3] = {(u64)c0, (u64)c1 + y, (u64)c2 + z};
      if (at[0] + width > map->sizes[0] || at[1] >= map->sizes[1] || at[2] >= map->sizes[2]) continue;
      const char* from = map->base + 2 * at[0] + at[1] * map->strides[0] + at[2] * map->strides[1];
      const u64 swizzle = width == 64 ? line % 8 : 0;
      for (u64 unit = 0; unit < bytes / 16; ++unit) memcpy(box->data() + line * bytes + (unit ^ swizzle) * 16, from + unit * 16, 16);
    }
  return box;
}
void tma_load_3d(void* to, const TensorMap* map, int c0, int c1, int c2, u64* bar) {
  auto box = gather(to, map, c0, c1, c2);
  enqueue(to, box->data(), box->size(), bar, box, __builtin_return_address(0));
}
// Enqueue a copy to another CTA of the cluster, at the same addresses. That CTA must run.
static void enqueue_there(host::Block& there, void* to, u64* bar, std::shared_ptr<std::vector<char>> box) {
  if (!there.begun || there.ended) trap();
  auto moved = [&](void* at) { return host::aligned(there) + ((char*)at - host::aligned(*host::fiber().block)); };
  memset(moved(to), 0xFF, box->size());
  host::copies.push_back({moved(to), box->data(), (u32)box->size(), (u64*)moved(bar), &there, box IF_WATCHED(, {})});
}
void tma_load_3d_multicast(void* to, const TensorMap* map, int c0, int c1, int c2, u64* bar) {
  auto box = gather(to, map, c0, c1, c2);
  for (host::Block* there : host::fiber().block->members)
    if (there == host::fiber().block)
      enqueue(to, box->data(), box->size(), bar, box, __builtin_return_address(0));
    else
      enqueue_there(*there, to, bar, box);
}
// Arrive at the barrier of the cluster, and wait until all its threads have.
void cluster_arrive_relaxed() {
  host::Fiber& f = host::fiber();
  host::Barrier& m = *f.block->cluster;
  f.cluster_generation = m.generation;
  if (++m.arrived == (int)(f.block->members.size() * f.block->warps.size()) * host::LANES) m.arrived = 0, ++m.generation;
}
void cluster_wait() {
  host::Fiber& f = host::fiber();
  if (f.block->cluster->generation != f.cluster_generation) return;
  f.barrier = f.block->cluster.get(), f.generation = f.cluster_generation;
  host::yield();
}
void cluster_sync() {
  syncthreads();  // tells the race detector, which knows one CTA
  cluster_arrive_relaxed(), cluster_wait();
}
void trap() {
  ++host::traps;
  for (;;) host::yield();
}
// It lands like a bulk copy. The other CTA must run.
void st_async(uint4* to, u32 rank, const uint4& v, u64* bar) {
  host::Block& there = *host::fiber().block->members.at(rank);
  auto box = std::make_shared<std::vector<char>>((const char*)&v, (const char*)(&v + 1));
  if (&there != host::fiber().block) return enqueue_there(there, to, bar, box);
  if (there.ended) trap();
  enqueue(to, box->data(), sizeof v, bar, box, __builtin_return_address(0));
}
void syncwarp() { host::synchronize(host::warp().barrier, host::LANES); }
void syncthreads() { host::synchronize(host::fiber().block->all, (int)host::fiber().block->warps.size() * host::LANES); }
// Of named barriers there is only one, so the number is not needed.
void bar_sync(int id, int threads) { host::synchronize(host::fiber().block->workers, threads); }

#ifdef WATCHED
// Functions that the compiler calls at each load and store of a kernel that was compiled with -fsanitize=thread. The return address
// identifies the line of the kernel.
static void access(void* at, size_t bytes, bool writes, void* code) {
  if (host::current) host::watch().access(at, bytes, writes, host::current->thread, code);
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
