// Products of a CTA's weight rows with all rows of x, by mma.m16n8k16: weights from the ring, operand from shared memory.
//
// Computes   y[row][n] = sum over columns of W[row][column] x[n][column], in float32.
// mma        a tile of 16 rows of W is operand A, 8 rows of x are operand B. A sum does not depend on the order of its terms, so a lane
//            takes 8 consecutive columns, 16 bytes, of its row as the two halves of two mma's: any lane's columns 4i to 4i + 3 are its
//            columns of one mma. Tiles of fewer rows leave rows of A zero.
// Banks      eight lanes read 16 bytes at once, of two rows. The swizzle puts unit u of row r at u ^ (r % 8), so row_of() pairs rows that
//            differ in bit 2, whose units do not collide. An operand of 8 rows and more has the same layout (BOXED); rows of a smaller
//            one are 64 bytes longer than a multiple of 128.
// Warps      a warp takes every BLOCK_GROUPS-th block of 64 columns. The warps' sums are added in a fixed order.
// Slabs      the operand of many rows does not fit into shared memory, so it is staged in slabs of columns, and products are added in y.
#pragma once

// Row of a tile for the lanes of a quad: a permutation of 0 to 7 that puts rows r and r + 4 into neighboring quads.
DEVICE int row_of(int quad) { return quad >> 1 | (quad & 1) << 2; }

// Load a slab of an operand [B T, WIDE] in bfloat16 into registers, run prepare(), and store transform(values, row, column) to shared memory.
// Ends with a barrier. SLAB_COLUMNS is the width of a slab, of which the last may have less.
template <int SLAB_COLUMNS, int WIDE, class Prepare, class Transform>
DEVICE void stage_operand(Consumer& c, int slab, const u16* operand, Prepare prepare, Transform transform) {
  constexpr int UNITS = SLAB_COLUMNS / 8, EACH = divided(ROWS * UNITS, CONSUMER_THREADS);
  uint4 v[EACH];
  c.refresh();
  auto row_of = [&](int i) { return (c.thread + i * CONSUMER_THREADS) / UNITS; };
  auto column_of = [&](int i) { return slab * SLAB_COLUMNS + (c.thread + i * CONSUMER_THREADS) % UNITS * 8; };
  auto has = [&](int i) { return row_of(i) < c.a.rows && column_of(i) < WIDE; };
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    v[i] = {0, 0, 0, 0};
    if (has(i)) v[i] = load_weak((const uint4*)(operand + (long long)row_of(i) * WIDE + column_of(i)));
  }
  prepare();
  c.refresh();
#pragma unroll
  for (int i = 0; i < EACH; ++i)
    if (has(i)) {
      const int row = row_of(i), column = column_of(i);
      *(uint4*)(c.s.operand + operand_offset<SLAB_COLUMNS>(row, column % SLAB_COLUMNS / 8)) = transform(v[i], row, column);
    }
  c.sync();
  c.boxes = BOXES;
}
// Copy a slab of an operand by TMA, in at most 4 boxes of all its rows or half of them: one thread issues them, and products wait for each box when they need
// it. Rows behind the last one become zeros. If SHARED, each CTA of a pair copies every second box into both. Both must have read what lies
// there before, and have initialized their barriers. A box may land before the barrier expects it: its phase still lacks an arrival.
template <int SLAB_COLUMNS>
struct Boxes {
  static constexpr int BLOCKS = box_blocks(SLAB_COLUMNS), BYTES = BLOCKS * BOX_ROWS * 128;
  static_assert(HALVES * divided(SLAB_COLUMNS / 64, BLOCKS) <= BOXES || !BOXED, "a barrier for each");
  // Issue the boxes of the halves from `first` to `last` of the rows.
  template <bool SHARED>
  static DEVICE void issue(const Shared& s, const TensorMap* map, int slab, int blocks, int first = 0, int last = HALVES - 1) {
#pragma unroll 1
    for (int box = 0; box * BLOCKS < blocks; ++box)
#pragma unroll 1
      for (int half = first; half <= last; ++half) {
        u64* const bar = s.loaded + box * HALVES + half;
        mbarrier_arrive_expect_tx(bar, BYTES);
        char* const to = s.operand + half * half_bytes(SLAB_COLUMNS) + box * BYTES;
        const int block = slab * (SLAB_COLUMNS / 64) + box * BLOCKS;
        if constexpr (!SHARED)
          tma_load_3d(to, map, 0, half * BOX_ROWS, block, bar);
        else if (box % 2 == cta_index() % 2)
          tma_load_3d_multicast(to, map, 0, half * BOX_ROWS, block, bar);
      }
  }
  // Wait for the boxes of the blocks before `end`.
  static DEVICE void await(Consumer& c, int end) {
#pragma unroll 1
    for (; c.boxes / HALVES * BLOCKS < end; ++c.boxes) {
      u64* bar = c.s.loaded + c.boxes;
      spin_until([&] { return mbarrier_try_wait(bar, c.landings >> c.boxes & 1); });
      c.landings ^= 1u << c.boxes;
    }
  }
};

