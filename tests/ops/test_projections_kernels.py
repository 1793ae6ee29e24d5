"""Tests of the Triton kernels of ``projections``: results, gradients, saved tensors, layouts, and calls that they refuse.

``assert_near`` bounds the norm of each error, relative to that of the expected values; ``results`` returns a variant's results
and gradients by name. ``of_every_kind()`` makes arguments with x ``[2, 5, 12]`` and the segments ``EVERY``: q, k, gate, decay
and gk, of the widths 20, 15, 14, 3 and 18.

``prose(text)`` compares a test's texts, in the order of its calls, with its entries in tests/snapshots/prose.txt. A test fails
if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``device`` is the first GPU, or the CPU. ``BOTH`` are the directions: forward, and forward with gradients. ``triton_variants`` are
the variants with kernels of our own for any GPU. ``assert_one_call_correct`` checks the errors of one call, and that it writes
all elements. ``assert_ok`` requires a verdict of the gate to be right. ``check_packing`` requires packed segments to equal a call
for each. ``CASES`` are the probes of ``projections`` and longer cases, by name. ``SHORT`` are the cases for Triton's interpreter.
``SMALL`` is the small case's sizes. ``case_of`` returns a case by its name. A test marked ``thorough`` does not run in
``make test``, and one marked ``interpret`` runs in Triton's interpreter, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import library
from torch.fx.experimental.proxy_tensor import make_fx

from onelaunch.ops import Segment, gla, projections
from onelaunch.ops.projections import autograd
from onelaunch.ops.projections.layout import layout_of
from tests.ops.cases import BOTH, assert_near, assert_ok, assert_one_call_correct, judge, results, triton_variants
from tests.ops.projections_cases import CASES, EVERY, PROJECTIONS, SHORT, SMALL, case_of, of_every_kind
from tests.ops.test_projections import check_packing, segments

OWN = ["wide_activated", "epilogue"]
"""Variants with portable kernels of our own.

"wide_activated" computes the activations of PyTorch's matrix product, "epilogue" also the product.
"""

REFUSED = {("epilogue", "long_heads"): "normalizes heads of at most 256 channels, not 512"}
"""Cases that a variant refuses, with the reason."""


def each_own_at(cases: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize ``variant`` and ``name``, without pairs that are refused."""
    pairs = [pair for pair in itertools.product(OWN, cases) if pair not in REFUSED]
    return pytest.mark.parametrize(("variant", "name"), pairs)


each_own = pytest.mark.parametrize("variant", OWN)
LEAVES = ("x", "weight", "bias")
# Checks of PyTorch's ``opcheck``: all, but with static instead of dynamic shapes
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")


@pytest.mark.interpret
@each_own_at(SHORT)
def test_results_and_gradients_are_correct(variant, name):
    assert_one_call_correct(PROJECTIONS, case_of(name), variant)
    assert_one_call_correct(PROJECTIONS, case_of(name), variant, "forward")


@pytest.mark.interpret
def test_bfloat16():
    """The interpreter truncates where a GPU rounds, which doubles the error.

    Its bfloat16 products are wrong, so no product of our kernels is used.
    """
    for case in (PROJECTIONS.case("bfloat16", **SMALL), PROJECTIONS.case("bfloat16", **SMALL, segments="gla")):
        given = PROJECTIONS.make_inputs(case, torch.device("cpu"), 0).arguments
        for tensor in given.values():
            if isinstance(tensor, torch.Tensor):
                tensor.requires_grad_()
        assert_near(results(PROJECTIONS, given, "wide_activated"), results(PROJECTIONS, given, "unfused"), 1e-2)


@pytest.mark.interpret
@each_own
@pytest.mark.parametrize("chain", [pytest.param("normalized", marks=pytest.mark.thorough), "gla"])
def test_kernels_pass_the_whole_gate(variant, chain):
    """Apply the whole verification gate (``judge``) in the interpreter, where other tests of kernels check one call."""
    case = PROJECTIONS.case("float16", **{**SMALL, "T": 3}, segments=chain)
    assert_ok(judge(PROJECTIONS, case, variant=variant, directions=BOTH), PROJECTIONS, case, variant)


@pytest.mark.interpret
@each_own
@pytest.mark.parametrize("lead", [(4,), (2, 3), (2, 1, 3)])
def test_results_are_aligned_views_of_one_packed_result(variant, lead):
    for grad in (False, True):
        found = projections(**of_every_kind(lead=lead, grad=grad), variant=variant)
        layout = layout_of(EVERY)
        assert [each.shape for each in found] == [(*lead, *segment.shape) for segment in EVERY]
        assert len({each.untyped_storage().data_ptr() for each in found}) == 1
        for each, span in zip(found, layout.spans, strict=True):
            assert each.storage_offset() == span.column
            assert each.storage_offset() * each.itemsize % 16 == 0
            assert each.stride(-1) == 1
            assert each.stride(len(lead) - 1) == layout.pitch
            assert each.requires_grad == grad


