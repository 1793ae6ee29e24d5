"""CUDA C++ of the decode kernels.

``step.cu`` is the entry and describes the design. ``words.cuh`` explains the flag-in-data protocol, ``waiting.cuh`` the ring of
weight chunks and time-outs, ``phases.cuh`` the phases and barriers, ``attention.cuh`` and ``parts.cuh`` flash-decoding,
``products.cuh`` the matrix-vector products, ``residual.cuh`` the split-K output projection, and ``sampling.cuh`` the sampler.
``machine.cuh`` of ``onelaunch.cuda`` wraps what the hardware does, so that tests can run all files of this folder on a CPU.
``emit.py`` of the folder above gives these files to the compiler.
"""
