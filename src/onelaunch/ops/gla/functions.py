"""``gla`` under the names of fla (flash-linear-attention), with fla's signatures and results: users only change the import.

Signatures are those of fla 0.6.0 with our keyword ``variant`` at the end. Each function calls the operation once: a decay that
is the same for every step is expanded without a copy. ``reverse`` goes backwards where the variant ``fused_recurrent`` runs, and
flips time before and after the call elsewhere.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from onelaunch import checks, dispatch
from onelaunch.errors import ArgumentError, ValueRangeError
from onelaunch.launch.planned import replayed
from onelaunch.operation import Query
from onelaunch.operation.states import float32_state
from onelaunch.ops.gla.contract import FUSED_RECURRENT, PER_CHANNEL, PER_HEAD, GlaCall, bind_under_autocast, gla, run
from onelaunch.wording import did_you_mean, listing

Results = tuple[torch.Tensor, torch.Tensor | None]
"""Output ``o`` and the final state, if it was asked for."""


def chunk_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    *,
    variant: str = dispatch.AUTO,
) -> Results:
    """Run gated linear attention with a decay per key channel: :func:`onelaunch.ops.gla` as ``fla.ops.gla.chunk_gla``.

    Args:
        q: Queries, ``[B, T, H, K]``, float16, bfloat16 or float32, K from 16 to 512.
        k: Keys, ``[B, T, H, K]``, dtype of ``q``.
        v: Values, ``[B, T, H, V]``, dtype of ``q``, V from 16 to 512.
        g: Log-decay, ``[B, T, H, K]``, at most 0, dtype of ``q`` or float32.
        scale: Factor of the queries. Default: ``K ** -0.5``.
        initial_state: Initial state, ``[N, H, K, V]`` float32 (``[N, H, V, K]`` if ``state_v_first``). Default: zeros.
        output_final_state: Flag to return the state after the last step of every sequence as well.
        state_v_first: Flag that states, the initial and the final one, are ``[N, H, V, K]``.
        cu_seqlens: Offsets of packed sequences, ``[N + 1]`` int32 or int64. Requires ``B = 1``.
        cu_seqlens_cpu: Offsets on the CPU, accepted together with ``cu_seqlens`` only. Unused: kernels read ``cu_seqlens``.
        variant: Name from ``gla.variants``, or ``"auto"`` for the fastest variant measured near this call.

    Returns:
        ``o [B, T, H, V]`` in the dtype of ``v``, and the final state, float32, or ``None`` unless ``output_final_state``.

    Raises:
        OneLaunchError: As in :func:`onelaunch.ops.gla`, which also says how tensors may share heads.
    """
    _companion(cu_seqlens, cu_seqlens_cpu)
    checks.tensor("g", g)
    return _results(
        q, k, v, g, None, None, scale, initial_state, output_final_state, state_v_first, cu_seqlens, "g", PER_CHANNEL, variant
    )  # fmt: skip


def chunk_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    *,
    variant: str = dispatch.AUTO,
    **kwargs: Any,
) -> Results:
    """Run gated linear attention with one decay per head, as ``fla.ops.simple_gla.chunk_simple_gla``.

    It is :func:`onelaunch.ops.gla` with ``g`` of ``[B, T, H]``.

    Args:
        q: Queries, ``[B, T, H, K]``, float16, bfloat16 or float32, K from 16 to 512.
        k: Keys, ``[B, T, H, K]``, dtype of ``q``.
        v: Values, ``[B, T, H, V]``, dtype of ``q``, V from 16 to 512.
        g: Log-decay, ``[B, T, H]``, at most 0, dtype of ``q`` or float32.
        g_gamma: Log-decay, ``[H]``, heads as in ``g``, at most 0, any of our dtypes: the same at every step (RetNet, lightning
            attention). Not together with ``g``. Without either, nothing decays.
        scale: Factor of the queries. Default: ``K ** -0.5``.
        initial_state: Initial state, ``[N, H, K, V]`` (``[N, H, V, K]`` if ``state_v_first``), float32 or the dtype of ``q``.
            Default: zeros.
        output_final_state: Flag to return the state after the last step of every sequence as well.
        state_v_first: Flag that states, the initial and the final one, are ``[N, H, V, K]``.
        cu_seqlens: Offsets of packed sequences, ``[N + 1]`` int32 or int64. Requires ``B = 1``.
        cu_seqlens_cpu: Offsets on the CPU, accepted together with ``cu_seqlens`` only. Unused: kernels read ``cu_seqlens``.
        variant: Name from ``gla.variants``, or ``"auto"`` for the fastest variant measured near this call.
        **kwargs: fla's ``chunk_size``, a power of 2, which is checked and ignored: variants choose their own. Also fla's former
            ``transpose_state_layout``, now ``state_v_first`` (with a warning), and ``head_first``, which must be false.

    Returns:
        ``o [B, T, H, V]`` in the dtype of ``v``, and the final state, float32, or ``None`` unless ``output_final_state``.

    Raises:
        ArgumentError: ``g`` and ``g_gamma`` are both given, or a keyword is unknown or not supported.
        OneLaunchError: For the rest, as in :func:`onelaunch.ops.gla`.
    """
    _companion(cu_seqlens, cu_seqlens_cpu)
    state_v_first = _older_names("chunk_simple_gla", kwargs, state_v_first, ("chunk_size",))
    initial_state = float32_state(initial_state, q)
    gate = _one_gate(g, g_gamma)
    return _results(
        q, k, v, g, None, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens, gate, PER_HEAD, variant
    )  # fmt: skip


def fused_recurrent_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    variant: str = dispatch.AUTO,
    **kwargs: Any,
) -> Results:
    """Run gated linear attention, for few steps, as ``fla.ops.gla.fused_recurrent_gla``.

    It is :func:`onelaunch.ops.gla`, by the variants of :func:`chunk_gla`: one step of decoding and a long sequence only differ
    in their sizes.

    Args:
        q: Queries, ``[B, T, H, K]``, float16, bfloat16 or float32, K from 16 to 512.
        k: Keys, ``[B, T, H, K]``, dtype of ``q``.
        v: Values, ``[B, T, H, V]``, dtype of ``q``, V from 16 to 512.
        gk: Log-decay per key channel, ``[B, T, H, K]``, at most 0, dtype of ``q`` or float32. Default: none.
        gv: Log-decay per value channel, ``[B, T, H, V]``, at most 0, dtype of ``q`` or float32. Default: none.
        scale: Factor of the queries. Default: ``K ** -0.5``.
        initial_state: Initial state, ``[N, H, K, V]`` (``[N, H, V, K]`` if ``state_v_first``), float32 or the dtype of ``q``.
            Default: zeros.
        output_final_state: Flag to return the state after the last step of every sequence as well.
        reverse: Flag to go through every sequence from its end to its start, by ``fused_recurrent`` for at most 64 steps, with
            ``gv`` and where neither ``hopper`` nor ``hopper_tf32`` is chosen; otherwise it costs a flipped copy of every tensor.
        state_v_first: Flag that states, the initial and the final one, are ``[N, H, V, K]``.
        cu_seqlens: Offsets of packed sequences, ``[N + 1]`` int32 or int64. Requires ``B = 1``.
        variant: Name from ``gla.variants``, or ``"auto"`` for the fastest variant measured near this call.
        **kwargs: fla's former ``transpose_state_layout``, now ``state_v_first`` (with a warning), and ``head_first``, which
            must be false.

    Returns:
        ``o [B, T, H, V]`` in the dtype of ``v``, and the final state, float32, or ``None`` unless ``output_final_state``.

    Raises:
        ArgumentError: A keyword is unknown or not supported.
        OneLaunchError: For the rest, as in :func:`onelaunch.ops.gla`.
    """
    state_v_first = _older_names("fused_recurrent_gla", kwargs, state_v_first, ())
    initial_state = float32_state(initial_state, q)
    return _results(
        q, k, v, gk, gv, None, scale, initial_state, output_final_state, state_v_first, cu_seqlens, "gk", PER_CHANNEL, variant,
        reverse=reverse,
    )  # fmt: skip


def fused_recurrent_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    variant: str = dispatch.AUTO,
    **kwargs: Any,
) -> Results:
    """Run gated linear attention with one decay per head, for few steps, as ``fla.ops.simple_gla.fused_recurrent_simple_gla``.

    It is :func:`onelaunch.ops.gla` with ``g`` of ``[B, T, H]``, by the variants of :func:`chunk_simple_gla`.

    Args:
        q: Queries, ``[B, T, H, K]``, float16, bfloat16 or float32, K from 16 to 512.
        k: Keys, ``[B, T, H, K]``, dtype of ``q``.
        v: Values, ``[B, T, H, V]``, dtype of ``q``, V from 16 to 512.
        g: Log-decay, ``[B, T, H]``, at most 0, dtype of ``q`` or float32.
        g_gamma: Log-decay, ``[H]``, as in :func:`chunk_simple_gla`. Not together with ``g``. Without either, nothing decays.
        scale: Factor of the queries. Default: ``K ** -0.5``.
        initial_state: Initial state, ``[N, H, K, V]`` (``[N, H, V, K]`` if ``state_v_first``), float32 or the dtype of ``q``.
            Default: zeros.
        output_final_state: Flag to return the state after the last step of every sequence as well.
        reverse: Flag to go through every sequence from its end to its start, by ``fused_recurrent`` for at most 64 steps, with
            ``gv`` and where neither ``hopper`` nor ``hopper_tf32`` is chosen; otherwise it costs a flipped copy of every tensor.
        state_v_first: Flag that states, the initial and the final one, are ``[N, H, V, K]``.
        cu_seqlens: Offsets of packed sequences, ``[N + 1]`` int32 or int64. Requires ``B = 1``.
        variant: Name from ``gla.variants``, or ``"auto"`` for the fastest variant measured near this call.
        **kwargs: fla's former ``transpose_state_layout``, now ``state_v_first`` (with a warning), and ``head_first``, which
            must be false.

    Returns:
        ``o [B, T, H, V]`` in the dtype of ``v``, and the final state, float32, or ``None`` unless ``output_final_state``.

    Raises:
        ArgumentError: ``g`` and ``g_gamma`` are both given, or a keyword is unknown or not supported.
        OneLaunchError: For the rest, as in :func:`onelaunch.ops.gla`.
    """
    state_v_first = _older_names("fused_recurrent_simple_gla", kwargs, state_v_first, ())
    initial_state = float32_state(initial_state, q)
    gate = _one_gate(g, g_gamma)
    return _results(
        q, k, v, g, None, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens, gate, PER_HEAD, variant,
        reverse=reverse,
    )  # fmt: skip


@replayed
def _results(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    gv: torch.Tensor | None,
    g_gamma: torch.Tensor | None,
    scale: float | None,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: torch.Tensor | None,
    gate: str,
    layout: str,
    variant: str,
    *,
    reverse: bool = False,
) -> Results:
    """Return the results of a call of one of fla's functions, whose keywords have been checked: those of :func:`bound`."""
    call = bound(
        q, k, v, g, gv, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens, gate, layout
    )  # fmt: skip
    return _backwards(call, variant) if reverse else run(call, variant)


