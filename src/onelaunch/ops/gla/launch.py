"""Launches of the operation's kernels: allocate the results, choose the tiles, pass the pointers. No checks, no autograd."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from onelaunch.kernels.common.layout import cdiv, inner_contiguous
from onelaunch.kernels.common.sequences import Sequences
from onelaunch.launch.warp_mma import warp_mma
from onelaunch.ops.gla import backward_kernels, kernels, step_kernels, walk_kernels

CHUNK = 64
"""Steps per chunk, as the kernels have it."""


def product_precision(exact: bool) -> str:
    """How float32 operands are multiplied, see ``split_product``.

    ``exact``: as accurately as step by step, which matrix units are not (they cut off what they add): 2 to 3 times its error.
    """
    from onelaunch.operation.requirements import interpreting

    return "ieee" if exact or interpreting() else "bf16x6"


@dataclass(frozen=True, slots=True)
class Tiles:
    """Blocks of keys and values that a program takes at once, and how it is launched."""

    keys: int
    values: int
    warps: int = 4
    stages: int = 1


def block(size: int, most: int = 64) -> int:
    """The smallest power of 2 that holds ``size``, from 16 to ``most``."""
    return next((each for each in (16, 32, 64, 128, 256, 512) if each >= min(size, most)), most)


@functools.cache
def family(device: torch.device) -> str:
    """Which tiles a device takes: ``warps`` (NVIDIA up to Hopper), ``cpu`` (the interpreter), or ``other``."""
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda" or torch.version.hip:
        return "other"
    return "warps" if torch.cuda.get_device_capability(device)[0] <= 9 else "other"


def carry_tiles(keys: int, values: int, family: str) -> Tiles:
    """Tiles of the walk of the states: the largest that spill no registers; not measured yet."""
    most = 32 if family == "warps" else 64
    return Tiles(block(keys, most), block(values, most), warps=8, stages=2)


def read_tiles(keys: int, values: int, family: str) -> Tiles:
    """Tiles of the outputs: the largest that spill no registers; not measured yet."""
    most = {"cpu": 64, "warps": 16}.get(family, 32)
    return Tiles(block(keys, most), block(values), warps=8 if family == "warps" else 4)


def gradient_tiles(keys: int, values: int, family: str) -> Tiles:
    """Tiles of the gradients of q, k and g: the largest that do not spill with a decay per channel; no others were timed."""
    if family == "warps":
        return Tiles(block(keys, 16), block(values, 32), warps=8)
    most = 64 if family == "cpu" else 16  # the interpreter takes as long for small ones as for large ones
    return Tiles(block(keys, most), block(values, most), warps=8)


@dataclass(frozen=True, slots=True)
class Rounding:
    """Into how many 16-bit parts float32 factors are split, and from where on pairs of steps are computed block by block."""

    parts: int = 2
    """1 for a product of float32."""
    limit: float = 40.0
    """Sums of log-decays from a chunk's middle up to which one product serves all pairs: exp(2 * limit) times products of inputs
    must stay finite, and in float32 the sums' own rounding must not show."""
    largest: float | None = None
    """Inputs up to which the factor exp(limit) may be multiplied on them."""


ROUNDINGS = {
    torch.bfloat16: Rounding(),
    torch.float16: Rounding(limit=6.0, largest=128.0),
    torch.float32: Rounding(parts=1, limit=8.0),
}


