// Layout of shared memory, the ring of weight chunks, and waits that time out, of the one-launch GLA layer (step.cu).
//
// Ring       STAGES buffers of CHUNK (16 KB) bytes, each with two mbarriers: `full` (armed by the producer thread, completed by TMA) and
//            `empty` (one arrival per consumer warp). A chunk has `rows` rows of a matrix over chunk_blocks() blocks of 64 columns. TMA
//            stores it as [block][row][128 bytes] with the 128-byte swizzle: 16-byte unit u of a line lies at u ^ (line % 8). A chunk of
//            states is contiguous in memory and in the buffer.
// Words      what the CTAs of a head exchange is tagged where it is small: a word of zero has not been written yet, so that the poll is the
//            read, and no fence and no counter stands between them. tagged() gives a zero the smallest subnormal number. All words are zero
//            again at the end of a launch. Larger exchanges, and that among all CTAs, count arrivals: a poll by every thread of all CTAs takes
//            more time than a fence and a counter save.
// Time-out   no wait is unbounded. After TIMEOUT_CYCLES (about two seconds) a wait traps, so that a CTA that never comes gives a CUDA error
//            and not a hung GPU. A cooperative launch has all its CTAs resident, so this only happens if memory is corrupted.
#pragma once

typedef unsigned short u16;

constexpr int WARPS = 8, CONSUMER_THREADS = 32 * WARPS, THREADS = CONSUMER_THREADS + 32, CHUNK = 16384;
constexpr int ROW_TILES = ROWS > 8 ? ROWS / 8 : 1, COLUMNS = 8 * ROW_TILES;  // rows of x in units of 8, the columns of an mma
constexpr int SUM_PITCH = COLUMNS + 1, BOXES = 4;
// Warps share the 64-column blocks of a chunk. With more than 32 rows of x two groups of warps also share these rows.
constexpr int ROW_GROUPS = ROW_TILES > 4 ? 2 : 1, BLOCK_GROUPS = WARPS / ROW_GROUPS, TILES_PER_WARP = ROW_TILES / ROW_GROUPS;

DEVICE constexpr int tile_rows(int rows) { return rows > 8 ? 16 : rows > 4 ? 8 : rows > 2 ? 4 : rows; }
DEVICE constexpr int chunk_blocks(int rows, int columns) {
  return CHUNK / (128 * rows) < columns / 64 ? CHUNK / (128 * rows) : columns / 64;
}
DEVICE constexpr int divided(int count, int size) { return (count + size - 1) / size; }

// Rows of the packed weight that a CTA multiplies: of q and k each, of v and the gate each, and of the decays' low-rank factor. With one
// decay per head every CTA of a head multiplies that head's single row.
constexpr int KEY_ROWS = KEYS / MEMBERS, VALUE_ROWS = VALUES / MEMBERS, RANK_ROWS = PER_HEAD ? 1 : divided(RANK, MEMBERS);
// Rows of `y`, the products in float32 that stay in the CTA, and its pitch, odd so that a column is read without bank conflicts.
constexpr int K_AT = 0, Q_AT = KEY_ROWS, R_AT = 2 * KEY_ROWS, V_AT = R_AT + RANK_ROWS, G_AT = V_AT + VALUE_ROWS, Y_PITCH = COLUMNS + 1;
// Floats of a row that the CTAs of a head exchange: q, k, the low-rank factor padded to 16 bytes, and v and the gate if each CTA has whole
// sequences.
constexpr int RANK_PADDED = PER_HEAD ? 0 : divided(RANK, 4) * 4, EXCHANGED_V = 2 * KEYS + RANK_PADDED, EXCHANGED_G = EXCHANGED_V + VALUES;
constexpr int EXCHANGED = EXCHANGED_V + (BY_SEQUENCE ? 2 * VALUES : 0), INNER = HEADS * VALUES;
constexpr int COUNTER_WORDS = 32 * (HEADS + 1 + EARLY);  // 128 bytes for each counter

