"""The layer as one autograd function, whose backward pass writes gradients where the matrix products read them.

Queries, keys, values and gates have no activation. So the gradient of the packed projection, a matrix dz with one column per
row of ``in_proj_weight``, is the concatenation of their gradients. If operations are called one by one, these gradients are
separate tensors, and a pass over memory concatenates them. Here the kernels of ``gla`` and ``output_chain`` write into columns
of dz, and so does the launch that computes the gradient of r, the low-rank factor that log-decays are projected from, and those
of the weight and the bias of that projection (PyTorch's products where :func:`takes_low_rank` says no).
Log-decays are logsigmoid of that projection, divided by ``normalizer``. The gradient before logsigmoid, ``dgk``, is computed in
the recurrence's registers on Hopper, elsewhere by a launch of its own.

dz is not visible outside: it is allocated and consumed within one call of the backward pass. The backward pass never writes to
saved tensors, so it may run more than once. The variants ``packed`` and ``packed_states`` (``variants/composed.py``) call
:func:`compute`. They ask :func:`why_not` whether they can, and ``packed_states`` asks :func:`own_kernel` for the recurrence.
The variant ``one_launch``, which has no backward pass, calls the operator ``step``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch

from onelaunch import dispatch
from onelaunch.launch import recomputed
from onelaunch.launch.operator import Operator
from onelaunch.operation import Query, SymbolicSizes, find_operation
from onelaunch.ops.gla.padding import STEP
from onelaunch.ops.gla_layer.composition import Results, decay_segments_of, segments_of
from onelaunch.ops.gla_layer.contract import CONVOLVED, GlaLayerCall, LayerSizes
from onelaunch.ops.output_chain import autograd as chain
from onelaunch.ops.projections import autograd as way_in
from onelaunch.ops.projections.configure_low_rank import takes_low_rank
from onelaunch.ops.projections.layout import ALIGNMENT, Layout, layout_of

_KEEP = True
"""Flag of launches that are followed by a backward pass and must save what it needs."""


class Kernels(NamedTuple):
    """Names of the variants whose launches make up the layer, in addition to PyTorch's product of x with ``in_proj_weight``."""

    decays: str
    """Variant of ``projections`` for the log-decays."""
    recurrence: str
    """Variant of ``gla``."""
    way_out: str
    """Variant of ``output_chain``."""


_OWN = (
    ("wide_activated", "epilogue", "epilogue_persistent", "cluster", "cluster_weight"),
    ("hopper", "fused"),
    ("norm_gate", "prologue"),
)
"""Names of the variants that each part can run, in the order of :class:`Kernels`; see :func:`own_kernel` for the choice."""


def parts_of(query: Query, rank: int, normalizer: float) -> tuple[Query, Query, Query]:
    """Return the dispatch keys of the parts' calls, in the order of :class:`Kernels`."""
    batch, length, width, heads, keys, values = query.sizes
    layout = layout_of(decay_segments_of(LayerSizes(heads, keys, values, rank, normalizer)))
    given = (query.device, query.dtype)
    return (
        Query("projections", *given, (batch, length, rank, heads, keys, keys), query.grad, (layout.code,)),
        Query("gla", *given, (batch, length, heads, keys, values), query.grad, query.flags),
        Query("output_chain", *given, (batch, length, heads, values, width), query.grad, ("gate", "norm_weight")),
    )


def own_kernel(query: Query, names: Sequence[str]) -> str | None:
    """Return the variant that the dispatcher chooses for a part if ``names`` has it, else the first of these that can run."""
    chosen = dispatch.choose(query).name
    able = [name for name in names if _why_not_part(name, query) is None]
    return chosen if chosen in able else next(iter(able), None)


def _why_not_part(name: str, query: Query) -> str | None:
    """Return why the launches of a variant cannot run a part of the layer, or ``None``.

    The variant ``hopper`` copies heads that TMA cannot address before it launches; the launches themselves, which the layer
    calls, do not.
    """
    if name == "hopper" and any(size % STEP for size in query.sizes[3:]):
        return f"copies heads whose sizes are no multiples of {STEP}"
    return find_operation(query.operation).get(name).why_not(query)


