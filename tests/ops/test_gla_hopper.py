"""Tests of the variant "hopper" of ``gla``: heads that fill its tiles, every kind of decay, packing and split of T, and refusals.

The kernels go through T in chunks of 64 steps, and divide it into segments that run in parallel if CTAs would be too few.
Results of the PyTorch variant "recurrent", a loop over time, are the expected ones where the oracle is not used.

``assert_near`` bounds the norm of each error, relative to that of the expected values; ``results`` returns a variant's results
and gradients by name.

``device`` is the first GPU, or the CPU. ``arguments_of`` makes small random arguments on the CPU. ``assert_correct`` applies the
whole verification gate, forward and with gradients. ``assert_ok`` requires a verdict of the gate to be right. ``differentiable``
returns the arguments that take gradients.
"""

from __future__ import annotations

import functools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from onelaunch.errors import VariantUnsupported
from onelaunch.ops.gla.configure_hopper import (
    NOT_RECOMPUTED,
    Segments,
    chunk_times,
    pass_groups,
    pass_segments,
    recomputed_chunk,
    recomputed_segments,
)
from onelaunch.ops.gla.reference import DECAYS
from onelaunch.workbench.verify import judge
from tests.ops.cases import (
    GLA,
    arguments_of,
    assert_captured_step_follows_its_inputs,
    assert_correct,
    assert_near,
    assert_ok,
    differentiable,
    results,
)

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
gpu = pytest.mark.gpu

CASES: dict[str, dict[str, Any]] = {
    "one_step": {"B": 3, "T": 1, "H": 2, "K": 64, "V": 64},
    "one_step_less_than_a_chunk": {"B": 2, "T": 63, "H": 2, "K": 128, "V": 128},
    "exactly_a_chunk": {"B": 1, "T": 64, "H": 8, "K": 128, "V": 128},
    "one_step_over_a_chunk": {"B": 2, "T": 65, "H": 3, "K": 64, "V": 128, "decay": "weak"},
    "several_chunks": {"B": 2, "T": 500, "H": 3, "K": 128, "V": 128, "decay": "mixed"},
    "as_many_chunks_as_stages": {"B": 1, "T": 192, "H": 5, "K": 128, "V": 64},
    "negative_scale": {"B": 1, "T": 130, "H": 2, "K": 64, "V": 64, "scale": -0.7},
    "decay_per_head": {"B": 2, "T": 300, "H": 3, "K": 128, "V": 128, "decay_per": "head"},
    "forgets_at_some_steps": {"B": 1, "T": 300, "H": 4, "K": 128, "V": 128, "decay": "forget"},
    "packed_with_empty_sequences": {
        "B": 1, "T": 330, "H": 2, "K": 128, "V": 128, "decay": "mixed", "lengths": (0, 50, 0, 0, 79, 1, 200, 0),
    },
    "packed_many_short": {"B": 1, "T": 70, "H": 2, "K": 64, "V": 64, "lengths": (1,) * 30 + (2,) * 20},
    "packed_decay_per_head": {"B": 1, "T": 400, "H": 2, "K": 128, "V": 64, "decay_per": "head", "lengths": (3, 0, 265, 132)},
    "long_and_weak": {"B": 1, "T": 2500, "H": 2, "K": 64, "V": 64, "decay": "weak"},
    "parts_of_T": {"B": 1, "T": 3000, "H": 1, "K": 128, "V": 128},
    "parts_of_packed_sequences": {"B": 1, "T": 3000, "H": 1, "K": 128, "V": 128, "lengths": (1900, 0, 700, 400)},
    "parts_and_decay_per_head": {"B": 1, "T": 2000, "H": 1, "K": 64, "V": 128, "decay_per": "head", "decay": "weak"},
}  # fmt: skip

each_case = pytest.mark.parametrize("name", CASES)
each_layout = pytest.mark.parametrize("per", ["channel", "head"])
"""Parametrization over the layouts of the log-decays: one per key channel, or one per head."""


