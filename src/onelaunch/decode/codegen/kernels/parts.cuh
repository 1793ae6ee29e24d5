// Combination of KV splits: partial attention outputs with their LSE become the operand of the output projection (flash-decoding).
//
// Computes   o = sum_i 2^(LSE_i - M) o_i / sum_i 2^(LSE_i - M), with M = max LSE_i, over the splits i of a query; LSE in base 2.
// Callers    phases.cuh calls stage_attention(), residual.cuh stage_own_attention().
// Memory     PARTIAL has a slot per unit of attention: [PARTIAL_QUERIES][HEAD_DIM] outputs, then [PARTIAL_QUERIES] LSE. The KV splits of
//            the same queries have consecutive slots. Without SPLIT_K_O every CTA reads the slots of all queries from the L2 cache; with
//            it a CTA reads only those of its query splits.
// Threads    a thread combines 4 or 8 channels of a head. Loads of all splits that fit in registers are in flight at once.
// Sync       slots are flag-in-data words if FLAG_IN_DATA, else plain words that the synchronization before the phase orders
//            (words.cuh). Both staging functions end with a barrier of the consumer threads.
#pragma once

// Splits that a thread loads at once. The weights of the output projection's first tiles are in registers meanwhile, so more tiles
// leave room for fewer splits.
constexpr int PARTIALS_AT_ONCE = LAUNCH_PER_PHASE || MAX_O > 3 ? 3 : MAX_O > 1 ? 4 : 8;

// Outputs and LSE of up to COUNT splits of a query, 4 * QUADS channels per thread, tags included.
template <int COUNT, int QUADS>
struct Partials {
  uint4 values[COUNT][QUADS];
  u32 lse[COUNT];
  // Load split `part` of a query, an index into the slot's queries. `slot` is that of the first split.
  DEVICE void load(int part, const float* slot, int channel, int query) {
    const uint4* at = (const uint4*)(slot + part * PARTIAL_WORDS + query * HEAD_DIM + channel);
    const u32* lse_at = (const u32*)(slot + part * PARTIAL_WORDS + PARTIAL_QUERIES * HEAD_DIM + query);
#pragma unroll
    for (int i = 0; i < QUADS; ++i) values[part][i] = FLAG_IN_DATA ? load_relaxed(at + i) : load_weak(at + i);
    lse[part] = FLAG_IN_DATA ? load_relaxed(lse_at) : *lse_at;
  }
  // Spin until the first `count` splits have arrived; the others get the weight 0. All lanes load all splits again until all have
  // arrived: lanes that loaded only the missing ones diverged, and their loads came one after another (words.cuh, spin_load, which also
  // explains the comparison of tags).
  DEVICE void spin_load(Consumer& c, const float* slot, int channel, int query, int count) {
    auto all_there = [&] {
      u32 some = tag_of(c.epoch()), every = some;
#pragma unroll
      for (int part = 0; part < COUNT; ++part) {
#pragma unroll
        for (int i = 0; i < QUADS; ++i) values[part][i] = {0, 0, 0, 0};
        lse[part] = float_as_uint(2 * NO_SCORE);  // weight 0 even if max_lse is still NO_SCORE (attention.cuh)
        if (part < count) load(part, slot, channel, query);
      }
#pragma unroll
      for (int part = 0; part < COUNT; ++part) {
        if (part >= count) continue;
#pragma unroll
        for (const uint4& v : values[part]) some |= v.x | v.y | v.z | v.w, every &= v.x & v.y & v.z & v.w;
        some |= lse[part], every &= lse[part];
      }
      return (some & ~every & 3) == 0;
    };
    if constexpr (FLAG_IN_DATA)
      spin_until(c.a, c.s, all_there);
    else
      all_there();
  }
};
// Running combination of splits by their LSE: the largest LSE so far, the sum of weights, and 4 * QUADS weighted channels.
template <int QUADS>
struct LseCombine {
  float max_lse = NO_SCORE, sum = 0;
  float4 sums[QUADS] = {};
  template <int COUNT>
  DEVICE void add(const Partials<COUNT, QUADS>& parts) {
    float larger = max_lse;
#pragma unroll
    for (int part = 0; part < COUNT; ++part) larger = fmaxf(larger, strip_tag(parts.lse[part]));
    const float rescale = exp2_approx(max_lse - larger);
    max_lse = larger, sum *= rescale;
#pragma unroll
    for (float4& s : sums) s = {s.x * rescale, s.y * rescale, s.z * rescale, s.w * rescale};
#pragma unroll
    for (int part = 0; part < COUNT; ++part) {
      const float weight = exp2_approx(strip_tag(parts.lse[part]) - max_lse);
      sum += weight;
#pragma unroll
      for (int i = 0; i < QUADS; ++i) {
        const float4 p = strip_tag(parts.values[part][i]);
        sums[i] = {sums[i].x + weight * p.x, sums[i].y + weight * p.y, sums[i].z + weight * p.z, sums[i].w + weight * p.w};
      }
    }
  }
  DEVICE void store(Consumer& c, int column) const {
    const float inverse_sum = rcp_approx(sum);
#pragma unroll
    for (int i = 0; i < QUADS; ++i)
      store_split4(c, column + 4 * i,
                   float4{sums[i].x * inverse_sum, sums[i].y * inverse_sum, sums[i].z * inverse_sum, sums[i].w * inverse_sum});
  }
};
// Combine all splits of a query head from `slot` on, COUNT at a time, and stage 8 channels at `column` of the operand.
template <int COUNT>
DEVICE void combine_parts(Consumer& c, const float* slot, int channel, int query, int column) {
  LseCombine<2> combined;
#pragma unroll 1
  for (int first = 0; first < c.kv_splits(); first += COUNT, slot += COUNT * PARTIAL_WORDS) {
    Partials<COUNT, 2> parts;
    parts.spin_load(c, slot, channel, query, c.kv_splits() - first);
    combined.add(parts);
  }
  combined.store(c, column);
}
DEVICE void store_split_zeros(Consumer& c, int column) {
  store_split4(c, column, float4{0, 0, 0, 0});
  store_split4(c, column + 4, float4{0, 0, 0, 0});
}
// Stage the attention output of all heads as the operand of the output projection (plans without SPLIT_K_O).
DEVICE void stage_attention(Consumer& c) {
  const int splits = c.kv_splits();
#pragma unroll 1
  for (int column = 8 * c.thread; column < padded(QUERY); column += 8 * CONSUMER_THREADS) {
    if (column >= QUERY) {
      store_split_zeros(c, column);
      continue;
    }
    const int head = column / HEAD_DIM, query = head % UNIT_QUERIES;
    const float* slot = c.a.words + PARTIAL + head / UNIT_QUERIES * KV_SPLITS * PARTIAL_WORDS;
    // With one split the output is final. Its LSE is written too, but not read: combine_parts() would only give the same output.
    if (splits == 1) {
      uint4 v[2];
      spin_load(c, v, c.epoch(), [](int) { return true; }, [&](int i) { return slot + query * HEAD_DIM + column % HEAD_DIM + 4 * i; });
      store_split4(c, column, strip_tag(v[0]));
      store_split4(c, column + 4, strip_tag(v[1]));
    } else if (splits == 2) {
      combine_parts<2>(c, slot, column % HEAD_DIM, query, column);
    } else if (PARTIALS_AT_ONCE > 4 && splits <= 4) {
      combine_parts<4>(c, slot, column % HEAD_DIM, query, column);
    } else {
      combine_parts<PARTIALS_AT_ONCE>(c, slot, column % HEAD_DIM, query, column);
    }
  }
  c.scale = 1.0f, c.norm_pending = false;
  c.sync();
}

