// State of a consumer thread: its work assignment, its place in the token, and its side of the weight ring.
//
// The eight consumer warps of a CTA run this code; the producer thread is in step.cu. Everything that outlives a phase is in Consumer.
// It is little, since registers are scarce: with nine warps a thread has at most 168 (three warps share a quarter of the SM's registers).
//
// Callers    step.cu makes the Consumer of each thread, and every phase takes it as `c`. The free functions serve step.cu (its producer
//            too), heads.cuh and phases.cuh.
// Weights    A granule (GRANULE, 4 KB) is a tile of 8 rows over a step (STEP) of 256 columns. Each warp has a part (PART, 512 bytes) of it,
//            32 columns, and a thread 16 bytes. A chunk (CHUNK, 16 KB) is one stage of the ring and holds four granules.
//            The columns of a matrix are divided into blocks of depth_of(columns) steps (products.cuh). A run is what a tile has in a
//            block, and is contiguous in the stream. If the steps of every matrix are divisible by 4, or else by 2, that is the DEPTH
//            of all blocks. With 4, a chunk belongs to one tile, and every phase ends at the end of a chunk (CHUNKED_PHASES). With 2,
//            a chunk may hold several tiles, and the end of one phase and the begin of the next. Other models have IN_PARTS: the
//            last block of a matrix may be shorter and end within a step, so that no padding is streamed. A run may then begin at
//            any part of a chunk.
//            The stream is counted in pieces: parts with IN_PARTS, else granules.
// Units      `assignments` counts a phase's work in units: tiles of a matrix, units of attention (heads.cuh), or KV heads. A unit of
//            phase O is a block of tiles if SPLIT_K_O (residual.cuh).
#pragma once

// Return the number of KV splits (flash-decoding) at a position: how many units of attention share the positions of the same queries.
// Without SPLIT_K_O it is one more for every POSITIONS_PER_SPLIT positions, at most KV_SPLITS. With it there are three regimes: one
// split in a short context, KV_SPLITS in a longer one, and from MERGE_FROM on QUERY_MERGE times as many (heads.cuh, Span).
DEVICE int kv_splits_at(int position) {
  const int wanted = (position + POSITIONS_PER_SPLIT) / POSITIONS_PER_SPLIT;
  if (SPLIT_K_O) return position >= MERGE_FROM ? KV_SPLITS * QUERY_MERGE : wanted > 1 ? KV_SPLITS : 1;
  return wanted < KV_SPLITS ? wanted : KV_SPLITS;
}

struct Consumer {
  const Arguments& a;
  Shared& s;
  const int* assignments;      // this CTA's row of the table: first unit and one past the last, for each phase
  int thread, warp, lane;
  int layer = 0, position;
  u32 token_epoch;             // epoch of the buffers that are used once per token; counts on over launches
  float scale = 1.0f;          // factor of this phase's products: 1 / RMS of the vector if norm_pending, else 1
  float squares = 0;           // this thread's part of the sum of squares behind that RMS
  bool norm_pending = false;   // the staged vector was multiplied by the norm's weights, but not yet divided by its RMS
  Ring ring;                   // next chunk to read
  int unreleased = 0;          // chunks before `ring` that were read but whose `empty` barrier was not arrived at
  int pieces_left = 0;         // pieces of the current chunk that the next phase will read (without CHUNKED_PHASES)
  bool ring_ok = true;         // no wait for the ring timed out; else chunks are no longer released, so that no barrier overflows
  int pieces_allowed = 0;      // pieces of this token up to the phase that began last; bounds the producer (allow_weights)
  int parity = 0;              // set of Shared::sums that the next product writes

  DEVICE Consumer(const Arguments& a, Shared& s, const int* assignments)
      : a(a), s(s), assignments(assignments), thread(thread_index()), warp(thread_index() / 32), lane(thread_index() % 32),
        position(a.position < 0 ? (int)a.state[POSITION] : a.position), token_epoch(a.state[TOKENS] + 1) {
    *s.grid_barriers = a.state[BARRIERS];
    *s.token = a.first ? (int)*a.first : a.tokens[position];  // all threads write the same value
  }
  // Recompute the thread's indices. Called before each phase and within attention, so that addresses made of them are computed there
  // and not kept in registers over all layers.
  DEVICE void refresh() { thread = opaque(thread), warp = thread / 32, lane = thread % 32; }
  // Barrier of the consumer threads; the producer warp does not take part.
  DEVICE void sync() const { bar_sync(1, CONSUMER_THREADS); }
  // Epoch of the buffers that each layer uses once: a number that grows by one per use over all tokens and launches (words.cuh).
  DEVICE u32 epoch() const { return (token_epoch - 1) * LAYERS + layer + 1; }
  DEVICE int begin(int phase) const { return assignments[2 * phase]; }
  DEVICE int end(int phase) const { return assignments[2 * phase + 1]; }

