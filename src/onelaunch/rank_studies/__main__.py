"""Command ``python -m onelaunch.rank_studies``: run a study of ranks under torchrun, or show its stored result.

torchrun --nproc-per-node 4 -m onelaunch.rank_studies context-parallel
torchrun --nproc-per-node 2 -m onelaunch.rank_studies context-parallel     # is added to the same result
python -m onelaunch.rank_studies results/nvidia-h200/ranks/context-parallel.json
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from onelaunch.device import hardware
from onelaunch.errors import OneLaunchError, ResultMismatch
from onelaunch.rank_studies.declare import RankStudy, find_rank_study
from onelaunch.rank_studies.judge import judged, lines
from onelaunch.rank_studies.result import Measured, RankResult
from onelaunch.rank_studies.run import measure
from onelaunch.workbench.study.plan import scale_for

TIME_OUT = timedelta(minutes=5)
"""Time that a rank waits for another one."""


def default_path(study: RankStudy, device: torch.device) -> Path:
    """Return the default file of a result: ``results/DEVICE/ranks/NAME.json`` in the working directory."""
    return Path("results") / hardware.describe(str(device)).slug / "ranks" / f"{study.name}.json"


def joined(study: RankStudy, path: Path, found: Sequence[Measured]) -> RankResult:
    """Return the result in a file, or a new one, with new measurements in place of those that they repeat.

    Raises:
        ResultMismatch: The result is that of another declaration.
    """
    before = RankResult.load(path) if path.exists() else None
    if before is not None and before.study_digest != study.digest():
        raise ResultMismatch(f"The study of {path} was declared otherwise.", advice="Name another file with --out.")
    new = {each.key for each in found}
    kept = () if before is None else tuple(each for each in before.measurements if each.key not in new)
    return judged(RankResult(study=study, study_digest=study.digest(), measurements=(*kept, *found)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run or show a study."""
    parser = argparse.ArgumentParser(prog="onelaunch.rank_studies", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", help="name of a study of ranks, path of its file, or a stored result to show")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", choices=("small", "full"), help="scale of the shapes; full on GPUs, small on CPUs")
    parser.add_argument("--out", type=Path, help="JSON file of the result; results/DEVICE/ranks/NAME.json by default")
    given = parser.parse_args(arguments)
    try:
        if given.name.endswith(".json"):
            _show(judged(RankResult.load(Path(given.name))))
            return
        study = find_rank_study(given.name)
        _run(study, given)
    except OneLaunchError as error:
        raise SystemExit(str(error)) from error


def _run(study: RankStudy, given: argparse.Namespace) -> None:
    """Run a study in a process of torchrun."""
    if "RANK" not in os.environ:
        raise SystemExit(f"torchrun starts a study of ranks: torchrun --nproc-per-node N -m onelaunch.rank_studies {study.name}")
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks not in study.ranks:
        raise SystemExit(f"{study.name} runs on {' or '.join(map(str, study.ranks))} ranks, not on {ranks}.")
    device = torch.device(given.device, int(os.environ["LOCAL_RANK"])) if given.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIME_OUT)
    try:
        path = given.out or default_path(study, device)
        found = measure(study, device, given.scale or scale_for(device.type))
        if distributed.get_rank() == 0:
            result = joined(study, path, found)
            path.parent.mkdir(parents=True, exist_ok=True)
            result.save(path, force=True)
            _show(result)
            sys.stdout.write(f"Result: {path}\n")
    finally:
        distributed.destroy_process_group()


def _show(result: RankResult) -> None:
    """Print a result."""
    sys.stdout.write("".join(f"{line}\n" for line in lines(result)))


if __name__ == "__main__":
    main()
