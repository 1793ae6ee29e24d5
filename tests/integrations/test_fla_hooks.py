"""Tests of ``accelerate()`` without a model, with stand-ins for fla's packages, since fla's kernels need a GPU."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from onelaunch import accelerate, dispatch
from onelaunch.dispatch import choice
from onelaunch.dispatch.measured import Measured
from onelaunch.errors import ArgumentError
from onelaunch.integrations import fla_hooks
from onelaunch.integrations.fla_calls import Hook
from onelaunch.operation import Query, requirements
from onelaunch.ops import gla
from onelaunch.ops.gated_scan import functions as scans
from onelaunch.ops.gla import functions
from tests.devices import HOPPERS, forget, pretend
from tests.integrations import fla_standin

FLA = "fla"
"""First result of every function of the stand-in."""


@pytest.fixture
def hooked(fla, monkeypatch):
    """Return a function that installs the stand-in; hooks are taken out at the end of the test."""
    yield lambda **options: fla_standin.install(fla, monkeypatch, **options)
    fla_hooks._remove(list(fla_hooks._INSTALLED))


@pytest.fixture
def faster(monkeypatch):
    """Let measured times say of every call that ours is faster."""
    monkeypatch.setattr(dispatch, "why_not_faster", lambda *key: None)


def called(name):
    """Return the function that fla's package exports now, called as users call it."""
    target = next(each for each in fla_hooks.TARGETS if each.name == name)
    return getattr(sys.modules[target.package], name)


def arguments(name, steps=3):
    """Return arguments of a function of fla."""
    if name.endswith("hgrn"):
        return torch.randn(2, steps, 4), -torch.rand(2, steps, 4)
    gate = (2, steps, 1) if "simple" in name else (2, steps, 1, 16)
    return *torch.randn(3, 2, steps, 1, 16), -torch.rand(gate)


OURS = {
    "chunk_gla": functions.chunk_gla,
    "fused_recurrent_gla": functions.fused_recurrent_gla,
    "chunk_simple_gla": functions.chunk_simple_gla,
    "fused_recurrent_simple_gla": functions.fused_recurrent_simple_gla,
    "fused_chunk_simple_gla": functions.chunk_simple_gla,
    "chunk_hgrn": scans.chunk_hgrn,
    "fused_recurrent_hgrn": scans.fused_recurrent_hgrn,
}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.usefixtures("faster")
def test_ours_runs_a_call_that_was_measured_faster(name, hooked):
    hooked()
    given = arguments(name)
    with accelerate() as report:
        o, state = called(name)(*given, output_final_state=True)
    want = OURS[name](*given, output_final_state=True)
    assert torch.equal(o, want[0])
    assert torch.equal(state, want[1])
    assert report.calls == {name: 1}
    assert not report.fallbacks
    assert called(name)(*given) == (FLA, name)
    assert report.calls == {name: 1}


@pytest.mark.parametrize("name", OURS)
def test_fla_runs_a_call_that_was_not_measured(name, hooked, prose):
    hooked()
    with accelerate() as report:
        given = arguments(name)
        assert called(name)(*given) == called(name)(*given) == (FLA, name)
    assert not report.calls
    assert report.fallbacks == {(name, "no similar call was measured"): 2}
    if name == "chunk_gla":
        prose(str(report))


def test_final_states_have_the_dtypes_of_fla(hooked, faster):
    hooked()
    x, g = (each.half() for each in arguments("chunk_hgrn"))
    with accelerate():
        assert called("chunk_hgrn")(x, g, output_final_state=True)[1].dtype is torch.float32
        assert called("fused_recurrent_hgrn")(x, g, output_final_state=True)[1].dtype is torch.float16
        assert called("fused_recurrent_hgrn")(x, g)[1] is None


def test_names_that_modules_hold_are_bound_and_bound_back(hooked, monkeypatch, faster):
    originals = hooked()
    early, late = types.ModuleType("early"), types.ModuleType("late")
    early.mine = originals["chunk_gla"]
    for each in (early, late):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    given = arguments("chunk_gla")
    report = accelerate()
    late.theirs = kept = called("chunk_gla")
    assert early.mine is kept is sys.modules["fla.ops.gla.chunk"].chunk_gla
    assert (kept.__name__, kept.__module__) == ("chunk_gla", "fla.ops.gla.chunk")
    kept(*given)
    report.undo()
    report.undo()
    assert early.mine is late.theirs is called("chunk_gla") is originals["chunk_gla"]
    assert kept(*given) == (FLA, "chunk_gla")
    assert report.calls == {"chunk_gla": 1}