def made(device: torch.device, *, grad: bool = False, seed: int = 0, **given: Any) -> dict[str, Any]:
    """Return random arguments on the GPU, in bfloat16 with several chunks and heads unless ``given`` says otherwise."""
    chosen = {"B": 2, "T": 500, "H": 3, "K": 128, "V": 128, "dtype": "bfloat16", **given}
    reading = GLA.make_inputs(GLA.case(**chosen), device, seed)
    for name in reading.differentiable if grad else ():
        reading.arguments[name].requires_grad_()
    return reading.arguments


def assert_same_every_time(arguments: dict[str, Any], times: int) -> None:
    """Require finite results and gradients that are bitwise equal in ``times`` calls."""
    first = results(GLA, arguments, "hopper")
    assert all(value.isfinite().all() for value in first.values())
    for turn in range(times):
        again = results(GLA, arguments, "hopper")
        if wrong := [
            difference(name, again[name], value) for name, value in first.items() if not torch.equal(again[name], value)
        ]:
            third = results(GLA, arguments, "hopper")
            odd = "this one" if all(torch.equal(third[name], value) for name, value in first.items()) else "the first"
            pytest.fail(f"call {turn + 1} differs from the first, and of the two {odd} is alone: " + "; ".join(wrong))


def difference(name: str, found: torch.Tensor, expected: torch.Tensor) -> str:
    """Describe which elements differ: their number, range of indices and the first few, to tell a tile from a sequence."""
    where = (found.view(torch.int16) != expected.view(torch.int16)).nonzero()
    low, high = where.amin(0).tolist(), where.amax(0).tolist()
    few = [(at, found[tuple(at)].item(), expected[tuple(at)].item()) for at in where[:4].tolist()]
    return f"{name} {list(found.shape)} in {len(where)} elements from {low} to {high}, such as (at, found, expected) {few}"


@gpu
@on_hopper
@each_case
def test_results_and_gradients_are_correct(name, device):
    assert_correct(GLA, GLA.case("bfloat16", name=name, **CASES[name]), "hopper", device)


@gpu
@on_hopper
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@each_case
def test_results_are_correct_from_an_initial_state(name, dtype, device):
    case = GLA.case(dtype, name=name, initial_state=True, final_state=True, **CASES[name])
    assert_ok(judge(GLA, case, variant="hopper", device=device, directions=("forward",)), GLA, case, "hopper")


FORMS: dict[str, dict[str, Any]] = {
    "final_state": {"final_state": True},
    "states": {"initial_state": True, "final_state": True},
    "float32_decay": {"log_decay_dtype": "float32"},
}
"""Options that a training call may have, singly; ``ALL_FORMS`` has all of them."""

ALL_FORMS = FORMS["states"] | FORMS["float32_decay"]


@gpu
@on_hopper
@each_case
def test_training_with_states_and_float32_decays_is_correct(name, device):
    """Gradients come in through the final state too, and that of the initial state is judged."""
    assert_correct(GLA, GLA.case("bfloat16", name=name, **ALL_FORMS, **CASES[name]), "hopper", device)


@gpu
@on_hopper
@each_case
def test_float16_gradients_are_correct(name, device):
    """The gradients that come in are random, and those that go out are rounded to float16: an error of about 3e-4 each."""
    arguments = made(device, grad=True, dtype="float16", initial_state=True, final_state=True, **CASES[name])
    names = (*"qkvg", "initial_state")
    generator = torch.Generator(device).manual_seed(5)
    do = torch.randn(arguments["v"].shape, generator=generator, device=device).half()
    dfinal = torch.randn(arguments["initial_state"].shape, generator=generator, device=device)
    found = torch.autograd.grad(GLA(**arguments, variant="hopper"), [arguments[each] for each in names], [do, dfinal])
    exact = arguments | {each: arguments[each].detach().double().requires_grad_() for each in names}
    expected = torch.autograd.grad(GLA.reference(**exact), [exact[each] for each in names], [do.double(), dfinal.double()])
    for name, gradient in zip(names, found, strict=True):
        assert gradient.dtype == arguments[name].dtype, name
    gradients = {name: gradient.double() for name, gradient in zip(names, found, strict=True)}
    assert_near(gradients, dict(zip(names, expected, strict=True)), 6e-4)


