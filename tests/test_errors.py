"""Tests of errors: messages name the problem and mostly the remedy, and classes derive from the built-in ones callers expect."""

from __future__ import annotations

import inspect

import pytest

from onelaunch import errors, wording
from onelaunch.cli.application import OPTIONS
from onelaunch.errors import (
    ArgumentError,
    CompileError,
    CompilerMissing,
    DeviceError,
    DriverError,
    DTypeError,
    NoDeviceError,
    OneLaunchError,
    PackingError,
    ResultCorrupt,
    ResultExists,
    ShapeError,
    StudyError,
    UnknownOperation,
    UnknownStudy,
    UnknownVariant,
    ValueRangeError,
    VariantUnsupported,
)
from onelaunch.wording import did_you_mean

# Errors with their messages.
MESSAGES = [
    (
        ShapeError("gate", got=[4, 8], want="[B, T, V] = [4, 2, 8] to match x [4, 2, 16]"),
        "gate has shape (4, 8); it must be [B, T, V] = [4, 2, 8] to match x [4, 2, 16].",
    ),
    (DTypeError("x", got="torch.int8", want="float16 or float32"), "x is torch.int8; it must be float16 or float32."),
    (DeviceError("gate", got="cpu", want="cuda:0"), "gate is on cpu; it must be on cuda:0, like the first argument."),
    (
        ValueRangeError("log_decay", got="has a positive value", want="every value must be at most 0"),
        "log_decay has a positive value; every value must be at most 0.",
    ),
    (PackingError("decreases at 2", want="never decrease"), "cu_seqlens decreases at 2; it must never decrease."),
    (
        UnknownOperation("linaer", ["linear", "scan"]),
        "There is no operation 'linaer'. Did you mean 'linear'? Known: linear, scan.",
    ),
    (UnknownVariant("zzz", ["b", "a"]), "There is no variant 'zzz'. Known: a, b."),
    (UnknownStudy("x", []), "There is no study 'x'. Known: none."),
    (
        VariantUnsupported("scan", "triton", reason="needs a GPU", instead=["eager", "chunked"]),
        "Variant 'triton' of scan cannot run this call: it needs a GPU. These can: eager, chunked.",
    ),
    (NoDeviceError("cuda", present=["cpu"]), "There is no device 'cuda' here. Present: cpu. Name one of these, or 'auto'."),
    (
        CompilerMissing("cuda-bindings is not installed"),
        "CUDA C++ cannot be compiled here: cuda-bindings is not installed. Do: pip install 'onelaunch[cuda]'.",
    ),
    (CompileError("a.cu", "sm_90a", log="a.cu(1): error"), "a.cu does not compile for sm_90a:\na.cu(1): error"),
    (
        DriverError("cuLaunchKernelEx", got="CUDA_ERROR_INVALID_VALUE", about="scale, grid (0, 1, 1)"),
        "cuLaunchKernelEx returned CUDA_ERROR_INVALID_VALUE for scale, grid (0, 1, 1).",
    ),
    (StudyError("a.toml", "there is no key 'shaeps'"), "a.toml: there is no key 'shaeps'"),
    (
        ResultExists("r.json"),
        "r.json exists already; results are never overwritten silently. Choose another path, or pass force=True to replace it.",
    ),
    (
        ResultCorrupt("r.json", "it is empty"),
        "r.json is not a result of onelaunch: it is empty. Run the study again, or restore the file.",
    ),
]


@pytest.mark.parametrize(
    ("error", "message"), MESSAGES, ids=lambda value: type(value).__name__ if isinstance(value, Exception) else ""
)
def test_messages_of_errors(error, message):
    assert str(error) == message


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ArgumentError, ValueError),
        (ShapeError, ValueError),
        (DTypeError, TypeError),
        (DTypeError, ValueError),
        (PackingError, ValueError),
        (UnknownOperation, LookupError),
        (UnknownVariant, ValueError),
        (VariantUnsupported, RuntimeError),
        (NoDeviceError, RuntimeError),
        (CompilerMissing, ImportError),
        (CompileError, RuntimeError),
        (DriverError, RuntimeError),
        (StudyError, ValueError),
        (ResultExists, FileExistsError),
        (ResultCorrupt, ValueError),
    ],
)
def test_errors_can_be_caught_as_built_in_errors(error, expected):
    assert issubclass(error, expected)


def test_every_error_derives_from_onelaunch_error_and_has_a_docstring():
    classes = [found for _, found in inspect.getmembers(errors, inspect.isclass) if found.__module__ == errors.__name__]
    assert len(classes) > 15
    for found in classes:
        assert issubclass(found, OneLaunchError)
        assert found.__doc__


def test_errors_about_arguments_name_the_argument():
    assert ShapeError("gate", got=(1,), want="[B]").argument == "gate"
    assert PackingError("is float32", want="be int32").argument == "cu_seqlens"


def test_a_suggestion_is_made_only_when_a_name_is_near():
    assert did_you_mean("smi_fused", ["semi_fused", "eager"]) == " Did you mean 'semi_fused'?"
    assert did_you_mean("quantum", ["semi_fused", "eager"]) == ""


def test_command_line_errors_name_options_instead_of_arguments():
    error = ResultExists("r.json", argument="save_to", resumable=True)
    assert "resume=True" in str(error)
    assert "save_to" in str(error)
    assert "--" not in str(error)
    told = error.told(OPTIONS)  # the message for the command line, with an option in place of each argument
    assert all(option in told for option in ("--resume", "--force", "--out"))
    assert "=True" not in told


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ArgumentError, 2),
        (UnknownOperation, 2),
        (UnknownStudy, 2),
        (errors.UnknownModel, 2),
        (errors.UnknownArchitecture, 2),
        (NoDeviceError, 2),
        (errors.ResultMissing, 2),
        (errors.CheckpointError, 1),
        (VariantUnsupported, 1),
        (StudyError, 1),
        (ResultCorrupt, 1),
        (ResultExists, 1),
        (errors.OutputUnwritable, 1),
    ],
)
def test_exit_codes_are_2_for_wrong_arguments_and_1_for_failures(error, code):
    assert error.exit_code == code


def test_escaped_text_cannot_control_a_terminal_and_can_be_encoded():
    text = "a\tb\n\x1b[2J\r\x00\x7f\x9b\u2028\u202e\ud800 Größe ≥ 3"
    shown = wording.escaped(text)
    assert shown == "a\tb\n\\x1b[2J\\r\\x00\\x7f\\x9b\\u2028\\u202e\\ud800 Größe ≥ 3"
    shown.encode()
    assert wording.escaped(shown) == shown