def test_a_second_call_hooks_nothing_again(hooked, prose, faster):
    hooked()
    first, second = accelerate(), accelerate()
    assert len(first.hooked) == len(second.already) == len(fla_hooks.TARGETS)
    assert second.hooked == first.already == ()
    called("chunk_gla")(*arguments("chunk_gla"))
    assert first.calls == second.calls == {"chunk_gla": 1}
    second.undo()
    called("chunk_gla")(*arguments("chunk_gla"))
    assert first.calls == {"chunk_gla": 2}
    prose(str(second))
    first.undo()
    assert accelerate().hooked == first.hooked


def test_an_error_leaves_nothing_hooked(hooked, monkeypatch):
    originals = hooked()

    def register(entry_point, **options):
        if entry_point.__name__ == "fused_chunk_simple_gla":
            raise MemoryError
        return fla_standin.register(entry_point, **options)

    monkeypatch.setattr(sys.modules["fla.backends"], "register", register)
    with pytest.raises(MemoryError):
        accelerate()
    assert not fla_hooks._INSTALLED
    for name, original in originals.items():
        assert called(name) is original
        assert called(name)(*arguments(name)) == (FLA, name)


@pytest.mark.parametrize("version", ["0.5.1", "0.7.0"])
def test_other_releases_are_refused(version, hooked, fla, prose):
    hooked()
    fla.__version__ = version
    with pytest.raises(ArgumentError) as error:
        accelerate()
    prose(str(error.value))


@pytest.mark.parametrize("known", [False, True])
def test_without_fla_or_its_backends(known, monkeypatch, prose):
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    if known:
        monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ArgumentError) as error:
        accelerate()
    prose(str(error.value))


def test_functions_that_cannot_be_hooked_are_named(hooked, monkeypatch, prose):
    hooked(dispatching=False)
    monkeypatch.setattr(sys.modules["fla.ops.gla"], "chunk_gla", accelerate)
    monkeypatch.delattr(sys.modules["fla.ops.hgrn"], "chunk_hgrn")
    report = accelerate()
    assert set(report.hooked).isdisjoint(report.refused)
    prose(str(report))


class Odd(torch.Tensor):
    """Class of tensors of somebody else."""


def _called(name, change=lambda *given: given, **options):
    return lambda: called(name)(*change(*arguments(name)), **options)


