// Matrix-vector products of a CTA's rows with tensor cores: weights from the ring, operand from shared memory.
//
// Computes   y = W x for the CTA's tiles of 8 rows, with W in bfloat16, x as x_hi + x_lo (vectors.cuh), and float32 sums.
// Callers    phases.cuh multiplies by multiply_phase() in every phase with a product; residual.cuh does so and uses its parts.
// mma        one mma.m16n8k16 multiplies 8 rows by 32 columns. A thread's 16 bytes of the stream are 8 consecutive columns of one row,
//            with the second and the third pair swapped (packing.py), so that they are the four registers of operand A as they lie.
//            The first four columns are rows 0 to 7 of operand A, the last four rows 8 to 15: the same rows of W over other columns.
//            Operand B has x_hi and x_lo of the first four columns in its columns 0 and 1, of the last four in 2 and 3. So
//            D[r][0] + D[r][1] + D[r + 8][2] + D[r + 8][3] is the row's sum; the rest of D is unused. The memory bound leaves room for
//            that: float32 activations take no extra time, and a row is summed with one shuffle.
// Warps      each of the eight warps multiplies 32 of every STEP (256) columns, for all tiles of the CTA. The warps write
//            their sums to Shared::sums, and thread t adds those of row t. Tiles side by side are divided otherwise (SideBySide):
//            a warp that has whole tiles needs neither Shared::sums nor a barrier.
// Memory     weights pass from the ring to registers once, 16 bytes per thread and load without bank conflicts; a phase's
//            first tiles are fetched before its operand is waited for, except in a persistent kernel without CROSS_PHASE_PREFETCH.
// Barriers   one barrier of the consumer threads per group of tiles, between the warps' sums and their addition. It also lets the next
//            phase overwrite the operand. Two sets of sums alternate, so that a warp may multiply again while others still add.
#pragma once

// Tiles whose weights are in registers at once. Launches that overlap, two CTAs per SM, have fewer registers.
constexpr int TILES_AHEAD = LAUNCH_PER_PHASE ? 2 : MAX_TILES;

// A CTA multiplies its tiles in groups of at most MAX_TILES, in the order of the weight stream (packing.py). GROUPS_... in plan.cuh is
// the most groups of any CTA, MAX_... and MIN_... the most and fewest tiles of a group.
DEVICE int group_count(int tiles) { return (tiles + MAX_TILES - 1) / MAX_TILES; }

// Order in which a group's weights pass through registers, which is that of the stream. The columns are divided into BLOCKS of DEEP
// steps. In each block come the tiles, in batches of SIZE, fetched at once. For a single tile, ROUNDS blocks are one batch. A batch has
// at most AHEAD entries: they must all fit in the ring. TILES and MIN_TILES are the most and fewest tiles of a group. If a tile has
// fewer columns (TILE_COLUMNS) than a block (COLUMNS), several tiles lie side by side in the same steps (residual.cuh). A tile has RUN
// pieces in a block, and TAIL in the last.
template <int COLUMNS, int TILES, int MIN_TILES, int TILE_COLUMNS = COLUMNS>
struct WeightBatches {
  static constexpr bool SIDE_BY_SIDE_TILES = TILE_COLUMNS < COLUMNS;
  static constexpr int DEEP = SIDE_BY_SIDE_TILES ? COLUMNS / STEP : depth_of(COLUMNS);
  static constexpr int MOST = SIDE_BY_SIDE_TILES ? 2 * DEPTH / DEEP : TILES_AHEAD, FIT = STAGES - IN_PARTS, AHEAD = MOST < FIT ? MOST : FIT;
  static constexpr int BLOCKS = SIDE_BY_SIDE_TILES ? 1 : blocks_of(COLUMNS), BATCHES = (TILES + AHEAD - 1) / AHEAD;
  static constexpr int SIZE = (TILES + BATCHES - 1) / BATCHES, ROUNDS = TILES > 1 ? 1 : BLOCKS < AHEAD ? BLOCKS : AHEAD;
  static constexpr int RUN = pieces_of(DEEP * STEP), TAIL = pieces_of(COLUMNS) - (BLOCKS - 1) * RUN;
  static_assert(IN_PARTS || TAIL == RUN, "blocks of DEPTH steps cover all columns");
  static_assert(!SIDE_BY_SIDE_TILES || (TAIL == RUN && COLUMNS % TILE_COLUMNS == 0 && TILE_COLUMNS % 32 == 0), "a batch has whole tiles");
  typedef uint4 Weights[ROUNDS * SIZE][DEEP];

