"""Tests of generation: when a sequence ends, streams, tokens equal to those of transformers, refused calls, and names of models.

``SMALL`` is a float32 Qwen3 model of two layers, 300 tokens and 512 positions, and ``CONFIGS`` are variations of it.
``prose.raises`` and ``prose.warns`` compare messages with the test's entries in ``tests/snapshots/prose.txt``. A test fails if
it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``write`` writes weights and configuration as a Hugging Face folder.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import warnings
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from onelaunch import dispatch
from onelaunch.decode import KVCache, decode_step, random_weights
from onelaunch.decode import generate as generate_file
from onelaunch.decode.generate import Model
from onelaunch.decode.model import hub as hub_file
from onelaunch.decode.model.hub import find_model
from onelaunch.decode.model.weights import from_tensors
from onelaunch.decode.plan.levels import plan_for
from onelaunch.decode.plan.packing import pack
from onelaunch.decode.runtime import engines as engine_file
from onelaunch.decode.runtime.engines import Request, TorchEngine, make_engine
from onelaunch.decode.runtime.packed import packed_bytes
from onelaunch.dispatch import AUTO
from onelaunch.errors import (
    ArgumentError,
    CheckpointError,
    ContextExceeded,
    DeviceMemoryError,
    FallbackNotice,
    LogitsNotFinite,
    TokenizerMissing,
    UnknownKeyword,
    UnknownModel,
    UnknownVariant,
    ValueRangeError,
    VariantUnsupported,
)
from tests.decode.models import CONFIGS, SMALL, write


class Letters:
    """Tokenizer of letters: 1 is a, 2 is b, and 0 ends a sequence."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(ord(letter) - 96 for letter in text)

    def decode(self, tokens) -> str:
        return "".join(chr(token + 96) for token in tokens if token)


class Script:
    """Engine that yields prescribed tokens and records whether it was closed. Its context has 20 positions.

    Args:
        text: Tokens as letters: ``a`` is 1, and ``.`` is 0, the end.
        then: Exception to raise behind the last token.
    """

    def __init__(self, text: str, then: BaseException | None = None) -> None:
        self.config = replace(SMALL, max_position_embeddings=20)
        self.text, self.then = text, then
        self.requests: list[Request] = []
        self.running = False

    def run(self, request: Request) -> Generator[int, None, None]:
        self.requests.append(request)
        self.running = True
        try:
            for letter in self.text[: request.max_new_tokens]:
                token = 0 if letter == "." else ord(letter) - 96
                yield token
                if token in request.ends:
                    return
            if self.then is not None:
                raise self.then
        finally:
            self.running = False


def model_of(text: str, then: BaseException | None = None) -> Model:
    """Return a model that generates a text, whatever the prompt; the arguments are those of :class:`Script`."""
    return Model(Script(text, then), Letters())  # pyrefly: ignore[bad-argument-type]


# When a sequence ends


@pytest.mark.parametrize(
    ("options", "text", "tokens", "finish"),
    [
        ({}, "abcabc", 7, "end"),
        ({"max_new_tokens": 4}, "abca", 4, "length"),
        ({"max_new_tokens": 6}, "abcabc", 6, "length"),
        ({"ignore_end": True}, "abcabcxyzxyzxyzxy", 18, "context"),
        ({"ignore_end": True, "max_new_tokens": 18}, "abcabcxyzxyzxyzxy", 18, "length"),
        ({"stop": "ca"}, "ab", 4, "stop"),
        ({"stop": ["xyz", "bc"]}, "a", 3, "stop"),
        ({"stop": "cx"}, "abcabc", 7, "end"),
        ({"stop": "cab", "max_new_tokens": 4}, "abca", 4, "length"),
    ],
)  # fmt: skip
def test_a_sequence_ends_for_each_reason(options, text, tokens, finish):
    model = model_of("abcabc.xyzxyzxyzxyzxyz")
    found = model.generate("hi", **options)
    assert (found.text, len(found.tokens), found.finish) == (text, tokens, finish)
    assert not model.engine.running
    stream = model.stream("hi", **options)
    assert "".join(stream) == text
    assert (stream.text, tuple(stream.tokens), stream.finish) == (text, found.tokens, finish)


