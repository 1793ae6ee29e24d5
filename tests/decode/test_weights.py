"""Checkpoints: every tensor is read once and checked; what is missing or damaged is named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from onelaunch.decode import ModelConfig, load_weights, random_weights
from onelaunch.errors import CheckpointError, ShapeError
from tests.decode.models import CONFIGS, SMALL, write

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", ["tied", "untied_with_biases"])
def test_what_was_written_is_read(name, shards, tmp_path):
    weights = random_weights(CONFIGS[name], seed=1)
    folder = write(tmp_path, weights, shards)
    config = ModelConfig.from_pretrained(folder)
    found = load_weights(folder, config).tensors()
    assert found.keys() == weights.tensors().keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in weights.tensors().items())
    assert {key.rpartition(".")[2] for key in found} >= {"q_norm", "gate_proj", "embed_tokens"}


def test_weights_are_read_in_the_dtype_of_the_configuration(tmp_path):
    weights = random_weights(SMALL)
    found = load_weights(write(tmp_path, weights), replace(SMALL, dtype=torch.bfloat16))
    assert {tensor.dtype for tensor in found.tensors().values()} == {torch.bfloat16}
    assert torch.equal(found.norm, weights.norm.bfloat16())


def test_a_tied_head_is_the_embedding_and_stays_so():
    weights = random_weights(SMALL)
    assert weights.lm_head is weights.embed_tokens
    copy = weights.map(torch.clone)
    assert copy.lm_head is copy.embed_tokens
    assert copy.embed_tokens is not weights.embed_tokens
    assert copy.nbytes == weights.nbytes == sum(tensor.nbytes for tensor in weights.tensors().values())


def test_a_head_of_its_own():
    weights = random_weights(CONFIGS["untied_with_biases"])
    assert weights.lm_head is weights.untied_head
    assert weights.layers[0].o_bias is not None
    assert weights.layers[0].o_bias.shape == (64,)


def test_random_weights_follow_their_seed():
    one, same, other = (random_weights(SMALL, seed).embed_tokens for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_folder_without_weights(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_weights(tmp_path, SMALL)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_truncated_file(tmp_path, shards):
    folder = write(tmp_path, random_weights(SMALL), shards)
    path = folder / ("model.safetensors" if shards == 1 else "model-1.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{path.name} cannot be read, as if missing or truncated"):
        load_weights(folder, SMALL)


def test_a_file_of_several_is_missing(tmp_path):
    folder = write(tmp_path, random_weights(SMALL), shards=2)
    (folder / "model-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-0\.safetensors is missing, which model\.safetensors\.index\.json names"):
        load_weights(folder, SMALL)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}'])
def test_an_index_that_is_none(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="is not an index of weights"):
        load_weights(tmp_path, SMALL)


def test_an_index_that_lacks_a_tensor(tmp_path):
    folder = write(tmp_path, random_weights(SMALL), shards=2)
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    del table["weight_map"][DOWN]
    index.write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=f"names no file for '{DOWN}'"):
        load_weights(folder, SMALL)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_a_tensor_that_is_quantized(dtype, tmp_path):
    path = write(tmp_path, random_weights(SMALL)) / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {DOWN: tensors[DOWN].to(dtype)}, path)
    with pytest.raises(
        CheckpointError, match=rf"{DOWN} of .*model\.safetensors is \w+; weights must be one of BF16, F16, F32, F64"
    ):
        load_weights(tmp_path, SMALL)


def test_tensors_that_no_configuration_knows(tmp_path):
    """Else a text would be made by another model than the file's."""
    path = write(tmp_path, random_weights(replace(SMALL, num_hidden_layers=4))) / "model.safetensors"
    with pytest.raises(
        CheckpointError, match=r"has model\.layers\.2\..* and 21 more tensors, for which the model's configuration"
    ):
        load_weights(tmp_path, SMALL)
    tensors = load_file(write(tmp_path, random_weights(SMALL)) / "model.safetensors")
    ones = torch.ones(2)
    free = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.rotary_emb.inv_freq": ones,
        "score.weight": 2 * ones,
    }
    save_file(tensors | free, path)
    load_weights(tmp_path, SMALL)
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": ones}, path)
    with pytest.raises(CheckpointError, match=r"has model\.layers\.0\.self_attn\.q_proj\.bias, for which"):
        load_weights(tmp_path, SMALL)


def test_a_tensor_that_is_missing_or_of_the_wrong_shape(tmp_path):
    path = write(tmp_path, random_weights(SMALL)) / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor for name, tensor in tensors.items() if name != DOWN}, path)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors has no tensor '{DOWN}'"):
        load_weights(tmp_path, SMALL)
    save_file(tensors | {DOWN: tensors[DOWN].T.contiguous()}, path)
    with pytest.raises(ShapeError, match=rf"{DOWN} of .*model\.safetensors has shape \(96, 64\); it must be \[64, 96\]"):
        load_weights(tmp_path, SMALL)
    with pytest.raises(ShapeError, match=r"embed_tokens.* must be \[400, 64\]"):
        load_weights(tmp_path, replace(SMALL, vocab_size=400))
    with pytest.raises(CheckpointError, match=r"no tensor 'lm_head\.weight'"):
        load_weights(tmp_path, replace(SMALL, tie_word_embeddings=False))
