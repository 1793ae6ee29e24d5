// Sampling of the next token across all CTAs: repetition penalty, temperature, top-k, top-p and min-p, with the rules of model/sampling.py.
//
// Computes   argmax over the kept tokens of -distance + Gumbel noise, with distance = (largest logit - logit) / temperature. The noise is a
//            function of seed, position and token. Logits stay in the CTAs that computed them.
// Callers    phases.cuh: next_token() calls samples(), sample_token() and mark_seen(), and the LM head calls penalised().
// Keys       60 bits: the distance as an integer (28 bits of its float32 pattern), then the token: smaller is likelier. The kept tokens are
//            those whose key is at most a limit; min-p is such a limit at once.
// Select     top-k and top-p find their limit by radix select, ten bits of the key per pass: each CTA adds its tokens to a histogram of
//            1024 bins, by count or by probability in fixed point (so no order of additions matters); after a grid barrier each CTA reads
//            it and finds the bin in which the limit lies. A search ends when the whole bin is kept: mostly after two or three passes; at
//            most three for top-k, which keeps all tokens of equal logits, and six for top-p, which does not.
// On chip    a histogram in shared memory, 8 KB over the operand, which is not in use then.
// Memory     one histogram of 64-bit sums per pass; read by all CTAs. They are zero before a token, and each is cleared by one CTA
//            after the last barrier, when all have read it.
// Sync       a grid barrier per pass and one for the sampled candidates, also in plans that have no other grid barriers. A token that is
//            not sampled adds no barrier: a penalty alone only changes the candidates of the LM head, which have tags.
#pragma once

enum { TEMPERATURE, TOP_K, TOP_P, MIN_P_DISTANCE, PENALTY, SEED_LOW, SEED_HIGH };  // words of Arguments::choices
constexpr int DIGIT = 10, BINS_PER_THREAD = BINS / CONSUMER_THREADS;
constexpr int FIRST_DIGIT = 50, LAST_OF_VALUE = 30;  // lowest bit of the first digit, and of the last digit of the distance
static_assert(RADIX_PASSES == 3 + 6 && BINS == 1 << DIGIT, "3 passes of top-k, which keeps all equals; 6 of top-p, which does not");
// Bit patterns of the smallest distance that differs from zero in a key, and of the largest. The noise lies between -2.9 and 22.9, so
// tokens at the largest distance or farther are never taken.
constexpr u32 MIN_DISTANCE = 0x32000000, MAX_DISTANCE = 0x41FFFFFF;  // 2^-27, just below 32

DEVICE float choice(const Consumer& c, int which) { return uint_as_float(c.a.choices[which]); }
// Return whether the kernel samples. In plans with a launch per phase one CTA runs this phase alone, and could not pass a grid barrier:
// the engine then samples in PyTorch.
DEVICE bool samples(const Consumer& c) { return !LAUNCH_PER_PHASE && c.a.choices && choice(c, TEMPERATURE) > 0; }
DEVICE float penalised(const Consumer& c, float logit, int row) {
  if (!c.a.seen || !c.a.seen[row]) return logit;
  const float penalty = choice(c, PENALTY);
  return logit < 0 ? logit * penalty : logit / penalty;
}
// Mark a token as seen, for the penalty. Only the CTA that has the token's row of the LM head reads and writes its flag.
DEVICE void mark_seen(const Consumer& c, int token) {
  if (c.a.seen && token >= c.begin(LM_HEAD) * TILE && token < c.end(LM_HEAD) * TILE) c.a.seen[token] = 1;
}

// State of the selection: the largest logit, the temperature, the limit of the keys that are kept, and the number of passes so far, each
// of which used a histogram.
struct Selection {
  float largest, temperature;
  u64 limit = ~0ull;
  int passes = 0;
};
// Return the key of a token: distances below the smallest count as zero.
DEVICE u64 key_of(float distance, u32 token) {
  const u32 bits = float_as_uint(fminf(distance, uint_as_float(MAX_DISTANCE)));
  return (u64)(bits > MIN_DISTANCE ? bits - MIN_DISTANCE : 0) << 32 | token;
}
DEVICE float distance_of(u64 key) { return uint_as_float((u32)(key >> 32) + MIN_DISTANCE); }
// Return exp(-distance), the probability relative to the likeliest token's, in units of 2^-38. The sum over a vocabulary is less than
// 2^62.
DEVICE u64 fixed_probability(float distance) { return (u64)(expf(-distance) * 0x1p38f); }