def bound(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    gv: torch.Tensor | None,
    g_gamma: torch.Tensor | None,
    scale: float | None,
    initial_state: torch.Tensor | None,
    output_final_state: bool | None,
    state_v_first: bool,
    cu_seqlens: torch.Tensor | None,
    gate: str,
    layout: str,
) -> GlaCall:
    """Return the checked call of one of fla's functions, whose keywords have been checked; ``onelaunch.integrations`` asks too.

    ``gate`` is the caller's name of the log-decay ``g``, and ``layout`` what that has. ``g_gamma`` takes the place of ``g``.
    fla's layers pass ``None`` where they want no final state.

    Raises:
        OneLaunchError: As in :func:`onelaunch.ops.gla`.
    """
    output_final_state = False if output_final_state is None else output_final_state
    if g_gamma is not None:
        g = _at_every_step(g_gamma, q, k, v)
    return bind_under_autocast(
        q, k, v, g, gv, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, gate=gate, layouts=(layout,),
    )  # fmt: skip


def _backwards(call: GlaCall, variant: str) -> Results:
    """Return the results of the call with time reversed, in the caller's order of time.

    Where the chosen variant cannot go backwards, time is flipped. Packed sequences come in reverse order during that call.
    """
    if goes_backwards(call.query(), variant):
        return run(call._replace(reverse=True), FUSED_RECURRENT)
    offsets, initial = call.cu_seqlens, call.initial_state
    if offsets is not None:
        offsets = call.q.shape[1] - offsets.flip(0)
        initial = None if initial is None else initial.flip(0)
    flipped = call._replace(
        q=call.q.flip(1),
        k=call.k.flip(1),
        v=call.v.flip(1),
        g=call.g.flip(1),
        gv=None if call.gv is None else call.gv.flip(1),
        initial_state=initial,
        cu_seqlens=offsets,
    )
    o, final_state = run(flipped, variant)
    packed = offsets is not None and final_state is not None
    return o.flip(1), final_state.flip(0) if packed else final_state


