"""The variant ``fused_hopper`` of ``linear_rnn``: one launch for wide layers on Hopper GPUs.

The kernel is hopper_kernels.py; the backward pass is that of the other variants, from the v and the states that the kernel keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from onelaunch.operation import KernelBuild, Query
from onelaunch.ops.gated_scan import triton_variants as scan
from onelaunch.ops.linear_rnn import triton_variants as layer
from onelaunch.ops.linear_rnn.contract import LinearRNNCall, linear_rnn

Results = tuple[torch.Tensor, torch.Tensor]
Optional = torch.Tensor | None

ALIGNMENT = 16
"""Bytes: what the copy engine asks of addresses and strides."""


@dataclass(frozen=True, slots=True)
class HopperTiles:
    """How the layer is cut: ``steps`` by ``channels`` a tile, ``inner`` columns of x a stage."""

    steps: int = 256
    channels: int = 128
    inner: int = 64
    stages: int = 3
    multiply_registers: int = 168
    scan_registers: int = 152

    def options(self) -> dict[str, int]:
        """Constants of the kernel."""
        return {
            "STAGES": self.stages, "MULTIPLY_REGISTERS": self.multiply_registers, "SCAN_REGISTERS": self.scan_registers,
        }  # fmt: skip

    def boxes(self, decay_size: int) -> dict[str, list[int]]:
        """What the copy engine moves at once, by argument; ``decay_size`` in bytes: wide decays come in shorter pieces."""
        rows = 16 if decay_size == 2 else 8
        return {
            "x": [self.steps // 2, self.inner],
            "weight": [self.inner, self.channels],
            "log_decay": [rows, self.channels],
            "gate": [rows, self.channels],
        }

    def even(self, length: int, width: int) -> bool:
        """Whether all tiles lie inside the tensor: then no access needs a mask."""
        return length % self.steps == 0 and width % self.channels == 0


TILES = HopperTiles()


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """``[B, T, N]`` as the ``[B T, N]`` that the copy engine can address: copied if strides or address do not allow it."""
    tensor = tensor.flatten(0, 1)
    aligned = tensor.stride(1) == 1 and tensor.stride(0) * tensor.element_size() % ALIGNMENT == 0
    return tensor if aligned and tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone(memory_format=torch.contiguous_format)


def run_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor,
    initial: torch.Tensor | None,
    want_final: bool,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, the final state, and for the backward pass v and the carries. One launch; what is not wanted has no elements."""
    import triton

    from onelaunch.ops.gated_scan.launch import Sequences, empty_states, scan_tiles
    from onelaunch.ops.gluon_compat import TensorDescriptor, gl
    from onelaunch.ops.linear_rnn.hopper_kernels import project_scan_gate_hopper_kernel
    from onelaunch.ops.workspace import workspace

    batch, length, width = x.shape
    channels = weight.shape[1]
    y = torch.empty((batch, length, channels), dtype=x.dtype, device=x.device)
    v = torch.empty_like(y) if keep else y.new_empty(0)
    initial = None if initial is None else initial.contiguous()
    final, carries = empty_states(y, Sequences(initial, None), scan_tiles(length, channels), want_final, keep)
    tiles_t, slices = triton.cdiv(length, TILES.steps), triton.cdiv(channels, TILES.channels)
    tiles = tiles_t * batch * slices
    given = {"x": rows_of(x), "weight": rows_of(weight[None]), "log_decay": rows_of(log_decay), "gate": rows_of(gate)}
    elements = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
    described = [
        TensorDescriptor.from_tensor(given[name], box, gl.NVMMASharedLayout.get_default_for(box, elements[given[name].dtype]))
        for name, box in TILES.boxes(log_decay.element_size()).items()
    ]
    words = workspace(x.device, batch * tiles_t * channels)
    counter = workspace(x.device, 1)  # no look-back needs a single word, so it is ours alone; the kernel leaves it at 0
    programs = min(tiles, torch.cuda.get_device_properties(x.device).multi_processor_count)
    project_scan_gate_hopper_kernel[(programs,)](
        *described, initial, y, v, final, carries, words, counter, length, width, channels, tiles, batch * slices,
        EVEN=TILES.even(length, channels), INITIAL=initial is not None, FINAL=want_final, KEEP=keep,
        num_warps=4, **TILES.options(),
    )  # fmt: skip
    return y, final, v, carries


