// Attention of a key head's queries over a part of the positions, norm and rotation of heads.
#pragma once

constexpr int FOUND_WORDS = HEAD + 4;  // results, maximum, sum
constexpr int LANES = HEAD / 8;    // of a position: 8 channels each
constexpr int AT_ONCE = 32 / LANES;  // positions of a warp
constexpr int DEEP = GROUP > 2 ? 1 : 2;  // of a lane: keys and values that are looked at together
constexpr float NOTHING = -1e30f;  // a maximum before the first position

DEVICE void unpack(const uint4& v, float (&x)[8]) {
  const float4 a = widen({v.x, v.y}), b = widen({v.z, v.w});
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
DEVICE uint4 rounded(const float (&x)[8]) {
  return {round_pair(x[0], x[1]), round_pair(x[2], x[3]), round_pair(x[4], x[5]), round_pair(x[6], x[7])};
}
DEVICE int channel_of(const Worker& w) { return w.lane % LANES * 8; }

// What turns a lane's 8 channels of a head, its factors read before the head is there. A channel's other is half a head away.
struct Turn {
  const float* rotation;
  uint4 queries_factors, keys_factors;
  DEVICE explicit Turn(const Worker& w) : rotation(SEPARATE ? w.a.rotations + (long long)w.position * HEAD : w.s.rotation) {
    const u16* factors = w.layer_norms() + 2 * HIDDEN + channel_of(w);
    queries_factors = *(const uint4*)factors, keys_factors = *(const uint4*)(factors + HEAD);
  }
  // Normalised, turned, and scaled; by all lanes of a warp.
  DEVICE void apply(const Worker& w, float (&x)[8], const uint4 factors, float by) const {
    float squares = 0, factor[8];
    unpack(factors, factor);
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += x[i] * x[i];
#pragma unroll
    for (int mask = LANES / 2; mask; mask /= 2) squares += from_lane_xor(squares, mask);
    const float scale = by * rsqrtf(squares / HEAD + EPS);
    float other[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= scale * factor[i];
#pragma unroll
    for (int i = 0; i < 8; ++i) other[i] = LANES > 1 ? from_lane_xor(x[i], LANES / 2) : x[i ^ 4];
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const int pair = (channel_of(w) + i) % (HEAD / 2);
      const bool lower = channel_of(w) + i < HEAD / 2;
      const float4 c = *(const float4*)(rotation + pair), s = *(const float4*)(rotation + HEAD / 2 + pair);
      const float cosine[4] = {c.x, c.y, c.z, c.w}, sine[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i + j] = x[i + j] * cosine[j] + (lower ? -other[i + j] : other[i + j]) * sine[j];
    }
  }
};
// A lane's channels of some heads that follow each other; those from limit on are left out.
template <int COUNT>
DEVICE void take_heads(Worker& w, const float* from, int limit, float (&x)[COUNT][8]) {
  uint4 v[2 * COUNT];
  const float* mine = from + channel_of(w);
  take(w, v, w.use(), [&](int i) { return i / 2 < limit ? mine + i / 2 * HEAD + i % 2 * 4 : nullptr; });
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const float4 a = bare(v[2 * i]), b = bare(v[2 * i + 1]);
    x[i][0] = a.x, x[i][1] = a.y, x[i][2] = a.z, x[i][3] = a.w, x[i][4] = b.x, x[i][5] = b.y, x[i][6] = b.z, x[i][7] = b.w;
  }
}
// A lane's channels in a row of keys or values of the cache.
DEVICE void cache(const Worker& w, u16* rows, int head, const uint4& row) {
  *(uint4*)(rows + w.cached(head) + (long long)w.position * HEAD + channel_of(w)) = row;
}
DEVICE void read(const float* from, float (&x)[8]) {
  const float4 a = *(const float4*)from, b = *(const float4*)(from + 4);
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
DEVICE void write(float* to, const float (&x)[8]) {
  *(float4*)to = {x[0], x[1], x[2], x[3]}, *(float4*)(to + 4) = {x[4], x[5], x[6], x[7]};
}
constexpr float QUERY_SCALE = LOG2E;  // and one over the root of HEAD: scores are exponents of two

// Queries of a key head, normalised and turned, by each warp for itself: LANES lanes a head, then through the warp's part of shared memory
// to all lanes. The warp that has the newest position turns its key too, and keeps key and value.
DEVICE void turn_heads(Worker& w, int head, bool newest, float (&queries)[GROUP][8]) {
  constexpr int PASSES = (GROUP + 2 + AT_ONCE - 1) / AT_ONCE;
  const int mine = w.lane / LANES, limit = newest ? GROUP + 2 : GROUP;
  const float* from = w.a.words + RAW + head * HEAD_WORDS + channel_of(w);
  float* to = w.s.found + w.warp * GROUP * FOUND_WORDS;
  const Turn turn(w);
  uint4 v[2 * PASSES];
  take(w, v, w.use(), [&](int i) {
    const int which = i / 2 * AT_ONCE + mine;
    return which < limit ? from + which * HEAD + i % 2 * 4 : nullptr;
  });
  w.mark(ATTENTION, READY);
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const int which = pass * AT_ONCE + mine;
    if (pass * AT_ONCE >= limit) continue;
    const float4 a = bare(v[2 * pass]), b = bare(v[2 * pass + 1]);
    float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    uint4 row = rounded(x);
    turn.apply(w, x, which < GROUP ? turn.queries_factors : turn.keys_factors, which < GROUP ? QUERY_SCALE * rsqrtf((float)HEAD) : 1.0f);
    if (which < GROUP) {
      write(to + which * HEAD + channel_of(w), x);
    } else if (which < limit) {
      if (which == GROUP) row = rounded(x);
      cache(w, which == GROUP ? w.a.keys : w.a.values, head, row);
      unpack(row, x);
      write(w.s.newest + (which - GROUP) * HEAD + channel_of(w), x);
    }
  }
  warp_meets();
  w.refresh();
#pragma unroll
  for (int g = 0; g < GROUP; ++g) read(to + g * HEAD + channel_of(w), queries[g]);
  warp_meets();  // before what was found takes their place
}

