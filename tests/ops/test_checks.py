"""Tests of argument checks: each error names the argument, its value, and what it must be.

Tests change a small valid call, which :func:`~tests.ops.cases.arguments_of` makes: float32 on the CPU, with B = 2 and T = 9. The
scans have V = 6, and ``linear_rnn`` also D = 5 (columns of ``x``); ``gla`` has H = 2, K = 20 and V = 16. Arguments that only
``gla`` takes are tested in ``test_gla_contract.py``.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in tests/snapshots/prose.txt. A
test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is
gone.

``OPERATIONS`` are ``gated_scan``, ``linear_rnn`` and ``gla``. ``SCANS`` are ``gated_scan`` and ``linear_rnn``. ``first_of`` names
an operation's first argument. ``pytorch_variants`` are the variants of plain PyTorch. ``triton_variants`` are the variants with
kernels of our own for any GPU. ``results`` returns a variant's results and gradients by name. A test marked ``interpret`` runs in
Triton's interpreter, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onelaunch import checks
from onelaunch.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    OneLaunchError,
    PackingError,
    ShapeError,
    UnknownVariant,
    ValueRangeError,
    VariantUnsupported,
)
from tests.ops.cases import (
    GATED_SCAN,
    GLA,
    LINEAR_RNN,
    OPERATIONS,
    SCANS,
    arguments_of,
    first_of,
    pytorch_variants,
    results,
    triton_variants,
)
from tests.prose import Prose

each_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
both_scans = pytest.mark.parametrize("operation", SCANS, ids=lambda operation: operation.name)


@pytest.fixture
def refused(prose: Prose) -> Callable[..., Any]:
    """Return a function that expects a call to raise an error, and compares its message with tests/snapshots/prose.txt.

    It takes the operation, the class of the error, and a regular expression of which the message must hold a match: mostly just
    the name of the wrong argument. Its keyword arguments replace arguments of a valid call.
    """

    def call(operation: Any, error: Any, pattern: str, /, **changes: Any) -> Any:
        arguments = arguments_of(operation) | changes
        with prose.raises(error, match=rf"(?<!\w){pattern}(?!\w)") as caught:
            operation(**arguments)
        assert isinstance(caught.value, OneLaunchError)
        # If the pattern is the name of an argument, an error with the attribute ``argument`` must hold it there too.
        assert not pattern.isidentifier() or pattern in getattr(caught.value, "argument", pattern)
        assert "\n" not in str(caught.value)
        return caught.value

    return call


# Shapes


@both_scans
@pytest.mark.parametrize("shape", [(9, 6), (6,), (), (1, 2, 9, 6)])
@pytest.mark.parametrize("argument", ["first", "log_decay", "gate"])
def test_wrong_rank(operation, argument, shape, refused):
    """The first argument is ``v`` or ``x``, depending on the operation."""
    argument = first_of(operation) if argument == "first" else argument
    error = refused(operation, ShapeError, argument, **{argument: -torch.ones(shape)})
    assert error.argument == argument


@both_scans
@pytest.mark.parametrize("argument", ["log_decay", "gate"])
@pytest.mark.parametrize("shape", [(2, 8, 6), (2, 9, 7), (1, 9, 6), (2, 6, 9)])
def test_mismatched_sizes(operation, argument, shape, refused):
    message = rf"^{argument} has shape \({', '.join(map(str, shape))}\); it must be \[B, T, V\] = \[2, 9, 6\] to match "
    refused(operation, ShapeError, message + first_of(operation), **{argument: -torch.ones(shape)})


@pytest.mark.parametrize("shape", [(5, 6, 1), (5,)])
def test_weight_of_wrong_rank(shape, refused):
    refused(LINEAR_RNN, ShapeError, "weight", weight=torch.ones(shape))


def test_weight_that_does_not_fit_x(refused):
    refused(LINEAR_RNN, ShapeError, "weight", weight=torch.ones(6, 5))


@both_scans
@pytest.mark.parametrize("shape", [(3, 6), (2, 5), (6, 2)])
def test_initial_state_of_wrong_shape(operation, shape, refused):
    refused(operation, ShapeError, "initial_state", initial_state=torch.zeros(shape))


@both_scans
def test_initial_state_of_wrong_rank(operation, refused):
    refused(operation, ShapeError, "initial_state", initial_state=torch.zeros(6))


@both_scans
def test_initial_state_counts_packed_sequences(operation, prose):
    """An initial state has a row per sequence. With packing these are the three sequences, whereas B is 1."""
    arguments = arguments_of(operation, B=1, lengths=(4, 0, 5)) | {"initial_state": torch.zeros(1, 6)}
    with prose.raises(ShapeError):
        operation(**arguments)


# Dtypes


@both_scans
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.float64, torch.complex64])
def test_first_argument_of_a_non_floating_dtype(operation, dtype, refused):
    name = first_of(operation)
    refused(operation, DTypeError, name, **{name: arguments_of(operation)[name].to(dtype)})


@both_scans
def test_gate_of_another_dtype(operation, refused):
    refused(operation, DTypeError, "gate", gate=torch.ones(2, 9, 6, dtype=torch.float16))


def test_weight_of_another_dtype(refused):
    refused(LINEAR_RNN, DTypeError, "weight", weight=torch.ones(5, 6, dtype=torch.bfloat16))


@both_scans
def test_log_decay_is_of_the_first_dtype_or_float32(operation, prose):
    arguments = arguments_of(operation, dtype="float16")
    arguments["log_decay"] = arguments["log_decay"].bfloat16()
    with prose.raises(DTypeError, match="log_decay"):
        operation(**arguments)


@both_scans
def test_initial_state_of_another_dtype(operation, refused):
    refused(operation, DTypeError, "initial_state", initial_state=torch.zeros(2, 6, dtype=torch.float16))


@both_scans
@pytest.mark.parametrize("argument", ["first", "log_decay", "gate", "initial_state", "cu_seqlens"])
def test_an_argument_that_is_not_a_tensor(operation, argument, refused):
    argument = first_of(operation) if argument == "first" else argument
    refused(operation, ArgumentError, argument, **{argument: [0, 9]})


# Devices


@both_scans
@pytest.mark.parametrize("argument", ["log_decay", "gate", "initial_state", "cu_seqlens"])
def test_mixed_devices(operation, argument, prose):
    arguments = arguments_of(operation, B=1, lengths=(4, 5), initial_state=True)
    arguments[argument] = arguments[argument].to("meta")
    with prose.raises(DeviceError, match=argument):
        operation(**arguments)


def test_weight_on_another_device(refused):
    refused(LINEAR_RNN, DeviceError, "weight", weight=torch.ones(5, 6, device="meta"))


# Values


@both_scans
@pytest.mark.parametrize("value", [0.25, float("nan"), float("inf")])
def test_an_invalid_log_decay_value(operation, value, refused):
    log_decay = -torch.ones(2, 9, 6)
    log_decay[1, 4, 3] = value
    refused(operation, ValueRangeError, "log_decay", log_decay=log_decay)


def test_values_on_a_gpu_are_read_only_on_demand(monkeypatch):
    """Reading values would synchronize with the device at every call. A tensor that claims to be on a GPU stands for one."""

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda")

    monkeypatch.delenv("ONELAUNCH_CHECK_VALUES", raising=False)
    value = torch.zeros(1).as_subclass(Elsewhere)
    assert not checks.values_are_checked(value)
    monkeypatch.setenv("ONELAUNCH_CHECK_VALUES", "1")
    assert checks.values_are_checked(value)
    assert checks.values_are_checked(torch.zeros(1))


@both_scans
def test_values_are_checked_at_every_call(operation, prose):
    """Passed checks of shapes are cached; checks of values cannot be."""
    arguments = arguments_of(operation)
    operation(**arguments)
    arguments["log_decay"][0, 0, 0] = 1.0
    with prose.raises(ValueRangeError, match="log_decay"):
        operation(**arguments)


@both_scans
def test_a_mistake_is_named_at_every_call(operation):
    """The call is repeated after a correct one and twice in a row. A cached correct call must not hide a wrong one."""
    arguments = arguments_of(operation)
    operation(**arguments)
    wrong: dict[str, Any] = {
        "gate": arguments["gate"].double(),
        "log_decay": arguments["log_decay"].to("meta"),
        "initial_state": torch.zeros(3, 6),
    }
    for name, value in wrong.items():
        for _ in range(2):
            with pytest.raises((ShapeError, DTypeError, DeviceError), match=rf"^{name} "):
                operation(**(arguments | {name: value}))


@both_scans
def test_cache_keys_of_checks_distinguish_calls(operation):
    """The dispatch key (query) of a call is cached. A call that differs in gradient or dtype must not find another call's key."""
    arguments = arguments_of(operation)
    plain = operation.bind(**arguments).query()
    assert operation.bind(**arguments).query() is plain, "the same call finds the cached key"
    arguments["gate"].requires_grad_()
    assert operation.bind(**arguments).query() == plain._replace(grad=True)
    with torch.no_grad():
        assert operation.bind(**arguments).query() == plain
    # Outside of no_grad, the gate asks for a gradient again. An argument given as None changes nothing.
    assert operation.bind(**arguments, cu_seqlens=None).query().grad
    arguments = {name: value.half() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    arguments["initial_state"] = None
    assert operation.bind(**arguments).query().dtype is torch.float16


# Packing


@each_operation
@pytest.mark.parametrize(
    "offsets",
    [
        [0, 6, 4, 9],
        [1, 4, 9],
        [-1, 4, 9],
        [0, 4, 8],
        [0, 4, 10],
        [0],
        [],
    ],
)
def test_offsets_that_do_not_describe_packed_sequences(operation, offsets, prose):
    arguments = arguments_of(operation, B=1, initial_state=False) | {"cu_seqlens": torch.tensor(offsets, dtype=torch.int32)}
    with prose.raises(PackingError, match="cu_seqlens") as caught:
        operation(**arguments)
    assert caught.value.argument == "cu_seqlens"


@each_operation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16, torch.uint8])
def test_offsets_of_a_wrong_dtype(operation, dtype, prose):
    arguments = arguments_of(operation, B=1) | {"cu_seqlens": torch.tensor([0, 9]).to(dtype)}
    with prose.raises(PackingError, match="cu_seqlens"):
        operation(**arguments)


