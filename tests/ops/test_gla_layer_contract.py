"""Tests of the arguments that ``gla_layer`` refuses, named as the caller knows them, and of its dispatch key, cost and peers.

The peers are the variants "fla" and "fla_fused_chunk": layers of the package flash-linear-attention, here replaced by doubles.

``assert_near`` bounds the norm of each error, relative to that of the expected values. ``made()`` makes float32 arguments with
B = 2, T = 9, D = 40, H = 2, K = 16 and V = 20, unless others are given.

``prose(text)`` compares a test's texts, in the order of its calls, with its entries in tests/snapshots/prose.txt. A test fails
if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.
``prose.raises`` does so with the message of an error, and otherwise is ``pytest.raises``.

``differentiable`` returns the arguments that take gradients. ``pretend`` installs a fake module with a double. ``CASES`` are
the probes of ``gla_layer``, by name. ``SMALL`` is the small case's sizes. ``TENSORS`` names the tensor arguments in their order.
``case_of`` returns a case by its name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from onelaunch import dispatch
from onelaunch.errors import ArgumentError, DeviceError, DTypeError, OneLaunchError, ShapeError, UnknownVariant
from onelaunch.operation import DIRECTIONS
from onelaunch.ops import gla, gla_layer
from onelaunch.ops.gla.variants import peers as recurrence_peers
from onelaunch.ops.gla_layer.modules import filter_size
from onelaunch.ops.gla_layer.variants import peers
from tests.ops.cases import assert_near, differentiable
from tests.ops.gla_layer_cases import CASES, GLA_LAYER, SMALL, TENSORS, case_of, made
from tests.ops.test_swiglu_peers import pretend
from tests.prose import Prose


@pytest.fixture
def refused(prose: Prose) -> Callable[..., None]:
    """Return a function that expects a call to raise an error, with the message recorded in tests/snapshots/prose.txt.

    It takes the class of the error, a regular expression that the message must contain (mostly the name of the argument), and
    keyword arguments that replace those of a valid call.
    """

    def call(error: Any, named: str, /, **changes: Any) -> None:
        with prose.raises(error, match=rf"(?<!\w){named}(?!\w)") as caught:
            gla_layer(**{**made(initial_state=True), **changes})
        assert isinstance(caught.value, OneLaunchError)
        assert not named.isidentifier() or named in getattr(caught.value, "argument", named)
        assert "\n" not in str(caught.value)

    return call


def test_wrong_shapes_are_named(refused):
    given = made(initial_state=True)
    x, packed, gk_weight, gk_bias, norm_weight, w_out = (given[name] for name in TENSORS)
    refused(ShapeError, "x", x=x[0])
    refused(
        ShapeError,
        "in_proj_weight",
        in_proj_weight=packed[1:],
    )
    refused(ShapeError, "gk_weight", gk_weight=gk_weight[1:])
    refused(ShapeError, "gk_weight", gk_weight=gk_weight[2:])
    refused(ShapeError, "gk_weight", gk_weight=gk_weight[:, :0])
    refused(ShapeError, "gk_bias", gk_bias=gk_bias[1:])
    refused(ShapeError, "norm_weight", norm_weight=norm_weight.repeat(2))
    refused(ShapeError, "w_out", w_out=w_out[:, 1:])
    refused(ShapeError, "w_out", w_out=w_out[1:])
    state = given["initial_state"]
    refused(ShapeError, "initial_state", initial_state=state.mT)


def test_wrong_dtypes_and_devices_are_named(refused):
    given = made(initial_state=True)
    for name in ("in_proj_weight", "gk_weight", "gk_bias", "w_out"):
        refused(DTypeError, name, **{name: given[name].half()})
    refused(DTypeError, "norm_weight", norm_weight=given["norm_weight"].half())
    refused(DTypeError, "initial_state", initial_state=given["initial_state"].half())
    for name in (*TENSORS[1:], "initial_state"):
        refused(DeviceError, name, **{name: given[name].to("meta")})
    refused(ArgumentError, "gk_bias", gk_bias=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 0}, "heads"),
        ({"heads": 2.0}, "heads"),
        ({"normalizer": 0}, "normalizer"),
        ({"normalizer": float("nan")}, "normalizer"),
        ({"eps": -1.0}, "eps"),
        ({"eps": True}, "eps"),
    ],
)
def test_wrong_numbers_are_named(changes, message, refused):
    refused(ArgumentError, message, **changes)


def test_a_wrong_variant_is_named(refused):
    refused(UnknownVariant, "'compose'", variant="compose")


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_case_and_its_call_have_the_same_dispatch_key(name, grad):
    arguments = made(grad=grad, **CASES[name])
    assert GLA_LAYER.query(case_of(name), "cpu", grad=grad) == GLA_LAYER.bind(**arguments).query()


def test_the_dispatcher_chooses_the_composed_variant():
    query = GLA_LAYER.query(case_of("small"), "cpu")
    assert dispatch.choose(query).name == "composed"
    assert GLA_LAYER.preference(query._replace(device="cuda:0"))[:2] == ["packed", "composed"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "rank"),
        ({"conv_size": 0}, "conv_size"),
        ({"decay_per": "step"}, "'step'"),
        ({"norm_weight": "none"}, "'none'"),
    ],
)
def test_an_impossible_case_is_refused(changes, message, prose):
    with prose.raises(ArgumentError, match=message):
        made(**changes)


def test_wrong_shapes_with_one_decay_per_head_are_named(prose):
    """The key channels of a head follow from the rows of the packed weight."""
    given = made(decay_per="head", conv_size=4, initial_state=False)
    packed, bias, filters = given["in_proj_weight"], given["gk_bias"], given["conv_weight"]
    for changes, error, message in (
        ({"in_proj_weight": packed[1:]}, ShapeError, "^in_proj_weight"),
        ({"in_proj_weight": packed[4:]}, ShapeError, "^in_proj_weight .* K from 16"),
        ({"in_proj_weight": packed[:, 1:]}, ShapeError, "^in_proj_weight"),
        ({"in_proj_weight": None}, ArgumentError, "^in_proj_weight"),
        ({"gk_bias": torch.zeros(32)}, ShapeError, "^gk_bias"),
        ({"gk_bias": bias.half()}, DTypeError, "^gk_bias"),
        ({"conv_weight": filters[1:]}, ShapeError, "^conv_weight"),
        ({"conv_weight": filters[:, None]}, ShapeError, "^conv_weight"),
        ({"conv_weight": filters[:, :0]}, ShapeError, "^conv_weight"),
        ({"conv_weight": filters.half()}, DTypeError, "^conv_weight"),
        ({"conv_weight": filters.to("meta")}, DeviceError, "^conv_weight"),
        ({"output_final_state": True}, ArgumentError, "^output_final_state"),
        ({"initial_state": torch.zeros(2, 2, 16, 20)}, ArgumentError, "^initial_state"),
    ):
        with prose.raises(error, match=message):
            gla_layer(**given | changes)


@pytest.mark.parametrize("options", [{"decay_per": "head"}, {"conv_size": 3}], ids=str)
def test_the_variant_with_a_backward_pass_of_its_own_leaves_other_layers_to_the_composed_one(options, prose):
    query = GLA_LAYER.query(GLA_LAYER.case("bfloat16", B=4, T=2048, D=1024, H=4, K=128, V=256, **options), "cuda:0", grad=True)
    for name in ("packed", "packed_states"):
        prose(GLA_LAYER.get(name).why_not(query))
    assert GLA_LAYER.get("composed").why_not(query) is None


# Cost


def test_minimal_bytes_and_flops():
    """Compute by hand at fla's default sizes: q and k of 1024 columns, v and gate of 2048, rank 16 of the decay."""
    case = GLA_LAYER.case("bfloat16", B=8, T=4096, D=2048, H=16, K=64, V=128)
    rows, columns = 8 * 4096, 2 * 1024 + 2 * 2048 + 16
    products = 2 * rows * (2048 * columns + 16 * 1024 + 2048 * 2048)
    recurrence = gla.cost(gla.case("bfloat16", B=8, T=4096, H=16, K=64, V=128)).flops
    assert GLA_LAYER.cost(case).flops == products + recurrence
    # bytes of x and of out each; and of the weights: packed, low-rank with bias, norm, out
    x, weights = 2 * rows * 2048, 2 * (columns * 2048 + 1024 * 17 + 128 + 2048 * 2048)
    assert GLA_LAYER.cost(case).bytes == 2 * x + weights
    # The backward pass reads x, dout and the weights, and writes the gradients of x and of the weights.
    assert GLA_LAYER.cost(case, None, "forward_backward").bytes == 5 * x + 3 * weights
    step = GLA_LAYER.case("bfloat16", B=1, T=1, D=2048, H=16, K=64, V=128, initial_state=True, final_state=True)
    assert GLA_LAYER.cost(step).bytes == 2 * 2 * 2048 + weights + 2 * 4 * 16 * 64 * 128


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", CASES)
def test_no_variant_moves_less_than_the_minimum(name, direction):
    case = case_of(name)
    least = GLA_LAYER.cost(case, None, direction)
    moved = {each: GLA_LAYER.cost(case, variant, direction) for each, variant in GLA_LAYER.variants.items()}
    assert all(cost.bytes > least.bytes and cost.flops >= least.flops for cost in moved.values())
    assert moved["composed"].bytes < min(moved["unfused"].bytes, moved["fla"].bytes)
    assert moved["fla"].launches is None


