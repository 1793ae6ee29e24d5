"""Declared studies: how one is written down (declare), read from a file (read), held against a device's peaks (plan), and the
measures that its criteria can ask for (measure).
"""

from onelaunch.workbench.study.declare import (
    LOOPS,
    Criterion,
    Regime,
    Scale,
    Selector,
    Shape,
    Study,
    members,
)
from onelaunch.workbench.study.measure import Alone, Measure, find_measure, measure_names, measures, register

__all__ = [
    "LOOPS",
    "Alone",
    "Criterion",
    "Measure",
    "Regime",
    "Scale",
    "Selector",
    "Shape",
    "Study",
    "find_measure",
    "measure_names",
    "measures",
    "members",
    "register",
]
