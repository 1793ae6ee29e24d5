// Race detector for shared memory, with vector clocks: reports two accesses to a byte, one of them a write, that no barrier orders.
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
typedef std::vector<uint32_t> Clock;
struct Access {
  int thread;
  uint32_t at;
  void* code;
};
struct Cell {
  Access written = {-1, 0, nullptr};
  std::vector<Access> reads;  // since the last write, at most one per thread
  size_t next = 0;  // index of the read to look at first: threads come in the same order each time
};
// Clocks of an mbarrier: joined over the threads that arrived in this phase, and in the phase before.
struct BarrierClocks { Clock now, before; };
struct Race {
  void *first, *second;
  const char* kind;
};
constexpr int GRAIN = 2;  // bytes of a cell: the smallest type that kernels store
struct Detector {
  char* base;
  size_t watched;
  std::vector<Clock> clocks;
  std::vector<Cell> cells;
  std::vector<BarrierClocks> barriers;

  Detector(char* base, int watched, int barriers, int threads);
  void next(int thread);
  void synchronize(const std::vector<int>& threads);
  void arrive(const void* barrier, const Clock& knowing);
  void complete(const void* barrier);
  void pass(const void* barrier, int thread);
  void access(const void* at, size_t bytes, bool writes, int thread, void* code);

 private:
  BarrierClocks& of(const void* barrier);
  bool before(const Access& a, int thread) const;
};
}  // namespace races
