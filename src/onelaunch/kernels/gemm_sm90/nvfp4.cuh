// NVFP4 dequantization: 4-bit codes of operand A times their block scales become 16-bit WGMMA fragments in registers, exactly.
//
// Given:      with NVFP4 = 1 (tile.cuh), a stage holds A_ROWS rows of K_BLOCK / 2 bytes of codes. A k-block has CHUNKS chunks
//             of 64 channels; each is multiplied by four WGMMAs of 16 channels, one block of the format each.
// Computes:   element = e2m1 code * e4m3 scale of its block of 16 channels. The product has at most 6 significant bits, so
//             float16 and bfloat16 hold it exactly. Scales of whole tensors are applied by the epilogue. NaN scales stay NaN.
// Codes:      a byte holds two neighbouring channels. It is looked up in a table in shared memory, which gives both elements.
// Table:      256 rows of 256 bytes. Each row repeats the pair of one byte once for every bank (128 bytes), so that 32 lanes
//             that look up different bytes at once do not conflict. The other 128 bytes of each row hold block scales. Thus the
//             offset of an entry is a byte of codes followed by a byte that selects the bank, and one PRMT composes it.
// Scales:     the producer warp copies a k-block's e4m3 scales with cp.async; three converter warps turn them into 16-bit
//             factors. Otherwise each decoding thread would convert all scales of its rows, and four threads share a row.
// Steps:      fill_table() once per CTA; copy_scales() and convert_scales() per k-block; a Decoder in each consumer thread.
// Callers:    gemm.cu fills the table; mainloop.cuh calls the other steps.
// Protocol:   scales_full[s], scales_converted[s] and empty[s]: see mainloop.cuh.
// Requires:   K is a multiple of K_BLOCK, since nothing masks the codes and scales beyond the end.
#pragma once
#include "tile.cuh"

// Select four bytes of a (0 to 3) and b (4 to 7); each hexadecimal digit of `bytes` names one.
__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 bytes) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(bytes));
  return r;
}

// Multiply two pairs of 16-bit elements.
__device__ __forceinline__ u32 multiply_x2(u32 a, u32 b) {
  u32 r;
  if (ELEMENT == BFLOAT16)
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  else
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Return a word whose two halves both are the given half of `word`.
__device__ __forceinline__ u32 broadcast_half(u32 word, int half) {
  u32 r;
  if (half == 0)
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};\n}" : "=r"(r) : "r"(word));
  else
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};\n}" : "=r"(r) : "r"(word));
  return r;
}

// Decode the two e2m1 codes of a byte to a pair of 16-bit elements, the lower code in the lower half. Bit 3 of a code is the
// sign, the others number the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6, whose upper and lower bytes the PRMTs select. The lower
// bytes of all these float16 numbers are 0.
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

// Fill the table: each of 256 threads writes the pairs of one row. A barrier of all readers must follow.
__device__ __forceinline__ void fill_table(char* table, u32 thread) {
  if (thread >= 256) return;
  const u32 pair = decode_pair(thread);
#pragma unroll
  for (u32 piece = 0; piece < 8; ++piece)  // rows begin in the same bank, so each lane has an order of its own
    *reinterpret_cast<uint4*>(table + thread * 256 + (piece + thread) % 8 * 16) = make_uint4(pair, pair, pair, pair);
}

// Look up the pair of one byte of `word`. The PRMT selector composes the entry's offset: 256 times that byte, plus `bank`.
__device__ __forceinline__ u32 look_up_pair(const char* table, u32 word, u32 selector, u32 bank) {
  return *reinterpret_cast<const u32*>(table + prmt(word, bank, selector));
}

// Block scales of a k-block: ROW_SCALES e4m3 scales of each row of A become as many 16-bit factors, FACTOR_BYTES in a stage.
// Factors are grouped by pairs of chunks (64 channels, 4 factors each): within a pair, row after row, one vector of
// FACTOR_VECTOR_BYTES per row. cp.async puts the e4m3 scales of a row where its last factors will be written; the thread that
// converts a row reads all its scales first.
constexpr int ROW_SCALES = 4 * CHUNKS, FACTOR_BYTES = 2 * A_ROWS * ROW_SCALES, FACTOR_VECTOR_BYTES = CHUNKS == 1 ? 8 : 16;
static_assert(STAGES * FACTOR_BYTES <= TABLE_BYTES / 2, "the factors fit into the free halves of the table's rows");

// Return the address of the factors of row r for a pair of chunks, given by its index in the k-block (0 if CHUNKS is 1). Each
// 128 bytes of factors fill the free half of one row of the table.
__device__ __forceinline__ u32 factors_at(u32 table, int stage, int r, int chunk_pair) {
  const u32 offset = stage * FACTOR_BYTES + (chunk_pair * A_ROWS + r) * FACTOR_VECTOR_BYTES;
  return table + offset + offset / 128 * 128 + 128;
}
// Return the address to which the e4m3 scales of row r are copied.
__device__ __forceinline__ u32 scales_at(u32 table, int stage, int r) { return factors_at(table, stage, r, (CHUNKS - 1) / 2); }