@pytest.mark.interpret
@each_own
@pytest.mark.parametrize("asking", [("x",), ("weight",), ("bias",), ("x", "bias"), ("weight", "bias")])
def test_gradients_of_a_subset_of_the_operands(variant, asking):
    given = of_every_kind()
    given |= {name: given[name].requires_grad_() for name in asking}
    found, expected = (results(PROJECTIONS, given, name) for name in (variant, "unfused"))
    assert {f"grad {name}" for name in asking} == {name for name in found if name.startswith("grad")}
    assert_near(found, expected, 1e-5)


@pytest.mark.interpret
@each_own
@pytest.mark.parametrize("used", [[0], [1], [2], [3], [4], [0, 4], [1, 2, 3]])
def test_an_unused_result_gets_no_gradient(variant, used):
    given = of_every_kind(grad=True)
    leaves = [given[name] for name in LEAVES]
    gradients = []
    for chosen in (variant, "unfused"):
        outputs = projections(**given, variant=chosen)
        taken = [outputs[index] for index in used]
        weights = [torch.cos(torch.arange(each.numel()) + 0.0).view(each.shape) for each in taken]
        gradients.append(torch.autograd.grad(taken, leaves, weights, allow_unused=True))
    for ours, theirs, leaf in zip(*gradients, leaves, strict=True):
        zeros = torch.zeros_like(leaf)
        assert torch.allclose(zeros if ours is None else ours, zeros if theirs is None else theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.interpret
@each_own
def test_gradients_of_any_strides(variant):
    given = of_every_kind(grad=True)
    leaves = [given[name] for name in LEAVES]
    outputs = projections(**given, variant=variant)
    dense = [torch.randn(each.shape) for each in outputs]
    turned = [each.transpose(0, 1).contiguous().transpose(0, 1) for each in dense]
    inner = [each.mT.contiguous().mT for each in dense]
    apart = [torch.stack([each, each], -1)[..., 0] for each in dense]
    expected = torch.autograd.grad(outputs, leaves, dense, retain_graph=True)
    for given_back in (turned, inner, apart):
        found = torch.autograd.grad(outputs, leaves, given_back, retain_graph=True)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    ones = [torch.ones(()).expand(each.shape) for each in outputs]
    found = torch.autograd.grad(outputs, leaves, ones, retain_graph=True)
    expected = torch.autograd.grad(outputs, leaves, [each.contiguous() for each in ones])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.interpret
@each_own
def test_operands_of_any_strides(variant):
    given = of_every_kind()
    expected = projections(**given, variant=variant)
    spread = torch.zeros(47, 2)
    spread[:, 1] = given["bias"]
    changes = {"x": given["x"].transpose(0, 1).contiguous().transpose(0, 1), "weight": given["weight"].T.contiguous().T}
    for name, value in {**changes, "bias": spread[:, 1]}.items():
        for one, other in zip(projections(**{**given, name: value}, variant=variant), expected, strict=True):
            assert torch.allclose(one, other, atol=1e-6), name


@pytest.mark.interpret
@each_own
def test_extreme_values(variant):
    """Cover exponentials that overflow or vanish, and a head of zeros."""
    z = torch.tensor([-1e4, -200.0, -90.0, -20.0, -1e-3, 0.0, 1e-3, 5.0, 20.0, 90.0, 200.0, 1e4])
    kinds = tuple(Segment(name, 12, 1, name) for name in ("silu", "sigmoid", "logsigmoid"))
    x = torch.ones(1, 1)
    found, expected = {}, {}
    for chosen, answer in ((variant, found), ("unfused", expected)):
        weight = z.repeat(3)[:, None].clone().requires_grad_()
        outputs = projections(x, weight, kinds, variant=chosen)
        answer |= dict(zip(("silu", "sigmoid", "logsigmoid"), (each.detach() for each in outputs), strict=True))
        (answer["gradient"],) = torch.autograd.grad(sum(each.sum() for each in outputs), weight)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-5, atol=5e-7), name
    # tolerance: bits that an exponential loses when added to 1
    for name, at in (("logsigmoid", (0, slice(7, 9))), ("gradient", (slice(31, 33), 0))):
        assert torch.allclose(found[name][at] / expected[name][at], torch.ones(2), rtol=1e-4), name
    (q,) = projections(torch.zeros(2, 3), torch.randn(8, 3), (Segment("q", 2, 4, "l2norm"),), variant=variant)
    assert not q.any()


