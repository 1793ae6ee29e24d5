// Entry point of a shared library that runs the one-launch GLA layer of one configuration on the emulated GPU (tests/decode/host).
//
// build() of gla_layer_step_host.py puts this file, the kernel's source and headers, and the host's machine.cuh in place of the GPU's into
// one folder, compiles it there, and links machine.cpp, and races.cpp if the library is watched.
#define ON_HOST
#include "step.cu"

static Arguments arguments;
static TensorMap maps[6];
static void body() { run_layer(arguments, {maps, maps + 1, maps + 2, maps + 3, maps + 4, maps + 5}); }

// Launch `ctas` CTAs with the pointers p in the order of `gla_layer_step` in step.cu. `tensors` holds, for each tensor map, the address,
// the strides in bytes, then the sizes and the box's sides. A launch that overlaps with the one before finds nothing of these tensors and
// of the `bytes` behind each pointer written before it has waited. Return how many threads trapped, or -1 if the launch did not end
// although none did.
EXPORTED int run(void** p, const long long* bytes, int batch, int length, float inverse_normalizer, float eps, const unsigned long long* tensors, int ctas,
                 int shared_bytes, int unwatched, int barriers, unsigned seed, long long sweeps) {
  arguments = {(const u16*)p[0], (const u16*)p[1], (const u16*)p[2], p[3],         (const float*)p[4], (float*)p[5],
               (u16*)p[6],       (float*)p[7],     (float*)p[8],     (u16*)p[9],   (u32*)p[10],        (u64*)p[11],
               batch,            length,           batch * length,   inverse_normalizer, eps};
  for (int i = 0; i < 6; ++i) {
    const unsigned long long* t = tensors + 9 * i;
    maps[i] = {(const char*)t[0], {t[3], t[4], t[5]}, {t[1], t[2]}, {(u32)t[6], (u32)t[7], (u32)t[8]}};
  }
  host::waited = false;
  for (int i = 0; OVERLAP && i < 12; ++i) host::hide(p[i], bytes[i]);
  for (const TensorMap& map : maps)
    if (OVERLAP) host::hide((void*)map.base, 2 * map.sizes[0] + (map.sizes[1] - 1) * map.strides[0] + (map.sizes[2] - 1) * map.strides[1]);
  const bool ended = host::launch({ctas, THREADS, shared_bytes, unwatched, barriers, seed, sweeps, PAIRED || PAIRED_X ? 2 : 1}, body);
  return ended ? 0 : host::traps ? host::traps : -1;
}