def test_sequences_are_prompt_and_new_tokens():
    found = model_of("ab.").generate(torch.tensor([[8, 9]]))
    assert found.sequences.tolist() == [[8, 9, 1, 2, 0]]


def test_closing_the_stream_closes_the_engine():
    model = model_of("abcdef")
    with model.stream("hi") as stream:
        assert next(stream) == "a"
        assert model.engine.running
    assert not model.engine.running
    assert (stream.finish, stream.text, list(stream)) == ("closed", "a", [])


@pytest.mark.parametrize("then", [KeyboardInterrupt(), RuntimeError("lost the device")])
def test_tokens_before_an_interruption_are_kept(then):
    model = model_of("ab", then)
    stream = model.stream("hi")
    with pytest.raises(type(then)):
        list(stream)
    assert (stream.text, stream.finish, model.engine.running) == ("ab", "closed", False)


def test_a_streamer_gets_the_prompt_and_every_token_and_is_always_ended():
    class Recorder(list):
        def put(self, value):
            self.append(value.tolist())

        def end(self):
            self.append("end")

    recorder = Recorder()
    model_of("ab.").generate("hi", streamer=recorder)
    assert recorder == [[[8, 9]], [1], [2], [0], "end"]
    interrupted = Recorder()
    with pytest.raises(KeyboardInterrupt):
        model_of("a", KeyboardInterrupt()).generate("hi", streamer=interrupted)
    assert interrupted == [[[8, 9]], [1], "end"]


# Asynchronous streams


def test_astream_yields_the_same_pieces_as_stream():
    async def read() -> list[str]:
        return [piece async for piece in model_of("abc.").astream("hi", stop="c")]

    assert asyncio.run(read()) == ["a", "b"]


def test_closing_an_asynchronous_stream_closes_the_engine():
    model = model_of("abcdefgh")

    async def read_one() -> str:
        pieces = model.astream("hi")
        first = await anext(pieces)
        await pieces.aclose()
        return first

    assert asyncio.run(read_one()) == "a"
    assert not model.engine.running


class Slow(Script):
    """Engine that makes each token only once the test allows it."""

    def __init__(self, *text) -> None:
        super().__init__(*text)
        self.entered, self.leave = threading.Event(), threading.Event()

    def run(self, request):
        for token in super().run(request):
            self.entered.set()
            self.leave.wait(5)
            yield token


@pytest.mark.parametrize("times", [1, 2])
def test_an_asynchronous_stream_can_be_cancelled_during_a_token(times):
    engine = Slow("abcdefgh")

    async def read() -> None:
        async for _ in Model(engine, Letters()).astream("hi"):  # pyrefly: ignore[bad-argument-type]
            pass

    async def cancel() -> None:
        task = asyncio.create_task(read())
        await asyncio.to_thread(engine.entered.wait, 5)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.02)
        engine.leave.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert not engine.running


def test_closing_from_another_thread_waits_for_the_current_token():
    engine = Slow("abcdefgh")
    stream = Model(engine, Letters()).stream("hi")  # pyrefly: ignore[bad-argument-type]
    with ThreadPoolExecutor(2) as pool:
        step = pool.submit(stream.step)
        engine.entered.wait(5)
        close = pool.submit(stream.close)
        while stream.finish is None:
            time.sleep(0.001)
        assert not close.done()
        engine.leave.set()
        assert (step.result(5), close.result(5)) == (None, None)
    assert (stream.finish, stream.text, stream.step(), engine.running) == ("closed", "", None, False)


# The PyTorch engine


@pytest.mark.parametrize("name", ["tied", "untied_with_biases"])
def test_greedy_tokens_match_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra decode")
    config = CONFIGS[name]
    folder = write(tmp_path, random_weights(config, seed=4))
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(folder).eval()
    prompt = torch.tensor([[5, 6, 7]])
    for penalty in (1.0, 1.2):
        choices = {"max_new_tokens": 80, "repetition_penalty": penalty}
        with torch.no_grad():
            expected = theirs.generate(prompt, do_sample=False, eos_token_id=None, pad_token_id=0, **choices)
        found = Model(TorchEngine(random_weights(config, seed=4))).generate(prompt, ignore_end=True, **choices)
        assert torch.equal(found.sequences, expected)


