"""Compile the kernels of a first call at the same time, on threads, instead of one after the other as they are launched.

When a kernel of a call is about to be compiled, the call is run once more on tensors without memory, and with its
backward pass if it takes gradients. The recorded launches tell which kernels it needs. Threads suffice, since Triton's passes and
NVRTC release the GIL and ``ptxas`` is a process of its own: only the translation from Python, a tenth of the time, takes turns.

What is compiled here goes to Triton's and our cache, where the launches find it. So a kernel that was not foreseen, or that does
not compile, is compiled by its launch as ever, which raises the error.

The dispatcher and the operators (``operator.py``) enter a :class:`Launching` for a call that may launch kernels; ``launch.py``
asks for the compilation. The workbench compiles the kernels of probes by :func:`compile_builds`.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

import torch

from onelaunch.cuda.compiler import compile_source
from onelaunch.device.architectures import ARCHITECTURES, Architecture
from onelaunch.errors import CompileNotice, OneLaunchError
from onelaunch.launch import triton_cache
from onelaunch.launch.build import Build, CudaBuild, build_of
from onelaunch.launch.compile import compile_triton
from onelaunch.launch.imitation import imitate, is_observed, observe
from onelaunch.launch.meta_tensors import MetaTensorMode, MetaTensors
from onelaunch.launch.planned import is_recording
from onelaunch.launch.running import Running
from onelaunch.tracing import sees_operators

JOBS = "ONELAUNCH_COMPILE_JOBS"
"""Environment variable for the number of threads that compile the kernels of a first call; 1 leaves each to its own launch."""

PATIENCE = 2.0
"""Seconds of compiling after which a notice says what takes so long."""

_DONE: set[tuple[str, object]] = set()
"""Architectures and keys of the builds that were compiled here."""

_TOLD = False
"""Flag that the notice about long compilations was given. One in a process suffices: a study would give dozens."""

_LOCK = threading.RLock()
"""Lock of :data:`_DONE`, held while kernels are compiled: a thread with the same first call waits, and finds them compiled.

It also keeps kernels apart that need different settings of Triton's compiler, which are environment variables of the process.
"""


def _unlock() -> None:
    """Give a forked process a lock of its own, since no thread of it would ever release one that was held."""
    global _LOCK  # noqa: PLW0603
    _LOCK = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


class Launching(Running):
    """Context of a call of a function that may launch kernels.

    Args:
        function: Function that runs in the context.
        inputs: Its inputs: tensors, other values, and tuples, lists, dictionaries and data classes of these.
    """

    __slots__ = ("_begun", "_function", "_grad", "_inputs")

    def __init__(self, function: Callable[..., Any], *inputs: Any) -> None:
        self._function = function
        self._inputs = inputs
        self._grad = torch.is_grad_enabled()
        self._begun = False

    def compile_kernels(self, *, by_triton: bool) -> None:
        """Compile the kernels of the call that are not compiled yet, once."""
        if self._begun or _is_watched():
            return
        self._begun = True
        threads = jobs()
        if threads < 2:
            return
        try:
            target = current_architecture(by_triton=by_triton)
            builds = self._builds(target)
        except Exception:  # noqa: BLE001 - any code of a variant may fail on tensors without memory; the launches go on without help
            return
        if len(builds) > 1:
            compile_builds(builds, target, threads)

    def _builds(self, target: Architecture) -> list[Build]:
        """Return the distinct kernels that the call launches, its backward pass included if it takes gradients.

        Nothing here calls the backward pass: while launches are recorded, each operator (``operator.py``) runs it right after its
        forward pass.
        """
        inputs = MetaTensors().of(self._inputs)
        with observe() as launches, imitate(), torch.set_grad_enabled(self._grad), MetaTensorMode():
            self._function(*inputs)
        found: dict[object, Build] = {}
        for launch in launches:
            build = build_of(launch, target, "")
            found.setdefault(build.key, build)
        return list(found.values())


def compile_builds(builds: Sequence[Build], target: Architecture, jobs: int) -> None:
    """Compile those builds for an architecture that were not compiled here before, and wait for them.

    With fewer than two threads nothing is compiled. Problems are left to the launches. Builds that keep Triton from WGMMA are
    compiled apart from the others. First calls and the probes of a study call this function.
    """
    if jobs < 2:
        return
    with _LOCK:
        missing = [each for each in builds if (target.name, each.key) not in _DONE]
        if len(missing) < 2:
            return  # its launch compiles a single one as well
        if any(not isinstance(each, CudaBuild) for each in missing):
            _warm_up(target)
        progress = _Progress(len(missing), jobs)
        for forced in (False, True):
            wave = [each for each in missing if (not isinstance(each, CudaBuild) and each.forces_warp_mma) is forced]
            if wave:
                _compile_wave(wave, target, jobs, progress)
        _DONE.update((target.name, each.key) for each in missing)


class _Progress:
    """Notice about kernels that are compiled, which is given once in a process, when it takes long.

    Args:
        total: Number of kernels.
        jobs: Number of threads.
    """

    def __init__(self, total: int, jobs: int) -> None:
        self._total, self._jobs = total, jobs
        self._at = time.monotonic() + PATIENCE

    def wait_for(self, futures: Sequence[Future[None]]) -> None:
        """Wait for all futures."""
        global _TOLD  # noqa: PLW0603
        if not _TOLD and wait(futures, timeout=max(self._at - time.monotonic(), 0.0)).not_done:
            _TOLD = True
            threads = min(self._jobs, self._total)
            notice = CompileNotice(
                f"The first call of its kind compiles {self._total} kernels, on {threads} threads; later processes find them "
                "in the cache. The command onelaunch prebuild compiles kernels before they are needed."
            )
            # One line: with a place in a file, Python would show a line of the source too.
            warnings.warn_explicit(notice, CompileNotice, "onelaunch", 1)
        wait(futures)


def _compile_wave(builds: Sequence[Build], target: Architecture, jobs: int, progress: _Progress) -> None:
    """Compile builds that agree about the settings of Triton's compiler."""
    pool = ThreadPoolExecutor(min(jobs, len(builds)), thread_name_prefix="onelaunch-compile")
    try:
        progress.wait_for([pool.submit(_compile, each, target) for each in builds])
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # so that Ctrl-C need not wait for a compiler


