// The residual stream where each word is a sum that CTAs add to, and that counts its additions: who reads it waits for their number.
//
// 56 bits of sum, in units of 2^-28, over 8 bits of count. Integers, so that no order of additions matters; the whole word less the
// number of additions has the sum in its upper bits, whatever the count has carried into them. Who owns a row clears it for the next
// token with what it read, by adding the opposite.
#pragma once

constexpr int COUNT_BITS = 8;
constexpr float OF_ONE = 268435456.0f, MOST_HELD = 67108864.0f;  // units; half of what a word can hold
static_assert(!SUMMED || ADDERS + 1 < 1 << COUNT_BITS, "additions from one wait to the next are told apart");

DEVICE u64* residual_at(const Worker& w, int row) { return (u64*)(w.a.words + MID) + row; }
// Once attention is added: all heads in each layer so far, and the MLPs before.
DEVICE u32 additions(const Worker& w) { return (u32)(ADDERS * (w.layer + 1) + w.layer); }
DEVICE bool has_all(u64 word, u32 additions) { return (((u32)word ^ additions) & ((1u << COUNT_BITS) - 1)) == 0; }
DEVICE float value_of(u64 word, u32 additions) {  // by halves: numbers of 64 bits take longer, and the lower one is exact
  const u64 v = word - additions;
  return fmaf((float)(int)(v >> 32), 1.0f / 16, (float)(u32)v * (1.0f / 256 / OF_ONE));
}
// Whether a number stays within what words hold; if not, that is noted, and nothing of this launch is waited for any longer.
DEVICE bool in_range(Worker& w, float v, float most) {
  if (fabsf(v) < most) return true;
  if (!load_relaxed(w.a.state + ERROR)) store_relaxed(w.a.state + ERROR, OUT_OF_RANGE);  // or what another's stall has made
  *w.s.gone = 1;
  return false;
}
DEVICE u64 in_units(Worker& w, float v) {
  if (!in_range(w, v, MOST_HELD / (ADDERS + 2))) v = 0;
  return (u64)llrintf(v * OF_ONE) << COUNT_BITS;
}

// All rows, times the norm's factors, as the vector that is multiplied: two columns of a thread lie side by side, so that a warp reads
// 512 bytes in a row.
DEVICE void gather_residual(Worker& w, const u16* factors) {
  constexpr int AT_ONCE = 2 * WORKERS_THREADS, PAIRS = (padded(HIDDEN) + AT_ONCE - 1) / AT_ONCE, TOGETHER = PAIRS < 4 ? PAIRS : 4;
  const u32 wanted = additions(w);
  w.squares = 0;
#pragma unroll 1
  for (int first = 2 * w.thread; first < padded(HIDDEN); first += TOGETHER * AT_ONCE) {
    u64 v[TOGETHER][2];
    u32 f[TOGETHER];
    auto inside = [&](int i) { return HIDDEN % (TOGETHER * AT_ONCE) == 0 || first + i * AT_ONCE < HIDDEN; };
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) f[i] = inside(i) ? *(const u32*)(factors + first + i * AT_ONCE) : 0;
    await(w.a, w.s, [&] {
      bool all = true;
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        v[i][0] = v[i][1] = wanted;
        if (inside(i)) load_relaxed(residual_at(w, first + i * AT_ONCE), v[i]);
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) all &= has_all(v[i][0], wanted) & has_all(v[i][1], wanted);
      return all;
    });
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      const int column = first + i * AT_ONCE;
      if (column >= padded(HIDDEN)) continue;
      const float a = value_of(v[i][0], wanted), b = value_of(v[i][1], wanted);
      w.squares += a * a + b * b;
      lay_pair(w, column, a * as_float(f[i] << 16), b * as_float(f[i] & ~0xFFFFu));
    }
  }
  w.normed = true;
  w.meet();
}

// Each unit's part of the output projection: blocks of rows, several tiles side by side, times what the unit has found. In the first
// layer the first unit of all adds the embedding too. Where warps have whole tiles they do not meet: the vector lies apart from that
// of the next phase.
constexpr int OWN_VECTOR = padded(HIDDEN), BLOCK_ROWS = BLOCK_WIDTH / BLOCK_ROOM * TILE;

