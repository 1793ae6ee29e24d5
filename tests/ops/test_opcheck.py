"""Tests of the operators of the scans and of ``gla`` by PyTorch's ``opcheck``, with kernels in Triton's interpreter.

``opcheck`` compares an operator's schema, fake results and autograd registration with what a call does.

``small`` makes the arguments of a call with few steps and both states. ``triton_variants`` are the variants with kernels of our
own for any GPU. A test marked ``thorough`` does not run in ``make test``, and one marked ``interpret`` runs in Triton's
interpreter, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch
from torch import library

from tests.ops.cases import (
    GATED_SCAN,
    GLA,
    LINEAR_RNN,
    small,
    triton_variants,
)

UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
"""Checks of ``opcheck``: all, but with static instead of dynamic shapes, which ``test_dynamic_shapes.py`` tests."""


@pytest.mark.interpret
@pytest.mark.parametrize(("separate", "gate"), [(False, True), (True, True), (False, False), (True, False)])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.thorough
def test_the_scan_operators_pass_opcheck(separate, gate, keep):
    arguments = small(GATED_SCAN, grad=keep, log_decay_dtype="float32", gate=gate)
    given = [arguments[name] for name in ("v", "log_decay", "gate", "initial_state")]
    forward = torch.ops.onelaunch.gated_scan_forward.default
    library.opcheck(forward, (*given, None, True, keep, separate), test_utils=UTILITIES)  # None: cu_seqlens; True: want_final
    plain = [None if value is None else value.detach() for value in given]
    y, _, carries, states = forward(*plain, None, want_final=True, keep=True, separate=separate)
    backward = torch.ops.onelaunch.gated_scan_backward.default
    gradients = (torch.randn_like(y), torch.randn(1, 4))
    library.opcheck(backward, (*gradients, *plain, None, carries, states, separate), test_utils=UTILITIES)


@pytest.mark.interpret
@pytest.mark.parametrize(("kernel", "gate"), [("chunked", True), ("stepwise", True), ("chunked", False)])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.thorough
def test_the_layer_operators_pass_opcheck(kernel, gate, keep):
    arguments = small(LINEAR_RNN, grad=keep, gate=gate)
    given = [arguments[name] for name in ("x", "weight", "log_decay", "gate", "initial_state")]
    forward = torch.ops.onelaunch.linear_rnn_forward.default
    library.opcheck(forward, (*given, None, True, keep, kernel), test_utils=UTILITIES)
    plain = [None if value is None else value.detach() for value in given]
    y, _, v, carries = forward(*plain, None, want_final=True, keep=True, kernel=kernel)
    backward = torch.ops.onelaunch.linear_rnn_backward.default
    gradients = (torch.randn_like(y), torch.randn(1, 4))
    library.opcheck(backward, (*gradients, *plain, None, v, carries), test_utils=UTILITIES)


@pytest.mark.interpret
@pytest.mark.parametrize("values_first", [False, True])
@pytest.mark.parametrize("kernel", triton_variants(GLA))
@pytest.mark.thorough
def test_the_attention_operators_pass_opcheck(kernel, values_first):
    """If the caller keeps states with values first, the operator gets a transposed state and may return one."""
    for keep in (False, True):
        arguments = small(GLA, grad=keep)
        given = [arguments[name] for name in ("q", "k", "v", "g", "initial_state")]
        if values_first:
            given[4] = given[4].detach().mT.contiguous().mT.requires_grad_(keep)
        forward = torch.ops.onelaunch.gla_forward.default
        library.opcheck(forward, (*given, None, 0.5, True, kernel), test_utils=UTILITIES)
    plain = [value.detach() for value in given]
    o, final = forward(*plain, None, 0.5, want_final=True, kernel=kernel)
    backward = torch.ops.onelaunch.gla_backward.default
    gradients = (torch.randn_like(o), torch.randn_like(final))
    library.opcheck(backward, (*gradients, *plain, None, 0.5, kernel), test_utils=UTILITIES)


@pytest.mark.interpret
def test_the_matrix_operator_passes_opcheck():
    """The operator is the matrix product of ``linear_rnn``'s variant ``three_launch``."""
    a, b = torch.randn(9, 5, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    library.opcheck(torch.ops.onelaunch.matmul.default, (a, b))
