// The recurrence of a CTA by values: VALUE_ROWS value channels of one head, all key channels, all sequences. sequences.cuh has the other way.
//
// Computes   S_t = diag(decay_t) S_{t-1} + k_t^T v_t;  o_t = K^-0.5 q_t S_t, with S in float32 registers.
// Warps      SLOTS sequences at a time; PARTS warps share the key channels of one. A lane has 4 value channels, 16 bytes, of KEYS_EACH key
//            channels. o is summed over the lanes of a warp by shuffles, over warps through shared memory, both in a fixed order.
// Blocks     q, k and the decays of BLOCK_ROWS rows are staged at a time, so that shared memory is bounded: several steps of SLOTS
//            sequences, or one step of more sequences, which the warps then go through without a barrier.
// Copies     with COPIED the first states go to shared memory (cp.async) while the low-rank factor's weights arrive, and registers take them when
//            q, k and the decays are there. Loads into registers, which the compiler waits for before the code of the next segment, would have
//            to arrive before what the CTAs of the head exchange is asked for.
// Memory     the state is read and written once. The state of the last sequences is stored by store_state() after this CTA has arrived at
//            the grid barrier, so that the release does not wait for it.
#pragma once

constexpr int VALUE_LANES = VALUE_ROWS / 4, KEY_LANES = 32 / VALUE_LANES, KEYS_EACH = KEYS / (KEY_LANES * PARTS);
static_assert(VALUE_LANES * KEY_LANES == 32 && KEYS_EACH * KEY_LANES * PARTS == KEYS && SLOTS * PARTS == WARPS, "a warp covers its part");
constexpr float LOG2_E = 1.44269504f;

struct State {
  float v[KEYS_EACH][4];
};
// Key channel `i` of a lane.
DEVICE int key_of(const Consumer& c, int i) { return (i * PARTS + c.warp % PARTS) * KEY_LANES + c.lane / VALUE_LANES; }
// Offset of a lane's first numbers in the states; those of its other key channels follow at constant distances.
constexpr int KEY_DISTANCE = PARTS * KEY_LANES * VALUES;
DEVICE long long state_offset(const Consumer& c, int sequence) {
  return (((long long)sequence * HEADS + c.head) * KEYS + key_of(c, 0)) * VALUES + c.member * VALUE_ROWS + c.lane % VALUE_LANES * 4;
}
// Load the states of the SLOTS sequences from `first` on, zeros without an initial state. The loads are in flight when this returns.
DEVICE void load_state(Consumer& c, int first, State& state) {
  c.refresh();
  const int sequence = first + c.warp / PARTS;
  const bool given = c.a.initial && sequence < c.a.batch;
  const float* from = given ? c.a.initial + state_offset(c, sequence) : nullptr;
#pragma unroll
  for (int i = 0; i < KEYS_EACH; ++i) {
    uint4 v = {0, 0, 0, 0};
    if (given) v = load_weak((const uint4*)(from + i * KEY_DISTANCE));
    state.v[i][0] = uint_as_float(v.x), state.v[i][1] = uint_as_float(v.y);
    state.v[i][2] = uint_as_float(v.z), state.v[i][3] = uint_as_float(v.w);
  }
}
// Copy the states of the first SLOTS sequences to shared memory: a thread what it reads itself. Only take_state() waits.
DEVICE void copy_state(Consumer& c) {
  c.refresh();
  const int sequence = c.warp / PARTS;
  if (!c.a.initial || sequence >= c.a.batch) return;
  const float* from = c.a.initial + state_offset(c, sequence);
#pragma unroll
  for (int i = 0; i < KEYS_EACH; ++i) cp_async_16(c.s.states + (i * CONSUMER_THREADS + c.thread) * 4, from + i * KEY_DISTANCE);
}
DEVICE void take_state(Consumer& c, State& state) {
  c.refresh();
  cp_async_wait_all();
  const bool given = c.a.initial && c.warp / PARTS < c.a.batch;
#pragma unroll
  for (int i = 0; i < KEYS_EACH; ++i) {
    float4 v = {0, 0, 0, 0};
    if (given) v = *(const float4*)(c.s.states + (i * CONSUMER_THREADS + c.thread) * 4);
    state.v[i][0] = v.x, state.v[i][1] = v.y, state.v[i][2] = v.z, state.v[i][3] = v.w;
  }
}
DEVICE void store_state(Consumer& c, int first, const State& state) {
  c.refresh();
  const int sequence = first + c.warp / PARTS;
  if (!c.a.final_state || sequence >= c.a.batch) return;
  float* to = c.a.final_state + state_offset(c, sequence);
#pragma unroll
  for (int i = 0; i < KEYS_EACH; ++i)
    *(float4*)(to + i * KEY_DISTANCE) = {state.v[i][0], state.v[i][1], state.v[i][2], state.v[i][3]};
}

