// The operand of a matrix-vector product: read from flag-in-data words, split into bfloat16 halves and staged in shared memory.
//
// Computes   x_hi = bf16(x), x_lo = bf16(x - x_hi): together 16 bits of mantissa, so that bfloat16 tensor cores multiply a nearly float32
//            vector (products.cuh). For a normalized operand x is v * weight, and 1 / RMS(v) is applied to the products afterwards.
// Callers    phases.cuh and residual.cuh stage operands, and phases.cuh calls norm_by_one_cta(). products.cuh calls publish_squares()
//            and read_scale(), and adds the row sums of the warps by tree_sum(). attention.cuh, parts.cuh and residual.cuh store into
//            the operand by store_split*(). heads.cuh calls bf16x4_to_float4(). products, residual, parts and attention use padded().
// On chip    Shared::vector_hi and vector_lo, 2 bytes per column each, padded with zeros to whole blocks of steps.
// Memory     every CTA reads the whole vector (4 bytes per column) from the L2 cache.
// Barriers   stage_vector() and stage_normed() write the operand and end with a barrier of the consumer threads; after
//            stage_vector_unsynced() the caller must synchronize. Before each, all consumer threads must have finished reading the
//            previous operand: the barrier within the previous phase's product ensures that.
#pragma once

DEVICE float4 bf16x4_to_float4(uint2 v) {
  return {uint_as_float(v.x << 16), uint_as_float(v.x & ~0xFFFFu), uint_as_float(v.y << 16), uint_as_float(v.y & ~0xFFFFu)};
}
DEVICE float4 load_bf16x4(const u16* at) { return bf16x4_to_float4(*(const uint2*)at); }

// Store 4, 2 or 1 elements of the operand from `column` on, each split into a bfloat16 and the bfloat16 of what it leaves.
DEVICE void store_split4(Consumer& c, int column, float4 v) {
  const u32 a = floats_to_bf16x2(v.x, v.y), b = floats_to_bf16x2(v.z, v.w);
  *(uint2*)(c.s.vector_hi + column) = {a, b};
  *(uint2*)(c.s.vector_lo + column) = {floats_to_bf16x2(v.x - uint_as_float(a << 16), v.y - uint_as_float(a & ~0xFFFFu)),
                                   floats_to_bf16x2(v.z - uint_as_float(b << 16), v.w - uint_as_float(b & ~0xFFFFu))};
}
DEVICE void store_split2(Consumer& c, int column, float x, float y) {
  const u32 upper = floats_to_bf16x2(x, y);
  *(u32*)(c.s.vector_hi + column) = upper;
  *(u32*)(c.s.vector_lo + column) = floats_to_bf16x2(x - uint_as_float(upper << 16), y - uint_as_float(upper & ~0xFFFFu));
}
DEVICE void store_split1(Consumer& c, int column, float x) {
  const u32 upper = floats_to_bf16x2(x, 0.0f);
  c.s.vector_hi[column] = (u16)upper, c.s.vector_lo[column] = (u16)floats_to_bf16x2(x - uint_as_float(upper << 16), 0.0f);
}
// Steps of a block of a matrix's columns. With IN_PARTS, matrices have blocks of at most DEPTH steps, as equal as possible; the operand has
// all columns of the last block, and zeros behind its own.
DEVICE constexpr int depth_of(int columns) {
  const int steps = (columns + STEP - 1) / STEP, blocks = (steps + DEPTH - 1) / DEPTH;
  return IN_PARTS ? (steps + blocks - 1) / blocks : DEPTH;
}
DEVICE constexpr int blocks_of(int columns) { return (columns + depth_of(columns) * STEP - 1) / (depth_of(columns) * STEP); }
DEVICE constexpr int padded(int columns) { return blocks_of(columns) * depth_of(columns) * STEP; }

