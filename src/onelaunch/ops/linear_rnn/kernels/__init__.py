"""Kernels of ``linear_rnn``: the whole layer in one launch (four kernels), a plain matrix product, and a read of the weight.

``few_rows.cu`` is the layer for few rows on Hopper, in CUDA C++; ``few_rows.py`` the same in Triton. ``machine.cuh`` of
``onelaunch.cuda`` wraps what the hardware does, so that tests can run the file on a CPU. ``configure_few_rows_hopper.py`` of the
folder above generates its ``sizes.cuh``.
"""
