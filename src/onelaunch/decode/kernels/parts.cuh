// What units of attention found, put together as the vector that is multiplied next.
#pragma once

// What attention found over all positions, as the vector that is multiplied next: parts weighted by their sums. A thread has 8 channels
// of a head, and of up to MOST_PARTS parts on their way at once.
constexpr int MOST_PARTS = SEPARATE || MOST_O > 3 ? 3 : MOST_O > 1 ? 4 : 8;  // weights wait in registers beside them

template <int COUNT>
struct Parts {
  uint4 values[COUNT][2];
  u32 logs[COUNT];
  DEVICE void load(int part, const float* slot, int channel, int g) {
    const uint4* at = (const uint4*)(slot + part * SLOT + g * HEAD + channel);
    const u32* log = (const u32*)(slot + part * SLOT + SLOT_QUERIES * HEAD + g);
    values[part][0] = TAGGED ? load_relaxed(at) : load_plain(at);
    values[part][1] = TAGGED ? load_relaxed(at + 1) : load_plain(at + 1);
    logs[part] = TAGGED ? load_relaxed(log) : *log;
  }
  // The first so many. All are asked for again until all are there: lanes that ask for what they lack go apart, one after another.
  DEVICE void take(Worker& w, const float* slot, int channel, int g, int count) {
    auto all_there = [&] {
      u32 some = tag_of(w.use()), every = some;
#pragma unroll
      for (int part = 0; part < COUNT; ++part) {
        values[part][0] = values[part][1] = {0, 0, 0, 0}, logs[part] = as_bits(2 * NOTHING);
        if (part < count) load(part, slot, channel, g);
      }
#pragma unroll
      for (int part = 0; part < COUNT; ++part) {
        if (part >= count) continue;
        const uint4 &a = values[part][0], &b = values[part][1];
        some |= a.x | a.y | a.z | a.w | b.x | b.y | b.z | b.w | logs[part];
        every &= a.x & a.y & a.z & a.w & b.x & b.y & b.z & b.w & logs[part];
      }
      return (some & ~every & 3) == 0;
    };
    if constexpr (TAGGED)
      await(w.a, w.s, all_there);
    else
      all_there();
  }
};
// 8 channels of a head: sums of what parts have found, by powers of two of their logarithms, over the largest so far.
struct Mixture {
  float most = NOTHING, sum = 0;
  float4 sums[2] = {};
  DEVICE void rescale(float larger) {
    const float by = power(most - larger);
    most = larger, sum *= by;
#pragma unroll
    for (int i = 0; i < 2; ++i) sums[i] = {sums[i].x * by, sums[i].y * by, sums[i].z * by, sums[i].w * by};
  }
  template <int COUNT>
  DEVICE void add(const Parts<COUNT>& parts) {
    float larger = most;
#pragma unroll
    for (int part = 0; part < COUNT; ++part) larger = fmaxf(larger, bare(parts.logs[part]));
    rescale(larger);
#pragma unroll
    for (int part = 0; part < COUNT; ++part) {
      const float weight = power(bare(parts.logs[part]) - most);
      sum += weight;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 p = bare(parts.values[part][i]);
        sums[i] = {sums[i].x + weight * p.x, sums[i].y + weight * p.y, sums[i].z + weight * p.z, sums[i].w + weight * p.w};
      }
    }
  }
  // With what another lane of the warp has of the same channels.
  DEVICE void add_lane(int mask) {
    rescale(fmaxf(most, from_lane_xor(most, mask)));
    auto add = [&](float& v) { v += from_lane_xor(v, mask); };
    add(sum);
#pragma unroll
    for (int i = 0; i < 2; ++i) add(sums[i].x), add(sums[i].y), add(sums[i].z), add(sums[i].w);
  }
  DEVICE void lay_out(Worker& w, int column) const {
    const float whole = inverse(sum);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      lay(w, column + 4 * i, float4{sums[i].x * whole, sums[i].y * whole, sums[i].z * whole, sums[i].w * whole});
  }
};
// From its parts on, COUNT at a time.
template <int COUNT>
DEVICE void combine_parts(Worker& w, const float* slot, int channel, int g, int column) {
  Mixture mixture;
#pragma unroll 1
  for (int first = 0; first < w.used(); first += COUNT, slot += COUNT * SLOT) {
    Parts<COUNT> parts;
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

// The same of a unit's own queries, of which other units have found parts, at one trip: of more than AT_A_TIME the other half by other
// lanes of the warp. In a short text it has found all itself, and laid out.
constexpr int AT_A_TIME = PARTS < 8 ? PARTS : 8, HALVES = PARTS > 8 ? 2 : 1;
static_assert(!SUMMED || (PARTS <= 8 * HALVES && HALVES <= 32 / LANES), "parts of a unit fit in a warp");

DEVICE void gather_own(Worker& w, int unit, int column) {
  constexpr int ITEMS = UNIT_QUERIES * HALVES;  // each for the lanes of a head
  for (int at = UNIT_QUERIES * HEAD + 8 * w.thread; at < BLOCK_ROOM; at += 8 * WORKERS_THREADS) lay_zeros(w, column + at);
  const int parts_of_all = w.used();
  if (parts_of_all > 1) {
    const bool joined = JOINED > 1 && parts_of_all > SPLITS;
    const float* slots = w.a.words + PARTIAL + (joined ? unit / JOINED * JOINED : unit) * SPLITS * SLOT;
    const int own = joined ? unit % JOINED * UNIT_QUERIES : 0;
    const long long since = ticks();
    while (w.warp * AT_ONCE < ITEMS && ticks() - since < HOLD) breathe();
#pragma unroll 1
    for (int first = w.warp * AT_ONCE; first < ITEMS; first += WARPS * AT_ONCE) {
      const int item = first + w.lane / LANES, g = item / HALVES, half = item % HALVES;
      Parts<AT_A_TIME> parts;
      parts.take(w, slots + half * AT_A_TIME * SLOT, channel_of(w), own + g, item < ITEMS ? parts_of_all - half * AT_A_TIME : 0);
      Mixture mixture;
      mixture.add(parts);
      if (HALVES > 1) mixture.add_lane(LANES);
      if (item < ITEMS && half == 0) mixture.lay_out(w, column + g * HEAD + channel_of(w));
    }
  }
  w.scale = 1.0f, w.normed = false;
  w.meet();
}
