// Attention of a key head's queries, or of some of them, over a part of the positions, or all of them.
#pragma once

constexpr int FOUND_WORDS = HEAD + 4;  // results, maximum, sum
constexpr float NOTHING = -1e30f;  // a maximum before the first position

// Running results of a lane's 8 channels: sums of values by powers of two of what the keys gave, over the largest so far.
template <int QUERIES>
struct Found {
  float most[QUERIES], sum[QUERIES], values[QUERIES][8];
  DEVICE Found() {
#pragma unroll
    for (int g = 0; g < QUERIES; ++g) {
      most[g] = NOTHING, sum[g] = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) values[g][i] = 0;
    }
  }
  DEVICE void rescale(int g, float larger) {
    const float by = power(most[g] - larger);
    sum[g] *= by;
#pragma unroll
    for (int i = 0; i < 8; ++i) values[g][i] *= by;
    most[g] = larger;
  }
  DEVICE void add(int g, float score, const float (&value)[8]) {
    const float weight = power(score - most[g]);
    sum[g] += weight;
#pragma unroll
    for (int i = 0; i < 8; ++i) values[g][i] += weight * value[i];
  }
};

// Keys and values of earlier positions come through the ring like weights, where chunks are whole phases' and no wait is in their way:
// keys in the first half of a chunk, values in the second.
constexpr int ROWS = CHUNK / (4 * HEAD);  // of a chunk

// Keys and values of a warp's positions in a round, DEEP of each lane's: as many as registers have room for.
template <int QUERIES>
struct Batch {
  static constexpr int DEEP = QUERIES > 2 ? 1 : QUERIES == 2 ? 2 : 4;
  static constexpr int ROUND = WARPS * AT_ONCE * DEEP, CHUNKS = ROUND > ROWS ? ROUND / ROWS : 1;  // positions of all warps; chunks of these
  static_assert(ROWS % ROUND == 0 || ROUND % ROWS == 0, "a chunk is for whole rounds of all warps, or a round takes whole chunks");
  uint4 keys[DEEP], values[DEEP];
  DEVICE void load(Worker& w, const Span& span, int base) {
    const int row = w.warp * AT_ONCE + w.lane / LANES, within = (base - span.begin) % ROWS;
    const long long cached = KEYS_STREAM ? 0 : (w.cached(span.head) + (long long)base * HEAD) * 2;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      const int first = base + chunk * ROWS;  // where a round has several chunks
      const char *keys_at = (const char*)w.a.keys + cached, *values_at = (const char*)w.a.values + cached;
      if (KEYS_STREAM) {
        keys_at = (first < span.cached ? w.chunk() : w.s.stages) + (within - chunk * ROWS) * HEAD * 2, values_at = keys_at + CHUNK / 2;
      }
#pragma unroll
      for (int i = chunk * DEEP / CHUNKS; i < (chunk + 1) * DEEP / CHUNKS; ++i) {
        const int mine = row + i * WARPS * AT_ONCE, offset = mine * HEAD * 2 + channel_of(w) * 2;
        keys[i] = values[i] = {0, 0, 0, 0};
        if (base + mine < span.cached) keys[i] = read_row(keys_at + offset), values[i] = read_row(values_at + offset);
      }
      if (KEYS_STREAM && first < span.cached && (within + ROUND >= ROWS || base + ROUND >= span.cached)) w.drop();
    }
  }
  // A row of the round that is not in the cache yet, where it is this lane's.
  DEVICE void insert(const Worker& w, int row, const uint4& key, const uint4& value) {
#pragma unroll
    for (int i = 0; i < DEEP; ++i)
      if (i * WARPS * AT_ONCE + w.warp * AT_ONCE + w.lane / LANES == row) keys[i] = key, values[i] = value;
  }
  DEVICE static uint4 read_row(const char* at) { return KEYS_STREAM ? *(const uint4*)at : load_plain((const uint4*)at); }
};

