"""Unpacking of matrices: from the weight stream back to the layout of Hugging Face, which PyTorch's products read.

:class:`Unpacker` copies a matrix out of a stream, by a kernel of its own on a GPU (``codegen/kernels/unpack.py``) and by PyTorch
elsewhere. ``packed.py`` calls it before each layer of a prompt. ``decode/plan/packing.py`` defines the stream.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.plan.packing import (
    Places,
    Stream,
    as_operands,
    from_warps,
    piece_bytes,
    pieces_of,
    row_order,
    width,
)  # fmt: skip
from onelaunch.decode.plan.phases import PRODUCTS, STEP, TILE, WARP_COLUMNS, Op, Plan, piece_columns

_PARTS = 16
"""Largest number of parts of 512 bytes that a CTA of the kernel copies: 16 words for each of its 128 threads."""

_REORDERED: tuple[Op, ...] = ("qkv", "gate_up")
"""Phases whose matrices have their rows in another order in the stream."""


def other_rows(config: ModelConfig, device: torch.device) -> dict[Op, torch.Tensor]:
    """Return the rows of the tiles of matrices whose rows the stream has in another order, ``[tiles, 8]`` int32."""
    return {op: row_order(config, op).int().to(device) for op in _REORDERED}


class Unpacker:
    """Copies the matrices of a model out of its stream.

    Args:
        plan: Plan for which the stream was packed, or any with the same division of matrices.
        stream: Stream.
        places: Places of the matrices in the stream, on its device.
        rows: Rows of tiles by :func:`other_rows`, on the same device.
    """

    def __init__(self, plan: Plan, stream: Stream, places: Mapping[Op, Places], rows: Mapping[Op, torch.Tensor]) -> None:
        self._plan, self._stream, self._places, self._rows = plan, stream, places, rows

    @property
    def nbytes(self) -> int:
        """Bytes of the tables on the device."""
        tables = [*self._rows.values(), *(each for places in self._places.values() for each in places)]
        return sum(table.nbytes for table in tables)

    def copy(self, op: Op, layer: int, out: torch.Tensor) -> None:
        """Copy a phase's matrix of a layer to ``out``, contiguous ``[rows, columns]``."""
        self._copy(op, layer, 0, len(self._places[op].indices), out)

    def copy_head(self, first: int, out: torch.Tensor) -> None:
        """Copy rows of the LM head from row ``first``, a multiple of 8, to ``out``, contiguous ``[R, H]``."""
        tile = first // TILE
        self._copy(PRODUCTS[-1], 0, tile, tile - (-len(out) // TILE), out)

    def _copy(self, op: Op, layer: int, first: int, end: int, out: torch.Tensor) -> None:
        """Copy tiles ``first`` to ``end`` of a phase's matrix to ``out``."""
        if out.device.type == "cuda" and out.itemsize == 2:
            self._launch(op, layer, first, end, out)
            return
        pieces = self._stream.data.view(-1, piece_bytes(self._plan.config) // 2)[self._places[op].of(layer, first, end)]
        parts = pieces.unflatten(-1, (-1, TILE, WARP_COLUMNS)).permute(0, 3, 1, 2, 4)
        rows = as_operands(parts.reshape(TILE * (end - first), -1))  # swapping two pairs twice changes nothing
        if (blocks := self._plan.blocks) is not None and op == "o":
            tiles = from_warps(rows, blocks).view(-1, blocks.count, TILE, blocks.rows // TILE, blocks.tile_columns)
            tiles = tiles.permute(1, 3, 2, 0, 4)[..., : blocks.channels]  # blocks, tiles, 8, query splits, columns
            out.copy_(tiles.reshape(-1, out.shape[1])[: len(out)])
        elif op in self._rows:
            out[self._rows[op].flatten().long()] = rows[:, : out.shape[1]]
        else:
            out.copy_(rows[: len(out), : out.shape[1]])

    def _launch(self, op: Op, layer: int, first: int, end: int, out: torch.Tensor) -> None:
        """Launch the kernel that copies tiles ``first`` to ``end`` of a phase's matrix to ``out``."""
        from onelaunch.decode.codegen.kernels.unpack import unpack_kernel  # imports Triton, which only prompts need
        from onelaunch.launch.launch import Launch

        config, places, words = self._plan.config, self._places[op], out.shape[1] // 2
        pieces, parts = pieces_of(config, width(self._plan, op)), piece_columns(config) // WARP_COLUMNS
        blocks = self._plan.blocks if op == "o" else None
        side_by_side = blocks is not None and blocks.tile_columns != blocks.width
        block = min(_PARTS, 1 << (pieces * parts - 1).bit_length())
        Launch(
            unpack_kernel, (end - first, -(-pieces * parts // block)),
            self._stream.data.view(torch.int32), out.view(-1).view(torch.int32), places.indices, places.to_next_layer,
            self._rows.get(op), layer, first, len(out),
            PIECES=pieces, PARTS=parts, WORDS=words,
            CHANNELS=blocks.channels // 2 if blocks else words, TILE_PARTS=blocks.tile_columns // WARP_COLUMNS if blocks else 1,
            BLOCKS=blocks.count if blocks else 0, STEPS=blocks.width // STEP if blocks and side_by_side else 0, B=block,
            num_warps=4,
        ).run()  # fmt: skip
