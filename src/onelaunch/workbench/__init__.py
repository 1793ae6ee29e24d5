"""The five steps of a study: plan, verify, time, count, decide; and the report."""

import importlib.util

from onelaunch.errors import ExtraMissing

for _package in ("numpy", "pydantic"):
    if importlib.util.find_spec(_package) is None:
        raise ExtraMissing("onelaunch.workbench", package=_package, extra="workbench")

from onelaunch.workbench import measures  # noqa: E402 - registers the measures, and needs the packages above

__all__ = ["measures"]
