"""A toy operation for tests of the workbench and of its commands.

It is a weighted running sum, with honest variants and rogue ones (tag ``rogue``, by which ``test_exploits.py`` selects them).
Importing this module registers it. A test that names ``toy_sum`` only in a study has to import it too.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from onelaunch import dispatch
from onelaunch.operation import Case, Cost, Direction, Query, Reading, Variant, operation


@dataclass(frozen=True)
class ToyCall:
    """Checked arguments of :func:`toy_sum`."""

    x: torch.Tensor
    weight: torch.Tensor

    def query(self) -> Query:
        grad = torch.is_grad_enabled() and (self.x.requires_grad or self.weight.requires_grad)
        return Query("toy_sum", str(self.x.device), self.x.dtype, tuple(self.x.shape), grad)


@operation(
    dimensions=("B", "T", "V"),
    outputs=("y", "final_state"),
    bind=ToyCall,
    options={"weight": "random"},
    defaults={"cpu": ("parallel", "eager"), "cuda": ("parallel", "eager")},
)
def toy_sum(x: torch.Tensor, weight: torch.Tensor, *, variant: str = dispatch.AUTO) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute y_t = sum over s <= t of x_s * weight, and the last sum.

    ``x`` is ``[B, T, V]``, ``weight`` ``[V]``, and the last sum float32 ``[B, V]``.
    """
    return dispatch.run(toy_sum, ToyCall(x, weight), variant)


