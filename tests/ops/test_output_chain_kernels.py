"""Tests of the Triton kernels of ``output_chain``: results, gradients, saved tensors, layouts, and calls that they refuse.

``assert_near`` bounds the norm of each error, relative to that of the expected values; ``results`` returns a variant's results
and gradients by name. ``made()`` makes float32 arguments with B = 2, T = 9, H = 3, V = 20, D = 40 and a bias, unless others are
given.

``prose(text)`` compares a test's texts, in the order of its calls, with its entries in tests/snapshots/prose.txt. A test fails
if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``device`` is the first GPU, or the CPU. ``BOTH`` are the directions: forward, and forward with gradients. ``triton_variants``
are the variants with kernels of our own for any GPU. ``assert_one_call_correct`` checks the errors of one call, and that it
writes all elements. ``assert_ok`` requires a verdict of the gate to be right. ``differentiable`` returns the arguments that
take gradients. ``flat`` reshapes the leading dimensions. ``packed_gate`` makes a gate by ``projections``. ``CASES`` are the
probes of ``output_chain`` and longer cases, by name. ``SHORT`` are the cases for Triton's interpreter. ``SMALL`` is the small
case's sizes. ``TENSORS`` names the tensor arguments in their order. ``case_of`` returns a case by its name. A test marked
``thorough`` does not run in ``make test``, and one marked ``interpret`` runs in Triton's interpreter, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import library

from onelaunch.ops import Segment, output_chain, projections
from onelaunch.ops.output_chain.autograd import run_forward
from tests.ops.cases import (
    BOTH,
    assert_captured_step_follows_its_inputs,
    assert_near,
    assert_ok,
    assert_one_call_correct,
    differentiable,
    judge,
    results,
    triton_variants,
)
from tests.ops.output_chain_cases import CASES, OUTPUT_CHAIN, SHORT, SMALL, TENSORS, case_of, flat, made, packed_gate

OWN = ["norm_gate", "prologue"]
"""Variants with portable kernels of our own.

"norm_gate" computes the operand a = norm(h) * silu(gate) of PyTorch's matrix product, "prologue" also the product.
"""

each_own = pytest.mark.parametrize("variant", OWN)
# Checks of PyTorch's ``opcheck``: all, but with static instead of dynamic shapes
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")


@pytest.mark.interpret
@each_own
@pytest.mark.parametrize("name", SHORT)
def test_results_and_gradients_are_correct(variant, name):
    assert_one_call_correct(OUTPUT_CHAIN, case_of(name), variant)
    assert_one_call_correct(OUTPUT_CHAIN, case_of(name), variant, "forward")


@pytest.mark.interpret
@pytest.mark.parametrize("values", [1, 3, 17, 333, 512])
def test_heads_of_any_size(values):
    case = OUTPUT_CHAIN.case("float32", **{**SMALL, "V": values, "T": 3}, eps=0.5)
    assert_one_call_correct(OUTPUT_CHAIN, case, "norm_gate")


@pytest.mark.interpret
@pytest.mark.parametrize("gate", ["silu", "activated", "none"])
def test_bfloat16(gate):
    """The interpreter truncates where a GPU rounds, so only a variant with PyTorch's products is tested."""
    given = made(grad=True, dtype="bfloat16", gate=gate)
    assert_near(results(OUTPUT_CHAIN, given, "norm_gate"), results(OUTPUT_CHAIN, given, "unfused"), 1.5e-2)


@pytest.mark.interpret
@each_own
@pytest.mark.parametrize("gate", ["silu", "activated"])
def test_kernels_pass_the_whole_gate(variant, gate):
    """Apply the whole verification gate (``judge``), not one call as in the other tests of kernels."""
    case = OUTPUT_CHAIN.case("float16", **{**SMALL, "T": 3}, gate=gate)
    assert_ok(judge(OUTPUT_CHAIN, case, variant=variant, directions=BOTH), OUTPUT_CHAIN, case, variant)


@pytest.mark.interpret
@each_own
@pytest.mark.parametrize("asking", [*((name,) for name in TENSORS), ("h", "w_out"), ("gate", "norm_weight")])
@pytest.mark.parametrize("activated", [False, True])
def test_gradients_of_a_subset_of_the_operands(variant, asking, activated):
    given = {**made(), "activated": activated}
    for name in asking:
        given[name].requires_grad_()
    found, expected = (results(OUTPUT_CHAIN, given, name) for name in (variant, "unfused"))
    assert {f"grad {name}" for name in asking} == {name for name in found if name.startswith("grad")}
    assert_near(found, expected, 1e-5)


