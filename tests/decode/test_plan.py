"""Tests of plans: sound plans are accepted and give the model's logits in any order; every missing dependency is detected.

A plan describes one token as data: phases, in each of which every CTA has an assignment, and the edge (synchronization) before
each phase. Each optimization level of the decode megakernel (``level``) is a variant of ``decode_step``. ``check`` proves that
consecutive tokens of some plans have no races or deadlocks, and raises PlanError if not. ``Interpreter`` runs a plan in
PyTorch, CTA by CTA in a random order. ``prose.raises`` compares the message with ``tests/snapshots/prose.txt``. A test fails if
it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``MODELS`` are small models by name. ``TINY`` is the first of ``MODELS``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from onelaunch.decode import ModelConfig
from onelaunch.decode.codegen.layout import THREADS, Tuning, layout_of
from onelaunch.decode.model.forward import prefill
from onelaunch.decode.model.sampling import Sampler, Sampling
from onelaunch.decode.plan import packing
from onelaunch.decode.plan.builder import POSITIONS
from onelaunch.decode.plan.check import Resources, check
from onelaunch.decode.plan.division import layer_ctas
from onelaunch.decode.plan.levels import LEVELS, plan_for
from onelaunch.decode.plan.packing import (
    as_operands,
    columns,
    from_pairs,
    in_order,
    in_pairs,
    in_tiles,
    matrix,
    pack,
    pieces_of,
    row_order,
)
from onelaunch.decode.plan.phases import ROUNDS, Slice, Wait, piece_columns
from onelaunch.errors import PlanError
from tests.decode.interpret import Interpreter
from tests.decode.plans import MODELS, SHARED, TINY, marks_of, packed, plan_with, weights_and_caches
from tests.decode.radix_select import digits
from tests.thorough import thorough_but

# Qwen3-0.6B and Qwen3-4B.
QWEN = ModelConfig(151_936, 1024, 3072, 28, 16, 8, 128, tie_word_embeddings=True)
LARGER = ModelConfig(151_936, 2560, 9728, 36, 32, 8, 128)
# Level and name of each phase, in plans of one launch.
WAITING = [
    (level, phase.name)
    for level, options in LEVELS.items()
    if not options.separate
    for phase in plan_for(TINY, level, 5).phases()
]

each_level = pytest.mark.parametrize("level", LEVELS)
# Levels that prefetch weights across phases, and synchronize by flag-in-data words.
STREAMS = [level for level, options in LEVELS.items() if options.streams]
in_streams = pytest.mark.parametrize("level", STREAMS)


def tokens_of(config, level, ctas):
    """Return plans of successive tokens, at context lengths that use few and many KV splits."""
    short, long = plan_for(config, level, ctas, 1), plan_for(config, level, ctas)
    return short, long, plan_for(config, level, ctas, long.splits), long, short


# The check


@pytest.mark.parametrize("level", thorough_but("fused_phases", of=LEVELS))
def test_plans_for_an_h200_are_sound(level):
    plan = plan_for(QWEN, level, 132)
    # 168 registers for each thread of nine warps, and 132 SMs. The vocabulary has 18992 tiles of 8 tokens.
    check(*tokens_of(QWEN, level, 132), resources=Resources(THREADS, 168, layout_of(plan, Tuning()).bytes, 132))
    assert (
        max(sum(assignment.units for assignment in phase.assignments) for phase in plan.phases() if phase.op == "lm_head")
        == 18992
    )


@pytest.mark.thorough
@in_streams
def test_plans_for_a_4B_model_are_sound(level):
    plan = plan_for(LARGER, level, 132)
    check(plan, plan, resources=Resources(THREADS, 168, layout_of(plan, Tuning()).bytes, 132))


@settings(max_examples=25, deadline=None)
@given(
    ctas=st.integers(1, 20),
    hidden=st.integers(1, 20),
    inner=st.integers(1, 20),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3), (8, 1)]),
    layers=st.integers(1, 4),
    level=st.sampled_from(list(LEVELS)),
)
def test_every_model_and_number_of_ctas_has_sound_plans(ctas, hidden, inner, heads, layers, level):
    config = ModelConfig(77, 8 * hidden, 8 * inner, layers, *heads, 16)
    check(*tokens_of(config, level, ctas))


@pytest.mark.parametrize(("level", "name"), sorted(set(WAITING)))
def test_no_edge_can_be_left_out(level, name, prose):
    """The check refuses a plan without the edge before one phase."""
    plan = plan_for(TINY, level, 5)
    bare = without_edge(plan, name)
    with prose.raises(PlanError, match="CTA", mask={r"\d+": "<number>"}):
        check(bare)


def without_edge(plan, name):
    """Return the plan with one phase's waits removed."""

    def bare(phase):
        if phase.name != name:
            return phase
        return replace(
            phase, edge="none", assignments=tuple(replace(assignment, polls=(), awaits=()) for assignment in phase.assignments)
        )

    return replace(plan, layer=tuple(map(bare, plan.layer)), closing=bare(plan.closing), tail=tuple(map(bare, plan.tail)))


