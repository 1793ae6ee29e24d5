// Layout of shared memory, the ring of weight chunks, and waits that time out, of the one-launch GLA layer (step.cu).
//
// Ring       STAGES buffers of CHUNK (16 KB) bytes, each with two mbarriers: `full` (armed by the producer thread, completed by TMA) and
//            `empty` (one arrival per consumer warp). A chunk has `rows` rows of a matrix over chunk_blocks() blocks of 64 columns. TMA
//            stores it as [block][row][128 bytes] with the 128-byte swizzle: 16-byte unit u of a line lies at u ^ (line % 8).
// Time-out   no wait is unbounded. After TIMEOUT_CYCLES (about two seconds) a wait traps, so that a CTA that never comes gives a CUDA error
//            and not a hung GPU. A cooperative launch has all its CTAs resident, so this only happens if memory is corrupted.
#pragma once

typedef unsigned short u16;

constexpr int WARPS = 8, CONSUMER_THREADS = 32 * WARPS, THREADS = CONSUMER_THREADS + 32, CHUNK = 16384;
constexpr int ROW_TILES = ROWS > 8 ? ROWS / 8 : 1, COLUMNS = 8 * ROW_TILES;  // rows of x in units of 8, the columns of an mma
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
// Floats of a row that the CTAs of a head exchange: q, k, and the low-rank factor padded to 16 bytes.
constexpr int RANK_PADDED = PER_HEAD ? 0 : divided(RANK, 4) * 4, EXCHANGED = 2 * KEYS + RANK_PADDED;

struct Arguments {
  const u16 *x, *decay_weight, *decay_bias;  // [B T, WIDTH]; [H K, RANK]; [H K] or [H]
  const void* norm_weight;                   // [V], float32 if FLOAT_NORM
  const float* initial;                      // [B, H, K, V] or null
  float* final_state;                        // the same or null
  u16* out;                                  // [B T, WIDTH]
  float *exchange, *squares;                 // [H][B T][EXCHANGED]; [B T][CTAS], sums of squares of a CTA's part of o
  u16* gated;                                // [B T, H V]: o times norm weight and silu(gate), before the division by the norm
  u32* counters;                             // [H + 1] lines of 128 bytes: arrivals of each head, then of all CTAs; zero between launches
  u64* markers;                              // [CTAS][MARKERS][2], only if PROFILED
  int batch, length, rows;                   // B, T and B T
  float inverse_normalizer, eps;
};

struct Maps { const TensorMap *keys, *values, *rank, *out; };

// Pointers into a CTA's shared memory, at the offsets of sizes.cuh.
struct Shared {
  char* stages;          // [STAGES][CHUNK]
  char* operand;         // [ROWS][columns of a slab * 2 + 64 bytes]: x, later the normalized and gated o
  float* sums;           // [2][BLOCK_GROUPS][16][COLUMNS]: sums of each group of warps; two sets alternate
  float* y;              // [G_AT + VALUE_ROWS][Y_PITCH]
  float* queries_keys;   // [BLOCK_ROWS][2 * KEYS]; later 1 / RMS of o, [ROWS][HEADS]
  float* decays;         // [BLOCK_ROWS][KEYS]
  float* low_rank;       // [BLOCK_ROWS][RANK_PADDED]
  float* partial;        // [PARTS][BLOCK_ROWS][VALUE_ROWS]: o of each part of the keys
  u16 *decay_weight, *decay_bias;  // [KEYS][RANK] and [KEYS] of the head; unused with one decay per head
  void* norm_weight;     // [VALUES], float32 if FLOAT_NORM
  u64 *full, *empty;     // [STAGES]
  DEVICE explicit Shared(char* base)
      : stages(base), operand(base + OPERAND_AT), sums((float*)(base + SUMS_AT)), y((float*)(base + Y_AT)),
        queries_keys((float*)(base + QUERIES_KEYS_AT)), decays((float*)(base + DECAYS_AT)), low_rank((float*)(base + LOW_RANK_AT)),
        partial((float*)(base + PARTIAL_AT)), decay_weight((u16*)(base + DECAY_WEIGHT_AT)), decay_bias((u16*)(base + DECAY_BIAS_AT)),
        norm_weight(base + NORM_WEIGHT_AT), full((u64*)(base + FULL_AT)), empty(full + STAGES) {}
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
  DEVICE Consumer(const Arguments& a, Shared& s)
      : a(a), s(s), thread(thread_index()), warp(thread_index() / 32), lane(thread_index() % 32), head(cta_index() / MEMBERS),
        member(cta_index() % MEMBERS) {}
  // Recompute the thread's indices. Called before each phase, so that addresses made of them are computed there and do not spill.
  DEVICE void refresh() { thread = opaque(thread), warp = thread / 32, lane = thread % 32; }
  // Barrier of the consumer threads; the producer warp does not take part.
  DEVICE void sync() const { bar_sync(1, CONSUMER_THREADS); }
  DEVICE const char* wait_chunk() const {
    spin_until([&] { return mbarrier_try_wait(s.full + ring.stage, ring.phase); });
    return s.stages + ring.stage * CHUNK;
  }
  DEVICE void release_chunk() {
    syncwarp();
    if (lane == 0) mbarrier_arrive(s.empty + ring.stage);
    ring.advance();
  }
  // Arrivals of the CTAs of head `index`, or of all CTAs for index HEADS.
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
  // Profile marker: cycles of the SM and nanoseconds of the GPU.
  DEVICE void mark(int marker) const {
    if constexpr (PROFILED)
      if (thread == 0) {
        a.markers[(cta_index() * MARKERS + marker) * 2] = (u64)clock64();
        a.markers[(cta_index() * MARKERS + marker) * 2 + 1] = globaltimer();
      }
  }
};

DEVICE float bf16_to_float(u32 v) { return uint_as_float(v << 16); }
DEVICE float high_bf16_to_float(u32 v) { return uint_as_float(v & 0xFFFF0000u); }
DEVICE u16 to_bf16(float v) { return (u16)floats_to_bf16x2(v, 0.0f); }
