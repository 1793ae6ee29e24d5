// Epilogue of swiglu: h = silu(gate) * up from both products of a tile, with the scales of their operands, stored by TMA.
//
// Given:      d, the float32 totals of this warpgroup's 64 rows of D [A_ROWS, B_ROWS], in the layout of WGMMA accumulators. A
//             interleaves both weights by 8 rows, that at the lower address first (operands/swiglu.cuh). So a thread's rows r
//             and r + 8 of D are the gate and up values of one column of h; with `up_first`, up and gate.
// Caller:     gemm.cu calls Epilogue::store() for each total, in kernels that ops/swiglu/launch_hopper.py makes.
// Macros:     SCALED  1 if an operand has float32 scales (float8 or NVFP4), KEEP  1 if a backward pass follows
//             (ops/swiglu/launch_hopper.py). tile.cuh explains SCHEDULE, A_ROWS, B_ROWS, STORE_BYTES and RESULT; COLUMNS, the
//             columns of h in a tile, is A_ROWS / 2 (operands/swiglu.cuh).
// Leaves:     h [M, N], and with KEEP both products [M, 2 N] for the backward pass, in 16 bits. Their TMA stores may still be
//             in flight on return; gemm.cu waits for them at the end.
// Shared:     `staging`: per block of 64 rows of A (32 columns of h), STORES buffers of STORE_ROWS rows of 64 bytes, with the
//             64-byte swizzle. D is transposed on the way by stmatrix.trans: its columns are rows of h.
// Barriers:   one named barrier per block of 64 rows. A warpgroup waits for no other one, which may still multiply.
// Numerics:   scales, SiLU and the product in float32, with __expf and __fdividef; then one rounding to RESULT.
#pragma once
#include "mainloop.cuh"

// Rows of h that this CTA computes of a tile. With SPLIT_K_CLUSTER, both CTAs of a cluster multiply the same tile, and each
// finishes half of the columns of D (reduction.cuh has added the other CTA's sums for that half to d).
constexpr int FINISHED = SCHEDULE == SPLIT_K_CLUSTER ? B_ROWS / 2 : B_ROWS;
// Rows of h of one TMA store. A tile of more rows is stored in several, so that one store is in flight while the next one's
// rows are computed.
constexpr int STORE_ROWS = FINISHED % 64 == 0 ? 64 : FINISHED % 32 == 0 ? 32 : FINISHED, STORES = FINISHED / STORE_ROWS;
static_assert(STORE_BYTES >= B_ROWS * COLUMNS * 2, "the staging buffer holds a tile of 16-bit results");

// Return silu(gate) * up.
__device__ __forceinline__ float gated(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

// Store this warpgroup's block of FINISHED rows and 32 columns. It begins at `row` and at `column` + 32 m_block of the matrix
// with index `matrix` in the tensor map, whose dimensions are (columns, matrices, rows), innermost first: h is one matrix, and
// `products` holds two, the gate's and up's. TMA leaves out what lies beyond the ends of a matrix. value(i) returns the i-th of
// this thread's FINISHED / 4 results, numbered as in Epilogue::store. All 128 threads of the warpgroup must call this; it uses
// the warpgroup's named barrier.
template <typename Value>
__device__ __forceinline__ void store_columns(
    const TensorMap* map, int matrix, const SharedMemory& smem, int row, int column, int m_block, Value value) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;  // a warp has 8 of the 32 columns, a 16-byte chunk of a row
  const bool issues_tma = threadIdx.x % 128 == 0;
  constexpr int MATRICES = STORE_ROWS % 32 == 0 ? 4 : 1;  // 8 x 8 matrices of one stmatrix
#pragma unroll
  for (int part = 0; part < STORES; ++part) {
    const u32 from = smem.staging + (m_block * STORES + part) * (STORE_ROWS * 64);
    if (issues_tma) tma_store_wait_group_read<STORES - 1>();  // the store that last read this buffer was STORES stores ago
    bar_sync(EPILOGUE_BARRIER + m_block, 128);
#pragma unroll
    for (int j = 0; j < STORE_ROWS / 8; j += MATRICES) {
      u32 v[MATRICES];
#pragma unroll
      for (int q = 0; q < MATRICES; ++q) {
        const int i = 2 * (part * (STORE_ROWS / 8) + j + q);
        v[q] = pack(value(i), value(i + 1));
      }
      const u32 r = 8 * j + lane % (8 * MATRICES);
      stmatrix_trans(from + r * 64 + (warp ^ (r / 2 % 4)) * 16, v);  // 64-byte swizzle
    }
    fence_proxy_async_shared();  // the TMA store reads through the async proxy
    bar_sync(EPILOGUE_BARRIER + m_block, 128);
    if (issues_tma) {
      tma_store_3d(map, from, column + m_block * 32, matrix, row + part * STORE_ROWS);
      tma_store_commit_group();
    }
  }
}

