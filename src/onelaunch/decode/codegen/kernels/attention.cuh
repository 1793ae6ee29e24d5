// Decode attention of one unit: some queries of a KV head over one KV split, with online softmax (flash-decoding).
//
// Computes   s_p = q k_p (base 2, scaled), m = max s_p, l = sum 2^(s_p - m), o = sum 2^(s_p - m) v_p / l, LSE = m + log2(l), for the
//            positions p of the unit's Span (heads.cuh). parts.cuh combines the KV splits of a query.
// Callers    attend() is a phase: the generated order.cuh calls it, or step.cu in plans with a launch per phase. parts.cuh uses NO_SCORE,
//            and the producer in step.cu CHUNK_POSITIONS.
// Grid       UNITS is the largest number of units of a CTA: 1 if there are enough CTAs, else a CTA runs its units one after another.
//            A unit has UNIT_QUERIES queries, or PARTIAL_QUERIES in a long context where units are merged (heads.cuh, Span).
// Warps      LANES = HEAD_DIM / 8 lanes have the key and value of a position, 8 channels each, so a warp has POSITIONS_PER_WARP =
//            32 / LANES positions at once. The eight warps take the positions in rounds of WARPS * POSITIONS_PER_WARP * ROWS_PER_LANE:
//            row i of a lane belongs to position (i * WARPS + warp) * POSITIONS_PER_WARP + lane / LANES of the round. Every lane keeps
//            its own online softmax; a score is one shuffle reduction over the lanes of a position. At the end lanes are combined by
//            shuffles, and warps through Shared::partial. A unit with at most POSITIONS_PER_WARP positions needs one warp, and no
//            combination of warps. Tensor cores were tried for scores and values and were slower.
// Registers  queries, accumulators, maxima and sums in float32; keys and values of this round and of the next. c.refresh() recomputes
//            the thread's indices, so that addresses made of them are not kept in registers.
// Memory     each key and value row of the split is read once per unit, in bfloat16: through the ring (KV_THROUGH_RING), with keys in the
//            first half of a chunk and values in the second, or by plain loads.
// Sync       rows of earlier positions are safe: no CTA begins a token before all have finished the previous one (heads.cuh). Queries, and
//            the newest key and value, are flag-in-data words (words.cuh); loads of earlier positions are in flight before they are
//            waited for. Results are flag-in-data words too. Every word of a partial result is written in every epoch, also by units
//            without positions (PartialStore::fill): an old word could have the tag that a reader waits for. A reader whose words never
//            come stops after about two seconds with an error (waiting.cuh). In plans without FLAG_IN_DATA a grid barrier, a semaphore
//            or a launch before and after this phase orders all of these.
#pragma once

constexpr int WARP_PARTIAL_WORDS = HEAD_DIM + 4;  // a warp's accumulator, maximum and sum of a query, padded to 16 bytes
constexpr float NO_SCORE = -1e30f;  // maximum before the first position; finite, so that differences are never NaN

// Online softmax of a lane: per query the largest score so far, and, relative to it, the sum of exponentials and the accumulator of the
// lane's 8 channels. Before add(), rescale() must have raised the maximum to the score or above.
template <int QUERIES>
struct OnlineSoftmax {
  float max_score[QUERIES], sum[QUERIES], acc[QUERIES][8];
  DEVICE OnlineSoftmax() {
#pragma unroll
    for (int g = 0; g < QUERIES; ++g) {
      max_score[g] = NO_SCORE, sum[g] = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) acc[g][i] = 0;
    }
  }
  DEVICE void rescale(int g, float larger) {
    const float by = exp2_approx(max_score[g] - larger);
    sum[g] *= by;
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[g][i] *= by;
    max_score[g] = larger;
  }
  DEVICE void add(int g, float score, const float (&value)[8]) {
    const float weight = exp2_approx(score - max_score[g]);
    sum[g] += weight;
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[g][i] += weight * value[i];
  }
};

constexpr int CHUNK_POSITIONS = CHUNK / (4 * HEAD_DIM);  // positions whose bfloat16 keys and values fill a chunk (CHUNK bytes) of the ring

