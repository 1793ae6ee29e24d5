"""Tests of what a study compiles ahead for the variants of ``decode_step``, in processes that do not have a model's weights.

A session of the megakernel must load the kernels that :func:`builds_on` lists. The smaller case that stands for a case of the
variant ``compiled`` must bring its functions all arguments, but for contents, with which they are called at the case itself:
what :func:`compile_static` gives is compiled anew for other sizes, strides or dtypes.

``level`` is an optimization level of the decode megakernel, which is a variant of ``decode_step``. The fixture ``played`` lets
PyTorch emulate the launches of the variant ``streaming``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onelaunch.decode import decode_step, loops, random_weights, torch_variants
from onelaunch.decode.loops import MAX_TOKENS, Running
from onelaunch.decode.plan.levels import LEVELS
from onelaunch.decode.runtime import kernels as kernels_file
from onelaunch.decode.runtime.kernels import builds_on, kernels_of, make_session
from onelaunch.decode.step.reference import config_of

SIZES = {"layers": 3, "hidden": 32, "intermediate": 24, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocabulary": 40}
"""Sizes of a small model."""


@pytest.mark.parametrize("level", LEVELS)
def test_a_session_loads_the_kernels_that_are_compiled_without_weights(level, monkeypatch):
    config = config_of(decode_step.case("bfloat16", position=5, no_qk_norm=True, unrotated=2, **SIZES))
    loaded = []

    class Loaded:
        """Stand-in for a loaded kernel, which keeps what would be compiled."""

        def __init__(self, plan, tuning, device):
            self.plan = plan
            loaded.extend(kernel.source for kernel in kernels_of(plan, tuning).values())

    monkeypatch.setattr(kernels_file, "StepKernel", Loaded)
    monkeypatch.setattr(kernels_file, "memory_bytes_per_cycle", lambda device: 1693.0)  # of an H100 SXM
    make_session(random_weights(config), level)
    case = decode_step.case("bfloat16", position=300, no_qk_norm=True, unrotated=2, **SIZES)
    listed = decode_step.get(level).builds_of_case(case, torch.device("cpu"))
    assert [build.source for build in listed] == loaded
    assert listed == builds_on(config, level, torch.device("cpu")), "the position decides nothing"


@pytest.mark.parametrize("variant", ["eager", "captured"])
def test_pytorchs_own_kernels_are_not_compiled_ahead(variant):
    case = decode_step.case("bfloat16", position=5, **SIZES)
    assert decode_step.get(variant).builds_of_case(case, torch.device("cpu")) == []


def compiled_for(case, monkeypatch):
    """Return the arguments of all compiled functions in a call of a case and a run of tokens behind it, but for contents."""
    seen = set()

    def described(value):
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), value.stride(), value.dtype
        return tuple(map(described, value)) if isinstance(value, tuple) else value

    def compile_static(function):
        def call(*given):
            seen.add((function.__name__, described(given)))
            return function(*given)

        return call

    monkeypatch.setattr(torch_variants, "compile_static", compile_static)
    monkeypatch.setattr(loops, "tokens_per_run", lambda *_: MAX_TOKENS)
    given = decode_step.make_inputs(case, torch.device("cpu"), 0).arguments
    decode_step(**given, variant="compiled")
    Running(decode_step.get("compiled"), given).seconds()
    return seen


@pytest.mark.parametrize(
    ("position", "options"),
    [
        (0, {}),
        (1, {"tied": False}),
        (32, {"no_qk_norm": True, "unrotated": 2, "rope_theta": 5e5}),
        (127, {"bias": True}),
        (128, {"bias": True, "no_output_bias": True, "no_qk_norm": True}),
        (200, {}),
        (1000, {"no_qk_norm": True, "tied": False}),
    ],
)
def test_one_layer_compiles_what_all_layers_do(position, options, monkeypatch):
    case = decode_step.case("float32", name="a model", position=position, **SIZES, **options)
    smaller = decode_step.get("compiled").smaller_case(case)
    assert smaller.sizes["layers"] == 1
    assert compiled_for(case, monkeypatch) == compiled_for(smaller, monkeypatch)


def test_positions_that_compile_alike_have_one_smaller_case():
    smaller_case = decode_step.get("compiled").smaller_case
    case = decode_step.case("bfloat16", name="a model", position=1, tied=False, **SIZES)
    found = [
        str(smaller_case(replace(case, sizes={**case.sizes, "position": position}, name=f"at {position}")))
        for position in (1, 50, 127, 128, 1000)
    ]
    assert found[0] == found[1] == found[2]
    assert len(set(found)) == 3
    assert str(smaller_case(replace(case, options={}))) == found[0], "a tied head"
