"""Tests of where parameters lie: one behind the other in one buffer, and what a call does once they no longer do.

In each case the result must be that of the parameters as they are now, since no packed copy of them exists.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onelaunch import accelerate
from onelaunch.integrations.storage import Owners, are_adjacent, lay, part, together
from tests.integrations.standins import GatedMLP

pytestmark = pytest.mark.usefixtures("fla")


def parameters(*rows, columns=3, dtype=torch.float32):
    return [nn.Parameter(torch.randn(each, columns, dtype=dtype)) for each in rows]


def test_each_parameter_keeps_its_values_and_gets_its_own_gradient():
    given = parameters(2, 1, 4)
    wanted = torch.cat([each.detach() for each in given])
    assert together(given) is None
    lay(given)
    whole = together(given)
    assert torch.equal(whole, wanted)
    assert whole.data_ptr() == given[0].data_ptr()
    given[1].requires_grad_(requires_grad=False)
    (together(given) * torch.arange(21.0).view(7, 3)).sum().backward()
    assert torch.equal(given[0].grad, torch.arange(6.0).view(2, 3))
    assert given[1].grad is None
    assert torch.equal(given[2].grad, torch.arange(9.0, 21.0).view(4, 3))
    with torch.no_grad():
        assert not together(given).requires_grad
    part(given)
    assert together(given) is None
    assert torch.equal(torch.cat(given), wanted)


def test_neighbours_in_different_storages_are_not_joined():
    memory = torch.arange(12.0)
    first, second = (torch.empty(0) for _ in range(2))
    buffer = memory.numpy()
    first, second = torch.from_numpy(buffer[:6]).view(2, 3), torch.from_numpy(buffer[6:]).view(2, 3)
    assert first.data_ptr() + 24 == second.data_ptr()
    assert not are_adjacent([first, second])
    assert are_adjacent([memory[:6].view(2, 3), memory[6:].view(2, 3)])
    assert not are_adjacent([memory[6:].view(2, 3), memory[:6].view(2, 3)])


def test_a_weight_that_was_changed_before_the_backward_pass_is_an_error():
    given = parameters(2, 2)
    lay(given)
    loss = together(given).square().sum()
    with torch.no_grad():
        given[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def tied():
    (one,) = parameters(2)
    return [one, one], [one]


def views_of_one_tensor():
    whole = torch.randn(5, 3)
    given = [nn.Parameter(whole[3:]), nn.Parameter(whole[:2])]
    return given, given


def shared_with_another_module():
    given = parameters(2, 2)
    return given, [*given, nn.Parameter(given[0].detach())]


def in_shared_memory():
    given = parameters(2, 2)
    given[0].share_memory_()
    return given, given


def of_two_dtypes():
    given = [*parameters(2), *parameters(2, dtype=torch.bfloat16)]
    return given, given


@pytest.mark.parametrize("made", [tied, views_of_one_tensor, shared_with_another_module, in_shared_memory, of_two_dtypes])
def test_parameters_that_cannot_be_moved_have_a_reason(made, prose):
    given, of_model = made()
    prose(Owners(nn.ParameterList(of_model)).why_not(given))
    assert Owners(nn.ParameterList(parameters(1))).why_not(parameters(2, 2)) is None


def to_another_dtype_and_back(mlp):
    mlp.bfloat16().float()


def loaded_by_assignment(mlp):
    mlp.load_state_dict({name: torch.randn_like(each) for name, each in mlp.state_dict().items()}, assign=True)


def swapped_storage(mlp):
    mlp.up_proj.weight.data = torch.randn(48, 32)


def swapped_parameter(mlp):
    mlp.gate_proj.weight = nn.Parameter(torch.randn(48, 32))


def freed_and_allocated_again(mlp):
    """Do what FSDP2 does: the module's parameters are other objects in each forward."""
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.register_parameter("weight", nn.Parameter(torch.randn(48, 32)))


MOVES = [to_another_dtype_and_back, loaded_by_assignment, swapped_storage, swapped_parameter, freed_and_allocated_again]


@pytest.mark.parametrize("move", MOVES)
def test_results_follow_parameters_that_move(move):
    mlp, plain, x = GatedMLP(), GatedMLP(), torch.randn(4, 32)
    report = accelerate(mlp)
    (replaced,) = report.replaced
    assert replaced.layout == "as one weight"
    move(mlp)
    assert replaced.layout.startswith("each by itself, since they are no longer adjacent")
    plain.load_state_dict(mlp.state_dict())
    found, wanted = mlp(x), plain(x)
    torch.testing.assert_close(found, wanted)
    found.sum().backward()
    wanted.sum().backward()
    for one, other in zip(mlp.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert not report.fallbacks
    accelerate(mlp)
    assert replaced.layout == "as one weight"
    torch.testing.assert_close(mlp(x), wanted)


def test_results_follow_values_written_into_the_buffer():
    mlp, x = GatedMLP(), torch.randn(4, 32)
    accelerate(mlp)
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1)
    mlp(x).square().sum().backward()
    optimizer.step()
    plain = GatedMLP()
    plain.load_state_dict(mlp.state_dict())
    torch.testing.assert_close(mlp(x), plain(x))


def test_undo_leaves_alone_what_was_not_moved():
    """Parameters that lay one behind the other already may be views of a flat parameter; undo must not break that."""
    mlp, flat = GatedMLP(), torch.randn(96, 32)
    mlp.gate_proj.weight, mlp.up_proj.weight = nn.Parameter(flat[:48]), nn.Parameter(flat[48:])
    report = accelerate(mlp)
    assert report.replaced[0].layout == "as one weight"
    report.undo()
    assert mlp.up_proj.weight.data_ptr() == flat[48:].data_ptr()


def test_projections_that_modules_share(prose):
    first, second, x = GatedMLP(), GatedMLP(), torch.randn(4, 32)
    second.gate_proj.weight = first.gate_proj.weight
    second.up_proj.weight = nn.Parameter(first.up_proj.weight.detach())
    model = nn.Sequential(first, second)
    before = model(x)
    report = accelerate(model)
    prose(str(report))
    torch.testing.assert_close(model(x), before)
    with torch.no_grad():
        first.up_proj.weight.zero_()
    assert not second.up_proj.weight.any()


def test_a_layer_that_a_model_holds_twice_is_replaced_once():
    mlp = GatedMLP()
    model = nn.Sequential(mlp, nn.Tanh(), mlp)
    before = model(torch.ones(2, 32))
    report = accelerate(model)
    assert len(report.replaced) == 1
    torch.testing.assert_close(model(torch.ones(2, 32)), before)
