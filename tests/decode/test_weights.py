"""Tests of checkpoints: tensors are read back and checked; errors name what is missing or damaged.

``write`` writes weights and configuration as a Hugging Face folder. ``SMALL`` is a float32 Qwen3 model of two layers, 300
tokens and 512 positions, and ``CONFIGS`` are variations of it. ``prose.raises`` compares the message of an error with the
test's entry in ``tests/snapshots/prose.txt``. A test fails if it does not compare one of its entries, and
``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``as_dict`` returns the content of a ``config.json``.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from onelaunch.decode import KVCache, Model, ModelConfig, load_weights, random_weights
from onelaunch.decode.model.weights import elements
from onelaunch.errors import ArgumentError, CheckpointError, OneLaunchError
from tests.decode.models import CONFIGS, SMALL, as_dict, write

DOWN = "model.layers.1.mlp.down_proj.weight"
"""Name in a checkpoint of the tensor that tests remove or damage."""


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", ["tied", "untied_with_biases"])
def test_written_checkpoints_are_read_back(name, shards, tmp_path):
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


def test_a_tied_lm_head_stays_the_embedding():
    weights = random_weights(SMALL)
    assert weights.lm_head is weights.embed_tokens
    copy = weights.map(torch.clone)
    assert copy.lm_head is copy.embed_tokens
    assert copy.embed_tokens is not weights.embed_tokens
    assert copy.nbytes == weights.nbytes == sum(tensor.nbytes for tensor in weights.tensors().values())


def test_an_untied_lm_head():
    weights = random_weights(CONFIGS["untied_with_biases"])
    assert weights.lm_head is weights.untied_head
    assert weights.layers[0].o_bias is not None
    assert weights.layers[0].o_bias.shape == (64,)


def test_random_weights_follow_their_seed():
    one, same, other = (random_weights(SMALL, seed).embed_tokens for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_folder_without_weights(tmp_path, prose):
    with prose.raises(CheckpointError, match=r"model\.safetensors"):
        load_weights(tmp_path, SMALL)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_truncated_file(tmp_path, shards, prose):
    folder = write(tmp_path, random_weights(SMALL), shards)
    path = folder / ("model.safetensors" if shards == 1 else "model-1.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    with prose.raises(CheckpointError, match=path.name, foreign=True):
        load_weights(folder, SMALL)


def test_a_missing_shard_is_named(tmp_path, prose):
    folder = write(tmp_path, random_weights(SMALL), shards=2)
    (folder / "model-0.safetensors").unlink()
    with prose.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        load_weights(folder, SMALL)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "JSON"),
        ("[]", "JSON"),
        ("{}", ""),
        ('{"weight_map": 3}', "weight_map"),
        ('{"weight_map": {"a": "b.safetensors", "a": "c.safetensors"}}', "'a'"),
    ],
)
def test_an_invalid_index_is_refused(tmp_path, content, message, prose):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with prose.raises(CheckpointError, match=message):
        load_weights(tmp_path, SMALL)


def test_an_index_without_a_tensor_is_refused(tmp_path, prose):
    folder = write(tmp_path, random_weights(SMALL), shards=2)
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    del table["weight_map"][DOWN]
    index.write_text(json.dumps(table))
    with prose.raises(CheckpointError, match=f"'{DOWN}'"):
        load_weights(folder, SMALL)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_quantized_tensors_are_refused(dtype, tmp_path, prose):
    path = write(tmp_path, random_weights(SMALL)) / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {DOWN: tensors[DOWN].to(dtype)}, path)
    with prose.raises(CheckpointError, match=r"model\.safetensors"):
        load_weights(tmp_path, SMALL)


def test_unknown_tensors_are_refused(tmp_path, prose):
    """If they were ignored, another model than the file's would generate."""
    path = write(tmp_path, random_weights(replace(SMALL, num_hidden_layers=4))) / "model.safetensors"
    with prose.raises(CheckpointError, match="21"):  # two layers of 11 tensors too many: one is named, 21 are counted
        load_weights(tmp_path, SMALL)
    tensors = load_file(write(tmp_path, random_weights(SMALL)) / "model.safetensors")
    # Tensors that are ignored: a copy of the tied LM head, RoPE frequencies, and the head of another task.
    ones = torch.ones(2)
    free = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.rotary_emb.inv_freq": ones,
        "score.weight": 2 * ones,
    }
    save_file(tensors | free, path)
    load_weights(tmp_path, SMALL)
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": ones}, path)
    with prose.raises(CheckpointError, match=r"'model\.layers\.0\.self_attn\.q_proj\.bias'"):
        load_weights(tmp_path, SMALL)


