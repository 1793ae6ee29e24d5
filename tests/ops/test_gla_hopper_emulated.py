"""Tests of the sources of ``gla``'s Hopper kernels on a CPU, through the emulation of Gluon in gluon_on_cpu.py.

Results and gradients are compared with the float64 reference, ``reference.py``'s loop over time. Each case has few steps, since
a chunk takes about 10 ms. What only a GPU shows is tested in test_gla_hopper.py and test_gla_hopper_sizes.py.

``arguments_of`` makes small random arguments on the CPU. ``assert_near`` bounds the norm of each error, relative to that of the
expected values. ``emulate`` replaces the kernels by their emulation for a test. A test marked ``thorough`` does not run in
``make test``. ``thorough_but`` marks all parameters but the named ones ``thorough``.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onelaunch.workbench.verify.poison import poisoned
from tests.ops import gluon_on_cpu
from tests.ops.cases import GLA, arguments_of, assert_near
from tests.ops.gluon_on_cpu import emulate
from tests.ops.rescaled import rescaled
from tests.thorough import thorough_but

BOUND = 4e-3
"""Largest norm-wise error: results of 16 bits have about 2.9e-3 in bfloat16, by three roundings."""


CASES: dict[str, dict[str, Any]] = {
    "tiles_that_heads_fill": {"T": 70, "K": 64, "V": 64},
    "padded": {"T": 70, "H": 2, "K": 96, "V": 80},
    "padded_in_segments": {"T": 200, "K": 48, "V": 144, "segments": 3},
    "padded_per_head": {"B": 2, "T": 70, "K": 32, "V": 48, "decay_per": "head"},
    "padded_per_head_in_segments": {"T": 200, "K": 80, "V": 72, "decay_per": "head", "segments": 2},
    "padded_packed": {"T": 140, "H": 2, "K": 40, "V": 72, "lengths": (50, 0, 1, 89)},
    "padded_wide_keys": {"T": 66, "K": 160, "V": 48},
    "padded_float32_decay": {"T": 70, "H": 2, "K": 80, "V": 40, "log_decay_dtype": "float32"},
    "padded_strong_decay": {"T": 130, "K": 48, "V": 96, "decay": "strong", "segments": 2},
    "padded_forgetting": {"T": 70, "K": 24, "V": 40, "decay": "forget", "log_decay_dtype": "float32"},
    "padded_without_states": {"T": 66, "H": 2, "K": 96, "V": 40, "initial_state": False, "final_state": False},
    "one_group": {"T": 66, "K": 64, "V": 128, "groups": 1},
    "one_group_per_head": {"T": 66, "K": 64, "V": 128, "decay_per": "head", "groups": 1},
    "one_group_per_head_without_states": {
        "T": 130, "K": 72, "V": 144, "decay_per": "head", "initial_state": False, "final_state": False, "groups": 1,
    },
    "one_group_in_segments": {"T": 130, "K": 80, "V": 104, "segments": 2, "groups": 1},
    "one_group_per_head_packed": {
        "T": 140, "H": 2, "K": 40, "V": 128, "lengths": (50, 0, 1, 89), "decay_per": "head", "groups": 1,
    },
}  # fmt: skip


Incoming = Callable[[torch.Tensor], torch.Tensor]
"""Function that returns the gradient that comes in through a result."""


def emulated(
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    segments: int,
    incoming: Incoming = torch.ones_like,
    *,
    groups: int = 2,
) -> dict[str, torch.Tensor]:
    """Return o, the final state and all gradients that the kernels compute, in float64.

    A float16 gradient of o is scaled by PyTorch: the kernels that do it are Triton's, and have tests of their own.
    """
    launch_hopper = emulate(monkeypatch, segments=segments, groups=groups)
    monkeypatch.setattr(launch_hopper, "rescaled", rescaled)
    from onelaunch.ops.gla import launch

    initial, offsets = arguments.get("initial_state"), arguments.get("cu_seqlens")
    scale = arguments.get("scale") or arguments["q"].shape[3] ** -0.5
    call = launch.Attention.of(*(arguments[name] for name in "qkvg"), initial, offsets, scale)
    wanted = bool(arguments.get("output_final_state"))
    with poisoned():
        final = launch.empty_final(call, wanted=wanted)
        o = launch_hopper.forward(call, final=final if wanted else None)
        found = launch_hopper.backward(call, incoming(o), dfinal=incoming(final) if wanted else None)
    results = {"o": o, **({"final": final} if wanted else {})}
    results |= {name: getattr(found, name).reshape(arguments[name].shape) for name in "qkvg"}
    if initial is not None:
        results["initial_state"] = found.initial
    return {name: value.double() for name, value in results.items()}


def expected(arguments: dict[str, Any], incoming: Incoming = torch.ones_like) -> dict[str, torch.Tensor]:
    """Return the same results of the oracle."""
    exact = dict(arguments)
    names = [name for name in (*"qkvg", "initial_state") if exact.get(name) is not None]
    for name in names:
        exact[name] = arguments[name].double().requires_grad_()
    results = {name: value for name, value in zip(("o", "final"), GLA.reference(**exact), strict=True) if value is not None}
    outputs = list(results.values())
    gradients = torch.autograd.grad(outputs, [exact[name] for name in names], [incoming(each) for each in outputs])
    return results | dict(zip(names, gradients, strict=True))


@pytest.mark.parametrize(
    "name",
    thorough_but(
        "tiles_that_heads_fill", "padded_packed", "padded_strong_decay", "padded_without_states", "one_group_per_head", of=CASES
    ),
)
def test_kernels_compute_results_and_gradients(name, monkeypatch):
    options = {"B": 1, "H": 1, "initial_state": True, "final_state": True, **CASES[name]}
    segments, groups = options.pop("segments", 1), options.pop("groups", 2)
    arguments = arguments_of(GLA, **options, dtype="bfloat16")
    assert_near(emulated(monkeypatch, arguments, segments, groups=groups), expected(arguments), BOUND)


ODD_HEADS: dict[str, dict[str, Any]] = {
    "both": {"T": 70, "H": 2, "K": 20, "V": 75, "initial_state": True, "final_state": True},
    "keys_per_head": {"T": 70, "K": 19, "V": 64, "decay_per": "head", "final_state": True},
    "values_packed": {"T": 90, "H": 2, "K": 32, "V": 36, "lengths": (40, 0, 50), "log_decay_dtype": "float32"},
}
"""Cases whose heads are no multiples of 8 channels: both sizes or one of them."""


@pytest.mark.parametrize("name", thorough_but("both", of=ODD_HEADS))
def test_heads_of_any_size_are_copied_into_aligned_ones(name, monkeypatch):
    """The variant pads them, so its own results and PyTorch's gradients are compared."""
    arguments = arguments_of(GLA, **{"B": 1, "H": 1, **ODD_HEADS[name]}, dtype="bfloat16")
    emulate(monkeypatch)
    names = [name for name in (*"qkvg", "initial_state") if arguments.get(name) is not None]
    leaves = {name: arguments[name].clone().requires_grad_() for name in names}
    with poisoned():
        o, final = GLA.get("hopper").run(GLA.bind(**{**arguments, **leaves}))
        outputs = {"o": o, "final": final} if arguments.get("output_final_state") else {"o": o}
        incoming = [torch.ones_like(each) for each in outputs.values()]
        gradients = torch.autograd.grad(list(outputs.values()), list(leaves.values()), incoming)
    assert all(each.is_contiguous() for each in outputs.values())
    found = outputs | dict(zip(names, gradients, strict=True))
    right = expected(arguments)
    assert {each: value.shape for each, value in found.items()} == {each: value.shape for each, value in right.items()}
    assert_near({each: value.double() for each, value in found.items()}, right, BOUND)


