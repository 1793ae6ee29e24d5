// NVFP4 decoder: codes of operand A and their block scales, of 16 channels each, become 16-bit elements in registers, exactly.
//
// Codes:      a byte, which is two neighbouring channels, is looked up in a table in shared memory.
// Scales:     e4m3, copied by the producer warp with cp.async and converted by three warps of their own, for each thread that
//             decodes needs all scales of a row, as three others do. NaN stays NaN. K is a multiple of K_BLOCK.
// Table:      256 rows of 256 bytes. A row repeats a pair once for every bank, so that lanes that look up at once do not
//             conflict. That takes half of the row, so that its address is one byte of codes followed by one that tells the
//             bank; scales lie in the other half.
#pragma once
#include "tile.cuh"

__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 bytes) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(bytes));
  return r;
}

__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
  u32 r;
  if (ELEMENT == BFLOAT16)
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  else
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Repeat one half of a word in both.
__device__ __forceinline__ u32 repeat_half(u32 word, int half) {
  u32 r;
  if (half == 0)
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};\n}" : "=r"(r) : "r"(word));
  else
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};\n}" : "=r"(r) : "r"(word));
  return r;
}

// Decode the two codes of a byte to a pair of elements.
__device__ __forceinline__ u32 decode_pair(u32 byte) {
  u32 pair = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 code = byte >> (4 * half), at = code & 7;
    const u32 high = ELEMENT == BFLOAT16 ? prmt(0x3F3F3F00, 0x40404040, at) : prmt(0x3E3C3800, 0x46444240, at);
    const u32 low = ELEMENT == BFLOAT16 ? prmt(0xC0800000, 0xC0804000, at) & 0xFF : 0;
    pair |= ((code & 8) << 12 | (high & 0xFF) << 8 | low) << (16 * half);
  }
  return pair;
}

// Fill the table: 256 threads, a row each.
__device__ __forceinline__ void fill_table(char* table, u32 thread) {
  if (thread >= 256) return;
  const u32 pair = decode_pair(thread);
#pragma unroll
  for (u32 piece = 0; piece < 8; ++piece)  // in another order by each lane, for their rows begin in the same bank
    *reinterpret_cast<uint4*>(table + thread * 256 + (piece + thread) % 8 * 16) = make_uint4(pair, pair, pair, pair);
}

__device__ __forceinline__ u32 looked_up(const char* table, u32 word, u32 bytes, u32 bank) {
  return *reinterpret_cast<const u32*>(table + prmt(word, bank, bytes));
}

// Block scales of a k-block: ROW_SCALES of each row of A. The 16-bit factors that they become lie by pairs of chunks of B:
// those of a row for two chunks side by side, then those of the next row. The e4m3 scales of a row come to where its last
// factors will be.
constexpr int ROW_SCALES = 4 * CHUNKS, FACTOR_BYTES = 2 * A_ROWS * ROW_SCALES, PIECE = CHUNKS == 1 ? 8 : 16;
static_assert(STAGES * FACTOR_BYTES <= TABLE_BYTES / 2, "factors lie between the table's rows");

// Return the address of the factors of row r for a piece of one or two chunks.
__device__ __forceinline__ u32 factors_at(u32 table, int stage, int r, int piece) {
  const u32 offset = stage * FACTOR_BYTES + (piece * A_ROWS + r) * PIECE;
  return table + offset + offset / 128 * 128 + 128;
}
__device__ __forceinline__ u32 scales_at(u32 table, int stage, int r) { return factors_at(table, stage, r, (CHUNKS - 1) / 2); }

// Copy the e4m3 scales of a k-block by one warp. A lane's rows are all of one weight, whose ``blocks`` it brings. TMA would
// need boxes of 16 bytes a row, and K in multiples of 256. 128 bytes go to the L2 cache at once.
__device__ __forceinline__ void copy_scales(
    u32 table, int stage, const unsigned char* blocks, int column, int k_block, int N, int K, int lane) {
#pragma unroll
  for (int r = 0; r < A_ROWS; r += 32) {
    const int n = min(column + (r + lane) / 16 * 8 + lane % 8, N - 1);
    cp_async<ROW_SCALES>(scales_at(table, stage, r + lane), blocks + (long long)n * (K / 16) + k_block * ROW_SCALES);
  }
}

