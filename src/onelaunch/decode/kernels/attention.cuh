// Attention of a key head's queries, or of some of them, over a part of the positions; norm and rotation of heads.
#pragma once

constexpr int FOUND_WORDS = HEAD + 4;  // results, maximum, sum
constexpr int LANES = HEAD / 8;    // of a position: 8 channels each
constexpr int AT_ONCE = 32 / LANES;  // positions of a warp
constexpr int DEEP = UNIT_QUERIES > 2 ? 1 : UNIT_QUERIES == 2 ? 2 : 4;  // of a lane: keys and values that are looked at together
constexpr float NOTHING = -1e30f;  // a maximum before the first position

DEVICE void unpack(const uint4& v, float (&x)[8]) {
  const float4 a = widen({v.x, v.y}), b = widen({v.z, v.w});
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
DEVICE uint4 rounded(const float (&x)[8]) {
  return {round_pair(x[0], x[1]), round_pair(x[2], x[3]), round_pair(x[4], x[5]), round_pair(x[6], x[7])};
}
DEVICE int channel_of(const Worker& w) { return w.lane % LANES * 8; }
DEVICE float sum_of_head(float v) {  // of its lanes, in each
#pragma unroll
  for (int mask = LANES / 2; mask; mask /= 2) v += from_lane_xor(v, mask);
  return v;
}

// Words of a head are in the order of its tiles: four channels of its first half, the same four of its second. Where a lane's first four
// channels are; the next four are those of the next tile.
constexpr int NEXT_FOUR = HEAD > TILE ? TILE : TILE / 2;
DEVICE int words_of(const Worker& w) { return channel_of(w) % (HEAD / 2) * 2 + channel_of(w) / (HEAD / 2) * (TILE / 2); }

// What turns a lane's 8 channels of a head where that is a phase of its own, read before the head is there. A channel's other is half a
// head away.
struct Turn {
  uint4 queries_factors, keys_factors;
  float4 cosines[2], sines[2];
  DEVICE explicit Turn(const Worker& w) {
    const u16* factors = w.layer_norms() + 2 * HIDDEN + channel_of(w);
    queries_factors = *(const uint4*)factors, keys_factors = *(const uint4*)(factors + HEAD);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* pair = w.rotation() + (channel_of(w) + 4 * i) % (HEAD / 2);
      cosines[i] = *(const float4*)pair, sines[i] = *(const float4*)(pair + HEAD / 2);
    }
  }
  // Normalised, turned, and scaled; by all lanes of a warp.
  DEVICE void apply(const Worker& w, float (&x)[8], const uint4 factors, float by) const {
    float squares = 0, factor[8];
    unpack(factors, factor);
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += x[i] * x[i];
    const float scale = by * inverse_root(sum_of_head(squares) / HEAD + EPS);
    float other[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= scale * factor[i];
#pragma unroll
    for (int i = 0; i < 8; ++i) other[i] = LANES > 1 ? from_lane_xor(x[i], LANES / 2) : x[i ^ 4];
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const bool lower = channel_of(w) + i < HEAD / 2;
      const float4 c = cosines[i / 4], s = sines[i / 4];
      const float cosine[4] = {c.x, c.y, c.z, c.w}, sine[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i + j] = x[i + j] * cosine[j] + (lower ? -other[i + j] : other[i + j]) * sine[j];
    }
  }
};
DEVICE void bare(const uint4& first, const uint4& next, float (&x)[8]) {
  const float4 a = bare(first), b = bare(next);
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
// A lane's channels of some heads that follow each other; those from limit on are left out.
template <int COUNT>
DEVICE void take_heads(Worker& w, const float* from, int limit, float (&x)[COUNT][8]) {
  uint4 v[2 * COUNT];
  const float* mine = from + words_of(w);
  take(w, v, w.use(), [&](int i) { return i / 2 < limit; }, [&](int i) { return mine + i / 2 * HEAD + i % 2 * NEXT_FOUR; });
#pragma unroll
  for (int i = 0; i < COUNT; ++i) bare(v[2 * i], v[2 * i + 1], x[i]);
}
// A lane's channels in a row of keys or values of the cache.
DEVICE void cache(const Worker& w, u16* rows, int head, const uint4& row) {
  *(uint4*)(rows + w.cached(head) + (long long)w.position * HEAD + channel_of(w)) = row;
}
constexpr float QUERY_SCALE = LOG2E;  // and one over the root of HEAD: scores are exponents of two

// A unit: some of a key head's queries, a part of the positions. The newest one is not in the cache yet.
struct Span {
  int head, query, begin, end, cached;
  bool used;
  DEVICE Span(int unit, int position) : head(unit / (SHARERS * SPLITS)), query(unit / SPLITS % SHARERS * UNIT_QUERIES) {
    const int positions = position + 1, parts = used_at(position), size = (positions + parts - 1) / parts;
    begin = unit % SPLITS * size, end = begin + size < positions ? begin + size : positions;
    cached = !ROPE_APART && end == positions ? end - 1 : end;
    used = unit % SPLITS < parts;
  }
};
// A key head at the newest position, as a warp needs it: a lane's channels of the queries, turned, but not scaled, for scores are; and, for
// who has the position, of key and value as they are cached.
struct Heads {
  float queries[UNIT_QUERIES][8], scales[UNIT_QUERIES];
  uint4 key, value;

  // Turned by who made them. Their squares are added up by the lanes of a head. Of units with the same key, the first one keeps it.
  DEVICE void take_turned(Worker& w, const Span& span, bool newest) {
    constexpr int WORDS = 2 * (UNIT_QUERIES + 2);
    const float* words = w.a.words + RAW + span.head * HEAD_WORDS + words_of(w);
    const float* squares = w.a.words + HEAD_SQUARES + span.head * (HEAD_WORDS / 2) + channel_of(w) / 2;
    uint4 v[WORDS + UNIT_QUERIES + 1];
    auto which = [](int i) { return i < WORDS ? i / 2 : i - WORDS; };
    auto place = [&](int i) { return which(i) < UNIT_QUERIES ? span.query + which(i) : which(i) - UNIT_QUERIES + GROUP; };
    take(w, v, w.use(), [&](int i) { return newest || which(i) < UNIT_QUERIES; },
         [&](int i) { return i < WORDS ? words + place(i) * HEAD + i % 2 * NEXT_FOUR : squares + place(i) * (HEAD / 2); });
    w.mark(ATTENTION, READY);
    float norms[UNIT_QUERIES + 1];
#pragma unroll
    for (int i = 0; i <= UNIT_QUERIES; ++i) {
      const float4 s = bare(v[WORDS + i]);
      norms[i] = s.x + s.y + (s.z + s.w);
    }
#pragma unroll
    for (int mask = LANES / 2; mask; mask /= 2)  // side by side
#pragma unroll
      for (int i = 0; i <= UNIT_QUERIES; ++i) norms[i] += from_lane_xor(norms[i], mask);
#pragma unroll
    for (int i = 0; i <= UNIT_QUERIES; ++i) norms[i] = inverse_root(norms[i] / HEAD + EPS);
#pragma unroll
    for (int g = 0; g < UNIT_QUERIES; ++g) {
      bare(v[2 * g], v[2 * g + 1], queries[g]);
      scales[g] = QUERY_SCALE * inverse_root(HEAD) * norms[g];
    }
    key = value = {0, 0, 0, 0};
    if (!newest) return;
    float x[8];
    bare(v[2 * UNIT_QUERIES], v[2 * UNIT_QUERIES + 1], x);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= norms[UNIT_QUERIES];
    key = rounded(x);
    bare(v[2 * UNIT_QUERIES + 2], v[2 * UNIT_QUERIES + 3], x);
    value = rounded(x);
    if (span.query > 0 || w.lane >= LANES) return;
    cache(w, w.a.keys, span.head, key);
    cache(w, w.a.values, span.head, value);
  }
  // Turned and scaled by a phase of its own, which has cached the rest.
  DEVICE void take_scaled(Worker& w, const Span& span) {
    take_heads(w, w.a.words + QUERIES + (span.head * GROUP + span.query) * HEAD, UNIT_QUERIES, queries);
    w.mark(ATTENTION, READY);
#pragma unroll
    for (int g = 0; g < UNIT_QUERIES; ++g) scales[g] = 1.0f;
    key = value = {0, 0, 0, 0};
  }
  DEVICE float score(int g, const float (&key)[8]) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += queries[g][i] * key[i];
    return sum_of_head(sum) * scales[g];
  }
};

