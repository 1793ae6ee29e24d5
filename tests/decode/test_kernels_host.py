"""Tests of the decode kernels' own source, run on the CPU.

They cover the shared-memory ring, synchronization, packed weights, products, attention and the choice of the next token. Each
optimization level of the decode megakernel (``level``) is a variant of ``decode_step``. The emulated machine delays CTAs, warps
and bulk copies at random, by a seed. A plan has a kernel of its own: of a level, a model, a number of CTAs and of KV splits.
``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in
``tests/snapshots/prose.txt``. A test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test
or the parameter of an entry is gone.

``libraries`` is a folder in which a test run compiles each library once. ``MODELS`` are small models by name. ``TINY`` is the
first of ``MODELS``. ``SHARED`` holds numbers of CTAs and KV splits with which CTAs share a key head's queries. ``plan_with``
returns a level's plan for some CTAs and KV splits. ``weights_and_caches`` returns weights and a KV cache, in bfloat16 and in
float64. ``HostKernel`` launches a plan's kernel on the emulated GPU. ``set_position`` puts a sequence at a position.
``phase_times`` reads the profile markers. A test marked ``thorough`` does not run in ``make test``. ``thorough_but`` marks all
parameters but the named ones ``thorough``.
"""

from __future__ import annotations

import pytest
import torch

from onelaunch.decode.codegen.layout import Tuning, marker_words
from onelaunch.decode.model.forward import prefill
from onelaunch.decode.plan import builder
from onelaunch.decode.plan.check import check
from onelaunch.decode.plan.levels import LEVELS, plan_for
from onelaunch.decode.runtime.memory import ERROR, OUT_OF_RANGE, Constants, Memory
from tests.decode.host_machine import HostKernel, needs_compiler, needs_watch, set_position
from tests.decode.plans import DEEP, MODELS, SHARED, TINY, WIDE, packed, plan_with, weights_and_caches
from tests.decode.stamps import phase_times
from tests.thorough import thorough_but

pytestmark = needs_compiler

# Level, model of ``tests/decode/plans.py`` and number of CTAs.
CASES = [*((level, "tied", 5) for level in LEVELS), ("tagged_words", "odd sizes", 3), ("tagged_words", "untied, a key head", 9)]
CASES += [("tagged_words", "whole chunks", 9), ("streaming", "whole chunks", 12)]
CASES += [("fused_phases", "three layers", 2), ("tagged_words", "three layers", 5), ("streaming", "three layers", 2)]
CASES += [("streaming", "two queries a key", 9), ("streaming", "two queries a key", 3), ("streaming", "five queries a key", 12)]
CASES += [("streaming", "odd sizes", 8), ("streaming", "untied, a key head", 12)]
CASES += [("streaming", "half chunks", 9), ("streaming", "qwen2", 28), ("head_local", "smollm3", 5)]
CASES += [("eight_barriers", "qwen2", 5), ("streaming", "three blocks", 20), ("streaming", "llama", 24)]
BY_HAND = [("tagged_words", "half chunks", 9), ("graph", "smollm3", 16)]
BY_HAND += [(level, model, 5) for level in LEVELS for model in ("llama", "qwen2", "biases everywhere", "smollm3")]
BY_HAND += [(level, model, 20) for level in LEVELS for model in ("half chunks", "two blocks", "three blocks")]
CASES += [pytest.param(*each, marks=pytest.mark.every) for each in BY_HAND if each not in CASES]


def kernel_and_memory(weights, plan, libraries, tuning=None):
    """Return a plan's kernel for the CPU, and its buffers, for sequences of up to 512 positions."""
    kernel = HostKernel(plan, libraries, tuning)
    return kernel, Memory(plan, Constants.of(weights, packed(weights, plan), 512), 512, markers=kernel.tuning.stamps)


def assert_matches_oracle(weights, plan, libraries, given, positions):
    """Compare the logits and the new cache rows at several positions with the float64 oracle.

    ``given`` holds the bfloat16 KV cache, and weights and KV cache in float64.
    """
    kernel, memory = kernel_and_memory(weights, plan, libraries)
    cache, exact, reference = given
    for seed, position in enumerate(positions, 1):
        token = torch.tensor([position % 100])
        want, after = prefill(exact, token, reference.map(torch.clone).with_length(position))
        plain, _ = prefill(weights, token, cache.map(torch.clone).with_length(position))
        mine = cache.map(torch.clone).with_length(position)
        found = kernel(memory, mine, token=token, position=position, seed=seed)
        error = (found - want).norm() / want.norm()
        # The largest ratio that was measured is 0.552.
        assert error <= 0.56 * (plain - want).norm() / want.norm(), (
            "activations have more bits than PyTorch's bfloat16, so that the error is smaller"
        )
        assert int(memory.tokens[position + 1]) == int(found.argmax())
        for written, right in ((mine.keys, after.keys), (mine.values, after.values)):
            row, true = written[:, :, position].double(), right[:, :, position]
            assert (row - true).norm() <= 2**-8 * true.norm(), (
                "rounding to bfloat16 is half of this bound, and other errors are small"
            )
        for written, before in ((mine.keys, cache.keys), (mine.values, cache.values)):
            assert torch.equal(written[:, :, :position], before[:, :, :position])


