"""Weights in the order of their use: for each CTA one run of memory, a token long, that its copying thread walks through.

Within a phase the order is: groups of up to six tiles; in each, columns in steps of 256, ``depth`` of them; tiles; steps;
the 32 columns of each warp; rows. So every thread's 16 bytes of a product are where a warp reads 512 bytes in a row; its 8
columns are in the order of the product's operands, :func:`as_operands`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.weights import LayerWeights, Weights
from onelaunch.decode.plan.builder import tiles
from onelaunch.decode.plan.phases import (
    GRANULE,
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
    padded,
)  # fmt: skip

MOMENTARY = 1 << 25
"""Bytes of tiles that are packed at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """All weights that products use, repacked."""

    data: torch.Tensor
    """bfloat16, one dimension."""
    starts: torch.Tensor
    """``[CTAs]`` int64: where each one's run begins, in bytes."""


def columns(config: ModelConfig, op: Op) -> int:
    """Return the columns of a phase's matrix."""
    return {"o": config.query_size, "down": config.intermediate_size}.get(op, config.hidden_size)


def width(plan: Plan, op: Op) -> int:
    """Return the columns of a phase's tiles in the stream."""
    return plan.blocks.width if op == "o" and plan.blocks else padded(columns(plan.config, op))


def in_pairs(heads: torch.Tensor) -> torch.Tensor:
    """Channels ``[..., D]`` of heads in the order of tiles: of each 8, four of the first half and the four they rotate with."""
    return heads.unflatten(-1, (2, -1, TILE // 2)).transpose(-3, -2).reshape(heads.shape)


def from_pairs(words: torch.Tensor) -> torch.Tensor:
    """Undo :func:`in_pairs`."""
    return words.unflatten(-1, (-1, 2, TILE // 2)).transpose(-3, -2).reshape(words.shape)


@functools.lru_cache(maxsize=64)
def row_order(config: ModelConfig, op: Op) -> torch.Tensor:
    """Rows of a phase's matrix (of several: one below the other) in the order of its tiles, ``[tiles, 8]``.

    Behind them, -1 is a row of zeros. ``qkv``: a key head's queries, its key, its value, each head's channels in pairs,
    :func:`in_pairs`. ``gate_up``: four channels of the gate, the same four of the up projection.
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


def matrix(weights: Weights, layer: LayerWeights | None, op: Op) -> torch.Tensor:
    """A phase's matrix, ``[rows, columns]`` in Hugging Face's order."""
    if layer is None:
        return weights.lm_head
    if op == "qkv":
        return torch.cat([layer.q_proj, layer.k_proj, layer.v_proj])
    if op == "gate_up":
        return torch.cat([layer.gate_proj, layer.up_proj])
    return layer.o_proj if op == "o" else layer.down_proj


def as_operands(values: torch.Tensor) -> torch.Tensor:
    """Values ``[..., columns]``, of each 8 columns the second pair and the third in each other's places.

    A thread's registers are those of an m16n8k16 then: a quarter of them for each pair of columns, in this order.
    """
    return values.unflatten(-1, (-1, 2, 2, 2)).transpose(-3, -2).reshape(values.shape)


def by_heads(values: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """The output projection ``[H, Q * D]`` as ``[units' blocks * 8, width]``: of a block, tiles of a unit's columns side by side,
    :func:`by_warps`.
    """
    units = values.unflatten(1, (-1, blocks.channels))
    room = values.new_zeros(blocks.count * blocks.rows, units.shape[1], blocks.tile_columns)
    room[: len(units), :, : blocks.channels] = units
    room = room.unflatten(0, (blocks.count, -1, TILE))  # [blocks, tiles, 8, units, columns]
    return by_warps(room.permute(3, 0, 2, 1, 4).reshape(-1, blocks.width), blocks)


def by_warps(values: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Columns ``[..., width]`` of tiles side by side in the order that gives each warp, in its steps, 32 after 32 of one tile."""
    if blocks.tile_columns == blocks.width:
        return values
    return values.unflatten(-1, (WARPS, -1, WARP_COLUMNS)).transpose(-3, -2).reshape(values.shape)


def from_warps(values: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Undo :func:`by_warps`."""
    if blocks.tile_columns == blocks.width:
        return values
    return values.unflatten(-1, (-1, WARPS, WARP_COLUMNS)).transpose(-3, -2).reshape(values.shape)


def in_order(weights: Weights, layer: LayerWeights | None, op: Op, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """A phase's matrix, and its rows in the order of tiles."""
    values = matrix(weights, layer, op)
    if op != "o" or plan.blocks is None:
        return values, row_order(plan.config, op)
    values = by_heads(values, plan.blocks)
    return values, torch.arange(len(values), device="cpu").view(-1, TILE)


def in_tiles(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """``[tiles, steps, warps, 8, 32]``: a matrix's rows in order, columns filled up with zeros, as operands."""
    room = values.new_zeros(len(order) * TILE, padded(values.shape[1]))
    rows = order.flatten()
    rows = rows[rows >= 0].to(values.device)
    room[: len(rows), : values.shape[1]] = values[rows]
    room = as_operands(room)
    return room.view(len(order), TILE, -1, WARPS, WARP_COLUMNS).permute(0, 2, 3, 1, 4)


def granules(plan: Plan, op: Op, cta: int) -> int:
    """Return the number of granules of 4 KB that a CTA loads in a phase."""
    return plan.phase(op).shares[cta].units * (width(plan, op) // STEP)


def stream_bytes(config: ModelConfig, *, summed: bool = False) -> int:
    """Return the bytes of a model's stream, however it is cut; at most, where the output projection is ``summed`` over heads."""
    sizes = {op: tiles(config, op) * (padded(columns(config, op)) // STEP) * GRANULE for op in PRODUCTS}
    if summed:
        sharers = [each for each in range(1, config.queries_per_key + 1) if config.queries_per_key % each == 0]
        cuts = [(config.num_key_value_heads * each, blocks_of(config, each)) for each in sharers]
        sizes["o"] = max(units * blocks.count * (blocks.width // STEP) for units, blocks in cuts) * GRANULE
    return sizes.pop("lm_head") + config.num_hidden_layers * sum(sizes.values())


def packing_bytes(config: ModelConfig, *, summed: bool = False) -> int:
    """Return the most bytes that :func:`pack` takes: the stream, gate and up side by side, and a few copies of some tiles."""
    sizes = {op: columns(config, op) * row_order(config, op).numel() * config.dtype.itemsize for op in PRODUCTS[:-1]}
    return stream_bytes(config, summed=summed) + max(sizes.values()) + 4 * MOMENTARY


def pack(weights: Weights, plan: Plan, again: Stream | None = None) -> Stream:
    """A model's weights for the CTAs of a plan. Plans that cut all matrices alike share a stream.

    Args:
        weights: of the model.
        plan: what each CTA multiplies.
        again: what this gave before, to be written over: addresses that a CUDA graph may hold stay as they are.
    """
    sizes = {op: torch.tensor([granules(plan, op, cta) for cta in range(plan.ctas)], device="cpu") for op in PRODUCTS}
    layer = torch.stack([sizes[op] for op in PRODUCTS[:-1]]).sum(0)
    runs = layer * len(weights.layers) + sizes[PRODUCTS[-1]]
    begin = starts = runs.cumsum(0) - runs
    data = again.data if again else weights.embed_tokens.new_empty((int(runs.sum()) * GRANULE // 2,))
    stream = data.view(-1, GRANULE // 2)
    for op in PRODUCTS[:-1]:
        of_tiles = torch.tensor([share.units for share in plan.phase(op).shares], device="cpu")
        further = layer.repeat_interleave(of_tiles)[:, None]  # to the next layer of the CTA that has a tile
        places, further = (each.to(data.device) for each in (_places(plan, op, begin), further))
        for number, each in enumerate(weights.layers):
            _scatter(*in_order(weights, each, op, plan), places + number * further, stream)
        begin = begin + sizes[op]
    places = _places(plan, PRODUCTS[-1], starts + layer * len(weights.layers)).to(data.device)
    _scatter(*in_order(weights, None, PRODUCTS[-1], plan), places, stream)
    return again or Stream(data, (starts * GRANULE).to(data.device))


def _scatter(values: torch.Tensor, order: torch.Tensor, places: torch.Tensor, stream: torch.Tensor) -> None:
    """A matrix's granules to theirs of the stream, some tiles at a time: there are a few copies of them for a moment."""
    some = max(MOMENTARY // (TILE * padded(values.shape[1]) * values.itemsize), 1)
    for rows, where in zip(order.split(some), places.split(some), strict=True):
        stream.index_copy_(0, where.flatten(), in_tiles(values, rows).flatten(0, 1).flatten(1))


def _places(plan: Plan, op: Op, at: torch.Tensor) -> torch.Tensor:
    """``[tiles, steps]`` int64: places in the stream of a phase's granules, of which those of each CTA begin ``at``."""
    steps, deep = width(plan, op) // STEP, depth(plan.config)

    @functools.cache
    def within(count: int) -> torch.Tensor:
        """A pass of so many tiles."""
        return torch.arange(count * steps, device="cpu").view(-1, count, deep).transpose(0, 1).flatten(1)

    begins = at.tolist()
    found = [
        within(end - begin) + (begins[cta] + begin * steps) for cta in range(plan.ctas) for begin, end in groups_of(plan, op, cta)
    ]
    return torch.cat(found)
