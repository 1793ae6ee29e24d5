// Decode step of a dense model (Qwen3, Llama, ...) at batch 1, as one persistent kernel: all layers, LM head and choice of the next token
// in one launch.
//
// Computes   per token and layer: x += W_o attention(rope(norm(W_qkv rmsnorm(x)))) and x += W_down (silu(W_gate y) * W_up y), y =
//            rmsnorm(x); then logits = W_head rmsnorm(x) and the next token. The model's flags (below) say whether heads are normalized
//            (norm), all layers rotate them (rope), and W_qkv and W_o have biases. Defined with ONLY_PHASE, the kernel runs one phase
//            of this per launch.
// Plan       plan.cuh (sizes, flags, offsets) and order.cuh (sequence of phases and their synchronization) are generated from a plan by
//            codegen/emit.py, for one model, optimization level and number of SMs.
// Host       decode/runtime/kernels.py compiles and launches decode(), the entry at the end of this file. tests/decode/host/run.cpp
//            defines ON_HOST, which leaves decode() out, and calls decode_tokens() and decode_phase() on an emulated GPU.
// Grid       one CTA per SM, all resident (cooperative launch), since CTAs wait for each other. Each owns tiles of 8 rows of every weight
//            matrix, and some units of attention: its row of the table `assignments`.
// Warps      eight consumer warps compute. One thread of a ninth warp, the producer, copies the CTA's weights, which lie in global memory
//            in the order of their use, into a ring in shared memory with cp.async.bulk (waiting.cuh). With CROSS_PHASE_PREFETCH it
//            runs ahead into the next phase, layer and token, bounded by the ring alone; keys and values of earlier positions, which
//            it copies too (KV_THROUGH_RING), it may only copy once the previous token is complete.
// On chip    shared memory: the ring (the rest of 227 KB), the operand of the current product as two bfloat16 per column, and the CTA's own
//            rows of the residual stream. Registers: the weights of a phase's first tiles, fetched before its operand is waited for.
// Memory     every weight is read once per token; each cached key and value once per unit that has its position. Vectors between phases
//            pass through the L2 cache: every CTA reads a phase's whole operand.
// Products   mma.m16n8k16 with x split into two bfloat16 (products.cuh).
// Sync       between phases, by plan: grid barriers, semaphores per KV head (phases.cuh), or flag-in-data words as in NCCL's LL
//            protocol, which need neither fence nor barrier (words.cuh). With SPLIT_K_O words of the residual stream are sums that
//            count their additions, and readers wait for the count (residual.cuh). Before launch, onelaunch.decode.plan.check proves
//            every plan free of races.
// Numerics   weights, keys and values bfloat16; products, residual stream and words between CTAs float32 (22 significant bits where
//            words carry a tag; fixed point in units of 2^-28 where they are added to).
// Time-out   every wait ends: after TIMEOUT_CYCLES an error is noted, at whose next check the others end too (waiting.cuh).
// Source     docs/notebook/decode.md, with the measurements behind these choices.
//
// Constants of plan.cuh
// Model      HIDDEN, INNER (width of the MLP), QUERY (channels of all query heads), KV_HEADS, GROUP (query heads per KV head), HEAD_DIM.
//            QK_NORM, QKV_BIAS, O_BIAS: flags of norms of heads and of biases; SOME_UNROTATED: not all layers rotate(layer).
//            LAYER_PARAMETERS is the stride of Arguments::parameters from layer to layer, and ..._AT are offsets in a layer.
// Attention  the work is divided into units, each the work of one CTA: QUERY_SPLITS divides a KV head's queries, KV_SPLITS the positions.
//            In a long context, from position MERGE_FROM on, QUERY_MERGE neighbouring query splits take each other's queries and divide
//            the positions further (heads.cuh). UNITS is the most units of any CTA. PARTIAL and the other buffer names are offsets in
//            Arguments::words.
// Weights    STAGES of the ring, DEPTH and PIECE_COLUMNS (consumer.cuh); MAX_, MIN_ and GROUPS_ of each product (products.cuh). SUM_ROWS
//            is the number of row sums that a warp has room for in shared memory.
// Pacing     in the layers of the megakernel, at most FLIGHT bulk copies are in flight, and a copy of weights begins at least PACE cycles
//            after a copy of weights directly before it. While there is one KV split, FLIGHT_LOCAL are in flight, since CTAs then exchange
//            no partial attention outputs (only with SPLIT_K_O; else equal to FLIGHT). HOLD cycles before a poll (parts.cuh). L2_CHUNKS
//            and PACE_L2: chunks of weights that the producer prefetches into L2 while the ring is full (Producer).
// Flags      CROSS_PHASE_PREFETCH, KV_THROUGH_RING, LAUNCH_PER_PHASE, FLAG_IN_DATA, SPLIT_K_O, PROFILED; NORM_PHASE and ROPE_PHASE, if
//            RMSNorm and RoPE are phases of their own.
#include "machine.cuh"
#include "plan.cuh"

