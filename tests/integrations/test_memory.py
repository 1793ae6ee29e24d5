"""Tests of what an accelerated block of fla's model saves for the backward pass, with kernels in Triton's interpreter.

The layers are stand-ins for fla's, which ``accelerate`` replaces all the same. ``pytest.mark.interpret`` marks tests that run
with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onelaunch import accelerate, dispatch
from onelaunch.device.hardware import is_hopper
from onelaunch.dispatch import choice
from onelaunch.integrations.norms import FlaNorm
from onelaunch.launch import recomputed
from onelaunch.ops import gla, gla_layer, output_chain, projections, rms_norm, swiglu
from tests.integrations.standins import GatedLinearAttention, GatedMLP, RMSNorm
from tests.ops.cases import assert_near

CHOSEN = {
    "gla_layer": gla_layer.variants["packed"],
    "gla": gla.variants["fused"],
    "projections": projections.variants["wide_activated"],
    "output_chain": output_chain.variants["norm_gate"],
    "rms_norm": rms_norm.variants["fused"],
    "swiglu": swiglu.variants["fused"],
}
"""Variants with kernels of ours that run in the interpreter, by operation."""

BATCH, LENGTH, WIDTH, COLUMNS = 2, 9, 64, 48
HEADS, KEYS, VALUES, RANK = 2, 16, 24, 16  # those of the stand-ins


class Block(nn.Module):
    """Block of fla's model with its default fusions: the second norm adds the residual."""

    def __init__(self):
        super().__init__()
        self.attn_norm, self.mlp_norm = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.attn, self.mlp = GatedLinearAttention(WIDTH), GatedMLP(WIDTH, COLUMNS)

    def forward(self, x):
        mixed, *_ = self.attn(self.attn_norm(x))
        y, total = self.mlp_norm(mixed, residual=x, prenorm=True)
        return total + self.mlp(y)


@pytest.fixture
def kernels(fla, monkeypatch):
    """Let the dispatcher choose the kernels of ours."""
    dispatch.forget()
    for place in (choice, dispatch):
        monkeypatch.setattr(place, "choose", lambda query: CHOSEN[query.operation])
    monkeypatch.setattr(dispatch, "why_not_faster", lambda *_: None)
    monkeypatch.setattr(FlaNorm, "decisions", FlaNorm.decisions._replace(era=None))
    yield
    monkeypatch.undo()
    dispatch.forget()


def gradients_of(block, x):
    """Return the output and all gradients by name."""
    block.zero_grad()
    x = x.clone().requires_grad_()
    out = block(x)
    out.square().sum().backward()
    return {"out": out.detach(), "x": x.grad, **{name: each.grad for name, each in block.named_parameters()}}


@pytest.mark.interpret
@pytest.mark.parametrize("least", [1, recomputed.LEAST_BYTES])
def test_what_a_block_saves(least, kernels, monkeypatch):
    """Small tensors are saved themselves where larger ones are computed again."""
    monkeypatch.setattr(recomputed, "LEAST_BYTES", least)
    torch.manual_seed(0)
    block, x = Block(), torch.randn(BATCH, LENGTH, WIDTH)
    expected = gradients_of(block, x)
    report = accelerate(block)
    parameters = {each.untyped_storage().data_ptr() for each in block.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = tensor  # holds it, so that no other tensor comes to lie there
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(2 * x.clone().requires_grad_())
    rows = BATCH * LENGTH
    wanted = {
        "input, which is the sum of the first norm": rows * WIDTH,
        "packed projections": rows * (HEADS * (2 * KEYS + 2 * VALUES) + RANK),
        "output of the recurrence": rows * HEADS * VALUES,
        "sum of the second norm": rows * WIDTH,
        "products of gate and up": rows * 2 * COLUMNS,
        "rstd": rows * (1 + HEADS + 1),
    }
    if least == 1:
        wanted["copies of the norms' weights"] = 2 * WIDTH
    else:
        wanted |= {"log-decays": rows * HEADS * KEYS, "results of both norms": 2 * rows * WIDTH}
    found = sum(each.untyped_storage().nbytes() for each in saved.values())
    assert found == 4 * sum(wanted.values())
    assert_near(gradients_of(block, x), expected, 1e-5)
    assert not report.fallbacks


@pytest.mark.interpret
@pytest.mark.thorough
def test_activation_checkpointing_behind_a_norm(kernels, monkeypatch):
    """The sum of a norm is saved inside the checkpointed part in place of its result, which comes from outside."""
    monkeypatch.setattr(recomputed, "LEAST_BYTES", 1)
    torch.manual_seed(0)
    block, x = Block(), torch.randn(BATCH, LENGTH, WIDTH)
    accelerate(block)
    expected = gradients_of(block, x)
    block.forward = lambda x: checkpointed(block, x)
    assert_near(gradients_of(block, x), expected, 1e-6)


@pytest.mark.gpu
def test_a_block_on_a_gpu(fla, device, monkeypatch):
    """A block computes what it did while it kept everything, up to roundings of bfloat16, and holds less between the passes."""
    if not is_hopper(device):
        pytest.skip("the dispatcher takes kernels of ours for the products of an MLP on Hopper alone")
    monkeypatch.setattr(dispatch, "why_not_faster", lambda *_: None)
    monkeypatch.setattr(FlaNorm, "decisions", FlaNorm.decisions._replace(era=None))
    torch.manual_seed(0)
    block, x = Block().to(device, torch.bfloat16), torch.randn(8, 4096, WIDTH, device=device, dtype=torch.bfloat16)
    accelerate(block)
    found, held = {}, {}
    for least in (1 << 40, 1):
        monkeypatch.setattr(recomputed, "LEAST_BYTES", least)
        dispatch.forget()  # replays repeat what was decided about the log-decays
        for _ in range(3):  # run, recorded, replayed
            found[least] = gradients_of(block, x)
        before = torch.cuda.memory_allocated(device)
        out = block(x.clone().requires_grad_())
        held[least] = torch.cuda.memory_allocated(device) - before
        del out
    dispatch.forget()
    assert_near(found[1], found[1 << 40], 2e-2)
    assert held[1 << 40] - held[1] >= x.nbytes  # at least the result of the norm before the MLP


def checkpointed(block, x):
    """Run the layers of a block by activation checkpointing, and its norms outside of it."""
    mixed, *_ = checkpoint(block.attn, block.attn_norm(x), use_reentrant=False)
    y, total = block.mlp_norm(mixed, residual=x, prenorm=True)
    return total + checkpoint(block.mlp, y, use_reentrant=False)
