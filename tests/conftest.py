"""What all tests share: markers that skip with a reason, fixed seeds, a device, no network, caches of their own."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import random
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from onelaunch import dispatch, operation
from onelaunch.device.tools import find_ncu
from onelaunch.operation import registry
from tests import prose as wording
from tests.browser import REQUIRED, missing_browser
from tests.durations import Durations, add_options
from tests.interpreter import spare_repeated_work
from tests.kept import keep_triton
from tests.prose import prose  # noqa: F401 - a fixture
from tests.toys import make_scale

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton decides when it is imported whether kernels are interpreted, so a process does one or the other."""

if INTERPRETED and importlib.util.find_spec("triton") is not None:
    spare_repeated_work()

os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # else each process compiles a file for seconds to see what the CPU can do
keep_triton()

if (WORKERS := os.environ.get("PYTEST_XDIST_WORKER_COUNT")) is not None:  # threads that wait for a core in turns cost 30 times
    torch.set_num_threads(max((os.cpu_count() or 1) // int(WORKERS), 1))
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # for processes that tests start


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)
    wording.add_options(parser)
    parser.addoption(
        "--architectures",
        choices=("one", "two", "all"),
        default="two",
        help="compile each kernel in one configuration for sm_90a (one), for sm_80 as well (two, the default), "
        "or in every configuration for these, sm_100a and gfx942 (all)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations(config))
    wording.register(config)
    config.pluginmanager.register(Frozen())


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files without tests of interpreted kernels where no others run: importing them takes seconds."""
    return True if INTERPRETED and collection_path.suffix == ".py" and not says_interpret(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("interpret") and not says_interpret(item.path):
            raise pytest.UsageError(f"{item.path} has tests of interpreted kernels, but does not say {INTERPRET}")
        if reason := _why_skip(item):
            item.add_marker(pytest.mark.skip(reason=reason))


INTERPRET = "pytest.mark.interpret"
"""What a file with tests of interpreted kernels says itself, also where another adds the marker."""


@functools.cache
def says_interpret(path: Path) -> bool:
    return INTERPRET in path.read_text(encoding="utf-8")


class Frozen:
    """The objects that the garbage collector leaves out: what imports and collection made, which stays.

    A study collects garbage before each measurement, and a compilation as it begins: to look through thousands of tests and
    all of PyTorch each time takes half a second.
    """

    MODULES = 50
    """How many modules are imported before what they made is left out as well."""

    def __init__(self) -> None:
        self.modules = len(sys.modules)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        self.freeze()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        if len(sys.modules) - self.modules > self.MODULES:
            self.freeze()

    def freeze(self) -> None:
        """Collect garbage, and let later collections leave out the objects that are alive now."""
        gc.collect()
        gc.freeze()
        self.modules = len(sys.modules)


def _why_skip(item: pytest.Item) -> str | None:
    interpret = item.get_closest_marker("interpret") is not None
    if interpret and not INTERPRETED:
        return "set TRITON_INTERPRET=1 to run kernels through Triton's interpreter"
    if INTERPRETED and not interpret:
        return "TRITON_INTERPRET=1 is set: only tests of interpreted kernels run"
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        return "needs a GPU"
    if item.get_closest_marker("ncu") and find_ncu() is None:
        return "needs NVIDIA's profiler ncu"
    if item.get_closest_marker("browser") and not REQUIRED:
        return missing_browser()
    return None


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Every test starts from the same random state."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """onelaunch's cache of this test run: the user's is neither read nor written."""
    folder = tmp_path_factory.getbasetemp() / "onelaunch-cache"
    monkeypatch.setenv("ONELAUNCH_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def own_tables(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder of measured times in this test run: one without tables."""
    folder = tmp_path_factory.getbasetemp() / "onelaunch-tables"
    monkeypatch.setenv("ONELAUNCH_TABLES", str(folder))
    return folder


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that reaches for the network fails; sockets within the machine stay possible."""
    connect = socket.socket.connect

    def refuse(address: Any) -> NoReturn:
        raise AssertionError(f"a test tried to reach {address!r}; tests use no network")

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            refuse(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Iterator[operation.Operation]:
    """The toy operation of :mod:`tests.toys`, registered for one test."""
    dispatch.choose.cache_clear()
    list(operation.operations())  # what is imported meanwhile would be forgotten
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    yield make_scale()
    dispatch.choose.cache_clear()
