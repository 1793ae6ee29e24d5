"""Checks of a model that ``accelerate`` has changed under DDP and FSDP2, by two processes of which this file is the program.

``test_distributed.py`` starts both, with gloo as the back end. They write the names of the checks to a file if all have passed.
Each process has other inputs, so a gradient that was not averaged over both would be wrong. ``python -m tests.integrations.pair
RANK FOLDER`` runs one of them.
"""

from __future__ import annotations

import copy
import json
import sys
import types
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from onelaunch import accelerate
from tests.integrations.standins import (
    GatedLinearAttention,
    GatedMLP,
    HGRN2Attention,
    HGRNAttention,
    SimpleGatedLinearAttention,
)

CHECKS = {}
"""Functions that raise an error if something is wrong, by name."""
SIZE = 64
WHOLE = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def check(function):
    CHECKS[function.__name__] = function
    return function


class Block(nn.Module):
    """Layer and MLP of a model; a layer of HGRN gets a lower bound that is trained too."""

    def __init__(self, layer, *, checkpointed):
        super().__init__()
        self.attn, self.mlp, self.checkpointed = layer, GatedMLP(SIZE), checkpointed
        forget = getattr(layer, "f_proj", None)
        self.bound = None if forget is None else nn.Parameter(torch.randn(forget.out_features))

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False) if self.checkpointed else self.run(x)

    def run(self, x):
        named = {} if self.bound is None else {"lower_bound": self.bound.sigmoid()}
        x = x + self.attn(x, **named)[0]
        return x + self.mlp(x)


def model_of(*, checkpointed=False):
    """Return the same model in both processes, with one block for each kind of layer."""
    torch.manual_seed(1)
    layers = (GatedLinearAttention(), SimpleGatedLinearAttention(), HGRNAttention(use_short_conv=True), HGRN2Attention())
    return nn.Sequential(*(Block(each, checkpointed=checkpointed) for each in layers))


