"""Judge the criteria of a study of models from its measurements.

A speed-up is judged with its interval and the noise of the baseline's second run in each round, and the error of a gradient with
the interval of the mean over the seeds; other measures are exact numbers.
Where losses are further apart than a bound allows, the controls of losses say whether that tells anything: runs of the baseline
from weights one rounding away from those of its first run.
"""

from __future__ import annotations

import itertools
import math
import statistics

from onelaunch.model_studies.declare import ModelCriterion, ModelStudy
from onelaunch.model_studies.result import Alone, Gradients, Missing, ModelOutcome, ModelResult, Timed, Training
from onelaunch.workbench import quantities as q
from onelaunch.workbench import stats
from onelaunch.workbench.result import CriterionStatus
from onelaunch.workbench.stored import Estimate

MOST_SPEEDUP_NOISE = 1.05
"""Largest A/A noise, as a factor, with which a speed-up can be met by ``within_noise``.

The same noise is allowed for the eager calls of the study everyday-calls (``most_noise``).
"""

MOST_GRADIENT_NOISE = 1.1
"""Largest noise with which a ``gradient_error_ratio`` can be met by ``within_noise``: upper end of its interval over its mean.

The noisier a comparison is, the larger a ratio would be met. One that cannot see a difference of 10 % decides nothing.
"""


def judged(result: ModelResult) -> ModelResult:
    """Return the result with an outcome for each criterion."""
    return result.model_copy(update={"outcomes": tuple(judge(result, criterion) for criterion in result.study.criteria)})


def judge(result: ModelResult, criterion: ModelCriterion) -> ModelOutcome:
    """Judge one criterion."""
    judges = {"speedup": _speedup, "peak_memory_ratio": _alone, "first_step_seconds": _alone, "gradient_error_ratio": _gradients}
    return judges.get(criterion.measure, _losses)(result, criterion, result.study.over(criterion))


def _speedup(result: ModelResult, criterion: ModelCriterion, over: str) -> ModelOutcome:
    timed = result.find("timed", criterion.model, criterion.activity)
    if not isinstance(timed, Timed) or not timed.rounds.get(criterion.of) or not timed.rounds.get(over):
        return _not_measured(criterion, _why(timed, criterion.of, over))
    mine, theirs = timed.rounds[criterion.of], timed.rounds[over]
    ratio, noise = stats.ratio(theirs, mine), timed.noise()
    status = _judge_ratio(ratio, criterion, noise)
    medians = " against ".join(q.time(statistics.median(each)) for each in (mine, theirs))
    interval = f"{ratio.low:.3g} to {ratio.high:.3g} in {ratio.samples} rounds"
    text = f"{criterion.of} is {ratio.median:.3g}x as fast as {over} ({interval}, {medians}, A/A noise {noise:.3g})"
    return ModelOutcome(criterion=criterion, status=status, evidence=f"{text}, {criterion.bound} was asked", value=ratio)


def _judge_ratio(ratio: Estimate, criterion: ModelCriterion, noise: float) -> CriterionStatus:
    """Judge a speed-up. Without ``within_noise`` it must lie beyond the bound by more than the noise, on either side.

    With it, the noise must be at most :data:`MOST_SPEEDUP_NOISE`.
    """
    bound = criterion.at_least or 1.0
    if ratio.high < bound and ratio.median < bound / noise:
        return "missed"
    if criterion.within_noise:
        return "met" if noise <= MOST_SPEEDUP_NOISE and ratio.median >= bound / noise else "inconclusive"
    return "met" if ratio.low >= bound and ratio.median >= bound * noise else "inconclusive"


def _alone(result: ModelResult, criterion: ModelCriterion, over: str) -> ModelOutcome:
    mine, theirs = (result.find("alone", criterion.model, variant) for variant in (criterion.of, over))
    if not isinstance(mine, Alone) or mine.missing:
        return _not_measured(criterion, _why(mine, criterion.of))
    if criterion.measure == "first_step_seconds":
        seconds = q.duration(mine.first_step_seconds)
        if not mine.empty_caches:
            return _not_measured(criterion, f"the first step took {seconds}, and not with empty caches")
        return _exact(criterion, mine.first_step_seconds, f"the first training step of {criterion.of} takes {seconds}")
    if not isinstance(theirs, Alone) or theirs.missing:
        return _not_measured(criterion, _why(theirs, over))
    if not mine.peak_bytes or not theirs.peak_bytes:
        return _not_measured(criterion, "peak memory is measured on a GPU alone")
    value = mine.peak_bytes / theirs.peak_bytes
    amounts = f"{q.size(mine.peak_bytes)} against {q.size(theirs.peak_bytes)}"
    return _exact(criterion, value, f"{criterion.of} takes {value:.3g}x the peak memory of {over} ({amounts})")


