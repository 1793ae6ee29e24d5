"""The operation ``gla_layer``: its definition, its arguments and their checks.

Users and the layer ``GatedLinearAttention`` call :func:`gla_layer`; the variants take a :class:`GlaLayerCall`. ``reference.py``,
``cost.py``, ``probes.py`` and ``variants`` register their parts with the operation.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from onelaunch import checks, dispatch
from onelaunch.checks import Facts
from onelaunch.errors import ArgumentError, ShapeError
from onelaunch.operation import SUM_OF_PRODUCTS, Query, Shapes, constant, fixed, operation, remembered, state_flags
from onelaunch.operation.autocast import cast, low_dtype, without_autocast
from onelaunch.ops.gla.contract import LARGEST_HEAD, SMALLEST_HEAD, gate_flags


class GlaLayerCall(NamedTuple):
    """Checked arguments of :func:`gla_layer`."""

    x: torch.Tensor
    """Input, ``[B, T, D]``."""
    in_proj_weight: torch.Tensor
    """Packed weight of q, k, v, gate and r, ``[2 H K + 2 H V + R, D]``, dtype of ``x``; with one decay per head R is H."""
    gk_weight: torch.Tensor | None
    """Second factor of the decay's weight, ``[H K, R]``, dtype of ``x``; ``None`` for one decay per head."""
    gk_bias: torch.Tensor
    """Bias of the decay, ``[H K]`` or ``[H]``, dtype of ``x``."""
    norm_weight: torch.Tensor
    """Weight of the norm, ``[V]``, dtype of ``x`` or float32."""
    w_out: torch.Tensor
    """Output weight, ``[D, H V]``, dtype of ``x``."""
    normalizer: float
    """Divisor of the log-decays."""
    eps: float
    """Number that the norm adds to the mean of squares."""
    initial_state: torch.Tensor | None
    """State before the first step, ``[B, H, K, V]`` float32."""
    output_final_state: bool
    conv_weight: torch.Tensor | None
    """Filters of the short convolutions of q, k and v, ``[2 H K + H V, W]``, dtype of ``x``, or ``None``."""
    key: Query
    """Dispatch key of the call: its device, dtype, sizes and flags, by which the dispatcher chooses a variant."""

    def query(self) -> Query:
        """Return the dispatch key."""
        return self.key

    @property
    def sizes(self) -> LayerSizes:
        """Sizes of the layer's parts."""
        *_, heads, keys, values = self.key.sizes
        rank = None if self.gk_weight is None else fixed(self.gk_weight.shape[1])[0]
        return LayerSizes(heads, keys, values, rank, self.normalizer)


class LayerSizes(NamedTuple):
    """Sizes of a layer that its parts depend on. Hashable."""

    heads: int
    keys: int
    """Number of channels of a head of queries, keys and decays, K."""
    values: int
    """Number of channels of a head of values and gates, V."""
    rank: int | None
    """Inner size R of the two factors of the decay's weight; ``None`` for one decay per head, whose weight has no factors."""
    normalizer: float

    @property
    def projected_decays(self) -> int:
        """Number of columns that the projection of x has for decays: R, or H with one decay per head."""
        return self.heads if self.rank is None else self.rank


def bind(
    x: torch.Tensor,
    in_proj_weight: torch.Tensor,
    gk_weight: torch.Tensor | None,
    gk_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    w_out: torch.Tensor,
    *,
    heads: int,
    normalizer: float = 16.0,
    eps: float = 1e-5,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    conv_weight: torch.Tensor | None = None,
) -> GlaLayerCall:
    """Check the arguments and return the call; raises the errors that :func:`gla_layer` lists."""
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1:
        raise ArgumentError(f"heads is {heads!r}; it must be an integer of at least 1.")
    normalizer, eps = constant(normalizer), constant(eps)
    if not _number(normalizer) or normalizer <= 0:
        raise ArgumentError(f"normalizer is {normalizer!r}; it must be a number above 0.")
    if not _number(eps) or eps < 0:
        raise ArgumentError(f"eps is {eps!r}; it must be a number of at least 0.")
    checks.flag("output_final_state", output_final_state)
    key = key_of(
        checks.facts("x", x),
        checks.facts("in_proj_weight", in_proj_weight),
        checks.optional_facts("gk_weight", gk_weight),
        checks.facts("gk_bias", gk_bias),
        checks.facts("norm_weight", norm_weight),
        checks.facts("w_out", w_out),
        checks.optional_facts("initial_state", initial_state),
        checks.optional_facts("conv_weight", conv_weight),
        heads,
        output_final_state,
        torch.is_grad_enabled(),
    )
    weights = (in_proj_weight, gk_weight, gk_bias, norm_weight, w_out)
    return GlaLayerCall(x, *weights, float(normalizer), float(eps), initial_state, output_final_state, conv_weight, key)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@remembered
