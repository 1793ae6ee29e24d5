"""Tasks of a study of models: first steps of a variant alone, times of all variants in turn, and gradients.

``child.py`` carries out a task in a process of its own, and ``run.py`` those of a whole study. A variant that cannot run, or
fails, gets a status with its reason, and the others are measured without it.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch

from onelaunch.cuda import no_garbage_collection
from onelaunch.model_studies.build import Trainer, plain_loss, random_rows, why_not
from onelaunch.model_studies.declare import Activity, LanguageModel, ModelStudy
from onelaunch.model_studies.result import Alone, GradientError, Gradients, Key, Missing, Timed
from onelaunch.wording import in_a_line
from onelaunch.workbench import stats
from onelaunch.workbench.measure.cores import one_core
from onelaunch.workbench.measure.garbage import Garbage
from onelaunch.workbench.measure.rounds import STEADY, by_turns, order
from onelaunch.workbench.result import Status

WARM_UP = 2
"""Runs of :data:`STEPS` steps, or decodings, of each variant before times are taken."""

STEPS = 5
"""Steps of training, or forward passes, in a row of which each time is the mean.

The device is awaited after the last one, so that the host runs ahead as in training. With one step a time, a step of the baseline
at 350M parameters took from 145 to 287 ms on an H100's host: the A/A noise was 1.32.
"""

PROMPT, DECODED = 64, 32
"""Tokens of the prompt of a decoding, and tokens that are decoded and timed after it."""

PART = 4
"""Tokens in a row that are timed together; a decoding counts as all tokens taking the median time of its parts.

