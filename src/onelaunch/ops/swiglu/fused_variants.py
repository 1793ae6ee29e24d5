"""Variants of ``swiglu`` whose own product ends with the gate, portable, and how PyTorch sees them.

One operator carries both: ``onelaunch::swiglu_forward``. For a backward pass it keeps both products, without a launch more. That
pass is the gate's gradients in one launch, and matrix products of PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.operation import KernelBuild, Query
from onelaunch.ops.autograd import Operator
from onelaunch.ops.formats import Fp8Tensor, NVFP4Tensor
from onelaunch.ops.gated_scan.triton_variants import cannot_launch
from onelaunch.ops.swiglu.contract import Operand, SwigluCall, swiglu
from onelaunch.ops.swiglu.torch_variants import Results, trains_plain_tensors
from onelaunch.ops.swiglu.triton_variants import build as gate_build
from onelaunch.ops.swiglu.triton_variants import gate_backward, multiply, plain_or_float8

Optional = torch.Tensor | None


def run_forward(
    x: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor | None,
    x_blocks: torch.Tensor | None,
    gate_blocks: torch.Tensor | None,
    up_blocks: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    gate_scale: torch.Tensor | None,
    up_scale: torch.Tensor | None,
    dtype: torch.dtype,
    swizzled: bool,
    keep: bool,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h, and for a backward pass both products ``[M, 2 N]`` (no elements unless ``keep``), by the variant of this name.

    ``w_gate`` holds the weights of both if ``w_up`` is not given. Blocks and scales are those of quantized operands.
    """
    from onelaunch.ops.swiglu import fused_launch

    rows = fused_launch.Matrix(x, x_blocks, x_scale)
    gate = fused_launch.Matrix(w_gate, gate_blocks, gate_scale)
    if w_up is None:
        half = w_gate.shape[0] // 2
        gate, up = gate.rows(0, half, swizzled=swizzled), gate.rows(half, 2 * half, swizzled=swizzled)
    else:
        up = fused_launch.Matrix(w_up, up_blocks, up_scale)
    columns = gate.values.shape[0]
    kept = x.new_empty((x.shape[0], 2 * columns) if keep else (0,), dtype=dtype)
    if kernel == "two_node":
        if keep:
            product = torch.mm(x, gate.values.mT, out=kept[:, :columns])
            return fused_launch.up(rows, up, product, dtype, kept[:, columns:]), kept
        product = multiply(_operand(rows), _operand(gate), dtype)
        return fused_launch.up(rows, up, product, dtype, None), kept
    if gate.kind == "nvfp4":
        return fused_launch.fused_nvfp4(rows, gate, up, dtype, swizzled=swizzled), kept
    return fused_launch.fused(rows, gate, up, dtype, kept if keep else None), kept


def _operand(matrix: Any) -> Operand:
    """Of a matrix in plain numbers or float8."""
    return matrix.values if matrix.scale is None else Fp8Tensor(matrix.values, matrix.scale)


