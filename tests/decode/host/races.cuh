// Whether threads of a block meet between their accesses to its shared memory, by vector clocks. A kernel compiled with
// -fsanitize=thread tells of each load and store by functions that are machine.cpp's and not the sanitizer's. Barriers,
// meetings of a warp and copies order; products and exchanges between lanes do not, though the machine's lanes rarely part there.
// What lies behind `watched` bytes, barriers and words that are polled, is not looked at.
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
  std::vector<Access> reads;  // since, one of a thread
  size_t next = 0;  // of them, the one behind that which was found last: threads take turns in the same order
};
// Of a barrier: what those knew who have arrived in this phase, and in the one before.
struct Known { Clock now, before; };
struct Race {
  void *first, *second;
  const char* kind;
};
constexpr int GRAIN = 2;  // bytes: the smallest number that is stored
struct Watch {
  char* base;
  size_t watched;
  std::vector<Clock> clocks;
  std::vector<Cell> cells;
  std::vector<Known> barriers;

  Watch(char* base, int watched, int barriers, int threads);
  void next(int thread);
  void meet(const std::vector<int>& threads);
  void arrive(const void* barrier, const Clock& knowing);
  void complete(const void* barrier);
  void pass(const void* barrier, int thread);
  void access(const void* at, size_t bytes, bool writes, int thread, void* code);

 private:
  Known& of(const void* barrier);
  bool before(const Access& a, int thread) const;
};
}  // namespace races