// Running results of a lane's 8 channels: sums of values by powers of two of what the keys gave, over the largest so far.
struct Found {
  float most[GROUP], sum[GROUP], values[GROUP][8];
  DEVICE Found() {
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
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

template <class Query>
DEVICE float score(const Query& query, const float (&key)[8]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += query[i] * key[i];
#pragma unroll
  for (int mask = LANES / 2; mask; mask /= 2) sum += from_lane_xor(sum, mask);
  return sum;
}

// A unit's part of a key head's positions. The newest one is not in the cache yet.
struct Span {
  int head, begin, end, cached;
  bool used;
  DEVICE Span(int unit, int position) : head(unit / SPLITS) {
    const int positions = position + 1, parts = used_at(position), size = (positions + parts - 1) / parts;
    begin = unit % SPLITS * size, end = begin + size < positions ? begin + size : positions;
    cached = !ROPE_APART && end == positions ? end - 1 : end;
    used = unit % SPLITS < parts;
  }
};
// Keys and values of earlier positions come through the ring like weights, where chunks are whole phases' and no wait is in their way:
// keys in the first half of a chunk, values in the second.
constexpr int ROUND = WARPS * AT_ONCE * DEEP, ROWS = CHUNK / (4 * HEAD);
static_assert(ROWS % ROUND == 0, "a chunk is for whole rounds of all warps");

// Keys and values of a warp's positions in a round, DEEP of each lane's.
struct Batch {
  uint4 keys[DEEP], values[DEEP];
  DEVICE void load(Worker& w, const Span& span, int base) {
    const char *keys_at, *values_at;
    const int row = w.warp * AT_ONCE + w.lane / LANES, within = (base - span.begin) % ROWS;
    if constexpr (KEYS_STREAM) {
      keys_at = (base < span.cached ? w.chunk() : w.s.stages) + within * HEAD * 2, values_at = keys_at + CHUNK / 2;
    } else {
      const long long at = w.cached(span.head) + (long long)base * HEAD;
      keys_at = (const char*)(w.a.keys + at), values_at = (const char*)(w.a.values + at);
    }
#pragma unroll
    for (int i = 0; i < DEEP; ++i) {
      const int mine = row + i * WARPS * AT_ONCE, offset = mine * HEAD * 2 + channel_of(w) * 2;
      keys[i] = values[i] = {0, 0, 0, 0};
      if (base + mine < span.cached) keys[i] = read_row(keys_at + offset), values[i] = read_row(values_at + offset);
    }
    if (KEYS_STREAM && base < span.cached && (within + ROUND == ROWS || base + ROUND >= span.cached)) w.drop();
  }
  DEVICE static uint4 read_row(const char* at) { return KEYS_STREAM ? *(const uint4*)at : load_plain((const uint4*)at); }
};

// All cached positions of the span, by rounds; the first round's are there or on their way.
DEVICE void attend_cached(Worker& w, const Span& span, Batch& batch, const float (&query)[GROUP][8], Found& f) {
#pragma unroll 1
  for (int base = span.begin; base < span.cached; base += ROUND) {
    w.refresh();
    float scores[GROUP][DEEP];
#pragma unroll
    for (int i = 0; i < DEEP; ++i) {
      const bool valid = base + i * WARPS * AT_ONCE + w.warp * AT_ONCE + w.lane / LANES < span.cached;
      float key[8];
      unpack(batch.keys[i], key);
#pragma unroll
      for (int g = 0; g < GROUP; ++g) {
        const float found = score(query[g], key);
        scores[g][i] = valid ? found : 2 * NOTHING;
      }
    }
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
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
      for (int g = 0; g < GROUP; ++g) f.add(g, scores[g][i], value);
    }
    batch = next;
  }
}

// What a warp found, of the lanes that have the same channels: to the slot, or, where other warps had positions too, to be combined.
DEVICE void combine_lanes(Worker& w, Found& f, float* slot, int sharing) {
  w.refresh();
#pragma unroll
  for (int g = 0; g < GROUP; ++g) {
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
      const float whole = 1.0f / f.sum[g];
      if (w.lane / LANES == g % AT_ONCE) {
        float* at = slot + g * HEAD + channel_of(w);
        put(at, float4{x[0] * whole, x[1] * whole, x[2] * whole, x[3] * whole}, w.use());
        put(at + 4, float4{x[4] * whole, x[5] * whole, x[6] * whole, x[7] * whole}, w.use());
      }
      if (w.lane == 0) put(slot + GROUP * HEAD + g, larger + log2f(f.sum[g]), w.use());
      continue;
    }
    float* mine = w.s.found + (w.warp * GROUP + g) * FOUND_WORDS;
    if (w.lane < LANES) {
#pragma unroll
      for (int i = 0; i < 8; ++i) mine[w.lane * 8 + i] = x[i];
    }
    if (w.lane == 0) mine[HEAD] = larger, mine[HEAD + 1] = f.sum[g];
  }
}
// Of all warps that had positions: results and the logarithm of their sums.
DEVICE void combine_warps(Worker& w, float* slot, int sharing) {
  w.refresh();
  const float* found = w.s.found;  // [WARPS][GROUP][FOUND_WORDS]
  w.meet();
  for (int at = w.thread; at < GROUP * HEAD; at += WORKERS_THREADS) {
    const int g = at / HEAD, channel = at % HEAD;
    float most = NOTHING, sum = 0, value = 0;
    for (int warp = 0; warp < sharing; ++warp) most = fmaxf(most, found[(warp * GROUP + g) * FOUND_WORDS + HEAD]);
    for (int warp = 0; warp < sharing; ++warp) {
      const float* its = found + (warp * GROUP + g) * FOUND_WORDS;
      const float weight = power(its[HEAD] - most);
      sum += weight * its[HEAD + 1];
      value += weight * its[channel];
    }
    put(slot + at, value / sum, w.use());
    if (channel == 0) put(slot + GROUP * HEAD + g, most + log2f(sum), w.use());
  }
}

