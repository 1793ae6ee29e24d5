"""Measure a study in a child process that this process supervises.

A variant may exit, crash, be killed for lack of memory, or never return. Each would end the run, or stop it for ever. So the
parent learns from a few bytes of shared memory which candidate is running, and since when. If the child dies, or a candidate runs
too long, that becomes the candidate's status. A new child then goes on without it, from the finished cases that the parent holds.

All candidates of a case are measured in one child, interleaved. As long as children measure, the parent uses no device and does
not initialise CUDA.

The child is forked where that is possible: on Linux, for the CPU, in a process that has not initialised CUDA. It then knows
everything that the caller's script has registered. Otherwise a new interpreter is started, which imports the caller's main module
and the modules that registered the operation and its variants. If it misses some of these nevertheless, the study is measured in
the calling process, and a note says so. ``run.py`` calls :func:`supervise`, or :func:`carry_out` for a run without a child.
"""

from onelaunch.workbench.supervise.job import Job, carry_out
from onelaunch.workbench.supervise.parent import CALL_LIMIT_SECONDS, slug_of, supervise

__all__ = ["CALL_LIMIT_SECONDS", "Job", "carry_out", "slug_of", "supervise"]