// Keys and values of a round in registers, ROWS_PER_LANE rows of each per lane: as many as there are registers for. A round has ROUND
// positions over all warps. It takes CHUNKS chunks of the ring, or several rounds share one chunk.
template <int QUERIES>
struct Batch {
  static constexpr int ROWS_PER_LANE = QUERIES > 2 ? 1 : QUERIES == 2 ? 2 : 4;
  static constexpr int ROUND = WARPS * POSITIONS_PER_WARP * ROWS_PER_LANE, CHUNKS = ROUND > CHUNK_POSITIONS ? ROUND / CHUNK_POSITIONS : 1;
  static_assert(CHUNK_POSITIONS % ROUND == 0 || ROUND % CHUNK_POSITIONS == 0, "a chunk has whole rounds, or a round has whole chunks");
  uint4 keys[ROWS_PER_LANE], values[ROWS_PER_LANE];
  // Load the lane's rows of the round that begins at position `base`; rows from `span.cached` on, which the cache does not have, become
  // zero. With KV_THROUGH_RING wait for the round's chunks, and release a chunk after its last round. All eight warps must then call
  // this, as a chunk is free only when each has released it.
  DEVICE void load(Consumer& c, const Span& span, int base) {
    const int row = c.warp * POSITIONS_PER_WARP + c.lane / LANES, within = (base - span.begin) % CHUNK_POSITIONS;
    const long long round_at = KV_THROUGH_RING ? 0 : (c.cache_offset(span.head) + (long long)base * HEAD_DIM) * 2;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      const int first = base + chunk * CHUNK_POSITIONS;
      const char *keys_at = (const char*)c.a.keys + round_at, *values_at = (const char*)c.a.values + round_at;
      if (KV_THROUGH_RING) {  // Row offsets count from `base`, which lies `within` positions behind the start of its chunk.
        keys_at = (first < span.cached ? c.wait_chunk() : c.s.stages) + (within - chunk * CHUNK_POSITIONS) * HEAD_DIM * 2;
        values_at = keys_at + CHUNK / 2;
      }
#pragma unroll
      for (int i = chunk * ROWS_PER_LANE / CHUNKS; i < (chunk + 1) * ROWS_PER_LANE / CHUNKS; ++i) {
        const int mine = row + i * WARPS * POSITIONS_PER_WARP, offset = mine * HEAD_DIM * 2 + channel_of(c) * 2;
        keys[i] = values[i] = {0, 0, 0, 0};
        if (base + mine < span.cached) keys[i] = read_row(keys_at + offset), values[i] = read_row(values_at + offset);
      }
      if (KV_THROUGH_RING && first < span.cached && (within + ROUND >= CHUNK_POSITIONS || base + ROUND >= span.cached)) c.release_chunk();
    }
  }
  // Put the newest position's key and value, which are not in the cache yet, into row `row` of the round, in the lanes that have it.
  DEVICE void insert(const Consumer& c, int row, const uint4& key, const uint4& value) {
#pragma unroll
    for (int i = 0; i < ROWS_PER_LANE; ++i)
      if (i * WARPS * POSITIONS_PER_WARP + c.warp * POSITIONS_PER_WARP + c.lane / LANES == row) keys[i] = key, values[i] = value;
  }
  // Rows of the cache are ordered before this (Sync), so a weak load suffices. It must not be ld.global.nc: this launch writes rows too.
  DEVICE static uint4 read_row(const char* at) { return KV_THROUGH_RING ? *(const uint4*)at : load_weak((const uint4*)at); }
};

