// Entry point of a shared library that runs linear_rnn's Hopper kernel for few rows on the emulated GPU (tests/decode/host).
//
// build() of linear_rnn_few_rows_host.py puts this file, the kernel's source and header, and the host's machine.cuh in place of the
// GPU's into one folder, compiles it there, and links machine.cpp, and races.cpp if the library is watched.
#define ON_HOST
#include "few_rows.cu"

static Arguments arguments;
static void body() { run_few_rows(arguments); }

// Launch `ctas` CTAs with the pointers p and the pitches in the order of `linear_rnn_few_rows` in few_rows.cu. A launch that overlaps with
// the one before finds none of the `bytes` behind each pointer written before it has waited. Return whether the launch ended.
EXPORTED int run(void** p, const long long* bytes, int rows, int length, int channels, const long long* pitches, int ctas,
                 int shared_bytes, unsigned seed, long long sweeps) {
  arguments = {(const u16*)p[0], (const u16*)p[1], p[2],   (const u16*)p[3], (const float*)p[4], (u16*)p[5],  (float*)p[6],
               rows,             length,           channels, pitches[0],     pitches[1],         pitches[2], pitches[3]};
  host::waited = false;
  for (int i = 0; OVERLAP && i < 7; ++i) host::hide(p[i], bytes[i]);
  return host::launch({ctas, THREADS, shared_bytes, READY_AT, 1, seed, sweeps, PARTS}, body);
}
