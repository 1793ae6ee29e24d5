// NVFP4 weights as the operand of a product that lies in registers.
//
// A thread takes 64 neighbouring channels of a row, four blocks, and hands the product of turn t (of 16) its channels 4 t to
// 4 t + 3. Which channel a product calls its first is free as long as x agrees: see turn_row.
#pragma once
#include "hopper.cuh"

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

// The first COUNT of four e4m3 scales, each as two equal 16-bit numbers: exact, NaN stays.
template <int COUNT>
__device__ __forceinline__ void block_factors(u32 four, u32 (&factors)[COUNT]) {
  static_assert(COUNT % 2 == 0, "converted in pairs");
#pragma unroll
  for (int i = 0; i < COUNT / 2; ++i) {
    u32 two;
    asm("{\n.reg .b16 x;\ncvt.u16.u32 x, %1;\ncvt.rn.f16x2.e4m3x2 %0, x;\n}" : "=r"(two) : "r"(four >> (16 * i)));
    if (ELEMENT == BFLOAT16) {
      float low, high;
      asm("{\n.reg .b16 x, y;\nmov.b32 {x, y}, %2;\ncvt.f32.f16 %0, x;\ncvt.f32.f16 %1, y;\n}"
          : "=f"(low), "=f"(high) : "r"(two));
      factors[2 * i] = permute(__float_as_uint(low), 0, 0x3232);
      factors[2 * i + 1] = permute(__float_as_uint(high), 0, 0x3232);
    } else {
      factors[2 * i] = permute(two, 0, 0x1010);
      factors[2 * i + 1] = permute(two, 0, 0x3232);
    }
  }
}

// What the two codes of each byte stand for, as a pair, once for every bank: lanes that look up at once do not wait for each
// other. A row has 256 bytes though it needs half, for the address is then one byte of codes behind one that tells the bank.
constexpr int TABLE_BYTES = 256 * 256;

__device__ __forceinline__ void fill_table(char* table, int thread, int threads) {
  for (int i = thread; i < 256 * 32; i += threads) {
    const int byte = i / 32, bank = i % 32;
    u32 pair = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 code = byte >> (4 * half), at = code & 7;
      const u32 high = ELEMENT == BFLOAT16 ? permute(0x3F3F3F00, 0x40404040, at) : permute(0x3E3C3800, 0x46444240, at);
      const u32 low = ELEMENT == BFLOAT16 ? permute(0xC0800000, 0xC0804000, at) & 0xFF : 0;
      pair |= ((code & 8) << 12 | (high & 0xFF) << 8 | low) << (16 * half);
    }
    *reinterpret_cast<u32*>(table + byte * 256 + bank * 4) = pair;
  }
}

// The two codes in a byte of a word, times their factor: exact. ``bank`` is 4 times the lane.
template <int BYTE>
__device__ __forceinline__ u32 decoded(const char* table, u32 word, u32 factor, u32 bank) {
  return times(*reinterpret_cast<const u32*>(table + permute(word, bank, 0x5504 | BYTE << 4)), factor);
}

// One warp: channels of a row of x in the order in which threads decode codes. ``at`` holds four matrices of 64 channels; the
// copy engine cannot turn them, for what moves is 4 bytes. A row's 16-byte piece c collects the words 2 c of each 64 channels.
__device__ __forceinline__ void turn_row(u32 at, int row, int lane) {
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 from = at + i * (ROWS * 128) + row * 128 + ((lane / 4) ^ (row % 8)) * 16 + lane % 4 * 4;
    v[i] = load_shared_word(from);
  }
  __syncwarp();
  const u32 to = at + (lane / 8) * (ROWS * 128) + row * 128 + ((lane % 8) ^ (row % 8)) * 16;
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
