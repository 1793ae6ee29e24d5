"""The variant ``one_launch`` of ``gla_layer``: the whole layer in one cooperative launch on Hopper, for steps of decoding.

On an H100 the study ``058-decoding-step`` measured 0.75 to 0.98 of the time of five launches up to 32 rows B T, and 1.26 to 2.1
times it with 64 (c521f76d, docs/notebook/gla_layer.md). It is marked experimental, so that ``auto`` never takes it, until it has
passed the operation's probes on a GPU: in that run no probe had sizes that it takes.

The dispatcher, studies and tests find registered variants by name. ``fuses`` names the steps that share the kernel. Since it
has no tag ``parts``, ``cost.py`` counts what its CTAs pass to each other and no other intermediates. Other keywords are
capabilities, which the class ``Capabilities`` of ``onelaunch.operation`` explains.
"""

from __future__ import annotations

import torch

from onelaunch.device.hardware import processors
from onelaunch.operation import Example, Query
from onelaunch.operation.requirements import needs_hopper
from onelaunch.ops.gla_layer.autograd import step
from onelaunch.ops.gla_layer.composition import Results
from onelaunch.ops.gla_layer.configure_step import config_of
from onelaunch.ops.gla_layer.contract import CONVOLVED, GlaLayerCall, gla_layer

_COMMON_RANK = 16
"""Rank of the decays that the requirement assumes, the layer's default, since the dispatch key does not hold the rank."""


@gla_layer.variant(
    "one_launch", launches=1, fuses=("projections", "recurrence", "norm_gate", "output"), architectures=("sm_90a",),
    backward=False, experimental=True,
)  # fmt: skip
def one_launch(call: GlaLayerCall) -> Results:
    """Run the whole layer in one cooperative launch, for at most 64 rows B T."""
    weights = (call.in_proj_weight, call.gk_weight, call.gk_bias, call.norm_weight, call.w_out)
    numbers = (call.sizes.heads, call.normalizer, call.eps, call.output_final_state)
    out, final = step(call.x, *weights, call.initial_state, *numbers, grad=False)
    return out, final if call.output_final_state else None


one_launch.supports(needs_hopper)


@one_launch.supports
def can_divide(query: Query) -> str | None:
    """Return why the kernel cannot run a call, or ``None``."""
    if query.dtype is not torch.bfloat16:
        return "needs bfloat16"
    if CONVOLVED in query.flags:
        return "needs a layer without short convolutions"
    rank = None if "scalar_decay" in query.flags else _COMMON_RANK
    batch, length, width, heads, keys, values = query.sizes
    sms = processors(torch.device(query.device))
    found = config_of(batch, length, width, heads, keys, values, rank, float_norm=True, sms=sms)
    return found if isinstance(found, str) else None


@one_launch.examples
def steps_of_decoding() -> list[Example]:
    """Return steps of one and more sequences, a few steps of one sequence, most rows, and a decay per head."""
    states = {"initial_state": True, "final_state": True}
    sizes = {"D": 2048, "H": 16, "K": 128, "V": 128, **states}
    return [
        Example(gla_layer.case("bfloat16", B=1, T=1, **sizes)),
        Example(gla_layer.case("bfloat16", B=16, T=1, **sizes)),
        Example(gla_layer.case("bfloat16", B=64, T=1, **sizes)),
        Example(gla_layer.case("bfloat16", B=1, T=16, **sizes)),
        Example(gla_layer.case("bfloat16", B=4, T=1, **{**sizes, "K": 64}, decay_per="head", norm_weight="float32")),
        Example(gla_layer.case("bfloat16", B=1, T=1, D=2048, H=8, K=256, V=256)),
    ]