class Attention(NamedTuple):
    """A call's tensors, as the kernels take them: neighbouring channels are neighbours in memory."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    """``[B, T, H, K]``, or ``[B, T, H, 1]`` for one decay per head."""
    sequences: Sequences
    scale: float

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        initial: torch.Tensor | None,
        offsets: torch.Tensor | None,
        scale: float,
    ) -> Attention:
        """From tensors of any strides; ``g [B, T, H]`` for one decay per head."""
        decay = g.unsqueeze(-1) if g.dim() == 3 else inner_contiguous(g)
        tensors = (inner_contiguous(q), inner_contiguous(k), inner_contiguous(v), decay)
        return cls(*tensors, Sequences.of(initial, offsets), scale)

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """B, T, H, K, V."""
        batch, length, heads, keys = self.q.shape
        return batch, length, heads, keys, self.v.shape[3]

    @property
    def sequence_count(self) -> int:
        """N."""
        return self.sequences.count(self.q.shape[0])

    @property
    def scalar(self) -> bool:
        """Whether a head has one decay."""
        return self.g.shape[3] == 1

    @property
    def rounding(self) -> Rounding:
        return ROUNDINGS[self.q.dtype]

    @property
    def slots(self) -> int:
        """Programs along time: chunks, at most."""
        batch, length = self.q.shape[:2]
        return batch * cdiv(length, CHUNK) if self.sequences.offsets is None else length // CHUNK + self.sequence_count

    def numbers(self) -> tuple[int, ...]:
        """T, H, K, V, N."""
        return (*self.sizes[1:], self.sequence_count)

    def parts(self, exact: bool) -> int:
        """Into how many parts float32 factors beside the inputs are split; 0 for a product of float32."""
        return 0 if exact and self.q.dtype is not torch.float32 else self.rounding.parts

    def flags(self, tiles: Tiles, *, exact: bool = False) -> dict[str, Any]:
        """Constants that all kernels have; ``exact`` where a float32 result hangs on the products."""
        _, length, _, keys, values = self.sizes
        packed = self.sequences.offsets is not None
        even = not packed and length % CHUNK == 0 and keys % tiles.keys == 0 and values % tiles.values == 0
        return {
            "BK": tiles.keys, "BV": tiles.values, "PRECISION": product_precision(exact or self.q.dtype is torch.float32),
            "EVEN": even, "SCALAR": self.scalar, "PACKED": packed, "num_warps": tiles.warps,
        }  # fmt: skip


def strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Elements between batch entries, steps and heads, tensor by tensor."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])


def empty_states(call: Attention, *, exact: bool) -> torch.Tensor:
    """Room for a state per chunk, in the inputs' dtype unless ``exact``."""
    _, _, heads, keys, values = call.sizes
    dtype = torch.float32 if exact else call.q.dtype
    return torch.empty((call.slots, heads, keys, values), dtype=dtype, device=call.q.device)


def empty_final(call: Attention, *, wanted: bool) -> torch.Tensor:
    """Room for the final state ``[N, H, K, V]``; no elements if it is not wanted."""
    _, _, heads, keys, values = call.sizes
    return call.q.new_empty((call.sequence_count, heads, keys, values) if wanted else (0,), dtype=torch.float32)


