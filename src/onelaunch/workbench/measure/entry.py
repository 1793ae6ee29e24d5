"""State of one candidate while it is measured.

A candidate is a variant of the operation or a control, a part of the operation that is timed beside the variants, such as its
matrix product alone. ``timing.py`` makes one :class:`Entry` for each candidate of a case, and one more for the second copy of the
baseline that an A/A run times.

``OUTSIDE`` is the status of a peer outside the gate: another project's variant that fails the verification gate, but whose errors
its own project's tests allow. It is timed, so that others can be compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from onelaunch.operation import Control, Loop
from onelaunch.workbench.measure.contents import InputsChanged
from onelaunch.workbench.measure.garbage import free_what_is_held_by
from onelaunch.workbench.measure.outcomes import CandidateResult
from onelaunch.workbench.measure.sampling import Sampler
from onelaunch.workbench.result import OUTSIDE, Regime, Verdict
from onelaunch.workbench.verify.calls import Candidate, status_of

RAISED = (Exception, SystemExit)
"""Exceptions that are recorded as a candidate's result, also if the oracle or the allocation of its inputs raised them.

``KeyboardInterrupt`` ends the run, and everything that was measured is kept.
"""


@dataclass
class Entry:
    """A candidate while it is measured."""

    result: CandidateResult
    candidate: Candidate
    control: Control | None
    """Control that the candidate runs, which has an oracle of its own; ``None`` if the candidate is a variant."""
    hidden: bool = False
    """True for the second copy of the baseline, which :class:`Measurements` do not list."""
    seconds: float = 0.0
    """Time that its samples took in all rounds, with what is not timed of them."""
    sampler: Sampler | None = None
    """Sampler of single calls; ``None`` before it is made, and after :meth:`release`."""
    loops: dict[Regime, Loop] = field(default_factory=dict)
    """Loops of consecutive steps, for the regimes of :data:`LOOPS`."""
    rounds: dict[Regime, list[float]] = field(default_factory=dict)
    """Samples in microseconds, one for each round."""

    @property
    def runs(self) -> bool:
        """True until something is found that ends its measurement; a peer outside the gate runs on."""
        return self.result.measured

    def fail(self, error: BaseException) -> None:
        """Record an exception as the candidate's status. ``SystemExit`` is one too, which must not end the run."""
        if isinstance(error, InputsChanged):
            self.result.status, self.result.reason = "incorrect", str(error)
        elif isinstance(error, SystemExit):
            self.result.status, self.result.reason = "crashed", f"It ended the process with sys.exit({error.code!r})."
        else:
            self.result.status, self.result.reason = status_of(error)
        self.release()
        if self.result.status == "out_of_memory":
            # Or the candidates that follow would find no memory either.
            free_what_is_held_by(error)

    def misses(self, verdict: Verdict, said: str = "") -> None:
        """Set the status after a verdict that fails: a peer outside the gate, which runs on, or incorrect.

        Args:
            verdict: The verdict. One without errors, of many calls, leaves the errors of an earlier one.
            said: Introduction of the reason.
        """
        reason = f"{said}{verdict.explain()}"
        if not verdict.outside:
            self.result.status, self.result.reason = "incorrect", reason
        elif self.result.status != OUTSIDE:
            self.result.status, self.result.reason = OUTSIDE, reason
            errors = verdict if verdict.components or self.result.verdict is None else self.result.verdict
            self.result.verdict = verdict.model_copy(update={"components": errors.components})

    def share_blame_of(self, again: Entry) -> None:
        """Take the status of the second copy of this variant, the baseline, if that one does not pass."""
        wrong = again.result.status in ("incorrect", OUTSIDE) and again.result.status != self.result.status
        if self.runs and wrong:
            self.result.status, self.result.reason = again.result.status, again.result.reason
            self.result.verdict = again.result.verdict or self.result.verdict

    def release(self) -> None:
        """Free the memory of its inputs, outputs and graphs."""
        self.sampler, self.loops = None, {}
