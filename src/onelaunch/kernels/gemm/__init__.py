"""Parts of portable Triton matrix products that several operations share: device functions and tile choices.

The Triton kernels of ``swiglu`` and of ``output_chain``'s prologue use them; Hopper's CUDA C++ product is in ``gemm_sm90``.
"""
