// A token drawn from logits that stay with the CTAs that made them: penalty, temperature, top-k, top-p and min-p as sampling.py has them.
//
// Keys       how far a logit lies below the largest, over the temperature, as an integer, and the token among equals: smaller is likelier.
//            Tokens stay whose keys are at most a limit.
// Limits     top-k and top-p look for theirs by ten bits of the key at a time. Each CTA adds up its tokens by that digit: one for each, or its
//            probability in fixed point, so that no order of additions matters. All CTAs add to one set of bins, meet, and each sees in which
//            bin the limit lies. They end when all that this bin has stays: mostly after two or three rounds of six.
// Draw       the largest of what stays plus noise, a function of seed, position and token. Each CTA says its own, all meet, all take the best.
// Memory     tallies: bins for each round of a token, zero before it, and again once every CTA has taken the token.
// Barriers   one for each round and one for the draw. None for a token that is not drawn; a penalty alone needs nothing but its flags.
#pragma once

enum { TEMPERATURE, TOP_K, TOP_P, FARTHEST, PENALTY, SEED_LOW, SEED_HIGH };  // words of choices
constexpr int DIGIT = 10, BINS_A_THREAD = BINS / WORKERS_THREADS;
constexpr int FIRST_DIGIT = 50, LAST_OF_VALUE = 30;  // where they lie: three of the value, three of the token
static_assert(ROUNDS == 3 + 6 && BINS == 1 << DIGIT, "top-k keeps all equals, top-p does not");
// Of values: nearer ones count as the largest, farther ones as equally far, for noise lies between -2.9 and 22.9: they are never drawn.
constexpr u32 NEAREST = 0x32000000, FARTHEST_OF_ALL = 0x41FFFFFF;  // 2^-27, just below 32

DEVICE float choice(const Worker& w, int which) { return as_float(w.a.choices[which]); }
DEVICE bool draws(const Worker& w) { return !SEPARATE && w.a.choices && choice(w, TEMPERATURE) > 0; }
DEVICE float penalised(const Worker& w, float logit, int row) {
  if (!w.a.seen || !w.a.seen[row]) return logit;
  const float penalty = choice(w, PENALTY);
  return logit < 0 ? logit * penalty : logit / penalty;
}
// By the CTA that has the token's row: nobody else asks.
DEVICE void remember(const Worker& w, int token) {
  if (w.a.seen && token >= w.begin(LM_HEAD) * TILE && token < w.end(LM_HEAD) * TILE) w.a.seen[token] = 1;
}

struct Draw {
  float largest, temperature;
  u64 limit = ~0ull;
  int rounds = 0;
};
DEVICE u64 key_of(float apart, u32 token) {
  const u32 bits = as_bits(fminf(apart, as_float(FARTHEST_OF_ALL)));
  return (u64)(bits > NEAREST ? bits - NEAREST : 0) << 32 | token;
}
DEVICE float apart_of(u64 key) { return as_float((u32)(key >> 32) + NEAREST); }
// A probability over that of the likeliest; all together are less than 2^62.
DEVICE u64 portion(float apart) { return (u64)(expf(-apart) * 0x1p38f); }

// apply(token, how far its logit lies below the largest) over the CTA's own.
template <class Apply>
DEVICE void for_logits(Worker& w, const Draw& d, Apply apply) {
  const int end = w.end(LM_HEAD) * TILE;
  for (int row = w.begin(LM_HEAD) * TILE + w.thread; row < end && row < VOCAB; row += WORKERS_THREADS)
    apply(row, (d.largest - penalised(w, w.a.logits[row], row)) / d.temperature);
}

// Adds the CTA's tokens to a set of bins: those within the limit whose keys begin with a prefix, by the digit behind it.
DEVICE void tally(Worker& w, const Draw& d, u64* set, bool portions, u64 prefix, int at) {
  u32 *low = w.s.bins, *high = low + BINS;
  for (int bin = w.thread; bin < BINS; bin += WORKERS_THREADS) low[bin] = high[bin] = 0;
  w.meet();
  for_logits(w, d, [&](int token, float apart) {
    const u64 key = key_of(apart, token);
    if (key > d.limit || key >> at >> DIGIT != prefix) return;
    const u64 v = portions ? portion(apart) : 1;
    const int bin = (int)(key >> at) & (BINS - 1);
    const u32 before = add_shared(low + bin, (u32)v), more = (u32)(v >> 32) + (before + (u32)v < before);  // shared memory adds 32 bits
    if (more) add_shared(high + bin, more);
  });
  w.meet();
  for (int bin = w.thread; bin < BINS; bin += WORKERS_THREADS)
    if (low[bin] | high[bin]) add_relaxed(set + bin, (u64)high[bin] << 32 | low[bin]);
}