def _compile(build: Build, target: Architecture) -> None:
    """Compile a build into the cache in which its launch looks for it."""
    with suppress(OneLaunchError, OSError, RuntimeError):
        if isinstance(build, CudaBuild):
            compile_source(build.source, target.name)
        else:
            _make_launcher(compile_triton(build, target))


def _make_launcher(kernel: Any) -> None:
    """Let Triton make the function that launches a kernel. Up to Triton 3.6 it is C code, compiled for each signature.

    Compiling it takes a tenth of a second. Triton caches it, so that the launch finds it.
    """
    from triton.runtime import driver

    with suppress(Exception):  # such as a missing compiler, which the launch reports
        driver.active.launcher_cls(kernel.src, kernel.metadata)


def _is_watched() -> bool:
    """Return whether something would see the operators of a call that is run for its launches, or a CUDA graph is captured."""
    if is_observed() or is_recording() or sees_operators():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def jobs() -> int:
    """Return the number of threads that compile: that of :data:`JOBS`, else the number of cores that this process may use."""
    with suppress(ValueError):
        return int(os.environ.get(JOBS, ""))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def current_architecture(*, by_triton: bool) -> Architecture:
    """Return the architecture of the current device, as Triton sees it.

    Triton's driver compiles C code when it is first asked, which a call of kernels in CUDA C++ alone need not wait for.
    """
    if by_triton:
        from triton.runtime import driver

        found = driver.active.get_current_target()
        backend, arch, warp = found.backend, found.arch, found.warp_size
    else:
        major, minor = torch.cuda.get_device_capability()
        backend, arch, warp = "cuda", 10 * major + minor, 32
    known = [each for each in ARCHITECTURES.values() if (each.backend, each.target) == (backend, arch)]
    if known:
        return known[0]
    name = str(arch) if backend != "cuda" else f"sm_{arch}" + ("a" if arch >= 90 else "")  # as cuda/module.py names it
    return Architecture(name, backend, arch, warp, (), 0, 0)


def _warm_up(target: Architecture) -> None:
    """Let Triton compute once what every compilation needs, since its caches let several threads compute the same thing."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime import cache

    triton_cache.ensure_writable()
    make_backend(GPUTarget(target.backend, target.target, target.warp)).hash()
    getattr(cache, "triton_key", lambda: None)()
