"""Segments of a packed projection, and where each of them lies: in the weight, in the results, in what is kept for gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from onelaunch.errors import ArgumentError
from onelaunch.operation import remembered
from onelaunch.wording import did_you_mean, listing

Activation: TypeAlias = Literal["none", "l2norm", "silu", "sigmoid", "logsigmoid"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)

ALIGNMENT = 8
"""Columns: every segment begins at a multiple of it, 16 bytes in 16 bits, as copy engines address memory."""


@dataclass(frozen=True)
class Segment:
    """A block of rows of a packed weight, and what becomes of the columns that they project to. Hashable.

    Args:
        name: of the result; a segment's own among those of a call.
        heads: at least 1.
        head_size: channels of a head, at least 1. With 1, results have no dimension for them.
        activation: ``none``; ``l2norm`` of every head, ``z / sqrt(sum(z^2) + eps)``; ``silu``; ``sigmoid``; or ``logsigmoid``,
            divided by ``normalizer``.
        normalizer: above 0; of ``logsigmoid`` alone.
        bias: whether a bias is added before the activation.

    Raises:
        ArgumentError: naming the segment, what was given and what it has to be.
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
        """Columns, and rows of the weight."""
        return self.heads * self.head_size

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result behind the leading dimensions of x: ``(heads, head_size)``, or ``(heads,)`` for heads of one channel."""
        return (self.heads,) if self.head_size == 1 else (self.heads, self.head_size)

    @property
    def code(self) -> str:
        """All but the name in one word: ``16x128:silu``, ``4x64:logsigmoid/16.0:bias``."""
        word = f"{self.heads}x{self.head_size}:{self.activation}"
        if self.normalizer != 1.0:
            word += f"/{float(self.normalizer)}"
        return f"{word}:bias" if self.bias else word

    @classmethod
    def read(cls, name: str, code: str) -> Segment:
        """The segment that a code stands for; raises :class:`ArgumentError` where it stands for none."""
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
class Place:
    """Where a segment lies."""

    segment: Segment
    row: int
    """The first of its rows in the weight ``[N, D]``; of its columns in z and dz ``[M, N]``."""
    column: int
    """The first of its columns in the packed result ``[M, pitch]``: a multiple of 8."""
    norm: int | None
    """The column of its first head in rstd ``[M, norms]``, for ``l2norm``."""
    kept: int | None
    """The first of its columns in the kept pre-activations ``[M, kept]``, a multiple of 8, for ``silu``."""
    bias: int | None
    """The first of its elements in the packed bias ``[biases]``, if it has one."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the segments of a call lie; made by :func:`layout_of`, which remembers it, so that it is hashed by identity.

    Gaps between segments of the packed result are nobody's: they are not written, and no result shows them.
    """

    places: tuple[Place, ...]
    rows: int
    """N, of the weight: the sum of all widths."""
    pitch: int
    """Columns of the packed result, a multiple of 8."""
    norms: int
    """Heads that are normalized, all segments together."""
    kept: int
    """Columns of the kept pre-activations, a multiple of 8."""
    biases: int
    """Elements of the packed bias: the sum of the widths of the segments that have one."""
    widths: tuple[int, ...]
    """Of the segments."""
    code: str
    """All that a kernel has to know of the segments, in one text: their codes, without their names."""

    @property
    def gradient_pitch(self) -> int:
        """From row to row of dz: N, rounded up to a multiple of 8."""
        return aligned(self.rows)

    def cut(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of the segments in a packed result: from ``[..., pitch]`` to ``[..., heads, head_size]`` or ``[..., heads]``."""
        leading, results = packed.shape[:-1], []
        parts = packed.split_with_sizes([aligned(width) for width in self.widths], -1)
        for part, place, width in zip(parts, self.places, self.widths, strict=True):
            filled = part if width % ALIGNMENT == 0 else part.narrow(-1, 0, width)
            results.append(filled.view(*leading, *place.segment.shape))
        return tuple(results)

    def cut_bias(self, bias: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Views of a packed bias: one for each segment that has one, else ``None``."""
        if bias is None:
            return (None,) * len(self.places)
        parts = iter(
            bias.split_with_sizes([width for width, place in zip(self.widths, self.places, strict=True) if place.segment.bias])
        )
        return tuple([next(parts) if place.segment.bias else None for place in self.places])


def aligned(columns: int) -> int:
    """Rounded up to a multiple of 8."""
    return -(-columns // ALIGNMENT) * ALIGNMENT


@remembered
def layout_of(segments: tuple[Segment, ...]) -> Layout:
    """Where these segments lie, one behind the other in the order given."""
    places: list[Place] = []
    row = column = norms = kept = biases = 0
    for segment in segments:
        normalized, keeps = segment.activation == "l2norm", segment.activation == "silu"
        places.append(
            Place(
                segment,
                row,
                column,
                norms if normalized else None,
                kept if keeps else None,
                biases if segment.bias else None,
            )
        )
        row += segment.width
        column = aligned(column + segment.width)
        norms += segment.heads * normalized
        kept += aligned(segment.width) * keeps
        biases += segment.width * segment.bias
    widths = tuple([segment.width for segment in segments])
    code = ",".join([segment.code for segment in segments])
    return Layout(tuple(places), row, column, norms, kept, biases, widths, code)


@remembered
def read_layout(code: str) -> Layout:
    """The layout that :attr:`Layout.code` stands for; its segments are called ``s0``, ``s1``..."""
    return layout_of(tuple([Segment.read(f"s{index}", word) for index, word in enumerate(code.split(","))]))
