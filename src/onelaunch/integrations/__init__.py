"""Faster forward passes for models of other libraries: fla's layers and the MLPs of transformers.

Users call :func:`onelaunch.accelerate`. Neither library is imported here: modules are recognized by the names of their classes.
"""

from onelaunch.integrations.report import Refused, Replaced, Report
from onelaunch.integrations.walk import accelerate

__all__ = ["Refused", "Replaced", "Report", "accelerate"]
