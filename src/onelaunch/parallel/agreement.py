"""An exchange of facts between the ranks of a group, so that a wrong argument on one rank is an error on all of them.

``contexts.py`` calls :func:`agree` before the first collective on data. So no rank waits for a collective that another rank does
not join, or joins with other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from onelaunch.errors import ArgumentError, OneLaunchError

Facts = Mapping[str, Any]
"""Facts of a call by name, picklable. Those of :data:`OWN` may differ between ranks, all others must be equal."""

OWN = ("length",)
"""Names of the facts that may differ between ranks."""


def resolve(mesh: Any) -> Any:
    """Return the process group of a mesh.

    Raises:
        ArgumentError: ``mesh`` is neither a process group nor a DeviceMesh of one dimension that this process belongs to, or
            ``torch.distributed`` is not initialized.
    """
    distributed = torch.distributed
    if not distributed.is_available():
        raise ArgumentError("mesh is given, but this PyTorch was built without torch.distributed; leave mesh out.")
    if not distributed.is_initialized():
        raise ArgumentError(
            "mesh is given, but torch.distributed is not initialized; call torch.distributed.init_process_group first."
        )
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names
            take = f'mesh["{names[-1]}"]' if names else "a slice of it with a name, such as mesh['cp']"
            raise ArgumentError(f"mesh has {mesh.ndim} dimensions; it must have one: pass {take}.")
        mesh = mesh.get_group()
    if not isinstance(mesh, distributed.ProcessGroup):
        said = "a DeviceMesh of one dimension, a process group or a onelaunch.parallel.Context"
        raise ArgumentError(f"mesh is {type(mesh).__name__}; it must be {said}.")
    if distributed.get_rank(mesh) < 0:
        raise ArgumentError("mesh does not contain this process; call only on its ranks.")
    return mesh


def backends(group: Any) -> dict[str, str]:
    """Return the names of the group's back ends by device type."""
    config = str(torch.distributed.get_backend_config(group))
    return dict(each.split(":", 1) for each in config.split(",") if ":" in each)


def check_device(group: Any, device: torch.device) -> None:
    """Raise :class:`ArgumentError` if the group has no back end for tensors on a device, as NCCL has none for a CPU."""
    known = backends(group)
    if known and device.type not in known:
        said = ", ".join(f"{name} for {kind}" for kind, name in known.items())
        raise ArgumentError(f"mesh has back ends only for other devices ({said}); the tensors are on {device}: move them there.")


def agree(group: Any, describe: Callable[[], Facts]) -> list[Facts]:
    """Exchange the facts of a call, compare them, and return those of all ranks by rank; a collective call.

    Args:
        group: Process group.
        describe: Function that returns this rank's facts. It may raise errors of this package.

    Raises:
        OneLaunchError: ``describe`` raised it on this rank.
        ArgumentError: ``describe`` raised an error on another rank, or the ranks' facts differ.
    """
    failed: OneLaunchError | None = None
    mine: dict[str, Any] = {}
    try:
        mine = dict(describe())
    except OneLaunchError as error:
        failed = error
        mine = {"error": str(error)}
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, mine, group=group)
    if failed is not None:
        raise failed
    for rank, facts in enumerate(found):
        if "error" in facts:
            raise ArgumentError(f"Rank {rank} of mesh was called with a wrong argument: {facts['error']}")
    _compare(found)
    return found


def _compare(found: list[dict[str, Any]]) -> None:
    """Raise :class:`ArgumentError` if a fact that must be the same on all ranks is not."""
    names = dict.fromkeys(name for facts in found for name in facts)
    for name in names:
        if name in OWN:
            continue
        values: dict[str, list[int]] = {}
        for rank, facts in enumerate(found):
            values.setdefault(_shown(facts.get(name)), []).append(rank)
        if len(values) > 1:
            said = "; ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in values.items())
            raise ArgumentError(f"{name} differs between the ranks of mesh: {said}. Call with the same on all of them.")


def _shown(value: Any) -> str:
    """Return a value as text for a message; a dtype without the prefix ``torch.``."""
    return str(value).removeprefix("torch.")