@pytest.mark.parametrize(
    ("level", "model", "ctas"),
    thorough_but(
        *((level, "tied", 5) for level in LEVELS),
        ("streaming", "whole chunks", 12),
        ("streaming", "qwen2", 28),
        ("streaming", "three blocks", 20),
        of=CASES,
    ),
)
def test_logits_keys_and_values_are_the_oracles(level, model, ctas, libraries):
    weights, *given = weights_and_caches(MODELS[model], 129)
    # From long to short: words left by the longer context must not be taken for new ones.
    assert_matches_oracle(weights, plan_for(MODELS[model], level, ctas), libraries, given, (129, 0))


@pytest.mark.parametrize(
    ("level", "model"),
    thorough_but(
        ("tagged_words", "five queries a key"),
        of=[*(("tagged_words", model) for model in SHARED), ("graph", "five queries a key")],
    ),
)
def test_ctas_that_share_queries_match_the_oracle(level, model, libraries):
    """Several CTAs divide one key head's queries.

    With "two queries a key" they read keys in rounds of two chunks of the ring; its positions need rows of no chunk, of one,
    of both, and of a further round.
    """
    plan = plan_with(MODELS[model], level, *SHARED[model])
    assert plan.query_splits > 1
    positions = (129, 0, 32, 63) if model == "two queries a key" else (129, 0)
    weights, *given = weights_and_caches(MODELS[model], 129)
    assert_matches_oracle(weights, plan, libraries, given, positions)


# Model, CTAs and KV splits with which neighbouring query splits are joined in long contexts.
JOINED = {
    "wide queries": (WIDE, 8, 2),
    "two queries a key": (MODELS["two queries a key"], 16, 2),
    "tied": (TINY, 12, 2),
    "five queries a key": (MODELS["five queries a key"], 12, 2),
}


@pytest.mark.parametrize("model", thorough_but("tied", of=JOINED))
def test_joined_attention_units_match_the_oracle(model, libraries):
    """Joined units of attention take each other's queries and divide the positions, here from position 100 on.

    In shorter contexts each takes its own queries: at some of the positions, or up to 64 positions at all of them.
    """
    config, ctas, splits = JOINED[model]
    plan = plan_with(config, "streaming", ctas, splits, merge_from=100)
    assert plan.query_merge > 1
    assert plan.positions == 64
    weights, *given = weights_and_caches(config, 129)
    assert_matches_oracle(weights, plan, libraries, given, (129, 1, 63, 64))


def test_ctas_with_fewer_weights_take_more_tiles_of_the_mlp(libraries, monkeypatch):
    monkeypatch.setattr(builder, "AHEAD_BYTES", 0)
    monkeypatch.setattr(builder, "UNEVEN", 1.0)
    config = MODELS["qwen2"]
    plan = builder.Builder(config, "streaming", LEVELS["streaming"], 5).plan()
    check(plan)
    tiles = [assignment.units for assignment in plan.phase("gate_up").assignments]
    assert max(tiles) > min(tiles) + 1
    weights, *given = weights_and_caches(config, 129)
    assert_matches_oracle(weights, plan, libraries, given, (129, 0))


def test_residual_additions_beyond_the_counter_match_the_oracle(libraries):
    """A word of the residual stream counts its additions in 8 bits. With more, the counter carries into the sum."""
    plan = plan_for(DEEP, "streaming", 5)
    assert plan.additions(DEEP.num_hidden_layers - 1) > 256
    weights, *given = weights_and_caches(DEEP, 70)
    assert_matches_oracle(weights, plan, libraries, given, (70, 0))


# Level, model, number of CTAs, and positions of the kernels that the race detector watches.
WATCHED = [
    ("tagged_words", MODELS["whole chunks"], 9, (40,)),
    ("tagged_words", MODELS["three layers"], 5, (70, 1)),
    ("streaming", MODELS["whole chunks"], 9, (70,)),
    ("fused_phases", MODELS["odd sizes"], 3, (70,)),
    ("eight_barriers", TINY, 3, (70,)),
]