@pytest.mark.interpret
@each_own
@pytest.mark.parametrize("lead", [(4,), (2, 3), (2, 1, 3)])
def test_leading_dimensions_are_kept(variant, lead):
    given = flat(made(T=math.prod(lead), B=1), lead)
    found, expected = (output_chain(**given, variant=name) for name in (variant, "unfused"))
    assert found.shape == (*lead, 40)
    assert_near({"out": found}, {"out": expected}, 1e-5)


@pytest.mark.interpret
@each_own
@pytest.mark.parametrize("activated", [False, True])
def test_a_gate_of_projections_is_read_in_place(variant, activated):
    """Rows of the gate are longer than those of h, and begin between other segments."""
    from onelaunch.ops.output_chain.launch import Operands

    gate = packed_gate(activated=activated, variant="wide_activated").requires_grad_()
    assert gate.stride() == (9 * 96, 96, 20, 1)
    given = {**made(), "activated": activated}
    found, expected = (results(OUTPUT_CHAIN, {**given, "gate": gate}, name) for name in (variant, "unfused"))
    assert_near(found, expected, 1e-5)
    dense = gate.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    again = results(OUTPUT_CHAIN, {**given, "gate": dense}, variant)
    assert all(torch.equal(found[name], again[name]) for name in found)

    rows = Operands.of(given["h"], gate, None, activated=activated)
    assert rows.gate.data_ptr() == gate.data_ptr()
    assert rows.gate.stride() == (96, 1)


@pytest.mark.interpret
@each_own
def test_gradients_reach_projections(variant):
    segments = (Segment("h", 3, 20), Segment("gate", 3, 20))
    x, weight = torch.randn(2, 9, 12), torch.randn(120, 12, requires_grad=True)
    rest = {name: made()[name] for name in ("norm_weight", "w_out", "bias")}
    gradients = []
    for one, other in ((variant, "wide_activated"), ("unfused", "unfused")):
        h, gate = projections(x, weight, segments, variant=other)
        gradients.append(torch.autograd.grad(output_chain(h, gate, **rest, variant=one).square().sum(), weight)[0])
    assert_near({"weight": gradients[0]}, {"weight": gradients[1]}, 1e-5)


@pytest.mark.interpret
@each_own
def test_operands_of_any_strides(variant):
    given = made()
    expected = output_chain(**given, variant=variant)
    changes = {name: torch.stack([given[name], given[name]], -1)[..., 0] for name in TENSORS}
    turned = {name: given[name].transpose(0, 1).contiguous().transpose(0, 1) for name in ("h", "gate", "w_out")}
    for name, value in (*changes.items(), *turned.items()):
        assert not value.is_contiguous()
        assert torch.allclose(output_chain(**{**given, name: value}, variant=variant), expected, atol=1e-6), name


@pytest.mark.interpret
@each_own
def test_gradients_of_any_strides(variant):
    given = made(grad=True)
    leaves = list(differentiable(given).values())
    out, dense = output_chain(**given, variant=variant), torch.randn(2, 9, 40)
    expected = torch.autograd.grad(out, leaves, dense, retain_graph=True)
    for dout in (dense.mT.contiguous().mT, dense.transpose(0, 1).contiguous().transpose(0, 1)):
        found = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert_near(dict(enumerate(found)), dict(enumerate(expected)), 1e-6)
    one = torch.ones(())
    found, expected = (
        torch.autograd.grad(out, leaves, each, retain_graph=True) for each in (one.expand(2, 9, 40), torch.ones(2, 9, 40))
    )
    assert_near(dict(enumerate(found)), dict(enumerate(expected)), 1e-6)


@pytest.mark.interpret
@each_own
def test_extreme_values(variant):
    """Cover gates whose exponentials overflow or vanish, heads of zeros, and heads whose squares overflow float16."""
    gate = torch.tensor([-1e4, -200.0, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4]).view(1, 1, 1, 8)
    given = {"gate": gate, "norm_weight": None, "w_out": torch.eye(8)}
    ours, theirs = (
        results(OUTPUT_CHAIN, {"h": torch.ones(1, 1, 1, 8), **given, "gate": gate.clone().requires_grad_()}, name)
        for name in (variant, "unfused")
    )
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-7) for name in theirs)
    assert not output_chain(h=torch.zeros(1, 1, 1, 8), **given, variant=variant).any()
    large = output_chain(torch.full((1, 2, 1, 4), 3e4).half(), None, None, torch.eye(4).half(), variant=variant)
    assert torch.equal(large, torch.ones_like(large))


