"""A tiny operation without kernels that scales a vector. It is registered only while a test runs.

The fixture ``scale`` of ``conftest.py`` registers it. ``test_operation.py`` tries to register it twice. :data:`MADE_UP_PEAKS` is
for tests that run commands in processes of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onelaunch import dispatch
from onelaunch import operation as registry
from onelaunch.operation import Case, Cost, Direction, Operation, Query, Reading, Variant

MADE_UP_PEAKS = """
from onelaunch.device import peaks, quick_look
from onelaunch.device.hardware import Ceilings
peaks.measure = lambda device: Ceilings(
    1e12, {"float32": 1e13}, 1e-6, "2026-11-20T12:00:00+00:00", peaks.software(device), 1e12
)
quick_look.implausible = lambda device, found: ""
"""
"""Python code after which a process takes made-up peaks for those of its device. Measuring them takes seconds. They are stored,
or cannot be stored, like measured ones."""


@dataclass(frozen=True)
class ScaleCall:
    """Checked arguments of one call of ``scale``; the dispatcher hands it to a variant."""

    x: torch.Tensor
    factor: float

    def query(self) -> Query:
        grad = torch.is_grad_enabled() and self.x.requires_grad
        return Query("scale", str(self.x.device), self.x.dtype, (self.x.shape[0],), grad)


def make_scale() -> Operation:
    """Register a new ``scale`` operation and return it: ``y = x * factor``, where x has N elements and factor is 2 by default.

    Its variants are ``loop``, which any call can use; ``vector``, for at most 1000 elements and preferred on a CPU;
    ``no_backward``, for calls without gradients; and ``elsewhere``, which no call can use. The option ``decay`` of its cases
    changes nothing; tests of cases and their names set it.
    """

    @registry.operation(
        dimensions=("N",),
        outputs=("y",),
        bind=ScaleCall,
        options={"decay": "model"},
        defaults={"cpu": ("vector", "loop", "not_registered")},  # no variant has the last name; it is skipped
    )
    def scale(x: torch.Tensor, factor: float = 2.0, *, variant: str = dispatch.AUTO) -> torch.Tensor:
        """Multiply a vector by a number."""
        (y,) = dispatch.run(scale, ScaleCall(x, factor), variant)
        return y

    @scale.variant("loop", launches=None, gemm="none")
    def loop(call: ScaleCall) -> tuple[torch.Tensor]:
        """Multiply one element after the other.

        Slow, obvious.
        """
        return (torch.stack([element * call.factor for element in call.x]),)

    @scale.variant("vector", launches=1)
    def vector(call: ScaleCall) -> tuple[torch.Tensor]:
        return (call.x * call.factor,)

    @scale.variant("no_backward", launches=1, backward=False)
    def no_backward(call: ScaleCall) -> tuple[torch.Tensor]:
        return (call.x.detach() * call.factor,)

    @scale.variant("elsewhere", launches=1)
    def elsewhere(call: ScaleCall) -> tuple[torch.Tensor]:
        raise AssertionError("must never run here")

    @elsewhere.supports
    def _(query: Query) -> str | None:
        return None if query.device_type == "quantum" else "needs a quantum computer"

    @vector.supports
    def _(query: Query) -> str | None:
        return "takes at most 1000 elements" if query.sizes[0] > 1000 else None

    @scale.oracle
    def _(x: torch.Tensor, factor: float) -> tuple[torch.Tensor]:
        return (x * factor,)

    @scale.inputs
    def _(case: Case, device: torch.device, generator: torch.Generator) -> Reading:
        x = torch.randn(case.sizes["N"], device=device, generator=generator).to(case.dtype)
        return Reading({"x": x, "factor": 3.0}, ("x",))  # arguments of a call, and those that get gradients

    @scale.costs
    def _(case: Case, variant: Variant | None, direction: Direction) -> Cost:
        # FLOPs, bytes (x read and y written) and launches.
        return Cost(case.sizes["N"], 2 * case.dtype.itemsize * case.sizes["N"], variant.launches if variant else 1)

    @scale.queries
    def _(case: Case, device: str, grad: bool) -> Query:
        return Query("scale", device, case.dtype, (case.sizes["N"],), grad)

    return scale
