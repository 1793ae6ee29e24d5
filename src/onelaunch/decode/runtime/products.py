"""Products of a prompt's tokens with matrices that lie in the weight stream, by a kernel that reads the stream in place.

:class:`StreamProducts` multiplies by any matrix of a layer and by the LM head (``codegen/kernels/stream_product.py``), instead of
a copy by ``unpacking.py`` and a product by cuBLAS. Weights are then read once, and not read, written and read again. Operands
have their channels in the order of the stream (:func:`~onelaunch.decode.plan.packing.as_operands`), and so have the results that
other products read. ``packed_prompts.py`` runs layers with it, and :func:`configure` chooses tiles.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.plan.packing import Places, Stream, as_operands, columns, layout_of_stream, row_order, width
from onelaunch.decode.plan.phases import PRODUCTS, STEP, TILE, WARP_COLUMNS, Op, Plan, depth, piece_columns
from onelaunch.device.architectures import HOPPER_SMS, find_architecture
from onelaunch.launch.build import Build, builds_of
from onelaunch.launch.imitation import record
from onelaunch.launch.side_by_side import compile_builds, jobs

_BLOCK_COLUMNS = 64
"""Columns of a block of the products' loop over K: 128 bytes, the widest swizzle of shared memory."""

_ARCHITECTURE = "sm_90a"
"""Architecture of the devices on which :class:`StreamProducts` is made."""


class Tiles(NamedTuple):
    """Tile sizes of a product, and the options of its kernel."""

    rows: int
    """Rows of the matrix of a CTA: 64, 128 or 256."""
    tokens: int
    """Tokens of a CTA, a power of two of at least 16."""
    splits: int
    """Number of CTAs that divide the columns of a tile; with more than one, a second launch adds their sums."""
    stages: int
    """Blocks of columns in shared memory, counting the one that is multiplied."""
    warps: int
    """Warps of a CTA, 4 or 8."""

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of the blocks of columns."""
        return 2 * self.stages * _BLOCK_COLUMNS * (self.rows + self.tokens)


class Table(NamedTuple):
    """Addresses of a phase's matrix in the stream, for the kernel."""

    sources: torch.Tensor
    """Row of the stream for each row of the product, ``[rows]`` int32: eight times the tile plus the row in it."""
    starts: torch.Tensor
    """Place of each run of a tile's columns, in parts of 512 bytes, ``[layers, tiles, runs]`` int32; the head has one layer."""
    columns: int
    """Columns of the matrix."""
    run: int
    """Columns of a run; the last one may have fewer."""
    steps: int
    """0 if the parts of a run lie in order; else part ``i`` is the one at ``i // steps + i % steps * 8``."""


