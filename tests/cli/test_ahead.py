"""Tests of the faster start of commands: the CUDA context is created during PyTorch's import, with garbage collection off.

``ahead.make_context`` takes the arguments of ``onelaunch generate`` and returns the thread that creates the context, or
``None``. ``ahead.hastened_import`` is the context manager around the import.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from types import SimpleNamespace

import pytest

from onelaunch.cli import ahead, main


@pytest.fixture
def driver(monkeypatch):
    """Replace the CUDA driver by one that records its calls in ``calls``. ``answer`` is the return value of cuInit.

    PyTorch counts as built for CUDA.
    """
    calls = []
    fake = SimpleNamespace(answer=0, calls=calls)
    fake.cuInit = lambda flags: calls.append(("cuInit", flags)) or fake.answer
    fake.cuDevicePrimaryCtxRetain = lambda place, device: calls.append(("cuDevicePrimaryCtxRetain", device)) or 0
    monkeypatch.setattr(ahead, "library", lambda: fake)
    monkeypatch.setattr(ahead, "_for_cuda", lambda: True)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")  # monkeypatch restores what a test changes
    return fake


def test_a_context_is_created_and_kept(driver):
    ahead.make_context(["def main(", "-n", "4"]).join(10)
    assert driver.calls == [("cuInit", 0), ("cuDevicePrimaryCtxRetain", 0)]


@pytest.mark.parametrize("arguments", [["--device", "cpu", "x"], ["x", "--device=cuda:1"], ["--help"], ["x", "-h"]])
def test_no_context_if_a_device_is_named_or_nothing_runs(arguments, driver):
    assert ahead.make_context(arguments) is None
    assert driver.calls == []


@pytest.mark.parametrize(("version", "expected"), [("cuda: Optional[str] = '13.0'", True), ("cuda: Optional[str] = None", False)])
def test_no_context_if_pytorch_was_built_without_cuda(version, expected, tmp_path, monkeypatch):
    """PyTorch's version.py is read, because this happens before PyTorch is imported."""
    (tmp_path / "version.py").write_text(f"debug = False\n{version}\nhip: Optional[str] = '6'\n")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert ahead._for_cuda() is expected
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert ahead._for_cuda() is False


def test_modules_are_loaded_lazily_unless_the_user_chose(driver, monkeypatch):
    ahead.make_context([]).join(10)
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER"
    monkeypatch.delenv("CUDA_MODULE_LOADING")
    ahead.make_context([]).join(10)
    assert os.environ["CUDA_MODULE_LOADING"] == "LAZY"


def test_without_a_gpu_nothing_happens(driver, monkeypatch):
    driver.answer = 100  # CUDA_ERROR_NO_DEVICE
    ahead.make_context([]).join(10)
    assert driver.calls == [("cuInit", 0)]
    # Without a driver, ``library`` raises; a lambda can raise only through a generator.
    monkeypatch.setattr(ahead, "library", lambda: (_ for _ in ()).throw(OSError("libcuda.so.1")))
    ahead.make_context([]).join(10)


@pytest.mark.parametrize(("command", "begun"), [("generate", [["x"]]), ("explain", [])])
def test_only_generate_creates_a_context_early(command, begun, monkeypatch):
    """``begun`` holds the arguments of every call of ``make_context``."""
    asked = []
    monkeypatch.setattr(ahead, "make_context", asked.append)
    monkeypatch.setattr("onelaunch.cli.application.application", lambda: None)
    monkeypatch.setattr("sys.argv", ["onelaunch", command, "x"])
    main.app()
    assert asked == begun


def test_garbage_collection_is_off_while_pytorch_is_imported(monkeypatch):
    """Afterwards the collector is on again, even if the import fails as it does here."""
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    monkeypatch.delitem(sys.modules, "torch")  # as if PyTorch were not imported yet
    with contextlib.suppress(ImportError), ahead.hastened_import():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    assert frozen == [False]


def test_ctrl_c_during_pytorchs_import_ends_the_process(monkeypatch):
    """Python's handler is replaced by the default action for the import; a signal that is ignored stays ignored."""
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.delitem(sys.modules, "torch")
    before = signal.getsignal(signal.SIGINT)
    for handler, meanwhile in ((signal.default_int_handler, signal.SIG_DFL), (signal.SIG_IGN, signal.SIG_IGN)):
        signal.signal(signal.SIGINT, handler)
        try:
            with ahead.hastened_import():
                assert signal.getsignal(signal.SIGINT) is meanwhile
            assert signal.getsignal(signal.SIGINT) is handler
        finally:
            signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collectors_state_is_restored(collects, monkeypatch):
    """PyTorch may be imported already, as in a notebook (``collects``), or the collector may have been turned off."""
    monkeypatch.setattr(gc, "freeze", lambda: pytest.fail("objects of the caller would be frozen"))
    if not collects:
        monkeypatch.delitem(sys.modules, "torch")
        gc.disable()
    try:
        with ahead.hastened_import():
            assert gc.isenabled() is collects
        assert gc.isenabled() is collects
    finally:
        gc.enable()