@needs_watch
@pytest.mark.parametrize(("level", "model", "ctas", "positions"), thorough_but(WATCHED[-1], of=WATCHED))
def test_shared_memory_accesses_are_separated_by_barriers(level, model, ctas, positions, libraries):
    plan = plan_for(model, level, ctas)
    weights, cache, *_ = weights_and_caches(model, max(positions))
    kernel = HostKernel(plan, libraries, Tuning(stages=12), watched=True)
    memory = Memory(plan, Constants.of(weights, packed(weights, plan), 512), 512)
    for seed, position in enumerate(positions, 1):
        kernel(memory, cache.map(torch.clone).with_length(position), token=torch.tensor([3]), position=position, seed=seed)
    assert kernel.races() == []


# Each change removes one synchronization: the barrier behind a staged vector, the switch between the two buffers of sums, and the
# synchronization of a warp before it releases a stage of the ring.
CHANGES = [
    ("  stage_vector_unsynced<COLUMNS>(c, from, epoch);\n  c.sync();", "  stage_vector_unsynced<COLUMNS>(c, from, epoch);"),
    ("    c.parity ^= 1;  // The next product writes", "    ;  //"),
    ("    syncwarp();\n#pragma unroll 1\n    for (; unreleased", "#pragma unroll 1\n    for (; unreleased"),
]


@needs_watch
@pytest.mark.parametrize(
    "change", [pytest.param(each, marks=[] if each is CHANGES[-1] else [pytest.mark.thorough]) for each in CHANGES]
)
def test_race_detector_finds_a_missing_barrier(change, libraries):
    kernel = HostKernel(plan := plan_for(TINY, "tagged_words", 3), libraries, watched=True, change=change)
    weights, cache, *_ = weights_and_caches(TINY, 5)
    kernel(Memory(plan, Constants.of(weights, packed(weights, plan), 512), 512), cache, token=torch.tensor([3]), position=5)
    races = kernel.races()
    assert races
    assert ".cuh:" in races[0], "races are reported as lines of the source"


@pytest.mark.parametrize("lost", [torch.inf, torch.nan, 1e30])
def test_a_residual_sum_out_of_range_is_reported(lost, libraries):
    weights, cache, _, _ = weights_and_caches(TINY, 3)
    kernel, memory = kernel_and_memory(weights, plan_for(TINY, "streaming", 2), libraries)
    weights.embed_tokens[1, 5] = lost
    logits = kernel(memory, cache, token=torch.tensor([1]), position=3)
    assert int(memory.state[ERROR]) == OUT_OF_RANGE
    assert logits.isnan().any()
    memory.reset()
    assert torch.isfinite(kernel(memory, cache, token=torch.tensor([2]), position=3)).all()


@pytest.mark.parametrize(
    ("level", "model", "ctas"),
    thorough_but(
        ("streaming", "odd sizes", 8),
        of=[
            ("tagged_words", "untied, a key head", 9),
            ("tagged_words", "odd sizes", 8),
            ("graph", "odd sizes", 8),
            ("streaming", "untied, a key head", 9),
            ("streaming", "odd sizes", 8),
        ],
    ),
)
def test_kv_splits_of_a_long_context_are_combined(level, model, ctas, libraries):
    """``streaming`` combines its eight or four splits at once, except at position 63, where one split has all positions.

    The other levels combine the splits that have positions: eight as four and four, four as three and one, three or two at once.
    """
    weights, *given = weights_and_caches(MODELS[model], 470)
    plan = plan_for(MODELS[model], level, ctas)
    assert plan.splits == (8 if ctas == 9 else 4)
    assert_matches_oracle(weights, plan, libraries, given, (470, 64) if level == "graph" else (470, 129, 64, 63))


# Model, level and number of CTAs.
ROWS = [
    *(("tied", level, 5) for level in ("eight_barriers", "fused_phases", "tagged_words", "streaming", "graph")),
    ("whole chunks", "streaming", 9),
]


@pytest.mark.parametrize(("model", "level", "ctas"), thorough_but(("tied", "streaming", 5), of=ROWS))
def test_tokens_of_one_launch_are_those_of_many_in_any_timing(model, level, ctas, libraries):
    weights, cache, _, _ = weights_and_caches(MODELS[model], 62)
    plan = plan_for(MODELS[model], level, ctas)
    assert plan.kv_through_ring == (model == "whole chunks")
    kernel, memory = kernel_and_memory(weights, plan, libraries)
    single, steps, count = cache.map(torch.clone), [9], 2 if model == "whole chunks" else 5
    for position in range(62, 62 + count):
        logits = kernel(memory, single, token=torch.tensor(steps[-1:]), position=position, seed=position)
        steps.append(int(logits.argmax()))
    for seed in (1, 2):
        set_position(memory, 62, 9)
        at_once = kernel(memory, cache.map(torch.clone), count, seed=seed)
        assert memory.tokens[62 : 63 + count].tolist() == steps
        assert torch.equal(at_once, logits)
        assert int(memory.state[0]) == 62 + count


