"""``gated_scan`` without a gate, under the names of fla (flash-linear-attention): users only change the import.

Signatures are those of fla 0.6.0 with our keyword ``variant`` at the end. Each function calls the operation once.
"""

from __future__ import annotations

import torch

from onelaunch import dispatch
from onelaunch.launch.planned import replayed
from onelaunch.operation.states import float32_state
from onelaunch.ops.gated_scan.contract import ScanCall, ScanNames, bind, gated_scan, under_autocast

Results = tuple[torch.Tensor, torch.Tensor | None]
"""Output ``o`` and the final state, if it was asked for."""

_NAMES = ScanNames("x", "g", "D")
"""Names of fla for the arguments ``v`` and ``log_decay`` of ``gated_scan``, and its letter for the channels."""


def chunk_hgrn(
    x: torch.Tensor,
    g: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    *,
    variant: str = dispatch.AUTO,
) -> Results:
    """Run the recurrence of HGRN: :func:`onelaunch.ops.gated_scan` without a gate, as ``fla.ops.hgrn.chunk_hgrn``.

        o_t = exp(g_t) * o_{t-1} + x_t        per channel

    Differentiable in every floating-point argument, through ``o`` and through the final state; fla's function has no gradients
    of states. For packed sequences use :func:`fused_recurrent_hgrn`, which runs the same variants.

    Args:
        x: Inputs, ``[B, T, D]``, float16, bfloat16 or float32.
        g: Log-decay, ``[B, T, D]``, at most 0, dtype of ``x`` or float32.
        initial_state: State before the first step, ``[B, D]``, float32 or the dtype of ``x``. Default: zeros.
        output_final_state: Flag to return the state after the last step as well.
        variant: Name from ``gated_scan.variants``, or ``"auto"`` for the fastest variant measured near this call.

    Returns:
        ``o [B, T, D]`` in the dtype of ``x``, and the final state ``[B, D]``, float32, or ``None`` unless ``output_final_state``.

    Raises:
        OneLaunchError: As in :func:`onelaunch.ops.gated_scan`.

    Source: Qin et al., Hierarchically Gated Recurrent Neural Network for Sequence Modeling (2023).
    """
    return _results(x, g, initial_state, output_final_state, None, variant)


def fused_recurrent_hgrn(
    x: torch.Tensor,
    g: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    variant: str = dispatch.AUTO,
) -> Results:
    """Run the recurrence of HGRN, also for packed sequences, as ``fla.ops.hgrn.fused_recurrent_hgrn``.

    It is :func:`onelaunch.ops.gated_scan` without a gate, by the variants of :func:`chunk_hgrn`: one step of decoding and a long
    sequence only differ in their sizes. Final states are float32; fla's have the dtype of ``x``.

    Args:
        x: Inputs, ``[B, T, D]``, float16, bfloat16 or float32.
        g: Log-decay, ``[B, T, D]``, at most 0, dtype of ``x`` or float32.
        initial_state: State before the first step, ``[N, D]``, float32 or the dtype of ``x``, ``N = B`` or the number of packed
            sequences. Default: zeros.
        output_final_state: Flag to return the state after the last step of every sequence as well.
        cu_seqlens: Offsets of packed sequences, ``[N + 1]`` int32 or int64. Requires ``B = 1``.
        variant: Name from ``gated_scan.variants``, or ``"auto"`` for the fastest variant measured near this call.

    Returns:
        ``o [B, T, D]`` in the dtype of ``x``, and the final state ``[N, D]``, float32, or ``None`` unless ``output_final_state``.

    Raises:
        OneLaunchError: As in :func:`onelaunch.ops.gated_scan`.

    Source: Qin et al., Hierarchically Gated Recurrent Neural Network for Sequence Modeling (2023).
    """
    return _results(x, g, initial_state, output_final_state, cu_seqlens, variant)


@replayed
def _results(
    x: torch.Tensor,
    g: torch.Tensor,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    cu_seqlens: torch.Tensor | None,
    variant: str,
) -> Results:
    """Return the results of a call of one of fla's functions."""
    call = bound(x, g, initial_state, output_final_state, cu_seqlens)
    o, final_state = dispatch.run(gated_scan, call, variant)
    return o, final_state if call.output_final_state else None


def bound(
    x: torch.Tensor,
    g: torch.Tensor,
    initial_state: torch.Tensor | None,
    output_final_state: bool | None,
    cu_seqlens: torch.Tensor | None,
) -> ScanCall:
    """Return the checked call of one of fla's functions; ``onelaunch.integrations`` asks too.

    fla's layers pass ``None`` where they want no final state.

    Raises:
        OneLaunchError: As in :func:`onelaunch.ops.gated_scan`.
    """
    initial_state = float32_state(initial_state, x)
    output_final_state = False if output_final_state is None else output_final_state
    v, log_decay, _ = under_autocast(x, g, None)
    return bind(
        v,
        log_decay,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        names=_NAMES,
    )
