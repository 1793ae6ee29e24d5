"""Input sets that take turns in a measurement, so that each call finds its inputs in memory and not in a cache.

:func:`rotate` makes them, ``timing.py`` gives one :class:`Rotation` to the samplers of all variants (``sampling.py``), and
``count_child.py`` takes the number of sets from :func:`count_sets`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from onelaunch.device.hardware import describe, free_memory
from onelaunch.workbench.measure.contents import Contents, InputsChanged
from onelaunch.workbench.verify.calls import Inputs
from onelaunch.workbench.verify.reference import Reference

CACHES = 3.0
"""Size of all rotated inputs together, in last-level caches. Each call then finds its inputs in memory, not in the cache."""

MOST_CALLS = 4096
"""Largest number of calls in a sample, and of input sets."""

_SHARE_OF_MEMORY = 0.25
"""Largest fraction of the free memory that the input sets and their outputs may take."""

JUDGED_CALLS = 2
"""Number of random calls of the last sample whose outputs are judged."""

_OFFSETS = "cu_seqlens"
"""Argument with the offsets of packed sequences, in all operations that take them."""

_WATCHED_SETS, _WATCHED_BYTES = 16, 32 << 20
"""Largest number and size in bytes of the input sets that are compared bit by bit with their contents after the last sample."""


@dataclass
class Rotation:
    """Input sets in different storage, shared by all variants of a measurement. Each control has a rotation of its own.

    At first all hold the contents of the reference. Samplers give them other contents before and between samples.
    """

    reference: Reference
    sets: list[Inputs]
    full: bool
    """True if the sets together exceed three last-level caches. False if memory is too small for that, or the sets too tiny."""
    stream: torch.cuda.Stream | None = None
    """Stream on which calls are captured, replayed and timed; ``None`` on a CPU."""
    other: Inputs | None = None
    """Inputs of the same case from another seed; see :class:`~onelaunch.workbench.measure.contents.Contents`."""
    seed: int = 0
    """Seed of the changing contents and of the choice of the calls that are judged."""
    short_of_memory: bool = False
    """True if more sets would not fit into memory, although these exceed three last-level caches."""
    _next: int = field(default=0, init=False)
    _begun: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.contents = Contents(self.reference.inputs, self.other, self.seed)
        self.other = None  # contents keep what they need of it

    def begin(self) -> None:
        """Replace the judged contents of all sets by others, before the first candidate runs."""
        if not self._begun:
            self.contents.renew(self.sets)
            self._begun = True

    def judge_some(self, count: int) -> frozenset[int]:
        """Return the random indices of the calls, or sets, of the last sample whose outputs are judged."""
        return frozenset(self.contents.random.sample(range(count), min(JUDGED_CALLS, count)))

    def watch_some(self) -> list[Inputs]:
        """Return random sets with known contents, which are compared with these after the last sample."""
        fit = _WATCHED_BYTES // max(self.reference.inputs.nbytes, 1)
        sets = self.contents.random.sample(self.sets, max(1, min(len(self.sets), _WATCHED_SETS, fit)))
        self.contents.renew(sets, all_of_it=True)
        return sets

    def check(self, sets: Sequence[Inputs]) -> None:
        """Compare sets with their contents bit by bit.

        Raises:
            InputsChanged: A tensor differs.
        """
        if names := sorted({name for one in sets for name in self.contents.changed(one)}):
            self.contents.renew(self.sets, all_of_it=True)  # the other candidates must not suffer
            raise InputsChanged(names)

    def next(self) -> Inputs:
        """Return the least recently used set, over all candidates that share the sets."""
        self._next = (self._next + 1) % len(self.sets)
        return self.sets[self._next]

    @property
    def note(self) -> str:
        """Number and size of the input sets, in a sentence for the result."""
        size = sum(one.nbytes for one in self.sets) / 2**20
        short = "" if self.full else f"; too few to exceed {CACHES:g} last-level caches"
        if self.short_of_memory:
            short = "; more would not fit into memory, so caches are flushed before samples"
        sets = "1 input set" if len(self.sets) == 1 else f"{len(self.sets)} input sets"
        return f"{sets} rotated, {size:.0f} MiB in all{short}"


def rotate(
    reference: Reference, device: torch.device, other: Inputs | None = None, seed: int = 0, candidates: int = 1
) -> Rotation:
    """Make enough input sets to exceed three last-level caches, as far as memory allows.

    Args:
        reference: Reference with the contents that are judged at the end.
        device: Device to run on.
        other: Inputs of the same case from another seed, which show by comparison which tensors are random.
        seed: Seed of the contents in between.
        candidates: Number of candidates that share the sets. On a GPU, each keeps outputs of its own for every set.
    """
    output_bytes = sum(
        value.numel() * reference.case.dtype.itemsize for value in reference.expected.values() if value is not None
    )
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    count, full = count_sets(reference.inputs.nbytes, output_bytes, device, candidates if device.type == "cuda" else 1)
    short = not full and count * reference.inputs.nbytes > CACHES * describe(str(device)).cache_bytes
    return Rotation(reference, [_copy(reference.inputs) for _ in range(count)], full, stream, other, seed, short)


def _copy(inputs: Inputs) -> Inputs:
    """Return a copy of inputs in new storage, but for the offsets of packed sequences.

    The layers of a model share one tensor of offsets. fla's functions keep what they derive from it, by its identity; for another
    tensor they read values on the host, which no CUDA graph can capture.
    """
    copy = inputs.clone()
    copy.arguments |= {name: value for name, value in inputs.arguments.items() if name == _OFFSETS}
    return copy


def count_sets(input_bytes: int, output_bytes: int, device: torch.device, candidates: int = 1) -> tuple[int, bool]:
    """Return the number of input sets to rotate through, and whether there are enough to exceed three last-level caches.

    Where graphs are replayed, each candidate keeps the outputs of each set too, since they are all captured before the first
    round. Inputs and outputs together take at most a quarter of the free memory. The rest is for what is left free within the
    graphs' pools, for calls from Python and for the reference.
    """
    one = max(input_bytes, 1)
    # One set more than exceeds the caches, so that the others alone exceed them between two uses of a set.
    wanted = int(CACHES * describe(str(device)).cache_bytes) // one + 2
    fit = int(_SHARE_OF_MEMORY * free_memory(device)) // (one + candidates * output_bytes)
    count = max(1, min(wanted, fit, MOST_CALLS))
    return count, count == wanted