def test_missing_tensors_and_wrong_shapes_are_named(tmp_path, prose):
    path = write(tmp_path, random_weights(SMALL)) / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor for name, tensor in tensors.items() if name != DOWN}, path)
    with prose.raises(CheckpointError, match=f"'{DOWN}'"):
        load_weights(tmp_path, SMALL)
    save_file(tensors | {DOWN: tensors[DOWN].T.contiguous()}, path)
    with prose.raises(CheckpointError, match=r"model\.safetensors"):
        load_weights(tmp_path, SMALL)
    with prose.raises(CheckpointError, match="embed_tokens"):
        load_weights(tmp_path, replace(SMALL, vocab_size=400))
    with prose.raises(CheckpointError, match=r"'lm_head\.weight'"):
        load_weights(tmp_path, replace(SMALL, tie_word_embeddings=False))


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("tensor", "change"),
    [
        ("self_attn.q_proj.bias", "missing or surplus"), ("self_attn.o_proj.bias", "surplus"),
        ("self_attn.q_norm.weight", "surplus"),
        ("self_attn.k_proj.weight", "missing or surplus"), ("self_attn.v_proj.weight", "transposed"),
        ("mlp.up_proj.bias", "surplus"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_the_family_are_named(name, tensor, change, tmp_path):
    """A tensor that belongs to the family is taken away or transposed; one that does not is added."""
    folder, tensor = write(tmp_path, random_weights(CONFIGS[name])), f"model.layers.1.{tensor}"
    tensors = load_file(folder / "model.safetensors")
    if change == "transposed":
        tensors[tensor] = tensors[tensor].T.contiguous()
    elif tensors.pop(tensor, None) is None:
        tensors[tensor] = torch.zeros(CONFIGS[name].query_size)
    else:
        assert change != "surplus"
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=tensor.replace(".", r"\.")):
        load_weights(folder, ModelConfig.from_pretrained(folder))


# Files outside of the folder


@pytest.mark.parametrize(
    "name",
    [
        "../model-0.safetensors", "sub/model-0.safetensors", "./model-0.safetensors", "..\\model-0.safetensors",
        "C:model.safetensors", "..", ".", "", "model-0.bin", "config.json", "model\x00.safetensors",
        "model\x1b[2J.safetensors", "x" * 300 + ".safetensors", 3, None, ["model-0.safetensors"], {"a": 1}, True,
    ],
)  # fmt: skip
def test_an_index_may_only_name_files_of_its_own_folder(tmp_path, name, prose):
    """A weights file lies in this folder, below it and above it, so that no such path fails because its file is missing."""
    folder = write(tmp_path / "sub", random_weights(SMALL), shards=2)
    for there in (tmp_path, folder / "sub"):
        there.mkdir(exist_ok=True)
        (there / "model-0.safetensors").write_bytes((folder / "model-0.safetensors").read_bytes())
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"][DOWN] = name
    index.write_text(json.dumps(table))
    with prose.raises(CheckpointError, match=r"index\.json") as caught:
        load_weights(folder, SMALL)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_an_absolute_path_is_refused_though_it_leads_to_the_right_file(tmp_path, prose):
    folder = write(tmp_path, random_weights(SMALL), shards=2)
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": {key: str(folder / name) for key, name in table["weight_map"].items()}}))
    with prose.raises(CheckpointError, mask={r"'/\S+\.\.\.": "<path>"}):
        load_weights(folder, SMALL)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_symlink_out_of_the_folder_is_not_followed(tmp_path, name, prose):
    folder = write(tmp_path / "model", random_weights(SMALL))
    secret = tmp_path / "elsewhere"
    (folder / name).rename(secret)
    (folder / name).symlink_to(secret)
    with prose.raises(CheckpointError, match=name):
        load_weights(folder, ModelConfig.from_pretrained(folder))
    (folder / name).unlink()
    secret.rename(folder / "renamed")
    (folder / name).symlink_to("renamed")
    assert load_weights(folder, ModelConfig.from_pretrained(folder)).config == SMALL
    (tmp_path / "alias").symlink_to(folder)
    assert load_weights(tmp_path / "alias", SMALL).config == SMALL, "the folder itself may be a symlink"


@pytest.mark.parametrize("shared", [False, True])
def test_symlinks_of_the_hubs_cache_are_followed(tmp_path, shared, prose):
    """Entries of the cache lead to blobs of the same model, which may lead to blobs that several models share."""
    model = tmp_path / "hub" / "models--owner--name"
    folder = write(model / "snapshots" / "0123abcd", random_weights(SMALL), shards=2)
    store = tmp_path / "hub" / "blobs" / "ab"
    for number, path in enumerate(sorted(folder.iterdir())):
        blob = model / "blobs" / str(number)
        blob.parent.mkdir(exist_ok=True)
        path.rename(blob)
        path.symlink_to(f"../../blobs/{number}")
        if shared:
            store.mkdir(parents=True, exist_ok=True)
            blob.rename(store / str(number))
            blob.symlink_to(f"../../blobs/ab/{number}")
    assert load_weights(folder, ModelConfig.from_pretrained(folder)).config == SMALL
    other = tmp_path / "hub" / "models--owner--other" / "secret"
    other.parent.mkdir()
    other.write_text("{}")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(other)
    with prose.raises(CheckpointError):
        ModelConfig.from_pretrained(folder)


def test_a_named_pipe_is_not_read(tmp_path, prose):
    folder = write(tmp_path, random_weights(SMALL))
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with prose.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_pretrained(folder)


# Configured sizes that the checkpoint does not have


@pytest.mark.timeout(10)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**9}, {"num_hidden_layers": 3}, {"hidden_size": 10**9}, {"vocab_size": 2**31 - 1},
        {"intermediate_size": 2**31 - 1}, {"num_attention_heads": 2**30}, {"head_dim": 2**31 - 2},
    ],
    ids=str,
)  # fmt: skip
def test_absurd_sizes_are_refused_from_the_header_alone(tmp_path, change, shards, prose):
    folder = write(tmp_path, random_weights(SMALL), shards)
    (folder / "config.json").write_text(json.dumps(as_dict(SMALL) | change))
    config = ModelConfig.from_pretrained(folder)
    with prose.raises(CheckpointError):
        load_weights(folder, config)
    with pytest.raises(CheckpointError):
        Model.from_pretrained(folder, device="cpu")


