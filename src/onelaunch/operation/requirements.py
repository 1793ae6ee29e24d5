"""Predicates that variants of many operations share. Most return why a call cannot run, or ``None`` if it can.

The returned reason completes the sentence "it ...", such as "needs a CUDA or ROCm device". The modules of variants and ablations
register them by ``supports``, alone or within predicates of their own. ``launch.py`` of ``gla`` asks :func:`interpreting` too.
"""

from __future__ import annotations

import functools

import torch

from onelaunch import cuda
from onelaunch.device.architectures import HOPPER_SHARED_BYTES
from onelaunch.device.hardware import is_hopper, shared_bytes
from onelaunch.device.tools import package_installed
from onelaunch.operation.query import Query

LARGEST_GRID_X = 2**31 - 1
"""Largest number of CTAs along x of a grid, on CUDA and ROCm."""


def cannot_launch_on(device_type: str) -> str | None:
    """Return why no Triton kernel can run on a device of this type, or ``None``; ``torch.compile`` treats it as a constant.

    The short convolutions of ``kernels/convolution`` ask it too.
    """
    if not triton_here():
        return "needs Triton, which is not installed"
    return None if device_type == "cuda" or interpreting() else "needs a CUDA or ROCm device"


vars(cannot_launch_on)["_dynamo_marked_constant"] = True  # as torch.compiler.assume_constant_result, without its slow import


def cannot_launch(query: Query) -> str | None:
    """Return why no Triton kernel can run a call, or ``None`` if one can."""
    if (reason := cannot_launch_on(query.device_type)) is not None:
        return reason
    if 0 in query.sizes:
        return "needs at least one element in every dimension"
    return None


LARGEST_GRID_Y = 65535
"""Largest number of CTAs along y of a grid, on CUDA and ROCm."""

FEWEST_CHANNELS = 16
"""Number of channels in the narrowest tile of kernels that scan over time."""


def cannot_multiply(query: Query) -> str | None:
    """Return why Triton kernels with matrix products cannot run a call, or ``None``."""
    return cannot_launch(query) or interprets_bfloat16_wrongly(query)


def cannot_scan(query: Query) -> str | None:
    """Return why Triton kernels that scan over time cannot run a call of sizes (batch, ..., channels), or ``None``."""
    if (reason := cannot_multiply(query)) is not None:
        return reason
    # Their grids have one CTA along y per batch entry and tile of channels. Batches are split (ops/gated_scan/batches.py).
    if -(-query.sizes[-1] // FEWEST_CHANNELS) > LARGEST_GRID_Y:
        return f"takes at most {LARGEST_GRID_Y * FEWEST_CHANNELS} channels: a grid is no larger along y"
    return None


@functools.cache
def triton_here() -> bool:
    """Return whether Triton is installed."""
    return package_installed("triton")


@functools.cache
def interpreting() -> bool:
    """Return whether Triton kernels run in its interpreter (``TRITON_INTERPRET=1`` was set when this was first called)."""
    if not triton_here():
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def interprets_bfloat16_wrongly(query: Query) -> str | None:
    """Return why a bfloat16 call cannot run without a GPU, or ``None``. Triton's interpreter computes wrong products."""
    if query.device_type != "cuda" and query.dtype is torch.bfloat16:
        return "needs a GPU for bfloat16: Triton's interpreter computes wrong bfloat16 products"
    return None


def needs_hopper(query: Query) -> str | None:
    """Return why a CUDA C++ kernel for Hopper cannot run a call, or ``None``."""
    if query.device_type != "cuda" or not is_hopper(torch.device(query.device)):
        return "needs an NVIDIA GPU of compute capability 9.0"
    return lacks_shared_memory(query) or cuda.missing()


def lacks_shared_memory(query: Query) -> str | None:
    """Return why a Hopper GPU cannot run kernels that were configured for all shared memory of an SM, or ``None``."""
    device = torch.device(query.device)
    if not is_hopper(device) or (found := shared_bytes(device)) >= HOPPER_SHARED_BYTES:
        return None
    return f"needs {HOPPER_SHARED_BYTES} bytes of shared memory per CTA, and this GPU has {found}"


def not_installed(package: str) -> str | None:
    """Return why a variant that calls a package cannot run, or ``None`` if the package is installed and runs its own code."""
    if not package_installed(package):
        return f"needs {package}, which is not installed"
    return _HOOKED.get(package)


_HOOKED: dict[str, str] = {}
"""Reason why the variants that call a package cannot run, by package."""


def hook(package: str, reason: str | None) -> None:
    """Let variants that call a package refuse every call with a reason, or with ``None`` no longer.

    ``onelaunch.integrations`` says so while it has hooked functions of the package, which may then run our kernels: neither
    results nor times of such a variant would be the package's. Call :func:`onelaunch.dispatch.forget` afterwards.
    """
    if reason is None:
        _HOOKED.pop(package, None)
    else:
        _HOOKED[package] = reason


def no_steps(query: Query) -> str | None:
    """Return why a call without time steps cannot run (it has no chunks), or ``None`` for a call with some.

    The number of time steps T is the second size of a query.
    """
    return "needs at least one time step" if query.sizes[1] == 0 else None
