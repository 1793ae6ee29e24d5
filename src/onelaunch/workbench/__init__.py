"""The workbench: from the declaration of a study to a decision with its evidence, and the report.

A study goes from room to room: study (declare, read, plan), verify, measure, decide, report. They hand on what result and stored
define, run leads through, and no room imports a later one. The measures that criteria can ask for are in measures.
"""

from onelaunch.device.tools import package_installed
from onelaunch.errors import ExtraMissing

for _package in ("numpy", "pydantic"):
    if not package_installed(_package):
        raise ExtraMissing("onelaunch.workbench", package=_package, extra="workbench")

from onelaunch.workbench import measures  # noqa: E402 - registers the measures, and needs the packages above

__all__ = ["measures"]
