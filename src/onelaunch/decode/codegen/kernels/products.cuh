// A CTA's tiles of a matrix times the vector laid out: weights out of the ring, sums of all warps, and what becomes of them.
#pragma once

constexpr int FITTING = SEPARATE ? 2 : MOST;  // side by side, launches have fewer registers

// Tiles of a CTA in groups of at most MOST; the stream has the same. GROUPS_... are the most of any CTA.
DEVICE int groups_of(int tiles) { return (tiles + MOST - 1) / MOST; }

// How a phase's weights go through registers, in the order of the stream: blocks of DEPTH steps; of each, batches of tiles. Of a single
// tile, several blocks are a batch. Where a tile takes only so many columns, ROOM, others lie beside it in the same steps.
template <int COLUMNS, int TILES, int LEAST, int ROOM = COLUMNS>
struct Batches {
  static constexpr bool BESIDE = ROOM < COLUMNS;
  static constexpr int WANTED = BESIDE ? 2 : FITTING, AHEAD = WANTED < STAGES ? WANTED : STAGES;
  static constexpr int BLOCKS = padded(COLUMNS) / STEP / DEPTH, MANY = (TILES + AHEAD - 1) / AHEAD;
  static constexpr int SIZE = (TILES + MANY - 1) / MANY, ROUNDS = TILES > 1 ? 1 : BLOCKS < AHEAD ? BLOCKS : AHEAD;
  static_assert(padded(COLUMNS) / STEP % DEPTH == 0, "granules of a tile that follow each other");
  static_assert(!BESIDE || (BLOCKS == 1 && COLUMNS % ROOM == 0 && ROOM % 32 == 0), "whole tiles in what is fetched together");
  typedef uint4 Weights[ROUNDS * SIZE][DEPTH];

  // Those of tiles from first on, of blocks from block on.
  DEVICE static void fetch(Worker& w, int block, int first, int tiles, Weights& v) {
    auto within = [](int count, int most) { return count < 0 ? 0 : count < most ? count : most; };
    if constexpr (TILES == 1)
      w.fetch(v, within(BLOCKS - block, ROUNDS), within(BLOCKS - (BLOCKS - 1) / ROUNDS * ROUNDS, ROUNDS));
    else
      w.fetch(v, within(LEAST == TILES ? TILES - first : tiles - first, SIZE), within(LEAST - first, SIZE));
  }
};

// Rows 0 to 7 of columns 0 and 1 are in a quad's first lane, rows 8 to 15 of columns 2 and 3 in its second: a warp's sum of a row.
template <int CHAINS>
DEVICE float sum_of_quad(const Worker& w, const float (&d)[CHAINS][4]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < CHAINS; ++i) sum += w.lane % 4 == 0 ? d[i][0] + d[i][1] : d[i][2] + d[i][3];
  return sum + from_lane_xor(sum, 1);
}
// Where a lane finds its part of the vector: row of the tile; as a column: which half of the 32 channels, which part.
DEVICE const u16* operand(const Worker& w, int column) {
  const int row = w.lane / 4, quad = w.lane % 4;
  return (row & 1 ? w.s.lower : w.s.upper) + column + 8 * quad + (row & 2 ? 4 : 0);
}
// Tiles side by side: of a block's parts of 32 columns each warp has DEPTH that follow each other, tile after tile.
template <int COLUMNS, int ROOM>
struct Beside {
  static constexpr int TILES = COLUMNS / ROOM, PARTS = ROOM / 32;
  static constexpr int OF_A_WARP = PARTS < DEPTH ? DEPTH / PARTS : 1, WARPS_OF_ONE = PARTS > DEPTH ? PARTS / DEPTH : 1;
};
// Sums of up to TILES blocks: told to found(row of the blocks, sum) by some lanes where a warp has whole tiles, else by warp.
template <int COLUMNS, int TILES, int LEAST, int ROOM, class Found>
DEVICE void multiply_beside(Worker& w, int tiles, int column, typename Batches<COLUMNS, TILES, LEAST, ROOM>::Weights& v, Found found) {
  using B = Batches<COLUMNS, TILES, LEAST, ROOM>;
  using Its = Beside<COLUMNS, ROOM>;
  const int quad = w.lane % 4, first_part = w.warp * DEPTH;
#pragma unroll
  for (int first = 0; first < TILES; first += B::SIZE) {
    if (first) B::fetch(w, 0, first, tiles, v);
    constexpr int CHAINS = DEPTH / Its::OF_A_WARP > 1 ? 2 : 1;  // of products that wait for each other
    float d[B::SIZE][Its::OF_A_WARP][CHAINS][4] = {};
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      const int part = Its::PARTS <= DEPTH ? i % Its::PARTS : first_part % Its::PARTS + i;
      const uint2 b = *(const uint2*)operand(w, column + part * 32);
#pragma unroll
      for (int t = 0; t < B::SIZE && first + t < TILES; ++t)
        if (first + t < LEAST || first + t < tiles) product(d[t][Its::OF_A_WARP > 1 ? i / Its::PARTS : 0][i % CHAINS], v[t][i], b);
    }
    constexpr int EACH = B::SIZE * Its::OF_A_WARP;
#pragma unroll
    for (int some = 0; some < EACH; some += 2) {  // the first two of a quad's lanes have a tile's sum; they take on a tile each
      int tile = -1;
      float mine = 0;
#pragma unroll
      for (int each = some; each < some + 2 && each < EACH; ++each) {
        const int t = each / Its::OF_A_WARP;
        const float sum = sum_of_quad(w, d[t][each % Its::OF_A_WARP]);
        if (first + t < tiles && quad == each - some)
          mine = sum, tile = (first + t) * Its::TILES + first_part / Its::PARTS + each % Its::OF_A_WARP;
      }
      if (tile < 0) continue;
      const int row = tile * TILE + w.lane / 4;
      if constexpr (Its::WARPS_OF_ONE == 1)
        found(row, mine);
      else
        w.s.sums[(w.parity * WARPS + w.warp % Its::WARPS_OF_ONE) * SUM_ROWS + row] = mine;
    }
  }
}
// Sums of up to TILES tiles over all columns, each warp its 32 of every STEP. The first batch of weights is there.
template <int COLUMNS, int TILES, int LEAST>
DEVICE void multiply(Worker& w, int tiles, typename Batches<COLUMNS, TILES, LEAST>::Weights& v, int column = 0) {
  using B = Batches<COLUMNS, TILES, LEAST>;
  // of products that wait for each other: many tiles have no registers for two, and one tile alone has nothing else to do
  constexpr int CHAINS = TILES > 4 ? 1 : TILES == 1 ? 4 : 2;
  float d[TILES][CHAINS][4];
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int i = 0; i < 4 * CHAINS; ++i) d[t][i / 4][i % 4] = 0.0f;
  const u16* x = operand(w, column + 32 * w.warp);
