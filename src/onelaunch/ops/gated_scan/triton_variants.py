"""Variants of ``gated_scan`` in Triton, and how PyTorch sees them.

One pair of operators carries both variants: ``onelaunch::gated_scan_forward`` and ``onelaunch::gated_scan_backward``.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable
from typing import Any

import torch

from onelaunch.builds import KernelBuild
from onelaunch.operation import Query
from onelaunch.ops.autograd import Operator
from onelaunch.ops.gated_scan.contract import ScanCall, gated_scan

Optional = torch.Tensor | None


def run_forward(
    v: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    want_final: bool,
    keep: bool,
    separate: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, the final state, and for the backward pass the carries and (where gate and scan are separate) the states."""
    from onelaunch.ops.gated_scan import launch

    sequences = launch.Sequences.of(initial, offsets)
    if not separate:
        y, final, carries = launch.forward(v, log_decay, gate, sequences, want_final=want_final, want_carries=keep)
        return y, final, carries, v.new_empty(0)
    s, final, carries = launch.forward(v, log_decay, None, sequences, want_final=want_final, want_carries=keep)
    return launch.gate_states(s, gate), final, carries, s


def run_backward(
    dy: torch.Tensor,
    dfinal: torch.Tensor | None,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    carries: torch.Tensor,
    states: torch.Tensor,
    separate: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of v, log_decay, gate and the initial state (no elements where there is none)."""
    from onelaunch.ops.gated_scan import launch

    sequences = launch.Sequences.of(initial, offsets)
    if separate:
        ds, dgate = launch.gate_states_backward(dy, states, gate)
        dv, dlog_decay, _, dinitial = launch.backward(ds, dfinal, v, log_decay, None, sequences, carries)
    else:
        dv, dlog_decay, dgate, dinitial = launch.backward(dy, dfinal, v, log_decay, gate, sequences, carries)
    return dv, dlog_decay, dgate, dinitial


def fake_forward(
    v: Any, log_decay: Any, gate: Any, initial: Any, offsets: Any, want_final: Any, keep: Any, separate: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Room for the results of :func:`run_forward`."""
    from onelaunch.ops.gated_scan import launch

    tiles = launch.scan_tiles(v.shape[1], v.shape[2])
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    final, carries = launch.empty_states(v, launch.Sequences(initial, offsets), tiles, want_final, keep)
    return y, final, carries, torch.empty_like(y) if separate else v.new_empty(0)


def fake_backward(
    dy: Any, dfinal: Any, v: Any, log_decay: Any, gate: Any, initial: Any, offsets: Any, carries: Any, states: Any, separate: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Room for the results of :func:`run_backward`."""
    gradients = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (v, log_decay, gate)]
    kept = v.new_empty(0) if initial is None else initial.new_empty(initial.shape)
    return *gradients, kept


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """The tensors among the inputs, the carries and the states."""
    v, log_decay, gate, initial, offsets, ctx.want_final, _, ctx.separate = inputs
    ctx.save_for_backward(v, log_decay, gate, initial, offsets, *output[2:])
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, backward: Any, dy: Optional, dfinal: Optional) -> tuple[Optional, ...]:
    """Of every input of :func:`run_forward`."""
    v, log_decay, gate, initial, offsets, carries, states = ctx.saved_tensors
    dy = torch.zeros_like(v) if dy is None else dy
    dfinal = dfinal if ctx.want_final else None
    dv, dlog_decay, dgate, dinitial = backward(dy, dfinal, v, log_decay, gate, initial, offsets, carries, states, ctx.separate)
    return dv, dlog_decay, dgate, None if initial is None else dinitial, None, None, None, None


backward = Operator("gated_scan_backward", run_backward, fake=fake_backward)
forward = Operator(
    "gated_scan_forward", run_forward, fake=fake_forward, save=save, gradients=gradients, backward=backward, outputs=2
)


def scan_and_gate(call: ScanCall, *, separate: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """y and the final state by the Triton kernels, differentiable; also for operations whose last steps are these."""
    grad = call.query().grad
    y, final, *_ = forward(
        call.v, call.log_decay, call.gate, call.initial_state, call.cu_seqlens, call.output_final_state, grad, separate,
        grad=grad,
    )  # fmt: skip
    return y, final


@gated_scan.variant("separate", launches=2, backward_launches=2, fuses=())
def separate(call: ScanCall) -> tuple[torch.Tensor, torch.Tensor]:
    """A scan kernel, then a gate kernel, with the states between them in memory, in the dtype of ``v`` as the write-up had them.

    Where few numbers are summed, that rounding may cost more than the error gate allows: in one of twenty draws of 200 elements.
    """
    return scan_and_gate(call, separate=True)


@gated_scan.variant("fused", launches=1, backward_launches=1, fuses=("scan", "gate"))
def fused(call: ScanCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Scan and gate in one launch, parallel over time by decoupled look-back."""
    return scan_and_gate(call, separate=False)


@separate.supports
@fused.supports
def needs_triton(query: Query) -> str | None:
    """What the scans' kernels need: also used by the operations that end with them."""
    if (reason := cannot_launch(query)) is not None:
        return reason
    if query.device_type != "cuda" and query.dtype is torch.bfloat16:
        return "needs a GPU for bfloat16: Triton's interpreter computes wrong bfloat16 products"
    slices = query.sizes[0] * -(-query.sizes[-1] // FEWEST_CHANNELS)
    if slices > LARGEST_GRID:
        return f"takes at most {LARGEST_GRID} pairs of a batch entry and {FEWEST_CHANNELS} channels: a launch is no wider"
    return None


def cannot_launch(query: Query) -> str | None:
    """What every Triton variant of every operation needs."""
    if not triton_here():
        return "needs Triton, which is not installed"
    if query.device_type != "cuda" and not interpreting():
        return "needs a CUDA or ROCm device"
    if 0 in query.sizes:
        return "needs at least one element in every dimension"
    return None


LARGEST_GRID = 65535
"""Programs along a launch's second dimension, on CUDA and ROCm."""

FEWEST_CHANNELS = 16
"""The narrowest tile of :func:`onelaunch.ops.gated_scan.launch.scan_tiles`."""


@functools.cache
def triton_here() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter (``TRITON_INTERPRET=1`` when Triton was imported)."""
    if not triton_here():
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def scan_signature(kernel: Any, element: str, absent: Iterable[str], constants: dict[str, Any]) -> dict[str, str]:
    """The Triton types of a scan kernel's arguments: pointers to ``element`` where nothing else is known."""
    special = {
        "initial": "*fp32", "offsets": "*i32", "final": "*fp32", "carries": "*fp32", "words": "*i64",
        "dfinal": "*fp32", "dinitial": "*fp32",
    }  # fmt: skip
    numbers = ("T", "sequences", "channels", "width")
    signature = {}
    for name in kernel.arg_names:
        if name in constants or name in absent:
            signature[name] = "constexpr"
        elif name in numbers or "stride" in name:
            signature[name] = "i32" if name in ("T", "sequences") else "i32:16"
        else:
            signature[name] = special.get(name, element)
    return signature


def scan_build(
    name: str,
    kernel: Any,
    tiles: Any,
    warps: int,
    *,
    element: str = "*fp16",
    stages: int = 3,
    matrix: bool = False,
    **flags: Any,
) -> KernelBuild:
    """A scan kernel as a plain training call launches it: no packing, no given states."""
    absent = ("initial", "offsets", "final", "dfinal", "dinitial")
    constants = {"BT": tiles.steps, "BV": tiles.channels, "GROUP": tiles.group, "STEPS": 0, "EVEN": True, **flags}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature = scan_signature(kernel, element, [key for key in absent if key in kernel.arg_names], constants)
    constants |= {key: None for key in absent if key in kernel.arg_names}
    return KernelBuild(name, kernel, signature, constants, num_warps=warps, num_stages=stages, matrix=matrix)


@fused.kernels
def _(architecture: str) -> list[KernelBuild]:
    from onelaunch.ops.gated_scan import backward_kernels, kernels, launch

    tiles = launch.scan_tiles(2048, 64)
    flags = {"GATED": True, "INITIAL": False, "PACKED": False, "FINAL": False, "CARRIES": True, "DFINAL": False}
    return [
        scan_build("scan_gate", kernels.scan_gate_kernel, tiles, tiles.warps, **flags),
        scan_build("scan_gate_backward", backward_kernels.scan_gate_backward_kernel, tiles, tiles.backward_warps, **flags),
    ]


@separate.kernels
def _(architecture: str) -> list[KernelBuild]:
    from onelaunch.ops.gated_scan import backward_kernels, kernels, launch

    tiles = launch.scan_tiles(2048, 64)
    flags = {"GATED": False, "INITIAL": False, "PACKED": False, "FINAL": False, "CARRIES": True, "DFINAL": False}
    return [
        scan_build("scan", kernels.scan_gate_kernel, tiles, tiles.warps, **flags),
        scan_build("gate", kernels.gate_kernel, tiles, tiles.warps),
        scan_build("gate_backward", backward_kernels.gate_backward_kernel, tiles, tiles.warps),
        scan_build("scan_backward", backward_kernels.scan_gate_backward_kernel, tiles, tiles.backward_warps, **flags),
    ]
