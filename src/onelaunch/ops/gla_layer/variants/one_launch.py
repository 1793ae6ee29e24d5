"""The variant ``one_launch`` of ``gla_layer``: the whole layer in one cooperative launch on Hopper, for steps of decoding.

On an H100 the study ``058-decoding-step`` measured 0.72 to 0.94 of the time of five launches up to 32 rows B T, and 1.21 to 2.1
times it with 64 (c7cad683, docs/notebook/gla_layer.md). ``auto`` takes it up to 32 rows, or 16 of several steps, where a table of
measured times says that it is the fastest.

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
from onelaunch.ops.gla_layer.contract import COMMON_RANK, CONVOLVED, HIGH_RANK, GlaLayerCall, gla_layer

FASTER_ROWS, FASTER_ROWS_OF_STEPS = 32, 16
"""Most rows B T with which ``auto`` takes the variant, if each sequence has one step, and if sequences have several.

On an H100 one launch was faster than five up to these rows. With 64 it took 1.21 times as long as they at one step, and 2.1 times
at 64 steps of one sequence. 17 to 32 rows of several steps were not measured: from 16 to 64 steps of one sequence its time grows
from 31.8 to 88.6 us, and that of five launches from 37.7 to 41.4.
"""


@gla_layer.variant(
    "one_launch", launches=1, fuses=("projections", "recurrence", "norm_gate", "output"), architectures=("sm_90a",),
    backward=False,
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
    rank = None if "scalar_decay" in query.flags else COMMON_RANK  # the key does not hold the rank
    batch, length, width, heads, keys, values = query.sizes
    sms = processors(torch.device(query.device))
    found = config_of(batch, length, width, heads, keys, values, rank, float_norm=True, sms=sms)
    return found if isinstance(found, str) else None


@one_launch.by_name_where
def has_more_rows_than_pay(query: Query) -> str | None:
    """Return why ``auto`` leaves the variant out though the kernel may run the call, or ``None``."""
    if HIGH_RANK in query.flags:
        return f"runs decays of a rank above {COMMON_RANK} only by name: the rank may leave too little shared memory"
    batch, length, *_ = query.sizes
    most, rows = (FASTER_ROWS, "rows B * T") if length == 1 else (FASTER_ROWS_OF_STEPS, "rows B * T of several steps")
    if batch * length <= most:
        return None
    return f"is left out beyond {most} {rows}, up to which it was measured to be faster than composed"


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
