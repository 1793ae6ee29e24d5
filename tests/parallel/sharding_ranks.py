"""Checks of sharded layers and of the model of ``train_lm.py``, by processes of which this file is the program.

``test_sharding.py`` starts it. Importing PyTorch takes longer than most checks, so one process imports everything and forks the
ranks: one that trains alone, then four, two and one, which continue the checkpoints of the four. The back end is gloo. Each
writes the names of its checks to a file if they have passed. ``python -m tests.parallel.sharding_ranks FOLDER`` runs all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch._dynamo  # which DTensor imports at its first use: here once instead of in each rank
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from onelaunch.errors import ArgumentError, ShapeError
from onelaunch.nn import (
    Cache,
    GatedLinearAttention,
    HGRN2Attention,
    HGRNAttention,
    LinearRNN,
    RMSNorm,
    SimpleGatedLinearAttention,
    SwiGLU,
)
from onelaunch.nn.parallel import TensorParallel, separate_weights, tensor_parallel_plan

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import sharding  # noqa: E402
import train_lm  # noqa: E402

D, HEADS = 64, 4
WHOLE = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
CHECKS = {}
"""Functions that raise an error if something is wrong, and the numbers of ranks that run them, by name."""

LAYERS = {
    "gla": lambda: GatedLinearAttention(hidden_size=D, expand_k=1.0, num_heads=HEADS, layer_idx=0),
    "gla-options": lambda: GatedLinearAttention(
        hidden_size=D, expand_k=2.0, expand_v=2.0, num_heads=8, num_kv_heads=4, use_short_conv=True, conv_bias=True,
        feature_map="relu", gate_fn="gelu", clamp_min=-0.05, layer_idx=0,
    ),
    "simple": lambda: SimpleGatedLinearAttention(hidden_size=D, num_heads=HEADS, use_short_conv=False, layer_idx=0),
    "simple-shared-heads": lambda: SimpleGatedLinearAttention(
        hidden_size=D, expand_k=2.0, expand_v=2.0, num_heads=8, num_kv_heads=4, elementwise_affine=False, layer_idx=0
    ),
    "simple-conv": lambda: SimpleGatedLinearAttention(hidden_size=D, num_heads=HEADS, layer_idx=0),
    "linear_rnn": lambda: LinearRNN(D, expand_v=0.75, layer_idx=0),
    "hgrn": lambda: HGRNAttention(hidden_size=D, use_short_conv=True, conv_bias=True, norm_eps=1e-3, layer_idx=1),
    "hgrn2": lambda: HGRN2Attention(hidden_size=D, num_heads=HEADS, expand_ratio=None, layer_idx=1),
    "swiglu": lambda: SwiGLU(D, intermediate_size=96),
}  # fmt: skip
"""Layers of each kind with at least four heads, and with the options that change what is sharded."""


def check(*ranks):
    def registered(function):
        CHECKS[function.__name__] = (function, ranks)
        return function

    return registered


def layer_of(name):
    """Return the same layer on every rank, with random weights of the norm."""
    torch.manual_seed(1)
    layer = LAYERS[name]()
    for key, parameter in layer.named_parameters():
        if "norm" in key:
            parameter.data.uniform_(0.5, 1.5)
    return layer


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def first(result):
    return result[0] if isinstance(result, tuple) else result


def assert_near(found, wanted, what, tolerance=2e-5):
    """Compare by the norm of the difference: both are float32, with sums over the channels in another order."""
    assert found.shape == wanted.shape, what
    assert (found - wanted).norm() <= tolerance * wanted.norm() + 1e-7, (what, (found - wanted).norm() / wanted.norm())


def bound_of(name):
    return {"lower_bound": torch.linspace(0, 0.6, D).requires_grad_()} if name.startswith("hgrn") else {}


def backward(layer, x, name, **arguments):
    """Return output and gradients of a call: of the input, of a lower bound, and of the parameters by name."""
    x, named = x.clone().requires_grad_(), bound_of(name)
    o = first(layer(x, **named, **arguments))
    (o * random(*o.shape, seed=2)).sum().backward()
    gradients = {key: whole(each.grad) for key, each in layer.named_parameters()}
    return {"o": o.detach(), "x": x.grad, **{key: each.grad for key, each in named.items()}, **gradients}


@check(4, 2)
def layers(mesh, _folder):
    """Outputs and gradients are those of the unsharded layer, for padded and packed sequences too."""
    mask = torch.ones(2, 8)
    mask[0, :3] = 0
    packed = {"cu_seqlens": torch.tensor([0, 5, 8])}
    for name in LAYERS if mesh.size() == HEADS else ("gla", "hgrn2", "swiglu"):
        plain, layer = separate_weights(layer_of(name)), layer_of(name)
        parallelize_module(layer, mesh, tensor_parallel_plan(layer))
        calls = [({}, 2)]
        if name in ("gla-options", "hgrn") and mesh.size() == HEADS:
            calls += [({"attention_mask": mask}, 2), (packed, 1)]
        for arguments, batch in calls:
            plain.zero_grad()
            layer.zero_grad()
            found, wanted = (backward(each, random(batch, 8, D), name, **arguments) for each in (layer, plain))
            assert list(found) == list(wanted)
            for key, value in wanted.items():
                assert_near(found[key], value, (name, key, list(arguments)))


@check(4)
def parts_of_time(mesh, _folder):
    """Ranks may pass and get parts of T; a norm's weight gets the sum of their gradients."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for name in ("gla", "hgrn2", "linear_rnn", "swiglu"):
        plain, model = nn.Sequential(RMSNorm(D), layer_of(name)), nn.Sequential(RMSNorm(D), layer_of(name))
        separate_weights(plain)
        plan = tensor_parallel_plan(model, input_layouts=Shard(1), output_layouts=Shard(1))
        assert list(plan) == ["0", "1"]
        parallelize_module(model, mesh, plan)
        x = random(2, 8, D).requires_grad_()
        part = x.detach().chunk(ranks, 1)[rank].clone().requires_grad_()
        wanted, found = first(plain(x)), first(model(part))
        assert_near(found, wanted.chunk(ranks, 1)[rank], name)
        weights = random(*wanted.shape, seed=2)
        (wanted * weights).sum().backward()
        (found * weights.chunk(ranks, 1)[rank]).sum().backward()
        assert_near(part.grad, x.grad.chunk(ranks, 1)[rank], (name, "x"))
        for (key, one), (also, two) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert key == also
            assert_near(whole(one.grad), two.grad, (name, key))


