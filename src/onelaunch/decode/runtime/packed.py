"""Weights of a model that exist once on the device: as the stream that a kernel reads, and not in the layout of PyTorch.

Short prompts are multiplied by the stream itself (``products.py``). PyTorch's prefill, which reads the others, needs plain
matrices. :class:`PackedWeights` copies them out of the stream, layer by layer, into a buffer of the size of two layers, and the
LM head in pieces. While products read one layer, the next one is copied on a stream beside them. So such a prompt reads the same
numbers, by the same products, as with plain weights. :func:`packed_from` packs a model tensor by tensor, by
way of the same buffer. ``Model.from_pretrained`` loads models for the megakernel's engines by :func:`load_packed`;
``decode/model/forward.py`` and ``kernels.py`` read them.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.weights import LayerWeights, ModelWeights, Reader, parts, reader_of
from onelaunch.decode.plan.packing import BATCH_BYTES, Packer, Places, Stream, layout_of_stream, piece_bytes, stream_bytes
from onelaunch.decode.plan.phases import TILE, Op, Plan
from onelaunch.decode.runtime.order import StreamOrder
from onelaunch.decode.runtime.products import StreamProducts, tables_of, takes
from onelaunch.decode.runtime.unpacking import Unpacker, other_rows
from onelaunch.device.architectures import find_architecture
from onelaunch.device.hardware import current, is_hopper
from onelaunch.launch.build import Build, builds_of
from onelaunch.launch.imitation import record

_MATRICES: dict[Op, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"), "o": ("o_proj",), "gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)
}  # fmt: skip
"""Matrices of a layer, by the phase that multiplies them, in the order in which the phase's matrix stacks them."""


LAYERS_HELD = 2
"""Number of layers for whose matrices the buffer has room on a GPU."""


class Matrices(NamedTuple):
    """Memory for the matrices of one layer, in the layout of Hugging Face."""

    phases: dict[Op, torch.Tensor]
    """Matrix of each phase of a layer, ``[rows, columns]``."""
    projections: dict[str, torch.Tensor]
    """Matrices by their names in :class:`~onelaunch.decode.model.weights.LayerWeights`, as parts of the former."""

    @classmethod
    def within(cls, flat: torch.Tensor, config: ModelConfig) -> Matrices:
        """Divide memory of the size of a layer's matrices among them."""
        shapes = {name.removeprefix("layers.0."): shape for name, _, shape in parts(config)}
        phases: dict[Op, torch.Tensor] = {}
        projections: dict[str, torch.Tensor] = {}
        at = 0
        for op, names in _MATRICES.items():
            rows, columns = [shapes[name][0] for name in names], shapes[names[0]][1]
            phases[op] = flat[at : at + sum(rows) * columns].view(-1, columns)
            projections |= zip(names, phases[op].split(rows), strict=True)
            at += phases[op].numel()
        return cls(phases, projections)


