"""Launches of ``gla``'s portable kernels: allocate the results, choose the tiles, pass the pointers.

Arguments are checked in contract.py and gradients wired in autograd.py; nothing here does either. The operators in autograd.py,
their fakes, the modules of variants and ablations, launch_hopper.py, launch_rescale.py and ``gla_layer`` call it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from onelaunch.device.hardware import compute_capability
from onelaunch.kernels.common.layout import cdiv, inner_contiguous, power_of_2
from onelaunch.kernels.common.sequences import Sequences
from onelaunch.kernels.gemm.choice import uses_tf32
from onelaunch.launch.launch import Launch, Mma
from onelaunch.operation.requirements import interpreting
from onelaunch.ops.gla.heads import Heads
from onelaunch.ops.gla.kernels import backward as backward_kernels
from onelaunch.ops.gla.kernels import chunk as chunk_kernels
from onelaunch.ops.gla.kernels import chunk_output as chunk_output_kernels
from onelaunch.ops.gla.kernels import step as step_kernels
from onelaunch.ops.gla.kernels import sum_heads as sum_kernels

CHUNK = chunk_kernels.CHUNK.value
"""Steps per chunk."""

EITHER_ORDER = "stepwise"
"""Variant whose kernel also reads initial states whose keys, rather than values, are contiguous; others get a copy."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile [keys, values] of a state that a CTA holds at once, and launch options of the kernel."""

    keys: int
    values: int
    warps: int = 4
    stages: int = 1


def block(size: int, most: int = 64) -> int:
    """Return the smallest power of 2 from 16 to ``most`` that is at least ``size``; ``most`` if ``size`` is larger."""
    return next((each for each in (16, 32, 64, 128, 256, 512) if each >= min(size, most)), most)


@functools.cache
def family(device: torch.device) -> str:
    """Return the kind of device that tiles are chosen for.

    ``warps`` stands for NVIDIA GPUs up to Hopper, whose portable kernels multiply by ``mma.sync``; ``cpu`` for the interpreter;
    ``other`` for all else.
    """
    if device.type == "cpu":
        return "cpu"
    generation = compute_capability(device)
    return "warps" if generation is not None and generation <= 9 else "other"


def _chunk_state_tiles(keys: int, values: int, family: str) -> Tiles:
    """Return the tiles of the chunk state pass: the largest that spill no registers; not measured yet."""
    most = 32 if family == "warps" else 64
    return Tiles(block(keys, most), block(values, most), warps=8, stages=2)


def _chunk_output_tiles(keys: int, values: int, family: str) -> Tiles:
    """Return the tiles of the chunk output: the largest that spill no registers; not measured yet."""
    most = {"cpu": 64, "warps": 16}.get(family, 32)
    return Tiles(block(keys, most), block(values), warps=8 if family == "warps" else 4)


def _gradient_tiles(keys: int, values: int, family: str) -> Tiles:
    """Return the tiles of the gradients of q, k and g.

    They are the largest that spill no registers with a decay per channel; no others were timed.
    """
    if family == "warps":
        return Tiles(block(keys, 16), block(values, 32), warps=8)
    most = 64 if family == "cpu" else 16  # the interpreter takes as long for small ones as for large ones
    return Tiles(block(keys, most), block(values, most), warps=8)


@dataclass(frozen=True, slots=True)
class Rounding:
    """Number of 16-bit terms of a float32 factor, and bounds beyond which the scores of a chunk need secondary chunking.

    Both are explained in kernels/chunk.py, under Numerics and in ``is_benign``.
    """

    parts: int = 2
    """Terms of a float32 factor next to a 16-bit one. Unused where the inputs are float32."""
    limit: float = 40.0
    """Largest magnitude of the sum of log-decays over half a chunk for which one matrix product gives all of its scores.

    exp(2 * limit) times products of inputs must stay finite. With float32 inputs the rounding of the sums must not show in the
    results either, so the limit is smaller.
    """
    largest: float | None = None
    """Largest input that may be multiplied by exp(limit); ``None`` for no bound."""


_ROUNDINGS = {
    torch.bfloat16: Rounding(),
    torch.float16: Rounding(limit=6.0, largest=128.0),
    torch.float32: Rounding(parts=1, limit=8.0),
}

_TF32_ROUNDING = Rounding(parts=1)
"""Rounding of float32 inputs that are multiplied in TF32: the rounding of the sums does not show beside that of the products."""