FLOAT16 = ("tiles_that_heads_fill", "padded_per_head_in_segments", "padded_strong_decay")
"""Cases that run in float16 too; the others do so with ``--architectures=every`` alone."""


@pytest.mark.parametrize("name", [each if each in FLOAT16 else pytest.param(each, marks=pytest.mark.every) for each in CASES])
def test_float16_is_as_accurate_as_its_rounding_allows(name, monkeypatch):
    """float16 has three more bits than bfloat16, so the bound is an eighth."""
    options = {"B": 1, "H": 1, "initial_state": True, "final_state": True, **CASES[name]}
    segments, groups = options.pop("segments", 1), options.pop("groups", 2)
    arguments = arguments_of(GLA, **options, dtype="float16")
    assert_near(emulated(monkeypatch, arguments, segments, drawn, groups=groups), expected(arguments, drawn), BOUND / 8)


@pytest.mark.parametrize("name", thorough_but("k", of=("q", "k")))
def test_large_float16_inputs_do_not_overflow_in_gradients(name, monkeypatch):
    """Half of a chunk decays by exp(-5.8). Numbers of 1000, divided by that factor, would be beyond the range of float16."""
    arguments = arguments_of(GLA, B=1, H=1, T=70, K=64, V=64, dtype="float16")
    arguments["g"] = torch.full_like(arguments["g"], -0.18)
    factors = {"q": 2.0**-8, "k": 2.0**-8, "v": 2.0**-4, name: 1000.0}
    for each, factor in factors.items():
        arguments[each] = (arguments[each] * factor).half()
    assert_near(emulated(monkeypatch, arguments, 1, drawn), expected(arguments, drawn), BOUND / 8)


