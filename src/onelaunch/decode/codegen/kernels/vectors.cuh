// A working thread, the words that CTAs hand each other, and the vector that a phase multiplies.
#pragma once

// CTAs that share the positions of the same queries; where they multiply what they find, none in a short text, and the most in a long one.
DEVICE int used_at(int position) {
  const int wanted = (position + POSITIONS) / POSITIONS;
  if (SUMMED) return position >= JOINED_FROM ? SPLITS * JOINED : wanted > 1 ? SPLITS : 1;
  return wanted < SPLITS ? wanted : SPLITS;
}

struct Worker {
  const Arguments& a;
  Shared& s;
  const int* share;
  int thread, warp, lane;
  int layer = 0, position;
  u32 token;     // use of the tail's buffers, counted on over launches
  float scale = 1.0f;  // of the products: one over the vector's norm,
  float squares = 0;   // whose square is this and the other threads',
  bool normed = false;  // if it is normalised
  Ring ring;
  int held = 0;     // chunks before it that were read and not given back
  int left = 0;     // granules of the chunk at hand
  bool there = true;  // and whether it and all before were waited for to the end
  int passed = 0;   // granules of this token whose phases have begun
  int parity = 0;   // of sums

  DEVICE Worker(const Arguments& a, Shared& s, const int* share)
      : a(a), s(s), share(share), thread(thread_index()), warp(thread_index() / 32), lane(thread_index() % 32),
        position(a.position < 0 ? (int)a.state[POSITION] : a.position), token(a.state[TOKENS] + 1) {
    *s.met = a.state[BARRIERS];
    *s.token = a.first ? (int)*a.first : a.tokens[position];  // the token that is processed; all threads say the same
  }
  // Before each phase, and within attention: addresses made of these are then made in it, and not kept in registers from layer to layer.
  DEVICE void refresh() { thread = afresh(thread), warp = thread / 32, lane = thread % 32; }
  DEVICE void meet() const { workers_meet(WORKERS_THREADS); }
  DEVICE u32 use() const { return (token - 1) * LAYERS + layer + 1; }  // of the buffers of layers
  DEVICE int begin(int what) const { return share[2 * what]; }
  DEVICE int end(int what) const { return share[2 * what + 1]; }
  // When the last token came where, if the kernel was asked to say so. Thread 0's clock; the next token has the phase SHARES.
  DEVICE void stamp(int at, u32 v) const {
    if constexpr (STAMPED)
      if (thread == 0) a.state[STATE_WORDS + cta_index() * (MARKS + (LAYERS + 1) * (SHARES + 1) * MARKS_OF_A_PHASE) + at] = v;
  }
  DEVICE void mark(int phase, int what) const {
    if constexpr (STAMPED) stamp(MARKS + (layer * (SHARES + 1) + phase) * MARKS_OF_A_PHASE + what, (u32)ticks());
  }
  DEVICE void mark_token(int at) const {
    if constexpr (STAMPED) stamp(at, (u32)ticks()), stamp(at + 1, (u32)nanoseconds());
  }
  DEVICE int used() const { return used_at(position); }
  DEVICE const u16* layer_norms() const { return a.norms + (long long)afresh(layer) * (2 * HIDDEN + 2 * HEAD); }
  DEVICE const float* rotation() const { return a.rotations + (long long)position * HEAD; }  // cosines of pairs, then sines
  DEVICE const u16* embedded() const { return a.embedding + (long long)*s.token * HIDDEN; }
  DEVICE long long cached(int head) const { return (long long)(afresh(layer) * HEADS + head) * a.capacity * HEAD; }