// Scores of the first rows of a lane in a round, and what was found before by the largest of them.
template <int COUNT, int QUERIES>
DEVICE void score_rows(Worker& w, const Span& span, int base, const Batch<QUERIES>& batch, const Heads<QUERIES>& heads, Found<QUERIES>& f,
                       float (&scores)[QUERIES][COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const bool valid = base + i * WARPS * AT_ONCE + w.warp * AT_ONCE + w.lane / LANES < span.end;
    float key[8];
    unpack(batch.keys[i], key);
#pragma unroll
    for (int g = 0; g < QUERIES; ++g) {
      const float found = heads.score(g, key);
      scores[g][i] = valid ? found : 2 * NOTHING;
    }
  }
#pragma unroll
  for (int g = 0; g < QUERIES; ++g) {
    float larger = f.most[g];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) larger = fmaxf(larger, scores[g][i]);
    f.rescale(g, larger);
  }
}
template <int COUNT, int QUERIES>
DEVICE void add_rows(const Batch<QUERIES>& batch, Found<QUERIES>& f, const float (&scores)[QUERIES][COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    float value[8];
    unpack(batch.values[i], value);
#pragma unroll
    for (int g = 0; g < QUERIES; ++g) f.add(g, scores[g][i], value);
  }
}
template <int COUNT, int QUERIES>
DEVICE void attend_rows(Worker& w, const Span& span, int base, const Batch<QUERIES>& batch, const Heads<QUERIES>& heads, Found<QUERIES>& f) {
  float scores[QUERIES][COUNT];
  score_rows<COUNT>(w, span, base, batch, heads, f, scores);
  add_rows<COUNT>(batch, f, scores);
}
// All positions of the span, by rounds; the first round's are there or on their way. In the last one a warp may have no position, and
// where a lane has one row at most, the others are left out.
template <int QUERIES>
DEVICE void attend_all(Worker& w, const Span& span, Batch<QUERIES>& batch, const Heads<QUERIES>& heads, bool newest, Found<QUERIES>& f) {
  constexpr int DEEP = Batch<QUERIES>::DEEP, ROUND = Batch<QUERIES>::ROUND;
  int base = span.begin;
#pragma unroll 1
  for (; base + ROUND < span.end; base += ROUND) {
    w.refresh();
    float scores[QUERIES][DEEP];
    score_rows<DEEP>(w, span, base, batch, heads, f, scores);
    Batch<QUERIES> next;
    next.load(w, span, base + ROUND);
    add_rows<DEEP>(batch, f, scores);
    batch = next;
  }
  if (base + w.warp * AT_ONCE >= span.end) return;
  w.refresh();
  if (newest) batch.insert(w, span.cached - base, heads.key, heads.value);
  if (DEEP > 1 && base + WARPS * AT_ONCE >= span.end)
    attend_rows<1>(w, span, base, batch, heads, f);
  else if (DEEP > 2 && base + 2 * WARPS * AT_ONCE >= span.end)
    attend_rows<2>(w, span, base, batch, heads, f);
  else
    attend_rows<DEEP>(w, span, base, batch, heads, f);
}

// What a unit found goes to its slot; and, where it has all positions and its CTA multiplies it, to the vector, from a column on.
struct Kept {
  float* slot;
  int column;  // or -1
  DEVICE Kept(const Worker& w, int unit)
      : slot(w.a.words + PARTIAL + unit * SLOT),
        column(SUMMED && w.used() == 1 ? padded(HIDDEN) + (UNITS > 1 ? unit - w.begin(ATTENTION) : 0) * BLOCK_ROOM : -1) {}
  DEVICE void tell(Worker& w, int at, float4 v) const {
    put(slot + at, v, w.use());
    if constexpr (SUMMED)
      if (column >= 0) lay(w, column + at, v);
  }
  DEVICE void tell(Worker& w, int at, float v) const {
    put(slot + at, v, w.use());
    if constexpr (SUMMED)
      if (column >= 0) lay_one(w, column + at, v);
  }
  // What nobody tells: each word is written in every use.
  DEVICE void fill(Worker& w, const Span& span, int queries) const {
    if constexpr (!TAGGED) return;
    const float4 zeros = {0, 0, 0, 0};
    if (span.used && queries == SLOT_QUERIES) return;
    const int begin = span.used ? queries * HEAD : 0;
    for (int at = begin + 4 * w.thread; at < SLOT_QUERIES * HEAD; at += 4 * WORKERS_THREADS) put(slot + at, zeros, w.use());
    const float4 none = span.used || !SUMMED ? zeros : float4{NOTHING, NOTHING, NOTHING, NOTHING};
    const int logs = SLOT_QUERIES * HEAD + (span.used ? queries : 0);
    for (int at = logs + w.thread; at < SLOT; at += WORKERS_THREADS) put(slot + at, none.x, w.use());
  }
  DEVICE void tell_logarithm(Worker& w, int query, float v) const { put(slot + SLOT_QUERIES * HEAD + query, v, w.use()); }
};