The variants take their parts by turns, so that all see what else the host does then. With a whole decoding at a time, the first
and the second run of the same model took 13.5 and 16.1 ms a token in the median of 10 rounds on an H100's host.
"""

MORE_SECONDS = 60.0
"""Seconds after which no more rounds follow those that were asked for, even if the A/A noise on a GPU is still high."""


KINDS = ("alone", "timed", "gradients", "training", "control")
"""Kinds of tasks as they are named. ``training`` means the control runs too, which ``control`` means alone."""


class Task(NamedTuple):
    """One piece of work, which gives one measurement."""

    task: str
    """``alone``, ``timed``, ``gradients`` or ``training``."""
    model: str
    variant: str = ""
    """Variant; for ``timed`` the activity."""
    seed: int = 0
    control: bool = False
    """True for a control of losses: a training run of the first variant once more, from weights one rounding away."""
    index: int = 0
    """Index of the control, which seeds the signs of its roundings."""

    @property
    def key(self) -> Key:
        """Key of the measurement."""
        return "control" if self.control else self.task, self.model, self.variant, self.seed, self.index

    @property
    def of_one(self) -> bool:
        """True if the task runs one variant of its model; other tasks run all of them."""
        return self.task in ("alone", "training")

    @property
    def words(self) -> str:
        """The task in words, for progress."""
        if self.task == "training":
            more = ", again from weights one rounding away" if self.control else ""
            which = f" (control {self.index + 1})" if self.index else ""
            return f"{self.model}: training run of {self.variant}, seed {self.seed}{more}{which}"
        said = {"alone": f"first steps of {self.variant}", "timed": f"times of {self.variant}"}
        said["gradients"] = f"gradients, seed {self.seed}" if self.seed else "gradients"
        return f"{self.model}: {said[self.task]}"


def task_of(key: Key) -> Task:
    """Return the task of a measurement, by its key."""
    kind, model, variant, seed, index = key
    return Task("training" if kind == "control" else kind, model, variant, seed, kind == "control", index)


def tasks_of(study: ModelStudy, model: LanguageModel) -> list[Task]:
    """Return the tasks of a model, in the order in which they run."""
    tasks = [Task("alone", model.name, variant) for variant in model.names]
    tasks += [Task("timed", model.name, activity) for activity in model.activities]
    tasks += [Task("gradients", model.name, "", seed) for seed in range(model.gradient_seeds)] if model.gradient_length else []
    if model.steps:
        for index, seed in enumerate(model.seeds):
            tasks += [Task("training", model.name, variant, seed) for variant in model.names]
            controls = 0 if index else model.controls
            tasks += [Task("training", model.name, model.names[0], seed, control=True, index=each) for each in range(controls)]
    return tasks


def batches(tasks: Sequence[Task]) -> Iterator[tuple[Task, ...]]:
    """Yield tasks in the groups that share a process, in order: the gradients and the controls of a model; others are alone.

    A process takes longer to start than one of these, and none of them measures a first step or memory.
    """
    shared = ("gradients", "control")
    for _, group in itertools.groupby(enumerate(tasks), lambda at: at[1].key[:2] if at[1].key[0] in shared else at[0]):
        yield tuple(task for _, task in group)


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def failure(error: BaseException) -> Missing:
    """Return the status of a variant that raised an error."""
    status: Status = "out_of_memory" if isinstance(error, torch.OutOfMemoryError) else "error"
    return Missing(status=status, reason=f"{type(error).__name__}: {in_a_line(error)}")


def absent(model: LanguageModel, variant: str, device: torch.device) -> Missing | None:
    """Return the status of a variant that cannot run on a device, or ``None``."""
    found = why_not(model, variant, device)
    return None if found is None else Missing(status=found[0], reason=found[1])  # pyrefly: ignore[bad-argument-type]


def alone(model: LanguageModel, variant: str, device: torch.device, *, empty_caches: bool) -> Alone:
    """Measure the first training step of a variant, and the peak memory of a later one.

    Args:
        model: Declaration of the model.
        variant: Name of the variant.
        device: Device of the run.
        empty_caches: Whether this process began with empty caches of compiled kernels. It is stored.
    """
    if (missing := absent(model, variant, device)) is not None:
        return Alone(model=model.name, variant=variant, missing=missing)
    begin = time.perf_counter()
    try:
        trainer = Trainer(model, variant, device)
        rows = random_rows(model, device)
        wait_for(device)
        built = time.perf_counter()
        trainer.step(rows)
        wait_for(device)
        first = time.perf_counter()
        peak = _peak(lambda: trainer.step(rows), device)
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the variant's status
        return Alone(model=model.name, variant=variant, missing=failure(error))
    report = trainer.report
    return Alone(
        model=model.name,
        variant=variant,
        parameters=sum(each.numel() for each in trainer.module.parameters()),
        build_seconds=built - begin,
        first_step_seconds=first - built,
        empty_caches=empty_caches,
        peak_bytes=peak,
        replaced=len(report.replaced) if report else 0,
        refused=tuple(f"{each.name}: {each.reason}" for each in report.refused) if report else (),
        fallbacks=dict(report.fallbacks) if report else {},
    )


def _peak(run: Callable[[], Any], device: torch.device) -> int | None:
    """Return the most bytes that are allocated on a GPU while a function runs, those that are allocated before it included."""
    if device.type != "cuda":
        run()
        return None
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    run()
    wait_for(device)
    return torch.cuda.max_memory_allocated(device)


def timed(model: LanguageModel, activity: Activity, rounds: int, device: torch.device) -> Timed:
    """Time all variants in turn: in each round each of them once, and the first one twice.

    The order rotates and reverses from round to round. If it rotated alone, the first run of the first variant would mostly come
    right after its second one, and no other run after one of its own variant.

    On a GPU the threads of this process stay on one core meanwhile, as in calls from Python that studies of variants time, and
    more rounds follow while the A/A noise is high. Garbage is collected in between alone: one collection takes as long as several
    tokens, and would charge one run with the garbage of all.
    """
    missing: dict[str, Missing] = {}
    runs: dict[str, Callable[[], Iterator[float | None]]] = {}
    rows = random_rows(model, device)
    for variant in model.names:
        if (why := absent(model, variant, device)) is not None:
            missing[variant] = why
            continue
        try:
            run = _activity(Trainer(model, variant, device), activity, rows)
            for _ in range(WARM_UP):
                for _ in run():
                    pass
            runs[variant] = run
        except Exception as error:  # noqa: BLE001 - whatever a library raises is the variant's status
            missing[variant] = failure(error)
    if not runs:
        return Timed(model=model.name, activity=activity, missing=missing)
    times = _in_turn(runs, rounds, device)
    return Timed(
        model=model.name,
        activity=activity,
        rounds={name: tuple(times[name]) for name in runs},
        again=tuple(times[""]),
        missing=missing,
    )


def _in_turn(
    runs: Mapping[str, Callable[[], Iterator[float | None]]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the microseconds of each run in each round, by name; the empty name stands for a second run of the first one."""
    first = next(iter(runs))
    names = (*runs, "")
    times: dict[str, list[float]] = {name: [] for name in names}
    began = time.perf_counter()
    with Garbage():
        for index in itertools.count():
            if index >= rounds and (time.perf_counter() - began > MORE_SECONDS or not _is_unsteady(times, first, device)):
                return times
            with one_core() if device.type == "cuda" else nullcontext(), no_garbage_collection():
                found = by_turns({name: runs[name or first]() for name in order(names, index)})
            for name, seconds in found.items():
                times[name].append(1e6 * cast("float", seconds))
    return times


def _is_unsteady(times: Mapping[str, Sequence[float]], first: str, device: torch.device) -> bool:
    """Return whether the A/A noise on a GPU is so high that studies of variants would take more rounds of calls from Python."""
    return device.type == "cuda" and stats.noise_floor(stats.ratio(times[""], times[first])) > STEADY