@pytest.mark.interpret
@each_own
def test_nan_stays_in_its_row_or_column(variant):
    """Heads of 20 channels fill part of a tile; in memory the next head follows, whose NaN must not be read as padding."""
    given = made()
    given["h"][0, 3, 1, 0] = math.nan
    given["w_out"][7, 20] = math.nan  # channel of the second head
    out = output_chain(**given, variant=variant)
    assert out[0, 3].isnan().all()
    assert out[..., 7].isnan().all()
    assert int(out.isnan().sum()) == 40 + 18 - 1  # one row of 40 columns, one column of 18 rows


@pytest.mark.interpret
@each_own
@pytest.mark.parametrize("values", [20, 64])
def test_the_backward_pass_finds_one_number_per_head_and_the_operand_if_it_was_written(variant, values):
    given = made(V=values, T=35, D=150)
    arguments = {name: given[name] for name in (*TENSORS, "activated", "eps")}
    out, rstd, a = run_forward(**arguments, keep=True, keep_a=variant == "norm_gate", variant=variant)
    assert rstd.shape == (70, 3)
    assert torch.allclose(rstd, (given["h"].square().mean(-1) + 1e-5).rsqrt().view(70, 3))
    if variant == "norm_gate":
        assert torch.equal(torch.nn.functional.linear(a, given["w_out"], given["bias"]).view(out.shape), out)
    else:
        assert a.numel() == 0
    alone, *nothing = run_forward(**arguments, keep=False, keep_a=False, variant=variant)
    assert not any(each.numel() for each in nothing)
    assert torch.equal(alone, out)


@pytest.mark.interpret
@pytest.mark.parametrize("processors", [1, 2, 5, 1000])
def test_partial_sums_do_not_depend_on_the_number_of_ctas(processors, monkeypatch):
    """CTAs of the backward pass, of which a GPU with more SMs gets more, each sum a part of the norm weight's gradient.

    Tiles of 128 elements make many CTAs of a small case. The last one adds their sums in tiles of 4 rows of 32 channels.
    """
    from onelaunch.ops.output_chain import launch
    from onelaunch.ops.output_chain.kernels import norm_gate

    monkeypatch.setattr(norm_gate, "SUM_ELEMENTS", type(norm_gate.SUM_ELEMENTS)(128))

    monkeypatch.setattr(launch, "processors", lambda device: processors)
    monkeypatch.setattr(launch, "GRADIENT_ELEMENTS", 128)
    given = made(grad=True, T=21)
    ours, again, theirs = (results(OUTPUT_CHAIN, given, name) for name in ("norm_gate", "norm_gate", "unfused"))
    assert_near(ours, theirs, 1e-5)
    assert all(torch.equal(ours[name], again[name]) for name in ours)


@pytest.mark.interpret
@pytest.mark.parametrize("values", [20, 128])
def test_the_gradient_of_h_stays_orthogonal_to_h_when_it_is_rounded(values):
    """The norm makes them orthogonal, but for eps, and gradients of a recurrence's decays are sums of their inner products."""
    from onelaunch.ops.output_chain import launch

    given = made(dtype="float16", V=values, T=64)
    operands = launch.Operands.of(given["h"], given["gate"], given["norm_weight"], activated=False)
    rstd = launch.norm_gate(operands, 1e-5, keep=True)[1]
    da = torch.randn(operands.h.shape, generator=torch.Generator().manual_seed(1)).half()
    dh = launch.norm_gate_gradients(da, operands, rstd, want_a=False).dh

    h, gate, upper = (tensor.double().unflatten(-1, (-1, values)) for tensor in (operands.h, operands.gate, da))
    x, scaled = h * rstd.double()[..., None], upper * torch.nn.functional.silu(gate) * given["norm_weight"].double()
    exact = rstd.double()[..., None] * (scaled - x * (scaled * x).mean(-1, keepdim=True))
    rounded = exact.half().double()
    ours = dh.double().unflatten(-1, (-1, values))
    assert_near({"dh": ours}, {"dh": exact}, 1.25 * float((rounded - exact).norm() / exact.norm()))
    lost = [float((((given_ - exact) * x).sum(-1)).norm()) for given_ in (ours, rounded)]
    assert lost[0] < 0.5 * lost[1]