// What a warp found, of the lanes that have the same channels: to its place, or, where other warps had positions too, to be combined.
template <int QUERIES>
DEVICE void combine_lanes(Worker& w, Found<QUERIES>& f, const Kept& place, int sharing) {
  w.refresh();
#pragma unroll
  for (int g = 0; g < QUERIES; ++g) {
    float larger = f.most[g];
#pragma unroll
    for (int mask = LANES; mask < 32; mask *= 2) larger = fmaxf(larger, from_lane_xor(larger, mask));
    f.rescale(g, larger);
#pragma unroll
    for (int mask = LANES; mask < 32; mask *= 2) {
      f.sum[g] += from_lane_xor(f.sum[g], mask);
#pragma unroll
      for (int i = 0; i < 8; ++i) f.values[g][i] += from_lane_xor(f.values[g][i], mask);
    }
    const float(&x)[8] = f.values[g];
    if (sharing == 1) {  // as with few positions: no need of the others
      const float whole = inverse(f.sum[g]);
      if (w.lane / LANES == g % AT_ONCE) {
        const int at = g * HEAD + channel_of(w);
        place.tell(w, at, float4{x[0] * whole, x[1] * whole, x[2] * whole, x[3] * whole});
        place.tell(w, at + 4, float4{x[4] * whole, x[5] * whole, x[6] * whole, x[7] * whole});
      }
      if (w.lane == 0) place.tell_logarithm(w, g, larger + logarithm(f.sum[g]));
      continue;
    }
    float* mine = w.s.found + (w.warp * QUERIES + g) * FOUND_WORDS;
    float4* at = (float4*)(mine + channel_of(w));
    if (w.lane < LANES) at[0] = {x[0], x[1], x[2], x[3]}, at[1] = {x[4], x[5], x[6], x[7]};
    if (w.lane == 0) mine[HEAD] = larger, mine[HEAD + 1] = f.sum[g];
  }
}
// Of all warps that had positions: results and the logarithm of their sums.
template <int QUERIES>
DEVICE void combine_warps(Worker& w, const Kept& place, int sharing) {
  w.refresh();
  const float* found = w.s.found;  // [WARPS][QUERIES][FOUND_WORDS]
  w.meet();
  for (int at = w.thread; at < QUERIES * HEAD; at += WORKERS_THREADS) {
    const int g = at / HEAD, channel = at % HEAD;
    float larger[WARPS], sums[WARPS], values[WARPS];
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {  // all read before any is used
      const float* its = found + (warp * QUERIES + g) * FOUND_WORDS;
      larger[warp] = NOTHING, sums[warp] = values[warp] = 0;
      if (warp < sharing) larger[warp] = its[HEAD], sums[warp] = its[HEAD + 1], values[warp] = its[channel];
    }
    float most = NOTHING, sum = 0, value = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) most = fmaxf(most, larger[warp]);
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      const float weight = power(larger[warp] - most);
      sum += weight * sums[warp], value += weight * values[warp];
    }
    place.tell(w, at, value * inverse(sum));
    if (channel == 0) place.tell_logarithm(w, g, most + logarithm(sum));
  }
}

// Each warp takes the queries for itself, and works alone until all have found something: positions are dealt out AT_ONCE to a warp.
// The newest position's key and value are used and kept by the warp that has it.
template <int QUERIES>
DEVICE void attend_unit(Worker& w, const Span& span, const Kept& place) {
  const int all = (span.end - span.begin + AT_ONCE - 1) / AT_ONCE, sharing = all < WARPS ? all : WARPS;
  const bool newest = span.cached < span.end && w.warp == (span.cached - span.begin) / AT_ONCE % WARPS;
  Batch<QUERIES> batch;
  if constexpr (!ROPE_APART) batch.load(w, span, span.begin);  // of earlier tokens: no need to wait
  if (w.warp < sharing) {  // the others have no position in any round
    Found<QUERIES> f;
    Heads<QUERIES> heads;
    if constexpr (ROPE_APART) {
      heads.take_scaled(w, span);
      batch.load(w, span, span.begin);
    } else {
      heads.take_turned(w, span, newest);
    }
    attend_all(w, span, batch, heads, newest, f);
    combine_lanes(w, f, place, sharing);
  }
  if (sharing > 1) combine_warps<QUERIES>(w, place, sharing);
}
DEVICE void attend(Worker& w) {
  w.refresh();
  const int first = w.begin(ATTENTION), last = w.end(ATTENTION);
  for (int unit = first; unit < last && (UNITS > 1 || unit == first); ++unit) {
    const Span span(unit, w.position);
    const Kept place(w, unit);
    const bool joined = JOINED > 1 && w.used() > SPLITS;
    place.fill(w, span, joined ? SLOT_QUERIES : UNIT_QUERIES);
    if (!span.used) continue;
    if (unit > first) w.meet();  // what all have found has been read
    if (joined)
      attend_unit<SLOT_QUERIES>(w, span, place);
    else
      attend_unit<UNIT_QUERIES>(w, span, place);
    w.mark(ATTENTION, DONE);
  }
}
