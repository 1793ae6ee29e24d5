// Norm, gate and output projection.
//
// publish_gated() multiplies o by the norm's weight and silu(gate), and publishes it in bfloat16 with the sum of o's squares in each CTA.
// The norm of a head needs all its CTAs, so the division by it is left to those who read the operand after the grid barrier. A CTA then
// multiplies whole rows of the output weight, so that sums are complete and in a fixed order.
#pragma once

DEVICE float norm_weight(const Consumer& c, int value) {
  const int at = c.member * VALUE_ROWS + value;
  return FLOAT_NORM ? ((const float*)c.s.norm_weight)[at] : bf16_to_float(((const u16*)c.s.norm_weight)[at]);
}
DEVICE void publish_gated(Consumer& c) {
  c.refresh();
  for (int row = c.warp; row < c.a.rows; row += WARPS) {
    float squares = 0;
    for (int value = c.lane; value < VALUE_ROWS; value += 32) {
      const float o = c.s.y[(V_AT + value) * Y_PITCH + row], gate = c.s.y[(G_AT + value) * Y_PITCH + row];
      const float silu = gate * rcp_approx(1.0f + exp2_approx(-gate * LOG2_E));
      squares += o * o;
      u16* to = c.a.gated + (long long)row * HEADS * VALUES + c.head * VALUES + c.member * VALUE_ROWS;
      to[value] = to_bf16(o * norm_weight(c, value) * silu);
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) squares += shfl_xor(squares, mask);
    if (c.lane == 0) c.a.squares[row * CTAS + cta_index()] = squares;
  }
}

// Put 1 / RMS of every row and head into shared memory, [ROWS][HEADS] in the place of q and k. Ends with a barrier.
DEVICE void make_norms(Consumer& c) {
  for (int at = c.thread; at < c.a.rows * HEADS; at += CONSUMER_THREADS) {
    float sum = 0;
#pragma unroll
    for (int member = 0; member < MEMBERS; ++member) sum += uint_as_float(load_relaxed((const u32*)c.a.squares + at * MEMBERS + member));
    c.s.queries_keys[at] = rsqrt_approx(sum * (1.0f / VALUES) + c.a.eps);
  }
  c.sync();
}
DEVICE u32 scaled(u32 pair, float scale) { return floats_to_bf16x2(bf16_to_float(pair) * scale, high_bf16_to_float(pair) * scale); }

// Number of tiles of the output weight that this CTA multiplies: tile cta_index() and every CTAS-th one after it.
DEVICE int output_tiles() { return divided(WIDTH / OUT_TILE - cta_index(), CTAS); }

DEVICE void multiply_output(Consumer& c) {
  constexpr int INNER = HEADS * VALUES, SLABS = divided(INNER, OUT_SLAB);
#pragma unroll 1
  for (int slab = 0; slab < SLABS; ++slab) {
    stage_operand<OUT_SLAB, INNER>(
        c, c.a.gated, slab, [&] { if (slab == 0) make_norms(c); },
        [&](const uint4& v, int row, int column) {
          const float scale = c.s.queries_keys[row * HEADS + column / VALUES];
          return uint4{scaled(v.x, scale), scaled(v.y, scale), scaled(v.z, scale), scaled(v.w, scale)};
        });
    if (slab == 0) c.mark(6);
    const int blocks = (INNER - slab * OUT_SLAB < OUT_SLAB ? INNER - slab * OUT_SLAB : OUT_SLAB) / 64;
#pragma unroll 1
    for (int i = 0; i < output_tiles(); ++i)
      multiply_rows<OUT_TILE, OUT_SLAB>(c, OUT_TILE, blocks, [&](int row, int n, float sum) {
        float* at = c.s.y + (i * OUT_TILE + row) * Y_PITCH + n;
        if (slab > 0) sum += *at;
        if (slab < SLABS - 1)
          *at = sum;
        else
          c.a.out[(long long)n * WIDTH + (cta_index() + i * CTAS) * OUT_TILE + row] = to_bf16(sum);
      });
  }
}
