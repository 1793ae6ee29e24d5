"""Tests against fla's own HGRN and HGRN2 layers: our layers and the replaced forwards give their outputs, gradients and states.

fla must be installed. On a CPU its kernels run in Triton's interpreter, with ``--architectures=every`` alone.
"""

from __future__ import annotations

import copy
import importlib

import pytest
import torch

from onelaunch import accelerate, nn
from tests.untuned import untuned

triton = pytest.importorskip("triton", reason="fla's layers are written in Triton")

CASES = {
    "hgrn": ("hgrn.HGRNAttention", {"expand_ratio": 2}),
    "hgrn with convolutions": ("hgrn.HGRNAttention", {"use_short_conv": True, "conv_bias": True, "norm_eps": 1e-3}),
    "hgrn2": ("hgrn2.HGRN2Attention", {"expand_ratio": 32, "norm_eps": 1e-2}),
    "hgrn2 with convolutions": ("hgrn2.HGRN2Attention", {"expand_ratio": 16, "use_short_conv": True, "conv_size": 3}),
    "hgrn2 without a weight of the norm": (
        "hgrn2.HGRN2Attention",
        {"expand_ratio": None, "num_heads": 2, "elementwise_affine": False},
    ),
}
SIZE = 64

each_case = pytest.mark.parametrize("name", CASES)
devices = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=[pytest.mark.interpret, pytest.mark.every]), pytest.param("cuda:0", marks=pytest.mark.gpu)],
)


@pytest.fixture
def made(name, device):
    """Return fla's layer, ours with its state dict, an input and a lower bound. Autotuners take their first configuration."""
    pytest.importorskip("fla", reason="it compares with fla's layers")
    path, options = CASES[name]
    module, kind = path.split(".")
    layers = importlib.import_module(f"fla.layers.{module}")
    given = {"hidden_size": SIZE, "layer_idx": 1, "mode": "fused_recurrent", **options}
    theirs, ours = (getattr(each, kind)(**given).to(device) for each in (layers, nn))
    for each in theirs.parameters():
        if each.dim() == 1:  # weights of norms, which begin with 1, and biases
            each.data.uniform_(0.5, 1.5)
    assert str(ours.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    assert {key: value.dtype for key, value in ours.state_dict().items()} == {
        key: value.dtype for key, value in theirs.state_dict().items()
    }
    with untuned():
        yield theirs, ours, torch.randn(2, 9, SIZE, device=device), torch.rand(theirs.f_proj.out_features, device=device)


def assert_near(found, wanted):
    """Compare by norm: fla's kernels add up in another order, in TF32 on some GPUs."""
    tolerance = 1e-6 if wanted.device.type == "cpu" else 2e-3
    assert (found - wanted).norm() <= tolerance * wanted.norm()


@devices
@each_case
def test_outputs_and_gradients_are_fla_s(made):
    theirs, ours, x, bound = made
    # Packed sequences, with which fla's layer of HGRN trains by its recurrent kernel; the interpreter does not run the other.
    offsets = torch.tensor([0, 2, 9], device=x.device)
    leaves = [[each.clone().requires_grad_() for each in (x[:1], bound)] for _ in range(2)]
    found, wanted = (
        layer(given, lower_bound=low, cu_seqlens=offsets)[0] for layer, (given, low) in zip((ours, theirs), leaves, strict=True)
    )
    assert_near(found, wanted)
    seed = torch.randn_like(found)
    found.backward(seed)
    wanted.backward(seed)
    for one, other in zip(*leaves, strict=True):
        assert_near(one.grad, other.grad)
    twin = copy.deepcopy(ours)  # whose state dict has the packed gradients under fla's names
    with torch.no_grad():
        for key, each in twin.named_parameters():
            each.copy_(ours.get_parameter(key).grad)
    for key, each in theirs.named_parameters():
        assert_near(twin.state_dict()[key], each.grad)


@devices
@each_case
@torch.no_grad()
def test_replaced_layers_give_fla_s_outputs_and_states(made):
    from fla.models.utils import Cache

    theirs, ours, x, bound = made
    theirs.eval()
    mask = torch.ones(2, 9, dtype=torch.long, device=x.device)
    mask[0, :3] = 0

    def decode(layer, cache):
        parts = [layer(part.clone(), None, cache, True, lower_bound=bound) for part in x.split([6, 1, 2], 1)]  # noqa: FBT003
        return torch.cat([each[0] for each in parts], 1), parts[-1][2]

    wanted, state = decode(theirs, Cache())
    padded = theirs(x.clone(), mask, lower_bound=bound)[0]
    assert_near(decode(ours, nn.Cache())[0], wanted)
    assert_near(ours(x, mask, lower_bound=bound)[0][mask == 1], padded[mask == 1])
    report = accelerate(theirs)
    assert len(report.replaced) == 1
    found, cache = decode(theirs, Cache())
    assert_near(found, wanted)
    assert_near(cache[1]["recurrent_state"], state[1]["recurrent_state"])
    assert cache.get_seq_length(1) == state.get_seq_length(1) == 9
    assert torch.equal(theirs(x.clone(), mask, lower_bound=bound)[0], padded)
    whole = theirs(x, lower_bound=bound)[0]
    report.undo()
    assert_near(whole, theirs(x.clone(), lower_bound=bound)[0])
