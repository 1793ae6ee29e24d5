"""Tests of the arguments that ``output_chain`` refuses, named as the caller knows them, and of its dispatch key.

``made()`` makes float32 arguments with B = 2, T = 9, H = 3, V = 20, D = 40 and a bias, unless others are given.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in tests/snapshots/prose.txt. A
test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is
gone.

``CASES`` are the probes of ``output_chain`` and longer cases, by name. ``SMALL`` is the small case's sizes. ``case_of`` returns a
case by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onelaunch.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    OneLaunchError,
    ShapeError,
    UnknownVariant,
    VariantUnsupported,
)
from onelaunch.ops import output_chain
from tests.ops.output_chain_cases import CASES, OUTPUT_CHAIN, SMALL, case_of, made
from tests.prose import Prose


@pytest.fixture
def refused(prose: Prose) -> Callable[..., None]:
    """Return a function that expects a call to raise an error, with the message recorded in tests/snapshots/prose.txt.

    It takes the class of the error, a regular expression that the message must contain (mostly the name of the argument), and
    keyword arguments that replace those of a valid call.
    """

    def call(error: Any, named: str, /, **changes: Any) -> None:
        with prose.raises(error, match=rf"(?<!\w){named}(?!\w)") as caught:
            output_chain(**{**made(), **changes})
        assert isinstance(caught.value, OneLaunchError)
        # If the pattern is the name of an argument, an error with the attribute ``argument`` must hold it there too.
        assert not named.isidentifier() or named in getattr(caught.value, "argument", named)
        assert "\n" not in str(caught.value)

    return call


def test_wrong_shapes_are_named(refused):
    given = made()
    h, gate, norm_weight, w_out, bias = (given[name] for name in ("h", "gate", "norm_weight", "w_out", "bias"))
    refused(ShapeError, "h", h=h[0, 0])
    refused(ShapeError, "h", h=h[:, :, :0])
    refused(ShapeError, "gate", gate=gate.flatten(-2))
    refused(ShapeError, "norm_weight", norm_weight=norm_weight.repeat(3))
    refused(ShapeError, "w_out", w_out=w_out.flatten())
    refused(ShapeError, "w_out", w_out=w_out.T)
    refused(ShapeError, "bias", bias=bias[1:])


def test_wrong_dtypes_and_devices_are_named(refused):
    given = made()
    for name in ("gate", "w_out", "bias"):
        refused(DTypeError, name, **{name: given[name].half()})
    refused(DTypeError, "h", h=given["h"].double())
    refused(DTypeError, "norm_weight", norm_weight=given["norm_weight"].half())
    low = {name: value.bfloat16() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    refused(DTypeError, "norm_weight", **{**low, "norm_weight": given["norm_weight"].half()})
    for name in ("gate", "norm_weight", "w_out", "bias"):
        refused(DeviceError, name, **{name: given[name].to("meta")})
    refused(ArgumentError, "w_out", w_out=[1.0])
    refused(ArgumentError, "gate", gate=False)


@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf"), "small", None, True])
def test_a_wrong_eps_is_named(eps, refused):
    refused(ArgumentError, "eps", eps=eps)


def test_an_activated_gate_must_be_given(refused):
    refused(ArgumentError, "activated", gate=None, activated=True)
    refused(ArgumentError, "'silu'", activated="silu")


def test_a_wrong_variant_is_named(refused):
    refused(UnknownVariant, "'norm_gat'", variant="norm_gat")
    refused(VariantUnsupported, "CUDA", variant="norm_gate")


# Dispatch and cases


@pytest.mark.parametrize("grad", [False, True])
def test_a_case_and_its_call_have_the_same_query(grad):
    for name, chosen in CASES.items():
        given = made(grad=grad, **{"bias": False, **chosen})
        assert OUTPUT_CHAIN.bind(**given).query() == OUTPUT_CHAIN.query(case_of(name), "cpu", grad=grad), name


def test_a_query_states_which_operands_are_given():
    query = OUTPUT_CHAIN.bind(**made()).query()
    assert query.sizes == (2, 9, 3, 20, 40)
    assert query.flags == ("gate", "norm_weight", "bias")
    assert OUTPUT_CHAIN.bind(**made(gate="activated", bias=False)).query().flags == ("activated", "norm_weight")
    assert OUTPUT_CHAIN.bind(**made(gate="none", norm_weight="none", bias=False)).query().flags == ()
    given = made()
    alone = {**given, "h": given["h"][0], "gate": given["gate"][0]}
    assert OUTPUT_CHAIN.bind(**alone).query().sizes == (1, 9, 3, 20, 40)
    more = {**given, "h": given["h"][None], "gate": given["gate"][None]}
    assert OUTPUT_CHAIN.bind(**more).query().sizes == (2, 9, 3, 20, 40)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate": "relu"}, "'relu'"),
        ({"norm_weight": "half"}, "'half'"),
        ({"bias": "yes"}, "'yes'"),
    ],
)
def test_a_case_of_unknown_options_is_refused(changes, message, prose):
    case = OUTPUT_CHAIN.case("float32", **SMALL, **changes)
    for ask in (lambda: OUTPUT_CHAIN.query(case, "cpu"), lambda: OUTPUT_CHAIN.cost(case)):
        with prose.raises(ArgumentError, match=message):
            ask()
