"""Plans of the decode megakernel: which CTA computes what in each phase of a token, and how the phases are synchronized."""

from onelaunch.decode.plan.phases import Plan
from onelaunch.decode.plan.rungs import plan_for

__all__ = ["Plan", "plan_for"]
