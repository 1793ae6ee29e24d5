"""Matrix product for Hopper GPUs (sm_90a) in CUDA C++: one kernel of a tile scheduler, a main loop and an epilogue.

``launch_hopper.py`` of ``ops/swiglu`` and of ``ops/projections`` launch it.
"""