@pytest.mark.parametrize("level", ["eight_barriers", "redundant_norm", "head_local"])
def test_prefetched_keys_must_be_of_earlier_tokens(level, prose):
    """With a RoPE phase that writes the newest key, only a later phase may read it.

    A prefetch at the token's start is too early.
    """
    plan = plan_for(TINY, level, 5)
    check(plan)
    with prose.raises(PlanError, match="CTA"):
        check(replace(plan, kv_through_ring=True))
    for level in STREAMS:
        check(plan_for(MODELS["whole chunks"], level, 9))
        assert plan_for(MODELS["whole chunks"], level, 9).kv_through_ring


def test_accumulators_receive_as_many_additions_as_readers_wait_for(prose):
    plan = plan_for(TINY, "streaming", 5)
    for op in ("o", "down"):
        phase = next(phase for phase in plan.layer if phase.op == op)
        cta = next(cta for cta, assignment in enumerate(phase.assignments) if assignment.adds)
        for adds in ((), phase.assignments[cta].adds * 2):
            with prose.raises(PlanError):
                check(with_assignment(plan, phase, cta, replace(phase.assignments[cta], adds=adds)))


def test_accumulators_are_cleared_for_the_next_token(prose):
    plan = plan_for(TINY, "streaming", 5)
    assignment = plan.closing.assignments[0]
    kept = replace(assignment, writes=tuple(slice_ for slice_ in assignment.writes if slice_.buffer != "mid"))
    with prose.raises(PlanError):
        check(with_assignment(plan, plan.closing, 0, kept))


def test_every_word_that_is_read_must_be_waited_for(prose):
    plan = plan_for(TINY, "streaming", 5)
    phase = plan.phase("down")
    polls = tuple(slice_ for slice_ in phase.assignments[1].polls if slice_.buffer != "mid")
    with prose.raises(PlanError, match="CTA"):
        check(with_assignment(plan, phase, 1, replace(phase.assignments[1], polls=polls)))


@in_streams
def test_a_read_in_a_middle_layer_is_checked(level, prose):
    """A CTA without work in the layers reads the residual stream there, but no CTA waits for that read before the LM head."""
    ctas = 7
    plan = plan_for(replace(TINY, num_hidden_layers=3), level, ctas)
    assert layer_ctas(TINY, ctas) < ctas
    qkv, hidden = plan.layer[0], (Slice("hidden", 0, TINY.hidden_size),)
    check(plan)
    with prose.raises(PlanError, match="CTA"):
        check(with_assignment(plan, qkv, ctas - 1, replace(qkv.assignments[-1], reads=hidden, polls=hidden)))


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    level=st.sampled_from([level for level, options in LEVELS.items() if "data" in (options.heads, options.others)]),
)
def test_no_writer_can_go_without_being_waited_for(data, level):
    """Remove from one CTA's polls all words that one other CTA writes. The check must reject the plan."""
    plan = plan_for(TINY, level, data.draw(st.integers(2, 9)))
    phase = data.draw(
        st.sampled_from([phase for phase in plan.phases() if any(assignment.polls for assignment in phase.assignments)])
    )
    cta = data.draw(st.sampled_from([cta for cta, assignment in enumerate(phase.assignments) if assignment.polls]))
    polls = phase.assignments[cta].polls
    wrote = {other: written_slices(plan, other) for other in range(plan.ctas) if other != cta}
    waited = [other for other, slices in wrote.items() if any(overlap(a, b) for a in polls for b in slices)]
    assume(waited)
    left = polls
    for slice_ in wrote[data.draw(st.sampled_from(waited))]:
        left = tuple(part for each in left for part in without(each, slice_))
    with pytest.raises(PlanError):
        check(with_assignment(plan, phase, cta, replace(phase.assignments[cta], polls=left)))


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(), level=st.sampled_from(["head_local", "fused_phases"]), change=st.sampled_from(["count", "wait", "arrival"])
)
def test_no_semaphore_arrival_or_wait_can_be_left_out(data, level, change):
    plan = plan_for(TINY, level, data.draw(st.integers(2, 9)))
    wanted = (lambda assignment: assignment.arrives) if change == "arrival" else (lambda assignment: assignment.awaits)
    phase = data.draw(st.sampled_from([phase for phase in plan.layer if any(map(wanted, phase.assignments))]))
    cta = data.draw(st.sampled_from([cta for cta, assignment in enumerate(phase.assignments) if wanted(assignment)]))
    assignment = phase.assignments[cta]
    if change == "count":
        assignment = replace(
            assignment, awaits=(Wait(assignment.awaits[0].counter, assignment.awaits[0].arrivals - 1), *assignment.awaits[1:])
        )
    elif change == "wait":
        arrivers = [
            other
            for each in plan.layer
            for other, its in enumerate(each.assignments)
            if assignment.awaits[0].counter in its.arrives
        ]
        assume(arrivers != [cta])
        assignment = replace(assignment, awaits=assignment.awaits[1:])
    else:
        assignment = replace(assignment, arrives=assignment.arrives[1:])
    with pytest.raises(PlanError):
        check(with_assignment(plan, phase, cta, assignment))


