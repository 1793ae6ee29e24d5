// Race detector for shared memory, with vector clocks: reports two accesses to the same place, one of them a write, that no barrier orders.
// A place is a cell of two bytes.
//
// A kernel compiled with -fsanitize=thread calls a function of machine.cpp, in place of the sanitizer's, at each load and store. Barriers
// (of a block, of the consumers, of a warp), mbarriers and bulk copies order accesses; mma and shuffles do not, though the emulated lanes
// rarely diverge there. The first `watched` bytes are checked; behind them are mbarriers and words that threads poll.
// Source: Fidge (1988), Mattern (1989).
#pragma once
#include <cstdint>
#include <cstddef>
#include <vector>

namespace races {
typedef std::vector<uint32_t> Clock;  // for each thread of a block, the time up to which its accesses are known to be over
struct Access {
  int thread;
  uint32_t at;  // time of that thread: its own entry of its clock
  void* code;   // return address of the call, which identifies the source line
};
struct Cell {
  Access written = {-1, 0, nullptr};
  std::vector<Access> reads;  // since the last write, at most one per thread
  size_t next = 0;  // index of the read to look at first: threads come in the same order each time
};
// Clocks of an mbarrier: joined over the threads that arrived in this phase, and in the phase before.
struct BarrierClocks { Clock now, before; };
struct Race {
  void *first, *second;  // code of the two accesses
  const char* kind;      // "written twice", "written, read" or "read, written"
};
constexpr int GRAIN = 2;  // bytes of a cell: the smallest type that kernels store
// Detector of one block.
struct Detector {
  char* base;      // start of shared memory
  size_t watched;  // bytes of it that are checked
  std::vector<Clock> clocks;  // by thread
  std::vector<Cell> cells;
  std::vector<BarrierClocks> barriers;  // by mbarrier

  Detector(char* base, int watched, int barriers, int threads);
  void next(int thread);                                   // the thread's later accesses get a later time
  void synchronize(const std::vector<int>& threads);       // all of them have come to a barrier
  void arrive(const void* barrier, const Clock& knowing);  // a thread or copy with this clock arrives at an mbarrier
  void complete(const void* barrier);                      // a phase of the mbarrier is complete
  void pass(const void* barrier, int thread);              // the thread has seen that
  void access(const void* at, size_t bytes, bool writes, int thread, void* code);

 private:
  BarrierClocks& of(const void* barrier);
  bool before(const Access& a, int thread) const;  // whether the access is ordered before the thread's next one
};
}  // namespace races
