"""Correctness check that tests and studies share.

A variant passes if its outputs are as near to the float64 oracle as those of plain PyTorch in the same dtype.
"""

from onelaunch.moved import renamed
from onelaunch.workbench.verify.gate import Judge, judge, judge_control, judge_outputs
from onelaunch.workbench.verify.probes import run_probes

__all__ = ["Judge", "judge", "judge_control", "judge_outputs", "run_probes"]

# Names that were renamed; each still works, with a DeprecationWarning.
__getattr__ = renamed(__name__, {"judge_answer": "judge_outputs"})
