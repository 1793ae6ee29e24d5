"""Execution of requests: engines, sessions, CUDA graphs, device memory, plan proofs, and loading of kernels."""
