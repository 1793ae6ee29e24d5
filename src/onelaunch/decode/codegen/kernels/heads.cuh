// Queries, keys and values of the newest position: RMS norm and RoPE, the unit of attention, and the write to the KV cache.
//
// Computes   q' = rope(q * w_q) / RMS(q), k' = rope(k * w_k) / RMS(k) per head, v' = v, for the token's position; without QK_NORM
//            q' = rope(q), k' = rope(k). Scores are in base 2: queries carry log2(e) / sqrt(HEAD_DIM).
// Callers    attention.cuh uses Heads, Span, unpack(), channel_of() and the constants of lanes and units; parts.cuh uses
//            MAX_KV_SPLITS and PARTIAL_QUERIES, step.cu Span; the generated order.cuh calls norm_rope().
// Where      either in a phase of its own (ROPE_PHASE: norm_rope), one warp per head; or split between two phases: the QKV product applies
//            weights and rotation, which are linear, to its outputs and also gives squares (phases.cuh, RowRope), and attention adds up
//            the squares and divides by the RMS (Heads::load_rotated).
// Layout     a lane has 8 channels of a head; each group of LANES lanes in a warp has a whole head. The words of a KV head are its GROUP
//            query heads, the key and the value, HEAD_DIM words each (HEAD_WORDS in all). Rows of the QKV product are permuted so that a
//            tile of 8 rows has four channels of a head's first half and their RoPE partners of the second half (packing.py, in_pairs);
//            the words keep that order. HEAD_SQUARES has one word per RoPE pair: the sum of the pair's two squares; without QK_NORM
//            there is no such buffer.
// Sync       words are flag-in-data (words.cuh), or, without FLAG_IN_DATA, ordered by a grid barrier or semaphore before the phase. Rows of
//            the KV cache are plain stores. Later tokens see them, because each CTA stores its candidate for the next token (the largest
//            logit of its rows of the LM head) with release semantics after them, once per token, and acquires those of all CTAs. With
//            ROPE_PHASE attention reads the newest row in the same token; such plans have a grid barrier or semaphore between the phases.
#pragma once

constexpr int LANES = HEAD_DIM / 8;             // lanes per position, with 8 channels each
constexpr int POSITIONS_PER_WARP = 32 / LANES;   // positions that a warp handles at once

