"""Plans of the decode megakernel: which CTA computes what in each phase of a token, and what orders the phases."""

from onelaunch.decode.plan.phases import Plan
from onelaunch.decode.plan.rungs import plan_for

__all__ = ["Plan", "plan_for"]
