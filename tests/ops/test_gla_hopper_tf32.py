"""Tests of the variant "hopper_tf32" of ``gla``: float32 calls as float16 copies, where PyTorch's settings allow TF32.

On a CPU the kernels of ``hopper`` run through the emulation in gluon_on_cpu.py, and the Triton kernels that make the copies are
replaced by scaled_copies.py; test_gla_scaled_copies.py compares both. Results and gradients are compared with the float64
reference, and with the variant ``chunked`` in PyTorch with products in TF32.

``arguments_of`` makes small random arguments on the CPU, and ``results`` returns a variant's results and gradients by name. A
test marked ``thorough`` does not run in ``make test``. ``device`` is the first GPU.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from onelaunch import dispatch
from onelaunch.device.architectures import find_architecture, pretended
from onelaunch.errors import VariantUnsupported
from onelaunch.operation import Example
from onelaunch.operation.examples import recorded_launches
from onelaunch.ops.gla import contract
from onelaunch.workbench.verify.poison import poisoned
from tests.ops.cases import GLA, arguments_of, results
from tests.ops.gluon_on_cpu import emulate
from tests.ops.scaled_copies import scaled_copies
from tests.ops.test_gla_hopper_emulated import drawn, expected
from tests.ops.tf32_units import RoundedProducts
from tests.thorough import thorough_but

pytest.importorskip("triton", reason="launches import portable kernels too, which import Triton")

MATMUL = torch.backends.cuda.matmul
BEFORE = MATMUL.fp32_precision
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


@pytest.fixture(autouse=True)
def _tf32():
    MATMUL.fp32_precision = "tf32"
    yield
    torch.set_float32_matmul_precision("highest")
    MATMUL.fp32_precision = BEFORE


def marked(*brief: Any, thorough: Any, of: Any) -> list[Any]:
    """Return parameters of which the ``brief`` ones run always, some are ``thorough``, and the others run by hand alone."""
    marks = dict.fromkeys(thorough, pytest.mark.thorough)
    return [each if each in brief else pytest.param(each, marks=marks.get(each, pytest.mark.every)) for each in of]


def sum_heads(parts: torch.Tensor, gradient: torch.Tensor) -> None:
    """Do what the kernel of this name does: it has a test of its own."""
    gradient.copy_(parts.unflatten(2, (gradient.shape[2], -1)).sum(3))


def prepared(monkeypatch: pytest.MonkeyPatch, *, segments: int = 1, groups: int = 2) -> Any:
    """Emulate the kernels, and return the module that launches them for this variant."""
    launch_hopper = emulate(monkeypatch, segments=segments, groups=groups)
    from onelaunch.ops.gla import launch_hopper_tf32

    monkeypatch.setattr(launch_hopper, "sum_heads", sum_heads)
    monkeypatch.setattr(launch_hopper_tf32, "scaled_copies", scaled_copies)
    return launch_hopper_tf32


def emulated(
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    incoming: Any = drawn,
    *,
    segments: int = 1,
    groups: int = 2,
) -> dict[str, torch.Tensor]:
    """Return o, the final state and all gradients that the kernels compute, float32."""
    launches = prepared(monkeypatch, segments=segments, groups=groups)
    from onelaunch.ops.gla import launch

    initial, offsets = arguments.get("initial_state"), arguments.get("cu_seqlens")
    scale = arguments.get("scale") or arguments["q"].shape[3] ** -0.5
    call = launch.Attention.of(*(arguments[name] for name in "qkvg"), initial, offsets, scale)
    wanted = bool(arguments.get("output_final_state"))
    with poisoned():
        final = launch.empty_final(call, wanted=wanted)
        o = launches.forward(call, final if wanted else None)
        found = launches.backward(call, incoming(o), incoming(final) if wanted else None)
    outputs = {"o": o, **({"final": final} if wanted else {})}
    outputs |= {name: getattr(found, name).reshape(arguments[name].shape) for name in "qkvg"}
    if initial is not None:
        outputs["initial_state"] = found.initial
    assert {value.dtype for value in outputs.values()} == {torch.float32}
    return outputs


def by_pytorch(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the same of the variant ``chunked``, with all products in TF32."""
    names = [name for name in (*"qkvg", "initial_state") if arguments.get(name) is not None]
    leaves = {name: arguments[name].clone().requires_grad_() for name in names}
    call = GLA.bind(**{**arguments, **leaves})
    with RoundedProducts() as products:
        o, final = GLA.get("chunked").run(call)
        outputs = {"o": o, **({"final": final} if arguments.get("output_final_state") else {})}
        gradients = torch.autograd.grad(list(outputs.values()), list(leaves.values()), [drawn(x) for x in outputs.values()])
    assert products.count > 10
    return {name: value.detach() for name, value in outputs.items()} | dict(zip(names, gradients, strict=True))


