"""Tests of the plans and weight streams of Llama, Qwen2, Mistral and SmolLM3 models, at the sizes of public models.

``FAMILIES`` are their configurations by name. ``Interpreter``, by ``assert_in_any_order``, runs plans of small models in PyTorch,
CTA by CTA in a random order. Each optimization level of the decode megakernel (``level``) is a variant of ``decode_step``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onelaunch.decode import ModelConfig, random_weights
from onelaunch.decode.codegen.emit import header
from onelaunch.decode.codegen.layout import Tuning
from onelaunch.decode.model.weights import elements
from onelaunch.decode.plan.division import balanced
from onelaunch.decode.plan.levels import LEVELS, plan_for, unsupported
from onelaunch.decode.plan.packing import pack, pieces, stream_bytes
from onelaunch.decode.plan.phases import PRODUCTS
from onelaunch.decode.runtime.memory import Constants
from onelaunch.decode.runtime.proofs import checked_plan
from tests.decode.plans import FAMILIES, MODELS, TINY, packed
from tests.decode.test_plan import QWEN, assert_in_any_order
from tests.thorough import thorough_but
from tools import measure_decoding
from tools.model_shapes import SHAPES

SMS = 132
"""Number of SMs of an H100 SXM and an H200."""

each_family = pytest.mark.parametrize("name", FAMILIES)


@each_family
def test_a_model_of_each_family_is_supported(name):
    assert unsupported(FAMILIES[name]) is None


def test_unsupported_models_are_refused_with_the_reason():
    assert unsupported(QWEN) is None
    assert "float16" in unsupported(replace(QWEN, dtype=torch.float16))
    assert "heads of" in unsupported(replace(QWEN, head_dim=80))
    assert "at most 8 query heads" in unsupported(replace(QWEN, num_attention_heads=32, num_key_value_heads=2))


@pytest.mark.parametrize(
    ("name", "level"),
    thorough_but(
        ("SmolLM2-135M", "streaming"),
        of=[
            *((name, "streaming") for name in FAMILIES),
            *(pytest.param(name, level, marks=pytest.mark.every) for name in FAMILIES for level in ("tagged_words", "graph")),
        ],
    ),
)
def test_plans_are_sound_and_fit_on_an_h200(name, level, tmp_path, monkeypatch):
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path))
    checked_plan(FAMILIES[name], level, SMS, Tuning())


@each_family
def test_the_stream_has_the_matrices_and_no_padding(name):
    config = FAMILIES[name]
    matrices = elements(config, matrices_only=True)
    if not config.tie_word_embeddings:
        matrices -= config.vocab_size * config.hidden_size  # the embedding, of which a token reads one row
    assert stream_bytes(config) == 2 * matrices
    plan = plan_for(config, "streaming", SMS)
    assert plan.blocks is not None
    assert plan.blocks.channels == plan.blocks.tile_columns, "a tile of the output projection has no padding"
    assert plan.blocks.rows * plan.blocks.count == config.hidden_size, "neither has the last block"


@each_family
def test_attention_has_a_unit_for_most_ctas(name):
    """Query heads are divided so that a CTA has one or two of them, and most CTAs have a unit of attention."""
    config, plan = FAMILIES[name], plan_for(FAMILIES[name], "streaming", SMS)
    assert config.queries_per_key // plan.query_splits <= 2
    units = [assignment.units for assignment in plan.phase("rope_attention").assignments]
    assert max(units) == 1
    assert sum(units) >= 64


def test_ctas_have_equal_weights_of_a_layer_where_tiles_are_few():
    """Qwen2.5-1.5B has 192 tiles of the down projection for 132 CTAs: some have two, which take 14 % of their layer's time."""
    plan = plan_for(FAMILIES["Qwen2.5-1.5B"], "streaming", SMS)
    sizes = [sum(pieces(plan, op, cta) for op in PRODUCTS[:-1]) for cta in range(SMS)]
    assert max(sizes) * SMS < 1.03 * sum(sizes)
    tiles = [assignment.units for assignment in plan.phase("gate_up").assignments]
    assert max(tiles) > min(tiles) + 1
    for name, config in {"Qwen3-0.6B": QWEN, "Llama-3.2-1B": FAMILIES["Llama-3.2-1B"]}.items():
        units = {assignment.units for assignment in plan_for(config, "streaming", SMS).phase("gate_up").assignments}
        assert len(units - {0}) == 1, name


