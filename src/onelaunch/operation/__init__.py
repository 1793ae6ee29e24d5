"""Operations, their variants, and the registry that the rest of the package reads.

An :class:`Operation` is a mathematical contract, and a :class:`Variant` is one implementation of it. The public functions, the
tests, the studies, the dispatcher, the commands and the documentation all read these objects; no other place lists all variants.
"""

from onelaunch.operation.accuracy import SUM_OF_PRODUCTS, StatedErrors
from onelaunch.operation.case import Bundle, Case, Reading
from onelaunch.operation.cost import Cost, launch_count
from onelaunch.operation.definition import Operation
from onelaunch.operation.probe import Probe
from onelaunch.operation.query import (
    AUTO,
    DIRECTIONS,
    NAME,
    Call,
    Direction,
    Outputs,
    Query,
    Shapes,
    SymbolicSizes,
    constant,
    fixed,
    names_of,
    parse_dtype,
    remembered,
    state_flags,
)
from onelaunch.operation.registry import find_operation, operation, operations, plugins
from onelaunch.operation.registry import operation_by_name as _operation_by_name  # noqa: F401 - pickles of older versions name it
from onelaunch.operation.registry import variant_by_name as _variant_by_name  # noqa: F401 - pickles of older versions name it
from onelaunch.operation.variant import Capabilities, Control, Example, Loop, LoopMaker, Variant

__all__ = [
    "AUTO",
    "DIRECTIONS",
    "NAME",
    "SUM_OF_PRODUCTS",
    "Bundle",
    "Call",
    "Capabilities",
    "Case",
    "Control",
    "Cost",
    "Direction",
    "Example",
    "Loop",
    "LoopMaker",
    "Operation",
    "Outputs",
    "Probe",
    "Query",
    "Reading",
    "Shapes",
    "StatedErrors",
    "SymbolicSizes",
    "Variant",
    "constant",
    "find_operation",
    "fixed",
    "launch_count",
    "names_of",
    "operation",
    "operations",
    "parse_dtype",
    "plugins",
    "remembered",
    "state_flags",
]
