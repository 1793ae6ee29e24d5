"""Measurements: times by interleaved rounds, clocks, DRAM bytes, launches and barriers, and compiling ahead of them."""
