"""Tests of models that ``transformers`` holds in memory: shared weights, its ``generate``, and what is refused.

``hf_model`` returns a small random model of ``transformers`` in float32, whose text is the reference.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from onelaunch.decode import Model
from onelaunch.errors import (
    ArgumentError,
    ContextExceeded,
    DTypeError,
    ModelConfigError,
    UnknownKeyword,
    UnsupportedModel,
)

transformers = pytest.importorskip("transformers", reason="needs the extra decode")

SIZES = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip

FAMILIES = ("Qwen3", "Qwen2", "Llama", "Mistral", "SmolLM3")


def hf_model(family="Qwen3", *, dtype=torch.float32, **changed):
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changed}, sliding_window=None)
    made = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3)  # so that greedy texts do not repeat one token
    made.generation_config.eos_token_id = None
    return made


IDS = torch.tensor([[3, 17, 151, 60, 9]])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_greedy_text_equals_that_of_transformers(family, tied):
    theirs = hf_model(family, tie_word_embeddings=tied)
    ours = Model.from_transformers(theirs)
    for given in ({"max_new_tokens": 30}, {"max_length": 20}, {"max_new_tokens": 12, "repetition_penalty": 1.3}):
        expected = theirs.generate(IDS, do_sample=False, **given)
        found = ours.generate(IDS, do_sample=False, **given)
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected), given
    assert len(set(expected[0].tolist())) > 5, "a text that tells something"


def test_the_weights_are_shared_and_changes_count():
    theirs = hf_model()
    ours = Model.from_transformers(theirs)
    assert ours.packed_bytes == 0
    assert {tensor.data_ptr() for tensor in ours.engine.weights.tensors().values()} == {
        parameter.data_ptr() for parameter in theirs.parameters()
    }
    before = ours.generate(IDS, max_new_tokens=10)
    with torch.no_grad():
        theirs.model.layers[0].mlp.down_proj.weight.neg_()
    after = ours.generate(IDS, max_new_tokens=10)
    assert not torch.equal(before, after)
    assert torch.equal(after, theirs.generate(IDS, max_new_tokens=10, do_sample=False))


def test_options_come_from_the_call_the_given_config_and_the_model_in_this_order():
    theirs = hf_model()
    theirs.generation_config.max_new_tokens = 3
    ours = Model.from_transformers(theirs)
    assert ours.generate(IDS).shape == (1, 8)
    given = transformers.GenerationConfig(max_new_tokens=5)
    assert ours.generate(IDS, given).shape == (1, 10)
    assert ours.generate(input_ids=IDS, generation_config=given, max_new_tokens=7).shape == (1, 12)
    theirs.generation_config.max_new_tokens = None
    assert Model.from_transformers(theirs).generate(IDS).shape == (1, 25), "20 new tokens, as in transformers"


def test_a_text_ends_at_the_end_tokens_of_the_call_or_of_the_model():
    theirs = hf_model()
    text = theirs.generate(IDS, max_new_tokens=12, do_sample=False)[0].tolist()
    end = text[9]
    for value in (end, [end, 199], torch.tensor([end])):
        found = Model.from_transformers(theirs).generate(IDS, max_new_tokens=12, eos_token_id=value)
        assert found[0].tolist() == text[: text.index(end, 5) + 1]
    theirs.generation_config.eos_token_id = [end]
    ours = Model.from_transformers(theirs)
    assert ours.config.eos_token_ids == (end,)
    assert torch.equal(ours.generate(IDS, max_new_tokens=12), theirs.generate(IDS, max_new_tokens=12, do_sample=False))
    assert ours.generate(IDS, max_new_tokens=12, eos_token_id=-1).shape == (1, 17)


def test_padding_on_the_left_is_not_read():
    theirs = hf_model()
    ids, mask = torch.cat([torch.zeros(1, 3, dtype=torch.int64), IDS], 1), torch.tensor([[0] * 3 + [1] * 5])
    found = Model.from_transformers(theirs).generate(ids, attention_mask=mask, max_new_tokens=8)
    assert torch.equal(found, theirs.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0))


def test_drawn_texts_follow_the_global_random_state():
    ours = Model.from_transformers(hf_model())
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(ours.generate(IDS, do_sample=True, temperature=1.5, top_k=100, max_new_tokens=20))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_a_streamer_receives_the_prompt_every_token_and_the_end():
    received = []
    streamer = SimpleNamespace(put=lambda value: received.append(value.flatten().tolist()), end=lambda: received.append("end"))
    found = Model.from_transformers(hf_model()).generate(IDS, max_new_tokens=4, streamer=streamer)
    assert received == [IDS[0].tolist(), *([token] for token in found[0, 5:].tolist()), "end"]


def test_the_result_may_be_an_output_object():
    found = Model.from_transformers(hf_model()).generate(IDS, max_new_tokens=4, return_dict_in_generate=True)
    assert isinstance(found, transformers.generation.GenerateDecoderOnlyOutput)
    assert found.sequences.shape == (1, 9)


def test_options_that_leave_a_feature_out_are_taken():
    ours = Model.from_transformers(hf_model())
    plain = ours.generate(IDS, max_new_tokens=4)
    options = {
        "num_beams": 1,
        "use_cache": True,
        "pad_token_id": 0,
        "num_return_sequences": 1,
        "logits_processor": [],
        "synced_gpus": False,
    }
    assert torch.equal(ours.generate(IDS, max_new_tokens=4, **options), plain)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 2), ("num_return_sequences", 2), ("output_scores", True), ("no_repeat_ngram_size", 2),
        ("min_new_tokens", 3), ("stop_strings", ["."]), ("logits_processor", [len]), ("stopping_criteria", [len]),
        ("bad_words_ids", [[3]]),
        ("assistant_model", object()), ("past_key_values", object()), ("cache_implementation", "static"),
    ],
)  # fmt: skip
def test_options_that_are_not_implemented_are_refused_by_name(name, value):
    with pytest.raises(ArgumentError, match=f"{name} is .*not implemented"):
        Model.from_transformers(hf_model()).generate(IDS, max_new_tokens=3, **{name: value})


@pytest.mark.parametrize(
    ("given", "problem", "said"),
    [
        ({}, ArgumentError, "inputs and input_ids"),
        ({"inputs": IDS, "input_ids": IDS}, ArgumentError, "inputs and input_ids"),
        ({"inputs": IDS.repeat(2, 1)}, ArgumentError, "2 sequences"),
        ({"inputs": IDS[0]}, ArgumentError, r"\[1, T\]"),
        ({"inputs": IDS.float()}, ArgumentError, "int64"),
        ({"inputs": [[1, 2]]}, ArgumentError, "tensor"),
        ({"inputs": IDS, "attention_mask": torch.tensor([[1, 1, 1, 0, 0]])}, ArgumentError, "on the left"),
        ({"inputs": IDS, "attention_mask": torch.ones(1, 4)}, ArgumentError, "attention_mask"),
        ({"inputs": IDS, "max_new_tokens": 0}, ArgumentError, "max_new_tokens"),
        ({"inputs": IDS, "max_length": 5}, ArgumentError, "max_length is 5"),
        ({"inputs": IDS, "eos_token_id": 200}, ArgumentError, "eos_token_id"),
        ({"inputs": IDS, "max_new_token": 3}, UnknownKeyword, "max_new_tokens"),
        ({"inputs": IDS, "generation_config": {"top_k": 3}}, ArgumentError, "GenerationConfig"),
        ({"inputs": IDS.repeat(1, 13)}, ContextExceeded, "66 positions"),
    ],
)
def test_wrong_arguments_are_refused(given, problem, said):
    with pytest.raises(problem, match=said):
        Model.from_transformers(hf_model()).generate(**given)


def _without(name):
    def change(model):
        module, _, last = name.rpartition(".")
        delattr(model.get_submodule(module), last)

    return change


def _with(name, value):
    def change(model):
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, value)

    return change


@pytest.mark.parametrize(
    ("change", "problem", "said"),
    [
        (_without("model.layers.1.self_attn.q_norm.weight"), ArgumentError, "no parameter model.layers.1.self_attn.q_norm"),
        (_with("model.layers.0.mlp.extra", torch.nn.Parameter(torch.ones(2))), ArgumentError, "has no place"),
        (_with("model.layers.0.mlp.lora_A", torch.nn.Linear(2, 2)), ArgumentError, "merge adapters first"),
        (_with("model.norm.weight", torch.nn.Parameter(torch.ones(64, dtype=torch.float64))), DTypeError, "model.norm.weight"),
        (_with("model.norm.weight", torch.nn.Parameter(torch.ones(64, device="meta"))), ArgumentError, "meta"),
        (_with("hf_quantizer", object()), UnsupportedModel, "quantized"),
        (lambda model: setattr(model.config, "hidden_act", "gelu"), UnsupportedModel, "hidden_act"),
        (lambda model: setattr(model.config, "num_key_value_heads", 3), ModelConfigError, "num_key_value_heads"),
        (lambda model: model.double(), DTypeError, "float64"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_shared_are_refused_by_what_is_wrong(change, problem, said):
    theirs = hf_model()
    change(theirs)
    with pytest.raises(problem, match=said):
        Model.from_transformers(theirs)


@pytest.mark.parametrize("given", [None, torch.nn.Linear(2, 2), "owner/name"])
def test_other_objects_are_refused(given):
    with pytest.raises(ArgumentError, match="hf_model is"):
        Model.from_transformers(given)


def test_another_architecture_is_refused():
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=20)
    with pytest.raises(UnsupportedModel, match="GPT2LMHeadModel"):
        Model.from_transformers(transformers.GPT2LMHeadModel(config))
