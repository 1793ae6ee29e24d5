// Phases of a token, and the edges before them.
#pragma once

// Over the grid. What was written before by any CTA is seen after it by all.
DEVICE void meet_grid(Worker& w) {
  w.meet();
  if (w.thread == 0) {
    u32* counter = w.a.counters;
    bump(counter);
    const u32 target = ++*w.s.met * CTAS;  // counted on over launches, and around
    await(w.a, w.s, [&] { return (int)(load_acquire(counter) - target) >= 0; });
  }
  w.meet();
}
// By key heads: counters stand 128 bytes apart, behind the grid's.
DEVICE u32* counter_of(Worker& w, int counter) { return w.a.counters + 32 * (1 + counter); }
DEVICE void arrive_heads(Worker& w, int base, int first, int last) {
  w.meet();
  for (int head = first + w.thread; head < last; head += WORKERS_THREADS) bump(counter_of(w, base + head));
}
DEVICE void await_heads(Worker& w, int base, int first, int last) {
  for (int head = first + w.thread; head < last; head += WORKERS_THREADS) {
    const u32* counter = counter_of(w, base + head);
    const u32 target = w.use() * (u32)w.a.arrivals[base + head];
    await(w.a, w.s, [&] { return (int)(load_acquire(counter) - target) >= 0; });
  }
  w.meet();
}
// Lets the copying thread go on to a phase's weights, where it does not anyway.
DEVICE void open_ring(Worker& w, int phase, int columns) {
  if constexpr (!STREAMS && !SEPARATE) {
    const int granules = layer_granules(w.share) * LAYERS + phase_granules(w.share, LM_HEAD, HIDDEN);
    w.passed += phase_granules(w.share, phase, columns);
    if (w.thread == 0) *w.s.allowed = *w.s.made * ((granules + 3) / 4) + (w.passed + 3) / 4;
  }
}

DEVICE const u16* first_row(const Worker& w) { return w.layer == 0 ? w.embedded() : nullptr; }

DEVICE void input_norm(Worker& w) { share_normed(w, w.a.words + RESIDUAL, first_row(w), w.layer_norms()); }
DEVICE void post_norm(Worker& w) { share_normed(w, w.a.words + MID, nullptr, w.layer_norms() + HIDDEN); }

// What turns a channel of a query or a key with its other, half a head away, which is in the same tile: the rotation, the norm's factors
// of both. It is linear, so that one over the norm can come later. Values stay as they are.
struct RowTurn {
  float cosine = 1, sine = 0, sign;
  u32 factor = 0x3F80, others = 0;  // bfloat16
  DEVICE RowTurn(const Worker& w, u32 row) : sign(upper(row) ? 1.0f : -1.0f) {
    const u32 which = row / HEAD % (GROUP + 2), pair = row % HEAD / TILE * (TILE / 2) + row % (TILE / 2);
    if (which > GROUP) return;
    const u16* lower = w.layer_norms() + 2 * HIDDEN + (which == GROUP ? HEAD : 0) + pair;
    const int half = upper(row) ? HEAD / 2 : 0;
    factor = lower[half], others = lower[HEAD / 2 - half];
    cosine = w.rotation()[pair], sine = w.rotation()[HEAD / 2 + pair];
  }
  DEVICE static bool upper(u32 row) { return row & TILE / 2; }
  DEVICE float apply(float own, float other) const {
    return own * (as_float(factor << 16) * cosine) + other * (as_float(others << 16) * (sign * sine));
  }
};
DEVICE void multiply_qkv(Worker& w) {
  w.refresh();
  if (w.begin(QKV) == w.end(QKV)) return;
  open_ring(w, QKV, HIDDEN);
  auto vector = [&] {
    if constexpr (NORM_APART)
      gather<HIDDEN>(w, w.a.words + NORMED, 0);
    else
      gather_normed(w, w.a.words + RESIDUAL, first_row(w), w.layer_norms(), w.use() - 1);
  };
  const RowTurn first(w, w.begin(QKV) * TILE + w.thread);  // of the first group; on its way before the vector is waited for
  product_of<HIDDEN, MOST_QKV, LEAST_QKV, GROUPS_QKV>(w, QKV, vector, [&](u32 row, int mine, float own, float other) {
    if constexpr (ROPE_APART) {
      put(w.a.words + RAW + row, own, w.use());
      return;
    }
    const RowTurn turn = mine == w.thread ? first : RowTurn(w, row);
    put(w.a.words + RAW + row, turn.apply(own, other), w.use());
    if (!RowTurn::upper(row))  // of values too: each word is written in every use
      put(w.a.words + HEAD_SQUARES + (row & ~(TILE - 1)) / 2 + row % (TILE / 2), own * own + other * other, w.use());
  });
}

// A row of the residual stream, kept by its CTA, or by all launches in memory.
DEVICE float& own_row(Worker& w, int row, int mine, bool first) {
  if constexpr (SEPARATE) {
    float& kept = w.a.words[KEPT + row];
    if (first) kept = as_float((u32)w.embedded()[row] << 16);
    return kept;
  }
  return w.s.own[mine];
}
DEVICE void multiply_o(Worker& w) {
  w.refresh();
  if (w.begin(O) == w.end(O)) return;
  open_ring(w, O, QUERY);
  product_of<QUERY, MOST_O, LEAST_O, GROUPS_O>(w, O, [&] { gather_found(w); }, [&](int row, int mine, float sum, float) {
    float& own = own_row(w, row, mine, w.layer == 0);
    put(w.a.words + MID + row, own += sum, w.use());
  });
}

