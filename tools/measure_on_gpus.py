"""Run measurements on all GPUs of a machine from a queue, side by side, until a deadline.

    python -m tools.measure_on_gpus --list
    python -m tools.measure_on_gpus --seconds 540 --out runs/h100 --from results/nvidia-h100 --pack h100.tar.gz rms-norm serving

``measurements.toml`` declares the measurements, and ``measurement_queue.py`` decides which of them run side by side. A
measurement is stopped at its own limit, or shortly before the deadline: by SIGINT as if by Ctrl-C, so that it saves what it has,
and by SIGKILL later. Results are written into the folder of ``--out``; the next call with this folder continues them. Ctrl-C
stops all measurements. The exit code is 0 if all of them ended by themselves with an exit code of success, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import shutil
import signal
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.measurement_queue import Measurement, Queue, needs

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyrefly: ignore[missing-import]

DECLARED = Path(__file__).with_name("measurements.toml")
"""File that declares the measurements."""

PACK_SECONDS, PACKED_BYTES = 20.0, 8 << 20
"""Seconds between two archives of the results, and size of the largest file in an archive."""

STATE = ".state"
"""Suffix of the folders in which studies of models keep checkpoints and caches of compiled kernels, which are not packed."""


def read(path: Path = DECLARED) -> dict[str, Measurement]:
    """Return the measurements that a file declares, by name.

    Raises:
        ValueError: A table has an unknown key, lacks one, has the name of another table, or an invalid number of GPUs.
    """
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    found: dict[str, Measurement] = {}
    known = {each.name for each in dataclasses.fields(Measurement)}
    for table in raw.get("measurements", ()):
        name, command, arguments = table.get("name"), table.pop("command", ()), table.pop("arguments", ())
        words = raw.get("commands", {}).get(command, ()) if isinstance(command, str) else command
        if unknown := set(table) - known:
            raise ValueError(f"{name}: unknown key {min(unknown)}; known are {', '.join(sorted({*known, 'arguments'}))}")
        if not words or name is None or "seconds" not in table:
            raise ValueError(f"{name}: a measurement needs a name, a command and seconds")
        if (gpus := table.get("gpus", 1)) != "all" and not (isinstance(gpus, int) and gpus > 0):
            raise ValueError(f'{name}: gpus is {gpus!r}; it must be a positive number or "all"')
        if name in found:
            raise ValueError(f"{name} is declared twice")
        lists: dict[str, Any] = {key: tuple(table.pop(key)) for key in ("also", "codes") if key in table}
        found[name] = Measurement(**table, **lists, command=(*words, *arguments))
    return found


def copy_results(source: Path, out: Path) -> None:
    """Copy the stored results of a device and choices of autotuners to ``out``, without replacing a file there."""
    for folder in (source, source / "models", source / "ranks"):
        for path in (*folder.glob("*.json"), *folder.glob("*.tuning")):
            if not (out / path.name).exists():
                shutil.copyfile(path, out / path.name)


@contextlib.contextmanager
def packing(folder: Path, file: Path | None) -> Iterator[None]:
    """Pack a folder into a file at intervals, and once more at the end; do nothing without a file."""
    if file is None:
        yield
        return
    ended = threading.Event()

    def at_intervals() -> None:
        while not ended.wait(PACK_SECONDS):
            try:
                pack(folder, file)
            except OSError as problem:  # noqa: PERF203 - a full disk, for example, does not end the measurements
                sys.stderr.write(f"{file} is not up to date: {problem}\n")

    thread = threading.Thread(target=at_intervals, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        pack(folder, file)


def pack(folder: Path, file: Path) -> None:
    """Write the files of a folder that :func:`files` yields to a tar.gz, and replace an existing one in one step."""
    part = file.with_name(f"{file.name}.part")
    with tarfile.open(part, "w:gz", compresslevel=1) as archive:
        for path in files(folder):
            if path in (file, part):
                continue
            # A file is read before its header is written, since it can grow or vanish in the meantime.
            with contextlib.suppress(FileNotFoundError):
                entry, content = tarfile.TarInfo(path.relative_to(folder).as_posix()), path.read_bytes()
                entry.size, entry.mtime = len(content), path.stat().st_mtime
                archive.addfile(entry, io.BytesIO(content))
    part.replace(file)


def files(folder: Path) -> Iterator[Path]:
    """Yield the files to pack: those of at most :data:`PACKED_BYTES` that are in no folder with the suffix :data:`STATE`."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if not each.endswith(STATE))
        for path in (Path(parent, name) for name in sorted(names)):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_size <= PACKED_BYTES:
                    yield path


