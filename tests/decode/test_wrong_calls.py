"""Tests of wrong calls of the public decoding interface: each raises an onelaunch error that names the argument.

Nothing runs before the error. Values of unusual classes that are accepted, such as NumPy's, are tested too. ``prose.raises``
compares the message of an error with the test's entry in ``tests/snapshots/prose.txt``. A test fails if it does not compare one
of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``SMALL`` is a small float32 model. ``as_dict`` returns the content of a ``config.json``. ``write`` writes weights and
configuration as a Hugging Face folder.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from onelaunch.decode import KVCache, Model, ModelConfig, Sampling, Weights, decode_step, random_weights
from onelaunch.decode.model.config import LinearScaling, Llama3Scaling
from onelaunch.decode.runtime.engines import TorchEngine
from onelaunch.errors import ArgumentError, ModelConfigError, OneLaunchError, UnknownKeyword, UnknownModel, UnknownNameError
from tests.decode.models import SMALL, as_dict, write

WEIGHTS = random_weights(SMALL)


class Unprintable:
    """Value that a message cannot show."""

    def __repr__(self) -> str:
        raise RuntimeError("no representation")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("model"), WEIGHTS)


@pytest.fixture
def model() -> Model:
    return Model(TorchEngine(WEIGHTS))


# Model.from_pretrained


@pytest.mark.parametrize("name", [None, 3, b"tiny", ["tiny"], "", "  ", Unprintable(), torch.ones(2), Path])
def test_a_model_name_of_a_wrong_type(name, prose):
    # in Python 3.13 ``Path`` belongs to the module pathlib._local
    with prose.raises(ArgumentError, match="'tiny'", mask={r"pathlib\._local": "pathlib"}):
        Model.from_pretrained(name)


@pytest.mark.parametrize(
    "name", ["tinny", "~/models/none", "./none", "/none/at/all", "a\0b", "x" * 5000, "a/b/c", "-x/y", "Tiny"]
)
def test_an_unknown_model_name(name, prose):
    with prose.raises(UnknownModel, match="config.json") as caught:
        Model.from_pretrained(name)
    assert isinstance(caught.value, UnknownNameError), "the command line's exit code is that of a wrong name"
    assert ("Did you mean 'tiny'?" in str(caught.value)) == (name in ("tinny", "Tiny"))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": None}, "device"),
        ({"device": 0}, "device"),
        ({"device": ["cpu"]}, "'cpu'"),
        ({"device": ""}, "device"),
        ({"dtype": "fp16"}, "'fp16'"),
        ({"dtype": "float"}, "'float'"),
        ({"dtype": 16}, "dtype"),
        ({"dtype": ["float16"]}, "'float16'"),
        ({"dtype": torch.int8}, "dtype"),
        ({"dtype": torch.float64}, "dtype"),
        ({"variant": None}, "variant"),
        ({"variant": 3}, "variant"),
        ({"variant": ["eager"]}, "'eager'"),
    ],
)
def test_options_of_a_wrong_type(folder, options, message, prose):
    with prose.raises(ArgumentError, match=message):
        Model.from_pretrained(folder, **({"device": "cpu"} | options))


def test_a_device_may_be_a_torch_device():
    pytest.importorskip("tokenizers", reason="needs the extra decode")
    assert Model.from_pretrained("tiny", device=torch.device("cpu")).engine.weights.device.type == "cpu"


@pytest.mark.parametrize(
    "arguments",
    [
        (None,),
        ("tiny",),
        (WEIGHTS,),
        (TorchEngine,),
        (TorchEngine(WEIGHTS), "tokenizer"),
        (TorchEngine(WEIGHTS), None, ["top_k"]),
    ],
)
def test_a_model_made_of_wrong_objects(arguments, prose):
    with prose.raises(ArgumentError):
        Model(*arguments)


def test_default_settings_are_checked_when_the_model_is_made(prose):
    with prose.raises(UnknownKeyword, match="'temprature'"):
        Model(TorchEngine(WEIGHTS), None, {"temprature": 1})  # pyrefly: ignore[bad-argument-type]


# generate, stream, astream, chat


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"), ("max_tokens", "max_new_tokens"), ("topk", "top_k"), ("stops", "stop"),
        ("ignore_eos", None), ("do_sample", None), ("num_beams", None),
    ],
)  # fmt: skip
def test_a_misspelt_argument(model, name, meant, prose):
    for ask in (model.generate, model.stream):
        with prose.raises(UnknownKeyword, match=f"'{name}'") as caught:
            ask([1], **{name: 1})
        assert isinstance(caught.value, TypeError), "the error is a TypeError, as Python's own"
        assert meant is None or f"Did you mean '{meant}'?" in str(caught.value)
        assert "max_new_tokens" in str(caught.value)


def test_streamer_is_suggested_only_by_functions_that_accept_it(model, prose):
    with prose.raises(UnknownKeyword, match="'streamer'"):
        model.generate([1], streemer=None)
    with prose.raises(UnknownKeyword, match="'streamer'"):
        model.stream([1], streamer=None)


@pytest.mark.parametrize("streamer", [object(), "x", 3, [], type("Half", (), {"put": print})()])
def test_a_streamer_without_its_methods(model, streamer, prose):
    with prose.raises(ArgumentError, match="streamer"):
        model.generate([1], streamer=streamer)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": "hot"}, {"temperature": None}, {"temperature": [1]}, {"temperature": torch.tensor(1.0)},
        {"temperature": 10**400}, {"temperature": 10**5000}, {"temperature": float("nan")}, {"temperature": Unprintable()},
        {"top_k": 5.5}, {"top_k": "5"}, {"top_k": True}, {"top_p": 2}, {"top_p": "0.9"}, {"min_p": -1}, {"min_p": {}},
        {"repetition_penalty": 0}, {"repetition_penalty": "1"}, {"seed": -1}, {"seed": 2**64}, {"seed": "1"}, {"seed": None},
        {"max_new_tokens": "5"}, {"max_new_tokens": None}, {"max_new_tokens": 2.5}, {"max_new_tokens": True},
        {"stop": 5}, {"stop": b"ab"}, {"stop": {1: 2}}, {"stop": itertools.repeat("a")},
        {"ignore_end": "no"}, {"ignore_end": None}, {"ignore_end": 1},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_a_value_of_a_wrong_type(model, options, prose):
    name = next(iter(options))
    with prose.raises(ArgumentError, match=name):
        model.generate([1], **options)


@pytest.mark.timeout(20)  # an endless iterator must be refused, not read
@pytest.mark.parametrize(
    "prompt",
    [
        None, 3.5, b"ab", {"input_ids": [1]}, [{"role": "user", "content": "x"}], [[1, 2]], ["a"], {1, 2}, list, Unprintable(),
        [Unprintable()], [10**5000], [-1], [None], itertools.repeat(1), Path("x"),
        torch.tensor(3), torch.tensor([[1], [2]]), torch.empty(3, dtype=torch.int64, device="meta"),
        torch.tensor([1, 2]).to_sparse(),
    ],
    ids=lambda prompt: type(prompt).__name__,
)  # fmt: skip
def test_an_invalid_prompt(model, prompt, prose):
    with prose.raises(OneLaunchError, match="prompt") as caught:
        model.stream(prompt)
    assert len(str(caught.value)) < 400


def test_arrays_are_prompts_only_if_they_are_rows_of_integers(model, prose):
    numpy = pytest.importorskip("numpy", reason="needs the extra decode")
    for prompt in (numpy.array(3), numpy.ones((2, 2), int), numpy.array([1.5])):
        with prose.raises(ArgumentError):
            model.stream(prompt)


def test_numpy_numbers_are_accepted(model):
    numpy = pytest.importorskip("numpy", reason="needs the extra decode")
    drawn = {"temperature": 0.5, "top_k": 7, "seed": 3}
    same = {"temperature": numpy.float32(0.5), "top_k": numpy.int64(7), "seed": numpy.uint8(3)}
    assert Sampling(**drawn) == Sampling(**same)
    found = model.generate([1], max_new_tokens=numpy.int64(9), **same)
    assert found.tokens == model.generate([1], max_new_tokens=9, **drawn).tokens


# Weights, caches, configurations, steps


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.grown(SMALL, "x"),
        lambda cache: cache.grown(None, 300),
        lambda cache: cache.with_length("x"),
        lambda cache: cache.with_length(-1),
        lambda cache: Weights(SMALL, WEIGHTS.embed_tokens, (), WEIGHTS.norm),
        lambda cache: Weights(SMALL, WEIGHTS.embed_tokens, None, WEIGHTS.norm),  # pyrefly: ignore[bad-argument-type]
        lambda cache: Weights(None, WEIGHTS.embed_tokens, (), WEIGHTS.norm),  # pyrefly: ignore[bad-argument-type]
        lambda cache: decode_step([1], WEIGHTS, cache),
        lambda cache: decode_step(torch.tensor([1]), None, cache),
        lambda cache: decode_step(torch.tensor([1]), WEIGHTS, None),
        lambda cache: ModelConfig.from_dict(None),  # pyrefly: ignore[bad-argument-type]
        lambda cache: ModelConfig.from_dict([1]),  # pyrefly: ignore[bad-argument-type]
        lambda cache: ModelConfig.from_pretrained(None),  # pyrefly: ignore[bad-argument-type]
    ],
)
def test_wrong_arguments_of_weights_caches_configurations_and_steps(call, prose):
    with prose.raises(ArgumentError):
        call(KVCache.empty(SMALL))


@pytest.mark.parametrize(
    "change",
    [
        {"eos_token_ids": 5}, {"eos_token_ids": None}, {"eos_token_ids": ("x",)}, {"rope_scaling": "yarn"},
        {"rope_scaling": LinearScaling("2")}, {"rope_scaling": LinearScaling(None)}, {"rope_scaling": LinearScaling(1e300)},
        {"rope_scaling": Llama3Scaling(8.0, 128, 4.0, 4.0)}, {"rope_scaling": Llama3Scaling(8.0, 128, 0.0, 4.0)},
        {"dtype": "bfloat16"}, {"dtype": []}, {"hidden_size": 64.0}, {"vocab_size": 2**31}, {"num_hidden_layers": 10**5000},
        {"max_position_embeddings": 10**18}, {"max_position_embeddings": -1}, {"rope_theta": 10**400},
        {"rms_norm_eps": 10**400}, {"rms_norm_eps": True},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_configuration_of_wrong_values(change, prose):
    with prose.raises(ModelConfigError, match=next(iter(change)).removesuffix("_ids")) as caught:
        replace(SMALL, **change)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("change", [{"rope_theta": 10**400}, {"rms_norm_eps": -(10**400)}, {"dtype": ["x"]}, {"dtype": 3}])
def test_a_file_of_wrong_values(change):
    with pytest.raises(ModelConfigError, match=next(iter(change))):
        ModelConfig.from_dict(as_dict(SMALL) | change)
