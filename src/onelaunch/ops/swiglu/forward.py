"""The operator of ``swiglu``'s own kernels, one for all of them, and its gradients.

``onelaunch::swiglu_forward`` runs the launches of a variant by its name. For a backward pass it keeps both products, without a
launch more. That pass is the gate's gradients in one launch, and matrix products of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from onelaunch.formats import ATOM_ROWS, Fp8Tensor, NVFP4Tensor
from onelaunch.launch.by_variant import Launches
from onelaunch.launch.operator import Operator
from onelaunch.ops.swiglu.contract import Operand, SwigluCall
from onelaunch.ops.swiglu.torch_variants import Results
from onelaunch.ops.swiglu.triton_variants import gate_backward

Optional = torch.Tensor | None


class Matrix(NamedTuple):
    """A matrix ``[R, K]`` in plain numbers, float8 or NVFP4, as tensors."""

    values: torch.Tensor
    """``[R, K]``, or codes ``[R, K / 2]`` uint8."""
    blocks: torch.Tensor | None = None
    """Scales of NVFP4, ``[R, K / 16]`` or swizzled."""
    scale: torch.Tensor | None = None
    """float32, of one element or ``[R, 1]``."""

    def rows(self, start: int, stop: int, *, swizzled: bool) -> Matrix:
        """Some of the rows, as views."""
        last = -(-stop // ATOM_ROWS) * ATOM_ROWS if swizzled else stop
        blocks = None if self.blocks is None else self.blocks[start:last]
        scale = self.scale[start:stop] if self.scale is not None and self.per_row else self.scale
        return Matrix(self.values[start:stop], blocks, scale)

    @property
    def per_row(self) -> bool:
        return self.scale is not None and self.scale.numel() != 1

    @property
    def kind(self) -> str:
        """``dense``, ``fp8`` or ``nvfp4``."""
        if self.blocks is not None:
            return "nvfp4"
        return "fp8" if self.values.dtype is torch.float8_e4m3fn else "dense"

    def flat_scale(self) -> torch.Tensor | None:
        """As kernels read it."""
        return None if self.scale is None else self.scale.contiguous()


def with_scales_alike(gate: Matrix, up: Matrix) -> tuple[Matrix, Matrix]:
    """Both weights with a scale for each row if one of them has such, as kernels read them."""
    if gate.per_row == up.per_row:
        return gate, up
    rows = gate.values.shape[0]
    one, other = (each._replace(scale=None if each.scale is None else each.scale.expand(rows, 1)) for each in (gate, up))
    return one, other


class Wanted(NamedTuple):
    """What launches are asked for beside their operands."""

    dtype: torch.dtype
    """Of h."""
    swizzled: bool
    """Whether block scales lie in the swizzled order."""
    keep: bool
    """Whether both products are wanted too."""
    constant_weights: bool
    """Whether weights may be read beside the end of earlier launches."""


Run: TypeAlias = Callable[[Matrix, Matrix, Matrix, Wanted], tuple[torch.Tensor, Optional]]
"""From x, w_gate and w_up to ``h [M, N]``, and both products ``[M, 2 N]`` if they are to be kept."""

launches: Launches[Run] = Launches()
"""By the names of variants."""


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
    constant_weights: bool,
    variant: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h, and for a backward pass both products ``[M, 2 N]`` (no elements unless ``keep``), by the variant of this name.

    ``w_gate`` holds the weights of both if ``w_up`` is not given. Blocks and scales are those of quantized operands.
    """
    rows, gate = Matrix(x, x_blocks, x_scale), Matrix(w_gate, gate_blocks, gate_scale)
    if w_up is None:
        half = w_gate.shape[0] // 2
        gate, up = gate.rows(0, half, swizzled=swizzled), gate.rows(half, 2 * half, swizzled=swizzled)
    else:
        up = Matrix(w_up, up_blocks, up_scale)
    h, kept = launches[variant](rows, *with_scales_alike(gate, up), Wanted(dtype, swizzled, keep, constant_weights))
    return h, x.new_empty(0, dtype=dtype) if kept is None else kept


def fake_forward(
    x: Any, w_gate: Any, w_up: Any, x_blocks: Any, gate_blocks: Any, up_blocks: Any, x_scale: Any, gate_scale: Any, up_scale: Any,
    dtype: Any, swizzled: Any, keep: Any, constant_weights: Any, variant: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Room for the results of :func:`run_forward`."""
    columns = w_gate.shape[0] // 2 if w_up is None else w_gate.shape[0]
    kept = x.new_empty((x.shape[0], 2 * columns) if keep else (0,), dtype=dtype)
    return x.new_empty((x.shape[0], columns), dtype=dtype), kept


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """x, the weights and both products."""
    ctx.save_for_backward(*inputs[:3], output[1])
    ctx.set_materialize_grads(False)  # nobody asks for gradients of the products


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
    return dx, dgate, dup, *(None,) * 11


forward = Operator("swiglu_forward", run_forward, fake=fake_forward, save=save, gradients=gradients, backward=gate_backward)


def compute(call: SwigluCall, variant: str) -> Results:
    """h by the variant of this name, differentiable where the operands are plain."""
    grad = call.query().grad
    stacked = call.stacked if grad else None  # whose gradient is one product, and one tensor
    operands = (call.x, call.w_gate, call.w_up) if stacked is None else (call.x, stacked)
    swizzled = all(each.swizzled for each in operands if isinstance(each, NVFP4Tensor))
    swizzled = swizzled and any(isinstance(each, NVFP4Tensor) for each in operands)
    parts = [_parts(each, swizzled=swizzled) for each in operands] + [(None, None, None)] * (stacked is not None)
    tensors = [part for kind in zip(*parts, strict=True) for part in kind]
    return (forward(*tensors, call.dtype, swizzled, grad, call.constant_weights, variant, grad=grad)[0],)


def _parts(operand: Operand, *, swizzled: bool) -> tuple[Optional, Optional, Optional]:
    """Values, blocks and scale."""
    if isinstance(operand, torch.Tensor):
        return operand, None, None
    if isinstance(operand, Fp8Tensor):
        return operand.values, None, operand.scale
    plain = operand if swizzled else operand.plain()
    return plain.codes, plain.scales, plain.global_scale