def _gradients(result: ModelResult, criterion: ModelCriterion, over: str) -> ModelOutcome:
    """Judge the error of a gradient. One seed gives a number without an interval; several are judged by :func:`_judge_mean`."""
    pairs: list[tuple[float, float]] = []
    for seed in range(result.study.model(criterion.model).gradient_seeds):
        found = result.find("gradients", criterion.model, "", seed)
        if not isinstance(found, Gradients) or criterion.of not in found.errors or over not in found.errors:
            which = f"seed {seed}: " if seed else ""
            return _not_measured(criterion, f"{which}{_why(found, criterion.of, over)}")
        pairs.append((found.errors[criterion.of].error, found.errors[over].error))
    if not all(0 < theirs < math.inf for _, theirs in pairs):
        return _not_measured(criterion, f"the gradient of {over} has no error to compare with")
    mine, theirs = (math.sqrt(statistics.fmean(error**2 for error in side)) for side in zip(*pairs, strict=True))
    text = f"the gradient of {criterion.of} is {mine:.3e} off, that of {over} {theirs:.3e}"
    if len(pairs) == 1 or not all(0 < error < math.inf for error, _ in pairs):
        return _exact(criterion, mine / theirs, f"{text}: {mine / theirs:.3g}x")
    ratio = stats.mean_ratio(*zip(*pairs, strict=True))
    each = [of / other for of, other in pairs]
    text += f" (root mean squares over {len(pairs)} seeds): {ratio.median:.3g}x in the geometric mean of the seeds' ratios"
    text += f" ({ratio.low:.3g} to {ratio.high:.3g}; {min(each):.3g} to {max(each):.3g} at each), {criterion.bound} was asked"
    if criterion.within_noise:
        noise, most = ratio.high / ratio.median, MOST_GRADIENT_NOISE
        text += f" within the interval's factor of {noise:.3g}"
        text += f", which is above {most:g} and too wide to meet it" if noise > most else f" (at most {most:g})"
    return ModelOutcome(criterion=criterion, status=_judge_mean(ratio, criterion), evidence=text, value=ratio)


def _judge_mean(ratio: Estimate, criterion: ModelCriterion) -> CriterionStatus:
    """Judge the mean of a gradient's error ratios over several seeds, against an upper bound.

    It is missed if its whole interval is above the bound. Without ``within_noise`` it is met if the whole interval is at most
    the bound. With ``within_noise``, the noise is the upper end of the interval over the mean. The ratio is met if the mean is at
    most the bound times the noise, and the noise is at most :data:`MOST_GRADIENT_NOISE`. So a mean that is met may exceed the
    bound by up to 10 %, and the upper end of its interval by up to 21 %.
    """
    bound = criterion.at_most or 0.0
    if ratio.low > bound:
        return "missed"
    if criterion.within_noise:
        noise = ratio.high / ratio.median
        return "met" if noise <= MOST_GRADIENT_NOISE and ratio.median <= bound * noise else "inconclusive"
    return "met" if ratio.high <= bound else "inconclusive"


def _losses(result: ModelResult, criterion: ModelCriterion, over: str) -> ModelOutcome:
    pairs: list[tuple[Training, Training]] = []
    for seed in result.study.model(criterion.model).seeds:
        runs = [result.find("training", criterion.model, variant, seed) for variant in (criterion.of, over)]
        for run, variant in zip(runs, (criterion.of, over), strict=True):
            if not isinstance(run, Training) or run.missing:
                return _not_measured(criterion, f"seed {seed}: {_why(run, variant)}")
        pairs.append((runs[0], runs[1]))  # pyrefly: ignore[bad-argument-type]
    if {run.text for pair in pairs for run in pair} != {pairs[0][0].text}:
        return _not_measured(criterion, "the runs did not train on the same text")
    seeds = q.plural(len(pairs), "seed")
    if criterion.measure == "final_loss_ratio":
        mine, theirs = (statistics.fmean(each.final for each in side) for side in zip(*pairs, strict=True))
        value = mine / theirs
        spread = max(run.final for _, run in pairs) - min(run.final for _, run in pairs)
        apart = f"{seeds}, among which {over} varies by {spread:.4f}" if len(pairs) > 1 else seeds
        text = f"the final loss of {criterion.of} is {mine:.4f}, that of {over} {theirs:.4f} ({apart})"
        return _near(result, criterion, value, text)
    value = max(distance for of, other in pairs for distance in of.apart(other))
    text = f"the losses of {criterion.of} and {over} are at most {100 * value:.2g} % apart ({seeds})"
    if criterion.measure == "loss_distance_over_control":
        return _over_control(result, criterion, value, text)
    return _near(result, criterion, value, text)