  // Profile markers, only if the kernel was generated with them (PROFILED). Thread 0 writes its clock. The choice of the next token has
  // the row NEXT_TOKEN. Phases behind the last layer have `layer` = LAYERS.
  DEVICE void write_marker(int at, u32 v) const {
    constexpr int WORDS = MARKER_HEADER + (LAYERS + 1) * (TABLE_PHASES + 1) * MARKERS_PER_PHASE;  // of a CTA
    if constexpr (PROFILED)
      if (thread == 0) a.state[STATE_WORDS + cta_index() * WORDS + at] = v;
  }
  DEVICE void mark(int phase, int marker) const {
    if constexpr (PROFILED) write_marker(MARKER_HEADER + (layer * (TABLE_PHASES + 1) + phase) * MARKERS_PER_PHASE + marker, (u32)clock64());
  }
  DEVICE void mark_token(int at) const {
    if constexpr (PROFILED) write_marker(at, (u32)clock64()), write_marker(at + 1, (u32)globaltimer());
  }

  DEVICE int kv_splits() const { return kv_splits_at(position); }
  // This layer's factors of norms and biases; the two norms of the residual stream come first.
  DEVICE const u16* parameters() const { return a.parameters + (long long)opaque(layer) * LAYER_PARAMETERS; }
  // Cosines of pairs, then sines. If some layers do not rotate, row 0 of the table is the identity, and the positions follow.
  DEVICE const float* rotation() const {
    const int row = !SOME_UNROTATED ? position : rotates(layer) ? position + 1 : 0;
    return a.rotations + (long long)row * HEAD_DIM;
  }
  // Bias of a row of the output projection; only with O_BIAS.
  DEVICE float o_bias(int row) const { return uint_as_float((u32)parameters()[O_BIAS_AT + row] << 16); }
  DEVICE const u16* embedding_row() const { return a.embedding + (long long)*s.token * HIDDEN; }
  DEVICE long long cache_offset(int head) const { return (long long)(opaque(layer) * KV_HEADS + head) * a.capacity * HEAD_DIM; }

  // Load the CTA's own rows of the residual stream, which stay in shared memory over all layers.
  DEVICE void begin_token() {
    mark_token(TICKS_BEGIN);
    const int first = begin(O) * TILE, rows = SPLIT_K_O ? 0 : (end(O) - begin(O)) * TILE;
    for (int row = thread; row < rows; row += CONSUMER_THREADS) s.own_rows[row] = uint_as_float((u32)embedding_row()[first + row] << 16);
    pieces_allowed = 0;
  }
  DEVICE void end_token() {
    ++position, ++token_epoch;
    if (thread == 0) ++*s.tokens_done;
    if (!CHUNKED_PHASES && pieces_left) release_chunk();
    sync();
    mark_token(TICKS_END);
  }
  // Write the state for the next launch. Every CTA read the old state before it took part in a token, and CTA 0 cannot finish a token
  // without all of them. With a launch per phase end_token() is not called, so the position is advanced here.
  DEVICE void end_launch() {
    if (cta_index() || thread) return;
    a.state[POSITION] = position + LAUNCH_PER_PHASE;
    a.state[TOKENS] = token_epoch - 1;
    a.state[BARRIERS] = *s.grid_barriers;
  }

