"""Declared studies.

``declare`` defines what a study declares, ``read`` reads it from a file, and ``plan`` computes its costs and roofline bounds on a
device. ``measure`` holds the base class and the registry of the measures (such as ``speedup``) that criteria can ask for; the
measures themselves are in :mod:`onelaunch.workbench.measures`.
"""

from onelaunch.workbench.study.declare import (
    LOOPS,
    Asked,
    Criterion,
    Prediction,
    Regime,
    Scale,
    Selector,
    Shape,
    Study,
    case_name,
    members,
)
from onelaunch.workbench.study.measure import Alone, Measure, find_measure, measure_names, measures, register

__all__ = [
    "LOOPS",
    "Alone",
    "Asked",
    "Criterion",
    "Measure",
    "Prediction",
    "Regime",
    "Scale",
    "Selector",
    "Shape",
    "Study",
    "case_name",
    "find_measure",
    "measure_names",
    "measures",
    "members",
    "register",
]
