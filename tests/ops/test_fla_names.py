"""Tests of the functions that have the names of fla (flash-linear-attention) 0.6.0: their signatures, and what they compute.

``docs/fla_arguments.toml`` holds fla's signatures and what each argument means here. The forms of calls are those that fla's own
tests make: states in the dtype of the inputs, head sizes between multiples of 16, float32 log-decays, packed sequences.

``prose`` compares wording with the test's entry in ``tests/snapshots/prose.txt``. A test fails if it does not compare one of
its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone. ``device`` is the first GPU, or the
CPU. ``arguments_of`` makes small random arguments on the CPU. ``pytorch_variants`` are the variants of plain PyTorch.
``triton_variants`` are the variants with kernels of our own for any GPU. ``assert_near`` bounds the norm of each error,
relative to that of the expected values. A test marked ``interpret`` runs in Triton's interpreter, with TRITON_INTERPRET=1.
``thorough_but`` marks all parameters but the named ones ``thorough``: they do not run in ``make test``.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from onelaunch import ops
from onelaunch.errors import ArgumentError, DeviceError, DTypeError, PackingError, ShapeError, ValueRangeError
from onelaunch.ops import chunk_hgrn, fused_recurrent_gla, fused_recurrent_hgrn, fused_recurrent_simple_gla, gated_scan, gla
from tests.ops.cases import GATED_SCAN, GLA, arguments_of, assert_near, pytorch_variants, triton_variants
from tests.thorough import thorough_but

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyrefly: ignore[missing-import]

STORED: dict[str, Any] = tomllib.loads((Path(__file__).parents[2] / "docs" / "fla_arguments.toml").read_text(encoding="utf-8"))
SIGNATURES: dict[str, str] = STORED["signatures"]
MODULES = {name: module for modules in STORED["modules"].values() for module, names in modules.items() for name in names}
"""Module of fla that holds a function, by its name."""

HGRN = {"chunk_hgrn": chunk_hgrn, "fused_recurrent_hgrn": fused_recurrent_hgrn}
each_hgrn = pytest.mark.parametrize("function", HGRN.values(), ids=list(HGRN))
each_function = pytest.mark.parametrize("name", SIGNATURES)


def written(parameters: list[inspect.Parameter]) -> str:
    """Return names and defaults of parameters as a line, without their types."""
    return ", ".join(str(each.replace(annotation=inspect.Parameter.empty)) for each in parameters)


@each_function
def test_signatures_are_those_of_fla_with_an_additional_variant(name):
    parameters = dict(inspect.signature(getattr(ops, name)).parameters)
    ours = parameters.pop("variant")
    assert (ours.kind, ours.default) == (inspect.Parameter.KEYWORD_ONLY, "auto")
    assert written(list(parameters.values())) == SIGNATURES[name]


@each_function
def test_stored_signatures_are_those_of_fla(name):
    """Compare with fla itself, where it is installed."""
    pytest.importorskip("triton", reason="fla imports Triton")
    module = pytest.importorskip(MODULES[name], reason="needs fla, which the tests do not install")
    assert written(list(inspect.signature(getattr(module, name)).parameters.values())) == SIGNATURES[name]


def test_every_argument_of_fla_is_explained():
    for operation, modules in STORED["modules"].items():
        functions = [name for names in modules.values() for name in names]
        parameters = {name for function in functions for name in inspect.signature(getattr(ops, function)).parameters}
        keywords = {name for function in functions for name in STORED["keywords"].get(function, ())}
        assert parameters - {"variant", "kwargs"} | keywords == set(STORED["arguments"][operation])
    assert set(MODULES) == set(SIGNATURES)
    assert set(STORED["keywords"]) == {name for name, signature in SIGNATURES.items() if signature.endswith("**kwargs")}


@pytest.mark.parametrize("name", STORED["keywords"])
def test_keywords_are_those_that_are_explained(name):
    """A message about an unknown keyword lists those that a function takes."""
    q = torch.ones(1, 2, 1, 16)
    with pytest.raises(ArgumentError) as caught:
        getattr(ops, name)(q, q, q, unknown=1)
    listed = str(caught.value).partition("Beside its named ones: ")[2].rstrip(".")
    assert set(listed.replace(" and ", ", ").split(", ")) == set(STORED["keywords"][name])


# The recurrence of HGRN


def hgrn_arguments(dtype: torch.dtype, state_dtype: torch.dtype, batch: int, length: int, states: int) -> dict[str, torch.Tensor]:
    """Return inputs as fla's tests make them: x times one minus the decay, with gradients, and an initial state."""
    generator = torch.Generator().manual_seed(42)
    x, logits = torch.randn(2, batch, length, 50, generator=generator)
    x, g = (1 - logits.sigmoid()) * x, F.logsigmoid(logits)
    made = {"x": x.to(dtype), "g": g.to(dtype), "initial_state": torch.randn(states, 50, generator=generator).to(state_dtype)}
    return {name: value.requires_grad_() for name, value in made.items()}


