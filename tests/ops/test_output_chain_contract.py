"""What ``output_chain`` refuses, by the names that the caller knows; its dispatch key."""

from __future__ import annotations

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


def refused(error: Any, message: str, /, **changes: Any) -> None:
    with pytest.raises(error, match=message) as caught:
        output_chain(**{**made(), **changes})
    assert isinstance(caught.value, OneLaunchError)
    assert "\n" not in str(caught.value)


def test_wrong_shapes_are_named():
    given = made()
    h, gate, norm_weight, w_out, bias = (given[name] for name in ("h", "gate", "norm_weight", "w_out", "bias"))
    refused(ShapeError, r"^h has shape \(3, 20\); it must be \[\.\.\., H, V\], a tensor of at least 3", h=h[0, 0])
    refused(ShapeError, r"^h has shape \(2, 9, 0, 20\); .* at least one head and one channel", h=h[:, :, :0])
    refused(ShapeError, r"^gate has shape \(2, 9, 60\); .* = \[2, 9, 3, 20\] to match h \[2, 9, 3, 20\]", gate=gate.flatten(-2))
    refused(ShapeError, r"^norm_weight has shape \(60,\); .* \[V\] = \[20\] to match h", norm_weight=norm_weight.repeat(3))
    refused(ShapeError, r"^w_out has shape \(2400,\); it must be \[D, H \* V\]", w_out=w_out.flatten())
    refused(ShapeError, r"^w_out has shape \(60, 40\); .* \[D, H \* V\] = \[60, 60\] to match h", w_out=w_out.T)
    refused(ShapeError, r"^bias has shape \(39,\); .* \[D\] = \[40\] to match w_out \[40, 60\]", bias=bias[1:])


def test_wrong_dtypes_and_devices_are_named():
    given = made()
    for name in ("gate", "w_out", "bias"):
        refused(DTypeError, rf"^{name} is torch\.float16; it must be float32, the dtype of h", **{name: given[name].half()})
    refused(DTypeError, r"^h is torch\.float64; it must be float16 or bfloat16 or float32", h=given["h"].double())
    refused(DTypeError, r"^norm_weight is torch\.float16; it must be float32,", norm_weight=given["norm_weight"].half())
    low = {name: value.bfloat16() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    message = r"^norm_weight is torch\.float16; it must be bfloat16 or float32, the dtype of h or float32"
    refused(DTypeError, message, **{**low, "norm_weight": given["norm_weight"].half()})
    for name in ("gate", "norm_weight", "w_out", "bias"):
        refused(DeviceError, rf"^{name} is on meta; it must be on cpu", **{name: given[name].to("meta")})
    refused(ArgumentError, r"^w_out is list; it must be a torch\.Tensor", w_out=[1.0])
    refused(ArgumentError, r"^gate is bool; it must be a torch\.Tensor", gate=False)


@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf"), "small", None, True])
def test_a_wrong_eps_is_named(eps):
    refused(ArgumentError, "^eps is .*; it must be a number of at least 0", eps=eps)


def test_an_activated_gate_must_be_there():
    refused(ArgumentError, "^activated is True, but gate is None; pass the activated gate", gate=None, activated=True)
    refused(ArgumentError, "^activated is 'silu'; it must be True or False", activated="silu")


def test_a_wrong_variant_is_named():
    refused(UnknownVariant, "There is no variant 'norm_gat'. Did you mean 'norm_gate'", variant="norm_gat")
    refused(VariantUnsupported, "needs a CUDA or ROCm device", variant="norm_gate")


# Dispatch and cases


@pytest.mark.parametrize("grad", [False, True])
def test_the_query_of_a_case_is_that_of_its_call(grad):
    for name, chosen in CASES.items():
        given = made(grad=grad, **{"bias": False, **chosen})
        assert OUTPUT_CHAIN.bind(**given).query() == OUTPUT_CHAIN.query(case_of(name), "cpu", grad=grad), name


def test_a_query_tells_what_there_is():
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
        ({"gate": "relu"}, "gate is 'relu'; it must be one of silu, activated, none"),
        ({"norm_weight": "half"}, "norm_weight is 'half'; it must be one of same, float32, none"),
        ({"bias": "yes"}, "bias is 'yes'; it must be one of False, True"),
    ],
)
def test_a_case_of_unknown_options_is_refused(changes, message):
    case = OUTPUT_CHAIN.case("float32", **SMALL, **changes)
    for ask in (lambda: OUTPUT_CHAIN.query(case, "cpu"), lambda: OUTPUT_CHAIN.cost(case)):
        with pytest.raises(ArgumentError, match=message):
            ask()
