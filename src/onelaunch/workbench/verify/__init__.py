"""The gate that tests and studies share: a variant is as near to the float64 oracle as plain PyTorch in the same dtype."""

from onelaunch.workbench.verify.gate import Judge, judge, judge_answer, judge_control

__all__ = ["Judge", "judge", "judge_answer", "judge_control"]
