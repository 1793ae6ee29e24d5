// Output projection fused with attention: split-K over heads, with atomic additions to a fixed-point residual stream (plans with
// SPLIT_K_O).
//
// Computes   residual += W_o[:, s] o_s for each query split s: UNIT_QUERIES query heads of one KV head, with their attention output o_s.
//            The KV_SPLITS units of attention of a query split divide the rows of W_o[:, s] among themselves (in blocks). In a short
//            context each of these units computes the whole of o_s in its own CTA, so attention outputs do not pass through global
//            memory. The MLP's down projection adds to the same words.
// Callers    the generated order.cuh calls multiply_o_split_k() and multiply_down_counted() in place of multiply_o() and
//            multiply_down(); phases.cuh calls stage_residual().
// Blocks     W_o[:, s] mostly has fewer columns than DEPTH steps of the weight stream. Then several tiles of 8 rows lie side by side in
//            the same columns, O_TILE_COLUMNS each (the query split's channels, rounded up to a power of two). They form a block of
//            BLOCK_WIDTH columns. BLOCKS_PER_SPLIT blocks cover all rows; block b of query split s has the number s * BLOCKS_PER_SPLIT + b.
// Words      64 bits: 56 bits of sum in units of 2^-28, above 8 bits that count additions, at the offset MID. An addition is one red.add of
//            (value << 8) + 1. Integer sums do not depend on the order of additions, so results are bitwise reproducible. A reader spins
//            until the count equals the number of additions that the plan has up to there, modulo 256; word - additions is then the sum
//            exactly, whatever the count has carried into the upper bits.
// Clearing   the CTA that owns a row reads it in the last layer and adds the negated word, which leaves zero for the next token.
// Sync       the count is a flag in the data (words.cuh): no barrier, no fence. An addition must come after all reads that wait for the
//            previous count; onelaunch.decode.plan.check proves that for each plan.
// Numerics   |words| < 2^26 and |addends| < 2^26 / MOST_ADDENDS; otherwise, also for NaN, the error word becomes OUT_OF_RANGE unless it
//            already holds an error, and the launch is aborted.
#pragma once

constexpr int COUNT_BITS = 8;
constexpr float FIXED_POINT_ONE = 268435456.0f;  // 2^28 units
constexpr float RESIDUAL_RANGE = 67108864.0f;    // 2^26: half of what a word can hold
// Addends that a word gets at most between two checks of its range: query splits, MLP, embedding, and the output projection's bias.
constexpr int MOST_ADDENDS = ADDERS + 2 + O_BIAS;
static_assert(!SPLIT_K_O || ADDERS + 1 < 1 << COUNT_BITS, "the count tells one wait from the next");

DEVICE u64* residual_at(const Consumer& c, int row) { return (u64*)(c.a.words + MID) + row; }
// Return the number of additions to a word since the token began, once attention of this layer is added: ADDERS (one per query split of
// the model) in each layer so far, and one per earlier MLP.
DEVICE u32 additions(const Consumer& c) { return (u32)(ADDERS * (c.layer + 1) + c.layer); }
// Return whether a word has that many additions, modulo 256.
DEVICE bool is_complete(u64 word, u32 additions) { return (((u32)word ^ additions) & ((1u << COUNT_BITS) - 1)) == 0; }
// Return the value of a complete word. Its halves are converted one by one: 64-bit conversions are slower. The lower half is converted
// exactly, since its lowest 8 bits are zero and 24 remain.
DEVICE float from_fixed_point(u64 word, u32 additions) {
  const u64 v = word - additions;
  return fmaf((float)(int)(v >> 32), 1.0f / 16, (float)(u32)v * (1.0f / 256 / FIXED_POINT_ONE));
}
// Return whether |v| < most. If not, note the error and abort the launch: no wait of it waits any longer.
DEVICE bool in_range(Consumer& c, float v, float most) {
  if (fabsf(v) < most) return true;
  // A time-out that was noted before stays: the value may be a consequence of it.
  if (!load_relaxed(c.a.state + ERROR)) store_relaxed(c.a.state + ERROR, OUT_OF_RANGE);
  *c.s.aborted = 1;
  return false;
}
// Return a value as an addend. Each word is checked by its owner once per layer to be within RESIDUAL_RANGE, half of what it can hold.
// Until the next check it gets at most MOST_ADDENDS. They are limited so that they fill at most the other half, and the sum cannot
// overflow.
DEVICE u64 to_fixed_point(Consumer& c, float v) {
  if (!in_range(c, v, RESIDUAL_RANGE / MOST_ADDENDS)) v = 0;
  return (u64)llrintf(v * FIXED_POINT_ONE) << COUNT_BITS;
}