// Copy the e4m3 scales of a k-block with cp.async, by all lanes of the producer warp. Rows of A are 8 of one weight and 8 of
// the other in turn (operands/swiglu.cuh), and `column` is the row of both weights at which the tile begins. A lane copies rows
// of A that are 32 apart, so all are of one weight, whose scales [N, K / 16] `blocks` points to. Rows behind the last one copy
// its scales; their results are not stored. TMA would need boxes of 16 bytes per row, and K in multiples of 256. cp.async
// fetches 128 bytes into L2.
__device__ __forceinline__ void copy_scales(
    u32 table, int stage, const unsigned char* blocks, int column, int k_block, int N, int K, int lane) {
#pragma unroll
  for (int r = 0; r < A_ROWS; r += 32) {
    // Row of the weight that row r + lane of A is.
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
      pairs[i] = prmt(__float_as_uint(low), __float_as_uint(high), 0x7632);  // the upper halves, exact
    }
  }
  first = pairs[0];
  second = pairs[1];
}

// Convert the scales of a k-block by `threads` threads, each a row at a time. scales_full[stage] must have completed.
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

// Load the piece-th 16 bytes, the codes of 32 channels, of row r of the stage at address `at`. TMA has swizzled a row's pieces:
// it XORs their index with the index of the 128 bytes in which the row lies, modulo the number of pieces of a row.
__device__ __forceinline__ uint4 load_codes(u32 at, int r, int piece) {
  constexpr int PITCH = 32 * CHUNKS, PIECES = 2 * CHUNKS;  // bytes and pieces of a row
  return ld_shared_v4_u32((at + r * PITCH + r / (8 / PIECES) % PIECES * 16) ^ piece * 16);
}

// Dequantizer of a thread's A fragments for the four WGMMAs of a chunk of 64 channels, from its rows r and r + 8.
//
// The steps are separate, because shared memory has latency: multiply() starts those of the next chunks meanwhile. Order for a
// chunk c: load(c) needs full[stage]; look_up() follows it; load_factors(c) needs scales_converted[stage]; scale(w, c) is last.
struct Decoder {
  const char* table;
  u32 at;             // address of the stage, where its codes begin
  int stage, r;       // stage; the first of the thread's two rows of A
  // PRMT selector of look_up_pair, and this lane's bank as an offset in bytes. From the lowest byte, the selector takes byte 0
  // of `bank`, this lane's byte of the word, and twice byte 1 of `bank`, which is 0.
  u32 selector, bank;
  uint4 codes[2][2];  // [row][half of the chunk]: 32 channels
  u32 pairs[2][8];    // [row][group of 8 channels]: this lane's two channels of the group
  u32 factors[2][4];  // [row][pair of factors]: those of two chunks, if CHUNKS > 1

  __device__ __forceinline__ Decoder(const char* table, u32 at, int stage, int r, int lane)
      : table(table), at(at), stage(stage), r(r), selector(0x5504 | lane % 4 << 4), bank(4 * lane) {}

  // Load the codes of chunk c.
  __device__ __forceinline__ void load(int c) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) codes[i][half] = load_codes(at, r + 8 * i, 2 * c + half);
  }

  // Look up the codes that load() has loaded. WGMMA takes channels 2 t and 2 t + 1 of each group of 8 from lane t of four: byte
  // t of each word.
  __device__ __forceinline__ void look_up() {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 four = codes[i][half];
        pairs[i][4 * half] = look_up_pair(table, four.x, selector, bank);
        pairs[i][4 * half + 1] = look_up_pair(table, four.y, selector, bank);
        pairs[i][4 * half + 2] = look_up_pair(table, four.z, selector, bank);
        pairs[i][4 * half + 3] = look_up_pair(table, four.w, selector, bank);
      }
  }

  // Load the factors of chunk c; for an even c, those of chunk c + 1 as well.
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

  // Write the fragments of chunk c to w: those of four WGMMAs of 16 channels, which are one block each. The four registers of a
  // fragment are, in this order: rows r and r + 8 of channels 0 to 7, then the same rows of channels 8 to 15.
  __device__ __forceinline__ void scale(u32 (&w)[4][4], int c) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        const u32 factor = broadcast_half(factors[i][c % 2 * 2 + block / 2], block % 2);
        w[block][i] = multiply_x2(pairs[i][2 * block], factor);
        w[block][i + 2] = multiply_x2(pairs[i][2 * block + 1], factor);
      }
  }
};