constexpr int WARPS = 8, CONSUMER_THREADS = 32 * WARPS, THREADS = CONSUMER_THREADS + 32;
// Rows of a tile, columns of a step; bytes of a granule (a tile's rows in one step) and of a chunk (a stage of the ring); the most tiles
// that a CTA multiplies at once.
constexpr int TILE = 8, STEP = 256, GRANULE = TILE * STEP * 2, CHUNK = 4 * GRANULE, MAX_TILES = 6;
// Columns and bytes of a warp's part of a granule. The stream is counted in pieces of PIECE_COLUMNS columns (consumer.cuh).
constexpr int PART_COLUMNS = STEP / WARPS, PART = GRANULE / WARPS;
constexpr bool IN_PARTS = PIECE_COLUMNS == PART_COLUMNS, CHUNKED_PHASES = DEPTH == 4 && !IN_PARTS;
constexpr int PIECE = TILE * PIECE_COLUMNS * 2, CHUNK_PIECES = CHUNK / PIECE;
static_assert(!IN_PARTS || STAGES > 1, "a run may begin in one chunk and end in the next");
constexpr int HEAD_WORDS = (GROUP + 2) * HEAD_DIM;           // words of a KV head: its queries, key and value
constexpr int UNIT_QUERIES = GROUP / QUERY_SPLITS;            // queries of a query split, and so of a unit of attention
// Words of a unit's slot of PARTIAL: outputs, then LSE, rounded up to a multiple of 16 bytes.
constexpr int PARTIAL_WORDS = UNIT_QUERIES * QUERY_MERGE * HEAD_DIM + (UNIT_QUERIES * QUERY_MERGE + 3) / 4 * 4;
constexpr long long TIMEOUT_CYCLES = 1ll << 32;  // about two seconds
constexpr float LOG2E = 1.4426950408889634f;

// Phases that have a row in Arguments::assignments, in the order of its rows (layout.py, ASSIGNED_PHASES). NEXT_TOKEN, the choice of the
// next token, has none.
enum { QKV, O, GATE_UP, DOWN, LM_HEAD, ATTENTION, ROPE, NORM, TABLE_PHASES, NEXT_TOKEN = TABLE_PHASES };
enum { POSITION, TOKENS, BARRIERS, ERROR, STATE_WORDS };  // words of Arguments::state
enum { STALLED = 1, OUT_OF_RANGE };  // values of the error word
// Profile markers, behind the state if PROFILED: per CTA MARKER_HEADER words of the token, in cycles and nanoseconds, then
// [LAYERS + 1][TABLE_PHASES + 1][MARKERS_PER_PHASE] in cycles.
enum { TICKS_BEGIN, TIME_BEGIN, TICKS_END, TIME_END, MARKER_HEADER };
enum { READY, DONE, MARKERS_PER_PHASE };  // operand staged; results stored

typedef unsigned short u16;

