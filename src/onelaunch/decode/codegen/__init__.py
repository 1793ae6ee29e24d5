"""CUDA C++ of the decode megakernel: shared-memory layout, generated headers, and the kernel sources."""
