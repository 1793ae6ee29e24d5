// Shared memory, the ring of weights, and waiting: every wait ends.
#pragma once

// Where things lie in shared memory; plan.cuh has the offsets.
struct Shared {
  char* stages;          // [STAGES][CHUNK]
  u16 *upper, *lower;    // [WIDEST]: the vector that is multiplied, in two parts
  float* sums;           // [2][WARPS][SUM_ROWS]: of tiles, by warp
  float* own;            // the residual stream's rows of this CTA
  float* squares;        // [WARPS]
  float* found;          // [WARPS][UNIT_QUERIES, or SLOT_QUERIES][HEAD + 4]: attention by warp: results, maximum, sum
  u64* winners;          // [WARPS]
  u32* bins;             // [2][BINS]: over the vector, when a token is drawn
  u64 *full, *empty;     // [STAGES]
  volatile int *allowed, *gone;  // chunks that may be copied; waits given up
  volatile int *token, *made;    // that is processed; of this launch
  volatile u32* met;     // barriers over the grid, in the first thread
  int* share;            // [SHARES][2]: units of this CTA
  DEVICE explicit Shared(char* base)
      : stages(base), upper((u16*)(base + UPPER_AT)), lower((u16*)(base + LOWER_AT)), sums((float*)(base + SUMS_AT)),
        own((float*)(base + OWN_AT)), squares((float*)(base + SQUARES_AT)), found((float*)(base + FOUND_AT)),
        winners((u64*)(base + WINNERS_AT)), bins((u32*)(base + UPPER_AT)), full((u64*)(base + FULL_AT)), empty(full + STAGES),
        allowed((volatile int*)(empty + STAGES)), gone(allowed + 1), token(allowed + 2), made(allowed + 3),
        met((volatile u32*)(allowed + 4)), share((int*)(allowed + 5)) {}
};

struct Ring {
  int stage = 0;
  u32 phase = 0;
  DEVICE void advance() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
  // So many stages on, at most all.
  DEVICE Ring after(int stages) const {
    Ring found = *this;
    found.stage += stages;
    if (found.stage >= STAGES) found.stage -= STAGES, found.phase ^= 1;
    return found;
  }
  // So many stages ago, at most all; before the first use, stages that were never filled, for which nobody waits.
  DEVICE Ring before(int stages) const {
    Ring found = *this;
    found.stage -= stages;
    if (found.stage < 0) found.stage += STAGES, found.phase ^= 1;
    return found;
  }
};

// Whether to wait no longer: it took too long, here or elsewhere.
DEVICE bool given_up(u32* error, volatile int* gone, long long begin) {
  if (*gone) return true;
  const u32 known = load_relaxed(error);
  if (ticks() - begin <= LIMIT && !known) return false;
  if (!known) store_relaxed(error, STALLED);
  *gone = 1;
  return true;
}
constexpr u32 PATIENCE = 1024, RING_PATIENCE = 64;  // tries between looks at the clock

// Until something is so; or until it took too long, from when on nothing is waited for. Whether it is so.
template <u32 TRIES = PATIENCE, class Ready>
DEVICE bool await(const Arguments& a, Shared& s, Ready ready) {
  u32 tries = 0;
  long long begin = 0;
  while (!ready()) {
    breathe();
    if (++tries % TRIES) continue;
    if (tries == TRIES) begin = ticks();
    if (given_up(a.state + ERROR, s.gone, begin)) return false;
  }
  return true;
}
DEVICE bool await_ring(const Arguments& a, Shared& s, u64* bar, u32 phase) {
  return await<RING_PATIENCE>(a, s, [&] { return ring_passed(bar, phase); });
}
