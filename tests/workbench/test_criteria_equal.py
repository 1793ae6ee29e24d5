"""Tests that times which differ by less than the least noise are equal, where a criterion asks for no loss.

Studies and times are those of ``ladder.py``: ``one`` is compared with ``three``.
"""

from __future__ import annotations

import pytest

from onelaunch.workbench.study import Criterion
from tests.workbench.ladder import ok_cell
from tests.workbench.test_criteria import SWEEP, faster, outcome


@pytest.mark.parametrize(
    ("time", "spread", "floor", "status"),
    [
        (14.9, 0.0, 1.01, "equal"),  # 1.007x
        (15.1, 0.0, 1.01, "equal"),  # 0.993x
        (14.8, 0.0, 1.01, "met"),  # 1.0135x
        (14.9, 0.006, 1.01, "equal"),  # 1.007x, no loss in the interval, whose upper end is above 1.01x
        (15.05, 0.02, 1.01, "inconclusive"),  # the interval has a loss of more than 1 %
        (15.2, 0.0, 1.01, "missed"),  # 0.987x
        (15.0, 0.03, 1.01, "inconclusive"),  # the interval reaches beyond the noise
        (14.9, 0.0, 1.02, "inconclusive"),  # another run of the same code differs by as much
        (14.9, 0.0, 2.0, "inconclusive"),
    ],
)
def test_no_loss_within_the_least_noise_is_equal(time, spread, floor, status):
    cells = ok_cell("three", 15.0), ok_cell("one", time, spread=spread)
    for criterion in (faster(1.0), Criterion(name="no slower", measure="time_ratio", of="one", over="three", at_most=1.0)):
        found = outcome(criterion, *cells, floor=floor)
        assert found.status == status, found.evidence
    assert outcome(faster(1.007), *cells, floor=floor).status != "equal"


def test_equal_at_some_shapes_and_met_at_the_others_is_equal(prose):
    cells = [ok_cell("three", 15.0, of=shape) for shape in SWEEP]
    cells += [ok_cell("one", 10.0 if index else 15.05, of=shape) for index, shape in enumerate(SWEEP)]
    found = outcome(faster(1.0), *cells, shapes=SWEEP)
    assert found.status == "equal"
    prose(found.evidence)
    assert outcome(faster(1.0, in_at_least=4), *cells, shapes=SWEEP).status == "met"
    cells[-1] = ok_cell("one", 16.0, of=SWEEP[-1])
    assert outcome(faster(1.0), *cells, shapes=SWEEP).status == "missed"
