"""Tests of the MLP as one autograd function, and of tensors that a backward pass computes again instead of saving them.

A test marked ``interpret`` runs in Triton's interpreter, with TRITON_INTERPRET=1. One marked ``thorough`` does not run in
``make test``.
"""

from __future__ import annotations

import pytest
import torch
from torch import library, nn
from torch.fx.experimental.proxy_tensor import make_fx

from onelaunch import dispatch
from onelaunch.dispatch import choice
from onelaunch.launch import recomputed
from onelaunch.ops import rms_norm, swiglu
from onelaunch.ops.swiglu import mlp as module
from onelaunch.ops.swiglu.mlp import mlp
from tests.ops.cases import assert_near

interpret = pytest.mark.interpret

ROWS, INNER, COLUMNS, OUT = 6, 32, 24, 20
NAMES = ("x", "w_gate", "w_up", "w_down", "bias")


@pytest.fixture
def kernels(monkeypatch):
    """Let the dispatcher choose the kernels of ours, which run in the interpreter."""
    choose = choice.choose
    own = {"swiglu": swiglu.variants["fused"], "rms_norm": rms_norm.variants["fused"]}
    dispatch.forget()
    monkeypatch.setattr(recomputed, "LEAST_BYTES", 1)
    for place in (choice, dispatch):
        monkeypatch.setattr(place, "choose", lambda query: own.get(query.operation) or choose(query))
    yield
    monkeypatch.undo()
    dispatch.forget()


