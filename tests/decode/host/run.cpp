// Entry point of a shared library that runs the decode kernel of one plan on the emulated GPU (machine.cuh).
//
// build() of host_machine.py puts this file, the kernel's source and headers, and this folder's machine.cuh in place of the GPU's into one
// folder, compiles it there, and links machine.cpp, and races.cpp if the library is watched.
#define ON_HOST
#include "step.cu"

static Arguments arguments;
static int layer_of_launch, phase_of_launch;

static void body() {
  const Arguments& a = arguments;
  const int layer = layer_of_launch, phase = phase_of_launch;
  if constexpr (LAUNCH_PER_PHASE) {
    if (phase == QKV) decode_phase<QKV>(a, layer);
    if (phase == O) decode_phase<O>(a, layer);
    if (phase == GATE_UP) decode_phase<GATE_UP>(a, layer);
    if (phase == DOWN) decode_phase<DOWN>(a, layer);
    if (phase == LM_HEAD) decode_phase<LM_HEAD>(a, layer);
    if (phase == ATTENTION) decode_phase<ATTENTION>(a, layer);
    if (phase == NEXT_TOKEN) decode_phase<NEXT_TOKEN>(a, layer);
  } else {
    decode_tokens(a);
  }
}

// Launch the kernel with the pointers p in the order of `decode` in step.cu; return whether all blocks came to their end. `layer` and
// `phase` are read by a plan with a launch per phase. The race detector leaves out what lies behind FULL_AT: mbarriers and words that
// threads poll.
EXPORTED int run(void** p, int capacity, int count, int position, int layer, int phase, int ctas, int shared_bytes, unsigned seed,
                 long long sweeps) {
  arguments = {(const char*)p[0], (const long long*)p[1], (const int*)p[2], (const int*)p[3],
               (const u16*)p[4],  (const u16*)p[5],       (const float*)p[6], (u16*)p[7],
               (u16*)p[8],        (const long long*)p[9], (int*)p[10],        (float*)p[11],
               (u64*)p[12],       (u32*)p[13],            (u32*)p[14],        (float*)p[15],
               (const u32*)p[16], (unsigned char*)p[17],  (u64*)p[18],
               capacity,          count,                  position};
  layer_of_launch = layer, phase_of_launch = phase;
  return host::launch({ctas, THREADS, shared_bytes, FULL_AT, 2 * STAGES, seed, sweeps}, body);
}