@pytest.mark.interpret
def test_a_gradient_of_h_that_leaves_float16_is_infinite_and_changes_no_other_row():
    from onelaunch.ops.output_chain import launch

    given = made(dtype="float16", T=4)
    operands = launch.Operands.of(given["h"], given["gate"], given["norm_weight"], activated=False)
    rstd = launch.norm_gate(operands, 1e-5, keep=True)[1]
    da = torch.ones_like(operands.h)
    usual = launch.norm_gate_gradients(da, operands, rstd, want_a=False).dh
    rstd[1, 0] = 1e6  # makes the gradient of this token's first head larger than float16 can hold
    dh = launch.norm_gate_gradients(da, operands, rstd, want_a=False).dh
    first = slice(0, operands.values)
    assert dh[1, first].isinf().any()
    assert not dh[1, first].isnan().any()
    dh[1, first] = usual[1, first]
    assert torch.equal(dh, usual)


# The launches of the backward pass, each with whether it recomputes the operand, by the tensors that take gradients
BACKWARD_LAUNCHES = {
    "norm_gate": {TENSORS: [False], ("h", "gate"): [False], ("w_out",): [], ("bias",): []},
    "prologue": {TENSORS: [True], ("h", "gate"): [False], ("w_out",): [True], ("bias",): []},
}


@pytest.mark.interpret
@pytest.mark.parametrize(("variant", "asking"), [(name, each) for name, found in BACKWARD_LAUNCHES.items() for each in found])
def test_the_backward_pass_recomputes_only_an_operand_that_was_not_written(variant, asking, monkeypatch):
    from onelaunch.ops.output_chain import launch

    calls, counted = [], launch.norm_gate_gradients
    monkeypatch.setattr(launch, "norm_gate_gradients", lambda *a, want_a: (calls.append(want_a), counted(*a, want_a=want_a))[1])
    given = made()
    for name in asking:
        given[name].requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (saved.append(tensor), tensor)[1], lambda tensor: tensor):
        out = output_chain(**given, variant=variant)
    operands = [tensor for tensor in saved if tensor is not None and tensor.shape == (18, 60)]
    assert len(operands) == (variant == "norm_gate" and "w_out" in asking)
    out.sum().backward()
    assert calls == BACKWARD_LAUNCHES[variant][asking]


@pytest.mark.interpret
@each_own
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("options", [{}, {"gate": "none", "norm_weight": "none", "bias": False}, {"norm_weight": "float32"}])
@pytest.mark.thorough
def test_the_operators_keep_pytorchs_rules(variant, keep, options):
    given = made(grad=keep, dtype="float16" if options.get("norm_weight") == "float32" else "float32", **options)
    arguments = [given.get(name) for name in (*TENSORS, "activated", "eps")]
    flags = (keep, keep and variant == "norm_gate", variant)
    forward = torch.ops.onelaunch.output_chain_forward.default
    library.opcheck(forward, (*arguments, *flags), test_utils=UTILITIES)
    if not keep:
        return
    detached = [each.detach() if isinstance(each, torch.Tensor) else each for each in arguments]
    _, rstd, _ = forward(*detached, *flags)
    h, gate, norm_weight = detached[:3]
    backward = torch.ops.onelaunch.output_chain_gradients.default
    da = torch.randn(18, 60).to(h.dtype)
    # with the gradient da and a recomputed; without a; and without da, if the output weight alone has a gradient
    for given_back, want_a in ((da, True), (da, False), (None, True)):
        library.opcheck(backward, (given_back, h, gate, norm_weight, rstd, False, want_a), test_utils=UTILITIES)


@pytest.mark.interpret
@pytest.mark.slow
@each_own
@pytest.mark.thorough
def test_it_compiles_into_one_graph(variant):
    torch.compiler.reset()
    function = torch.compile(lambda **given: output_chain(**given, variant=variant), fullgraph=True, backend="aot_eager")
    for options in ({}, {"T": 7}, {"gate": "none"}, {"gate": "activated", "bias": False}):
        given = made(grad=True, **options)
        leaves = list(differentiable(given).values())
        answers = [each(**given) for each in (function, lambda **given: output_chain(**given, variant=variant))]
        assert torch.equal(*answers)
        gradients = [torch.autograd.grad(answer.square().sum(), leaves) for answer in answers]
        assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.interpret
