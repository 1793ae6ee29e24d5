"""Weights in the order of their use: for each CTA one run of memory, a token long, that its copying thread walks through.

Within a phase the order is: groups of up to six tiles; in each, columns in steps of 256, ``depth`` of them; tiles; steps;
the 32 columns of each warp; rows. So every thread's 16 bytes of a product are where a warp reads 512 bytes in a row; its 8
columns are in the order of the product's operands, :func:`as_operands`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from onelaunch.decode.builder import tiles
from onelaunch.decode.config import ModelConfig
from onelaunch.decode.emit import PRODUCTS, WARPS
from onelaunch.decode.plan import GRANULE, STEP, TILE, WARP_COLUMNS, Blocks, Op, Plan, blocks_of, depth, padded, passes_of
from onelaunch.decode.weights import LayerWeights, Weights


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """All weights that products use, repacked."""

    data: torch.Tensor
    """bfloat16, one dimension."""
    starts: torch.Tensor
    """``[CTAs]`` int64: where each one's run begins, in bytes."""


def columns(config: ModelConfig, op: Op) -> int:
    """Of a phase's matrix."""
    return {"o": config.query_size, "down": config.intermediate_size}.get(op, config.hidden_size)


def width(plan: Plan, op: Op) -> int:
    """Of a phase's tiles in the stream, in columns."""
    return plan.blocks.width if op == "o" and plan.blocks else padded(columns(plan.config, op))


