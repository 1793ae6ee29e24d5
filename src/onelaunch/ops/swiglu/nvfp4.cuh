// NVFP4 weights as the operand of a product that lies in registers: codes and scales of 16 channels become numbers, exactly.
//
// Codes      a byte, two neighbouring channels, is looked up in shared memory.
// Scales     e4m3, shifted into place as 16-bit numbers of which the exponent is too small; the table's are too great. What is left
//            of both, 2^-8, keeps all products in float16's range: results are multiplied by DECODED_BY. A NaN is no NaN any more
//            when shifted, so it is remembered: it makes a whole row of the product NaN, whatever x is.
#pragma once
#include "hopper.cuh"

constexpr float DECODED_BY = 256.0f;
constexpr int TABLE_BYTES = 256 * 256;

__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 bytes) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(bytes));
  return r;
}

__device__ __forceinline__ u32 times(u32 a, u32 b) {
  u32 r;
  if (ELEMENT == BFLOAT16)
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  else
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// One half of a word, twice.
__device__ __forceinline__ u32 twice(u32 word, int half) {
  u32 r;
  if (half == 0)
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};\n}" : "=r"(r) : "r"(word));
  else
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};\n}" : "=r"(r) : "r"(word));
  return r;
}

// Two codes as a pair of numbers: 2^112 times what they are in bfloat16, just that in float16.
__device__ __forceinline__ u32 pair_in(u32 byte) {
  u32 pair = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 code = byte >> (4 * half), at = code & 7;
    const u32 high = ELEMENT == BFLOAT16 ? permute(0x77777700, 0x78787878, at) : permute(0x3E3C3800, 0x46444240, at);
    const u32 low = ELEMENT == BFLOAT16 ? permute(0xC0800000, 0xC0804000, at) & 0xFF : 0;
    pair |= ((code & 8) << 12 | (high & 0xFF) << 8 | low) << (16 * half);
  }
  return pair;
}

// The table, once for every bank: lanes that look up at once do not wait for each other. A row has 256 bytes though it needs half,
// for the address is then one byte of codes behind one that tells the bank. 256 threads fill a row each.
__device__ __forceinline__ void fill_table(char* table, u32 thread) {
  if (thread >= 256) return;
  const u32 pair = pair_in(thread);
#pragma unroll
  for (u32 piece = 0; piece < 8; ++piece)  // in another order by each lane, for their rows begin in the same bank
    *reinterpret_cast<uint4*>(table + thread * 256 + (piece + thread) % 8 * 16) = make_uint4(pair, pair, pair, pair);
}

__device__ __forceinline__ u32 looked_up(const char* table, u32 word, u32 bytes, u32 bank) {
  return *reinterpret_cast<const u32*>(table + permute(word, bank, bytes));
}

// Block scales of a step: 4 X_TILES of each row of a tile. K is a multiple of STEP.
constexpr int ROW_SCALES = 4 * X_TILES, SCALE_BYTES = 2 * COLUMNS * ROW_SCALES;

// From where they lie: a lane's rows are all of one weight, whose ``blocks`` it brings. 128 bytes go to the L2 cache at once.
__device__ __forceinline__ void copy_scales(u32 to, const unsigned char* blocks, int column, int step, int N, int K, int lane) {
#pragma unroll
  for (int r = 0; r < 2 * COLUMNS; r += 32) {
    const int n = min(column + (r + lane) / 16 * 8 + lane % 8, N - 1);
    copy_async<ROW_SCALES>(to + (r + lane) * ROW_SCALES, blocks + (long long)n * (K / 16) + step * ROW_SCALES);
  }
}

// Those of one row, four to a word.
__device__ __forceinline__ void load_scales(u32 (&to)[X_TILES], u32 at, int r) {
  at += r * ROW_SCALES;
  if constexpr (X_TILES == 4) {
    const uint4 four = load_shared_words(at);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
  } else {
#pragma unroll
    for (int c = 0; c < X_TILES; ++c) to[c] = load_shared_word(at + 4 * c);
  }
}

// Scales of four blocks side by side as 16-bit numbers: those of the first and the third in a word, of the others in another.
struct Factors {
  u32 even, odd;
  __device__ __forceinline__ Factors(u32 scales, u32& nan)
      : even((scales & 0x007F007F) << SHIFT | (scales & 0x00800080) << 8),
        odd((scales & 0x7F007F00) >> (8 - SHIFT) | (scales & 0x80008000)) {
    nan |= (scales + 0x01010101) ^ scales;  // of 0x7F and 0xFF alone the highest bit changes
  }
  static constexpr int SHIFT = ELEMENT == BFLOAT16 ? 4 : 7;
  __device__ __forceinline__ u32 of(int block) const { return twice(block % 2 ? odd : even, block / 2); }
};
__device__ __forceinline__ bool nan_among(u32 nan) { return nan & 0x80808080; }

// 16 bytes of codes of row ``r`` of a step: those of 32 channels.
__device__ __forceinline__ uint4 load_codes(u32 at, int r, int piece) {
  constexpr int PITCH = 32 * X_TILES, PIECES = 2 * X_TILES;  // swizzled over the row
  return load_shared_words((at + r * PITCH + r / (8 / PIECES) % PIECES * 16) ^ piece * 16);
}

// What a thread needs of a row for the four products of 64 channels, as their row i of two. Such a product wants channels 2 t and
// 2 t + 1 of each eight from lane t of four, a byte of each word.
__device__ __forceinline__ void decode(u32 (&w)[4][4], int i, const char* table, u32 at, int r, int c, Factors by, int lane) {
  const u32 byte = 0x5504 | lane % 4 << 4, bank = 4 * lane;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 codes = load_codes(at, r, 2 * c + half);
    const u32 first = by.of(2 * half), second = by.of(2 * half + 1);
    w[2 * half][i] = times(looked_up(table, codes.x, byte, bank), first);
    w[2 * half][i + 2] = times(looked_up(table, codes.y, byte, bank), first);
    w[2 * half + 1][i] = times(looked_up(table, codes.z, byte, bank), second);
    w[2 * half + 1][i + 2] = times(looked_up(table, codes.w, byte, bank), second);
  }
}
