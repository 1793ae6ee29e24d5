"""Segments of a packed projection, and their offsets in the weight, in the results and in the tensors saved for gradients.

z ``[M, N]``, the pre-activations, is the product of x ``[M, D]`` and the packed weight ``[N, D]``, plus the bias. dz is its
gradient, and rstd the factor ``1 / sqrt(sum(z^2) + eps)`` of every head that is normalized, in float32. *Saved pre-activations*
are the columns of z to which SiLU was applied. Users pass a :class:`Segment` per projection. The contract makes a
:class:`Layout` of them, which the other files of this folder read. ``gla_layer`` makes layouts of its own, and
``onelaunch.nn`` names activations by :data:`Activation`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from onelaunch.errors import ArgumentError
from onelaunch.launch.facts import plain
from onelaunch.operation import remembered
from onelaunch.wording import did_you_mean, listing

Activation: TypeAlias = Literal["none", "l2norm", "silu", "sigmoid", "logsigmoid"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
"""All activations. Kernels know an activation by its index here."""

ALIGNMENT = 8
"""Alignment of segments in the packed result and in the saved pre-activations, in columns.

8 elements of 16 bits are 16 bytes, the alignment that TMA needs.
"""


@plain  # a call's plan is looked up by its arguments, of which the segments are one
@dataclass(frozen=True)
class Segment:
    """A block of rows of a packed weight, and the activation of the columns that they project to. Hashable.

    Args:
        name: name of the result, different for each segment of a call.
        heads: number of heads, at least 1.
        head_size: channels of a head, at least 1. With 1, results have no dimension for channels.
        activation: ``none``; ``l2norm`` of every head, ``z / sqrt(sum(z^2) + eps)``; ``silu``; ``sigmoid``; or ``logsigmoid``,
            divided by ``normalizer``.
        normalizer: divisor above 0, for ``logsigmoid`` only.
        bias: whether a bias is added before the activation.

    Raises:
        ArgumentError: an argument is invalid; the message names the segment, what was given and what it must be.
    """

    name: str
    heads: int
    head_size: int
    activation: Activation = "none"
    normalizer: float = 1.0
    bias: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ArgumentError(f"A segment's name is {self.name!r}; it must be a text that is not empty.")
        for what, count in (("heads", self.heads), ("head_size", self.head_size)):
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ArgumentError(f"{what} of segment {self.name!r} is {count!r}; it must be an integer of at least 1.")
        if self.activation not in ACTIVATIONS:
            meant = did_you_mean(str(self.activation), ACTIVATIONS)
            known = f"it must be one of {listing(ACTIVATIONS)}."
            raise ArgumentError(f"activation of segment {self.name!r} is {self.activation!r}; {known}{meant}")
        number = isinstance(self.normalizer, (int, float)) and not isinstance(self.normalizer, bool)
        if not number or not math.isfinite(self.normalizer) or self.normalizer <= 0:
            raise ArgumentError(f"normalizer of segment {self.name!r} is {self.normalizer!r}; it must be a number above 0.")
        if self.normalizer != 1.0 and self.activation != "logsigmoid":
            said = f"normalizer of segment {self.name!r} is {self.normalizer!r}, but its activation {self.activation}"
            raise ArgumentError(f"{said}; only logsigmoid takes one.")
        if not isinstance(self.bias, bool):
            raise ArgumentError(f"bias of segment {self.name!r} is {self.bias!r}; it must be True or False.")

    @property
    def width(self) -> int:
        """Number of columns of the result, and of rows of the weight."""
        return self.heads * self.head_size

    @property
    def shape(self) -> tuple[int, ...]:
        """Trailing shape of the result: ``(heads, head_size)``, or ``(heads,)`` if heads have one channel."""
        return (self.heads,) if self.head_size == 1 else (self.heads, self.head_size)

    @property
    def code(self) -> str:
        """All fields but the name as one word, such as ``16x128:silu`` or ``4x64:logsigmoid/16.0:bias``.

        Registered PyTorch operators get segments in this form, since they accept only types that PyTorch knows. :meth:`read`
        is the inverse.
        """
        word = f"{self.heads}x{self.head_size}:{self.activation}"
        if self.normalizer != 1.0:
            word += f"/{float(self.normalizer)}"
        return f"{word}:bias" if self.bias else word

    @classmethod
    def read(cls, name: str, code: str) -> Segment:
        """Return the segment that a code describes; raise :class:`ArgumentError` if it describes none."""
        sizes, *rest = code.split(":")
        bias = rest[-1:] == ["bias"]
        words = rest[:-1] if bias else rest
        activation, slash, number = (words or ["none"])[0].partition("/")
        try:
            heads, head_size = sizes.split("x")
            segment = (int(heads), int(head_size), float(number) if slash else 1.0)
        except ValueError:
            segment = None
        if segment is None or len(words) > 1:
            raise ArgumentError(
                f"{code!r} is no segment; write HEADSxSIZE, then :ACTIVATION (or :logsigmoid/NUMBER), then :bias."
            )
        heads, head_size, normalizer = segment
        return cls(name, heads, head_size, activation, normalizer, bias)  # pyrefly: ignore[bad-argument-type]


@dataclass(frozen=True)
class SegmentSpan:
    """Offsets of a segment in the packed tensors."""

    segment: Segment
    row: int
    """First row in the weight ``[N, D]``, and first column in z and dz ``[M, N]``."""
    column: int
    """First column in the packed result ``[M, pitch]``, a multiple of 8."""
    norm: int | None
    """Column of the first head in rstd ``[M, norms]``; ``None`` unless the activation is ``l2norm``."""
    kept: int | None
    """First column in the saved pre-activations ``[M, kept]``, a multiple of 8; ``None`` unless the activation is ``silu``."""
    bias: int | None
    """First element in the packed bias ``[biases]``; ``None`` for a segment without bias."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Offsets of all segments of a call. :func:`layout_of` makes and caches it, so it is hashed by identity.

    Gaps between segments of the packed result belong to no segment: they are not written, and no result shows them.
    """

    spans: tuple[SegmentSpan, ...]
    rows: int
    """Number of rows of the weight, N: the sum of all widths."""
    pitch: int
    """Number of columns of the packed result, a multiple of 8."""
    norms: int
    """Number of heads that are normalized, of all segments."""
    kept: int
    """Number of columns of the saved pre-activations, a multiple of 8."""
    biases: int
    """Number of elements of the packed bias: the sum of the widths of the segments that have one."""
    widths: tuple[int, ...]
    """Widths of the segments."""
    code: str
    """Codes of all segments in one string, without their names: all that a kernel needs to know of them."""

    @property
    def gradient_pitch(self) -> int:
        """Row pitch of dz, in elements: N, rounded up to a multiple of 8."""
        return _aligned(self.rows)

    def cut(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return views of a packed result ``[..., pitch]``, one per segment: ``[..., heads, head_size]`` or ``[..., heads]``."""
        leading, results = packed.shape[:-1], []
        parts = packed.split_with_sizes([_aligned(width) for width in self.widths], -1)
        for part, span, width in zip(parts, self.spans, self.widths, strict=True):
            filled = part if width % ALIGNMENT == 0 else part.narrow(-1, 0, width)
            results.append(filled.view(*leading, *span.segment.shape))
        return tuple(results)

    def cut_bias(self, bias: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return one entry per segment: a view of the packed bias, or ``None`` for a segment without bias."""
        if bias is None:
            return (None,) * len(self.spans)
        parts = iter(
            bias.split_with_sizes([width for width, span in zip(self.widths, self.spans, strict=True) if span.segment.bias])
        )
        return tuple([next(parts) if span.segment.bias else None for span in self.spans])


def _aligned(columns: int) -> int:
    """Round a number of columns up to a multiple of 8."""
    return -(-columns // ALIGNMENT) * ALIGNMENT


@remembered
def layout_of(segments: tuple[Segment, ...]) -> Layout:
    """Return the layout of these segments, concatenated in the order given."""
    spans: list[SegmentSpan] = []
    row = column = norms = kept = biases = 0
    for segment in segments:
        normalized, keeps = segment.activation == "l2norm", segment.activation == "silu"
        spans.append(
            SegmentSpan(
                segment,
                row,
                column,
                norms if normalized else None,
                kept if keeps else None,
                biases if segment.bias else None,
            )
        )
        row += segment.width
        column = _aligned(column + segment.width)
        norms += segment.heads * normalized
        kept += _aligned(segment.width) * keeps
        biases += segment.width * segment.bias
    widths = tuple([segment.width for segment in segments])
    code = ",".join([segment.code for segment in segments])
    return Layout(tuple(spans), row, column, norms, kept, biases, widths, code)


@remembered
def read_layout(code: str) -> Layout:
    """Return the layout that a :attr:`Layout.code` describes; its segments are called ``s0``, ``s1``..."""
    return layout_of(tuple([Segment.read(f"s{index}", word) for index, word in enumerate(code.split(","))]))
