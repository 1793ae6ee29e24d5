"""Tests of judging variants on the probes of their operation, and of what depends on them: tables and the choice of ``auto``.

``careless`` is a variant of ``gated_scan`` as a package ``acme`` would register it: right at T = 128 and 256, where its author
checked it, and wrong at tails, above 256 steps, for decays of -inf, and with an initial state. ``toy_sum`` is the operation of
``toy.py``; ``probed`` gives it probes for one test. ``prose.raises`` is ``pytest.raises`` that also compares the message with
the entry of this test in ``tests/snapshots/prose.txt``. A test fails if it does not compare one of its entries, and
``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``run`` runs a study on the CPU. ``ToyCall`` holds the checked arguments of ``toy_sum``. ``parallel`` is a correct variant of
``toy_sum``. ``toy_case`` returns a small case of ``toy_sum``. ``HONEST`` are the correct variants of ``toy_sum``.
"""

from __future__ import annotations

import math

import pytest
import torch

from onelaunch import dispatch
from onelaunch.device import hardware
from onelaunch.dispatch import measured
from onelaunch.errors import AdoptNotice, ArgumentError, CompileError, DriverError, UnknownVariant
from onelaunch.operation import Probe, Query, find_operation
from onelaunch.operation.probe import elsewhere, mixed_magnitudes, transposed
from onelaunch.workbench.adopt import adopt
from onelaunch.workbench.measure import rotation, sampling, timing
from onelaunch.workbench.result import ProbeReport, Result
from onelaunch.workbench.run import run_study
from onelaunch.workbench.study import Shape, Study
from onelaunch.workbench.verify import Judge, judge, run_probes
from tests.workbench.runs import run, steps, study
from tests.workbench.toy import HONEST, ToyCall, parallel, toy_case, toy_sum

GATED_SCAN = find_operation("gated_scan")


