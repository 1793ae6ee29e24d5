// Heads at the newest position: their norm and rotation, as a phase of their own or when attention takes them.
#pragma once

constexpr int LANES = HEAD / 8;    // of a position: 8 channels each
constexpr int AT_ONCE = 32 / LANES;  // positions of a warp

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

// A unit: some of a key head's queries, and a part of the positions. Where it multiplies what it finds, in a short text all positions;
// in a long one JOINED units take each other's queries too, for each key to be read once. The newest one is not in the cache yet; of
// those who have it one keeps it.
static_assert(SUMMED || POSITIONS >= SPLITS, "each of those who share positions has some");
constexpr int PARTS = SPLITS * JOINED, SLOT_QUERIES = UNIT_QUERIES * JOINED;
struct Span {
  int head, query, begin, end, cached;
  bool used, keeps;
  DEVICE Span(int unit, int position) : head(unit / (SHARERS * SPLITS)), query(unit / SPLITS % SHARERS * UNIT_QUERIES) {
    const int positions = position + 1, parts = used_at(position);
    int size = (positions + parts - 1) / parts, part = unit % SPLITS;
    keeps = query == 0;
    if constexpr (SUMMED) {  // one of three numbers of parts: no division
      if (parts == 1) {
        size = positions, keeps = query == 0 && part == 0, part = 0;
      } else if (JOINED == 1 || parts == SPLITS) {
        size = (positions + SPLITS - 1) / SPLITS;
      } else {
        size = (positions + PARTS - 1) / PARTS, keeps = query < SLOT_QUERIES, part = unit % PARTS;
        query -= query % SLOT_QUERIES;
      }
    }
    begin = part * size, end = begin + size < positions ? begin + size : positions;
    cached = !ROPE_APART && end == positions ? end - 1 : end;
    used = part < parts && begin < positions;
  }
};
// A key head at the newest position, as a warp needs it: a lane's channels of the queries, turned, but not scaled, for scores are; and, for
// who has the position, of key and value as they are cached.
template <int COUNT>
struct Heads {
  float queries[COUNT][8], scales[COUNT];
  uint4 key, value;

  // Turned by who made them. Their squares are added up by the lanes of a head.
  DEVICE void take_turned(Worker& w, const Span& span, bool newest) {
    constexpr int WORDS = 2 * (COUNT + 2);
    const float* words = w.a.words + RAW + span.head * HEAD_WORDS + words_of(w);
    const float* squares = w.a.words + HEAD_SQUARES + span.head * (HEAD_WORDS / 2) + channel_of(w) / 2;
    uint4 v[WORDS + COUNT + 1];
    auto which = [](int i) { return i < WORDS ? i / 2 : i - WORDS; };
    auto place = [&](int i) { return which(i) < COUNT ? span.query + which(i) : which(i) - COUNT + GROUP; };
    take(w, v, w.use(), [&](int i) { return newest || which(i) < COUNT; },
         [&](int i) { return i < WORDS ? words + place(i) * HEAD + i % 2 * NEXT_FOUR : squares + place(i) * (HEAD / 2); });
    w.mark(ATTENTION, READY);
    float norms[COUNT + 1];
#pragma unroll
    for (int i = 0; i <= COUNT; ++i) {
      const float4 s = bare(v[WORDS + i]);
      norms[i] = s.x + s.y + (s.z + s.w);
    }
#pragma unroll
    for (int mask = LANES / 2; mask; mask /= 2)  // side by side
#pragma unroll
      for (int i = 0; i <= COUNT; ++i) norms[i] += from_lane_xor(norms[i], mask);
#pragma unroll
    for (int i = 0; i <= COUNT; ++i) norms[i] = inverse_root(norms[i] / HEAD + EPS);
#pragma unroll
    for (int g = 0; g < COUNT; ++g) {
      bare(v[2 * g], v[2 * g + 1], queries[g]);
      scales[g] = QUERY_SCALE * inverse_root(HEAD) * norms[g];
    }
    key = value = {0, 0, 0, 0};
    if (!newest) return;
    float x[8];
    bare(v[2 * COUNT], v[2 * COUNT + 1], x);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= norms[COUNT];
    key = rounded(x);
    bare(v[2 * COUNT + 2], v[2 * COUNT + 3], x);
    value = rounded(x);
    if (!span.keeps || w.lane >= LANES) return;
    cache(w, w.a.keys, span.head, key);
    cache(w, w.a.values, span.head, value);
  }
  // Turned and scaled by a phase of its own, which has cached the rest.
  DEVICE void take_scaled(Worker& w, const Span& span) {
    take_heads(w, w.a.words + QUERIES + (span.head * GROUP + span.query) * HEAD, COUNT, queries);
    w.mark(ATTENTION, READY);
#pragma unroll
    for (int g = 0; g < COUNT; ++g) scales[g] = 1.0f;
    key = value = {0, 0, 0, 0};
  }
  DEVICE float score(int g, const float (&key)[8]) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += queries[g][i] * key[i];
    return sum_of_head(sum) * scales[g];
  }
};

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