// Multiply one tile of TILE rows by `blocks` blocks of 64 columns of the staged operand; leave the sums of each group of warps in
// Shared::sums.
template <int TILE, int SLAB_COLUMNS>
DEVICE void multiply_tile(Consumer& c, int blocks) {
  c.refresh();
  constexpr int CHUNK_BLOCKS = chunk_blocks(TILE, SLAB_COLUMNS);
  constexpr int EACH = divided(CHUNK_BLOCKS, BLOCK_GROUPS), UNROLLED = EACH < 2 ? EACH : 2;  // blocks of a chunk for a warp: one of a tile of 16
  const int quad = c.lane / 4, unit = c.lane % 4, row = row_of(quad) & (TILE - 1), column = BOXED ? row_of(quad) : quad;
  const int block_group = c.warp % BLOCK_GROUPS, first_tile = c.warp / BLOCK_GROUPS * TILES_PER_WARP;
  constexpr int CHAINS = TILES_PER_WARP > 2 ? 1 : 2;  // accumulators per tile, so that an mma need not wait for the one before it
  float d[TILES_PER_WARP][CHAINS][4];
#pragma unroll
  for (int i = 0; i < TILES_PER_WARP * CHAINS * 4; ++i) d[i / 4 / CHAINS][i / 4 % CHAINS][i % 4] = 0.0f;
#pragma unroll 1
  for (int first = 0; first < blocks; first += CHUNK_BLOCKS) {
    if constexpr (BOXED) Boxes<SLAB_COLUMNS>::await(c, blocks - first < CHUNK_BLOCKS ? blocks : first + CHUNK_BLOCKS);
    const char* chunk = c.wait_chunk();
#pragma unroll UNROLLED
    for (int i = 0; i < EACH; ++i) {
      const int block = block_group + i * BLOCK_GROUPS;
      if (block >= CHUNK_BLOCKS || first + block >= blocks) break;
      const int line = block * TILE + row;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const char* at = chunk + line * 128 + ((4 * half + unit) ^ (line & 7)) * 16;
        const uint4 low = *(const uint4*)at;
        uint4 high = {0, 0, 0, 0};
        if constexpr (TILE == 16) high = *(const uint4*)(at + 8 * 128);  // eight rows on: the same place in the swizzle
#pragma unroll
        for (int tile = 0; tile < TILES_PER_WARP; ++tile) {
          const int n = (first_tile + tile) * 8 + column;
          const int at_b = operand_offset<SLAB_COLUMNS>(n < ROWS ? n : ROWS - 1, (first + block) * 8 + 4 * half + unit);
          const uint4 b = *(const uint4*)(c.s.operand + at_b);
          mma_m16n8k16(d[tile][0], {low.x, high.x, low.y, high.y}, {b.x, b.y});
          mma_m16n8k16(d[tile][CHAINS - 1], {low.z, high.z, low.w, high.w}, {b.z, b.w});
        }
      }
    }
    c.release_chunk();
  }
  // Columns 2 u and 2 u + 1 of a tile are rows u and u + 4 of a boxed operand, as row_of() permutes them.
  constexpr int FIRST = BOXED ? 1 : 2, NEXT = BOXED ? 4 : 1;
  float* sums = c.s.sums + (c.parity * BLOCK_GROUPS + block_group) * 16 * SUM_PITCH + first_tile * 8 + FIRST * unit;
  const int mine = row_of(quad);
#pragma unroll
  for (int tile = 0; tile < TILES_PER_WARP; ++tile) {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = d[tile][0][i] + (CHAINS > 1 ? d[tile][CHAINS - 1][i] : 0.0f);
    if (mine < TILE) sums[mine * SUM_PITCH + tile * 8] = v[0], sums[mine * SUM_PITCH + tile * 8 + NEXT] = v[1];
    if (TILE == 16) sums[(mine + 8) * SUM_PITCH + tile * 8] = v[2], sums[(mine + 8) * SUM_PITCH + tile * 8 + NEXT] = v[3];
  }
}

// Multiply `count` rows, tile by tile, and call store(row, n, sum) in one thread for each row and each row n of x. Neighboring threads have
// neighboring rows, so that what they store for one n is contiguous. read() is called when a thread has read the operand and the weights.
template <int TILE, int SLAB_COLUMNS, class Store, class Read>
DEVICE void multiply_rows(Consumer& c, int count, int blocks, Store store, Read read) {
#pragma unroll 1
  for (int first = 0; first < count; first += TILE) {
    multiply_tile<TILE, SLAB_COLUMNS>(c, blocks);
    read();
    c.sync();
    for (int at = c.thread; at < TILE * COLUMNS; at += CONSUMER_THREADS) {
      const int row = at % TILE, n = at / TILE;
      if (first + row >= count || n >= c.a.rows) continue;
      float sum = 0;
#pragma unroll
      for (int group = 0; group < BLOCK_GROUPS; ++group) sum += c.s.sums[((c.parity * BLOCK_GROUPS + group) * 16 + row) * SUM_PITCH + n];
      store(first + row, n, sum);
    }
    c.parity ^= 1;  // the next product writes the other set of sums, while slower threads still read this one
  }
}
