"""Tests of the kernel that computes all gradients of a projection of few inputs, interpreted and on a GPU.

``SIZES`` are rows M, columns N and columns of x, D. The operation's gradients are compared with those of its oracle in float64.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from onelaunch.kernels.common.layout import cdiv
from onelaunch.ops import Segment, projections
from onelaunch.ops.projections import autograd
from onelaunch.ops.projections.configure_low_rank import (
    MOST_COLUMNS,
    MOST_INPUTS,
    LowRankTiles,
    low_rank_tiles,
    takes_low_rank,
)
from tests.ops.cases import assert_near
from tests.ops.projections_cases import EVERY, PROJECTIONS, of_every_kind

pytest.importorskip("triton", reason="launches import their kernels, which import Triton")

devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interpret), pytest.param("cuda:0", marks=pytest.mark.gpu)]
)

SIZES: dict[str, tuple[int, int, int]] = {
    "one_of_everything": (1, 1, 1),
    "one_row": (1, 16, 8),
    "one_tile": (64, 128, 16),
    "cut_off": (70, 200, 16),
    "several_groups": (700, 264, 8),
    "odd_everything": (77, 131, 5),
    "inputs_above_a_power_of_2": (130, 136, 24),
    "most_inputs": (65, 72, 32),
}

TOLERANCE = {torch.float16: 4e-4, torch.bfloat16: 3e-3, torch.float32: 1e-6}
"""Largest norm-wise relative error of a gradient that is rounded once."""


def made(name: str, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return dz, x and memory for the gradient of x as columns of larger matrices, and the weight; other columns of it are 7."""
    rows, columns, inputs = SIZES[name]
    generator = torch.Generator().manual_seed(4)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    return {
        "dz": drawn(rows, columns + 24)[:, 8 : 8 + columns],
        "x": drawn(rows, inputs + 16)[:, 16:],
        "weight": drawn(columns, inputs),
        "into": torch.full((rows, inputs + 8), 7.0, dtype=dtype, device=device),
    }


def check(given: dict[str, Any], wants: tuple[bool, bool, bool] = (True, True, True)) -> list[torch.Tensor]:
    """Compare the gradients with float64, and return them.

    Two launches must give the same, since the second finds the counters as the first left them.
    """
    from onelaunch.ops.projections.launch_low_rank import low_rank_gradients

    dz, x, weight, into = given["dz"], given["x"], given["weight"], given["into"]
    right = (dz.double() @ weight.double(), dz.double().mT @ x.double(), dz.double().sum(0))
    found: tuple[torch.Tensor | None, ...] = ()
    for _ in range(2):
        into.fill_(7.0)
        found = low_rank_gradients(dz, x, weight, wants, into[:, : x.shape[1]])
        assert tuple(each is not None for each in found) == wants
        for one, expected in zip(found, right, strict=True):
            if one is not None:
                assert one.dtype is dz.dtype
                assert (one.double() - expected).norm() <= TOLERANCE[dz.dtype] * expected.norm()
        assert (into[:, x.shape[1] if wants[0] else 0 :] == 7.0).all()
    return [each for each in found if each is not None]


def tiles_of_few_ctas(rows: int, columns: int, inputs: int, dtype: torch.dtype) -> LowRankTiles:
    """Return the tiles of a call, but with three blocks of rows for each CTA."""
    tiles = low_rank_tiles(rows, columns, inputs, dtype)
    return dataclasses.replace(tiles, steps=3, groups=cdiv(rows, 3 * tiles.rows))


@devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("name", SIZES)
def test_gradients_are_rounded_once(name, dtype, device, monkeypatch):
    """With few CTAs each has three blocks of rows, of which the last group may lack some."""
    from onelaunch.ops.projections import launch_low_rank

    given = made(name, dtype, device)
    check(given)
    monkeypatch.setattr(launch_low_rank, "low_rank_tiles", tiles_of_few_ctas)
    check(given)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SIZES)
def test_bfloat16_gradients_are_rounded_once(name, device):
    check(made(name, torch.bfloat16, device))


@devices
@pytest.mark.parametrize("place", [0, 1, 2])
def test_single_gradients_are_those_of_all_together(place, device):
    given = made("cut_off", torch.float16, device)
    together = check(given)[place].clone()
    (alone,) = check(given, (place == 0, place == 1, place == 2))
    assert torch.equal(alone, together)


@devices
def test_strides_change_no_bit(device):
    from onelaunch.ops.projections.launch_low_rank import low_rank_gradients

    given = made("cut_off", torch.float16, device)
    columns = check(given)
    tensors = {name: given[name] for name in ("dz", "x", "weight")}
    turned = {name: each.mT.contiguous().mT for name, each in tensors.items()}
    for how in ({name: each.contiguous() for name, each in tensors.items()}, turned):
        found = low_rank_gradients(*how.values(), (True, True, True))
        assert all(torch.equal(one, other) for one, other in zip(found, columns, strict=True))
    expanded = given["x"][:1].expand(given["x"].shape)
    check({**given, "x": expanded})


