// A CTA's tiles of a matrix times the vector laid out: weights out of the ring, sums of all warps, and what becomes of them.
#pragma once

// Tiles of a CTA in groups of at most MOST; the stream has the same.
DEVICE int groups_of(int tiles) { return (tiles + MOST - 1) / MOST; }

// Sums of up to TILES tiles over all columns, each warp its 32 of every STEP. The first granules are on their way, and always the next
// while those before are multiplied: a wait for the ring and a read of shared memory for each would be a third of the time.
template <int COLUMNS, int TILES>
DEVICE void multiply(Worker& w, int tiles, uint4 (&v)[DEPTH]) {
  constexpr int STEPS = padded(COLUMNS) / STEP;
  static_assert(STEPS % DEPTH == 0, "granules of a tile that follow each other");
  constexpr int CHAINS = TILES > 4 ? 1 : 2;  // of products that wait for each other; many tiles have no registers for two
  float d[TILES][CHAINS][4];
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int i = 0; i < 4 * CHAINS; ++i) d[t][i / 4][i % 4] = 0.0f;
  const int row = w.lane / 4, quad = w.lane % 4;  // row of the tile; as a column: which half of the 32 channels, which part
  const u16* x = (row & 1 ? w.s.lower : w.s.upper) + 32 * w.warp + 8 * quad + (row & 2 ? 4 : 0);
  for (int step = 0; step < STEPS; step += DEPTH) {
    uint2 b[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) b[i] = *(const uint2*)(x + (step + i) * STEP);
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      if (t < tiles) {
        uint4 next[DEPTH];
        const bool more = t + 1 < tiles || step + DEPTH < STEPS;
        if (more) w.fetch(next);
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) product(d[t][i % CHAINS], v[i].x, v[i].z, v[i].y, v[i].w, b[i].x, b[i].y);
        if (more) {
          w.release();
#pragma unroll
          for (int i = 0; i < DEPTH; ++i) v[i] = next[i];
        }
      }
    }
  }
  // Rows 0 to 7 of columns 0 and 1 are in a quad's first lane, rows 8 to 15 of columns 2 and 3 in its second.
  float* sums = w.s.sums + (w.parity * WARPS + w.warp) * MOST * TILE;
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    if (t < tiles) {
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

// All tiles of a phase: apply(row of the matrix, row among the CTA's, row of the sums) by a thread for each row.
template <int COLUMNS, int TILES, class Apply>
DEVICE void product_of(Worker& w, int phase, Apply apply) {
  const int begin = w.begin(phase), count = w.end(phase) - begin, groups = groups_of(count);
  w.mark(phase, READY);
  for (int group = 0; group < groups; ++group) {
    const int first = group * count / groups, tiles = (group + 1) * count / groups - first;
    uint4 v[DEPTH];
    w.fetch(v);
    w.release();
    multiply<COLUMNS, TILES>(w, tiles, v);
    w.meet();
    if (w.thread < tiles * TILE) apply((begin + first) * TILE + w.thread, first * TILE + w.thread, w.thread);
    w.parity ^= 1;  // so that sums are read while others already multiply
  }
  w.mark(phase, DONE);
}
