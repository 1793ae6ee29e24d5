"""Variants of ``swiglu`` whose own product ends with the gate, portable. See ``forward.py`` for how PyTorch sees them."""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.device.architectures import HOPPER_SHARED_BYTES
from onelaunch.formats import Fp8Tensor
from onelaunch.launch.build import KernelBuild
from onelaunch.operation import Query
from onelaunch.operation.requirements import cannot_launch
from onelaunch.ops.swiglu.contract import Operand, SwigluCall, swiglu
from onelaunch.ops.swiglu.forward import Matrix, Wanted, compute, launches
from onelaunch.ops.swiglu.torch_variants import Results, trains_plain_tensors
from onelaunch.ops.swiglu.triton_variants import build as gate_build
from onelaunch.ops.swiglu.triton_variants import multiply, plain_or_float8


@launches("two_node")
def run_two_node(x: Matrix, gate: Matrix, up: Matrix, wanted: Wanted) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A product by PyTorch, and a launch."""
    from onelaunch.ops.swiglu import fused_launch

    if not wanted.keep:
        product = multiply(_operand(x), _operand(gate), wanted.dtype)
        return fused_launch.up(x, up, product, wanted.dtype, None), None
    columns = gate.values.shape[0]
    kept = x.values.new_empty((x.values.shape[0], 2 * columns))
    product = torch.mm(x.values, gate.values.mT, out=kept[:, :columns])
    return fused_launch.up(x, up, product, wanted.dtype, kept[:, columns:]), kept


@launches("fused")
def run_fused(x: Matrix, gate: Matrix, up: Matrix, wanted: Wanted) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One launch."""
    from onelaunch.ops.swiglu import fused_launch

    if gate.kind == "nvfp4":
        return fused_launch.fused_nvfp4(x, gate, up, wanted.dtype, swizzled=wanted.swizzled), None
    kept = x.values.new_empty((x.values.shape[0], 2 * gate.values.shape[0])) if wanted.keep else None
    return fused_launch.fused(x, gate, up, wanted.dtype, kept), kept


def _operand(matrix: Matrix) -> Operand:
    """Of a matrix in plain numbers or float8."""
    return matrix.values if matrix.scale is None else Fp8Tensor(matrix.values, matrix.scale)


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
    "sm_90a": (132, HOPPER_SHARED_BYTES, True),
    "sm_100a": (148, HOPPER_SHARED_BYTES, True),
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
