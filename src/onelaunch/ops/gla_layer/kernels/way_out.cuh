// Norm, gate and output projection.
//
// By values, publish_gated() multiplies o by the norm's weight and silu(gate), and publishes it with the sum of o's squares in each CTA. The
// norm of a head needs all its CTAs, so the division by it is left to those who read the operand. A few rows are published as tagged words
// in float32 (TAGGED_GATED), which the readers poll; more of them in bfloat16 before a grid barrier. By sequences, a CTA publishes
// the normalized o itself (sequences.cuh), and TMA copies the operand. A CTA then multiplies whole rows of the output weight, so that sums
// are complete and in a fixed order.
#pragma once

DEVICE float* gated_words(const Consumer& c) { return (float*)(c.a.counters + COUNTER_WORDS) + (long long)HEADS * c.a.rows * EXCHANGED; }
// Place of a column among the words of a row. A thread polls eight columns by two loads of 16 bytes, and a load that sees other CTAs' stores
// passes L1. So the first halves of a warp's 32 times eight columns follow each other, then the second halves: each load of a warp reads
// whole sectors of 32 bytes, where halves side by side would be read from L2 twice.
constexpr bool HALVES_APART = INNER % 256 == 0;
DEVICE int word_of(int column) { return HALVES_APART ? (column & ~255) | (column & 4) << 5 | (column & 248) >> 1 | (column & 3) : column; }
DEVICE float* square_words(const Consumer& c) { return TAGGED_GATED ? gated_words(c) + c.a.rows * INNER : c.a.squares; }

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
      if constexpr (TAGGED_GATED)
        store_relaxed((u32*)gated_words(c) + row * INNER + word_of(column), tagged(gated));
      else
        ((u16*)c.a.gated)[row * INNER + column] = to_bf16(gated);
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) squares += shfl_xor(squares, mask);
    if (c.lane == 0) {
      u32* to = (u32*)square_words(c) + row * CTAS + cta_index();
      if constexpr (TAGGED_GATED)
        store_relaxed(to, tagged(squares));
      else
        *to = float_as_uint(squares);
    }
  }
}

// Put 1 / RMS of every row and head into shared memory, [ROWS][HEADS] in the place of q and k. Ends with a barrier.
DEVICE void make_norms(Consumer& c) {
  constexpr int AT_ONCE = MEMBERS < 8 ? MEMBERS : 8;
  for (int at = c.thread; at < c.a.rows * HEADS; at += CONSUMER_THREADS) {
    float sum = 0;
#pragma unroll 1
    for (int member = 0; member < MEMBERS; member += AT_ONCE) {
      const u32* from = (const u32*)square_words(c) + at * MEMBERS + member;
      u32 v[AT_ONCE];
      spin_until([&] {
        bool all = true;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) v[i] = load_relaxed(from + i);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) all = all && v[i];
        return all || !TAGGED_GATED;
      });
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) sum += uint_as_float(v[i]);
    }
    c.s.queries_keys[at] = rsqrt_approx(sum * (1.0f / VALUES) + c.a.eps);
  }
  c.sync();
}
DEVICE u32 scaled(u32 pair, float scale) { return floats_to_bf16x2(bf16_to_float(pair) * scale, high_bf16_to_float(pair) * scale); }
DEVICE u32 scaled(u32 low, u32 high, float scale) { return floats_to_bf16x2(uint_as_float(low) * scale, uint_as_float(high) * scale); }

// Number of tiles of the output weight that this CTA multiplies: tile cta_index() and every CTAS-th one after it.
DEVICE int output_tiles() { return divided(WIDTH / OUT_TILE - cta_index(), CTAS); }

// Stage a slab of the gated o of all CTAs, which must have arrived unless its words are tagged.
// Numbers of eight columns of a row, and the sums of squares of their head if a thread reads them itself and shares no norms.
constexpr bool OWN_NORM = TAGGED_GATED && (MEMBERS == 4 || MEMBERS == 8 || MEMBERS == 16);
constexpr int SQUARE_UNITS = OWN_NORM ? MEMBERS / 4 : 1;
struct Eight { uint4 low, high, squares[SQUARE_UNITS]; };
DEVICE Eight load_eight(const Consumer& c, int row, int column) {
  const uint4 *from = (const uint4*)(gated_words(c) + row * INNER + word_of(column));
  Eight v = {load_relaxed(from), load_relaxed(from + (HALVES_APART ? 32 : 1)), {}};
  if constexpr (OWN_NORM) {
    const uint4* squares = (const uint4*)(square_words(c) + (row * HEADS + column / VALUES) * MEMBERS);
#pragma unroll
    for (int i = 0; i < SQUARE_UNITS; ++i) v.squares[i] = load_relaxed(squares + i);
  }
  return v;
}
DEVICE bool complete(const Eight& v) {
  bool all = complete(v.low) && complete(v.high);
#pragma unroll
  for (int i = 0; i < SQUARE_UNITS; ++i) all = all && (!OWN_NORM || complete(v.squares[i]));
  return all;
}
DEVICE uint4 finish_eight(const Consumer& c, const Eight& v, int row, int column) {
  float scale = c.s.queries_keys[row * HEADS + column / VALUES];
  if constexpr (OWN_NORM) {
    scale = 0;
#pragma unroll
    for (int i = 0; i < SQUARE_UNITS; ++i) {
      const uint4& s = v.squares[i];
      scale += uint_as_float(s.x), scale += uint_as_float(s.y), scale += uint_as_float(s.z), scale += uint_as_float(s.w);
    }
    scale = rsqrt_approx(scale * (1.0f / VALUES) + c.a.eps);
  }
  const uint4 &a = v.low, &b = v.high;
  return {scaled(a.x, a.y, scale), scaled(a.z, a.w, scale), scaled(b.x, b.y, scale), scaled(b.z, b.w, scale)};
}
DEVICE void stage_gated(Consumer& c, const Maps& maps, int slab, int blocks) {
  auto scale_of = [&](int row, int column) { return c.s.queries_keys[row * HEADS + column / VALUES]; };
  auto prepare = [&] { if (slab == 0) make_norms(c); };
  if constexpr (BY_SEQUENCE && BOXED) {
    if (slab > 0) c.sync();
    if (c.thread == 0) {
      if (slab == 0) {
        spin_until([&] { return load_acquire(c.counter(HEADS)) >= (u32)CTAS; });
        PROXY_FENCES ? fence_proxy_async_global() : fence_proxy_async();
      }
      Boxes<OUT_SLAB>::issue(c.s, maps.gated, slab, blocks);
    }
    c.boxes = 0;
  } else if constexpr (TAGGED_GATED) {
    stage_operand<OUT_SLAB, INNER, true, Eight>(
        c, slab, [&](int row, int column) { return load_eight(c, row, column); }, [&] { if (!OWN_NORM) prepare(); },
        [&](const Eight& v, int row, int column) { return finish_eight(c, v, row, column); });
  } else {
    stage_operand<OUT_SLAB, INNER, false, uint4>(
        c, slab, [&](int row, int column) { return load_weak((const uint4*)((const u16*)c.a.gated + (long long)row * INNER + column)); }, prepare,
        [&](const uint4& v, int row, int column) {
          const float scale = scale_of(row, column);
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
