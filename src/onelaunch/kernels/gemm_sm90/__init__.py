"""One matrix product for Hopper GPUs (sm_90a): a scheduler, a main loop and an epilogue, put together for each configuration."""