// Each warp turns the queries for itself, and works alone until all have found something: positions are dealt out AT_ONCE to a warp.
// The newest position's key and value are turned, used and kept by the warp whose turn it is.
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
    const bool newest = span.cached < span.end && (all - 1) % WARPS == w.warp;
    Batch batch;
    if constexpr (!ROPE_APART) batch.load(w, span, span.begin);  // of earlier tokens: no need to wait
    if (w.warp < sharing) {  // the others have no position in any round
      Found f;
      float queries[GROUP][8];
      if constexpr (ROPE_APART) {
        take_heads(w, w.a.words + QUERIES + span.head * GROUP * HEAD, GROUP, queries);
        w.mark(ATTENTION, READY);
        batch.load(w, span, span.begin);
      } else {
        turn_heads(w, span.head, newest, queries);
      }
      if (newest) {  // all lanes of the warp for their shuffles, one position of it counts
        float key[8], value[8];
        read(w.s.newest + channel_of(w), key);
        read(w.s.newest + HEAD + channel_of(w), value);
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
          const float found = score(queries[g], key), counted = w.lane < LANES ? found : 2 * NOTHING;
          f.rescale(g, fmaxf(f.most[g], counted));
          f.add(g, counted, value);
        }
      }
      attend_cached(w, span, batch, queries, f);
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
    const float scale = which == GROUP ? 1.0f : QUERY_SCALE * rsqrtf((float)HEAD);
    if (which <= GROUP) turn.apply(w, x[0], which == GROUP ? turn.keys_factors : turn.queries_factors, scale);
    if (which >= GROUP) {
      if (w.lane < LANES) cache(w, which == GROUP ? w.a.keys : w.a.values, head, rounded(x[0]));
    } else if (w.lane < LANES) {
      float* at = w.a.words + QUERIES + (head * GROUP + which) * HEAD + channel_of(w);
      put(at, float4{x[0][0], x[0][1], x[0][2], x[0][3]}, w.use());
      put(at + 4, float4{x[0][4], x[0][5], x[0][6], x[0][7]}, w.use());
    }
  }
  w.mark(ROPE, DONE);
}

