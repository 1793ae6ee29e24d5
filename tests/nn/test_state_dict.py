"""Tests of state dicts with fla's names: loading, saving, missing and surplus keys, and packed parameters.

``make(name)`` returns a small layer, and its definition, which is not used here.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in tests/snapshots/prose.txt. A
test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is
gone.

``NAMES`` are the names of all small layers of the tests. ``D`` is the number of columns of x.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from onelaunch.nn import GatedLinearAttention, HGRN2Attention, HGRNAttention, SimpleGatedLinearAttention, SwiGLU
from tests.nn.layers import NAMES, D, make

H = 2
"""Number of heads."""


def linear(inputs, outputs, bias=False):
    return nn.Linear(inputs, outputs, bias=bias)


class SeparateNorm(nn.Module):
    """Module with the weight of a norm, and no computation."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))


class Separate(nn.Module):
    """Parameters as fla's layers register them, with one module per weight. Only its state dict is used.

    Args:
        kind: "gla" for the parameters of GatedLinearAttention, "simple" for those of SimpleGatedLinearAttention.
        conv: Whether q, k and v have short convolutions.
        norm: Name of the norm's module.
    """

    def __init__(self, kind, conv=False, norm="g_norm_swish_gate"):
        super().__init__()
        keys = D // 2 if kind == "gla" else D
        self.q_proj, self.k_proj = linear(D, keys), linear(D, keys)
        self.v_proj, self.g_proj, self.o_proj = linear(D, D), linear(D, D), linear(D, D)
        self.gk_proj = nn.Sequential(linear(D, 16), linear(16, keys, bias=True)) if kind == "gla" else linear(D, H, bias=True)
        self.add_module(norm, SeparateNorm(D // H))
        if conv:
            for name, width in (("q", keys), ("k", keys), ("v", D)):
                self.add_module(f"{name}_conv1d", nn.Conv1d(width, width, 4, groups=width, padding=3, bias=False))


class SeparateHGRN(nn.Module):
    """Parameters as fla's layers of HGRN and HGRN2 register them. Only its state dict is used.

    Args:
        projections: Names of the projections without ``_proj``.
        size: Channels of inputs and outputs.
        channels: Channels of the state or, of HGRN2, of all heads.
        conv: Names of the projections with short convolutions.
    """

    def __init__(self, projections, size, channels, conv=""):
        super().__init__()
        for name in projections:
            self.add_module(f"{name}_proj", linear(size, channels))
        for name in conv:
            self.add_module(f"{name}_conv1d", nn.Conv1d(channels, channels, 4, groups=channels, padding=3))
        self.g_norm, self.o_proj = SeparateNorm(channels), linear(channels, size)


PAIRS = {  # functions that make a layer of ours, and the parameters of fla's layer with the same arguments
    "gla": (lambda: GatedLinearAttention(hidden_size=D, num_heads=H), lambda: Separate("gla")),
    "gla-conv": (
        lambda: GatedLinearAttention(hidden_size=D, num_heads=H, use_short_conv=True, fuse_norm=False),
        lambda: Separate("gla", conv=True, norm="g_norm"),
    ),
    "simple": (
        lambda: SimpleGatedLinearAttention(hidden_size=D, num_heads=H, gate_fn="silu", use_short_conv=False),
        lambda: Separate("simple", norm="g_norm"),
    ),
    "simple-conv": (lambda: SimpleGatedLinearAttention(hidden_size=D, num_heads=H), lambda: Separate("simple", conv=True)),
    "hgrn": (lambda: HGRNAttention(hidden_size=D, expand_ratio=2), lambda: SeparateHGRN("ifg", D, 2 * D)),
    "hgrn-conv": (
        lambda: HGRNAttention(hidden_size=D, use_short_conv=True, conv_bias=True),
        lambda: SeparateHGRN("ifg", D, D, conv="fi"),
    ),
    "hgrn2": (lambda: HGRN2Attention(hidden_size=D, expand_ratio=32), lambda: SeparateHGRN("qfi", D, D)),
    "hgrn2-conv": (
        lambda: HGRN2Attention(hidden_size=D, expand_ratio=None, num_heads=2, use_short_conv=True, conv_bias=True),
        lambda: SeparateHGRN("qfi", D, D, conv="qfi"),
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_separate_weights_are_loaded_and_saved_unchanged(pair):
    ours, theirs = (build() for build in PAIRS[pair])
    given = theirs.state_dict()
    before = {key: value.clone() for key, value in given.items()}
    assert str(ours.load_state_dict(given)) == "<All keys matched successfully>"
    saved = ours.state_dict()
    assert saved.keys() == given.keys()
    for key, value in before.items():
        assert torch.equal(saved[key], value), key
        assert torch.equal(given[key], value), f"{key} in the caller's state dict was changed"
    twin = PAIRS[pair][1]()
    twin.load_state_dict(saved)
    assert all(torch.equal(value, before[key]) for key, value in twin.state_dict().items())


def test_loaded_rows_are_those_that_the_layer_reads():
    """If all weights of one of these projections are zero, the whole output is zero."""
    ours, theirs = (build() for build in PAIRS["gla"])
    x = torch.randn(1, 6, D)
    for silent in ("q_proj", "k_proj", "v_proj", "g_proj", "o_proj"):
        given = {key: torch.zeros_like(value) if key.startswith(silent) else value for key, value in theirs.state_dict().items()}
        ours.load_state_dict(given)
        assert bool((ours(x)[0] == 0).all()), silent
    ours.load_state_dict(theirs.state_dict())
    assert not bool((ours(x)[0] == 0).any())


@pytest.mark.parametrize("missing", ["k_proj.weight", "gk_proj.0.weight", "gk_proj.1.bias", "g_norm_swish_gate.weight"])
def test_a_missing_key_is_named_and_its_rows_are_kept(missing):
    """Rows of a packed parameter whose key is missing keep their values."""
    ours, theirs = (build() for build in PAIRS["gla"])
    given, before = theirs.state_dict(), copy.deepcopy(ours.state_dict())
    del given[missing]
    with pytest.raises(RuntimeError, match=f'Missing key\\(s\\) in state_dict: "{missing}"\\. $'):
        ours.load_state_dict(given)
    answer = ours.load_state_dict(given, strict=False)
    assert (answer.missing_keys, answer.unexpected_keys) == ([missing], [])
    after = ours.state_dict()
    assert torch.equal(after[missing], before[missing])
    assert all(torch.equal(after[key], value) for key, value in given.items())


@pytest.mark.parametrize(
    "surplus", ["q_proj.bias", "gk_proj.0.bias", "in_proj_weight", "gk_proj.2.weight", "g_norm.weight", "q_conv1d.weight"]
)
def test_a_surplus_key_is_named(surplus):
    ours, theirs = (build() for build in PAIRS["gla"])
    given = {**theirs.state_dict(), surplus: torch.zeros(3)}
    with pytest.raises(RuntimeError, match=f'Unexpected key\\(s\\) in state_dict: "{surplus}"\\. $'):
        ours.load_state_dict(given)
    answer = ours.load_state_dict(given, strict=False)
    assert (answer.missing_keys, answer.unexpected_keys) == ([], [surplus])
    assert torch.equal(ours.state_dict()["q_proj.weight"], given["q_proj.weight"])


def test_a_weight_of_the_wrong_shape_is_named():
    ours, theirs = (build() for build in PAIRS["gla"])
    given = {**theirs.state_dict(), "v_proj.weight": torch.zeros(3, D)}
    with pytest.raises(RuntimeError, match=r"size mismatch for v_proj\.weight: .*\[3, 64\].*\[64, 64\]") as raised:
        ours.load_state_dict(given)
    assert "Missing" not in str(raised.value)
    assert "Unexpected" not in str(raised.value)
    with pytest.raises(RuntimeError, match=r'"v_proj\.weight" is list'):
        ours.load_state_dict({**theirs.state_dict(), "v_proj.weight": []})


def test_keys_inside_a_model_have_its_prefix():
    model = nn.Sequential(nn.Linear(D, D), GatedLinearAttention(hidden_size=D, num_heads=H), SwiGLU(D, intermediate_size=48))
    given = model.state_dict()
    assert {"1.q_proj.weight", "1.gk_proj.1.bias", "2.gate_proj.weight", "2.up_proj.weight", "0.bias"} <= given.keys()
    assert not any("in_proj" in key or "gate_up" in key for key in given)
    del given["1.q_proj.weight"], given["2.up_proj.weight"]
    answer = model.load_state_dict({**given, "1.what.weight": torch.zeros(1)}, strict=False)
    assert sorted(answer.missing_keys) == ["1.q_proj.weight", "2.up_proj.weight"]
    assert answer.unexpected_keys == ["1.what.weight"]


def test_a_meta_layer_can_be_assigned_a_checkpoint(prose):
    with torch.device("meta"):
        ours = GatedLinearAttention(hidden_size=D, num_heads=H)
    given = {key: value.bfloat16() for key, value in Separate("gla").state_dict().items()}
    partial = {key: value for key, value in given.items() if key != "q_proj.weight"}
    with prose.raises(RuntimeError, match="in_proj_weight"):
        ours.load_state_dict(partial, strict=False, assign=True)
    ours.load_state_dict(given, assign=True)
    assert ours.in_proj_weight.dtype is torch.bfloat16
    assert ours.in_proj_weight.requires_grad
    assert all(torch.equal(value, given[key]) for key, value in ours.state_dict().items())
    assert ours(torch.randn(1, 4, D).bfloat16())[0].isfinite().all()


def test_a_partial_checkpoint_can_be_assigned():
    ours = GatedLinearAttention(hidden_size=D, num_heads=H)
    before, weight = copy.deepcopy(ours.state_dict()), torch.randn(32, D)
    ours.load_state_dict({"k_proj.weight": weight}, strict=False, assign=True)
    assert torch.equal(ours.state_dict()["k_proj.weight"], weight)
    assert torch.equal(ours.state_dict()["q_proj.weight"], before["q_proj.weight"])
    assert isinstance(ours.in_proj_weight, nn.Parameter)


@pytest.mark.parametrize("name", NAMES)
def test_state_dicts_are_saved_and_loaded_unchanged(name, tmp_path):
    layer, other = make(name)[0], make(name)[0]
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), other.parameters(), strict=True))
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    third = make(name)[0]
    third.load_state_dict(torch.load(stream))
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), third.parameters(), strict=True))


