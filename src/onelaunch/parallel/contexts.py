"""Facts that all ranks know about a call: the lengths of the slices and the offsets of packed sequences.

Public functions and layers call :func:`entered` with the caller's ``mesh``. Users call :func:`context` to make a
:class:`Context` once for many calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch

from onelaunch import checks
from onelaunch.errors import ArgumentError, PackingError
from onelaunch.parallel.agreement import Facts, agree, check_device, resolve
from onelaunch.parallel.collectives import Collectives
from onelaunch.parallel.exchange import collectives_of
from onelaunch.parallel.local_slice import LocalSlice, local_slice_of, starts_of
from onelaunch.parallel.uncompiled import uncompiled

R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Context:
    """Slices of the steps of a group's ranks, made by :func:`context`; pass it as ``mesh``.

    One object serves any number of calls with slices of these lengths. The ranks compare a call of a new kind (sizes, dtype,
    flags) once; later calls of that kind exchange only data.
    """

    collectives: Collectives
    """Collectives of the process group."""
    rank: int
    lengths: tuple[int, ...]
    """Steps on each rank."""
    offsets: tuple[int, ...] | None
    """Offsets of the packed sequences among all steps, or ``None``."""
    local_slice: LocalSlice
    """Steps and sequences of this rank."""
    cu_seqlens: torch.Tensor | None
    """Offsets of this rank's sequences in its slice, int32, or ``None`` where no sequences are packed."""
    sequences: torch.Tensor
    """Indices of this rank's sequences among those of all ranks, int64."""
    ending: torch.Tensor
    """Positions among this rank's sequences of those that end here, int64."""
    given: torch.Tensor | None = None
    """Tensor ``cu_seqlens`` of the caller, with offsets among the steps of all ranks."""
    process_group: Any = field(default=None, repr=False)
    """Process group, or ``None`` where one process stands for a rank (``simulated.py``)."""
    known: set[tuple[Any, ...]] = field(default_factory=set, repr=False)
    """Kinds of calls that all ranks have agreed on."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.lengths)

    @property
    def starts(self) -> tuple[int, ...]:
        """First step of every slice, and the end of the last one."""
        return starts_of(self.lengths)


class Described(NamedTuple):
    """Description of a checked call on this rank, which is compared with those of the other ranks."""

    length: int
    """Steps on this rank."""
    device: torch.device
    facts: dict[str, Any]
    """Facts that must be the same on all ranks: hashable values by name."""
    call: Any = None
    """Checked call, for the caller of :func:`entered`."""


def context(mesh: Any, length: int, *, device: torch.device | str, cu_seqlens: torch.Tensor | None = None) -> Context:
    """Tell all ranks of a group how the steps are spread over them; a collective call.

    Args:
        mesh: DeviceMesh of one dimension, or process group. The slice of rank 0 comes first in time, then that of rank 1.
        length: Number of steps T on this rank, at least 0.
        device: Device of the calls' tensors.
        cu_seqlens: Offsets of packed sequences among the steps of all ranks, ``[N + 1]`` int32 or int64, the same on all ranks.
            The host reads them.

    Returns:
        The context of this rank.

    Raises:
        ArgumentError: An argument is wrong on this rank or on another one, or offsets differ between ranks: on every rank.
    """

    def describe() -> Described:
        if not isinstance(length, int) or isinstance(length, bool) or length < 0:
            raise ArgumentError(f"length is {length!r}; it must be an integer of at least 0.")
        return Described(length, torch.device(device), {})

    return uncompiled(_entered, mesh, cu_seqlens, describe)[0]


def offsets_of(mesh: Any, cu_seqlens: torch.Tensor | None) -> torch.Tensor | None:
    """Return the offsets of a call among all steps: those given, or those of a :class:`Context`."""
    return mesh.given if cu_seqlens is None and isinstance(mesh, Context) else cu_seqlens


def entered(
    mesh: Any, cu_seqlens: torch.Tensor | None, describe: Callable[[], Described], then: Callable[[Context, Any], R]
) -> R:
    """Compare a call between all ranks, then run it; both outside of the graphs of ``torch.compile``.

    Args:
        mesh: The caller's argument: a context, or a group or a mesh from which one is made.
        cu_seqlens: The caller's offsets among all steps.
        describe: Function that checks the call's arguments on this rank and describes it.
        then: Function from the context and the checked call to the results.

    Raises:
        OneLaunchError: An argument is wrong on this rank, or on another one, or differs between the ranks.
    """

    def run() -> R:
        return then(*_entered(mesh, cu_seqlens, describe))

    return uncompiled(run)


def _entered(mesh: Any, cu_seqlens: torch.Tensor | None, describe: Callable[[], Described]) -> tuple[Context, Any]:
    """Return the context of a call and the checked call, outside of compiled code."""
    if not isinstance(mesh, Context):
        return _agreed(resolve(mesh), cu_seqlens, describe)
    described = _fitting(mesh, cu_seqlens, describe)
    kind = tuple(described.facts.items())
    if kind not in mesh.known and mesh.process_group is not None:
        agree(mesh.process_group, lambda: described.facts)
        mesh.known.add(kind)
    return mesh, described.call


def _fitting(known: Context, cu_seqlens: torch.Tensor | None, describe: Callable[[], Described]) -> Described:
    """Return the description of a call; raise :class:`ArgumentError` unless it fits a context."""
    described = describe()
    expected = known.lengths[known.rank]
    if described.length != expected:
        said = f"The call has T = {described.length} steps, and mesh is a Context of {expected} steps on this rank"
        raise ArgumentError(f"{said}; make a new Context.")
    if cu_seqlens is not None and cu_seqlens is not known.given:
        raise ArgumentError(
            "mesh is a Context that was made with other cu_seqlens; pass the same tensor, or leave cu_seqlens out."
        )
    return described


def _agreed(group: Any, cu_seqlens: torch.Tensor | None, describe: Callable[[], Described]) -> tuple[Context, Any]:
    """Return the context of this rank and its checked call, after one exchange."""
    mine: list[tuple[Described, tuple[int, ...] | None]] = []

    def facts() -> Facts:
        offsets = _read(cu_seqlens)
        described = describe()
        check_device(group, described.device)
        mine.append((described, offsets))
        return {"length": described.length, "cu_seqlens": offsets, "device": described.device.type, **described.facts}

    lengths = tuple(each["length"] for each in agree(group, facts))
    described, offsets = mine[-1]
    total = sum(lengths)
    if offsets is not None and offsets[-1] != total:  # on every rank, since all have the same offsets and lengths
        raise PackingError(f"runs to {offsets[-1]}", want=f"run to {total}, the number of steps of all ranks of mesh")
    rank, known = torch.distributed.get_rank(group), {tuple(described.facts.items())}
    collectives = collectives_of(group, len(lengths), described.device)
    made = context_of(collectives, rank, lengths, described.device, cu_seqlens, offsets, process_group=group, known=known)
    return made, described.call


def context_of(
    collectives: Collectives,
    rank: int,
    lengths: tuple[int, ...],
    device: torch.device,
    cu_seqlens: torch.Tensor | None,
    offsets: tuple[int, ...] | None = None,
    **rest: Any,
) -> Context:
    """Return the context of a rank, whose ``offsets`` are the values of ``cu_seqlens``; ``rest`` are fields of a context."""
    if offsets is None:
        offsets = _read(cu_seqlens)
    local = local_slice_of(rank, lengths, offsets)
    cu_seqlens_here = None if offsets is None else torch.tensor(local.offsets, dtype=torch.int32, device=device)
    sequences = torch.tensor(local.sequences, device=device)
    ending = torch.tensor([at for at, ends in enumerate(local.ends) if ends], dtype=torch.int64, device=device)
    return Context(collectives, rank, lengths, offsets, local, cu_seqlens_here, sequences, ending, cu_seqlens, **rest)


def _read(cu_seqlens: torch.Tensor | None) -> tuple[int, ...] | None:
    """Return the offsets as integers, after checks of their form: they must start at 0 and never decrease."""
    if cu_seqlens is None:
        return None
    checks.packing(checks.facts("cu_seqlens", cu_seqlens), 1)
    offsets = tuple(cu_seqlens.tolist())
    if offsets[0] != 0:
        raise PackingError(f"starts at {offsets[0]}", want="start at 0")
    for at, (one, other) in enumerate(pairwise(offsets), 1):
        if other < one:
            raise PackingError(f"falls from {one} to {other} at {at}", want="never decrease")
    return offsets