@gpu
@on_hopper
@each_case
def test_training_in_float16_is_correct(name, device):
    assert_correct(GLA, GLA.case("float16", name=name, initial_state=True, final_state=True, **CASES[name]), "hopper", device)


@gpu
@on_hopper
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["several_chunks", "decay_per_head", "parts_of_T", "packed_with_empty_sequences"])
def test_each_form_of_training_is_correct(name, form, device):
    assert_correct(GLA, GLA.case("bfloat16", name=name, **FORMS[form], **CASES[name]), "hopper", device)


@gpu
@on_hopper
@each_layout
@pytest.mark.parametrize("given", [{}, ALL_FORMS], ids=["plain", "all_forms"])
@pytest.mark.parametrize("decay", DECAYS)
def test_every_kind_of_decay(decay, given, per, device):
    case = GLA.case("bfloat16", B=2, T=400, H=4, K=128, V=128, decay=decay, decay_per=per, **given)
    assert_correct(GLA, case, "hopper", device)


@gpu
@on_hopper
@each_layout
@pytest.mark.parametrize("values", [64, 128, 192, 256, 512])
@pytest.mark.parametrize("keys", [64, 128, 256])
def test_every_size_of_head(keys, values, per, device):
    case = GLA.case("bfloat16", B=1, T=200, H=2, K=keys, V=values, decay_per=per)
    assert_correct(GLA, case, "hopper", device)


@gpu
@on_hopper
@each_layout
@pytest.mark.parametrize(("keys", "values"), [(128, 128), (64, 64), (64, 128), (128, 192), (256, 128)])
@pytest.mark.parametrize("parts", [2, 3, 8])
def test_any_number_of_time_segments(parts, keys, values, per, device, monkeypatch):
    """More segments than chunks leave some of them empty."""
    from onelaunch.ops.gla import launch_hopper

    monkeypatch.setattr(launch_hopper, "pass_segments", lambda *_: Segments(parts))
    for lengths in (None, (5, 0, 290, 30)):
        case = GLA.case("bfloat16", B=1, T=325, H=2, K=keys, V=values, decay_per=per, lengths=lengths)
        assert_correct(GLA, case, "hopper", device)


