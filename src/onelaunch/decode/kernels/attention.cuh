// Attention of a key head's queries over a part of the positions, norm and rotation of heads.
#pragma once

constexpr int LANES = HEAD / 8;    // of a position: 8 channels each
constexpr int AT_ONCE = 32 / LANES;  // positions of a warp
constexpr int DEEP = GROUP > 2 ? 1 : 2;  // of a lane: keys and values that are looked at together; as many are on their way
constexpr float NOTHING = -1e30f;  // a maximum before the first position

DEVICE void unpack(const uint4& v, float (&x)[8]) {
  const float4 a = widen({v.x, v.y}), b = widen({v.z, v.w});
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
DEVICE u16 rounded(float v) { return (u16)round_pair(v, 0.0f); }

// Heads of a key head as they were projected, into shared memory: queries, key, value. What turns them is on its way meanwhile.
DEVICE void gather_heads(Worker& w, int head) {
  const float* from = w.a.words + RAW + head * HEAD_WORDS;
  const u16* factors = w.layer_norms() + 2 * HIDDEN;
  const int t = w.thread;
  static_assert(HEAD <= WORKERS_THREADS, "a factor of either norm for each thread");
  const float rotation = t < HEAD ? w.a.rotations[(long long)w.position * HEAD + t] : 0;
  const u16 of_queries = t < HEAD ? factors[t] : 0, of_key = t < HEAD ? factors[HEAD + t] : 0;
  for (int at = 4 * t; at < HEAD_WORDS; at += 4 * WORKERS_THREADS) *(float4*)(w.s.heads + at) = take(w, from + at, w.use);
  if (t < HEAD) {
    w.s.turns[t] = rotation;
    w.s.turns[HEAD + t] = as_float((u32)of_queries << 16), w.s.turns[2 * HEAD + t] = as_float((u32)of_key << 16);
  }
  w.meet();
}
// Queries normalised, turned and scaled for powers of two; key and value rounded as the cache holds them. A warp for each head.
DEVICE void turn_heads(Worker& w, float* queries, float* key_value) {
  const float* rotation = w.s.turns;
  for (int head = w.warp; head < GROUP + 2; head += WARPS) {
    const float* raw = w.s.heads + head * HEAD;
    if (head == GROUP + 1) {
      for (int at = w.lane; at < HEAD; at += 32) key_value[HEAD + at] = as_float((u32)rounded(raw[at]) << 16);
      continue;
    }
    const float* factor = rotation + (head == GROUP ? 2 * HEAD : HEAD);
    float squares = 0;
    for (int at = w.lane; at < HEAD; at += 32) squares += raw[at] * raw[at];
    const float scale = rsqrtf(sum_of_warp(squares) / HEAD + EPS);
    for (int at = w.lane; at < HEAD; at += 32) {
      const int pair = at % (HEAD / 2), other = at < HEAD / 2 ? at + HEAD / 2 : at - HEAD / 2;
      const float mine = raw[at] * scale * factor[at], its = raw[other] * scale * factor[other];
      const float cosine = rotation[pair], sine = rotation[HEAD / 2 + pair];
      const float turned = at < HEAD / 2 ? mine * cosine - its * sine : mine * cosine + its * sine;
      if (head == GROUP)
        key_value[at] = as_float((u32)rounded(turned) << 16);
      else
        queries[head * HEAD + at] = turned * (LOG2E * rsqrtf((float)HEAD));
    }
  }
  w.meet();
}
// Written by one CTA.
DEVICE void cache_key_value(Worker& w, int head, const float* key_value) {
  const long long at = w.cached(head) + (long long)w.position * HEAD;
  for (int i = w.thread; i < HEAD; i += WORKERS_THREADS) {
    w.a.keys[at + i] = (u16)(as_bits(key_value[i]) >> 16);
    w.a.values[at + i] = (u16)(as_bits(key_value[HEAD + i]) >> 16);
  }
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
    const float by = exp2f(most[g] - larger);
    sum[g] *= by;
#pragma unroll
    for (int i = 0; i < 8; ++i) values[g][i] *= by;
    most[g] = larger;
  }
  DEVICE void add(int g, float score, const float (&value)[8]) {
    const float weight = exp2f(score - most[g]);
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

// Keys and values of a warp's next positions, DEEP of each lane's.
struct Batch {
  uint4 keys[DEEP], values[DEEP];
  DEVICE Batch(const Worker& w, int head, int first, int end) {
    const long long base = w.cached(head) + (w.lane % LANES) * 8;
#pragma unroll
    for (int i = 0; i < DEEP; ++i) {
      const int at = first + i * WARPS * AT_ONCE + w.lane / LANES;
      keys[i] = values[i] = {0, 0, 0, 0};
      if (at < end) {
        keys[i] = load_plain((const uint4*)(w.a.keys + base + (long long)at * HEAD));
        values[i] = load_plain((const uint4*)(w.a.values + base + (long long)at * HEAD));
      }
    }
  }
};

// Positions up to end of the cache; the first ones are on their way.
DEVICE void attend_cached(const Worker& w, int head, int first, int end, Batch batch, const float (&query)[GROUP][8], Found& f) {
#pragma unroll 1
  while (first < end) {
    const int next = first + WARPS * AT_ONCE * DEEP;
    const Batch later(w, head, next, end);
    float scores[GROUP][DEEP];
#pragma unroll
    for (int i = 0; i < DEEP; ++i) {
      const bool valid = first + i * WARPS * AT_ONCE + w.lane / LANES < end;
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
#pragma unroll
    for (int i = 0; i < DEEP; ++i) {
      float value[8];
      unpack(batch.values[i], value);
#pragma unroll
      for (int g = 0; g < GROUP; ++g) f.add(g, scores[g][i], value);
    }
    batch = later;
    first = next;
  }
}

// Of the lanes that have the same channels, then of all warps: results and the logarithm of their sums to the slot.
DEVICE void combine(Worker& w, Found& f, int unit) {
  float* found = w.s.found;  // [WARPS][GROUP][HEAD + 2]
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
    float* mine = found + (w.warp * GROUP + g) * (HEAD + 2);
    if (w.lane < LANES) {
#pragma unroll
      for (int i = 0; i < 8; ++i) mine[w.lane * 8 + i] = f.values[g][i];
    }
    if (w.lane == 0) mine[HEAD] = larger, mine[HEAD + 1] = f.sum[g];
  }
  w.meet();
  float* slot = w.a.words + PARTIAL + unit * SLOT;
  for (int at = w.thread; at < GROUP * HEAD; at += WORKERS_THREADS) {
    const int g = at / HEAD, channel = at % HEAD;
    float most = NOTHING, sum = 0, value = 0;
    for (int warp = 0; warp < WARPS; ++warp) most = fmaxf(most, found[(warp * GROUP + g) * (HEAD + 2) + HEAD]);
    for (int warp = 0; warp < WARPS; ++warp) {
      const float* its = found + (warp * GROUP + g) * (HEAD + 2);
      const float weight = exp2f(its[HEAD] - most);
      sum += weight * its[HEAD + 1];
      value += weight * its[channel];
    }
    put(slot + at, value / sum, w.use);
    if (channel == 0) put(slot + GROUP * HEAD + g, most + log2f(sum), w.use);
  }
}

DEVICE void attend(Worker& w) {
  float *queries = w.s.heads + HEAD_WORDS, *key_value = queries + GROUP * HEAD;
  const int positions = w.position + 1, used = w.used(), size = (positions + used - 1) / used;
  for (int unit = w.begin(ATTENTION); unit < w.end(ATTENTION); ++unit) {
    const int head = unit / SPLITS, part = unit % SPLITS;
    if (part >= used) {  // nothing to add, but each word is written in every use
      if constexpr (TAGGED)
        for (int at = w.thread; at < SLOT; at += WORKERS_THREADS) put(w.a.words + PARTIAL + unit * SLOT + at, 0.0f, w.use);
      continue;
    }
    const int begin = part * size, end = begin + size < positions ? begin + size : positions;
    const bool newest = !ROPE_APART && end == positions;
    const int first = begin + w.warp * AT_ONCE, cached = newest ? end - 1 : end;
    const Batch batch(w, head, first, ROPE_APART ? 0 : cached);  // of earlier tokens: no need to wait
    if constexpr (ROPE_APART) {
      for (int at = 4 * w.thread; at < GROUP * HEAD; at += 4 * WORKERS_THREADS)
        *(float4*)(queries + at) = take(w, w.a.words + QUERIES + head * GROUP * HEAD + at, w.use);
      w.meet();
    } else {
      gather_heads(w, head);
      turn_heads(w, queries, key_value);
      if (newest) cache_key_value(w, head, key_value);
    }
    w.mark(ATTENTION, READY);
    float query[GROUP][8];
#pragma unroll
    for (int g = 0; g < GROUP; ++g)
#pragma unroll
      for (int i = 0; i < 8; ++i) query[g][i] = queries[g * HEAD + (w.lane % LANES) * 8 + i];
    Found f;
    attend_cached(w, head, first, cached, ROPE_APART ? Batch(w, head, first, cached) : batch, query, f);
    if (newest && w.warp == 0) {  // its key and value are here; all lanes of the warp for their shuffles, one position of it counts
      float key[8], value[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) key[i] = key_value[(w.lane % LANES) * 8 + i], value[i] = key_value[HEAD + (w.lane % LANES) * 8 + i];
#pragma unroll
      for (int g = 0; g < GROUP; ++g) {
        const float found = score(query[g], key), counted = w.lane < LANES ? found : 2 * NOTHING;
        f.rescale(g, fmaxf(f.most[g], counted));
        f.add(g, counted, value);
      }
    }
    combine(w, f, unit);
    w.mark(ATTENTION, DONE);
    w.meet();  // shared memory is free again
  }
}

// Norm and rotation as a phase of their own.
DEVICE void turn(Worker& w) {
  float *queries = w.s.heads + HEAD_WORDS, *key_value = queries + GROUP * HEAD;
  for (int head = w.begin(ROPE); head < w.end(ROPE); ++head) {
    gather_heads(w, head);
    w.mark(ROPE, READY);
    turn_heads(w, queries, key_value);
    cache_key_value(w, head, key_value);
    for (int at = w.thread; at < GROUP * HEAD; at += WORKERS_THREADS)
      put(w.a.words + QUERIES + head * GROUP * HEAD + at, queries[at], w.use);
    w.meet();
    w.mark(ROPE, DONE);
  }
}

// What attention found over all positions, as the vector that is multiplied next: parts weighted by their sums. A thread has 8 channels
// of a head, those of PARTS parts on their way at once: there are no registers for more.
constexpr int PARTS = SPLITS < 4 ? SPLITS : 4;

DEVICE void gather_found(Worker& w) {
  const int used = w.used();
#pragma unroll 1
  for (int column = 8 * afresh(w.thread); column < padded(QUERY); column += 8 * WORKERS_THREADS) {
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
            if (first + part >= used) continue;
            const uint4* values = (const uint4*)(slot + part * SLOT + g * HEAD + column % HEAD);
            const float* log = slot + part * SLOT + GROUP * HEAD + g;
            parts[part][0] = TAGGED ? load_relaxed(values) : load_plain(values);
            parts[part][1] = TAGGED ? load_relaxed(values + 1) : load_plain(values + 1);
            logs[part] = TAGGED ? load_relaxed((const u32*)log) : as_bits(*log);
          }
#pragma unroll
          for (int part = 0; part < PARTS; ++part) {
            if (first + part >= used) continue;
            there &= tagged(parts[part][0], tag_of(w.use)) && tagged(parts[part][1], tag_of(w.use)) && ((logs[part] ^ w.use) & 3) == 0;
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
