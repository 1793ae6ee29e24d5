"""The operation ``gla``: its formula, arguments, checks and errors. Functions with fla's names are in functions.py.

Users, the gated layers of ``onelaunch.nn`` and ``gla_layer`` call :func:`gla`. A call has two steps: :func:`bind` checks the
arguments and makes a :class:`GlaCall`, which :func:`run` computes by a variant. ``functions.py`` calls
:func:`bind_under_autocast` and :func:`run` too. The gated layers and ``gla_layer`` take the limits of head sizes from here.
``reference.py``, ``cost.py``, ``probes.py``, ``variants`` and the ablations register their parts with the operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from onelaunch import checks, dispatch
from onelaunch.checks import Facts
from onelaunch.errors import ArgumentError, ShapeError, ValueRangeError
from onelaunch.launch.tape import check_always
from onelaunch.launch.tf32 import allows_tf32
from onelaunch.operation import SUM_OF_PRODUCTS, Query, Shapes, constant, fixed, operation, remembered, state_flags
from onelaunch.operation.autocast import autocast, low_dtype, without_autocast
from onelaunch.ops.gla.heads import Heads, check_heads, one_divides
from onelaunch.ops.gla.slices import described, gla_across
from onelaunch.parallel import Described, entered, offsets_of

SMALLEST_HEAD, LARGEST_HEAD = 16, 512
"""Sizes that K and V may have.

The smallest is the width of a matrix instruction, the largest is set by what the chip can hold of a state.
"""

FUSED_RECURRENT = "fused_recurrent"
"""Variant that takes :attr:`GlaCall.reverse`; for all others time must be flipped."""

PER_CHANNEL, PER_HEAD = "[B, T, H, K]", "[B, T, H]"
"""Layouts that ``g`` may have.