  // Fetch the weights of the batch that begins at tile `first` and block `block`, of `tiles` tiles in the group.
  DEVICE static void fetch(Consumer& c, int block, int first, int tiles, Weights& v) {
    auto within = [](int count, int most) { return count < 0 ? 0 : count < most ? count : most; };
    const int runs = TILES == 1 ? within(BLOCKS - block, ROUNDS) : within(MIN_TILES == TILES ? TILES - first : tiles - first, SIZE);
    const int guaranteed = TILES == 1 ? within(BLOCKS - (BLOCKS - 1) / ROUNDS * ROUNDS, ROUNDS) : within(MIN_TILES - first, SIZE);
    if constexpr (!IN_PARTS) {
      c.fetch(v, runs, guaranteed);
    } else if constexpr (TILES == 1) {  // Runs are blocks, and only the last of all may be shorter.
      const int whole = BLOCKS - 1 - block;
      c.fetch_parts<TAIL>(v, runs, guaranteed, RUN, runs > whole ? whole * RUN + TAIL : runs * RUN, whole);
    } else {  // Runs are tiles in the same block.
      const bool last = block == BLOCKS - 1;
      c.fetch_parts<TAIL>(v, runs, guaranteed, last ? TAIL : RUN, runs * (last ? TAIL : RUN), last ? 0 : runs);
    }
  }
};