def in_pairs(heads: torch.Tensor) -> torch.Tensor:
    """Channels ``[..., D]`` of heads in the order of tiles: of each 8, four of the first half and the four they rotate with."""
    return heads.unflatten(-1, (2, -1, TILE // 2)).transpose(-3, -2).reshape(heads.shape)


def from_pairs(words: torch.Tensor) -> torch.Tensor:
    """What :func:`in_pairs` was given."""
    return words.unflatten(-1, (-1, 2, TILE // 2)).transpose(-3, -2).reshape(words.shape)


@functools.lru_cache(maxsize=64)
def row_order(config: ModelConfig, op: Op) -> torch.Tensor:
    """Rows of a phase's matrix (of several: one below the other) in the order of its tiles, ``[tiles, 8]``.

    Behind them, -1 is a row of zeros. ``qkv``: a key head's queries, its key, its value, each head's channels in pairs,
    :func:`in_pairs`. ``gate_up``: four channels of the gate, the same four of the up projection.
    """
    head, heads, group = config.head_dim, config.num_key_value_heads, config.queries_per_key
    if op == "qkv":
        q = torch.arange(config.query_size).view(heads, group * head)
        k = config.query_size + torch.arange(config.key_value_size).view(heads, head)
        rows = in_pairs(torch.cat([q, k, k + config.key_value_size], 1).view(-1, head)).flatten()
    elif op == "gate_up":
        gate = torch.arange(config.intermediate_size).view(-1, TILE // 2)
        rows = torch.cat([gate, gate + config.intermediate_size], 1).flatten()
    else:
        rows = torch.arange(config.vocab_size if op == "lm_head" else config.hidden_size)
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
    room = values.new_zeros(blocks.count * blocks.rows, units.shape[1], blocks.room)
    room[: len(units), :, : blocks.channels] = units
    room = room.unflatten(0, (blocks.count, -1, TILE))  # [blocks, tiles, 8, units, columns]
    return by_warps(room.permute(3, 0, 2, 1, 4).reshape(-1, blocks.width), blocks)


def by_warps(values: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Columns ``[..., width]`` of tiles side by side in the order that gives each warp, in its steps, 32 after 32 of one tile."""
    if blocks.room == blocks.width:
        return values
    return values.unflatten(-1, (WARPS, -1, WARP_COLUMNS)).transpose(-3, -2).reshape(values.shape)


def from_warps(values: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """What :func:`by_warps` was given."""
    if blocks.room == blocks.width:
        return values
    return values.unflatten(-1, (-1, WARPS, WARP_COLUMNS)).transpose(-3, -2).reshape(values.shape)


def tiles_of(weights: Weights, layer: LayerWeights | None, op: Op, plan: Plan) -> torch.Tensor:
    """A phase's matrix as the stream has it: :func:`in_tiles`."""
    values = matrix(weights, layer, op)
    if op != "o" or plan.blocks is None:
        return in_tiles(values, row_order(plan.config, op))
    values = by_heads(values, plan.blocks)
    return in_tiles(values, torch.arange(len(values)).view(-1, TILE))


def in_tiles(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """``[tiles, steps, warps, 8, 32]``: a matrix's rows in order, columns filled up with zeros, as operands."""
    room = values.new_zeros(len(order) * TILE, padded(values.shape[1]))
    rows = order.flatten()
    rows = rows[rows >= 0].to(values.device)
    room[: len(rows), : values.shape[1]] = values[rows]
    room = as_operands(room)
    return room.view(len(order), TILE, -1, WARPS, WARP_COLUMNS).permute(0, 2, 3, 1, 4)


def granules(plan: Plan, op: Op, cta: int) -> int:
    """Of a CTA in a phase: 4 KB each."""
    return plan.phase(op).shares[cta].units * (width(plan, op) // STEP)


def run_granules(plan: Plan, cta: int) -> int:
    """Of a CTA in a token."""
    layer = sum(granules(plan, op, cta) for op in PRODUCTS[:-1])
    return layer * plan.config.num_hidden_layers + granules(plan, "lm_head", cta)


def stream_bytes(config: ModelConfig, *, summed: bool = False) -> int:
    """Of a model's stream, however it is cut; at most, where the output projection is ``summed`` over heads."""
    sizes = {op: tiles(config, op) * (padded(columns(config, op)) // STEP) * GRANULE for op in PRODUCTS}
    if summed:
        sharers = [each for each in range(1, config.queries_per_key + 1) if config.queries_per_key % each == 0]
        cuts = [(config.num_key_value_heads * each, blocks_of(config, each)) for each in sharers]
        sizes["o"] = max(units * blocks.count * (blocks.width // STEP) for units, blocks in cuts) * GRANULE
    return sizes.pop("lm_head") + config.num_hidden_layers * sum(sizes.values())


def pack(weights: Weights, plan: Plan, again: Stream | None = None) -> Stream:
    """A model's weights for the CTAs of a plan. Plans that cut all matrices alike share a stream.

    Args:
        weights: of the model.
        plan: what each CTA multiplies.
        again: what this gave before, to be written over: addresses that a CUDA graph may hold stay as they are.
    """
    device, half = weights.device, GRANULE // 2
    device, half = weights.device, GRANULE // 2
    in_layer = {op: torch.tensor([granules(plan, op, cta) for cta in range(plan.ctas)]) for op in PRODUCTS[:-1]}
    layer = torch.stack([*in_layer.values()]).sum(0)
    sizes = torch.tensor([run_granules(plan, cta) for cta in range(plan.ctas)])
    at = starts = sizes.cumsum(0) - sizes
    data = again.data if again else weights.embed_tokens.new_empty((int(sizes.sum()) * half,))
    stream = data.view(-1, half)
    for op, count in in_layer.items():
        places = _places(plan, op, at).to(device)
        of_tiles = torch.tensor([share.units for share in plan.phase(op).shares])
        further = layer.repeat_interleave(of_tiles).to(device)[:, None]  # to the next layer of the CTA that has a tile
        for each in weights.layers:
            stream.index_copy_(0, places.flatten(), tiles_of(weights, each, op, plan).flatten(0, 1).flatten(1))
            places += further
        at = at + count
    places = _places(plan, PRODUCTS[-1], starts + layer * len(weights.layers)).to(device)
    stream.index_copy_(0, places.flatten(), tiles_of(weights, None, PRODUCTS[-1], plan).flatten(0, 1).flatten(1))
    return again or Stream(data, (starts * GRANULE).to(device))


def _places(plan: Plan, op: Op, at: torch.Tensor) -> torch.Tensor:
    """``[tiles, steps]`` int64: places in the stream of a phase's granules, of which those of each CTA begin ``at``."""
    steps, deep = width(plan, op) // STEP, depth(plan.config)

    @functools.cache
    def within(count: int) -> torch.Tensor:
        """A pass of so many tiles."""
        return torch.arange(count * steps).view(-1, count, deep).transpose(0, 1).flatten(1)

    begins = at.tolist()
    found = [
        within(end - begin) + (begins[cta] + begin * steps) for cta in range(plan.ctas) for begin, end in passes_of(plan, op, cta)
    ]
    return torch.cat(found)