// Call apply(token, distance) for the logits of this CTA.
template <class Apply>
DEVICE void for_logits(Consumer& c, const Selection& selection, Apply apply) {
  const int end = c.end(LM_HEAD) * TILE;
  for (int row = c.begin(LM_HEAD) * TILE + c.thread; row < end && row < VOCAB; row += CONSUMER_THREADS)
    apply(row, (selection.largest - penalised(c, c.a.logits[row], row)) / selection.temperature);
}

// Add the CTA's tokens to a histogram: those within the limit whose key begins with `prefix`, by the digit that begins at bit `at`.
// Shared memory adds 32 bits at once, so sums have two words there. Contains two barriers of the consumer threads.
DEVICE void add_histogram(Consumer& c, const Selection& selection, u64* histogram, bool by_probability, u64 prefix, int at) {
  u32 *low = c.s.histogram, *high = low + BINS;
  for (int bin = c.thread; bin < BINS; bin += CONSUMER_THREADS) low[bin] = high[bin] = 0;
  c.sync();
  for_logits(c, selection, [&](int token, float distance) {
    const u64 key = key_of(distance, token);
    if (key > selection.limit || key >> at >> DIGIT != prefix) return;
    const u64 v = by_probability ? fixed_probability(distance) : 1;
    const int bin = (int)(key >> at) & (BINS - 1);
    const u32 before = atomic_add_shared(low + bin, (u32)v), more = (u32)(v >> 32) + (before + (u32)v < before);
    if (more) atomic_add_shared(high + bin, more);
  });
  c.sync();
  for (int bin = c.thread; bin < BINS; bin += CONSUMER_THREADS)
    if (low[bin] | high[bin]) red_add_relaxed(histogram + bin, (u64)high[bin] << 32 | low[bin]);
}

// Bin of a histogram: its index, the sum over all bins before it, and its own sum.
struct Bin {
  u64 index, before, inside;
};
// Return the bin in which the running sum over the histogram reaches the target; with `is_fraction` the target is first set to top-p
// times the sum of all. A thread has BINS_PER_THREAD bins; sums before it come by shuffles in the warp and by shared memory.
DEVICE Bin find_bin(Consumer& c, const u64* histogram, u64& target, bool is_fraction) {
  u64 v[BINS_PER_THREAD], sum = 0, before = 0;
#pragma unroll
  for (int i = 0; i < BINS_PER_THREAD; i += 2) {
    const uint4 pair = load_relaxed((const uint4*)(histogram + c.thread * BINS_PER_THREAD + i));
    v[i] = (u64)pair.y << 32 | pair.x, v[i + 1] = (u64)pair.w << 32 | pair.z;
    sum += v[i] + v[i + 1];
  }
  for (int mask = 1; mask < 32; mask *= 2) {
    const u64 others = shfl_xor(sum, mask);
    if (c.lane & mask) before += others;
    sum += others;
  }
  if (c.lane == 0) c.s.candidates[c.warp] = sum;
  c.sync();
  sum = 0;
  for (int warp = 0; warp < WARPS; ++warp) {
    if (warp < c.warp) before += c.s.candidates[warp];
    sum += c.s.candidates[warp];
  }
  if (is_fraction) {
    target = (u64)((double)choice(c, TOP_P) * (double)sum);
    if (target == 0) target = 1;  // The likeliest token is always kept.
  }
  u64* result = (u64*)c.s.squares;  // 24 of its 32 bytes; one thread writes them
#pragma unroll
  for (int i = 0; i < BINS_PER_THREAD; ++i) {
    if (before < target && target <= before + v[i]) result[0] = c.thread * BINS_PER_THREAD + i, result[1] = before, result[2] = v[i];
    before += v[i];
  }
  c.sync();
  return {result[0], result[1], result[2]};
}

