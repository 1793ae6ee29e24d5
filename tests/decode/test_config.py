"""Tests of model configurations: which files are read, which are refused, and with which message.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in tests/snapshots/prose.txt. A
test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is
gone. Entries are found by test id, which holds the index of the parameter: adding or removing a case renames those after it.

``SMALL`` is a small float32 model. ``CONFIGS`` are variations of a small model, by name. ``as_dict`` returns the content of a
``config.json``.
"""

from __future__ import annotations

import json
import math

import pytest
import torch

from onelaunch.decode import ModelConfig
from onelaunch.decode.model.config import LinearScaling, YarnScaling
from onelaunch.errors import CheckpointError, ModelConfigError, UnsupportedModel
from tests.decode.models import CONFIGS, SMALL, as_dict

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
"""Configuration of the smallest Qwen3 model (0.6B), in the older layout of ``config.json``."""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_configuration_is_read_back(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(as_dict(CONFIGS[name])))
    assert ModelConfig.from_pretrained(tmp_path) == CONFIGS[name]
    assert hash(ModelConfig.from_pretrained(tmp_path)) == hash(CONFIGS[name])


def test_config_json_in_the_older_layout_is_read():
    config = ModelConfig.from_dict(QWEN3)
    assert (config.dtype, config.rope_theta, config.rope_scaling) == (torch.bfloat16, 1e6, None)
    assert (config.query_size, config.key_value_size, config.queries_per_key) == (2048, 1024, 2)
    assert config.eos_token_ids == (151645,)
    yarn = ModelConfig.from_dict(QWEN3 | {"rope_scaling": {"type": "yarn", "factor": 4}})
    assert yarn.rope_scaling == YarnScaling(4, original_max_position_embeddings=40960)
    assert yarn.rope_theta == 1e6
    linear = ModelConfig.from_dict(QWEN3 | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    assert linear.rope_scaling == LinearScaling(2.0)


def test_config_json_in_the_newer_layout_is_read():
    newer = {key: value for key, value in QWEN3.items() if key not in ("rope_theta", "torch_dtype")}
    newer |= {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "dtype": "float16",
        "layer_types": ["full_attention"] * 28,
    }
    config = ModelConfig.from_dict(newer)
    assert (config.rope_theta, config.rope_scaling, config.dtype) == (5e5, None, torch.float16)


def test_end_tokens_come_from_the_generation_configuration_first(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643], "temperature": 0.6}))
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == (151645, 151643)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden_size": None}, ModelConfigError, "hidden_size"),
        ({"hidden_size": 0}, ModelConfigError, "hidden_size"),
        ({"num_hidden_layers": "28"}, ModelConfigError, "'28'"),
        ({"num_key_value_heads": 3}, ModelConfigError, "num_key_value_heads"),
        ({"head_dim": 33}, ModelConfigError, "head_dim"),
        ({"rms_norm_eps": -1}, ModelConfigError, "rms_norm_eps"),
        ({"rms_norm_eps": math.inf}, ModelConfigError, "rms_norm_eps"),
        ({"rope_theta": 0.0}, ModelConfigError, "rope_theta"),
        ({"rope_theta": math.inf}, ModelConfigError, "rope_theta"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, ModelConfigError, "rope_theta .* is 0"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4, "rope_theta": 1}}, ModelConfigError, "rope_theta .* above 1"),
        ({"torch_dtype": "float8"}, ModelConfigError, "'float8'"),
        ({"eos_token_id": 151936}, ModelConfigError, "eos_token_id"),
        ({"eos_token_id": "end"}, ModelConfigError, "eos_token_id"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, ModelConfigError, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, ModelConfigError, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, ModelConfigError, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, ModelConfigError, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "mscale": 1}}, ModelConfigError, "rope_scaling.mscale"),
        ({"bos_token_id": [1]}, ModelConfigError, "bos_token_id"),
        ({"eos_token_id": True}, ModelConfigError, "eos_token_id"),
        ({"rope_parameters": 5}, ModelConfigError, "rope_parameters"),
        ({"rope_scaling": ["yarn"]}, ModelConfigError, "rope_scaling"),
        ({"rope_scaling": {"rope_type": ["x"]}}, ModelConfigError, "'x'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "truncate": [1]}}, ModelConfigError, "rope_scaling.truncate"),
        ({"layer_types": [["a"]]}, ModelConfigError, "'a'"),
        ({"layer_types": 5}, ModelConfigError, "layer_types .* is 5"),
        ({"architectures": "Qwen3ForCausalLM"}, ModelConfigError, "'Qwen3ForCausalLM'"),
        ({"architectures": [["x"]]}, ModelConfigError, "architectures"),
        ({"tie_word_embeddings": [1]}, ModelConfigError, "tie_word_embeddings"),
        ({"use_sliding_window": True, "max_window_layers": "x"}, UnsupportedModel, ""),
        ({"architectures": ["GemmaForCausalLM"]}, UnsupportedModel, "'GemmaForCausalLM'"),
        ({"architectures": None, "model_type": "gpt2"}, UnsupportedModel, "'gpt2'"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, UnsupportedModel, ""),
        ({"use_sliding_window": True, "max_window_layers": 2}, UnsupportedModel, ""),
        ({"layer_types": ["sliding_attention"] * 28}, UnsupportedModel, ""),
        ({"layer_types": ["chunked_attention"] * 28}, UnsupportedModel, "chunked_attention"),
        ({"num_experts": 8}, UnsupportedModel, "num_experts = 8"),
        ({"logits_scaling": 4.0}, UnsupportedModel, "logits_scaling"),
        ({"architectures": ["LlamaForCausalLM"], "mlp_bias": True}, UnsupportedModel, "mlp_bias"),
        ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, UnsupportedModel, "attention_bias"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ModelConfigError, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, ModelConfigError, "rope_parameters"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]}, ModelConfigError, "no_rope_layers"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 0}, ModelConfigError, "no_rope_layer_interval"),
        ({"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 10**9}, ModelConfigError, "num_hidden_layers"),
    ],
)  # fmt: skip
def test_errors_name_the_wrong_key(change, error, message, prose):
    with prose.raises(error, match=message):
        ModelConfig.from_dict(QWEN3 | change)


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{",
        "[" * 10**5,
        "[]",
        '{"vocab_size": 1, "vocab_size": 2}',
        '{"rope_scaling": {"a": 1, "a": 1}}',
        '{"rope_theta": NaN}',
        '{"rope_theta": -Infinity}',
        '{"rope_theta": 1' + "0" * 5000 + "}",
        " " * 9_000_000 + "{}",
    ],
    ids=["none", "open", "deep", "list", "twice", "twice inside", "nan", "infinity", "digits", "huge"],
)
def test_a_folder_without_a_readable_configuration_is_refused(tmp_path, content, prose):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with prose.raises(CheckpointError, match=r"config\.json", mask={"Exceeds the limit.*": "<reason>"}):
        ModelConfig.from_pretrained(tmp_path)


