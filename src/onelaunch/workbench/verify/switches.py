"""Global switches of PyTorch, which a call must leave as they were: what a variant changes, all later code runs with.

``gate.py`` and ``repeated.py`` make their calls in :func:`unchanged_switches`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Switch:
    """One global setting of PyTorch, with the functions that read it and set it."""

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], object]
    harmful: bool = True
    """False for a setting that PyTorch itself may change during a call. A change of it is a note, not a problem."""


def _read_determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_determinism(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _read_autocast() -> tuple[tuple[bool, torch.dtype], ...]:
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def _set_autocast(value: tuple[tuple[bool, torch.dtype], ...]) -> None:
    for kind, (enabled, dtype) in zip(("cpu", "cuda"), value, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def _read_cudnn() -> tuple[bool, bool, bool]:
    return torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic


def _set_cudnn(value: tuple[bool, bool, bool]) -> None:
    torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = value


def _read_float32_precision() -> str:
    """Return the precision by PyTorch's older function, or by the newer attribute if that was set last: then the function raises.

    The two have different words: "highest", "high" and "medium", or "ieee", "tf32" and "none".
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return str(torch.backends.cuda.matmul.fp32_precision)


def _set_float32_precision(value: str) -> None:
    if value in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(value)
    else:
        torch.backends.cuda.matmul.fp32_precision = value


SWITCHES = (
    Switch("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Switch("the precision of float32 matrix products", _read_float32_precision, _set_float32_precision),
    Switch("the use of deterministic algorithms", _read_determinism, _set_determinism),
    Switch("grad mode", torch.is_grad_enabled, torch._C._set_grad_enabled),  # noqa: SLF001 - the public function is a context too
    Switch("autocast", _read_autocast, _set_autocast),
    Switch("the settings of cuDNN", _read_cudnn, _set_cudnn),
    Switch("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    # torch.compile sets it to one in a process that compiles.
    Switch("the number of threads", torch.get_num_threads, torch.set_num_threads, harmful=False),
)
"""Settings that are compared after the last call of a candidate."""


@dataclass
class Changes:
    """Settings that calls changed, in sentences."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@contextmanager
def unchanged_switches() -> Iterator[Changes]:
    """Compare the global settings before and after the ``with`` block, and set them back.

    The yielded value is filled when the block ends, also by an exception.
    """
    before = [switch.read() for switch in SWITCHES]
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    found = Changes()
    try:
        yield found
    finally:
        for switch, value in zip(SWITCHES, before, strict=True):
            if (now := switch.read()) != value:
                sentence = f"It changed {switch.name} from {_shown(value)} to {_shown(now)}, for all code that runs later."
                (found.problems if switch.harmful else found.notes).append(sentence)
                switch.restore(value)
        if device is not None and torch.cuda.current_device() != device:
            found.problems.append(f"It changed the current GPU from {device} to {torch.cuda.current_device()}.")
            torch.cuda.set_device(device)


def _shown(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
