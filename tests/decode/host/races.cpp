// Race detector: see races.cuh. machine.cpp calls it where WATCHED is set.
#include "races.cuh"
#include "machine.cuh"
#include <dlfcn.h>

namespace races {
static std::vector<Race> found;
// Record a race, once for each pair of code addresses.
static void record(const Access& first, void* second, const char* kind) {
  for (const Race& race : found)
    if (race.first == first.code && race.second == second) return;
  found.push_back({first.code, second, kind});
}
// Raise a clock to another one where that is later.
static void join(Clock& who, const Clock& what) {
  if (who.size() < what.size()) who.resize(what.size(), 0);
  for (size_t i = 0; i < what.size(); ++i)
    if (who[i] < what[i]) who[i] = what[i];
}

Detector::Detector(char* base, int watched, int barriers, int threads)
    : base(base), watched(watched), clocks(threads, Clock(threads, 0)), cells(watched / GRAIN), barriers(barriers) {
  for (int thread = 0; thread < threads; ++thread) clocks[thread][thread] = 1;
}
// The mbarriers lie behind the watched bytes, 8 bytes each.
BarrierClocks& Detector::of(const void* barrier) { return barriers[((const char*)barrier - base - watched) / 8]; }
void Detector::next(int thread) { ++clocks[thread][thread]; }
void Detector::synchronize(const std::vector<int>& threads) {
  Clock all;
  for (int thread : threads) join(all, clocks[thread]);
  for (int thread : threads) clocks[thread] = all, next(thread);
}
void Detector::arrive(const void* barrier, const Clock& knowing) { join(of(barrier).now, knowing); }
void Detector::complete(const void* barrier) { of(barrier).before.swap(of(barrier).now), of(barrier).now.clear(); }
void Detector::pass(const void* barrier, int thread) { join(clocks[thread], of(barrier).before); }
bool Detector::before(const Access& a, int thread) const { return a.thread == thread || a.at <= clocks[thread][a.thread]; }
void Detector::access(const void* at, size_t bytes, bool writes, int thread, void* code) {
  const size_t offset = (const char*)at - base;
  if ((const char*)at < base || offset >= watched) return;
  const Access now = {thread, clocks[thread][thread], code};
  for (size_t i = offset / GRAIN; i <= (offset + bytes - 1) / GRAIN; ++i) {
    Cell& cell = cells[i];
    if (cell.written.thread >= 0 && !before(cell.written, thread)) record(cell.written, code, writes ? "written twice" : "written, read");
    if (writes) {
      for (const Access& read : cell.reads)
        if (!before(read, thread)) record(read, code, "read, written");
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

// Number of races found so far; and of one of them the two addresses in the library and the kind of the two accesses.
EXPORTED int race_count() { return (int)races::found.size(); }
EXPORTED const char* race(int which, size_t* first, size_t* second) {
  Dl_info library;
  dladdr((void*)&race_count, &library);
  const races::Race r = races::found[which];
  *first = (char*)r.first - (char*)library.dli_fbase, *second = (char*)r.second - (char*)library.dli_fbase;
  return r.kind;
}
