"""Variants of ``linear_rnn`` in three, two and one launch, and how PyTorch sees them."""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.launch.operator import Operator
from onelaunch.operation import Query
from onelaunch.ops.gated_scan import triton_variants as scan
from onelaunch.ops.linear_rnn.contract import LinearRNNCall, linear_rnn

Results = tuple[torch.Tensor, torch.Tensor]
Optional = torch.Tensor | None


# Three launches and two: a matrix product, then the kernels of gated_scan


def run_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a [M, K] @ b [K, N]`` by the Triton kernel."""
    from onelaunch.ops.linear_rnn import launch

    return launch.matmul(a, b)


def _fake_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)


def _matmul_gradients(ctx: Any, product: Any, dout: torch.Tensor) -> tuple[Optional, Optional]:
    a, b = ctx.saved_tensors
    da = product(dout, b.t()) if ctx.needs_input_grad[0] else None
    db = product(a.t(), dout) if ctx.needs_input_grad[1] else None
    return da, db


matmul = Operator(
    "matmul",
    run_matmul,
    fake=_fake_matmul,
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    gradients=_matmul_gradients,
)


@linear_rnn.variant("three_launch", launches=3, backward_launches=4, fuses=(), gemm="triton")
def three_launch(call: LinearRNNCall) -> Results:
    """A Triton matrix product, a scan kernel, a gate kernel: the write-up's baseline."""
    v = matmul(call.x.flatten(0, 1), call.weight, grad=call.query().grad).unflatten(0, call.x.shape[:2])
    return scan.scan_and_gate(call.scan_call(v), separate=True)


@linear_rnn.variant("three_launch_cublas", launches=3, backward_launches=4, fuses=(), gemm="cublas")
def three_launch_cublas(call: LinearRNNCall) -> Results:
    """The library's matrix product, a scan kernel, a gate kernel: the control that the write-up lacked."""
    return scan.scan_and_gate(call.scan_call(call.project()), separate=True)


@linear_rnn.variant("semi_fused", launches=2, backward_launches=3, fuses=("scan", "gate"), gemm="cublas")
def semi_fused(call: LinearRNNCall) -> Results:
    """The library's matrix product, then scan and gate in one kernel."""
    return scan.scan_and_gate(call.scan_call(call.project()), separate=False)


# One launch


def run_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    want_final: bool,
    keep: bool,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, the final state, and for the backward pass v and the carries, by the kernel of this name."""
    from onelaunch.ops.linear_rnn import hopper_launch, launch

    layer = launch.Layer(x, weight, log_decay, gate, launch.Sequences.of(initial, offsets), want_final, keep)
    chunked = hopper_launch.chunked if hopper_launch.suits(layer) else launch.chunked
    kernels = {"chunked": chunked, "stepwise": launch.stepwise, "persistent": hopper_launch.persistent}
    return kernels[kernel](layer)


def run_backward(
    dy: torch.Tensor,
    dfinal: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    v: torch.Tensor,
    carries: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, weight, log_decay, gate and the initial state (no elements where there is none)."""
    from onelaunch.kernels.scan import launch

    sequences = launch.Sequences.of(initial, offsets)
    dv, dlog_decay, dgate, dinitial = launch.backward(dy, dfinal, v, log_decay, gate, sequences, carries)
    dx = dv @ weight.t()
    dweight = x.flatten(0, 1).t() @ dv.flatten(0, 1)
    return dx, dweight, dlog_decay, dgate, dinitial


def fake_forward(
    x: Any, weight: Any, log_decay: Any, gate: Any, initial: Any, offsets: Any, want_final: Any, keep: Any, kernel: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Room for the results of :func:`run_forward`."""
    from onelaunch.kernels.common.sequences import Sequences
    from onelaunch.ops.linear_rnn.launch import Layer

    return Layer(x, weight, log_decay, gate, Sequences(initial, offsets), want_final, keep).results()


def fake_backward(
    dy: Any, dfinal: Any, x: Any, weight: Any, log_decay: Any, gate: Any, initial: Any, offsets: Any, v: Any, carries: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Room for the results of :func:`run_backward`."""
    gradients = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, weight, log_decay, gate)]
    kept = x.new_empty(0) if initial is None else initial.new_empty(initial.shape)
    return *gradients, kept


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """The tensors among the inputs, v and the carries."""
    *tensors, ctx.want_final, _, _ = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, backward: Any, dy: Optional, dfinal: Optional) -> tuple[Optional, ...]:
    """Of every input of :func:`run_forward`."""
    x, weight, log_decay, gate, initial, offsets, v, carries = ctx.saved_tensors
    dy = torch.zeros_like(v) if dy is None else dy
    dfinal = dfinal if ctx.want_final else None
    *found, dinitial = backward(dy, dfinal, x, weight, log_decay, gate, initial, offsets, v, carries)
    return *found, None if initial is None else dinitial, None, None, None, None


backward = Operator("linear_rnn_backward", run_backward, fake=fake_backward)
forward = Operator(
    "linear_rnn_forward", run_forward, fake=fake_forward, save=save, gradients=gradients, backward=backward, outputs=2
)


def one_launch(call: LinearRNNCall, kernel: str) -> Results:
    """y and the final state by the kernel of this name, differentiable."""
    grad = call.query().grad
    y, final, *_ = forward(
        call.x, call.weight, call.log_decay, call.gate, call.initial_state, call.cu_seqlens,
        call.output_final_state, grad, kernel, grad=grad,
    )  # fmt: skip
    return y, final


@linear_rnn.variant("fused_stepwise", launches=1, backward_launches=3, fuses=("projection", "scan", "gate"), gemm="vector")
def fused_stepwise(call: LinearRNNCall) -> Results:
    """One launch, a vector-matrix product per time step: the write-up's loser, kept as the lesson it is."""
    return one_launch(call, "stepwise")


@linear_rnn.variant("fused_chunked", launches=1, backward_launches=3, fuses=("projection", "scan", "gate"), gemm="triton")
def fused_chunked(call: LinearRNNCall) -> Results:
    """One launch that keeps the tensor cores: a tile of time at once, the carry by decoupled look-back."""
    return one_launch(call, "chunked")


for _variant in (three_launch, three_launch_cublas, semi_fused, fused_stepwise, fused_chunked):
    _variant.supports(scan.needs_triton)


WIDE = 512 * 512
"""Weights beyond which the library's matrix product wins back what its own launch costs."""


@linear_rnn.prefers
def library_product_for_wide_layers(query: Query) -> tuple[str, ...]:
    """At D = V = 2048 two launches take 515 us on an H200, ``fused_chunked`` 927: its product is no match for the library's."""
    return ("semi_fused",) if query.device_type == "cuda" and query.sizes[2] * query.sizes[3] >= WIDE else ()


@fused_stepwise.supports
def fits_registers(query: Query) -> str | None:
    """The stepwise kernel holds its weights in registers, and its states between tiles assume unpacked sequences."""
    from onelaunch.ops.linear_rnn.launch import STEPWISE_WIDTH

    if query.sizes[2] > STEPWISE_WIDTH:
        return f"needs D of at most {STEPWISE_WIDTH}: it holds the weights of 16 channels in registers"
    return None