def fake_forward(
    x: Any, w_gate: Any, w_up: Any, x_blocks: Any, gate_blocks: Any, up_blocks: Any, x_scale: Any, gate_scale: Any, up_scale: Any,
    dtype: Any, swizzled: Any, keep: Any, kernel: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Room for the results of :func:`run_forward`."""
    columns = w_gate.shape[0] // 2 if w_up is None else w_gate.shape[0]
    kept = x.new_empty((x.shape[0], 2 * columns) if keep else (0,), dtype=dtype)
    return x.new_empty((x.shape[0], columns), dtype=dtype), kept


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """x, the weights and both products."""
    ctx.save_for_backward(*inputs[:3], output[1])


def gradients(ctx: Any, backward: Any, dh: torch.Tensor) -> tuple[Optional, ...]:
    """Of x and the weights; nothing else takes any."""
    x, w_gate, w_up, products = ctx.saved_tensors
    both = backward(dh, products, None)  # [M, 2 N]
    wants_x, *wants_weights = ctx.needs_input_grad[:3]
    dx = dgate = dup = None
    if w_up is None:
        dx = both @ w_gate if wants_x else None
        dgate = both.mT @ x if wants_weights[0] else None
    else:
        gate, up = both.chunk(2, 1)
        dx = torch.addmm(gate @ w_gate, up, w_up) if wants_x else None
        if any(wants_weights):
            dgate, dup = (both.mT @ x).chunk(2)
    return dx, dgate, dup, *(None,) * 10


forward = Operator("swiglu_forward", run_forward, fake=fake_forward, save=save, gradients=gradients, backward=gate_backward)


def compute(call: SwigluCall, kernel: str) -> Results:
    """h by the variant of this name, differentiable where the operands are plain."""
    operands = (call.x, call.w_gate, call.w_up) if call.stacked is None else (call.x, call.stacked)
    swizzled = all(each.swizzled for each in operands if isinstance(each, NVFP4Tensor))
    swizzled = swizzled and any(isinstance(each, NVFP4Tensor) for each in operands)
    parts = [_parts(each, swizzled=swizzled) for each in operands] + [(None, None, None)] * (call.stacked is not None)
    tensors = [part for kind in zip(*parts, strict=True) for part in kind]
    grad = call.query().grad
    return (forward(*tensors, call.dtype, swizzled, grad, kernel, grad=grad)[0],)


def _parts(operand: Operand, *, swizzled: bool) -> tuple[Optional, Optional, Optional]:
    """Values, blocks and scale."""
    if isinstance(operand, torch.Tensor):
        return operand, None, None
    if isinstance(operand, Fp8Tensor):
        return operand.values, None, operand.scale
    plain = operand if swizzled else operand.plain()
    return plain.codes, plain.scales, plain.global_scale


@swiglu.variant("two_node", launches=2, backward_launches=4, fuses=("gate",), hands=("gate",), gemm="cublas, triton")
def two_node(call: SwigluCall) -> Results:
    """The gate's product by PyTorch, and one kernel for that of up, which ends with the gate: the write-up's first step."""
    return compute(call, "two_node")


@swiglu.variant("fused", launches=1, backward_launches=4, fuses=("products", "gate"), hands=(), gemm="triton")
def fused(call: SwigluCall) -> Results:
    """One launch: both products of a tile in registers, then the gate. NVFP4 is decoded there.

    Scales that are swizzled in every NVFP4 operand are read as they lie; where only some are, those are copied into plain order
    before. The backward pass of stacked weights takes a launch less than that of separate ones, three.
    """
    return compute(call, "fused")


LARGEST = 2**30
"""Sizes below this leave room for a tile and for 2 N in 32 bits."""


@two_node.supports
@fused.supports
def needs_triton(query: Query) -> str | None:
    """What the kernels need."""
    if (reason := cannot_launch(query)) is not None:
        return reason
    multiplied = query.dtype is torch.bfloat16 and not {"fp8", "nvfp4"} & set(query.flags)
    if query.device_type != "cuda" and multiplied:
        return "needs a GPU for bfloat16: Triton's interpreter computes wrong bfloat16 products"
    if max(query.sizes) >= LARGEST:
        return f"takes M, N and K below {LARGEST}: positions in rows are of 32 bits"
    return None


two_node.supports(trains_plain_tensors)
fused.supports(trains_plain_tensors)
two_node.supports(plain_or_float8)


FACTS = {
    "sm_80": (108, 163 * 1024, False),
    "sm_90a": (132, 227 * 1024, True),
    "sm_100a": (148, 227 * 1024, True),
    "gfx942": (304, 64 * 1024, False),
}
"""Processors, shared memory of a block, and whether there are float8 units, of architectures that kernels are compiled for."""

FEW, MANY = 1, 8192
"""Rows."""

WORDS = {"KEEP": "products kept", "EVEN": "channels left over", "SWIZZLED": "swizzled"}
"""What differs from a plain call, in names."""

POINTERS = {
    "bfloat16": {"x": "*bf16", "h": "*bf16", "gate": "*bf16"},
    "float32": {"x": "*fp32", "h": "*fp32", "gate": "*fp32"},
    "fp8": {"x": "*u8", "h": "*bf16", "gate": "*bf16"},
    "nvfp4_weights": {"x": "*i32", "w": "*u8", "h": "*bf16"},
    "nvfp4": {"x": "*u8", "h": "*fp16"},
    "nvfp4_to_float32": {"x": "*u8", "h": "*fp32"},
}
"""What tensors hold, per format; weights what x does."""


def build(architecture: str, kernel: Any, form: str, rows: int, **given: Any) -> KernelBuild:
    """A kernel as a call of so many rows launches it."""
    from onelaunch.ops.swiglu import fused_launch

    count, shared, native = FACTS.get(architecture, (fused_launch.PROCESSORS, fused_launch.LEAST_SHARED, False))
    pointers, codes = dict(POINTERS[form]), form.startswith("nvfp4")
    factor = {"bfloat16": "bf16", "nvfp4_weights": "bf16", "nvfp4": "fp16"}.get(form, "fp32")
    factor = ("fp8e4nv" if native else "fp16") if form == "fp8" else factor
    stored = 0.5 if codes else {"*bf16": 2, "*fp32": 4, "*u8": 1}[pointers["x"]]
    if factor == "fp8e4nv":
        pointers["x"] = "*fp8e4nv"
    products = 1 if "gate" in kernel.arg_names else 2
    tiles = fused_launch.product_tiles(rows, 4096, factor, stored, products, count, shared)
    options = tiles.options(7168)
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    keep, per_row = given.get("KEEP", False), form == "fp8"
    flags = {"X_ROWS": per_row, "W_ROWS": per_row, "KEEP": False, "SWIZZLED": False, "FACTOR": fused_launch.FACTORS[factor]}
    absent = dict.fromkeys(("products", "kept")) if not keep else {}
    absent |= {} if codes or per_row else dict.fromkeys(("x_scale", "gate_scale", "up_scale"))
    absent |= dict.fromkeys(("x_scale", "x_blocks")) if form == "nvfp4_weights" else {}
    constants = {**options, **flags, **absent, **given}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in ("M", "N", "K") or "stride" in name:
            return "i32:16"
        if "scale" in name:
            return "*fp32"
        if "blocks" in name:
            return "*u8"
        if name.startswith("w_"):
            return pointers.get("w", pointers["x"])
        return pointers.get(name, pointers["h"])

    signature = {name: type_of(name) for name in kernel.arg_names}
    said = [form, "few rows" if rows == FEW else "many rows", *(WORDS[name] for name in given)]
    by_warps = tiles.n < WARPGROUP_ROWS
    matrix = factor != "fp32" and not (by_warps and architecture == "sm_100a")
    name = kernel.__name__.removesuffix("_kernel")
    return KernelBuild(f"{name}, {', '.join(said)}", kernel, signature, constants, warps, stages, matrix, by_warps)


WARPGROUP_ROWS = 64
"""Of the left operand; with fewer, products are those of single warps."""


@two_node.kernels
def _(architecture: str) -> list[KernelBuild]:
    from onelaunch.ops.swiglu import kernels, product_kernels

    up = product_kernels.up_kernel
    return [
        build(architecture, up, "bfloat16", FEW),
        build(architecture, up, "bfloat16", MANY),
        build(architecture, up, "bfloat16", MANY, KEEP=True, EVEN=False),
        build(architecture, up, "float32", MANY),
        build(architecture, up, "fp8", FEW),
        build(architecture, up, "fp8", MANY, EVEN=False),
        gate_build("gate_backward", kernels.gate_backward_kernel),
    ]


@fused.kernels
def _(architecture: str) -> list[KernelBuild]:
    from onelaunch.ops.swiglu import kernels, product_kernels

    plain, four = product_kernels.fused_kernel, product_kernels.fused_nvfp4_kernel
    return [
        *(build(architecture, plain, form, rows) for form in ("bfloat16", "float32", "fp8") for rows in (FEW, MANY)),
        build(architecture, plain, "bfloat16", MANY, KEEP=True, EVEN=False),
        build(architecture, plain, "fp8", MANY, EVEN=False),
        *(build(architecture, four, form, rows) for form in ("nvfp4_weights", "nvfp4") for rows in (FEW, MANY)),
        build(architecture, four, "nvfp4", MANY, SWIZZLED=True),
        build(architecture, four, "nvfp4_to_float32", MANY),
        gate_build("gate_backward", kernels.gate_backward_kernel),
    ]