// An operand, the rows of x or of the gated o, in shared memory: either padded rows, or boxes that TMA has stored as those of weights, with
// all blocks of 64 columns one after another. If EARLY, boxes have half of the rows, and those of the second half follow those of the first.
constexpr int HALVES = EARLY ? 2 : 1, BOX_ROWS = ROWS / HALVES;
DEVICE constexpr int box_blocks(int columns) {
  return CHUNK / (128 * (BOX_ROWS > 8 ? BOX_ROWS : 8)) < columns / 64 ? CHUNK / (128 * (BOX_ROWS > 8 ? BOX_ROWS : 8)) : columns / 64;
}
// Bytes of the boxes of a half, of which the last may be wider than the operand.
DEVICE constexpr int half_bytes(int columns) { return divided(columns / 64, box_blocks(columns)) * box_blocks(columns) * BOX_ROWS * 128; }
template <int SLAB_COLUMNS>
DEVICE int operand_offset(int row, int unit) {
  // Shifts: a signed division takes more.
  if constexpr (EARLY)
    return (row >> 3) * half_bytes(SLAB_COLUMNS) + ((unit >> 3) * BOX_ROWS + (row & 7)) * 128 + ((unit & 7) ^ (row & 7)) * 16;
  if constexpr (BOXED) return ((unit >> 3) * ROWS + row) * 128 + ((unit & 7) ^ (row & 7)) * 16;
  return row * (2 * SLAB_COLUMNS + 64) + unit * 16;
}

struct Arguments {
  const u16 *x, *decay_weight, *decay_bias;  // [B T, WIDTH]; [H K, RANK]; [H K] or [H]
  const void* norm_weight;                   // [V], float32 if FLOAT_NORM
  const float* initial;                      // [B, H, K, V] or null
  float* final_state;                        // the same or null
  u16* out;                                  // [B T, WIDTH]
  float *exchange, *squares;                 // [H][B T][EXCHANGED]; [B T][CTAS], sums of squares of a CTA's part of o
  u16* gated;                                // [B T, H V]: o, normalized if BY_SEQUENCE, times norm weight and silu(gate)
  u32* counters;                             // [H + 1] lines of 128 bytes: arrivals of each head, then of all CTAs, if EARLY also
                                             // those with their first sequence; then tagged words
  u64* markers;                              // [CTAS][MARKERS + ARRIVALS][2], only if PROFILED
  int batch, length, rows;                   // B, T and B T
  float inverse_normalizer, eps;
};

struct Maps { const TensorMap *keys, *values, *rank, *out, *x, *gated; };

// Pointers into a CTA's shared memory, at the offsets of sizes.cuh.
struct Shared {
  char* stages;          // [STAGES][CHUNK]
  char* operand;         // operand_offset(): x, later the normalized and gated o
  float* sums;           // [2][BLOCK_GROUPS][16][SUM_PITCH]: sums of each group of warps; two sets alternate
  float* y;              // [G_AT + VALUE_ROWS][Y_PITCH]
  float* queries_keys;   // [BLOCK_ROWS][2 * KEYS]; later 1 / RMS of o, [ROWS][HEADS]. BY_SEQUENCE: [BLOCK_ROWS][EXCHANGED]
  float* decays;         // [BLOCK_ROWS][KEYS]. BY_SEQUENCE: [BLOCK_ROWS][KEYS][4], the decay, k and q of a key channel
  float* low_rank;       // [BLOCK_ROWS][RANK_PADDED]. Not BY_SEQUENCE
  float* states;         // [KEYS_EACH][CONSUMER_THREADS][4]: the first states, if COPIED
  float* partial;        // [PARTS][BLOCK_ROWS][VALUE_ROWS]: o of each part of the keys. BY_SEQUENCE: [BLOCK_ROWS][PARTS][VALUES]
  u16 *decay_weight, *decay_bias;  // [KEYS][RANK] and [KEYS] of the head; unused with one decay per head
  void* norm_weight;     // [VALUES], float32 if FLOAT_NORM
  u64 *full, *empty;     // [STAGES]
  u64 *loaded, *read;    // [BOXES]: boxes of a slab of the operand have landed; all that CTAs exchange has been read by this CTA
  u64* published;        // the first sequence's gated o has been published, if EARLY
  DEVICE explicit Shared(char* base)
      : stages(base), operand(base + OPERAND_AT), sums((float*)(base + SUMS_AT)), y((float*)(base + Y_AT)),
        queries_keys((float*)(base + QUERIES_KEYS_AT)), decays((float*)(base + DECAYS_AT)), low_rank((float*)(base + LOW_RANK_AT)),
        states((float*)(base + STATES_AT)), partial((float*)(base + PARTIAL_AT)), decay_weight((u16*)(base + DECAY_WEIGHT_AT)),
        decay_bias((u16*)(base + DECAY_BIAS_AT)), norm_weight(base + NORM_WEIGHT_AT), full((u64*)(base + FULL_AT)), empty(full + STAGES),
        loaded(empty + STAGES), read(loaded + BOXES),
        published(read + 1) {}
};

// Spin until ready() is true; trap after the time-out.
template <class Ready>
DEVICE void spin_until(Ready ready) {
  u32 spins = 0;
  long long begin = 0;
  while (!ready()) {
    spin_pause();
    if (++spins % 256) continue;
    const long long now = clock64();
    if (spins == 256) begin = now;
    if (now - begin > TIMEOUT_CYCLES) trap();
  }
}

