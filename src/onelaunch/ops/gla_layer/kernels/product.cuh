// Products of a CTA's weight rows with all rows of x, by mma.m16n8k16: weights from the ring, operand from shared memory.
//
// Computes   y[row][n] = sum over columns of W[row][column] x[n][column], in float32.
// mma        a tile of 16 rows of W is operand A, 8 rows of x are operand B. A sum does not depend on the order of its terms, so a lane
//            takes 8 consecutive columns, 16 bytes, of its row as the two halves of two mma's: any lane's columns 4i to 4i + 3 are its
//            columns of one mma. Tiles of fewer rows leave rows of A zero.
// Banks      eight lanes read 16 bytes at once, of two rows. The swizzle puts unit u of row r at u ^ (r % 8), so row_of() pairs rows that
//            differ in bit 2, whose units do not collide. Rows of the operand are 64 bytes longer than a multiple of 128.
// Warps      a warp takes every BLOCK_GROUPS-th block of 64 columns. The warps' sums are added in a fixed order.
// Slabs      the operand of many rows does not fit into shared memory, so it is staged in slabs of columns, and products are added in y.
#pragma once

// Row of a tile for the lanes of a quad: a permutation of 0 to 7 that puts rows r and r + 4 into neighboring quads.
DEVICE int row_of(int quad) { return quad >> 1 | (quad & 1) << 2; }

// Load a slab of an operand [B T, WIDE] in bfloat16 into registers, run prepare(), and store transform(values, row, column) to shared
// memory. Ends with a barrier. SLAB_COLUMNS is the width of a slab, of which the last may have less.
template <int SLAB_COLUMNS, int WIDE, class Prepare, class Transform>
DEVICE void stage_operand(Consumer& c, const u16* from, int slab, Prepare prepare, Transform transform) {
  constexpr int UNITS = SLAB_COLUMNS / 8, EACH = divided(ROWS * UNITS, CONSUMER_THREADS);
  uint4 v[EACH];
  c.refresh();
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = c.thread + i * CONSUMER_THREADS, row = at / UNITS, column = slab * SLAB_COLUMNS + at % UNITS * 8;
    v[i] = {0, 0, 0, 0};
    if (row < c.a.rows && column < WIDE) v[i] = load_weak((const uint4*)(from + (long long)row * WIDE + column));
  }
  prepare();
  c.refresh();
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = c.thread + i * CONSUMER_THREADS, row = at / UNITS, column = slab * SLAB_COLUMNS + at % UNITS * 8;
    if (row < c.a.rows && column < WIDE)
      *(uint4*)(c.s.operand + row * (2 * SLAB_COLUMNS + 64) + at % UNITS * 16) = transform(v[i], row, column);
  }
  c.sync();
}

// Multiply one tile of TILE rows by `blocks` blocks of 64 columns of the staged operand; leave the sums of each group of warps in
// Shared::sums. PITCH is that of the operand in bytes.
template <int TILE, int CHUNK_BLOCKS, int PITCH>
DEVICE void multiply_tile(Consumer& c, int blocks) {
  c.refresh();
  const int quad = c.lane / 4, unit = c.lane % 4, row = row_of(quad) & (TILE - 1);
  const int block_group = c.warp % BLOCK_GROUPS, first_tile = c.warp / BLOCK_GROUPS * TILES_PER_WARP;
  constexpr int CHAINS = TILES_PER_WARP > 2 ? 1 : 2;  // accumulators per tile, so that an mma need not wait for the one before it
  float d[TILES_PER_WARP][CHAINS][4];
#pragma unroll
  for (int i = 0; i < TILES_PER_WARP * CHAINS * 4; ++i) d[i / 4 / CHAINS][i / 4 % CHAINS][i % 4] = 0.0f;
#pragma unroll 1
  for (int first = 0; first < blocks; first += CHUNK_BLOCKS) {
    const char* chunk = c.wait_chunk();
#pragma unroll 2
    for (int block = block_group; block < CHUNK_BLOCKS; block += BLOCK_GROUPS) {
      if (first + block >= blocks) break;
      const int line = block * TILE + row;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const char* at = chunk + line * 128 + ((4 * half + unit) ^ (line & 7)) * 16;
        const uint4 low = *(const uint4*)at;
        uint4 high = {0, 0, 0, 0};
        if constexpr (TILE == 16) high = *(const uint4*)(at + 8 * 128);  // eight rows on: the same place in the swizzle
#pragma unroll
        for (int tile = 0; tile < TILES_PER_WARP; ++tile) {
          const int n = (first_tile + tile) * 8 + quad;
          const uint4 b = *(const uint4*)(c.s.operand + (n < ROWS ? n : ROWS - 1) * PITCH + (first + block) * 128 + (4 * half + unit) * 16);
          mma_m16n8k16(d[tile][0], {low.x, high.x, low.y, high.y}, {b.x, b.y});
          mma_m16n8k16(d[tile][CHAINS - 1], {low.z, high.z, low.w, high.w}, {b.z, b.w});
        }
      }
    }
    c.release_chunk();
  }
  float* sums = c.s.sums + (c.parity * BLOCK_GROUPS + block_group) * 16 * COLUMNS + first_tile * 8 + 2 * unit;
  const int mine = row_of(quad);
#pragma unroll
  for (int tile = 0; tile < TILES_PER_WARP; ++tile) {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = d[tile][0][i] + (CHAINS > 1 ? d[tile][CHAINS - 1][i] : 0.0f);
    if (mine < TILE) sums[mine * COLUMNS + tile * 8] = v[0], sums[mine * COLUMNS + tile * 8 + 1] = v[1];
    if (TILE == 16) sums[(mine + 8) * COLUMNS + tile * 8] = v[2], sums[(mine + 8) * COLUMNS + tile * 8 + 1] = v[3];
  }
}

// Multiply `count` rows, tile by tile, and call store(row, n, sum) in one thread for each row and each row n of x.
template <int TILE, int SLAB_COLUMNS, class Store>
DEVICE void multiply_rows(Consumer& c, int count, int blocks, Store store) {
#pragma unroll 1
  for (int first = 0; first < count; first += TILE) {
    multiply_tile<TILE, chunk_blocks(TILE, SLAB_COLUMNS), 2 * SLAB_COLUMNS + 64>(c, blocks);
    c.sync();
    for (int at = c.thread; at < TILE * COLUMNS; at += CONSUMER_THREADS) {
      const int row = at / COLUMNS, n = at % COLUMNS;
      if (first + row >= count || n >= c.a.rows) continue;
      float sum = 0;
#pragma unroll
      for (int group = 0; group < BLOCK_GROUPS; ++group) sum += c.s.sums[((c.parity * BLOCK_GROUPS + group) * 16 + row) * COLUMNS + n];
      store(first + row, n, sum);
    }
    c.parity ^= 1;  // the next product writes the other set of sums, while slower threads still read this one
  }
}