def key_of(
    x: Facts,
    in_proj_weight: Facts,
    gk_weight: Facts | None,
    gk_bias: Facts,
    norm_weight: Facts,
    w_out: Facts,
    initial_state: Facts | None,
    conv_weight: Facts | None,
    heads: int,
    output_final_state: bool,
    grad_enabled: bool,
) -> Query:
    """Make all checks that need no values, and return the dispatch key; both are cached by these facts.

    K follows from gk_weight, or with one decay per head from in_proj_weight, and V from w_out.
    """
    checks.rank("x", x, "[B, T, D]")
    checks.dtype("x", x, checks.FLOATS)
    batch, length, width = x.shape
    checks.rank("w_out", w_out, "[D, H * V]")
    if gk_weight is None:
        values = _head_size("w_out", w_out, 1, heads, "[D, H * V]")
        keys = _keys_beside_decays_per_head(in_proj_weight, heads, values)
        sized = f"heads = {heads}, in_proj_weight {list(in_proj_weight.shape)} and w_out {list(w_out.shape)}"
        layout, rows, biases = "[2 H K + 2 H V + H, D]", 2 * heads * (keys + values) + heads, (heads,)
        checks.shape("gk_bias", gk_bias, biases, "[H]", f"heads = {heads}")
    else:
        checks.rank("gk_weight", gk_weight, "[H * K, R]")
        keys = _head_size("gk_weight", gk_weight, 0, heads, "[H * K, R]")
        values = _head_size("w_out", w_out, 1, heads, "[D, H * V]")
        if gk_weight.shape[1] == 0:
            raise ShapeError("gk_weight", got=gk_weight.shape, want="[H * K, R] with R of at least 1")
        sized = f"heads = {heads}, gk_weight {list(gk_weight.shape)} and w_out {list(w_out.shape)}"
        layout, rows = "[2 H K + 2 H V + R, D]", 2 * heads * (keys + values) + gk_weight.shape[1]
    checks.rank("in_proj_weight", in_proj_weight, layout)
    checks.shape("in_proj_weight", in_proj_weight, (rows, width), layout, f"x {list(x.shape)}, {sized}")
    checks.shape("w_out", w_out, (width, heads * values), "[D, H * V]", f"x {list(x.shape)}")
    if gk_weight is not None:
        checks.shape("gk_bias", gk_bias, (heads * keys,), "[H * K]", f"gk_weight {list(gk_weight.shape)}")
    checks.shape("norm_weight", norm_weight, (values,), "[V]", sized)
    weights = {"in_proj_weight": in_proj_weight, "gk_weight": gk_weight, "gk_bias": gk_bias, "w_out": w_out}
    if conv_weight is not None:
        _check_filters(conv_weight, heads * (2 * keys + values), initial_state, output_final_state)
        weights["conv_weight"] = conv_weight
    for name, value in weights.items():
        if value is not None:
            checks.dtype(name, value, (x.dtype,), ", the dtype of x")
            checks.device(name, value, x.device)
    allowed = (x.dtype,) if x.dtype is torch.float32 else (x.dtype, torch.float32)
    checks.dtype("norm_weight", norm_weight, allowed, ", the dtype of x or float32")
    checks.device("norm_weight", norm_weight, x.device)
    if initial_state is not None:
        extent = (batch, heads, keys, values)
        checks.shape("initial_state", initial_state, extent, "[B, H, K, V]", f"x {list(x.shape)}, {sized}")
        checks.dtype("initial_state", initial_state, (torch.float32,))
        checks.device("initial_state", initial_state, x.device)
    return Query(
        "gla_layer",
        str(x.device),
        x.dtype,
        fixed(batch, length, width, heads, keys, values, free=2),
        grad_enabled and checks.grad_wanted(x, *weights.values(), norm_weight, initial_state),
        state_flags(packed=False, initial_state=initial_state is not None, final_state=output_final_state)
        + gate_flags(per_head=gk_weight is None, value_gate=False, wide=False)
        + (CONVOLVED,) * (conv_weight is not None)
        + (HIGH_RANK,) * (gk_weight is not None and fixed(gk_weight.shape[1])[0] > COMMON_RANK),
    )


