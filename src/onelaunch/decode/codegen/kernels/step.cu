// Tokens of a Qwen3 model at batch 1: all layers, the head and the choice of the next token in one launch, or one phase of them.
//
// Plan       plan.cuh, written for a model, a rung of the ladder and a chip: sizes, places, edges, the order of phases.
// Grid       one CTA for each processor, all resident. Each owns tiles of 8 rows of every matrix, see shares.
// Warps      8 work; one thread of a ninth copies the CTA's weights, which lie in the order of their use, into a ring in shared memory.
//            Where the plan streams it waits for no edge but one: it runs into the next phase, layer and token, but copies keys and
//            values of earlier positions once the token before is done.
// On chip    weights on their way; the vector that a phase multiplies; the rows of the residual stream that the CTA owns, if it alone
//            adds to them.
// Products   a tile's 8 rows times 32 channels are one product of 16 rows by 8 columns: rows 8 to 15 are the same rows, 16 channels on.
//            Columns are the vector's upper and lower 8 bits of mantissa, for either half: float32 activations at no cost, no shuffles.
// Edges      grid: a counter that all bump. flags: counters by key head. data: a word's two lowest bits say which use it was written
//            for, and readers wait for the words themselves; that needs no fence and no order but that of the data. Where heads are
//            summed, words of the residual stream count what was added to them, and readers wait for that number: residual.cuh.
// Numerics   weights, keys and values bfloat16; sums, residual stream and what CTAs hand each other float32, less two bits if tagged;
//            a stream that is added to is in integers of 2^-28.
// Waiting    never without end: after LIMIT ticks an error is noted, and no wait of this launch waits again.
#include "machine.cuh"
#include "plan.cuh"

constexpr int WARPS = 8, WORKERS_THREADS = 32 * WARPS, THREADS = WORKERS_THREADS + 32;
constexpr int TILE = 8, STEP = 256, GRANULE = TILE * STEP * 2, CHUNK = 4 * GRANULE, MOST = 6;
constexpr int HEAD_WORDS = (GROUP + 2) * HEAD, UNIT_QUERIES = GROUP / SHARERS;  // queries of a unit of attention
constexpr int SLOT = UNIT_QUERIES * JOINED * HEAD + (UNIT_QUERIES * JOINED + 3) / 4 * 4;
constexpr long long LIMIT = 1ll << 32;  // ticks: two seconds
constexpr float LOG2E = 1.4426950408889634f;

enum { QKV, O, GATE_UP, DOWN, LM_HEAD, ATTENTION, ROPE, NORM, SHARES };       // rows of the table of shares
enum { POSITION, TOKENS, BARRIERS, ERROR, STATE_WORDS };                      // words of state
enum { STALLED = 1, OUT_OF_RANGE };                                           // errors
enum { TICKS_BEGIN, TIME_BEGIN, TICKS_END, TIME_END, MARKS };                 // behind them if STAMPED, for each CTA: of a token; then
enum { READY, DONE, MARKS_OF_A_PHASE };                                       // [LAYERS + 1][SHARES + 1] of these, in ticks

typedef unsigned short u16;

struct Arguments {
  const char* stream;        // weights, CTA after CTA
  const long long* starts;   // where each CTA's begin, in bytes
  const int* shares;         // [CTAS][SHARES][2]: units of each CTA
  const int* arrivals;       // of each counter, in one use
  const u16* embedding;      // [VOCAB][HIDDEN]
  const u16* norms;          // per layer HIDDEN, HIDDEN, HEAD, HEAD; then HIDDEN
  const float* rotations;    // [capacity][HEAD]: cosines, then sines
  u16 *keys, *values;        // [LAYERS][HEADS][capacity][HEAD]
  const long long* first;    // the token that comes first, or none: that of its position in tokens
  int* tokens;               // by position
  float* words;              // buffers
  u64* best;                 // [3][CTAS]: candidates, two sets by turns; those that are drawn
  u32* counters;
  u32* state;
  float* logits;             // [VOCAB]
  const u32* choices;        // how a token is chosen, or none: the likeliest; see sampling.cuh
  unsigned char* seen;       // [VOCAB]: whether a token is in the text, or none: without a penalty
  u64* tallies;              // [ROUNDS][BINS]
  int capacity, count;       // positions that the cache has room for; tokens to make
  int position;              // of the first token, or -1: as the last launch left it
};

