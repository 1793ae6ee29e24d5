"""Runs of a study of ranks, in the processes of torchrun, and the file of its result.

``onelaunch study ranks`` calls :func:`run_rank_study` in each process. The first rank alone writes the result.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from onelaunch.device import hardware
from onelaunch.errors import ArgumentError, ResultMismatch
from onelaunch.rank_studies.declare import RankStudy
from onelaunch.rank_studies.judge import judged
from onelaunch.rank_studies.result import Measured, RankResult
from onelaunch.rank_studies.run import measure
from onelaunch.workbench.study import Scale
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


def run_rank_study(study: RankStudy, device_type: str, scale: Scale | None, out: Path | None) -> tuple[RankResult, Path] | None:
    """Measure a study on the ranks that torchrun started, and store the result.

    Args:
        study: Study of ranks.
        device_type: ``"cuda"``, where each process takes the GPU of its local rank and NCCL, or ``"cpu"`` with gloo.
        scale: Scale of the shapes; by default that of the device.
        out: File of the result; :func:`default_path` by default.

    Returns:
        The result and its file on the first rank, ``None`` on the others.

    Raises:
        ArgumentError: This process was not started by torchrun, or not with a number of ranks that the study declares.
        ResultMismatch: The file holds the result of another declaration.
    """
    if "RANK" not in os.environ:
        raise ArgumentError(
            f"A study of ranks runs under torchrun: torchrun --nproc-per-node N -m onelaunch study ranks {study.name}"
        )
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks not in study.ranks:
        raise ArgumentError(f"{study.name} runs on {' or '.join(map(str, study.ranks))} ranks, not on {ranks}.")
    device = torch.device(device_type, int(os.environ["LOCAL_RANK"])) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIME_OUT)
    try:
        path = out or default_path(study, device)
        found = measure(study, device, scale or scale_for(device.type))
        if distributed.get_rank() != 0:
            return None
        result = joined(study, path, found)
        path.parent.mkdir(parents=True, exist_ok=True)
        result.save(path, force=True)
        return result, path
    finally:
        distributed.destroy_process_group()