# The peers


class Norm(nn.Module):
    """Double of the gated norm in fla's layer."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size)), eps

    def forward(self, o: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(o, o.shape[-1:], self.weight, self.eps) * F.silu(gate)


class Layer(nn.Module):
    """Double of fla's layer, with its arguments, parameters and results, computed by functions of PyTorch and ours."""

    def __init__(
        self, hidden_size, expand_k, expand_v, num_heads, gate_logit_normalizer, norm_eps, use_short_conv, conv_size,
        gate_low_rank_dim=None,
    ) -> None:  # fmt: skip
        super().__init__()
        keys, values = round(hidden_size * expand_k), round(hidden_size * expand_v)
        self.convolved = use_short_conv
        self.heads, self.normalizer = num_heads, gate_logit_normalizer
        for name, width in {"q_proj": keys, "k_proj": keys, "v_proj": values, "g_proj": values}.items():
            self.add_module(name, nn.Linear(hidden_size, width, bias=False))
        if gate_low_rank_dim is None:
            self.gk_proj = nn.Linear(hidden_size, num_heads)
        else:
            self.gk_proj = nn.Sequential(
                nn.Linear(hidden_size, gate_low_rank_dim, bias=False), nn.Linear(gate_low_rank_dim, keys)
            )
        for name, width in {"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": values}.items() if use_short_conv else ():
            self.add_module(name, nn.Conv1d(width, width, conv_size, groups=width, padding=conv_size - 1, bias=False))
        self.g_norm_swish_gate = Norm(values // num_heads, norm_eps)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)

    def forward(self, x):
        gk = F.logsigmoid(self.gk_proj(x)) / self.normalizer
        q, k, v, gate = self.q_proj(x), self.k_proj(x), self.v_proj(x), self.g_proj(x)
        if self.convolved:
            filters = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
            q, k, v = (F.silu(f(each.mT)[..., : x.shape[1]].mT) for f, each in zip(filters, (q, k, v), strict=True))
        q, k, v, gate = (each.unflatten(-1, (self.heads, -1)) for each in (q, k, v, gate))
        if gk.shape[-1] == self.heads:
            recurrence = sys.modules["fla.layers.simple_gla"].chunk_simple_gla
            o, _ = recurrence(
                q=q, k=k, v=v, g=gk, initial_state=None, output_final_state=False, state_v_first=True, cu_seqlens=None
            )
        else:
            o, _ = gla(q, k, v, gk.unflatten(-1, (self.heads, -1)), variant="chunked")
        return self.o_proj(self.g_norm_swish_gate(o, gate).flatten(-2)), None, None


def recurrence_named(name, calls):
    """Return a double of a function of fla for one decay per head, which adds its name to a list."""

    def recurrence(q, k, v, g, initial_state, output_final_state, cu_seqlens, **more):
        assert (initial_state, output_final_state, cu_seqlens) == (None, False, None)
        assert more == ({"state_v_first": True} if name == "chunk_simple_gla" else {})  # the other one does not have it
        calls.append(name)
        return gla(q, k, v, g, variant="chunked")

    return recurrence


@pytest.fixture
def calls(monkeypatch):
    """Install doubles of fla's layers; return the names of its functions for one decay per head, in the order of calls."""
    found: list[str] = []
    usual, fused = (recurrence_named(name, found) for name in ("chunk_simple_gla", "fused_chunk_simple_gla"))
    pretend(monkeypatch, "fla.layers.gla", GatedLinearAttention=Layer)
    pretend(monkeypatch, "fla.layers.simple_gla", SimpleGatedLinearAttention=Layer, chunk_simple_gla=usual)
    pretend(monkeypatch, "fla.ops.simple_gla", fused_chunk_simple_gla=fused)
    pretend(monkeypatch, "fla.layers", simple_gla=sys.modules["fla.layers.simple_gla"])
    pretend(monkeypatch, "fla", layers=sys.modules["fla.layers"])
    return found


@pytest.mark.parametrize(
    ("variant", "options", "called"),
    [
        ("fla", {"rank": 5}, []),
        ("fla", {"conv_size": 3}, []),
        ("fla", {"decay_per": "head"}, ["chunk_simple_gla"]),
        ("fla_fused_chunk", {"decay_per": "head", "conv_size": 4}, ["fused_chunk_simple_gla"]),
    ],
    ids=str,
)
def test_flas_layers_run_with_the_weights_of_the_call(variant, options, called, calls):
    peers.layer_of.cache_clear()
    usual = sys.modules["fla.layers.simple_gla"].chunk_simple_gla
    for seed in (0, 1):  # the second call finds a cached layer, which must not hold the weights of the first
        given = made(grad=True, seed=seed, normalizer=3.0, eps=0.5, **options)
        given["w_out"] = nn.Parameter(given["w_out"].detach())
        leaves = list(differentiable(given).values())
        (found, state), (expected, _) = GLA_LAYER.get(variant)(GLA_LAYER.bind(**given)), gla_layer(**given, variant="stepwise")
        assert calls == called
        calls.clear()
        assert sys.modules["fla.layers.simple_gla"].chunk_simple_gla is usual
        assert state is None
        assert_near({"out": found}, {"out": expected}, 2e-6)
        ours, theirs = (torch.autograd.grad(each.square().sum(), leaves) for each in (found, expected))
        assert_near(dict(enumerate(ours)), dict(enumerate(theirs)), 2e-5)
    # The cached layer must hold no tensor of a call, parameters included.
    call = GLA_LAYER.bind(**given)
    kept = peers.layer_of(40, call.sizes, 0.5, filter_size(call))
    peers.layer_of.cache_clear()
    assert not any(isinstance(value, torch.Tensor) for module in kept.modules() for value in vars(module).values())


def test_the_reasons_why_flas_layer_cannot_run(monkeypatch, prose):
    found = {"fla", "fla.layers", "transformers"}
    # The predicates ask for packages by this function alone, so the test does not depend on what is installed.
    monkeypatch.setattr(peers, "package_installed", lambda package: package in found)
    monkeypatch.setattr(peers, "not_installed", lambda package: None)

    def reason(device: str = "cuda:0", **given: Any) -> str | None:
        return peers.fla.why_not(GLA_LAYER.query(GLA_LAYER.case("bfloat16", **{**SMALL, **given}), device, grad=True))

    assert reason() is None
    prose(reason("cpu"))
    prose(reason(T=0))
    prose(reason(initial_state=True))
    prose(reason(final_state=True))
    for missing in ("transformers", "fla.layers", "fla"):
        found.discard(missing)
        prose(reason())


def test_the_layer_with_a_decay_per_head_trains_by_another_function_on_hopper(monkeypatch, prose):
    monkeypatch.setattr(peers, "package_installed", lambda package: True)
    monkeypatch.setattr(peers, "not_installed", lambda package: None)
    monkeypatch.setattr(recurrence_peers, "is_hopper", lambda device: True)
    monkeypatch.setattr(recurrence_peers, "_triton_version", lambda: (3, 6, 0))

    def reason(variant: str, *, grad: bool, **given: Any) -> str | None:
        case = GLA_LAYER.case("bfloat16", **{**SMALL, **given})
        return GLA_LAYER.get(variant).why_not(GLA_LAYER.query(case, "cuda:0", grad=grad))

    per_head = {"decay_per": "head", "conv_size": 4}
    prose(reason("fla", grad=True, **per_head))
    prose(reason("fla_fused_chunk", grad=True))
    prose(reason("fla_fused_chunk", grad=False, **per_head))
    assert reason("fla", grad=False, **per_head) is None
    assert reason("fla", grad=True) is None
    assert reason("fla_fused_chunk", grad=True, **per_head) is None
    assert reason("fla_fused_chunk", grad=False, T=65, **per_head) is None
