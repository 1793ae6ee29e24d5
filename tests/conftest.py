"""Hooks and fixtures shared by all tests.

The hooks add pytest's options, skip tests by their markers with a reason, and keep garbage collections short. The fixtures seed
random numbers, give a device, private cache folders, a folder of compiled libraries and the toy operation ``scale``, and refuse
network connections.
"""

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

# Before PyTorch is imported: its products on a CPU then round alike on all x86 CPUs. oneDNN's products with AMX also read beyond
# the rows of a slice, and a NaN there becomes one of the result (PyTorch 2.13).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

import torch

from onelaunch import dispatch, operation
from onelaunch.device.tools import find_ncu
from onelaunch.launch.planned import forget_plans
from onelaunch.operation import registry
from tests import prose as wording
from tests.browser import REQUIRED, missing_browser
from tests.durations import Durations, add_options
from tests.interpreter import spare_repeated_work
from tests.kept import keep_triton
from tests.prose import prose  # noqa: F401 - a fixture
from tests.toys import make_scale

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""True if this process interprets Triton's kernels. Triton decides that at its import, so a process does one or the other."""

if INTERPRETED and importlib.util.find_spec("triton") is not None:
    spare_repeated_work()  # patches the interpreter, which then needs a quarter of the time

# Otherwise each process compiles a file for seconds to find out the CPU's vector instructions.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
keep_triton()  # does nothing unless ONELAUNCH_TEST_CACHE names a folder

# More threads than cores, which wait for a core in turns, take 30 times as long.
if (WORKERS := os.environ.get("PYTEST_XDIST_WORKER_COUNT")) is not None:
    torch.set_num_threads(max((os.cpu_count() or 1) // int(WORKERS), 1))
    # The environment variable is for processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)
    wording.add_options(parser)
    parser.addoption(
        "--architectures",
        choices=("one", "two", "all", "every"),
        default="two",
        help="compile each kernel in one configuration for sm_90a (one), for sm_80 as well (two, the default), for sm_100a and "
        "gfx942 as well (all), or in every configuration for all of them, with the tests marked `every` (every)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations(config))
    wording.register(config)
    config.pluginmanager.register(Frozen())


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Skip files without tests of interpreted kernels in an interpreter run: importing them takes seconds."""
    return True if INTERPRETED and collection_path.suffix == ".py" and not says_interpret(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("interpret") and not says_interpret(item.path):
            raise pytest.UsageError(f"{item.path} has tests of interpreted kernels, but does not say {INTERPRET}")
        if item.get_closest_marker("interpret") and _is_of_ablation(item):
            item.add_marker(pytest.mark.thorough)
        if reason := _why_skip(item):
            item.add_marker(pytest.mark.skip(reason=reason))


INTERPRET = "pytest.mark.interpret"
"""String in the source of every file with tests of interpreted kernels, even if a shared helper adds the marker."""


@functools.cache
def says_interpret(path: Path) -> bool:
    """Return whether a file's source holds :data:`INTERPRET`. Reading it is fast, where importing it takes seconds."""
    return INTERPRET in path.read_text(encoding="utf-8")


def _is_of_ablation(item: pytest.Item) -> bool:
    """Return whether a parameter of a test is the name of an ablation's variant, which ``auto`` never chooses."""
    given = getattr(item, "callspec", None)
    return given is not None and any(isinstance(value, str) and value in _ablations() for value in given.params.values())


@functools.cache
def _ablations() -> frozenset[str]:
    """Return the names of the variants that ``onelaunch.ablations`` registers."""
    found = [operation.find_operation(name) for name in ("gla", "linear_rnn")]
    return frozenset(
        variant.name
        for each in found
        for variant in each.variants.values()
        if variant.run.__module__.startswith("onelaunch.ablations.")
    )


class Frozen:
    """Plugin that excludes long-lived objects from garbage collection: those made by imports and by collecting tests.

    Nothing is collected while tests are collected, since nearly all of what that makes stays; it would take a tenth of the time.
    A study collects garbage around each measurement, and so may ``torch.compile``. Traversing thousands of tests and all of
    PyTorch takes half a second each time.
    """

    MODULES = 50
    """Number of newly imported modules after which their objects are excluded from garbage collection too."""

    def __init__(self) -> None:
        self.modules = len(sys.modules)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        gc.disable()
        try:
            return (yield)
        finally:
            gc.enable()
            self.freeze()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        if len(sys.modules) - self.modules > self.MODULES:
            self.freeze()

    def freeze(self) -> None:
        """Collect garbage, then exclude all objects that are alive now from later collections."""
        gc.collect()
        gc.freeze()
        self.modules = len(sys.modules)


def _why_skip(item: pytest.Item) -> str | None:
    """Return why a test cannot run here, by its markers, or ``None`` if it can."""
    interpret = item.get_closest_marker("interpret") is not None
    if interpret and not INTERPRETED:
        return "set TRITON_INTERPRET=1 to run kernels through Triton's interpreter"
    if INTERPRETED and not interpret:
        return "TRITON_INTERPRET=1 is set: only tests of interpreted kernels run"
    brief = item.config.getoption("architectures") not in ("all", "every") and not item.config.getoption(wording.UPDATE)
    if item.get_closest_marker("thorough") and brief:
        return "runs in `make check`"
    if item.get_closest_marker("every") and item.config.getoption("architectures") != "every":
        return "runs with --architectures=every"
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        return "needs a GPU"
    if item.get_closest_marker("ncu") and find_ncu() is None:
        return "needs NVIDIA's profiler ncu"
    if item.get_closest_marker("browser") and not REQUIRED:
        return missing_browser()
    return None


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the first GPU, or the CPU."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one folder for all workers of a run, so that each library is compiled once.

    Tests that run CUDA C++ kernels on an emulated GPU compile libraries into it.
    """
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "libraries"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Start every test from the same random state."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_plans() -> None:
    """Forget the plans of earlier tests, which replay calls without the functions that a test may have replaced."""
    forget_plans()


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give all tests of the process one cache folder of their own. The user's cache is neither read nor written."""
    folder = tmp_path_factory.getbasetemp() / "onelaunch-cache"
    monkeypatch.setenv("ONELAUNCH_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def own_tables(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give all tests of the process one folder of measured tables, empty at first, in place of the user's."""
    folder = tmp_path_factory.getbasetemp() / "onelaunch-tables"
    monkeypatch.setenv("ONELAUNCH_TABLES", str(folder))
    return folder


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a test fail that opens a network connection. Sockets within the machine stay possible."""
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
    """Register the toy operation of :mod:`tests.toys` for one test, and return it."""
    dispatch.choose.cache_clear()  # it caches choices by query, also those of an earlier test's operation of the same name
    list(operation.operations())  # without this, operations imported during the test would be unregistered after it
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    yield make_scale()
    dispatch.choose.cache_clear()