// Compute the scores of a lane's first COUNT rows of a round, and rescale the accumulators to the new maximum. Rows behind the span score
// 2 * NO_SCORE: their weight is then zero even in a lane without any position, whose maximum is NO_SCORE.
template <int COUNT, int QUERIES>
DEVICE void score_rows(Consumer& c, const Span& span, int base, const Batch<QUERIES>& batch, const Heads<QUERIES>& heads,
                       OnlineSoftmax<QUERIES>& f, float (&scores)[QUERIES][COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const bool valid = base + i * WARPS * POSITIONS_PER_WARP + c.warp * POSITIONS_PER_WARP + c.lane / LANES < span.end;
    float key[8];
    unpack(batch.keys[i], key);
#pragma unroll
    for (int g = 0; g < QUERIES; ++g) {
      const float score = heads.score(g, key);
      scores[g][i] = valid ? score : 2 * NO_SCORE;
    }
  }
#pragma unroll
  for (int g = 0; g < QUERIES; ++g) {
    float larger = f.max_score[g];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) larger = fmaxf(larger, scores[g][i]);
    f.rescale(g, larger);
  }
}
// Add the values of a lane's first COUNT rows, weighted by their scores. score_rows() must have rescaled the accumulators.
template <int COUNT, int QUERIES>
DEVICE void add_rows(const Batch<QUERIES>& batch, OnlineSoftmax<QUERIES>& f, const float (&scores)[QUERIES][COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    float value[8];
    unpack(batch.values[i], value);
#pragma unroll
    for (int g = 0; g < QUERIES; ++g) f.add(g, scores[g][i], value);
  }
}
// Attend to a lane's first COUNT rows of a round.
template <int COUNT, int QUERIES>
DEVICE void attend_rows(Consumer& c, const Span& span, int base, const Batch<QUERIES>& batch, const Heads<QUERIES>& heads,
                        OnlineSoftmax<QUERIES>& f) {
  float scores[QUERIES][COUNT];
  score_rows<COUNT>(c, span, base, batch, heads, f, scores);
  add_rows<COUNT>(batch, f, scores);
}
// Attend to all positions of the span, round by round. `batch` has the first round, loaded or in flight. The next round's loads are
// issued after the scores, when the keys' registers are free. In the last round a warp may have no position, and returns. If no lane of
// any warp has more than one row there (or more than two), the others are left out. `newest`: this warp has the newest position, which
// is always in the last round.
template <int QUERIES>
DEVICE void attend_all(Consumer& c, const Span& span, Batch<QUERIES>& batch, const Heads<QUERIES>& heads, bool newest,
                       OnlineSoftmax<QUERIES>& f) {
  constexpr int ROWS_PER_LANE = Batch<QUERIES>::ROWS_PER_LANE, ROUND = Batch<QUERIES>::ROUND;
  int base = span.begin;
#pragma unroll 1
  for (; base + ROUND < span.end; base += ROUND) {
    c.refresh();
    float scores[QUERIES][ROWS_PER_LANE];
    score_rows<ROWS_PER_LANE>(c, span, base, batch, heads, f, scores);
    Batch<QUERIES> next;
    next.load(c, span, base + ROUND);
    add_rows<ROWS_PER_LANE>(batch, f, scores);
    batch = next;
  }
  if (base + c.warp * POSITIONS_PER_WARP >= span.end) return;
  c.refresh();
  if (newest) batch.insert(c, span.cached - base, heads.key, heads.value);
  if (ROWS_PER_LANE > 1 && base + WARPS * POSITIONS_PER_WARP >= span.end)
    attend_rows<1>(c, span, base, batch, heads, f);
  else if (ROWS_PER_LANE > 2 && base + 2 * WARPS * POSITIONS_PER_WARP >= span.end)
    attend_rows<2>(c, span, base, batch, heads, f);
  else
    attend_rows<ROWS_PER_LANE>(c, span, base, batch, heads, f);
}