@pytest.mark.interpret
@each_own
def test_nan_stays_in_its_head(variant):
    given = of_every_kind(lead=(3,))
    given["weight"][3, 0] = float("nan")  # channel of the first head of q
    q, *others = projections(**given, variant=variant)
    assert q[:, 0].isnan().all()
    assert not q[:, 1].isnan().any()
    assert not any(each.isnan().any() for each in others)


@pytest.mark.interpret
@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(st.lists(segments, min_size=1, max_size=5))
def test_a_packed_call_equals_calls_of_its_segments(kinds):
    check_packing(kinds, "wide_activated")


@pytest.mark.interpret
def test_gradients_of_z_have_zeros_behind_them():
    """A GPU multiplies all columns of dz, whose number is a multiple of 8, and gets the gradients of the first N alone."""
    given, layout = of_every_kind(), layout_of(EVERY)
    assert layout.gradient_pitch > layout.rows
    x, weight = given["x"], given["weight"]
    y, rstd, kept = autograd.run_forward(x, weight, given["bias"], layout.code, 1e-6, keep=True, variant="wide_activated")
    dys = [torch.randn(*x.shape[:-1], *segment.shape) for segment in EVERY]
    dz, sums = autograd.run_backward(dys, y, rstd, kept, None, None, layout.code, [True] * 3)
    biased = [span for span in layout.spans if span.segment.bias]
    columns = torch.cat([dz[:, span.row : span.row + span.segment.width] for span in biased], 1)
    torch.testing.assert_close(sums, columns.sum(0))
    assert not dz[:, layout.rows :].any()
    padded = autograd._products(dz, x, weight, wants_x=True, wants_weight=True)
    plain = autograd._products(dz[:, : layout.rows], x, weight, wants_x=True, wants_weight=True)
    for one, other, like in zip(padded, plain, (x, weight), strict=True):
        assert one.shape == like.shape
        torch.testing.assert_close(one, other)


@pytest.mark.interpret
def test_the_backward_pass_saves_what_inverts_the_activations():
    """The forward pass keeps 1 / norm of q's heads, and the input of SiLU. Other activations are inverted from their results."""
    from onelaunch.ops.projections import launch

    layout, z = layout_of(EVERY), torch.randn(5, 70)
    bias = torch.randn(47)
    y, rstd, kept = launch.activate(z, bias, layout, 1e-6, keep=True)
    assert torch.allclose(rstd, (z[:, :20].view(5, 2, 10).square().sum(-1) + 1e-6).rsqrt())
    assert torch.allclose(kept[:, :14], z[:, 35:49] + bias[15:29])
    alone, *nothing = launch.activate(z, bias, layout, 1e-6, keep=False)
    assert nothing == [None, None]
    for one, other in zip(layout.cut(y), layout.cut(alone), strict=True):
        assert torch.equal(one, other)


@pytest.mark.interpret
@each_own
def test_gla_accepts_the_results(variant):
    given = PROJECTIONS.make_inputs(PROJECTIONS.case("float32", **{**SMALL, "K": 16, "V": 16}), torch.device("cpu"), 0).arguments
    given |= {name: given[name].requires_grad_() for name in ("x", "weight")}
    gradients = []
    for chosen in (variant, "unfused"):
        q, k, v, gate, decay = projections(**given, variant=chosen)
        o, _ = gla(q, k, v, torch.log(decay), variant="chunked")
        gradients.append(torch.autograd.grad((o * gate).sum(), [given["x"], given["weight"]]))
    assert_near(dict(enumerate(gradients[0])), dict(enumerate(gradients[1])), 1e-5)


@pytest.mark.interpret
@each_own
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.thorough
def test_the_operators_pass_opcheck(variant, keep):
    """The layouts leave no gaps between segments: memory that nobody writes would differ from call to call."""
    kinds = tuple(Segment(each.name, 4 * each.heads, 2 * each.head_size, each.activation, each.normalizer) for each in EVERY)
    x, weight = torch.randn(2, 5, 12, requires_grad=keep), torch.randn(sum(each.width for each in kinds), 12, requires_grad=keep)
    code = layout_of(kinds).code
    forward = torch.ops.onelaunch.projections_forward.default
    library.opcheck(forward, (x, weight, None, code, 1e-6, keep, variant), test_utils=UTILITIES)
    if not keep:
        return
    y, rstd, kept = forward(x.detach(), weight.detach(), None, code, 1e-6, keep, variant)
    dys = [torch.randn(2, 5, *segment.shape) for segment in kinds]
    dys[2] = None
    backward = torch.ops.onelaunch.projections_backward.default
    saved = (dys, y, rstd, kept)
    library.opcheck(backward, (*saved, None, None, code, [True, True, False]), test_utils=UTILITIES)
    for wants in ([True, True, True], [False, True, False]):
        library.opcheck(backward, (*saved, x.detach(), weight.detach(), code, wants), test_utils=UTILITIES)


