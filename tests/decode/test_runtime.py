"""Tests of the runtime apart from sessions: caches per model, proofs of plans, memory, CUDA graphs, writes to weights.

The fixture ``played`` lets PyTorch emulate the launches of the variant ``streaming``, and ``weights`` are those of its small
model ``MODEL``. ``alone`` returns the tokens of a request by the eager PyTorch engine, as the reference. ``GREEDY`` holds a
request with a prompt of 3 tokens and one of 40; ``SAMPLED`` is greedy too, unless a test gives it sampling parameters. Each
optimization level of the decode megakernel (``level``) is a variant of ``decode_step``. The proof of its plan is recorded in
the cache folder; ``proofs._check`` also caches it in the process. ``prose`` and ``prose.raises`` compare wording with the
test's entries in ``tests/snapshots/prose.txt``. A test fails if it does not compare one of its entries, and
``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``SMALL`` is a small float32 model.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from onelaunch.decode import KVCache, decode_step, megakernel, random_weights, torch_variants
from onelaunch.decode.model.weights import from_tensors
from onelaunch.decode.plan.levels import LEVELS, plan_for
from onelaunch.decode.runtime import kernels as kernels_file
from onelaunch.decode.runtime import proofs
from onelaunch.decode.runtime.engines import KernelEngine, TorchEngine
from onelaunch.decode.runtime.graphs import CaptureSite, GraphCache
from onelaunch.decode.runtime.kernels import StepKernel, make_session, session_for, tuning_of
from onelaunch.decode.runtime.models import MODELS
from onelaunch.decode.step.contract import key_of
from onelaunch.device import hardware
from onelaunch.errors import (
    ArgumentError,
    DeviceError,
    DeviceMemoryError,
    DTypeError,
    InspectionError,
    PlanError,
    ShapeError,
)
from tests.decode.models import SMALL
from tests.decode.played import GREEDY, MODEL, SAMPLED, alone

# Objects cached for a model


@pytest.mark.parametrize("first", [True, False])
def test_cached_buffers_serve_the_next_sequence_in_and_out_of_inference_mode(first, played):
    weights = random_weights(MODEL, 4)  # weights of this test alone: it writes to them
    played.weights = weights
    for inference in (first, not first):
        with torch.inference_mode(inference):
            assert list(KernelEngine(weights, "streaming").run(SAMPLED)) == alone(weights, SAMPLED)
        weights.norm.mul_(1.01)
    assert list(KernelEngine(weights, "streaming").run(SAMPLED)) == alone(weights, SAMPLED)


def test_a_generation_can_be_continued_outside_of_inference_mode(weights, played):
    for engine in (KernelEngine(weights, "streaming"), TorchEngine(weights, "eager")):
        with torch.inference_mode():
            text = engine.run(GREEDY["second"])
            tokens = [next(text) for _ in range(3)]
        assert tokens + list(text) == alone(weights, GREEDY["second"])


@pytest.mark.parametrize("variant", ["eager", "streaming"])
def test_trainable_weights_decode_without_an_autograd_graph(variant, weights, played):
    trainable = weights.map(lambda tensor: torch.nn.Parameter(tensor.clone()))
    played.weights = trainable
    given = {"token": torch.tensor([5]), "weights": trainable}
    for cache in (KVCache.empty(MODEL), KVCache.empty(MODEL)):
        logits, _, _ = decode_step(**given, cache=cache, variant=variant)
        assert not logits.requires_grad
        assert torch.equal(logits, decode_step(**given | {"weights": weights}, cache=KVCache.empty(MODEL), variant="eager")[0])


def wrong(weights, name, change):
    """Return weights in which one tensor is changed by a function."""
    tensors = weights.tensors()
    return from_tensors(weights.config, tensors | {name: change(tensors[name])})


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("norm", torch.Tensor.float, DTypeError, ""),
        ("layers.1.q_norm", lambda x: x.to("meta"), DeviceError, "weights.layers.1.q_norm .*meta"),
        ("layers.0.o_proj", lambda x: x[:-1], ShapeError, "o_proj"),
        ("embed_tokens", lambda x: x.T.contiguous().T, ArgumentError, "embed_tokens"),
    ],
)  # fmt: skip
def test_weights_that_kernels_would_misread_are_refused(name, change, error, message, played, prose):
    other = wrong(random_weights(replace(MODEL, dtype=torch.bfloat16), 1), name, change)
    with prose.raises(error, match=message):
        decode_step(torch.tensor([5]), other, KVCache.empty(other.config), variant="streaming")


def test_a_proof_is_valid_for_its_devices_resources_only(weights, played, monkeypatch, tmp_path):
    checked = []
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path))
    monkeypatch.setattr(proofs, "check", lambda *plans, resources: checked.append(resources))
    for limit in (proofs.HOPPER_SHARED_BYTES, proofs.HOPPER_SHARED_BYTES, 1024):
        proofs._check.cache_clear()
        monkeypatch.setattr(proofs, "HOPPER_SHARED_BYTES", limit)
        proofs.checked_plan(MODEL, "streaming", 5, proofs.Tuning())
    assert len(checked) == 2
    proofs._check.cache_clear()  # a later test must not take these for proofs


# Memory


def test_out_of_memory_while_packing_weights_or_reading_a_prompt(weights, played, monkeypatch, prose):
    def exhausted(*_, **__):
        raise torch.OutOfMemoryError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(kernels_file, "pack", exhausted)
        with prose.raises(DeviceMemoryError):
            list(KernelEngine(weights, "streaming").run(SAMPLED))
    # Without a place, the prefill runs out of memory.
    for place, what in ((KVCache, "a cache of 40 positions"), (None, "the activations of a prompt of 40 tokens")):
        with monkeypatch.context() as patched:
            patched.setattr(*((KVCache, "empty") if place else ("onelaunch.decode.runtime.engines.prefill",)), exhausted)
            for engine in (TorchEngine(weights), KernelEngine(weights, "streaming")):
                with prose.raises(DeviceMemoryError, match=what):
                    list(engine.run(GREEDY["second"]))


# CUDA graphs


@pytest.mark.parametrize("captures", ["level", "captured"])
def test_graphs_are_captured_on_the_weights_device_while_other_threads_work(captures, weights, played, monkeypatch):
    """Emulate PyTorch's CUDA calls. A second GPU has streams of its own.

    A session of an optimization level captures a step. So does the variant ``captured``: PyTorch's step as a CUDA graph.
    """
    seen = []

    @contextmanager
    def entered(*given, **named):
        seen.append((given, named))
        yield

    class Stream:
        def __init__(self, device=None):
            self.device = device

        def wait_stream(self, other):
            pass

    for name, value in {
        "graph": entered, "device": entered, "stream": entered, "Stream": Stream, "current_stream": Stream, "CUDAGraph": object,
        "graph_pool_handle": lambda: (0, 1),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    cache = KVCache.empty(MODEL)
    if captures == "level":
        monkeypatch.setattr(StepKernel, "launch", lambda *_: None)
        make_session(weights, "graph").captured(cache)
    else:
        call = decode_step.bind(torch.tensor([1]), weights, cache)
        site = CaptureSite(weights.device)
        torch_variants.CapturedStep.of(call, torch_variants.layer_step, torch_variants.head_step, 256, site)
    assert ((weights.device,), {}) in seen
    (named,) = [named for _, named in seen if named]
    assert named["stream"].device == weights.device
    assert named["capture_error_mode"] == "thread_local"


@pytest.mark.parametrize("capacity", [4, 16])
def test_a_graph_cache_keeps_the_most_recently_used(capacity):
    made = []
    cache = GraphCache(capacity)
    for key in range(capacity):
        cache.get(key, lambda key=key: made.append(key) or key)
    assert [cache.get(0, pytest.fail), len(cache)] == [0, capacity]
    assert cache.get("new", lambda: "graph") == "graph"
    assert len(cache) == capacity
    assert cache.get(0, pytest.fail) == 0, "it was used most recently"
    cache.get(1, lambda: made.append(1))
    assert made == [*range(capacity), 1], "the least recently used one was dropped"


# Cost and requirements of a start


@pytest.mark.parametrize(
    "change",
    [{"qk_norm": False}, {"unrotated_layers": (1,)}, {"attention_bias": True}, {"attention_bias": True, "output_bias": False}],
)
def test_kernels_take_the_features_of_all_families(weights, change):
    """The dispatcher asks with the key alone, so the key must hold these features."""
    for level in LEVELS:
        config = replace(weights.config, **change)
        assert megakernel.has_a_plan(level, query_of(config)) is None
        assert megakernel._config_in(query_of(config)).qk_norm == config.qk_norm


def query_of(config, device="cuda:0"):
    """Return the dispatch key of a step at position 100, of a model in bfloat16 without biases, as the kernels need."""
    return key_of(replace(config, dtype=torch.bfloat16, attention_bias=False), 100, device)


def test_only_the_requested_variant_is_proved_and_once_per_set_of_files(weights, played, monkeypatch, tmp_path):
    """The files are the sources on which a proof depends. Models that differ in RoPE and context only share a proof."""
    checked = []
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path))
    proofs._check.cache_clear()
    monkeypatch.setattr(proofs, "check", lambda *plans, resources: checked.append(plans[0].level))
    monkeypatch.setattr(megakernel, "processors", lambda device: 132)
    for level in LEVELS:
        assert megakernel.has_a_plan(level, query_of(weights.config)) is None
    assert checked == []
    for config in (weights.config, replace(weights.config, rope_theta=5e5, max_position_embeddings=64)):
        make_session(random_weights(config), "streaming")
    assert checked == ["streaming"]
    proofs._check.cache_clear()  # forget in-process caches, as a new process would
    make_session(random_weights(weights.config), "streaming")
    assert checked == ["streaming"]
    proofs._check.cache_clear()


def proofs_with(changes, monkeypatch, tmp_path):
    """Count the proofs that run with the sources as they are, then with changes by module name, then with the same once more."""
    real, proved = proofs.source_of, []
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path))
    monkeypatch.setattr(proofs, "check", lambda *plans, resources: proved.append(plans[0].level))
    for changed in ({}, changes, changes):
        monkeypatch.setattr(proofs, "source_of", lambda name, changed=changed: changed[name] if name in changed else real(name))
        proofs._check.cache_clear()
        proofs.checked_plan(MODEL, "streaming", 5, proofs.Tuning())
    proofs._check.cache_clear()
    return len(proved)


# Some modules on which a proof depends.
PROVED_BY = ("plan.check", "plan.builder", "plan.levels", "plan.phases", "codegen.layout", "model.config", "runtime.proofs")


@pytest.mark.parametrize("module", PROVED_BY)
def test_a_change_of_a_module_that_a_proof_depends_on_repeats_the_proof(module, monkeypatch, tmp_path):
    name = f"onelaunch.decode.{module}"
    assert proofs_with({name: proofs.source_of(name) + "# changed"}, monkeypatch, tmp_path) == 2


def test_a_change_elsewhere_keeps_the_proof(monkeypatch, tmp_path):
    assert proofs_with({"onelaunch.decode.codegen.emit": "", "onelaunch.decode.generate": ""}, monkeypatch, tmp_path) == 1


@pytest.mark.parametrize(
    "line",
    [
        "from onelaunch.decode.plan.helper import part", "    from onelaunch.decode.plan.helper import part",
        "import onelaunch.decode.plan.helper", "from onelaunch.decode.plan import helper",
    ],
)  # fmt: skip
def test_a_newly_imported_module_is_part_of_the_proof(line, monkeypatch, tmp_path):
    """A module counts that a proof's module imports, wherever and however the import is written."""
    builder, helper, real = "onelaunch.decode.plan.builder", "onelaunch.decode.plan.helper", proofs.source_of
    (tmp_path / "helper.py").write_text("part = 1\n")
    folders = importlib.import_module("onelaunch.decode.plan").__path__
    folders.append(str(tmp_path))
    try:
        assert helper not in proofs.proof_sources()
        monkeypatch.setattr(proofs, "source_of", lambda name: real(name) + f"\n{line}\n" * (name == builder))
        assert proofs.proof_sources()[helper].startswith("part = 1\n")
    finally:
        folders.remove(str(tmp_path))