def test_growing_the_cache_does_not_change_the_tokens():
    weights = random_weights(replace(SMALL, num_hidden_layers=1), seed=4)
    engine = TorchEngine(weights)
    found = list(engine.run(Request((1, 2, 3), 300)))  # more tokens than the 256 positions that a cache has at first
    from onelaunch.decode.model.forward import forward, logits_of

    with torch.no_grad():
        whole = logits_of(weights, forward(weights, torch.tensor([1, 2, 3, *found]), KVCache.empty(weights.config, 400)))
    best = whole.argmax(1).tolist()
    # Where the two largest logits nearly agree, sums in another order may choose the other token.
    close = (whole.topk(2).values.diff(dim=1).abs() < 1e-4).flatten().tolist()
    assert [token for token, near in zip(found, close[2:], strict=False) if not near] == [
        token for token, near in zip(best[2:-1], close[2:], strict=False) if not near
    ]
    assert sum(close) < 10


def test_an_engine_can_be_closed_early_and_used_again():
    engine = TorchEngine(random_weights(SMALL))
    request = Request((1, 2), 10)
    made = engine.run(request)
    first = [next(made) for _ in range(3)]
    made.close()
    assert list(engine.run(request))[:3] == first
    assert torch.is_grad_enabled()


def test_seeds_decide_and_greedy_has_none():
    model = Model(TorchEngine(random_weights(SMALL)))
    draws = [model.generate([3], max_new_tokens=20, temperature=1.0, seed=seed).tokens for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert model.generate([3], max_new_tokens=9).tokens == model.generate([3], max_new_tokens=9, seed=5).tokens


def test_defaults_of_a_call_come_from_the_model():
    weights = random_weights(SMALL)
    model = Model(TorchEngine(weights), None, {"temperature": 5.0, "top_p": 0.9})
    drawn = model.generate([3], max_new_tokens=20).tokens
    assert drawn == Model(TorchEngine(weights)).generate([3], max_new_tokens=20, temperature=5.0, top_p=0.9).tokens
    greedy = Model(TorchEngine(weights)).generate([3], max_new_tokens=20).tokens
    assert drawn != greedy == model.generate([3], max_new_tokens=20, temperature=0.0).tokens


def test_a_variant_may_provide_its_own_engine(monkeypatch, prose):
    monkeypatch.setattr(decode_step, "variants", dict(decode_step.variants))
    decode_step.variant("scripted", engine=lambda weights: Script("abc"))(lambda call: None)
    weights = random_weights(SMALL)
    assert isinstance(make_engine(weights, "scripted"), Script)
    assert isinstance(make_engine(weights), TorchEngine)
    with pytest.raises(UnknownVariant, match="scriptd"):
        make_engine(weights, "scriptd")
    with prose.raises(VariantUnsupported, match="CUDA"):
        make_engine(weights, "captured")
    dispatch.choose.cache_clear()  # of the choices among this test's variants


def test_on_a_gpu_a_notice_says_why_a_faster_engine_is_not_used(monkeypatch, prose):
    """A patched key makes the CPU count as a GPU, where ``eager`` is chosen.

    A notice is given only if a variant with an engine comes before it in the order of preference.
    """
    without = {name: variant for name, variant in decode_step.variants.items() if variant.capabilities.engine is None}
    monkeypatch.setattr(decode_step, "variants", without)
    faster = decode_step.variant("faster", engine=Script)(lambda call: None)
    faster.supports(lambda query: "needs a GPU of compute capability 9")
    slower = decode_step.variant("slower", engine=Script)(lambda call: None)
    slower.supports(lambda query: "needs two GPUs")
    weights = random_weights(SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_engine(weights)
    key = engine_file.key_of
    monkeypatch.setattr(engine_file, "key_of", lambda config, position, device: key(config, position, "cuda:0"))
    monkeypatch.setattr(dispatch, "pick", lambda variant, query: decode_step.get("eager"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_engine(weights)  # no notice about variants slower than the chosen one
    monkeypatch.setattr(decode_step, "_preference", lambda query: ("faster",))
    with prose.warns(FallbackNotice, match="GPU"):
        assert isinstance(make_engine(weights), TorchEngine)
    dispatch.choose.cache_clear()  # of the choices among this test's variants


def test_the_next_engine_runs_if_the_fastest_lacks_memory(monkeypatch, prose):
    """The memory that a variant needs in addition to the weights decides. A variant named by the caller is not replaced."""
    cpu, fastest = torch.device("cpu"), decode_step.get("eager")
    monkeypatch.setattr(fastest, "capabilities", replace(fastest.capabilities, engine_bytes=lambda config: 7_000_000_000))
    assert engine_file.engine_that_fits(SMALL, cpu, 7_000_000_000) == AUTO
    with prose.warns(FallbackNotice, match="eager", mask={r"\w+ runs": "<variant> runs"}):
        name = engine_file.engine_that_fits(SMALL, cpu, 6_900_000_000)
    assert name not in (AUTO, "eager")
    assert engine_file.engine_bytes(SMALL, cpu, name) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine_file.engine_that_fits(SMALL, cpu, -1) == AUTO, "even the weights do not fit, which a later error reports"


def test_a_device_with_too_little_memory(monkeypatch, tmp_path, prose):
    folder = write(tmp_path, random_weights(SMALL))
    monkeypatch.setattr(generate_file, "resolve", lambda device: torch.device("cuda:0"))
    # The driver reports 80 bytes free; PyTorch's allocator has reserved 100, of which 40 are in use.
    for name, number in {"mem_get_info": (80, 10**9), "memory_reserved": 100, "memory_allocated": 40}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, number=number: number)
    taken, weights = [], random_weights(SMALL)
    stream = pack(weights, plan_for(SMALL, "streaming", 5)).data.numel() * 2  # bfloat16 on a GPU
    for variant in ("eager", "streaming"):
        monkeypatch.setattr(dispatch, "pick", lambda name, query: decode_step.get(name))
        with prose.raises(DeviceMemoryError) as caught:
            Model.from_pretrained(folder, device="cuda", variant=variant)
        taken.append((caught.value.need, caught.value.free))
    assert taken == [(weights.nbytes, 140), (need := packed_bytes(SMALL, summed=True), 140)]
    assert stream < need < stream + 150e6, "the estimate includes temporary buffers"

    def exhausted(self, config, positions):
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(KVCache, "grown", exhausted)
    with prose.raises(DeviceMemoryError, match="300"):
        TorchEngine(random_weights(SMALL))._grown(KVCache.empty(SMALL), 300)


# Calls that are refused


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ("hi", {"max_new_tokens": 0}, ArgumentError, "max_new_tokens"),
        ("hi", {"max_new_tokens": 2.0}, ArgumentError, "max_new_tokens is 2.0"),
        ("a" * 20, {}, ContextExceeded, "21"),
        ("", {}, ArgumentError, "prompt"),
        ([1, 300], {}, ValueRangeError, "prompt"),
        ([1, "2"], {}, ValueRangeError, "'2'"),
        (torch.tensor([[1], [2]]), {}, ArgumentError, "prompt"),
        (torch.tensor([1.0]), {}, ArgumentError, "of torch.float32"),
        (torch.tensor([True]), {}, ArgumentError, ""),
        (torch.tensor([1j]), {}, ArgumentError, "of torch.complex64"),
        ([True], {}, ValueRangeError, "prompt"),
        ([1.5], {}, ValueRangeError, "prompt"),
        (None, {}, ArgumentError, "prompt"),
        (5, {}, ArgumentError, "prompt"),
        (b"ab", {}, ArgumentError, "prompt"),
        ("hi", {"stop": 5}, ArgumentError, "stop"),
        ("hi", {"stop": None}, ArgumentError, "stop"),
        ("hi", {"stop": ["a", ""]}, ArgumentError, "stop"),
        ("hi", {"stop": [3]}, ArgumentError, "stop"),
        ("hi", {"temperature": -1}, ArgumentError, "temperature"),
        ("hi", {"temprature": 1}, UnknownKeyword, "'temprature'"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named_before_anything_runs(prompt, options, error, message, prose):
    model = model_of("abc")
    for ask in (model.generate, model.stream):
        with prose.raises(error, match=message):
            ask(prompt, **options)
    assert not model.engine.requests


def test_integers_of_any_class_are_tokens():
    numpy = pytest.importorskip("numpy", reason="needs the extra decode")
    for prompt in (numpy.array([8, 9]), [numpy.int32(8), torch.tensor(9)], range(8, 10)):
        found = model_of("ab.").generate(prompt)
        assert found.prompt == (8, 9)
        assert {type(token) for token in found.prompt} == {int}


def test_a_prompt_that_just_fits():
    found = model_of("abc").generate("a" * 19)
    assert (found.text, found.finish) == ("a", "context")


def test_an_empty_prompt_starts_with_the_models_bos_token():
    model = model_of("ab")
    model.engine.config = replace(model.engine.config, bos_token_id=7)
    assert model.generate("").prompt == (7,)


def test_without_a_tokenizer_there_are_tokens_but_no_text(prose):
    model = Model(Script("ab."))
    found = model.generate([8, 9])
    assert (found.tokens, found.text, found.finish) == ((1, 2, 0), None, "end")
    for prompt, options in (("hi", {}), ([8], {"stop": "x"})):
        with prose.raises(TokenizerMissing, match=r"'onelaunch\[decode\]'"):
            model.generate(prompt, **options)


@pytest.mark.parametrize("variant", ["eager", "auto"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_raise_an_error(variant, value, prose):
    tensors = random_weights(SMALL, 1).tensors()
    tensors["norm"] = tensors["norm"].index_fill(0, torch.tensor([3]), value)
    stream = Model(make_engine(from_tensors(SMALL, tensors), variant)).stream([1, 2])
    with prose.raises(LogitsNotFinite):
        stream.step()
    assert (stream.tokens, stream.finish) == ([], "closed")


def test_generation_settings_of_a_folder_are_checked_before_its_weights(tmp_path, prose):
    folder = write(tmp_path, random_weights(SMALL))
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnknownVariant):
        Model.from_pretrained(folder, device="cpu", variant="egaer")
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": "hot"}')
    with prose.raises(CheckpointError, match="'hot'"):
        Model.from_pretrained(folder, device="cpu")


# Names and folders of models


def test_the_bundled_model_takes_precedence_over_a_folder_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / hub_file.BUNDLED).mkdir()
    assert (find_model(hub_file.BUNDLED) / "model.safetensors").is_file()
    for name in (f"./{hub_file.BUNDLED}", Path(hub_file.BUNDLED)):
        assert find_model(name).resolve() == tmp_path / hub_file.BUNDLED


def test_names_of_models(tmp_path, monkeypatch, prose):
    assert find_model(tmp_path) == tmp_path
    with prose.raises(UnknownModel, match="'nothing-here'"):
        find_model("nothing-here")
    hub = pytest.importorskip("huggingface_hub", reason="needs the extra decode")
    asked = []
    monkeypatch.setattr(hub, "snapshot_download", lambda name, allow_patterns: asked.append(name) or str(tmp_path))
    assert find_model("owner/name") == tmp_path
    assert asked == ["owner/name"]
    assert "*.safetensors" in hub_file.FILES

    def refuse(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    with prose.raises(CheckpointError) as caught:
        find_model("owner/name")
    assert "hf download owner/name --local-dir" in str(caught.value), "the remedy without a network"
    assert "'tiny'" in str(caught.value)
    file = tmp_path / "model.gguf"
    file.touch()
    with prose.raises(CheckpointError):
        find_model(file)
    with prose.raises(CheckpointError, match=r"config\.json"):
        Model.from_pretrained(tmp_path, device="cpu")
