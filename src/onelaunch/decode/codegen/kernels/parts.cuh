// What units of attention found, put together as the vector that is multiplied next.
#pragma once

// What attention found over all positions, as the vector that is multiplied next: parts weighted by their sums. A thread has 4 channels
// of a head, or 8, and of several parts all on their way at once.
constexpr int MOST_PARTS = SEPARATE || MOST_O > 3 ? 3 : MOST_O > 1 ? 4 : 8;  // weights wait in registers beside them

template <int COUNT, int QUADS>
struct Parts {
  uint4 values[COUNT][QUADS];
  u32 logs[COUNT];
  DEVICE void load(int part, const float* slot, int channel, int g) {
    const uint4* at = (const uint4*)(slot + part * SLOT + g * HEAD + channel);
    const u32* log = (const u32*)(slot + part * SLOT + SLOT_QUERIES * HEAD + g);
#pragma unroll
    for (int i = 0; i < QUADS; ++i) values[part][i] = TAGGED ? load_relaxed(at + i) : load_plain(at + i);
    logs[part] = TAGGED ? load_relaxed(log) : *log;
  }
  // The first so many. All are asked for again until all are there: lanes that ask for what they lack go apart, one after another.
  DEVICE void take(Worker& w, const float* slot, int channel, int g, int count) {
    auto all_there = [&] {
      u32 some = tag_of(w.use()), every = some;
#pragma unroll
      for (int part = 0; part < COUNT; ++part) {
#pragma unroll
        for (int i = 0; i < QUADS; ++i) values[part][i] = {0, 0, 0, 0};
        logs[part] = as_bits(2 * NOTHING);
        if (part < count) load(part, slot, channel, g);
      }
#pragma unroll
      for (int part = 0; part < COUNT; ++part) {
        if (part >= count) continue;
#pragma unroll
        for (const uint4& v : values[part]) some |= v.x | v.y | v.z | v.w, every &= v.x & v.y & v.z & v.w;
        some |= logs[part], every &= logs[part];
      }
      return (some & ~every & 3) == 0;
    };
    if constexpr (TAGGED)
      await(w.a, w.s, all_there);
    else
      all_there();
  }
};
// Channels of a head: sums of what parts have found, by powers of two of their logarithms, over the largest so far.
template <int QUADS>
struct Mixture {
  float most = NOTHING, sum = 0;
  float4 sums[QUADS] = {};
  template <int COUNT>
  DEVICE void add(const Parts<COUNT, QUADS>& parts) {
    float larger = most;
#pragma unroll
    for (int part = 0; part < COUNT; ++part) larger = fmaxf(larger, bare(parts.logs[part]));
    const float by = power(most - larger);
    most = larger, sum *= by;
#pragma unroll
    for (float4& s : sums) s = {s.x * by, s.y * by, s.z * by, s.w * by};
#pragma unroll
    for (int part = 0; part < COUNT; ++part) {
      const float weight = power(bare(parts.logs[part]) - most);
      sum += weight;
#pragma unroll
      for (int i = 0; i < QUADS; ++i) {
        const float4 p = bare(parts.values[part][i]);
        sums[i] = {sums[i].x + weight * p.x, sums[i].y + weight * p.y, sums[i].z + weight * p.z, sums[i].w + weight * p.w};
      }
    }
  }
  DEVICE void lay_out(Worker& w, int column) const {
    const float whole = inverse(sum);
#pragma unroll
    for (int i = 0; i < QUADS; ++i)
      lay(w, column + 4 * i, float4{sums[i].x * whole, sums[i].y * whole, sums[i].z * whole, sums[i].w * whole});
  }
};
// From its parts on, COUNT at a time.
template <int COUNT>
DEVICE void combine_parts(Worker& w, const float* slot, int channel, int g, int column) {
  Mixture<2> mixture;
#pragma unroll 1
  for (int first = 0; first < w.used(); first += COUNT, slot += COUNT * SLOT) {
    Parts<COUNT, 2> parts;
    parts.take(w, slot, channel, g, w.used() - first);
    mixture.add(parts);
  }
  mixture.lay_out(w, column);
}
DEVICE void lay_zeros(Worker& w, int column) {
  lay(w, column, float4{0, 0, 0, 0});
  lay(w, column + 4, float4{0, 0, 0, 0});
}
DEVICE void gather_found(Worker& w) {
  const int used = w.used();
#pragma unroll 1
  for (int column = 8 * w.thread; column < padded(QUERY); column += 8 * WORKERS_THREADS) {
    if (column >= QUERY) {
      lay_zeros(w, column);
      continue;
    }
    const int head = column / HEAD, g = head % UNIT_QUERIES;
    const float* slot = w.a.words + PARTIAL + head / UNIT_QUERIES * SPLITS * SLOT;
    if (used == 1) {  // as it is
      uint4 v[2];
      take(w, v, w.use(), [](int) { return true; }, [&](int i) { return slot + g * HEAD + column % HEAD + 4 * i; });
      lay(w, column, bare(v[0]));
      lay(w, column + 4, bare(v[1]));
    } else if (used == 2) {
      combine_parts<2>(w, slot, column % HEAD, g, column);
    } else if (MOST_PARTS > 4 && used <= 4) {
      combine_parts<4>(w, slot, column % HEAD, g, column);
    } else {
      combine_parts<MOST_PARTS>(w, slot, column % HEAD, g, column);
    }
  }
  w.scale = 1.0f, w.normed = false;
  w.meet();
}

// The same of a unit's own queries, of which other units have found parts, all at one trip. In a short text it has found all itself, and
// laid out.
template <int COUNT>
DEVICE void combine_own(Worker& w, const float* slots, int channel, int query, int column) {
  Parts<COUNT, 1> parts;
  parts.take(w, slots, channel, query, COUNT);
  Mixture<1> mixture;
  mixture.add(parts);
  mixture.lay_out(w, column);
}
DEVICE void gather_own(Worker& w, int unit, int column) {
  constexpr int QUERIES_WIDTH = UNIT_QUERIES * HEAD;
  for (int at = QUERIES_WIDTH + 8 * w.thread; at < BLOCK_ROOM; at += 8 * WORKERS_THREADS) lay_zeros(w, column + at);
  const int parts_of_all = w.used();
  if (parts_of_all > 1) {
    const bool joined = JOINED > 1 && parts_of_all > SPLITS;
    const long long since = ticks();
    while (w.warp * 32 * 4 < QUERIES_WIDTH && ticks() - since < HOLD) breathe();
#pragma unroll 1
    for (int at = 4 * w.thread; at < QUERIES_WIDTH; at += 4 * WORKERS_THREADS) {
      const int channel = at % HEAD, query = at / HEAD;
      const float* slots = w.a.words + PARTIAL;
      if (joined)
        combine_own<PARTS>(w, slots + unit / JOINED * JOINED * SPLITS * SLOT, channel, unit % JOINED * UNIT_QUERIES + query, column + at);
      else
        combine_own<SPLITS>(w, slots + unit * SPLITS * SLOT, channel, query, column + at);
    }
  }
  w.scale = 1.0f, w.normed = false;
  w.meet();
}
