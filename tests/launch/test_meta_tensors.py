"""Tests of tensors without memory: they look as real ones do, and calls on them launch the same kernels.

A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch

from onelaunch.device.architectures import find_architecture
from onelaunch.launch.build import build_of
from onelaunch.launch.imitation import imitate, observe
from onelaunch.launch.meta_tensors import MetaTensor, MetaTensorMode, MetaTensors, _like
from onelaunch.operation import find_operation
from onelaunch.operation.examples import _differentiable

ELSEWHERE = torch.device("cpu", 7)
"""Device that no tensor of these tests is on. One of CUDA would need a PyTorch with CUDA: see ``test_first_call_gpu.py``."""


def meta_tensor(tensor, device=ELSEWHERE):
    return MetaTensor(MetaTensors().of(tensor).plain, device)


def looks(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), tensor.untyped_storage().nbytes()


class Named(NamedTuple):
    x: torch.Tensor
    number: int


@dataclasses.dataclass(frozen=True)
class Call:
    x: torch.Tensor
    inner: Named
    flags: tuple[str, ...] = ("packed",)


def test_meta_tensors_look_like_their_tensors():
    whole = torch.randn(4, 6, 8)
    for each in (whole, whole[1:], whole.transpose(0, 2), whole[:, ::2, 3:], whole.expand(2, 4, 6, 8), whole.half(), whole[:0]):
        assert looks(MetaTensors().of(each)) == looks(each)
        assert MetaTensors().of(each).device == each.device
    assert meta_tensor(whole).device == ELSEWHERE
    assert meta_tensor(whole[1:]).data_ptr() % 16 == 0
    assert meta_tensor(whole[:, :, 1:]).data_ptr() % 16 == 4


def test_meta_tensors_of_one_storage_share_one():
    whole = torch.randn(4, 8)
    first, second, other = MetaTensors().of((whole[:, :4], whole[:, 4:], torch.randn(2)))
    assert first.plain.untyped_storage()._cdata == second.plain.untyped_storage()._cdata
    assert first.plain.untyped_storage()._cdata != other.plain.untyped_storage()._cdata


def test_gradients_are_required_of_meta_tensors_as_of_their_tensors():
    made = MetaTensors().of([torch.randn(2, requires_grad=True), torch.randn(2), torch.nn.Parameter(torch.randn(2))])
    assert [each.requires_grad for each in made] == [True, False, True]


def test_tensors_are_replaced_wherever_a_call_holds_them():
    x = torch.randn(3)
    made = MetaTensors().of({"call": Call(x, Named(x, 2)), "list": [x, None, "text"]})
    assert isinstance(made["call"], Call)
    assert isinstance(made["call"].inner, Named)
    assert (made["call"].inner.number, made["call"].flags, made["list"][1:]) == (2, ("packed",), [None, "text"])
    assert all(type(each) is MetaTensor for each in (made["call"].x, made["call"].inner.x, made["list"][0]))


def test_a_tensor_of_another_class_has_no_meta_tensor():
    class Own(torch.Tensor):
        pass

    with pytest.raises(TypeError, match="Own"):
        MetaTensors().of(torch.randn(2).as_subclass(Own))


def test_an_object_that_may_hold_a_state_has_no_meta_tensor():
    class Session:
        pass

    with pytest.raises(TypeError, match="Session"):
        MetaTensors().of((torch.randn(2), Session()))


def test_variants_that_could_do_harm_on_meta_tensors_are_not_run_on_them():
    for operation, names in {
        "decode_step": (),
        "gla": ("fused", "stepwise", "hopper"),
        "gla_layer": ("packed", "composed"),
    }.items():
        variants = find_operation(operation).variants.values()
        found = {each.name for each in variants if each.is_recordable}
        assert found >= set(names)
        assert not {each.name for each in variants if each.capabilities.requires} & found
        assert operation != "decode_step" or not found


OPERATORS = {
    "view": lambda x: x.view(-1, 4),
    "brackets": lambda x: x[:, None, 1:, ..., 0],
    "transpose": lambda x: x.mT,
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "clone": lambda x: x.transpose(0, 1).clone(),
    "clone of an expanded tensor": lambda x: x.expand(3, *x.shape).clone(),
    "empty_like": lambda x: torch.empty_like(x[:, 1:], dtype=torch.float64),
    "empty_like, contiguous": lambda x: torch.empty_like(x.transpose(0, 1), memory_format=torch.contiguous_format),
    "new_zeros": lambda x: x.new_zeros(2, 3),
    "to": lambda x: x.transpose(0, 1).to(torch.bfloat16),
    "sum": lambda x: x.sum(1),
    "product": lambda x: x @ x.mT,
    "in place": lambda x: x.transpose(0, 1).mul_(2),
    "several": lambda x: x.unbind(1)[1],
    "cat": lambda x: torch.cat([x, x], 1),
    "expand": lambda x: torch.zeros((), device=x.device).expand(x.shape),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_return_meta_tensors_of_what_they_would(name):
    x = torch.randn(2, 4, 8)
    other = meta_tensor(x)
    with MetaTensorMode():
        made = OPERATORS[name](other)
    expected = OPERATORS[name](x)
    assert type(made) is MetaTensor
    assert made.device == ELSEWHERE
    assert looks(made)[:4] == looks(expected)[:4]


def test_allocations_are_on_the_device_that_is_asked_for():
    with MetaTensorMode():
        made = torch.empty(2, 3, device=ELSEWHERE), torch.arange(4), torch.zeros(2, pin_memory=False)
    assert [each.device for each in made] == [ELSEWHERE, torch.device("cpu"), torch.device("cpu")]
    assert all(type(each) is MetaTensor for each in made)


def test_values_cannot_be_read():
    made = meta_tensor(torch.ones(1))
    with MetaTensorMode(), pytest.raises(RuntimeError):
        made.item()


def test_copies_have_the_strides_that_pytorch_gives_them():
    x = torch.randn(2, 3, 4, 5)
    for each in (x, x.permute(2, 0, 3, 1), x[1:], x[..., ::2], x[:, :1], x.permute(3, 1, 0, 2)[:, :1], x.expand(2, 2, 3, 4, 5)):
        made = _like((each,), {})
        if made is not None:
            assert made.stride() == torch.empty_like(each).stride() == each.clone().stride()
    assert _like((x.permute(2, 0, 3, 1),), {}) is not None
    assert _like((x[..., ::2],), {}) is None


EXAMPLES = {
    "gla hopper": ("gla", "hopper", {"B": 2, "T": 512, "H": 4, "K": 128, "V": 128}),
    "gla hopper, states": (
        "gla", "hopper",
        {"B": 1, "T": 512, "H": 4, "K": 64, "V": 128, "lengths": (100, 412), "initial_state": True, "final_state": True},
    ),
    "gla fused": ("gla", "fused", {"B": 2, "T": 100, "H": 4, "K": 64, "V": 64, "decay_per": "head"}),
    "gla stepwise": ("gla", "stepwise", {"B": 2, "T": 1, "H": 4, "K": 64, "V": 64, "initial_state": True}),
    "linear_rnn": ("linear_rnn", "fused_hopper", {"B": 2, "T": 256, "D": 256, "V": 256}),
    "gated_scan": ("gated_scan", "fused", {"B": 2, "T": 256, "V": 256}),
    "swiglu": ("swiglu", "two_node", {"M": 256, "K": 256, "N": 256}),
    "rms_norm": ("rms_norm", "fused", {"M": 256, "D": 256}),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("grad", [False, True])
def test_a_call_on_meta_tensors_launches_the_kernels_of_the_call(name, grad):
    """The call itself runs on real tensors of the CPU, without its launches."""
    pytest.importorskip("triton", reason="the calls launch kernels of Triton")
    operation, variant, given = EXAMPLES[name]
    operation = find_operation(operation)
    variant, case = operation.get(variant), operation.case("bfloat16", **given)
    call = operation.bind(**operation.make_inputs(case, torch.device("cpu"), 0).arguments)
    if grad:
        call = _differentiable(variant, call)
    keys = []
    for inputs, mode in ((call, nullcontext()), (MetaTensors().of(call), MetaTensorMode())):
        with observe() as launches, imitate(), torch.no_grad(), mode:
            variant.run(inputs)
        keys.append([build_of(each, find_architecture("sm_90a"), "").key for each in launches])
    assert keys[0] == keys[1]
    assert keys[0]


IMPORTS = """
import sys, torch
import onelaunch.ops
from onelaunch.launch.planned import Planned
from onelaunch.launch.plan import Device
from onelaunch.launch.meta_tensors import MetaTensorMode, MetaTensors
x = torch.randn(2, 4, 8)
y = MetaTensors().of(x)
with MetaTensorMode(), torch.no_grad():
    torch.empty_like(y), y.transpose(0, 1).contiguous(), y[1:].to(torch.bfloat16), y.new_zeros(3)
Device.types = ("cpu",)
Device.is_capturing = staticmethod(lambda: False)
planned = Planned(torch.neg)
with torch.no_grad():
    planned(x), planned(x)
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules], len(planned.plans()))
"""


@pytest.mark.thorough
def test_neither_meta_tensors_nor_recordings_import_pytorchs_compiler():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[] 1", done.stdout