def hgrn_in_float64(x: torch.Tensor, g: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs and final states of the recurrence, step by step."""
    steps = []
    for t in range(x.shape[1]):
        state = g[:, t].exp() * state + x[:, t]
        steps.append(state)
    return torch.stack(steps, 1), state


def named_gradients(outputs: tuple[torch.Tensor, ...], leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients of a sum of all outputs, each weighed by fixed random numbers."""
    generator = torch.Generator().manual_seed(1)
    loss = torch.stack([(each * torch.randn(each.shape, generator=generator)).sum() for each in outputs]).sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def check_hgrn(function: Any, arguments: dict[str, torch.Tensor], bounds: list[int] | None, variant: str, bound: float) -> None:
    """Require outputs, final states and all gradients to agree with the recurrence in float64 within ``bound``."""
    packed = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds)}
    given = {name: value.detach().double().requires_grad_() for name, value in arguments.items()}
    x, g, state = given.values()
    if bounds is None:
        expected = hgrn_in_float64(x, g, state)
    else:
        parts = [
            hgrn_in_float64(x[:, start:end], g[:, start:end], state[n : n + 1]) if end > start else (x[:, :0], state[n : n + 1])
            for n, (start, end) in enumerate(itertools.pairwise(bounds))
        ]
        expected = torch.cat([o for o, _ in parts], 1), torch.cat([final for _, final in parts])
    found = function(**arguments, **packed, output_final_state=True, variant=variant)
    assert (found[0].dtype, found[1].dtype) == (arguments["x"].dtype, torch.float32)
    ours, theirs = named_gradients(found, arguments), named_gradients(expected, given)
    results = dict(zip(("o", "final_state"), found, strict=True)) | ours
    for name, value in (dict(zip(("o", "final_state"), expected, strict=True)) | theirs).items():
        assert_near({name: results[name].double()}, {name: value}, bound)


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "bound"),
    [
        (torch.float32, torch.float32, 2e-6),
        (torch.bfloat16, torch.bfloat16, 5e-3),
        (torch.bfloat16, torch.float32, 5e-3),
        (torch.float16, torch.float16, 1e-3),
    ],
)
@pytest.mark.parametrize("length", [1, 15, 63])
@each_hgrn
def test_hgrn_with_states_as_flas_tests_call_it(function, length, dtype, state_dtype, bound):
    check_hgrn(function, hgrn_arguments(dtype, state_dtype, 2, length, 2), None, "auto", bound)


@pytest.mark.parametrize("variant", pytorch_variants(GATED_SCAN))
def test_hgrn_of_packed_sequences(variant):
    check_hgrn(fused_recurrent_hgrn, hgrn_arguments(torch.float32, torch.float32, 1, 63, 4), [0, 17, 17, 62, 63], variant, 2e-6)