def why_not(query: Query) -> str | None:
    """Return why a layer of this key cannot run as one function, or ``None``.

    It needs a backward pass, decays per channel, no short convolutions, columns that kernels can address, and kernels of ours for
    every part.
    """
    if not query.grad:
        return "differs from composed in the backward pass alone, and there is none"
    if "scalar_decay" in query.flags or CONVOLVED in query.flags:
        return "needs a decay per channel and no short convolutions: its backward pass has no other gradients"
    *_, heads, keys, values = query.sizes
    if heads * keys % ALIGNMENT or heads * values % ALIGNMENT:
        return f"needs H * K and H * V in multiples of {ALIGNMENT}: so columns of all gradients begin where they can be addressed"
    # The key holds neither rank nor normalizer, and whether some kernel can run depends on neither: any valid ones will do.
    for part, names in zip(parts_of(query, ALIGNMENT, 1.0), _OWN, strict=True):
        if own_kernel(part, names) is None:
            reasons = [f"{name} {_why_not_part(name, part)}" for name in names]
            return f"needs kernels of ours for {part.operation}: {'; '.join(reasons)}"
    return None


@functools.lru_cache(maxsize=4096)
def _kernels_for(operation: str, device: str, dtype: torch.dtype, *rest: Any) -> str:
    """Return :class:`Kernels` as one string, its names separated by commas, for a layer that :func:`why_not` accepts.

    ``rest`` is the rest of the layer's dispatch key (sizes, grad, flags), then its rank and normalizer.
    """
    *key, rank, normalizer = rest
    parts = parts_of(Query(operation, device, dtype, *key), rank, normalizer)
    return ",".join([own_kernel(part, names) or "" for part, names in zip(parts, _OWN, strict=True)])


def _constant_kernels(operation: str, device: str, dtype: torch.dtype, *rest: Any) -> str:
    """Return :func:`_kernels_for` for the noted sizes, and where it holds; ``torch.compile`` treats the result as a constant.

    The arguments are those of :func:`_kernels_for` without the sizes.
    """
    return dispatch.decided(lambda sizes: _kernels_for(operation, device, dtype, sizes, *rest))


vars(_constant_kernels)["_dynamo_marked_constant"] = True  # as torch.compiler.assume_constant_result, without its slow import


class Plan(NamedTuple):
    """Layouts of a layer's packed tensors, and the names of its kernels."""

    sizes: LayerSizes
    layout: Layout
    """Layout of the projections of x; the packed result and dz have the same columns."""
    decays: Layout
    """Layout of the packed log-decays, a single segment."""
    kernels: Kernels

    @property
    def scale(self) -> float:
        """Scale of the queries, K^-0.5."""
        return self.sizes.keys**-0.5


@functools.lru_cache(maxsize=1024)
def _plan_for(sizes: LayerSizes, kernels: str) -> Plan:
    """Return the plan of a layer with kernels of these names, given as one string."""
    return Plan(sizes, layout_of(segments_of(sizes)), layout_of(decay_segments_of(sizes)), Kernels(*kernels.split(",")))