CONVOLVED = "convolved"
"""Flag of the dispatch key of a call whose q, k and v go through short convolutions."""

COMMON_RANK = 16
"""Rank of the decays that layers have by default."""

HIGH_RANK = "high_rank"
"""Flag of the dispatch key of a call whose decays have a higher rank than :data:`COMMON_RANK`; the key does not hold the rank."""


def _keys_beside_decays_per_head(in_proj_weight: Facts, heads: int, values: int) -> int:
    """Return the key channels of a head, from the rows left for q and k; raise :class:`ShapeError` if they do not fit."""
    layout = "[2 H K + 2 H V + H, D]"
    checks.rank("in_proj_weight", in_proj_weight, layout)
    keys, rest = divmod(*fixed(in_proj_weight.shape[0] - 2 * heads * values - heads, 2 * heads))
    if rest or not SMALLEST_HEAD <= keys <= LARGEST_HEAD:
        want = f"{layout} of heads = {heads}, V = {values} and K from {SMALLEST_HEAD} to {LARGEST_HEAD}, as gk_weight is None"
        raise ShapeError("in_proj_weight", got=in_proj_weight.shape, want=want)
    return keys


def _check_filters(conv_weight: Facts, channels: int, initial_state: Facts | None, output_final_state: bool) -> None:
    """Raise unless the filters fit, and there are no states, which would not hold the inputs of the convolutions."""
    layout = "[2 H K + H V, W]"
    checks.rank("conv_weight", conv_weight, layout)
    if conv_weight.shape[0] != channels or conv_weight.shape[1] == 0:
        want = f"{layout} with {channels} filters of at least one step, one for each channel of q, k and v"
        raise ShapeError("conv_weight", got=conv_weight.shape, want=want)
    if initial_state is not None or output_final_state:
        named = "initial_state" if initial_state is not None else "output_final_state"
        raise ArgumentError(
            f"{named} is given beside conv_weight; a state lacks the convolutions' inputs. onelaunch.nn.Cache holds both."
        )


def _head_size(name: str, weight: Facts, dimension: int, heads: int, dimensions: str) -> int:
    """Return the channels of a head; raise :class:`ShapeError` unless they divide evenly and are within the limits of ``gla``."""
    size, rest = divmod(*fixed(weight.shape[dimension], heads))
    if rest or not SMALLEST_HEAD <= size <= LARGEST_HEAD:
        letter = "K" if dimension == 0 else "V"
        want = f"{dimensions} of heads = {heads} with {letter} from {SMALLEST_HEAD} to {LARGEST_HEAD}"
        raise ShapeError(name, got=weight.shape, want=want)
    return size


