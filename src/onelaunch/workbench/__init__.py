"""The workbench: from the declaration of a study to a decision with its evidence, and the report.

Each step is a package: ``study`` (declare, read, plan), ``verify``, ``measure``, ``decide``, ``report``. No package imports a
later one. ``run`` carries out the steps in order, with the state in ``running``. ``result`` and ``stored`` define the values that
pass between them, and ``measures`` holds the measures that criteria can ask for.

Four parts stand beside the steps: ``adopt`` writes measured times into the dispatcher's tables, ``sinks`` sends results to the
logs of other packages, ``pack`` lets a study run on a machine without a network, and ``inspection`` reads the machine code of
kernels. The commands ``onelaunch study`` and ``onelaunch inspect`` call the workbench, other commands print with its
``quantities`` and ``report/tables.py``, and tests judge variants by ``verify``.
"""

from onelaunch.device.tools import package_installed
from onelaunch.errors import ExtraMissing

for _package in ("numpy", "pydantic"):
    if not package_installed(_package):
        raise ExtraMissing("onelaunch.workbench", package=_package, extra="workbench")

from onelaunch.workbench import measures  # noqa: E402 - importing it registers the measures; it needs the packages checked above

__all__ = ["measures"]
