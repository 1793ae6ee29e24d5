"""Tests of the time and money that a result holds: what counts, sums of resumed runs, and results from before it was stored.

The fixture ``clock`` replaces ``time.monotonic`` in the meter by a number of seconds that tests set.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from onelaunch.workbench import quantities as q
from onelaunch.workbench import spending
from onelaunch.workbench.decide.recompute import recompute
from onelaunch.workbench.report import markdown
from onelaunch.workbench.result import Result, Spent
from onelaunch.workbench.spending import Meter, with_lost_turn
from tests.workbench import results, toy
from tests.workbench.runs import interrupted_at, quick, run, study  # noqa: F401 - the fixture applies to all tests here

EARLIER = Spent(wall_seconds=3600.0, device_seconds=1000.0, price_per_hour=3.0, cost=3.0)


@pytest.fixture
def clock(monkeypatch):
    """Return the clock of the meter, which begins at 100 seconds."""
    fake = SimpleNamespace(now=100.0)
    monkeypatch.setattr(spending.time, "monotonic", lambda: fake.now)
    return fake


def holding(spent):
    """Return a made-up result that holds what was spent."""
    return results.nothing_ran().model_copy(update={"spent": spent})


def test_device_time_is_that_of_turns(clock):
    told = []
    meter = Meter()
    turn = meter.watching(lambda *facts, **more: told.append((*facts, more)))
    clock.now += 5.0
    turn("first", "forward", "one", control=False, step="verified")
    clock.now += 2.0
    turn("first", "forward", None, control=False, step="")
    clock.now += 3.0
    assert meter.spent() == Spent(wall_seconds=10.0, device_seconds=2.0)
    assert [each[2] for each in told] == ["one", None]
    assert told[0][3] == {"control": False, "step": "verified"}


def test_a_resumed_run_adds_up(clock):
    meter = Meter(began=100.0, earlier=holding(EARLIER))
    clock.now += 1800.0
    assert meter.spent() == Spent(wall_seconds=5400.0, device_seconds=1000.0, price_per_hour=3.0, cost=4.5)


@pytest.mark.parametrize(("before", "cost"), [(EARLIER, 4.0), (Spent(wall_seconds=3600.0, device_seconds=0.0), 3.0)])
def test_a_new_price_holds_for_the_new_part_and_for_parts_without_one(clock, before, cost):
    meter = Meter(began=100.0, price_per_hour=2.0, earlier=holding(before))
    clock.now += 1800.0
    assert meter.spent().cost == cost


def test_a_new_process_goes_on_from_what_the_last_one_reported(clock):
    kept = with_lost_turn(holding(Spent(wall_seconds=50.0, device_seconds=20.0)), 7.0)
    assert kept is not None
    meter = Meter(began=0.0, kept=kept)
    assert meter.spent() == Spent(wall_seconds=100.0, device_seconds=27.0)
    assert with_lost_turn(None, 7.0) is None


def test_a_run_holds_what_it_took_and_its_resumption_adds_to_it(tmp_path):
    path = tmp_path / "result.json"
    assert toy.toy_sum.variants  # the import of toy registers the operation
    first = run(study(), save_to=path, steps=interrupted_at("begin"), price_per_hour=3600.0)
    assert first.interrupted
    assert first.spent is not None
    assert 0 < first.spent.device_seconds < first.spent.wall_seconds
    assert first.spent.cost == pytest.approx(first.spent.wall_seconds)
    second = run(study(), save_to=path, resume=True)
    assert second.spent is not None
    assert second.spent.wall_seconds > first.spent.wall_seconds
    assert second.spent.device_seconds > first.spent.device_seconds
    assert second.spent.price_per_hour == 3600.0
    assert second.spent.cost == pytest.approx(second.spent.wall_seconds)
    assert Result.load(path) == second


def test_results_without_it_are_read_and_written_as_before(tmp_path):
    old = results.proceed_on_gpu()
    text = old.save(tmp_path / "old.json").read_text()
    assert "spent" not in text
    loaded = Result.load(tmp_path / "old.json")
    assert loaded.stored() == text
    assert loaded.spent is None
    assert "wall time" not in markdown.render(loaded)


def test_what_was_spent_decides_nothing_and_is_reported():
    old = results.proceed_on_gpu()
    new = old.model_copy(update={"spent": EARLIER})
    assert new.study.digest() == old.study.digest()
    one, other = recompute(old), recompute(new)
    assert isinstance(one, Result)
    assert isinstance(other, Result)
    assert one.decision == other.decision
    text = markdown.render(new)
    assert "took 1 h 00 min (16 min 40 s of the device, cost 3.00)" in text
    assert "3.00, at 3.00 an hour of wall time" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 s"), (0.4123, "0.412 s"), (47.31, "47.3 s"), (200.0, "3 min 20 s"), (7500.0, "2 h 05 min")]
)
def test_durations_are_formatted(seconds, text):
    assert q.duration(seconds) == text


@pytest.mark.parametrize(("amount", "text"), [(0.0, "0.00"), (12.345, "12.35"), (0.00123, "0.0012")])
def test_amounts_of_money_are_formatted(amount, text):
    assert q.money(amount) == text
