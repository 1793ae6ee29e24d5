"""Tests of first calls: kernels are compiled side by side, once, and nothing is left behind by calls that fail.

Triton's compiler is the real one, its driver a stand-in that launches nothing, see ``first.py``. ``test_first_call_gpu.py`` has
the tests on a GPU.

``prose`` compares wording with the test's entry in ``tests/snapshots/prose.txt``. A test fails if it does not compare one of
its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone. ``machine`` replaces the GPU's driver
by a stand-in. ``vectors`` returns random vectors.
"""

from __future__ import annotations

import ast
import os
import threading
import warnings

import pytest
import torch

from onelaunch.errors import CompileNotice
from onelaunch.launch import side_by_side, workspace
from onelaunch.launch.launch import Launch
from onelaunch.launch.operator import Operator
from onelaunch.launch.side_by_side import Launching
from tests.launch.first import machine, vectors  # noqa: F401 - a fixture
from tests.launch.first_kernels import broken_kernel, double_kernel, slope_kernel, square_kernel

triton = pytest.importorskip("triton", reason="the tests compile kernels of Triton")

BLOCK = 128

NAMES = ["double_kernel", "slope_kernel", "square_kernel"]
"""Kernels of :data:`squared` and its gradient."""


def start(kernel, *tensors, **options):
    Launch(kernel, (tensors[0].numel() // BLOCK,), *tensors, BLOCK=BLOCK, **options).run()


def run_forward(x: torch.Tensor) -> torch.Tensor:
    doubled, out = torch.empty_like(x), torch.empty_like(x)
    start(double_kernel, x, doubled)
    start(square_kernel, doubled, out)
    return out


def run_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    start(slope_kernel, x, grad.contiguous(), out)
    return out


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def gradients(ctx, backward, grad):
    return (backward(grad, *ctx.saved_tensors),)


backward = Operator("test_first_squared_backward", run_backward)
squared = Operator("test_first_squared", run_forward, save=save, gradients=gradients, backward=backward)
"""Operator of the tests: ``(2 x) ** 2`` in two launches, and its gradient in a third."""


def call(x, *, grad=False):
    """Call the operator as an operation does. ``test_triton_cache.py`` launches its kernels by it too."""
    with Launching(lambda given: squared(given, grad=grad), x):
        return squared(x, grad=grad)


def is_apart(compiled):
    """Return whether all kernels were compiled on threads of their own."""
    return all(thread.startswith("onelaunch-compile") for _, thread in compiled)


def test_the_functions_that_launch_its_kernels_are_made_on_threads_too(machine):  # noqa: F811
    (x,) = vectors()
    call(x.requires_grad_(), grad=True).sum().backward()
    made = {}
    for name, signature, thread in machine.launchers:
        made.setdefault((name, str(signature)), []).append(thread.startswith("onelaunch-compile"))
    assert sorted(name for name, _ in made) == NAMES, "a launch has another signature than the one prepared for it"
    assert all(threads == [True, False] for threads in made.values()), "first on a thread, then by the launch"


def test_a_first_call_compiles_its_kernels_and_those_of_its_backward_pass_on_threads(machine):  # noqa: F811
    (x,) = vectors()
    out = call(x.requires_grad_(), grad=True)
    assert machine.names == NAMES
    assert is_apart(machine.compiled)
    assert machine.launched == ["double_kernel", "square_kernel"]
    out.sum().backward()
    assert machine.launched == ["double_kernel", "square_kernel", "slope_kernel"]
    assert machine.names == NAMES


def test_a_first_call_without_gradients_compiles_no_backward_pass(machine):  # noqa: F811
    call(*vectors())
    assert machine.names == ["double_kernel", "square_kernel"]
    x = vectors()[0].requires_grad_()
    call(x, grad=True).sum().backward()
    assert machine.names == NAMES


def test_a_backward_pass_compiles_its_kernels_side_by_side_if_no_call_foresaw_it(machine):  # noqa: F811
    def run(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def twice(ctx, operator, grad):
        return (operator(grad),)

    inner = Operator("test_first_inner", run_forward)
    outer = Operator("test_first_outer", run, save=save, gradients=twice, backward=inner)
    outer(vectors()[0].requires_grad_(), grad=True).sum().backward()
    assert machine.names == ["double_kernel", "square_kernel"]
    assert is_apart(machine.compiled)


def test_kernels_of_several_operators_are_compiled_together(machine):  # noqa: F811
    def layer(x):
        return squared(squared(x, grad=x.requires_grad) + 1, grad=torch.is_grad_enabled())

    other = vectors(size=512)[0]
    with Launching(layer, other.requires_grad_()):
        layer(other)
    assert machine.names == NAMES
    assert is_apart(machine.compiled)


def test_a_kernel_for_other_inputs_is_compiled_by_the_call_that_needs_it(machine):  # noqa: F811
    call(vectors()[0])
    call(torch.randn(257)[1:])  # not aligned
    assert machine.names == sorted(["double_kernel"] * 2 + ["square_kernel"])
    call(torch.randn(512, dtype=torch.float64))
    assert machine.names == sorted(["double_kernel"] * 3 + ["square_kernel"] * 2)
    assert is_apart(machine.compiled[-2:])


def test_calls_of_compiled_kernels_are_not_run_on_fake_tensors(machine, monkeypatch):  # noqa: F811
    call(*vectors())
    monkeypatch.setattr(Launching, "_builds", lambda *_: pytest.fail("a call without kernels to compile was imitated"))
    call(*vectors())
    call(*vectors(size=512))
    assert len(machine.launched) == 6


def test_two_threads_with_the_same_first_call_compile_once(machine, monkeypatch):  # noqa: F811
    both, x = threading.Barrier(2), vectors()[0]
    plain = Launching._builds

    def builds(*given):
        found = plain(*given)
        both.wait(30)  # both threads have met a kernel that is not compiled
        return found

    monkeypatch.setattr(Launching, "_builds", builds)
    threads = [threading.Thread(target=call, args=(x,)) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert machine.names == ["double_kernel", "square_kernel"]
    assert sorted(machine.launched) == sorted(["double_kernel", "square_kernel"] * 2)


def test_a_notice_says_after_some_time_what_is_compiled(machine, monkeypatch, prose):  # noqa: F811
    monkeypatch.setattr(side_by_side, "PATIENCE", 0.0)
    with prose.warns(CompileNotice, match="2 kernels") as said:
        call(*vectors())
    assert len(said) == 1
    shown = warnings.formatwarning(said[0].message, said[0].category, said[0].filename, said[0].lineno, said[0].line)
    assert shown == f"onelaunch:1: CompileNotice: {said[0].message}\n"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(*vectors(size=512))


def test_a_short_compilation_gives_no_notice(machine, monkeypatch):  # noqa: F811
    monkeypatch.setattr(side_by_side, "PATIENCE", 600.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(*vectors())
    assert machine.names == ["double_kernel", "square_kernel"]


def test_a_kernel_that_does_not_compile_raises_the_error_of_its_launch(machine):  # noqa: F811
    def run(x):
        out = torch.empty_like(x)
        start(double_kernel, x, out)
        start(broken_kernel, x, out)
        return out

    (x,) = vectors()
    for _ in range(2):
        with pytest.raises(triton.CompilationError), Launching(run, x):
            run(x)
    assert machine.names == ["double_kernel"]
    assert machine.launched == ["double_kernel"] * 2


def test_kernels_with_other_settings_of_the_compiler_are_found_by_their_launches(machine):  # noqa: F811
    from onelaunch.launch.launch import Mma

    def run(x):
        out = torch.empty_like(x)
        for kernel in (double_kernel, square_kernel):
            for mma in (Mma.NONE, Mma.WARP):
                start(kernel, x, out, mma=mma, num_warps=4 if mma is Mma.NONE else 8)
        return out

    (x,) = vectors()
    with Launching(run, x):
        run(x)
    assert machine.names == sorted(["double_kernel", "square_kernel"] * 2)
    assert is_apart(machine.compiled)
    assert "DISABLE_MMA_V3" not in os.environ


def test_code_that_cannot_be_imitated_compiles_as_ever(machine):  # noqa: F811
    def run(x):
        if x.sum().item() > -1e9:  # fake tensors have no values
            start(double_kernel, x, torch.empty_like(x))

    (x,) = vectors()
    with Launching(run, x):
        run(x)
    assert machine.names == ["double_kernel"]


def test_one_thread_compiles_nothing_ahead(machine, monkeypatch):  # noqa: F811
    monkeypatch.setenv(side_by_side.JOBS, "1")
    call(vectors()[0].requires_grad_(), grad=True)
    assert machine.compiled == [("double_kernel", "MainThread"), ("square_kernel", "MainThread")]


def test_nothing_is_compiled_ahead_while_operators_are_counted_or_a_graph_is_captured(machine, monkeypatch):  # noqa: F811
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        call(*vectors())
    assert {thread for _, thread in machine.compiled} == {"MainThread"}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call(torch.randn(256, dtype=torch.float64))
    assert {thread for _, thread in machine.compiled} == {"MainThread"}


def test_memory_that_runs_out_while_a_kernel_is_loaded_leaves_the_call_as_it_was(machine):  # noqa: F811
    machine.unloadable = 2
    (x,) = vectors()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            call(x)
    assert machine.launched == []
    call(x)
    assert machine.launched == ["double_kernel", "square_kernel"]
    assert machine.names == ["double_kernel", "square_kernel"]


def test_an_error_in_a_call_ends_its_context(machine):  # noqa: F811
    def run(x):
        raise MemoryError

    with pytest.raises(MemoryError), Launching(run, vectors()[0]):
        run(None)
    call(*vectors())
    assert machine.names == ["double_kernel", "square_kernel"]
    assert is_apart(machine.compiled)


def test_memory_that_runs_out_for_a_reserve_leaves_the_former_one(monkeypatch):
    monkeypatch.setattr(workspace, "RESERVE", 64)
    reserve, device = workspace.Reserve(), torch.device("cpu")
    reserve.fill(device)
    for _ in range(5):
        reserve.take(8)

    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", out_of_memory)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                reserve.fill(device)
    assert reserve._used == []
    reserve.fill(device)
    assert len(reserve._used) == 1


@pytest.mark.parametrize("times", [1, 3])
def test_a_compilation_that_another_thread_disturbed_is_made_again(times, machine, monkeypatch):  # noqa: F811
    """CPython's parser raises SystemError if another thread parses at the same time."""
    parse, disturbed = ast.parse, []

    def parse_after_an_error(*arguments, **options):
        thread = threading.current_thread().name
        if len(disturbed) < times and thread.startswith("onelaunch-compile"):
            disturbed.append(thread)
            raise SystemError("AST constructor recursion depth mismatch (before=39, after=34)")
        return parse(*arguments, **options)

    monkeypatch.setattr(ast, "parse", parse_after_an_error)
    call(vectors()[0])
    assert len(disturbed) == times
    assert is_apart(machine.compiled)
    assert machine.names == ["double_kernel", "square_kernel"]