@warp_mma()
def carry(call: Attention, *, want_final: bool, exact: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The state that enters each chunk, and the final one ``[N, H, K, V]`` or no elements.

    ``exact`` keeps them in float32.
    """
    tiles = carry_tiles(*call.sizes[3:], family(call.q.device))
    states, final = empty_states(call, exact=exact), empty_final(call, wanted=want_final)
    kernels.carry_kernel[carry_grid(call, tiles)](
        call.k, call.v, call.g, call.sequences.initial, call.sequences.offsets, states, final, call.scale,
        *call.numbers(), *strides(call.k, call.v, call.g),
        STAGES=tiles.stages, PARTS=call.parts(want_final or exact), FIRST=call.sequences.initial is not None, LAST=want_final,
        REVERSE=False, **call.flags(tiles, exact=want_final or exact),
    )  # fmt: skip
    return states, final


def carry_grid(call: Attention, tiles: Tiles) -> tuple[int]:
    """A program per tile of the state, head and sequence."""
    _, _, heads, keys, values = call.sizes
    return (call.sequence_count * heads * cdiv(keys, tiles.keys) * cdiv(values, tiles.values),)


@warp_mma()
def read(
    call: Attention, values: torch.Tensor, states: torch.Tensor, *, transposed: bool, into: torch.Tensor | None = None
) -> torch.Tensor:
    """o from v and the states that enter the chunks, or, ``transposed``, dv from do and the gradients of those behind them.

    Written where ``into`` says, see :class:`Into`, or to new memory.
    """
    _, _, heads, keys, width = call.sizes
    tiles = read_tiles(keys, width, family(call.q.device))
    out = room_like(call.v, into)
    rounding = call.rounding
    kernels.read_kernel[(call.slots * heads * cdiv(width, tiles.values),)](
        call.q, call.k, values, call.g, call.sequences.offsets, states, out, call.scale,
        *call.numbers(), *strides(call.q, call.k, values, call.g), pitch_of(out),
        STEPS=call.sequences.bisection_steps(), PARTS=rounding.parts, LIMIT=rounding.limit, LARGEST=rounding.largest,
        TRANSPOSED=transposed, num_stages=tiles.stages, **call.flags(tiles),
    )  # fmt: skip
    return out


def forward(call: Attention, *, want_final: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``o [B, T, H, V]`` and the final state ``[N, H, K, V]``, which has no elements if it is not wanted."""
    states, final = carry(call, want_final=want_final)
    return read(call, call.v, states, transposed=False), final


WALKED_KEYS = 64
"""The largest K of which a walking program holds a whole state."""


def walk_tiles(keys: int, values: int) -> Tiles:
    """Tiles of the single launch: all keys, and as many values as registers allow."""
    return Tiles(block(keys, WALKED_KEYS), block(values, 32), warps=8)


@warp_mma()
def walk(call: Attention, *, want_final: bool, ahead: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of :func:`forward` by one launch, which loads a chunk ``ahead`` of the one it works on or not."""
    _, _, heads, keys, values = call.sizes
    tiles, rounding = walk_tiles(keys, values), call.rounding
    out = torch.empty(call.v.shape, dtype=call.v.dtype, device=call.v.device)
    final = empty_final(call, wanted=want_final)
    walk_kernels.walk_kernel[(call.sequence_count * heads * cdiv(values, tiles.values),)](
        call.q, call.k, call.v, call.g, call.sequences.initial, call.sequences.offsets, out, final, call.scale,
        *call.numbers(), *strides(call.q, call.k, call.v, call.g),
        BS=min(tiles.keys, 16), PARTS=rounding.parts, STATE_PARTS=call.parts(want_final),
        LIMIT=rounding.limit, LARGEST=rounding.largest, FIRST=call.sequences.initial is not None, LAST=want_final, AHEAD=ahead,
        num_stages=tiles.stages, **call.flags(tiles, exact=want_final),
    )  # fmt: skip
    return out, final


def step_tiles(keys: int, values: int) -> Tiles:
    """Tiles of the walk step by step: all keys, and values for 64 registers a thread; not tuned yet."""
    rows = block(keys, 512)
    return Tiles(rows, block(values, 8192 // max(rows, 128)))


def in_either_order(state: torch.Tensor | None) -> torch.Tensor | None:
    """A state ``[N, H, K, V]`` with values or keys next to each other in memory and nothing in between: copied if it is not."""
    if state is None or state.is_contiguous() or state.mT.is_contiguous():
        return state
    return state.contiguous()


def step(call: Attention, *, want_final: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of :func:`forward` step by step; the final state lies in memory as the initial one does."""
    _, _, heads, keys, values = call.sizes
    tiles, initial = step_tiles(keys, values), call.sequences.initial
    out = torch.empty(call.v.shape, dtype=call.v.dtype, device=call.v.device)
    final = final_like(initial, empty_final(call, wanted=want_final))
    along = (values, 1) if initial is None or initial.is_contiguous() else (1, keys)
    step_kernels.step_kernel[(call.sequence_count * heads * cdiv(values, tiles.values),)](
        call.q, call.k, call.v, call.g, initial, call.sequences.offsets, out, final, call.scale,
        *call.numbers(), *along, *strides(call.q, call.k, call.v, call.g),
        BK=tiles.keys, BV=tiles.values, SCALAR=call.scalar, PACKED=call.sequences.offsets is not None,
        FIRST=initial is not None, LAST=want_final, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out, final


def final_like(initial: torch.Tensor | None, final: torch.Tensor) -> torch.Tensor:
    """Room for the final state in the order of the initial one, which a caller that keeps values first wants back."""
    if initial is None or initial.is_contiguous() or final.dim() != 4:
        return final
    return torch.empty_like(final.mT, memory_format=torch.contiguous_format).mT


# The backward pass


class Gradients(NamedTuple):
    """Of the call's tensors, in their dtypes and shapes."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    initial: torch.Tensor
    """``[N, H, K, V]``, or no elements without an initial state."""


class Into(NamedTuple):
    """Where gradients of q, k and v go: ``[B, T, H, X]``, as they are packed with others in one matrix.

    Tokens are one pitch apart, of all batch entries one behind the other; heads and channels have nothing between them. For the
    copy engine of Hopper, the pitch and where each begins are multiples of 16 bytes. That of q and k is the same.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def room_like(tensor: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    """Where to write what is shaped ``[B, T, H, X]`` like ``tensor``: ``into``, or new memory without gaps."""
    if into is None:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    (batch, length, heads, channels), strides = tensor.shape, into.stride()
    together = strides[3] == 1 and (heads == 1 or strides[2] == channels)
    in_order = batch == 1 or strides[0] == length * pitch_of(into)
    if into.shape != tensor.shape or into.dtype != tensor.dtype or not (together and in_order):
        raise ValueError(f"cannot write {list(tensor.shape)} into {list(into.shape)} of strides {strides}")
    return into


def pitch_of(tensor: torch.Tensor) -> int:
    """Elements from token to token of ``[B, T, H, X]``, of which the last of an entry is followed by the first of the next.

    Views of a single token have any stride there.
    """
    return tensor.stride(1) if tensor.shape[1] > 1 else tensor.stride(0)


def exact_gradients(call: Attention) -> bool:
    """Whether nothing is rounded on the way to dq, dk and dg.

    A float32 dg beside 16-bit inputs is held to float32's accuracy, and float16 has too narrow a range for products of gradients.
    """
    return call.g.dtype is torch.float32 or call.q.dtype is torch.float16


@warp_mma()
def carry_back(
    call: Attention, do: torch.Tensor, dfinal: torch.Tensor | None, *, exact: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the state behind each chunk, and that of the initial state or no elements."""
    tiles, wanted = carry_tiles(*call.sizes[3:], family(call.q.device)), call.sequences.initial is not None
    dstates, dinitial = empty_states(call, exact=exact), empty_final(call, wanted=wanted)
    kernels.carry_kernel[carry_grid(call, tiles)](
        call.q, do, call.g, dfinal, call.sequences.offsets, dstates, dinitial, call.scale,
        *call.numbers(), *strides(call.q, do, call.g),
        STAGES=tiles.stages, PARTS=call.parts(wanted or exact), FIRST=dfinal is not None, LAST=wanted, REVERSE=True,
        **call.flags(tiles, exact=wanted or exact),
    )  # fmt: skip
    return dstates, dinitial


@warp_mma()
def backward(call: Attention, do: torch.Tensor, dfinal: torch.Tensor | None, into: Into | None = None) -> Gradients:
    """Gradients of all inputs, from those of ``o`` and of the final state; nothing was kept but the inputs."""
    do, dfinal = inner_contiguous(do), None if dfinal is None else dfinal.contiguous()
    exact, rounding = exact_gradients(call), call.rounding
    kept = exact or call.scalar  # one dg for a whole head adds up over all of a state: rounded ones would show
    states, _ = carry(call, want_final=False, exact=kept)
    dstates, dinitial = carry_back(call, do, dfinal, exact=kept)
    to_q, to_k, to_v = into or (None, None, None)
    dv = read(call, do, dstates, transposed=True, into=to_v)
    tiles = gradient_tiles(*call.sizes[3:], family(call.q.device))
    dq, dk, dg = room_like(call.q, to_q), room_like(call.k, to_k), room_like(call.g, None)
    backward_kernels.gradients_kernel[(call.slots * call.sizes[2],)](
        call.q, call.k, call.v, call.g, do, call.sequences.offsets, states, dstates, dq, dk, dg, call.scale,
        *call.numbers(), *strides(call.q, call.k, call.v, call.g, do), pitch_of(dq),
        STEPS=call.sequences.bisection_steps(), EXACT=exact, PARTS=call.parts(exact),
        LIMIT=ROUNDINGS[torch.float32].limit if exact else rounding.limit, LARGEST=None if exact else rounding.largest,
        num_stages=tiles.stages, **call.flags(tiles, exact=exact),
    )  # fmt: skip
    return Gradients(dq, dk, dv, dg.squeeze(-1) if call.scalar else dg, dinitial)
