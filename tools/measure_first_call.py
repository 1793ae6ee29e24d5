"""Measure first calls in fresh processes, with empty caches and with filled ones, and print the seconds with their provenance.

    python tools/measure_first_call.py --json

For each case of :data:`CASES` a process starts with empty caches of Triton and onelaunch, and a second one with the caches that
the first has filled. A measured time is wall time from before the call until the device has finished. Imports, the start of the
device (its context and one kernel of PyTorch) and making the inputs are measured apart. So are the imports that happen within the
call: the first ``backward`` of a process imports SymPy for PyTorch, which takes seconds, and operations import their kernels when
they need them. Loading libraries such as cuBLAS, which the first call needs, belongs to the call.

The script is run by hand, on idle cores: a first call compiles on all of them.
"""

from __future__ import annotations

import argparse
import builtins
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

SRC = Path(__file__).resolve().parents[1] / "src"
"""Folder that holds the package, for the processes that are started."""

PROCESS_SECONDS = 300
"""Seconds after which a process that measures is stopped."""


class Case(NamedTuple):
    """First call to measure."""

    summary: str
    asked: float
    """Most seconds that a first call with empty caches may take."""
    sizes: dict[str, int]
    small: dict[str, int]
    """Sizes with ``--small``, for machines without a GPU."""


CASES = {
    "gla": Case(
        "gla with its backward pass, bfloat16, a decay per channel", 12.0,
        {"B": 4, "T": 2048, "H": 16, "K": 128, "V": 128}, {"B": 1, "T": 64, "H": 1, "K": 32, "V": 32},
    ),
    "layer": Case(
        "GatedLinearAttention, forward and backward, bfloat16", 20.0,
        {"B": 4, "T": 2048, "hidden_size": 1024, "num_heads": 4}, {"B": 1, "T": 64, "hidden_size": 64, "num_heads": 1},
    ),
}  # fmt: skip
"""First calls by name."""

ASKED_AGAIN = 1.5
"""Most seconds that the first call of a second process may take, which finds the caches filled."""


def measure(name: str, device: str, *, small: bool = False) -> dict[str, Any]:
    """Make the first call of a case in this process, and return its times in seconds and facts about the process.

    Args:
        name: Name of a case in :data:`CASES`.
        device: Device of the call, such as ``cuda:0``.
        small: Flag to take the small sizes.
    """
    begun = time.perf_counter()
    import torch

    from onelaunch import nn, ops  # noqa: F401 - a user imports what the call needs before it
    from onelaunch.launch.side_by_side import jobs

    compiled = _note_kernels()
    imported = time.perf_counter()
    here = torch.device(device)
    torch.ones(8, device=here).sum().item()
    started = time.perf_counter()
    step = _STEPS[name](CASES[name].small if small else CASES[name].sizes, here)
    _finish(here)
    ready = time.perf_counter()
    with _Imports() as imports:
        results = step()
        _finish(here)
    seconds = time.perf_counter() - ready
    if not all(bool(torch.isfinite(each).all()) for each in results):
        raise RuntimeError(f"results of {name} on {device} are not finite")
    return {
        "case": name,
        "seconds": seconds,
        "seconds_besides_imports": seconds - imports.seconds,
        "import_seconds": imported - begun,
        "device_seconds": started - imported,
        "input_seconds": ready - started,
        "kernels": len(compiled),
        "threads": jobs(),
        **provenance(here),
    }


def _gla_step(sizes: dict[str, int], device: Any) -> Callable[[], list[Any]]:
    """Return the function that calls ``gla`` and its backward pass."""
    import torch

    from onelaunch import ops

    batch, steps, heads, keys, values = (sizes[name] for name in ("B", "T", "H", "K", "V"))
    q, k, v, do = (
        torch.randn(batch, steps, heads, size, dtype=torch.bfloat16, device=device) for size in (keys, keys, values, values)
    )
    g = torch.nn.functional.logsigmoid(torch.randn_like(q)) / 16
    inputs = [each.requires_grad_() for each in (q, k, v, g)]

    def step() -> list[Any]:
        o = ops.gla(*inputs)[0]
        o.backward(do)
        return [o, *(each.grad for each in inputs)]

    return step


def _layer_step(sizes: dict[str, int], device: Any) -> Callable[[], list[Any]]:
    """Return the function that runs the layer forward and backward."""
    import torch

    from onelaunch import nn

    layer = nn.GatedLinearAttention(hidden_size=sizes["hidden_size"], num_heads=sizes["num_heads"]).to(device, torch.bfloat16)
    x = torch.randn(sizes["B"], sizes["T"], sizes["hidden_size"], dtype=torch.bfloat16, device=device, requires_grad=True)
    do = torch.randn_like(x)

    def step() -> list[Any]:
        o = layer(x)[0]
        o.backward(do)
        return [o, x.grad, *(each.grad for each in layer.parameters())]

    return step


_STEPS = {"gla": _gla_step, "layer": _layer_step}
"""Function from sizes and device to the first call, by the name of the case."""


