"""Measurements: times in interleaved rounds, clocks, DRAM bytes, launches and grid barriers; and compilation ahead of them."""