def with_assignment(plan, phase, cta, assignment):
    """Return the plan with the work assignment of one CTA in one phase replaced."""
    assignments = (*phase.assignments[:cta], assignment, *phase.assignments[cta + 1 :])

    def changed(each):
        return replace(each, assignments=assignments) if each is phase else each

    return replace(
        plan, layer=tuple(map(changed, plan.layer)), closing=changed(plan.closing), tail=tuple(map(changed, plan.tail))
    )


def written_slices(plan, cta):
    """Return the slices of buffers that a CTA writes in any phase."""
    return [slice_ for phase in plan.phases() for slice_ in phase.assignments[cta].writes]


def overlap(a, b):
    """Return whether two slices share words of a buffer."""
    return a.buffer == b.buffer and a.begin < b.end and b.begin < a.end


def without(slice_, taken):
    """Return what is left of a slice without the words of another one."""
    if not overlap(slice_, taken):
        return [slice_]
    ends = [(slice_.begin, max(slice_.begin, taken.begin)), (min(slice_.end, taken.end), slice_.end)]
    return [Slice(slice_.buffer, *each) for each in ends if each[0] < each[1]]


@pytest.mark.parametrize(
    ("room", "reason"),
    [
        ({"sms": 100}, "100"),
        ({"shared_bytes": 240_000}, "240000"),
        ({"registers": 240}, "65536"),
    ],
)
def test_ctas_that_cannot_all_be_resident_are_refused(room, reason, prose):
    plan = plan_for(QWEN, "streaming", 132)
    facts = {"threads": THREADS, "registers": 168, "shared_bytes": 200_000, "sms": 132} | room
    with prose.raises(PlanError, match=reason):
        check(plan, resources=Resources(**facts))


def test_barriers_per_token_of_each_variant():
    """With grid barriers a token has two besides those of its layers: before the LM head, and before the next token is chosen."""
    counted = {level: plan_for(QWEN, level, 132).barriers() for level in LEVELS}
    assert counted == {
        "eight_barriers": 226, "redundant_norm": 170, "head_local": 114, "fused_phases": 114, "tagged_words": 0, "streaming": 0,
        "graph": 0,
    }  # fmt: skip


# The packed stream of weights


@in_streams
@pytest.mark.parametrize("model", thorough_but("tied", "odd sizes", of=MODELS))
def test_every_weight_is_in_the_stream_once(level, model):
    config = MODELS[model]
    weights, _, _, _ = weights_and_caches(config, 1)
    plan = plan_for(config, level, 7)
    stream = pack(weights, plan)
    layers = weights.layers
    work = [(matrix(layer, op), op) for layer in layers for op in ("qkv", "o", "gate_up", "down")] + [
        (weights.lm_head, "lm_head")
    ]
    wanted = torch.cat([in_tiles(*in_order(*each, plan), piece_columns(config)).flatten() for each in work])
    assert torch.equal(counts(stream.data), counts(wanted))
    for values, op in work:  # and no weight is lost on the way to the tiles
        size = piece_columns(config)
        if op == "o" and plan.blocks:
            tiles = in_tiles(*in_order(values, op, plan), size)
            assert torch.equal(counts(tiles[tiles != 0]), counts(values[values != 0])), "tiles are padded with zeros"
            continue
        tiles = in_tiles(values, row_order(config, op), size)
        # as_operands is its own inverse
        rows = as_operands(tiles.permute(0, 3, 1, 2, 4).reshape(-1, pieces_of(config, columns(config, op)) * size))
        kept = row_order(config, op).flatten()
        assert torch.equal(rows[kept >= 0][:, : values.shape[1]], values[kept[kept >= 0]])


