"""Options of a run, which ``workbench/run.py`` makes and sends to the process that measures, and the progress that it reports."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from onelaunch.operation import Direction
from onelaunch.workbench.measure.timing import new_seed

T = TypeVar("T")


class Part(NamedTuple):
    """Part of a run that one process measures, where several processes share it, each on a device of its own.

    A process claims each shape before it measures it, so that one that is done with its own shapes takes over those that others
    have not begun. A claim is a symbolic link in a folder, from the shape's index to the part's. The system makes a link whole or
    not at all, and only if there is none, so that no lock is needed which a process could hold when it is killed.
    """

    index: int
    number: int
    """Number of parts."""
    claims: Path | None = None
    """Folder of the claims; ``None`` if each part measures its own shapes alone."""

    def of(self, shapes: Sequence[T]) -> Sequence[T]:
        """Return the shapes of this part: every ``number``-th, since shapes that stand together often take alike."""
        return shapes[self.index :: self.number]

    def claimed(self, shapes: Sequence[T]) -> Iterator[T]:
        """Yield shapes that this process measures now, each claimed when it is asked for.

        First come those that an earlier process of this part has claimed, then its own, then others' from the last one on.
        """
        if self.claims is None:
            yield from self.of(shapes)
            return
        yield from [shape for at, shape in enumerate(shapes) if self._owner(at) == self.index]
        own = range(len(shapes))[self.index :: self.number]
        for at in (*own, *(at for at in reversed(range(len(shapes))) if at not in own)):
            try:
                (self.claims / str(at)).symlink_to(str(self.index))
            except FileExistsError:
                continue
            yield shapes[at]

    def left(self, shapes: Sequence[T]) -> Sequence[T]:
        """Return the shapes that this process measures or may still measure: those that no other one has claimed."""
        if self.claims is None:
            return self.of(shapes)
        return [shape for at, shape in enumerate(shapes) if self._owner(at) in (None, self.index)]

    def _owner(self, at: int) -> int | None:
        """Return the index of the part that has claimed the shape with this index, or ``None``."""
        assert self.claims is not None  # noqa: S101 - both callers have looked
        try:
            return int(str((self.claims / str(at)).readlink()))
        except FileNotFoundError:
            return None


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
    across_commits: bool = False
    """True if a resumed run may take over what another commit of onelaunch measured."""
    anew: tuple[str, ...] = ()
    """Names of shapes that a resumed run measures even if the earlier run has finished them."""

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