DEVICE void unpack(const uint4& v, float (&x)[8]) {
  const float4 a = bf16x4_to_float4({v.x, v.y}), b = bf16x4_to_float4({v.z, v.w});
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
DEVICE uint4 pack_bf16x8(const float (&x)[8]) {
  return {floats_to_bf16x2(x[0], x[1]), floats_to_bf16x2(x[2], x[3]), floats_to_bf16x2(x[4], x[5]), floats_to_bf16x2(x[6], x[7])};
}
// First of a lane's 8 channels.
DEVICE int channel_of(const Consumer& c) { return c.lane % LANES * 8; }
// Return the sum over the lanes of a head, in each of them.
DEVICE float head_sum(float v) {
#pragma unroll
  for (int mask = LANES / 2; mask; mask /= 2) v += shfl_xor(v, mask);
  return v;
}

// Offset of a lane's first four channels among the words of a head, which are in the order of its tiles: four channels of the first
// half, the same four of the second. The lane's next four channels are those of the next tile, NEXT_QUAD words later.
constexpr int NEXT_QUAD = HEAD_DIM > TILE ? TILE : TILE / 2;
DEVICE int word_offset(const Consumer& c) { return channel_of(c) % (HEAD_DIM / 2) * 2 + channel_of(c) / (HEAD_DIM / 2) * (TILE / 2); }

// Weights and rotation of a lane's 8 channels, for norm and RoPE in a phase of their own. They are loaded before the head's words are
// waited for. The RoPE partner of a channel is half a head away, in lane (lane ^ LANES / 2).
struct NormRope {
  uint4 query_weights, key_weights;  // only with QK_NORM
  float4 cosines[2], sines[2];
  DEVICE explicit NormRope(const Consumer& c) {
    if constexpr (QK_NORM) {
      const u16* weights = c.parameters() + QK_NORMS_AT + channel_of(c);  // q_norm, k_norm
      query_weights = *(const uint4*)weights, key_weights = *(const uint4*)(weights + HEAD_DIM);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* pair = c.rotation() + (channel_of(c) + 4 * i) % (HEAD_DIM / 2);
      cosines[i] = *(const float4*)pair, sines[i] = *(const float4*)(pair + HEAD_DIM / 2);
    }
  }
  // Normalize (with QK_NORM) and rotate a head in place, and multiply it by `factor`. `x` has the lane's 8 channels. All lanes of the warp
  // must call this.
  DEVICE void apply(const Consumer& c, float (&x)[8], const uint4& weights, float factor) const {
    if constexpr (QK_NORM) {
      float squares = 0, weight[8];
      unpack(weights, weight);
#pragma unroll
      for (int i = 0; i < 8; ++i) squares += x[i] * x[i];
      const float scale = factor * rsqrt_approx(head_sum(squares) / HEAD_DIM + EPS);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] *= scale * weight[i];
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] *= factor;
    }
    float other[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) other[i] = LANES > 1 ? shfl_xor(x[i], LANES / 2) : x[i ^ 4];
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const bool lower = channel_of(c) + i < HEAD_DIM / 2;
      const float4 cos4 = cosines[i / 4], sin4 = sines[i / 4];
      const float cosine[4] = {cos4.x, cos4.y, cos4.z, cos4.w}, sine[4] = {sin4.x, sin4.y, sin4.z, sin4.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i + j] = x[i + j] * cosine[j] + (lower ? -other[i + j] : other[i + j]) * sine[j];
    }
  }
};
// Clear the tags of a lane's two quads of words.
DEVICE void strip_tag(const uint4& first, const uint4& next, float (&x)[8]) {
  const float4 a = strip_tag(first), b = strip_tag(next);
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
// Load a lane's channels of up to COUNT consecutive heads from flag-in-data words; heads from `limit` on are left out.
template <int COUNT>
DEVICE void load_heads(Consumer& c, const float* from, int limit, float (&x)[COUNT][8]) {
  uint4 v[2 * COUNT];
  const float* mine = from + word_offset(c);
  spin_load(c, v, c.epoch(), [&](int i) { return i / 2 < limit; }, [&](int i) { return mine + i / 2 * HEAD_DIM + i % 2 * NEXT_QUAD; });
#pragma unroll
  for (int i = 0; i < COUNT; ++i) strip_tag(v[2 * i], v[2 * i + 1], x[i]);
}
// Write a lane's channels of the newest position to the key or value cache.
DEVICE void store_cache(const Consumer& c, u16* rows, int head, const uint4& row) {
  *(uint4*)(rows + c.cache_offset(head) + (long long)c.position * HEAD_DIM + channel_of(c)) = row;
}
constexpr float QUERY_SCALE = LOG2E;  // times 1 / sqrt(HEAD_DIM): exponentials are powers of two

// A further split is used only from POSITIONS_PER_SPLIT more positions on. Its size may then be rounded up, and no split is left empty.
static_assert(SPLIT_K_O || POSITIONS_PER_SPLIT >= KV_SPLITS, "each KV split has positions");
// With merged units (Span): the number of KV splits, and the queries of a unit. A slot of PARTIAL has room for as many.
constexpr int MAX_KV_SPLITS = KV_SPLITS * QUERY_MERGE, PARTIAL_QUERIES = UNIT_QUERIES * QUERY_MERGE;

// Work of a unit of attention at a position: UNIT_QUERIES queries of a KV head over a range of positions (a KV split, as in
// flash-decoding). With SPLIT_K_O there are three regimes. In a short context each unit takes all positions, so that its CTA can
// multiply the result at once. In a longer one KV_SPLITS units share the positions. From MERGE_FROM on QUERY_MERGE neighbouring units
// also take each other's queries, each over 1 / QUERY_MERGE of the positions: each key is then read once. Without ROPE_PHASE the newest
// position is not in the cache yet; of the units that have it, one stores its key and value.
struct Span {
  int head, query;  // KV head; first query, counted within the KV head
  int begin, end;   // first position and one past the last
  int cached;       // one past the last position of the range that is in the cache
  bool active;      // false if the unit has no positions: its split is not used in this context
  bool stores;      // this unit stores the newest key and value, if it has the newest position
  DEVICE Span(int unit, int position) : head(unit / (QUERY_SPLITS * KV_SPLITS)), query(unit / KV_SPLITS % QUERY_SPLITS * UNIT_QUERIES) {
    const int positions = position + 1, parts = kv_splits_at(position);
    int size = (positions + parts - 1) / parts, part = unit % KV_SPLITS;
    stores = query == 0;
    if constexpr (SPLIT_K_O) {  // One of three constant divisors: no integer division.
      if (parts == 1) {
        size = positions, stores = query == 0 && part == 0, part = 0;
      } else if (QUERY_MERGE == 1 || parts == KV_SPLITS) {
        size = (positions + KV_SPLITS - 1) / KV_SPLITS;
      } else {
        size = (positions + MAX_KV_SPLITS - 1) / MAX_KV_SPLITS, stores = query < PARTIAL_QUERIES, part = unit % MAX_KV_SPLITS;
        query -= query % PARTIAL_QUERIES;
      }
    }
    begin = part * size, end = begin + size < positions ? begin + size : positions;
    cached = !ROPE_PHASE && end == positions ? end - 1 : end;
    active = part < parts && begin < positions;
  }
};
// Queries of a unit in registers: a lane's 8 channels of each, rotated; `scales` are applied to the scores. Also the newest position's
// key and value in bfloat16, as they are cached, in the warp that has this position.
template <int COUNT>
struct Heads {
  float queries[COUNT][8], scales[COUNT];
  uint4 key, value;

  // Load queries (and key and value if `newest`) that the QKV product rotated, and with QK_NORM divide by the RMS of each head: the key
  // at once, the queries by means of `scales`. The lanes of a head add up the squares. Stores key and value to the cache if
  // `span.stores`. All lanes of the warp must call this; no barrier is needed. One spin loads everything: two quads of words for each
  // query, key and value (QUADS), then with QK_NORM one quad of squares for each query and the key.
  DEVICE void load_rotated(Consumer& c, const Span& span, bool newest) {
    constexpr int QUADS = 2 * (COUNT + 2);
    const float* words = c.a.words + QKV_OUT + span.head * HEAD_WORDS + word_offset(c);
    const float* squares = c.a.words + HEAD_SQUARES + span.head * (HEAD_WORDS / 2) + channel_of(c) / 2;
    uint4 v[QUADS + (QK_NORM ? COUNT + 1 : 0)];
    auto which = [](int i) { return i < QUADS ? i / 2 : i - QUADS; };
    // Index of quad i's head within the KV head: GROUP queries, key, value.
    auto head_at = [&](int i) { return which(i) < COUNT ? span.query + which(i) : which(i) - COUNT + GROUP; };
    spin_load(c, v, c.epoch(), [&](int i) { return newest || which(i) < COUNT; },
              [&](int i) { return i < QUADS ? words + head_at(i) * HEAD_DIM + i % 2 * NEXT_QUAD : squares + head_at(i) * (HEAD_DIM / 2); });
    c.mark(ATTENTION, READY);
    float norms[COUNT + 1];
#pragma unroll
    for (int i = 0; i <= COUNT; ++i) {
      if constexpr (QK_NORM) {
        const float4 s = strip_tag(v[QUADS + i]);
        norms[i] = s.x + s.y + (s.z + s.w);
      } else {
        norms[i] = 1.0f;
      }
    }
    if constexpr (QK_NORM) {
#pragma unroll
      for (int mask = LANES / 2; mask; mask /= 2)  // The shuffles of all heads overlap.
#pragma unroll
        for (int i = 0; i <= COUNT; ++i) norms[i] += shfl_xor(norms[i], mask);
#pragma unroll
      for (int i = 0; i <= COUNT; ++i) norms[i] = rsqrt_approx(norms[i] / HEAD_DIM + EPS);
    }
#pragma unroll
    for (int g = 0; g < COUNT; ++g) {
      strip_tag(v[2 * g], v[2 * g + 1], queries[g]);
      scales[g] = QUERY_SCALE * rsqrt_approx(HEAD_DIM) * norms[g];
    }
    key = value = {0, 0, 0, 0};
    if (!newest) return;
    float x[8];
    strip_tag(v[2 * COUNT], v[2 * COUNT + 1], x);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= norms[COUNT];
    key = pack_bf16x8(x);
    strip_tag(v[2 * COUNT + 2], v[2 * COUNT + 3], x);
    value = pack_bf16x8(x);
    if (!span.stores || c.lane >= LANES) return;  // All groups of LANES lanes have the same key and value.
    store_cache(c, c.a.keys, span.head, key);
    store_cache(c, c.a.values, span.head, value);
  }
  // Load queries that norm_rope() normalized, rotated and scaled; it has written key and value to the cache too.
  DEVICE void load_scaled(Consumer& c, const Span& span) {
    load_heads(c, c.a.words + QUERIES + (span.head * GROUP + span.query) * HEAD_DIM, COUNT, queries);
    c.mark(ATTENTION, READY);
#pragma unroll
    for (int g = 0; g < COUNT; ++g) scales[g] = 1.0f;
    key = value = {0, 0, 0, 0};
  }
  // Return the score of query g and a key, of which the lane has its 8 channels; all lanes of the position get it. All lanes of the warp
  // must call this.
  DEVICE float score(int g, const float (&key)[8]) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += queries[g][i] * key[i];
    return head_sum(sum) * scales[g];
  }
};

