"""Tests of the Triton kernels of ``rms_norm``: results, gradients, saved tensors, layouts, and calls that they refuse.

``assert_near`` bounds the norm of each error, relative to that of the expected values; ``results`` returns a variant's results
and gradients by name. ``made()`` makes float32 arguments with M = 9 rows of D = 40 channels, unless others are given.

``prose(text)`` compares a test's texts, in the order of its calls, with its entries in tests/snapshots/prose.txt. A test fails
if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``device`` is the first GPU, or the CPU. ``BOTH`` are the directions: forward, and forward with gradients.
``assert_one_call_correct`` checks the errors of one call, and that it writes all elements. ``assert_ok`` requires a verdict of
the gate to be right. ``differentiable`` returns the arguments that take gradients. ``CASES`` are the probes of ``rms_norm`` by
name. ``SHORT`` are the cases for Triton's interpreter. ``TENSORS`` names the tensor arguments. ``case_of`` returns a case by its
name. A test marked ``thorough`` does not run in ``make test``, and one marked ``interpret`` runs in Triton's interpreter, with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import library

from onelaunch.ops import rms_norm
from onelaunch.ops.rms_norm.autograd import run_forward
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
from tests.ops.rms_norm_cases import CASES, RMS_NORM, SHORT, TENSORS, case_of, made

# Checks of PyTorch's ``opcheck``: all, but with static instead of dynamic shapes
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")


@pytest.fixture
def small_device(monkeypatch):
    """Return a function that lets launches believe in a device with so many SMs, whose tiles hold few elements."""

    def believe(processors):
        from onelaunch.ops.rms_norm import launch

        monkeypatch.setattr(launch, "processors", lambda device: processors)
        monkeypatch.setattr(launch, "_FORWARD_ELEMENTS", 128)
        monkeypatch.setattr(launch, "_BACKWARD_BYTES", 512)
        return launch

    return believe


@pytest.mark.interpret
@pytest.mark.parametrize("name", SHORT)
def test_results_and_gradients_are_correct(name):
    assert_one_call_correct(RMS_NORM, case_of(name), "fused")


@pytest.mark.interpret
def test_kernels_pass_the_whole_gate():
    """Apply the whole verification gate (``judge``), not one call as in the other tests of kernels."""
    case = case_of("float32_residual")
    assert_ok(judge(RMS_NORM, case, variant="fused", directions=BOTH), RMS_NORM, case, "fused")


@pytest.mark.interpret
def test_bfloat16():
    """The interpreter truncates where a GPU rounds."""
    given = made(grad=True, dtype="bfloat16")
    assert_near(results(RMS_NORM, given, "fused"), results(RMS_NORM, given, "eager"), 1.5e-2)


@pytest.mark.interpret
@pytest.mark.parametrize("asking", [*((name,) for name in TENSORS), ("x", "weight"), ("weight", "residual")])
@pytest.mark.parametrize("residual", ["same", "float32"])
def test_gradients_of_a_subset_of_the_operands(asking, residual):
    given = made(dtype="float16", residual=residual)
    for name in asking:
        given[name].requires_grad_()
    found, expected = (results(RMS_NORM, given, name) for name in ("fused", "eager"))
    assert {f"grad {name}" for name in asking} == {name for name in found if name.startswith("grad")}
    assert_near(found, expected, 2e-3)


@pytest.mark.interpret
@pytest.mark.parametrize("result", [0, 1])
def test_gradients_through_one_result(result):
    given = made(grad=True)
    leaves = list(differentiable(given).values())
    found, expected = (
        torch.autograd.grad(rms_norm(**given, variant=name)[result].sin().sum(), leaves, allow_unused=True)
        for name in ("fused", "eager")
    )
    assert (found[1] is None) == (result == 1)  # the weight has no part in the sum
    for one, other in zip(found, expected, strict=True):
        assert one is other is None or torch.allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.interpret
def test_operands_and_gradients_of_any_strides():
    given = made(grad=True)
    leaves = list(differentiable(given).values())
    y, total = rms_norm(**given, variant="fused")
    dense = torch.randn(9, 40)
    expected = torch.autograd.grad((y, total), leaves, (dense, dense), retain_graph=True)
    wide = torch.cat([dense, dense], 1)[:, :40]
    for gradient in (dense.T.contiguous().T, wide):
        found = torch.autograd.grad((y, total), leaves, (gradient, gradient), retain_graph=True)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    for name in TENSORS:
        apart = torch.stack([given[name], given[name]], -1)[..., 0]
        assert all(map(torch.equal, rms_norm(**{**given, name: apart}, variant="fused"), (y, total)))
    packed = torch.cat([given["x"], given["residual"]], 1).detach()
    x, residual = packed.split(40, 1)
    assert all(map(torch.equal, rms_norm(x, given["weight"], residual, variant="fused"), (y, total)))


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("processors", "channels"),
    [
        *[(1, 40), (2, 40), (5, 40)],
        *[
            pytest.param(2, size, marks=pytest.mark.thorough, id=f"2-{name}")
            for name, size in (("long", 4100), ("longest", 8200))
        ],
    ],
)
def test_partial_sums_do_not_depend_on_the_number_of_ctas(processors, channels, small_device):
    """CTAs of the backward pass, of which a GPU with more SMs gets more, each sum a part of the weight's gradient.

    They take several tiles each here. Float32 rows of 4100 channels are long, and those of 8200 so long that a CTA's sum of
    several rows is in memory.
    """
    launch = small_device(processors)
    tile = launch.backward_tile(21, channels, 4, processors)
    assert launch.is_long(tile, 4) == (channels > 40)
    assert launch.backward_ctas(21, tile, 4, processors) * tile.BM < 21
    given = made(grad=True, M=21, D=channels)
    ours, again, theirs = (results(RMS_NORM, given, name) for name in ("fused", "fused", "eager"))
    assert_near(ours, theirs, 1e-5)
    assert all(torch.equal(ours[name], again[name]) for name in ours)


@pytest.mark.interpret
def test_nan_stays_in_its_row(small_device):
    """Rows of 40 channels fill part of a tile; in memory the next row follows, whose NaN must not be read as padding."""
    small_device(1)
    given = made(M=21)
    given["x"][3, 0] = math.nan
    y, total = rms_norm(**given, variant="fused")
    assert y[3].isnan().all()
    assert int(y.isnan().sum()) == 40
    assert int(total.isnan().sum()) == 1


@pytest.mark.interpret
def test_one_number_per_row_is_saved_for_the_backward_pass():
    given = made()
    arguments = tuple(given[name] for name in TENSORS)
    y, total, rstd = run_forward(*arguments, 1e-5, keep=True)
    assert torch.allclose(rstd, (total.square().mean(-1) + 1e-5).rsqrt())
    alone, _, nothing = run_forward(*arguments, 1e-5, keep=False)
    assert nothing.numel() == 0
    assert torch.equal(alone, y)


@pytest.mark.parametrize("rows", [1, 16, 300, 8192, 32768])
@pytest.mark.parametrize("channels", [1, 100, 1024, 4096, 5120, 16384])
def test_tiles_hold_whole_rows_and_occupy_the_device(rows, channels):
    pytest.importorskip("triton", reason="launch.py imports Triton's kernels")
    from onelaunch.ops.rms_norm import launch

    for itemsize in (2, 4):
        forward = [launch.forward_tile(rows, channels, itemsize, 132, residual=each) for each in (False, True)]
        for tile in (*forward, launch.backward_tile(rows, channels, itemsize, 132)):
            assert channels <= tile.BD
            assert tile.BM == 1 or rows >= 4 * 132 * tile.BM
            assert 32 * 32 * max(tile.warps, 4) >= tile.BD * tile.BM  # at most 32 elements per thread
            assert 1 <= launch.backward_ctas(rows, tile, itemsize, 132) <= min(rows, 4 * 132)


@pytest.mark.interpret
@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"residual": "none", "weight": "none"}, {"dtype": "float16", "residual": "float32"}])
def test_the_operators_keep_pytorchs_rules(options):
    given = made(grad=True, **options)
    arguments = [given.get(name) for name in (*TENSORS, "eps")]
    forward = torch.ops.onelaunch.rms_norm_forward.default
    library.opcheck(forward, (*arguments, True), test_utils=UTILITIES)
    x, weight, residual, eps = (each.detach() if isinstance(each, torch.Tensor) else each for each in arguments)
    y, total, rstd = forward(x, weight, residual, eps, keep=True)
    backward = torch.ops.onelaunch.rms_norm_backward.default
    dtotal, total = (None, x) if residual is None else (torch.randn_like(total), total)
    for wanted in ((True, False, weight is not None), (False, True, False)):
        library.opcheck(backward, (torch.randn_like(y), dtotal, total, weight, rstd, *wanted), test_utils=UTILITIES)


@pytest.mark.interpret
@pytest.mark.every
@pytest.mark.slow
def test_it_compiles_into_one_graph():
    torch.compiler.reset()
    function = torch.compile(lambda **given: rms_norm(**given, variant="fused"), fullgraph=True, backend="aot_eager")
    for options in ({}, {"residual": "none"}, {"M": 7}):
        given = made(grad=True, **options)
        leaves = list(differentiable(given).values())
        found, expected = (each(**given) for each in (function, lambda **given: rms_norm(**given, variant="fused")))
        assert torch.equal(found[0], expected[0])
        gradients = [torch.autograd.grad(each[0].sin().sum(), leaves) for each in (found, expected)]
        assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.interpret
@pytest.mark.parametrize("changes", [{"D": 16385}, {"M": 0}, {"M": 2**30 + 1}])
def test_unsupported_calls_are_refused_with_the_reason(changes, prose):
    query = RMS_NORM.query(RMS_NORM.case(**{"dtype": "float16", "M": 9, "D": 40, **changes}), "cpu")
    prose(RMS_NORM.get("fused").why_not(query))
    assert RMS_NORM.get("eager").why_not(query) is None


def test_every_variant_with_portable_kernels_is_tested():
    assert triton_variants(RMS_NORM) == ["fused"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_kernels_on_a_gpu(name, device):
    case = case_of(name)
    assert_ok(judge(RMS_NORM, case, variant="fused", device=device, directions=BOTH), RMS_NORM, case, "fused")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "channels"), [(1, 4096), (16, 5120), (5000, 128), (3000, 1024), (1500, 4096), (700, 8192), (300, 16384)]
)
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"dtype": "float32"}, {"dtype": "bfloat16", "residual": "float32"}])
def test_rows_of_usual_sizes_on_a_gpu(rows, channels, options, device):
    case = RMS_NORM.case(**options, M=rows, D=channels)
    assert_ok(judge(RMS_NORM, case, variant="fused", device=device, directions=BOTH), RMS_NORM, case, "fused")


@pytest.mark.gpu
def test_a_captured_step_follows_its_inputs(device):
    def on_device(seed, grad):
        given = made(seed=seed, dtype="float16", M=600, D=256)
        moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
        return {name: value.requires_grad_(grad) if name in TENSORS else value for name, value in moved.items()}

    assert_captured_step_follows_its_inputs(RMS_NORM, "fused", on_device, device)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"residual": "none"}])
def test_peers_compute_the_same_on_a_gpu(options, device):
    """The libraries are called with the right arguments: their results and gradients are near ours."""
    case = RMS_NORM.case("float16", M=64, D=512, **options)
    arguments = RMS_NORM.make_inputs(case, device, 0).arguments
    for value in arguments.values():
        if isinstance(value, torch.Tensor):
            value.requires_grad_()
    expected = results(RMS_NORM, arguments, "fused")
    able = [name for name in ("fla", "liger") if RMS_NORM.get(name).why_not(RMS_NORM.bind(**arguments).query()) is None]
    if not able:
        pytest.skip("neither fla nor liger_kernel is installed")
    for name in able:
        assert_near(results(RMS_NORM, arguments, name), expected, 5e-3)