@pytest.mark.parametrize("level", LEVELS)
def test_the_kernel_executes_the_barriers_of_its_plan(level, libraries):
    weights, cache, _, _ = weights_and_caches(TINY, 10)
    plan = plan_for(TINY, level, 5)
    kernel, memory = kernel_and_memory(weights, plan, libraries)
    for count in (1, 3):
        before = int(memory.counters[0])
        set_position(memory, 10, 9)
        kernel(memory, cache.map(torch.clone), count)
        assert int(memory.counters[0]) - before == plan.ctas * count * plan.barriers()


@pytest.mark.parametrize(
    ("model", "tuning"),
    thorough_but(
        ("tied", Tuning(stages=2, flight=2)),
        ("tied", Tuning(stages=3, flight=2, l2_chunks=3, pace_l2=0)),
        of=[
            *(("tied", Tuning(stages=stages, flight=2)) for stages in (2, 4, 5)),
            ("half chunks", Tuning(stages=1, flight=1)),
            ("half chunks", Tuning(stages=2, flight=2)),
            ("tied", Tuning(stages=3, flight=2, l2_chunks=3, pace_l2=0)),
        ],
    ),
    ids=str,
)
def test_ring_depth_does_not_change_results(model, tuning, libraries):
    """A ring of one stage suffices where no tile begins in one chunk and ends in the next."""
    weights, cache, _, _ = weights_and_caches(MODELS[model], 20)
    plan = plan_for(MODELS[model], "streaming", 3)
    found = []
    for each in (tuning, Tuning(stages=3, flight=1)):
        kernel, memory = kernel_and_memory(weights, plan, libraries, each)
        found.append(kernel(memory, cache.map(torch.clone), token=torch.tensor([5]), position=20))
    assert torch.equal(*found)


def test_a_wait_that_never_ends_is_abandoned_and_reported(libraries):
    weights, cache, _, _ = weights_and_caches(TINY, 3)
    kernel, memory = kernel_and_memory(weights, plan_for(TINY, "streaming", 2), libraries)
    whole = kernel.plan.ctas
    logits = torch.zeros(TINY.vocab_size)
    # one CTA is missing, so the others wait in vain
    kernel.launch(memory, cache, logits, torch.tensor([1]), (1, 3, 0, 0, whole - 1), 0)
    assert int(memory.state[ERROR]) == 1
    assert logits.isnan().any()
    memory.reset()
    assert torch.isfinite(kernel(memory, cache, token=torch.tensor([1]), position=3)).all()


@pytest.mark.parametrize("level", [pytest.param("redundant_norm", marks=pytest.mark.thorough), "streaming"])
def test_profile_markers_time_phases_and_do_not_change_results(level, libraries, prose):
    weights, cache, _, _ = weights_and_caches(TINY, 20)
    plan, found = plan_for(TINY, level, 4), []
    for stamps in (False, True):
        kernel, memory = kernel_and_memory(weights, plan, libraries, Tuning(stages=3, flight=2, stamps=stamps))
        set_position(memory, 20, 5)
        found.append(kernel(memory, cache.map(torch.clone), 3))
    assert torch.equal(*found)
    times = phase_times(plan, memory.state)
    assert list(times) == list(dict.fromkeys(phase.name for _, phase in plan.instances()))
    assert all(time.waits >= 0 and time.works >= 0 for time in times.values())
    assert times["qkv"].waits > 0
    assert times["qkv"].works > 0
    span = (
        memory.state[-marker_words(plan) + 2] - memory.state[-marker_words(plan)]
    ) / 2000  # the host's clock: two ticks a nanosecond
    passes = {phase.name: TINY.num_hidden_layers for phase in plan.layer} | {phase.name: 1 for phase in plan.tail}
    total = sum(passes[name] * (time.waits + time.works) for name, time in times.items())
    assert 0.5 * span < total < 1.5 * span, "the times of all phases add up to the token's time"
    with prose.raises(ValueError):
        phase_times(plan, memory.state[:4])
    with prose.raises(ValueError):
        phase_times(plan_for(TINY, "graph", 4), memory.state)