// Return a warp's sum of a row, in the first two lanes of each quad: the first lane has D's rows 0 to 7 of columns 0 and 1, the second
// rows 8 to 15 of columns 2 and 3. CHAINS accumulators are added.
template <int CHAINS>
DEVICE float quad_sum(const Consumer& c, const float (&d)[CHAINS][4]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < CHAINS; ++i) sum += c.lane % 4 == 0 ? d[i][0] + d[i][1] : d[i][2] + d[i][3];
  return sum + shfl_xor(sum, 1);
}
// Return the address of a lane's fragment of operand B, for the 32 columns from `column` on. B's column (lane / 4) selects x_hi or x_lo
// and the first or last four of each eight columns; the lane's quad selects the eight.
DEVICE const u16* operand(const Consumer& c, int column) {
  const int row = c.lane / 4, quad = c.lane % 4;
  return (row & 1 ? c.s.vector_lo : c.s.vector_hi) + column + 8 * quad + (row & 2 ? 4 : 0);
}
// Division of a block of TILES tiles that lie side by side among the warps. A tile has PARTS parts of 32 columns, the columns of one mma.
// Each warp takes DEEP consecutive parts of the block, tile after tile. So a warp has TILES_PER_WARP whole tiles, or WARPS_PER_TILE
// warps share a tile.
template <int COLUMNS, int TILE_COLUMNS>
struct SideBySide {
  static constexpr int DEEP = COLUMNS / STEP, TILES = COLUMNS / TILE_COLUMNS, PARTS = TILE_COLUMNS / 32;
  static constexpr int TILES_PER_WARP = PARTS < DEEP ? DEEP / PARTS : 1, WARPS_PER_TILE = PARTS > DEEP ? PARTS / DEEP : 1;
};
// Multiply `tiles` (at most TILES) blocks of tiles that lie side by side by the operand from `column` on. The first batch of weights must
// have been fetched into v, and the operand must be staged. If a warp has whole tiles, its lanes call store(row in the blocks, sum), and
// no barrier is needed. Else the sums go to Shared::sums, and the caller adds those of WARPS_PER_TILE warps after a barrier.
template <int COLUMNS, int TILES, int MIN_TILES, int TILE_COLUMNS, class Store>
DEVICE void multiply_side_by_side(Consumer& c, int tiles, int column,
                                  typename WeightBatches<COLUMNS, TILES, MIN_TILES, TILE_COLUMNS>::Weights& v, Store store) {
  using B = WeightBatches<COLUMNS, TILES, MIN_TILES, TILE_COLUMNS>;
  using Split = SideBySide<COLUMNS, TILE_COLUMNS>;
  const int quad = c.lane % 4, first_part = c.warp * B::DEEP;
#pragma unroll
  for (int first = 0; first < TILES; first += B::SIZE) {
    if (first) B::fetch(c, 0, first, tiles, v);
    constexpr int CHAINS = B::DEEP / Split::TILES_PER_WARP > 1 ? 2 : 1;  // independent accumulators: mma's that do not wait for each other
    float d[B::SIZE][Split::TILES_PER_WARP][CHAINS][4] = {};
#pragma unroll
    for (int i = 0; i < B::DEEP; ++i) {
      const int part = Split::PARTS <= B::DEEP ? i % Split::PARTS : first_part % Split::PARTS + i;
      const uint2 b = *(const uint2*)operand(c, column + part * 32);
#pragma unroll
      for (int t = 0; t < B::SIZE && first + t < TILES; ++t)
        if (first + t < MIN_TILES || first + t < tiles)
          mma_m16n8k16(d[t][Split::TILES_PER_WARP > 1 ? i / Split::PARTS : 0][i % CHAINS], v[t][i], b);
    }
    constexpr int SUMS = B::SIZE * Split::TILES_PER_WARP;
#pragma unroll
    for (int pair = 0; pair < SUMS; pair += 2) {  // quad_sum() leaves a tile's sum in two lanes of a quad; each stores one tile of two.
      int tile = -1;
      float mine = 0;
#pragma unroll
      for (int each = pair; each < pair + 2 && each < SUMS; ++each) {
        const int t = each / Split::TILES_PER_WARP;
        const float sum = quad_sum(c, d[t][each % Split::TILES_PER_WARP]);
        if (first + t < tiles && quad == each - pair)
          mine = sum, tile = (first + t) * Split::TILES + first_part / Split::PARTS + each % Split::TILES_PER_WARP;
      }
      if (tile < 0) continue;
      const int row = tile * TILE + c.lane / 4;
      if constexpr (Split::WARPS_PER_TILE == 1)
        store(row, mine);
      else
        c.s.sums[(c.parity * WARPS + c.warp % Split::WARPS_PER_TILE) * SUM_ROWS + row] = mine;
    }
  }
}
// Multiply up to TILES tiles over all columns; each warp takes its 32 columns of every STEP and leaves its row sums in Shared::sums.
// The first batch of weights must have been fetched into v, and the operand must be staged.
template <int COLUMNS, int TILES, int MIN_TILES>
DEVICE void multiply(Consumer& c, int tiles, typename WeightBatches<COLUMNS, TILES, MIN_TILES>::Weights& v, int column = 0) {
  using B = WeightBatches<COLUMNS, TILES, MIN_TILES>;
  // Independent accumulators per tile, so that an mma need not wait for the one before it. More than four tiles leave no registers for
  // two, and overlap with each other; one tile alone has no other mma's to overlap with.
  constexpr int CHAINS = TILES > 4 ? 1 : TILES == 1 ? 4 : 2;
  float d[TILES][CHAINS][4];
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int i = 0; i < 4 * CHAINS; ++i) d[t][i / 4][i % 4] = 0.0f;
  const u16* x = operand(c, column + 32 * c.warp);