@functools.lru_cache(maxsize=1024)
def configure(tokens: int, rows: int, columns: int) -> Tiles:
    """Return the tiles of a product ``[tokens, columns]`` by ``[rows, columns]``.

    They follow from times on an H100, with 16, 128 and 512 tokens and the matrices of Qwen3-0.6B and 8B (notebook of decoding).
    Tiles of 64 rows were faster where tiles of 128 rows give fewer CTAs than the device has SMs, and for few tokens except in LM
    heads. Splits were faster where even those tiles fill less than half of the SMs, or with 64 and 128 tokens not all of
    them, at the cost of the sums that are stored and added.
    """
    if tokens <= 128:
        block = max(16, 1 << (tokens - 1).bit_length())
    else:
        block = 256 if -(-tokens // 256) * 256 <= -(-tokens // 128) * 128 else 128
    ctas = -(-tokens // block) * -(-rows // 128)
    if block <= 32:
        tall = rows > 128 * 2 * HOPPER_SMS
    elif block <= 128:
        tall = ctas >= HOPPER_SMS
    else:
        tall = ctas > HOPPER_SMS // 2 or columns > 4096
    if not tall:
        ctas = -(-tokens // block) * -(-rows // 64)
    splits, enough = 1, HOPPER_SMS if block in (64, 128) else HOPPER_SMS // 2
    while ctas * splits <= enough and splits < 8 and columns > 1024 and columns >= 4 * splits * _BLOCK_COLUMNS:
        splits *= 2
    if tall:
        return Tiles(128, block, splits, *{16: (6, 4), 32: (5, 4), 64: (4, 4), 128: (3, 4), 256: (4, 8)}[block])
    return Tiles(64, block, splits, *{16: (8, 4), 32: (6, 4), 64: (5, 4), 128: (4, 4), 256: (3, 4)}[block])


def run_columns(plan: Plan, op: Op) -> int:
    """Return how many columns of a tile follow each other at regular distances in the stream."""
    if op == "o" and plan.blocks is not None:
        return min(plan.blocks.channels, depth(plan.config, plan.blocks.width) * STEP)
    return depth(plan.config, width(plan, op)) * STEP


def takes(plan: Plan) -> bool:
    """Return whether the kernel reads the stream of a plan: a block of columns must not reach into a second run."""
    if plan.blocks is None:
        return True
    run = run_columns(plan, "o")
    alone = plan.blocks.channels == plan.config.query_size  # one run, which may end anywhere
    return (alone and run == plan.blocks.channels) or (run % _BLOCK_COLUMNS == 0 and plan.blocks.channels % run == 0)


def sources_of(config: ModelConfig, op: Op) -> torch.Tensor:
    """Return the row of the stream for each row of a product, ``[rows]`` int64.

    Rows that become channels of another product's operand are in the order of :func:`as_operands`: those of values, of the
    residual stream, and of gate and up, of which 8 rows of one and 8 of the other take turns.
    """
    order = row_order(config, op).flatten()
    order = order[order >= 0]
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device="cpu")
    if op == "lm_head":
        return places
    if op == "qkv":
        natural = config.query_size + config.key_value_size
        return torch.cat([places[:natural], as_operands(places[natural:])])
    if op == "gate_up":
        return as_operands(places.view(2, -1)).view(2, -1, TILE).transpose(0, 1).flatten()
    return as_operands(places)


def tables_of(plan: Plan, places: Mapping[Op, Places]) -> dict[Op, Table]:
    """Return the addresses of all matrices of a stream, which the kernel :func:`takes`, on the device of ``places``."""
    return {op: _table_of(plan, op, places[op]) for op in PRODUCTS}


def _table_of(plan: Plan, op: Op, places: Places) -> Table:
    """Return the addresses of a phase's matrix."""
    config, run = plan.config, run_columns(plan, op)
    layers = torch.arange(1 if op == PRODUCTS[-1] else config.num_hidden_layers, device=places.indices.device)[:, None, None]
    per_piece = piece_columns(config) // WARP_COLUMNS
    sources = sources_of(config, op).int().to(places.indices.device)
    if op != "o" or plan.blocks is None:
        starts = places.indices[:, :: run // piece_columns(config)] + layers * places.to_next_layer[:, None]
        return Table(sources, (starts * per_piece).int().contiguous(), columns(config, op), run, 0)
    blocks, tiles = plan.blocks, plan.blocks.rows // TILE
    side_by_side = tiles > 1
    # Parts of a block, in the order of its columns, at which runs of its tiles begin: [tiles, runs of a query split].
    begins = torch.arange(0, blocks.channels, run, device=places.indices.device) // WARP_COLUMNS
    begins = begins + torch.arange(tiles, device=begins.device)[:, None] * (blocks.tile_columns // WARP_COLUMNS)
    deep = blocks.width // STEP
    parts = begins // deep + begins % deep * (STEP // WARP_COLUMNS) if side_by_side else begins
    pieces = places.indices.view(-1, blocks.count, places.indices.shape[1])[:, :, parts // per_piece]
    starts = (pieces * per_piece + parts % per_piece).permute(1, 2, 0, 3).flatten(0, 1).flatten(1)  # [tiles, runs]
    steps = (places.to_next_layer * per_piece).view(-1, blocks.count).transpose(0, 1)[:, None, :, None]
    starts = starts + layers * steps.expand(-1, tiles, -1, parts.shape[1]).reshape(len(starts), -1)
    return Table(sources, starts.int().contiguous(), columns(config, op), run, deep if side_by_side else 0)


class StreamProducts:
    """Products with the matrices of a model's stream.

    Args:
        stream: Stream, of 16-bit floats.
        tables: Addresses of its matrices by :func:`tables_of`, on its device.
    """

    def __init__(self, stream: Stream, tables: Mapping[Op, Table]) -> None:
        self._stream, self.tables = stream, tables
        self._compiled: set[tuple[_Call, ...]] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of the tables on the device."""
        return sum(part.nbytes for table in self.tables.values() for part in table if isinstance(part, torch.Tensor))

    def compile(self, calls: Sequence[tuple[Op, int, bool]]) -> None:
        """Compile the kernels of several products on threads, in place of one after the other at their launches.

        Args:
            calls: Phase, number of tokens, and whether there is a bias, of each product. Calls that were given before cost
                nothing.
        """
        key = tuple(_Call(*each) for each in calls)
        if not self._stream.data.is_cuda or key in self._compiled:
            return
        self._compiled.add(key)
        with contextlib.suppress(Exception):  # what does not compile here raises at its launch
            architecture = find_architecture(_ARCHITECTURE)
            compile_builds(_builds(self.tables, self._stream.data.dtype, key, architecture.name), architecture, jobs())

    def multiply(
        self, op: Op, layer: int, x: torch.Tensor, bias: torch.Tensor | None = None, tiles: Tiles | None = None
    ) -> torch.Tensor:
        """Return the product of tokens with a matrix, in the dtype of the stream.

        Args:
            op: Phase of the matrix.
            layer: Number of the layer; 0 for the LM head.
            x: Tokens ``[T, columns]``, contiguous, in the dtype of the stream, with their channels in the order of
                :func:`~onelaunch.decode.plan.packing.as_operands`.
            bias: Addends of the product's rows ``[rows]``, in their order; not for gate and up.
            tiles: Tiles; by default those of :func:`configure`.

        Returns:
            For gate and up ``silu(x G^T) * (x U^T)``, ``[T, intermediate size]``; else ``x W^T + bias``, ``[T, rows]``. Queries,
            keys and logits are in the model's order, all other channels in that of operands.
        """
        from onelaunch.decode.codegen.kernels.stream_product import product_kernel, sum_kernel  # imports Triton
        from onelaunch.launch.launch import Launch, Mma

        table, tokens = self.tables[op], len(x)
        rows, gated = len(table.sources), op == "gate_up"
        tiles = configure(tokens, rows, table.columns) if tiles is None else tiles
        out = x.new_empty(tokens, rows // 2 if gated else rows)
        sums, padded = out, -(-rows // tiles.rows) * tiles.rows
        if tiles.splits > 1:
            sums = x.new_empty(tiles.splits, tokens, padded, dtype=torch.float32)
        Launch(
            product_kernel, (-(-tokens // tiles.tokens), padded // tiles.rows, tiles.splits),
            self._stream.data, x, sums, table.sources, table.starts, None if tiles.splits > 1 else bias,
            layer * table.starts[0].numel(), tokens, rows, table.columns // 8, table.starts.shape[2], table.run,
            mma=Mma.WIDEST, STEPS=table.steps, EVEN=table.columns % _BLOCK_COLUMNS == 0, GATED=gated and tiles.splits == 1,
            SPLIT=tiles.splits > 1, BR=tiles.rows, BT=tiles.tokens, BK=_BLOCK_COLUMNS,
            num_warps=tiles.warps, num_stages=tiles.stages,
        ).run()  # fmt: skip
        if tiles.splits > 1:
            Launch(
                sum_kernel, (-(-tokens // 4), -(-padded // 512)), sums, out, bias, tokens, rows, padded,
                GATED=gated, SPLITS=tiles.splits, BR=512, BT=4, num_warps=4,
            ).run()  # fmt: skip
        return out


def builds_of_products(plan: Plan, architecture: str, counts: tuple[int, ...] = (512, 128, 16)) -> list[Build]:
    """Return the builds of the products of ``counts`` tokens each with the matrices of a plan's layers, and of one with its head.

    Products that differ in sizes alone share a kernel, and are named once.
    """
    config = plan.config
    biased: tuple[Op, ...] = ("qkv", "o") if config.output_bias else ("qkv",)
    calls = [_Call(op, count, config.attention_bias and op in biased) for count in counts for op in PRODUCTS[:-1]]
    if not config.tie_word_embeddings:
        calls.append(_Call(PRODUCTS[-1], 1))
    return _builds(tables_of(plan, layout_of_stream(plan).places), config.dtype, calls, architecture)


class _Call(NamedTuple):
    """Call of :meth:`StreamProducts.multiply`."""

    op: Op
    tokens: int
    biased: bool = False


def _builds(tables: Mapping[Op, Table], dtype: torch.dtype, calls: Sequence[_Call], architecture: str) -> list[Build]:
    """Return the builds of calls with the matrices of a stream, each kernel once."""
    named = []
    with record(architecture) as (device, launches):

        def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        fakes = {
            op: table._replace(
                sources=empty(*table.sources.shape, dtype=torch.int32), starts=empty(*table.starts.shape, dtype=torch.int32)
            )
            for op, table in tables.items()
        }
        data = empty(1)
        products = StreamProducts(Stream(data, data), fakes)
        for op, tokens, biased in calls:
            begun, table = len(launches), tables[op]
            products.multiply(op, 0, empty(tokens, table.columns), empty(len(table.sources)) if biased else None)
            named += [(f"{op} of {tokens} tokens", launch) for launch in launches[begun:]]
    builds = builds_of(named, find_architecture(architecture))
    return list({build.key: build for build in reversed(builds)}.values())[::-1]
