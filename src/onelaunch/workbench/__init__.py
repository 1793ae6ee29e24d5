"""The five steps of a study: plan, verify, time, count, decide; and the report."""

from onelaunch.errors import ExtraMissing
from onelaunch.installed import package_installed

for _package in ("numpy", "pydantic"):
    if not package_installed(_package):
        raise ExtraMissing("onelaunch.workbench", package=_package, extra="workbench")

from onelaunch.workbench import measures  # noqa: E402 - registers the measures, and needs the packages above

__all__ = ["measures"]
