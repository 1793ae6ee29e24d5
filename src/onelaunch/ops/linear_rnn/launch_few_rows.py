"""Launch of the layer's kernel for few rows: the whole layer, of at most 64 rows B T, in one launch.

``variants/few_rows.py`` calls :func:`few_rows`, through the operator in ``autograd.py``, which makes a
:class:`~onelaunch.ops.linear_rnn.launch.Layer`. ``reference.py`` calls :func:`weight_alone`, which reads the weight alone.
"""

from __future__ import annotations

import torch

from onelaunch.device.hardware import processors, shared_bytes
from onelaunch.kernels.common.layout import by_columns, cdiv, inner_contiguous
from onelaunch.kernels.gemm.choice import mma_with, precision_of
from onelaunch.launch.launch import Launch, Mma
from onelaunch.launch.workspace import counters
from onelaunch.ops.linear_rnn import launch_few_rows_hopper
from onelaunch.ops.linear_rnn.configure_few_rows import FewRowsConfig, config_of
from onelaunch.ops.linear_rnn.kernels.few_rows import few_rows_kernel
from onelaunch.ops.linear_rnn.kernels.read_weight import read_weight_kernel
from onelaunch.ops.linear_rnn.launch import Layer, Results

_AT_ONCE = 4
"""Parts whose sums are loaded at once."""


_FARTHEST = 2**31 - 2**20
"""Bound of the distance between the first and the last row of a tile in elements: offsets in a tile are 32-bit."""


def _in_rows(matrix: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a matrix, copied if its columns are not next to each other, or if that many rows lie too far apart."""
    matrix = inner_contiguous(matrix)
    return matrix if 0 <= matrix.stride(0) * rows <= _FARTHEST else matrix.contiguous()


def _weight_of(weight: torch.Tensor, config: FewRowsConfig) -> tuple[torch.Tensor, bool]:
    """Return the weight, copied as :func:`_in_rows` copies, and whether its columns are contiguous.

    The transposed weight of a ``torch.nn.Linear`` has contiguous columns. A copy of it would take longer than the whole layer.
    """
    if by_columns(weight) and 0 <= weight.stride(1) * config.columns <= _FARTHEST:
        return weight, True
    return _in_rows(weight, config.inner), False


def few_rows(layer: Layer) -> Results:
    """Launch the kernel for few rows; it takes any dtype and packed sequences, and keeps nothing for a backward pass.

    On Hopper at most 16 rows in bfloat16 take the kernel of ``launch_few_rows_hopper.py``, for sizes that it divides.
    """
    hopper = launch_few_rows_hopper.config_for(layer)
    if hopper is not None:
        return launch_few_rows_hopper.few_rows(hopper, layer)
    results, sequences = layer.results(), layer.sequences
    batch, length, width, channels = layer.sizes
    rows, device, size = batch * length, layer.x.device, layer.x.element_size()
    config = config_of(rows, width, channels, size, processors(device), shared_bytes(device))
    x, log_decay = (_in_rows(tensor.flatten(0, 1), config.rows) for tensor in (layer.x, layer.log_decay))
    gate = None if layer.gate is None else _in_rows(layer.gate.flatten(0, 1), config.rows)
    weight, turned = _weight_of(layer.weight, config)
    split, packed = config.parts > 1, sequences.offsets is not None
    terms = results.final.new_empty(config.term_elements) if split else None
    flags = {name: flag for name, flag in layer.flags().items() if name != "KEEP"}
    Launch(
        few_rows_kernel, (config.slices * config.parts,),
        x, weight, log_decay, gate, *sequences,  # initial, offsets
        results.y, results.final, terms, counters(device, config.slices) if split else None,
        rows, length, width, channels, sequences.count(batch), config.parts, config.blocks,
        x.stride(0), weight.stride(int(turned)), log_decay.stride(0), 0 if gate is None else gate.stride(0),
        BM=config.rows, BN=config.columns, BK=config.inner, WARPS=config.warps, VECTOR=config.vector, STAGES=config.stages,
        EVEN_D=width == config.inner * config.blocks * config.parts,
        EVEN_V=channels % config.columns == 0,
        SPLIT=split, AT_ONCE=_AT_ONCE, STEPS=sequences.bisection_steps(), SCAN=packed or length > 1, PACKED=packed,
        BY_COLUMNS=turned, PRECISION=precision_of(layer.x), num_warps=config.warps, **flags,
        mma=Mma.NONE if config.vector else mma_with(layer.x, Mma.SMALL),
    ).run()  # fmt: skip
    return results


def weight_alone(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Read ``weight [D, V]`` in one launch, and return the sums of its tiles, ``[ceil(D / rows), ceil(V / columns)]``."""
    weight = inner_contiguous(weight)
    width, channels = weight.shape
    grid = cdiv(width, rows), cdiv(channels, columns)
    out = weight.new_empty(grid)
    Launch(
        read_weight_kernel, grid, weight, out, width, channels, weight.stride(0),
        ROWS=rows, COLUMNS=columns, num_warps=16, mma=Mma.NONE,
    ).run()  # fmt: skip
    return out
