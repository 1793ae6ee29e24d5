// What races.cuh declares, and what was found.
#include "races.cuh"
#include "machine.cuh"
#include <dlfcn.h>

namespace races {
static std::vector<Race> found;
static void note(const Access& first, void* second, const char* kind) {
  for (const Race& race : found)
    if (race.first == first.code && race.second == second) return;
  found.push_back({first.code, second, kind});
}
static void learn(Clock& who, const Clock& what) {
  if (who.size() < what.size()) who.resize(what.size(), 0);
  for (size_t i = 0; i < what.size(); ++i)
    if (who[i] < what[i]) who[i] = what[i];
}

Watch::Watch(char* base, int watched, int barriers, int threads)
    : base(base), watched(watched), clocks(threads, Clock(threads, 0)), cells(watched / GRAIN), barriers(barriers) {
  for (int thread = 0; thread < threads; ++thread) clocks[thread][thread] = 1;
}
Known& Watch::of(const void* barrier) { return barriers[((const char*)barrier - base - watched) / 8]; }
void Watch::next(int thread) { ++clocks[thread][thread]; }
void Watch::meet(const std::vector<int>& threads) {
  Clock all;
  for (int thread : threads) learn(all, clocks[thread]);
  for (int thread : threads) clocks[thread] = all, next(thread);
}
void Watch::arrive(const void* barrier, const Clock& knowing) { learn(of(barrier).now, knowing); }
void Watch::complete(const void* barrier) { of(barrier).before.swap(of(barrier).now), of(barrier).now.clear(); }
void Watch::pass(const void* barrier, int thread) { learn(clocks[thread], of(barrier).before); }
bool Watch::before(const Access& a, int thread) const { return a.thread == thread || a.at <= clocks[thread][a.thread]; }
void Watch::access(const void* at, size_t bytes, bool writes, int thread, void* code) {
  const size_t offset = (const char*)at - base;
  if ((const char*)at < base || offset >= watched) return;
  const Access now = {thread, clocks[thread][thread], code};
  for (size_t i = offset / GRAIN; i <= (offset + bytes - 1) / GRAIN; ++i) {
    Cell& cell = cells[i];
    if (cell.written.thread >= 0 && !before(cell.written, thread)) note(cell.written, code, writes ? "written twice" : "written, read");
    if (writes) {
      for (const Access& read : cell.reads)
        if (!before(read, thread)) note(read, code, "read, written");
      cell.reads.clear(), cell.written = now;
      continue;
    }
    size_t known = cell.next;
    if (known >= cell.reads.size() || cell.reads[known].thread != thread)
      for (known = 0; known < cell.reads.size() && cell.reads[known].thread != thread;) ++known;
    cell.next = known + 1 < cell.reads.size() ? known + 1 : 0;
    if (known < cell.reads.size())
      cell.reads[known] = now;
    else
      cell.reads.push_back(now);
  }
}
}  // namespace races

// How many pairs of accesses raced so far; of one of them the addresses in the library, and what they did.
EXPORTED int race_count() { return (int)races::found.size(); }
EXPORTED const char* race(int which, size_t* first, size_t* second) {
  Dl_info library;
  dladdr((void*)&race_count, &library);
  const races::Race r = races::found[which];
  *first = (char*)r.first - (char*)library.dli_fbase, *second = (char*)r.second - (char*)library.dli_fbase;
  return r.kind;
}
