"""Kernels of ``output_chain``: norm and gate in one pass, and the output projection with both inside.

``few_rows.cu`` is the output projection of few rows on Hopper, in CUDA C++. ``machine.cuh`` of ``onelaunch.cuda`` wraps what the
hardware does, so that tests can run the file on a CPU. ``configure_few_rows.py`` of the folder above generates its ``sizes.cuh``.
"""