  // The part of the residual stream that is this CTA's, kept over the layers.
  DEVICE void begin_token() {
    mark_token(TICKS_BEGIN);
    const int first = begin(O) * TILE, rows = SUMMED ? 0 : (end(O) - begin(O)) * TILE;
    for (int row = thread; row < rows; row += WORKERS_THREADS) s.own[row] = as_float((u32)embedded()[first + row] << 16);
    passed = 0;
  }
  DEVICE void end_token() {
    ++position, ++token;
    if (thread == 0) ++*s.made;
    if (DEPTH < 4 && left) drop();
    meet();
    mark_token(TICKS_END);
  }
  DEVICE void end_launch() {  // all have long read what they began with
    if (cta_index() || thread) return;
    a.state[POSITION] = position + SEPARATE;
    a.state[TOKENS] = token - 1;
    a.state[BARRIERS] = *s.met;
  }
  // The ring: a thread's part of granules, DEPTH of them in a unit, at least so many of them in all calls. They are on their way to
  // registers when this returns. Their chunks are held, so that giving them back delays nobody, until give_back() or the next call.
  // A warp is at one barrier at a time: lanes at one each gave wrong results on the GPU.
  template <int ROOM>
  DEVICE void fetch(uint4 (&v)[ROOM][DEPTH], int units, int least) {
    give_back();
    const int begin = DEPTH < 4 && left ? 4 - left : 0, end = begin + units * DEPTH, until = (end + 3) / 4;
    bool landed = true;  // in most cases long ago: all are asked about at once
#pragma unroll
    for (int chunk = 0; chunk < (ROOM * DEPTH + 6) / 4; ++chunk) {
      const Ring each = ring.after(chunk);
      if (chunk >= (begin > 0) && chunk < until) landed &= ring_passed(s.full + each.stage, each.phase);
    }
    if (!landed) {
      Ring each = ring.after(begin > 0);
#pragma unroll 1
      for (int chunk = begin > 0; chunk < until; ++chunk, each.advance())
        there &= await_ring(a, s, s.full + each.stage, each.phase);
    }
    const char* base = s.stages + warp * (GRANULE / WARPS) + lane * 16;
#pragma unroll
    for (int unit = 0; unit < ROOM; ++unit) {
      const int granule = begin + unit * DEPTH;
      const char* at = base + ring.after(granule / 4).stage * CHUNK + granule % 4 * GRANULE;
#pragma unroll
      for (int i = 0; i < DEPTH; ++i)  // what is not written in all cases would be kept in registers from layer to layer
        v[unit][i] = unit < least || unit < units ? *(const uint4*)(at + i * GRANULE) : uint4{0, 0, 0, 0};
    }
    held = end / 4, ring = ring.after(held);
    if (DEPTH < 4) left = end % 4 ? 4 - end % 4 : 0;
  }
  // The next chunk of the ring, for all lanes to read; then drop() gives it back.
  DEVICE const char* chunk() {
    there &= await_ring(a, s, s.full + ring.stage, ring.phase);
    return s.stages + ring.stage * CHUNK;
  }
  DEVICE void drop() {
    ++held, ring.advance(), left = 0;
    give_back();
  }
  // Chunks that were read to their end, once all lanes have read them: each once for each time that it was filled.
  DEVICE void give_back() {
    warp_meets();
#pragma unroll 1
    for (; held > 0; --held)
      if (lane == 0 && there) ring_arrive(s.empty + (ring.stage - held + (ring.stage < held ? STAGES : 0)));
  }
};

// Granules of a phase's share, in the order that phases have in the stream.
DEVICE int phase_granules(const int* share, int phase, int columns) {
  return (share[2 * phase + 1] - share[2 * phase]) * ((columns + STEP - 1) / STEP);
}
DEVICE int columns_of(int phase) { return phase == O ? (SUMMED ? BLOCK_WIDTH : QUERY) : phase == DOWN ? INNER : HIDDEN; }
DEVICE int layer_granules(const int* share) {
  int sum = 0;
  for (int phase = QKV; phase <= DOWN; ++phase) sum += phase_granules(share, phase, columns_of(phase));
  return sum;
}

// Words that CTAs hand each other.