_FEW_STEPS = 64
"""Most steps for which a loop over time takes less time than the launches that flip tensors and those of chunks."""


def goes_backwards(query: Query, variant: str) -> bool:
    """Return whether a call with time reversed runs by :data:`FUSED_RECURRENT`, which flips nothing.

    Flipping q, k, v, g and o moves twice their bytes. With many steps that takes less time than a loop over time, if kernels
    of ``hopper`` compute the rest. Compiled code flips always, fused with what is around it.
    """
    if variant == FUSED_RECURRENT:
        return True
    if variant != dispatch.AUTO or query.device_type != "cuda" or torch.compiler.is_compiling():
        return False
    if gla.variants[FUSED_RECURRENT].why_not(query) is not None:
        return False
    return query.sizes[1] <= _FEW_STEPS or dispatch.choose(query).name not in ("hopper", "hopper_tf32")


def _one_gate(g: torch.Tensor | None, g_gamma: torch.Tensor | None) -> str:
    """Return the name of the log-decay per head that a caller gives; raise :class:`ArgumentError` if both are given."""
    if g is not None and g_gamma is not None:
        raise ArgumentError("g and g_gamma are both given; give the decay per step as g or per head as g_gamma, not both.")
    return "g" if g_gamma is None else "g_gamma"


def _at_every_step(g_gamma: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return a decay per head ``[Hs]`` as a ``[B, T, Hs]`` float32 view, with strides of 0 along B and T."""
    for name, value, layout in (("q", q, "[B, T, H, K]"), ("k", k, "[B, T, H, K]"), ("v", v, "[B, T, H, V]")):
        checks.rank(name, checks.tensor(name, value), layout)
    checks.rank("g_gamma", checks.tensor("g_gamma", g_gamma), "[H]")
    states = max(k.shape[2], v.shape[2])
    if g_gamma.shape[0] not in (states, max(states, q.shape[2])):
        checks.shape("g_gamma", g_gamma, (states,), "[H]", f"q {list(q.shape)}")
    checks.device("g_gamma", g_gamma, q.device)
    checks.dtype("g_gamma", g_gamma, checks.FLOATS)
    return g_gamma.float().expand(*q.shape[:2], -1)


def _companion(cu_seqlens: torch.Tensor | None, cu_seqlens_cpu: torch.Tensor | None) -> None:
    """Raise if the offsets for the host are given without those for the device."""
    if cu_seqlens is None and cu_seqlens_cpu is not None:
        raise ArgumentError("cu_seqlens_cpu is given without cu_seqlens; give the offsets as cu_seqlens, on the device of q.")


def _older_names(function: str, kwargs: dict[str, Any], state_v_first: bool, known: tuple[str, ...]) -> bool:
    """Check the keywords beside a function's named arguments; return ``state_v_first``, from its former name if that is given.

    Args:
        function: Name of the function, for messages.
        kwargs: Keywords of the call beside the named arguments.
        state_v_first: The named argument, which fla formerly called ``transpose_state_layout``.
        known: Keywords that only this function takes. All take ``transpose_state_layout`` and a false ``head_first``.

    Raises:
        ArgumentError: A keyword is unknown, ``head_first`` is set, or the state's layout is given under both names.
        ValueRangeError: ``chunk_size`` is no power of 2.
    """
    known = (*known, "transpose_state_layout", "head_first")
    for name, value in kwargs.items():
        if name not in known:
            hint = did_you_mean(name, known)
            raise ArgumentError(f"{function} has no argument {name!r}.{hint} Beside its named ones: {listing(known)}.")
        if name == "head_first" and value:
            raise ArgumentError("head_first is set; tensors must be [B, T, H, ...]: transpose them and leave head_first out.")
        if name == "chunk_size" and value is not None and (not isinstance(value, int) or value < 1 or value & (value - 1)):
            raise ValueRangeError("chunk_size", got=f"is {value!r}", want="it must be a power of 2, or be left out")
    if "transpose_state_layout" in kwargs:
        if state_v_first:
            raise ArgumentError("transpose_state_layout is given beside state_v_first; give state_v_first alone.")
        warnings.warn("transpose_state_layout is called state_v_first now.", DeprecationWarning, stacklevel=3)
        return bool(kwargs["transpose_state_layout"])
    return state_v_first