struct Arguments {
  const char* stream;        // weights, CTA after CTA, each in the order of its use (packing.py)
  const long long* starts;   // [CTAS]: offset of each CTA's weights, in bytes
  const int* assignments;    // [CTAS][TABLE_PHASES][2]: first unit of work and one past the last (consumer.cuh)
  const int* arrivals;       // per semaphore: CTAs that signal it in one epoch
  const u16* embedding;      // [VOCAB][HIDDEN]
  const u16* parameters;     // factors of norms and biases, [LAYERS][LAYER_PARAMETERS] (memory.py); then the last norm, [HIDDEN]
  const float* rotations;    // [capacity][HEAD_DIM]: cosines, then sines; with SOME_UNROTATED behind a row of the identity
  u16 *keys, *values;        // [LAYERS][KV_HEADS][capacity][HEAD_DIM]
  const long long* first;    // id of the first token to process; if null it is read from `tokens`
  int* tokens;               // [positions]: token ids by position; the launch writes the ids that it chooses
  float* words;              // buffers between CTAs, at the offsets of plan.cuh
  u64* best;                 // [3][CTAS]: candidates: two sets that alternate, and the sampled ones
  u32* counters;             // grid barrier, then semaphores, 128 bytes each
  u32* state;
  float* logits;             // [VOCAB]
  const u32* choices;        // sampling parameters (sampling.cuh); null takes the largest logit
  unsigned char* seen;       // [VOCAB]: flag of tokens in the sequence; null without a penalty
  u64* histograms;           // [RADIX_PASSES][BINS], zero between tokens
  int capacity, count;       // positions that the KV cache has room for; tokens to process
  int position;              // position of the first token; -1 continues where the last launch ended
};

// Pieces of a tile with this many columns; chunks of this many pieces.
DEVICE constexpr int pieces_of(int columns) { return (columns + PIECE_COLUMNS - 1) / PIECE_COLUMNS; }
DEVICE constexpr int chunks_of(int pieces) { return (pieces + CHUNK_PIECES - 1) / CHUNK_PIECES; }

#include "waiting.cuh"
#include "consumer.cuh"
#include "words.cuh"
#include "vectors.cuh"
#include "products.cuh"
#include "heads.cuh"
#include "attention.cuh"
#include "parts.cuh"
#include "residual.cuh"
#include "phases.cuh"

// State of the producer thread. In the layers, where vectors pass between CTAs, the number of copies in flight is bounded by `flight`, and
// a copy of weights begins at least PACE cycles after a copy of weights directly before it, because loads and polls of the consumers queue
// behind the copies in the memory system. Keys and values are not paced. `earliest` is the clock cycle before which the next copy of
// weights may not begin, and `issued` the number of copies so far.
//
// While the ring is full, the producer prefetches the next chunks of weights into L2, at most L2_CHUNKS beyond the one that waits for a
// stage: L2 extends the ring while all CTAs wait for each other's results. Copies of such chunks begin PACE_L2 cycles after the copy
// before. The weights are those of a token: `chunks` chunks of `pieces` pieces in all, which begin at `from`. `chunk` is the number of
// the next one to copy, and `ahead` that of the next one to prefetch, which may be of the next token.
struct Producer {
  const Arguments& a;
  Shared& s;
  const char* from;
  int pieces, chunks = chunks_of(pieces);
  Ring ring;
  int issued = 0, flight = FLIGHT, chunk = 0, ahead = 0;
  long long earliest = 0;
  const u64 read_once = createpolicy_evict_first();

  DEVICE int bytes_of(int number) const {
    const int left = pieces - CHUNK_PIECES * number;
    return PIECE * (left < CHUNK_PIECES ? left : CHUNK_PIECES);
  }
  // Wait until the next stage is empty; return false if the wait timed out.
  DEVICE bool wait_for_stage() {
    u64* const empty = s.empty + ring.stage;
    const u32 phase = ring.phase ^ 1;
    if constexpr (L2_CHUNKS > 0) {
      const Ring landed = ring.before(flight);
      while (!mbarrier_test_wait(empty, phase)) {
        if (ahead < chunk) ahead = chunk;
        if (ahead >= chunk + L2_CHUNKS) break;
        if (clock64() < earliest || !mbarrier_test_wait(s.full + landed.stage, landed.phase)) continue;
        const int number = ahead % chunks;
        prefetch_l2(from + (long long)number * CHUNK, bytes_of(number));
        ++ahead, earliest = clock64() + PACE;
      }
    }
    return wait_ring(a, s, empty, phase);
  }

