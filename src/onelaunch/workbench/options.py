"""Options of a run, which ``workbench/run.py`` makes and sends to the process that measures, and the progress that it reports."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from onelaunch.operation import Direction
from onelaunch.workbench.measure.timing import new_seed

T = TypeVar("T")


class Part(NamedTuple):
    """Part of a run that one process measures, where several processes share it, each on a device of its own."""

    index: int
    number: int
    """Number of parts."""

    def of(self, shapes: Sequence[T]) -> Sequence[T]:
        """Return the shapes of this part: every ``number``-th, since shapes that stand together often take alike."""
        return shapes[self.index :: self.number]


WHOLE = Part(0, 1)
"""The only part of a run in one process."""


@dataclass(frozen=True)
class RunOptions:
    """Options of a run."""

    rounds: int
    time_cap: float
    """Seconds after which no new round of a case begins."""
    quick: bool = False
    """True if the study's first direction alone is measured."""
    count: bool | Literal["all"] = True
    """Switch for counting DRAM bytes, launches and barriers and for host times; see :func:`onelaunch.workbench.run.run_study`."""
    command: str = ""
    """Command line for the provenance; this process's own if empty."""
    timing_seed: int = field(default_factory=new_seed)
    """Seed of the inputs that are timed, drawn for each run and stored in its result."""
    began: float = field(default_factory=time.monotonic)
    """Start of the run by ``time.monotonic``."""
    price_per_hour: float | None = None
    """Price of an hour of the machine, in any currency; ``None`` if it is not known."""
    time_limit: float | None = None
    """Seconds from ``began`` after which no new case begins; ``None`` for no limit."""
    tuning: Path | None = None
    """File of the choices of Triton's autotuner, see :mod:`onelaunch.workbench.measure.tuning`; ``None`` for none."""

    @property
    def out_of_time(self) -> bool:
        """True once the time limit is reached."""
        return self.time_limit is not None and time.monotonic() - self.began >= self.time_limit


@dataclass(frozen=True)
class Progress:
    """Progress of a run."""

    shape: str
    direction: Direction
    step: str
    """``compile``, ``probe``, ``verify``, ``examine``, ``prepare``, ``time`` or ``count``."""
    done: int
    """Number of items of this step that are done at this shape and direction."""
    total: int
    cases_done: int
    """Number of cases, each a shape in one direction, that are finished; in one of several parts, of that part."""
    cases: int
    """Number of all cases, or of those of the part."""
