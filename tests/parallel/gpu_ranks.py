"""Processes of the tests of context parallelism with NCCL: ``python -m tests.parallel.gpu_ranks FOLDER CHECK`` is one rank.

``test_gpus.py`` starts one for each GPU, with the environment of torchrun. A rank writes the name of its check to a file if it
has passed.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import distributed

from onelaunch import cuda, nn, parallel
from onelaunch.cuda.driver import reaches
from onelaunch.errors import ArgumentError
from onelaunch.ops import gated_scan, gla
from onelaunch.ops.gla.contract import bind
from onelaunch.ops.gla.slices import GlaRules
from onelaunch.parallel.exchange import PEER_STORES, STORES
from tests.parallel.cases import Slices

TIMEOUT = 20
"""Seconds that a collective may take."""

LARGEST = 6e-3
"""Largest norm-wise difference of bfloat16 results of slices from those of one GPU."""


def inputs(steps, heads=16, size=128, seed=0):
    """Return q, k, v and g of the whole sequence, the same on every rank."""
    random = torch.Generator("cuda").manual_seed(seed)
    q, k, v, z = (torch.randn(1, steps, heads, size, device="cuda", generator=random) for _ in range(4))
    tensors = (q, k * size**-0.5, v, torch.nn.functional.logsigmoid(z) / 16)
    return [each.to(torch.bfloat16).requires_grad_() for each in tensors]


def near(found, wanted, name):
    assert (found.double() - wanted.double()).norm() <= LARGEST * wanted.double().norm(), name


def results(slices):
    """Outputs, final states and gradients of gla, whole and packed, are those of one GPU; the third call replays plans."""
    packed = torch.tensor([0, slices.total // 3, slices.total], device="cuda")
    for offsets, seed in product((None, packed), range(3)):
        tensors = inputs(slices.total, seed=seed)
        mine = [slices.of(each).detach().requires_grad_() for each in tensors]
        named = {"cu_seqlens": offsets, "output_final_state": True}
        (o, state), (own, last) = gla(*tensors, **named), gla(*mine, **named, mesh=slices.group)
        near(own, slices.of(o), "output")
        near(last, state, "final state")
        do, dstate = torch.randn_like(o), torch.randn_like(state)
        distributed.broadcast(do, 0)
        distributed.broadcast(dstate, 0)
        wanted = torch.autograd.grad([o, state], tensors, [do, dstate])
        found = torch.autograd.grad([own, last], mine, [slices.of(do), dstate / distributed.get_world_size()])
        for name, one, other in zip("qkvg", found, wanted, strict=True):
            near(one, slices.of(other), name)


def layers(slices):
    """A layer with short convolutions, and a scan, in float32."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    layer = nn.GatedLinearAttention(hidden_size=64, num_heads=2, expand_k=1.0, use_short_conv=True).cuda()
    x = torch.randn(2, slices.total, 64, device="cuda")
    wanted = layer(x)[0]
    mine = slices.of(x).requires_grad_()
    found = layer(mine, mesh=slices.group)[0]
    assert (found - slices.of(wanted)).norm() <= 1e-4 * wanted.norm()
    found.square().sum().backward()
    assert mine.grad.isfinite().all()
    v = torch.randn(2, slices.total, 5, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    assert (gated_scan(slices.of(v), -slices.of(v).abs(), mesh=slices.group) - slices.of(gated_scan(v, -v.abs()))).norm() < 1e-3


def graphs(slices):
    """A captured call, collectives included, gives right results for other inputs when it is replayed.

    With 48 heads, CTAs that wait for messages could keep the all-reduce of final states' gradients from running (passes.py).
    """
    for heads in (16, 48):
        replayed(slices, heads)


def replayed(slices, heads):
    """Capture a call with a number of heads, and compare the results of its replays."""
    tensors = inputs(slices.total, heads)
    mine = [slices.of(each).detach().clone().requires_grad_() for each in tensors]
    made = parallel.context(slices.group, slices.lengths[slices.rank], device="cuda")

    def call():
        o, state = gla(*mine, mesh=made, output_final_state=True)
        dstate = torch.full_like(state, 1 / len(slices.lengths))  # the losses of all ranks are added up
        return [o.detach(), *torch.autograd.grad([o, state], mine, [torch.ones_like(o), dstate])]

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    found = cuda.capture(call, graph, stream)
    for scale in (1.0, 0.5):
        with torch.no_grad():
            for own, each in zip(mine, tensors, strict=True):
                own.copy_(scale * slices.of(each))
        for _ in range(50):
            graph.replay()
        whole = [(scale * each.detach()).requires_grad_() for each in tensors]
        o, state = gla(*whole, output_final_state=True)
        wanted = [o, *torch.autograd.grad([o, state], whole, [torch.ones_like(o), torch.ones_like(state)])]
        for name, one, other in zip("oqkvg", found, wanted, strict=True):
            near(one, slices.of(other), (heads, scale, name))


def exchanges(slices):
    """All-gathers give the bits that NCCL gives: many in a row on two streams, some ranks late, and in graphs between them."""
    rank, size = slices.rank, len(slices.lengths)
    made = parallel.context(slices.group, 4, device="cuda").collectives
    current, other = torch.cuda.current_stream(), torch.cuda.Stream()
    random = torch.Generator("cuda").manual_seed(rank)

    def bits(elements):
        return torch.randint(-(2**31), 2**31 - 1, (1, elements), dtype=torch.int32, device="cuda", generator=random)

    def by_nccl(x):
        wanted = x.new_empty(size, x.shape[1])
        distributed.all_gather_into_tensor(wanted, x, group=slices.group)
        return wanted

    def gathered(x, turn):
        stream = (current, other)[turn // 3 % 2]
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10**6 if turn % size == rank else 1)
            pending = made.start_all_gather(x)
            torch.cuda._sleep(10**6 if (turn + rank) % 3 == 0 else 1)
            found = pending.result()
        current.wait_stream(stream)
        return found

    def captured(x):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            made.start_all_gather(x).result()
        torch.cuda.synchronize()
        found = cuda.capture(lambda: [made.start_all_gather(x + each).result() for each in range(3)], graph, stream)
        return x, graph, found

    kinds = (1, 37, 4096, 264192)
    for turn in range(80):
        x = bits(kinds[turn % 4])
        assert torch.equal(gathered(x, turn), by_nccl(x)), turn
    replays = [captured(bits(elements)) for elements in (4096, 264192)]
    for turn in range(20):
        x, graph, found = replays[turn % 3 % 2]
        x.copy_(bits(x.shape[1]))
        torch.cuda._sleep(10**6 if turn % size == rank else 1)
        graph.replay()
        between = bits(37)
        assert torch.equal(gathered(between, turn), by_nccl(between))
        for each, one in enumerate(found):
            assert torch.equal(one, by_nccl(x + each)), (turn, each)
    expected = {STORES}
    if os.environ[PEER_STORES] != "1":
        expected = {f"collective, since {PEER_STORES} is not 1 (rank 0)"}
    elif not all(reaches(rank, peer) for peer in range(size) if peer != rank):
        expected = {each for each in made.used if "no peer access" in each}
    assert made.used == expected


def scans(slices):
    """States behind the slices of other ranks are those of all-gathered messages, with some ranks late and in replayed graphs."""
    from onelaunch.ops.gla.launch_slices import MessageSizes, outgoing  # it needs Triton

    rank, size = slices.rank, len(slices.lengths)
    made = parallel.context(slices.group, 4, device="cuda").collectives
    rules = GlaRules(gla, bind(*(torch.zeros(1, 1, 4, each, device="cuda") for each in (32, 32, 96, 32))), "auto")
    random = torch.Generator("cuda").manual_seed(rank)
    sizes = {back: (range(rank + 1, size), range(rank)[::-1])[back] for back in (False, True)}

    def scanned(x, *, back):
        states, decays = x[0].split([4 * 32 * 96, 4 * 32])  # as the sums of a single segment, [V, K]
        sums = states.view(1, 4, 1, 32, 96).mT.contiguous(), decays.view(1, 4, 1, 32).contiguous()
        sent = outgoing(*sums, MessageSizes(4, 32, 96, 32), None, x, back=back)
        exchange = made.start_scan(sent, tuple(sizes[back]))
        torch.cuda._sleep(10**6 if rank == size // 2 else 1)
        ranks = sizes[not back][::-1]
        found = rules.scan(exchange, ranks, back=back) if ranks else None
        exchange.finish()
        return found

    def wanted(x, *, back):
        every = x.new_empty(size, x.shape[1])
        distributed.all_gather_into_tensor(every, x, group=slices.group)
        ranks = sizes[not back][::-1]
        return rules.fold(every, ranks, back=back) if ranks else None

    def drawn(turn):
        x = torch.rand(1, 4 * (32 * 96 + 32), device="cuda", generator=random)
        x[0, 4 * 32 * 96 :] *= turn % 3 > 0  # decays of zero
        return x

    def same(found, expected, turn):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected, msg=lambda text: f"{turn}: {text}")

    scanned(drawn(0), back=False)
    for turn in range(60):
        x = drawn(turn)
        torch.cuda._sleep(10**6 if turn % size == rank else 1)
        back = turn // 4 % 2 == 1  # several in a row in one direction, in which a rank that reads nothing is ahead
        same(scanned(x, back=back), wanted(x, back=back), turn)
    x, graph, stream = drawn(1), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    both = cuda.capture(lambda: [scanned(x, back=back) for back in (False, True)], graph, stream)
    for turn in range(20):
        x.copy_(drawn(turn))
        graph.replay()
        for back, found in zip((False, True), both, strict=True):
            same(found, wanted(x, back=back), turn)


def tensors_on_another_device(slices):
    """Every rank refuses tensors of a CPU, before any collective on them."""
    v = torch.zeros(1, 4, 3)
    with pytest.raises(ArgumentError, match=r"nccl for cuda.*the tensors are on cpu"):
        gated_scan(v, v, mesh=slices.group)
    v = v.cuda()
    assert gated_scan(v, v, mesh=slices.group).shape == v.shape  # the group is still good


def death(slices):
    """The last rank ends between two calls; the others end with an error within the time-out of the group.

    The kernel that waits for the messages ends by a trap, or NCCL's watchdog ends the process.
    """
    v = torch.zeros(1, 4, 3, device="cuda")
    made = parallel.context(slices.group, 4, device="cuda")
    gated_scan(v, v, mesh=made)
    torch.cuda.synchronize()
    if slices.rank == len(slices.lengths) - 1:
        os._exit(0)
    gated_scan(v, v, mesh=made)
    torch.cuda.synchronize()


CHECKS = {each.__name__: each for each in (results, layers, graphs, exchanges, scans, tensors_on_another_device, death)}


def main(folder, name):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT)
    )
    lengths = tuple(700 + 64 * each for each in range(size))
    CHECKS[name](Slices(distributed.group.WORLD, lengths))
    (folder / f"{rank}.passed").write_text(name)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
