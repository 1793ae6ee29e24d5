"""PyTorch operators for the variants of ``gla`` with kernels of their own: one forward and one backward operator for all.

``onelaunch::gla_forward`` runs the launches of the variant whose name it is given, see :data:`launches`. Only the inputs are
saved for ``onelaunch::gla_backward``, which computes the states again. The backward pass has kernels of its own for ``hopper``
its control :data:`IN_TURNS` and :data:`TF32`; all other variants share the portable ones. The variants in ``variants/`` and in
``onelaunch/ablations`` call :func:`attend`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from onelaunch.launch.by_variant import Launches
from onelaunch.launch.imitation import imitated
from onelaunch.launch.operator import Operator
from onelaunch.launch.tf32 import allows_tf32
from onelaunch.ops.gla import fakes
from onelaunch.ops.gla.contract import GlaCall
from onelaunch.ops.gla.heads import expanded

if TYPE_CHECKING:
    from onelaunch.ops.gla.launch import Attention

Results: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Output ``o [B, T, H, V]`` and the final state, which has no elements if it is not wanted. Variants and ablations return it."""

Run: TypeAlias = "Callable[[Attention, bool], Results]"
"""Function from a call's tensors, and from whether the final state is wanted, to the results."""

IN_TURNS = "hopper_in_turns"
"""Name of the control of ``hopper`` without overlap, in ablations/gla_in_turns.py."""

TF32 = "hopper_tf32"
"""Name of the variant in variants/hopper_tf32.py, float32 calls in the kernels of ``hopper`` where TF32 is allowed."""

launches: Launches[Run] = Launches()
"""Launches of forward passes by the names of variants, which register them in variants/ and in ablations."""


def run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    scale: float,
    want_final: bool,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute o and the final state (no elements if it is not wanted) by the variant of this name."""
    from onelaunch.ops.gla.launch import EITHER_ORDER, Attention

    call = Attention.of(q, k, v, g, initial, offsets, scale, either_order=kernel == EITHER_ORDER)
    return launches[kernel](call, want_final)


def run_backward(
    do: torch.Tensor,
    dfinal: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    scale: float,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of q, k, v, g and the initial state (no elements where there is none).

    Where TF32 is no longer allowed, the gradients of :data:`TF32` are those of the portable kernels, without it.
    """
    from onelaunch.ops.gla import launch, launch_hopper, launch_hopper_tf32

    call = launch.Attention.of(q, k, v, g, initial, offsets, scale)
    if kernel in ("hopper", IN_TURNS):
        return launch_hopper.backward(call, do, dfinal=dfinal, turns=kernel == IN_TURNS)
    if kernel == TF32 and (allows_tf32() or imitated()):  # calls that are only recorded show what runs where it is allowed
        return launch_hopper_tf32.backward(call, do, dfinal)
    return launch.backward(call, do, dfinal)


def save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    """Save the inputs, and leave gradients of unused outputs ``None`` instead of zeros."""
    *tensors, ctx.scale, ctx.want_final, ctx.kernel = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, backward: Any, do: torch.Tensor | None, dfinal: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return the gradient of every input of :func:`run_forward`."""
    *tensors, initial, offsets = ctx.saved_tensors  # tensors: q, k, v, g
    if do is None:
        heads = max(x.shape[2] for x in tensors)
        do = tensors[2].new_zeros((*tensors[2].shape[:2], heads, tensors[2].shape[3]))
    dfinal = dfinal if ctx.want_final else None  # an unwanted final state has no elements, nor has its gradient
    *dqkvg, dinitial = backward(do, dfinal, *tensors, initial, offsets, ctx.scale, ctx.kernel)
    return *dqkvg, None if initial is None else dinitial, None, None, None, None  # none of offsets, scale, want_final, kernel


backward = Operator("gla_backward", run_backward, fake=fakes.backward)
forward = Operator("gla_forward", run_forward, fake=fakes.forward, save=save, gradients=gradients, backward=backward, outputs=2)


def attend(call: GlaCall, kernel: str) -> Results:
    """Compute o and the final state by the variant named ``kernel``, with gradients if the call wants them.

    Kernels compute equal states of different heads once, those of heads that share k, v and g without an initial state. The final
    state is repeated here.
    """
    o, final = forward(
        call.q, call.k, call.v, call.g, call.initial_state, call.cu_seqlens, call.scale, call.output_final_state, kernel,
        grad=call.query().grad,
    )  # fmt: skip
    return o, expanded(final, call.heads.state, dim=1) if call.output_final_state else final
