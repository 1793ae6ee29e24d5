"""Processes of the tests of context parallelism: ``python -m tests.parallel.ranks SIZE FOLDER`` forks SIZE, which run all checks.

The names of checks may follow, to run these alone.

Forking saves the imports. Groups of 2 and 3 ranks are the first ranks of all. Every rank writes the names of the checks that have
passed, with their seconds, to a file. ``test_across_ranks.py`` starts this program, with gloo as the back end.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo  # which DDP imports when it wraps a module: here once instead of in each rank
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from onelaunch import nn, parallel
from onelaunch.errors import ArgumentError, PackingError, ShapeError, ValueRangeError, VariantUnsupported
from onelaunch.ops import gated_scan, gla
from onelaunch.ops.gla.slices import GlaRules
from onelaunch.parallel import agreement, contexts
from onelaunch.parallel.collectives import Collectives, Pending
from onelaunch.rank_studies.declare import find_rank_study
from onelaunch.rank_studies.run import measure
from tests.parallel.cases import Slices, attend, close, compare, compare_layers, decay, gla_tensors, leaf, rnn, scan

TIMEOUT = 60
"""Seconds that a collective may take, also after a rank has ended."""
LENGTHS = ((5, 7), (70, 61), (0, 9, 4), (5, 0, 6), (1, 0, 1, 0), (0, 0, 0, 0), (20, 1, 2, 70))
CHECKS = {}
GROUPS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def slices_of(lengths):
    """Return the slices on a group of that many ranks, or ``None`` on other ranks."""
    return Slices(GROUPS[len(lengths)], lengths) if distributed.get_rank() < len(lengths) else None


def each_slicing(lengths=LENGTHS):
    return ((slices, torch.Generator().manual_seed(3)) for each in lengths if (slices := slices_of(each)) is not None)


def cuts(total):
    """Return offsets of packed sequences, some without steps."""
    return [torch.tensor(each) for each in ([0, total // 3, total // 3, total // 2, total], [0, 0, min(total, 1), total, total])]


@check
def scans():
    for slices, random in each_slicing():
        for gated in (True, False):
            tensors = [leaf(random, 2, slices.total, 5), decay(random, 2, slices.total, 5)]
            tensors.append(leaf(random, 2, slices.total, 5) if gated else None)
            compare(slices, scan, tensors, [], leaf(random, 2, 5) if gated else None, None, mesh=slices.group, final=gated)
        tensors = [leaf(random, 2, slices.total, 6), decay(random, 2, slices.total, 5), leaf(random, 2, slices.total, 5)]
        compare(slices, rnn, tensors, [leaf(random, 6, 5)], None, None, mesh=slices.group, final=True)


@check
def attention_with_both_decays():
    for slices, random in each_slicing():
        for per_head in (False, True):
            initial = leaf(random, 2, 2, 16, 20) if per_head else None
            tensors = gla_tensors(random, 2, slices.total, per_head=per_head)
            compare(slices, attend, tensors, [], initial, None, mesh=slices.group, final=per_head)


@check
def attention_with_shared_heads_and_value_gates():
    for slices, random in each_slicing(((9, 4), (5, 0, 6))):
        for heads in ((4, 2, 2, 2), (4, 2, 2, 4), (2, 2, 4, 4), (4, 1, 2, 2)):
            tensors = gla_tensors(random, 1, slices.total, heads=heads, per_head=heads[0] == 2)
            compare(slices, attend, tensors, [], None, None, mesh=slices.group, final=True)
        for states in (2, 4):
            tensors = gla_tensors(random, 1, slices.total, heads=(4, 2, 2, 2))
            compare(slices, attend, tensors, [], leaf(random, 1, states, 16, 20), None, mesh=slices.group, final=True)
        tensors = gla_tensors(random, 2, slices.total, value_gate=True)
        compare(slices, attend, tensors, [], leaf(random, 2, 2, 16, 20), None, mesh=slices.group, final=True)


@check
def packed_sequences():
    for slices, random in each_slicing():
        for offsets in cuts(slices.total):
            n = len(offsets) - 1
            tensors = gla_tensors(random, 1, slices.total)
            compare(slices, attend, tensors, [], leaf(random, n, 2, 16, 20), offsets, mesh=slices.group, final=True)
            tensors = [leaf(random, 1, slices.total, 5), decay(random, 1, slices.total, 5), None]
            compare(slices, scan, tensors, [], leaf(random, n, 5), offsets, mesh=slices.group, final=True)
        tensors = gla_tensors(random, 1, slices.total, per_head=True)
        compare(slices, attend, tensors, [], None, offsets, mesh=slices.group, final=False)


@check
def low_precision_and_resets():
    for slices, random in each_slicing(((9, 4), (5, 0, 6))):
        for dtype in (torch.bfloat16, torch.float16):
            tensors = gla_tensors(random, 1, slices.total, dtype=dtype)
            compare(slices, attend, tensors, [], None, None, mesh=slices.group, final=True, dtype=dtype)
        log_decay = decay(random, 1, slices.total, 5).detach()
        log_decay[:, ::3] = float("-inf")
        tensors = [leaf(random, 1, slices.total, 5), log_decay.requires_grad_(), leaf(random, 1, slices.total, 5)]
        compare(slices, scan, tensors, [], leaf(random, 1, 5), None, mesh=slices.group, final=True)


@check
def layers():
    torch.manual_seed(0)
    made = [
        (nn.GatedLinearAttention(hidden_size=32, num_heads=2, expand_k=1.0, use_short_conv=True), None),
        (nn.GatedLinearAttention(hidden_size=32, num_heads=2, expand_k=1.0), None),
        (nn.SimpleGatedLinearAttention(hidden_size=64, num_heads=4, num_kv_heads=2), None),
        (nn.LinearRNN(32), None),
        (nn.HGRNAttention(hidden_size=32, use_short_conv=True), None),
        (nn.HGRN2Attention(hidden_size=32, expand_ratio=16, use_short_conv=True), torch.rand(32) * 0.3),
    ]
    for slices, _ in each_slicing(((5, 7), (1, 2, 1, 0), (4, 1, 1, 6))):
        for layer, bound in made:
            compare_layers(slices, layer, 2, None, mesh=slices.group, bound=bound)
            compare_layers(slices, layer, 1, cuts(slices.total)[0], mesh=slices.group, bound=bound)


@contextmanager
def events():
    """Yield a list that collects, while the context lasts, what is started, waited for and computed, in order."""
    seen, started, result, run = [], dict(vars(Collectives)), Pending.result, GlaRules.run

    def starting(kind):
        def start(*arguments):
            pending = started[f"start_{kind}"](*arguments)
            pending.kind = kind
            seen.append(f"{kind} started")
            return pending

        return start

    def waited(pending):
        if not pending._waited:
            seen.append(f"{pending.kind} waited for")
        return result(pending)

    def ran(rules, tensors, *rest):
        seen.append("call")
        if tensors[2].requires_grad:
            tensors[2].register_hook(lambda _: seen.append("gradients of the call"))
        return run(rules, tensors, *rest)

    def logged(owner, name, event):
        function = getattr(owner, name)

        def called(*arguments, **named):
            seen.append(event)
            return function(*arguments, **named)

        patch.setattr(owner, name, called)

    with pytest.MonkeyPatch.context() as patch:
        for kind in ("all_gather", "all_reduce"):
            patch.setattr(Collectives, f"start_{kind}", starting(kind))
        patch.setattr(Pending, "result", waited)
        patch.setattr(GlaRules, "run", ran)
        logged(GlaRules, "initial_gradient", "gradient of the initial state")
        logged(nn.GatedLinearAttention, "log_decay", "decays")
        logged(nn.ShortConvolution, "forward", "convolution")
        yield seen


@check
def order_of_events():
    """Collectives are started before local work that does not need them, and waited for behind it."""
    slices, random = slices_of((4, 9, 5)), torch.Generator().manual_seed(3)
    if slices is None:
        return
    made = parallel.context(slices.group, slices.lengths[slices.rank], device="cpu")
    first, last = slices.rank == 0, slices.rank == 2
    mine = [slices.of(each).detach().requires_grad_() for each in gla_tensors(random, 1, slices.total)[:4]]
    with events() as seen:
        o, state = gla(*mine, output_final_state=True, mesh=made)
        gathered = ["all_gather started", "call", "all_gather waited for"]
        if not first:
            gathered = ["all_gather started", "all_gather waited for", "call"]
        assert seen == [*gathered, "all_reduce started", "all_reduce waited for"], seen
        seen.clear()
        (o.sum() + state.sum()).backward()
    local = [] if first else ["gradient of the initial state"]  # nobody waits for it where the sequence begins
    if last:  # its message holds the gradient of the final state, and its call needs no message
        wanted = [*local, "all_reduce waited for", "all_gather started", "gradients of the call", "all_gather waited for"]
    else:  # the last rank sends after the all-reduce, which must have run here before a kernel waits for messages (passes.py)
        wanted = [*local, "all_gather started", "all_reduce waited for", "all_gather waited for", "gradients of the call"]
    assert seen == ["all_reduce started", *wanted]

    layer = nn.GatedLinearAttention(hidden_size=32, num_heads=2, expand_k=1.0, use_short_conv=True)
    x = torch.randn(1, slices.lengths[slices.rank], 32, requires_grad=True)
    with events() as seen:
        layer.gk_proj_weight.register_hook(lambda _: seen.append("gradient of the decays' weight"))
        o, _, _ = layer(x, mesh=made)
        halo, convolutions = ["all_gather started", "decays"], ["convolution"] * 3
        waited = ["all_gather waited for"]
        assert seen[:6] == ([*halo, *convolutions, *waited] if first else [*halo, *waited, *convolutions])
        seen.clear()
        o.sum().backward()
    assert seen[-3:] == ["all_reduce started", "gradient of the decays' weight", "all_reduce waited for"]


@check
def meshes_and_contexts():
    """A mesh is a group; a context is one too, whose later calls of a known kind exchange nothing but data."""
    slices, random = slices_of((3, 4, 2, 5)), torch.Generator().manual_seed(3)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    offsets = torch.tensor([0, 5, 14])
    tensors = gla_tensors(random, 1, slices.total)
    compare(slices, attend, tensors, [], None, offsets, mesh=mesh, final=True)
    made = parallel.context(mesh, slices.lengths[slices.rank], device="cpu", cu_seqlens=offsets)
    assert (made.size, made.rank, made.lengths, made.offsets) == (4, slices.rank, slices.lengths, (0, 5, 14))
    compare(slices, attend, tensors, [], None, offsets, mesh=made, final=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contexts, "agree", None)  # which nothing calls now
        compare(slices, attend, tensors, [], None, offsets, mesh=made, final=True)
    with pytest.raises(ArgumentError, match="mesh is a Context of"):
        gla(*(torch.zeros(1, 7, 2, 16) for _ in range(3)), mesh=made)
    mine = [slices.of(each) for each in tensors[:4]]
    with pytest.raises(ArgumentError, match="made with other cu_seqlens"):
        gla(*mine, cu_seqlens=offsets.clone(), mesh=made)


@check
def data_parallel_modules_and_activation_checkpointing():
    """DDP over the ranks of the slices averages the gradients; a recomputed forward pass exchanges states again."""
    slices = slices_of((6, 9, 1, 4))
    torch.manual_seed(0)
    layer, x = nn.SimpleGatedLinearAttention(hidden_size=32, num_heads=2), torch.randn(2, slices.total, 32)
    layer(x)[0].square().sum().backward()
    wanted = [each.grad.clone() for each in layer.parameters()]
    model = DistributedDataParallel(layer)
    for checkpointed in (False, False, False, True):  # a call is replayed from the third on, with fewer saved tensors
        layer.zero_grad()
        run = partial(model, mesh=slices.group)
        y = checkpoint(run, slices.of(x), use_reentrant=False)[0] if checkpointed else run(slices.of(x))[0]
        (4 * y.square().sum()).backward()
        for each, gradient in zip(layer.parameters(), wanted, strict=True):
            close(each.grad, gradient, torch.float32, "averaged gradient")


@check
def compiled_code():
    """The graph ends before a call with collectives; results, states and gradients of packed sequences are the same.

    Compiling takes long, so one of two ranks compiles the operation, and the other one the layer.
    """
    slices, random = slices_of((6, 9)), torch.Generator().manual_seed(3)
    if slices is None:
        return

    def run(tensors, whole, **named):
        return attend([2 * tensors[0], *tensors[1:]], whole, **named)

    compiled = torch.compile(run, backend="eager") if slices.rank == 0 else run

    def either(tensors, whole, **named):
        return (compiled if "mesh" in named else run)(tensors, whole, **named)

    offsets = torch.tensor([0, 4, 4, 11, 15])
    compare(slices, either, gla_tensors(random, 1, 15), [], leaf(random, 4, 2, 16, 20), offsets, mesh=slices.group, final=True)
    layer = nn.GatedLinearAttention(hidden_size=32, num_heads=2, expand_k=1.0, use_short_conv=True)
    for parameter in layer.parameters():
        distributed.broadcast(parameter.data, 0, group=slices.group)
    x = leaf(random, 1, 15, 32)
    mine = slices.of(x).detach().requires_grad_()
    made = parallel.context(slices.group, mine.shape[1], device="cpu")
    own = torch.compile(layer, backend="eager") if slices.rank == 1 else layer
    found, wanted = own(mine, mesh=made)[0], layer(x)[0]
    close(found, slices.of(wanted), torch.float32, "output")
    (gradient,) = torch.autograd.grad(wanted.square().sum(), x)
    found.square().sum().backward()
    close(mine.grad, slices.of(gradient), torch.float32, "gradient of the input")
    v = torch.zeros(1, 6 + 3 * slices.rank, 5)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(gated_scan, backend="eager", fullgraph=True)(v, v, mesh=slices.group)


@check
def study_of_ranks():
    """Every rank gets the same measurements, and the results of slices are those of one process."""
    study = find_rank_study("context-parallel").model_copy(update={"rounds": 2})
    found = measure(study, torch.device("cpu"), "small")
    assert [(each.direction, each.regime, each.ranks, len(each.one)) for each in found] == [
        ("forward", "eager", 4, 2),
        ("forward_backward", "eager", 4, 2),
    ]
    assert [each.exchange for each in found] == ["collective"] * 2
    assert list(found[1].differences) == ["o", "q", "k", "v", "g"]
    assert max(found[1].differences.values()) < 1e-5
    same = [None] * 4
    distributed.all_gather_object(same, [(each.one, each.sliced, each.differences) for each in found])
    assert all(each == same[0] for each in same)


def refused(error, message, *, others=ArgumentError, on=None, mesh=None, **given):
    """Assert that a scan is refused on every rank; on rank ``on`` with ``error``, on others with ``others``."""
    rank = distributed.get_rank()
    arguments = {"v": torch.zeros(1, 4, 3), "log_decay": torch.zeros(1, 4, 3)}
    arguments.update(given if on in (None, rank) else {})
    with pytest.raises(error if on in (None, rank) else others, match=message):
        gated_scan(**arguments, mesh=distributed.group.WORLD if mesh is None else mesh)


@check
def wrong_calls_are_errors_on_every_rank():
    half, offsets = torch.float16, torch.tensor([0, 16])
    refused(
        ArgumentError, r"dtype differs .* float32 on rank 0, 1, 3; float16 on rank 2", on=2, v=torch.zeros(1, 4, 3, dtype=half)
    )
    wide = torch.zeros(1, 4, 5)
    refused(ArgumentError, "sizes differs", on=1, v=wide, log_decay=wide)
    refused(ArgumentError, "gradients differs", on=1, v=torch.zeros(1, 4, 3, requires_grad=True))
    refused(ArgumentError, "cu_seqlens differs|flags differs", on=1, cu_seqlens=offsets)
    offsets_of_this_rank = torch.tensor([0, 3 + distributed.get_rank() // 3, 16])
    refused(
        ArgumentError, r"cu_seqlens differs .*0, 3, 16.* on rank 0, 1, 2; .*0, 4, 16.* on rank 3", cu_seqlens=offsets_of_this_rank
    )
    with pytest.raises(ArgumentError, match="cu_seqlens differs"):
        parallel.context(distributed.group.WORLD, 4, device="cpu", cu_seqlens=offsets_of_this_rank)
    with pytest.raises(ArgumentError, match="length is -1" if distributed.get_rank() == 2 else "Rank 2 of mesh"):
        parallel.context(distributed.group.WORLD, -1 if distributed.get_rank() == 2 else 4, device="cpu")
    refused(PackingError, "runs to 15; it must run to 16", cu_seqlens=offsets - torch.tensor([0, 1]))
    refused(PackingError, "never decrease", on=3, cu_seqlens=torch.tensor([0, 9, 4, 16]))
    refused(ValueRangeError, "log_decay holds 1", on=1, log_decay=torch.ones(1, 4, 3))
    refused(ShapeError, "log_decay has shape", on=0, log_decay=torch.zeros(1, 5, 3))
    refused(VariantUnsupported, "fused", on=0, variant="fused")
    refused(ArgumentError, "v is str", on=2, v="x")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "backends", lambda group: {"cuda": "nccl"})
        refused(ArgumentError, r"nccl for cuda.*the tensors are on cpu")
    flat = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    refused(ArgumentError, r"mesh has 2 dimensions; .* mesh\[\"cp\"\]", mesh=flat)
    refused(ArgumentError, "mesh is str", mesh="world")
    if distributed.get_rank() == 3:
        refused(ArgumentError, "mesh", mesh=GROUPS[3])
    own = distributed.get_rank()
    q = torch.zeros(1, 4, 2, 16)
    with pytest.raises(ArgumentError, match=r"scale differs .* 0.25 on rank 0, 1, 2; 1.0 on rank 3"):
        gla(q, q, q, q, scale=1.0 if own == 3 else 0.25, mesh=distributed.group.WORLD)
    with pytest.raises(ArgumentError, match="flags differs"):
        gla(q, q[:, :, : 1 + own % 2], q, q, mesh=distributed.group.WORLD)
    with pytest.raises(ArgumentError, match=r"sizes differs .*\(1, 32\) on rank 0, 1, 2; \(2, 32\) on rank 3"):
        nn.LinearRNN(32)(torch.zeros(1 + own // 3, 4, 32), mesh=distributed.group.WORLD)
    made = parallel.context(distributed.group.WORLD, 4, device="cpu")
    with pytest.raises(ArgumentError, match="dtype differs"):  # a kind of call that the context does not know yet
        gla(*(q.to(half if own == 1 else torch.float32) for _ in range(4)), mesh=made)
    with pytest.raises(ArgumentError, match="use_cache"):
        nn.LinearRNN(32, layer_idx=0)(torch.zeros(1, 4, 32), use_cache=True, mesh=distributed.group.WORLD)


@check
def a_rank_that_does_not_come_ends_the_others():
    """The others get an error within the time-out of the group; other groups go on."""
    seconds = 2
    group = distributed.new_group(timeout=timedelta(seconds=seconds))
    v = torch.zeros(1, 4, 3)
    begun = time.monotonic()
    if distributed.get_rank() == 3:
        time.sleep(2 * seconds)
    else:
        with pytest.raises(RuntimeError):
            gated_scan(v, v, mesh=group)
        assert time.monotonic() - begun < 2 * seconds
    distributed.barrier()


@check
def a_rank_that_dies_ends_the_others():
    """The last check: rank 3 ends between two calls, and the others get an error within the time-out of the group."""
    v = torch.zeros(1, 4, 3)
    made = parallel.context(distributed.group.WORLD, 4, device="cpu")
    gated_scan(v, v, mesh=made)
    if distributed.get_rank() == 3:
        return
    begun = time.monotonic()

    def twice():  # the first call may still get the message of the rank that ends
        gated_scan(v, v, mesh=made)
        gated_scan(v, v, mesh=made)

    with pytest.raises(RuntimeError):
        twice()
    assert time.monotonic() - begun < TIMEOUT + 5


def main(rank, size, folder):
    torch.set_num_threads(1)
    limit = timedelta(seconds=TIMEOUT)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=limit)
    GROUPS.update({n: distributed.new_group(list(range(n)), timeout=limit) for n in range(2, size)})
    GROUPS[size] = distributed.group.WORLD
    passed = {}
    for name in sys.argv[3:] or CHECKS:
        begun = time.monotonic()
        CHECKS[name]()
        passed[name] = time.monotonic() - begun
    (folder / f"{rank}.json").write_text(json.dumps(passed))


def forked(rank, size, folder):
    """Return the process number of a fork that runs all checks, with its output in a file."""
    if child := os.fork():
        return child
    code = 1
    try:
        with (folder / f"{rank}.log").open("w") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        main(rank, size, folder)
        code = 0
    except BaseException:  # noqa: BLE001 - a child must not run what the parent has to do
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def import_what_calls_import() -> None:
    """Make a first call of each operation before the ranks are forked: it imports Triton and SymPy, once instead of in each."""
    with torch.no_grad():
        v, q = torch.zeros(1, 2, 3), torch.zeros(1, 2, 1, 16)
        gated_scan(v, v)
        gla(q, q, q, q)


if __name__ == "__main__":
    import_what_calls_import()
    count, place = int(sys.argv[1]), Path(sys.argv[2])
    children = [forked(rank, count, place) for rank in range(count)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(map(abs, codes)))