// Combine COUNT splits of a query, all with one trip to the L2 cache, and stage 4 channels at `column` of the operand.
template <int COUNT>
DEVICE void combine_own(Consumer& c, const float* slots, int channel, int query, int column) {
  Partials<COUNT, 1> parts;
  parts.spin_load(c, slots, channel, query, COUNT);
  LseCombine<1> combined;
  combined.add(parts);
  combined.store(c, column);
}
// Stage the attention output of a query split, as the operand of its blocks of the output projection (SPLIT_K_O). With one KV split
// the CTA's attention phase has staged it already (PartialStore), and only the padding is written. Else the warps that poll wait HOLD
// cycles before the first poll: polling earlier delays the words that are polled.
DEVICE void stage_own_attention(Consumer& c, int query_split, int column) {
  constexpr int QUERIES_WIDTH = UNIT_QUERIES * HEAD_DIM;
  for (int at = QUERIES_WIDTH + 8 * c.thread; at < O_TILE_COLUMNS; at += 8 * CONSUMER_THREADS) store_split_zeros(c, column + at);
  const int splits = c.kv_splits();
  if (splits > 1) {
    const bool merged = QUERY_MERGE > 1 && splits > KV_SPLITS;
    const long long since = clock64();
    while (c.warp * 32 * 4 < QUERIES_WIDTH && clock64() - since < HOLD) spin_pause();
#pragma unroll 1
    for (int at = 4 * c.thread; at < QUERIES_WIDTH; at += 4 * CONSUMER_THREADS) {
      const int channel = at % HEAD_DIM, query = at / HEAD_DIM;
      const float* slots = c.a.words + PARTIAL;
      if (merged)  // Each slot of QUERY_MERGE neighbouring query splits has the queries of all of them.
        combine_own<MAX_KV_SPLITS>(c, slots + query_split / QUERY_MERGE * QUERY_MERGE * KV_SPLITS * PARTIAL_WORDS, channel,
                                   query_split % QUERY_MERGE * UNIT_QUERIES + query, column + at);
      else
        combine_own<KV_SPLITS>(c, slots + query_split * KV_SPLITS * PARTIAL_WORDS, channel, query, column + at);
    }
  }
  c.scale = 1.0f, c.norm_pending = false;
  c.sync();
}