def test_every_way_to_make_a_configuration_checks_it():
    with pytest.raises(ModelConfigError, match="vocab_size"):
        ModelConfig(**{**vars(SMALL), "vocab_size": True})


def test_families_differ_in_their_features():
    def features(architecture: str, **change: object) -> tuple[bool, bool, bool, tuple[int, ...]]:
        config = ModelConfig.from_dict(QWEN3 | {"architectures": [architecture], "num_hidden_layers": 8} | change)
        return config.qk_norm, config.attention_bias, config.attention_bias and config.output_bias, config.unrotated_layers

    assert features("Qwen3ForCausalLM") == (True, False, False, ())
    assert features("LlamaForCausalLM") == features("MistralForCausalLM") == (False, False, False, ())
    assert features("LlamaForCausalLM", attention_bias=True) == (False, True, True, ())
    assert features("Qwen2ForCausalLM") == (False, True, False, ())
    assert features("SmolLM3ForCausalLM") == (False, False, False, (3, 7))
    assert features("SmolLM3ForCausalLM", no_rope_layers=[0, *[1] * 7]) == (False, False, False, (0,))


def test_the_context_ends_with_the_sliding_window():
    """Up to the window, attention over it is full attention."""
    mistral = {key: value for key, value in QWEN3.items() if key != "sliding_window"} | {"architectures": ["MistralForCausalLM"]}
    assert ModelConfig.from_dict(mistral).max_position_embeddings == 4096, "the default of the family"
    assert ModelConfig.from_dict(mistral | {"sliding_window": None}).max_position_embeddings == 40960
    assert ModelConfig.from_dict(mistral | {"sliding_window": 50_000}).max_position_embeddings == 40960
    sliding = {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 1000}
    assert ModelConfig.from_dict(QWEN3 | sliding).max_position_embeddings == 1000
    assert ModelConfig.from_dict(QWEN3 | sliding | {"use_sliding_window": False}).max_position_embeddings == 40960