@each_operation
def test_packing_with_a_batch(operation, refused):
    refused(operation, PackingError, "cu_seqlens", cu_seqlens=torch.tensor([0, 9]))


@each_operation
def test_offsets_of_two_dimensions(operation, prose):
    arguments = arguments_of(operation, B=1) | {"cu_seqlens": torch.tensor([[0, 9]])}
    with prose.raises(ShapeError, match="cu_seqlens"):
        operation(**arguments)


# Variants


@each_operation
def test_an_unknown_variant(operation, prose):
    with prose.raises(UnknownVariant, match="'chuncked'"):
        operation(**arguments_of(operation), variant="chuncked")


@pytest.mark.parametrize(("operation", "variant"), [(GATED_SCAN, "fused"), (LINEAR_RNN, "fused_chunked")])
def test_a_variant_that_cannot_run_here(operation, variant, prose):
    with prose.raises(VariantUnsupported, match=f"'{variant}'") as caught:
        operation(**arguments_of(operation), variant=variant)
    assert "needs" in caught.value.reason


@pytest.mark.parametrize("operation", [LINEAR_RNN, GLA], ids=lambda operation: operation.name)
def test_fla_cannot_run_here(operation):
    """The variant that calls the package fla (flash-linear-attention) needs the package and CUDA tensors."""
    with pytest.raises(VariantUnsupported, match=r"fla|CUDA"):
        operation(**arguments_of(operation), variant="fla")