@check(2)
def caches(mesh, _folder):
    """A prompt and a step with a cache give the outputs of one call; states have the heads of a rank."""
    for name in ("gla", "simple-shared-heads", "linear_rnn", "hgrn", "hgrn2"):
        plain, layer = layer_of(name), layer_of(name)
        parallelize_module(layer, mesh, {"": TensorParallel()})
        x, named = random(2, 6, D), bound_of(name)
        with torch.no_grad():
            cache = Cache()
            wanted = plain(x, **named)[0]
            prompt = layer(x[:, :5], past_key_values=cache, use_cache=True, **named)[0]
            step = layer(x[:, 5:], past_key_values=cache, use_cache=True, **named)[0]
            _, _, states = plain(x, use_cache=True, **named)
        assert_near(torch.cat([prompt, step], 1), wanted, name)
        index = layer.layer_idx
        assert_near(cache[index].recurrent_state, states[index].recurrent_state.chunk(2, 1)[mesh.get_local_rank()], name)


class Recomputed(nn.Module):
    """Layer whose activations are computed again in the backward pass."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, **named):
        return checkpoint(self.layer, x, use_reentrant=False, **named)


@check(2)
def fsdp2_of_packed_weights(mesh, _folder):
    """FSDP2 shards packed weights too; state dicts have whole parts, and 16 bits with recomputation train as float32 does."""
    for name in ("gla", "simple", "linear_rnn", "hgrn", "hgrn2", "swiglu"):
        plain, layer = layer_of(name), layer_of(name)
        before = {key: value.clone() for key, value in plain.state_dict().items()}
        fully_shard(layer, mesh=mesh)
        x = random(2, 8, D)
        found, wanted = (backward(each, x, name) for each in (layer, plain))
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            assert_near(found[key], value, (name, key))
        assert all(torch.equal(whole(value), before[key]) for key, value in layer.state_dict().items())
        layer.load_state_dict({key: value * 2 for key, value in layer.state_dict().items()})
        assert all(torch.equal(whole(value), before[key] * 2) for key, value in layer.state_dict().items())
        low = fully_shard(Recomputed(layer_of(name)), mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        for key, value in backward(low, x, name).items():
            assert_near(value.float(), wanted[key.removeprefix("layer.")], (name, key, "in 16 bits"), 0.05)


@check(4)
def heads_and_slices(_mesh, _folder):
    """Two ranks share heads and two a sequence; the gradients of the slices add up to those of the whole sequence."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    part, others = both["cp"].get_local_rank(), both["cp"].get_group()
    for name in ("gla-options", "linear_rnn", "hgrn2"):
        plain, layer = separate_weights(layer_of(name)), layer_of(name)
        parallelize_module(layer, both["tp"], tensor_parallel_plan(layer))
        x, named = random(2, 9, D).requires_grad_(), bound_of(name)
        wanted = first(plain(x, **named))
        weights = random(*wanted.shape, seed=2)
        (wanted * weights).sum().backward()
        mine = slice(0, 5) if part == 0 else slice(5, 9)
        own = x.detach()[:, mine].requires_grad_()
        found = first(layer(own, **bound_of(name), mesh=both["cp"]))
        (found * weights[:, mine]).sum().backward()
        assert_near(found, wanted[:, mine], name)
        assert_near(own.grad, x.grad[:, mine], (name, "x"))
        for (key, one), (also, two) in zip(layer.named_parameters(), plain.named_parameters(), strict=True):
            assert key == also
            gradient = whole(one.grad).clone()
            distributed.all_reduce(gradient, group=others)
            assert_near(gradient, two.grad, (name, key))


