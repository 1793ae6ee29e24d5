"""Tests of ``output_chain``'s Hopper kernel for few rows without a GPU: its source on an emulated one, and its configurations.

The variant "prologue" launches it where rows are few. ``use_host`` of ``output_chain_few_rows_host.py`` lets the launches run on
the emulated GPU, which delays CTAs, warps and copies at random, by a seed.

``libraries`` is a folder in which a test run compiles each library once. ``made()`` makes random arguments. ``assert_near``
bounds the norm of each error, relative to that of the expected values. A test marked ``thorough`` does not run in ``make test``,
and one marked ``every`` with --architectures=every alone.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from onelaunch.device.architectures import HOPPER_SHARED_BYTES, HOPPER_SMS
from onelaunch.ops.output_chain.configure_few_rows import MOST_ROWS, FewRowsConfig, at_once, config_of
from onelaunch.workbench.verify.poison import poisoned
from tests.decode.host_machine import needs_compiler, needs_watch
from tests.ops.cases import assert_near
from tests.ops.output_chain_cases import made
from tests.ops.output_chain_few_rows_host import HostLaunch, use_host

pytest.importorskip("triton", reason="the module with the launches imports Triton for the portable kernel")

CASES: dict[str, dict[str, Any]] = {  # sizes and options, and the SMs of the emulated GPU
    "three_rows": {"sms": 20, "B": 3, "T": 1, "H": 4, "V": 64, "D": 100},
    "one_row": {"sms": 8, "B": 1, "T": 1, "H": 5, "V": 32, "D": 64, "gate": "none", "norm_weight": "none", "bias": False},
    "sixteen_rows": {"sms": 12, "B": 2, "T": 8, "H": 4, "V": 128, "D": 64, "gate": "activated"},
    "long_rows": {"sms": 12, "B": 4, "T": 1, "H": 16, "V": 64, "D": 64, "norm_weight": "float32"},
    "seventeen_rows": {"sms": 12, "B": 17, "T": 1, "H": 3, "V": 128, "D": 130},
    "two_slabs": {"sms": 8, "B": 33, "T": 1, "H": 2, "V": 256, "D": 40},
    "most_rows": {"sms": 8, "B": 64, "T": 1, "H": 2, "V": 64, "D": 60, "norm_weight": "float32"},
}
THOROUGH = ("one_row", "sixteen_rows", "long_rows", "seventeen_rows", "most_rows")
MARKED = [pytest.param(name, marks=[pytest.mark.thorough] * (name in THOROUGH)) for name in CASES]


def launched(host: type[HostLaunch], given: dict[str, Any], eps: float = 1e-5) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a call, require that it takes the kernel for few rows, and return ``out [M, D]`` and ``rstd [M, H]``."""
    from onelaunch.ops.output_chain.launch import Operands
    from onelaunch.ops.output_chain.launch_prologue import prologue

    before = len(host.launched)
    operands = Operands.of(given["h"], given["gate"], given["norm_weight"], given["activated"])
    out, rstd, _ = prologue(operands, given["w_out"], given.get("bias"), eps, keep=True)
    assert len(host.launched) == before + 1
    assert rstd is not None
    return out, rstd


def expected(given: dict[str, Any], eps: float = 1e-5) -> dict[str, torch.Tensor]:
    """Return out and rstd by the definition in float64, but for the operand of the product, which is rounded to bfloat16."""
    wide = {name: value.double() for name, value in given.items() if isinstance(value, torch.Tensor)}
    h = wide["h"]
    rstd = 1 / (h.square().mean(-1) + eps).sqrt()
    a = h * rstd[..., None] * wide.get("norm_weight", 1)
    if "gate" in wide:
        gate = wide["gate"]
        a = a * (gate if given["activated"] else gate * torch.sigmoid(gate))
    out = a.flatten(-2).bfloat16().double() @ wide["w_out"].mT + wide.get("bias", 0)
    return {"out": out.flatten(0, 1), "rstd": rstd.flatten(0, 1)}


def called(monkeypatch: Any, libraries: Any, name: str, **options: Any) -> tuple[type[HostLaunch], dict[str, Any]]:
    """Return the class of the emulated launches, and the arguments of a case."""
    sizes = dict(CASES[name])
    return use_host(monkeypatch, libraries, sizes.pop("sms"), **options), made(dtype="bfloat16", **sizes)


@needs_compiler
@pytest.mark.parametrize("name", MARKED)
def test_results_match_the_definition(name, libraries, monkeypatch):
    host, given = called(monkeypatch, libraries, name)
    out, rstd = launched(host, given)
    wanted = expected(given)
    assert_near({"out": out.double()}, {"out": wanted["out"]}, 2.5e-3)
    assert_near({"rstd": rstd.double()}, {"rstd": wanted["rstd"]}, 1e-6)