class Attention(NamedTuple):
    """Tensors of a call as the kernels take them: the last dimension of q, k, v and g is contiguous.

    They may have fewer heads than the output, see heads.py.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    """``[B, T, H, K]``, or ``[B, T, H, 1]`` for one decay per head."""
    sequences: Sequences
    """Offsets of packed sequences and initial state, each ``None`` where the call has none."""
    scale: float
    """Factor of q in o."""

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
        *,
        either_order: bool = False,
    ) -> Attention:
        """Make the call from tensors of any strides; ``g [B, T, H]`` for one decay per head.

        With ``either_order`` an initial state whose keys rather than values are contiguous is taken as it is; otherwise it is
        copied.
        """
        decay = g.unsqueeze(-1) if g.dim() == 3 else inner_contiguous(g)
        tensors = (inner_contiguous(q), inner_contiguous(k), inner_contiguous(v), decay)
        as_given = either_order and initial is not None and initial.mT.is_contiguous()
        sequences = Sequences.of(None if as_given else initial, offsets)
        return cls(*tensors, sequences._replace(initial=initial) if as_given else sequences, scale)

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Sizes B, T, H, K, V; H is the number of heads of the output."""
        batch, length, _, keys = self.q.shape
        return batch, length, self.heads.output, keys, self.v.shape[3]

    @property
    def heads(self) -> Heads:
        """Numbers of heads of the tensors and of the states that are computed: those of g, or of the initial state."""
        initial, decays = self.sequences.initial, self.g.shape[2]
        state = decays if initial is None else initial.shape[1]
        return Heads(self.q.shape[2], self.k.shape[2], self.v.shape[2], decays, state)

    @property
    def sequence_count(self) -> int:
        """Number N of sequences."""
        return self.sequences.count(self.q.shape[0])

    @property
    def scalar(self) -> bool:
        """Flag that a head has one decay for all of its channels."""
        return self.g.shape[3] == 1

    @property
    def rounding(self) -> Rounding:
        """Rounding of a call's factors, by the dtype of q and the form of its float32 products."""
        return _TF32_ROUNDING if self.uses_tf32 else _ROUNDINGS[self.q.dtype]

    @property
    def uses_tf32(self) -> bool:
        """Flag that the inputs are float32 and are multiplied in TF32: PyTorch's settings allow it, and the device can."""
        return uses_tf32(self.q)

    def precision(self, *, exact: bool) -> str:
        """Return how float32 operands are multiplied: the constant PRECISION of ``split_product`` in kernels/chunk.py.

        Args:
            exact: Flag that the product must be as accurate as a loop over time next to 16-bit inputs. Matrix units truncate the
                terms that they add, so their error is 2 to 3 times that of such a loop.
        """
        if self.uses_tf32:
            return "tf32"
        return "ieee" if exact or self.q.dtype is torch.float32 or interpreting() else "bf16x6"

    def mma(self, *, exact: bool = False) -> Mma:
        """Return the requirement on the matrix instructions of a kernel, which ``onelaunch inspect`` checks.

        ``exact`` says that the kernel multiplies float32 without loss of precision, as it does for float32 inputs without TF32.
        Some architectures have no matrix instruction for that.
        """
        return Mma.WARP_OR_NONE if self.precision(exact=exact) == "ieee" and not interpreting() else Mma.WARP

    @property
    def slots(self) -> int:
        """Upper bound of the number of chunks of all sequences, which the host knows without reading the offsets.

        It is the number of CTAs along time and of stored states.
        """
        batch, length = self.q.shape[:2]
        return batch * cdiv(length, CHUNK) if self.sequences.offsets is None else length // CHUNK + self.sequence_count

    def numbers(self, heads: int | None = None) -> tuple[int, ...]:
        """Return T, H, K, V, N, in the order of the kernels' parameters; H is ``heads``, by default those of the output."""
        _, length, most, keys, values = self.sizes
        return length, most if heads is None else heads, keys, values, self.sequence_count

    def parts(self, exact: bool) -> int:
        """Return the number of 16-bit terms of a float32 factor next to the inputs; 0 for a product of float32."""
        return 0 if exact and self.q.dtype is not torch.float32 else self.rounding.parts

    def flags(self, tiles: Tiles, *, exact: bool = False) -> dict[str, Any]:
        """Return the constants that the kernels of chunks share, and their number of warps.

        ``exact`` says that a float32 result depends on the products, whose float32 operands must then not be rounded.
        kernels/chunk.py explains the constants.
        """
        _, length, _, keys, values = self.sizes
        packed = self.sequences.offsets is not None
        even = not packed and length % CHUNK == 0 and keys % tiles.keys == 0 and values % tiles.values == 0
        return {
            "BK": tiles.keys, "BV": tiles.values, "PRECISION": self.precision(exact=exact), "EVEN": even,
            "SCALAR": self.scalar, "PACKED": packed, "num_warps": tiles.warps,
        }  # fmt: skip