@check(4)
def state_dicts(mesh, _folder):
    """A whole state dict loads into the unsharded layer and the other way round, with the same names and values."""
    for name in LAYERS:
        plain, layer = layer_of(name), layer_of(name)
        before = {key: value.clone() for key, value in plain.state_dict().items()}
        parallelize_module(layer, mesh, tensor_parallel_plan(layer))
        assert layer.state_dict().keys() == before.keys()
        assert all(isinstance(value, DTensor) for value in layer.state_dict().values())
        saved = get_model_state_dict(layer, options=StateDictOptions(full_state_dict=True))
        if distributed.get_rank() == 0:
            plain.load_state_dict({key: torch.zeros_like(value) for key, value in before.items()})
            plain.load_state_dict(saved)
            assert all(torch.equal(value, before[key]) for key, value in plain.state_dict().items())
        set_model_state_dict(layer, {key: value * 2 for key, value in before.items()}, options=WHOLE)
        for key, value in layer.state_dict().items():
            assert torch.equal(whole(value), before[key] * 2), (name, key)


@check(4)
def refusals(mesh, _folder):
    """Every rank refuses what it cannot divide, by an error that names it, and stays usable."""
    refused = {
        "num_heads of GatedLinearAttention is 2; it must be a multiple of 4": GatedLinearAttention(hidden_size=D, num_heads=2),
        "num_kv_heads of GatedLinearAttention is 2": GatedLinearAttention(hidden_size=256, num_heads=4, num_kv_heads=2),
        "num_heads of SimpleGatedLinearAttention is 1": SimpleGatedLinearAttention(hidden_size=D, num_heads=1),
        "num_heads of HGRN2Attention is 2": HGRN2Attention(hidden_size=D, num_heads=2, expand_ratio=None),
        r"hidden_size \* expand_ratio of HGRNAttention is 66": HGRNAttention(hidden_size=66),
        r"hidden_size \* expand_v of LinearRNN is 66": LinearRNN(66),
        "intermediate_size of SwiGLU is 90": SwiGLU(D, intermediate_size=90),
        "The module is a Linear": nn.Linear(D, D),
    }
    for message, module in refused.items():
        names = [name for name, _ in module.named_parameters()]
        with pytest.raises(ArgumentError, match=message):
            parallelize_module(module, mesh, TensorParallel())
        assert [name for name, _ in module.named_parameters()] == names  # nothing has changed
    bounded = parallelize_module(layer_of("hgrn"), mesh, TensorParallel())
    with pytest.raises(ShapeError, match=r"lower_bound has shape \(16,\); it must be \[C\] with C = 64"):
        bounded(random(1, 8, D), lower_bound=torch.zeros(16))
    layer = parallelize_module(layer_of("gla"), mesh, TensorParallel())
    with pytest.raises(ArgumentError, match="sharded already"):
        parallelize_module(layer, mesh, TensorParallel())
    with pytest.raises(ArgumentError, match="must be Replicate"):
        TensorParallel(input_layouts=Shard(2))
    with pytest.raises(ArgumentError, match="2 dimensions"):
        TensorParallel()._apply(layer_of("gla"), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))


# Training of the example's model

STEPS, SAVED_AT, ROWS, LENGTH = 4, 2, 8, 32
LOSS = 5e-5
"""Tolerance of a step's loss, relative.

All runs are float32 and differ by the order of sums, 1e-7 of a gradient. AdamW divides gradients by their root mean squares. So
an element whose gradient is all rounding moves by as much as any other, up to the learning rate of 4e-3 in a step, but it matters
little to the loss. Measured: at most 2e-6 within six steps.
"""