def test_elements_are_counted_without_a_loop_over_layers():
    for config in CONFIGS.values():
        assert elements(config) == sum(tensor.numel() for tensor in random_weights(config).tensors().values())
        matrices = [tensor for tensor in random_weights(config).tensors().values() if tensor.dim() == 2]
        assert elements(config, matrices_only=True) == sum(matrix.numel() for matrix in matrices)
    assert elements(replace(SMALL, num_hidden_layers=10**9)) > 10**9


@pytest.mark.parametrize(
    "call",
    [
        lambda folder: load_weights(None, SMALL),  # pyrefly: ignore[bad-argument-type]
        lambda folder: load_weights(b"folder", SMALL),  # pyrefly: ignore[bad-argument-type]
        lambda folder: load_weights(folder, None),  # pyrefly: ignore[bad-argument-type]
        lambda folder: load_weights(folder, as_dict(SMALL)),
        lambda folder: load_weights(folder, SMALL, "gpu"),
        lambda folder: load_weights(folder, SMALL, "meta"),
        lambda folder: load_weights(folder, SMALL, "cuda:99"),
        lambda folder: load_weights(folder, SMALL, 3),
        lambda folder: random_weights(None),
        lambda folder: random_weights(SMALL, "x"),
        lambda folder: random_weights(SMALL, -1),
        lambda folder: random_weights(SMALL, 0, "gpu"),
        lambda folder: random_weights(SMALL, 0, None),
        lambda folder: KVCache.empty(None),
        lambda folder: KVCache.empty(SMALL, "256"),
        lambda folder: KVCache.empty(SMALL, -5),
        lambda folder: KVCache.empty(SMALL, 256, "gpu"),
        lambda folder: KVCache.empty(SMALL, 256, "cpu", "float16"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, call):
    with pytest.raises(OneLaunchError, match=r"(folder|config|device|seed|capacity|dtype) is |no device"):
        call(write(tmp_path, random_weights(SMALL)))


def test_a_folder_of_pickles_is_refused_by_name(tmp_path, prose):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with prose.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load_weights(tmp_path, SMALL)


def test_wrong_shapes_and_truncation_are_both_checkpoint_errors(tmp_path, prose):
    """The checkpoint is at fault and not the caller, so that the command line ends with the same exit code."""
    path = write(tmp_path, random_weights(SMALL)) / "model.safetensors"
    save_file(load_file(path) | {DOWN: torch.ones(2, 2)}, path)
    for foreign in (False, True):
        with prose.raises(CheckpointError, match=r"model\.safetensors", foreign=foreign) as caught:
            load_weights(tmp_path, SMALL)
        assert not isinstance(caught.value, ArgumentError)
        path.write_bytes(path.read_bytes()[:-3])
