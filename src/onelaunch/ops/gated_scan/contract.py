"""The public function ``gated_scan``: what it computes, what it takes, what can go wrong."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onelaunch import dispatch
from onelaunch.operation import Query, fixed, operation
from onelaunch.ops import checks


@dataclass(frozen=True, slots=True)
class ScanCall:
    """Checked arguments of :func:`gated_scan`."""

    v: torch.Tensor
    log_decay: torch.Tensor
    gate: torch.Tensor
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    output_final_state: bool

    def query(self) -> Query:
        batch, length, channels = self.v.shape
        tensors = (self.v, self.log_decay, self.gate, self.initial_state)
        return Query(
            "gated_scan",
            str(self.v.device),
            self.v.dtype,
            fixed(batch, length, channels),
            torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors),
            state_flags(self.cu_seqlens is not None, self.initial_state is not None, self.output_final_state),
        )


def state_flags(packed: bool, initial_state: bool, final_state: bool) -> tuple[str, ...]:
    """The query's flags of the operations with a recurrent state."""
    return ("packed",) * packed + ("initial_state",) * initial_state + ("final_state",) * final_state


def bind(
    v: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> ScanCall:
    """The checked call; raises as :func:`gated_scan` says."""
    checks.rank("v", checks.tensor("v", v), "[B, T, V]")
    checks.dtype("v", v, checks.FLOATS)
    batch, length, channels = v.shape
    check_scan_arguments(log_decay, gate, initial_state, cu_seqlens, v, "v", (batch, length, channels))
    return ScanCall(v, log_decay, gate, initial_state, cu_seqlens, output_final_state)


def check_scan_arguments(
    log_decay: torch.Tensor,
    gate: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    first: torch.Tensor,
    first_name: str,
    extent: tuple[int, int, int],
) -> None:
    """The checks that every operation with a gated scan inside makes; ``extent`` is ``(B, T, V)``."""
    batch, length, channels = extent
    because = f"{first_name} {list(first.shape)}"
    like_first = f", the dtype of {first_name}"
    for name, value, dtypes in (
        ("log_decay", log_decay, (first.dtype, torch.float32)),
        ("gate", gate, (first.dtype,)),
    ):
        checks.rank(name, checks.tensor(name, value), "[B, T, V]")
        checks.shape(name, value, extent, "[B, T, V]", because)
        checks.dtype(name, value, tuple(dict.fromkeys(dtypes)), like_first if len(dtypes) == 1 else "")
        checks.device(name, value, first.device)
    sequences = batch
    if cu_seqlens is not None:
        checks.device("cu_seqlens", checks.tensor("cu_seqlens", cu_seqlens), first.device)
        checks.offsets(cu_seqlens, batch, length)
        sequences = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        checks.rank("initial_state", checks.tensor("initial_state", initial_state), "[N, V]")
        checks.shape("initial_state", initial_state, (sequences, channels), "[N, V]", f"{sequences} sequences and {because}")
        checks.dtype("initial_state", initial_state, (torch.float32,))
        checks.device("initial_state", initial_state, first.device)
    checks.log_decay(log_decay)


@operation(
    dimensions=("B", "T", "V"),
    outputs=("y", "final_state"),
    bind=bind,
    options={"decay": "model", "lengths": None, "initial_state": True, "final_state": True, "log_decay_dtype": None},
    defaults={"cuda": ("fused", "chunked", "eager"), "cpu": ("chunked", "eager")},
)
def gated_scan(
    v: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    variant: str = dispatch.AUTO,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A decaying scan over time, gated: the recurrent half of a linear-RNN layer.

        s_t = exp(log_decay_t) * s_{t-1} + v_t;  y_t = s_t * silu(gate_t)        per channel

    Differentiable in every floating-point argument, through ``y`` and through the final state.

    Args:
        v: ``[B, T, V]`` float16, bfloat16 or float32.
        log_decay: ``[B, T, V]``, at most 0, dtype of ``v`` or float32. ``-inf`` forgets the past.
        gate: ``[B, T, V]``, dtype of ``v``.
        initial_state: ``[N, V]`` float32, ``N = B`` or the number of packed sequences. Default: zeros.
        output_final_state: also return the state after the last step of every sequence.
        cu_seqlens: ``[N + 1]`` int32 or int64 offsets of sequences packed into one batch entry, from 0 to T, never decreasing
            (equal neighbours are an empty sequence); needs ``B = 1``. Never read by the host on a GPU.
        variant: a name from ``gated_scan.variants``, or ``"auto"`` for the fastest measured one.

    Returns:
        ``y [B, T, V]`` in the dtype of ``v``, and ``s_T [N, V]`` float32 if ``output_final_state``. The state is float32
        throughout.

    Raises:
        ShapeError, DTypeError, DeviceError, PackingError, ValueRangeError: naming the argument, what it was and what it has
        to be.
        UnknownVariant: no variant of that name.
        VariantUnsupported: the named variant cannot run this call; says why and which can.

    Source: experiment 040; scan in one pass over memory after Merrill and Garland (2016).
    """
    v, log_decay, gate = autocast(v, log_decay, gate)
    call = bind(v, log_decay, gate, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens)
    y, final_state = dispatch.run(gated_scan, call, variant)
    return (y, final_state) if output_final_state else y


def autocast(first: torch.Tensor, log_decay: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Under autocast, everything in the autocast dtype but the log-decay, which becomes float32 (sums of it lose bits first)."""
    kind = first.device.type if isinstance(first, torch.Tensor) else "cpu"
    if not torch.is_autocast_enabled(kind):
        return (first, log_decay, *rest)
    low = torch.get_autocast_dtype(kind)
    return (_cast(first, low), _cast(log_decay, torch.float32), *(_cast(tensor, low) for tensor in rest))


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Only what the contract would take anyway: autocast must not hide a wrong argument."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype in checks.FLOATS else value