def made(*, bias=False, stacked=False):
    """Return leaves by name, x of three dimensions."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (2, ROWS // 2, INNER), "w_gate": (COLUMNS, INNER), "w_up": (COLUMNS, INNER), "w_down": (OUT, COLUMNS)}
    shapes |= {"bias": (OUT,)} if bias else {}
    if stacked:
        shapes["w_gate"] = (2 * COLUMNS, INNER)
        del shapes["w_up"]
    scales = {"x": 1.0}
    leaves = {name: torch.randn(shape, generator=generator) * scales.get(name, 0.2) for name, shape in shapes.items()}
    return {name: each.requires_grad_() for name, each in leaves.items()}


def down_of(leaves):
    """Return a linear module whose parameters are leaves."""
    down = nn.Linear(COLUMNS, OUT, bias="bias" in leaves)
    down.weight = nn.Parameter(leaves["w_down"].detach())
    if "bias" in leaves:
        down.bias = nn.Parameter(leaves["bias"].detach())
    return down


def results(run, leaves, down, wanted):
    """Return the output of ``run`` and the gradients of the wanted leaves by name."""
    out = run(leaves["x"], leaves["w_gate"], leaves.get("w_up"), down)
    assert down.bias is not None or not out._is_view(), "FSDP hooks no views, and an addition in place would copy one"
    places = {**leaves, "w_down": down.weight, "bias": down.bias}
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    found = torch.autograd.grad((out * weights).sum(), [places[name] for name in wanted])
    return {"out": out, **dict(zip(wanted, found, strict=True))}


def saved_by(run):
    """Return the bytes of each storage that autograd saves during a call, by its address, parameters excluded."""
    saved = {}

    def pack(tensor):
        if not tensor.requires_grad or not tensor.is_leaf:
            saved[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run()
    assert kept is not None
    return {at: size for at, (size, _) in saved.items()}


@interpret
@pytest.mark.parametrize(("stacked", "bias"), [(True, False), (False, True)])
@pytest.mark.parametrize("wanted", [None, ("x",), ("w_down",)])
def test_results_are_those_of_the_parts(kernels, stacked, bias, wanted):
    leaves = made(stacked=stacked, bias=bias)
    down = down_of(leaves)
    found = results(mlp, leaves, down, wanted or [*leaves])
    expected = results(lambda x, gate, up, down: down(swiglu(x, gate, up, variant="eager")), leaves, down, wanted or [*leaves])
    assert_near(found, expected, 1e-6)


@interpret
def test_neither_the_rows_nor_h_are_saved(kernels):
    """Saved are the norm's sum, rstd, and both products, beside weights. The norm's weight is copied."""
    leaves = made(stacked=True)
    down = down_of(leaves)
    weight = torch.ones(INNER, requires_grad=True)

    def run():
        y, total = rms_norm(leaves["x"], weight, leaves["x"] + 1)
        return mlp(y, leaves["w_gate"], None, down), total

    for _ in range(3):  # run, recorded, replayed
        sizes = sorted(saved_by(run).values())
        assert sizes == sorted(4 * size for size in (ROWS, INNER, ROWS * INNER, 2 * ROWS * COLUMNS))


@interpret
def test_gradients_through_rows_that_are_computed_again(kernels):
    leaves = made(stacked=True)
    down, weight, residual = down_of(leaves), torch.rand(INNER).requires_grad_(), torch.randn(2, ROWS // 2, INNER)

    def gradients(run, variant):
        y, _ = rms_norm(leaves["x"], weight, residual, variant=variant)
        out = run(y, leaves["w_gate"], None, down)
        given = {"x": leaves["x"], "weight": weight, "w_gate": leaves["w_gate"], "w_down": down.weight}
        return dict(zip(given, torch.autograd.grad(out.square().sum(), list(given.values())), strict=True))

    expected = gradients(lambda x, gate, up, down: down(swiglu(x, gate, up, variant="eager")), "eager")
    assert_near(gradients(mlp, "fused"), expected, 1e-5)


@interpret
@pytest.mark.parametrize("low", [None, torch.float16])
@pytest.mark.parametrize("stacked", [False, True])
def test_the_third_call_is_replayed(kernels, monkeypatch, low, stacked):
    """Under autocast the casts and the launches are, and their results and gradients are those of the first call."""
    leaves = made(stacked=stacked)
    down = down_of(leaves)

    def run(x, gate, up, down):
        with torch.autocast("cpu", dtype=low, enabled=low is not None):
            return mlp(x, gate, up, down).float()

    first, _ = (results(run, leaves, down, [*leaves]) for _ in range(2))
    monkeypatch.setattr(module, "bind", None)  # calling it would be an error
    assert_near(results(run, leaves, down, [*leaves]), first, 0.0)


@interpret
@pytest.mark.thorough
def test_the_operators_pass_opcheck(kernels):
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    for leaves in (made(stacked=True), made(bias=True)):
        rows = leaves["x"].detach().flatten(0, 1).requires_grad_()
        arguments = (rows, *(leaves.get(name) for name in NAMES[1:]), "fused")
        library.opcheck(torch.ops.onelaunch.swiglu_mlp_forward.default, arguments, test_utils=utilities)
    given = (torch.randn(ROWS, COLUMNS), torch.randn(ROWS, 2 * COLUMNS))
    library.opcheck(torch.ops.onelaunch.swiglu_mlp_gradients.default, given, test_utils=utilities)


@pytest.mark.gpu
def test_an_mlp_on_a_gpu(device):
    """In bfloat16 both forms round products, h and gradients, in other places: 2e-2 is 5 roundings of 2^-8."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (2, 512, 512), "w_gate": (2 * 1408, 512), "w_down": (512, 1408)}
    leaves = {name: 0.05 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    leaves = {name: each.to(device, torch.bfloat16).requires_grad_() for name, each in leaves.items()}
    down = nn.Linear(1408, 512, bias=False)
    down.weight = nn.Parameter(leaves["w_down"].detach())
    names = ["x", "w_gate", "w_down"]
    expected = results(lambda x, gate, up, down: down(swiglu(x, gate, up, variant="eager")), leaves, down, names)
    for _ in range(3):  # run, recorded, replayed
        assert_near(results(mlp, leaves, down, names), expected, 2e-2)


# Without kernels


def test_a_module_that_does_more_than_a_product_is_called():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    leaves = made(stacked=True)
    down, scaled = down_of(leaves), Scaled(COLUMNS, OUT, bias=False)
    scaled.weight = down.weight
    plain = mlp(leaves["x"], leaves["w_gate"], None, down)
    assert torch.equal(mlp(leaves["x"], leaves["w_gate"], None, scaled), 2 * plain)
    down.register_forward_hook(lambda module, inputs, output: output + 1)
    assert torch.equal(mlp(leaves["x"], leaves["w_gate"], None, down), plain + 1)


def test_autocast_casts_all_operands():
    leaves = made(stacked=True, bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = mlp(leaves["x"], leaves["w_gate"], None, down_of(leaves))
    assert out.dtype is torch.bfloat16


def test_without_kernels_the_variant_that_the_dispatcher_chooses_runs():
    leaves = made(stacked=True)
    assert dispatch.choose(swiglu.bind(leaves["x"], leaves["w_gate"]).key).name not in module.launches
    down = down_of(leaves)
    found = results(mlp, leaves, down, ["x", "w_down"])
    assert_near(found, results(lambda x, gate, up, down: down(swiglu(x, gate, up)), leaves, down, ["x", "w_down"]), 1e-6)


def test_what_is_saved_in_place_of_a_tensor(monkeypatch):
    monkeypatch.setattr(recomputed, "LEAST_BYTES", 12 * 4)
    source = torch.randn(3, 4)
    rows = 2 * source
    recomputed.attach(rows, lambda source: 2 * source, (source,))
    for tensor in (rows, rows.flatten(), rows.view(4, 3)):
        again, saved = recomputed.instead_of(tensor)
        assert [each.data_ptr() for each in saved] == [source.data_ptr()]
        assert torch.equal(recomputed.once_more(again, saved), tensor)
    for tensor in (rows[:2], rows.T, rows.clone()):
        assert recomputed.instead_of(tensor) == (None, (tensor,))
    monkeypatch.setattr(recomputed, "LEAST_BYTES", 12 * 4 + 1)
    small = 2 * source
    recomputed.attach(small, lambda source: 2 * source, (source,))
    assert recomputed.instead_of(small) == (None, (small,))


@pytest.mark.parametrize("changed", ["rows", "source"])
def test_a_tensor_is_saved_itself_once_something_was_modified(changed, monkeypatch):
    monkeypatch.setattr(recomputed, "LEAST_BYTES", 1)
    given = {"source": torch.randn(3, 4), "rows": torch.empty(0)}
    given["rows"] = rows = 2 * given["source"]
    recomputed.attach(rows, lambda source: 2 * source, (given["source"],))
    assert recomputed.instead_of(rows)[0] is not None
    given[changed].add_(1)
    assert recomputed.instead_of(rows) == (None, (rows,))


@pytest.mark.parametrize("freed", [lambda scale: scale.untyped_storage().resize_(0), lambda scale: scale.mul_(2)])
def test_a_parameter_may_be_freed_or_updated_before_anything_is_saved(freed, monkeypatch):
    """FSDP frees a norm's weight after its forward pass, and nothing tells the module behind it."""
    monkeypatch.setattr(recomputed, "LEAST_BYTES", 1)
    source, scale = torch.randn(3, 4), torch.full((4,), 3.0)
    rows = source * scale
    recomputed.attach(rows, torch.mul, (source,), (scale,))
    freed(scale)
    again, saved = recomputed.instead_of(rows)
    assert again is not None
    assert torch.equal(recomputed.once_more(again, saved), rows)


def test_a_stored_tensor_has_no_recipe(monkeypatch, tmp_path):
    monkeypatch.setattr(recomputed, "LEAST_BYTES", 1)
    source = torch.randn(3, 4)
    rows = 2 * source
    recomputed.attach(rows, lambda source: 2 * source, (source,))
    torch.save(rows, tmp_path / "rows.pt")
    again = torch.load(tmp_path / "rows.pt", weights_only=True)
    assert torch.equal(again, rows)
    assert recomputed.instead_of(again) == (None, (again,))


def test_a_tracer_finds_no_recipe(monkeypatch):
    """It would record the launches of the backward pass."""
    monkeypatch.setattr(recomputed, "LEAST_BYTES", 1)
    saved = []

    def traced(source):
        rows = 2 * source
        recomputed.attach(rows, lambda source: 2 * source, (source,))
        saved.append(recomputed.instead_of(rows)[0])
        return rows

    make_fx(traced)(torch.randn(3, 4))
    assert saved == [None]