DEVICE u32 tag_of(u32 use) { return use & 3; }
DEVICE void put(float* at, float v, u32 use) {
  if constexpr (TAGGED)
    store_relaxed((u32*)at, (as_bits(v) & ~3u) | tag_of(use));
  else
    *at = v;
}
DEVICE void put(float* at, float4 v, u32 use) {
  auto word = [&](float each) { return (as_bits(each) & ~3u) | tag_of(use); };
  if constexpr (TAGGED)
    store_relaxed((uint4*)at, {word(v.x), word(v.y), word(v.z), word(v.w)});
  else
    *(float4*)at = v;
}
DEVICE bool tagged(const uint4& v, u32 tag) {
  return (((v.x ^ tag) | (v.y ^ tag) | (v.z ^ tag) | (v.w ^ tag)) & 3) == 0;
}
// Without their tags: results must not depend on how often the kernel has run.
DEVICE float bare(u32 v) { return as_float(TAGGED ? v & ~3u : v); }
DEVICE float4 bare(const uint4& v) { return {bare(v.x), bare(v.y), bare(v.z), bare(v.w)}; }
// Quads of words, those that are wanted from at(i) each: all on their way at once, until all are there.
template <int COUNT, class Wanted, class At>
DEVICE void take(Worker& w, uint4 (&v)[COUNT], u32 use, Wanted wanted, At at) {
  auto all_there = [&] {
    u32 some = tag_of(use), every = some;  // bits of some word, of every word: two words an instruction, in two short chains
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (wanted(i))
        v[i] = TAGGED ? load_relaxed((const uint4*)at(i)) : load_plain((const uint4*)at(i));
      else  // what is not written in all cases would be kept in registers from layer to layer
        v[i] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (TAGGED && wanted(i)) some |= v[i].x | v[i].y | v[i].z | v[i].w, every &= v[i].x & v[i].y & v[i].z & v[i].w;
    return (some & ~every & 3) == 0;
  };
  if constexpr (TAGGED)
    await(w.a, w.s, all_there);
  else
    all_there();
}
DEVICE float4 take(Worker& w, const float* at, u32 use) {
  uint4 v;
  if constexpr (TAGGED)
    await(w.a, w.s, [&] { return v = load_relaxed((const uint4*)at), tagged(v, tag_of(use)); });
  else
    v = load_plain((const uint4*)at);
  return bare(v);
}
DEVICE float4 widen(uint2 v) { return {as_float(v.x << 16), as_float(v.x & ~0xFFFFu), as_float(v.y << 16), as_float(v.y & ~0xFFFFu)}; }
DEVICE float4 load_bf16(const u16* at) { return widen(*(const uint2*)at); }

// The vector that is multiplied: 4 numbers in two parts of 8 bits of mantissa each.
DEVICE void lay(Worker& w, int column, float4 v) {
  const u32 a = round_pair(v.x, v.y), b = round_pair(v.z, v.w);
  *(uint2*)(w.s.upper + column) = {a, b};
  *(uint2*)(w.s.lower + column) = {round_pair(v.x - as_float(a << 16), v.y - as_float(a & ~0xFFFFu)),
                                   round_pair(v.z - as_float(b << 16), v.w - as_float(b & ~0xFFFFu))};
}
DEVICE void lay_pair(Worker& w, int column, float x, float y) {
  const u32 upper = round_pair(x, y);
  *(u32*)(w.s.upper + column) = upper;
  *(u32*)(w.s.lower + column) = round_pair(x - as_float(upper << 16), y - as_float(upper & ~0xFFFFu));
}
DEVICE void lay_one(Worker& w, int column, float x) {
  const u32 upper = round_pair(x, 0.0f);
  w.s.upper[column] = (u16)upper, w.s.lower[column] = (u16)round_pair(x - as_float(upper << 16), 0.0f);
}
DEVICE constexpr int padded(int columns) { return (columns + STEP - 1) / STEP * STEP; }