struct Epilogue {
  // Scales of whole tensors, or 1 for an operand without one or with one scale per row. They are read before the first tile,
  // when no result waits for them.
  float x = 1.0f, gate = 1.0f, up = 1.0f;

  // Read the scales of whole tensors. `x_scales` and `w_scales` tell that `x_scale`, or `gate_scale` and `up_scale`, point to
  // one scale per row of x or of the weights; those are read by store(). griddepcontrol_wait() must precede.
  __device__ __forceinline__ explicit Epilogue(const Arguments& a) {
    if (!SCALED) return;
    if (a.x_scale && !a.x_scales) x = *a.x_scale;
    if (!a.w_scales) gate = *a.gate_scale, up = *a.up_scale;
  }

  // Compute and store h, and with KEEP both products, from a tile's totals d; called by the warpgroups that hold them. m_block
  // is the index of the warpgroup's 64 rows of A. WIDTH is B_ROWS, the columns of D that its WGMMAs computed; with
  // SPLIT_K_CLUSTER the totals of this CTA's half are the first half of d.
  template <int WIDTH>
  __device__ __forceinline__ void store(
      float (&d)[WIDTH / 2], const Arguments& a, const SharedMemory& smem, Tile tile, int m_block) const {
    const int row = tile.row + (SCHEDULE == SPLIT_K_CLUSTER ? cluster_ctarank() * FINISHED : 0);
    // n: this thread's column of h
    const int lane = threadIdx.x % 32, n = tile.column + m_block * 32 + threadIdx.x / 32 % 4 * 8 + lane / 4;
    float gate_scale = gate, up_scale = up;
    if (SCALED && a.w_scales && n < a.N) {
      gate_scale = a.gate_scale[n];
      up_scale = a.up_scale[n];
    }
    // i numbers the thread's FINISHED / 4 elements of each product, in pairs of neighbouring rows of h. Both products together
    // are the FINISHED / 2 accumulators: of every four, two belong to row r of D and the next two to row r + 8.
    auto row_of = [&](int i) { return row + i / 2 * 8 + lane % 4 * 2 + i % 2; };
    auto x_scale_of = [&](int i) { return SCALED && a.x_scales ? a.x_scale[min(row_of(i), a.M - 1)] : x; };
    auto gate_at = [&](int i) {
      const float sum = a.up_first ? d[i / 2 * 4 + i % 2 + 2] : d[i / 2 * 4 + i % 2];
      return SCALED ? sum * (gate_scale * x_scale_of(i)) : sum;
    };
    auto up_at = [&](int i) {
      const float sum = a.up_first ? d[i / 2 * 4 + i % 2] : d[i / 2 * 4 + i % 2 + 2];
      return SCALED ? sum * (up_scale * x_scale_of(i)) : sum;
    };
    store_columns(a.h, 0, smem, row, tile.column, m_block, [&](int i) { return gated(gate_at(i), up_at(i)); });
    if constexpr (KEEP) {
      store_columns(a.products, 0, smem, row, tile.column, m_block, gate_at);
      store_columns(a.products, 1, smem, row, tile.column, m_block, up_at);
    }
  }
};