// Convert four e4m3 scales to two pairs of 16-bit factors.
__device__ __forceinline__ void convert(u32 four, u32& first, u32& second) {
  u32 pairs[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    asm("{\n.reg .b16 x;\ncvt.u16.u32 x, %1;\ncvt.rn.f16x2.e4m3x2 %0, x;\n}" : "=r"(pairs[i]) : "r"(four >> (16 * i)));
  if (ELEMENT == BFLOAT16) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float low, high;
      asm("{\n.reg .b16 x, y;\nmov.b32 {x, y}, %2;\ncvt.f32.f16 %0, x;\ncvt.f32.f16 %1, y;\n}"
          : "=f"(low), "=f"(high)
          : "r"(pairs[i]));
      pairs[i] = prmt(__float_as_uint(low), __float_as_uint(high), 0x7632);  // the upper halves: exact
    }
  }
  first = pairs[0];
  second = pairs[1];
}

// Convert the scales of a k-block by ``threads`` threads, a row each.
__device__ __forceinline__ void convert_scales(u32 table, int stage, int thread, int threads) {
  for (int r = thread; r < A_ROWS; r += threads) {
    u32 words[CHUNKS], v[2 * CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) words[i] = ld_shared_u32(scales_at(table, stage, r) + 4 * i);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) convert(words[i], v[2 * i], v[2 * i + 1]);
    if constexpr (CHUNKS == 1) {
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(factors_at(table, stage, r, 0)), "r"(v[0]), "r"(v[1]) : "memory");
    } else {
#pragma unroll
      for (int i = 0; i < CHUNKS / 2; ++i)
        st_shared_v4_u32(factors_at(table, stage, r, i), v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
    }
  }
}

// Load 16 bytes of codes of row r of a stage: those of 32 channels.
__device__ __forceinline__ uint4 load_codes(u32 at, int r, int piece) {
  constexpr int PITCH = 32 * CHUNKS, PIECES = 2 * CHUNKS;  // swizzled over the row
  return ld_shared_v4_u32((at + r * PITCH + r / (8 / PIECES) % PIECES * 16) ^ piece * 16);
}

// Decoder of what a thread needs of its rows r and r + 8 for the four WGMMAs of a chunk of 64 channels. It works in three
// steps, for shared memory has latency: those of the next chunk are under way meanwhile.
struct Decoder {
  const char* table;
  u32 at;  // address of the stage
  int stage, r;
  u32 byte, bank;
  uint4 codes[2][2];  // by row, by half of the channels
  u32 pairs[2][8];    // by row, by eight channels
  u32 factors[2][4];  // by row; of two chunks, if there are two

  __device__ __forceinline__ Decoder(const char* table, u32 at, int stage, int r, int lane)
      : table(table), at(at), stage(stage), r(r), byte(0x5504 | lane % 4 << 4), bank(4 * lane) {}

  __device__ __forceinline__ void load(int c) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) codes[i][half] = load_codes(at, r + 8 * i, 2 * c + half);
  }

  // A WGMMA wants channels 2 t and 2 t + 1 of each eight from lane t of four, a byte of each word.
  __device__ __forceinline__ void look_up() {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 four = codes[i][half];
        pairs[i][4 * half] = looked_up(table, four.x, byte, bank);
        pairs[i][4 * half + 1] = looked_up(table, four.y, byte, bank);
        pairs[i][4 * half + 2] = looked_up(table, four.z, byte, bank);
        pairs[i][4 * half + 3] = looked_up(table, four.w, byte, bank);
      }
  }

  __device__ __forceinline__ void load_factors(u32 table_at, int c) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 from = factors_at(table_at, stage, r + 8 * i, c / 2);
      if constexpr (CHUNKS == 1) {
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(factors[i][0]), "=r"(factors[i][1]) : "r"(from) : "memory");
      } else if (c % 2 == 0) {
        const uint4 v = ld_shared_v4_u32(from);
        factors[i][0] = v.x, factors[i][1] = v.y, factors[i][2] = v.z, factors[i][3] = v.w;
      }
    }
  }

  __device__ __forceinline__ void scale(u32 (&w)[4][4], int c) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        const u32 by = repeat_half(factors[i][c % 2 * 2 + block / 2], block % 2);
        w[block][i] = multiply_pairs(pairs[i][2 * block], by);
        w[block][i + 2] = multiply_pairs(pairs[i][2 * block + 1], by);
      }
  }
};