  // Return the address for the next chunk, of `bytes` bytes, once its stage is empty, and arm its `full` barrier. Return null if the
  // wait for the stage timed out: the rest is not copied, as nobody waits for it. The other waits go on after a time-out. In plans without
  // prefetch, first wait for permission (allow_weights). A `bounded` copy waits until the copy `flight` positions before it has landed and,
  // if `pace` is not 0, until the copy before it is as many cycles old as its own `pace` was.
  DEVICE char* acquire(int bytes, bool bounded, int pace) {
    if constexpr (!CROSS_PHASE_PREFETCH && !LAUNCH_PER_PHASE) spin_until(a, s, [&] { return (int)(*s.chunks_allowed - issued) > 0; });
    if (!wait_for_stage()) return nullptr;
    mbarrier_arrive_expect_tx(s.full + ring.stage, bytes);
    if (bounded) {
      const Ring landed = ring.before(flight);
      wait_ring(a, s, s.full + landed.stage, landed.phase);
      if (pace > 0) spin_until(a, s, [&] { return clock64() >= earliest; });
      earliest = clock64() + pace;
    }
    return s.stages + ring.stage * CHUNK;
  }
  DEVICE void copy(char* to, const void* from, int bytes) { cp_async_bulk(to, from, bytes, s.full + ring.stage, read_once); }
  DEVICE void advance() { ring.advance(), ++issued; }
};
// Copy the next chunk of weights.
DEVICE void copy_weights(Producer& p, bool bounded) {
  const int bytes = p.bytes_of(p.chunk);
  if (char* to = p.acquire(bytes, bounded, p.chunk < p.ahead ? PACE_L2 : PACE))
    p.copy(to, p.from + (long long)p.chunk * CHUNK, bytes), p.advance();
  ++p.chunk;
}
// Copy the keys and values of earlier positions for the CTA's units. Before the first layer's, wait until this CTA has completed the
// previous token: the rows that any CTA wrote for it have then been acquired, and the proxy fence orders them before bulk copies.
DEVICE void copy_cache(Producer& p, const int* assignments, int layer, int token, int position) {
  bool waited = layer > 0;
  const auto copy = [&](int head, int base, int positions) {
    if (!waited) {
      spin_until(p.a, p.s, [&] { return *p.s.tokens_done >= token; });
      fence_proxy_async();
      waited = true;
    }
    const int bytes = 2 * HEAD_DIM * positions;
    char* to = p.acquire(2 * bytes, true, 0);
    if (!to) return;
    const long long at = ((long long)(layer * KV_HEADS + head) * p.a.capacity + base) * HEAD_DIM;
    p.copy(to, p.a.keys + at, bytes), p.copy(to + CHUNK / 2, p.a.values + at, bytes), p.advance();
  };
  for (int unit = assignments[2 * ATTENTION]; unit < assignments[2 * ATTENTION + 1]; ++unit) {
    const Span span(unit, position);
    if (!span.active) continue;
    for (int base = span.begin; base < span.cached; base += CHUNK_POSITIONS)
      copy(span.head, base, span.cached - base < CHUNK_POSITIONS ? span.cached - base : CHUNK_POSITIONS);
  }
}
// The producer thread: copy all weights of the CTA, in the order of their use, token after token.
DEVICE void produce(const Arguments& a, const int* assignments, Shared& s) {
  const int qkv_chunks = phase_pieces(assignments, QKV, HIDDEN) / CHUNK_PIECES, per_layer = layer_pieces(assignments);
  const int chunks_of_layers = chunks_of(per_layer * LAYERS), pieces = per_layer * LAYERS + phase_pieces(assignments, LM_HEAD, HIDDEN);
  const int position = a.position < 0 ? (int)a.state[POSITION] : a.position;
  Producer p = {a, s, a.stream + a.starts[cta_index()], pieces};
  for (int token = 0; token < a.count; ++token) {
    if (FLIGHT_LOCAL != FLIGHT) p.flight = kv_splits_at(position + token) == 1 ? FLIGHT_LOCAL : FLIGHT;
    // With KV_THROUGH_RING phases end at chunks. A layer's keys and values are copied between QKV's weights and the rest of the layer's:
    // before chunk `cache_before`.
    int cache_before = qkv_chunks;
    for (int layer = 0; p.chunk < p.chunks && !*s.aborted;) {
      if (KV_THROUGH_RING && p.chunk == cache_before && layer < LAYERS)
        copy_cache(p, assignments, layer++, token, position + token), cache_before += per_layer / CHUNK_PIECES;
      copy_weights(p, p.chunk < chunks_of_layers);
    }
    p.ahead -= p.chunk, p.chunk = 0;
  }
}

