"""Checks that layers share: constructor arguments, and a call's inputs with its cache, mask and packed sequences.

The constructors of all layers check their arguments here. ``GatedLayer``, ``ForgetGateLayer`` and ``LinearRNN`` read the inputs
of a call by :func:`read_inputs`; ``RecurrentLayer`` calls :func:`check_convolved_padding`. ``argument`` is the name of the
checked argument in messages.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import torch

from onelaunch import checks
from onelaunch.errors import ArgumentError, ShapeError
from onelaunch.nn.cache import Cache, LayerState
from onelaunch.ops.gla.contract import LARGEST_HEAD, SMALLEST_HEAD
from onelaunch.parallel import Context, Described, entered, offsets_of


def count(argument: str, value: object) -> int:
    """Return the value; raise :class:`ArgumentError` unless it is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(f"{argument} is {value!r}; it must be an integer of at least 1.")
    return value


def index(argument: str, value: object) -> int | None:
    """Return the value; raise :class:`ArgumentError` unless it is ``None`` or an integer of at least 0."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ArgumentError(f"{argument} is {value!r}; it must be an integer of at least 0, or None.")
    return value


def number(argument: str, value: Any, *, above: float | None = None, least: float | None = None) -> float:
    """Return the value; raise :class:`ArgumentError` unless it is a finite number in the range that one of the bounds gives."""
    # Not math.isfinite, which raises for an integer that no float holds.
    real = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if above is not None and not (real and value > above):
        raise ArgumentError(f"{argument} is {value!r}; it must be a number above {above:g}.")
    if least is not None and not (real and value >= least):
        raise ArgumentError(f"{argument} is {value!r}; it must be a number of at least {least:g}.")
    return float(value)


def expanded(hidden_size: int, argument: str, ratio: Any) -> int:
    """Return ``hidden_size * ratio``; raise :class:`ArgumentError` unless it is a whole number."""
    width = hidden_size * number(argument, ratio, above=0)
    if not math.isfinite(width) or round(width) < 1 or not math.isclose(width, round(width)):
        raise ArgumentError(f"{argument} is {ratio!r}; hidden_size * {argument} must be a whole number, and is {width:g}.")
    return round(width)


def head_size(makes: str, size: int) -> int:
    """Return the channels of a head; raise :class:`ArgumentError` if ``onelaunch.ops.gla`` does not take such heads.

    The operation checks them again at each call; here the message names the layer's arguments.

    Args:
        makes: Subject and verb of the message, such as ``expand_k and num_heads make``.
        size: Channels of a head.
    """
    if not SMALLEST_HEAD <= size <= LARGEST_HEAD:
        takes = f"onelaunch.ops.gla takes {SMALLEST_HEAD} to {LARGEST_HEAD}"
        remedy = "fewer" if size < SMALLEST_HEAD else "more"
        raise ArgumentError(f"{makes} heads of {size} channels; {takes}: take {remedy} heads.")
    return size


class Inputs(NamedTuple):
    """Checked arguments of a layer's call."""

    x: torch.Tensor
    """Input, ``[B, T, D]``, with zeros at padding."""
    padding: torch.Tensor | None
    """Mask of padding, ``[B, T]`` bool, or ``None``."""
    cu_seqlens: torch.Tensor | None
    """Offsets of packed sequences, ``[N + 1]``, or ``None``."""
    cache: Cache | None
    """Cache that was given, or a new one if ``use_cache`` is set without one."""
    use_cache: bool
    """Flag that the new state is stored in ``cache``."""
    layer_idx: int | None
    """Key of the layer's state in ``cache``; an integer wherever there is a cache."""
    last: LayerState | None
    """State of the layer after the previous call, or ``None`` without one."""
    context: Context | None = None
    """Slices of the ranks over which the steps are spread, or ``None``; ``cu_seqlens`` are this rank's then."""

    @property
    def steps(self) -> dict[str, Any]:
        """Keyword arguments of an operation that say which sequences the steps belong to, and where the other steps are."""
        return {"cu_seqlens": self.cu_seqlens} if self.context is None else {"mesh": self.context}

    @property
    def initial_state(self) -> torch.Tensor | None:
        """State that the call starts from, or ``None``."""
        return None if self.last is None else self.last.recurrent_state

    def store(self, recurrent_state: torch.Tensor | None, conv_state: tuple[torch.Tensor, ...] | None = None) -> None:
        """Store the layer's state in the cache for the next call, if ``use_cache`` is set."""
        if self.use_cache and self.cache is not None and self.layer_idx is not None and recurrent_state is not None:
            self.cache.update(self.layer_idx, recurrent_state, conv_state, self.x.shape[1])

    def without_padding(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``[B, T, ...]`` with zeros at padding; a log-decay of 0 leaves the state unchanged."""
        if self.padding is None:
            return value
        return value.masked_fill(self.padding.reshape(*self.padding.shape, *(1,) * (value.dim() - 2)), 0)


def read_inputs(
    hidden_states: torch.Tensor,
    width: int,
    layer_idx: int | None,
    attention_mask: torch.Tensor | None,
    past_key_values: Cache | None,
    use_cache: bool | None,
    output_attentions: bool | None,
    cu_seqlens: torch.Tensor | None,
    mesh: Any = None,
) -> Inputs:
    """Check the arguments of a call; raise :class:`ArgumentError` or a subclass that names one. ``width`` is ``hidden_size``.

    The operations check shapes, dtypes and offsets again, with their own names of the arguments.
    """
    if mesh is not None:
        given = (hidden_states, width, layer_idx, attention_mask, past_key_values, use_cache, output_attentions)
        return _inputs_of_slice(mesh, cu_seqlens, *given)
    checks.rank("hidden_states", checks.tensor("hidden_states", hidden_states), "[B, T, D]")
    checks.dtype("hidden_states", hidden_states, checks.FLOATS)
    if hidden_states.shape[2] != width:
        raise ShapeError("hidden_states", got=hidden_states.shape, want=f"[B, T, D] with D = hidden_size = {width}")
    if output_attentions:
        raise ArgumentError("output_attentions is set; linear attention never forms attention weights: leave it out.")
    cache = _cache(past_key_values, bool(use_cache), layer_idx)
    sequences = hidden_states.shape[0]
    if cu_seqlens is not None:
        checks.packing(checks.tensor("cu_seqlens", cu_seqlens), sequences)
        sequences = cu_seqlens.shape[0] - 1
        if attention_mask is not None:
            raise ArgumentError("attention_mask and cu_seqlens are both given; packed sequences have no padding: give one.")
    last = None if cache is None or layer_idx is None else cache.get(layer_idx)
    if last is not None and last.recurrent_state.shape[0] != sequences:
        said = f"past_key_values holds {last.recurrent_state.shape[0]} sequences, and this call has {sequences}"
        raise ArgumentError(f"{said}; go on with the same sequences, or take a new Cache.")
    padding = None if attention_mask is None else _padding(hidden_states, attention_mask)
    given = Inputs(hidden_states, padding, cu_seqlens, cache, bool(use_cache), layer_idx, last)
    return given if padding is None else given._replace(x=given.without_padding(hidden_states))


def _inputs_of_slice(mesh: Any, cu_seqlens: torch.Tensor | None, *rest: Any) -> Inputs:
    """Return the checked arguments of a call with a mesh; ``rest`` are those of :func:`read_inputs` before ``cu_seqlens``."""
    _, width, _, attention_mask, past_key_values, use_cache, _ = rest

    def describe() -> Described:
        if past_key_values is not None or use_cache:
            raise ArgumentError(
                "mesh is given with past_key_values or use_cache; a layer keeps no state across ranks: leave one out."
            )
        given = read_inputs(*rest, cu_seqlens=offsets_of(mesh, cu_seqlens))
        facts = {"sizes": (given.x.shape[0], width), "dtype": given.x.dtype, "attention_mask": attention_mask is not None}
        return Described(given.x.shape[1], given.x.device, {"operation": "layer", **facts}, given)

    def of_slice(context: Context, given: Inputs) -> Inputs:
        return given._replace(context=context, cu_seqlens=context.cu_seqlens)

    return entered(mesh, cu_seqlens, describe, of_slice)


def _cache(past_key_values: object, use_cache: bool, layer_idx: int | None) -> Cache | None:
    """Return the cache of a call: the given one, or a new one if ``use_cache`` is set without one."""
    if past_key_values is not None and not isinstance(past_key_values, Cache):
        raise ArgumentError(f"past_key_values is {type(past_key_values).__name__}; it must be a onelaunch.nn.Cache, or None.")
    if (past_key_values is not None or use_cache) and layer_idx is None:
        asked = "use_cache is set" if past_key_values is None else "past_key_values is given"
        raise ArgumentError(f"{asked}, but the layer has no layer_idx; construct it with layer_idx=0, 1, ... in its model.")
    return Cache() if past_key_values is None and use_cache else past_key_values


def _padding(hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Return ``[B, T]`` bool, true for padding; the mask may also cover the steps of earlier calls."""
    batch, length, _ = hidden_states.shape
    mask = checks.tensor("attention_mask", attention_mask)
    if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] < length:
        want = f"[B, T] = {[batch, length]}, 0 for padding, or longer in front by the steps of earlier calls"
        raise ShapeError("attention_mask", got=mask.shape, want=want)
    checks.device("attention_mask", mask, hidden_states.device)
    return mask[:, mask.shape[1] - length :] == 0


def check_convolved_padding(given: Inputs) -> None:
    """Raise if a short convolution would mix padding with tokens; only where values are checked.

    Padding behind all tokens is harmless without ``use_cache``. With it the convolutions' states would hold padding in place of
    the last tokens.
    """
    if given.padding is None or not checks.values_are_checked(given.padding):
        return
    changes = given.padding.int().diff(dim=1)  # 1 where padding begins behind a token, -1 where it ends
    begun = (changes > 0).cumsum(1) > 0
    if bool((begun & (changes < 0)).any()):
        raise ArgumentError("attention_mask has padding between tokens; with use_short_conv it must lie at the ends.")
    if given.use_cache and bool(begun.any()):
        raise ArgumentError(
            "attention_mask has padding behind tokens; with use_short_conv and use_cache it must lie before them."
        )
