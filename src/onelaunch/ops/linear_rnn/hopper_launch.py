"""Launches of the kernels for Hopper GPUs: the layer's tensors as the copy engine addresses them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from onelaunch.ops.linear_rnn.launch import Layer, Results
from onelaunch.ops.workspace import workspace

ALIGNMENT = 16
"""Bytes: what the copy engine asks of addresses and strides."""


@dataclass(frozen=True, slots=True)
class HopperTiles:
    """How the layer is cut: ``steps`` by ``channels`` a tile, ``inner`` columns of x a stage."""

    steps: int = 256
    channels: int = 128
    inner: int = 64
    stages: int = 3
    multiply_registers: int = 168
    scan_registers: int = 152

    def options(self) -> dict[str, int]:
        """Constants of the kernel."""
        return {
            "STAGES": self.stages, "MULTIPLY_REGISTERS": self.multiply_registers, "SCAN_REGISTERS": self.scan_registers,
        }  # fmt: skip

    def boxes(self, decay_size: int) -> dict[str, list[int]]:
        """What the copy engine moves at once, by argument; ``decay_size`` in bytes: wide decays come in shorter pieces."""
        rows = 16 if decay_size == 2 else 8
        return {
            "x": [self.steps // 2, self.inner],
            "weight": [self.inner, self.channels],
            "log_decay": [rows, self.channels],
            "gate": [rows, self.channels],
        }

    def even(self, length: int, width: int) -> bool:
        """Whether all tiles lie inside the tensor: then no access needs a mask."""
        return length % self.steps == 0 and width % self.channels == 0


TILES = HopperTiles()


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """``[B, T, N]`` as the ``[B T, N]`` that the copy engine can address: copied if strides or address do not allow it."""
    tensor = tensor.flatten(0, 1)
    aligned = tensor.stride(1) == 1 and tensor.stride(0) * tensor.element_size() % ALIGNMENT == 0
    return tensor if aligned and tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone(memory_format=torch.contiguous_format)


def described(tensor: torch.Tensor, box: list[int]) -> Any:
    """A descriptor of ``[rows, columns]`` from which the copy engine moves boxes into shared memory."""
    from onelaunch.ops.gluon_compat import TensorDescriptor, gl

    element = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[tensor.dtype]
    return TensorDescriptor.from_tensor(tensor, box, gl.NVMMASharedLayout.get_default_for(box, element))


def persistent(layer: Layer) -> Results:
    """The kernel for wide layers: a program per processor, the scan of a tile under the matrix product of the next."""
    from onelaunch.ops.linear_rnn.hopper_kernels import project_scan_gate_hopper_kernel

    results, initial = layer.results(), layer.sequences.initial
    batch, length, width, channels = layer.sizes
    tiles_t, slices = triton.cdiv(length, TILES.steps), triton.cdiv(channels, TILES.channels)
    tiles = tiles_t * batch * slices
    boxes = TILES.boxes(layer.log_decay.element_size())
    given = (layer.x, layer.weight[None], layer.log_decay, layer.gate)
    words = workspace(layer.x.device, batch * tiles_t * channels)
    counter = workspace(layer.x.device, 1)  # no look-back needs a single word, so it is ours alone; the kernel leaves it at 0
    programs = min(tiles, torch.cuda.get_device_properties(layer.x.device).multi_processor_count)
    project_scan_gate_hopper_kernel[(programs,)](
        *(described(rows_of(tensor), box) for tensor, box in zip(given, boxes.values(), strict=True)),
        initial, results.y, results.v, results.final, results.carries, words, counter,
        length, width, channels, tiles, batch * slices,
        EVEN=TILES.even(length, channels), num_warps=4, **TILES.options(), **layer.flags(),
    )  # fmt: skip
    return results