def _near(result: ModelResult, criterion: ModelCriterion, value: float, text: str) -> ModelOutcome:
    """Judge a distance of losses by its bound, and say how far apart runs of the baseline are (the controls of losses).

    These are its first run and the controls, each from weights one rounding away from those of the first run. Where the distance
    is above the bound and no larger than the largest between two of them, a rounding of the weights moves the losses as much as
    the variant does: the outcome is inconclusive. The mean of a final loss over several seeds is held to that distance divided by
    the square root of their number, as each control is one run.
    """
    outcome = _exact(criterion, value, text)
    model = result.study.model(criterion.model)
    baseline, seed, final = model.names[0], model.seeds[0], criterion.measure == "final_loss_ratio"
    first, controls = result.training(model.name, baseline, seed), result.controls(model.name)
    if first is None or not controls or any(each.text != first.text for each in controls):
        return outcome
    pairs = itertools.combinations([first, *controls], 2)
    distances = [abs(other.final / one.final - 1) if final else max(other.apart(one)) for one, other in pairs]
    distance, count = max(distances), len(model.seeds)
    noise = distance / math.sqrt(count) if final else distance
    mean = f", which is {100 * noise:.2g} % for a mean over {count} seeds" if final and count > 1 else ""
    if len(controls) == 1:
        apart = f"two runs of {baseline} from weights one rounding apart differ by {100 * distance:.2g} %{mean}"
    else:
        median = 100 * statistics.median(distances)
        runs = f"{len(controls)} control runs of {baseline} from weights one rounding away and its first run"
        apart = f"{runs} differ from one another by at most {100 * distance:.2g} %{mean}, in the median by {median:.2g} %"
    noisy = outcome.status == "missed" and value <= (1 + noise if final else noise)
    status: CriterionStatus = "inconclusive" if noisy else outcome.status
    return outcome.model_copy(update={"status": status, "evidence": f"{outcome.evidence}; {apart}"})


def _over_control(result: ModelResult, criterion: ModelCriterion, value: float, text: str) -> ModelOutcome:
    """Judge a distance of losses relative to the largest between two runs of the baseline, its first run and its controls.

    It is not measured with fewer than two controls, since one pair of runs is too small a sample for a largest distance. Nor is
    it before all declared controls are finished, since the largest distance can only grow with each.
    """
    model = result.study.model(criterion.model)
    baseline = model.names[0]
    first, controls = result.training(model.name, baseline, model.seeds[0]), result.controls(model.name)
    if first is None:
        return _not_measured(criterion, f"{baseline} has no finished run with seed {model.seeds[0]}")
    if len(controls) < max(2, model.controls):
        asked = "at least two control runs, and all that are declared"
        return _not_measured(criterion, f"it needs {asked}: {len(controls)} of {model.controls} are finished")
    if any(each.text != first.text for each in controls):
        return _not_measured(criterion, "the runs did not train on the same text")
    pairs = list(itertools.combinations([first, *controls], 2))
    largest = max(max(other.apart(one)) for one, other in pairs)
    if not largest:
        return _not_measured(criterion, f"the runs of {baseline} do not differ, so there is no distance to compare with")
    runs = f"two of {len(controls) + 1} runs of {baseline} from weights one rounding apart at most {100 * largest:.2g} %"
    return _exact(criterion, value / largest, f"{text}, and {runs} ({len(pairs)} pairs): {value / largest:.3g}x")


def _exact(criterion: ModelCriterion, value: float, text: str) -> ModelOutcome:
    """Judge a number without an interval against an upper bound."""
    status: CriterionStatus = "met" if value <= (criterion.at_most or 0.0) else "missed"
    exact = Estimate(median=value, low=value, high=value, samples=1)
    return ModelOutcome(criterion=criterion, status=status, evidence=f"{text}, {criterion.bound} was asked", value=exact)


def _not_measured(criterion: ModelCriterion, why: str) -> ModelOutcome:
    return ModelOutcome(criterion=criterion, status="not_measured", evidence=f"not measured: {why}")


def _why(found: Alone | Timed | Gradients | Training | None, *variants: str) -> str:
    """Return why a measurement does not have the variants, as a clause."""
    missing = getattr(found, "missing", None)
    if isinstance(missing, Missing):
        return f"{variants[0]}: {missing.reason}"
    reasons = [f"{variant}: {missing[variant].reason}" for variant in variants if missing and variant in missing]
    return "; ".join(reasons) or "it did not run"


def summary(result: ModelResult) -> str:
    """Return how many criteria have which status, in a sentence."""
    return _counted(result.study, [outcome.status for outcome in result.outcomes])


def _counted(study: ModelStudy, statuses: list[CriterionStatus]) -> str:
    others = [f"{statuses.count(status)} {status.replace('_', ' ')}" for status in dict.fromkeys(statuses) if status != "met"]
    more = f" ({', '.join(others)})" if others else ""
    return f"{statuses.count('met')} of {q.plural(len(study.criteria), 'criterion', 'criteria')} met{more}"