@gpu
@on_hopper
@each_layout
@pytest.mark.parametrize(("keys", "values"), [(128, 128), (64, 64), (32, 32), (128, 64), (256, 128)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_recomputed_states_have_the_same_bits(dtype, keys, values, per, device, monkeypatch):
    """With a decay per channel a float16 chunk with large queries may take another path, but none of these is that large."""
    from onelaunch.ops.gla import launch_hopper

    if keys > 128 and per == "channel":
        pytest.skip("such a pass does not recompute states")

    for lengths, given in ((None, {}), ((5, 0, 1290, 330), {"initial_state": True}), (None, FORMS["float32_decay"])):
        options = {"T": 1625, "K": keys, "V": values, "decay": "mixed", "decay_per": per, "lengths": lengths, **given}
        arguments = made(device, dtype=dtype, **({"B": 1} if lengths else {}), **options)
        for groups in (1, 2):
            monkeypatch.setattr(launch_hopper, "pass_groups", lambda *_, groups=groups: groups)
            found = []
            for count in (1, 2, 5):
                monkeypatch.setattr(launch_hopper, "pass_segments", lambda *asked, count=count: cut_of(count, *asked))
                found.append(GLA(**{**arguments, "output_final_state": True}, variant="hopper"))
            for o, final in found[1:]:
                assert torch.equal(o, found[0][0])
                assert torch.equal(final, found[0][1])


def cut_of(count: int, ctas: int, chunks: int, multiprocessors: int, chunk: float, recompute: int) -> Segments:
    """Return ``count`` segments whose states are recomputed, if the pass can do so."""
    return recomputed_segments(chunks, count, recompute)[1] if recompute and count > 1 else Segments(1)


@gpu
@on_hopper
@each_layout
def test_segment_sums_that_stop_early_are_deterministic(per, device):
    """The moment at which a sum is known to be complete varies from run to run. The sum stays the same, and it ends."""
    arguments = made(device, B=1, T=16000, H=2, decay="strong", decay_per=per, grad=True)
    assert_same_every_time(arguments, 300)


@gpu
@on_hopper
@each_layout
def test_gradients_do_not_depend_on_memory_after_a_sequence(per, device):
    """The last chunk of batch entry 0 ends inside a tile, after which entry 1 lies in memory, here full of NaN."""
    arguments = made(device, T=100, decay_per=per, grad=True)
    with torch.no_grad():
        for name in "qkv":
            arguments[name][1] = math.nan
    clean = results(GLA, arguments, "hopper")
    assert not any(value[0].isnan().any() for value in clean.values())


@gpu
@on_hopper
def test_large_float16_inputs_do_not_overflow_in_intermediates(device):
    """A chunk decays by exp(-11.5). Numbers of 1000, divided by that factor, would be beyond the range of float16."""
    for name in "qk":
        arguments = made(device, dtype="float16", T=70)
        arguments["g"] = torch.full_like(arguments["g"], -0.18)
        arguments[name] = (arguments[name] * 1000).half()
        found, expected = (GLA(**arguments, variant=each)[0] for each in ("hopper", "recurrent"))
        assert_near({"o": found}, {"o": expected}, 1e-3)


@gpu
@on_hopper
@each_layout
@pytest.mark.parametrize("lengths", [None, (0, 3000, 1, 0, 999)])
def test_results_are_the_same_to_the_last_bit(lengths, per, device):
    given: dict[str, Any] = {"B": 1, "lengths": lengths} if lengths else {}
    arguments = made(device, T=4000, decay_per=per, decay="mixed", grad=True, **given)
    assert_same_every_time(arguments, 20)


@gpu
@on_hopper
@each_layout
@pytest.mark.parametrize("decay", ["mixed", "strong"])
@pytest.mark.parametrize("parts", [1, 3])
def test_in_turns_results_are_the_same_to_the_last_bit(parts, decay, per, device, monkeypatch):
    """The control ``hopper_in_turns`` orders the work of each chunk, but computes the same. With strong decay sums stop early."""
    from onelaunch.ops.gla import launch_hopper

    monkeypatch.setattr(launch_hopper, "pass_segments", lambda *_: Segments(parts))
    for size in (64, 128, 256):
        options = {"T": 2000, "K": size, "V": size, "decay": decay, "decay_per": per}
        arguments = made(device, **options, initial_state=True, final_state=True, grad=True)
        expected, found = (results(GLA, arguments, variant) for variant in ("hopper", "hopper_in_turns"))
        assert {name for name, value in expected.items() if not torch.equal(found[name], value)} == set()


@gpu
@on_hopper
@each_layout
def test_stores_finish_before_their_shared_memory_is_reused(per, device):
    """Reductions once reused the buffer of dq while it was still being copied out.

    A few elements in 1e8 were wrong, in one run of many, at full load.
    """
    arguments = made(device, B=4, T=2048, H=32, K=256, V=256, decay_per=per, grad=True)
    assert_same_every_time(arguments, 30)


@gpu
@on_hopper
@pytest.mark.parametrize("least", [-20.0, -1000.0, -math.inf])
@each_layout
def test_states_decay_by_the_given_amount(per, least, device):
    arguments = made(device, decay_per=per, grad=True)
    arguments["g"] = torch.full_like(arguments["g"], least).requires_grad_()
    found, expected = (results(GLA, arguments, name) for name in ("hopper", "recurrent"))
    assert_near(found, expected, 1e-2)


@gpu
@on_hopper
@pytest.mark.parametrize("name", ["q", "k", "v", "g"])
@each_layout
def test_nan_stays_in_its_head_and_propagates(name, per, device):
    arguments = made(device, T=300, decay_per=per)
    if arguments[name].dim() == 3:
        arguments[name][0, 130, 1] = math.nan
    else:
        arguments[name][0, 130, 1, 3] = math.nan
    o, _ = GLA(**arguments, variant="hopper")
    seen = o[0, 130 : 131 if name == "q" else None, 1].isnan()
    assert (seen[..., 3] if name == "v" else seen.all(-1)).all()
    assert not o[0, :128, 1].isnan().any()
    assert not o[1].isnan().any()
    assert not o[:, :, 0].isnan().any()
    assert not o[:, :, 2].isnan().any()


@gpu
@on_hopper
def test_inputs_may_be_strided(device):
    arguments = made(device, B=1, T=300, lengths=(0, 100, 200), grad=True)
    expected = results(GLA, arguments, "hopper")
    wide = {**arguments, "cu_seqlens": arguments["cu_seqlens"].long()}
    for name in "qkvg":
        spread = torch.full((*arguments[name].shape[:3], 200), math.nan, dtype=torch.bfloat16, device=device)
        wide[name] = spread[..., 13:141].copy_(arguments[name].detach()).requires_grad_()
    assert_near(results(GLA, wide, "hopper"), expected, 0)


@gpu
@on_hopper
@pytest.mark.parametrize("lengths", [None, (0, 300, 0, 200)])
def test_a_captured_training_step_follows_its_inputs(lengths, device):
    given: dict[str, Any] = {"B": 1, "lengths": lengths} if lengths else {}
    assert_captured_step_follows_its_inputs(GLA, "hopper", functools.partial(made, device, **given), device)


@gpu
@on_hopper
def test_a_thread_without_a_cuda_context_can_launch(device):
    """A backward pass may run in such a thread: once memory and kernels exist, nothing else gives the thread a context."""
    arguments = made(device)
    expected = GLA(**arguments, variant="hopper")[0].clone()
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(lambda: GLA(**arguments, variant="hopper")[0]).result()
    assert torch.equal(found, expected)


@gpu
@on_hopper
def test_a_call_never_waits_for_the_device(device):
    arguments = made(device, B=1, lengths=(0, 300, 0, 200), grad=True)
    o, _ = GLA(**arguments, variant="hopper")
    torch.autograd.grad(o, list(differentiable(arguments).values()), torch.randn_like(o))
    torch.cuda.set_sync_debug_mode("error")
    try:
        o, _ = GLA(**arguments, variant="hopper")
        torch.autograd.grad(o, list(differentiable(arguments).values()), torch.randn_like(o))
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Calls that the variant refuses: options of the case, whether gradients are needed, and words of the reason
LEFT_TO_OTHERS: dict[str, tuple[dict[str, Any], bool, str]] = {
    "float32": ({"dtype": "float32"}, False, "needs float16 or bfloat16"),
    "wide_keys": ({"K": 264}, False, "needs K of at most 256"),
    "no_steps": ({"T": 0}, False, "at least one element"),
    "float32_decay_of_wide_heads": ({"log_decay_dtype": "float32", "K": 144}, False, "K of at most 128 with float32 log-decays"),
    "value_gate": ({"value_gate": True}, False, "no gate on values"),
}

TAKEN: dict[str, tuple[dict[str, Any], bool]] = {
    "final_state": ({"final_state": True}, False),
    "training_with_states": ({"initial_state": True, "final_state": True}, True),
    "float32_decay": ({"log_decay_dtype": "float32"}, True),
    "float32_decay_per_head": ({"log_decay_dtype": "float32", "decay_per": "head"}, True),
    "all_of_them_packed": ({"lengths": (30, 0, 40), **ALL_FORMS}, True),
    "shared_values_per_head": ({"H": 4, "k_heads": 2, "v_heads": 2, "g_heads": 2, "decay_per": "head"}, True),
    "shared_values": ({"H": 4, "k_heads": 2, "v_heads": 2, "g_heads": 2}, True),
    "padded_heads": ({"K": 96, "V": 80, **ALL_FORMS}, True),
    "odd_heads": ({"K": 20, "V": 76, **ALL_FORMS}, True),
    "least_heads": ({"K": 16, "V": 16}, True),
    "largest_heads": ({"K": 256, "V": 512}, True),
    "float16": ({"dtype": "float16", "initial_state": True, "final_state": True}, True),
}
"""Calls that the variant takes: options of the case, and whether gradients are needed."""


@pytest.mark.parametrize("name", TAKEN)
def test_calls_that_people_make_are_taken(name, monkeypatch):
    from onelaunch.ops.gla.variants import hopper

    pytest.importorskip("triton", reason="without Triton, the variant takes no calls")
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    given, grad = TAKEN[name]
    case = GLA.case(**{"dtype": "bfloat16", "B": 1, "T": 70, "H": 1, "K": 64, "V": 64, **given})
    assert GLA.get("hopper").why_not(GLA.query(case, "cuda:0", grad=grad)) is None


@pytest.mark.parametrize("name", LEFT_TO_OTHERS)
def test_unsupported_calls_are_refused_with_the_reason(name, monkeypatch):
    from onelaunch.ops.gla.variants import hopper

    pytest.importorskip("triton", reason="without Triton, the only reason given is that it is missing")
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    given, grad, said = LEFT_TO_OTHERS[name]
    case = GLA.case(**{"dtype": "bfloat16", "B": 1, "T": 70, "H": 1, "K": 64, "V": 64, **given})
    assert said in str(GLA.get("hopper").why_not(GLA.query(case, "cuda:0", grad=grad)))


def test_it_is_refused_without_a_hopper_gpu():
    with pytest.raises(VariantUnsupported, match=r"Hopper|CUDA"):
        GLA(**arguments_of(GLA, B=1, T=70, H=1, K=64, V=64, dtype="bfloat16"), variant="hopper")


@pytest.mark.parametrize(
    ("programs", "chunks", "parts"), [(96, 128, 1), (32, 256, 4), (16, 512, 8), (256, 64, 1), (1, 1, 1), (1, 3, 1), (64, 2, 1)]
)
def test_time_segments_fill_the_gpu(programs, chunks, parts):
    """With ``programs`` CTAs for each segment and ``chunks`` chunks of 3 us in T, a GPU of 132 SMs gets ``parts`` segments."""
    assert pass_segments(programs, chunks, 132, 3.0) == Segments(parts)


@pytest.mark.parametrize(
    ("per", "keys", "heads", "chunks", "expected"),
    [
        ("head", 128, 64, 32, (1, 1)), ("head", 128, 16, 64, (1, 4)), ("head", 128, 16, 8, (1, 1)),
        ("head", 128, 96, 128, (2, 1)),
        ("channel", 128, 64, 32, (1, 1)), ("channel", 128, 16, 64, (2, 8)), ("channel", 128, 96, 128, (2, 1)),
        ("wide", 128, 64, 32, (2, 2)),
    ],
)  # fmt: skip
def test_passes_take_the_groups_and_segments_that_were_fastest(per, keys, heads, chunks, expected):
    """With V = 128 on 132 SMs, where no pass recomputes states: docs/notebook/gla.md has the times of the other choices."""
    times = chunk_times(keys, scalar=per == "head", wide=per == "wide", store_states=False)
    groups = pass_groups(heads, chunks, 132, times, NOT_RECOMPUTED)
    assert (groups, pass_segments(heads * 2 // groups, chunks, 132, times[groups - 1]).count) == expected


@pytest.mark.parametrize(
    ("per", "keys", "ctas", "chunks", "expected"),
    [
        ("head", 64, 64, 32, (2, 896)), ("head", 128, 32, 8, (3, 768)), ("head", 256, 64, 32, (2, 736)),
        ("channel", 64, 64, 32, (2, 768)), ("head", 128, 128, 32, (1, 0)), ("head", 128, 32, 1, (1, 0)),
        ("head", 128, 32, 64, (4, 0)), ("head", 128, 32, 512, (4, 0)),
    ],
)  # fmt: skip
def test_passes_recompute_states_where_heads_are_few_and_sequences_short(per, keys, ctas, chunks, expected):
    """Expected are the number of segments and the share of the first one in 1/1024, 0 where segments are summed beforehand.

    With one warpgroup that multiplies on 132 SMs. 896 is 28 of 32 chunks: 4 more and 28 without outputs take as long.
    """
    scalar = per == "head"
    time = chunk_times(keys, scalar=scalar, wide=False, store_states=False).one
    found = pass_segments(ctas, chunks, 132, time, recomputed_chunk(keys, scalar=scalar, wide=False).one)
    assert (found.count, found.share) == expected
