"""Plans of the decode megakernel: which CTA computes what in each phase of a token, and how the phases are synchronized."""

from onelaunch.decode.plan.levels import plan_for
from onelaunch.decode.plan.phases import Plan

__all__ = ["Plan", "plan_for"]