// Destination of a unit's result: its slot of the buffer PARTIAL, read by other CTAs. With SPLIT_K_O and one KV split the result is
// also staged as the operand of the CTA's own output projection (vectors.cuh), from `column` on. These columns lie behind the
// padded(HIDDEN) columns that the operand of the next phase takes; each unit of the CTA has O_TILE_COLUMNS of them.
struct PartialStore {
  float* slot;
  int column;  // -1 if it is not staged
  DEVICE PartialStore(const Consumer& c, int unit)
      : slot(c.a.words + PARTIAL + unit * PARTIAL_WORDS),
        column(SPLIT_K_O && c.kv_splits() == 1 ? padded(HIDDEN) + (UNITS > 1 ? unit - c.begin(ATTENTION) : 0) * O_TILE_COLUMNS : -1) {}
  DEVICE void store(Consumer& c, int at, float4 v) const {
    store_words(slot + at, v, c.epoch());
    if constexpr (SPLIT_K_O)
      if (column >= 0) store_split4(c, column + at, v);
  }
  DEVICE void store(Consumer& c, int at, float v) const {
    store_words(slot + at, v, c.epoch());
    if constexpr (SPLIT_K_O)
      if (column >= 0) store_split1(c, column + at, v);
  }
  // Store the words of the slot that none of the unit's `queries` queries fills, since each word must be written in every epoch. With
  // SPLIT_K_O a unit without positions gives NO_SCORE as LSE, so that its weight is zero; other plans do not read such units.
  DEVICE void fill(Consumer& c, const Span& span, int queries) const {
    if constexpr (!FLAG_IN_DATA) return;
    const float4 zeros = {0, 0, 0, 0};
    if (span.active && queries == PARTIAL_QUERIES) return;
    const int begin = span.active ? queries * HEAD_DIM : 0;
    for (int at = begin + 4 * c.thread; at < PARTIAL_QUERIES * HEAD_DIM; at += 4 * CONSUMER_THREADS)
      store_words(slot + at, zeros, c.epoch());
    const float4 none = span.active || !SPLIT_K_O ? zeros : float4{NO_SCORE, NO_SCORE, NO_SCORE, NO_SCORE};
    const int lse = PARTIAL_QUERIES * HEAD_DIM + (span.active ? queries : 0);
    for (int at = lse + c.thread; at < PARTIAL_WORDS; at += CONSUMER_THREADS) store_words(slot + at, none.x, c.epoch());
  }
  DEVICE void store_lse(Consumer& c, int query, float v) const { store_words(slot + PARTIAL_QUERIES * HEAD_DIM + query, v, c.epoch()); }
};

// Combine the lanes of a warp that have the same channels. If this warp alone has positions, store the result; else leave accumulator,
// maximum and sum in Shared::partial for combine_warps(). All readers of the previous unit's Shared::partial must have passed a barrier.
template <int QUERIES>
DEVICE void combine_lanes(Consumer& c, OnlineSoftmax<QUERIES>& f, const PartialStore& out, int active_warps) {
  c.refresh();
#pragma unroll
  for (int g = 0; g < QUERIES; ++g) {
    float larger = f.max_score[g];
#pragma unroll
    for (int mask = LANES; mask < 32; mask *= 2) larger = fmaxf(larger, shfl_xor(larger, mask));
    f.rescale(g, larger);
#pragma unroll
    for (int mask = LANES; mask < 32; mask *= 2) {
      f.sum[g] += shfl_xor(f.sum[g], mask);
#pragma unroll
      for (int i = 0; i < 8; ++i) f.acc[g][i] += shfl_xor(f.acc[g][i], mask);
    }
    const float(&x)[8] = f.acc[g];
    if (active_warps == 1) {
      const float inverse_sum = rcp_approx(f.sum[g]);
      if (c.lane / LANES == g % POSITIONS_PER_WARP) {
        const int at = g * HEAD_DIM + channel_of(c);
        out.store(c, at, float4{x[0] * inverse_sum, x[1] * inverse_sum, x[2] * inverse_sum, x[3] * inverse_sum});
        out.store(c, at + 4, float4{x[4] * inverse_sum, x[5] * inverse_sum, x[6] * inverse_sum, x[7] * inverse_sum});
      }
      if (c.lane == 0) out.store_lse(c, g, larger + log2_approx(f.sum[g]));
      continue;
    }
    float* mine = c.s.partial + (c.warp * QUERIES + g) * WARP_PARTIAL_WORDS;
    float4* at = (float4*)(mine + channel_of(c));
    if (c.lane < LANES) at[0] = {x[0], x[1], x[2], x[3]}, at[1] = {x[4], x[5], x[6], x[7]};
    if (c.lane == 0) mine[HEAD_DIM] = larger, mine[HEAD_DIM + 1] = f.sum[g];
  }
}
// Combine the results of all warps that had positions, and store output and LSE. Begins with a barrier; another must precede the next
// write to Shared::partial.
template <int QUERIES>
DEVICE void combine_warps(Consumer& c, const PartialStore& out, int active_warps) {
  c.refresh();
  const float* partial = c.s.partial;  // [WARPS][QUERIES][WARP_PARTIAL_WORDS]
  c.sync();
  for (int at = c.thread; at < QUERIES * HEAD_DIM; at += CONSUMER_THREADS) {
    const int g = at / HEAD_DIM, channel = at % HEAD_DIM;
    float larger[WARPS], sums[WARPS], values[WARPS];
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {  // All loads come before the first use.
      const float* row = partial + (warp * QUERIES + g) * WARP_PARTIAL_WORDS;
      larger[warp] = NO_SCORE, sums[warp] = values[warp] = 0;
      if (warp < active_warps) larger[warp] = row[HEAD_DIM], sums[warp] = row[HEAD_DIM + 1], values[warp] = row[channel];
    }
    float max_score = NO_SCORE, sum = 0, value = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) max_score = fmaxf(max_score, larger[warp]);
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      const float weight = exp2_approx(larger[warp] - max_score);
      sum += weight * sums[warp], value += weight * values[warp];
    }
    out.store(c, at, value * rcp_approx(sum));
    if (channel == 0) out.store_lse(c, g, max_score + log2_approx(sum));
  }
}