@pytest.mark.interpret
@pytest.mark.parametrize("bounds", [None, [0, 17, 17, 62, 70]], ids=["dense", "packed"])
@pytest.mark.parametrize("variant", thorough_but("fused", of=triton_variants(GATED_SCAN)))
def test_kernels_of_hgrn(variant, bounds):
    arguments = hgrn_arguments(torch.float32, torch.float32, 1, 70, 4 if bounds else 1)
    check_hgrn(fused_recurrent_hgrn, arguments, bounds, variant, 2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["auto", *triton_variants(GATED_SCAN)])
def test_hgrn_on_a_gpu(variant, dtype, device):
    """Compare the kernels with ``eager`` of the same dtype, forward and backward, in the bounds of fla's tests.

    Of the three calls of the variant, the second is recorded and the third replayed.
    """
    arguments = {name: value.detach().to(device) for name, value in hgrn_arguments(dtype, dtype, 2, 300, 2).items()}
    found = []
    for name in ("eager", variant, variant, variant):
        leaves = {key: value.clone().requires_grad_() for key, value in arguments.items()}
        o, final = chunk_hgrn(**leaves, output_final_state=True, variant=name)
        gradients = torch.autograd.grad(o.float().square().sum() + final.square().sum(), list(leaves.values()))
        found.append({"o": o, "final_state": final, **dict(zip(leaves, gradients, strict=True))})
    for each in found[1:]:
        assert_near(each, found[0], 5e-3)


@each_hgrn
def test_hgrn_without_states(function):
    arguments = arguments_of(GATED_SCAN, initial_state=False, final_state=False)
    x, g = arguments["v"], arguments["log_decay"]
    o, final = function(x, g)
    assert final is None
    assert torch.equal(o, gated_scan(x, g))
    assert torch.equal(o, function(x, g, None, None)[0])  # fla's layers pass None for no final state
    one = torch.full_like(x, 1.2784645427610738)  # SiLU of it is 1
    assert_near({"o": o}, {"o": gated_scan(x, g, one)}, 1e-6)


@each_hgrn
def test_positional_arguments_of_hgrn_have_flas_order(function):
    arguments = arguments_of(GATED_SCAN, initial_state=True)
    x, g, state = (arguments[name] for name in ("v", "log_decay", "initial_state"))
    o, final = function(x, g, state, True)  # noqa: FBT003
    expected = gated_scan(x, g, initial_state=state, output_final_state=True)
    assert_near({"o": o, "final_state": final}, dict(zip(("o", "final_state"), expected, strict=True)), 0)


@each_hgrn
def test_hgrn_under_autocast(function):
    arguments = arguments_of(GATED_SCAN, initial_state=True)
    x, g, state = (arguments[name] for name in ("v", "log_decay", "initial_state"))
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = function(x, g, state)
    assert o.dtype is torch.bfloat16
    assert torch.equal(o, function(x.bfloat16(), g, state)[0])


@each_hgrn
def test_errors_of_hgrn_name_flas_arguments(function, prose):
    x, g = -torch.ones(2, 2, 9, 6)
    for changes, error, message in (
        ({"x": x[0]}, ShapeError, r"^x has shape .*\[B, T, D\]"),
        ({"x": x.double()}, DTypeError, "^x"),
        ({"g": g[:, :8]}, ShapeError, r"^g has shape .*\[B, T, D\].* x "),
        ({"g": g.half()}, DTypeError, "^g"),
        ({"g": g.to("meta")}, DeviceError, "^g"),
        ({"g": -g}, ValueRangeError, r"^g holds 1; .*exp\(g\)"),
        ({"g": None}, ArgumentError, "^g is NoneType"),
        ({"initial_state": torch.ones(3, 6)}, ShapeError, r"^initial_state .*\[N, D\]"),
        ({"initial_state": torch.ones(2, 6).half()}, DTypeError, "^initial_state"),
        ({"output_final_state": 1}, ArgumentError, "^output_final_state"),
    ):
        with prose.raises(error, match=message):
            function(**{"x": x, "g": g} | changes)