def ratio(many: int, few: int) -> int:
    """Return how many of ``many`` heads share one of ``few`` heads: 0 if there are fewer of ``many``, 1 where ``few`` is 0."""
    return many // few if few else 1


def strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of batch entries, steps and heads in elements, tensor by tensor."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:3])


def _empty_states(call: Attention, *, exact: bool) -> torch.Tensor:
    """Allocate a state per chunk, in the inputs' dtype unless ``exact``."""
    *_, keys, values = call.sizes
    dtype = torch.float32 if exact else call.q.dtype
    return torch.empty((call.slots, call.heads.state, keys, values), dtype=dtype, device=call.q.device)


def empty_final(call: Attention, *, wanted: bool) -> torch.Tensor:
    """Allocate the final state ``[N, heads, K, V]``; no elements if it is not wanted."""
    *_, keys, values = call.sizes
    return call.q.new_empty((call.sequence_count, call.heads.state, keys, values) if wanted else (0,), dtype=torch.float32)


def empty_output(call: Attention) -> torch.Tensor:
    """Allocate the output ``[B, T, H, V]``, contiguous."""
    batch, length, heads, _, values = call.sizes
    return torch.empty((batch, length, heads, values), dtype=call.v.dtype, device=call.v.device)


def chunk_states(call: Attention, *, want_final: bool, exact: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the initial state of each chunk, and the final state ``[N, heads, K, V]`` (no elements if it is not wanted).

    ``exact`` keeps them in float32.
    """
    heads = call.heads
    tiles = _chunk_state_tiles(*call.sizes[3:], family(call.q.device))
    states, final = _empty_states(call, exact=exact), empty_final(call, wanted=want_final)
    Launch(
        chunk_kernels.chunk_state_kernel, _chunk_state_grid(call, tiles),
        call.k, call.v, call.g, call.sequences.initial, call.sequences.offsets, states, final, call.scale,
        *call.numbers(heads.state), *strides(call.k, call.v, call.g), mma=call.mma(exact=want_final or exact),
        STAGES=tiles.stages, PARTS=call.parts(want_final or exact), FIRST=call.sequences.initial is not None, LAST=want_final,
        REVERSE=False, ADDED_GROUP=ratio(heads.state, heads.k), VALUES_GROUP=ratio(heads.state, heads.v),
        G_GROUP=ratio(heads.state, heads.g), SUMMED=1,
        **call.flags(tiles, exact=want_final or exact),
    ).run()  # fmt: skip
    return states, final


def _chunk_state_grid(call: Attention, tiles: Tiles) -> tuple[int]:
    """Return the grid of the chunk state pass: a CTA per tile of the state, head and sequence."""
    *_, keys, values = call.sizes
    return (call.sequence_count * call.heads.state * cdiv(keys, tiles.keys) * cdiv(values, tiles.values),)


def chunk_output(
    call: Attention, values: torch.Tensor, states: torch.Tensor, *, transposed: bool, into: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute o from v and each chunk's initial state; with ``transposed``, dv from do and each chunk's final-state gradient.

    The result is written to ``into``, see :class:`Into`, or to new memory.
    """
    *_, keys, width = call.sizes
    heads, groups = call.heads, call.heads.groups
    tiles = _chunk_output_tiles(keys, width, family(call.q.device))
    out = output_like(call.v, into) if transposed else empty_output(call)
    written, rounding = heads.v if transposed else heads.output, call.rounding
    Launch(
        chunk_output_kernels.chunk_output_kernel, (call.slots * written * cdiv(width, tiles.values),),
        call.q, call.k, values, call.g, call.sequences.offsets, states, out, call.scale,
        *call.numbers(written), *strides(call.q, call.k, values, call.g), pitch_of(out), mma=call.mma(),
        BISECTION_STEPS=call.sequences.bisection_steps(), PARTS=rounding.parts, LIMIT=rounding.limit, LARGEST=rounding.largest,
        TRANSPOSED=transposed, Q_GROUP=groups.q, K_GROUP=groups.k, VALUES_GROUP=1 if transposed else groups.v,
        G_GROUP=groups.g, STATE_GROUP=groups.state, STATES=ratio(heads.state, heads.v) if transposed else 1,
        QUERIES=groups.state if transposed else 1, num_stages=tiles.stages, **call.flags(tiles),
    ).run()  # fmt: skip
    return out


def forward(call: Attention, *, want_final: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``o [B, T, H, V]`` and the final state ``[N, heads, K, V]``, which has no elements if it is not wanted."""
    states, final = chunk_states(call, want_final=want_final)
    return chunk_output(call, call.v, states, transposed=False), final


def _step_tiles(keys: int, values: int, queries: int = 1) -> Tiles:
    """Return the tiles of the loop over time: all keys, and as many values as keep the state within 64 registers per thread.

    If ``queries`` of a group read a state, the loop over them needs registers too, and the state gets 32. They are not tuned yet.
    """
    rows = block(keys, 512)
    return Tiles(rows, block(values, (8192 if queries == 1 else 4096) // max(rows, 128)))


def step(call: Attention, *, want_final: bool, gv: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the results of :func:`forward` step by step; the final state lies in memory as the initial one does.

    ``gv [B, T, Hg, V]`` are log-decays of value channels, for as many heads as g; their last dimension is contiguous.
    """
    *_, keys, values = call.sizes
    heads, initial = call.heads, call.sequences.initial
    tiles = _step_tiles(keys, values, heads.groups.state)
    out = empty_output(call)
    final = final_like(initial, empty_final(call, wanted=want_final))
    along = (values, 1) if initial is None or initial.is_contiguous() else (1, keys)  # strides of states along K and V
    Launch(
        step_kernels.step_kernel, (call.sequence_count * heads.state * cdiv(values, tiles.values),),
        call.q, call.k, call.v, call.g, gv, initial, call.sequences.offsets, out, final, call.scale,
        *call.numbers(heads.state), *along, *strides(call.q, call.k, call.v, call.g, call.g if gv is None else gv),
        BK=tiles.keys, BV=tiles.values, SCALAR=call.scalar, GV=gv is not None, PACKED=call.sequences.offsets is not None,
        FIRST=initial is not None, LAST=want_final, Q_GROUP=max(ratio(heads.state, heads.q), 1),
        K_GROUP=ratio(heads.state, heads.k), V_GROUP=ratio(heads.state, heads.v),
        G_GROUP=ratio(heads.state, heads.g), QUERIES=heads.groups.state,
        num_warps=tiles.warps, num_stages=tiles.stages,
    ).run()  # fmt: skip
    return out, final


def final_like(initial: torch.Tensor | None, final: torch.Tensor) -> torch.Tensor:
    """Return memory for the final state in the order of the initial one.

    A caller that keeps values first, ``[N, H, V, K]``, gets such a state back. A final state that is not wanted (one dimension,
    no elements) is returned as it is.
    """
    if initial is None or initial.is_contiguous() or final.dim() != 4:
        return final
    return torch.empty_like(final.mT, memory_format=torch.contiguous_format).mT


# The backward pass


class Gradients(NamedTuple):
    """Gradients of a call's tensors, in their dtypes and shapes."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    initial: torch.Tensor
    """``[N, H, K, V]``, or no elements without an initial state."""


class Into(NamedTuple):
    """Destinations of the gradients of q, k and v: ``[B, T, H, X]``, columns of one matrix.

    Tokens are one pitch apart, and batch entries follow each other; heads and channels are contiguous. TMA wants the pitch and
    each address to be multiples of 16 bytes. q and k have the same pitch.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def output_like(tensor: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    """Return the destination of a result shaped ``[B, T, H, X]`` like ``tensor``: ``into``, or new contiguous memory.

    Raises:
        ValueError: ``into`` has another shape or dtype, or strides that :class:`Into` excludes.
    """
    if into is None:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    (batch, length, heads, channels), strides = tensor.shape, into.stride()
    together = strides[3] == 1 and (heads == 1 or strides[2] == channels)
    in_order = batch == 1 or strides[0] == length * pitch_of(into)
    if into.shape != tensor.shape or into.dtype != tensor.dtype or not (together and in_order):
        raise ValueError(f"cannot write {list(tensor.shape)} into {list(into.shape)} of strides {strides}")
    return into


def pitch_of(tensor: torch.Tensor) -> int:
    """Return the elements from token to token of ``[B, T, H, X]``, where a batch entry follows the one before without a gap.

    Views of a single token may have any stride there, so that of the batch is taken.
    """
    return tensor.stride(1) if tensor.shape[1] > 1 else tensor.stride(0)


def exact_gradients(call: Attention) -> bool:
    """Return whether nothing may be rounded on the way to dq, dk and dg.

    A float32 dg next to 16-bit inputs must have float32's accuracy, and float16 has too narrow a range for products of
    gradients.
    """
    return call.g.dtype is torch.float32 or call.q.dtype is torch.float16


def chunk_state_gradients(
    call: Attention, do: torch.Tensor, dfinal: torch.Tensor | None, *, exact: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradient of each chunk's final state, and that of the initial state (no elements where there is none)."""
    heads = call.heads
    tiles, wanted = _chunk_state_tiles(*call.sizes[3:], family(call.q.device)), call.sequences.initial is not None
    dstates, dinitial = _empty_states(call, exact=exact), empty_final(call, wanted=wanted)
    Launch(
        chunk_kernels.chunk_state_kernel, _chunk_state_grid(call, tiles),
        call.q, do, call.g, dfinal, call.sequences.offsets, dstates, dinitial, call.scale,
        *call.numbers(heads.state), *strides(call.q, do, call.g), mma=call.mma(exact=wanted or exact),
        STAGES=tiles.stages, PARTS=call.parts(wanted or exact), FIRST=dfinal is not None, LAST=wanted, REVERSE=True,
        ADDED_GROUP=heads.groups.q, VALUES_GROUP=1, G_GROUP=ratio(heads.state, heads.g), SUMMED=heads.groups.state,
        **call.flags(tiles, exact=wanted or exact),
    ).run()  # fmt: skip
    return dstates, dinitial


def backward(call: Attention, do: torch.Tensor, dfinal: torch.Tensor | None, into: Into | None = None) -> Gradients:
    """Compute the gradients of all inputs from those of ``o`` and of the final state; only the inputs were saved."""
    do, dfinal = inner_contiguous(do), None if dfinal is None else dfinal.contiguous()
    exact = exact_gradients(call)
    rounding = _ROUNDINGS[torch.float32] if exact and call.q.dtype is not torch.float32 else call.rounding
    exact_states = exact or call.scalar  # one dg per head sums over a whole state, in which its rounding would show
    states, _ = chunk_states(call, want_final=False, exact=exact_states)
    dstates, dinitial = chunk_state_gradients(call, do, dfinal, exact=exact_states)
    to_q, to_k, to_v = into or (None, None, None)
    dv = chunk_output(call, do, dstates, transposed=True, into=to_v)
    tiles, groups = _gradient_tiles(*call.sizes[3:], family(call.q.device)), call.heads.groups
    dq, dk, dg = output_like(call.q, to_q), output_like(call.k, to_k), output_like(call.g, None)
    shared = ((dq, groups.q), (dk, groups.k), (dg, groups.g))
    parts = [gradient if group == 1 else empty_parts(gradient, call.sizes[2]) for gradient, group in shared]
    Launch(
        backward_kernels.gradients_kernel, (call.slots * call.sizes[2],),
        call.q, call.k, call.v, call.g, do, call.sequences.offsets, states, dstates, *parts, call.scale,
        *call.numbers(), *strides(call.q, call.k, call.v, call.g, do), pitch_of(dq if groups.q == 1 else dk), mma=call.mma(),
        BISECTION_STEPS=call.sequences.bisection_steps(), EXACT=exact, PARTS=call.parts(exact),
        LIMIT=rounding.limit, LARGEST=rounding.largest,
        Q_GROUP=groups.q, K_GROUP=groups.k, V_GROUP=groups.v, G_GROUP=groups.g, STATE_GROUP=groups.state,
        num_stages=tiles.stages, **call.flags(tiles, exact=exact),
    ).run()  # fmt: skip
    for part, (gradient, group) in zip(parts, shared, strict=True):
        if group > 1:
            sum_heads(part, gradient)
    return Gradients(dq, dk, dv, dg.squeeze(-1) if call.scalar else dg, dinitial)


def empty_parts(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    """Allocate what each of ``heads`` heads gives to a gradient of shared heads: ``[B, T, heads, X]`` float32, contiguous."""
    batch, length, _, channels = gradient.shape
    return torch.empty((batch, length, heads, channels), dtype=torch.float32, device=gradient.device)


_SUM_BLOCK = 1024
"""Elements of a CTA of ``sum_heads_kernel``; not measured yet."""


def sum_heads(parts: torch.Tensor, gradient: torch.Tensor) -> None:
    """Fill a gradient ``[B, T, Hx, X]`` with the sums of the heads of ``parts`` that share a head of it."""
    batch, length, heads, channels = gradient.shape
    block = min(power_of_2(heads * channels), _SUM_BLOCK)
    Launch(
        sum_kernels.sum_heads_kernel, (batch * length, cdiv(heads * channels, block)),
        parts, gradient, heads, channels, pitch_of(gradient),
        GROUP=ratio(parts.shape[2], heads), BLOCK=block, num_warps=4,
    ).run()  # fmt: skip
