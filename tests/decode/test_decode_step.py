"""Tests of the operation ``decode_step``: its variants against the oracle, its cost, and the arguments it refuses.

``Judge.judge`` applies the verification gate: outputs and the new cache rows against a float64 oracle. ``SMALL`` is a float32
model of two layers, 2 key heads of 32 channels, 300 tokens and 512 positions. ``prose.raises`` compares the message of an error
with the test's entry in ``tests/snapshots/prose.txt``. A test fails if it does not compare one of its entries, and
``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``trivial_answers`` returns trivial outputs, such as zeros, that would pass the gate at a case: there must be none. A test marked
``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onelaunch import dispatch
from onelaunch.decode import KVCache, decode_step, random_weights
from onelaunch.decode.model.forward import prefill
from onelaunch.decode.step.probes import CASES, SIZES
from onelaunch.decode.step.variants.pytorch import window_of
from onelaunch.dispatch.capture import compiler_missing
from onelaunch.errors import ArgumentError, ContextExceeded, DTypeError, ShapeError, ValueRangeError, VariantUnsupported
from onelaunch.operation import find_operation
from onelaunch.workbench.verify import Judge
from tests.decode.models import SMALL
from tests.trivial import trivial_answers


def case_of(name: str):
    """Return the case of ``CASES`` with the sizes of ``SIZES`` where it names no others."""
    return decode_step.case(**SIZES | CASES[name])


def made(length: int = 5):
    """Return the arguments of a step at position ``length``: a token, random weights, and a cache filled by prefill."""
    weights = random_weights(SMALL)
    _, cache = prefill(weights, torch.arange(1, length + 1), KVCache.empty(SMALL))
    return {"token": torch.tensor([7]), "weights": weights, "cache": cache}


def test_decode_step_is_in_the_registry():
    assert find_operation("decode_step") is decode_step


@pytest.mark.parametrize("name", CASES)
def test_eager_variant_matches_the_oracle(name):
    judge = Judge()
    verdict = judge.judge(decode_step, case_of(name), variant="eager")
    assert verdict.ok, verdict.problems
    assert {component.name for component in verdict.components} == {"logits", "keys", "values"}
    # Outputs such as zeros must fail the gate at this case; otherwise passing it would prove nothing.
    assert not trivial_answers(judge.reference(decode_step, case_of(name)))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", ["untied_with_biases", "beyond_a_window"])
def test_compiled_variant_matches_the_oracle(name):
    case = case_of(name)
    if reason := compiler_missing(decode_step.query(case, "cpu")):
        pytest.skip(reason)
    verdict = Judge().judge(decode_step, case, variant="compiled")
    assert verdict.ok, verdict.problems


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["captured", "compiled"])
@pytest.mark.parametrize("name", CASES)
def test_one_graph(name, variant):
    """Variants that run a step as one CUDA graph match the oracle."""
    verdict = Judge().judge(decode_step, case_of(name), variant=variant, device="cuda")
    assert verdict.ok, verdict.problems


@pytest.mark.gpu
def test_graphs_follow_the_cache_from_window_to_window():
    weights = random_weights(replace(SMALL, dtype=torch.bfloat16), device="cuda")
    outcomes = []
    for variant in ("eager", "captured"):
        cache = KVCache.empty(weights.config, 300, "cuda")
        token, logits = torch.tensor([3], device="cuda"), []
        for _ in range(300):
            found, _, _ = decode_step(token, weights, cache, variant=variant)
            cache = cache.with_length(cache.length + 1)
            token = (token * 7 + 1) % SMALL.vocab_size
            logits.append(found)
        outcomes.append(torch.stack(logits))
    # in bfloat16 each is up to 1.4e-2 off the oracle, in roundings of its own, so the two may be twice as far apart
    assert (outcomes[0] - outcomes[1]).norm() <= 2.8e-2 * outcomes[0].norm()


def test_a_step_appends_to_the_cache_and_changes_nothing_else():
    given = made()
    cache = given["cache"]
    before = cache.keys.clone()
    logits, keys, values = decode_step(**given)
    assert logits.shape == (300,)
    assert keys.shape == values.shape == (2, 2, 32)
    assert keys.data_ptr() == cache.keys[:, :, 5].data_ptr()
    assert keys.abs().sum() > 0
    rest = [at for at in range(cache.capacity) if at != 5]
    assert torch.equal(cache.keys[:, :, rest], before[:, :, rest])
    whole, _ = prefill(given["weights"], torch.tensor([1, 2, 3, 4, 5, 7]), KVCache.empty(SMALL))
    assert (logits - whole).norm() <= 1e-6 * whole.norm()  # float32 sums in another order: one row instead of six


def test_window_sizes():
    """The window is the smallest power of two, at least 256, that holds the position, and at most the cache's capacity."""
    assert [window_of(position, 4096) for position in (0, 255, 256, 511, 512, 3000)] == [256, 256, 512, 512, 1024, 4096]
    assert window_of(2100, 2304) == 2304


