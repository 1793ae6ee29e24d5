"""Tests of plans: recorded calls that are replayed with other tensors, streams and threads, and calls that are not replayed.

They run on CPU memory with stand-in kernels, see ``replayed.py``. ``test_plan_gpu.py`` has the tests on a GPU.

``machine`` replaces the GPU's driver by a stand-in. ``Kernel`` is a stand-in kernel, computed by a Python function.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from onelaunch.errors import DriverError
from onelaunch.launch import parameters, workspace
from onelaunch.launch.facts import facts_of
from onelaunch.launch.imitation import observe
from onelaunch.launch.launch import Launch
from onelaunch.launch.packet import Address, Image, Packet, Parameters, place
from onelaunch.launch.parameters import NotPlannable, with_map
from onelaunch.launch.plan import Device, Plan
from onelaunch.launch.planned import Planned, refuse_plan, refused_calls
from onelaunch.launch.recording import Recorder, Recording, recorder
from tests.launch.replayed import Kernel, machine  # noqa: F401 - a fixture

N = 16
"""Elements of the vectors of most tests."""


def add(a, b, out, count, factor):
    """Write ``a + factor * b`` to the first elements of ``out``."""
    out[:count] = a[:count] + factor * b[:count]


@pytest.fixture
def adding(machine):  # noqa: F811
    """Return a kernel that adds two vectors."""
    return Kernel(machine, add, a="*fp32", b="*fp32", out="*fp32", count="i32", factor="fp32", BLOCK="constexpr")


class Called:
    """Planned function that counts how often its Python code runs."""

    def __init__(self, function):
        self.count = 0

        def counted(*inputs):
            self.count += 1
            return function(*inputs)

        self.planned = Planned(counted)

    def __call__(self, *inputs):
        return self.planned(*inputs)


@pytest.fixture
def sum_of(adding):
    """Return a planned function that launches one kernel."""

    def run(a, b, factor):
        out = torch.empty_like(a)
        Launch(adding, (3, 2), a, b, out, a.numel(), factor, BLOCK=8).run()
        return out

    return Called(run)


def vectors(count=2, size=N):
    return [torch.randn(size) for _ in range(count)]


def test_the_third_call_is_replayed_for_other_tensors(sum_of, machine):  # noqa: F811
    for call in range(5):
        a, b = vectors()
        torch.testing.assert_close(sum_of(a, b, 0.5), a + 0.5 * b)
        assert sum_of.count == min(call + 1, 2)
    assert machine.launches == [(7, (3, 2, 1))] * 3


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda a, b: (a.clone()[:8], b.clone()[:8], 0.5), id="shape"),
        pytest.param(lambda a, b: (torch.randn(2 * N)[::2], b, 0.5), id="stride"),
        pytest.param(lambda a, b: (torch.randn(N + 1)[1:], b, 0.5), id="alignment"),
        pytest.param(lambda a, b: (a.double(), b.double(), 0.5), id="dtype"),
        pytest.param(lambda a, b: (a, b, 0.25), id="number"),
        pytest.param(lambda a, b: (a, b, 1), id="type of a number"),
        pytest.param(lambda a, b: (a.requires_grad_(), b, 0.5), id="gradient"),
    ],
)
def test_a_plan_is_not_replayed_for_other_facts(sum_of, machine, other):  # noqa: F811
    for _ in range(3):
        sum_of(*vectors(), 0.5)
    launched, count = len(machine.launches), sum_of.count
    sum_of(*other(*vectors()))
    assert (len(machine.launches), sum_of.count) == (launched, count + 1)


def test_facts_tell_apart_what_is_equal():
    a = torch.zeros(4)
    keys = [facts_of(given).key for given in ((a, 1), (a, True), (a, 1.0), (a, 0.0), (a, -0.0), (a, 0), (a, None), ([a],), (a,))]
    assert len(set(keys)) == len(keys)
    assert facts_of((a, object())) is None
    assert facts_of((a.to_sparse(),)) is None


def test_a_plan_of_one_device_is_not_replayed_while_another_is_current(sum_of, machine):  # noqa: F811
    for _ in range(3):
        sum_of(*vectors(), 0.5)
    machine.device = 1
    sum_of(*vectors(), 0.5)
    assert (len(machine.launches), sum_of.count) == (1, 3)


@pytest.fixture
def tensors_on_gpu_0(machine, monkeypatch):  # noqa: F811
    """Pretend that all tensors are on GPU 0. The stand-in has the index of the GPU that is current."""

    @contextlib.contextmanager
    def at(index):
        before, machine.device = machine.device, index
        try:
            yield
        finally:
            machine.device = before

    monkeypatch.setattr(Device, "elsewhere", lambda _: None if machine.device == 0 else 0)
    monkeypatch.setattr(Device, "at", at)


@pytest.mark.usefixtures("tensors_on_gpu_0")
def test_calls_are_replayed_on_the_gpu_of_their_tensors(sum_of, machine):  # noqa: F811
    machine.device = 1
    for _ in range(5):
        a, b = vectors()
        torch.testing.assert_close(sum_of(a, b, 0.5), a + 0.5 * b)
    assert (len(machine.launches), sum_of.count) == (3, 2)
    assert machine.device == 1


@pytest.mark.usefixtures("tensors_on_gpu_0")
def test_a_function_that_raises_leaves_the_current_gpu_as_it_was(machine):  # noqa: F811
    def run(_):
        raise ValueError(machine.device)

    machine.device = 1
    with pytest.raises(ValueError, match=r"^0$"):
        Planned(run)(torch.zeros(N))
    assert machine.device == 1


@pytest.mark.usefixtures("tensors_on_gpu_0")
def test_kernels_are_launched_on_the_gpu_of_their_tensors(machine):  # noqa: F811
    def note(out):
        out[0] = machine.device

    machine.device, out = 3, torch.full((N,), -1.0)
    Launch(Kernel(machine, note, out="*fp32", BLOCK="constexpr"), (1,), out, BLOCK=8).run()
    assert (out[0], machine.device) == (0, 3)


def test_the_first_tensor_on_a_gpu_says_where_a_call_runs(machine):  # noqa: F811
    with FakeTensorMode():
        first, second = (torch.empty(2, device=f"cuda:{index}") for index in (1, 2))
    machine.device = 1
    assert Device.elsewhere([torch.zeros(2), 3, None]) is None
    assert Device.elsewhere([torch.zeros(2), None, first, second]) is None
    assert Device.elsewhere([torch.zeros(2), second, first]) == 2
    assert Device.elsewhere([4, SimpleNamespace(base=second)]) == 2  # a descriptor for TMA
    machine.device = 0
    assert Device.elsewhere([first]) == 1


def test_a_plan_that_allocates_nothing_is_one_of_the_device_of_its_inputs():
    assert Recorder([0.5, torch.zeros(2)]).recording.device == torch.device("cpu")
    assert Plan(Recording(device=torch.device("cuda", 1)), None, lambda _: None).index == 1
    assert Plan(Recording(), None, lambda _: None).index == 0


def test_inputs_in_one_storage_are_told_apart(adding):
    def run(a, b):
        out = torch.empty(N)
        Launch(adding, (1,), a.view(4, 4).flatten(), b[4:], out, 8, 1.0, BLOCK=8).run()
        return out[:8]

    called = Called(run)
    for _ in range(2):
        both = torch.randn(2 * N)
        called(both[:N], both[N:])
    a, b = vectors()  # of different storages, and in the other order
    torch.testing.assert_close(called(b, a), b[:8] + a[4:12])
    assert called.count == 2


def test_intermediate_tensors_and_operators_of_pytorch_are_repeated(adding):
    def run(a, b):
        first, second, third = (torch.empty(N) for _ in range(3))
        Launch(adding, (1,), a, b, first, N, 1.0, BLOCK=8).run()
        Launch(adding, (1,), first, b, second, N, 2.0, BLOCK=8).run()
        square = torch.empty(4, 8)
        torch.mm(second.view(4, 4), a.view(4, 4), out=square[:, 4:])
        Launch(adding, (1,), square[:, 4:].contiguous(), second[:8].repeat(2), third, N, 1.0, BLOCK=8).run()
        return [third.view(2, 8), torch.cat((first, second)), None]

    called = Called(run)
    for _ in range(4):
        a, b = vectors()
        third, both, nothing = called(a, b)
        first = a + b
        second = first + 2 * b
        expected = (second.view(4, 4) @ a.view(4, 4)).flatten() + second[:8].repeat(2)
        torch.testing.assert_close(third, expected.view(2, 8))
        torch.testing.assert_close(both, torch.cat((first, second)))
        assert nothing is None
        assert third.is_contiguous()
    assert called.count == 2


def test_memory_of_a_stream_is_asked_for_again(adding, machine, monkeypatch):  # noqa: F811
    words = {stream: torch.full((N,), float(stream)) for stream in (7, 8)}
    monkeypatch.setattr(workspace, "_workspace", lambda device, count: words[machine.stream(0)])

    def run(a):
        out = torch.empty(N)
        Launch(adding, (1,), a, workspace.workspace(a.device, N), out, N, 1.0, BLOCK=8).run()
        return out

    called = Called(run)
    for stream in (7, 7, 8, 7, 8):
        machine.streams[threading.get_ident()] = stream
        (a,) = vectors(1)
        torch.testing.assert_close(called(a), a + stream)
    assert called.count == 2
    assert [stream for stream, _ in machine.launches] == [8, 7, 8]


def test_threads_replay_one_plan_with_their_own_tensors(sum_of):
    for _ in range(3):
        sum_of(*vectors(), 0.5)
    wrong = []

    def work():
        for _ in range(100):
            a, b = vectors()
            if not torch.equal(sum_of(a, b, 0.5), a + 0.5 * b):
                wrong.append((a, b))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum_of.count == 2


def test_a_call_is_not_recorded_while_the_first_of_its_kind_still_runs(adding):
    """A recorded call compiles its kernels by itself, and the first call may be compiling them for all threads."""
    began, end, modes = threading.Event(), threading.Event(), []

    def run(a, b):
        modes.append(recorder() is not None)
        if len(modes) == 1:
            began.set()
            assert end.wait(60)
        out = torch.empty_like(a)
        Launch(adding, (1,), a, b, out, N, 1.0, BLOCK=8).run()
        return out

    planned = Planned(run)
    first = threading.Thread(target=planned, args=vectors())
    first.start()
    assert began.wait(60)
    planned(*vectors())
    assert modes == [False, False]
    end.set()
    first.join()
    planned(*vectors())
    assert modes == [False, False, True]
    assert len(planned.plans()) == 1


def test_a_plan_keeps_no_tensor(sum_of):
    kept = []
    for _ in range(4):
        a, b = vectors()
        kept += [weakref.ref(each) for each in (a, b, sum_of(a, b, 0.5))]
    del a, b
    gc.collect()
    assert [each() for each in kept] == [None] * len(kept)


def counter():
    return FlopCounterMode(display=False)


@pytest.mark.parametrize("seen_by", [counter, observe], ids=["dispatch mode", "observer of launches"])
def test_nothing_is_replayed_where_something_wants_to_see_it(sum_of, machine, seen_by):  # noqa: F811
    for _ in range(3):
        sum_of(*vectors(), 0.5)
    with seen_by():
        sum_of(*vectors(), 0.5)
    assert (len(machine.launches), sum_of.count) == (1, 3)


def test_nothing_is_replayed_under_hooks_of_triton(sum_of, machine):  # noqa: F811
    from triton import knobs

    for _ in range(3):
        sum_of(*vectors(), 0.5)
    seen = []
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        sum_of(*vectors(), 0.5)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert (len(machine.launches), len(seen)) == (1, 1)


def test_fake_tensors_are_not_replayed(sum_of, machine):  # noqa: F811
    for _ in range(3):
        sum_of(*vectors(), 0.5)
    with FakeTensorMode() as mode:
        a = mode.from_tensor(torch.randn(N))
        assert facts_of((a,)) is None
    assert len(machine.launches) == 1


def test_a_failed_launch_raises(sum_of, machine):  # noqa: F811
    for _ in range(3):
        sum_of(*vectors(), 0.5)
    machine.error = 700
    with pytest.raises(DriverError, match="700"):
        sum_of(*vectors(), 0.5)
    machine.error = 0
    a, b = vectors()
    torch.testing.assert_close(sum_of(a, b, 0.5), a + 0.5 * b)


def test_a_call_that_runs_out_of_memory_while_it_is_recorded_leaves_nothing(adding):
    problems = [None, torch.OutOfMemoryError("out of memory"), None, None]

    def run(a):
        if problems and (problem := problems.pop(0)) is not None:
            raise problem
        out = torch.empty(N)
        Launch(adding, (1,), a, a, out, N, 1.0, BLOCK=8).run()
        return out

    called = Called(run)
    called(*vectors(1))
    with pytest.raises(torch.OutOfMemoryError):
        called(*vectors(1))
    assert recorder() is None
    assert called.planned.plans() == []
    for _ in range(2):
        (a,) = vectors(1)
        torch.testing.assert_close(called(a), 2 * a)
    assert called.count == 3


def not_plannable(adding):
    """Return functions by the reason why they cannot be replayed."""
    constant = torch.ones(N)

    def launched(a, b=None):
        out = torch.empty(N)
        Launch(adding, (1,), a, a if b is None else b, out, N, 1.0, BLOCK=8).run()
        return out

    def unreported(a):
        out = torch.empty(N)
        adding.run(a, a, out, N, 1.0, grid=(1,), warmup=False, BLOCK=8)
        return out

    def refused(a):
        refuse_plan("as asked")
        return launched(a)

    return {
        "reads a value": lambda a: launched(a) * (a.sum().item() > -1e9),
        "reads a tensor that is no input": lambda a: launched(a, constant),
        "launches a kernel by other means": unreported,
        "is refused": refused,
        "returns a number": lambda a: (launched(a), 1),
    }


@pytest.mark.parametrize("reason", [*not_plannable(None)])
def test_a_call_that_cannot_be_repeated_runs_every_time(adding, machine, reason):  # noqa: F811
    called = Called(not_plannable(adding)[reason])
    for call in range(4):
        called(*vectors(1))
        assert called.count == call + 1
    assert not machine.launches
    (why,) = called.planned.refused()
    assert refused_calls()["counted"] == [why]
    called.planned.forget()
    assert "counted" not in refused_calls()


def test_a_kernel_with_other_parameters_than_expected_is_left_to_triton(sum_of, machine, monkeypatch):  # noqa: F811
    monkeypatch.setattr(parameters, "parameter_sizes", lambda function, most: [*machine.sizes(function, most), 4])
    for _ in range(4):
        a, b = vectors()
        torch.testing.assert_close(sum_of(a, b, 0.5), a + 0.5 * b)
    assert (sum_of.count, machine.launches) == (4, [])


def test_a_plan_that_depends_on_a_distance_is_replayed_at_that_distance_alone(adding):
    from onelaunch.kernels.tma import distance

    def run(a, b):
        out = torch.empty(N)
        Launch(adding, (1,), a, b, out, N, float(distance(a, b)), BLOCK=8).run()
        return out

    called = Called(run)
    memory = torch.ones(8 * N)
    near, far = (memory[:N], memory[N : 2 * N]), (memory[:N], memory[4 * N : 5 * N])
    for pair, count in ((near, 1), (near, 2), (near, 2), (far, 3), (far, 3), (near, 2 + 1)):
        apart = pair[1].data_ptr() - pair[0].data_ptr()
        torch.testing.assert_close(called(*pair), torch.full((N,), 1.0 + apart))
        assert called.count == count


def test_a_tensor_map_is_re_addressed_by_its_first_word():
    def encode(address):
        return address.to_bytes(8, "little") + bytes(range(120))

    found = with_map(Address(2, 32), encode, 0x1000)
    image = Image()
    placed = place(image, Parameters(1, (b"\1\0\0\0", found, bytes(8)), (1, 1, 1), 128, 0))
    packet = Packet(image, [placed])
    ((word, source, offset),) = placed.words
    assert (word * 8 % 128, source, offset) == (0, 2, 32)
    packet.words[word] = 0x2020
    content = memoryview(packet.words).cast("B")
    assert bytes(content[word * 8 : word * 8 + 128]) == encode(0x2020)


@pytest.mark.parametrize("encode", [lambda address: bytes(128), lambda address: address.to_bytes(8, "little") * 16])
def test_a_tensor_map_of_another_form_is_not_re_addressed(encode):
    with pytest.raises(NotPlannable):
        with_map(Address(0), encode, 0x1000)


def test_a_plan_that_another_thread_found_before_it_was_forgotten_is_not_replayed(sum_of):
    for _ in range(3):
        sum_of(*vectors(), 0.5)
    found = sum_of.planned._latest
    sum_of.planned.forget()
    sum_of.planned._latest = found  # as by a thread that looked the plan up just before
    count = sum_of.count
    sum_of(*vectors(), 0.5)
    assert sum_of.count == count + 1


def test_plans_are_forgotten(sum_of):
    for _ in range(3):
        sum_of(*vectors(), 0.5)
    assert [type(each) for each in sum_of.planned.plans()] == [Plan]
    sum_of.planned.forget()
    sum_of(*vectors(), 0.5)
    assert sum_of.count == 3


def test_memory_that_runs_out_during_a_first_call_leaves_no_plan(machine):  # noqa: F811
    failing = [True] * 3

    def function(x):
        out = x + 1
        if failing and failing.pop():
            raise torch.OutOfMemoryError("out of memory")
        return out * 2

    planned, (x,) = Planned(function), vectors(1)
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            planned(x)
        assert planned.plans() == []
    for _ in range(4):
        assert torch.equal(planned(x), (x + 1) * 2)
    assert len(planned.plans()) == 1
