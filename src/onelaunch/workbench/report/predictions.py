"""Section of a report with the declared predictions beside what was measured, and how wrong they were.

``details.py`` takes the section, ``terminal.py`` prints it below the criteria, and command ``onelaunch study show`` prints
:func:`predicted`.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from onelaunch.wording import listing
from onelaunch.workbench import quantities as q
from onelaunch.workbench.decide.measured import judged
from onelaunch.workbench.decide.predictions import Comparison, compared_predictions
from onelaunch.workbench.report.summary import Section, direction_words, selector
from onelaunch.workbench.report.tables import Table, columns
from onelaunch.workbench.result import Result
from onelaunch.workbench.study import Prediction, Study

_INTRODUCTION = (
    "Values that were expected, as the study declares them, beside those that this run measured. They decide nothing. "
    "A value came as predicted if the measured interval, widened by the A/A noise, holds it."
)
"""Text above the table of predictions."""


def predictions(result: Result) -> Section:
    """Return the section with a row for each prediction and shape; without predictions it is empty."""
    comparisons = compared_predictions(result)
    if not comparisons:
        return Section("Predictions")
    heads = columns("prediction", "by", "at", ">measured", ">measured / predicted", "came out", "?why")
    rows = tuple(
        (
            predicted(result.study, each.prediction),
            each.prediction.by,
            each.shape,
            each.why_none if each.value is None else judged(each.prediction.criterion()).amount(each.value),
            q.NONE if each.ratio is None else q.ratio(each.ratio),
            outcome_words(each),
            each.prediction.why,
        )
        for each in comparisons
    )
    return Section("Predictions", (_INTRODUCTION, tally(comparisons)), (Table("", heads, rows),))


def predicted(study: Study, prediction: Prediction) -> str:
    """Return what a prediction says, in words, such as ``semi_fused is 1.30x as fast as three_launch (forward, cold)``."""
    criterion = prediction.criterion()
    measure = judged(criterion)
    of, over = selector(prediction.of), selector(study.over(criterion))
    said = measure.told.format(of=of, over=over, amount=f"{q.number(prediction.value)}{measure.unit}")
    regime = f", {prediction.regime}" if measure.timed else ""
    return f"{said} ({direction_words(prediction.direction)}{regime})"


def outcome_words(comparison: Comparison) -> str:
    """Return how a prediction came out, such as ``as predicted`` or ``worse: predicted 1.40x too high``."""
    if comparison.ratio is None or comparison.factor is None or comparison.came == "as predicted":
        return q.NONE if comparison.value is None else comparison.came
    side = "low" if comparison.ratio > 1 else "high"
    turned = ", the other side wins" if comparison.reversed else ""
    return f"{comparison.came}: predicted {q.ratio(comparison.factor)} too {side}{turned}"


def tally(comparisons: Sequence[Comparison]) -> str:
    """Return how many predicted values came out in which way, and by which factor they were off, in one or two sentences."""
    counts = Counter(each.came for each in comparisons)
    parts = [f"{counts[came]} came out {came}" for came in ("as predicted", "better", "worse") if counts[came]]
    parts += [f"{counts['not measured']} {'was' if counts['not measured'] == 1 else 'were'} not measured"] * bool(
        counts["not measured"]
    )
    said = f"Of {q.plural(len(comparisons), 'predicted value')}, {listing(parts)}."
    factors = [(each.factor, each) for each in comparisons if each.factor is not None]
    if not factors:
        return said
    if len(factors) == 1:
        return f"{said} The measured one is off by a factor of {q.ratio(factors[0][0])}."
    most, furthest = max(factors, key=lambda each: each[0])
    middle = q.ratio(statistics.median(factor for factor, _ in factors))
    return f"{said} The median of the factors by which they are off is {middle}, the largest {q.ratio(most)} at {furthest.shape}."
