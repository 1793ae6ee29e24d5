// A CTA's tiles of a matrix times the vector laid out: weights out of the ring, sums of all warps, and what becomes of them.
#pragma once

constexpr int FITTING = SEPARATE ? 2 : MOST, AHEAD = FITTING < STAGES ? FITTING : STAGES;  // side by side, launches have fewer registers

// Tiles of a CTA in groups of at most MOST; the stream has the same.
DEVICE int groups_of(int tiles) { return (tiles + MOST - 1) / MOST; }

// How a phase's weights go through registers, in the order of the stream: blocks of DEPTH steps; of each, batches of tiles. Of a single
// tile, several blocks are a batch.
template <int COLUMNS, int TILES, int LEAST>
struct Batches {
  static constexpr int BLOCKS = padded(COLUMNS) / STEP / DEPTH, MANY = (TILES + AHEAD - 1) / AHEAD;
  static constexpr int SIZE = (TILES + MANY - 1) / MANY, ROUNDS = TILES > 1 ? 1 : BLOCKS < AHEAD ? BLOCKS : AHEAD;
  static_assert(padded(COLUMNS) / STEP % DEPTH == 0, "granules of a tile that follow each other");
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

// Sums of up to TILES tiles over all columns, each warp its 32 of every STEP. The first batch of weights is there.
template <int COLUMNS, int TILES, int LEAST>
DEVICE void multiply(Worker& w, int tiles, typename Batches<COLUMNS, TILES, LEAST>::Weights& v) {
  using B = Batches<COLUMNS, TILES, LEAST>;
  constexpr int CHAINS = TILES > 4 ? 1 : 2;  // of products that wait for each other; many tiles have no registers for two
  float d[TILES][CHAINS][4];
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int i = 0; i < 4 * CHAINS; ++i) d[t][i / 4][i % 4] = 0.0f;
  const int row = w.lane / 4, quad = w.lane % 4;  // row of the tile; as a column: which half of the 32 channels, which part
  const u16* x = (row & 1 ? w.s.lower : w.s.upper) + 32 * w.warp + 8 * quad + (row & 2 ? 4 : 0);
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
  // Rows 0 to 7 of columns 0 and 1 are in a quad's first lane, rows 8 to 15 of columns 2 and 3 in its second.
  float* sums = w.s.sums + (w.parity * WARPS + w.warp) * MOST * TILE;
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    if (t < LEAST || t < tiles) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < CHAINS; ++i) sum += quad == 0 ? d[t][i][0] + d[t][i][1] : d[t][i][2] + d[t][i][3];
      sum += from_lane_xor(sum, 1);
      if (quad == 0) sums[t * TILE + row] = sum;
    }
  }
}
DEVICE float sum_of_row(const Worker& w, int row) {
  float sum = 0;
  for (int warp = 0; warp < WARPS; ++warp) sum += w.s.sums[(w.parity * WARPS + warp) * MOST * TILE + row];
  return sum * w.scale;
}

// All tiles of a phase: gather() lays the vector out, then apply(row of the matrix, row among the CTA's, row of the sums) by a thread
// for each row.
template <int COLUMNS, int TILES, int LEAST, class Gather, class Apply>
DEVICE void product_of(Worker& w, int phase, Gather gather, Apply apply) {
  using B = Batches<COLUMNS, TILES, LEAST>;
  constexpr bool EARLY = STREAMS || SEPARATE;  // else weights come last
  const int begin = w.begin(phase), count = w.end(phase) - begin, groups = groups_of(count);
  if (count == 0) return gather();  // the head of a small vocabulary: its words are waited for in every use
  auto first_of = [&](int group) { return group * count / groups; };
  typename B::Weights v;
  auto product_of_group = [&](int first, int tiles) {
    multiply<COLUMNS, TILES, LEAST>(w, tiles, v);
    if (first == 0) tell_squares(w);
    w.meet();
    if (first == 0) take_scale(w);
    if (w.thread < tiles * TILE) apply((begin + first) * TILE + w.thread, first * TILE + w.thread, w.thread);
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