// Stage the residual stream times the norm's weights as the operand of the gate and up projections, once attention of all heads is
// added. A thread has two adjacent columns, so that a warp reads 512 contiguous bytes. Ends with a barrier.
DEVICE void stage_residual(Consumer& c, const u16* weights) {
  constexpr int STRIDE = 2 * CONSUMER_THREADS, PAIRS = (padded(HIDDEN) + STRIDE - 1) / STRIDE, UNROLL = PAIRS < 4 ? PAIRS : 4;
  const u32 wanted = additions(c);
  c.squares = 0;
#pragma unroll 1
  for (int first = 2 * c.thread; first < padded(HIDDEN); first += UNROLL * STRIDE) {
    u64 v[UNROLL][2];
    u32 f[UNROLL];
    auto inside = [&](int i) { return HIDDEN % (UNROLL * STRIDE) == 0 || first + i * STRIDE < HIDDEN; };
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) f[i] = inside(i) ? *(const u32*)(weights + first + i * STRIDE) : 0;
    spin_until(c.a, c.s, [&] {
      bool all = true;
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        v[i][0] = v[i][1] = wanted;
        if (inside(i)) load_relaxed(residual_at(c, first + i * STRIDE), v[i]);
      }
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) all &= is_complete(v[i][0], wanted) & is_complete(v[i][1], wanted);
      return all;
    });
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int column = first + i * STRIDE;
      if (column >= padded(HIDDEN)) continue;
      const float a = from_fixed_point(v[i][0], wanted), b = from_fixed_point(v[i][1], wanted);
      c.squares += a * a + b * b;
      store_split2(c, column, a * uint_as_float(f[i] << 16), b * uint_as_float(f[i] & ~0xFFFFu));
    }
  }
  c.norm_pending = true;
  c.sync();
}

// Column of Shared::vector_hi and vector_lo from which on attention outputs lie: behind the operand of the next phase, which may then be
// staged while slower warps still multiply. Rows of the output projection in a block.
constexpr int OWN_VECTOR = padded(HIDDEN), BLOCK_ROWS = BLOCK_WIDTH / O_TILE_COLUMNS * TILE;

