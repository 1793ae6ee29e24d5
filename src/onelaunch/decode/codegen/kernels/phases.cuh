// Phases of a token, and the synchronization before them. The generated order.cuh, included at the end, calls them in the plan's order.
//
// Phases     QKV (RMSNorm, projections, RoPE), ATTENTION, O (output projection, residual), GATE_UP (RMSNorm, SwiGLU), DOWN (residual) in
//            each layer; then LM_HEAD and the next token. NORM and ROPE are phases of their own in the early optimization levels.
// Callers    the generated order.cuh; in plans with a launch per phase, step.cu calls the one phase of each launch. sampling.cuh, which is
//            included in the middle, uses grid_barrier(), candidate(), logit_of(), larger_of() and cta_max().
// Work       each CTA owns tiles of 8 rows of every matrix, and thread t finishes row t of a group of tiles (products.cuh).
// Sync       a plan has one of these before each phase (codegen/emit.py):
//            grid      grid_barrier(): all writes of all CTAs before it are visible to all after it.
//            flags     a semaphore per KV head (signal_heads, wait_heads): only the CTAs of a head wait for each other.
//            data      none here: the phase spins on the flag-in-data words that it reads (words.cuh).
//            With a launch per phase nothing is needed between phases.
// Residual   the CTA that owns a row of O owns the same row of DOWN, so the residual stream stays in its shared memory over all layers
//            (Shared::own_rows) and is only written for others to read. With a launch per phase it is kept in global memory
//            (own_row); with SPLIT_K_O see residual.cuh.
#pragma once

// Wait for all CTAs of the grid, which must all be resident (the host checks that). The release increment and the acquire poll, between
// two CTA barriers, make all earlier writes of every CTA visible to all. The counter is never reset: it counts on over launches and
// wraps around, so it is compared by the sign of the difference.
DEVICE void grid_barrier(Consumer& c) {
  c.sync();
  if (c.thread == 0) {
    u32* counter = c.a.counters;
    red_increment_release(counter);
    const u32 target = ++*c.s.grid_barriers * CTAS;
    spin_until(c.a, c.s, [&] { return (int)(load_acquire(counter) - target) >= 0; });
  }
  c.sync();
}
// Semaphores, one per KV head and phase that is waited for. They are 128 bytes apart, behind the grid barrier's counter, and count on
// over launches: the target is the epoch times the CTAs that signal (Arguments::arrivals).
DEVICE u32* semaphore(Consumer& c, int counter) { return c.a.counters + 32 * (1 + counter); }
DEVICE void signal_heads(Consumer& c, int base, int first, int last) {
  c.sync();
  for (int head = first + c.thread; head < last; head += CONSUMER_THREADS) red_increment_release(semaphore(c, base + head));
}
DEVICE void wait_heads(Consumer& c, int base, int first, int last) {
  for (int head = first + c.thread; head < last; head += CONSUMER_THREADS) {
    const u32* counter = semaphore(c, base + head);
    const u32 target = c.epoch() * (u32)c.a.arrivals[base + head];
    spin_until(c.a, c.s, [&] { return (int)(load_acquire(counter) - target) >= 0; });
  }
  c.sync();
}
// Permit the producer to copy a phase's weights, in plans without prefetch across phases (elsewhere it needs no permission).
DEVICE void allow_weights(Consumer& c, int phase, int columns) {
  if constexpr (!CROSS_PHASE_PREFETCH && !LAUNCH_PER_PHASE) {
    const int pieces = layer_pieces(c.assignments) * LAYERS + phase_pieces(c.assignments, LM_HEAD, HIDDEN);
    c.pieces_allowed += phase_pieces(c.assignments, phase, columns);
    if (c.thread == 0) *c.s.chunks_allowed = *c.s.tokens_done * chunks_of(pieces) + chunks_of(c.pieces_allowed);
  }
}

// The embedding row takes the place of the residual stream in the first layer.
DEVICE const u16* first_row(const Consumer& c) { return c.layer == 0 ? c.embedding_row() : nullptr; }