// What attention found over all positions, as the vector that is multiplied next: parts weighted by their sums. A thread has 8 channels
// of a head, those of PARTS parts on their way at once: there are no registers for more.
constexpr int PARTS = SPLITS < 3 ? SPLITS : 3;

DEVICE void gather_found(Worker& w) {
  const int used = w.used();
#pragma unroll 1
  for (int column = 8 * w.thread; column < padded(QUERY); column += 8 * WORKERS_THREADS) {
    float4 sums[2] = {};
    if (column < QUERY) {
      const int head = column / HEAD, g = head % GROUP;
      const float* slot = w.a.words + PARTIAL + head / GROUP * SPLITS * SLOT;
      float most = NOTHING, sum = 0;
#pragma unroll 1
      for (int first = 0; first < used; first += PARTS, slot += PARTS * SLOT) {
        uint4 parts[PARTS][2];
        float weights[PARTS];
        auto fetch = [&] {
          u32 logs[PARTS];
          bool there = true;
#pragma unroll
          for (int part = 0; part < PARTS; ++part) {
            if (first + part >= used) {
              parts[part][0] = parts[part][1] = {0, 0, 0, 0}, logs[part] = 0, weights[part] = 0;
              continue;
            }
            const uint4* values = (const uint4*)(slot + part * SLOT + g * HEAD + column % HEAD);
            const float* log = slot + part * SLOT + GROUP * HEAD + g;
            parts[part][0] = TAGGED ? load_relaxed(values) : load_plain(values);
            parts[part][1] = TAGGED ? load_relaxed(values + 1) : load_plain(values + 1);
            logs[part] = TAGGED ? load_relaxed((const u32*)log) : as_bits(*log);
          }
#pragma unroll
          for (int part = 0; part < PARTS; ++part) {
            if (first + part >= used) continue;
            for (int i = 0; i < 2; ++i) there &= tagged(parts[part][i], tag_of(w.use()));
            there &= ((logs[part] ^ w.use()) & 3) == 0;
            weights[part] = bare(logs[part]);
          }
          return there;
        };
        if constexpr (TAGGED)
          await(w.a, w.s, fetch);
        else
          fetch();
        float larger = most;
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
          if (first + part < used) larger = fmaxf(larger, weights[part]);
        const float by = exp2f(most - larger);
        most = larger, sum *= by;
#pragma unroll
        for (int i = 0; i < 2; ++i) sums[i] = {sums[i].x * by, sums[i].y * by, sums[i].z * by, sums[i].w * by};
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
          if (first + part >= used) continue;
          const float weight = exp2f(weights[part] - most);
          sum += weight;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float4 p = bare(parts[part][i]);
            sums[i] = {sums[i].x + weight * p.x, sums[i].y + weight * p.y, sums[i].z + weight * p.z, sums[i].w + weight * p.w};
          }
        }
      }
      const float whole = 1.0f / sum;
#pragma unroll
      for (int i = 0; i < 2; ++i) sums[i] = {sums[i].x * whole, sums[i].y * whole, sums[i].z * whole, sums[i].w * whole};
    }
    lay(w, column, sums[0]);
    lay(w, column + 4, sums[1]);
  }
  w.scale = 1.0f;
  w.meet();
}
