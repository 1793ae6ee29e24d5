// The recurrence of a CTA by sequences: every MEMBERS-th sequence of one head, all channels, one step (BY_SEQUENCE).
//
// Computes   what recurrence.cuh computes, for T = 1, and with it norm and gate, since a CTA has all values of a head.
// State      comes through the ring in contiguous chunks, is updated in registers and stored at once. A thread has 4 value channels, 16 bytes,
//            of several key channels. o is summed over the threads of a channel through shared memory, in a fixed order. With BULK_STORES a
//            warp has a contiguous part of a chunk, puts it back where it was and stores it from there (cp.async.bulk), which neither the
//            release before the grid barrier waits for nor loads queue behind. It gives the stage back once its next store is issued.
// Exchange   a CTA reads q, k, the low-rank factor, v and the gate of its own sequences alone, so it clears the words that it has read.
// Blocks     BLOCK_ROWS sequences at a time.
// Early      with EARLY a CTA has at most two sequences, the first of which has one of the first eight rows. Their gated o is published before
//            the second sequence is advanced, and the producer copies it, half of the operand, while states and o of the second ones arrive.
#pragma once

constexpr int STATE_FLOATS = KEYS * VALUES < CHUNK / 4 ? KEYS * VALUES : CHUNK / 4;  // of a chunk of states
constexpr int STATE_CHUNKS = KEYS * VALUES / STATE_FLOATS, PASSES = STATE_FLOATS / (4 * CONSUMER_THREADS);
constexpr int VALUE_UNITS = VALUES / 4, KEYS_AT_ONCE = CONSUMER_THREADS / VALUE_UNITS;
static_assert(PASSES * 4 * CONSUMER_THREADS * STATE_CHUNKS == KEYS * VALUES && KEYS_AT_ONCE * VALUE_UNITS == CONSUMER_THREADS, "all take part");

constexpr bool BULK_STORES = BULK && VALUE_UNITS <= 32;  // a lane has the same value channels in all passes
// Key channels from one pass of a thread to the next, and the 16-byte unit of a chunk that a thread has in a pass.
constexpr int PASS_KEYS = BULK_STORES ? 32 / VALUE_UNITS : KEYS_AT_ONCE;
DEVICE int unit_at(const Consumer& c, int pass) {
  return BULK_STORES ? (c.warp * PASSES + pass) * 32 + c.lane : pass * CONSUMER_THREADS + c.thread;
}
// Number of sequences of member `member` of a head.
DEVICE int sequences_of(const Arguments& a, int member) { return member < a.batch ? divided(a.batch - member, MEMBERS) : 0; }
DEVICE long long state_of(int head, int sequence) { return ((long long)sequence * HEADS + head) * KEYS * VALUES; }
// Sequence `i` of a CTA.
DEVICE int sequence_at(const Consumer& c, int i) { return c.member + i * MEMBERS; }

