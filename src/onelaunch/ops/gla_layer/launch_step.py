"""Launch of the variant ``one_launch``: workspace, tensor maps and results of a layer in one cooperative launch.

The operator ``step`` of ``autograd.py`` calls :func:`run`. Two calls on different streams may run at the same time: each has a
workspace of its own, and the counters of its stream.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from onelaunch.device.hardware import processors
from onelaunch.errors import VariantUnsupported
from onelaunch.kernels.common.layout import cdiv
from onelaunch.kernels.tma import ROW_BYTES, address, addressable, tensor_map
from onelaunch.launch.launch import CudaLaunch
from onelaunch.launch.workspace import counters
from onelaunch.ops.gla_layer.configure_step import StepConfig, config_of, kernel_of
from onelaunch.ops.gla_layer.contract import GlaLayerCall

_LINE = 16
"""Number of int64 words from one counter to the next: 128 bytes."""


class StepInputs(NamedTuple):
    """Inputs of a layer in one launch, as :class:`~onelaunch.ops.gla_layer.contract.GlaLayerCall` describes them."""

    x: torch.Tensor
    in_proj_weight: torch.Tensor
    gk_weight: torch.Tensor | None
    gk_bias: torch.Tensor
    norm_weight: torch.Tensor
    w_out: torch.Tensor
    initial: torch.Tensor | None
    heads: int
    normalizer: float
    eps: float
    want_final: bool

    @classmethod
    def of(cls, call: GlaLayerCall) -> StepInputs:
        """Return the inputs of a checked call."""
        weights = (call.in_proj_weight, call.gk_weight, call.gk_bias, call.norm_weight, call.w_out)
        return cls(call.x, *weights, call.initial_state, call.sizes.heads, call.normalizer, call.eps, call.output_final_state)

    def config(self) -> StepConfig:
        """Return the configuration of the launch.

        Raises:
            VariantUnsupported: The rank of the decays leaves too little shared memory, which the dispatch key does not tell.
        """
        (batch, length, width), values = self.x.shape, self.w_out.shape[1] // self.heads
        ranks = self.heads if self.gk_weight is None else self.gk_weight.shape[1]
        keys = (self.in_proj_weight.shape[0] - ranks) // (2 * self.heads) - values
        rank = None if self.gk_weight is None else ranks
        float_norm, sms = self.norm_weight.dtype is torch.float32, processors(self.x.device)
        config = config_of(batch, length, width, self.heads, keys, values, rank, float_norm=float_norm, sms=sms)
        if isinstance(config, str):
            raise VariantUnsupported("gla_layer", "one_launch", reason=config, instead=("composed",))
        return config


def weight_map(weight: torch.Tensor, rows: int, blocks: int) -> bytes:
    """Return the tensor map of a weight matrix for boxes of ``rows`` rows by ``blocks`` blocks of 64 columns, block by block."""
    height, width = weight.shape
    columns = ROW_BYTES // weight.element_size()
    strides = (weight.stride(0) * weight.element_size(), ROW_BYTES)
    return tensor_map(weight.dtype, address(weight), (columns, height, width // columns), strides, (columns, rows, blocks))


def chunk_map(config: StepConfig, weight: torch.Tensor, tile: int, slab: int) -> bytes:
    """Return the tensor map of a weight matrix for chunks of the ring: tiles of ``tile`` rows, slabs of ``slab`` columns."""
    return weight_map(weight, tile, config.chunk_blocks(tile, slab))


def run(given: StepInputs, markers: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the layer; return ``out [B, T, D]``, and the final state ``[B, H, K, V]`` float32 or an empty tensor.

    Args:
        given: Inputs, of sizes for which there is a configuration.
        markers: ``[CTAs, 8 + 40, 2]`` int64 for profile markers. The first 8 are cycles and nanoseconds: at the start, when x is
            staged, when q and k are published, when v is there or, with whole sequences in a CTA, what they exchange, after the
            recurrence, when the gated o is published, when that of all CTAs is staged, and at the end. The others belong to
            chunks of the ring, two cycles each: when it was seen to have landed, and when the consumers had it. Default: none.

    Raises:
        VariantUnsupported: As :meth:`StepInputs.config` raises it.
    """
    config = given.config()
    if markers is not None:
        config = config.with_markers()
    x, weight, w_out = _aligned(given.x), addressable(given.in_proj_weight), addressable(given.w_out)
    rows, inner, device = x.shape[0] * x.shape[1], config.heads * config.values, x.device
    initial = None if given.initial is None else _aligned(given.initial)
    decay_weight = None if given.gk_weight is None else _aligned(given.gk_weight)
    out = torch.empty_like(x)
    state = (x.shape[0], config.heads, config.keys, config.values) if given.want_final else (0,)
    final = x.new_empty(state, dtype=torch.float32)
    exchange = None if config.tagged else x.new_empty(config.heads * rows * config.exchanged, dtype=torch.float32)
    squares = None if config.by_sequence else x.new_empty(rows * config.ctas, dtype=torch.float32)
    gated = x.new_empty(rows, inner)
    words = counters(device, config.counters * _LINE + cdiv(config.tagged_words(rows), 2))
    key_tile, value_tile, rank_tile = config.tiles
    maps = [chunk_map(config, weight, tile, config.slab) for tile in (key_tile, value_tile, rank_tile)]
    maps.append(chunk_map(config, w_out, config.out_tile, config.out_slab))
    maps.append(weight_map(x.view(rows, -1), config.box_rows, config.operand_blocks(config.slab)) if config.boxed else maps[0])
    maps.append(weight_map(gated, config.box_rows, config.operand_blocks(config.out_slab)) if config.by_sequence else maps[0])
    CudaLaunch(
        kernel_of(config), device, (config.ctas, 1, 1),
        x, decay_weight, _aligned(given.gk_bias), _aligned(given.norm_weight), initial, final if given.want_final else None,
        out, exchange, squares, gated, words, markers,
        x.shape[0], x.shape[1], 1.0 / given.normalizer, given.eps, *maps, owners=(weight, w_out),
    ).run()  # fmt: skip
    return out, final


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, copied unless it is contiguous and begins at a multiple of 16 bytes."""
    tensor = tensor.contiguous()
    return tensor if address(tensor) % 16 == 0 else tensor.clone()