// Lower the limit: by count, to the key of the target-th token and its equals; or by probability, to the key at which the sum reaches
// top-p's part of the whole sum.
DEVICE void radix_select(Consumer& c, Selection& selection, bool by_probability, u64 target) {
  u64 prefix = 0;
  for (int at = FIRST_DIGIT;; at -= DIGIT) {
    u64* histogram = c.a.histograms + selection.passes++ * BINS;
    add_histogram(c, selection, histogram, by_probability, prefix, at);
    grid_barrier(c);
    const Bin bin = find_bin(c, histogram, target, by_probability && at == FIRST_DIGIT);
    target -= bin.before;
    prefix = prefix << DIGIT | bin.index;
    const u64 last = ((prefix + 1) << at) - 1, excess = bin.inside - target;
    // The whole bin is kept if its sum exceeds the target by nothing or, by probability, by less than the probability of its last key,
    // the smallest in the bin: then no token can be left out. Top-k also keeps all tokens of equal logits.
    const bool all = by_probability ? excess < fixed_probability(distance_of(last)) : excess == 0 || at == LAST_OF_VALUE;
    if (all || at == 0) {
      if (last < selection.limit) selection.limit = last;
      return;
    }
  }
}

// Permute 32-bit words so that no pattern is left, as sampling.py does. Constants: Wellons (2018).
DEVICE u32 mix(u32 v) {
  v = (v ^ v >> 16) * 0x7FEB352D;
  v = (v ^ v >> 15) * 0x846CA68B;
  return v ^ v >> 16;
}
// Return Gumbel noise of a token, bit for bit the integers of sampling.gumbel.
DEVICE float gumbel_noise(u32 a, u32 b, u32 token) {
  const float v = ((float)mix(mix(token + a) ^ b) + 0.5f) * 0x1p-32f;
  return -logf(-log1pf(-fminf(v, 1.0f - 0x1p-24f)));
}

DEVICE u64* sampled_candidates(Consumer& c) { return c.a.best + 2 * CTAS; }

// Return the candidate that is sampled for a position, in all threads. `likeliest` is the best candidate of all CTAs. Every CTA gets
// the same.
DEVICE u64 sample_token(Consumer& c, u64 likeliest, u32 position) {
  Selection selection = {logit_of(likeliest), choice(c, TEMPERATURE)};
#pragma unroll 1
  for (int by_probability = 0; by_probability < 2; ++by_probability)
    if (by_probability ? choice(c, TOP_P) < 1 : c.a.choices[TOP_K] > 0) radix_select(c, selection, by_probability, c.a.choices[TOP_K]);
  const u64 farthest = key_of(choice(c, MIN_P_DISTANCE), ~0u);
  if (farthest < selection.limit) selection.limit = farthest;
  const u32 first = mix(mix(c.a.choices[SEED_LOW]) ^ c.a.choices[SEED_HIGH]), second = mix(first + 0x9E3779B9);
  const u32 a = mix(position ^ first), b = mix(position + second);
  u64 mine = 0;
  for_logits(c, selection, [&](int token, float distance) {
    if (key_of(distance, token) <= selection.limit) mine = larger_of(mine, candidate(gumbel_noise(a, b, token) - distance, token));
  });
  mine = cta_max(c, mine);
  if (c.thread == 0) sampled_candidates(c)[cta_index()] = mine;
  grid_barrier(c);
  mine = 0;
  for (int cta = c.thread; cta < CTAS; cta += CONSUMER_THREADS) mine = larger_of(mine, load_relaxed(sampled_candidates(c) + cta));
  for (int pass = cta_index(); pass < selection.passes; pass += CTAS)  // All CTAs have read the histograms.
    for (int bin = 2 * c.thread; bin < BINS; bin += 2 * CONSUMER_THREADS)
      store_relaxed((uint4*)(c.a.histograms + pass * BINS + bin), {0, 0, 0, 0});
  return cta_max(c, mine);
}
