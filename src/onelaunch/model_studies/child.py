"""Process that carries out one task: ``python -m onelaunch.model_studies.child JOB ANSWER``.

``run.py`` writes the job and reads the answer, both JSON. A process of its own gives each task an empty memory, and the first
steps empty caches. A library that ends the process ends its own task alone.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from pydantic import TypeAdapter

from onelaunch.device.hardware import describe
from onelaunch.model_studies.declare import Activity, ModelStudy
from onelaunch.model_studies.result import Measurement
from onelaunch.model_studies.tasks import Task, alone, gradients, timed
from onelaunch.model_studies.training import training
from onelaunch.workbench.measure.tuning import keep, restore
from onelaunch.workbench.stored import Stored


class Job(Stored):
    """A task with what it needs."""

    study: ModelStudy
    task: Task
    device: str
    state: Path
    """Folder of the checkpoints of training runs."""
    deadline: float | None = None
    """Time (``time.time()``) at which a training run saves and stops."""
    empty_caches: bool = False
    """True if the process begins with empty caches of compiled kernels."""
    tuning: Path | None = None
    """File of choices of peers' autotuners, which is read unless the caches must be empty, and written after the task."""


ANSWER: TypeAdapter[Measurement] = TypeAdapter(Measurement)
"""Reader of an answer."""


def carry_out(job: Job, stop: Callable[[], bool] = lambda: False) -> Measurement:
    """Carry out a task in this process.

    Args:
        job: The task.
        stop: Function that says whether a training run must save and stop, beside the job's deadline.
    """
    task, device = job.task, torch.device(job.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels of other libraries run on the current device
    model = job.study.model(task.model)
    if task.task == "alone":
        return alone(model, task.variant, device, empty_caches=job.empty_caches)
    if task.task == "timed":
        return timed(model, cast("Activity", task.variant), job.study.rounds, device)
    if task.task == "gradients":
        return gradients(model, device)
    name = f"{model.name}-{task.variant}-{task.seed}{'-control' if task.control else ''}.pt"
    checkpoint = job.state / name.replace(" ", "-")

    def ends() -> bool:
        return stop() or (job.deadline is not None and time.time() >= job.deadline)

    return training(model, task.variant, task.seed, device, checkpoint, ends, control=task.control)


def main(job_path: str, answer_path: str) -> None:
    """Read a job, carry it out, and write the answer."""
    job = Job.model_validate_json(Path(job_path).read_bytes())
    stopped: list[int] = []
    if job.task.task == "training":  # Ctrl-C reaches this process too; the run saves before it ends
        signal.signal(signal.SIGINT, lambda number, _: stopped.append(number))
    device = describe(job.device).name
    if job.tuning is not None and not job.empty_caches:
        restore(job.tuning, device)
    found = carry_out(job, lambda: bool(stopped))
    if job.tuning is not None and (problem := keep(job.tuning, device)):
        sys.stderr.write(f"{problem}\n")
    Path(answer_path).write_bytes(ANSWER.dump_json(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