@pytest.mark.interpret
@each_own
def test_one_graph_supports_other_lengths(variant):
    layout = layout_of(EVERY)
    rest = (layout.code, 1e-6, True, variant)

    def forward(x, weight, bias):
        return torch.ops.onelaunch.projections_forward(x, weight, bias, *rest)

    weight, bias = torch.randn(layout.rows, 12), torch.randn(layout.biases)
    traced = make_fx(forward, tracing_mode="symbolic")(torch.randn(2, 5, 12), weight, bias)
    x = torch.randn(2, 9, 12)
    found, expected = traced(x, weight, bias), forward(x, weight, bias)
    for one, other in zip(layout.cut(found[0]), layout.cut(expected[0]), strict=True):
        assert torch.equal(one, other)
    assert [each.shape for each in found] == [each.shape for each in expected]


@pytest.mark.parametrize("variant", [*OWN, "epilogue_persistent", "cluster", "cluster_weight"])
@pytest.mark.parametrize("keep", [False, True])
def test_results_on_the_meta_device_have_their_shapes(variant, keep):
    layout = layout_of(EVERY)
    x, weight = (torch.empty(*shape, 16, dtype=torch.float16, device="meta") for shape in ((2, 5), (layout.rows,)))
    bias = torch.empty(layout.biases, dtype=torch.float16, device="meta")
    y, rstd, kept = torch.ops.onelaunch.projections_forward(x, weight, bias, layout.code, 1e-6, keep, variant)
    assert (y.shape, y.dtype, y.device.type) == ((2, 5, layout.pitch), torch.float16, "meta")
    assert (rstd.shape, rstd.dtype) == ((10, layout.norms) if keep else (0,), torch.float32)
    assert kept.shape == ((10, layout.kept) if keep else (0,))


@pytest.mark.interpret
@pytest.mark.slow
@each_own
@pytest.mark.thorough
def test_it_compiles_into_one_graph(variant):
    torch.compiler.reset()
    function = torch.compile(lambda **given: projections(**given, variant=variant), fullgraph=True, backend="aot_eager")
    for lead in ((2, 5), (2, 7), (3,)):
        given = of_every_kind(lead=lead, grad=True)
        leaves = [given[name] for name in LEAVES]
        answers = [each(**given) for each in (function, lambda **given: projections(**given, variant=variant))]
        assert all(torch.equal(one, other) for one, other in zip(*answers, strict=True))
        # The first result is left unused.
        gradients = [torch.autograd.grad(sum(each.square().sum() for each in answer[1:]), leaves) for answer in answers]
        assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.interpret
@each_own
def test_autocast(variant):
    given = of_every_kind(grad=True)
    with torch.autocast("cpu", torch.float16):
        found = projections(**given, variant=variant)
        assert all(each.dtype == torch.float16 for each in found)
    low = {name: value.detach().half() if name != "segments" else value for name, value in given.items()}
    assert all(torch.equal(one, other) for one, other in zip(found, projections(**low, variant=variant), strict=True))


@pytest.mark.gpu
@each_own_at(CASES)
def test_kernels_on_a_gpu(variant, name, device):
    case = case_of(name)
    assert_ok(judge(PROJECTIONS, case, variant=variant, device=device, directions=BOTH), PROJECTIONS, case, variant)


@pytest.mark.interpret
@pytest.mark.parametrize(
    "changes",
    [
        {"segments": "2x513:l2norm"},
        {"T": 0},
        {"segments": f"1x{2**30}"},
        {"B": 2**30, "T": 2**12},
    ],
)
def test_unsupported_calls_are_refused_with_the_reason(changes, prose):
    case = PROJECTIONS.case("float16", **{**SMALL, **changes})
    prose(PROJECTIONS.get("wide_activated").why_not(PROJECTIONS.query(case, "cpu")))
    assert PROJECTIONS.get("unfused").why_not(PROJECTIONS.query(case, "cpu")) is None


@pytest.mark.interpret
@pytest.mark.parametrize(("variant", "name"), REFUSED)
def test_untested_combinations_are_refused(variant, name):
    query = PROJECTIONS.query(case_of(name), "cpu")
    assert PROJECTIONS.get(variant).why_not(query) == REFUSED[variant, name]


def test_without_a_gpu_and_without_an_interpreter_pytorch_computes():
    reason = PROJECTIONS.get("wide_activated").why_not(PROJECTIONS.query(case_of("normalized"), "cpu"))
    assert reason is not None


def test_every_variant_with_portable_kernels_is_tested():
    assert triton_variants(PROJECTIONS) == OWN