def test_importing_a_package_counts_all_of_its_modules(prose):
    assert "onelaunch.decode.step.variants.pytorch" in proofs._modules("onelaunch.decode.step")
    assert proofs._modules("onelaunch.decode.plan") >= {"onelaunch.decode.plan", "onelaunch.decode.plan.check"}
    assert proofs.source_of("onelaunch.decode.plan.check").startswith('"""')
    with prose.raises(ImportError, match="no_such"):
        proofs.source_of("onelaunch.no_such")


def test_an_unsound_plan_is_refused_every_time(weights, played, monkeypatch, tmp_path, prose):
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path))

    def refuse(*plans, resources):
        raise PlanError("streaming", "it is not sound")

    monkeypatch.setattr(proofs, "check", refuse)
    for _ in range(2):
        proofs._check.cache_clear()
        with prose.raises(PlanError, match="it"):
            make_session(random_weights(weights.config), "streaming")
    proofs._check.cache_clear()


def test_variants_whose_ctas_cannot_all_be_resident_are_unsupported(monkeypatch, prose):
    monkeypatch.setattr(megakernel, "processors", lambda device: 132)
    wide = replace(SMALL, intermediate_size=200_000)
    prose(megakernel.has_a_plan("streaming", query_of(wide)) or "")


@pytest.mark.parametrize("level", LEVELS)
def test_without_numpy_kernels_are_unsupported(level, monkeypatch, prose):
    """Hide NumPy from a process that has not loaded the modules that import it."""
    monkeypatch.setattr(decode_step.get(level), "_supports", decode_step.get(level)._supports[1:])  # as on a Hopper GPU
    for name in ("numpy", "onelaunch.decode.plan.check", "onelaunch.decode.runtime.proofs", "onelaunch.decode.runtime.kernels"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    prose(decode_step.get(level).why_not(query_of(SMALL)))
    with pytest.raises(InspectionError, match=r"NumPy.*onelaunch\[decode\]"):
        decode_step.get(level).builds("sm_90a")


@pytest.mark.thorough
def test_decoding_is_imported_without_numpy():
    """NumPy is no dependency of every installation. Only a process that runs or builds the megakernel's kernels imports it."""
    code = "import sys; sys.modules['numpy'] = None\nfrom onelaunch.decode import decode_step\nprint(*decode_step.variants)"
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert "streaming" in ended.stdout.split(), ended.stderr


# Weights that are written to


def addresses(session):
    """Return the addresses of all model buffers that a launch is given and that a CUDA graph would hold."""
    memory, cache = session.memory, KVCache.empty(MODEL)
    return [tensor is not None and tensor.data_ptr() for tensor in memory.arguments(cache, torch.empty(1))[:7]]


@pytest.mark.parametrize("name", ["embed_tokens", "layers.1.q_norm", "layers.0.o_proj", "norm"])
def test_buffers_made_from_weights_are_refreshed_in_place_after_a_write(name, played):
    weights = random_weights(MODEL, 5)
    levels = ("streaming", "tagged_words", "eight_barriers")  # the last two variants share one packed stream
    before = {level: session_for(weights, level) for level in levels}
    held = {level: addresses(session) for level, session in before.items()}
    weights.tensors()[name].mul_(2)
    fresh = weights.map(torch.clone)
    for level, session in before.items():
        assert session_for(weights, level) is session
        assert addresses(session) == held[level]
        mine, other = session.memory.constants, session_for(fresh, level).memory.constants
        assert torch.equal(mine.stream.data, other.stream.data)
        assert torch.equal(mine.parameters, other.parameters)
        assert torch.equal(mine.weights.embed_tokens, other.weights.embed_tokens)


def test_each_set_of_weights_has_its_own_buffers():
    first, second = (random_weights(SMALL, 0, "cpu") for _ in range(2))
    assert MODELS.kernels(first) is not MODELS.kernels(second)
    assert MODELS.kernels(first) is MODELS.kernels(first)
    assert MODELS.captured(first) is MODELS.captured(first) is not MODELS.captured(second)


@pytest.mark.parametrize(
    ("rate", "level", "expected"),
    [
        (1693.0, "streaming", proofs.Tuning(pace=1060, flight=3, l2_chunks=8)),  # an H100 SXM
        (2483.0, "streaming", proofs.Tuning(pace=730)),  # an H200
        (1693.0, "tagged_words", proofs.Tuning()),
        (None, "streaming", proofs.Tuning()),
    ],
)
def test_copies_are_paced_by_the_memory_of_the_device(rate, level, expected, monkeypatch):
    monkeypatch.setattr(kernels_file, "memory_bytes_per_cycle", lambda device: rate)
    assert tuning_of(plan_for(MODEL, level, 132), torch.device("cuda")) == expected


def test_the_memory_of_a_gpu_is_read_from_its_clock_rates(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    facts = SimpleNamespace(memory_clock_rate=2_619_000, memory_bus_width=5120, clock_rate=1_980_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    assert hardware.memory_bytes_per_cycle(torch.device("cuda")) == pytest.approx(1693, abs=1)
    facts.memory_bus_width = 0  # an older PyTorch does not tell
    assert hardware.memory_bytes_per_cycle(torch.device("cuda")) is None
    assert hardware.memory_bytes_per_cycle(torch.device("cpu")) is None
