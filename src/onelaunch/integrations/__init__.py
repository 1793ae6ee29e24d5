"""Faster forward passes for models of other libraries: fla's layers and functions, and the MLPs of transformers.

Users call :func:`onelaunch.accelerate`. Modules are recognized by the names of their classes, so neither library is imported for
them; fla is imported where its functions are hooked.
"""

from onelaunch.integrations.fla_hooks import FunctionReport
from onelaunch.integrations.report import Refused, Replaced, Report
from onelaunch.integrations.walk import accelerate

__all__ = ["FunctionReport", "Refused", "Replaced", "Report", "accelerate"]