// Copy the exchanged words of `count` sequences from `first` on to shared memory, and clear them.
DEVICE void stage_sequences(Consumer& c, int first, int count) {
  constexpr int UNITS = EXCHANGED / 4, EACH = divided(BLOCK_ROWS * UNITS, CONSUMER_THREADS);
  uint4 v[EACH];
  c.refresh();
  auto has = [&](int i) { return c.thread + i * CONSUMER_THREADS < count * UNITS; };
  auto from = [&](int i) {
    const int at = c.thread + i * CONSUMER_THREADS;
    return (uint4*)(c.exchanged(sequence_at(c, first + at / UNITS)) + at % UNITS * 4);
  };
  auto load = [&](int i) { return load_relaxed((const uint4*)from(i)); };
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    v[i] = {0, 0, 0, 0};
    if (has(i)) v[i] = load(i);
  }
  if constexpr (TAGGED) await_words(v, has, load);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if (!has(i)) continue;
    if constexpr (TAGGED) store_relaxed(from(i), {0, 0, 0, 0});
    *(uint4*)(c.s.queries_keys + (c.thread + i * CONSUMER_THREADS) * 4) = v[i];
  }
  c.sync();
}
// Return the product of a row's low-rank factor and the weights of a key channel.
DEVICE float low_rank_product(const Consumer& c, const float* factor, int key) {
  const u16* weights = c.s.decay_weight + key * RANK;
  float sum = 0;
  if constexpr (RANK % 8 == 0) {
#pragma unroll 2
    for (int r = 0; r < RANK; r += 8) {
      const uint4 w = *(const uint4*)(weights + r);
      const float4 low = *(const float4*)(factor + r), high = *(const float4*)(factor + r + 4);
      sum += low.x * bf16_to_float(w.x) + low.y * high_bf16_to_float(w.x) + low.z * bf16_to_float(w.y) + low.w * high_bf16_to_float(w.y);
      sum += high.x * bf16_to_float(w.z) + high.y * high_bf16_to_float(w.z) + high.z * bf16_to_float(w.w) + high.w * high_bf16_to_float(w.w);
    }
  } else {
#pragma unroll 1
    for (int r = 0; r < RANK; ++r) sum += factor[r] * bf16_to_float(weights[r]);
  }
  return sum;
}
// Compute the decays, and put them with k and the scaled q of the same key channel.
DEVICE void make_factors(Consumer& c, int first, int count) {
  c.refresh();
  for (int at = c.thread; at < count * KEYS; at += CONSUMER_THREADS) {
    const int i = at / KEYS, key = at % KEYS;
    const float* row = c.s.queries_keys + i * EXCHANGED;
    float z;
    if constexpr (PER_HEAD) {
      z = bf16_to_float(c.a.decay_bias[c.head]) + c.s.y[R_AT * Y_PITCH + sequence_at(c, first + i)];
    } else {
      z = bf16_to_float(c.s.decay_bias[key]) + low_rank_product(c, row + 2 * KEYS, key);
    }
    *(float4*)(c.s.decays + at * 4) = {decay_of(c, z), row[KEYS + key], row[key] * QUERY_SCALE, 0.0f};
  }
  c.sync();
}
// The state of a CTA's last sequence, which is stored once the gated o of all CTAs has arrived, if registers can hold it: the release before
// the grid barrier and what is read behind it need not wait for these stores. Other states are stored at once.
constexpr bool HOLDS = !BULK_STORES && KEYS * VALUES <= 64 * CONSUMER_THREADS;
struct Held {
  float4 v[HOLDS ? STATE_CHUNKS : 1][PASSES];
};
DEVICE float* final_of(const Consumer& c, int i) {
  return c.a.final_state ? c.a.final_state + state_of(c.head, sequence_at(c, i)) : nullptr;
}
DEVICE void store_passes(const Consumer& c, float* to, const float4 (&state)[PASSES]) {
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) *(float4*)(to + unit_at(c, pass) * 4) = state[pass];
}
DEVICE void store_held(Consumer& c, int i, const Held& held) {
  c.refresh();
  float* to = final_of(c, i);
  if (!HOLDS || !to) return;
#pragma unroll
  for (int chunk = 0; chunk < STATE_CHUNKS; ++chunk) store_passes(c, to + chunk * STATE_FLOATS, held.v[chunk]);
}
// Stage of the ring that a warp's latest bulk store reads, -1 if there is none.
struct Lent {
  int stage = -1;
};
// Give a stage back to the producer, when all stores of this warp but the latest PENDING ones have read it.
template <int PENDING>
DEVICE void give_back(Consumer& c, Lent& lent) {
  if (lent.stage >= 0 && c.lane == 0) {
    tma_store_wait_group_read<PENDING>();
    mbarrier_arrive(c.s.empty + lent.stage);
  }
  lent.stage = -1;
}
// Put a warp's part of a chunk back into the ring, and store it to `to` from there. Give back the stage of the store before.
DEVICE void store_chunk(Consumer& c, char* at, float* to, const float4 (&state)[PASSES], Lent& lent) {
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) *(float4*)(at + unit_at(c, pass) * 16) = state[pass];
  fence_proxy_async_shared();
  syncwarp();
  if (c.lane == 0) {
    const int unit = unit_at(c, 0);
    cp_async_bulk_store(to + unit * 4, at + unit * 16, PASSES * 512);
    tma_store_commit_group();
  }
  const int stage = c.ring.stage;
  give_back<1>(c, lent);
  lent.stage = stage;
  c.ring.advance();
}
// Advance one chunk of a state, which is taken from the ring, in registers; store it to `to` if BULK_STORES, and if `to` is not null.
DEVICE void advance_chunk(Consumer& c, const float4* factors, const float4& v, float4& o, float4 (&state)[PASSES], float* to, Lent& lent) {
  const char* from = c.a.initial ? c.wait_chunk() : nullptr;
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    state[pass] = {0, 0, 0, 0};
    if (from) state[pass] = *(const float4*)(from + unit_at(c, pass) * 16);
  }
  if (from && !(BULK_STORES && to)) c.release_chunk();
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const float4 f = factors[pass * PASS_KEYS];
    float4& s = state[pass];
    s.x = s.x * f.x + f.y * v.x, s.y = s.y * f.x + f.y * v.y, s.z = s.z * f.x + f.y * v.z, s.w = s.w * f.x + f.y * v.w;
    o.x += f.z * s.x, o.y += f.z * s.y, o.z += f.z * s.z, o.w += f.z * s.w;
  }
  if (BULK_STORES && from && to) store_chunk(c, (char*)from, to, state, lent);
}
// Advance the state of the block's sequence `i` by its step; leave each thread's o in Shared::partial. The last sequence's state stays in
// `held`.
template <bool LAST>
DEVICE void advance_sequence(Consumer& c, int first, int i, Held& held, Lent& lent) {
  c.refresh();
  const float4 v = *(const float4*)(c.s.queries_keys + i * EXCHANGED + EXCHANGED_V + c.thread % VALUE_UNITS * 4);
  const float4* factors = (const float4*)(c.s.decays + i * KEYS * 4) + unit_at(c, 0) / VALUE_UNITS;
  float4 o = {0, 0, 0, 0};
  if constexpr (LAST && HOLDS) {
#pragma unroll
    for (int chunk = 0; chunk < STATE_CHUNKS; ++chunk) advance_chunk(c, factors + chunk * PASSES * KEYS_AT_ONCE, v, o, held.v[chunk], nullptr, lent);
  } else {
    float* to = final_of(c, first + i);
#pragma unroll 1
    for (int chunk = 0; chunk < STATE_CHUNKS; ++chunk) {
      float4 state[PASSES];
      float* const chunk_to = to ? to + chunk * STATE_FLOATS : nullptr;
      advance_chunk(c, factors + chunk * PASSES * KEYS_AT_ONCE, v, o, state, chunk_to, lent);
      if (to && !(BULK_STORES && c.a.initial)) store_passes(c, chunk_to, state);
    }
  }
  *(float4*)(c.s.partial + (i * CONSUMER_THREADS + c.thread) * 4) = o;
}
// Add the threads' o of the block's sequences from `begin` to `count`, a warp each; normalize and gate it, and publish it in bfloat16. A lane
// has pairs of neighbors.
DEVICE void publish_sequences(Consumer& c, int first, int begin, int count) {
  constexpr int PAIRS = divided(VALUES, 64);
  c.refresh();
  for (int i = begin + c.warp; i < count; i += WARPS) {
    const float* gates = c.s.queries_keys + i * EXCHANGED + EXCHANGED_G;
    float o[PAIRS][2], squares = 0;
#pragma unroll
    for (int j = 0; j < PAIRS; ++j)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int value = (j * 32 + c.lane) * 2 + k;
        o[j][k] = 0;
        if (VALUES % 64 && value >= VALUES) continue;
#pragma unroll
        for (int part = 0; part < KEYS_AT_ONCE; ++part) o[j][k] += c.s.partial[(i * KEYS_AT_ONCE + part) * VALUES + value];
        squares += o[j][k] * o[j][k];
      }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) squares += shfl_xor(squares, mask);
    const float scale = rsqrt_approx(squares * (1.0f / VALUES) + c.a.eps);
    u32* to = (u32*)c.a.gated + ((long long)sequence_at(c, first + i) * HEADS + c.head) * VALUES / 2;
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      const int value = (j * 32 + c.lane) * 2;
      if (VALUES % 64 && value >= VALUES) continue;
      float v[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) v[k] = o[j][k] * scale * norm_weight(c, value + k) * silu(gates[value + k]);
      to[value / 2] = floats_to_bf16x2(v[0], v[1]);
    }
  }
}
// Publish the gated o of this CTA's first sequence, of at most two, and arrive with it. Only the first warp waits for the release; the others go
// on with the second sequence, whose state is still arriving. A CTA with one sequence arrives when it arrives at the grid barrier.
DEVICE void arrive_with_first(const Consumer& c) {
  red_increment_release(c.counter(HEADS + 1));
  mbarrier_arrive(c.s.published);
}
DEVICE void publish_first(Consumer& c) {
  c.sync();
  publish_sequences(c, 0, 0, 1);
  if (c.warp > 0) return;
  if constexpr (PROXY_FENCES) fence_proxy_async_global();
  syncwarp();
  if (c.lane == 0) arrive_with_first(c);
}
// Run the recurrence of this CTA's sequences; return the last one, whose state `held` has, or -1 if there are fewer sequences than CTAs of a head
// and none is left for this one.
DEVICE int run_sequences(Consumer& c, Held& held, Lent& lent) {
  const int all = sequences_of(c.a, c.member);
#pragma unroll 1
  for (int first = 0; first < all; first += BLOCK_ROWS) {
    const int count = all - first < BLOCK_ROWS ? all - first : BLOCK_ROWS;
    stage_sequences(c, first, count);
    if (first == 0) c.mark(3);
    make_factors(c, first, count);
#pragma unroll 1
    for (int i = 0; i < count && first + i < all - 1; ++i) {
      advance_sequence<false>(c, first, i, held, lent);
      if constexpr (EARLY) publish_first(c);
    }
    if (first + count == all) advance_sequence<true>(c, first, count - 1, held, lent);
    c.sync();
    if (first + count == all) c.mark(4);
    publish_sequences(c, first, EARLY && all > 1 ? 1 : 0, count);
    if (first + count < all) c.sync();
  }
  return all - 1;
}