class LayerBuffer:
    """Buffer on the device for the matrices of layers. On a GPU it has room for two, of which one is read and one written.

    Args:
        config: Configuration of the model.
        device: Device of the buffer.

    Attributes:
        places: Memory for the matrices of a layer: one, or two that layers use in turn.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        size, count = _layer_elements(config), LAYERS_HELD if device.type == "cuda" else 1
        self._lock, self._order = threading.RLock(), StreamOrder(device)
        self._flat = torch.empty(count * size, dtype=config.dtype, device=device)
        self._rows, self._columns = TILE * (size // (TILE * config.hidden_size)), config.hidden_size
        self.places = tuple(Matrices.within(each, config) for each in self._flat.split(size))
        self._side: torch.cuda.Stream | None = None
        self._ahead: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self._flat.nbytes

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Let no other thread use the buffer, and the current stream wait for the streams that used it before.

        The buffer's device is the current one inside, since Triton's launches run there.
        """
        with self._lock, current(self._flat.device):
            self._order.join()
            self._ahead = None
            if self._side is not None and not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream().wait_stream(self._side)  # a request that was cancelled may have left a copy there
            yield

    def layer(self, copy: Callable[[int, Matrices], None], number: int, ahead: int | None) -> Matrices:
        """Return the place of a layer's matrices, once the current stream has them there.

        Args:
            copy: Function that enqueues the copy of a layer's matrices to a place.
            number: Number of the layer.
            ahead: Number of the layer that will be asked for next, which is copied meanwhile, on a stream of its own; the next
                one, or ``None`` for none.
        """
        if len(self.places) == 1:
            copy(number, self.places[0])
            return self.places[0]
        current, place = torch.cuda.current_stream(), self.places[number % LAYERS_HELD]
        if self._side is None:
            self._side = torch.cuda.Stream(self._flat.device)
            self._flat.record_stream(self._side)
        if self._ahead == number:
            current.wait_stream(self._side)
        else:
            copy(number, place)
        self._ahead = ahead
        if ahead is not None:
            self._side.wait_stream(current)  # the last products that read the other place are enqueued
            with torch.cuda.stream(self._side):
                copy(ahead, self.places[ahead % LAYERS_HELD])
        return place

    def rows_of(self, count: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the first row, and memory in the buffer for the rows ``[R, H]``, of each piece of a matrix of ``count`` rows."""
        for first in range(0, count, self._rows):
            size = min(self._rows, count - first)
            yield first, self._flat[: size * self._columns].view(size, -1)


@dataclass(frozen=True, eq=False)
class PackedWeights(ModelWeights):
    """Weights of a model as the stream of a plan, with the tensors that are not part of it.

    The tensors of :meth:`layer` and :meth:`head_rows` lie in the buffer, where the next call overwrites them.
    """

    unpacks: ClassVar[bool] = True
    config: ModelConfig
    plan: Plan
    """Plan for which the stream was packed."""
    embed_tokens: torch.Tensor
    """Embedding ``[V, H]``, of which the kernel reads rows; the stream has the matrix of the LM head, even if it is the same."""
    norm: torch.Tensor
    """Factors of the RMS norm before the LM head, ``[H]``."""
    stream: Stream
    """Matrices of all layers, and of the LM head."""
    layers: tuple[dict[str, torch.Tensor], ...]
    """Norm factors and biases of each layer, by their names in :class:`~onelaunch.decode.model.weights.LayerWeights`."""
    buffer: LayerBuffer
    """Buffer for the matrices of a layer."""
    unpacker: Unpacker
    """Functions that copy matrices from the stream to the buffer."""
    products: StreamProducts | None = None
    """Products that read the stream in place; ``None`` on other devices than Hopper GPUs, and if they do not take the plan."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor once, without the buffer."""
        own = {"embed_tokens": self.embed_tokens, "norm": self.norm, "stream": self.stream.data}
        for number, layer in enumerate(self.layers):
            own |= {f"layers.{number}.{name}": tensor for name, tensor in layer.items()}
        return own

    def vectors(self, number: int) -> dict[str, torch.Tensor]:
        """Return the norm factors and biases of a layer."""
        return self.layers[number]

    def layer(self, number: int, ahead: int | None = None) -> LayerWeights:
        """Copy the matrices of a layer to the buffer, and return the layer's tensors."""
        place = self.buffer.layer(self._copy, number, ahead)
        return LayerWeights(**place.projections, **self.layers[number])

    def _copy(self, number: int, place: Matrices) -> None:
        """Copy the matrices of a layer to a place."""
        for op, matrix in place.phases.items():
            self.unpacker.copy(op, number, matrix)

    def head_rows(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the matrix of the LM head in pieces, each copied to the buffer."""
        if self.config.tie_word_embeddings:
            yield 0, self.embed_tokens
            return
        for first, rows in self.buffer.rows_of(self.config.vocab_size):
            self.unpacker.copy_head(first, rows)
            yield first, rows

    def exclusive(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which other threads and streams leave the buffer alone."""
        return self.buffer.exclusive()


def _layer_elements(config: ModelConfig) -> int:
    """Return the number of elements of a layer's matrices."""
    return sum(math.prod(shape) for name, _, shape in parts(config) if name.startswith("layers.0.") and len(shape) == 2)


def packed_bytes(config: ModelConfig, *, summed: bool = False) -> int:
    """Return the most bytes of a model's packed weights, with the buffer and all that loading takes for a while.

    ``summed`` says that the output projection is split over heads.
    """
    size = config.dtype.itemsize
    plain = config.vocab_size * config.hidden_size + LAYERS_HELD * _layer_elements(config)
    vectors = sum(math.prod(shape) for _, _, shape in parts(config) if len(shape) == 1)
    stream = stream_bytes(config, summed=summed)
    tables = 4 * stream // piece_bytes(config)  # as if every layer had tables of its own
    return stream + size * (plain + vectors) + tables + 4 * BATCH_BYTES


@torch.inference_mode(mode=False)  # cached tensors must be usable outside of inference mode too
@torch.no_grad()
def packed_from(read: Reader, plan: Plan, device: torch.device) -> PackedWeights:
    """Pack a model tensor by tensor for the CTAs of a plan.

    Beside the result, the device holds the copies of a batch of tiles for a while.

    Args:
        read: Function that reads the tensors.
        plan: Plan for which to pack.
        device: Device of the result.
    """
    config = plan.config
    buffer = LayerBuffer(config, device)
    place = buffer.places[0]

    def taken(name: str) -> torch.Tensor:
        return read(name).to(device, config.dtype)

    embed_tokens, norm = taken("embed_tokens"), taken("norm")
    packer = Packer(plan, norm)
    names = {name.removeprefix("layers.0."): len(shape) for name, _, shape in parts(config) if name.startswith("layers.0.")}
    layers = []
    for number in range(config.num_hidden_layers):
        for name, matrix in place.projections.items():
            matrix.copy_(read(f"layers.{number}.{name}"))
        for op, matrix in place.phases.items():
            packer.put(op, number, matrix)
        layers.append({name: taken(f"layers.{number}.{name}") for name, dims in names.items() if dims == 1})
    if config.tie_word_embeddings:
        packer.put_head(0, embed_tokens)
    else:
        for first, rows in buffer.rows_of(config.vocab_size):
            rows.copy_(read("untied_head", first, first + len(rows)))
            packer.put_head(first, rows)
    unpacker = Unpacker(plan, packer.stream, packer.places, other_rows(config, device))
    products = None
    if device.type == "cuda" and is_hopper(device) and takes(plan):
        products = StreamProducts(packer.stream, tables_of(plan, packer.places))
    return PackedWeights(config, plan, embed_tokens, norm, packer.stream, tuple(layers), buffer, unpacker, products)


def builds_of_copies(plan: Plan, architecture: str) -> list[Build]:
    """Return the builds of the kernel that copies the matrices of a plan's stream."""
    layout, rows = layout_of_stream(plan), other_rows(plan.config, torch.device("cpu"))
    with record(architecture) as (device, launches):

        def empty(like: torch.Tensor) -> torch.Tensor:
            return torch.empty(like.shape, dtype=like.dtype, device=device)

        data = torch.empty(layout.pieces * piece_bytes(plan.config) // 2, dtype=plan.config.dtype, device=device)
        places = {op: Places(*map(empty, each)) for op, each in layout.places.items()}
        unpacker = Unpacker(plan, Stream(data, data), places, {op: empty(each) for op, each in rows.items()})
        buffer = LayerBuffer(plan.config, device)
        for op, matrix in buffer.places[0].phases.items():
            unpacker.copy(op, 0, matrix)
        if not plan.config.tie_word_embeddings:
            unpacker.copy_head(*next(buffer.rows_of(plan.config.vocab_size)))
    named = list(zip([*buffer.places[0].phases, "lm_head"], launches, strict=False))
    return builds_of(named, find_architecture(architecture))


def load_packed(folder: Path, config: ModelConfig, device: torch.device, plan: Plan) -> PackedWeights:
    """Read the weights of a checkpoint straight into the stream of a plan. The host maps the files and keeps no copy.

    Raises:
        CheckpointError: The same errors as those of :func:`~onelaunch.decode.model.weights.load_weights`.
    """
    with reader_of(folder, config, torch.device("cpu")) as read:
        return packed_from(read, plan, device)
