"""Tests of products with matrices in a kernel's stream, and of prompts that are read by them.

Tests of layers let ``from_tables`` stand for the kernel. Those
marked ``interpret`` run the kernel in Triton's interpreter, in float16, of which its products are right.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onelaunch.decode import KVCache, random_weights
from onelaunch.decode.model.forward import prefill
from onelaunch.decode.plan.levels import plan_for
from onelaunch.decode.plan.phases import PRODUCTS
from onelaunch.decode.runtime import prompts
from onelaunch.decode.runtime.packed import packed_from
from onelaunch.decode.runtime.products import StreamProducts, Tiles, builds_of_products, configure, tables_of, takes
from onelaunch.decode.step.variants import megakernel
from onelaunch.device.architectures import HOPPER_SHARED_BYTES
from tests.decode.plans import MODELS
from tests.decode.products import by_matrix, from_tables, operands
from tests.thorough import thorough_but
from tools.model_shapes import SHAPES

CPU = torch.device("cpu")
LEVELS = ("streaming", "tagged_words")
TAKEN = [(model, level) for model in MODELS for level in LEVELS if takes(plan_for(MODELS[model], level, 7))]
"""Small models and levels whose streams the kernel takes."""


def packed_of(config, level, dtype=torch.bfloat16):
    """Return random weights, and the same packed for a plan of a level, with products."""
    weights = random_weights(replace(config, dtype=dtype), 1)
    tensors, plan = weights.tensors(), plan_for(weights.config, level, 7)
    packed = packed_from(lambda name, begin=0, end=None: tensors[name][begin:end], plan, CPU)
    assert packed.products is None, "there are products on Hopper GPUs alone"
    return weights, replace(packed, products=StreamProducts(packed.stream, tables_of(plan, packed.unpacker._places)))


@pytest.mark.parametrize(
    ("model", "level"), thorough_but(("odd sizes", "streaming"), ("biases everywhere", "tagged_words"), of=TAKEN)
)
@torch.no_grad()
def test_tables_and_layers_are_those_of_plain_weights(model, level, monkeypatch):
    """A pass must be about as close to float64 as one with plain matrices. A wrong channel anywhere would cost all digits."""
    weights, packed = packed_of(MODELS[model], level)
    config, products = weights.config, packed.products
    for op in PRODUCTS:
        x, bias = operands(products, op, 3, config.dtype, biased=op in ("qkv", "o"))
        for layer in range(1 if op == "lm_head" else config.num_hidden_layers):
            # Both are rounded to bfloat16, 2^-8 of a value, the table's of sums in another order; a wrong channel is off by 1.
            torch.testing.assert_close(
                from_tables(products, op, layer, x, bias).float(), by_matrix(weights, op, layer, x, bias), rtol=0.01, atol=0.02
            )
    monkeypatch.setattr(prompts, "MOST_TOKENS", 512)
    monkeypatch.setattr(StreamProducts, "multiply", from_tables)
    monkeypatch.setattr(packed.__class__, "layer", lambda *_: pytest.fail("nothing is copied"))
    tokens = torch.arange(13)
    exact_weights = weights.map(torch.Tensor.double)
    exact, exact_cache = prefill(exact_weights, tokens, KVCache.empty(config, 13, dtype=torch.float64))
    results = []
    for each in (packed, weights):
        logits, cache = prompts._run_in_eager_mode(each, 16, tokens, KVCache.empty(config, 13), lambda: None)
        found, want = (logits, cache.keys, cache.values), (exact, exact_cache.keys, exact_cache.values)
        results.append([float((a.double() - b).norm() / b.norm()) for a, b in zip(found, want, strict=True)])
    assert all(error < 2 * plain for error, plain in zip(*results, strict=True))
    between, last, cache = None, torch.tensor([12]), KVCache.empty(config, 13)
    for number in range(config.num_hidden_layers):  # as if each layer were a graph
        between, in_parts = prompts._run_part(packed, tokens, last, cache, between, range(number, number + 1), None)
    logits, _ = prompts._run_in_eager_mode(packed, 13, tokens, KVCache.empty(config, 13), lambda: None)
    assert torch.equal(in_parts, logits)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("model", "level", "op"),
    thorough_but(
        *[("odd sizes", "streaming", op) for op in ("o", "gate_up")],
        ("half chunks", "streaming", "qkv"),
        of=[
            (model, level, op)
            for model, level in TAKEN
            if model in ("odd sizes", "half chunks", "whole chunks", "two blocks", "three blocks")
            for op in PRODUCTS
        ],
    ),
)
@torch.no_grad()
def test_the_kernel_multiplies_by_the_stream(model, level, op):
    """Each product runs whole, with its columns divided among CTAs, and for several blocks of tokens."""
    weights, packed = packed_of(replace(MODELS[model], num_hidden_layers=2, unrotated_layers=()), level, torch.float16)
    layer = 0 if op == "lm_head" else 1
    for tokens, tiles in ((2, Tiles(128, 16, 1, 3, 4)), (17, Tiles(64, 16, 2, 3, 4))):
        x, bias = operands(packed.products, op, tokens, torch.float16, biased=op in ("qkv", "o"))
        found = packed.products.multiply(op, layer, x, bias, tiles).float()
        expected = by_matrix(weights, op, layer, x, bias)
        assert found.shape == expected.shape
        assert (found - expected).norm() < 5e-4 * expected.norm(), "half a unit of float16, on average"


# Choices


@pytest.mark.parametrize("model", SHAPES)
def test_tiles_fit_and_fill_the_device(model):
    config = SHAPES[model]
    for tokens in (1, *prompts.SIZES):
        for rows, columns in (
            (2 * config.intermediate_size, config.hidden_size),
            (config.hidden_size, config.intermediate_size),
            (config.hidden_size, config.query_size),
        ):
            tiles = configure(tokens, rows, columns)
            assert tiles.shared_bytes <= HOPPER_SHARED_BYTES
            assert tiles.splits == 1 or columns // 64 >= 2 * tiles.splits
            assert tiles.tokens < 2 * max(tokens, 16), "less than half of a tile is padding"


def test_public_models_are_taken():
    """Blocks of 64 columns stay within the columns of a query split in every public model."""
    names = [name for name in SHAPES if name != "small"]
    assert [name for name in names if not takes(plan_for(SHAPES[name], "streaming", 132))] == []


def test_long_passes_and_other_models_copy_matrices(monkeypatch):
    monkeypatch.setattr(prompts, "MOST_TOKENS", 100)
    weights, packed = packed_of(MODELS["odd sizes"], "streaming")
    for given, copied in ((packed, [False, False, True]), (replace(packed, products=None), [True] * 3), (weights, [False] * 3)):
        assert [prompts.PromptPasses(given).copies_matrices(given, tokens) for tokens in (2, 96, 97)] == copied


def test_kernels_of_a_size_are_compiled_once():
    """CI compiles the builds of all variants."""
    builds = builds_of_products(plan_for(megakernel.BUILT["Qwen3-0.6B"], "streaming", 132), "sm_90a", (16, 512, 448))
    assert len({build.key for build in builds}) == len(builds)
    counts = {build.name.rpartition("of ")[2] for build in builds}
    assert counts == {"16 tokens", "512 tokens"}, "448 tokens have the tiles of 512"