def shard(model, **options):
    """Shard the parameters of each layer, and of the rest of its block, over both processes."""
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        fully_shard(block.attn, mesh=mesh, **options)
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def step(model, *, autocast=False):
    """Return the output of a training step with this process's input, and all gradients, those of shards as whole tensors.

    The parameters are changed too, by stochastic gradient descent.
    """
    x = torch.randn(2, 5, SIZE, generator=torch.Generator().manual_seed(distributed.get_rank()))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    y.float().square().mean().backward()
    gradients = {name.removeprefix("module."): whole(each.grad) for name, each in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    return y.detach(), gradients


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(found, wanted, tolerance=3e-5):
    """Compare outputs and gradients by the norm of the difference: both are float32, with sums in another order."""
    pairs = {"output": (found[0], wanted[0])}
    assert list(found[1]) == list(wanted[1])
    pairs |= {name: (found[1][name], wanted[1][name]) for name in wanted[1]}
    for name, (one, other) in pairs.items():
        assert (one.float() - other.float()).norm() <= tolerance * other.float().norm(), name


def assert_same_parameters(model, other):
    for (name, one), (also, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert name == also
        assert (whole(one) - whole(two)).norm() <= 3e-5 * whole(two).norm(), name


@check
def ddp():
    """Outputs, averaged gradients and steps are those of the plain model, and state dicts load both ways."""
    plain, fast = model_of(), model_of()
    names = list(fast.state_dict())
    report = accelerate(fast)
    one, other = DistributedDataParallel(fast), DistributedDataParallel(plain)
    assert_same(step(one), step(other))
    assert_same_parameters(one, other)
    assert not report.fallbacks
    assert {each.layout for each in report.replaced} == {"as one weight"}
    assert [name.removeprefix("module.") for name in one.state_dict()] == names
    fresh = model_of()
    fresh.load_state_dict(fast.state_dict())
    assert_same_parameters(fresh, plain)
    fast.load_state_dict(plain.state_dict())
    assert_same(step(one), step(other))
    report.undo()
    assert_same(step(one), step(other))


@check
def ddp_with_checkpointing_and_autocast():
    """Recomputed activations and 16-bit products give the gradients of the plain model."""
    plain, fast = model_of(checkpointed=True), model_of(checkpointed=True)
    accelerate(fast)
    one, other = DistributedDataParallel(fast), DistributedDataParallel(plain)
    assert_same(step(one), step(other))
    plain.load_state_dict(fast.state_dict())
    assert_same(step(one, autocast=True), step(other, autocast=True), 0.1)


@check
def fsdp2():
    """Outputs, gradients and steps are those of the plain model; the report says that parameters are sharded."""
    plain, fast = model_of(), model_of()
    report = accelerate(fast)
    one, other = shard(fast), shard(plain)
    assert all(type(each) is DTensor for each in fast.parameters())
    assert_same(step(one), step(other))
    assert_same_parameters(one, other)
    assert not report.fallbacks
    assert {each.kind: each.layout for each in report.replaced} == {
        each.kind: f"{each.by.separately()}, since each is a DTensor, whose shards are gathered into other memory in every call"
        for each in report.replaced
    }
    assert_same(step(one), step(DistributedDataParallel(unsharded(plain))))
    report.undo()
    assert not any("forward" in vars(each) for each in fast.modules())
    step(plain)
    assert_same(step(one), step(other))


def unsharded(model):
    """Return a new plain model with the values of a sharded one."""
    new = model_of()
    new.load_state_dict({name: whole(each) for name, each in model.state_dict().items()})
    return new


@check
def fsdp2_checkpoints():
    """A whole state dict of either model loads into the other, sharded or not, and one saved before sharding does too."""
    plain, fast = model_of(), model_of()
    before = copy.deepcopy(plain.state_dict())
    accelerate(fast)
    shard(fast)
    step(fast)
    saved = get_model_state_dict(fast, options=StateDictOptions(full_state_dict=True))
    if distributed.get_rank() == 0:
        plain.load_state_dict(saved)
        assert list(saved) == list(before)
    set_model_state_dict(fast, dict(before), options=WHOLE)  # which writes into the dictionary
    for (name, one), (_, two) in zip(fast.state_dict().items(), before.items(), strict=True):
        assert torch.equal(whole(one), two), name


@check
def fsdp2_with_checkpointing_and_mixed_precision():
    """Recomputed activations and parameters gathered in bfloat16 give the gradients of the plain model."""
    plain, fast = model_of(checkpointed=True), model_of(checkpointed=True)
    accelerate(fast)
    assert_same(step(shard(fast)), step(shard(plain)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain, fast = model_of(), model_of()
    report = accelerate(fast)
    assert_same(step(shard(fast, mp_policy=policy)), step(shard(plain, mp_policy=policy)), 0.1)
    assert not report.fallbacks


@check
def fsdp2_comes_after_accelerate():
    """A sharded model is refused with the reason; weights moved apart by sharding stay so in a second call."""
    model = shard(model_of())
    report = accelerate(model)
    assert report.replaced == ()
    assert all(
        "is a DTensor, not a plain torch.nn.Parameter (call accelerate before sharding)" in x.reason for x in report.refused
    )
    fast = model_of()
    accelerate(fast)
    shard(fast)
    again = accelerate(fast)
    assert len(again.already) == 8
    assert again.already[0].by.why_not_laid == "a weight is a DTensor"


@check
def a_projection_that_is_sharded_by_itself_runs_the_original():
    """FSDP2 changes its class and gives it hooks that gather the shards, so it must be called as a module."""
    plain, fast = model_of(), model_of()
    report = accelerate(fast)
    for model in (plain, fast):
        fully_shard(model[2].attn.f_proj, mesh=init_device_mesh("cpu", (2,)))
    assert_same(step(shard(fast)), step(shard(plain)))
    assert report.fallbacks == {"f_proj is of the class FSDPLinear now": 1}


def main(rank, folder):
    torch.set_num_threads(1)
    sys.modules["fla"] = types.ModuleType("fla")
    sys.modules["fla"].__version__ = "0.6.0"
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for function in CHECKS.values():
        function()
    (folder / f"{rank}.json").write_text(json.dumps(list(CHECKS)))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