#include "waiting.cuh"
#include "vectors.cuh"
#include "products.cuh"
#include "heads.cuh"
#include "attention.cuh"
#include "parts.cuh"
#include "residual.cuh"
#include "phases.cuh"

// The thread that copies. In a plan that does not stream it stops where the workers have not yet arrived. Before the chunk at which
// hand-offs end, what is on its way is bounded, and how soon one chunk follows another: hand-offs queue behind it.
struct Copier {
  const Arguments& a;
  Shared& s;
  Ring ring;
  int issued = 0, flight = FLIGHT;
  long long earliest = 0;
  const u64 once = used_once();

  // The place of the next chunk, of so many bytes, once it is free; or none: nobody waits for the rest.
  DEVICE char* next(int bytes, bool bounded, int pace) {
    if constexpr (!STREAMS && !SEPARATE) await(a, s, [&] { return (int)(*s.allowed - issued) > 0; });
    if (!await_ring(a, s, s.empty + ring.stage, ring.phase ^ 1)) return nullptr;
    ring_expect(s.full + ring.stage, bytes);
    if (bounded) {
      const Ring landed = ring.before(flight);
      await_ring(a, s, s.full + landed.stage, landed.phase);
      if (pace > 0) await(a, s, [&] { return ticks() >= earliest; });
      earliest = ticks() + pace;
    }
    return s.stages + ring.stage * CHUNK;
  }
  DEVICE void copy(char* to, const void* from, int bytes) { ring_copy(to, from, bytes, s.full + ring.stage, once); }
  DEVICE void done() { ring.advance(), ++issued; }
};
DEVICE void copy_weights(Copier& c, const char* from, int granules, int chunk, bool bounded) {
  const int bytes = GRANULE * (granules - 4 * chunk < 4 ? granules - 4 * chunk : 4);
  if (char* to = c.next(bytes, bounded, PACE)) c.copy(to, from + (long long)chunk * CHUNK, bytes), c.done();
}
// Earlier positions of a layer. Those of the token before are there once it is done.
DEVICE void copy_cache(Copier& c, const int* share, int layer, int token, int position) {
  for (int unit = share[2 * ATTENTION]; unit < share[2 * ATTENTION + 1]; ++unit) {
    const Span span(unit, position);
    if (!span.used || span.begin >= span.cached) continue;
    if (layer == 0) {
      await(c.a, c.s, [&] { return *c.s.made >= token; });
      see_for_copies();
    }
    for (int base = span.begin; base < span.cached; base += ROWS) {
      const int bytes = 2 * HEAD * (span.cached - base < ROWS ? span.cached - base : ROWS);
      const long long at = ((long long)(layer * HEADS + span.head) * c.a.capacity + base) * HEAD;
      char* to = c.next(2 * bytes, true, 0);
      if (!to) return;
      c.copy(to, c.a.keys + at, bytes), c.copy(to + CHUNK / 2, c.a.values + at, bytes), c.done();
    }
  }
}
DEVICE void copy_tokens(const Arguments& a, const int* share, Shared& s) {
  const int qkv = phase_granules(share, QKV, HIDDEN) / 4, layer = layer_granules(share), chunks = (layer * LAYERS + 3) / 4;
  const int granules = layer * LAYERS + phase_granules(share, LM_HEAD, HIDDEN);
  const int position = a.position < 0 ? (int)a.state[POSITION] : a.position;
  const char* from = a.stream + a.starts[cta_index()];
  Copier c = {a, s};
  for (int token = 0; token < a.count; ++token) {
    if (FLIGHT_APART != FLIGHT) c.flight = used_at(position + token) == 1 ? FLIGHT_APART : FLIGHT;
    int until = qkv;  // whole layers are whole chunks, where keys and values come too
    for (int chunk = 0, at = 0; chunk < (granules + 3) / 4 && !*s.gone; ++chunk) {
      if (KEYS_STREAM && chunk == until && at < LAYERS) copy_cache(c, share, at++, token, position + token), until += layer / 4;
      copy_weights(c, from, granules, chunk, chunk < chunks);
    }
  }
}