LARGEST = torch.finfo(torch.float16).max


@pytest.mark.parametrize("per", ["channel", "head"])
@pytest.mark.parametrize("exponent", [-20, pytest.param(-8, marks=pytest.mark.every), 12])
def test_float16_gradients_do_not_depend_on_the_scale_of_the_loss(exponent, per, monkeypatch):
    """Gradients within the range of float16 are as accurate as with any scale, and those beyond it are inf, never finite.

    With large queries and a scale of 2^12 the gradients of states leave the range where most results do not. A scale of 2^-20
    makes incoming gradients that are below the normal numbers of float16. So are results, which may be off by 2^-25 by rounding.
    """
    options = {"B": 1, "H": 2, "T": 130, "K": 64, "V": 64, "decay": "weak", "decay_per": per}
    arguments = arguments_of(GLA, **options, initial_state=True, final_state=True, dtype="float16")
    for name, factor in (("q", 16.0), ("k", 2.0**-5), ("v", 2.0**-6), ("initial_state", 2.0**-11)):
        arguments[name] = arguments[name] * factor

    def incoming(result: torch.Tensor) -> torch.Tensor:
        return (drawn(result).float() * 2.0**exponent).to(torch.float16).to(result.dtype)

    found, right = emulated(monkeypatch, arguments, 1, incoming), expected(arguments, incoming)
    left_range = set()
    for name in ("q", "k", "v", "g", "initial_state"):
        exact, got = right[name].double(), found[name]
        largest = torch.finfo(arguments[name].dtype).max
        beyond, within = exact.abs() > largest * (1 + 1e-2), exact.abs() < largest * (1 - 1e-2)
        left_range |= {name} if beyond.any() else set()
        assert (got[beyond] == exact[beyond].sign() * torch.inf).all()
        error = (got - exact)[within]
        assert error.norm() <= BOUND / 8 * exact.norm() + 2.0**-25 * error.numel() ** 0.5
    assert left_range == ({"v"} if exponent == 12 else set())


def drawn(result: torch.Tensor) -> torch.Tensor:
    """Return a gradient that is drawn alike for the kernels and the oracle, and that bfloat16 holds exactly."""
    return torch.randn(result.shape, generator=torch.Generator().manual_seed(5)).bfloat16().to(result.dtype)


@pytest.mark.parametrize("decay", ["model", "strong", pytest.param("mixed", marks=pytest.mark.thorough)])
def test_every_element_of_a_float32_gradient_of_decays_is_accurate(decay, monkeypatch):
    """The verification gate allows an element to be off by 0.024 of the root mean square, however many there are.

    With strong decay the elements of the first and last step of a chunk are many times larger than most others. They come from
    the state and its gradient: with one 16-bit term of each the error was 0.9 of what is allowed here, and above it on a GPU.
    With moderate decay most comes from pairs of steps: with one term of decayed queries and keys it was 0.4 of that here, and
    1.01 among the 16.8 million elements of a study's call on a GPU.
    """
    options = {"B": 1, "H": 1, "T": 136, "K": 80, "V": 144, "initial_state": True, "final_state": True}
    arguments = arguments_of(GLA, **options, decay=decay, log_decay_dtype="float32", dtype="bfloat16")
    found, right = emulated(monkeypatch, arguments, 1, drawn)["g"], expected(arguments, drawn)["g"].double()
    assert (found - right).abs().max() <= 0.05 * 0.024 * right.square().mean().sqrt()