def chosen(names: Sequence[str], declared: dict[str, Measurement], gpus: int) -> list[Measurement]:
    """Return the named measurements.

    Raises:
        ValueError: A name is unknown or is given twice, or there are fewer GPUs than a measurement needs.
    """
    if gpus < 1:
        raise ValueError(f"the number of GPUs is {gpus}; it must be at least 1")
    for name in names:
        if name not in declared:
            raise ValueError(f"{name} is no measurement; known are {', '.join(declared)}")
        if names.count(name) > 1:
            raise ValueError(f"{name} is named twice")
        if needs(declared[name], gpus) > gpus:
            raise ValueError(f"{name} needs {declared[name].gpus} GPUs, and there are {gpus}")
    return [declared[name] for name in names]


def listing(declared: dict[str, Measurement]) -> str:
    """Return a line for each measurement."""
    lines = [f"{'name':28} {'GPUs':>4} {'seconds':>7}  quiet  command"]
    for each in declared.values():
        quiet = "quiet" if each.quiet else ""
        lines.append(f"{each.name:28} {each.gpus:>4} {each.seconds:7.0f}  {quiet:5}  {' '.join(each.command)}")
    return "\n".join(lines)


def count_gpus() -> int:
    """Return the number of GPUs that PyTorch sees, or 1 on a machine without one."""
    import torch

    return torch.cuda.device_count() or 1


def parsed(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[Measurement]]:
    """Return the arguments and the measurements that they name; print the list and exit with ``--list``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="measurement to run, in this order")
    parser.add_argument("--list", action="store_true", help="print the measurements")
    parser.add_argument("--seconds", type=float, help="seconds after which the machine is lost")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the results and logs")
    parser.add_argument("--from", type=Path, metavar="FOLDER", dest="source", help="folder of stored results to continue")
    parser.add_argument("--pack", type=Path, metavar="FILE", help=f"tar.gz of the results, written every {PACK_SECONDS:.0f} s")
    parser.add_argument("--gpus", type=int, help="number of GPUs; by default all")
    parser.add_argument("--declared", type=Path, metavar="FILE", default=DECLARED, help="file that declares the measurements")
    given = parser.parse_args(arguments)
    try:
        declared = read(given.declared)
        if given.list:
            sys.stdout.write(listing(declared) + "\n")
            parser.exit()
        if not (given.names and given.seconds and given.out):
            parser.error("it takes --seconds, --out and at least one NAME, or --list")
        if given.source is not None and not given.source.is_dir():
            parser.error(f"--from is {given.source}, which is no folder")
        given.gpus = count_gpus() if given.gpus is None else given.gpus
        return given, chosen(given.names, declared, given.gpus)
    except (OSError, ValueError) as problem:
        parser.error(str(problem))


@contextlib.contextmanager
def cancelling(queue: Queue) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM stop a queue, but not this process."""
    before = {number: signal.signal(number, lambda *_: queue.cancel()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurements that were asked for, print their outcomes, and return the exit code."""
    began = time.monotonic()
    given, measurements = parsed(arguments)
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if given.source is not None:
        copy_results(given.source, out)
    queue = Queue(measurements, given.gpus, out, began + given.seconds)
    with cancelling(queue), packing(out, given.pack and given.pack.resolve()):
        outcomes = {each.name: each for each in queue.run()}
    sys.stdout.writelines(f"{outcomes[name]}\n" for name in given.names)
    return 0 if all(each.good for each in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