@toy_sum.oracle
def reference(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum step by step. The verification gate calls it with float64 arguments."""
    sums, total = [], torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        total = total + x[:, t] * weight
        sums.append(total)
    return torch.stack(sums, dim=1), total


@toy_sum.inputs
def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Reading:
    """Draw both arguments from N(0, 1); both take gradients. The case's option ``weight="zero"`` makes all sums zero."""
    batch, length, width = (case.sizes[name] for name in ("B", "T", "V"))
    x = torch.randn(batch, length, width, device=device, generator=generator)
    weight = torch.randn(width, device=device, generator=generator)
    if toy_sum.option(case, "weight") == "zero":
        weight.zero_()
    return Reading({"x": x.to(case.dtype), "weight": weight.to(case.dtype)}, ("x", "weight"))


@toy_sum.costs
def cost(case: Case, variant: Variant | None, direction: Direction) -> Cost:
    elements = math.prod(case.sizes.values())
    # Passes over B x T x V elements: x read and y written; backward, x and the gradient of y read and that of x written. One more
    # is stated for eager.
    passes = {"forward": 2, "forward_backward": 5}[direction] + (variant is not None and variant.name == "eager")
    return Cost(0, passes * elements * case.dtype.itemsize, None if variant is None else variant.launches)


@toy_sum.queries
def query(case: Case, device: str, grad: bool) -> Query:
    """Return the query that :meth:`ToyCall.query` gives for a call of this case."""
    return Query("toy_sum", device, case.dtype, tuple(case.sizes[name] for name in ("B", "T", "V")), grad)


@toy_sum.variant("eager", yardstick=True)
def eager(call: ToyCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum step by step: the PyTorch baseline (``yardstick``) that sets the gate's tolerance."""
    total = torch.zeros_like(call.x[:, 0], dtype=torch.float32)
    sums = []
    for t in range(call.x.shape[1]):
        total = total + call.x[:, t].float() * call.weight.float()
        sums.append(total.to(call.x.dtype))
    return torch.stack(sums, dim=1), total


@toy_sum.variant("parallel", launches=2)
def parallel(call: ToyCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum all steps at once."""
    sums = (call.x.float() * call.weight.float()).cumsum(1)
    return sums.to(call.x.dtype), sums[:, -1].clone()  # for a single step, contiguous() would return memory of y


@toy_sum.control("product", oracle=lambda x, weight: x * weight, cost=lambda case: Cost(0, 2 * math.prod(case.sizes.values()), 1))
def product(call: ToyCall) -> torch.Tensor:
    """Compute only the product. It is a control, a part of the operation that is timed beside the variants."""
    return call.x * call.weight


@toy_sum.variant("gpu_only")
def gpu_only(call: ToyCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand for an honest variant that needs another device."""
    return parallel(call)


@gpu_only.supports
def _needs_a_gpu(query: Query) -> str | None:
    return None if query.device_type == "cuda" else "needs a GPU"


@toy_sum.variant("missing_package", requires="a_package_that_nobody_has")
def missing_package(call: ToyCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand for an honest variant of a package that is not installed."""
    return parallel(call)


# Rogue variants: each looks fast or correct to a careless benchmark, or fails


@toy_sum.variant("zeros", rogue=True)
def zeros(call: ToyCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return zeros."""
    return torch.zeros_like(call.x), torch.zeros_like(call.x[:, 0], dtype=torch.float32)


@toy_sum.variant("unwritten", rogue=True)
def unwritten(call: ToyCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave the last step unwritten."""
    sums, state = parallel(call)
    y = torch.empty_like(sums)
    y[:, :-1] = sums[:, :-1]
    return y, state


@toy_sum.variant("mutates", rogue=True)
def mutates(call: ToyCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Overwrite the input."""
    result = parallel(call)
    call.x.mul_(2)
    return result


_answers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
"""Cached outputs of the rogue ``caches`` by the address of ``x``."""


@toy_sum.variant("caches", rogue=True)
def caches(call: ToyCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Cache outputs by the address of the input."""
    return _answers.setdefault(call.x.data_ptr(), parallel(call))


@toy_sum.variant("later", rogue=True)
def later(call: ToyCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return at once and compute in another thread."""
    sums, state = parallel(call)
    result = torch.zeros_like(sums), torch.zeros_like(state)

    def finish() -> None:
        time.sleep(0.003)  # the gate watches outputs for several times as long; test_exploits checks that
        result[0].copy_(sums)
        result[1].copy_(state)

    threading.Thread(target=finish).start()
    return result


_streams: list[torch.cuda.Stream] = []
"""The one stream of the rogue ``other_stream``, made by its first call."""


@toy_sum.variant("other_stream", rogue=True)
def other_stream(call: ToyCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute on another stream, without waiting for the caller's."""
    if not _streams:
        _streams.append(torch.cuda.Stream())
    with torch.cuda.stream(_streams[0]):
        return parallel(call)


@other_stream.supports
def _needs_streams(query: Query) -> str | None:
    return None if query.device_type == "cuda" else "needs a GPU"


@toy_sum.variant("nan", rogue=True)
def nan(call: ToyCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Put one NaN into correct outputs."""
    sums, state = parallel(call)
    sums[0, 0, 0] = float("nan")
    return sums, state


@toy_sum.variant("wrong_dtype", rogue=True)
def wrong_dtype(call: ToyCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the correct values in another dtype than required."""
    sums, state = parallel(call)
    return sums.double(), state


@toy_sum.variant("wrong_shape", rogue=True)
def wrong_shape(call: ToyCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the correct values without the batch dimension."""
    sums, state = parallel(call)
    return sums.flatten(0, 1), state


@toy_sum.variant("wrong_state", rogue=True)
def wrong_state(call: ToyCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the state of the step before the last."""
    sums, _ = parallel(call)
    return sums, sums[:, -2].float().contiguous()


class _WrongGradient(torch.autograd.Function):
    """Correct outputs; the gradient of ``x`` lacks the sum over later steps, and that of ``weight`` is zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(weight)
        return parallel(ToyCall(x, weight))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (weight,) = ctx.saved_tensors
        return gradients[0] * weight, torch.zeros_like(weight)


@toy_sum.variant("wrong_gradient", rogue=True)
def wrong_gradient(call: ToyCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the correct outputs and wrong gradients."""
    return _WrongGradient.apply(call.x, call.weight)


@toy_sum.variant("no_gradient", rogue=True)
def no_gradient(call: ToyCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Detach the outputs from autograd."""
    return parallel(ToyCall(call.x.detach(), call.weight.detach()))


@toy_sum.variant("raises", rogue=True)
def raises(call: ToyCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Raise an error."""
    raise RuntimeError("the kernel fell over")


@toy_sum.variant("runs_out", rogue=True)
def runs_out(call: ToyCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Raise PyTorch's error for exhausted GPU memory, without allocating any."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")


HONEST = ("eager", "parallel")
"""Correct variants that run on every device. ``gpu_only`` and ``missing_package`` are correct too, but do not."""


def toy_case(dtype: str = "float32", **options: Any) -> Case:
    """Return a small case of the toy operation. ``options`` may hold sizes (B, T, V), a ``name`` and the option ``weight``."""
    sizes = {"B": 2, "T": 24, "V": 8} | {key: options.pop(key) for key in ("B", "T", "V") if key in options}
    return toy_sum.case(dtype, name=options.pop("name", ""), **sizes, **options)