def test_packed_hgrn_needs_one_batch_entry(prose):
    x, g = -torch.ones(2, 2, 9, 6)
    with prose.raises(PackingError, match="B = 1"):
        fused_recurrent_hgrn(x, g, cu_seqlens=torch.tensor([0, 9]))
    with pytest.raises(TypeError, match="cu_seqlens"):
        chunk_hgrn(x[:1], g[:1], cu_seqlens=torch.tensor([0, 9]))  # as fla's


# Gated linear attention


def test_one_decay_per_head_step_by_step():
    options = {"initial_state": True, "final_state": True, "scale": 0.3, "state_v_first": True}
    arguments = arguments_of(GLA, B=1, T=30, lengths=(3, 0, 27), decay_per="head", **options)
    found, expected = fused_recurrent_simple_gla(**arguments), gla(**arguments)
    assert_near(dict(enumerate(found)), dict(enumerate(expected)), 0)
    gamma = torch.tensor([-0.02, -3.0])
    arguments["g"] = gamma.expand(1, 30, 2)
    expected = gla(**arguments)
    arguments.pop("g")
    assert_near(dict(enumerate(fused_recurrent_simple_gla(g_gamma=gamma, **arguments))), dict(enumerate(expected)), 0)


def test_one_decay_per_head_in_reverse():
    arguments = arguments_of(GLA, T=30, decay_per="head", initial_state=True, final_state=True)
    flipped = {name: value.flip(1) if name in "qkvg" else value for name, value in arguments.items()}
    o, final = gla(**flipped)
    found = fused_recurrent_simple_gla(**arguments, reverse=True)
    assert_near(dict(enumerate(found)), {0: o.flip(1), 1: final}, 1e-6)


@pytest.mark.parametrize("name", ["chunk_simple_gla", "fused_recurrent_gla", "fused_recurrent_simple_gla"])
def test_initial_states_may_have_the_dtype_of_the_queries(name):
    """fla reads states of any dtype, but for ``chunk_gla``, which asks for float32 as ours does."""
    per = "channel" if name == "fused_recurrent_gla" else "head"
    arguments = arguments_of(GLA, dtype="bfloat16", T=20, decay_per=per, initial_state=True, final_state=True)
    state = arguments["initial_state"].bfloat16().requires_grad_()
    if name == "fused_recurrent_gla":
        arguments["gk"] = arguments.pop("g")
    function = getattr(ops, name)
    o, final = function(**arguments | {"initial_state": state})
    expected = function(**arguments | {"initial_state": state.detach().float()})
    assert_near({"o": o, "final_state": final}, dict(zip(("o", "final_state"), expected, strict=True)), 0)
    (gradient,) = torch.autograd.grad(final.sum(), [state])
    assert gradient.dtype is torch.bfloat16
    assert gradient.abs().sum() > 0


def test_states_of_other_dtypes_are_refused(prose):
    arguments = arguments_of(GLA, dtype="bfloat16", initial_state=True)
    with prose.raises(DTypeError, match="initial_state"):
        ops.chunk_gla(**arguments | {"initial_state": arguments["initial_state"].bfloat16()})
    arguments["gk"] = arguments.pop("g")
    with prose.raises(DTypeError, match="initial_state"):
        fused_recurrent_gla(**arguments | {"initial_state": arguments["initial_state"].half()})


@pytest.mark.parametrize("name", ["chunk_gla", "chunk_simple_gla", "fused_recurrent_gla", "fused_recurrent_simple_gla"])
def test_no_final_state_may_be_asked_for_by_none(name):
    """fla's layers pass on ``use_cache``, which may be None."""
    arguments = arguments_of(GLA)
    q, k, v, g = (arguments[each] for each in "qkvg")
    g = g[..., 0] if "simple" in name else g
    function = getattr(ops, name)
    gate = "gk" if name == "fused_recurrent_gla" else "g"
    o, final = function(q, k, v, **{gate: g}, output_final_state=None)
    assert final is None
    assert torch.equal(o, function(q, k, v, **{gate: g})[0])