@pytest.fixture(scope="module")
def careless():
    """Register the variant ``careless``, and remove it after the tests of this file."""
    chunked = GATED_SCAN.get("chunked").run

    def run(call):
        length = call.v.shape[1]
        log_decay = call.log_decay.clamp(min=-80.0)  # wrong only where the state is so large that exp(-80) of it counts
        log_decay = torch.where(call.log_decay == -math.inf, torch.zeros_like(log_decay), log_decay)
        y, state = chunked(call._replace(log_decay=log_decay, initial_state=None))
        whole = torch.arange(length, device=y.device) < (length // 64 * 64 if length < 256 else 256)
        return y * whole[:, None], state

    run.__module__ = "acme.scan"
    GATED_SCAN.variant("careless", launches=1)(run)
    dispatch.choice.forget()
    yield "careless"
    del GATED_SCAN.variants["careless"]
    dispatch.choice.forget()


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Read tables of measured times from one empty folder, and return it."""
    monkeypatch.setattr(measured, "TABLES", tmp_path / "none")
    monkeypatch.setenv("ONELAUNCH_TABLES", str(tmp_path / "tables"))
    for cache in (measured._rows.cache_clear, dispatch.choice.forget):
        cache()
    yield tmp_path / "tables"
    for cache in (measured._rows.cache_clear, dispatch.choice.forget):
        cache()


def checked_by_its_author(lengths=(128, 256)):
    """Return a study of ``careless`` at the lengths at which it is right."""
    shapes = tuple(
        Shape(
            name=f"T{length}", dtype="float32", scale="small", sizes={"B": 2, "T": length, "V": 16},
            options={"initial_state": False, "final_state": False},
        )
        for length in lengths
    )  # fmt: skip
    return Study(
        name="careless", question="Is it faster?", operation="gated_scan", baseline="eager", variants=("eager", "careless"),
        shapes=shapes, rounds=3, criteria=(),
    )  # fmt: skip


def query(length, *flags):
    return Query("gated_scan", "cpu", torch.float32, (2, length, 16), flags=flags)


def test_a_variant_that_is_right_where_its_author_checked_it_fails_the_probes(careless, run_of_careless):
    for length in (128, 256):
        case = GATED_SCAN.case("float32", B=2, T=length, V=16, initial_state=False, final_state=False)
        assert judge(GATED_SCAN, case, variant=careless).ok
    report = run_of_careless.probes[careless]
    assert not report.met
    failed = {line.partition(",")[0] for line in report.failed}
    assert {"shorter_than_a_tile", "one_step_over_a_tile", "over_256_steps", "forgets_everything", "exactly_a_tile"} <= failed


@pytest.fixture(scope="module")
def run_of_careless(careless, tmp_path_factory):
    """Run the study of ``careless`` once for all tests, with probes of ``careless`` alone, and return its result."""

    def probe(judge, operation, name, device, directions):
        return run_probes(judge, operation, name, device, directions) if name == careless else ProbeReport(passed=1)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("careless"))
        patch.setattr(rotation, "CACHES", 0)
        patch.setattr(sampling, "CPU_SAMPLE_SECONDS", 1e-4)
        patch.setitem(timing.WARM_UP_SECONDS, "cpu", 0.0)
        patch.setenv("ONELAUNCH_COMMIT", "abc")
        result = run_study(checked_by_its_author(), device="cpu", steps=steps(probe=probe), time_cap=1.0)
    assert {cell.status for cell in result.cells} == {"ok"}
    return result


@pytest.fixture
def measured_careless(run_of_careless, tables, monkeypatch):
    """Return the result of the study of ``careless`` with ``careless`` ten times as fast as measured."""
    monkeypatch.setenv("ONELAUNCH_COMMIT", "abc")
    return run_of_careless.model_copy(update={"cells": tuple(map(sped_up, run_of_careless.cells))})


def sped_up(cell):
    """Return a cell of ``careless`` with a tenth of its times, so that a busy machine does not decide which one is faster."""
    if cell.variant != "careless":
        return cell
    timings = []
    for one in cell.timings:
        estimate = one.microseconds
        shorter = {name: getattr(estimate, name) / 10 for name in ("median", "low", "high")}
        changes = {"microseconds": estimate.model_copy(update=shorter), "rounds": tuple(value / 10 for value in one.rounds)}
        timings.append(one.model_copy(update=changes))
    return cell.model_copy(update={"timings": tuple(timings)})


def test_a_plug_in_that_fails_its_probes_is_not_adopted(measured_careless):
    assert not measured_careless.probes["careless"].met
    with pytest.warns(AdoptNotice, match="careless"):
        adopt([measured_careless])
    assert "careless" not in {dispatch.choose(query(length)).name for length in (127, 128, 129, 255, 256)}


def test_a_plug_in_checked_at_two_lengths_is_not_chosen_at_others(measured_careless):
    """Before, it was adopted and ran at 255 steps, for packed sequences and with an initial state.

    The result is as one of an older version, which asked no probes.
    """
    with pytest.warns(AdoptNotice):
        adopt([measured_careless.model_copy(update={"probes": {}})])
    assert {dispatch.choose(query(length)).name for length in (128, 256)} == {"careless"}
    others = [query(length) for length in (1, 100, 127, 129, 255, 257, 1000)]
    others += [query(128, flag) for flag in ("packed", "initial_state", "final_state")]
    assert {dispatch.choose(each).name for each in others} <= {"chunked", "eager"}
    explained = dispatch.explain(query(255))
    assert "careless was faster there" in explained.because
    v = torch.randn(2, 255, 16)
    found = GATED_SCAN(v, v.new_zeros(v.shape), torch.ones_like(v))
    torch.testing.assert_close(found, GATED_SCAN(v, v.new_zeros(v.shape), torch.ones_like(v), variant="eager"))


def test_a_table_names_the_variants_that_met_their_probes(tables, tmp_path, monkeypatch):
    """A variant that failed its probes is not named, so that it is never chosen away from its measurements."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rotation, "CACHES", 0)  # two input sets instead of as many as exceed the caches
    monkeypatch.setattr(sampling, "CPU_SAMPLE_SECONDS", 1e-4)
    monkeypatch.setitem(timing.WARM_UP_SECONDS, "cpu", 0.0)
    monkeypatch.setenv("ONELAUNCH_COMMIT", "abc")
    result = run(study())
    reports = {"eager": ProbeReport(passed=3), "parallel": ProbeReport(passed=2, failed=("T=1, forward: It raised.",))}
    path = adopt([result.model_copy(update={"probes": reports})])
    rows = measured.read(path)[2].values()
    assert [row.probes for row in rows] == [frozenset({"eager"})] * len(rows)
    assert hardware.describe("cpu").table in path.name


# Counting


@pytest.fixture
def probed():
    """Return a function that registers the probes of ``toy_sum`` for this test: the given cases or probes."""

    def register(*probes):
        toy_sum._probes = None
        toy_sum.probes(lambda: probes)

    yield register
    toy_sum._probes = None


@pytest.fixture
def variant():
    """Return a function that registers a variant of ``toy_sum`` for this test."""
    made = []

    def register(name, run, **tags):
        made.append(name)
        return toy_sum.variant(name, **tags)(run)

    yield register
    for name in made:
        toy_sum.variants.pop(name, None)


@pytest.mark.parametrize("name", HONEST)
def test_honest_variants_pass_every_probe_in_both_directions(probed, name):
    cases = [toy_case(T=1, name="one"), toy_case("float16", T=33, name="tail")]
    probed(*cases, Probe(toy_case(name="strides"), transposed("x")), Probe(toy_case(name="rows"), mixed_magnitudes("x", 0.1, 10)))
    assert run_probes(Judge(), toy_sum, name) == ProbeReport(passed=8)


def test_refusals_are_counted_apart_from_failures(probed, variant):
    picky = variant("picky", parallel, backward=False)
    picky.supports(lambda query: "takes at least two steps" if query.sizes[1] < 2 else None)
    probed(toy_case(T=1, name="one"), toy_case(T=2, name="two"))
    assert run_probes(Judge(), toy_sum, "picky") == ProbeReport(passed=1, refused=3)

    def by_contract(call):
        raise ArgumentError("T is odd; it must be even.")

    variant("by_contract", by_contract)
    report = run_probes(Judge(), toy_sum, "by_contract")
    assert report == ProbeReport(passed=0, refused=4)
    assert not report.met  # whoever refuses everything has shown nothing

    variant("at_one", lambda call: (0 * call.x, 0 * call.x[:, 0].float()) if call.x.shape[1] == 1 else parallel(call))
    report = run_probes(Judge(), toy_sum, "at_one")
    assert (report.passed, report.refused, len(report.failed)) == (2, 0, 2)
    assert all(line.startswith("one, forward") for line in report.failed)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("fell over"), SystemExit(0), AssertionError(), torch.OutOfMemoryError("no memory"),
        DriverError("cuModuleLoadData", got="CUDA_ERROR_OUT_OF_MEMORY", about="sum"), CompileError("sum", "sm_90a", log="error"),
    ],
)  # fmt: skip
def test_whatever_a_variant_raises_is_a_failure(probed, variant, error):
    def run(call):
        raise error

    variant("raising", run)
    probed(toy_case(name="any"), Probe(toy_case(name="not_taken"), refused=True))
    report = run_probes(Judge(), toy_sum, "raising")
    assert (report.passed, report.refused, len(report.failed)) == (0, 0, 3)
    assert all(type(error).__name__ in line for line in report.failed)


