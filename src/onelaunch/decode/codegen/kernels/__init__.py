"""CUDA C++ of the decode kernels."""