// apply(column, 4 numbers, their factors) over a vector of words, or a row of bfloat16 if there is one, and zeros up to a whole step.
template <int COLUMNS, class Use>
DEVICE void for_columns(Worker& w, const float* from, const u16* row, const u16* factors, u32 use, Use apply) {
  constexpr int AT_ONCE = 4 * WORKERS_THREADS, QUADS = (padded(COLUMNS) + AT_ONCE - 1) / AT_ONCE, TOGETHER = QUADS < 8 ? QUADS : 8;
#pragma unroll 1
  for (int first = 4 * w.thread; first < padded(COLUMNS); first += TOGETHER * AT_ONCE) {
    uint4 v[TOGETHER];
    uint2 f[TOGETHER];
    auto inside = [&](int i) { return COLUMNS % (TOGETHER * AT_ONCE) == 0 || first + i * AT_ONCE < COLUMNS; };
    if (factors) {
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i)
        f[i] = inside(i) ? *(const uint2*)(factors + first + i * AT_ONCE) : uint2{0, 0};
    }
    if (!row) take(w, v, use, inside, [&](int i) { return from + first + i * AT_ONCE; });
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      const int column = first + i * AT_ONCE;
      if (inside(i))
        apply(column, row ? load_bf16(row + column) : bare(v[i]), factors ? widen(f[i]) : float4{1, 1, 1, 1});
      else if (column < padded(COLUMNS))
        apply(column, float4{0, 0, 0, 0}, float4{0, 0, 0, 0});
    }
  }
}
// As it is; all meet behind it.
template <int COLUMNS>
DEVICE void lay_all(Worker& w, const float* from, u32 use) {
  for_columns<COLUMNS>(w, from, nullptr, nullptr, use, [&](int column, float4 v, float4) { lay(w, column, v); });
  w.scale = 1.0f, w.normed = false;
}
template <int COLUMNS>
DEVICE void gather(Worker& w, const float* from, u32 use) {
  lay_all<COLUMNS>(w, from, use);
  w.meet();
}
template <int COUNT>
DEVICE float sum_of(float (&each)[COUNT]) {  // by halves: they wait for each other less
#pragma unroll
  for (int half = COUNT / 2; half; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) each[i] += each[i + half];
  return each[0];
}
DEVICE float sum_of_warp(float v) {
  for (int mask = 16; mask; mask /= 2) v += from_lane_xor(v, mask);
  return v;
}
// Of all working threads; they have met.
DEVICE float sum_of_all(Worker& w, float v) {
  v = sum_of_warp(v);
  if (w.lane == 0) w.s.squares[w.warp] = v;
  w.meet();
  float sum = 0;
  for (int warp = 0; warp < WARPS; ++warp) sum += w.s.squares[warp];
  return sum;
}
// The residual stream, or the embedding's row before it, times the norm's factors; returns the thread's sum of squares.
template <class Use>
DEVICE float for_normed(Worker& w, const float* from, const u16* row, const u16* factors, u32 use, Use apply) {
  float squares = 0;
  for_columns<HIDDEN>(w, from, row, factors, use, [&](int column, float4 v, float4 f) {
    squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    apply(column, {v.x * f.x, v.y * f.y, v.z * f.z, v.w * f.w});
  });
  return squares;
}
DEVICE float one_over_norm(float squares) { return inverse_root(squares / HIDDEN + EPS); }
// Factors now, one over the norm with the sums: products need not wait for it, and squares go from warp to warp when sums do.
DEVICE void gather_normed(Worker& w, const float* from, const u16* row, const u16* factors, u32 use) {
  w.squares = for_normed(w, from, row, factors, use, [&](int column, float4 v) { lay(w, column, v); });
  w.normed = true;
  w.meet();
}
DEVICE void tell_squares(Worker& w) {
  if (!w.normed) return;
  const float v = sum_of_warp(w.squares);
  if (w.lane == 0) w.s.squares[w.warp] = v;
}
DEVICE void take_scale(Worker& w) {  // all have met since
  if (!w.normed) return;
  float each[WARPS];
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) each[warp] = w.s.squares[warp];
  w.scale = one_over_norm(sum_of(each));
}
// By one CTA for all.
DEVICE void share_normed(Worker& w, const float* from, const u16* row, const u16* factors) {
  if (w.begin(NORM) == w.end(NORM)) return;
  w.scale = one_over_norm(sum_of_all(w, for_normed(w, from, row, factors, 0, [&](int column, float4 v) {
    if (column < HIDDEN) *(float4*)(w.a.words + NORMED + column) = v;
  })));
  for (int column = 4 * w.thread; column < HIDDEN; column += 4 * WORKERS_THREADS) {  // what this thread has written
    float4* v = (float4*)(w.a.words + NORMED + column);
    *v = {v->x * w.scale, v->y * w.scale, v->z * w.scale, v->w * w.scale};
  }
}