// Running results of a lane's 8 channels: sums of values by powers of two of what the keys gave, over the largest so far.
struct Found {
  float most[UNIT_QUERIES], sum[UNIT_QUERIES], values[UNIT_QUERIES][8];
  DEVICE Found() {
#pragma unroll
    for (int g = 0; g < UNIT_QUERIES; ++g) {
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
constexpr int ROUND = WARPS * AT_ONCE * DEEP, ROWS = CHUNK / (4 * HEAD), CHUNKS = ROUND > ROWS ? ROUND / ROWS : 1;  // of a round
static_assert(ROWS % ROUND == 0 || ROUND % ROWS == 0, "a chunk is for whole rounds of all warps, or a round takes whole chunks");

// Keys and values of a warp's positions in a round, DEEP of each lane's.
struct Batch {
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

// All positions of the span, by rounds; the first round's are there or on their way. A warp that has none in the last round is done.
DEVICE void attend_all(Worker& w, const Span& span, Batch& batch, const Heads& heads, bool newest, Found& f) {
#pragma unroll 1
  for (int base = span.begin; base + w.warp * AT_ONCE < span.end; base += ROUND) {
    w.refresh();
    if (newest && base + ROUND >= span.end) batch.insert(w, span.cached - base, heads.key, heads.value);
    float scores[UNIT_QUERIES][DEEP];
#pragma unroll
    for (int i = 0; i < DEEP; ++i) {
      const bool valid = base + i * WARPS * AT_ONCE + w.warp * AT_ONCE + w.lane / LANES < span.end;
      float key[8];
      unpack(batch.keys[i], key);
#pragma unroll
      for (int g = 0; g < UNIT_QUERIES; ++g) {
        const float found = heads.score(g, key);
        scores[g][i] = valid ? found : 2 * NOTHING;
      }
    }
#pragma unroll
    for (int g = 0; g < UNIT_QUERIES; ++g) {
      float larger = f.most[g];
#pragma unroll
      for (int i = 0; i < DEEP; ++i) larger = fmaxf(larger, scores[g][i]);
      f.rescale(g, larger);
    }
    Batch next;
    next.load(w, span, base + ROUND);
#pragma unroll
    for (int i = 0; i < DEEP; ++i) {
      float value[8];
      unpack(batch.values[i], value);
#pragma unroll
      for (int g = 0; g < UNIT_QUERIES; ++g) f.add(g, scores[g][i], value);
    }
    batch = next;
  }
}

// What a warp found, of the lanes that have the same channels: to the slot, or, where other warps had positions too, to be combined.
DEVICE void combine_lanes(Worker& w, Found& f, float* slot, int sharing) {
  w.refresh();
#pragma unroll
  for (int g = 0; g < UNIT_QUERIES; ++g) {
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
        float* at = slot + g * HEAD + channel_of(w);
        put(at, float4{x[0] * whole, x[1] * whole, x[2] * whole, x[3] * whole}, w.use());
        put(at + 4, float4{x[4] * whole, x[5] * whole, x[6] * whole, x[7] * whole}, w.use());
      }
      if (w.lane == 0) put(slot + UNIT_QUERIES * HEAD + g, larger + logarithm(f.sum[g]), w.use());
      continue;
    }
    float* mine = w.s.found + (w.warp * UNIT_QUERIES + g) * FOUND_WORDS;
    float4* at = (float4*)(mine + channel_of(w));
    if (w.lane < LANES) at[0] = {x[0], x[1], x[2], x[3]}, at[1] = {x[4], x[5], x[6], x[7]};
    if (w.lane == 0) mine[HEAD] = larger, mine[HEAD + 1] = f.sum[g];
  }
}
// Of all warps that had positions: results and the logarithm of their sums.
DEVICE void combine_warps(Worker& w, float* slot, int sharing) {
  w.refresh();
  const float* found = w.s.found;  // [WARPS][UNIT_QUERIES][FOUND_WORDS]
  w.meet();
  for (int at = w.thread; at < UNIT_QUERIES * HEAD; at += WORKERS_THREADS) {
    const int g = at / HEAD, channel = at % HEAD;
    float larger[WARPS], sums[WARPS], values[WARPS];
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {  // all read before any is used
      const float* its = found + (warp * UNIT_QUERIES + g) * FOUND_WORDS;
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
    put(slot + at, value * inverse(sum), w.use());
    if (channel == 0) put(slot + UNIT_QUERIES * HEAD + g, most + logarithm(sum), w.use());
  }
}

// Each warp takes the queries for itself, and works alone until all have found something: positions are dealt out AT_ONCE to a warp.
// The newest position's key and value are used and kept by the warp that has it.
DEVICE void attend(Worker& w) {
  w.refresh();
  for (int unit = w.begin(ATTENTION); unit < w.end(ATTENTION); ++unit) {
    const Span span(unit, w.position);
    float* slot = w.a.words + PARTIAL + unit * SLOT;
    if (!span.used) {  // nothing to add, but each word is written in every use
      if constexpr (TAGGED)
        for (int at = 4 * w.thread; at < SLOT; at += 4 * WORKERS_THREADS) put(slot + at, float4{0, 0, 0, 0}, w.use());
      continue;
    }
    if (unit > w.begin(ATTENTION)) w.meet();  // what all have found has been read
    const int all = (span.end - span.begin + AT_ONCE - 1) / AT_ONCE, sharing = all < WARPS ? all : WARPS;
    const bool newest = span.cached < span.end && w.warp == (span.cached - span.begin) / AT_ONCE % WARPS;
    Batch batch;
    if constexpr (!ROPE_APART) batch.load(w, span, span.begin);  // of earlier tokens: no need to wait
    if (w.warp < sharing) {  // the others have no position in any round
      Found f;
      Heads heads;
      if constexpr (ROPE_APART) {
        heads.take_scaled(w, span);
        batch.load(w, span, span.begin);
      } else {
        heads.take_turned(w, span, newest);
      }
      attend_all(w, span, batch, heads, newest, f);
      combine_lanes(w, f, slot, sharing);
    }
    if (sharing > 1) combine_warps(w, slot, sharing);
    w.mark(ATTENTION, DONE);
  }
}

// Norm and rotation as a phase of their own: a warp for each query head, the key and the value.
DEVICE void turn(Worker& w) {
  w.refresh();
  for (int unit = w.begin(ROPE) * (GROUP + 2) + w.warp; unit < w.end(ROPE) * (GROUP + 2); unit += WARPS) {
    const int head = unit / (GROUP + 2), which = unit % (GROUP + 2);
    const Turn turn(w);
    float x[1][8];
    take_heads(w, w.a.words + RAW + unit * HEAD, 1, x);
    w.mark(ROPE, READY);
    const float scale = which == GROUP ? 1.0f : QUERY_SCALE * inverse_root(HEAD);
    if (which <= GROUP) turn.apply(w, x[0], which == GROUP ? turn.keys_factors : turn.queries_factors, scale);
    if (which >= GROUP) {
      if (w.lane < LANES) cache(w, which == GROUP ? w.a.keys : w.a.values, head, rounded(x[0]));
    } else if (w.lane < LANES) {
      float* at = w.a.words + QUERIES + (head * GROUP + which) * HEAD + words_of(w);
      put(at, float4{x[0][0], x[0][1], x[0][2], x[0][3]}, w.use());
      put(at + NEXT_FOUR, float4{x[0][4], x[0][5], x[0][6], x[0][7]}, w.use());
    }
  }
  w.mark(ROPE, DONE);
}

// What attention found over all positions, as the vector that is multiplied next: parts weighted by their sums. A thread has 8 channels
// of a head, and of up to MOST_PARTS parts on their way at once; what has come is not asked for again.
constexpr int MOST_PARTS = SEPARATE || MOST_O > 3 ? 3 : MOST_O > 1 ? 4 : 8;  // weights wait in registers beside them

template <int COUNT>
struct Parts {
  uint4 values[COUNT][2];
  u32 logs[COUNT];
  DEVICE void load(int part, const float* slot, int channel, int g) {
    const uint4* at = (const uint4*)(slot + part * SLOT + g * HEAD + channel);
    const u32* log = (const u32*)(slot + part * SLOT + UNIT_QUERIES * HEAD + g);
    values[part][0] = TAGGED ? load_relaxed(at) : load_plain(at);
    values[part][1] = TAGGED ? load_relaxed(at + 1) : load_plain(at + 1);
    logs[part] = TAGGED ? load_relaxed(log) : *log;
  }
  DEVICE bool came(int part, u32 tag) const {
    return tagged(values[part][0], tag) && tagged(values[part][1], tag) && ((logs[part] ^ tag) & 3) == 0;
  }
  // The first so many.
  DEVICE void take(Worker& w, const float* slot, int channel, int g, int count) {
#pragma unroll
    for (int part = 0; part < COUNT; ++part) {
      values[part][0] = values[part][1] = {0, 0, 0, 0}, logs[part] = as_bits(2 * NOTHING);
      if (part < count) load(part, slot, channel, g);
    }
    if constexpr (TAGGED)
      await(w.a, w.s, [&] {
        bool there = true;
#pragma unroll
        for (int part = 0; part < COUNT; ++part) {
          if (part >= count || came(part, tag_of(w.use()))) continue;
          there = false;
          load(part, slot, channel, g);
        }
        return there;
      });
  }
};
// 8 channels of a head, from its parts on, COUNT at a time.
template <int COUNT>
DEVICE void combine_parts(Worker& w, const float* slot, int channel, int g, float4 (&sums)[2]) {
  float most = NOTHING, sum = 0;
  sums[0] = sums[1] = {0, 0, 0, 0};
#pragma unroll 1
  for (int first = 0; first < w.used(); first += COUNT, slot += COUNT * SLOT) {
    Parts<COUNT> parts;
    parts.take(w, slot, channel, g, w.used() - first);
    float larger = most;
#pragma unroll
    for (int part = 0; part < COUNT; ++part) larger = fmaxf(larger, bare(parts.logs[part]));
    const float by = power(most - larger);
    most = larger, sum *= by;
#pragma unroll
    for (int i = 0; i < 2; ++i) sums[i] = {sums[i].x * by, sums[i].y * by, sums[i].z * by, sums[i].w * by};
#pragma unroll
    for (int part = 0; part < COUNT; ++part) {
      const float weight = power(bare(parts.logs[part]) - most);
      sum += weight;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 p = bare(parts.values[part][i]);
        sums[i] = {sums[i].x + weight * p.x, sums[i].y + weight * p.y, sums[i].z + weight * p.z, sums[i].w + weight * p.w};
      }
    }
  }
  const float whole = inverse(sum);
#pragma unroll
  for (int i = 0; i < 2; ++i) sums[i] = {sums[i].x * whole, sums[i].y * whole, sums[i].z * whole, sums[i].w * whole};
}
DEVICE void gather_found(Worker& w) {
  const int used = w.used();
#pragma unroll 1
  for (int column = 8 * w.thread; column < padded(QUERY); column += 8 * WORKERS_THREADS) {
    float4 sums[2] = {};
    if (column < QUERY) {
      const int head = column / HEAD, g = head % UNIT_QUERIES;
      const float* slot = w.a.words + PARTIAL + head / UNIT_QUERIES * SPLITS * SLOT;
      if (used == 1) {  // as it is
        uint4 v[2];
        take(w, v, w.use(), [](int) { return true; }, [&](int i) { return slot + g * HEAD + column % HEAD + 4 * i; });
        sums[0] = bare(v[0]), sums[1] = bare(v[1]);
      } else if (used == 2) {
        combine_parts<2>(w, slot, column % HEAD, g, sums);
      } else if (MOST_PARTS > 4 && used <= 4) {
        combine_parts<4>(w, slot, column % HEAD, g, sums);
      } else {
        combine_parts<MOST_PARTS>(w, slot, column % HEAD, g, sums);
      }
    }
    lay(w, column, sums[0]);
    lay(w, column + 4, sums[1]);
  }
  w.scale = 1.0f, w.normed = false;
  w.meet();
}