DEVICE void add_row(Worker& w, int unit, int row, float sum) {
  if (row >= HIDDEN) return;
  u64 v = in_units(w, sum);
  if (w.layer == 0 && unit == 0) v += in_units(w, as_float((u32)w.embedded()[row] << 16));
  add_relaxed(residual_at(w, row), v + 1);
}
template <int WIDTH>
DEVICE void multiply_unit(Worker& w, int unit, int begin, int count, int column) {
  using B = Batches<WIDTH, MOST_O, LEAST_O, BLOCK_ROOM>;
  const int groups = GROUPS_O > 1 ? groups_of(count) : 1;
  auto first_of = [&](int group) { return group * count / groups; };
  typename B::Weights v;
  int tiles = groups == 1 ? count : first_of(1), first = 0;
  B::fetch(w, 0, 0, tiles, v);
  gather_own(w, unit, column);
  w.mark(O, READY);
#pragma unroll 1
  for (int group = 0; group < groups && (GROUPS_O > 1 || group == 0); ++group) {
    if (group > 0) B::fetch(w, 0, 0, tiles, v);
    const int from = (begin - unit * UNIT_BLOCKS + first) * BLOCK_ROWS;
    if constexpr (B::BESIDE) {
      auto found = [&](int row, float sum) { add_row(w, unit, from + row, sum); };
      multiply_beside<WIDTH, MOST_O, LEAST_O, BLOCK_ROOM>(w, tiles, column, v, found);
    } else {
      multiply<WIDTH, MOST_O, LEAST_O>(w, tiles, v, column);
    }
    constexpr int WARPS_OF_ONE = B::BESIDE ? Beside<WIDTH, BLOCK_ROOM>::WARPS_OF_ONE : WARPS;
    if constexpr (WARPS_OF_ONE > 1) {
      w.meet();
      for (int row = w.thread; row < tiles * BLOCK_ROWS; row += WORKERS_THREADS)
        add_row(w, unit, from + row, sum_of_row<WARPS_OF_ONE>(w, row));
      w.parity ^= 1;
    }
    first += tiles, tiles = first_of(group + 2) - first;
  }
  w.mark(O, DONE);
  w.give_back();
}
DEVICE void multiply_summed(Worker& w) {
  w.refresh();
  const int begin = w.begin(O), end = w.end(O);
#pragma unroll 1
  for (int first = begin; first < end && (UNITS > 1 || first == begin);) {
    const int unit = first / UNIT_BLOCKS, next = (unit + 1) * UNIT_BLOCKS, last = UNITS > 1 && next < end ? next : end;
    multiply_unit<BLOCK_WIDTH>(w, unit, first, last - first, OWN_VECTOR + (UNITS > 1 ? (unit - begin / UNIT_BLOCKS) * BLOCK_ROOM : 0));
    first = last;
  }
}

// A row that the CTA owns, with attention and before the MLP. On its way before the MLP's inner vector is waited for.
struct OwnRow {
  u64 word;
  float value = 0;
  DEVICE OwnRow(const Worker& w, int row) : word(load_relaxed(residual_at(w, row))) {}
  DEVICE void take(Worker& w, int row) {
    const u32 wanted = additions(w);
    await(w.a, w.s, [&] { return has_all(word, wanted) || (word = load_relaxed(residual_at(w, row)), false); });
    value = value_of(word, wanted);
    in_range(w, value, MOST_HELD);
  }
};
DEVICE void multiply_down_summed(Worker& w) {
  w.refresh();
  const int begin = w.begin(DOWN), end = w.end(DOWN);
  if (begin == end) return;
  const bool last = w.layer + 1 == LAYERS;  // read by the head, also in CTAs that have no part in layers
  float* to = w.a.words + (last ? FINAL : RESIDUAL);
  const int mine = begin * TILE + w.thread;
  const bool has = mine < end * TILE && w.thread < MOST_DOWN * TILE;
  OwnRow first(w, has ? mine : 0);
  auto vector = [&] {
    lay_all<INNER>(w, w.a.words + ACT, w.use());
    if (has) first.take(w, mine);
    w.meet();
  };
  product_of<INNER, MOST_DOWN, LEAST_DOWN, GROUPS_DOWN>(w, DOWN, vector, [&](int row, int, float found, float) {
    OwnRow own = first;
    if (GROUPS_DOWN > 1 && row != mine) own = OwnRow(w, row), own.take(w, row);
    put(to + row, own.value + found, last ? w.token : w.use());
    add_relaxed(residual_at(w, row), last ? 0 - own.word : in_units(w, found) + 1);
  });
}