def test_gradients_of_decays_per_head_add_up_over_time(monkeypatch):
    """The gradient of a bias of the decays is a sum over all steps, in which errors that the steps share do not average out.

    The incoming gradient is orthogonal to o, as behind a norm, so that most of a step's q dq cancels. A layer that rounds o and
    this gradient is off by 5e-3 to 1e-2 (docs/notebook/gla.md), beside which the kernels' error has to be small. It is 9e-4, and
    2.4e-3 with one term of dP, or 9.5e-3 if dq and dk are rounded before they are subtracted.
    """
    arguments = arguments_of(GLA, B=1, T=320, H=4, K=64, V=64, decay_per="head", log_decay_dtype="float32", dtype="bfloat16")
    o = expected(arguments)["o"].detach()
    do = drawn(o)
    do = (do - o * (do * o).sum(-1, keepdim=True) / o.square().sum(-1, keepdim=True)).bfloat16()

    def incoming(result: torch.Tensor) -> torch.Tensor:
        return do.to(result.dtype)

    found, right = emulated(monkeypatch, arguments, 1, incoming)["g"], expected(arguments, incoming)["g"].double()
    assert_near({"g": found.sum(1)}, {"g": right.sum(1)}, 2e-3)


@pytest.mark.parametrize(("keys", "values", "aliased"), [(80, 72, False), (64, 128, True)])
def test_gradients_go_into_columns_of_a_matrix(keys, values, aliased, monkeypatch):
    """Rows of the matrix are no multiple of a head's size apart, as in ``gla_layer``; other columns keep what they held."""
    launch_hopper = emulate(monkeypatch)
    from onelaunch.ops.gla import launch

    batch, length, heads = 1, 128, 2
    arguments = arguments_of(GLA, B=batch, T=length, H=heads, K=keys, V=values, dtype="bfloat16")
    call = launch.Attention.of(*(arguments[name] for name in "qkvg"), None, None, 0.1)
    do = torch.ones_like(arguments["v"])
    expected = launch_hopper.backward(call, do, normalizer=16.0)
    widths = [heads * keys, heads * keys, heads * values, 24]
    matrix = torch.full((batch, length, sum(widths)), 7.0, dtype=torch.bfloat16)
    *columns, rest = matrix.split(widths, dim=2)
    into = launch.Into(*(each.unflatten(2, (heads, -1)) for each in columns))
    assert (launch_hopper.aliased_state_buffers(call, into) is not None) == aliased
    found = launch_hopper.backward(call, do, into, normalizer=16.0)
    assert (rest == 7.0).all()
    for name in "qkvg":
        assert torch.equal(getattr(found, name), getattr(expected, name))
        assert getattr(expected, name).isfinite().all()


