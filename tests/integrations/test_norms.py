"""Tests of the norms of fla that ``accelerate`` replaces, with stand-ins, since fla's kernels need a GPU."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

from onelaunch import accelerate, dispatch
from onelaunch.dispatch import choice, measured
from onelaunch.integrations.norms import FlaNorm
from onelaunch.ops import rms_norm
from onelaunch.workbench.study.read import load_study
from tests.devices import HOPPERS, forget, pretend
from tests.integrations.standins import GatedLinearAttention, GatedMLP, RMSNorm

pytestmark = pytest.mark.usefixtures("fla")


@pytest.fixture
def faster(monkeypatch):
    """Let measured times say of every call that ours is faster; return the decided calls."""
    seen = []
    monkeypatch.setattr(FlaNorm, "decisions", FlaNorm.decisions._replace(era=None))  # what was decided before is forgotten
    monkeypatch.setattr(dispatch, "why_not_faster", lambda *key: seen.append(key))
    return seen


def calls(dtype=torch.float32):
    """Return arguments of the forward in every form."""
    x, residual = torch.randn(2, 2, 5, 32).to(dtype)
    for added in (None, residual, residual.float()):
        for prenorm in (False, True):
            for wide in (False, True):
                yield x, {"residual": added, "prenorm": prenorm, "residual_in_fp32": wide}


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_those_of_fla(affine, dtype, faster):
    norm = RMSNorm(elementwise_affine=affine).to(dtype)
    plain = copy.deepcopy(norm)
    report = accelerate(norm)
    assert [(each.operation, each.layout) for each in report.replaced] == [("rms_norm", "")]
    for x, options in calls(dtype):
        found, wanted = norm(x, **options), plain(x, **options)
        assert isinstance(found, tuple) == options["prenorm"]
        # Checks dtypes too. Sums over 32 channels in another order; in bfloat16 two roundings may then differ by one step, 2^-7.
        tolerance = 1e-6 if dtype is torch.float32 else 2**-7
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    assert norm.calls == 0
    assert not report.fallbacks
    assert {(query.operation, peer) for query, peer in faster} == {("rms_norm", "fla")}
    assert len(faster) == (2 if dtype is torch.float32 else 3)  # decided once for each residual


def test_gradients_and_parameters_stay(faster):
    norm, (x, residual) = RMSNorm(), torch.randn(2, 3, 32)
    names, parameters = [*dict(norm.named_parameters())], list(norm.parameters())

    def run():
        leaves = [x.detach().requires_grad_(), residual.detach().requires_grad_(), norm.weight]
        y, total = norm(*leaves[:2], prenorm=True)
        return torch.autograd.grad(y.sin().sum() + total.cos().sum(), leaves)

    before = run()
    with accelerate(norm):
        torch.testing.assert_close(run(), before)
        assert [*dict(norm.named_parameters())] == names
        assert all(map(torch.is_same_size, norm.parameters(), parameters))
    assert norm.calls == 1
    assert "forward" not in vars(norm)


def test_a_copy_computes_with_its_own_weight(faster):
    norm, x = RMSNorm(), torch.randn(3, 32)
    accelerate(norm)
    norm(x)  # remembers its decision, which no copy can hold
    other = copy.deepcopy(norm)
    with torch.no_grad():
        other.weight.zero_()
    assert not other(x).any()
    assert norm(x).any()
    assert other.calls == norm.calls == 0


def test_a_decision_holds_for_the_calls_that_it_was_made_for(monkeypatch):
    norm, (x, residual) = RMSNorm(), torch.randn(2, 3, 32)
    monkeypatch.setattr(FlaNorm, "decisions", FlaNorm.decisions._replace(era=None))
    monkeypatch.setattr(dispatch, "why_not_faster", lambda query, peer: "slow" if "residual" in query.flags else None)
    report = accelerate(norm)
    for added in (None, residual, residual, None, None, residual):
        norm(x, residual=added)
    assert report.fallbacks == {"slow": 3}
    monkeypatch.setattr(dispatch, "why_not_faster", lambda *key: None)
    dispatch.forget()  # as after a new table
    norm(x, residual=residual)
    assert report.fallbacks == {"slow": 3}


def test_fla_runs_what_was_not_measured(prose):
    norm, x = RMSNorm(), torch.randn(3, 32)
    report = accelerate(norm)
    for _ in range(2):
        norm(x)
    norm(x, residual=x.double())
    assert norm.calls == 3
    prose(str(report))


class Block(nn.Module):
    """Block of fla's ``GLAForCausalLM``, whose second norm adds the residual."""

    def __init__(self):
        super().__init__()
        self.attn_norm, self.attn = RMSNorm(), GatedLinearAttention(32)
        self.mlp_norm, self.mlp = RMSNorm(), GatedMLP()

    def forward(self, residual):
        x = self.attn(hidden_states=self.attn_norm(residual))[0]
        x, residual = self.mlp_norm(x, residual, prenorm=True)
        return residual + self.mlp(x)