// Run one unit, by all consumer warps. Positions are dealt out POSITIONS_PER_WARP at a time to the warps, and each warp loads the queries
// itself, so warps need no barrier before they combine. Without ROPE_PHASE the warp that has the newest position inserts its key and
// value, and stores them to the cache. With ROPE_PHASE norm_rope() has stored them, and the cache has all rows when this phase begins.
// Such plans have no KV_THROUGH_RING, so warps without positions need not load.
template <int QUERIES>
DEVICE void attend_unit(Consumer& c, const Span& span, const PartialStore& out) {
  const int all = (span.end - span.begin + POSITIONS_PER_WARP - 1) / POSITIONS_PER_WARP, active_warps = all < WARPS ? all : WARPS;
  const bool newest = span.cached < span.end && c.warp == (span.cached - span.begin) / POSITIONS_PER_WARP % WARPS;
  Batch<QUERIES> batch;
  if constexpr (!ROPE_PHASE) batch.load(c, span, span.begin);  // Rows of earlier tokens need no wait.
  if (c.warp < active_warps) {  // The other warps have no position in any round.
    OnlineSoftmax<QUERIES> f;
    Heads<QUERIES> heads;
    if constexpr (ROPE_PHASE) {
      heads.load_scaled(c, span);
      batch.load(c, span, span.begin);
    } else {
      heads.load_rotated(c, span, newest);
    }
    attend_all(c, span, batch, heads, newest, f);
    combine_lanes(c, f, out, active_warps);
  }
  if (active_warps > 1) combine_warps<QUERIES>(c, out, active_warps);
}
// Phase ATTENTION: run all units of the CTA. The generated order.cuh calls it once per layer and token; in plans with a launch per phase,
// decode_phase() calls it. `merged`: in a long context each unit has the queries of QUERY_MERGE units, over fewer positions (Span).
DEVICE void attend(Consumer& c) {
  c.refresh();
  const int first = c.begin(ATTENTION), last = c.end(ATTENTION);
  for (int unit = first; unit < last && (UNITS > 1 || unit == first); ++unit) {
    const Span span(unit, c.position);
    const PartialStore out(c, unit);
    const bool merged = QUERY_MERGE > 1 && c.kv_splits() > KV_SPLITS;
    out.fill(c, span, merged ? PARTIAL_QUERIES : UNIT_QUERIES);
    if (!span.active) continue;
    if (unit > first) c.sync();  // All threads have read Shared::partial of the unit before.
    if (merged)
      attend_unit<PARTIAL_QUERIES>(c, span, out);
    else
      attend_unit<UNIT_QUERIES>(c, span, out);
    c.mark(ATTENTION, DONE);
  }
}