forward = torch.library.custom_op("onelaunch::linear_rnn_forward_hopper", run_forward, mutates_args=())


@forward.register_fake
def _(
    x: Any, weight: Any, log_decay: Any, gate: Any, initial: Any, want_final: Any, keep: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    from onelaunch.ops.gated_scan.launch import Sequences, empty_states, scan_tiles

    y = torch.empty((*x.shape[:2], weight.shape[1]), dtype=x.dtype, device=x.device)
    tiles = scan_tiles(x.shape[1], weight.shape[1])
    final, carries = empty_states(y, Sequences(initial, None), tiles, want_final, keep)
    return y, final, torch.empty_like(y) if keep else y.new_empty(0), carries


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, ctx.want_final, _ = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, operator: Any, dy: Optional, dfinal: Optional) -> tuple[Optional, ...]:
    x, weight, log_decay, gate, initial, v, carries = ctx.saved_tensors
    dy = torch.zeros_like(v) if dy is None else dy
    dfinal = dfinal if ctx.want_final else None
    *gradients, dinitial = operator(dy, dfinal, x, weight, log_decay, gate, initial, None, v, carries)
    return *gradients, None if initial is None else dinitial, None, None


forward.register_autograd(
    lambda ctx, dy, dfinal, *_: _gradients(ctx, layer.backward, dy, dfinal),
    setup_context=_save,
)


class _Eager(torch.autograd.Function):
    """The same pair without the operator's boundary."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        output = run_forward(*inputs)
        _save(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[2:])
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Optional, ...]:  # pyrefly: ignore[bad-override]  (the decorator)
        return _gradients(ctx, layer.run_backward, grad_outputs[0], grad_outputs[1])


@linear_rnn.variant(
    "fused_hopper", launches=1, backward_launches=3, fuses=("projection", "scan", "gate"), gemm="gluon",
    architectures=("sm_90a",),
)  # fmt: skip
def fused_hopper(call: LinearRNNCall) -> Results:
    """One launch for wide layers on Hopper: the scan of a tile runs under the matrix product of the next."""
    grad = call.query().grad
    inputs = (call.x, call.weight, call.log_decay, call.gate, call.initial_state, call.output_final_state, grad)
    if torch.compiler.is_compiling():
        return forward(*inputs)[:2]
    return (_Eager.apply if grad else run_forward)(*inputs)[:2]


fused_hopper.supports(scan.needs_triton)


@fused_hopper.supports
def fits(query: Query) -> str | None:
    """What the copy engine and the matrix units ask for."""
    here = query.device_type == "cuda" and not torch.version.hip and torch.cuda.is_available()
    if not here or torch.cuda.get_device_capability(query.device)[0] != 9:
        return "needs a Hopper GPU (compute capability 9.x)"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return "needs float16 or bfloat16"
    if "packed" in query.flags:
        return "takes no packed sequences"
    _, length, width, channels = query.sizes
    if length < 64:
        return "needs at least 64 time steps"
    if width % 8 or channels % 8:
        return "needs D and V that are multiples of 8: the copy engine moves 16 bytes at once"
    return None


@fused_hopper.kernels
def _(architecture: str) -> list[KernelBuild]:
    if architecture not in fused_hopper.tags["architectures"]:
        return []
    from onelaunch.ops.gluon_compat import gl
    from onelaunch.ops.linear_rnn.hopper_kernels import project_scan_gate_hopper_kernel as kernel

    boxes = TILES.boxes(2)
    layouts = {name: gl.NVMMASharedLayout.get_default_for(box, gl.float16) for name, box in boxes.items()}
    constants = {**TILES.options(), "EVEN": True, "INITIAL": False, "FINAL": False, "KEEP": True, "initial": None}
    special = {name: f"tensordesc<fp16{boxes[name]},{layouts[name]!r}>" for name in boxes}
    special |= {"y": "*fp16", "v": "*fp16", "words": "*i64", "counter": "*i64", "final": "*fp32", "carries": "*fp32"}
    special |= dict.fromkeys(("T", "tiles", "pairs"), "i32")
    signature = {name: "constexpr" if name in constants else special.get(name, "i32:16") for name in kernel.arg_names}
    build = KernelBuild("project_scan_gate_hopper", kernel, signature, constants, num_warps=4, matrix=True)
    return [build, *scan.fused.builds(architecture)[1:]]