// Phases NORM: the functions have the names that plan/builder.py gives these phases, by which order.cuh calls them.
DEVICE void input_norm(Consumer& c) { norm_by_one_cta(c, c.a.words + RESIDUAL, first_row(c), c.parameters()); }
DEVICE void post_norm(Consumer& c) { norm_by_one_cta(c, c.a.words + MID, nullptr, c.parameters() + HIDDEN); }

// Bias, RoPE and norm weights of one row of the QKV product. The RoPE partner of a channel is half a head away. Rows are packed so that a
// tile has four channels of a head's first half and then their partners (packing.py, in_pairs): in the tile the partner is half a tile
// away. A KV head has GROUP query heads, then its key, then its value. Norm weights and rotation are linear, so the division by the RMS of
// the head can come later, in attention. Rows of values are not rotated. The table of biases has the order of the packed rows.
struct RowRope {
  float cosine = 1, sine = 0, sign;
  u32 weight = 0x3F80, partner_weight = QK_NORM ? 0 : 0x3F80;  // bfloat16: 1 and 0. Without norms, only the sine of a value's row is 0.
  u32 bias = 0, partner_bias = 0;                              // bfloat16, only with QKV_BIAS
  DEVICE RowRope(const Consumer& c, u32 row) : sign(upper(row) ? 1.0f : -1.0f) {
    const u32 head = row / HEAD_DIM % (GROUP + 2), pair = row % HEAD_DIM / TILE * (TILE / 2) + row % (TILE / 2);
    // A thread behind the rows of its CTA asks too, and its row may lie behind those of the matrix.
    if (QKV_BIAS && row < QUERY + 2 * KV_HEADS * HEAD_DIM) {
      const u16* biases = c.parameters() + QKV_BIAS_AT;
      bias = biases[row], partner_bias = biases[row ^ TILE / 2];
    }
    if (head > GROUP) return;  // a row of a value
    if constexpr (QK_NORM) {
      const u16* lower = c.parameters() + QK_NORMS_AT + (head == GROUP ? HEAD_DIM : 0) + pair;
      const int half = upper(row) ? HEAD_DIM / 2 : 0;
      weight = lower[half], partner_weight = lower[HEAD_DIM / 2 - half];
    }
    cosine = c.rotation()[pair], sine = c.rotation()[HEAD_DIM / 2 + pair];
  }
  DEVICE static bool upper(u32 row) { return row & TILE / 2; }
  // Add the biases of a row and of its partner to their products.
  DEVICE void add_biases(float& own, float& other) const {
    if constexpr (QKV_BIAS) own += uint_as_float(bias << 16), other += uint_as_float(partner_bias << 16);
  }
  DEVICE float apply(float own, float other) const {
    return own * (uint_as_float(weight << 16) * cosine) + other * (uint_as_float(partner_weight << 16) * (sign * sine));
  }
};
// Phase QKV: projections of queries, keys and values, with RoPE in the epilogue unless that is a phase of its own.
DEVICE void multiply_qkv(Consumer& c) {
  c.refresh();
  if (c.begin(QKV) == c.end(QKV)) return;
  allow_weights(c, QKV, HIDDEN);
  auto stage = [&] {
    if constexpr (NORM_PHASE)
      stage_vector<HIDDEN>(c, c.a.words + NORMED, 0);  // Any epoch will do: these plans have grid barriers and no tags.
    else  // The previous layer's DOWN wrote RESIDUAL, in its epoch.
      stage_normed(c, c.a.words + RESIDUAL, first_row(c), c.parameters(), c.epoch() - 1);
  };
  // This thread's row in the first group of tiles. Its weights are loaded before the wait for the operand.
  const RowRope first(c, c.begin(QKV) * TILE + c.thread);
  multiply_phase<HIDDEN, MAX_QKV, MIN_QKV, GROUPS_QKV>(c, QKV, stage, [&](u32 row, int mine, float own, float other) {
    if constexpr (ROPE_PHASE && !QKV_BIAS) {
      store_words(c.a.words + QKV_OUT + row, own, c.epoch());
      return;
    }
    const RowRope rope = mine == c.thread ? first : RowRope(c, row);
    rope.add_biases(own, other);
    store_words(c.a.words + QKV_OUT + row, ROPE_PHASE ? own : rope.apply(own, other), c.epoch());
    // Squares of a pair of channels. Those of values are not needed, but each word is written in every epoch.
    if (QK_NORM && !ROPE_PHASE && !RowRope::upper(row))
      store_words(c.a.words + HEAD_SQUARES + (row & ~(TILE - 1)) / 2 + row % (TILE / 2), own * own + other * other, c.epoch());
  });
}

