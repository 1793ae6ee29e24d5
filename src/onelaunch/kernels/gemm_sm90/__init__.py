"""Matrix product for Hopper GPUs (sm_90a) in CUDA C++: one kernel of a tile scheduler, a main loop and an epilogue."""
