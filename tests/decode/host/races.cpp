// What races.cuh declares, compiled apart: these accesses are not the kernel's.
#include "races.cuh"

namespace races {
static std::vector<Race> found;
int count() { return (int)found.size(); }
Race race(int which) { return found[which]; }
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

Watch::Watch(char* base, int threads) : base(base), clocks(threads, Clock(threads, 0)), cells(FULL_AT / GRAIN), barriers(2 * STAGES) {
  for (int thread = 0; thread < threads; ++thread) clocks[thread][thread] = 1;
}
Known& Watch::of(const void* barrier) { return barriers[((const char*)barrier - base - FULL_AT) / 8]; }
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
  if ((const char*)at < base || offset >= FULL_AT) return;
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
    size_t known = 0;
    while (known < cell.reads.size() && cell.reads[known].thread != thread) ++known;
    if (known < cell.reads.size())
      cell.reads[known] = now;
    else
      cell.reads.push_back(now);
  }
}
}  // namespace races
