"""Tests of the kernel that computes all gradients of the low-rank projection of log-decays, interpreted and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interpret), pytest.param("cuda:0", marks=pytest.mark.gpu)]
)

SIZES: dict[str, tuple[int, int, int]] = {
    "one_row": (1, 16, 8),
    "one_tile": (64, 128, 16),
    "cut_off": (70, 200, 16),
    "several_groups": (700, 264, 8),
    "rank_above_a_power_of_2": (130, 136, 24),
    "largest_rank": (65, 72, 64),
}
"""Rows M, columns N and rank R."""


def made(name: str, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return dz, r and the gradient of r as columns of larger matrices, and the weight; other columns of the last are 7."""
    rows, columns, rank = SIZES[name]
    generator = torch.Generator().manual_seed(4)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    return {
        "dz": drawn(rows, columns + 24)[:, 8 : 8 + columns],
        "r": drawn(rows, rank + 16)[:, 16:],
        "weight": drawn(columns, rank),
        "into": torch.full((rows, rank + 8), 7.0, dtype=dtype, device=device),
    }


def check(given: dict[str, Any], bound: float, **wants: bool) -> None:
    """Compare all gradients with float64, twice: the counters of a launch must be as they were before it."""
    from onelaunch.ops.gla_layer.launch import low_rank_gradients

    dz, r, weight, into = given["dz"], given["r"], given["weight"], given["into"]
    target = into[:, : r.shape[1]] if wants["want_input"] else None
    right = (dz.double() @ weight.double(), dz.double().mT @ r.double(), dz.double().sum(0))
    for _ in range(2):
        into.fill_(7.0)
        dweight, dbias = low_rank_gradients(dz, r, weight, target, want_weight=wants["want_weight"], want_bias=wants["want_bias"])
        for found, expected in zip((target, dweight, dbias), right, strict=True):
            if found is not None:
                assert found.dtype is dz.dtype
                assert (found.double() - expected).norm() <= bound * expected.norm()
        assert (into[:, r.shape[1] :] == 7.0).all()
        assert (dweight is not None, dbias is not None) == (wants["want_weight"], wants["want_bias"])


ALL = {"want_input": True, "want_weight": True, "want_bias": True}


@devices
@pytest.mark.parametrize("name", SIZES)
def test_gradients_are_rounded_once(name, device, monkeypatch):
    """On a GPU of one SM a CTA has several blocks of rows."""
    from onelaunch.ops.gla_layer import launch

    check(made(name, torch.float16, device), 4e-4, **ALL)
    monkeypatch.setattr(launch, "processors", lambda device: 1)
    check(made(name, torch.float16, device), 4e-4, **ALL)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SIZES)
def test_bfloat16_gradients_are_rounded_once(name, device):
    check(made(name, torch.bfloat16, device), 3e-3, **ALL)


@devices
@pytest.mark.parametrize("wanted", ["want_input", "want_weight", "want_bias"])
def test_single_gradients_are_those_of_all_together(wanted, device):
    check(made("cut_off", torch.float16, device), 4e-4, **{name: name == wanted for name in ALL})


@pytest.mark.gpu
def test_results_are_the_same_to_the_last_bit(device):
    """The order in which CTAs end does not change a sum."""
    from onelaunch.ops.gla_layer.launch import low_rank_gradients

    given = made("several_groups", torch.bfloat16, device)
    target = given["into"][:, : given["r"].shape[1]]
    first = None
    for _ in range(20):
        found = low_rank_gradients(given["dz"], given["r"], given["weight"], target, want_weight=True, want_bias=True)
        again = (target.clone(), *found)
        first = first or again
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