def _note_kernels() -> list[str]:
    """Return a list that will hold the name of each kernel that Triton compiles from now on; it stays empty without Triton."""
    found: list[str] = []
    try:
        import triton
    except ImportError:
        return found

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            found.append(src.name)

    triton.knobs.compilation.listener = listen
    return found


class _Imports:
    """Context that counts the seconds that this thread imports modules in."""

    def __enter__(self) -> Self:
        self.seconds = 0.0
        self._thread, self._depth = threading.get_ident(), 0
        self._usual = (builtins.__import__, importlib.import_module)
        builtins.__import__, importlib.import_module = (self._timed(each) for each in self._usual)
        return self

    def __exit__(self, *_: object) -> None:
        builtins.__import__, importlib.import_module = self._usual

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that also adds up its seconds, unless it runs within another import or another thread."""

        @functools.wraps(function)
        def run(*arguments: Any, **named: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*arguments, **named)
            begun = time.perf_counter()
            self._depth += 1
            try:
                return function(*arguments, **named)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.perf_counter() - begun

        return run


def _finish(device: Any) -> None:
    """Wait until the device has finished."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def provenance(device: Any) -> dict[str, Any]:
    """Return the device, the software and the commit of this process."""
    import platform

    import torch

    import onelaunch
    from onelaunch.device.hardware import describe
    from onelaunch.operation.sources import installed_version
    from onelaunch.workbench.result.provenance import commit, driver

    return {
        "device": describe(str(device)).name,
        "driver": driver(device),
        "commit": commit(),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "triton": installed_version("triton"),
            "cuda": torch.version.cuda,
            "onelaunch": onelaunch.__version__,
        },
    }


def measure_twice(name: str, device: str, *, small: bool = False) -> list[dict[str, Any]]:
    """Measure a case in a process with empty caches and in a second one with those that the first has filled.

    Raises:
        RuntimeError: A process failed; the message ends with what it printed.
        TimeoutError: A process took longer than :data:`PROCESS_SECONDS`.
    """
    found = []
    with tempfile.TemporaryDirectory(prefix="first-call-") as folder:
        variables = {"TRITON_CACHE_DIR": "triton", "ONELAUNCH_CACHE": "onelaunch", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
        path = os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = os.environ | {key: str(Path(folder) / part) for key, part in variables.items()} | {"PYTHONPATH": path}
        command = [sys.executable, __file__, "--case", name, "--device", device, "--in-process", *(["--small"] * small)]
        for caches in ("empty", "filled"):
            try:
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=False, timeout=PROCESS_SECONDS
                )
            except subprocess.TimeoutExpired as error:
                raise TimeoutError(f"{name} with {caches} caches took longer than {PROCESS_SECONDS} s") from error
            if done.returncode:
                raise RuntimeError(f"{name} with {caches} caches failed: {done.stderr[-2000:]}")
            found.append({"caches": caches, **json.loads(done.stdout.splitlines()[-1])})
    return found


def listing(measured: list[dict[str, Any]]) -> str:
    """Return the lines that show measurements, with the software of the first one above them."""
    first = measured[0]
    software = ", ".join(f"{name} {version}" for name, version in first["versions"].items() if version)
    lines = [
        f"{first['device']}, {software}, commit {first['commit'] or 'unknown'}, {first['threads']} threads compile",
        f"{'case':8} {'caches':8} {'seconds':>8}  besides imports  {'asked':>6}  imports  device  inputs  kernels compiled",
    ]
    for each in measured:
        asked = CASES[each["case"]].asked if each["caches"] == "empty" else ASKED_AGAIN
        lines.append(
            f"{each['case']:8} {each['caches']:8} {each['seconds']:8.2f}  "
            f"{each['seconds_besides_imports']:15.2f}  {asked:6.1f}  {each['import_seconds']:7.2f} "
            f"{each['device_seconds']:7.2f} {each['input_seconds']:7.2f}  {each['kernels']:7}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure the cases that were asked for, and print lines or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="case to measure; all without this option")
    parser.add_argument("--device", default="cuda:0", help="device of the calls")
    parser.add_argument("--repeats", type=int, default=1, help="number of measurements of each case, each from empty caches")
    parser.add_argument("--small", action="store_true", help="take small sizes, to try the script on a CPU")
    parser.add_argument("--json", action="store_true", help="print JSON, and the lines on stderr")
    parser.add_argument("--in-process", action="store_true", help="measure one case in this process, with the caches as they are")
    given = parser.parse_args()
    names = given.case or sorted(CASES)
    if given.in_process:
        sys.stdout.write(json.dumps(measure(names[0], given.device, small=given.small)) + "\n")
        return
    measured = [
        each for _ in range(given.repeats) for name in names for each in measure_twice(name, given.device, small=given.small)
    ]
    (sys.stderr if given.json else sys.stdout).write(listing(measured) + "\n")
    if given.json:
        sys.stdout.write(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