@pytest.fixture
def queries(faster):
    """Return the dispatch keys of the norms of a model with float32 parameters, trained under autocast."""
    model = nn.Sequential(nn.Embedding(8, 32), Block(), Block(), RMSNorm())
    accelerate(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
    return {query.dtype: query for query, _ in faster}


def test_norms_under_autocast_read_float32_or_add_to_a_float32_residual(queries):
    """Embeddings and residuals are float32, and what products return bfloat16; two forms for the four norms of the model."""
    assert {query.dtype: (query.grad, query.flags) for query in queries.values()} == {
        torch.float32: (True, ("weight",)),
        torch.bfloat16: (True, ("weight", "residual", "float32_residual", "float32_weight")),
    }


@pytest.fixture
def adopt(tmp_path, monkeypatch, pytestconfig):
    """Return a function that writes made-up rows of groups of the study as the only table of a pretended H100.

    It returns the device's name. In each row of the study's training calls our variant takes half of fla's time.
    """
    monkeypatch.setattr(measured, "TABLES", tmp_path / "none")
    monkeypatch.setenv("ONELAUNCH_TABLES", str(tmp_path))
    study, device = load_study(pytestconfig.rootpath / "studies" / "rms-norm.toml"), HOPPERS["H100"]

    def write(*groups):
        rows = []
        for shape in study.at_scale("full"):
            if {*groups} & {*shape.groups}:
                query = rms_norm.query(study.case(shape), "cuda:0", grad=True)
                row = {"operation": "rms_norm", "direction": query.direction, "dtype": str(query.dtype).removeprefix("torch.")}
                row |= {"flags": query.flags, "sizes": dict(shape.sizes), "microseconds": {"fused": 1.0, "fla": 2.0}}
                rows.append(row)
        (tmp_path / f"{device.table}.json").write_text(json.dumps({"device": device.name, "source": [], "rows": rows}))
        return pretend(device, monkeypatch)

    yield write
    forget()


def test_norms_under_autocast_are_decided_by_the_rows_of_the_study(queries, adopt):
    """Rows of 16 bits alone, as the first run of the study gave, say nothing of norms that read float32."""
    pytest.importorskip("triton", reason="without Triton, the kernel refuses every call")

    def reasons(device):
        """Return why calls at the sizes of the models 30m and 350m are left to fla, by dtype."""
        return {
            dtype: {
                choice.why_not_faster(query._replace(device=device, sizes=sizes), "fla")
                for sizes in ((32768, 512), (16384, 1024))
            }
            for dtype, query in queries.items()
        }

    before = reasons(adopt("training", "alone", "float32"))
    assert before == {torch.float32: {"no similar call was measured"}, torch.bfloat16: {None}}
    assert reasons(adopt("autocast")) == {torch.float32: {None}, torch.bfloat16: {None}}


def test_a_compiled_call_stays_with_fla(faster):
    norm, x = RMSNorm(), torch.randn(3, 32)
    before = norm(x)
    accelerate(norm)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(norm, backend="eager")(x), before)
    assert not faster


def test_other_tensors_stay_with_fla(faster):
    class Own(torch.Tensor):
        pass

    norm, x = RMSNorm(), torch.randn(3, 32)
    report = accelerate(norm)
    norm(x, residual=x.as_subclass(Own))
    norm(x.double())
    assert report.fallbacks == {
        "the residual is a Own": 1,
        "the input or a weight is neither float16, bfloat16 nor float32": 1,
    }


@pytest.mark.parametrize("name", ["bias", "eps", "float64"])
def test_what_is_refused_has_a_reason(name, prose):
    norm = RMSNorm(bias=name == "bias", eps=-1.0 if name == "eps" else 1e-5)
    report = accelerate(nn.Sequential(norm.double() if name == "float64" else norm))
    assert not report.replaced
    prose(report.refused[0].reason)


def test_the_norm_of_a_replaced_layer_is_left_to_it(faster):
    layer = GatedLinearAttention(fuse_norm=False)
    weight = layer.g_norm.weight
    layer.g_norm = RMSNorm(layer.head_v_dim)
    layer.g_norm.weight = weight
    model = nn.Sequential(layer, RMSNorm(64))
    report = accelerate(model)
    assert [each.name for each in report.replaced] == ["0", "1"]
    assert [each.name for each in accelerate(model).already] == ["0", "1"]
    layer(torch.randn(1, 3, 64))
    assert not report.fallbacks
    assert layer.g_norm.calls == 0
