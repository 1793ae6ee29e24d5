// The decode kernel of one plan as a function of a shared library.
#define ON_HOST
#include "step.cu"
#include <dlfcn.h>

// Whether all blocks came to their end.
extern "C" int run(void** p, int capacity, int count, int position, int layer, int phase, int ctas, int shared_bytes, unsigned seed,
                   long long sweeps) {
  const Arguments a = {(const char*)p[0], (const long long*)p[1], (const int*)p[2], (const int*)p[3],
                       (const u16*)p[4],  (const u16*)p[5],       (const float*)p[6], (u16*)p[7],
                       (u16*)p[8],        (const long long*)p[9], (int*)p[10],        (float*)p[11],
                       (u64*)p[12],       (u32*)p[13],            (u32*)p[14],        (float*)p[15],
                       (const u32*)p[16], (unsigned char*)p[17],  (u64*)p[18],
                       capacity,          count,                  position};
  return host::launch(ctas, THREADS, shared_bytes, seed, sweeps, [&] {
    if constexpr (SEPARATE) {
      if (phase == QKV) decode_phase<QKV>(a, layer);
      if (phase == O) decode_phase<O>(a, layer);
      if (phase == GATE_UP) decode_phase<GATE_UP>(a, layer);
      if (phase == DOWN) decode_phase<DOWN>(a, layer);
      if (phase == LM_HEAD) decode_phase<LM_HEAD>(a, layer);
      if (phase == ATTENTION) decode_phase<ATTENTION>(a, layer);
      if (phase == SHARES) decode_phase<SHARES>(a, layer);
    } else {
      decode_tokens(a);
    }
  });
}

#ifdef WATCHED
// What the compiler calls at each load and store where it was told to: of the kernel's own, not of those in between.
#define QUIET __attribute__((no_sanitize("thread")))
static bool busy = false;
QUIET static void access(void* at, size_t bytes, bool writes, void* code) {
  if (busy) return;
  busy = true;
  if (host::now && host::now->block->watch) host::now->block->watch->access(at, bytes, writes, host::now->thread, code);
  busy = false;
}
#define OF(BYTES)                                                                                                       \
  QUIET void __tsan_read##BYTES(void* at) { access(at, BYTES, false, __builtin_return_address(0)); }                     \
  QUIET void __tsan_write##BYTES(void* at) { access(at, BYTES, true, __builtin_return_address(0)); }                     \
  QUIET void __tsan_unaligned_read##BYTES(void* at) { access(at, BYTES, false, __builtin_return_address(0)); }           \
  QUIET void __tsan_unaligned_write##BYTES(void* at) { access(at, BYTES, true, __builtin_return_address(0)); }
extern "C" {
OF(1) OF(2) OF(4) OF(8) OF(16)
QUIET void __tsan_read_range(void* at, size_t bytes) { access(at, bytes, false, __builtin_return_address(0)); }
QUIET void __tsan_write_range(void* at, size_t bytes) { access(at, bytes, true, __builtin_return_address(0)); }
QUIET void __tsan_init() {}
QUIET void __tsan_func_entry(void*) {}
QUIET void __tsan_func_exit() {}

// How many pairs of accesses raced so far; of one of them the addresses in the library, and what they did.
int race_count() { return races::count(); }
const char* race(int which, size_t* first, size_t* second) {
  Dl_info library;
  dladdr((void*)&race_count, &library);
  const races::Race r = races::race(which);
  *first = (char*)r.first - (char*)library.dli_fbase, *second = (char*)r.second - (char*)library.dli_fbase;
  return r.kind;
}
}
#endif
