"""Tests of the trained models in ``small_models``: texts of transformers, of PyTorch's variants and of the kernels are equal.

``tools/train_small_models.py`` made the folders: a model of each family, and in ``texts.json`` the greedy texts of 512 tokens by
transformers, in float32 with the stored weights. Two texts of each model are clear: the two largest logits stay apart, so that
rounding decides no token. At the other prompts, each token's logit must be near the largest one of the float64 oracle.

``device`` is the first GPU, or the CPU.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from onelaunch.decode import KVCache, Model
from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.forward import forward, logits_of, prefill
from onelaunch.decode.model.weights import load_weights
from onelaunch.decode.plan.levels import LEVELS, plan_for
from onelaunch.decode.plan.packing import pack
from onelaunch.decode.runtime.memory import Constants, Memory
from onelaunch.device.hardware import is_hopper
from tests.decode.host_machine import HostKernel, needs_compiler, set_position
from tools.train_small_models import FAMILIES, NEW_TOKENS

pytest.importorskip("safetensors", reason="needs the extra decode")

FOLDERS = {family: Path(__file__).parent / "small_models" / family.lower() for family in FAMILIES}

MARGIN = 0.06
"""Smallest difference of the two largest logits in a clear text."""

TOLERANCE = {torch.bfloat16: 0.04, torch.float32: 1e-4}
"""Largest difference of two logits that count as equal, relative to the root mean square of all logits at that position.

That of bfloat16 is the cap of the verification gate on the error of ``decode_step``.
"""

each_family = pytest.mark.parametrize("family", FAMILIES)


def texts_of(family, *, clear):
    """Return the two clearest texts of a model, or the ten others."""
    texts = sorted(json.loads((FOLDERS[family] / "texts.json").read_text()), key=lambda text: -text["margin"])
    return texts[:2] if clear else texts[2:]


@each_family
def test_the_folders_are_small_and_two_of_their_texts_are_clear(family):
    sizes = {path.name: path.stat().st_size for path in FOLDERS[family].iterdir()}
    assert set(sizes) == {"config.json", "model.safetensors", "texts.json"}
    assert sizes["model.safetensors"] < 100_000
    texts = texts_of(family, clear=True)
    assert all(text["margin"] >= MARGIN for text in texts)
    assert all(len(text["text"]) == NEW_TOKENS for text in texts)
    assert len(texts_of(family, clear=False)) == 10


@each_family
@torch.no_grad()
def test_the_texts_are_those_of_transformers(family):
    """A greedy text is one whose tokens have the largest logits, which a single forward pass shows."""
    transformers = pytest.importorskip("transformers", reason="needs the extra decode")
    theirs = getattr(transformers, f"{family}ForCausalLM").from_pretrained(FOLDERS[family], dtype=torch.float32).eval()
    for text in texts_of(family, clear=True):
        sequence = torch.tensor([text["prompt"] + text["text"]])
        logits = theirs(sequence).logits[0, len(text["prompt"]) - 1 : -1]
        assert logits.argmax(1).tolist() == text["text"]
        top = logits.topk(2).values
        assert float((top[:, 0] - top[:, 1]).min()) == pytest.approx(text["margin"], abs=2e-3)


@pytest.mark.thorough
@each_family
def test_float32_gives_the_clear_texts(family):
    model = Model.from_pretrained(FOLDERS[family], device="cpu", dtype="float32", variant="eager")
    for text in texts_of(family, clear=True):
        found = model.generate(text["prompt"], max_new_tokens=NEW_TOKENS, temperature=0)
        assert list(found.tokens) == text["text"]


@each_family
def test_other_texts_of_float32_take_tokens_near_the_oracles(family):
    model = Model.from_pretrained(FOLDERS[family], device="cpu", dtype="float32", variant="eager")
    for text in texts_of(family, clear=False)[::5]:
        found = model.generate(text["prompt"], max_new_tokens=64, temperature=0)
        assert_near_the_oracle(family, found, torch.float32, torch.device("cpu"))


@pytest.mark.thorough
@needs_compiler
@each_family
@pytest.mark.parametrize("level", [pytest.param(each, marks=[pytest.mark.every] * (each != "streaming")) for each in LEVELS])
@torch.no_grad()
def test_kernels_on_a_host_give_the_clearest_text(family, level, libraries):
    """A part of the text, around position 128, that the kernels' source makes on an emulated GPU behind PyTorch's prefill."""
    config = replace(ModelConfig.from_pretrained(FOLDERS[family]), dtype=torch.bfloat16)
    weights, plan = load_weights(FOLDERS[family], config), plan_for(config, level, 6)
    (text, _), count, begin = texts_of(family, clear=True), 20, 118
    tokens = text["prompt"] + text["text"]
    _, cache = prefill(weights, torch.tensor(tokens[:begin]), KVCache.empty(config, begin + count))
    memory = Memory(plan, Constants.of(weights, pack(weights, plan), 256), 256)
    set_position(memory, begin, tokens[begin])
    HostKernel(plan, libraries)(memory, cache, count)
    assert memory.tokens[begin : begin + count + 1].tolist() == tokens[begin : begin + count + 1]


@pytest.mark.gpu
@each_family
@pytest.mark.parametrize("variant", [*LEVELS, "captured"])
def test_bfloat16_gives_the_clear_texts_and_others_near_the_oracles(family, variant, device):
    if not is_hopper(device):
        pytest.skip("needs a Hopper GPU")
    model = Model.from_pretrained(FOLDERS[family], device="cuda", dtype="bfloat16", variant=variant)
    for text in texts_of(family, clear=True):
        found = model.generate(text["prompt"], max_new_tokens=NEW_TOKENS, temperature=0)
        assert list(found.tokens) == text["text"]
    for text in texts_of(family, clear=False):
        found = model.generate(text["prompt"], max_new_tokens=NEW_TOKENS, temperature=0)
        assert_near_the_oracle(family, found, torch.bfloat16, device)


@torch.no_grad()
def assert_near_the_oracle(family, found, dtype, device):
    """Assert that each token's logit is within the tolerance of the largest, and that most tokens are the oracle's own."""
    config = ModelConfig.from_pretrained(FOLDERS[family])
    exact = load_weights(FOLDERS[family], config, device).map(torch.Tensor.double)
    text = found.sequences[0].to(device)
    cache = KVCache.empty(config, len(text), device, torch.float64)
    logits = logits_of(exact, forward(exact, text[:-1], cache)[len(found.prompt) - 1 :])
    near = TOLERANCE[dtype] * logits.square().mean(1).sqrt()
    best = logits.topk(2).values
    taken = logits.gather(1, text[len(found.prompt) :, None])[:, 0]
    assert (best[:, 0] - taken <= near).all()
    assert (best[:, 0] - best[:, 1] > near).double().mean() > 0.5, "most tokens must be the oracle's own"
