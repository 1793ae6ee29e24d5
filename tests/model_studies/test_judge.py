"""Tests of the judgement of a study of models, on made-up measurements, and of declarations and files that are refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from onelaunch.errors import ResultCorrupt, ResultMissing, StudyError, UnknownStudy
from onelaunch.model_studies.build import example, random_rows
from onelaunch.model_studies.declare import ModelStudy, find_model_study
from onelaunch.model_studies.judge import judge, judged, summary
from onelaunch.model_studies.report import overview_entry, tables, to_document
from onelaunch.model_studies.result import Alone, GradientError, Gradients, ModelResult, Timed, Training
from onelaunch.model_studies.run import provenance
from onelaunch.workbench.result import EarlierCommit
from onelaunch.workbench.study.read import find_study
from tests.model_studies import tiny


def result(*measurements, **changes):
    study = tiny.study(**changes)
    run = provenance(study.rounds, tiny.CPU, "small", "command")
    return ModelResult(study=study, study_digest=study.digest(), provenance=run, measurements=measurements)


def criterion(found, name, **changes):
    return next(each for each in found.study.criteria if each.name == name).model_copy(update=changes)


def timed(ours, theirs, again):
    rounds = {"fla": theirs, "accelerated": ours}
    return result(Timed(model="tiny", activity="training", rounds=rounds, again=again))


@pytest.mark.parametrize(
    ("ours", "within", "status"),
    [(80.0, False, "met"), (99.5, False, "inconclusive"), (99.5, True, "met"), (101.0, True, "met"), (120.0, True, "missed")],
)
def test_a_speedup_is_judged_with_the_noise(ours, within, status):
    """The second run of the baseline takes 2 % longer, so differences of up to 2 % say nothing."""
    found = timed((ours,) * 5, (100.0,) * 5, (102.0,) * 5)
    outcome = judge(found, criterion(found, "faster", at_least=1.0, within_noise=within))
    assert outcome.status == status
    assert outcome.value.median == pytest.approx(100 / ours)
    assert "A/A noise 1.02" in outcome.evidence


@pytest.mark.parametrize(("again", "status"), [(105.0, "met"), (106.0, "inconclusive")])
def test_no_loss_within_a_large_noise_is_not_met(again, status):
    found = timed((103.0,) * 5, (100.0,) * 5, (again,) * 5)
    assert judge(found, criterion(found, "faster", at_least=1.0, within_noise=True)).status == status


@pytest.mark.parametrize(("ours", "status"), [(90, "met"), (91, "missed")])
def test_peak_memory_is_compared(ours, status):
    alone = [Alone(model="tiny", variant=name, peak_bytes=peak) for name, peak in (("fla", 100), ("accelerated", ours))]
    found = result(*alone)
    assert judge(found, criterion(found, "memory")).status == status


@pytest.mark.parametrize(("seconds", "status"), [(29.0, "met"), (31.0, "missed")])
def test_a_first_step_counts_with_empty_caches_alone(seconds, status):
    first = Alone(model="tiny", variant="accelerated", first_step_seconds=seconds, empty_caches=True)
    found = result(first)
    assert judge(found, criterion(found, "first")).status == status
    found = result(first.model_copy(update={"empty_caches": False}))
    assert judge(found, criterion(found, "first")).status == "not_measured"


def test_a_report_says_what_was_left_to_the_library():
    left = {"refused": ("layers.0: it has hooks",), "fallbacks": {"cu_seqlens is given": 2}}
    text = to_document(judged(result(Alone(model="tiny", variant="accelerated", **left))), "results/x.json")
    assert "Left to the library in tiny: layers.0: it has hooks; 2 calls: cu" in text


def runs(ours, theirs, text="a"):
    return [
        Training(model="tiny", variant=variant, seed=seed, losses=losses, text=text)
        for variant, losses in (("fla", theirs), ("accelerated", ours))
        for seed in (0, 1)
    ]


def test_losses_are_compared_at_each_tenth_and_at_the_end():
    theirs = tuple(3.0 - 0.1 * step for step in range(20))
    ours = (*theirs[:9], theirs[9] * 1.004, *theirs[10:])  # the step at the fifth tenth
    found = result(*runs(ours, theirs))
    assert judge(found, criterion(found, "losses")).value.median == pytest.approx(0.004)
    assert judge(found, criterion(found, "losses")).status == "met"
    assert judge(found, criterion(found, "losses", at_most=0.003)).status == "missed"
    assert judge(found, criterion(found, "end")).value.median == 1.0
    late = result(*runs((*theirs[:-1], theirs[-1] * 1.01), theirs))
    assert judge(late, criterion(late, "end")).status == "missed"
    part = result(*runs(ours, theirs)[:3])
    assert judge(part, criterion(part, "end")).status == "not_measured"
    first, *rest = runs(ours, theirs)
    mixed = result(first.model_copy(update={"text": "b"}), *rest)
    assert "same text" in judge(mixed, criterion(mixed, "end")).evidence


@pytest.mark.parametrize(
    ("ours", "control", "status"),
    [
        (1.004, 1.0, "met"),
        (1.004, 1.04, "met"),
        (1.02, 1.04, "inconclusive"),
        (1.02, 0.96, "inconclusive"),
        (1.02, 1.01, "missed"),
        (1.02, None, "missed"),
    ],
)
@pytest.mark.parametrize("name", ["losses", "end"])
def test_losses_no_further_apart_than_two_runs_of_the_library_tell_nothing(name, ours, control, status):
    """The control and our variant differ from fla's run by a factor at every step. The bound is 1.005.

    A final loss is a mean over two seeds, so the control's distance counts divided by the root of 2.
    """
    theirs = tuple(3.0 - 0.1 * step for step in range(20))
    measured = runs(tuple(ours * loss for loss in theirs), theirs)
    if control is not None:
        again = tuple(control * loss for loss in theirs)
        measured.append(measured[0].model_copy(update={"losses": again, "control": True, "perturbation": 2.0**-9}))
    found = result(*measured)
    outcome = judge(found, criterion(found, name))
    assert outcome.status == status
    assert outcome.value.median == pytest.approx(ours if name == "end" else ours - 1)
    if control is not None:
        assert f"one rounding apart differ by {100 * abs(control - 1):.2g} %" in outcome.evidence
        mean = f"which is {100 * abs(control - 1) / 2**0.5:.2g} % for a mean over 2 seeds"
        assert (mean in outcome.evidence) == (name == "end")


@pytest.mark.parametrize(
    ("ours", "factors", "status"),
    [
        (1.02, (1.01, 0.985), "inconclusive"),  # no further than the two controls from one another
        (1.03, (1.01, 0.985), "missed"),
        (1.02, (1.03, 1.001), "inconclusive"),
        (1.004, (1.03, 0.97), "met"),
    ],
)
def test_losses_are_compared_with_all_pairs_of_the_library_s_runs(ours, factors, status):
    (first, *rest) = runs((3.0 * ours,) * 20, (3.0,) * 20)
    controls = [
        first.model_copy(update={"losses": (3.0 * factor,) * 20, "control": True, "index": index, "perturbation": 2.0**-9})
        for index, factor in enumerate(factors)
    ]
    found = result(first, *rest, *controls, controls=2)
    outcome = judge(found, criterion(found, "losses"))
    assert outcome.status == status
    _, median, most = sorted([*(abs(each - 1) for each in factors), abs(factors[1] / factors[0] - 1)])
    assert "2 control runs of fla from weights one rounding away and its first run differ" in outcome.evidence
    assert f"by at most {100 * most:.2g} %, in the median by {100 * median:.2g} %" in outcome.evidence
    (table,) = (each for each in tables(found) if each.title == "Training losses")
    assert [row[1] for row in table.rows[-2:]] == ["fla, control", "fla, control 2"]


@pytest.mark.parametrize(
    ("ours", "factors", "value", "status"),
    [
        (1.02, (1.01, 0.985), 0.8, "met"),  # the two controls are 0.025 / 1.01 or 0.025 / 0.985 apart
        (1.03, (1.01, 0.985), 1.2, "missed"),
        (1.02, (1.02, 1.01), 1.0, "met"),
    ],
)
def test_losses_are_compared_relative_to_the_largest_distance_of_the_library_s_runs(ours, factors, value, status):
    (first, *rest) = runs((3.0 * ours,) * 20, (3.0,) * 20)
    controls = [
        first.model_copy(update={"losses": (3.0 * factor,) * 20, "control": True, "index": index, "perturbation": 2.0**-9})
        for index, factor in enumerate(factors)
    ]

    def judged_with(*controls, declared=2):
        found = result(first, *rest, *controls, controls=declared)
        return judge(found, criterion(found, "losses", measure="loss_distance_over_control", at_most=1.0 + 1e-9))

    outcome = judged_with(*controls)
    assert (outcome.status, outcome.value.median) == (status, pytest.approx(value, rel=0.02))
    assert "and two of 3 runs of fla from weights one rounding apart at most" in outcome.evidence
    for these, declared in (((), 1), (controls[:1], 1), (controls[:1], 2), (controls, 3)):
        few = judged_with(*these, declared=declared)
        assert few.status == "not_measured"
        assert few.evidence.endswith(
            f"at least two control runs, and all that are declared: {len(these)} of {declared} are finished"
        )
    alike = [each.model_copy(update={"losses": first.losses}) for each in controls]
    assert "the runs of fla do not differ" in judged_with(*alike).evidence
    other = [each.model_copy(update={"text": "b"}) for each in controls]
    assert "did not train on the same text" in judged_with(*other).evidence


def test_a_report_says_how_far_apart_two_runs_of_the_library_are():
    first, *rest = runs((3.03,) * 20, (3.0,) * 20)
    again = first.model_copy(update={"losses": (3.06,) * 20, "control": True, "perturbation": 2.0**-9})
    text = to_document(judged(result(first, *rest, again)), "results/x.json")
    assert "a part of 2^-9, up or down at random" in text
    rows = {tuple(each.strip() for each in line.strip("|").split("|")) for line in text.splitlines() if line.startswith("| tiny")}
    assert {(row[1], *row[-2:]) for row in rows} == {
        ("fla", "–", "–"),
        ("accelerated", "1 %", "1 %"),
        ("fla, control", "2 %", "2 %"),
    }


def test_a_report_says_what_was_measured_at_which_commit():
    found = result(*runs((1.0,) * 20, (1.0,) * 20), Alone(model="tiny", variant="fla"))
    assert "**Commits**" not in to_document(found, "results/x.json")
    assert not overview_entry(found, "x.json").marks[1:]
    measured = ("tiny: first steps of fla", "tiny: training run of fla, seed 1")
    earlier = EarlierCommit(commit="a" * 12, date="2026-01-02T03:04:05+00:00", measured=measured)
    now = {"commit": "b" * 12, "date": "2026-02-03T04:05:06+00:00", "package": "", "earlier": (earlier,)}
    found = found.model_copy(update={"provenance": found.provenance.model_copy(update=now)})
    text = to_document(found, "results/x.json")
    assert f"commit {'b' * 12}; {'a' * 12} for 2 earlier measurements, 2026-02-03T" in text
    (table,) = (each for each in tables(found) if each.title == "Commits")
    own = "training run of fla, seed 0; training run of accelerated, seed 0; training run of accelerated, seed 1"
    assert table.rows == (
        ("a" * 12, "2026-01-02T03:04:05+00:00", "tiny", "first steps of fla; training run of fla, seed 1"),
        ("b" * 12, "2026-02-03T04:05:06+00:00", "tiny", own),
    )
    (mark,) = overview_entry(found, "x.json").marks
    assert mark.sentence == f"2 tasks of 5 were measured at other commits: {'a' * 12} (2026-01-02)."


def test_gradients_are_compared():
    errors = {
        name: GradientError(error=error, loss=1.0, worst="x", worst_error=error)
        for name, error in (("fla", 0.01), ("layers", 0.02))
    }
    found = result(Gradients(model="tiny", loss=1.0, errors=errors))
    outcome = judge(found, criterion(found, "gradient", at_most=1.0))
    assert outcome.status == "missed"
    assert outcome.value.median == pytest.approx(2.0)
    assert summary(judged(found)) == "1 of 6 criteria met (5 not measured)"


def at(seed, theirs, ours, **more):
    """Return the gradients of a seed with the errors of fla and of our layers."""
    errors = {
        name: GradientError(error=error, loss=1.0, worst=f"x{seed}", worst_error=error)
        for name, error in (("fla", theirs), ("layers", ours))
    }
    return Gradients(model="tiny", seed=seed, loss=1.0, errors=errors, **more)


def test_gradients_at_several_seeds_are_compared_by_the_mean_of_their_ratios():
    both = at(0, 0.03, 0.04), at(1, 0.04, 0.03)
    found = result(*both, gradient_seeds=2)
    outcome = judge(found, criterion(found, "gradient", at_most=1.0))
    assert (outcome.status, outcome.value.median) == ("inconclusive", pytest.approx(1.0))
    assert outcome.value.high == pytest.approx((4 / 3) ** 12.706)  # Student's t with one degree of freedom
    assert "fla 3.536e-02 (root mean squares over 2 seeds): 1x in the geometric mean of the seeds' ratios" in outcome.evidence
    assert "0.75 to 1.33 at each), at most 1 was asked" in outcome.evidence
    for ours, status in ((0.02, "met"), (0.05, "missed")):
        apart = result(at(0, 0.03, ours), at(1, 0.0301, ours), gradient_seeds=2)
        assert judge(apart, criterion(apart, "gradient", at_most=1.0)).status == status
    (table,) = (each for each in tables(found) if each.title == "Gradients")
    assert table.rows[1] == ("tiny", "layers", "2", "3.5e-02", "3.0e-02 to 4.0e-02", "x0 (4.0e-02)")
    part = result(both[0], gradient_seeds=2)
    assert judge(part, criterion(part, "gradient")).evidence == "not measured: seed 1: it did not run"


@pytest.mark.parametrize(
    ("ratios", "strict", "status"),
    [
        ((0.90, 0.91, 0.92), "met", "met"),
        ((1.00, 1.01, 1.02), "inconclusive", "met"),  # the mean is above the bound by less than the interval's factor of 1.025
        ((1.03, 1.04, 1.05), "missed", "missed"),  # the whole interval is above the bound
        ((1.00, 1.05, 1.15), "inconclusive", "inconclusive"),  # an interval of a factor of 1.19
        ((0.5, 1.0, 1.0), "inconclusive", "inconclusive"),  # a mean below the bound, of a comparison that sees nothing
        ((0.5, 0.5, 0.6), "met", "inconclusive"),  # the same, though the whole interval is below the bound
        ((1.5, 1.9, 2.4), "missed", "missed"),  # a wide interval, all of it above the bound
    ],
)
def test_a_gradient_within_the_noise_of_the_seeds_is_met_if_the_noise_is_small(ratios, strict, status):
    found = result(*(at(seed, 0.01, 0.01 * ratio) for seed, ratio in enumerate(ratios)), gradient_seeds=3)
    assert judge(found, criterion(found, "gradient", at_most=1.0)).status == strict
    outcome = judge(found, criterion(found, "gradient", at_most=1.0, within_noise=True))
    assert outcome.status == status
    noise = outcome.value.high / outcome.value.median
    words = " (at most 1.1)" if noise <= 1.1 else ", which is above 1.1 and too wide to meet it"
    assert outcome.evidence.endswith(f"at most 1 was asked within the interval's factor of {noise:.3g}{words}")


def test_a_gradient_taken_with_another_epsilon_than_declared_does_not_fit(tmp_path):
    path = tmp_path / "x.json"
    for eps, fits in ((1e-2, True), (1e-6, False)):
        found = judged(result(at(0, 0.01, 0.01, eps=eps), gradient_eps=1e-2))
        found.save(path, force=True)
        if fits:
            assert ModelResult.load(path) == found
            assert "heads' outputs, in the reference too: 0.01 (tiny); 1e-06 in all other" in to_document(found, "results/x.json")
        else:
            with pytest.raises(ResultCorrupt, match=r"taken with an eps of 1e-06, and its study declares 0\.01"):
                ModelResult.load(path)
    old = at(0, 0.01, 0.01)
    assert old.eps == 1e-6
    assert "eps" not in old.model_dump()  # files of older versions keep their bytes


def test_a_damaged_result_is_refused(tmp_path):
    path = tmp_path / "x.json"
    with pytest.raises(ResultMissing):
        ModelResult.load(path)
    whole = judged(result(*runs((1.0,) * 20, (1.0,) * 20)))
    whole.save(path)
    assert ModelResult.load(path) == whole
    cut = whole.measurements[0].model_copy(update={"losses": (1.0,) * 19})
    broken = {
        "19 losses": whole.model_copy(update={"measurements": (cut,)}),
        "stands twice": whole.model_copy(update={"measurements": whole.measurements * 2}),
        "was changed": whole.model_copy(update={"study": tiny.study(batch=3)}),
        "not those of the criteria": whole.model_copy(update={"outcomes": whole.outcomes[1:]}),
    }
    for words, each in broken.items():
        each.save(path, force=True)
        with pytest.raises(ResultCorrupt, match=words):
            ModelResult.load(path)
    path.write_text("{")
    with pytest.raises(ResultCorrupt):
        ModelResult.load(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"variants": ["transformers"]}, "has no variant 'transformers'"),
        ({"steps": 15}, "multiple of 10"),
        ({"kind": "llama"}, "for the kind gla alone"),
        ({"activities": ["decoding"]}, "decoding is for the kind llama alone"),
        ({"variants": ["layers"]}, "has no variant 'accelerated'"),
        ({"activities": ["forward"]}, "training of 'tiny' is not timed"),
        ({"name": "other"}, "there is no model 'tiny'"),
        ({"controls": 17}, "less than or equal to 16"),
        ({"gradient_seeds": 0}, "greater than or equal to 1"),
        ({"gradient_eps": 0.0}, "greater than 0"),
        ({"gradient_eps": 0.01, "gradient_length": 0}, "for models with gradient_length alone"),
        ({"heads": 0}, "greater than or equal to 1"),
    ],
)
def test_a_declaration_that_does_not_fit_is_refused(changes, words):
    with pytest.raises(ValidationError, match=words):
        tiny.study(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"at_most": 1.0}, "exactly one"),
        ({"measure": "loss_distance"}, "a speedup has a bound at_least"),
        (
            {"measure": "peak_memory_ratio", "at_least": None, "at_most": 1.0, "within_noise": True},
            "within_noise is for speedup and g",
        ),
        (
            {"measure": "gradient_error_ratio", "at_least": None, "at_most": 1.0, "within_noise": True},
            "needs several gradient_seeds",
        ),
    ],
)
def test_a_criterion_that_does_not_fit_is_refused(changes, words):
    with pytest.raises(ValidationError, match=words):
        ModelStudy.model_validate({**tiny.STUDY, "criteria": [{**tiny.STUDY["criteria"][0], **changes}]})


def test_studies_are_found_by_name_and_by_path(tmp_path):
    study = find_model_study("in-model")
    assert study.name == "in-model"
    full = {model.name: model for model in study.at_scale("full")}
    assert (full["12 layers"].tokens, full["12 layers"].precision) == (8 * 4096, "bfloat16")
    sizes = example().SIZES
    shape = ("width", "heads", "layers", "vocabulary", "batch", "length", "rate")
    assert all(getattr(full[name], key) == getattr(sizes[name], key) for name in ("30m", "350m") for key in shape)
    with pytest.raises(UnknownStudy, match="in-model"):
        find_model_study("in-modle")
    path = tmp_path / "x.toml"
    path.write_text("name = 'x'\nquestion = 'y'\nmodels = []\n")
    with pytest.raises(StudyError, match="models"):
        find_model_study(str(path))
    path.write_text("name = ")
    with pytest.raises(StudyError):
        find_model_study(str(path))
    with pytest.raises(StudyError, match="onelaunch study models in-model"):
        find_study("in-model")


def test_rows_depend_on_the_seed_alone():
    model = tiny.study().models[0]
    assert random_rows(model, tiny.CPU).equal(random_rows(model, tiny.CPU))
    assert not random_rows(model, tiny.CPU).equal(random_rows(model, tiny.CPU, seed=1))
