"""Launch of the layer on Hopper for at most 16 rows B T in bfloat16, as in steps of decoding, where it takes few microseconds.

``launch_few_rows.py`` calls :func:`few_rows` with the configuration that :func:`config_for` returned, and launches the portable
kernel where there is none.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from onelaunch import cuda
from onelaunch.device.hardware import is_hopper, processors
from onelaunch.kernels.common.layout import by_columns, inner_contiguous
from onelaunch.kernels.tma import addressable
from onelaunch.launch.launch import CudaLaunch
from onelaunch.ops.linear_rnn.configure_few_rows_hopper import HopperConfig, config_of, kernel_of
from onelaunch.ops.linear_rnn.launch import Layer, Results


def config_for(layer: Layer) -> HopperConfig | None:
    """Return the configuration of a call, or ``None`` if it needs the portable kernel."""
    if layer.x.dtype is not torch.bfloat16 or layer.sequences.offsets is not None or not is_hopper(layer.x.device):
        return None
    if cuda.missing() is not None:
        return None
    float_decay = layer.log_decay.dtype is torch.float32
    config = config_of(*layer.sizes, float_decay=float_decay, sms=processors(layer.x.device))
    return config and replace(config, by_columns=by_columns(layer.weight))


def few_rows(config: HopperConfig, layer: Layer) -> Results:
    """Launch the layer; nothing is kept for a backward pass."""
    results, initial = layer.results(), layer.sequences.initial
    batch, length, _, channels = layer.sizes
    x, weight = addressable(layer.x.flatten(0, 1)), addressable(layer.weight.t() if config.by_columns else layer.weight)
    log_decay = inner_contiguous(layer.log_decay.flatten(0, 1))
    gate = None if layer.gate is None else inner_contiguous(layer.gate.flatten(0, 1))
    CudaLaunch(
        kernel_of(config), x.device, (config.ctas(channels), 1, 1),
        x, weight, log_decay, gate, None if initial is None else initial.contiguous(), results.y,
        results.final if layer.want_final else None, batch * length, length, channels,
        x.stride(0), weight.stride(0), log_decay.stride(0), 0 if gate is None else gate.stride(0),
    ).run()  # fmt: skip
    return results
