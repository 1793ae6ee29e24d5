"""Kernel that copies a matrix out of the weight stream, into the layout of PyTorch's products.

Computes   out[row, column] = the element of the stream that the packing (``decode/plan/packing.py``) has put there; bit for bit.
Grid       (tiles, blocks of B parts of a tile). A tile is 8 rows, a part those by the 32 columns of a warp, 512 contiguous bytes.
On chip    B parts as 32-bit words, ``[B, 8, 16]``, in registers.
Memory     reads the stream once, in contiguous 512 bytes, and writes the matrix once, in rows of B parts (at most 1 KB). It reads
           two table entries per piece.
Protocol   CTAs do not exchange anything within a launch.
Numerics   a copy.
Caller     ``decode/runtime/unpacking.py``.
Source     docs/notebook/decode.md.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["layer", "first", "count"])
def unpack_kernel(
    stream, out, indices, to_next_layer, rows, layer, first, count,
    PIECES: tl.constexpr, PARTS: tl.constexpr, WORDS: tl.constexpr, CHANNELS: tl.constexpr,
    TILE_PARTS: tl.constexpr, BLOCKS: tl.constexpr, STEPS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Copy B parts of a tile of a layer to ``out``, which has ``count`` rows, from the first one of tile ``first`` on.

    ``indices [tiles, PIECES]`` and ``to_next_layer [tiles]`` say where the stream has the pieces, each of PARTS parts. ``rows
    [tiles, 8]`` are the rows of tiles in ``out``, or ``None`` if they are in order. All arrays but tables are 32-bit words.

    Constants: WORDS: words of a row of ``out``. BLOCKS: 0; or tiles lie side by side, as BLOCKS blocks of each
    query split. Then CHANNELS are the words of a query split's columns, TILE_PARTS the parts of a tile within a block, and STEPS
    the steps of a block over which the parts of each warp are spread, 0 if they lie in order.
    """
    tile = tl.program_id(0)
    part = tl.program_id(1) * B + tl.arange(0, B)
    there = part < PIECES * PARTS
    piece = tl.load(indices + (first + tile) * PIECES + part // PARTS, mask=there, other=0).to(tl.int64)
    piece += tl.load(to_next_layer + first + tile).to(tl.int64) * layer
    row = tl.arange(0, 8)
    word = tl.arange(0, 16)
    at = (piece * PARTS + part % PARTS)[:, None, None] * 128 + (row[:, None] * 16 + word[None, :])[None, :, :]
    values = tl.load(stream + at, mask=there[:, None, None], other=0)
    # Of each four words, which are a thread's 16 bytes, the second and the third change places.
    values = tl.reshape(tl.permute(tl.reshape(values, (B, 8, 4, 2, 2)), (0, 1, 2, 4, 3)), (B, 8, 16))
    if BLOCKS:
        if STEPS:
            part = part % 8 * STEPS + part // 8
        split, block = tile // BLOCKS, tile % BLOCKS
        tiles: tl.constexpr = PIECES * PARTS // TILE_PARTS
        r = ((block * tiles + part // TILE_PARTS) * 8)[:, None] + row[None, :]  # [B, 8]
        c = (part % TILE_PARTS * 16)[:, None] + word[None, :]  # [B, 16]
        valid = (r < count)[:, :, None] & (c < CHANNELS)[:, None, :]
        c += split * CHANNELS
    else:
        numbers = tile * 8 + row if rows is None else tl.load(rows + (first + tile) * 8 + row)
        c = (part * 16)[:, None] + word[None, :]
        r = numbers[None, :]
        valid = (r >= 0)[:, :, None] & (r < count)[:, :, None] & (c < WORDS)[:, None, :]
    valid &= there[:, None, None]
    tl.store(out + r.to(tl.int64)[:, :, None] * WORDS + c[:, None, :], values, mask=valid)