// The bin in which the sum of all before it and its own reaches the target, or a share of the sum of all, which then is the target.
struct Place {
  u64 bin, before, inside;
};
DEVICE Place find(Worker& w, const u64* set, u64& target, bool is_share) {
  u64 v[BINS_A_THREAD], sum = 0, before = 0;
#pragma unroll
  for (int i = 0; i < BINS_A_THREAD; i += 2) {
    const uint4 two = load_relaxed((const uint4*)(set + w.thread * BINS_A_THREAD + i));
    v[i] = (u64)two.y << 32 | two.x, v[i + 1] = (u64)two.w << 32 | two.z;
    sum += v[i] + v[i + 1];
  }
  for (int mask = 1; mask < 32; mask *= 2) {
    const u64 others = from_lane_xor(sum, mask);
    if (w.lane & mask) before += others;
    sum += others;
  }
  if (w.lane == 0) w.s.winners[w.warp] = sum;
  w.meet();
  sum = 0;
  for (int warp = 0; warp < WARPS; ++warp) {
    if (warp < w.warp) before += w.s.winners[warp];
    sum += w.s.winners[warp];
  }
  if (is_share) {
    target = (u64)((double)choice(w, TOP_P) * (double)sum);
    if (target == 0) target = 1;  // the likeliest stays
  }
  u64* found = (u64*)w.s.squares;
#pragma unroll
  for (int i = 0; i < BINS_A_THREAD; ++i) {
    if (before < target && target <= before + v[i]) found[0] = w.thread * BINS_A_THREAD + i, found[1] = before, found[2] = v[i];
    before += v[i];
  }
  w.meet();
  return {found[0], found[1], found[2]};
}

// Lowers the limit: to the key at which so many tokens are reached, and its equals; or at which top-p's share of all portions is.
DEVICE void narrow(Worker& w, Draw& d, bool portions, u64 target) {
  u64 prefix = 0;
  for (int at = FIRST_DIGIT;; at -= DIGIT) {
    u64* set = w.a.tallies + d.rounds++ * BINS;
    tally(w, d, set, portions, prefix, at);
    meet_grid(w);
    const Place place = find(w, set, target, portions && at == FIRST_DIGIT);
    target -= place.before;
    prefix = prefix << DIGIT | place.bin;
    const u64 last = ((prefix + 1) << at) - 1, spare = place.inside - target;
    // Whether all of the bin stays. No portion in it is smaller than that of its last key.
    const bool all = portions ? spare < portion(apart_of(last)) : spare == 0 || at == LAST_OF_VALUE;
    if (all || at == 0) {
      if (last < d.limit) d.limit = last;
      return;
    }
  }
}

DEVICE u32 mix(u32 v) {
  v = (v ^ v >> 16) * 0x7FEB352D;
  v = (v ^ v >> 15) * 0x846CA68B;
  return v ^ v >> 16;
}
// Gumbel's noise: sampling.gumbel.
DEVICE float noise(u32 a, u32 b, u32 token) {
  const float v = ((float)mix(mix(token + a) ^ b) + 0.5f) * 0x1p-32f;
  return -logf(-log1pf(-fminf(v, 1.0f - 0x1p-24f)));
}

DEVICE u64* drawn(Worker& w) { return w.a.best + 2 * CTAS; }

// A candidate for the token at a position, in all threads; the likeliest is known.
DEVICE u64 draw(Worker& w, u64 likeliest, u32 position) {
  Draw d = {logit_of(likeliest), choice(w, TEMPERATURE)};
#pragma unroll 1
  for (int portions = 0; portions < 2; ++portions)
    if (portions ? choice(w, TOP_P) < 1 : w.a.choices[TOP_K] > 0) narrow(w, d, portions, w.a.choices[TOP_K]);
  const u64 farthest = key_of(choice(w, FARTHEST), ~0u);
  if (farthest < d.limit) d.limit = farthest;
  const u32 first = mix(mix(w.a.choices[SEED_LOW]) ^ w.a.choices[SEED_HIGH]), second = mix(first + 0x9E3779B9);
  const u32 a = mix(position ^ first), b = mix(position + second);
  u64 mine = 0;
  for_logits(w, d, [&](int token, float apart) {
    if (key_of(apart, token) <= d.limit) mine = better(mine, candidate(noise(a, b, token) - apart, token));
  });
  mine = best_of_all(w, mine);
  if (w.thread == 0) drawn(w)[cta_index()] = mine;
  meet_grid(w);
  mine = 0;
  for (int cta = w.thread; cta < CTAS; cta += WORKERS_THREADS) mine = better(mine, load_relaxed(drawn(w) + cta));
  for (int round = cta_index(); round < d.rounds; round += CTAS)  // all have read them
    for (int bin = 2 * w.thread; bin < BINS; bin += 2 * WORKERS_THREADS)
      store_relaxed((uint4*)(w.a.tallies + round * BINS + bin), {0, 0, 0, 0});
  return best_of_all(w, mine);
}
