"""Section of a report with the declared predictions beside what was measured.

``details.py`` takes the section, and command ``onelaunch study show`` prints :func:`predicted`.
"""

from __future__ import annotations

from onelaunch.errors import OneLaunchError
from onelaunch.workbench import quantities as q
from onelaunch.workbench.decide.criteria import finding_at
from onelaunch.workbench.decide.measured import judged
from onelaunch.workbench.report.summary import Section, direction_words, selector
from onelaunch.workbench.report.tables import Table, columns
from onelaunch.workbench.result import Result
from onelaunch.workbench.study import Criterion, Prediction, Study

_INTRODUCTION = "Values that were expected, as the study declares them, beside those that this run measured. They decide nothing."
"""Text above the table of predictions."""


def predictions(result: Result) -> Section:
    """Return the section with a row for each prediction and shape; without predictions it is empty."""
    rows = tuple(row for prediction in result.study.predictions for row in _rows(result, prediction))
    if not rows:
        return Section("Predictions")
    heads = columns("prediction", "by", "at", ">measured", ">measured / predicted", "why")
    return Section("Predictions", (_INTRODUCTION,), (Table("", heads, rows),))


def predicted(study: Study, prediction: Prediction) -> str:
    """Return what a prediction says, in words, such as ``semi_fused is 1.30x as fast as three_launch (forward, cold)``."""
    criterion = prediction.criterion()
    measure = judged(criterion)
    of, over = selector(prediction.of), selector(study.over(criterion))
    said = measure.told.format(of=of, over=over, amount=f"{q.number(prediction.value)}{measure.unit}")
    regime = f", {prediction.regime}" if measure.timed else ""
    return f"{said} ({direction_words(prediction.direction)}{regime})"


def _rows(result: Result, prediction: Prediction) -> list[tuple[str, ...]]:
    criterion = prediction.criterion()
    said = predicted(result.study, prediction)
    return [
        (said, prediction.by, shape.name, *_measured(result, criterion, shape.name, prediction.value), prediction.why)
        for shape in result.study.shapes_of(criterion)
    ]


def _measured(result: Result, criterion: Criterion, shape: str, value: float) -> tuple[str, str]:
    """Return the measured value at a shape, or why there is none, and its ratio to the predicted value."""
    try:
        finding = finding_at(result, criterion, result.study.shape(shape))
    except OneLaunchError as error:  # the operation or a variant is not installed here
        return str(error), q.NONE
    if finding.value is None:
        return finding.brief or finding.text, q.NONE
    return judged(criterion).amount(finding.value), q.ratio(finding.value.median / value)