// Phase ROPE, in plans with ROPE_PHASE: normalize (with QK_NORM) and rotate the heads of the CTA, one warp per query head, key or value.
// Queries go to the buffer QUERIES, scaled; the newest key and value to the cache, in bfloat16. The generated order.cuh calls it, after
// a grid barrier or semaphore.
DEVICE void norm_rope(Consumer& c) {
  c.refresh();
  for (int unit = c.begin(ROPE) * (GROUP + 2) + c.warp; unit < c.end(ROPE) * (GROUP + 2); unit += WARPS) {
    const int head = unit / (GROUP + 2), which = unit % (GROUP + 2);
    const NormRope rope(c);
    float x[1][8];
    load_heads(c, c.a.words + QKV_OUT + unit * HEAD_DIM, 1, x);
    c.mark(ROPE, READY);
    const float scale = which == GROUP ? 1.0f : QUERY_SCALE * rsqrt_approx(HEAD_DIM);
    if (which <= GROUP) rope.apply(c, x[0], which == GROUP ? rope.key_weights : rope.query_weights, scale);
    if (which >= GROUP) {
      if (c.lane < LANES) store_cache(c, which == GROUP ? c.a.keys : c.a.values, head, pack_bf16x8(x[0]));
    } else if (c.lane < LANES) {
      float* at = c.a.words + QUERIES + (head * GROUP + which) * HEAD_DIM + word_offset(c);
      store_words(at, float4{x[0][0], x[0][1], x[0][2], x[0][3]}, c.epoch());
      store_words(at + NEXT_QUAD, float4{x[0][4], x[0][5], x[0][6], x[0][7]}, c.epoch());
    }
  }
  c.mark(ROPE, DONE);
}