def test_a_stream_is_the_same_however_many_tiles_are_packed_at_once(monkeypatch):
    weights, _, _, _ = weights_and_caches(MODELS["odd sizes"], 1)
    plan = plan_for(weights.config, "streaming", 7)
    stream, slices, of = pack(weights, plan), [], packing.in_tiles
    monkeypatch.setattr(packing, "BATCH_BYTES", 3 * 8 * 2 * 512)  # bytes of three padded tiles of the hidden size
    monkeypatch.setattr(packing, "in_tiles", lambda values, rows, size: slices.append(len(rows)) or of(values, rows, size))
    assert torch.equal(pack(weights, plan).data, stream.data)
    assert max(slices) <= 6  # rows of the output projection are half as long, so twice as many tiles are a batch


def counts(values):
    """Return how many of the 16-bit values have each bit pattern. Equal counts mean the same values in any order."""
    return torch.bincount(values.flatten().view(torch.int16).int() + 2**15, minlength=2**16)


@pytest.mark.parametrize("model", MODELS)
def test_a_tile_of_heads_has_four_pairs_of_channels_that_rotate_together(model):
    config = MODELS[model]
    size, order = config.head_dim, row_order(config, "qkv")
    assert (order[:, 4:] - order[:, :4] == size // 2).all()
    assert (order // size == order[:, :1] // size).all()
    group = config.queries_per_key
    heads = (order[:: size // 8, 0] // size).view(config.num_key_value_heads, group + 2)
    first = torch.arange(config.num_key_value_heads)
    queries = first[:, None] * group + torch.arange(group)
    keys = config.num_attention_heads + first
    assert torch.equal(heads, torch.column_stack([queries, keys, keys + len(first)]))
    words = torch.arange(3 * size).view(3, size)
    assert torch.equal(from_pairs(in_pairs(words)), words)
    assert torch.equal(in_pairs(words)[0], order[: size // 8].flatten())


# The interpreter


IN_ORDERS = [
    *((level, "tied") for level in LEVELS),
    *((level, model) for level in STREAMS for model in MODELS if model != "tied"),
]


@pytest.mark.parametrize(
    ("level", "model"),
    [
        *(pytest.param(*each, marks=marks_of(each[1])) for each in IN_ORDERS),
        ("eight_barriers", "odd sizes"),
    ],
)
def test_in_any_order_the_logits_are_the_models(level, model):
    config = MODELS[model]
    whole = plan_for(config, level, 5)
    assert_in_any_order(config, plan_for(config, level, 5, min(whole.splits, -(-71 // POSITIONS))))


@pytest.mark.parametrize("model", [pytest.param("five queries a key", marks=pytest.mark.thorough), "untied, a key head"])
def test_in_any_order_ctas_that_share_queries_give_the_models_logits(model):
    for used in (1, 2):
        plan = plan_with(MODELS[model], "tagged_words", *SHARED[model], used)
        assert plan.query_splits > 1
        assert_in_any_order(MODELS[model], plan)


def assert_in_any_order(config, plan):
    """Compare two tokens by the interpreter, in two random orders, with those by the model."""
    weights, _, exact, cache = weights_and_caches(config, 70)
    check(plan)
    stream = packed(weights, plan, double=True)
    expected, reference = [], cache.map(torch.clone)
    token = torch.tensor([7])
    for _ in range(2):
        logits, reference = prefill(exact, token, reference)
        token = logits.argmax()[None]
        expected.append(logits)
    for seed in range(2):
        mine = cache.map(torch.clone)
        found = Interpreter(plan, exact, stream, mine, seed).run(7, 2)
        torch.testing.assert_close(found, expected[-1], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(mine.keys[:, :, 71], reference.keys[:, :, 71])


# Sampling parameters.
DRAWN = {
    "temperature": Sampling(temperature=0.8, seed=1),
    "top_k": Sampling(temperature=2.0, top_k=7, seed=2),
    "all": Sampling(temperature=1.5, top_k=40, top_p=0.8, min_p=0.02, repetition_penalty=1.3, seed=3),
}


def drawn_tokens(plan, sampling, count, seed):
    """Return the tokens and the last logits, by a plan, or without one by PyTorch's sampler on the model's own logits."""
    _, _, exact, cache = weights_and_caches(TINY, 70)
    sampler, tokens = Sampler(sampling, torch.tensor([1, 7, 7]), TINY.vocab_size), [7]
    if plan is not None:
        stream = packed(weights_and_caches(TINY, 70)[0], plan, double=True)
        found = Interpreter(plan, exact, stream, cache, seed, sampler)
        logits = found.run(7, count)
        return [found.tokens[70 + at] for at in range(count + 1)], logits
    for _ in range(count):
        logits, cache = prefill(exact, torch.tensor(tokens[-1:]), cache)
        tokens.append(int(sampler(logits, cache.length)))
    return tokens, logits


@pytest.mark.parametrize("name", thorough_but("all", of=DRAWN))
@pytest.mark.parametrize("level", ["fused_phases", *STREAMS])
def test_in_any_order_drawn_tokens_are_the_samplers(level, name):
    plan = plan_for(TINY, level, 5, rounds=len(digits(DRAWN[name])))
    check(plan)
    expected, logits = drawn_tokens(None, DRAWN[name], 4, 0)
    for seed in range(2):
        tokens, found = drawn_tokens(plan, DRAWN[name], 4, seed)
        assert tokens == expected
        torch.testing.assert_close(found, logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["tally 0", "tally 1", "tally 4", "draw", "next"])
def test_without_an_edge_some_order_draws_other_tokens(name):
    """The check refuses such a plan with reason: in one of five random orders, tokens are wrong or CTAs disagree."""
    plan = plan_for(TINY, "streaming", 5, rounds=ROUNDS)
    bare = without_edge(plan, name)
    with pytest.raises(PlanError):
        check(bare)
    expected, _ = drawn_tokens(None, DRAWN["all"], 2, 0)

    def wrong(seed):
        try:
            return drawn_tokens(bare, DRAWN["all"], 2, seed)[0] != expected
        except PlanError:
            return True

    assert any(wrong(seed) for seed in range(5))


@pytest.mark.parametrize("level", [level for level, options in LEVELS.items() if not options.separate])
def test_plans_of_drawn_tokens_are_sound(level):
    check(*(plan_for(TINY, level, 7, rounds=rounds) for rounds in (ROUNDS, 0, None, 1, 0, 2, ROUNDS)))
    head, first, *others = plan_for(TINY, level, 7, rounds=ROUNDS).tail
    assert (head.edge, first.edge) == (LEVELS[level].others, LEVELS[level].others)
    assert {phase.edge for phase in others} == {"grid"}, "sampling.cuh has grid barriers between radix-select passes"


@pytest.mark.parametrize(
    "change",
    [
        lambda assignment: replace(assignment, writes=()),
        lambda assignment: replace(assignment, writes=assignment.writes * 2),
        lambda assignment: replace(assignment, adds=(Slice("drawn", 0, 1),)),
    ],
)
def test_histograms_are_cleared_by_one_cta_before_new_additions(change, prose):
    plan = plan_for(TINY, "streaming", 3, rounds=4)
    closing = plan.tail[-1]
    with prose.raises(PlanError):
        check(with_assignment(plan, closing, 0, change(closing.assignments[0])))


def test_histograms_are_not_cleared_while_others_read_them(prose):
    """The phase that reads the last histogram must not clear it, because other CTAs may still be reading."""
    plan = plan_for(TINY, "streaming", 3, rounds=2)
    draw = plan.phase("draw")
    early = replace(draw.assignments[0], writes=(*draw.assignments[0].writes, Slice("histograms", 0, 2)))
    with prose.raises(PlanError, match="CTA"):
        check(with_assignment(plan, draw, 0, early))


@in_streams
@pytest.mark.parametrize("name", ["qkv", "attention", "o", "gate_up", "down", "next"])
def test_without_an_edge_some_order_gives_other_numbers(level, name):
    weights, _, exact, cache = weights_and_caches(TINY, 70)
    plan = without_edge(plan_for(TINY, level, 5), name)
    stream = packed(weights, plan, double=True)
    expected, _ = prefill(exact, torch.tensor([7]), cache.map(torch.clone))

    def wrong(seed):
        try:
            found = Interpreter(plan, exact, stream, cache.map(torch.clone), seed).run(7)
        except PlanError:
            return True
        return not torch.allclose(found, expected, rtol=1e-6)

    assert any(wrong(seed) for seed in range(5))