  // Release what was read before, and wait until the next `count` pieces, at most MOST, are in the ring. Return the number of pieces of
  // the first chunk that were read before. consume() must follow once they are read. A warp waits at one barrier at a time: a version in
  // which each lane had the barrier of another chunk gave wrong results on the GPU.
  template <int MOST>
  DEVICE int wait_pieces(int count) {
    release();
    const int begin = !CHUNKED_PHASES && pieces_left ? CHUNK_PIECES - pieces_left : 0;
    const int until = (begin + count + CHUNK_PIECES - 1) / CHUNK_PIECES;  // chunks
    // Mostly all chunks have landed long ago, so all barriers are tested first, without a branch between them. The first chunk needs no
    // test if the previous call has read from it.
    bool landed = true;
#pragma unroll
    for (int chunk = 0; chunk < (MOST + 2 * CHUNK_PIECES - 2) / CHUNK_PIECES; ++chunk) {
      const Ring each = ring.after(chunk);
      if (chunk >= (begin > 0) && chunk < until) landed &= mbarrier_try_wait(s.full + each.stage, each.phase);
    }
    if (!landed) {
      Ring each = ring.after(begin > 0);
#pragma unroll 1
      for (int chunk = begin > 0; chunk < until; ++chunk, each.advance())
        ring_ok &= wait_ring(a, s, s.full + each.stage, each.phase);
    }
    return begin;
  }
  // Go on in the ring by `end` pieces from the begin of the first chunk on. The chunks that were read to their end stay unreleased until
  // release() or the next wait_pieces(), so that the arrivals do not delay the loads.
  DEVICE void consume(int end) {
    unreleased = end / CHUNK_PIECES, ring = ring.after(unreleased);
    if (!CHUNKED_PHASES) pieces_left = end % CHUNK_PIECES ? CHUNK_PIECES - end % CHUNK_PIECES : 0;
  }
  // Read this thread's 16 bytes of each granule of the next `runs` runs of DEPTH granules into registers, without IN_PARTS. `runs` is at
  // most CAPACITY, and at least `guaranteed` in every call of this instantiation. The shared-memory loads are in flight when this returns.
  template <int CAPACITY>
  DEVICE void fetch(uint4 (&v)[CAPACITY][DEPTH], int runs, int guaranteed) {
    const int begin = wait_pieces<CAPACITY * DEPTH>(runs * DEPTH);
    const char* base = s.stages + warp * (GRANULE / WARPS) + lane * 16;
#pragma unroll
    for (int run = 0; run < CAPACITY; ++run) {
      const int granule = begin + run * DEPTH;
      const char* at = base + ring.after(granule / 4).stage * CHUNK + granule % 4 * GRANULE;
#pragma unroll
      for (int i = 0; i < DEPTH; ++i)  // The compiler would keep an array that is not written on every path in registers over all layers.
        v[run][i] = run < guaranteed || run < runs ? *(const uint4*)(at + i * GRANULE) : uint4{0, 0, 0, 0};
    }
    consume(begin + runs * DEPTH);
  }
  // The same with IN_PARTS: a run has up to DEEP steps, and begins `stride` parts behind the run before; all runs have `count` parts. Runs
  // from number `whole` on belong to the last block of the columns and have TAIL parts. A warp without a part of a step reads zeros.
  template <int TAIL, int CAPACITY, int DEEP>
  DEVICE void fetch_parts(uint4 (&v)[CAPACITY][DEEP], int runs, int guaranteed, int stride, int count, int whole) {
    const int begin = wait_pieces<CAPACITY * DEEP * WARPS>(count), first = ring.stage * CHUNK_PIECES + begin + warp;
#pragma unroll
    for (int run = 0; run < CAPACITY; ++run) {
#pragma unroll
      for (int i = 0; i < DEEP; ++i) {
        int part = first + run * stride + i * WARPS;  // within the ring, whose stages are contiguous
        part -= part >= STAGES * CHUNK_PIECES ? STAGES * CHUNK_PIECES : 0;
        const bool has = (run < guaranteed || run < runs) && (TAIL == DEEP * WARPS || run < whole || i * WARPS + warp < TAIL);
        v[run][i] = has ? *(const uint4*)(s.stages + part * PART + lane * 16) : uint4{0, 0, 0, 0};
      }
    }
    consume(begin + count);
  }
  // Wait for the next chunk and return its address, for all lanes to read. release_chunk() must follow.
  DEVICE const char* wait_chunk() {
    ring_ok &= wait_ring(a, s, s.full + ring.stage, ring.phase);
    return s.stages + ring.stage * CHUNK;
  }
  DEVICE void release_chunk() {
    ++unreleased, ring.advance(), pieces_left = 0;
    release();
  }
  // Arrive once at the `empty` barrier of every chunk that this warp has read to its end. The warp barrier comes first: all its lanes
  // have then read them.
  DEVICE void release() {
    syncwarp();
#pragma unroll 1
    for (; unreleased > 0; --unreleased)
      if (lane == 0 && ring_ok) mbarrier_arrive(s.empty + (ring.stage - unreleased + (ring.stage < unreleased ? STAGES : 0)));
  }
};

// Return the number of pieces that a CTA with these assignments reads in a phase whose tiles have `columns` columns. In the stream,
// phases follow each other in the order of the enumeration QKV, O, GATE_UP, DOWN, and LM_HEAD comes after all layers.
DEVICE int phase_pieces(const int* assignments, int phase, int columns) {
  return (assignments[2 * phase + 1] - assignments[2 * phase]) * pieces_of(columns);
}
// Return the columns of a phase's tiles: those of its matrix or, with SPLIT_K_O, of a block of the output projection.
DEVICE int columns_of(int phase) { return phase == O ? (SPLIT_K_O ? BLOCK_WIDTH : QUERY) : phase == DOWN ? INNER : HIDDEN; }
// Return the number of pieces that a CTA reads in each layer.
DEVICE int layer_pieces(const int* assignments) {
  int sum = 0;
  for (int phase = QKV; phase <= DOWN; ++phase) sum += phase_pieces(assignments, phase, columns_of(phase));
  return sum;
}