// Return a row of the residual stream that this CTA owns: in shared memory or, if each phase is a launch, in global memory.
DEVICE float& own_row(Consumer& c, int row, int mine, bool first) {
  if constexpr (LAUNCH_PER_PHASE) {
    float& value = c.a.words[RESIDUAL_ROWS + row];
    if (first) value = uint_as_float((u32)c.embedding_row()[row] << 16);
    return value;
  }
  return c.s.own_rows[mine];
}
// Phase O: output projection of all heads, added to the residual stream.
DEVICE void multiply_o(Consumer& c) {
  c.refresh();
  if (c.begin(O) == c.end(O)) return;
  allow_weights(c, O, QUERY);
  multiply_phase<QUERY, MAX_O, MIN_O, GROUPS_O>(c, O, [&] { stage_attention(c); }, [&](int row, int mine, float sum, float) {
    float& own = own_row(c, row, mine, c.layer == 0);
    if constexpr (O_BIAS) sum += c.o_bias(row);
    store_words(c.a.words + MID + row, own += sum, c.epoch());
  });
}

// Phase GATE_UP: SwiGLU. A tile has the gate's rows of 4 channels, then the up projection's rows of the same channels.
DEVICE void multiply_gate_up(Consumer& c) {
  c.refresh();
  if (c.begin(GATE_UP) == c.end(GATE_UP)) return;
  allow_weights(c, GATE_UP, HIDDEN);
  auto stage = [&] {
    if constexpr (NORM_PHASE)
      stage_vector<HIDDEN>(c, c.a.words + NORMED, 0);
    else if constexpr (SPLIT_K_O)
      stage_residual(c, c.parameters() + HIDDEN);
    else
      stage_normed(c, c.a.words + MID, nullptr, c.parameters() + HIDDEN, c.epoch());
  };
  multiply_phase<HIDDEN, MAX_GATE_UP, MIN_GATE_UP, GROUPS_GATE_UP>(c, GATE_UP, stage, [&](u32 row, int, float gate, float up) {
    if (row % TILE >= TILE / 2) return;
    store_words(c.a.words + ACT + row / TILE * (TILE / 2) + row % TILE,
                up * gate * rcp_approx(1.0f + exp2_approx(-LOG2E * gate)), c.epoch());
  });
}

// Phase DOWN: down projection, added to the residual stream.
DEVICE void multiply_down(Consumer& c) {
  c.refresh();
  if (c.begin(DOWN) == c.end(DOWN)) return;
  allow_weights(c, DOWN, INNER);
  const bool last = c.layer + 1 == LAYERS;  // The last result has a buffer of its own, as CTAs without work in the layers read it too.
  float* to = c.a.words + (last ? FINAL : RESIDUAL);
  auto stage = [&] { stage_vector<INNER>(c, c.a.words + ACT, c.epoch()); };
  multiply_phase<INNER, MAX_DOWN, MIN_DOWN, GROUPS_DOWN>(c, DOWN, stage, [&](int row, int mine, float sum, float) {
    float& own = own_row(c, row, mine, false);
    store_words(to + row, own += sum, last ? c.token_epoch : c.epoch());
  });
}