// A tile has 4 channels: their rows of the gate, then of the up projection.
DEVICE void multiply_gate_up(Worker& w) {
  w.refresh();
  if (w.begin(GATE_UP) == w.end(GATE_UP)) return;
  open_ring(w, GATE_UP, HIDDEN);
  auto vector = [&] {
    if constexpr (NORM_APART)
      gather<HIDDEN>(w, w.a.words + NORMED, 0);
    else if constexpr (SUMMED)
      gather_residual(w, w.layer_norms() + HIDDEN);
    else
      gather_normed(w, w.a.words + MID, nullptr, w.layer_norms() + HIDDEN, w.use());
  };
  product_of<HIDDEN, MOST_GATE_UP, LEAST_GATE_UP, GROUPS_GATE_UP>(w, GATE_UP, vector, [&](u32 row, int, float gate, float up) {
    if (row % TILE >= TILE / 2) return;
    put(w.a.words + ACT + row / TILE * (TILE / 2) + row % TILE, up * gate * inverse(1.0f + power(-LOG2E * gate)), w.use());
  });
}

DEVICE void multiply_down(Worker& w) {
  w.refresh();
  if (w.begin(DOWN) == w.end(DOWN)) return;
  open_ring(w, DOWN, INNER);
  const bool last = w.layer + 1 == LAYERS;  // read by the head, also in CTAs that have no part in layers
  float* to = w.a.words + (last ? FINAL : RESIDUAL);
  auto vector = [&] { gather<INNER>(w, w.a.words + ACT, w.use()); };
  product_of<INNER, MOST_DOWN, LEAST_DOWN, GROUPS_DOWN>(w, DOWN, vector, [&](int row, int mine, float sum, float) {
    float& own = own_row(w, row, mine, false);
    put(to + row, own += sum, last ? w.token : w.use());
  });
}

// The largest logit wins, the first of equals: numbers in an order of integers, then the token's turned around, then a tag.
DEVICE u64 candidate(float logit, int token) {
  const u32 bits = as_bits(logit), ordered = bits >> 31 ? ~bits : bits | 1u << 31;
  return (u64)ordered << 32 | (u64)(0xFFFFFF - token) << 8;
}
DEVICE float logit_of(u64 candidate) {
  const u32 ordered = (u32)(candidate >> 32);
  return as_float(ordered >> 31 ? ordered ^ 1u << 31 : ~ordered);
}
DEVICE u64 better(u64 a, u64 b) { return a > b ? a : b; }
// Of all working threads, in each.
DEVICE u64 best_of_all(Worker& w, u64 mine) {
  w.meet();  // the ones before have been read
  for (int mask = 16; mask; mask /= 2) mine = better(mine, from_lane_xor(mine, mask));
  if (w.lane == 0) w.s.winners[w.warp] = mine;
  w.meet();
  for (int warp = 0; warp < WARPS; ++warp) mine = better(mine, w.s.winners[warp]);
  return mine;
}
DEVICE u64* best_at(Worker& w) { return w.a.best + (w.token & 1) * CTAS; }

#include "sampling.cuh"

DEVICE void multiply_head(Worker& w) {
  w.refresh();
  open_ring(w, LM_HEAD, HIDDEN);
  auto vector = [&] {
    gather_normed(w, w.a.words + FINAL, nullptr, w.a.norms + (long long)LAYERS * (2 * HIDDEN + 2 * HEAD), w.token);
  };
  u64 mine = 0;
  product_of<HIDDEN, MOST_LM_HEAD, LEAST_LM_HEAD, GROUPS_LM_HEAD>(w, LM_HEAD, vector, [&](int row, int, float sum, float) {
    if (row >= VOCAB) return;
    const float logit = *w.s.gone ? as_float(0x7FC00000) : sum;  // not a number, if something was not waited for
    w.a.logits[row] = logit;
    mine = better(mine, candidate(penalised(w, logit, row), row));
  });
  mine = best_of_all(w, mine);
  if (w.thread == 0) store_release(best_at(w) + cta_index(), mine | (w.token & 0xFF));  // and what went to the cache, once a token
}

DEVICE void next_token(Worker& w) {
  w.refresh();
  u64 mine = 0;
  for (int cta = w.thread; cta < CTAS; cta += WORKERS_THREADS) {
    u64 found;
    await(w.a, w.s, [&] { return found = load_acquire(best_at(w) + cta), !TAGGED || (u32)((found ^ w.token) & 0xFF) == 0; });
    mine = better(mine, found);
  }
  mine = best_of_all(w, mine);
  if (draws(w)) mine = draw(w, mine, w.position + 1);
  if (w.thread == 0) {
    const int token = 0xFFFFFF - (int)(mine >> 8 & 0xFFFFFF);
    *w.s.token = token < VOCAB ? token : VOCAB - 1;  // after an error: a place that exists
    remember(w, *w.s.token);
    if (cta_index() == 0) w.a.tokens[w.position + 1] = *w.s.token;
  }
  w.meet();
  w.mark(SHARES, READY), w.mark(SHARES, DONE);
}

#include "order.cuh"