def test_the_cost_is_the_weights_the_cache_and_the_logits():
    case = decode_step.case("bfloat16", **SIZES, position=10)
    # Elements of a layer: norms, norms of queries and keys, QKV and output projections, MLP. A row holds a position's key and
    # value.
    layer = 2 * 64 + 2 * 32 + 64 * (128 + 64 + 64) + 128 * 64 + 3 * 64 * 96
    row = 2 * 2 * 64
    tied = decode_step.cost(case)
    assert tied.bytes == 2 * (2 * layer + 64 + 200 * 64 + 11 * row) + 4 * 200
    matrices = 2 * (layer - 2 * 64 - 2 * 32) + 200 * 64
    assert tied.flops == 2 * matrices + 4 * 2 * 128 * 11
    untied = decode_step.cost(decode_step.case("bfloat16", **SIZES, position=10, tied=False))
    assert untied.bytes == tied.bytes + 2 * 64  # one row of the embedding
    assert untied.flops == tied.flops
    assert (tied.launches, decode_step.cost(case, decode_step.get("eager")).launches) == (1, None)


def test_the_cost_of_qwen3_0_6b_matches_its_size():
    sizes = {
        "layers": 28,
        "hidden": 1024,
        "intermediate": 3072,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 128,
        "vocabulary": 151936,
    }
    cost = decode_step.cost(decode_step.case("bfloat16", **sizes, position=1000))
    # Bytes of the weights in bfloat16, of keys and values at 1001 positions, and of logits in float32.
    assert cost.bytes == 1_192_099_840 + 1001 * 114_688 + 4 * 151_936


def test_dispatch_on_a_cpu_is_eager(prose):
    assert dispatch.choose(decode_step.query(case_of("first"), "cpu")).name == "eager"
    with prose.raises(VariantUnsupported, match="CUDA"):
        decode_step(**made(), variant="captured")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"token": 7}, ArgumentError, "token"),
        ({"token": torch.tensor(7)}, ShapeError, "token"),
        ({"token": torch.tensor([7], dtype=torch.int32)}, DTypeError, "token"),
        ({"token": torch.tensor([300])}, ValueRangeError, "token"),
        ({"token": torch.tensor([-1])}, ValueRangeError, "token"),
        ({"weights": {}}, ArgumentError, "weights"),
        ({"cache": None}, ArgumentError, "cache"),
        ({"weights": random_weights(SMALL).map(torch.Tensor.half)}, DTypeError, "weights"),
        ({"cache": KVCache.empty(replace(SMALL, num_hidden_layers=3))}, ShapeError, "cache.keys"),
        ({"cache": KVCache.empty(SMALL, dtype=torch.float16)}, DTypeError, "cache.keys is torch.float16"),
        ({"cache": KVCache.empty(SMALL).with_length(256)}, ShapeError, "256"),
        ({"cache": KVCache.empty(SMALL).with_length(512)}, ContextExceeded, "513"),
        ({"cache": KVCache.empty(SMALL).map(lambda t: t.mT.contiguous().mT)}, ArgumentError, "cache.keys"),
    ],
)  # fmt: skip
def test_errors_name_the_wrong_argument(change, error, message, prose):
    with prose.raises(error, match=message):
        decode_step(**made() | change)