@pytest.mark.gpu
def test_results_are_the_same_to_the_last_bit(device):
    """The order in which CTAs end does not change a sum."""
    given = made("several_groups", torch.bfloat16, device)
    first = [each.clone() for each in check(given)]
    for _ in range(20):
        assert all(torch.equal(one, other) for one, other in zip(first, check(given), strict=True))


def gradients_of(given: dict[str, Any], variant: str) -> dict[str, torch.Tensor]:
    """Return the gradients of the arguments that require some, for a loss that weighs all results differently."""
    leaves = {name: each for name, each in given.items() if isinstance(each, torch.Tensor) and each.requires_grad}
    outputs = projections(**given, variant=variant)
    loss = torch.stack([(each * torch.linspace(-1, 1, each.numel()).view(each.shape)).sum() for each in outputs]).sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@pytest.mark.interpret
@pytest.mark.parametrize("inner", [1, 12, MOST_INPUTS, MOST_INPUTS + 1])
def test_gradients_of_the_operation_are_those_of_pytorch(inner, monkeypatch):
    """All kinds of segments, three of five with a bias; only up to the largest number of inputs is the kernel launched."""
    from onelaunch.ops.projections import launch_low_rank

    launched: list[int] = []
    run = launch_low_rank.low_rank_gradients

    def record(dz: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
        launched.append(x.shape[1])
        return run(dz, x, *rest)

    monkeypatch.setattr(launch_low_rank, "low_rank_gradients", record)
    given = of_every_kind(inner, lead=(3, 23), grad=True)
    assert_near(gradients_of(given, "wide_activated"), gradients_of(given, "unfused"), 2e-6)
    assert launched == ([inner] if inner <= MOST_INPUTS else [])


@pytest.mark.interpret
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("asked", ["x", "weight"])
def test_single_gradients_of_the_operation(asked, bias):
    segments = (Segment("gk", 2, 20, "logsigmoid", normalizer=16.0, bias=bias), Segment("v", 3, 7))
    generator = torch.Generator().manual_seed(0)
    given: dict[str, Any] = {"x": torch.randn(2, 9, 16, generator=generator), "weight": torch.randn(61, 16, generator=generator)}
    given |= {"bias": torch.randn(40, generator=generator)} if bias else {}
    leaves = {name: each.requires_grad_() for name, each in given.items()}
    together = gradients_of({**given, "segments": segments}, "wide_activated")
    assert set(together) == set(leaves)
    alone = {name: each.detach().requires_grad_(name == asked) for name, each in leaves.items()}
    found = gradients_of({**alone, "segments": segments}, "wide_activated")
    assert set(found) == {asked}
    assert torch.equal(found[asked], together[asked])


# Which calls are taken, and how they are cut


def test_calls_that_are_left_to_pytorch():
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert takes_low_rank(cuda, torch.bfloat16, MOST_INPUTS, MOST_COLUMNS)
    assert takes_low_rank(cpu, torch.float32, 1, 1)
    assert not takes_low_rank(cuda, torch.bfloat16, MOST_INPUTS + 1, 128)
    assert not takes_low_rank(cuda, torch.bfloat16, 0, 128)
    assert not takes_low_rank(cuda, torch.bfloat16, 16, MOST_COLUMNS + 1)
    assert not takes_low_rank(cpu, torch.bfloat16, 16, 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(32768, 2048, 16), (1, 1, 1), (100, 3, 32), (10**6, 100, 17), (7, 10**6, 5)])
def test_tiles_cover_all_rows_and_columns(sizes, dtype):
    rows, columns, inputs = sizes
    tiles = low_rank_tiles(rows, columns, inputs, dtype)
    assert tiles.tiles * tiles.columns >= columns > (tiles.tiles - 1) * tiles.columns
    assert tiles.groups * tiles.steps * tiles.rows >= rows > (tiles.groups - 1) * tiles.steps * tiles.rows
    assert tiles.inputs >= inputs


def test_the_backward_operator_returns_dz_where_pytorch_multiplies():
    """Only with x and the weight are there gradients of these."""
    y = torch.empty(2, 5, 72, device="meta")
    code = PROJECTIONS.bind(**of_every_kind()).layout.code
    nothing = torch.empty(0, device="meta")
    for wants_bias, biases in ((False, 0), (True, 47)):
        wants = [True, True, wants_bias]
        dz, sums = autograd.backward.fake([None] * len(EVERY), y, nothing, nothing, None, None, code, wants)
        assert (dz.shape, sums.shape) == ((10, 72), (biases,))
    x, weight = y.new_empty(2, 5, 12), y.new_empty(70, 12)
    found = autograd.backward.fake([None] * len(EVERY), y, nothing, nothing, x, weight, code, [True, False, True])
    assert [tuple(each.shape) for each in found] == [(10, 12), (0,), (70,)]