def test_entries_are_views_unless_they_are_variables():
    """Entries of a state dict change with the parameter, as for any module, and ``keep_vars`` keeps the autograd graph."""
    layer = GatedLinearAttention(hidden_size=D, num_heads=H)
    held = layer.state_dict()["k_proj.weight"]
    assert not held.requires_grad
    with torch.no_grad():
        layer.in_proj_weight.zero_()
    assert bool((held == 0).all())
    assert layer.state_dict(keep_vars=True)["k_proj.weight"].requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_a_copied_layer_is_independent(name):
    layer, _ = make(name)
    x = torch.randn(1, 5, D)
    twin, before = copy.deepcopy(layer), layer(x)[0]
    assert torch.equal(twin(x)[0], before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(layer(x)[0], before)
    assert bool((twin.state_dict()["o_proj.weight"] == 0).all())
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x)[0], before)


def test_a_layer_changes_dtype_and_device_like_any_module():
    layer = GatedLinearAttention(hidden_size=D, num_heads=H)
    assert {value.dtype for value in layer.to(torch.float16).state_dict().values()} == {torch.float16}
    assert layer(torch.randn(2, 5, D, dtype=torch.float16))[0].dtype is torch.float16
    assert {value.device.type for value in layer.to("meta").state_dict().values()} == {"meta"}