// Add a query split's product to a row of the residual stream. Query split 0 adds the bias too, and in the first layer the embedding.
DEVICE void add_row(Consumer& c, int query_split, int row, float sum) {
  if (row >= HIDDEN) return;
  u64 v = to_fixed_point(c, sum);
  if (O_BIAS && query_split == 0) v += to_fixed_point(c, c.o_bias(row));
  if (c.layer == 0 && query_split == 0) v += to_fixed_point(c, uint_as_float((u32)c.embedding_row()[row] << 16));
  red_add_relaxed(residual_at(c, row), v + 1);
}
// Stage a query split's attention output at `column`, and multiply it by `count` blocks of the output projection from number `begin` on.
// If each warp has whole tiles, no barrier is needed before the additions.
template <int WIDTH>
DEVICE void multiply_blocks(Consumer& c, int query_split, int begin, int count, int column) {
  using B = WeightBatches<WIDTH, MAX_O, MIN_O, O_TILE_COLUMNS>;
  const int groups = GROUPS_O > 1 ? group_count(count) : 1;
  auto first_of = [&](int group) { return group * count / groups; };
  typename B::Weights v;
  int tiles = groups == 1 ? count : first_of(1), first = 0;
  B::fetch(c, 0, 0, tiles, v);
  stage_own_attention(c, query_split, column);
  c.mark(O, READY);
#pragma unroll 1
  for (int group = 0; group < groups && (GROUPS_O > 1 || group == 0); ++group) {
    if (group > 0) B::fetch(c, 0, 0, tiles, v);
    const int from = (begin - query_split * BLOCKS_PER_SPLIT + first) * BLOCK_ROWS;
    if constexpr (B::SIDE_BY_SIDE_TILES) {
      auto add = [&](int row, float sum) { add_row(c, query_split, from + row, sum); };
      multiply_side_by_side<WIDTH, MAX_O, MIN_O, O_TILE_COLUMNS>(c, tiles, column, v, add);
    } else {
      multiply<WIDTH, MAX_O, MIN_O>(c, tiles, v, column);
    }
    constexpr int WARPS_PER_TILE = B::SIDE_BY_SIDE_TILES ? SideBySide<WIDTH, O_TILE_COLUMNS>::WARPS_PER_TILE : WARPS;
    if constexpr (WARPS_PER_TILE > 1) {
      c.sync();
      for (int row = c.thread; row < tiles * BLOCK_ROWS; row += CONSUMER_THREADS)
        add_row(c, query_split, from + row, sum_over_warps<WARPS_PER_TILE>(c, row));
      c.parity ^= 1;
    }
    first += tiles, tiles = first_of(group + 2) - first;
  }
  c.mark(O, DONE);
  c.release();
}
// Phase O: multiply the CTA's blocks of the output projection by the attention outputs of their query splits. UNITS is the most units
// of attention of any CTA. With one, all blocks of a CTA belong to one query split.
DEVICE void multiply_o_split_k(Consumer& c) {
  c.refresh();
  const int begin = c.begin(O), end = c.end(O);
#pragma unroll 1
  for (int first = begin; first < end && (UNITS > 1 || first == begin);) {
    const int query_split = first / BLOCKS_PER_SPLIT, next = (query_split + 1) * BLOCKS_PER_SPLIT;
    const int last = UNITS > 1 && next < end ? next : end;
    const int offset = UNITS > 1 ? (query_split - begin / BLOCKS_PER_SPLIT) * O_TILE_COLUMNS : 0;
    multiply_blocks<BLOCK_WIDTH>(c, query_split, first, last - first, OWN_VECTOR + offset);
    first = last;
  }
}

// A row of the residual stream that this CTA owns, with attention and without this layer's MLP, which only this CTA adds. The load is in
// flight before the wait for the operand of the down projection. wait() spins until the word has all additions, and checks its range.
struct OwnRow {
  u64 word;
  float value = 0;
  DEVICE OwnRow(const Consumer& c, int row) : word(load_relaxed(residual_at(c, row))) {}
  DEVICE void wait(Consumer& c, int row) {
    const u32 wanted = additions(c);
    // The first check is of the word that the constructor loaded; each failed check loads it again for the next one.
    spin_until(c.a, c.s, [&] { return is_complete(word, wanted) || (word = load_relaxed(residual_at(c, row)), false); });
    value = from_fixed_point(word, wanted);
    in_range(c, value, RESIDUAL_RANGE);
  }
};
// Phase DOWN: write each owned row plus the MLP to a buffer of flag-in-data words for the next phase, and add the MLP to the word of the
// residual stream; in the last layer clear the word instead.
DEVICE void multiply_down_counted(Consumer& c) {
  c.refresh();
  const int begin = c.begin(DOWN), end = c.end(DOWN);
  if (begin == end) return;
  const bool last = c.layer + 1 == LAYERS;  // The last result has a buffer of its own, as CTAs without work in the layers read it too.
  float* to = c.a.words + (last ? FINAL : RESIDUAL);
  const int mine = begin * TILE + c.thread;
  const bool has_row = mine < end * TILE && c.thread < MAX_DOWN * TILE;
  OwnRow first(c, has_row ? mine : 0);
  auto stage = [&] {
    stage_vector_unsynced<INNER>(c, c.a.words + ACT, c.epoch());
    if (has_row) first.wait(c, mine);
    c.sync();
  };
  multiply_phase<INNER, MAX_DOWN, MIN_DOWN, GROUPS_DOWN>(c, DOWN, stage, [&](int row, int, float sum, float) {
    OwnRow own = first;
    if (GROUPS_DOWN > 1 && row != mine) own = OwnRow(c, row), own.wait(c, row);
    store_words(to + row, own.value + sum, last ? c.token_epoch : c.epoch());
    red_add_relaxed(residual_at(c, row), last ? 0 - own.word : to_fixed_point(c, sum) + 1);
  });
}