A decay for every key channel (GLA), or one for a whole head (RetNet, lightning attention, SSD).
"""


class GlaCall(NamedTuple):
    """Checked arguments of :func:`gla`. Tensors have any strides.

    H is the number of heads of the output. Tensors may have fewer, Hq, Hk, Hv, Hg and Hs: see heads.py.
    """

    q: torch.Tensor
    """Queries, ``[B, T, Hq, K]``."""
    k: torch.Tensor
    """Keys, ``[B, T, Hk, K]``, dtype of ``q``."""
    v: torch.Tensor
    """Values, ``[B, T, Hv, V]``, dtype of ``q``."""
    g: torch.Tensor
    """Log-decay, ``[B, T, Hg, K]`` or ``[B, T, Hg]``, float32 or the dtype of ``q``. Strides may be 0 (expanded)."""
    gv: torch.Tensor | None
    """Log-decay of value channels, ``[B, T, Hg, V]``, float32 or the dtype of ``q``, or ``None``."""
    scale: float
    initial_state: torch.Tensor | None
    """Initial state, ``[N, Hs, K, V]`` float32; a transposed view where the caller keeps values first."""
    cu_seqlens: torch.Tensor | None
    """Offsets of packed sequences, ``[N + 1]`` int32 or int64."""
    output_final_state: bool
    state_v_first: bool
    """Flag that the caller's states are ``[N, H, V, K]``. Variants return ``[N, H, K, V]``, which :func:`run` transposes."""
    key: Query
    """Dispatch key of the call: its device, dtype, sizes and flags, by which the dispatcher chooses a variant."""
    reverse: bool = False
    """Flag that every sequence is gone through from its end to its start, which only :data:`FUSED_RECURRENT` can do."""

    def query(self) -> Query:
        """Return the dispatch key."""
        return self.key

    @property
    def sequences(self) -> int:
        """Number N of sequences packed into the batch, or of batch entries."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def per_head(self) -> bool:
        """Flag that a head has one decay for all its channels."""
        return self.g.dim() == 3

    @property
    def heads(self) -> Heads:
        """Numbers of heads of the tensors and of the final state."""
        counts = self.q.shape[2], self.k.shape[2], self.v.shape[2], self.g.shape[2]
        return Heads(*counts, max(counts) if self.initial_state is None else self.initial_state.shape[1])


def gate_flags(per_head: bool, value_gate: bool, wide: bool) -> tuple[str, ...]:
    """Return the dispatch key's flags about decays; none for a decay per key channel in the dtype of q and no value gate.

    ``reference.py`` calls it for cases, and ``gla_layer`` for its own key.

    Args:
        per_head: Flag that a head has one decay for all channels.
        value_gate: Flag that value channels decay too.
        wide: Flag that log-decays are float32 next to 16-bit inputs.
    """
    return ("scalar_decay",) * per_head + ("value_gate",) * value_gate + ("float32_decay",) * wide


def tf32_flags(dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
    """Return the dispatch key's flag that PyTorch's settings let float32 products use TF32; none on a CPU and for other dtypes.

    ``reference.py`` calls it for cases.
    """
    return ("tf32",) if dtype is torch.float32 and device.type == "cuda" and _tf32_is_allowed() else ()


def _tf32_is_allowed() -> bool:
    """Return whether TF32 is allowed now. ``torch.compile`` takes it as a constant, and guards the setting itself."""
    return allows_tf32()


# As torch.compiler.assume_constant_result, without its slow import: Dynamo cannot trace PyTorch's reader of the setting.
vars(_tf32_is_allowed)["_dynamo_marked_constant"] = True


def bind(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    *,
    gv: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    gate: str = "g",
    layouts: tuple[str, ...] = (PER_CHANNEL, PER_HEAD),
    sliced: bool = False,
) -> GlaCall:
    """Return the checked call, from the arguments of :func:`gla`.

    ``gate`` is the caller's name of ``g``, for messages; ``layouts`` are those that ``g`` may have. ``sliced`` says that the
    offsets are those of all ranks' steps.

    Raises:
        OneLaunchError: As in :func:`gla`.
    """
    checks.flag("output_final_state", output_final_state)
    checks.flag("state_v_first", state_v_first)
    key = _key(
        checks.facts("q", q),
        checks.facts("k", k),
        checks.facts("v", v),
        checks.optional_facts(gate, g),
        checks.optional_facts("gv", gv),
        checks.optional_facts("initial_state", initial_state),
        checks.optional_facts("cu_seqlens", cu_seqlens),
        output_final_state,
        state_v_first,
        torch.is_grad_enabled(),
        gate,
        layouts,
        tf32_flags(q.dtype, q.device),
    )
    number = _scale(scale, key.sizes[3])
    if cu_seqlens is not None and not sliced:
        check_always(checks.offsets, cu_seqlens, q.shape[1])
    if g is None:  # one zero for all steps and heads
        heads = max(k.shape[2], v.shape[2]) if gv is None else gv.shape[2]
        g = torch.zeros((), dtype=torch.float32, device=q.device).expand(*q.shape[:2], heads)
    else:
        _at_most_zero(gate, g)
    if gv is not None:
        _at_most_zero("gv", gv)
    if state_v_first and initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)
    return GlaCall(q, k, v, g, gv, number, initial_state, cu_seqlens, output_final_state, state_v_first, key)


@remembered
def _key(
    q: Facts,
    k: Facts,
    v: Facts,
    g: Facts | None,
    gv: Facts | None,
    initial_state: Facts | None,
    cu_seqlens: Facts | None,
    output_final_state: bool,
    state_v_first: bool,
    grad_enabled: bool,
    gate: str,
    layouts: tuple[str, ...],
    precision: tuple[str, ...],
) -> Query:
    """Run all checks that need no values, and return the dispatch key; both are cached by these facts."""
    checks.rank("q", q, "[B, T, H, K]")
    checks.dtype("q", q, checks.FLOATS)
    batch, length, _, keys = q.shape
    _per_step("k", k, q, keys, "[B, T, H, K]")
    checks.rank("v", v, "[B, T, H, V]")
    values = v.shape[3]
    _per_step("v", v, q, values, "[B, T, H, V]")
    for name, value in (("k", k), ("v", v)):
        checks.dtype(name, value, (q.dtype,), ", the dtype of q")
    check_head_sizes(q.shape, v.shape)
    for name, value, channels, known in ((gate, g, keys, layouts), ("gv", gv, values, ("[B, T, H, V]",))):
        if value is not None:
            _per_step(name, value, q, channels, *known)
            checks.dtype(name, value, tuple(dict.fromkeys((q.dtype, torch.float32))))
    heads = check_heads(q, k, v, {gate: g, "gv": gv}, initial_state)
    sequences = batch
    if cu_seqlens is not None:
        checks.device("cu_seqlens", cu_seqlens, q.device)
        checks.packing(cu_seqlens, batch)
        sequences = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        dimensions = "[N, H, V, K]" if state_v_first else "[N, H, K, V]"
        ends = (values, keys) if state_v_first else (keys, values)
        checks.rank("initial_state", initial_state, dimensions)
        extent = (sequences, heads.state, *ends)
        if tuple(initial_state.shape) != extent:  # else the message would specialize a traced N
            because = f"{sequences} sequences, q {list(q.shape)} and v {list(v.shape)}"
            if heads.g < heads.output:
                because += f"; {heads.g} heads are allowed too"
            checks.shape("initial_state", initial_state, extent, dimensions, because)
        checks.dtype("initial_state", initial_state, (torch.float32,))
        checks.device("initial_state", initial_state, q.device)
    return Query(
        "gla",
        str(q.device),
        q.dtype,
        fixed(batch, length, heads.output, keys, values, free=2),
        grad_enabled and checks.grad_wanted(q, k, v, g, gv, initial_state),
        state_flags(cu_seqlens is not None, initial_state is not None, output_final_state)
        + gate_flags(g is None or len(g.shape) == 3, gv is not None, g is not None and g.dtype != q.dtype)
        + heads.flags()
        + precision,
    )


def _per_step(name: str, value: Facts, q: Facts, channels: int, *layouts: str) -> None:
    """Raise unless a tensor with a value for every step and head has one of the layouts, on the device of q.

    Its last dimension, where the layout has one for channels, must be ``channels``. Its heads are checked by ``check_heads``.
    """
    known = {layout.count(",") + 1: layout for layout in layouts}
    rank = len(value.shape)
    if rank not in known:
        ranks = " or ".join(str(each) for each in known)
        raise ShapeError(name, got=value.shape, want=f"{' or '.join(layouts)}, a tensor of {ranks} dimensions")
    own, queries = fixed(value.shape[2], q.shape[2])
    heads = own if one_divides(own, queries) else queries
    want = (*q.shape[:2], heads, channels)[:rank]
    if (*value.shape[:2], heads, *value.shape[3:]) != want:
        raise ShapeError(name, got=value.shape, want=f"{known[rank]} = {list(want)} to match q {list(q.shape)}")
    checks.device(name, value, q.device)


def check_head_sizes(q: Sequence[int], v: Sequence[int]) -> None:
    """Raise unless K and V, the last dimensions of the shapes of q and v, are sizes that heads may have.

    ``reference.py`` calls it for cases.
    """
    for name, shape, dimension in (("q", q, "K"), ("v", v, "V")):
        if SMALLEST_HEAD <= shape[-1] <= LARGEST_HEAD:
            continue
        if dimension == "K":
            pad = "pad q, k and g with zeros and give scale, which changes no result"
            split = "take parts of q, k and g, give scale, and add up their results"
        else:
            pad = "pad v with zeros and cut them off the results"
            split = "take parts of v and put their results side by side"
        said = f"[B, T, H, {dimension}] with {dimension} from {SMALLEST_HEAD} to {LARGEST_HEAD}"
        raise ShapeError(name, got=shape, want=f"{said}: {pad if shape[-1] < SMALLEST_HEAD else split}")


def _at_most_zero(name: str, value: torch.Tensor) -> None:
    """Raise when a log-decay is positive; values are read on a CPU, and on GPUs if ``ONELAUNCH_CHECK_VALUES=1``.

    A call that is replayed from a tape repeats the check. NaN passes: it has to come out as NaN.
    """
    if checks.values_are_checked(value) and value.numel():
        check_always(_raise_if_positive, name, value)


def _raise_if_positive(name: str, value: torch.Tensor) -> None:
    """Raise when a log-decay with elements is positive.

    The largest value, NaN if there is one, is found in a quarter of the time that a comparison of all values takes.
    """
    if value.detach().max().item() <= 0:
        return
    if bool((value > 0).any()):
        largest = value[value > 0].max().item()
        wanted = "a log-decay is at most 0 (decay = exp(log-decay) lies in [0, 1]); pass torch.log of your decay"
        raise ValueRangeError(name, got=f"holds {largest:g}", want=wanted)


def _scale(scale: float | None, keys: int) -> float:
    """Return the scale of the queries, ``K ** -0.5`` by default; raise unless it is a finite number."""
    scale = constant(scale)
    if scale is None:
        return keys**-0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise ArgumentError(f"scale is {type(scale).__name__}; it must be a number, or None for K ** -0.5.")
    if not math.isfinite(scale):
        raise ArgumentError(f"scale is {scale}; it must be a finite number, or None for K ** -0.5.")
    return float(scale)


@operation(
    dimensions=("B", "T", "H", "K", "V"),
    outputs=("o", "final_state"),
    bind=bind,
    planned=True,
    # Options of a case, from which reference.py makes inputs. Then the variants to prefer where nothing was measured.
    options={
        "decay": "model",
        "decay_per": "channel",
        "value_gate": False,
        "lengths": None,
        "initial_state": False,
        "final_state": False,
        "state_v_first": False,
        "state_gradients": True,  # without them, states are passed on as in truncated backpropagation through time
        "log_decay_dtype": None,
        "scale": None,
        "q_heads": None,
        "k_heads": None,
        "v_heads": None,
        "g_heads": None,
        "state_heads": None,
    },
    defaults={
        "cuda": ("hopper", "hopper_tf32", "fused", FUSED_RECURRENT, "chunked", "recurrent"),
        "cpu": ("chunked", "recurrent"),
    },
    # Float32 results of 16-bit calls that are sums of products of 16-bit numbers; the gate judges them as such.
    stated_errors=dict.fromkeys(("final_state", "grad g", "grad gv", "grad initial_state"), SUM_OF_PRODUCTS),
)
def gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    *,
    gv: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    mesh: Any = None,
    variant: str = dispatch.AUTO,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run gated linear attention: a matrix-valued state per head that decays, adds ``k^T v`` and is multiplied by ``q``.

        S_t = diag(exp(g_t)) S_{t-1} diag(exp(gv_t)) + k_t^T v_t;  o_t = scale * q_t S_t        per head

    Differentiable in every floating-point tensor, through ``o`` and through the final state. NaN in an input makes NaN of all
    that depends on it, unless it has decayed to 0 in float32 since. It may reach back to the start of its chunk of at most 64
    steps; other heads and sequences stay clean, but those that share it.

    Heads may be shared, without copies of what is shared: q, k and v have Hq, Hk and Hv heads, of any two of which one is a
    multiple of the other; o has as many as the largest, H. g (and gv) has ``Hg = max(Hk, Hv)`` heads, or H. Head h of o reads
    head ``h // (H / Hx)`` of a tensor with Hx heads, as if it were repeated by ``x.repeat_interleave(H // Hx, dim=2)``. The
    gradient of a shared head is the sum over those that share it, rounded once. Two uses:

    - fewer heads of q and k than of v, as Mamba-2 (``ngroups``) and gated DeltaNet have them: o, g and the states have Hv heads;
    - fewer heads of k, v and g than of q, fla's ``num_kv_heads``: o and the states have Hq heads. If g has Hq heads, every head
      decays on its own.

    States have H heads. Where Hg is smaller and the initial state has Hg heads, queries that share a head of g share a state,
    which is read once for all of them, and the final state has Hg heads too.

    Args:
        q: Queries, ``[B, T, Hq, K]``, float16, bfloat16 or float32, K from 16 to 512.
        k: Keys, ``[B, T, Hk, K]``, dtype of ``q``.
        v: Values, ``[B, T, Hv, V]``, dtype of ``q``, V from 16 to 512.
        g: Log-decay, at most 0, ``[B, T, Hg, K]`` per key channel or ``[B, T, Hg]`` per head, dtype of ``q`` or float32.
            ``-inf`` resets the state. Default: no decay.
        gv: Log-decay per value channel, at most 0, ``[B, T, Hg, V]``, dtype of ``q`` or float32. Default: none.
        scale: Factor of the queries, any number. Default: ``K ** -0.5``.
        initial_state: State before the first step, ``[N, H, K, V]`` (or ``[N, Hg, K, V]``) float32, ``N = B`` or the number of
            packed sequences. Default: zeros.
        output_final_state: Flag to return the state after the last step of every sequence as well.
        state_v_first: Flag that states, the initial and the final one, are ``[N, H, V, K]``.
        cu_seqlens: Offsets of sequences packed into one batch entry, ``[N + 1]`` int32 or int64, from 0 to T, never
            decreasing (equal neighbours are an empty sequence). Requires ``B = 1``. On a GPU the host reads them only in
            PyTorch's loop over steps and if ``ONELAUNCH_CHECK_VALUES=1``.
        mesh: DeviceMesh of one dimension, process group or :class:`onelaunch.parallel.Context` over whose ranks the steps are
            spread, in the order of ranks. Tensors hold this rank's T steps, any number of them; offsets and states are those of
            all sequences. A collective call; ``docs/parallel.md`` says who holds what. Default: this process has all steps.
        variant: Name from ``gla.variants``, or ``"auto"`` for the fastest variant measured near this call.

    Returns:
        ``o [B, T, H, V]`` in the dtype of ``v``, and the final state, float32, or ``None`` unless ``output_final_state``. It is
        ``[N, H, K, V]``, or ``[N, Hg, K, V]`` if the initial state is. The state is float32 between steps.

    Raises:
        ShapeError, DTypeError, DeviceError, PackingError, ValueRangeError, ArgumentError: An argument is wrong; the message
            names it, what it was and what it has to be.
        UnknownVariant: No variant has that name.
        VariantUnsupported: The named variant cannot run this call; the message says why, and which variants can.

    Source: experiment 039; Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training (2024).
    """
    rest = {
        "scale": scale, "initial_state": initial_state, "output_final_state": output_final_state, "state_v_first": state_v_first
    }  # fmt: skip
    if mesh is None:
        return run(bind_under_autocast(q, k, v, g, gv, cu_seqlens=cu_seqlens, **rest), variant)

    def describe() -> Described:
        offsets = offsets_of(mesh, cu_seqlens)
        call = bind_under_autocast(q, k, v, g, gv, cu_seqlens=offsets, sliced=True, **rest)
        return described(call.key, call, variant)

    return entered(mesh, cu_seqlens, describe, lambda context, call: gla_across(context, call, gla, variant))


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Tensors q, k, v, g and gv."""


def bind_under_autocast(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, gv: torch.Tensor | None, **rest: Any
) -> GlaCall:
    """Cast the tensors as autocast wants, then check them by :func:`bind`, whose other keywords are ``rest``."""
    q, k, v, g, gv = under_autocast(q, k, v, g, gv)
    return bind(q, k, v, g, gv=gv, **rest)


def under_autocast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, gv: torch.Tensor | None) -> Tensors:
    """Return the tensors as autocast has them: q, k and v in the autocast dtype, log-decays in float32.

    Sums of log-decays are the first to lose bits. Log-decays that come in the autocast dtype stay so: what they have lost does
    not come back, sums are taken in float32 anyway, and fewer kernels take float32 ones. Arguments are not checked yet.
    """
    low = low_dtype(q)
    if low is None:
        return q, k, v, g, gv

    def summable(log_decay: torch.Tensor | None) -> torch.Tensor | None:
        if log_decay is None or getattr(log_decay, "dtype", None) is low:
            return log_decay
        return autocast(q, log_decay)[1]

    g, gv = summable(g), summable(gv)
    q, _, k, v = autocast(q, k, k, v)  # its second result would be a log-decay; those are cast above
    return q, k, v, g, gv


def run(call: GlaCall, variant: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the results of a checked call by a variant, the final state in the layout that the caller keeps."""
    with without_autocast(call.q.device):
        o, final_state = dispatch.run(gla, call, variant)
    if not call.output_final_state:
        return o, None
    return o, final_state.transpose(-1, -2) if call.state_v_first else final_state


@gla.shapes
def result_shapes(call: GlaCall) -> Shapes:
    """Return ``o [B, T, H, V]``, and ``final_state``, ``[N, H, K, V]`` or as the initial one, where it is asked for."""
    batch, length, heads, keys, values = call.key.sizes
    sequences = batch if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    return (batch, length, heads, values), (sequences, call.heads.state, keys, values) if call.output_final_state else None