# Empty inputs are not an error


@both_scans
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("variant", ["auto", "eager"])
def test_no_steps(operation, variant, grad):
    """The state passes through unchanged, and so does its gradient."""
    arguments = arguments_of(operation, T=0, initial_state=True, final_state=True, grad=grad)
    found = results(operation, arguments, variant)
    assert found["y"].shape == (2, 0, 6)
    assert torch.equal(found["final_state"], arguments["initial_state"])
    assert found["final_state"].data_ptr() != arguments["initial_state"].data_ptr()
    if grad:
        assert found["grad initial_state"].shape == (2, 6)
        assert found["grad initial_state"].all()
    without = arguments | {"initial_state": None}
    assert not operation(**without, variant=variant)[1].any()


@both_scans
@pytest.mark.parametrize("variant", ["auto", "eager"])
def test_packed_sequences_without_any_step(operation, variant):
    arguments = arguments_of(operation, B=1, T=0, lengths=(0, 0, 0), initial_state=True, final_state=True)
    y, final = operation(**arguments, variant=variant)
    assert y.shape == (1, 0, 6)
    assert torch.equal(final, arguments["initial_state"])


@both_scans
@pytest.mark.parametrize("grad", [False, True])
def test_no_batch(operation, grad):
    for variant in ("auto", *pytorch_variants(operation)):
        arguments = arguments_of(operation, B=0, initial_state=True, final_state=True, grad=grad)
        found = results(operation, arguments, variant)
        assert found["y"].shape == (0, 9, 6)
        assert found["final_state"].shape == (0, 6)


@both_scans
def test_no_channels(operation):
    for variant in ("auto", *pytorch_variants(operation)):
        y, final = operation(**arguments_of(operation, V=0, initial_state=True, final_state=True), variant=variant)
        assert y.shape == (2, 9, 0)
        assert final.shape == (2, 0)


@pytest.mark.parametrize("variant", ["auto", *pytorch_variants(LINEAR_RNN)])
def test_no_columns_of_x(variant):
    """An empty sum is zero: only the decaying initial state is left."""
    arguments = arguments_of(LINEAR_RNN, D=0, initial_state=True, final_state=True, grad=True)
    found = results(LINEAR_RNN, arguments, variant)
    expected = arguments["initial_state"] * arguments["log_decay"].sum(1).exp()
    torch.testing.assert_close(found["final_state"], expected.detach())
    assert found["grad x"].shape == (2, 9, 0)


@pytest.mark.interpret
@both_scans
@pytest.mark.parametrize("empty", ["B", "T", "V"])
def test_kernels_refuse_empty_inputs(operation, empty, prose):
    """In the interpreter the kernels could run on the CPU, so the empty size alone rules them out. ``auto`` finds a variant."""
    given: dict[str, Any] = {"initial_state": True, "final_state": True, empty: 0}
    arguments = arguments_of(operation, **given)
    for variant in triton_variants(operation):
        with prose.raises(VariantUnsupported):
            operation(**arguments, variant=variant)
    y, _ = operation(**arguments)
    assert not y.numel()