// Encode a candidate for the next token so that the largest integer is the largest logit and, among equals, the smallest token. From the
// top: 32 bits of the logit, mapped so that unsigned integers have the order of the floats; 24 bits of 0xFFFFFF - token; and 8 zero bits
// for the tag.
DEVICE u64 candidate(float logit, int token) {
  const u32 bits = float_as_uint(logit), ordered = bits >> 31 ? ~bits : bits | 1u << 31;
  return (u64)ordered << 32 | (u64)(0xFFFFFF - token) << 8;
}
DEVICE float logit_of(u64 candidate) {
  const u32 ordered = (u32)(candidate >> 32);
  return uint_as_float(ordered >> 31 ? ordered ^ 1u << 31 : ~ordered);
}
DEVICE u64 larger_of(u64 a, u64 b) { return a > b ? a : b; }
// Return the largest candidate of all consumer threads, in each of them. Contains two barriers.
DEVICE u64 cta_max(Consumer& c, u64 mine) {
  c.sync();  // All threads have read Shared::candidates of the call before.
  for (int mask = 16; mask; mask /= 2) mine = larger_of(mine, shfl_xor(mine, mask));
  if (c.lane == 0) c.s.candidates[c.warp] = mine;
  c.sync();
  for (int warp = 0; warp < WARPS; ++warp) mine = larger_of(mine, c.s.candidates[warp]);
  return mine;
}
// Return this token's set of candidates, one per CTA; two sets alternate.
DEVICE u64* candidates_of_token(Consumer& c) { return c.a.best + (c.token_epoch & 1) * CTAS; }

#include "sampling.cuh"

// Phase LM_HEAD: write logits, and this CTA's candidate for the next token, with the number of the token modulo 256 as its tag.
DEVICE void multiply_head(Consumer& c) {
  c.refresh();
  allow_weights(c, LM_HEAD, HIDDEN);
  auto stage = [&] {
    stage_normed(c, c.a.words + FINAL, nullptr, c.a.parameters + (long long)LAYERS * LAYER_PARAMETERS, c.token_epoch);
  };
  u64 mine = 0;
  multiply_phase<HIDDEN, MAX_LM_HEAD, MIN_LM_HEAD, GROUPS_LM_HEAD>(c, LM_HEAD, stage, [&](int row, int, float sum, float) {
    if (row >= VOCAB) return;
    const float logit = *c.s.aborted ? uint_as_float(0x7FC00000) : sum;  // NaN in an aborted launch: the host must notice
    c.a.logits[row] = logit;
    mine = larger_of(mine, candidate(penalised(c, logit, row), row));
  });
  mine = cta_max(c, mine);
  // The release also orders this token's rows of the KV cache before it, once per token.
  if (c.thread == 0) store_release(candidates_of_token(c) + cta_index(), mine | (c.token_epoch & 0xFF));
}

// Take the best of all CTAs' candidates, or sample. Every CTA does so for itself and gets the same token. Two sets of candidates
// alternate from token to token, as a slow CTA may still read the previous one's. Without FLAG_IN_DATA the barrier or the launch before
// this phase has ordered the candidates, and tags are not checked.
DEVICE void next_token(Consumer& c) {
  c.refresh();
  u64 mine = 0;
  for (int cta = c.thread; cta < CTAS; cta += CONSUMER_THREADS) {
    u64 theirs;
    spin_until(c.a, c.s, [&] {
      theirs = load_acquire(candidates_of_token(c) + cta);
      return !FLAG_IN_DATA || (u32)((theirs ^ c.token_epoch) & 0xFF) == 0;
    });
    mine = larger_of(mine, theirs);
  }
  mine = cta_max(c, mine);
  if (samples(c)) mine = sample_token(c, mine, c.position + 1);
  if (c.thread == 0) {
    const int token = 0xFFFFFF - (int)(mine >> 8 & 0xFFFFFF);
    *c.s.token = token < VOCAB ? token : VOCAB - 1;  // After an error it must still be an index of the embedding.
    mark_seen(c, *c.s.token);
    if (cta_index() == 0) c.a.tokens[c.position + 1] = *c.s.token;
  }
  c.sync();
  c.mark(NEXT_TOKEN, READY), c.mark(NEXT_TOKEN, DONE);  // no operand is staged: both markers are the end
}

#include "order.cuh"
