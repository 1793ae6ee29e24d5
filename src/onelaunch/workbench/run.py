"""Run a study: plan, verify, time, count, judge its criteria, decide. Finished measurements are never lost.

A case is a shape in one direction, ``forward`` or ``forward_backward``. Cases run one after another, and the partial result is
saved after each. A variant that raises, runs out of memory or is incorrect is recorded as such, and the others continue.
Ctrl-C ends the run early with everything that was measured. Command ``onelaunch study run`` calls :func:`run_study`.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from onelaunch.device import hardware
from onelaunch.errors import ArgumentError, OutputUnwritable, ResultBusy, ResultCorrupt, ResultExists, ResultMissing, StudyError
from onelaunch.folders import cache_folder
from onelaunch.wording import shown
from onelaunch.workbench.files import probe_file, within
from onelaunch.workbench.options import Progress, RunOptions
from onelaunch.workbench.result import Result
from onelaunch.workbench.result.provenance import spelled
from onelaunch.workbench.resume import changed_shapes, refuse_unknown
from onelaunch.workbench.steps import Steps
from onelaunch.workbench.stored import FROM_A_FILE
from onelaunch.workbench.study import Scale, Shape, Study
from onelaunch.workbench.study.plan import scale_for
from onelaunch.workbench.supervise import CALL_LIMIT_SECONDS, Job, carry_out, slug_of, supervise

QUICK_SECONDS = 3.0
"""Time cap in seconds of each shape in a quick run."""

TIME_CAP_SECONDS: dict[Scale, float] = {"small": 15.0, "full": 60.0}
"""Seconds by scale after which no new round of a case begins. Small runs are short, because people wait for them."""


def default_path(study: Study, device: str = "auto") -> Path:
    """Return the default file of a run on this device: ``results/<device>/<study>.json`` in the working directory."""
    return within(Path("results"), Path("results") / slug_of(str(hardware.resolve(device))) / f"{study.name}.json")


def resolve_all(device: str) -> tuple[str, ...]:
    """Return the names of the devices of a run, which commas separate, such as ``("cuda:0", "cuda:1")``.

    Raises:
        NoDeviceError: PyTorch sees no device of one of these names.
        ArgumentError: A device is named twice.
    """
    found = tuple(str(hardware.resolve(name.strip())) for name in device.split(","))
    if len(set(found)) < len(found):
        raise ArgumentError(f"{shown(device)} names a device twice; name each once.")
    return found


def partial_path(path: Path) -> Path:
    """Return the file that holds the finished cases during a run. After a killed run it can be read like any result."""
    return path.with_name(f"{path.stem}.partial.json")


class ResultUnsaved(OutputUnwritable):
    """Error of a finished study that could not be saved to its file, such as on a full disk.

    Attributes:
        result: Result with measurements and decision.
        rescued: File in the system's temporary folder to which it was saved instead, or ``None`` if that failed too.
    """

    def __init__(self, failure: OutputUnwritable, result: Result) -> None:
        self.result = result
        self.rescued: Path | None = None
        remedy = "It could not be saved under the system's temporary folder either."
        try:
            folder = Path(tempfile.mkdtemp(prefix="onelaunch-"))
            self.rescued = result.save(folder / failure.path.name)
            remedy = f"The result was saved as {self.rescued} instead. Move it from there."
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
    across_commits: bool = False,
    anew: Collection[str] = (),
    processes: int = 0,
    command: str = "",
    steps: Steps | None = None,
    in_process: bool = True,
    call_limit: float = CALL_LIMIT_SECONDS,
    price_per_hour: float | None = None,
    time_limit: float | None = None,
    tuning: Path | None = None,
) -> Result:
    """Run a study and save its result.

    Args:
        study: Study, as :func:`~onelaunch.workbench.study.read.load_study` reads it.
        device: ``cuda:0``, ``cpu`` and so on; ``auto`` is the first GPU, or the CPU. Several devices of one kind, as in
            ``cuda:0,cuda:1``, share the shapes and measure side by side, each in a child process of its own.
        scale: Scale of the shapes to run; ``auto`` is ``full`` on a GPU and ``small`` on a CPU.
        rounds: Number of rounds in place of the study's own.
        time_cap: Seconds after which no new round of a case begins, once three are measured. :data:`TIME_CAP_SECONDS` of the
            scale by default.
        quick: Whether to run only the study's first direction, with a time cap of :data:`QUICK_SECONDS`, for a first look. A note
            in the result says so.
        count: Where to count DRAM bytes with the hardware's counters. ``True`` counts at the shapes where a criterion asks for
            bytes: the variants that launch a known number of kernels, and those that the criterion names. (A loop of thousands of
            launches would keep the profiler busy for minutes.) ``"all"`` counts everything at every shape, ``False`` nothing.
            Bytes that are not counted are computed by arithmetic. Launches and grid barriers are counted, and host times are
            taken, for the variants and shapes of the criteria that ask for them, unless this is ``False``.
        on_progress: Callback for the progress.
        save_to: File of the result; :func:`default_path` by default.
        force: Whether to replace an existing result.
        resume: Whether to continue an interrupted or killed run, whose partial result is read from its file. Without one the run
            begins anew. Device, software, commit, rounds, and what the study declares for all its shapes must be the same. Shapes
            that it declares otherwise by now are measured anew, and criteria may be others.
        across_commits: Whether a resumed run may take over what another commit of onelaunch measured. The result's provenance
            then names the commit of each shape. Both commits must be known and without changes.
        anew: Names of shapes that a resumed run measures even if the earlier run has finished them, such as after a change of
            a kernel or of the verification gate that concerns them alone. A finished run can be resumed for their sake.
        processes: Number of processes that make every call of the study once before it is measured, a group of shapes at a time,
            so that its compiled kernels are in the cache; 0 for none. They also check variants on probes and by many calls. Each
            makes one call at a time, and the device needs memory for all of them.
        command: Command line for the result's provenance; this process's own by default.
        steps: Functions that use the device: they read its peaks, measure a case, count and compile. Tests replace them.
        in_process: Whether to measure in this process, which a variant can then end, crash or stop for ever. ``False``, the
            default of the command line, measures in a child process that this one supervises; see
            :mod:`onelaunch.workbench.supervise`. It is not the default in Python, since a new interpreter imports the caller's
            main module, which must then guard its work by ``if __name__ == "__main__"``.
        call_limit: Seconds after which a variant counts as hung and gets the status ``timed_out``, in one step such as its
            probes, its verification, its preparation (all of these compile), or one sample. Applies to a supervised run.
        price_per_hour: Price of an hour of the machine, in any currency. The result then holds the cost of its wall time. A
            resumed run without a price takes that of the interrupted one.
        time_limit: Seconds after which no new case begins. The result is then that of an interrupted run, which can be resumed.
        tuning: File of choices of Triton's autotuner, which is read before anything is compiled and written at the end; see
            :mod:`onelaunch.workbench.measure.tuning`.

    Returns:
        The result, as saved. After Ctrl-C its ``interrupted`` is true, and unfinished measurements have that status.

    Raises:
        NoDeviceError: The device does not exist here.
        StudyError: The study has no shapes of this scale, none of a name in ``anew``, or a name that is not allowed in a file.
        ResultExists: The file, or the partial result of a killed run, exists, and neither ``force`` nor ``resume`` applies.
            Raised before anything is measured.
        OutputUnwritable: The file cannot be written. Raised before anything is measured.
        ResultBusy: Another run is writing this result. Raised before anything is measured.
        ResultCorrupt: The file of the run to resume is damaged, is no result, or is too new. Raised before anything is measured.
        ResultUnsaved: The file could not be written at the end, or another run has written it meanwhile. Holds the result.
        MeasuringFailed: The child process of a supervised run died twice before it measured anything.
        ArgumentError: The file of the tuning is damaged, or was written by a newer version; a device is named twice; or there
            are several, and ``in_process`` is set.
        ResultMismatch: The interrupted run has another study, device, software, commit, scale or number of rounds.
    """
    began = time.monotonic()
    devices = resolve_all(device)
    if len(devices) > 1 and in_process:
        raise ArgumentError("Several devices are measured by processes of their own; pass in_process=False.")
    where = hardware.resolve(devices[0])
    path = save_to or default_path(study, str(where))
    with _alone(path):
        earlier = _before_anything_runs(study, path, force=force, resume=resume, anew=anew)
        before = _stamp(path)
        chosen = scale_for(where.type) if scale == "auto" else scale
        if not study.at_scale(chosen):
            raise _no_shapes(study, chosen)
        cap = time_cap or (QUICK_SECONDS if quick else TIME_CAP_SECONDS[chosen])
        options = RunOptions(
            rounds or study.rounds,
            cap,
            quick=quick,
            count=count,
            command=command or spelled(sys.argv),
            began=began,
            price_per_hour=price_per_hour,
            time_limit=time_limit,
            tuning=tuning,
            across_commits=across_commits,
            anew=tuple(anew),
        )
        job = Job(
            study=study,
            device=str(where),
            scale=chosen,
            options=options,
            partial=partial_path(path),
            steps=steps or Steps(),
            processes=processes,
            earlier=earlier,
            # The path is for messages: an existing result is read first, and the partial file only in its absence.
            earlier_path=partial_path(path) if not path.exists() else path,
        )
        tell = on_progress or (lambda _: None)
        result = carry_out(job, tell) if in_process else supervise(job, tell, devices=devices, call_limit=call_limit)
        if _stamp(path) != before:
            raise ResultUnsaved(OutputUnwritable(path, "another run has written it meanwhile"), result)
        return _saved(result, path, force=force or earlier is not None)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock of a result during its run. It lies in the cache folder, so that nothing is left beside the result.

    Raises:
        ResultBusy: Another run holds it.
    """
    import filelock  # imported here, since it takes 16 ms

    # surrogatepass: Python stands for bytes of a path that are not UTF-8 with surrogates, which UTF-8 cannot encode.
    name = hashlib.sha256(str(path.absolute()).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    lock = filelock.FileLock(cache_folder() / "runs" / f"{name}.lock", timeout=0)
    held = False
    try:
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        held = True
    except filelock.Timeout:
        raise ResultBusy(path) from None
    except (OSError, NotImplementedError):
        pass  # The cache folder takes no locks. The end of the run still finds a file that another run has written meanwhile.
    try:
        yield
    finally:
        if held:
            lock.release()


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Return what changes when a file is replaced; ``None`` if there is no file."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _before_anything_runs(study: Study, path: Path, *, force: bool, resume: bool, anew: Collection[str]) -> Result | None:
    """Check the study's names and the output file, and return the interrupted run to continue, or ``None`` for a new run."""
    # A study made in Python may have names that a study file may not, such as ones with markup. They become names of files and
    # parts of reports and plots, so the study is validated again by the rules for files.
    try:
        Study.model_validate(study.model_dump(), context=FROM_A_FILE)
    except ValidationError as error:
        first = error.errors(include_context=False)[0]
        raise StudyError(
            shown(study.name), f"{'.'.join(map(str, first['loc']))} is {shown(first['input'])}: {first['msg']}"
        ) from error
    if both := sorted(set(study.variant_names()) & set(study.controls)):
        problem = f"{shown(both[0])} is a variant and a control, so its times would be ambiguous."
        raise StudyError(study.name, problem, advice="Leave the control out, or rename it in its operation.")
    refuse_unknown(study, anew)
    probe_file(path)
    earlier = run_to_resume(study, path, force=force, anew=anew) if resume else None
    for existing in (path, partial_path(path)):
        if existing.exists() and not force and earlier is None:
            raise ResultExists(existing, argument="save_to", resumable=is_resumable(existing))
    return earlier


def _saved(result: Result, path: Path, *, force: bool) -> Result:
    """Save a result, remove the partial one, and return the result."""
    try:
        result.save(path, force=force)
    except OutputUnwritable as failure:
        raise ResultUnsaved(failure, result) from failure
    partial_path(path).unlink(missing_ok=True)
    return result


def _no_shapes(study: Study, scale: Scale) -> StudyError:
    """Return the error of a study that has no shapes of a scale."""
    declared = sorted({shape.scale for shape in study.shapes})
    default = Shape.model_fields["scale"].default
    return StudyError(
        study.name,
        f"declares no shape of {scale} scale, which is the default on {'a CPU' if scale == 'small' else 'a GPU'}. Its "
        f"{len(study.shapes)} shapes are of {declared[0]} scale (a shape that names no scale is of {default} scale).",
        # The error replaces {scale} by the name of the argument or the command-line option.
        advice=f'Pass {{scale}} {declared[0]}, or declare a shape with scale = "{scale}".',
    )


def is_resumable(path: Path) -> bool:
    """Return whether a file holds the partial result of an interrupted or killed run, which can be resumed."""
    try:
        return Result.load(path).interrupted
    except (ResultCorrupt, ResultMissing):
        return False


def run_to_resume(study: Study, path: Path, *, force: bool = False, anew: Collection[str] = ()) -> Result | None:
    """Return the result of an interrupted run, the partial result of a killed one, or a finished result with shapes to measure.

    Args:
        study: Study that runs. A finished result is resumed if the study declares other shapes by now.
        path: File of the result. It is looked at first, then :func:`partial_path` of it.
        force: Flag to treat a finished run as absent, so that a new one replaces it.
        anew: Names of shapes that are measured even if they are finished.

    Returns:
        The result to resume, or ``None`` if there is none and a new run begins.

    Raises:
        ResultExists: The run was finished, nothing is left to measure, and ``force`` is not set.
        ResultCorrupt: The file is damaged, is no result, or is too new.
    """
    found = next((Result.load(each) for each in (path, partial_path(path)) if each.exists()), None)
    if found is None or found.interrupted:
        return found
    if not force and (anew or changed_shapes(found.study, study)):
        return found
    if not force:
        raise ResultExists(path, argument="save_to")
    return None
