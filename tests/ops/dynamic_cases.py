"""Calls of all operations of ``onelaunch.ops`` and all layers with changing sizes, for tests of code that is compiled once.

``test_dynamic_shapes.py`` uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from onelaunch import nn
from onelaunch.ops import Segment, gated_scan, gla, gla_layer, linear_rnn, output_chain, projections, rms_norm, swiglu

SIZES = ((2, 70), (3, 133), (6, 66))
"""Batch sizes and numbers of steps; a chunk of 64 steps does not hold any. No other dimension has the size of a batch here.

``torch.compile`` takes sizes that are equal at the first call for one size.
"""

HEADS, KEYS, VALUES, WIDTH, CHANNELS = 4, 16, 32, 40, 24

SEGMENTS = (
    Segment("q", HEADS, KEYS, "l2norm"),
    Segment("v", HEADS, VALUES, "silu"),
    Segment("g", 8, 1, "logsigmoid", 16.0, bias=True),
)

Tensors = tuple[torch.Tensor, ...]


class Call(NamedTuple):
    """Call of an operation: the function of its tensors, and the tensors for a batch size and a number of steps."""

    run: Callable[..., Any]
    tensors: Callable[[int, int, Callable[..., torch.Tensor]], Tensors]


def _decay(x: torch.Tensor) -> torch.Tensor:
    return -x.abs()


def _gla(batch: int, length: int, draw: Callable[..., torch.Tensor]) -> Tensors:
    q, k, g = (draw(batch, length, HEADS, KEYS) for _ in range(3))
    state = draw(batch, HEADS, KEYS, VALUES, dtype=torch.float32)
    return q, k, draw(batch, length, HEADS, VALUES), _decay(g), state


def _layer(batch: int, length: int, draw: Callable[..., torch.Tensor]) -> Tensors:
    rows, inner = 2 * HEADS * (KEYS + VALUES) + 8, HEADS * VALUES
    weights = (draw(rows, WIDTH) / 8, draw(HEADS * KEYS, 8), draw(HEADS * KEYS), draw(VALUES), draw(WIDTH, inner) / 8)
    return draw(batch, length, WIDTH), *weights


CALLS: dict[str, Call] = {
    "gated_scan": Call(
        lambda v, decay, gate, state, **given: gated_scan(
            v, decay, gate, initial_state=state, output_final_state=True, **given
        ),
        lambda batch, length, draw: (
            draw(batch, length, CHANNELS), _decay(draw(batch, length, CHANNELS)), draw(batch, length, CHANNELS),
            draw(batch, CHANNELS, dtype=torch.float32),
        ),
    ),
    "linear_rnn": Call(
        linear_rnn,
        lambda batch, length, draw: (
            draw(batch, length, WIDTH), draw(WIDTH, CHANNELS) / 8, _decay(draw(batch, length, CHANNELS)),
            draw(batch, length, CHANNELS),
        ),
    ),
    "gla": Call(
        lambda q, k, v, g, state, **given: gla(q, k, v, g, initial_state=state, output_final_state=True, **given), _gla
    ),
    "swiglu": Call(
        swiglu,
        lambda batch, length, draw: (draw(batch, length, WIDTH), draw(CHANNELS, WIDTH) / 8, draw(CHANNELS, WIDTH) / 8),
    ),
    "projections": Call(
        lambda x, weight, bias, **given: projections(x, weight, SEGMENTS, bias=bias, **given),
        lambda batch, length, draw: (
            draw(batch, length, WIDTH), draw(sum(each.width for each in SEGMENTS), WIDTH) / 8, draw(8),
        ),
    ),
    "output_chain": Call(
        output_chain,
        lambda batch, length, draw: (
            draw(batch, length, HEADS, VALUES), draw(batch, length, HEADS, VALUES), draw(VALUES),
            draw(WIDTH, HEADS * VALUES) / 8,
        ),
    ),
    "rms_norm": Call(
        rms_norm,
        lambda batch, length, draw: (draw(batch, length, WIDTH), draw(WIDTH), draw(batch, length, WIDTH)),
    ),
    "gla_layer": Call(lambda *tensors, **given: gla_layer(*tensors, heads=HEADS, **given)[0], _layer),
}  # fmt: skip
"""Calls by the operation's name."""

LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "SwiGLU": lambda: nn.SwiGLU(WIDTH, intermediate_size=CHANNELS),
    "LinearRNN": lambda: nn.LinearRNN(WIDTH),
    "GatedLinearAttention": lambda: nn.GatedLinearAttention(hidden_size=64, num_heads=HEADS, expand_k=1.0),
    "SimpleGatedLinearAttention": lambda: nn.SimpleGatedLinearAttention(hidden_size=64, num_heads=HEADS),
}
"""Layers by name."""


def results_of(outputs: Any) -> list[torch.Tensor]:
    """Return the results of a call as a list of tensors, without those that are ``None``."""
    return [each for each in (outputs if isinstance(outputs, (tuple, list)) else (outputs,)) if isinstance(each, torch.Tensor)]


def with_gradients(run: Callable[..., Any], tensors: Tensors) -> list[torch.Tensor]:
    """Return the results of a call and the gradients of a weighted sum of them with respect to all tensors."""
    leaves = [each.detach().clone().requires_grad_() for each in tensors]
    outputs = results_of(run(*leaves))
    total = sum(
        (each.float() * torch.linspace(-1, 1, each.numel(), device=each.device).view(each.shape)).sum() for each in outputs
    )
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [*(each.detach() for each in outputs), *(each for each in found if each is not None)]


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor], bound: float) -> None:
    """Require as many tensors of equal shapes, and bound the norm of each error relative to that of the expected values."""
    assert [each.shape for each in found] == [each.shape for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other.double()).norm() <= bound * other.double().norm()