#pragma unroll 1
  for (int block = 0; block < B::BLOCKS; block += B::ROUNDS) {
#pragma unroll
    for (int first = 0; first < TILES; first += B::SIZE) {
      if (block || first) B::fetch(c, block, first, tiles, v);
#pragma unroll
      for (int r = 0; r < B::ROUNDS; ++r) {
        if (B::BLOCKS % B::ROUNDS && block + r >= B::BLOCKS) continue;
        uint2 b[B::DEEP];
#pragma unroll
        for (int i = 0; i < B::DEEP; ++i) b[i] = *(const uint2*)(x + ((block + r) * B::DEEP + i) * STEP);
#pragma unroll
        for (int i = 0; i < B::DEEP; ++i)
#pragma unroll
          for (int t = 0; t < B::SIZE && first + t < TILES; ++t)
            if (first + t < MIN_TILES || first + t < tiles) mma_m16n8k16(d[first + t][i % CHAINS], v[r + t][i], b[i]);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; ++t)
    if (t < MIN_TILES || t < tiles) {
      const float sum = quad_sum(c, d[t]);
      if (c.lane % 4 == 0) c.s.sums[(c.parity * WARPS + c.warp) * SUM_ROWS + t * TILE + c.lane / 4] = sum;
    }
}
// Return a row's sum over all warps, or over the first COUNT, not yet scaled by 1 / RMS. A barrier must lie between multiply() and this.
template <int COUNT = WARPS>
DEVICE float sum_over_warps(const Consumer& c, int row) {
  float each[COUNT];
#pragma unroll
  for (int warp = 0; warp < COUNT; ++warp) each[warp] = c.s.sums[(c.parity * WARPS + warp) * SUM_ROWS + row];
  return tree_sum(each);
}

// Run a matrix-vector phase: fetch weights, call stage() to stage the operand, multiply all tiles, and call
// apply(row of the matrix, index of the row in this CTA, its product, product of the row half a tile away) in one thread for each row.
// The row half a tile away is the RoPE partner, or the up projection's row of a gate row. stage() must end with a barrier.
template <int COLUMNS, int TILES, int MIN_TILES, int GROUPS, class Stage, class Apply>
DEVICE void multiply_phase(Consumer& c, int phase, Stage stage, Apply apply) {
  using B = WeightBatches<COLUMNS, TILES, MIN_TILES>;
  constexpr bool EARLY = CROSS_PHASE_PREFETCH || LAUNCH_PER_PHASE;  // Else weights may not be copied before the phase begins.
  const int begin = c.begin(phase), count = c.end(phase) - begin, groups = GROUPS > 1 ? group_count(count) : 1;
  if (phase == LM_HEAD && count == 0) return stage();  // A CTA without rows still follows every epoch of the words (words.cuh).
  auto first_of = [&](int group) { return group * count / groups; };
  typename B::Weights v;
  auto multiply_group = [&](int first, int tiles) {
    multiply<COLUMNS, TILES, MIN_TILES>(c, tiles, v);
    if (first == 0) publish_squares(c);
    c.sync();
    const bool has = c.thread < tiles * TILE;
    // Loaded before read_scale() loads the squares: the scale is needed last.
    const float own = sum_over_warps(c, has ? c.thread : 0), other = shfl_xor(own, TILE / 2);
    if (first == 0) read_scale(c);
    if (has) apply((begin + first) * TILE + c.thread, first * TILE + c.thread, own * c.scale, other * c.scale);
    c.parity ^= 1;  // The next product writes the other set of sums, while slower threads still read this one.
  };
  int tiles = groups == 1 ? count : first_of(1);
  if constexpr (EARLY) B::fetch(c, 0, 0, tiles, v);
  stage();
  c.mark(phase, READY);
  if constexpr (!EARLY) B::fetch(c, 0, 0, tiles, v);
  multiply_group(0, tiles);
#pragma unroll 1
  for (int group = 1; group < groups; ++group) {
    const int first = first_of(group);
    tiles = first_of(group + 1) - first;
    B::fetch(c, 0, 0, tiles, v);
    multiply_group(first, tiles);
  }
  c.mark(phase, DONE);  // profile marker, as READY is: a time stamp on which no result depends
  c.release();
}
