// Norm, gate and output projection.
//
// By values, publish_gated() multiplies o by the norm's weight and silu(gate), and publishes it with the sum of o's squares in each CTA. The
// norm of a head needs all its CTAs, so the division by it is left to those who read the operand. By sequences, a CTA publishes the
// normalized o itself (sequences.cuh), and TMA copies the operand. Both are read behind a grid barrier. A CTA then multiplies whole rows of
// the output weight, so that sums are complete and in a fixed order.
#pragma once

DEVICE float norm_weight(const Consumer& c, int at) {
  return FLOAT_NORM ? ((const float*)c.s.norm_weight)[at] : bf16_to_float(((const u16*)c.s.norm_weight)[at]);
}
DEVICE float silu(float v) { return v * rcp_approx(1.0f + exp2_approx(-v * LOG2_E)); }
DEVICE void publish_gated(Consumer& c) {
  c.refresh();
  for (int row = c.warp; row < c.a.rows; row += WARPS) {
    float squares = 0;
    for (int value = c.lane; value < VALUE_ROWS; value += 32) {
      const float o = c.s.y[(V_AT + value) * Y_PITCH + row], gate = c.s.y[(G_AT + value) * Y_PITCH + row];
      const float gated = o * norm_weight(c, c.member * VALUE_ROWS + value) * silu(gate);
      const int column = c.head * VALUES + c.member * VALUE_ROWS + value;
      squares += o * o;
      c.a.gated[row * INNER + column] = to_bf16(gated);
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) squares += shfl_xor(squares, mask);
    if (c.lane == 0) c.a.squares[row * CTAS + cta_index()] = squares;
  }
}

// Put 1 / RMS of every row and head into shared memory, [ROWS][HEADS] in the place of q and k. Ends with a barrier.
DEVICE void make_norms(Consumer& c) {
  constexpr int AT_ONCE = MEMBERS < 8 ? MEMBERS : 8;
  for (int at = c.thread; at < c.a.rows * HEADS; at += CONSUMER_THREADS) {
    float sum = 0;
#pragma unroll 1
    for (int member = 0; member < MEMBERS; member += AT_ONCE) {
      const u32* from = (const u32*)c.a.squares + at * MEMBERS + member;
      u32 v[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) v[i] = load_relaxed(from + i);
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) sum += uint_as_float(v[i]);
    }
    c.s.queries_keys[at] = rsqrt_approx(sum * (1.0f / VALUES) + c.a.eps);
  }
  c.sync();
}
DEVICE u32 scaled(u32 pair, float scale) { return floats_to_bf16x2(bf16_to_float(pair) * scale, high_bf16_to_float(pair) * scale); }

// Number of tiles of the output weight that this CTA multiplies: tile cta_index() and every CTAS-th one after it.
DEVICE int output_tiles() { return divided(WIDTH / OUT_TILE - cta_index(), CTAS); }

// Stage a slab of the gated o of all CTAs, which must have arrived.
DEVICE void stage_gated(Consumer& c, const Maps& maps, int slab, int blocks) {
  if constexpr (BY_SEQUENCE && BOXED) {
    if (slab > 0) c.sync();
    if (c.thread == 0) {
      if (slab == 0) {
        spin_until([&] { return load_acquire(c.counter(HEADS)) >= (u32)CTAS; });
        PROXY_FENCES ? fence_proxy_async_global() : fence_proxy_async();
      }
      // Behind the grid barrier no CTA reads x any more. That the other CTA of a pair has read a slab is not known.
      if (slab == 0)
        Boxes<OUT_SLAB>::issue<PAIRED>(c.s, maps.gated, slab, blocks, EARLY ? 1 : 0);
      else
        Boxes<OUT_SLAB>::issue<false>(c.s, maps.gated, slab, blocks);
    }
    c.boxes = 0;
  } else {
    auto prepare = [&] { if (slab == 0) make_norms(c); };
    stage_operand<OUT_SLAB, INNER>(c, slab, c.a.gated, prepare, [&](const uint4& v, int row, int column) {
      const float scale = c.s.queries_keys[row * HEADS + column / VALUES];
      return uint4{scaled(v.x, scale), scaled(v.y, scale), scaled(v.z, scale), scaled(v.w, scale)};
    });
  }
}
// Multiply the gated o of all CTAs by this CTA's rows of the output weight. read() is called once this CTA has read the last slab.
template <class Read>
DEVICE void multiply_output(Consumer& c, const Maps& maps, Read read) {
  constexpr int SLABS = divided(INNER, OUT_SLAB);
#pragma unroll 1
  for (int slab = 0; slab < SLABS; ++slab) {
    const int blocks = (INNER - slab * OUT_SLAB < OUT_SLAB ? INNER - slab * OUT_SLAB : OUT_SLAB) / 64;
    stage_gated(c, maps, slab, blocks);
    bool unread = slab == SLABS - 1;
    auto note = [&] {
      if (!unread) return;
      unread = false;
      if (c.thread == 0) mbarrier_arrive(c.s.read);
      read();
    };
    if constexpr (!BY_SEQUENCE) note();
    if (BY_SEQUENCE && slab == 0) Boxes<OUT_SLAB>::await(c, 1);
    if (slab == 0) c.mark(6);
#pragma unroll 1
    for (int i = 0; i < output_tiles(); ++i)
      multiply_rows<OUT_TILE, OUT_SLAB>(
          c, OUT_TILE, blocks,
          [&](int row, int n, float sum) {
            float* at = c.s.y + (i * OUT_TILE + row) * Y_PITCH + n;
            if (slab > 0) sum += *at;
            if (slab < SLABS - 1)
              *at = sum;
            else
              c.a.out[(long long)n * WIDTH + (cta_index() + i * CTAS) * OUT_TILE + row] = to_bf16(sum);
          },
          note);
    if constexpr (BY_SEQUENCE) Boxes<OUT_SLAB>::await(c, blocks), note();  // a CTA may have no tile
  }
}