@operation(
    dimensions=("B", "T", "D", "H", "K", "V"),
    outputs=("out", "final_state"),
    bind=bind,
    planned=True,
    # Options of a case, from which reference.py makes inputs. Then the variants to prefer where nothing was measured.
    options={
        "rank": COMMON_RANK,
        "normalizer": 16.0,
        "eps": 1e-5,
        "norm_weight": "same",
        "initial_state": False,
        "final_state": False,
        "decay_per": "channel",
        "conv_size": None,
    },
    defaults={"cuda": ("packed", "composed"), "cpu": ("composed",)},
    # Float32 results of 16-bit calls that are sums of products of 16-bit numbers; the gate judges them as such.
    stated_errors=dict.fromkeys(("final_state", "grad initial_state"), SUM_OF_PRODUCTS),
    stages=3,  # projections, gla and output_chain round their results one after another, so larger errors are allowed
)
def gla_layer(
    x: torch.Tensor,
    in_proj_weight: torch.Tensor,
    gk_weight: torch.Tensor | None,
    gk_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    w_out: torch.Tensor,
    *,
    heads: int,
    normalizer: float = 16.0,
    eps: float = 1e-5,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    conv_weight: torch.Tensor | None = None,
    variant: str = dispatch.AUTO,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a layer of gated linear attention: projections, low-rank decays, the recurrence, norm, gate, output projection.

        q, k, v, gate, r = x in_proj_weight^T;  g = logsigmoid(r gk_weight^T + gk_bias) / normalizer
        S_t = diag(exp(g_t)) S_{t-1} + k_t^T v_t;  o_t = K^-0.5 q_t S_t                             per head
        out = (o / sqrt(mean(o^2) + eps) * norm_weight * silu(gate)) w_out^T                        norm per head

    This is :class:`onelaunch.nn.GatedLinearAttention` with its default arguments, as a function of its weights. Without
    ``gk_weight`` there is one decay per head, ``g = logsigmoid(r + gk_bias) / normalizer`` with r of H columns, and with
    ``conv_weight`` the layer is :class:`onelaunch.nn.SimpleGatedLinearAttention`: queries, keys and values go through short
    causal convolutions and SiLU, ``silu(sum_j conv_weight_j * q_{t - W + 1 + j})`` per channel, before the recurrence.

    Differentiable in every tensor, through both results. Under ``torch.autocast`` tensors are cast to the autocast dtype,
    ``norm_weight`` to float32; ``initial_state`` is not cast and must be float32.

    Args:
        x: ``[B, T, D]`` float16, bfloat16 or float32.
        in_proj_weight: ``[2 H K + 2 H V + R, D]``, dtype of ``x``: rows as :class:`torch.nn.Linear` holds them, those of
            q, k, v, the gate and r, concatenated. With one decay per head R is H.
        gk_weight: second factor of the decay's weight, ``[H * K, R]``, dtype of ``x``; K from 16 to 512. ``None`` for one decay
            per head.
        gk_bias: bias of the decay, ``[H * K]``, or ``[H]`` with one decay per head, dtype of ``x``.
        norm_weight: ``[V]``, dtype of ``x`` or float32, the same for all heads.
        w_out: ``[D, H * V]``, dtype of ``x``; V from 16 to 512.
        heads: number of heads, H.
        normalizer: divisor of the log-decays, above 0.
        eps: constant that is added to the mean of squares; at least 0.
        initial_state: ``[B, H, K, V]`` float32. Default: zeros.
        output_final_state: whether to return the state after the last step.
        conv_weight: filters of short convolutions over W steps, one for each channel of q, k and v, ``[2 H K + H V, W]``,
            dtype of ``x``. Not together with states. Default: no convolutions.
        variant: a name from ``gla_layer.variants``, or ``"auto"`` for the fastest variant measured near this call.

    Returns:
        ``out [B, T, D]`` in the dtype of ``x``, and the final state ``[B, H, K, V]`` float32, or ``None`` unless
        ``output_final_state``.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: an argument is invalid; the message names it, what it was and
            what it must be.
        UnknownVariant: there is no variant of that name.
        VariantUnsupported: the named variant cannot run this call; the message says why, and which variants can.

    Source: experiment 058; Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training (2024), as
    ``fla.layers.GatedLinearAttention`` has it.
    """
    low = low_dtype(x)
    if low is not None:
        x, in_proj_weight, gk_weight = cast(x, low), cast(in_proj_weight, low), cast(gk_weight, low)
        gk_bias, w_out, norm_weight = cast(gk_bias, low), cast(w_out, low), cast(norm_weight, torch.float32)
        conv_weight = cast(conv_weight, low)
    call = bind(
        x,
        in_proj_weight,
        gk_weight,
        gk_bias,
        norm_weight,
        w_out,
        heads=heads,
        normalizer=normalizer,
        eps=eps,
        initial_state=initial_state,
        output_final_state=output_final_state,
        conv_weight=conv_weight,
    )
    with without_autocast(call.x.device):
        return dispatch.run(gla_layer, call, variant)


@gla_layer.shapes
def result_shapes(call: GlaLayerCall) -> Shapes:
    """Return the shapes of ``out [B, T, D]`` and, if requested, of ``final_state [B, H, K, V]``."""
    heads, keys, values, *_ = call.sizes
    state = (call.x.shape[0], heads, keys, values) if call.output_final_state else None
    return tuple(call.x.shape), state