DEVICE Shared set_up(const Arguments& a) {
  Shared s(shared_memory());
  if (thread_index() < 2 * SHARES) s.share[thread_index()] = a.shares[cta_index() * SHARES * 2 + thread_index()];
  if (thread_index() == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      ring_init(s.full + stage, 1);
      ring_init(s.empty + stage, WARPS);
    }
    *s.allowed = 0;
    *s.gone = 0;
    *s.made = 0;
    ring_fence();
  }
  block_meets();
  return s;
}

DEVICE void decode_tokens(const Arguments& a) {
  Shared s = set_up(a);
  const int* share = s.share;
  if (thread_index() >= WORKERS_THREADS) {
    if (thread_index() == WORKERS_THREADS) copy_tokens(a, share, s);
  } else {
    Worker w(a, s, share);
    while (*s.made < a.count) {
      w.begin_token();
      for (w.layer = 0; w.layer < LAYERS; ++w.layer) layer_phases(w);
      tail_phases(w);
      w.end_token();
    }
    w.end_launch();
  }
}

// One phase of a layer, or of the tail where layer is LAYERS, as a launch of its own. SHARES stands for the choice of the next token.
template <int PHASE>
DEVICE void decode_phase(const Arguments& a, int layer) {
  Shared s = set_up(a);
  const int* share = s.share;
  if (thread_index() >= WORKERS_THREADS) {
    if (PHASE <= LM_HEAD && thread_index() == WORKERS_THREADS) {
      int before = layer * layer_granules(share);
      for (int each = 0; each < PHASE && PHASE != LM_HEAD; ++each) before += phase_granules(share, each, columns_of(each));
      const int granules = phase_granules(share, PHASE, columns_of(PHASE));
      const char* from = a.stream + a.starts[cta_index()] + (long long)before * GRANULE;
      Copier c = {a, s};
      for (int chunk = 0; chunk < (granules + 3) / 4; ++chunk) copy_weights(c, from, granules, chunk, false);  // nobody's result: no need to wait
    }
  } else {
    begin_after_earlier_launches();
    let_next_launch_begin();
    Worker w(a, s, share);
    w.layer = layer;
    if constexpr (PHASE == QKV) multiply_qkv(w);
    if constexpr (PHASE == ATTENTION) attend(w);
    if constexpr (PHASE == O) multiply_o(w);
    if constexpr (PHASE == GATE_UP) multiply_gate_up(w);
    if constexpr (PHASE == DOWN) multiply_down(w);
    if constexpr (PHASE == LM_HEAD) multiply_head(w);
    if constexpr (PHASE == SHARES) next_token(w), w.end_launch();
  }
}

#ifndef ON_HOST
#ifdef ALONE
// Two launches side by side, but attention's has more registers: those beside it have few.
constexpr int SIDE_BY_SIDE = ALONE == ATTENTION ? 1 : 2;
#else
constexpr int SIDE_BY_SIDE = 1;
#endif
extern "C" __global__ void __launch_bounds__(THREADS, SIDE_BY_SIDE)
decode(const char* stream, const long long* starts, const int* shares, const int* arrivals, const u16* embedding, const u16* norms,
       const float* rotations, u16* keys, u16* values, const long long* first, int* tokens, float* words, u64* best, u32* counters,
       u32* state, float* logits, const u32* choices, unsigned char* seen, u64* tallies, int capacity, int count, int position,
       int layer) {
  const Arguments a = {stream, starts, shares,   arrivals, embedding, norms,   rotations, keys,    values,   first, tokens,
                       words,  best,   counters, state,    logits,    choices, seen,      tallies, capacity, count, position};
#ifdef ALONE
  decode_phase<ALONE>(a, layer);
#else
  decode_tokens(a);
#endif
}
#endif