// Rows of a block: step `t + i % STEPS` of sequence `first + i / STEPS`, for i below BLOCK_ROWS.
constexpr int STEPS = ONE_STEP ? 1 : BLOCK_ROWS / SLOTS, SEQUENCES = BLOCK_ROWS / STEPS;
struct Block {
  int first, t;
  DEVICE int row(const Consumer& c, int i) const {  // its row of x, or -1 behind the last sequence or step
    const int sequence = first + i / STEPS, step = t + i % STEPS;
    return sequence < c.a.batch && step < c.a.length ? sequence * c.a.length + step : -1;
  }
};

// Copy q, k and the low-rank factor of a block's rows, which the CTAs of the head publish, to shared memory.
DEVICE void stage_block(Consumer& c, const Block& block) {
  constexpr int UNITS = EXCHANGED / 4, EACH = divided(BLOCK_ROWS * UNITS, CONSUMER_THREADS);
  c.refresh();
  auto row_of_unit = [&](int i) {
    const int at = c.thread + i * CONSUMER_THREADS;
    return at < BLOCK_ROWS * UNITS ? block.row(c, at / UNITS) : -1;
  };
  auto load = [&](int i) {
    return load_relaxed((const uint4*)(c.exchanged(row_of_unit(i)) + (c.thread + i * CONSUMER_THREADS) % UNITS * 4));
  };
  uint4 v[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    v[i] = {0, 0, 0, 0};
    if (row_of_unit(i) >= 0) v[i] = load(i);
  }
  if constexpr (TAGGED) await_words(v, [&](int i) { return row_of_unit(i) >= 0; }, load);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = c.thread + i * CONSUMER_THREADS, slot = at / UNITS, unit = at % UNITS;
    if (row_of_unit(i) < 0) continue;
    float* to = unit < KEYS / 2 ? c.s.queries_keys + slot * 2 * KEYS + unit * 4 : c.s.low_rank + slot * RANK_PADDED + (unit - KEYS / 2) * 4;
    *(uint4*)to = v[i];
  }
  c.sync();
}
// Return exp(logsigmoid(z) / normalizer).
DEVICE float decay_of(const Consumer& c, float z) {
  const float size = z < 0 ? -z : z;
  const float log_sigmoid = (z < 0 ? z * LOG2_E : 0.0f) - log2_approx(1.0f + exp2_approx(-size * LOG2_E));  // in base 2
  return exp2_approx(log_sigmoid * c.a.inverse_normalizer);
}
// Compute the decays of a block's rows from the low-rank factor. A thread has one key channel of every ROWS_APART-th row.
DEVICE void make_decays(Consumer& c, const Block& block) {
  c.refresh();
  constexpr int ROWS_APART = CONSUMER_THREADS / KEYS, EACH = divided(BLOCK_ROWS, ROWS_APART);
  const int key = c.thread % KEYS, first = c.thread / KEYS;
  float z[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) z[i] = bf16_to_float(PER_HEAD ? c.a.decay_bias[c.head] : c.s.decay_bias[key]);
  if constexpr (PER_HEAD) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = first + i * ROWS_APART, row = at < BLOCK_ROWS ? block.row(c, at) : -1;
      if (row >= 0) z[i] += c.s.y[R_AT * Y_PITCH + row];
    }
  } else {
    constexpr int WIDTH_OF_LOAD = RANK % 8 == 0 ? 8 : 1;
#pragma unroll 1
    for (int r = 0; r < RANK; r += WIDTH_OF_LOAD) {
      float w[WIDTH_OF_LOAD];
      if constexpr (WIDTH_OF_LOAD == 8) {
        const uint4 v = *(const uint4*)(c.s.decay_weight + key * RANK + r);
        w[0] = bf16_to_float(v.x), w[1] = high_bf16_to_float(v.x), w[2] = bf16_to_float(v.y), w[3] = high_bf16_to_float(v.y);
        w[4] = bf16_to_float(v.z), w[5] = high_bf16_to_float(v.z), w[6] = bf16_to_float(v.w), w[7] = high_bf16_to_float(v.w);
      } else {
        w[0] = bf16_to_float(c.s.decay_weight[key * RANK + r]);
      }
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        const int at = first + i * ROWS_APART;
        if (at >= BLOCK_ROWS || block.row(c, at) < 0) continue;
#pragma unroll
        for (int j = 0; j < WIDTH_OF_LOAD; ++j) z[i] += c.s.low_rank[at * RANK_PADDED + r + j] * w[j];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = first + i * ROWS_APART;
    if (at < BLOCK_ROWS) c.s.decays[at * KEYS + key] = decay_of(c, z[i]);
  }
  c.sync();
}
// Advance the states of SLOTS sequences, from the block's sequence `group` on, over its steps; leave each part's o in Shared::partial.
DEVICE void advance_state(Consumer& c, const Block& block, int group, State& state) {
  c.refresh();
  const int slot = group + c.warp / PARTS, value = c.lane % VALUE_LANES * 4;
#pragma unroll 1
  for (int step = 0; step < STEPS; ++step) {
    const int i = slot * STEPS + step, row = block.row(c, i);
    if (row < 0) break;
    const float *q = c.s.queries_keys + i * 2 * KEYS, *k = q + KEYS, *decay = c.s.decays + i * KEYS;
    float v[4], o[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = c.s.y[(V_AT + value + j) * Y_PITCH + row];
#pragma unroll
    for (int each = 0; each < KEYS_EACH; ++each) {
      const int key = key_of(c, each);
      const float e = decay[key], k_each = k[key], q_each = q[key];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        state.v[each][j] = state.v[each][j] * e + k_each * v[j];
        o[j] += q_each * state.v[each][j];
      }
    }
#pragma unroll
    for (int mask = VALUE_LANES; mask < 32; mask *= 2)
#pragma unroll
      for (int j = 0; j < 4; ++j) o[j] += shfl_xor(o[j], mask);
    if (c.lane < VALUE_LANES)
      *(float4*)(c.s.partial + (c.warp % PARTS * BLOCK_ROWS + i) * VALUE_ROWS + value) = {o[0], o[1], o[2], o[3]};
  }
}
// Add the parts of o, and put it into the rows of v in Shared::y, which are not read any more.
DEVICE void collect_outputs(Consumer& c, const Block& block) {
  for (int i = c.warp; i < BLOCK_ROWS; i += WARPS) {
    const int row = block.row(c, i);
    if (row < 0) continue;
    for (int value = c.lane; value < VALUE_ROWS; value += 32) {
      float sum = 0;
#pragma unroll
      for (int part = 0; part < PARTS; ++part) sum += c.s.partial[(part * BLOCK_ROWS + i) * VALUE_ROWS + value];
      c.s.y[(V_AT + value) * Y_PITCH + row] = sum * QUERY_SCALE;
    }
  }
}
// Run the recurrence of all sequences. `state` holds the first ones' states unless they are COPIED; it ends with those of the last ones, not yet stored, whose
// first sequence is returned.
DEVICE int run_recurrence(Consumer& c, State& state) {
  int held = 0;
#pragma unroll 1
  for (int first = 0; first < c.a.batch; first += SEQUENCES)
#pragma unroll 1
    for (int t = 0; t < c.a.length; t += STEPS) {
      const Block block = {first, t};
      stage_block(c, block);
      make_decays(c, block);
      if (COPIED && first == 0 && t == 0) take_state(c, state);
#pragma unroll 1
      for (int group = 0; group < SEQUENCES && first + group < c.a.batch; group += SLOTS) {
        if (first + group != held) {
          store_state(c, held, state);
          held = first + group;
          load_state(c, held, state);
        }
        advance_state(c, block, group, state);
      }
      c.sync();
      collect_outputs(c, block);
    }
  return held;
}
