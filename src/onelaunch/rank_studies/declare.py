"""Declaration of a study of ranks, and its reader.

Criteria and predictions are declared before anything runs on several GPUs, and results hold a digest of the declaration.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import Field, model_validator

from onelaunch.workbench.stored import Name, Positive, Words
from onelaunch.workbench.study.declare import Declared, Scale
from onelaunch.workbench.study.kinds import find_declared

Size = Annotated[int, Field(ge=1, le=2**31 - 1)]

Direction = Literal["forward", "forward_backward"]

Regime = Literal["graph", "eager"]
"""Regime of a timing.

- ``graph``: Replays of a CUDA graph, collectives included. Only on GPUs.
- ``eager``: Calls of the public function from Python with a context, many in a row.
"""

Measure = Literal["speedup", "difference"]
"""Quantity that a criterion asks for.

- ``speedup``: time of the call on one GPU / time of the call over all ranks, the slowest of them.
- ``difference``: largest norm-wise difference of outputs and gradients from those of one GPU, relative to their norm.
"""


class RankShape(Declared):
    """Sizes of a call of ``gla``: one sequence for each batch entry, in equal slices."""

    name: Name
    """Name in criteria, results and reports; each shape of a study has its own."""
    scale: Scale = "full"
    """Scale: ``small`` shapes suit a machine without a GPU."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    B: Size = 1
    T: Size
    """Steps of the whole sequence; a multiple of every number of ranks."""
    H: Size
    K: Size
    V: Size
    decay_per: Literal["channel", "head"] = "channel"


class Asked(Declared):
    """Base of criteria and predictions: what they are about."""

    shape: Name
    ranks: Size
    direction: Direction = "forward_backward"
    regime: Regime = "graph"
    """Regime of a speedup."""


class RankPrediction(Asked):
    """Speedup that is expected, declared before the study runs. It decides nothing."""

    by: Words
    """Source of the prediction, such as a cost model."""
    value: Positive
    why: Words
    """Reason for which this value is expected."""


class RankCriterion(Asked):
    """One condition of success."""

    name: Name
    measure: Measure
    at_least: Positive | None = None
    """Lower bound of a speedup."""
    at_most: Positive | None = None
    """Upper bound of a difference."""

    @model_validator(mode="after")
    def _one_bound(self) -> RankCriterion:
        if (self.at_least is not None) != (self.measure == "speedup") or (self.at_most is not None) != (
            self.measure == "difference"
        ):
            raise ValueError(f"criterion {self.name!r}: a speedup has a bound at_least, and a difference one at_most")
        return self

    @property
    def bound(self) -> str:
        """The bound in words, such as ``at least 1.8``."""
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"


class RankStudy(Declared):
    """A declared study of ranks."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,79}$")]
    """Name of the study; its result is named after it."""
    question: str
    rounds: int = Field(default=12, ge=2)
    """Rounds of timing. In each round both calls run, in turns."""
    ranks: tuple[Size, ...] = Field(min_length=1)
    """Numbers of ranks that the study asks for, each a run of its own."""
    shapes: tuple[RankShape, ...] = Field(min_length=1)
    criteria: tuple[RankCriterion, ...] = ()
    predictions: tuple[RankPrediction, ...] = ()
    notes: str = ""

    @model_validator(mode="after")
    def _names_fit(self) -> RankStudy:
        names = [shape.name for shape in self.shapes]
        if len(set(names)) < len(names):
            raise ValueError("two shapes have one name")
        if len({each.name for each in self.criteria}) < len(self.criteria):
            raise ValueError("two criteria have one name")
        for each in (*self.criteria, *self.predictions):
            if each.shape not in names:
                raise ValueError(f"there is no shape {each.shape!r}")
            if each.ranks not in self.ranks:
                raise ValueError(f"the study does not run on {each.ranks} ranks")
        for shape in self.shapes:
            if any(shape.T % ranks for ranks in self.ranks):
                raise ValueError(f"T of {shape.name!r} must be a multiple of every number of ranks")
        return self

    def at_scale(self, scale: Scale) -> tuple[RankShape, ...]:
        """Return the shapes of one scale, in the declared order."""
        return tuple(shape for shape in self.shapes if shape.scale == scale)

    def digest(self) -> str:
        """Return the SHA-256 of the declaration."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def find_rank_study(name_or_path: str) -> RankStudy:
    """Return a study of ranks, by its name or by the path of its file.

    Raises:
        UnknownStudy: No study of ranks has this name.
        StudyError: The file cannot be read or is wrong. The message names the key.
    """
    return find_declared("ranks", RankStudy, name_or_path)
