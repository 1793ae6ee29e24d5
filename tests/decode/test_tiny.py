"""Tests of the bundled model: a real, trained model that is small enough for every machine.

A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from onelaunch.decode.generate import Model
from onelaunch.decode.model.hub import BUNDLED, find_model
from onelaunch.errors import TokenizerMissing

pytest.importorskip("tokenizers", reason="needs the extra decode")

PROMPT = "import os\nimport sys\n\n\nclass "


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.from_pretrained(BUNDLED, device="cpu")


def test_the_bundled_model_is_small_and_complete():
    folder = find_model(BUNDLED)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= sizes.keys()
    assert sum(sizes.values()) < 3.2e6


def test_the_bundled_model_has_learnt_python(model):
    """The model predicts this file better than random letters. An untrained model would lose 7.6 nats per token."""
    from onelaunch.decode import KVCache
    from onelaunch.decode.model.forward import forward, logits_of

    text = Path(__file__).read_text()[:3000]
    tokens = torch.tensor(model.codec.encode(text))
    with torch.no_grad():
        logits = logits_of(model.engine.weights, forward(model.engine.weights, tokens, KVCache.empty(model.config, len(tokens))))
    loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:]).item()
    assert loss < 4.5
    assert len(tokens) < len(text) / 2


def test_encoding_and_decoding_restores_any_text(model):
    for text in ("def f(x):\n\treturn x  # é€😀\r\n", " leading", ""):
        assert model.codec.decode(model.codec.encode(text)) == text


@pytest.mark.thorough
def test_512_greedy_tokens_match_transformers(model):
    """The comparison is in float32. In bfloat16 two logits are sometimes equal, and either token is right."""
    transformers = pytest.importorskip("transformers", reason="needs the extra decode")
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(find_model(BUNDLED), dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(find_model(BUNDLED))
    prompt = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    assert tuple(prompt[0].tolist()) == model.codec.encode(PROMPT)
    choices = {"max_new_tokens": 512}
    with torch.no_grad():
        expected = theirs.generate(prompt, do_sample=False, eos_token_id=None, pad_token_id=0, **choices)
    wide = Model.from_pretrained(BUNDLED, device="cpu", dtype="float32")
    found = wide.generate(PROMPT, ignore_end=True, temperature=0, **choices)
    assert torch.equal(found.sequences, expected)
    assert tokenizer.decode(expected[0, prompt.shape[1] :]) == found.text


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["eager", "captured"])
def test_a_gpu_generates_the_tokens_of_a_cpu(variant):
    texts = [
        Model.from_pretrained(BUNDLED, device=device, dtype="float32", variant=chosen).generate(
            PROMPT, max_new_tokens=400, seed=5
        )
        for device, chosen in (("cpu", "eager"), ("cuda", variant))
    ]
    assert texts[0].text == texts[1].text


def test_a_streamer_of_transformers_prints_the_text(model, capsys):
    transformers = pytest.importorskip("transformers", reason="needs the extra decode")
    tokenizer = transformers.AutoTokenizer.from_pretrained(find_model(BUNDLED))
    found = model.generate(PROMPT, max_new_tokens=30, streamer=transformers.TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.rstrip("\n") == (found.text or "").rstrip("\n")


def test_a_folder_without_a_tokenizer_takes_token_ids(tmp_path, prose):
    """A prompt of text raises an error that names the missing file."""
    for path in find_model(BUNDLED).iterdir():
        if not path.name.startswith("tokenizer"):
            shutil.copy(path, tmp_path)
    model, whole = Model.from_pretrained(tmp_path, device="cpu"), Model.from_pretrained(BUNDLED, device="cpu")
    found = model.generate([5, 6, 7], max_new_tokens=4)
    assert (found.tokens, found.text) == (whole.generate([5, 6, 7], max_new_tokens=4).tokens, None)
    with prose.raises(TokenizerMissing, match=r"has no tokenizer\.json"):
        model.generate("text")