def store_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every TMA store read its tile as late as it may: when the thread that issued it waits for its stores.

    Each wait takes two milliseconds, in which the other warpgroups come as far as barriers allow.
    """
    pending = threading.local()
    store = gluon_on_cpu.tma_store

    def store_later(*arguments):
        pending.stores = [*getattr(pending, "stores", []), arguments]

    def wait(pendings):
        assert pendings == 0
        time.sleep(2e-3)
        for arguments in getattr(pending, "stores", []):
            store(*arguments)
        pending.stores = []

    monkeypatch.setattr(gluon_on_cpu, "tma_store", store_later)
    monkeypatch.setattr(gluon_on_cpu, "tma_store_wait", wait)


LATE_STORES: dict[str, dict[str, Any]] = {
    "float32_decay": {"K": 80, "V": 128, "log_decay_dtype": "float32"},
    "float32_decay_one_group": {"K": 80, "V": 64, "log_decay_dtype": "float32", "groups": 1},
    "per_channel": {"K": 80, "V": 72},
    "wide_keys": {"K": 160, "V": 64},
    "per_head": {"K": 64, "V": 128, "decay_per": "head"},
    "wide_keys_per_head": {"K": 160, "V": 64, "decay_per": "head"},
    "packed": {"T": 330, "K": 80, "V": 128, "log_decay_dtype": "float32", "lengths": (1, 0, 200, 129), "decay": "mixed"},
}
"""Cases by what decides from where outputs leave: LEAVE in hopper_chunk_state.py is "state", "tile" and "registers"."""


@pytest.mark.parametrize("name", thorough_but("float32_decay", of=LATE_STORES))
def test_tiles_are_not_overwritten_before_stores_have_read_them(name, monkeypatch):
    """Results are right however late stores read their tiles, and however far ``prepare`` gets meanwhile.

    Five chunks use every stage again, and the factors of the state in ``ends`` too.
    """
    options = {"B": 1, "H": 1, "T": 260, "initial_state": True, "final_state": True, **LATE_STORES[name]}
    groups = options.pop("groups", 2)
    arguments = arguments_of(GLA, **options, dtype="bfloat16")
    store_late(monkeypatch)
    assert_near(emulated(monkeypatch, arguments, 1, drawn, groups=groups), expected(arguments, drawn), BOUND)


RECOMPUTED: dict[str, dict[str, Any]] = {
    "per_head_packed": {"T": 390, "H": 2, "K": 40, "V": 72, "lengths": (250, 0, 1, 64, 75), "decay_per": "head"},
    "per_channel": {"T": 330, "K": 64, "V": 64, "decay": "mixed"},
    "per_channel_packed": {"T": 390, "H": 2, "K": 40, "V": 72, "lengths": (250, 0, 1, 64, 75), "decay": "strong", "groups": 1},
    "wide_keys_per_head": {"T": 330, "K": 256, "V": 64, "decay_per": "head"},
    "per_head": {"T": 580, "K": 64, "V": 128, "decay_per": "head", "decay": "mixed"},
    "one_group_per_head": {"T": 330, "K": 128, "V": 128, "decay_per": "head", "groups": 1},
    "one_group": {"T": 330, "K": 96, "V": 128, "groups": 1},
    "one_step": {"T": 1, "K": 64, "V": 64, "decay_per": "head"},
    "float32_decay": {"T": 330, "K": 80, "V": 72, "log_decay_dtype": "float32", "groups": 1},
    "float16": {"T": 330, "K": 64, "V": 64, "dtype": "float16"},
    "float16_per_head": {"T": 330, "K": 64, "V": 64, "dtype": "float16", "decay_per": "head"},
    "without_states": {"T": 330, "K": 64, "V": 64, "decay_per": "head", "initial_state": False, "final_state": False},
    "shared_heads": {"T": 200, "H": 4, "K": 64, "V": 64, "k_heads": 2, "v_heads": 2, "g_heads": 2},
}
"""Cases in which states at the starts of segments are recomputed, so that results are those of whole sequences."""


@pytest.mark.parametrize(
    ("segments", "variant"),
    [(2, "hopper"), *(pytest.param(*each, marks=pytest.mark.every) for each in ((4, "hopper"), (3, "hopper_in_turns")))],
)
@pytest.mark.parametrize(
    "name",
    [
        *thorough_but("per_head_packed", "per_channel", of=list(RECOMPUTED)[:4]),
        *(pytest.param(name, marks=pytest.mark.every) for name in list(RECOMPUTED)[4:]),
    ],
)
def test_recomputed_states_give_the_bits_of_whole_sequences(name, segments, variant, monkeypatch):
    """Segments have different lengths, the shortest ones none. The last one of a sequence stores its final state."""
    options = {"B": 1, "H": 1, "initial_state": True, "final_state": True, "dtype": "bfloat16", **RECOMPUTED[name]}
    groups = options.pop("groups", 2)
    call = GLA.bind(**arguments_of(GLA, **options))
    emulate(monkeypatch, groups=groups)
    expected = GLA.get("hopper").run(call)
    emulate(monkeypatch, segments=segments, groups=groups, recompute=True)
    with poisoned():
        found = GLA.get(variant).run(call)
    assert expected[0].isfinite().all()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("per", thorough_but("head", of=("channel", "head")))
def test_chunks_before_a_segment_have_neither_queries_nor_scores(per, monkeypatch):
    """Of nine chunks the first CTA has eight, per channel seven, and the second one goes over these without outputs."""
    arguments = arguments_of(GLA, B=1, H=1, T=576, K=64, V=64, decay_per=per, dtype="bfloat16")
    events = recorded(monkeypatch)
    counts = []
    for recompute in (False, True):
        emulate(monkeypatch, segments=2 if recompute else 1, recompute=recompute)
        events.clear()
        GLA.get("hopper").run(GLA.bind(**arguments))
        counts.append({name: events.count(name) for name in ("load", "multiply")})
    # Tiles are q, k, v and g, products q S, v^T k in one term or two, and scores v.
    tiles, products, skipped = (3, 3, 8) if per == "head" else (4, 4, 7)
    assert counts[0] == {"load": 9 * tiles, "multiply": 9 * products}
    assert counts[1] == {"load": 9 * tiles + skipped * (tiles - 1), "multiply": 9 * products + skipped * (products - 2)}


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by "load" with each TMA load, and with each product by the name of the role that multiplies."""
    events: list[str] = []
    role = threading.local()
    specialize, load, multiply = gluon_on_cpu.warp_specialize, gluon_on_cpu.tma_load, gluon_on_cpu.warpgroup_mma

    def named(function):
        def run(*arguments):
            role.name = function.__name__
            function(*arguments)

        return run

    def specialize_named(partitions, warps, registers):
        specialize([(named(function), arguments) for function, arguments in partitions], warps, registers)

    def load_recorded(source, coordinates, bar, tile, pred=True):
        if bool(pred):
            events.append("load")
        load(source, coordinates, bar, tile, pred)

    def multiply_recorded(*arguments, **options):
        events.append(role.name)
        return multiply(*arguments, **options)

    for name, function in (
        ("warp_specialize", specialize_named), ("tma_load", load_recorded), ("warpgroup_mma", multiply_recorded),
    ):  # fmt: skip
        monkeypatch.setattr(gluon_on_cpu, name, function)
    return events