#pragma unroll 1
  for (int block = 0; block < B::BLOCKS; block += B::ROUNDS) {
#pragma unroll
    for (int first = 0; first < TILES; first += B::SIZE) {
      if (block || first) B::fetch(w, block, first, tiles, v);
#pragma unroll
      for (int r = 0; r < B::ROUNDS; ++r) {
        if (B::BLOCKS % B::ROUNDS && block + r >= B::BLOCKS) continue;
        uint2 b[DEPTH];
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) b[i] = *(const uint2*)(x + ((block + r) * DEPTH + i) * STEP);
#pragma unroll
        for (int i = 0; i < DEPTH; ++i)
#pragma unroll
          for (int t = 0; t < B::SIZE && first + t < TILES; ++t)
            if (first + t < LEAST || first + t < tiles) product(d[first + t][i % CHAINS], v[r + t][i], b[i]);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; ++t)
    if (t < LEAST || t < tiles) {
      const float sum = sum_of_quad(w, d[t]);
      if (w.lane % 4 == 0) w.s.sums[(w.parity * WARPS + w.warp) * SUM_ROWS + t * TILE + w.lane / 4] = sum;
    }
}
// Of all warps, or the first so many; not scaled yet.
template <int COUNT = WARPS>
DEVICE float sum_of_row(const Worker& w, int row) {
  float each[COUNT];
#pragma unroll
  for (int warp = 0; warp < COUNT; ++warp) each[warp] = w.s.sums[(w.parity * WARPS + warp) * SUM_ROWS + row];
  return sum_of(each);
}

// All tiles of a phase: gather() lays the vector out, then apply(row of the matrix, row among the CTA's, its product, that of the row
// half a tile away) by a thread for each row.
template <int COLUMNS, int TILES, int LEAST, int GROUPS, class Gather, class Apply>
DEVICE void product_of(Worker& w, int phase, Gather gather, Apply apply) {
  using B = Batches<COLUMNS, TILES, LEAST>;
  constexpr bool EARLY = STREAMS || SEPARATE;  // else weights come last
  const int begin = w.begin(phase), count = w.end(phase) - begin, groups = GROUPS > 1 ? groups_of(count) : 1;
  if (phase == LM_HEAD && count == 0) return gather();  // a small vocabulary: its words are waited for in every use
  auto first_of = [&](int group) { return group * count / groups; };
  typename B::Weights v;
  auto product_of_group = [&](int first, int tiles) {
    multiply<COLUMNS, TILES, LEAST>(w, tiles, v);
    if (first == 0) tell_squares(w);
    w.meet();
    const bool has = w.thread < tiles * TILE;
    const float own = sum_of_row(w, has ? w.thread : 0), other = from_lane_xor(own, TILE / 2);  // before the scale is made of others
    if (first == 0) take_scale(w);
    if (has) apply((begin + first) * TILE + w.thread, first * TILE + w.thread, own * w.scale, other * w.scale);
    w.parity ^= 1;  // so that sums are read while others already multiply
  };
  int tiles = groups == 1 ? count : first_of(1);
  if constexpr (EARLY) B::fetch(w, 0, 0, tiles, v);
  gather();
  w.mark(phase, READY);
  if constexpr (!EARLY) B::fetch(w, 0, 0, tiles, v);
  product_of_group(0, tiles);
#pragma unroll 1
  for (int group = 1; group < groups; ++group) {
    const int first = first_of(group);
    tiles = first_of(group + 1) - first;
    B::fetch(w, 0, 0, tiles, v);
    product_of_group(first, tiles);
  }
  w.mark(phase, DONE);
  w.give_back();
}
