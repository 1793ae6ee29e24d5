"""Repacking of weights: one contiguous stream per CTA, in the order in which its producer thread copies them during one token.

A CTA's stream has its granules of each layer's products, then those of the LM head. A granule is a tile of 8 rows over 256
columns, 4 KB. Within a phase the order is, from the outermost: groups of up to six tiles; blocks of ``depth`` steps of 256
columns; tiles; steps of the block; warps, with 32 columns each; rows; columns. A matrix whose columns are no whole blocks ends
within a block, with the part of some warp, so that only columns up to a multiple of 32 are padded. The whole stream is then
counted in parts of 512 bytes instead of granules; a *piece* is either. The 16 bytes that each thread needs for an mma
lie where a warp reads 512 contiguous bytes of shared memory, without bank conflicts. The 8 columns in them are in fragment order,
:func:`as_operands`. ``decode/runtime/memory.py`` and ``decode/runtime/kernels.py`` call :func:`pack`. The megakernel's variants
state the memory and the time of a model by :func:`packing_bytes` and :func:`stream_bytes`. ``summed`` and ``blocks`` stand for an
output projection that is split over heads (split-K).
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.weights import LayerWeights, ModelWeights
from onelaunch.decode.plan.division import tiles
from onelaunch.decode.plan.phases import (
    PRODUCTS,
    STEP,
    TILE,
    WARP_COLUMNS,
    WARPS,
    Blocks,
    Op,
    Plan,
    blocks_of,
    depth,
    groups_of,
    piece_columns,
)  # fmt: skip

BATCH_BYTES = 1 << 25
"""Bytes of tiles that are packed at once, which bounds the temporary memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """Repacked weights of all products, for the CTAs of a plan."""

    data: torch.Tensor
    """Pieces of all CTAs, one dimension, bfloat16."""
    starts: torch.Tensor
    """Offset of each CTA's weights in ``data``, in bytes, ``[CTAs]`` int64."""


def columns(config: ModelConfig, op: Op) -> int:
    """Return the number of columns of a phase's matrix."""
    return {"o": config.query_size, "down": config.intermediate_size}.get(op, config.hidden_size)


def width(plan: Plan, op: Op) -> int:
    """Return the number of columns of a phase's tiles, or of its blocks of tiles."""
    return plan.blocks.width if op == "o" and plan.blocks else columns(plan.config, op)


def block_pieces(plan: Plan, op: Op) -> list[int]:
    """Return the number of pieces of each block of a tile's columns, in order; only the last may have fewer than the others."""
    config, whole = plan.config, width(plan, op)
    deep = whole // STEP if op == "o" and plan.blocks and plan.blocks.tile_columns < whole else depth(config, whole)
    most, count = deep * STEP // piece_columns(config), pieces_of(config, whole)
    return [min(most, count - begin) for begin in range(0, count, most)]