@pytest.mark.parametrize(("per", "values"), [("channel", 64), ("head", 128)])
def test_in_turns_a_chunk_is_loaded_prepared_and_multiplied_before_the_next(per, values, monkeypatch):
    """T is two segments of more chunks than there are stages. The control gives the same bits as ``hopper`` without overlap."""
    options = {"B": 1, "H": 1, "T": 580, "K": 64, "V": values, "initial_state": True, "final_state": True, "decay": "weak"}
    call = GLA.bind(**arguments_of(GLA, **options, decay_per=per, dtype="bfloat16"))
    events = recorded(monkeypatch)
    emulate(monkeypatch, segments=2)
    expected = GLA.get("hopper").run(call)
    overlapped = [name for name, _ in itertools.groupby(events)]
    events.clear()
    with poisoned():
        found = GLA.get("hopper_in_turns").run(call)
    assert all(map(torch.equal, found, expected))
    in_turns = [name for name, _ in itertools.groupby(events)]
    sums = ["load", "decay_keys", "accumulate"] if per == "channel" else ["load", "accumulate"]  # per head it only scales values
    assert in_turns == sums * 5 + ["load", "prepare", "multiply"] * 10
    assert overlapped != in_turns


@pytest.mark.parametrize("per", thorough_but("head", of=("channel", "head")))
def test_gradients_in_turns_have_the_same_bits(per, monkeypatch):
    """Heads of 60 values are copied into aligned ones, in both variants."""
    arguments = arguments_of(GLA, B=1, H=1, T=200, K=32, V=60, decay_per=per, initial_state=True, dtype="bfloat16")
    emulate(monkeypatch)
    leaves = [arguments[name].requires_grad_() for name in (*"qkvg", "initial_state")]
    gradients = []
    for variant in ("hopper", "hopper_in_turns"):
        with poisoned():
            o, _ = GLA.get(variant).run(GLA.bind(**arguments))
            gradients.append(torch.autograd.grad(o, leaves, drawn(o)))
    assert all(map(torch.equal, *gradients))
