// Flag-in-data words: how CTAs pass vectors to each other without barriers or fences.
//
// The idea is that of NCCL's LL protocol. A buffer consists of 32-bit float words. The producer overwrites the two lowest mantissa bits
// of every word with a tag, and stores the word with a relaxed 32-bit store (four at a time in one 16-byte instruction). A consumer
// spins on the words that it needs: it loads them, and loads them again until every one has the expected tag. Flag and value arrive in
// the same atomic word, so nothing else has to be ordered: no fence, no barrier, no separate flag. A semaphore would cost four trips to
// the L2 cache one after another (fence, increment, poll, read of the data); here there are two, the store's and the poll's, and the
// poll is the read.
//
// Callers    attention.cuh, heads.cuh, phases.cuh and residual.cuh store words; heads.cuh, parts.cuh and vectors.cuh load them.
// Tag        the epoch modulo 4. The epoch of a buffer grows by one with each use: (token, layer) for buffers of layers, the token for
//            those of the LM head. It counts on over launches, and all words begin as zero with the first epoch being 1.
// Safety     two bits are enough, since every word of a buffer is written in every epoch (also where its value is not needed), and every
//            reader follows every epoch: when a CTA begins to poll for epoch e, all words of e - 1 are known to have been written, and
//            nobody writes e + 1 before all readers of e have read. A polled word is thus of epoch e - 1 or e. All of this follows from
//            the data flow between the phases; onelaunch.decode.plan.check proves it for each plan with vector clocks. A tag says
//            nothing about any other word, so each word that is read must be polled itself.
// Numerics   a value keeps 22 of its 24 significant bits. Readers clear the tag before they compute: otherwise the last bits of the
//            logits would depend on how often the kernel has run.
//
// FLAG_IN_DATA is false in plans that synchronize otherwise (grid barriers, semaphores, or a launch per phase). The functions below are
// then plain stores and loads.
#pragma once

DEVICE u32 tag_of(u32 epoch) { return epoch & 3; }
// Store one value, or four to a 16-byte aligned address, for readers of this epoch.
DEVICE void store_words(float* at, float v, u32 epoch) {
  if constexpr (FLAG_IN_DATA)
    store_relaxed((u32*)at, (float_as_uint(v) & ~3u) | tag_of(epoch));
  else
    *at = v;
}
DEVICE void store_words(float* at, float4 v, u32 epoch) {
  auto word = [&](float each) { return (float_as_uint(each) & ~3u) | tag_of(epoch); };
  if constexpr (FLAG_IN_DATA)
    store_relaxed((uint4*)at, {word(v.x), word(v.y), word(v.z), word(v.w)});
  else
    *(float4*)at = v;
}
DEVICE bool has_tag(const uint4& v, u32 tag) {
  return (((v.x ^ tag) | (v.y ^ tag) | (v.z ^ tag) | (v.w ^ tag)) & 3) == 0;
}
// Return the value of a word, or of four, without the tag.
DEVICE float strip_tag(u32 v) { return uint_as_float(FLAG_IN_DATA ? v & ~3u : v); }
DEVICE float4 strip_tag(const uint4& v) { return {strip_tag(v.x), strip_tag(v.y), strip_tag(v.z), strip_tag(v.w)}; }
// Spin until COUNT quads of words (16 bytes each) have the epoch's tag, and leave them in v, tags included. Quad i is loaded from at(i)
// if wanted(i), else it is zero. All loads of an iteration are in flight at once. Every lane loads all of its quads again until all of
// them have arrived: a loop in which lanes loaded only the missing quads made the lanes diverge and cost 9 % of a token. The spin ends
// early if the launch is aborted (waiting.cuh); v is then meaningless. Without FLAG_IN_DATA one load suffices, since the synchronization
// before the phase has ordered the writes before it.
template <int COUNT, class Wanted, class At>
DEVICE void spin_load(Consumer& c, uint4 (&v)[COUNT], u32 epoch, Wanted wanted, At at) {
  auto all_there = [&] {
    // `some` is the OR and `every` the AND of all words and the tag. The two agree in the two lowest bits only if all tags equal the
    // epoch's. Each is a chain of its own, and one three-input logic instruction adds two words to it.
    u32 some = tag_of(epoch), every = some;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (wanted(i))
        v[i] = FLAG_IN_DATA ? load_relaxed((const uint4*)at(i)) : load_weak((const uint4*)at(i));
      else  // The compiler would keep an array that is not written on every path in registers from layer to layer.
        v[i] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (FLAG_IN_DATA && wanted(i)) some |= v[i].x | v[i].y | v[i].z | v[i].w, every &= v[i].x & v[i].y & v[i].z & v[i].w;
    return (some & ~every & 3) == 0;
  };
  if constexpr (FLAG_IN_DATA)
    spin_until(c.a, c.s, all_there);
  else
    all_there();
}
// Spin until four words have the epoch's tag, and return their values.
DEVICE float4 spin_load(Consumer& c, const float* at, u32 epoch) {
  uint4 v;
  if constexpr (FLAG_IN_DATA)
    spin_until(c.a, c.s, [&] { return v = load_relaxed((const uint4*)at), has_tag(v, tag_of(epoch)); });
  else
    v = load_weak((const uint4*)at);
  return strip_tag(v);
}