def pieces_of(config: ModelConfig, columns: int) -> int:
    """Return the number of pieces of a tile with so many columns."""
    return -(-columns // piece_columns(config))


def piece_bytes(config: ModelConfig) -> int:
    """Return the bytes of a piece in bfloat16."""
    return 2 * TILE * piece_columns(config)


def in_pairs(heads: torch.Tensor) -> torch.Tensor:
    """Permute the channels ``[..., D]`` of heads so that each tile of 8 has four of the first half and their RoPE partners."""
    return heads.unflatten(-1, (2, -1, TILE // 2)).transpose(-3, -2).reshape(heads.shape)


def from_pairs(words: torch.Tensor) -> torch.Tensor:
    """Undo :func:`in_pairs`. Only tests call it, to run plans in PyTorch."""
    return words.unflatten(-1, (-1, 2, TILE // 2)).transpose(-3, -2).reshape(words.shape)


@functools.lru_cache(maxsize=64)
def row_order(config: ModelConfig, op: Op) -> torch.Tensor:
    """Return the rows of a phase's matrix in the order of its tiles, ``[tiles, 8]``; -1 stands for a row of zeros at the end.

    Several matrices of a phase are stacked. ``qkv``: per key head its queries, its key and its value, each head's channels
    permuted by :func:`in_pairs`. ``gate_up``: four rows of the gate, then the same four of the up projection.
    """
    head, heads, group = config.head_dim, config.num_key_value_heads, config.queries_per_key
    if op == "qkv":
        q = torch.arange(config.query_size, device="cpu").view(heads, group * head)
        k = config.query_size + torch.arange(config.key_value_size, device="cpu").view(heads, head)
        rows = in_pairs(torch.cat([q, k, k + config.key_value_size], 1).view(-1, head)).flatten()
    elif op == "gate_up":
        gate = torch.arange(config.intermediate_size, device="cpu").view(-1, TILE // 2)
        rows = torch.cat([gate, gate + config.intermediate_size], 1).flatten()
    else:
        rows = torch.arange(config.vocab_size if op == "lm_head" else config.hidden_size, device="cpu")
    rows = torch.cat([rows, rows.new_full((-len(rows) % TILE,), -1)])
    return rows.view(-1, TILE)


def matrix(layer: LayerWeights, op: Op) -> torch.Tensor:
    """Return the matrix of a phase of a layer, ``[rows, columns]`` in the order of Hugging Face."""
    if op == "qkv":
        return torch.cat([layer.q_proj, layer.k_proj, layer.v_proj])
    if op == "gate_up":
        return torch.cat([layer.gate_proj, layer.up_proj])
    return layer.o_proj if op == "o" else layer.down_proj


def as_operands(values: torch.Tensor) -> torch.Tensor:
    """Permute columns to the fragment order of ``mma.m16n8k16``: of each 8, swap the second and the third pair.

    The four 32-bit registers of a thread's fragment of operand A are then its 16 bytes as they lie. The first and the third
    register are rows 0 to 7 of the operand, the others rows 8 to 15 (codegen/kernels/products.cuh).
    """
    return values.unflatten(-1, (-1, 2, 2, 2)).transpose(-3, -2).reshape(values.shape)


def _by_query_splits(values: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Cut the columns of the output projection ``[H, Q * D]`` by query splits: ``[blocks of all query splits * 8, width]``.

    In each block, several tiles of a query split's columns lie side by side, in the order of :func:`_by_warps`.
    """
    parts = values.unflatten(1, (-1, blocks.channels))
    stacked = values.new_zeros(blocks.count * blocks.rows, parts.shape[1], blocks.tile_columns)
    stacked[: len(parts), :, : blocks.channels] = parts
    stacked = stacked.unflatten(0, (blocks.count, -1, TILE))  # [blocks, tiles, 8, query splits, columns]
    return _by_warps(stacked.permute(3, 0, 2, 1, 4).reshape(-1, blocks.width), blocks)


def _by_warps(values: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Permute the columns ``[..., width]`` of a block so that each warp gets neighbouring parts of 32 columns of one tile.

    In the stream, a warp's columns are every eighth part of 32: one in each step.
    """
    if blocks.tile_columns == blocks.width:
        return values
    return values.unflatten(-1, (WARPS, -1, WARP_COLUMNS)).transpose(-3, -2).reshape(values.shape)


def from_warps(values: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Undo :func:`_by_warps`."""
    if blocks.tile_columns == blocks.width:
        return values
    return values.unflatten(-1, (-1, WARPS, WARP_COLUMNS)).transpose(-3, -2).reshape(values.shape)


def in_order(values: torch.Tensor, op: Op, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a phase's matrix as the stream has it, and the indices of its rows in the order of tiles, ``[tiles, 8]``."""
    if op != "o" or plan.blocks is None:
        return values, row_order(plan.config, op)
    values = _by_query_splits(values, plan.blocks)
    return values, torch.arange(len(values), device="cpu").view(-1, TILE)


def in_tiles(values: torch.Tensor, order: torch.Tensor, columns: int) -> torch.Tensor:
    """Return a matrix as pieces of ``columns`` columns in fragment order, ``[tiles, pieces, parts, 8, 32]``.

    Rows behind the last one of ``order``, and the columns of the last piece behind those of the matrix, are zeros.
    """
    stacked = values.new_zeros(len(order) * TILE, -(-values.shape[1] // columns) * columns)
    rows = order.flatten()
    rows = rows[rows >= 0].to(values.device)
    stacked[: len(rows), : values.shape[1]] = values[rows]
    stacked = as_operands(stacked)
    return stacked.view(len(order), TILE, -1, columns // WARP_COLUMNS, WARP_COLUMNS).permute(0, 2, 3, 1, 4)


def pieces(plan: Plan, op: Op, cta: int) -> int:
    """Return the number of pieces that a CTA loads in a phase; the kernel counts them in ``phase_pieces``."""
    return plan.phase(op).assignments[cta].units * pieces_of(plan.config, width(plan, op))


def stream_bytes(config: ModelConfig, *, summed: bool = False) -> int:
    """Return the bytes of a model's stream, which each token loads once; they do not depend on the number of CTAs.

    If the output projection is split over heads (``summed``), it is the largest size over all numbers of query splits.
    """
    sizes = {op: tiles(config, op) * pieces_of(config, columns(config, op)) * piece_bytes(config) for op in PRODUCTS}
    if summed:
        counts = [each for each in range(1, config.queries_per_key + 1) if config.queries_per_key % each == 0]
        layouts = [(config.num_key_value_heads * each, blocks_of(config, each)) for each in counts]
        sizes["o"] = max(splits * blocks.count * blocks.width for splits, blocks in layouts) * 2 * TILE
    # The left operand is evaluated first, so the sum is over the products of a layer alone.
    return sizes.pop("lm_head") + config.num_hidden_layers * sum(sizes.values())


def packing_bytes(config: ModelConfig, *, summed: bool = False) -> int:
    """Return the most bytes that :func:`pack` takes: the stream, a phase's stacked matrices, and copies of a batch of tiles."""
    sizes = {op: columns(config, op) * row_order(config, op).numel() * config.dtype.itemsize for op in PRODUCTS[:-1]}
    return stream_bytes(config, summed=summed) + max(sizes.values()) + 4 * BATCH_BYTES


def division(plan: Plan) -> tuple[object, ...]:
    """Return a key of how a plan divides the matrices among CTAs. Plans with the same key can share a stream."""
    units = (phase.assignments[cta].units for phase in plan.phases() for cta in range(plan.ctas) if phase.op in PRODUCTS)
    return (plan.ctas, plan.blocks, *units)


class Places(NamedTuple):
    """Places of the pieces of a phase's matrices in the stream, as indices of pieces."""

    indices: torch.Tensor
    """Index of each piece of the first layer, ``[tiles, pieces]`` int32."""
    to_next_layer: torch.Tensor
    """Pieces from a tile to the same tile of the next layer, ``[tiles]`` int32; 0 for the LM head."""

    def of(self, layer: int, first: int = 0, end: int | None = None) -> torch.Tensor:
        """Return the index of each piece of some tiles of a layer, ``[tiles, pieces]`` int64; by default of all tiles."""
        return (self.indices[first:end] + layer * self.to_next_layer[first:end, None]).long()


class Layout(NamedTuple):
    """Layout of a plan's stream."""

    places: dict[Op, Places]
    """Places of the matrices of each product, on the CPU."""
    starts: torch.Tensor
    """Index of each CTA's first piece, ``[CTAs]`` int64."""
    pieces: int
    """Pieces of the whole stream."""


def layout_of_stream(plan: Plan) -> Layout:
    """Return where a plan's stream has each piece of the matrices."""
    head, layers = PRODUCTS[-1], plan.config.num_hidden_layers
    sizes = {op: torch.tensor([pieces(plan, op, cta) for cta in range(plan.ctas)], device="cpu") for op in PRODUCTS}
    layer = torch.stack([sizes[op] for op in PRODUCTS[:-1]]).sum(0)
    sizes_of_ctas = layer * layers + sizes[head]
    begin = starts = sizes_of_ctas.cumsum(0) - sizes_of_ctas
    places = {}
    for op in PRODUCTS:
        units = torch.tensor([assignment.units for assignment in plan.phase(op).assignments], device="cpu")
        to_next_layer = (torch.zeros_like(layer) if op == head else layer).repeat_interleave(units)
        indices = _piece_indices(plan, op, starts + layer * layers if op == head else begin)
        places[op] = Places(indices.int(), to_next_layer.int())
        begin = begin + sizes[op]  # not in place: ``starts`` is the same tensor at first
    return Layout(places, starts, int(sizes_of_ctas.sum()))


class Packer:
    """Writer of a stream, which takes the matrices of a model one by one, in any order.

    Args:
        plan: Plan that says which tiles each CTA multiplies.
        like: Tensor with the dtype and the device of the stream.
        again: Earlier stream to overwrite, so that addresses in captured CUDA graphs stay valid.

    Attributes:
        stream: Stream; complete once every matrix was given.
        places: Places of the matrices of each product, on the stream's device.
    """

    def __init__(self, plan: Plan, like: torch.Tensor, again: Stream | None = None) -> None:
        self._plan = plan
        places, starts, count = layout_of_stream(plan)
        self.places = {op: Places(*(table.to(like.device) for table in each)) for op, each in places.items()}
        size = piece_bytes(plan.config)
        if again is None:
            again = Stream(like.new_empty((count * size // 2,)), (starts * size).to(like.device))
        self.stream = again

    def put(self, op: Op, layer: int, values: torch.Tensor) -> None:
        """Write a phase's matrix of a layer, ``[rows, columns]`` as :func:`matrix` returns it, on the stream's device."""
        self._scatter(*in_order(values, op, self._plan), self.places[op].of(layer))

    def put_head(self, first: int, values: torch.Tensor) -> None:
        """Write some rows of the LM head: a multiple of 8, unless they are the last ones, from row ``first``, such a multiple."""
        tile, count = first // TILE, -(-len(values) // TILE)
        rows = torch.arange(len(values), device="cpu")
        order = torch.cat([rows, rows.new_full((-len(rows) % TILE,), -1)]).view(-1, TILE)
        self._scatter(values, order, self.places[PRODUCTS[-1]].of(0, tile, tile + count))

    def _scatter(self, values: torch.Tensor, order: torch.Tensor, indices: torch.Tensor) -> None:
        """Write a matrix's pieces to ``indices``, a batch of tiles at a time to bound the temporary memory."""
        stream, columns = self.stream.data.view(-1, piece_bytes(self._plan.config) // 2), piece_columns(self._plan.config)
        batch = max(BATCH_BYTES // (TILE * values.shape[1] * values.itemsize), 1)
        for rows, piece in zip(order.split(batch), indices.split(batch), strict=True):
            stream.index_copy_(0, piece.flatten(), in_tiles(values, rows, columns).flatten(0, 1).flatten(1))


def pack(weights: ModelWeights, plan: Plan, again: Stream | None = None) -> Stream:
    """Repack a model's weights for the CTAs of a plan. Plans that divide all matrices alike can share a stream.

    Args:
        weights: Weights of the model.
        plan: Plan that says which tiles each CTA multiplies.
        again: Earlier result to overwrite, so that addresses in captured CUDA graphs stay valid.
    """
    packer = Packer(plan, weights.embed_tokens, again)
    with weights.exclusive():
        for number in range(plan.config.num_hidden_layers):
            layer = weights.layer(number)
            for op in PRODUCTS[:-1]:
                packer.put(op, number, matrix(layer, op))
        for first, values in weights.head_rows():
            packer.put_head(first, values)
    return packer.stream


def _piece_indices(plan: Plan, op: Op, at: torch.Tensor) -> torch.Tensor:
    """Return the index in the stream of each piece of a phase, ``[tiles, pieces]`` int64.

    ``at`` has the index of each CTA's first piece of the phase.
    """
    sizes = block_pieces(plan, op)
    of_tile = sum(sizes)

    @functools.cache
    def within(count: int) -> torch.Tensor:
        """Return the order of pieces in a group of ``count`` tiles, ``[count, pieces]``: in each block, tile after tile."""
        begins = [0, *itertools.accumulate(count * size for size in sizes)]
        blocks = [
            begin + torch.arange(count * size, device="cpu").view(count, size) for begin, size in zip(begins, sizes, strict=False)
        ]
        return torch.cat(blocks, 1)

    begins = at.tolist()
    order = [
        within(end - begin) + (begins[cta] + begin * of_tile)
        for cta in range(plan.ctas)
        for begin, end in groups_of(plan, op, cta)
    ]
    return torch.cat(order)
