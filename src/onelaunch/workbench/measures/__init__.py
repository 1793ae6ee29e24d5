"""Measures that criteria can ask for. Every module in this folder registers its measures when it is imported.

A new measure is one new module here: a class that derives from :class:`onelaunch.workbench.decide.measured.JudgedMeasure`, or
from its ``CountedMeasure`` or ``TakenMeasure``, under the decorator :func:`onelaunch.workbench.study.register`. A package of your
own registers measures in the same way.
"""

import importlib
import pkgutil

FIRST = ("times", "traffic", "memory", "counts", "error", "host")
"""Modules in the order in which messages and the documentation list their measures. Other modules follow by name."""

for _name in dict.fromkeys((*FIRST, *sorted(module.name for module in pkgutil.iter_modules(__path__)))):
    importlib.import_module(f"{__name__}.{_name}")