def test_ctrl_c_ends_the_probes(probed, variant):
    def run(call):
        raise KeyboardInterrupt

    variant("stopped", run)
    probed(toy_case(name="any"))
    with pytest.raises(KeyboardInterrupt):
        run_probes(Judge(), toy_sum, "stopped")


def test_a_variant_that_takes_the_last_stride_for_one_fails_a_transposed_probe(probed, variant):
    """Its author only ever passed contiguous tensors, as the cases do."""

    def run(call):
        x = torch.as_strided(call.x, call.x.shape, (call.x.shape[1] * call.x.shape[2], call.x.shape[2], 1))
        return parallel(ToyCall(x, call.weight))

    variant("contiguous_only", run)
    probed(Probe(toy_case(name="strides"), transposed("x")))
    report = run_probes(Judge(), toy_sum, "contiguous_only")
    assert report.failed
    assert not report.met


def test_probes_share_no_reference_with_another_probe_of_equal_sizes(probed):
    plain, scaled = toy_case(name="plain"), Probe(toy_case(name="rows"), mixed_magnitudes("x", 0.1, 10))
    probed(plain, scaled)
    shared = Judge()
    run_probes(shared, toy_sum, "parallel")
    inputs = [reference.inputs.arguments["x"] for reference in shared._references.values()]
    assert len(inputs) >= 3
    assert not all(torch.equal(each, inputs[0]) for each in inputs)


def test_an_operation_that_takes_what_it_must_refuse_fails_the_probe(probed):
    """The toy operation checks nothing, and PyTorch raises no error of a contract."""
    probed(Probe(toy_case(name="weight_elsewhere"), elsewhere("weight"), refused=True))
    (line,) = run_probes(Judge(), toy_sum, "parallel").failed
    assert line.startswith("weight_elsewhere, forward: ")


def test_an_operation_without_probes_gives_an_empty_report():
    report = run_probes(Judge(), toy_sum, "parallel")
    assert report == ProbeReport(passed=0)
    assert not report.met


def test_wrong_lists_of_probes_are_refused(probed, prose):
    probed(toy_case(name="one"), toy_case(T=1, name="one"))
    with prose.raises(ArgumentError):
        toy_sum.listed_probes()
    probed("one")
    with prose.raises(ArgumentError):
        toy_sum.listed_probes()
    with prose.raises(ArgumentError):
        toy_sum.probes(lambda: ())
    with pytest.raises(UnknownVariant):
        run_probes(Judge(), toy_sum, "none")


def test_reports_are_stored_in_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rotation, "CACHES", 0)  # two input sets instead of as many as exceed the caches
    monkeypatch.setattr(sampling, "CPU_SAMPLE_SECONDS", 1e-4)
    monkeypatch.setitem(timing.WARM_UP_SECONDS, "cpu", 0.0)
    result = run(study())
    assert '"probes"' not in result.stored()
    whole = result.model_copy(update={"probes": {"eager": ProbeReport(passed=3, failed=("one: wrong",))}})
    path = whole.save(tmp_path / "whole.json")
    assert Result.load(path) == whole
