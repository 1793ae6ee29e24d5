"""Count the DRAM bytes of a call with NVIDIA's ``ncu``, or compute them by arithmetic. The result says which.

One child process (:mod:`onelaunch.workbench.measure.count_child`) runs under ``ncu`` for many requests, each in an NVTX range of
its own. It calls over rotated inputs, which exceed three last-level caches if memory allows, after one full rotation that is not
counted. ``ncu`` leaves the caches alone. In this steady state, if they do, all compulsory traffic reaches DRAM, including
write-backs. ``running.py`` calls :func:`count_all` after a case is timed. Where nothing was counted, ``cells.py`` calls
:func:`analytic`. Measures that a step of their own takes (``decide/measured.py``) are given their calls as a :class:`Request`
too.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import onelaunch
from onelaunch.device.tools import find_ncu
from onelaunch.operation import Case, Cost, Direction, Operation
from onelaunch.workbench.result import Traffic

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
"""Metrics of ``ncu`` for the bytes that are read from DRAM and written to it."""

_METRICS = (READ, WRITTEN, "lts__t_bytes.sum", "gpu__time_duration.sum")
"""Metrics to collect, of which :func:`parse` reads the first two, and nothing the others.

They are at most four, so that one pass over each kernel suffices and no kernel is replayed.
"""

RANGE = "onelaunch_count_"
"""Prefix of the NVTX range of a request; the index of the request follows."""

_MOST_KERNELS = 20_000
"""Largest number of kernels that one child process profiles."""

UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}
"""Bytes by the unit names of ``ncu``."""


@dataclass(frozen=True)
class Request:
    """Description of a call that is to be counted."""

    case: Case
    variant: str
    """Name of the variant, or of the control."""
    direction: Direction = "forward"
    control: bool = False


@dataclass(frozen=True)
class Counted:
    """Sums over the kernels of one NVTX range: bytes read, bytes written, number of kernels."""

    read: float = 0.0
    written: float = 0.0
    kernels: int = 0

    def __add__(self, other: Counted) -> Counted:
        return Counted(self.read + other.read, self.written + other.written, self.kernels + other.kernels)


class CountFailed(RuntimeError):
    """Error of a profiler that gave no numbers. The message says why."""


def count(
    operation: Operation[..., Any],
    case: Case,
    variant: str,
    direction: Direction = "forward",
    *,
    control: bool = False,
    device: torch.device | str = "cpu",
    seed: int = 0,
    timeout_seconds: float = 240.0,
) -> Traffic:
    """Return the DRAM bytes of one call of a variant or control. For several calls :func:`count_all` is faster.

    Runs of studies call :func:`count_all`. This function is for a single call by hand; in the project only tests call it.
    """
    request = Request(case, variant, direction, control)
    return count_all(operation, [request], device=device, seed=seed, timeout_seconds=timeout_seconds)[0]


def count_all(
    operation: Operation[..., Any],
    requests: Sequence[Request],
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    timeout_seconds: float = 600.0,
) -> list[Traffic]:
    """Return the DRAM bytes of each requested call, all profiled in one child process.

    A profiler that is missing, not permitted or too slow is no error. The bytes that could not be counted are computed by
    :func:`analytic`, with a note that says why.
    """
    device = torch.device(device)
    try:
        if device.type != "cuda" or torch.version.hip:
            raise CountFailed("ncu counts on NVIDIA GPUs only")
        counted = _profile(operation, requests, device, seed, timeout_seconds)
    except CountFailed as failure:
        counted = [str(failure)] * len(requests)
    return [
        found if isinstance(found, Traffic) else analytic(_cost(operation, request), because=found)
        for found, request in zip(counted, requests, strict=True)
    ]


def analytic(cost: Cost, because: str = "") -> Traffic:
    """Return the fewest bytes by arithmetic. If the cost does not say how many are written, all count as read.

    Args:
        cost: The cost of the call.
        because: Reason why the bytes were not counted, for the note.
    """
    written = cost.written or 0
    note = "fewest bytes by arithmetic" + (", reads and writes together" if cost.written is None else "")
    note = f"{note} ({because})" if because else note
    return Traffic(source="analytic", read=float(cost.bytes - written), written=float(written), note=note)


def parse(text: str) -> dict[int, Counted]:
    """Return the sums by request from the output of ``ncu --csv --page raw --print-units base``.

    The output is a header, a row of units, and a row for each kernel. A kernel belongs to the request whose NVTX range its row
    names.

    Raises:
        CountFailed: There is no table, or a metric is missing or not in bytes. The message holds the profiler's own error if it
            gave one.
    """
    lines = text.splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise CountFailed(_error_line(text) or "ncu gave no table")
    rows = csv.DictReader(io.StringIO("\n".join(lines[start:])))
    if missing := [name for name in (READ, WRITTEN) if name not in (rows.fieldnames or ())]:
        raise CountFailed(f"ncu gave no {' and no '.join(missing)}")
    scales = {READ: 1.0, WRITTEN: 1.0}
    sums: dict[int, Counted] = {}
    for row in rows:
        if not row["ID"]:  # the row of units, which comes before the kernels
            scales = {name: _scale(row[name]) for name in scales}
            continue
        if (match := re.search(rf"{RANGE}(\d+)\b", " ".join(value for value in row.values() if isinstance(value, str)))) is None:
            continue
        read, written = (_number(row[name]) * scales[name] for name in (READ, WRITTEN))
        index = int(match.group(1))
        sums[index] = sums.get(index, Counted()) + Counted(read, written, 1)
    return sums


def command(ncu: str, log: Path, specification: Path, requests: int) -> list[str]:
    """Return the command line that runs the child process under the profiler."""
    include = [part for index in range(requests) for part in ("--nvtx-include", f"{RANGE}{index}/")]
    return [
        *(ncu, "--metrics", ",".join(_METRICS), "--clock-control", "none", "--cache-control", "none"),
        *("--replay-mode", "kernel", "--target-processes", "all", "--launch-count", str(_MOST_KERNELS), "--nvtx", *include),
        *("--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)),
        *(sys.executable, "-m", "onelaunch.workbench.measure.count_child", str(specification)),
    ]


def _profile(
    operation: Operation[..., Any], requests: Sequence[Request], device: torch.device, seed: int, timeout_seconds: float
) -> list[Traffic | str]:
    """Return for each request its traffic, or the reason why it could not be counted."""
    if (ncu := find_ncu()) is None:
        raise CountFailed("ncu is not installed")
    with tempfile.TemporaryDirectory(prefix="onelaunch-count-") as folder:
        specification, log, report = (Path(folder) / name for name in ("requests.json", "ncu.csv", "report.json"))
        specification.write_text(json.dumps(_specification(operation, requests, device, seed, report)), encoding="utf-8")
        printed, code = _run(command(ncu, log, specification, len(requests)), timeout_seconds)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        if code != 0 and '"ID"' not in text:  # a crash after some kernels leaves a table, whose complete requests are of use
            raise CountFailed(_error_line(text + printed) or f"ncu ended with code {code}: {printed.strip()[-200:]}")
        sums = parse(text)
        outcomes = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    if sum(found.kernels for found in sums.values()) >= _MOST_KERNELS:
        sums.pop(max(sums))  # the limit cut this request off, so its sum is incomplete
    return [_traffic(sums.get(index), outcomes.get(str(index), {})) for index in range(len(requests))]


def _traffic(found: Counted | None, outcome: dict[str, Any]) -> Traffic | str:
    """Return the bytes per call of one request, or the reason why there is no number."""
    if error := outcome.get("error"):
        return str(error)
    if found is None or not outcome.get("calls"):
        return "ncu counted no kernel of this call"
    calls = outcome["calls"]
    note = (
        f"mean of {calls} calls over {outcome['sets']} rotated input sets, {found.kernels / calls:g} kernels a call, "
        "caches left as they are between kernels"
    )
    return Traffic(source="ncu", read=found.read / calls, written=found.written / calls, note=note)


def _specification(
    operation: Operation[..., Any], requests: Sequence[Request], device: torch.device, seed: int, report: Path
) -> dict[str, Any]:
    """Return the JSON description of the requests for the child process."""
    return {
        "operation": operation.name,
        "module": operation.__module__,
        "device": str(device),
        "seed": seed,
        "report": str(report),
        "requests": [
            {
                "name": request.variant,
                "control": request.control,
                "direction": request.direction,
                "dtype": str(request.case.dtype).removeprefix("torch."),
                "sizes": dict(request.case.sizes),
                "options": dict(request.case.options),
            }
            for request in requests
        ],
    }


def _run(arguments: list[str], timeout_seconds: float) -> tuple[str, int]:
    """Run a command to its end, and return what it printed and its exit code.

    Raises:
        CountFailed: It does not start, or takes longer than ``timeout_seconds``.
    """
    # The child must import this onelaunch, also from a checkout that is not installed.
    paths = [str(Path(onelaunch.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    try:
        process = subprocess.Popen(
            arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise CountFailed(f"ncu does not start: {error}") from error
    try:
        printed, _ = process.communicate(timeout=timeout_seconds)
    except BaseException as error:  # whatever ended the wait, the whole process group must end, the profiled child included
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise CountFailed(f"ncu took more than {timeout_seconds:g} s") from error
        raise
    return printed, process.returncode


def _error_line(text: str) -> str | None:
    """Return the profiler's first error line, if there is one."""
    found = re.search(r"==ERROR==\s*(.+)", text)
    return f"ncu: {found.group(1).strip()}" if found else None


def _scale(unit: str) -> float:
    if unit not in UNITS:
        raise CountFailed(f"ncu counted in {unit or 'no unit'}, not in bytes")
    return UNITS[unit]


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError as error:
        raise CountFailed(f"ncu gave {text!r} for a count of bytes") from error


def _cost(operation: Operation[..., Any], request: Request) -> Cost:
    if request.control:
        return operation.controls[request.variant].cost(request.case)
    return operation.cost(request.case, operation.variants.get(request.variant), request.direction)