@needs_compiler
@pytest.mark.thorough
def test_results_do_not_depend_on_who_comes_first(libraries, monkeypatch):
    host, given = called(monkeypatch, libraries, "two_slabs")
    found = []
    for host.seed in (1, 2):
        found.append(launched(host, given))
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


@needs_compiler
@pytest.mark.thorough
def test_operands_of_any_strides(libraries, monkeypatch):
    """Rows may be any multiple of 16 bytes apart; other tensors are copied."""
    host, given = called(monkeypatch, libraries, "three_rows")
    result = launched(host, given)
    for name in ("h", "gate", "w_out"):
        value = given[name]
        wide = value.new_full((*value.shape[:-1], value.shape[-1] + 8), torch.nan)[..., : value.shape[-1]].copy_(value)
        apart = torch.stack([value, value], -1)[..., 0]
        shifted = value.new_empty(value.numel() + 1)[1:].view(value.shape).copy_(value)
        for other in (wide, apart, shifted):
            again = launched(host, {**given, name: other})
            assert all(torch.equal(first, second) for first, second in zip(again, result, strict=True))


@needs_watch
@pytest.mark.every
@pytest.mark.parametrize("name", CASES)
def test_shared_memory_has_no_races(name, libraries, monkeypatch):
    host, given = called(monkeypatch, libraries, name, watched=True)
    launched(host, given)
    assert not host.races


# A wait, and what takes its place; and a case. That for the weights is not among them: emulated, they always land before a does.
WAITS = {
    "beginning_of_the_others": ("        cluster_wait();", "", "three_rows"),
    "a_of_the_cluster": ("while (!mbarrier_try_wait(ready, slab & 1)) spin_pause();", "", "three_rows"),
    "sums_of_other_warps": ("syncthreads();\n    store_sums", "store_sums", "three_rows"),
    "readers_of_the_slab_before": ("        cluster_sync();", "        syncthreads();", "two_slabs"),
}


@needs_compiler
@pytest.mark.every
@pytest.mark.parametrize("name", WAITS)
def test_a_missing_wait_gives_wrong_results(name, libraries, monkeypatch):
    wait, instead, case = WAITS[name]
    with monkeypatch.context() as unchanged:
        host, given = called(unchanged, libraries, case)
        right, _ = launched(host, given)
    host, given = called(monkeypatch, libraries, case, change=(wait, instead or ";"))
    host.strict, host.sweeps, wrong = False, 10_000, 0
    for host.seed in range(1, 9):
        with poisoned():  # out holds NaN where a launch that does not end leaves it
            out, _ = launched(host, given)
        wrong += not torch.equal(out, right)
    assert wrong


@pytest.mark.parametrize("sms", [HOPPER_SMS, 16])
def test_every_configuration_fits_into_shared_memory_and_on_the_gpu(sms):
    sizes = itertools.product((1, 8, 9, 16, 17, MOST_ROWS), (1, 64, 100, 1024, 2048, 4096), (1, 5, 8, 16, 32), (32, 64, 128, 256))
    found = [(each, config_of(*each, "silu", "bfloat16", sms)) for each in sizes]
    assert sum(config is not None for _, config in found) > len(found) // 4
    for (rows, columns, heads, values), config in found:
        if config is None:
            continue
        assert config.shared_bytes <= HOPPER_SHARED_BYTES
        assert config.ctas(columns) <= at_once(config.cluster, sms)
        assert config.ctas(columns) * config.tile >= columns
        assert config.offsets["FULL"] % 8 == 0
        assert config.pitch % 128 == 64
        assert config.pitch >= 2 * heads * values
        assert config.rows <= max(8, 2 * rows)


@pytest.mark.parametrize(
    "sizes", [(0, 64, 4, 64), (MOST_ROWS + 1, 64, 4, 64), (16, 64, 4, 80), (16, 1 << 20, 4, 64), (16, 2048, 64, 128)]
)
def test_other_calls_take_the_portable_kernel(sizes):
    assert config_of(16, 2048, 16, 128, "silu", "bfloat16", HOPPER_SMS) == FewRowsConfig(
        16, 128, rows=16, tile=24, gate="silu", norm="bfloat16", cluster=4, warps=16
    )
    assert config_of(*sizes, "silu", "bfloat16", HOPPER_SMS) is None


@needs_compiler
def test_an_eps_that_the_kernel_would_flush_takes_the_portable_kernel(libraries, monkeypatch):
    from onelaunch.ops.output_chain.launch import Operands
    from onelaunch.ops.output_chain.launch_few_rows import config_for

    _, given = called(monkeypatch, libraries, "three_rows")
    operands = Operands.of(given["h"], given["gate"], given["norm_weight"], activated=False)
    assert config_for(operands, given["w_out"], 1e-5)
    assert config_for(operands, given["w_out"], 0.0) is None