@pytest.mark.parametrize("name", ["gla", "simple", "linear_rnn"])
def test_optimizers_see_one_parameter_and_restore_their_state(name):
    layer, _ = make(name)
    names = [key for key, _ in layer.named_parameters()]
    assert names.count("in_proj_weight") == 1
    assert not any(key.startswith(("q_proj", "k_proj", "g_proj", "gk_proj.")) for key in names)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)

    def step(layer, optimizer):
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 6 * D).view(1, 6, D)
        layer(x)[0].square().sum().backward()
        optimizer.step()

    step(layer, optimizer)
    twin = make(name)[0]
    twin.load_state_dict(layer.state_dict())
    restored = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(layer, optimizer)
    step(twin, restored)
    for key, value in layer.state_dict().items():
        assert torch.equal(value, twin.state_dict()[key]), key


def test_packed_weights_are_initialized_like_separate_ones():
    """Every part of a packed weight is drawn from the range that :class:`torch.nn.Linear` uses, at first and at a reset."""
    layer = GatedLinearAttention(hidden_size=256, num_heads=2)
    for _ in range(2):
        for key, value in layer.state_dict().items():
            if key.startswith("g_norm"):
                assert bool((value == 1).all())
                continue
            # torch.nn.Linear draws from +-1 / sqrt(inputs); the second factor of the low-rank gate has 16 inputs
            bound = (16 if key.startswith("gk_proj.1") else 256) ** -0.5
            assert 0.9 * bound < value.abs().max() <= bound, key
            assert value.mean().abs() < 0.25 * bound, key
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(7)
        layer.reset_parameters()
