"""Execution of requests: engines, sessions, CUDA graphs, device memory, and the loading of kernels."""