def train(folder, *, tensor=1, context=1, fsdp=False, begin=0, save=None, load=None, recompute=False, mixed=False):
    """Train the tiny model with heads for four ranks, by the code of the example; return the losses of the steps."""
    size = dataclasses.replace(train_lm.SIZES["tiny"], heads=HEADS)
    options = argparse.Namespace(tensor_parallel=tensor, context_parallel=context, fsdp=fsdp, impl="onelaunch", compile=False)
    ranks = sharding.Sharding(options, torch.device("cpu"))
    model = train_lm.build("onelaunch", size, seed=0 if load is None else 1)
    for block in model.model.layers:
        block.recompute = recompute
    ranks.apply(model, LENGTH, mixed=mixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.rate)
    if load is not None:
        assert ranks.load(folder / load, {"step": 0}, model, optimizer) == {"step": begin}
    tokens = torch.frombuffer(bytearray((ROOT / "examples" / "train_lm.py").read_bytes()), dtype=torch.uint8)
    losses = []
    for step in range(begin, STEPS):
        loss = train_lm.loss_of(model, train_lm.batch_of(tokens, ROWS, LENGTH, 0, step), "onelaunch", ranks)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(ranks.mean(loss).item())
        if save is not None and step + 1 == SAVED_AT:
            ranks.save(folder / save, {"step": SAVED_AT}, model, optimizer)
    return losses


def alone(folder):
    return json.loads((folder / "alone.json").read_text())


@check(4)
def training_by_four(_mesh, folder):
    """Heads, parameters, slices of sequences, and two of them on each rank: losses are those of one process; three runs save."""
    wanted = pytest.approx(alone(folder), rel=LOSS)
    for name in ("both", "fsdp", "slices"):
        (folder / name).mkdir(exist_ok=True)
    assert train(folder, tensor=4) == wanted
    assert train(folder, fsdp=True, save="fsdp") == wanted
    assert train(folder, tensor=2, fsdp=True, recompute=True, save="both") == wanted
    assert train(folder, context=2, fsdp=True, recompute=True) == wanted
    assert train(folder, context=2, tensor=2, fsdp=True, save="slices") == wanted


@check(2)
def training_by_two(_mesh, folder):
    """Two ranks train to the losses of one process, and continue the checkpoints of four, each by another division."""
    wanted = alone(folder)
    assert train(folder, tensor=2) == pytest.approx(wanted, rel=LOSS)
    assert train(folder, fsdp=True, recompute=True) == pytest.approx(wanted, rel=LOSS)
    left = pytest.approx(wanted[SAVED_AT:], rel=LOSS)
    assert train(folder, tensor=2, load="fsdp", begin=SAVED_AT) == left
    assert train(folder, fsdp=True, load="both", begin=SAVED_AT) == left
    assert train(folder, context=2, fsdp=True, load="slices", begin=SAVED_AT) == left
    # Roundings to bfloat16 of up to 2^-9 each are averaged over many products; the losses were within 2e-3.
    assert train(folder, fsdp=True, mixed=True, recompute=True) == pytest.approx(wanted, rel=2e-2)


def main(folder):
    torch.set_num_threads(1)
    groups = [(1, "alone"), (4, "four"), (2, "two"), (1, "continued")]
    for ranks, group in groups:
        children = [fork(folder, rank, ranks, group) for rank in range(ranks)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            sys.exit(1)


def fork(folder, rank, ranks, group):
    """Start a rank in a process of its own, and return its id."""
    if child := os.fork():
        return child
    code = 1
    try:
        run(folder, rank, ranks, group)
        code = 0
    finally:
        traceback.print_exc() if code else None
        sys.stderr.flush()
        os._exit(code)


def run(folder, rank, ranks, group):
    if group == "alone":
        (folder / "alone.json").write_text(json.dumps(train(folder)))
        return
    if group == "continued":
        wanted = pytest.approx(alone(folder)[SAVED_AT:], rel=LOSS)
        assert train(folder, load="fsdp", begin=SAVED_AT) == wanted
        assert train(folder, load="both", begin=SAVED_AT) == wanted
        assert train(folder, load="slices", begin=SAVED_AT) == wanted
        (folder / f"{group}-{rank}.json").write_text("[]")
        return
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(ranks)})  # as torchrun does, for the example
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store-{group}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    passed = []
    for name, (function, numbers) in CHECKS.items():
        if ranks in numbers:
            function(mesh, folder)
            passed.append(name)
    (folder / f"{group}-{rank}.json").write_text(json.dumps(passed))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
