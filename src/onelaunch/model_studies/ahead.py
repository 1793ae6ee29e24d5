"""Compile the configurations of a library's autotuners ahead, in several processes, before a model of it is measured.

fla's autotuners compile one configuration after the other, which takes minutes in the first step of a model. Here each of several
processes, ``python -m onelaunch.model_studies.ahead JOB PART``, compiles a part of them on a copy of the model with one layer,
and times none. ``run.py`` calls :func:`compile_ahead`; the tasks of the model find the kernels in the same caches.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from onelaunch.device.hardware import describe
from onelaunch.model_studies.build import Trainer, random_rows
from onelaunch.model_studies.declare import LanguageModel
from onelaunch.model_studies.tasks import wait_for
from onelaunch.wording import in_a_line
from onelaunch.workbench.measure.compiling import part_of_tuning
from onelaunch.workbench.measure.cores import give_way
from onelaunch.workbench.measure.tuning import restore
from onelaunch.workbench.stored import Stored

TUNED = ("fla",)
"""Variants whose library tunes its kernels by Triton's autotuner. Each is the first variant of its models."""

POLL_SECONDS = 0.1
"""Seconds between two looks at the processes."""


class AheadJob(Stored):
    """A model whose first variant is compiled ahead."""

    model: LanguageModel
    device: str
    parts: int
    """Number of parts of each autotuner's configurations, one for each process."""
    tuning: Path | None = None
    """File of choices of autotuners. What it holds is not compiled again for other configurations."""


def compile_ahead(
    job: AheadJob, folder: Path, environment: Mapping[str, str], limit: float, report: Callable[[int], None]
) -> list[str]:
    """Compile a model's configurations in as many processes as the job has parts, all at once.

    Args:
        job: Model, device and number of parts. The device needs memory for one training step of one layer in each process.
        folder: Folder of the job's file and of the processes' output.
        environment: Environment of the processes, with the places of the caches.
        limit: Seconds after which processes are stopped.
        report: Callback with the number of processes that have ended, after each.

    Returns:
        One line for each process that failed. These are no errors, since a task compiles what it does not find.

    Raises:
        KeyboardInterrupt: Ctrl-C. All processes are stopped before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ahead.json"
    path.write_text(job.model_dump_json(), encoding="utf-8")
    command = [sys.executable, "-m", "onelaunch.model_studies.ahead", str(path)]
    ends = time.monotonic() + limit
    running: dict[int, subprocess.Popen[bytes]] = {}
    failed: list[str] = []
    try:
        for part in range(job.parts):
            with _log(folder, part).open("wb") as output:
                running[part] = subprocess.Popen([*command, str(part)], env=environment, stdout=output, stderr=output)
        while running:
            late = time.monotonic() >= ends
            for part, process in list(running.items()):
                if late:
                    process.kill()
                    process.wait()
                if process.poll() is None:
                    continue
                del running[part]
                if process.returncode != 0:
                    why = f"stopped after {limit:.0f} s" if late else f"its process ended with code {process.returncode}"
                    said = f"{why}{_last(_log(folder, part))}"
                    failed.append(f"Not compiled ahead: part {part + 1} of {job.parts} of {job.model.name}: {said}")
                report(job.parts - len(running))
            time.sleep(POLL_SECONDS if running else 0)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return failed


def _log(folder: Path, part: int) -> Path:
    """Return the file of the output of a part's process."""
    return folder / f"ahead-{part}.txt"


def _last(log: Path) -> str:
    """Return the last line of a log as a clause, or an empty string."""
    lines = log.read_bytes()[-4000:].decode(errors="replace").strip().splitlines()
    return f"; its output ended with: {lines[-1][:300]}" if lines else ""


def compile_part(job: AheadJob, part: int) -> None:
    """Compile a part of the configurations in this process, by the steps that the tasks of the model run.

    These are a training step, a forward pass without gradients if it is timed, and the loss and gradient of a shorter sequence
    if gradients are compared. The number of layers alone differs, which no autotuner's key holds.
    """
    model, device = job.model.model_copy(update={"layers": 1}), torch.device(job.device)
    rows = random_rows(model, device)
    with part_of_tuning(part, job.parts):
        trainer = Trainer(model, model.names[0], device)
        trainer.step(rows)
        if "forward" in model.activities:
            trainer.module.eval()
            trainer.logits(rows, use_cache=False)
            trainer.module.train()
        if model.gradient_length:
            trainer.loss(rows[:1, : model.gradient_length]).backward()
        wait_for(device)


def main(path: str, part: str) -> None:
    """Read a job and compile a part of it; a failure is one line on standard error and exit status 1."""
    job = AheadJob.model_validate_json(Path(path).read_bytes())
    device = torch.device(job.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels of other libraries run on the current device
    try:
        if job.tuning is not None:
            restore(job.tuning, describe(job.device).name)
        compile_part(job, int(part))
    except Exception as error:  # noqa: BLE001 - the task that measures meets the error again
        sys.stderr.write(f"{type(error).__name__}: {in_a_line(error)}\n")
        sys.exit(1)


if __name__ == "__main__":
    give_way()
    main(*sys.argv[1:])