CALLS = {
    "reverse": _called("fused_recurrent_gla", reverse=True),
    "g_gamma": _called("chunk_simple_gla", lambda q, k, v, g: (q, k, v, None, -torch.rand(1))),
    "no decay": _called("fused_recurrent_simple_gla", lambda q, k, v, g: (q, k, v)),
    "many steps": lambda: called("fused_recurrent_gla")(*arguments("fused_recurrent_gla", 65)),
    "heads": _called("chunk_gla", lambda q, k, v, g: (q.expand(-1, -1, 2, -1), k, v, g)),
    "chunk_size": _called("chunk_simple_gla", chunk_size=32),
    "variant": _called("fused_recurrent_gla", variant=None),
    "cu_seqlens_cpu": _called("chunk_gla", cu_seqlens_cpu=torch.tensor([0, 3])),
    "small heads": _called("chunk_gla", lambda *given: [each[..., :8] for each in given]),
    "one argument": lambda: called("chunk_hgrn")(x=torch.ones(1), g=[1.0]),
    "subclass": _called("chunk_hgrn", lambda x, g: (x.as_subclass(Odd), g)),
    "no such argument": lambda: fla_hooks._INSTALLED[0].hook.why_not((), {"q": torch.ones(1)}) and (FLA, None),
    "states of chunk_hgrn": lambda: called("chunk_hgrn")(
        torch.randn(2, 3, 4, requires_grad=True), -torch.rand(2, 3, 4), output_final_state=True
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.usefixtures("faster")
def test_fla_runs_what_ours_does_not_take_or_was_not_measured(call, hooked, prose):
    hooked()
    with accelerate() as report:
        assert CALLS[call]()[0] == FLA
    ((_, reason),) = report.fallbacks
    prose(reason)


@pytest.mark.usefixtures("faster")
def test_autocast_and_transforms(hooked, prose):
    hooked()
    given = arguments("chunk_gla")
    with accelerate() as report:
        with torch.autocast("cpu", torch.bfloat16):
            assert called("chunk_gla")(*given)[0] == FLA
            low = called("chunk_gla")(*[each.bfloat16() for each in given[:3]], given[3])[0]
        assert called("chunk_gla")(*given)[0].dtype is torch.float32  # decided again
        seen = []
        torch.func.vmap(lambda x: seen.append(called("chunk_hgrn")(x, x)) or x)(torch.zeros(2, 2, 3, 4))
    assert low.dtype is torch.bfloat16
    assert seen == [(FLA, "chunk_hgrn")]
    prose("\n".join(reason for _, reason in report.fallbacks))


def test_gradients_and_parameters(hooked, faster):
    hooked()
    x, g = arguments("chunk_hgrn")
    x = nn.Parameter(x)
    with accelerate():
        called("chunk_hgrn")(x, g)[0].sum().backward()
    assert x.grad.any()


def test_code_of_torch_compile_leaves_its_graph_where_fla_does(hooked, faster):
    hooked(mark=torch.compiler.disable)
    x, g = arguments("chunk_hgrn")
    with accelerate() as report:
        compiled = torch.compile(lambda x, g: called("chunk_hgrn")(x + 1, g)[0] * 2, backend="eager")
        torch.testing.assert_close(compiled(x, g), scans.chunk_hgrn(x + 1, g)[0] * 2)
    assert report.calls == {"chunk_hgrn": 1}


def test_fla_keeps_a_call_in_a_graph(hooked, faster):
    hooked()
    x, g = arguments("chunk_hgrn")
    with accelerate() as report:
        compiled = torch.compile(lambda x, g: (x + 1, called("chunk_hgrn")(x, g)), backend="eager", fullgraph=True)
        assert compiled(x, g)[1] == (FLA, "chunk_hgrn")
    assert not report.calls + report.fallbacks


def test_variants_that_call_fla_refuse_meanwhile(hooked, monkeypatch, prose):
    hooked()
    monkeypatch.setattr(requirements, "package_installed", lambda package: True)
    query = Query("gla", "cuda:0", torch.bfloat16, (4, 2048, 16, 128, 128))
    assert gla.variants["fla"].why_not(query) is None
    with accelerate():
        prose(gla.variants["fla"].why_not(query))
    assert gla.variants["fla"].why_not(query) is None


def test_forgotten_choices_are_asked_for_again(hooked, monkeypatch):
    hooked()
    answers = []
    monkeypatch.setattr(dispatch, "why_not_faster", lambda *key: answers.append(key) or "no")
    given = arguments("chunk_hgrn")
    with accelerate() as report:
        for _ in range(3):
            called("chunk_hgrn")(*given)
            called("chunk_hgrn")(given[0], g=given[1])
            called("chunk_hgrn")(given[0], g=given[1])  # as the call before
        assert len(answers) == 2
        with torch.no_grad():
            called("chunk_hgrn")(given[0], g=given[1])
        called("chunk_hgrn")(given[0].requires_grad_(), g=given[1])
        assert len(answers) == 4
        dispatch.forget()
        called("chunk_hgrn")(*given)
    assert len(answers) == 5
    assert report.fallbacks.total() == 12


def test_the_dtype_of_autocast_is_noticed(hooked, monkeypatch):
    hooked()
    given = arguments("chunk_hgrn")
    with accelerate() as report:
        for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype):
                called("chunk_hgrn")(given[0].half(), given[1])
    assert list(report.fallbacks.values()) == [2, 1]


QUERY = Query("gla", "cpu", torch.float32, (4, 2048, 16, 128, 128))


def row(steps=2048, noise=1.0, unsupported=(), **times):
    """Return a measured row of ``gla``, with times of the chosen variant and of fla."""
    named = {dispatch.choose(QUERY).name if name == "ours" else name: time for name, time in times.items()}
    sizes = {"B": 4, "T": steps, "H": 16, "K": 128, "V": 128}
    return Measured("a GPU", sizes, named, noise=noise, unsupported=frozenset(unsupported))


ROWS = {
    "faster": lambda: row(ours=10.0, fla=11.0),
    "a tie": lambda: row(ours=10.0, fla=10.2),
    "within noise": lambda: row(ours=10.0, fla=11.0, noise=1.2),
    "slower": lambda: row(ours=20.0, fla=11.0),
    "fla not measured": lambda: row(ours=20.0, unsupported=["fla"]),
    "ours not measured": lambda: row(fla=20.0),
    "few steps": lambda: row(64, ours=10.0, fla=20.0),
    "none": lambda: None,
}


@pytest.mark.parametrize("borrowed", [False, True])
@pytest.mark.parametrize("case", ROWS)
def test_what_measured_rows_say(case, borrowed, monkeypatch, prose):
    found, chosen = ROWS[case](), dispatch.choose(QUERY)
    monkeypatch.setattr(choice, "choose", lambda query: chosen)

    def looked_up(operation, query, *, borrow, which=None):
        return found if borrow is borrowed and found and (which is None or which(found)) else None

    monkeypatch.setattr(choice, "_looked_up", looked_up)
    said = dispatch.why_not_faster(QUERY, "fla", 64)
    assert (said is None) is (case == "faster")
    if said is not None and not borrowed:
        prose(said)


@pytest.mark.parametrize("name", ["H200", "H100"])
def test_the_packages_table_decides_on_hopper_gpus(name, monkeypatch, prose):
    """Each has times of its own here. Without the flag that says so, ``fla_fused_chunk`` was measured with a decay per head."""
    pytest.importorskip("triton", reason="without Triton, kernels refuse every call")
    device = pretend(HOPPERS[name], monkeypatch)
    long = Query("gla", device, torch.bfloat16, (8, 4096, 16, 128, 128))
    try:
        assert dispatch.choose(long).name == "hopper"
        assert dispatch.why_not_faster(long, "fla", 64) is None
        assert dispatch.why_not_faster(long._replace(grad=True), "fla", 64) is None
        prose(dispatch.why_not_faster(long, "fla_fused_chunk", None, ("scalar_decay",)))
    finally:
        monkeypatch.undo()
        forget()


# Name of fla's function, what it is given (for gla: B, T, H, K, V; for hgrn: B, T, D), and facts about the call.
EVERYDAY = {
    "training": ("chunk_gla", (4, 2048, 16, 128, 128), {"grad": True}),
    "training in float16": ("chunk_simple_gla", (4, 2048, 16, 128, 128), {"dtype": torch.float16}),
    "states": ("chunk_gla", (4, 2048, 16, 128, 128), {"grad": True, "states": 4}),
    "float32 decays": ("chunk_gla", (2, 4096, 16, 128, 128), {"wide": True}),
    "prefill": ("chunk_gla", (1, 4096, 16, 128, 128), {"final": True}),
    "a decay per head": ("chunk_simple_gla", (8, 2048, 16, 64, 64), {}),
    "a decay per head, fused": ("fused_chunk_simple_gla", (4, 2048, 16, 128, 128), {}),
    "packed, a decay per head, fused": ("fused_chunk_simple_gla", (1, 8192, 16, 128, 128), {"packed": 4, "grad": True}),
    "step": ("fused_recurrent_gla", (8, 1, 16, 128, 128), {"states": 8, "final": True}),
    "step, a decay per head": ("fused_recurrent_simple_gla", (64, 1, 16, 128, 128), {"states": 64, "final": True}),
    "scan": ("chunk_hgrn", (4, 2048, 1024), {"grad": True}),
    "scan, recurrent": ("fused_recurrent_hgrn", (4, 2048, 1024), {"states": 4, "final": True}),
    "scan, packed": ("fused_recurrent_hgrn", (1, 8192, 1024), {"packed": 16, "grad": True}),
}
FLAS = {
    "training, a decay per head": ("chunk_simple_gla", (4, 2048, 16, 128, 128), {"grad": True}),
    "training, a decay per head, fused": ("fused_chunk_simple_gla", (4, 2048, 16, 128, 128), {"grad": True}),
    "scan, step": ("fused_recurrent_hgrn", (8, 1, 1024), {"states": 8, "final": True}),
}
"""Calls that fla's function keeps: it could not run then, its gradients were wrong, or nothing similar was measured."""


def everyday(name, sizes, device, *, grad=False, states=0, final=False, packed=0, wide=False, dtype=torch.bfloat16):
    """Return keyword arguments of a function of fla, as fake tensors on a device; ``wide`` makes log-decays float32."""

    def tensor(*shape, kind=dtype):
        return torch.empty(shape, dtype=kind, device=device, requires_grad=grad and kind.is_floating_point)

    kind = torch.float32 if wide else dtype
    if len(sizes) == 3:
        given = {"x": tensor(*sizes), "g": tensor(*sizes, kind=kind)}
        state = sizes[2:]
    else:
        batch, steps, heads, keys, values = sizes
        given = {each: tensor(batch, steps, heads, keys) for each in ("q", "k")} | {"v": tensor(batch, steps, heads, values)}
        per_head = (batch, steps, heads)
        gate = "gk" if name == "fused_recurrent_gla" else "g"
        given[gate] = tensor(*per_head, kind=kind) if "simple" in name else tensor(*per_head, keys, kind=kind)
        state = (heads, keys, values)
    given["output_final_state"] = final
    given |= {"initial_state": torch.empty(states, *state, device=device)} if states else {}
    return given | ({"cu_seqlens": torch.empty(packed + 1, dtype=torch.int64, device=device)} if packed else {})


@pytest.mark.parametrize("call", [*EVERYDAY, *FLAS])
def test_everyday_calls_on_an_h100(call, monkeypatch):
    pytest.importorskip("triton", reason="without Triton, kernels refuse every call")
    name, sizes, facts = (EVERYDAY | FLAS)[call]
    device = pretend(HOPPERS["H100"], monkeypatch)
    hook = Hook(next(each for each in fla_hooks.TARGETS if each.name == name))
    try:
        with FakeTensorMode():
            found = hook._measured((), everyday(name, sizes, device, **facts))
        said = dispatch.why_not_faster(*found)
    finally:
        monkeypatch.undo()
        forget()
    assert (said is None) is (call in EVERYDAY), said
