"""Predicted values of a study beside the measured ones: by which factor each is off, and in which direction.

``report/predictions.py`` shows what :func:`compared_predictions` returns, and the sinks of ``workbench/sinks`` log it. Nothing of
it decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onelaunch.errors import OneLaunchError
from onelaunch.workbench.decide.criteria import finding_at
from onelaunch.workbench.decide.judging import Finding
from onelaunch.workbench.decide.measured import judged
from onelaunch.workbench.result import Estimate, Result
from onelaunch.workbench.study import Prediction

Came = Literal["as predicted", "better", "worse", "not measured"]
"""Outcome of a prediction at a shape.

``as predicted``: The measured interval, widened by the A/A noise, holds the predicted value. ``better`` and ``worse``: It does
not, and the measured value lies on that side of it by the measure's own direction.
"""


@dataclass(frozen=True)
class Comparison:
    """A prediction beside what was measured at one shape."""

    prediction: Prediction
    shape: str
    came: Came
    value: Estimate | None = None
    """Measured value, in the unit of the measure; ``None`` if there is none."""
    why_none: str = ""
    """Reason why there is no measured value."""
    reversed: bool = False
    """True if a ratio was predicted above 1 and measured below 1, or the other way round, beyond the noise: the variant that was
    predicted to win loses."""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted value, or ``None`` without a measured value."""
        return None if self.value is None else self.value.median / self.prediction.value

    @property
    def factor(self) -> float | None:
        """Factor, at least 1, by which the prediction is off in either direction; infinite for a measured value of 0."""
        if self.ratio is None:
            return None
        return max(self.ratio, 1 / self.ratio) if self.ratio > 0 else float("inf")


def compared_predictions(result: Result) -> tuple[Comparison, ...]:
    """Return a comparison for each prediction of a study and each shape that it is about, in declared order."""
    return tuple(
        _compared(result, prediction, shape.name)
        for prediction in result.study.predictions
        for shape in result.study.shapes_of(prediction.criterion())
    )


def _compared(result: Result, prediction: Prediction, shape: str) -> Comparison:
    criterion = prediction.criterion()
    try:
        finding = finding_at(result, criterion, result.study.shape(shape))
    except OneLaunchError as error:  # the operation or a variant is not installed here
        return Comparison(prediction, shape, "not measured", why_none=str(error))
    if finding.value is None:
        return Comparison(prediction, shape, "not measured", why_none=finding.brief or finding.text)
    low, high = _range(finding, finding.value)
    came: Came = "as predicted"
    if not low <= prediction.value <= high:
        more_is_better = judged(criterion).better == "higher"
        came = "better" if (finding.value.median > prediction.value) == more_is_better else "worse"
    turned = (high < 1 < prediction.value or prediction.value < 1 < low) and judged(criterion).unit == "x"
    # A measure of one variant, such as a time over the roofline bound, compares it with no other that could win.
    return Comparison(prediction, shape, came, finding.value, reversed=turned and judged(criterion).alone is None)


def _range(finding: Finding, value: Estimate) -> tuple[float, float]:
    """Return the interval of a measured value, widened by the factor of the A/A noise on both sides."""
    noise = finding.noise or 1.0
    return min(value.low, value.median / noise), max(value.high, value.median * noise)
