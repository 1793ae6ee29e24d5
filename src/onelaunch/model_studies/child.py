"""Process that carries out the tasks of a job: ``python -m onelaunch.model_studies.child JOB ANSWER``.

``run.py`` writes the job and reads the answer, both JSON. A process of its own gives a task an empty memory, and the first
steps empty caches; the gradients of a model at several seeds share one, and so do its controls. A library that ends the process
ends no other tasks.
"""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from pydantic import TypeAdapter

from onelaunch.device.hardware import describe
from onelaunch.model_studies.continued import unfinished
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
    more: tuple[Task, ...] = ()
    """Tasks that the same process carries out after it."""
    device: str
    state: Path
    """Folder of the checkpoints of training runs."""
    deadline: float | None = None
    """Time (``time.time()``) at which a training run saves and stops."""
    empty_caches: bool = False
    """True if the process begins with empty caches of compiled kernels."""
    tuning: Path | None = None
    """File of choices of peers' autotuners, which is read unless the caches must be empty, and written after the task."""


ANSWER: TypeAdapter[list[Measurement]] = TypeAdapter(list[Measurement])
"""Reader of an answer: a measurement for each task that was carried out."""


def carry_out_all(job: Job, stop: Callable[[], bool] = lambda: False) -> list[Measurement]:
    """Carry out all tasks of a job in this process, in order; the arguments are those of :func:`carry_out`.

    Returns:
        A measurement for each task. They end with the first that was stopped, and after one that ends past the job's deadline.
    """
    found: list[Measurement] = []
    for task in (job.task, *job.more):
        if found and job.deadline is not None and time.time() >= job.deadline:
            break
        found.append(carry_out(job.model_copy(update={"task": task}), stop))
        if unfinished(found[-1]):
            break
        gc.collect()  # frees the memory of the task's model
    return found


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
        return gradients(model, device, task.seed)
    control = f"-control-{task.index}" if task.control else ""
    name = f"{model.name}-{task.variant}-{task.seed}{control}.pt"
    checkpoint = job.state / name.replace(" ", "-")

    def ends() -> bool:
        return stop() or (job.deadline is not None and time.time() >= job.deadline)

    return training(model, task.variant, task.seed, device, checkpoint, ends, control=task.control, index=task.index)


def main(job_path: str, answer_path: str) -> None:
    """Read a job, carry it out, and write the answer."""
    job = Job.model_validate_json(Path(job_path).read_bytes())
    stopped: list[int] = []
    if job.task.task == "training":  # Ctrl-C reaches this process too; the run saves before it ends
        signal.signal(signal.SIGINT, lambda number, _: stopped.append(number))
    device = describe(job.device).name
    if job.tuning is not None and not job.empty_caches:
        restore(job.tuning, device)
    found = carry_out_all(job, lambda: bool(stopped))
    if job.tuning is not None and (problem := keep(job.tuning, device)):
        sys.stderr.write(f"{problem}\n")
    Path(answer_path).write_bytes(ANSWER.dump_json(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