// Tagged words: never zero, so that a word of zero is one that has not been written. Polled four or one at a time.
DEVICE u32 tagged(float v) {
  const u32 bits = float_as_uint(v);
  return bits ? bits : 1;
}
DEVICE bool complete(const uint4& v) { return v.x && v.y && v.z && v.w; }
// Spin until all words of a thread's N units have been written. v[i] is what load(i) returned at first, zero words included; where has(i)
// is false, there is no unit i. All units that lack words are loaded again before one of them is looked at: one after the other, each
// would take a trip to L2 of its own.
template <int N, class Has, class Load>
DEVICE void await_words(uint4 (&v)[N], Has has, Load load) {
  spin_until([&] {
    bool lacks[N], all = true;
#pragma unroll
    for (int i = 0; i < N; ++i) lacks[i] = has(i) && !complete(v[i]), all = all && !lacks[i];
    if (all) return true;
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (lacks[i]) v[i] = load(i);
    return false;
  });
}

// Position in the ring: a stage, and the parity of the mbarrier phase at it.
struct Ring {
  int stage = 0;
  u32 phase = 0;
  DEVICE void advance() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

// State of a consumer thread.
struct Consumer {
  const Arguments& a;
  Shared& s;
  int thread, warp, lane, head, member;
  Ring ring;
  int parity = 0;  // set of Shared::sums that the next product writes
  int chunk = 0;   // number of chunks that have been waited for, counted if PROFILED
  // Boxes of the present slab that have been waited for: all of them unless a copy has been issued. The parity of each box's next landing.
  int boxes = BOXES;
  u32 landings = 0;
  DEVICE Consumer(const Arguments& a, Shared& s)
      : a(a), s(s), thread(thread_index()), warp(thread_index() / 32), lane(thread_index() % 32), head(cta_index() / MEMBERS),
        member(cta_index() % MEMBERS) {}
  // Recompute the thread's indices. Called before each phase, so that addresses made of them are computed there and do not spill.
  DEVICE void refresh() { thread = opaque(thread), warp = thread / 32, lane = thread % 32; }
  // Barrier of the consumer threads; the producer warp does not take part.
  DEVICE void sync() const { bar_sync(1, CONSUMER_THREADS); }
  DEVICE const char* wait_chunk() {
    spin_until([&] { return mbarrier_try_wait(s.full + ring.stage, ring.phase); });
    if constexpr (PROFILED) {
      if (thread == 0 && chunk < ARRIVALS) a.markers[(cta_index() * (MARKERS + ARRIVALS) + MARKERS + chunk) * 2 + 1] = (u64)clock64();
      ++chunk;
    }
    return s.stages + ring.stage * CHUNK;
  }
  DEVICE void release_chunk() {
    syncwarp();
    if (lane == 0) mbarrier_arrive(s.empty + ring.stage);
    ring.advance();
  }
  // Arrivals of the CTAs of head `index`, or of all CTAs for index HEADS, with their first sequence for index HEADS + 1.
  DEVICE u32* counter(int index) const { return a.counters + 32 * index; }
  // Publish what all consumer threads have written, and arrive. The barrier orders their writes before the release of thread 0.
  DEVICE void arrive(int index) const {
    sync();
    if (thread == 0) red_increment_release(counter(index));
  }
  DEVICE void await(int index, u32 arrivals) const {
    if (thread == 0) spin_until([&] { return load_acquire(counter(index)) >= arrivals; });
    sync();
  }
  // Exchanged words of a row of a head.
  DEVICE float* exchanged(int row) const {
    return (TAGGED ? (float*)(a.counters + COUNTER_WORDS) : a.exchange) + ((long long)head * a.rows + row) * EXCHANGED;
  }
  // Profile marker: cycles of the SM and nanoseconds of the GPU.
  DEVICE void mark(int marker) const {
    if constexpr (PROFILED)
      if (thread == 0) {
        a.markers[(cta_index() * (MARKERS + ARRIVALS) + marker) * 2] = (u64)clock64();
        a.markers[(cta_index() * (MARKERS + ARRIVALS) + marker) * 2 + 1] = globaltimer();
      }
  }
};

DEVICE float bf16_to_float(u32 v) { return uint_as_float(v << 16); }
DEVICE float high_bf16_to_float(u32 v) { return uint_as_float(v & 0xFFFF0000u); }
DEVICE u16 to_bf16(float v) { return (u16)floats_to_bf16x2(v, 0.0f); }