@each_own
def test_autocast(variant):
    given = made(grad=True)
    with torch.autocast("cpu", torch.float16):
        found = output_chain(**given, variant=variant)
    low = {name: value.detach().half() if name in TENSORS else value for name, value in given.items()}
    low["norm_weight"] = given["norm_weight"].detach()
    assert found.dtype == torch.float16
    assert torch.equal(found, output_chain(**low, variant=variant))
    found.float().sum().backward()
    assert all(given[name].grad.dtype == torch.float32 for name in TENSORS)


@pytest.mark.gpu
@each_own
@pytest.mark.parametrize("name", CASES)
def test_kernels_on_a_gpu(variant, name, device):
    case = case_of(name)
    assert_ok(judge(OUTPUT_CHAIN, case, variant=variant, device=device, directions=BOTH), OUTPUT_CHAIN, case, variant)


@pytest.mark.gpu
@each_own
@pytest.mark.parametrize(
    "sizes",
    [
        *({"V": values} for values in (64, 100, 128, 256)),
        {"V": 128, "B": 1, "T": 1},
        {"V": 128, "B": 16, "T": 1, "H": 16, "D": 2048, "norm_weight": "none"},
        {"V": 64, "B": 17, "T": 1, "gate": "activated", "bias": True},
        {"V": 256, "B": 33, "T": 1, "gate": "none"},
        {"V": 32, "B": 64, "T": 1, "H": 32, "D": 1024},
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_products_of_usual_sizes_on_a_gpu(variant, sizes, dtype, device):
    """Few rows in bfloat16 take a kernel of their own on Hopper."""
    case = OUTPUT_CHAIN.case(dtype, **{"B": 2, "T": 500, "H": 8, "D": 1000, **sizes})
    assert_ok(judge(OUTPUT_CHAIN, case, variant=variant, device=device, directions=BOTH), OUTPUT_CHAIN, case, variant)


@pytest.mark.gpu
@each_own
def test_a_captured_step_follows_its_inputs(variant, device):
    def on_device(seed, grad):
        given = made(seed=seed, dtype="float16", V=64)
        moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
        return {name: value.requires_grad_(grad) if name in TENSORS else value for name, value in moved.items()}

    assert_captured_step_follows_its_inputs(OUTPUT_CHAIN, variant, on_device, device)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("norm_gate", {"V": 513}),
        ("prologue", {"V": 257}),
        ("norm_gate", {"T": 0}),
        ("prologue", {"T": 0}),
        ("norm_gate", {"H": 2**23, "V": 128}),
        ("prologue", {"D": 2**30}),
        ("norm_gate", {"B": 2**24, "T": 2**12, "V": 512}),
        ("prologue", {"dtype": "bfloat16"}),
    ],
)
def test_unsupported_calls_are_refused_with_the_reason(variant, changes, prose):
    case = OUTPUT_CHAIN.case(**{"dtype": "float16", **SMALL, **changes})
    query = OUTPUT_CHAIN.query(case, "cpu")
    prose(OUTPUT_CHAIN.get(variant).why_not(query))
    assert OUTPUT_CHAIN.get("unfused").why_not(query) is None


def test_without_a_gpu_and_without_an_interpreter_pytorch_computes():
    for variant in OWN:
        assert OUTPUT_CHAIN.get(variant).why_not(OUTPUT_CHAIN.query(case_of("gated"), "cpu")) is not None


def test_every_variant_with_portable_kernels_is_tested():
    assert triton_variants(OUTPUT_CHAIN) == OWN


def test_example_calls_reach_the_backward_kernel_in_every_form():
    """An absent tensor is compiled as a constant. ``builds`` are the kernels that the variants' example calls launch.

    ``norm_gate`` has saved ``a`` and ``prologue`` recomputes it, unless no weight is trained; if only the output weight is,
    only ``a`` is recomputed.
    """
    pytest.importorskip("triton")
    variants = [OUTPUT_CHAIN.get(name) for name in ("norm_gate", "prologue")]
    builds = [build for variant in variants for build in variant.builds("sm_90a") if "gradients" in build.name]
    absent = [{name for name in ("a", "da", "gate", "norm_weight") if build.signature[name] == "constexpr"} for build in builds]
    for form in (set(), {"gate"}, {"a"}, {"a", "gate", "norm_weight"}, {"da"}):
        assert form in absent