def _plan_of(gk_weight: torch.Tensor, w_out: torch.Tensor, heads: int, normalizer: float, kernels: str) -> Plan:
    """Return the plan of a call, from its weights; as integers, since the sizes of a tracer have no hash."""
    keys, rank, values = (int(size) for size in (*gk_weight.shape, w_out.shape[1]))
    return _plan_for(LayerSizes(heads, keys // heads, values // heads, rank, normalizer), kernels)


def run_forward(
    x: torch.Tensor,
    in_proj_weight: torch.Tensor,
    gk_weight: torch.Tensor,
    gk_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    w_out: torch.Tensor,
    initial: Optional[torch.Tensor],  # noqa: UP045 - as PyTorch reads schemas
    heads: int,
    normalizer: float,
    eps: float,
    want_final: bool,
    keep_states: bool,
    keep_decays: bool,
    kernels: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute ``out [B, T, D]`` and the final state; return them and the tensors to save for the backward pass.

    Saved are the packed projections of x (y) ``[B, T, pitch]``, with ``keep_decays`` packed log-decays (gk) ``[B, T, pitch]``,
    ``o [B, T, H, V]``, the norms' ``rstd [B T, H]`` and, with ``keep_states``, a state per chunk ``[slots, H, V, K]``. A result
    that is not wanted has no elements. ``kernels`` is the result of :func:`_kernels_for`.
    """
    from onelaunch.ops.gla import launch, launch_hopper
    from onelaunch.ops.output_chain import launch as chain_launch

    plan = _plan_of(gk_weight, w_out, heads, normalizer, kernels)
    rows = x.reshape(-1, x.shape[-1])
    y = rows.new_empty(*x.shape[:-1], plan.layout.pitch)
    torch.mm(rows, in_proj_weight.mT, out=y.view(-1, plan.layout.pitch)[:, : plan.layout.rows])
    q, k, v, gate, low_rank = plan.layout.cut(y)
    gk = _log_decays(plan, low_rank, gk_weight, gk_bias)
    (g,) = plan.decays.cut(gk)
    call = launch.Attention.of(q, k, v, g, initial, None, plan.scale)
    states: list[torch.Tensor] = []
    if plan.kernels.recurrence == "hopper":
        states, final = launch_hopper.empty_states(call, int(keep_states)), launch.empty_final(call, wanted=want_final)
        o = launch_hopper.forward(call, states, final=final if want_final else None)
    else:
        o, final = launch.forward(call, want_final=want_final)
    given = chain_launch.Operands.of(o, gate, norm_weight, activated=False)
    out, rstd, _ = chain.launches[plan.kernels.way_out](given, w_out, None, eps, _KEEP)
    assert rstd is not None  # noqa: S101 - _KEEP is set
    gk = gk if keep_decays else x.new_empty(0)
    return torch.ops.aten._unsafe_view.default(out, x.shape), final, y, gk, o, rstd, states[0] if states else x.new_empty(0)  # noqa: SLF001 - no view


def _log_decays(plan: Plan, low_rank: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the packed log-decays (gk) ``[B, T, pitch]`` from the factor r ``[B, T, 1, rank]``, the same bits each time."""
    wanted = way_in.Wanted(plan.decays, eps=0.0, keep=_KEEP)  # eps has no effect: no segment has a norm
    packed = way_in.launches[plan.kernels.decays](low_rank.reshape(-1, plan.sizes.projected_decays), weight, bias, wanted)
    return packed.y.view(*low_rank.shape[:2], plan.decays.pitch)


def run_backward(
    dout: torch.Tensor,
    dfinal: Optional[torch.Tensor],  # noqa: UP045
    x: torch.Tensor,
    in_proj_weight: torch.Tensor,
    gk_weight: torch.Tensor,
    gk_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    w_out: torch.Tensor,
    initial: Optional[torch.Tensor],  # noqa: UP045
    y: torch.Tensor,
    gk: torch.Tensor,
    o: torch.Tensor,
    rstd: torch.Tensor,
    states: torch.Tensor,
    heads: int,
    normalizer: float,
    kernels: str,
    wants: Sequence[bool],
) -> list[torch.Tensor]:
    """Compute the gradients of the seven tensors that :func:`run_forward` takes: in their order those that ``wants`` asks for.

    ``y`` to ``states`` are the tensors that :func:`run_forward` returned.
    """
    from onelaunch.ops.output_chain import launch as chain_launch

    plan = _plan_of(gk_weight, w_out, heads, normalizer, kernels)
    wants_x, wants_packed, wants_gk, wants_bias, wants_norm, wants_out, wants_initial = wants
    # Of x, in_proj_weight, gk_weight, gk_bias, norm_weight, w_out, initial
    found: list[torch.Tensor | None] = [None] * len(wants)
    dz = x.new_empty(y.shape)
    *_, gate, _ = plan.layout.cut(y)
    *_, dgate, _ = plan.layout.cut(dz)
    # Large tensors are deleted as soon as they were read, which lowers the peak of memory.
    dout, inner = dout.reshape(-1, w_out.shape[0]), heads * plan.sizes.values
    inside = wants_x or wants_packed or wants_gk or wants_bias or wants_initial
    da = dout @ w_out if inside or wants_norm else None
    given = chain_launch.Operands.of(o, gate, norm_weight, activated=False)
    a, do, _, dnorm = chain_launch.norm_gate_gradients(
        da, given, rstd, want_a=wants_out, into=dgate.flatten(0, 1).view(-1, inner)
    )
    del da
    found[5] = None if a is None else dout.mT @ a
    found[4] = dnorm if wants_norm else None
    del a
    if not inside or do is None:
        return _wanted(found, wants)
    gk = gk if gk.numel() else _log_decays(plan, plan.layout.cut(y)[-1], gk_weight, gk_bias)
    dgk, sums, dinitial = _recurrence_gradients(plan, do.view(o.shape), dfinal, y, gk, initial, states, dz)
    del do, gk
    columns, dz = plan.layout.rows, dz.view(-1, plan.layout.pitch)
    of_low_rank = slice(columns - plan.sizes.projected_decays, columns)
    low_rank = y.view(-1, plan.layout.pitch)[:, of_low_rank]
    wants_decays = (wants_x or wants_packed, wants_gk, wants_bias)
    found[2:4] = _decay_gradients(dgk, sums, low_rank, gk_weight, wants_decays, dz[:, of_low_rank])
    del dgk
    dz = dz[:, :columns]
    if wants_x:
        found[0] = (dz @ in_proj_weight).view(x.shape)
    if wants_packed:
        found[1] = dz.mT @ x.reshape(-1, x.shape[-1])
    if wants_initial:
        found[6] = dinitial
    return _wanted(found, wants)


def _wanted(found: Sequence[torch.Tensor | None], wants: Sequence[bool]) -> list[torch.Tensor]:
    """Return the gradients that are wanted, in their order."""
    return [each for each, wanted in zip(found, wants, strict=True) if wanted and each is not None]


def _decay_gradients(
    dgk: torch.Tensor,
    sums: torch.Tensor | None,
    low_rank: torch.Tensor,
    weight: torch.Tensor,
    wants: tuple[bool, bool, bool],
    into: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Write the gradient of r ``[B T, rank]`` into columns of dz; return those of the decays' weight and bias.

    ``wants`` says for each of the three whether it is wanted. ``sums`` are those of the columns of dgk, in float32, if they were
    computed with it. The launch, and PyTorch's products where there is none, are those of the backward pass of ``projections``,
    so that gradients are equal to the last bit.
    """
    from onelaunch.ops.projections import launch_low_rank

    wants_low_rank, wants_weight, wants_bias = wants
    if not any(wants):
        return None, None
    if takes_low_rank(dgk.device, dgk.dtype, int(weight.shape[1]), int(weight.shape[0])):
        _, dweight, dbias = launch_low_rank.low_rank_gradients(dgk, low_rank, weight, wants, into)
        return dweight, dbias
    if wants_low_rank:
        torch.mm(dgk, weight, out=into)
    dbias = None
    if wants_bias:
        dbias = dgk.sum(0) if sums is None else sums.to(dgk.dtype)
    return dgk.mT @ low_rank if wants_weight else None, dbias


def _recurrence_gradients(
    plan: Plan,
    do: torch.Tensor,
    dfinal: torch.Tensor | None,
    y: torch.Tensor,
    gk: torch.Tensor,
    initial: torch.Tensor | None,
    states: torch.Tensor,
    dz: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Write the gradients of q, k and v into columns of dz.

    Returns the gradient of the log-decays before their activation ``[B T, H * K]`` (dgk); the sums of its columns in float32, if
    it was not computed with the recurrence; and the gradient of the initial state.
    """
    from onelaunch.ops.gla import launch, launch_hopper
    from onelaunch.ops.projections import launch as projections_launch

    q, k, v, *_ = plan.layout.cut(y)
    into = launch.Into(*plan.layout.cut(dz)[:3])
    (g,) = plan.decays.cut(gk)
    call = launch.Attention.of(q, k, v, g, initial, None, plan.scale)
    width = plan.decays.rows
    if plan.kernels.recurrence == "hopper":
        kept = [states] if states.numel() else None
        found = launch_hopper.backward(call, do, into, plan.sizes.normalizer, kept, dfinal=dfinal)
        return found.g.flatten(0, 1).view(-1, width), None, found.initial
    found = launch.backward(call, do, dfinal, into)
    nothing, dg = gk.new_empty(0), found.g.view(-1, width)  # logsigmoid needs neither rstd nor a saved pre-activation
    made, sums = projections_launch.activation_gradients(
        [dg], gk.view(-1, plan.decays.pitch), nothing, nothing, plan.decays, sums=True
    )
    return made[:, :width], sums, found.initial


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Save all input tensors and those that :func:`run_forward` returns for it; for x what makes it again, if it can be."""
    x, *tensors, heads, normalizer, _, ctx.want_final, _, _, kernels = inputs
    ctx.x_again, sources = recomputed.instead_of(x)
    ctx.save_for_backward(*tensors, *output[2:], *sources)
    ctx.numbers = (heads, normalizer, kernels)
    ctx.set_materialize_grads(False)


_SAVED = 11
"""Number of saved tensors beside x: six other inputs, and five results of :func:`run_forward`."""

_WANTS: dict[tuple[bool, ...], tuple[bool, ...]] = {}
"""Flags for the gradients of the tensors, by themselves: one object for equal flags, which replays compare by identity."""


def gradients(ctx: Any, backward: Any, dout: torch.Tensor | None, dfinal: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return the gradient of every input of :func:`run_forward`."""
    saved = ctx.saved_tensors  # once: each access unpacks them
    asked = ctx.needs_input_grad[:7]
    wants = _WANTS.setdefault(asked, asked)
    x = recomputed.once_more(ctx.x_again, saved[_SAVED:])
    dout = torch.zeros_like(x) if dout is None else dout
    found = backward(dout, dfinal if ctx.want_final else None, x, *saved[:_SAVED], *ctx.numbers, wants)
    given = iter(found)
    return *[next(given) if wanted else None for wanted in wants], *(None,) * 7


def fake_forward(
    x: torch.Tensor,
    in_proj_weight: torch.Tensor,
    gk_weight: torch.Tensor,
    gk_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    w_out: torch.Tensor,
    initial: torch.Tensor | None,
    heads: int,
    normalizer: float,
    eps: float,
    want_final: bool,
    keep_states: bool,
    keep_decays: bool,
    kernels: str,
) -> tuple[torch.Tensor, ...]:
    """Return empty tensors for the results of :func:`run_forward`, whose sizes B and T may be symbolic."""
    from onelaunch.ops.gla import launch, launch_hopper

    plan = _plan_of(gk_weight, w_out, heads, normalizer, kernels)
    leading = x.shape[:-1]
    y, gk = x.new_empty(*leading, plan.layout.pitch), x.new_empty(*leading, plan.decays.pitch)
    (q, k, v, *_), (g,) = plan.layout.cut(y), plan.decays.cut(gk)
    call = launch.Attention.of(q, k, v, g, initial, None, plan.scale)
    kept = launch_hopper.empty_states(call, int(keep_states and plan.kernels.recurrence == "hopper")) or [x.new_empty(0)]
    final, rstd = launch.empty_final(call, wanted=want_final), x.new_empty(math.prod(leading), heads, dtype=torch.float32)
    gk = gk if keep_decays else x.new_empty(0)
    return x.new_empty(x.shape), final, y, gk, launch.empty_output(call), rstd, kept[0]


def fake_backward(
    dout: torch.Tensor,
    dfinal: torch.Tensor | None,
    x: torch.Tensor,
    in_proj_weight: torch.Tensor,
    gk_weight: torch.Tensor,
    gk_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    w_out: torch.Tensor,
    initial: torch.Tensor | None,
    y: torch.Tensor,
    gk: torch.Tensor,
    o: torch.Tensor,
    rstd: torch.Tensor,
    states: torch.Tensor,
    heads: int,
    normalizer: float,
    kernels: str,
    wants: Sequence[bool],
) -> list[torch.Tensor]:
    """Return empty tensors for the results of :func:`run_backward`."""
    tensors = (x, in_proj_weight, gk_weight, gk_bias, norm_weight, w_out, initial)
    return _wanted([None if tensor is None else tensor.new_empty(tensor.shape) for tensor in tensors], wants)


backward = Operator("gla_layer_backward", run_backward, fake=fake_backward)
forward = Operator(
    "gla_layer_forward", run_forward, fake=fake_forward, save=save, gradients=gradients, backward=backward, outputs=2
)


def compute(call: GlaLayerCall, *, keep_states: bool = False) -> Results:
    """Compute the layer of a call that :func:`why_not` accepts; ``keep_states`` saves the states for the backward pass."""
    key, sizes = call.query(), call.sizes
    keep_decays = False  # a comparison would be a guard of compiled code
    if torch.compiler.is_compiling() or type(key.sizes) is SymbolicSizes:
        dispatch.note_sizes(key.sizes)
        decided = _constant_kernels(*key[:3], *key[4:], sizes.rank, sizes.normalizer)
        kernels = dispatch.within(key.sizes, decided)
    else:
        kernels = _kernels_for(*key, sizes.rank, sizes.normalizer)
        keep_decays = key.sizes[0] * key.sizes[1] * sizes.heads * sizes.keys * key.dtype.itemsize < recomputed.LEAST_BYTES
    out, final, *_ = forward(
        call.x, call.in_proj_weight, call.gk_weight, call.gk_bias, call.norm_weight, call.w_out, call.initial_state,
        sizes.heads, sizes.normalizer, call.eps, call.output_final_state, keep_states, keep_decays,
        kernels, grad=True,
    )  # fmt: skip
    return out, final if call.output_final_state else None


def run_step(
    x: torch.Tensor,
    in_proj_weight: torch.Tensor,
    gk_weight: Optional[torch.Tensor],  # noqa: UP045
    gk_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    w_out: torch.Tensor,
    initial: Optional[torch.Tensor],  # noqa: UP045
    heads: int,
    normalizer: float,
    eps: float,
    want_final: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``out [B, T, D]`` and the final state in one launch; a state that is not wanted has no elements."""
    from onelaunch.ops.gla_layer import launch_step

    weights = (in_proj_weight, gk_weight, gk_bias, norm_weight, w_out)
    return launch_step.run(launch_step.StepInputs(x, *weights, initial, heads, normalizer, eps, want_final))


def fake_step(
    x: torch.Tensor,
    in_proj_weight: torch.Tensor,
    gk_weight: torch.Tensor | None,
    gk_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    w_out: torch.Tensor,
    initial: torch.Tensor | None,
    heads: int,
    normalizer: float,
    eps: float,
    want_final: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty tensors for the results of :func:`run_step`, whose sizes B and T may be symbolic."""
    values = w_out.shape[1] // heads
    ranks = heads if gk_weight is None else gk_weight.shape[1]
    keys = (in_proj_weight.shape[0] - ranks) // (2 * heads) - values
    state = (x.shape[0], heads, keys, values) if want_final else (0,)
    return x.new_empty(x.shape), x.new_empty(state, dtype=torch.float32)


step = Operator("gla_layer_step", run_step, fake=fake_step)
