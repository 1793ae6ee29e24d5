// Layout of shared memory, the ring of weight chunks, and spin waits that time out.
//
// Callers    step.cu (producer) and consumer.cuh wait for the ring; words.cuh, parts.cuh, phases.cuh, residual.cuh and step.cu
//            spin by spin_until().
// Ring       STAGES buffers of CHUNK (16 KB) bytes, each with two mbarriers: `full` (one arrival plus the bytes of the copies; the
//            producer thread arms it, the bulk copies complete it) and `empty` (one arrival per consumer warp). The producer waits for
//            `empty`, arms `full` and issues cp.async.bulk; the consumer warps wait for `full`, read the chunk into registers, and
//            arrive at `empty`. This is the producer/consumer pipeline of CUTLASS. A position in the ring is a stage and the parity of
//            the mbarrier phase that is waited for there; the parity flips each time the ring wraps around.
// Time-out   no wait is unbounded. After TIMEOUT_CYCLES (about two seconds) a wait writes STALLED to the state's error word and sets
//            `aborted` in shared memory. From then on every wait of any CTA ends at its next check of the error (SPINS_PER_CHECK): the
//            launch ends, its logits are NaN, and the host raises. A CTA that is not resident, or a damaged buffer, thus gives an
//            error and not a hung GPU.
#pragma once

// Pointers into a CTA's shared memory. plan.cuh has the byte offsets (..._AT), which codegen/layout.py computes. `vector_hi` and
// `vector_lo` hold the operand of the current matrix-vector product, split into two bfloat16 numbers (vectors.cuh, store_split4).
struct Shared {
  char* stages;                    // [STAGES][CHUNK]: the ring
  u16 *vector_hi, *vector_lo;      // [columns of the widest operand]
  float* sums;                     // [2][WARPS][SUM_ROWS]: row sums of each warp; two sets alternate (Consumer::parity)
  float* own_rows;                 // rows of the residual stream that this CTA owns
  float* squares;                  // [WARPS]: sums of squares, and scratch of the sampler
  float* partial;                  // [WARPS][queries of a unit][HEAD_DIM + 4]: each warp's attention accumulator, maximum and sum
  u64* candidates;                 // [WARPS]: scratch of reductions over the CTA
  u32* histogram;                  // [2][BINS]: aliases the operand, which is not in use while a token is sampled
  u64 *full, *empty;               // [STAGES]: mbarriers of the ring
  volatile int *chunks_allowed;    // chunks that the producer may copy in this launch; only without CROSS_PHASE_PREFETCH (allow_weights)
  volatile int *aborted;           // set once a wait has timed out
  volatile int *token;             // id of the token that is processed
  volatile int *tokens_done;       // tokens that this launch has completed
  volatile u32* grid_barriers;     // grid barriers passed since the counters were cleared; used by thread 0
  int* assignments;                // [TABLE_PHASES][2]: first unit and one past the last of this CTA in each phase
  DEVICE explicit Shared(char* base)
      : stages(base), vector_hi((u16*)(base + VECTOR_HI_AT)), vector_lo((u16*)(base + VECTOR_LO_AT)), sums((float*)(base + SUMS_AT)),
        own_rows((float*)(base + OWN_ROWS_AT)), squares((float*)(base + SQUARES_AT)), partial((float*)(base + WARP_PARTIAL_AT)),
        candidates((u64*)(base + CANDIDATES_AT)), histogram((u32*)(base + VECTOR_HI_AT)), full((u64*)(base + FULL_AT)),
        empty(full + STAGES), chunks_allowed((volatile int*)(empty + STAGES)), aborted(chunks_allowed + 1), token(chunks_allowed + 2),
        tokens_done(chunks_allowed + 3), grid_barriers((volatile u32*)(chunks_allowed + 4)), assignments((int*)(chunks_allowed + 5)) {}
};

// Position in the ring: a stage, and the parity of the mbarrier phase at it.
struct Ring {
  int stage = 0;
  u32 phase = 0;
  DEVICE void advance() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
  // Return the position `stages` later; at most STAGES.
  DEVICE Ring after(int stages) const {
    Ring other = *this;
    other.stage += stages;
    if (other.stage >= STAGES) other.stage -= STAGES, other.phase ^= 1;
    return other;
  }
  // Return the position `stages` earlier; at most STAGES. Before the first use this names stages that were never filled, with the
  // parity for which a wait returns at once.
  DEVICE Ring before(int stages) const {
    Ring other = *this;
    other.stage -= stages;
    if (other.stage < 0) other.stage += STAGES, other.phase ^= 1;
    return other;
  }
};

// Return whether a wait that began at cycle `begin` must end: it timed out, or this CTA or another has noted an error.
DEVICE bool should_abort(u32* error, volatile int* aborted, long long begin) {
  if (*aborted) return true;
  const u32 known = load_relaxed(error);
  if (clock64() - begin <= TIMEOUT_CYCLES && !known) return false;
  if (!known) store_relaxed(error, STALLED);
  *aborted = 1;
  return true;
}
// Iterations between two looks at the clock and the error word. An iteration of a ring wait may be suspended in hardware, so it counts
// for more. Checking `aborted` before every wait for the ring cost 26 us per token (0.6B, H200).
constexpr u32 SPINS_PER_CHECK = 1024, RING_SPINS_PER_CHECK = 64;

// Spin until ready() is true, and return true; return false if the wait timed out or the launch is aborted. The caller goes on in both
// cases, with data that is then meaningless.
template <u32 SPINS = SPINS_PER_CHECK, class Ready>
DEVICE bool spin_until(const Arguments& a, Shared& s, Ready ready) {
  u32 spins = 0;
  long long begin = 0;
  while (!ready()) {
    spin_pause();
    if (++spins % SPINS) continue;
    if (spins == SPINS) begin = clock64();
    if (should_abort(a.state + ERROR, s.aborted, begin)) return false;
  }
  return true;
}
// Wait for the phase of an mbarrier with this parity. All lanes of a warp must wait at the same barrier (Consumer::fetch says why).
DEVICE bool wait_ring(const Arguments& a, Shared& s, u64* bar, u32 phase) {
  return spin_until<RING_SPINS_PER_CHECK>(a, s, [&] { return mbarrier_try_wait(bar, phase); });
}
