"""The PyTorch operator of the short causal convolution, with SiLU or without, and its gradients.

``ShortConvolution`` of ``onelaunch.nn`` and the compositions of ``gla_layer`` call :func:`convolve` where :func:`why_not` allows
it, and PyTorch's functions elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch

from onelaunch.launch.operator import Operator
from onelaunch.operation.requirements import cannot_launch_on
from onelaunch.tracing import is_transformed

_MOST_TAPS = 8
"""Largest W: a thread keeps W taps, W sums and 2 (W - 1) inputs and gradients for each of its channels in registers."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of x."""


def why_not(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> str | None:
    """Return why the kernels cannot run a call of :func:`convolve`, or ``None``.

    Sizes, dtypes and devices that do not fit together are left to PyTorch, which refuses them or, under autocast, converts them.
    """
    if (reason := cannot_launch_on(x.device.type)) is not None:
        return reason
    if x.dtype not in _DTYPES or weight.dtype != x.dtype or torch.is_autocast_enabled(x.device.type):
        return "needs x and the weight in one dtype, float16, bfloat16 or float32, and no autocast"
    if bias is not None and (bias.dtype != x.dtype or bias.shape != weight.shape[:1]):
        return "needs a bias for each channel, in the dtype of the weight"
    if any(each is not None and each.device != x.device for each in (weight, bias, state, offsets)):
        return "needs all tensors on one device"
    batch, _, channels = x.shape
    sequences = batch if offsets is None else offsets.shape[0] - 1
    if weight.shape[0] != channels or (
        state is not None and (state.dtype, state.shape) != (x.dtype, (sequences, channels, weight.shape[1] - 1))
    ):
        return "needs a filter for each channel of x, and a state of W - 1 inputs for each sequence, in the dtype of x"
    if offsets is not None and batch != 1:
        return "needs B = 1 with packed sequences"
    if weight.shape[1] > _MOST_TAPS:
        return f"takes filters of at most {_MOST_TAPS} steps"
    if 0 in x.shape:
        return "needs at least one element"
    return "does not run under transforms of torch.func" if is_transformed() else None


def run_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],  # noqa: UP045 - as PyTorch reads schemas
    state: Optional[torch.Tensor],  # noqa: UP045
    offsets: Optional[torch.Tensor],  # noqa: UP045
    silu: bool,
    channels: Sequence[int],
) -> torch.Tensor:
    """Return y ``[B, T, C]`` from the arguments of :func:`convolve`."""
    from onelaunch.kernels.convolution import launch

    return launch.forward(launch.Operands.of(x, weight, bias, state, offsets, silu))


def run_backward(
    dys: Sequence[torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],  # noqa: UP045
    state: Optional[torch.Tensor],  # noqa: UP045
    offsets: Optional[torch.Tensor],  # noqa: UP045
    silu: bool,
    wants: Sequence[bool],
) -> list[torch.Tensor]:
    """Return the gradients of x, the weight, the bias and the state, as ``wants`` says for each; the others have no elements.

    ``dys`` are the gradients of the parts of y.
    """
    from onelaunch.kernels.convolution import launch

    found = launch.backward(launch.Operands.of(x, weight, bias, state, offsets, silu), dys, tuple(wants))
    return [x.new_empty(0) if each is None else each for each in found]


def _fake_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor | None,
    offsets: torch.Tensor | None,
    silu: bool,
    channels: Sequence[int],
) -> torch.Tensor:
    """Return an empty tensor for the result of :func:`run_forward`."""
    return x.new_empty(x.shape)


def _fake_backward(
    dys: Sequence[torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor | None,
    offsets: torch.Tensor | None,
    silu: bool,
    wants: Sequence[bool],
) -> list[torch.Tensor]:
    """Return empty tensors for the results of :func:`run_backward`."""
    tensors = (x, weight, bias, state)
    return [
        each.new_empty(each.shape) if wanted and each is not None else x.new_empty(0)
        for each, wanted in zip(tensors, wants, strict=True)
    ]


def save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Save the inputs: what is between x and y is computed again."""
    *tensors, ctx.silu, _ = inputs
    ctx.save_for_backward(*tensors)


def gradients(ctx: Any, backward: Any, *dys: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradient of every input of :func:`run_forward`, from those of the parts of y."""
    wants = [bool(each) for each in ctx.needs_input_grad[:4]]
    found = backward(list(dys), *ctx.saved_tensors, ctx.silu, wants)
    return *(each if wanted else None for each, wanted in zip(found, wants, strict=True)), None, None, None


def views(inputs: tuple[Any, ...], y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the parts of y, as views. ``inputs`` are those of :func:`run_forward`."""
    return y.split_with_sizes(inputs[-1], -1)


_backward = Operator("short_convolution_backward", run_backward, fake=_fake_backward)
_forward = Operator(
    "short_convolution", run_forward, fake=_fake_forward, save=save, gradients=gradients, backward=_backward, views=views
)


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    *,
    silu: bool = True,
    channels: Sequence[int] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Convolve every channel with its filter, causally in time, and apply SiLU if asked; differentiable once.

    Several tensors that lie next to each other, such as queries, keys and values, are convolved in one launch, and the gradient
    of each result is read where it is.

    Args:
        x: Inputs ``[B, T, C]``. :func:`why_not` must give ``None`` for these arguments.
        weight: Filters ``[C, W]``; the last tap multiplies the present step.
        bias: ``[C]``. Default: zeros.
        state: Inputs before the first step of each sequence, ``[N, C, W - 1]``, the newest last. Default: zeros.
        offsets: First steps of packed sequences and at last T, ``[N + 1]``, for ``B = 1``. Default: a batch entry is a sequence.
        silu: Flag to apply SiLU to the results.
        channels: Number of channels of each result; their sum is C. Default: one result.

    Returns:
        Views ``[B, T, channels]`` of y ``[B, T, C]``, contiguous, in the dtype of x.
    """
    given = (x, weight, bias, state)
    grad = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in given)
    parts = [x.shape[2]] if channels is None else list(channels)
    return _forward(x, weight, bias, state, offsets, silu, parts, grad=grad)
