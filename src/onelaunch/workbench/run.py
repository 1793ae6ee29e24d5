"""Run a study: plan, verify, time, count, judge its criteria, decide. What is measured is never lost.

One shape and direction after another; each is kept on disk before the next begins. Whatever a variant does wrong (raise, run
out of memory, answer incorrectly) is its result, and the rest goes on. Ctrl-C ends the run early with all that was measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from onelaunch.device import hardware
from onelaunch.errors import OutputUnwritable, ResultCorrupt, ResultExists, ResultMissing, StudyError
from onelaunch.wording import shown
from onelaunch.workbench.files import probe_file, within
from onelaunch.workbench.result import Result, StoredCeilings
from onelaunch.workbench.running import QUICK_SECONDS, Progress, Run, Steps, Wanted
from onelaunch.workbench.stored import FROM_A_FILE
from onelaunch.workbench.study import Scale, Shape, Study
from onelaunch.workbench.study.plan import plan_study, scale_for

TIME_CAP_SECONDS: dict[Scale, float] = {"small": 15.0, "full": 60.0}
"""No new round of a shape and direction begins after this: a small run is one that people wait for."""


def default_path(study: Study, device: str = "auto") -> Path:
    """Return where a run on this device is saved by default: ``results/<device>/<study>.json`` in the working directory."""
    slug = hardware.describe(str(hardware.resolve(device))).slug
    return within(Path("results"), Path("results") / slug / f"{study.name}.json")


def partial_path(path: Path) -> Path:
    """Return where the finished shapes of a run are kept while it lasts; read it like any result if the run was killed."""
    return path.with_name(f"{path.stem}.partial.json")


class ResultUnsaved(OutputUnwritable):
    """A finished study could not be saved at its place, as on a disk that has become full.

    Attributes:
        result: what was measured and decided.
        rescued: where it was saved instead, or ``None`` where that failed too.
    """

    def __init__(self, failure: OutputUnwritable, result: Result) -> None:
        self.result = result
        self.rescued: Path | None = None
        remedy = "It could not be saved under the system's temporary folder either."
        try:
            folder = Path(tempfile.mkdtemp(prefix="onelaunch-"))
            self.rescued = result.save(folder / failure.path.name)
            remedy = f"The result was saved as {self.rescued} instead; move it from there."
        except OSError:
            pass
        super().__init__(failure.path, failure.reason, remedy=remedy)


def run_study(
    study: Study,
    *,
    device: str = "auto",
    scale: Scale | Literal["auto"] = "auto",
    rounds: int | None = None,
    time_cap: float | None = None,
    quick: bool = False,
    count: bool | Literal["all"] = True,
    on_progress: Callable[[Progress], None] | None = None,
    save_to: Path | None = None,
    force: bool = False,
    resume: bool = False,
    processes: int = 0,
    command: str = "",
    steps: Steps | None = None,
) -> Result:
    """Run a study and save its result.

    Args:
        study: as :func:`~onelaunch.workbench.study.read.load_study` reads it.
        device: ``cuda:0``, ``cpu``...; ``auto`` is the first GPU, or the CPU.
        scale: which of the study's shapes; ``auto`` is ``full`` on a GPU and ``small`` on a CPU.
        rounds: instead of the study's own number.
        time_cap: seconds after which no new round of a shape and direction begins, once three are measured;
            :data:`TIME_CAP_SECONDS` of the scale by default.
        quick: run the study's first direction alone, with a time cap of :data:`QUICK_SECONDS`, for a first look; a note in the
            result says so.
        count: DRAM bytes by the hardware's counters where they can be read: at the shapes where a criterion asks for bytes
            (``True``; of what launches a known number of kernels, and of what the criterion names: a loop of thousands would keep
            the profiler busy for minutes), of everything everywhere (``"all"``), or nowhere. Elsewhere bytes are by arithmetic.
            Launches and barriers are counted where a criterion asks for them, of what it names, unless this is ``False``.
        on_progress: is told how far the run is.
        save_to: the file; :func:`default_path` by default.
        force: replace a result that is there already.
        resume: go on with an interrupted run (the file's, or the kept part of one that was killed) after what it finished; begins
            where there is none. Nothing that tells on a result may have changed since.
        processes: make every call once in so many processes side by side, before anything is measured: they compile what this one
            then finds compiled. The device needs memory for as many calls.
        command: how the run was started, for the result's provenance; this process's command line by default.
        steps: what measures; for tests.

    Returns:
        The result, as saved. After Ctrl-C its ``interrupted`` is true, and cells that were not finished say so.

    Raises:
        NoDeviceError: the device is not here.
        StudyError: the study has no shapes of this scale.
        ResultExists: the file (or the kept part of a killed run) is there already; raised before anything is measured.
        OutputUnwritable: the file cannot be written; tried before anything is measured.
        ResultUnsaved: the file could not be written when all was measured; holds the result.
        ResultMismatch: ``resume``, but the study, the device, the software or the rounds are not those of the interrupted run.
    """
    where = hardware.resolve(device)
    path = save_to or default_path(study, str(where))
    earlier = _before_anything_runs(study, path, force=force, resume=resume)
    steps = steps or Steps()
    chosen = scale_for(where.type) if scale == "auto" else scale
    if not study.at_scale(chosen):
        raise _no_shapes(study, chosen)
    # floors of one result rest on the same rates
    ceilings = earlier.ceilings if earlier else StoredCeilings(**asdict(steps.ceilings(str(where))))
    cap = time_cap or (QUICK_SECONDS if quick else TIME_CAP_SECONDS[chosen])
    wanted = Wanted(rounds or study.rounds, cap, quick=quick, count=count, command=command)
    run = Run(plan_study(study, ceilings, str(where), chosen), where, ceilings, wanted, steps, on_progress or (lambda _: None))
    if earlier is not None:
        run.go_on(earlier, partial_path(path) if not path.exists() else path)
    run.measure_all(processes, partial_path(path))
    return _saved(run.result(interrupted=run.stopped), path, force=force or earlier is not None)


def _before_anything_runs(study: Study, path: Path, *, force: bool, resume: bool) -> Result | None:
    """Check names and the output, and return the interrupted run to go on with, if there is one and ``resume`` asks for it."""
    try:
        Study.model_validate(study.model_dump(), context=FROM_A_FILE)
    except ValidationError as error:
        first = error.errors(include_context=False)[0]
        raise StudyError(
            shown(study.name), f"{'.'.join(map(str, first['loc']))} is {shown(first['input'])}: {first['msg']}"
        ) from error
    probe_file(path)
    earlier = interrupted_run(path, force=force) if resume else None
    for existing in (path, partial_path(path)):
        if existing.exists() and not force and earlier is None:
            raise ResultExists(existing, argument="save_to", resumable=is_resumable(existing))
    return earlier


def _saved(result: Result, path: Path, *, force: bool) -> Result:
    """Save a result in the place of the part that was kept while it was measured, and return it."""
    try:
        result.save(path, force=force)
    except OutputUnwritable as failure:
        raise ResultUnsaved(failure, result) from failure
    partial_path(path).unlink(missing_ok=True)
    return result


def _no_shapes(study: Study, scale: Scale) -> StudyError:
    """Return the error of a study that has no shapes of a scale."""
    there = sorted({shape.scale for shape in study.shapes})
    default = Shape.model_fields["scale"].default
    return StudyError(
        study.name,
        f"declares no shape of {scale} scale, which is the default on {'a CPU' if scale == 'small' else 'a GPU'}. Its "
        f"{len(study.shapes)} shapes are of {there[0]} scale (a shape that names no scale is of {default} scale).",
        advice=f'Pass {{scale}} {there[0]}, or declare a shape with scale = "{scale}".',
    )


def is_resumable(path: Path) -> bool:
    """Return whether a file is what an interrupted or killed run left, so that the run can be continued."""
    try:
        return Result.load(path).interrupted
    except (ResultCorrupt, ResultMissing):
        return False


def interrupted_run(path: Path, *, force: bool = False) -> Result | None:
    """Return the result of an interrupted run, or the kept part of one that was killed; ``None`` where there is neither.

    Raises:
        ResultExists: the run was finished, and is not to be replaced by ``force``.
    """
    found = next((Result.load(each) for each in (path, partial_path(path)) if each.exists()), None)
    if found is None or found.interrupted:
        return found
    if not force:
        raise ResultExists(path, argument="save_to")
    return None