def _activity(trainer: Trainer, activity: Activity, rows: torch.Tensor) -> Callable[[], Iterator[float | None]]:
    """Return a function that runs a few steps of an activity. It yields ``None`` after each part, and then the seconds of one."""
    trainer.module.train(activity == "training")
    if activity != "training":
        trainer.optimizer.state.clear()
    if activity == "decoding":
        return lambda: _decode(trainer, rows[:1, :PROMPT])
    more = {} if trainer.variant == "layers" or activity == "training" else {"use_cache": False}

    def run() -> Iterator[float | None]:
        begin = _begin(trainer.device)
        for _ in range(STEPS):
            if activity == "training":
                trainer.step(rows)
            else:
                trainer.logits(rows, **more)
        wait_for(trainer.device)
        yield (time.perf_counter() - begin) / STEPS

    return run


def _decode(trainer: Trainer, prompt: torch.Tensor) -> Iterator[float | None]:
    """Decode :data:`DECODED` tokens greedily after a prompt; yield ``None`` after each part, and then the seconds of one."""
    out = trainer.logits(prompt, use_cache=True)
    timed = []
    for _ in range(DECODED // PART):
        begin = _begin(trainer.device)
        for _ in range(PART):
            token = out.logits[:, -1:].argmax(-1)
            out = trainer.logits(token, past_key_values=out.past_key_values, use_cache=True)
        wait_for(trainer.device)
        timed.append((time.perf_counter() - begin) / PART)
        yield None
    yield statistics.median(timed)


def _begin(device: torch.device) -> float:
    """Collect garbage, wait until the device has finished all work, and return the time."""
    gc.collect()
    wait_for(device)
    return time.perf_counter()


def gradients(model: LanguageModel, device: torch.device, seed: int = 0) -> Gradients:
    """Compare the gradients of all variants at the initial weights with those of plain PyTorch in float32.

    The weights of the reference are those of the variants, so rounded to bfloat16 where the model is. Weights of other seeds than
    the first are drawn on the device. In all variants and the reference the norms of heads' outputs have the epsilon
    ``model.eps_of_gradients``.
    """
    eps = model.eps_of_gradients
    rows = random_rows(model, device, seed)[:1, : model.gradient_length]
    errors: dict[str, GradientError] = {}
    missing: dict[str, Missing] = {}
    wanted: dict[str, torch.Tensor] | None = None
    loss: float | None = None
    for variant in model.names:
        if (why := absent(model, variant, device)) is not None:
            missing[variant] = why
            continue
        try:
            trainer = Trainer(model, variant, device, seed, drawn_there=seed > 0, eps=eps)
            if wanted is None:
                weights = {name: each.detach().float() for name, each in trainer.module.state_dict().items()}
                loss, wanted = _reference(weights, model, rows, eps)
            found = trainer.loss(rows)
            found.backward()
            errors[variant] = _distance(_gradient(trainer), wanted, float(found.detach()))
        except Exception as error:  # noqa: BLE001 - whatever a library raises is the variant's status
            missing[variant] = failure(error)
        trainer = None
        gc.collect()
    return Gradients(model=model.name, seed=seed, eps=eps, loss=loss, errors=errors, missing=missing)


def _reference(
    weights: dict[str, torch.Tensor], model: LanguageModel, rows: torch.Tensor, eps: float
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of plain PyTorch in float32, and its gradient by the parameters' names, without TF32."""
    leaves = {name: each.clone().requires_grad_() for name, each in weights.items()}
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        loss = plain_loss(leaves, model, rows, eps)
        found = torch.autograd.grad(loss, list(leaves.values()))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return float(loss.detach()), dict(zip(leaves, found, strict=True))


def _gradient(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the gradient by the names of a state dict. The parameters of the model are overwritten by it.

    A state dict names the parts of packed parameters as fla does.
    """
    for name, each in trainer.module.named_parameters():
        if each.grad is None:
            raise RuntimeError(f"{name} has no gradient")
        each.data = each.grad
    return {name: each.detach().float() for name, each in trainer.module.state_dict().items()}


def _distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], loss: float) -> GradientError:
    """Return the distance of a gradient from the reference, both by the names of the parameters."""
    if found.keys() != wanted.keys():
        raise RuntimeError(f"the names of the parameters differ: {sorted(found.keys() ^ wanted.keys())[:3]}")
    apart = {name: float((found[name] - wanted[name]).double().norm()) for name in wanted}
    sizes = {name: float(wanted[name].double().norm()) for name in wanted}
    own = {name: apart[name] / sizes[name] if sizes[name] else 0.0 for name in wanted}
    worst = max(own, key=lambda name: own[name])
    error = sum(each**2 for each in apart.values()) ** 0.5 / sum(each**2 for each in sizes.values()) ** 0.5
    return GradientError(error=error, loss=loss, worst=worst, worst_error=own[worst])