def error_of(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the error relative to that of the exact values."""
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm())


CASES: dict[str, dict[str, Any]] = {
    "per_channel": {"T": 70, "K": 64, "V": 64},
    "per_head_in_segments": {"T": 130, "K": 80, "V": 72, "decay_per": "head", "segments": 2},
    "in_segments": {"T": 200, "K": 48, "V": 144, "segments": 3},
    "packed": {"T": 80, "H": 2, "K": 40, "V": 72, "lengths": (10, 0, 1, 69)},
    "one_group_packed_per_head": {
        "T": 140, "H": 2, "K": 40, "V": 128, "lengths": (50, 0, 1, 89), "decay_per": "head", "groups": 1,
    },
    "strong_decay": {"T": 130, "K": 48, "V": 96, "decay": "strong"},
    "forgetting": {"T": 70, "B": 2, "K": 24, "V": 40, "decay": "forget"},
    "no_decay_without_states": {"T": 200, "K": 32, "V": 32, "decay": "zero", "initial_state": False, "final_state": False},
    "wide_keys_per_head": {"T": 66, "K": 256, "V": 64, "decay_per": "head"},
    "shared_keys_and_values": {"T": 130, "H": 4, "K": 64, "V": 64, "k_heads": 2, "v_heads": 2, "g_heads": 2},
    "shared_states": {"T": 70, "H": 4, "K": 64, "V": 64, "k_heads": 2, "v_heads": 1, "g_heads": 2, "state_heads": 2},
    "shared_queries_per_head": {"T": 70, "H": 4, "K": 64, "V": 64, "q_heads": 2, "k_heads": 2, "decay_per": "head"},
}  # fmt: skip


@pytest.mark.parametrize("name", marked("per_head_in_segments", thorough=("packed", "strong_decay", "shared_states"), of=CASES))
def test_errors_are_at_most_twice_those_of_products_in_tf32(name, monkeypatch):
    options = {"B": 1, "H": 1, "initial_state": True, "final_state": True, **CASES[name]}
    segments, groups = options.pop("segments", 1), options.pop("groups", 2)
    arguments = arguments_of(GLA, **options, dtype="float32")
    exact = expected(arguments, drawn)
    found, other = emulated(monkeypatch, arguments, segments=segments, groups=groups), by_pytorch(arguments)
    assert found.keys() == exact.keys() == other.keys()
    for each, value in exact.items():
        error = error_of(found[each], value)
        assert 1e-6 < error <= 2 * error_of(other[each], value), each


@pytest.mark.parametrize("per", thorough_but("head", of=("channel", "head")))
def test_powers_of_2_change_exponents_alone(per, monkeypatch):
    """Inputs that are far beyond the range of float16, above or below, give the bits of inputs near 1.

    So do gradients. Every head has powers of its own.
    """
    arguments = arguments_of(
        GLA, B=1, H=2, T=70, K=32, V=48, decay_per=per, initial_state=True, final_state=True, scale=-0.3, dtype="float32"
    )
    right = emulated(monkeypatch, arguments)
    of_q, of_k, of_v, of_do = (torch.tensor(e) for e in ((40, -50), (-70, 20), (50, -9), (-30, 25)))
    powers = {
        "q": of_q, "k": of_k, "v": of_v, "initial_state": of_k + of_v, "o": of_q + of_k + of_v, "final": of_k + of_v,
        "grad q": of_do + of_k + of_v, "grad k": of_do + of_q + of_v, "grad v": of_do + of_q + of_k,
        "grad g": of_do + of_q + of_k + of_v, "grad initial_state": of_do + of_q,
    }  # fmt: skip

    def scaled(name: str, value: torch.Tensor) -> torch.Tensor:
        factors = 2.0 ** powers[name]
        heads = 1 if name.endswith(("state", "final")) else 2
        return value * factors.view(2, *(1,) * (value.dim() - heads - 1))

    def incoming(result: torch.Tensor) -> torch.Tensor:
        state = result.shape == arguments["initial_state"].shape
        e = of_do + of_q if state else of_do
        return drawn(result) * (2.0**e).view(2, 1, *(1,) * state)

    powers["grad final"] = of_do + of_q
    changed = arguments | {name: scaled(name, arguments[name]) for name in ("q", "k", "v", "initial_state")}
    found = emulated(monkeypatch, changed, incoming)
    for name, value in right.items():
        assert torch.equal(found[name], scaled(name if name in ("o", "final") else f"grad {name}", value)), name


@pytest.mark.parametrize(
    ("per", "state"), thorough_but(("channel", 900.0), of=[("channel", 1.0), ("head", 1.0), ("channel", 900.0)])
)
def test_sums_that_reach_their_bounds_stay_in_range(per, state, monkeypatch):
    """All elements are as large as the largest one, have one sign, and nothing decays, so that no other sums are larger."""
    arguments = arguments_of(
        GLA, B=1, H=1, T=129, K=64, V=64, decay="zero", decay_per=per, initial_state=True, final_state=True, dtype="float32"
    )
    for name in "qkv":
        arguments[name] = torch.full_like(arguments[name], 1.9990234375)  # as far above a power of 2 as float16 holds
    arguments["initial_state"] = torch.full_like(arguments["initial_state"], 1.9990234375 * state)

    def incoming(result: torch.Tensor) -> torch.Tensor:
        return torch.full_like(result, 1.9990234375 * (state if result.shape[-2] == 64 else 1.0))

    found, exact = emulated(monkeypatch, arguments, incoming), expected(arguments, incoming)
    for name, value in exact.items():
        assert error_of(found[name], value) < 1e-3, name


@pytest.mark.parametrize("value", marked("nan", thorough=("inf",), of=("nan", "inf")))
@pytest.mark.parametrize("name", marked("k", thorough=(), of=("q", "k", "v", "initial_state")))
def test_what_is_not_finite_stays_so_and_in_its_head(name, value, monkeypatch):
    options = {"B": 1, "H": 2, "T": 70, "K": 32, "V": 32, "initial_state": True, "final_state": True}
    arguments = arguments_of(GLA, **options, dtype="float32")
    right = emulated(monkeypatch, arguments)
    changed = arguments | {name: arguments[name].clone()}
    changed[name][(0, 1, 3, 2) if name == "initial_state" else (0, 66, 1, 3)] = float(value)
    found, exact = emulated(monkeypatch, changed), expected(changed, drawn)
    for each, result in found.items():
        heads = 1 if each in ("final", "initial_state") else 2
        assert torch.equal(result.select(heads, 0), right[each].select(heads, 0)), each
        wrong = ~exact[each].isfinite() & result.isfinite()
        assert not wrong.any(), each
    before = found["o"][0, :64, 1]
    assert before.isfinite().all() == (name != "initial_state")
    assert not found["o"][0, 64:, 1].isfinite().all()


def test_a_tensor_of_zeros_leaves_the_others_their_results(monkeypatch):
    """With keys of 0 only the initial state counts, and without a gradient of o that of the final state."""
    options = {"B": 1, "H": 1, "T": 66, "K": 32, "V": 32, "initial_state": True, "final_state": True}
    arguments = arguments_of(GLA, **options, dtype="float32")
    arguments["k"] = torch.zeros_like(arguments["k"])
    arguments["initial_state"] = arguments["initial_state"] * 1e6

    def incoming(result: torch.Tensor) -> torch.Tensor:
        return drawn(result) * 1e-9 if result.shape == arguments["initial_state"].shape else torch.zeros_like(result)

    found, exact = emulated(monkeypatch, arguments, incoming), expected(arguments, incoming)
    for name, value in exact.items():
        if value.any():
            assert error_of(found[name], value) < 1e-3, name
        else:
            assert not found[name].any(), name


def test_results_beyond_float32_are_inf_and_those_within_it_are_not(monkeypatch):
    arguments = arguments_of(GLA, B=1, H=1, T=66, K=32, V=32, final_state=True, dtype="float32")
    arguments |= {"q": arguments["q"] * 2.0**60, "k": arguments["k"] * 2.0**50, "v": arguments["v"] * 2.0**16}
    found, exact = emulated(monkeypatch, arguments, lambda x: drawn(x) * 2.0**-60)["o"], expected(arguments)["o"]
    largest = torch.finfo(torch.float32).max
    beyond, within = exact.abs() > largest * 1.01, exact.abs() < largest * 0.99
    assert 0 < beyond.sum() < within.sum()
    assert torch.equal(found[beyond].double(), exact[beyond].sign() * math.inf)
    assert error_of(found[within], exact[within]) < 1e-3


def test_the_variant_makes_results_of_heads_of_any_size(monkeypatch):
    """Heads of 20 keys and 75 values are copied into aligned ones. The backward pass follows the setting at its own time."""
    prepared(monkeypatch)
    arguments = arguments_of(GLA, B=1, H=1, T=70, K=20, V=75, initial_state=True, final_state=True, dtype="float32")
    names = (*"qkvg", "initial_state")
    leaves = {name: arguments[name].clone().requires_grad_() for name in names}
    with poisoned():
        o, final = GLA.get("hopper_tf32").run(GLA.bind(**{**arguments, **leaves}))
        gradients = torch.autograd.grad([o, final], list(leaves.values()), [drawn(o), drawn(final)], retain_graph=True)
    exact, found = expected(arguments, drawn), {"o": o, "final": final} | dict(zip(names, gradients, strict=True))
    for name, value in exact.items():
        assert found[name].shape == value.shape, name
        assert error_of(found[name].detach(), value) < 7e-4, name

    from onelaunch.ops.gla import launch

    class Portable(Exception):
        pass

    def portable(*_: Any) -> None:
        raise Portable

    monkeypatch.setattr(launch, "backward", portable)
    MATMUL.fp32_precision = "ieee"
    with pytest.raises(Portable):
        o.sum().backward()


# The choice of the variant


def chosen(device: str = "sm_90a", dtype: str = "float32", *, grad: bool = False, **options: Any) -> tuple[str, str | None]:
    """Return the variant that ``auto`` takes for a case, and why ``hopper_tf32`` cannot run it."""
    where = "cpu" if device == "cpu" else str(pretended(find_architecture(device).name))
    case = GLA.case(dtype, **{"B": 4, "T": 2048, "H": 16, "K": 128, "V": 128, **options})
    query = GLA.query(case, where, grad=grad)
    return dispatch.choose(query).name, GLA.get("hopper_tf32").why_not(query)


@pytest.mark.parametrize("grad", [False, True])
def test_auto_takes_it_where_tf32_is_allowed(grad):
    assert chosen(grad=grad) == ("hopper_tf32", None)
    assert chosen(grad=grad, B=1, H=2) == ("hopper_tf32", None)
    assert chosen(grad=grad, T=64, H=64)[0] == "fused_recurrent" if grad else True
    MATMUL.fp32_precision = "ieee"
    name, reason = chosen(grad=grad)
    assert name == "fused_recurrent"
    assert reason is not None
    assert reason.startswith("needs TF32 to be allowed")
    MATMUL.fp32_precision = "tf32"
    assert chosen(grad=grad)[0] == "hopper_tf32"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "bfloat16"}, "needs float32"),
        ({"K": 136}, "needs K of at most 128"),
        ({"K": 264, "decay_per": "head"}, "needs K of at most 256"),
        ({"value_gate": True}, "takes no gate on values"),
        ({"device": "sm_80"}, "needs a Hopper GPU"),
        ({"B": 1, "T": (1 << 20) + 1, "H": 1}, "needs at most 1048576 steps"),
    ],
)
def test_it_says_which_calls_it_cannot_run(options, said):
    name, reason = chosen(**options)
    assert name != "hopper_tf32"
    assert reason is not None
    assert reason.startswith(said)


def test_only_float32_on_a_gpu_has_the_flag():
    for device, dtype, flags in (("cuda:0", "float32", ("tf32",)), ("cuda:0", "float16", ()), ("cpu", "float32", ())):
        assert GLA.query(GLA.case(dtype, B=1, T=1, H=1, K=16, V=16), device).flags == flags
    MATMUL.fp32_precision = "none"
    assert GLA.query(GLA.case("float32", B=1, T=1, H=1, K=16, V=16), "cuda:0").flags == ()


@pytest.mark.thorough
def test_compiled_code_asks_for_the_setting_again_when_it_has_changed():
    x = torch.zeros(1)
    compiled = torch.compile(lambda x: x + contract._tf32_is_allowed(), backend="eager", fullgraph=True)
    for precision in ("ieee", "tf32", "none", "tf32"):
        MATMUL.fp32_precision = precision
        assert compiled(x).item() == (precision == "tf32")


@pytest.mark.parametrize("per", ["channel", "head"])
def test_a_training_call_launches_what_its_tags_say(per):
    case = GLA.case("float32", B=4, T=2048, H=36, K=64, V=64, decay_per=per, initial_state=True, final_state=True)
    variant = GLA.get("hopper_tf32")
    launches = recorded_launches(variant, Example(case, "forward_backward"), "sm_90a")
    names = [each.kernel.fn.__name__ for each in launches]
    copies = ["head_largest_kernel", "scaled_copies_kernel"]
    assert names == [*copies, "chunk_state_kernel", *copies, "chunk_state_kernel", "chunk_state_kernel", "gradients_kernel"]
    capabilities = variant.capabilities
    assert (capabilities.launches, capabilities.backward_launches) == (3, len(names) - 3)


# On a GPU


GPU_CASES: dict[str, dict[str, Any]] = {
    "per_channel": {"B": 2, "T": 500, "H": 3, "K": 128, "V": 128},
    "per_head": {"B": 2, "T": 300, "H": 3, "K": 128, "V": 128, "decay_per": "head"},
    "wide_keys_per_head": {"B": 1, "T": 300, "H": 2, "K": 256, "V": 256, "decay_per": "head"},
    "in_parts": {"B": 1, "T": 3000, "H": 1, "K": 128, "V": 128},
    "in_parts_per_head": {"B": 1, "T": 3000, "H": 1, "K": 64, "V": 128, "decay_per": "head", "decay": "weak"},
    "packed": {"B": 1, "T": 330, "H": 2, "K": 128, "V": 64, "lengths": (0, 50, 0, 0, 79, 1, 200, 0)},
    "strong_decay": {"B": 1, "T": 300, "H": 4, "K": 96, "V": 80, "decay": "strong"},
    "forgetting": {"B": 1, "T": 300, "H": 4, "K": 64, "V": 64, "decay": "forget"},
    "odd_heads": {"B": 1, "T": 97, "H": 2, "K": 33, "V": 75},
    "shared": {"B": 1, "T": 200, "H": 4, "K": 64, "V": 64, "k_heads": 2, "v_heads": 2, "g_heads": 2},
    "shared_states": {"B": 1, "T": 200, "H": 4, "K": 64, "V": 64, "k_heads": 2, "v_heads": 1, "g_heads": 2, "state_heads": 2},
    "many": {"B": 4, "T": 2048, "H": 16, "K": 128, "V": 128},
}


def on_gpu(device: torch.device, *, grad: bool = True, **options: Any) -> dict[str, Any]:
    """Return random float32 arguments on the GPU, with states."""
    case = GLA.case("float32", initial_state=True, final_state=True, **options)
    arguments = dict(GLA.make_inputs(case, device, 0).arguments)
    for name in (*"qkvg", "initial_state"):
        arguments[name] = arguments[name].detach().clone().requires_grad_(grad)
    return arguments


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_a_gpu_is_as_accurate_as_its_products_in_tf32(name, device):
    """Products that cuBLAS does not make in TF32 count as if they were. Replays give the same bits."""
    arguments = on_gpu(device, **GPU_CASES[name])
    other = results(GLA, arguments, "chunked")
    MATMUL.fp32_precision = "ieee"
    exact = results(GLA, arguments, "chunked")  # within 1e-6 of float64
    MATMUL.fp32_precision = "tf32"
    found = [results(GLA, arguments, "hopper_tf32") for _ in range(4)]
    for each, value in exact.items():
        assert error_of(found[0][each], value) <= 2 * max(error_of(other[each], value), 3e-4), each
        assert all(torch.equal(again[each], found[0][each]) for again in found[1:]), each


@on_hopper
@pytest.mark.gpu
def test_a_gpu_takes_it_by_itself_and_follows_the_setting(device):
    arguments = on_gpu(device, B=2, T=300, H=4, K=64, V=64)
    right = results(GLA, arguments, "hopper_tf32")
    for precision in ("tf32", "ieee", "tf32"):
        MATMUL.fp32_precision = precision
        for _ in range(3):
            found = results(GLA, arguments, "auto")
            same = [torch.equal(found[name], right[name]) for name in right]
            assert all(same) if precision == "tf32" else not any(same)
    MATMUL.fp32_precision = "ieee"
    with pytest.raises(VariantUnsupported, match="needs TF32 to be allowed"):
        GLA(**arguments, variant="hopper_tf32")


@on_hopper
@pytest.mark.gpu
def test_a_gpu_runs_it_in_compiled_code_and_in_a_graph(device):
    arguments = on_gpu(device, B=2, T=300, H=4, K=64, V=64, grad=False)
    right = GLA(**arguments)

    compiled = torch.compile(lambda q, k, v, g, s: GLA(q, k, v, g, initial_state=s, output_final_state=True), fullgraph=True)
    names = (*"qkvg", "initial_state")
    found = compiled(*(arguments[name] for name in names))
    assert all(map(torch.equal, found, right))

    graph = torch.cuda.CUDAGraph()
    inputs = {**arguments, **{name: arguments[name].clone() for name in names}}
    GLA(**inputs)
    with torch.cuda.graph(graph):
        captured = GLA(**inputs)
    inputs["q"].mul_(2.0**40)
    graph.replay()
    assert torch.equal(captured[0], right[0] * 2.0**40)
    assert torch.equal(captured[1], right[1])


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gpu_keeps_what_is_not_finite_in_its_head(value, device):
    arguments = on_gpu(device, B=1, T=300, H=2, K=64, V=64, grad=False)
    right = GLA(**arguments, variant="hopper_tf32")
    arguments["k"][0, 100, 1, 5] = value
    found = GLA(**arguments, variant="hopper_tf32")
    assert torch.equal(found[0][:, :, 0], right[0][:, :, 0])
    assert torch.equal(found[0][:, :64, 1], right[0][:, :64, 1])
    assert not found[0][0, 100:, 1].isfinite().any()
    assert not found[1][0, 1, 5].isfinite().any()