// Call apply(column, 4 values, their 4 weights) for every fourth column of a vector of flag-in-data words, or of a bfloat16 row if
// `row` is not null; columns behind COLUMNS, up to padded(COLUMNS), get zeros. Without `weights` they are 1. Up to 8 quads of a
// thread are in flight at once, since each trip to the L2 cache takes 0.6 us.
template <int COLUMNS, class Apply>
DEVICE void for_columns(Consumer& c, const float* from, const u16* row, const u16* weights, u32 epoch, Apply apply) {
  constexpr int STRIDE = 4 * CONSUMER_THREADS, QUADS = (padded(COLUMNS) + STRIDE - 1) / STRIDE, UNROLL = QUADS < 8 ? QUADS : 8;
#pragma unroll 1
  for (int first = 4 * c.thread; first < padded(COLUMNS); first += UNROLL * STRIDE) {
    uint4 v[UNROLL];
    uint2 f[UNROLL];
    auto inside = [&](int i) { return COLUMNS % (UNROLL * STRIDE) == 0 || first + i * STRIDE < COLUMNS; };
    if (weights) {  // loaded before the spin, so that both trips to memory overlap
#pragma unroll
      for (int i = 0; i < UNROLL; ++i)
        f[i] = inside(i) ? *(const uint2*)(weights + first + i * STRIDE) : uint2{0, 0};
    }
    if (!row) spin_load(c, v, epoch, inside, [&](int i) { return from + first + i * STRIDE; });
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int column = first + i * STRIDE;
      if (inside(i))
        apply(column, row ? load_bf16x4(row + column) : strip_tag(v[i]), weights ? bf16x4_to_float4(f[i]) : float4{1, 1, 1, 1});
      else if (column < padded(COLUMNS))
        apply(column, float4{0, 0, 0, 0}, float4{0, 0, 0, 0});
    }
  }
}
// Stage a vector as it is. The caller must synchronize afterwards; stage_vector() does so itself.
template <int COLUMNS>
DEVICE void stage_vector_unsynced(Consumer& c, const float* from, u32 epoch) {
  for_columns<COLUMNS>(c, from, nullptr, nullptr, epoch, [&](int column, float4 v, float4) { store_split4(c, column, v); });
  c.scale = 1.0f, c.norm_pending = false;
}
template <int COLUMNS>
DEVICE void stage_vector(Consumer& c, const float* from, u32 epoch) {
  stage_vector_unsynced<COLUMNS>(c, from, epoch);
  c.sync();
}
// Return the sum of an array, added pairwise: a shorter chain of dependent additions than one after another. COUNT must be a power of
// 2. The array is overwritten.
template <int COUNT>
DEVICE float tree_sum(float (&each)[COUNT]) {
#pragma unroll
  for (int half = COUNT / 2; half; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) each[i] += each[i + half];
  return each[0];
}
DEVICE float warp_sum(float v) {
  for (int mask = 16; mask; mask /= 2) v += shfl_xor(v, mask);
  return v;
}
// Return the sum over all consumer threads, in each of them. Contains a barrier; another must precede the next use of Shared::squares.
DEVICE float cta_sum(Consumer& c, float v) {
  v = warp_sum(v);
  if (c.lane == 0) c.s.squares[c.warp] = v;
  c.sync();
  float sum = 0;
  for (int warp = 0; warp < WARPS; ++warp) sum += c.s.squares[warp];
  return sum;
}
// Call apply(column, 4 values times the norm's weights) over the residual stream, or over the embedding row that takes its place in the
// first layer. Return this thread's sum of squares of the values.
template <class Apply>
DEVICE float for_norm_columns(Consumer& c, const float* from, const u16* row, const u16* weights, u32 epoch, Apply apply) {
  float squares = 0;
  for_columns<HIDDEN>(c, from, row, weights, epoch, [&](int column, float4 v, float4 f) {
    squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    apply(column, {v.x * f.x, v.y * f.y, v.z * f.z, v.w * f.w});
  });
  return squares;
}
DEVICE float inverse_rms(float squares) { return rsqrt_approx(squares / HIDDEN + EPS); }
// Stage the operand of a normalized product: v * weight now; the factor 1 / RMS is multiplied into the products later. Products thus do
// not wait for the sum of squares, which crosses the warps at the same barrier as the row sums (publish_squares, then read_scale).
DEVICE void stage_normed(Consumer& c, const float* from, const u16* row, const u16* weights, u32 epoch) {
  c.squares = for_norm_columns(c, from, row, weights, epoch, [&](int column, float4 v) { store_split4(c, column, v); });
  c.norm_pending = true;
  c.sync();
}
// Write each warp's part of the sum of squares to shared memory.
DEVICE void publish_squares(Consumer& c) {
  if (!c.norm_pending) return;
  const float v = warp_sum(c.squares);
  if (c.lane == 0) c.s.squares[c.warp] = v;
}
// Set Consumer::scale from the squares of all warps. A barrier must lie between publish_squares() and this.
DEVICE void read_scale(Consumer& c) {
  if (!c.norm_pending) return;
  float each[WARPS];
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) each[warp] = c.s.squares[warp];
  c.scale = inverse_rms(tree_sum(each));
}
// Normalize the residual stream in one CTA for all others (NORM_PHASE), and write the result to the buffer NORMED. The words have no
// tags, as these plans have grid barriers; the epoch 0 is not used.
DEVICE void norm_by_one_cta(Consumer& c, const float* from, const u16* row, const u16* weights) {
  if (c.begin(NORM) == c.end(NORM)) return;
  c.scale = inverse_rms(cta_sum(c, for_norm_columns(c, from, row, weights, 0, [&](int column, float4 v) {
    if (column < HIDDEN) *(float4*)(c.a.words + NORMED + column) = v;
  })));
  for (int column = 4 * c.thread; column < HIDDEN; column += 4 * CONSUMER_THREADS) {  // the columns that this thread wrote
    float4* v = (float4*)(c.a.words + NORMED + column);
    *v = {v->x * c.scale, v->y * c.scale, v->z * c.scale, v->w * c.scale};
  }
}
