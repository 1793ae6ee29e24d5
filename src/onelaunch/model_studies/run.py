"""Run a study of models: carry out the tasks that a result does not have yet, judge the criteria, and save after each task.

A run that was stopped, by Ctrl-C, a time limit or the loss of the machine, is continued from its partial result, and its training
runs from their checkpoints. Command ``onelaunch study models`` calls :func:`run_model_study`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import onelaunch
from onelaunch.device import hardware
from onelaunch.errors import ArgumentError, ResultExists, StudyError
from onelaunch.model_studies.ahead import TUNED, AheadJob, compile_ahead
from onelaunch.model_studies.child import ANSWER, Job, carry_out_all
from onelaunch.model_studies.continued import Source, check_alike, earlier_commits, select, taken, unfinished
from onelaunch.model_studies.declare import LanguageModel, ModelStudy
from onelaunch.model_studies.judge import judged
from onelaunch.model_studies.result import Alone, Gradients, Key, Measurement, Missing, ModelResult, Timed, Training
from onelaunch.model_studies.tasks import Task, absent, batches, tasks_of
from onelaunch.operation.sources import installed_version
from onelaunch.workbench.files import probe_file, within
from onelaunch.workbench.result import Provenance, Spent, Status
from onelaunch.workbench.result.provenance import commit, driver, spelled
from onelaunch.workbench.result.sources import package_digest
from onelaunch.workbench.study import Scale
from onelaunch.workbench.study.plan import scale_for

TASK_LIMIT_SECONDS = 1500.0
"""Seconds after which a task other than a training run counts as hung."""

INTERRUPT_SECONDS = 30.0
"""Seconds that a training run has to save after Ctrl-C or after the deadline."""

PACKAGES = ("triton", "flash-linear-attention", "fla-core", "transformers")
"""Packages whose versions are stored, beside Python, PyTorch and onelaunch."""


def default_path(study: ModelStudy, device: str) -> Path:
    """Return the default file of a result: ``results/DEVICE/models/NAME.json`` in the working directory."""
    slug = hardware.describe(device).slug
    return within(Path("results"), Path("results") / slug / "models" / f"{study.name}.json")


def run_model_study(
    study: ModelStudy,
    *,
    device: str = "auto",
    scale: Scale | None = None,
    save_to: Path | None = None,
    force: bool = False,
    resume: bool = False,
    across_commits: bool = False,
    only: Collection[str] = (),
    anew: Collection[str] = (),
    also: Sequence[Path] = (),
    time_limit: float | None = None,
    in_process: bool = False,
    tuning: Path | None = None,
    processes: int = 0,
    on_progress: Callable[[str], None] = lambda _: None,
    command: str = "",
) -> ModelResult:
    """Run a study of models and save its result.

    Args:
        study: Study, as :func:`~onelaunch.model_studies.declare.find_model_study` reads it.
        device: ``cuda:0``, ``cpu`` and so on; ``auto`` is the first GPU, or the CPU.
        scale: Scale of the models; by default ``full`` on a GPU and ``small`` on a CPU.
        save_to: File of the result; :func:`default_path` by default. A folder beside it, named ``NAME.state``, holds checkpoints
            and caches until the run is finished.
        force: Whether to replace an existing result and begin again.
        resume: Whether to continue an interrupted run; without one the run begins anew. A finished result is continued where
            tasks are to be carried out ``anew``, or where its study declares something else by now. Measurements of models that
            are declared otherwise than then are left out, with a note.
        across_commits: Whether to take over measurements of another commit, which the result then names in
            ``provenance.earlier``. Both commits must be without changes, and everything else alike. Training runs that are
            not finished begin again.
        only: Tasks to carry out now: kinds (``alone``, ``timed``, ``gradients``, ``training``, or ``control`` for control
            runs), names of models, and pairs such as ``30m/gradients``. Kinds and models together mean these kinds of these
            models. All by default.
        anew: Tasks whose measurements in the result that is continued are removed, named as in ``only``. They are left to do.
        also: Interrupted results of the same study whose finished tasks are taken over, such as those of another GPU of the
            machine that ran another part of the tasks at the same time.
        time_limit: Seconds after which no task begins, and running ones are stopped. The result can then be continued. With 0
            nothing runs.
        in_process: Whether to carry the tasks out in this process. Then first steps have no empty caches.
        tuning: File that keeps the choices of peers' autotuners from run to run (:mod:`onelaunch.workbench.measure.tuning`).
            First steps of our variants begin without them, with empty caches. Those of a model's first variant, the library's
            own, begin with them if the file is there, since fla tunes for minutes, and are marked as begun with other caches.
        processes: Number of processes that compile the configurations of the library's autotuners ahead, before the first task of
            a model whose own variant is tuned (:mod:`onelaunch.model_studies.ahead`). With 0 or 1, with ``in_process``, and on a
            CPU nothing is compiled ahead. First steps of that variant are then marked as begun with other caches. All processes
            run at once, so the device needs memory for as many training steps of one layer. Failures are notes in the result.
        on_progress: Callback with the words for each task that begins.
        command: Command line for the provenance; this process's own by default.

    Returns:
        The result, as saved. Its ``interrupted`` is true if tasks are left.

    Raises:
        ArgumentError: ``processes`` is negative, a name in ``only`` or ``anew`` is unknown, or ``anew`` is given without
            ``resume``.
        StudyError: The study has no models of this scale.
        ResultExists: The file exists, and neither ``force`` nor ``resume`` applies.
        ResultMismatch: An earlier run has another study, device, software or commit.
        OutputUnwritable: The file cannot be written. Raised before anything is measured.
    """
    if processes < 0:
        raise ArgumentError(f"processes is {processes}; it must be at least 0.")
    if anew and not resume:
        raise ArgumentError("anew removes measurements of the result that resume continues, and resume is off.")
    where = hardware.resolve(device)
    path = save_to or default_path(study, str(where))
    chosen = scale or scale_for(where.type)
    models = study.at_scale(chosen)
    if not models:
        raise StudyError(study.name, f"declares no model of {chosen} scale.", advice="Pass another {scale}.")
    tasks = [task for model in models for task in tasks_of(study, model)]
    wanted, again = select(tasks, study, only, "only"), select(tasks, study, anew, "anew") if anew else []
    probe_file(path)
    earlier = ModelResult.load(path) if resume and path.exists() and not force else None
    if path.exists() and not force and (earlier is None or not (earlier.interrupted or anew or _changed(earlier, study))):
        raise ResultExists(path, argument="save_to", resumable=earlier is None and _is_interrupted(path))
    state = path.with_name(f"{path.stem}.state")
    if earlier is None:
        shutil.rmtree(state, ignore_errors=True)
    words = command or spelled(sys.argv)
    run = _Run(study, where, chosen, state, in_process=in_process, command=words, tuning=tuning, processes=processes)
    run.tasks = tasks
    if earlier is not None:
        run.take_over(earlier, across_commits=across_commits, anew=[task.key for task in again])
    for part in also:
        run.take_over(ModelResult.load(part), across_commits=across_commits)
    deadline = None if time_limit is None else time.time() + time_limit
    for group in batches(run.left(wanted)):
        if _is_late(deadline) or not run.prepare(group[0], deadline, on_progress) or _is_late(deadline):
            break
        on_progress(group[0].words if len(group) == 1 else f"{group[0].words}, and {len(group) - 1} more")
        kept = run.do(group, deadline)
        run.result().save(path, force=True)
        if not kept:
            break
    result = run.result()
    result.save(path, force=True)
    if not result.interrupted:
        shutil.rmtree(state, ignore_errors=True)
    return result


def _is_late(deadline: float | None) -> bool:
    return deadline is not None and time.time() >= deadline


def _changed(earlier: ModelResult, study: ModelStudy) -> bool:
    """Return whether a study declares something else than an earlier result does."""
    return earlier.study_digest != study.digest()


def _is_interrupted(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return ModelResult.load(path).interrupted
    return False


class _Run:
    """State of a run: the measurements so far."""

    def __init__(
        self,
        study: ModelStudy,
        device: torch.device,
        scale: Scale,
        state: Path,
        *,
        in_process: bool,
        command: str,
        tuning: Path | None = None,
        processes: int = 0,
    ) -> None:
        self._tuning, self._tuned = tuning, tuning is not None and tuning.exists()
        self._processes = processes
        self._compiled: set[str] = set()
        """Models whose first variant was compiled ahead."""
        self.study, self.device, self.state, self.in_process = study, device, state, in_process
        self.tasks: list[Task] = []
        self.measured: dict[Key, Measurement] = {}
        self._sources: list[Source] = []
        """Earlier results that measurements were taken over from."""
        self._began, self._device_seconds = time.monotonic(), 0.0
        self._wall_seconds = 0.0
        self._notes: list[str] = []
        self._provenance = provenance(study.rounds, device, scale, command)

    def take_over(self, earlier: ModelResult, *, across_commits: bool = False, anew: Collection[Key] = ()) -> None:
        """Take over the finished measurements of an earlier run but for those of tasks to carry out ``anew``, and its seconds.

        Raises:
            ResultMismatch: A fact that influences measurements differs.
        """
        check_alike(earlier, self.study, self._provenance, across_commits=across_commits)
        kept, notes = taken(earlier, self.study, self.tasks, anew)
        self._sources.append(Source(earlier.provenance, kept.keys() - self.measured.keys()))
        self.measured = kept | self.measured
        self._notes += notes
        if earlier.spent is not None:
            self._wall_seconds += earlier.spent.wall_seconds
            self._device_seconds += earlier.spent.device_seconds

    def left(self, tasks: Sequence[Task]) -> list[Task]:
        """Return those of some tasks that are left to do."""
        return [task for task in tasks if task.key not in self.measured or unfinished(self.measured[task.key])]

    def do(self, tasks: Sequence[Task], deadline: float | None) -> bool:
        """Carry out tasks in one process, and return whether the run goes on; it ends at the deadline and after Ctrl-C."""
        began, task = time.monotonic(), tasks[0]
        tuned = self._tuned or task.model in self._compiled
        job = Job(
            study=self.study,
            task=task,
            more=tuple(tasks[1:]),
            device=str(self.device),
            state=self.state,
            deadline=deadline,
            empty_caches=self._compiles and begins_empty(task, self.study.model(task.model), tuned=tuned),
            tuning=None if self._tuning is None else self._tuning.absolute(),
        )
        goes_on = True
        try:
            missing = absent(self.study.model(task.model), task.variant, self.device) if task.of_one else None
            if missing is not None:
                found = [without(self.study, each, missing.status, missing.reason) for each in tasks]
            else:
                found = carry_out_all(job) if self.in_process else self._in_a_child(job)
        except KeyboardInterrupt:
            found, goes_on = [without(self.study, each, "interrupted", "stopped by Ctrl-C") for each in tasks], False
        self._device_seconds += time.monotonic() - began
        self.measured |= {each.key: measured for each, measured in zip(tasks, found, strict=False)}
        for source in self._sources:
            source.keys.difference_update(each.key for each in tasks)
        return goes_on and len(found) == len(tasks) and not any(map(unfinished, found))

    @property
    def _compiles(self) -> bool:
        """True if tasks run in processes of their own, whose compiled kernels are cached in folders of the run."""
        return self.device.type == "cuda" and not self.in_process

    def _caches(self, task: Task) -> Path:
        """Return the folder of the caches of a task. Tasks that run all variants share that of the model's first variant."""
        model = self.study.model(task.model)
        return self.state / "caches" / model.name.replace(" ", "-") / (task.variant if task.of_one else model.names[0])

    def _environment(self, caches: Path) -> dict[str, str]:
        """Return the environment of a process with its caches in a folder."""
        names = {"TRITON_CACHE_DIR": "triton", "ONELAUNCH_CACHE": "onelaunch", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
        places = {name: str((caches / folder).absolute()) for name, folder in names.items()}
        return {**os.environ, **(places if self._compiles else {})}

    def prepare(self, task: Task, deadline: float | None, on_progress: Callable[[str], None]) -> bool:
        """Compile configurations of the library's autotuners ahead of a model's first task with them.

        Returns:
            Whether the run goes on; it ends after Ctrl-C.
        """
        model, caches = self.study.model(task.model), self._caches(task)
        wanted = self._processes > 1 and self._compiles and caches.name == model.names[0] and model.names[0] in TUNED
        if not wanted or model.name in self._compiled or absent(model, model.names[0], self.device) is not None:
            return True
        done = caches / "compiled_ahead"  # by an earlier part of this run
        if done.exists():
            self._compiled.add(model.name)
            return True
        began, parts = time.monotonic(), self._processes
        words = f"{model.name}: configurations of {model.names[0]}'s autotuners"
        on_progress(f"{words}, compiled in {parts} processes")
        tuning = None if self._tuning is None else self._tuning.absolute()
        job = AheadJob(model=model, device=str(self.device), parts=parts, tuning=tuning)
        limit = min(TASK_LIMIT_SECONDS, TASK_LIMIT_SECONDS if deadline is None else max(1.0, deadline - time.time()))
        try:
            failed = compile_ahead(
                job, self.state, self._environment(caches), limit, lambda ended: on_progress(f"{words}, {ended}/{parts} parts")
            )
        except KeyboardInterrupt:
            return False
        finally:
            self._device_seconds += time.monotonic() - began
        self._notes += failed
        if len(failed) < parts:
            self._compiled.add(model.name)
        if not failed:
            caches.mkdir(parents=True, exist_ok=True)
            done.touch()
        return True

    def _in_a_child(self, job: Job) -> list[Measurement]:
        """Carry out a job in a process of its own. First steps begin with empty caches, which later tasks of the model use."""
        caches = self._caches(job.task)
        if job.empty_caches:
            shutil.rmtree(caches, ignore_errors=True)
        self.state.mkdir(parents=True, exist_ok=True)
        job_path, answer, log = (self.state / name for name in ("job.json", "answer.json", "log.txt"))
        answer.unlink(missing_ok=True)
        job_path.write_text(job.model_dump_json(), encoding="utf-8")
        command = [sys.executable, "-m", "onelaunch.model_studies.child", str(job_path), str(answer)]
        with log.open("ab") as output:
            process = subprocess.Popen(command, env=self._environment(caches), stdout=output, stderr=output)
            status, reason = _wait(process, job)
        if answer.is_file() and process.returncode == 0:
            return ANSWER.validate_json(answer.read_bytes())
        last = log.read_bytes()[-4000:].decode(errors="replace").strip().splitlines()[-1:] or [""]
        why = f"{reason}; its output ended with: {last[0][:300]}"
        return [without(self.study, task, status, why) for task in (job.task, *job.more)]

    def result(self) -> ModelResult:
        """Return the result so far, judged."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        earlier = earlier_commits(self._sources, self.tasks, self._provenance.commit)
        spent = Spent(
            wall_seconds=self._wall_seconds + time.monotonic() - self._began,
            device_seconds=self._device_seconds,
        )
        found = ModelResult(
            study=self.study,
            study_digest=self.study.digest(),
            provenance=self._provenance.model_copy(update={"date": now, "earlier": earlier}),
            measurements=tuple(self.measured[task.key] for task in self.tasks if task.key in self.measured),
            notes=tuple(dict.fromkeys(self._notes)),  # results that share earlier runs repeat the notes on them
            interrupted=bool(self.left(self.tasks)),
            spent=spent,
        )
        return judged(found)


def begins_empty(task: Task, model: LanguageModel, *, tuned: bool) -> bool:
    """Return whether a task begins with empty caches of compiled kernels: first steps do.

    Those of the model's first variant, the library's own, begin with the choices of its autotuners where a run is given some, or
    with their configurations where they were compiled ahead; ``tuned`` says so.
    """
    return task.task == "alone" and not (tuned and task.variant == model.names[0])


def _wait(process: subprocess.Popen[bytes], job: Job) -> tuple[Status, str]:
    """Wait for the process of a job; return the status and the reason for the case that it has no answer.

    Ctrl-C reaches the process too. A training run saves before it ends.
    """
    left = None if job.deadline is None else max(1.0, job.deadline - time.time()) + INTERRUPT_SECONDS
    limit = left if job.task.task == "training" else min(TASK_LIMIT_SECONDS, left or TASK_LIMIT_SECONDS)
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        late = left is not None and limit == left
        return ("interrupted", "stopped at the time limit") if late else ("timed_out", f"it ran for more than {limit:.0f} s")
    except KeyboardInterrupt:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(INTERRUPT_SECONDS)
        process.kill()
        process.wait()
        return "interrupted", "stopped by Ctrl-C"
    return "crashed", f"its process ended with code {code}"


def without(study: ModelStudy, task: Task, status: Status, reason: str) -> Measurement:
    """Return the measurement of a task that gave none."""
    missing = Missing(status=status, reason=reason)
    if task.task == "alone":
        return Alone(model=task.model, variant=task.variant, missing=missing)
    if task.task == "training":
        known: dict[str, Any] = {"model": task.model, "variant": task.variant, "seed": task.seed}
        return Training(**known, control=task.control, index=task.index, missing=missing)
    each = dict.fromkeys(study.model(task.model).names, missing)
    if task.task == "gradients":
        return Gradients(model=task.model, seed=task.seed, eps=study.model(task.model).eps_of_gradients, missing=each)
    return Timed.model_validate({"model": task.model, "activity": task.variant, "missing": each})


def provenance(rounds: int, device: torch.device, scale: Scale, command: str) -> Provenance:
    """Return the provenance of a run with so many rounds of timing that ends now."""
    facts, committed = hardware.describe(str(device)), commit()
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "onelaunch": onelaunch.__version__}
    found = {"cuda": torch.version.cuda, "rocm": torch.version.hip, **{name: installed_version(name) for name in PACKAGES}}
    return Provenance(
        device=facts.name,
        slug=facts.slug,
        architecture=facts.architecture,
        driver=driver(device),
        versions=versions | {name: version for name, version in found.items() if version},
        commit=committed,
        package=package_digest() if not committed or committed.endswith("-dirty") else "",
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=command,
        scale=scale,
        rounds=rounds,
    )
