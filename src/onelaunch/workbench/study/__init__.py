"""Declared studies: how one is written down (declare), read from a file (read) and held against a device's peaks (plan)."""

from onelaunch.workbench.study.declare import (
    ALONE,
    COUNTS,
    DRAM_BYTES,
    LOOPS,
    TIMES,
    Criterion,
    Measure,
    Regime,
    Scale,
    Selector,
    Shape,
    Study,
    members,
)

__all__ = [
    "ALONE",
    "COUNTS",
    "DRAM_BYTES",
    "LOOPS",
    "TIMES",
    "Criterion",
    "Measure",
    "Regime",
    "Scale",
    "Selector",
    "Shape",
    "Study",
    "members",
]