@settings(max_examples=50, deadline=None)
@given(
    count=st.integers(0, 200), weight=st.integers(1, 50), others=st.lists(st.integers(0, 400), min_size=1, max_size=20)
)  # fmt: skip
def test_balanced_division_has_every_tile_once_and_the_smallest_maximum(count, weight, others):
    found = balanced(count, weight, others)
    assert [end for _, end in found] == [begin for begin, _ in found[1:]] + [count]
    assert found[0][0] == 0
    loads = [other + weight * (end - begin) for other, (begin, end) in zip(others, found, strict=True)]
    if max(loads) > max(others):  # else the other phases alone decide
        assert sum(max(max(loads) - 1 - other, 0) // weight for other in others) < count, "no smaller maximum suffices"


@pytest.mark.parametrize("model", ["llama", "odd sizes", "untied, a key head"])
@pytest.mark.parametrize("level", ["streaming", "tagged_words"])
def test_a_packed_stream_has_the_stated_size(level, model):
    """The plan of few CTAs has fewer query splits, whose blocks may be padded, than the size assumes."""
    config = MODELS[model]
    plan = plan_for(config, level, 7)
    assert pack(random_weights(config), plan).data.nbytes <= stream_bytes(config, summed=LEVELS[level].summed)
    if plan.blocks is None:
        assert pack(random_weights(config), plan).data.nbytes == stream_bytes(config)


FEATURES = ("llama", "qwen2", "biases everywhere", "smollm3")
"""Models with other features than Qwen3."""

IN_ORDERS = [("head_local", "smollm3"), ("fused_phases", "biases everywhere"), ("graph", "qwen2"), ("redundant_norm", "llama")]
"""Levels and models whose plans are interpreted in ``make check``."""


@pytest.mark.parametrize(
    ("level", "model"),
    thorough_but(
        ("head_local", "smollm3"),
        of=[
            *IN_ORDERS,
            *(
                pytest.param(level, model, marks=pytest.mark.every)
                for level, options in LEVELS.items()
                for model in FEATURES
                if not options.streams and (level, model) not in IN_ORDERS
            ),
        ],
    ),
)
def test_in_any_order_the_logits_are_the_models(level, model):
    assert_in_any_order(MODELS[model], plan_for(MODELS[model], level, 5))


def test_without_norms_of_heads_no_squares_are_exchanged():
    """Their buffer, and the loads of it, would only delay attention."""
    for level in LEVELS:
        with_norms, without = plan_for(TINY, level, 5), plan_for(replace(TINY, qk_norm=False), level, 5)
        names = {buffer.name for buffer in without.buffers}
        assert "squares" not in names
        assert names | ({"squares"} if not any(phase.op == "rope" for phase in without.layer) else set()) == {
            buffer.name for buffer in with_norms.buffers
        }


def test_the_table_of_parameters_has_norms_and_biases_in_the_order_of_rows():
    config = MODELS["biases everywhere"]
    weights, plan = random_weights(config), plan_for(config, "streaming", 5)
    table = Constants.of(weights, packed(weights, plan), 16).parameters
    numbers = dict(line.removeprefix("constexpr int ").rstrip(";").split(" = ") for line in constants(config) if " int " in line)
    size, H = int(numbers["LAYER_PARAMETERS"]), config.hidden_size
    assert len(table) == config.num_hidden_layers * size + H
    for layer, own in zip(weights.layers, table[:-H].view(-1, size), strict=True):
        assert torch.equal(own[:H], layer.input_layernorm)
        assert torch.equal(own[int(numbers["QK_NORMS_AT"]) :][: config.head_dim], layer.q_norm)
        assert torch.equal(own[int(numbers["O_BIAS_AT"]) :][:H], layer.o_bias)
        # A tile has four channels of a head's first half, then their partners of the second half.
        biases, half = own[int(numbers["QKV_BIAS_AT"]) :], config.head_dim // 2
        assert torch.equal(biases[:8], torch.cat([layer.q_bias[:4], layer.q_bias[half : half + 4]]))


def constants(config: ModelConfig) -> list[str]:
    """Return the lines of the generated header of a plan."""
    return header(plan_for(config, "streaming", 5), Tuning()).splitlines()


def test_the_kernel_knows_the_layers_that_do_not_rotate():
    config = replace(TINY, num_hidden_layers=40, unrotated_layers=(3, 7, 39))
    lines = constants(config)
    assert "  if (layer < 32) return 0xFFFFFF77u >> layer % 32 & 1;" in lines
    assert "  if (layer < 64) return 0xFFFFFF7Fu >> layer % 32 & 1;" in lines
    assert "constexpr bool SOME_UNROTATED = true;" in lines
    weights = random_weights(replace(config, num_hidden_layers=1, unrotated_layers=(0,)))
    plan = plan_for(weights.config, "streaming", 5)
    rotations = Constants.of(weights, packed(weights, plan), 16).rotations
    assert rotations.shape == (17, config.head_dim)
    half = config.head_dim // 2
    assert torch.equal(rotations[0], torch.cat([torch.ones(half), torch.zeros(half)]))
    assert torch.equal(rotations[1], rotations[0]), "at position 0 all angles are zero"
    assert (rotations[2:, half:] != 0).any()


def test_the_tool_measures_a_small_model_on_a_cpu(monkeypatch):
    monkeypatch.setattr(measure_decoding, "TOKENS", 3)
    monkeypatch.setattr(measure_decoding, "RUNS", 1)
    (found,) = measure_decoding.measure("small", ["eager"], torch.device("cpu"))
    assert found["one_launch_us"] is None
    assert found["steps_us"] > 0
    assert 0 < found["kl"] < 1e-3
    assert 0 < found["error"] < 2e-2
    assert found["weights_bytes"] == 2 * elements(SHAPES["small"])
    assert "small          eager" in measure_decoding.listing([found])