// Load the CTA's assignments and initialize the ring. Ends with a barrier of all threads.
DEVICE Shared set_up(const Arguments& a) {
  Shared s(shared_memory());
  if (thread_index() < 2 * TABLE_PHASES) s.assignments[thread_index()] = a.assignments[cta_index() * TABLE_PHASES * 2 + thread_index()];
  if (thread_index() == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(s.full + stage, 1);
      mbarrier_init(s.empty + stage, WARPS);
    }
    *s.chunks_allowed = 0;
    *s.aborted = 0;
    *s.tokens_done = 0;
    fence_mbarrier_init();
  }
  syncthreads();
  return s;
}

// Decode a.count tokens.
DEVICE void decode_tokens(const Arguments& a) {
  Shared s = set_up(a);
  const int* assignments = s.assignments;
  if (thread_index() >= CONSUMER_THREADS) {
    if (thread_index() == CONSUMER_THREADS) produce(a, assignments, s);
  } else {
    Consumer c(a, s, assignments);
    while (*s.tokens_done < a.count) {
      c.begin_token();
      for (c.layer = 0; c.layer < LAYERS; ++c.layer) layer_phases(c);
      tail_phases(c);
      c.end_token();
    }
    c.end_launch();
  }
}

// Run one phase of a layer, or of the tail with layer LAYERS, as a launch of its own. Launches overlap (programmatic dependent launch):
// the producer starts at once, as weights depend on no result; the consumers wait for the launches before. Copies in flight are not
// bounded, as no vectors pass between CTAs within a launch.
template <int PHASE>
DEVICE void decode_phase(const Arguments& a, int layer) {
  Shared s = set_up(a);
  const int* assignments = s.assignments;
  if (thread_index() >= CONSUMER_THREADS) {
    if (PHASE <= LM_HEAD && thread_index() == CONSUMER_THREADS) {
      int before = layer * layer_pieces(assignments);
      for (int each = 0; each < PHASE && PHASE != LM_HEAD; ++each) before += phase_pieces(assignments, each, columns_of(each));
      const int pieces = phase_pieces(assignments, PHASE, columns_of(PHASE));
      Producer p = {a, s, a.stream + a.starts[cta_index()] + (long long)before * PIECE, pieces};
      while (p.chunk < p.chunks) copy_weights(p, false);
    }
  } else {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    Consumer c(a, s, assignments);
    c.layer = layer;
    if constexpr (PHASE == QKV) multiply_qkv(c);
    if constexpr (PHASE == ATTENTION) attend(c);
    if constexpr (PHASE == O) multiply_o(c);
    if constexpr (PHASE == GATE_UP) multiply_gate_up(c);
    if constexpr (PHASE == DOWN) multiply_down(c);
    if constexpr (PHASE == LM_HEAD) multiply_head(c);
    if constexpr (PHASE == NEXT_TOKEN) next_token(c), c.end_launch();
  }
}

#ifndef ON_HOST
#ifdef ONLY_PHASE
// Two launches overlap on an SM. Attention may use more than half of the registers, as the launches before and after it use few.
constexpr int MIN_CTAS_PER_SM = ONLY_PHASE == ATTENTION ? 1 : 2;
#else
constexpr int MIN_CTAS_PER_SM = 1;
#endif
extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS_PER_SM)
decode(const char* stream, const long long* starts, const int* assignments, const int* arrivals, const u16* embedding,
       const u16* parameters, const float* rotations, u16* keys, u16* values, const long long* first, int* tokens, float* words,
       u64* best, u32* counters, u32* state, float* logits, const u32* choices, unsigned char* seen, u64* histograms, int capacity,
       int count, int position, int layer) {
  const Arguments a = {stream, starts, assignments, arrivals, embedding, parameters, rotations, keys, values, first, tokens,
                       words, best, counters, state, logits, choices, seen, histograms, capacity, count, position};
#ifdef ONLY_PHASE
  decode_phase<ONLY_PHASE>(a, layer);
#else
  decode_tokens(a);
#endif
}
#endif
