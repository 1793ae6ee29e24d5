from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from onelaunch.errors import FolderNotice, StudyError, UnknownStudy
from onelaunch.wording import UNSAFE
from onelaunch.workbench.study import Criterion
from onelaunch.workbench.study.read import find_study, list_studies, load_study
from tests.workbench import ladder

assert ladder.ladder.name == "ladder"  # registered by its import

GOOD = """
name = "mine"
question = "Is it?"
operation = "ladder"
baseline = "three"
controls = ["product"]
directions = ["forward", "forward_backward"]

[[shapes]]
name = "big"
N = 4
V = 8
kind = "odd"

[[shapes]]
name = "small"
scale = "small"
dtype = "float32"
N = 1
V = 1

[[criteria]]
name = "faster"
measure = "speedup"
of = { launches = [1, 2] }
at = "big"
at_least = 1.3
"""


@pytest.fixture
def written(tmp_path):
    def write(text=GOOD, name="mine.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_a_study_is_read_with_sizes_and_options_sorted(written):
    study = load_study(written())
    big, small = study.shapes
    assert (big.sizes, big.options, big.dtype, big.scale) == ({"N": 4, "V": 8}, {"kind": "odd"}, "float16", "full")
    assert (small.sizes, small.options, small.dtype, small.scale) == ({"N": 1, "V": 1}, {}, "float32", "small")
    assert study.case(big).options == {"kind": "odd"}
    assert str(study.case(big)) == "big"


def test_a_shape_may_run_in_some_of_the_directions(written):
    whole = load_study(written())
    study = load_study(written(GOOD.replace('kind = "odd"', 'kind = "odd"\ndirections = ["forward"]')))
    assert [study.directions_at(shape) for shape in study.shapes] == [("forward",), ("forward", "forward_backward")]
    assert all(whole.directions_at(shape) == whole.directions for shape in whole.shapes)
    assert "directions" not in whole.shapes[0].model_dump()  # studies of older results keep their digests
    assert study.shapes[0].model_dump()["directions"] == ("forward",)


def test_what_a_study_answers(written):
    study = load_study(written())
    (faster,) = study.criteria
    assert study.select(faster.of) == ("two", "one", "forward_only")
    assert study.select("product") == ("product",)
    assert study.select({}) == study.variant_names()
    assert study.over(faster) == "three"
    assert [shape.name for shape in study.shapes_of(faster)] == ["big"]
    everywhere = Criterion(name="e", measure="error", of="one", at_most=1)
    assert [shape.name for shape in study.shapes_of(everywhere)] == ["big"]  # full scale by default
    assert study.variant_names()[0] == "three"
    assert study.digest() == load_study(written()).digest()


MISTAKES = {
    "misspelt key": (('baseline = "three"', 'basline = "three"'), "unknown key 'basline'. Did you mean 'baseline'?"),
    "missing key": (('baseline = "three"', ""), "the study lacks baseline"),
    "misspelt key of a shape": (
        ('kind = "odd"', 'knd = "odd"'),
        r"shapes[0] (big) has an unknown key 'knd'. Did you mean 'kind'?",
    ),
    "misspelt size": (
        ("N = 4", "M = 4"),
        "shapes[0] (big) has an unknown key 'M'. Known: name, dtype, scale, skip, directions, N, V, kind, masked.",
    ),
    "missing size": (("N = 4\n", ""), "shapes[0] (big): ladder needs the sizes N, V; N not given."),
    "unknown name to skip": (
        ('kind = "odd"', 'skip = ["two", "produkt"]'),
        "shapes[0] (big): skip names no variant or control 'produkt'. Did you mean 'product'?",
    ),
    "size of a wrong type": (("N = 4", 'N = "4"'), "shapes[0] (big): Size N of ladder is '4'; it must be an integer"),
    "negative size": (("N = 4", "N = -4"), "it must be an integer of at least 0"),
    "option of a wrong type": (
        ('kind = "odd"', "kind = 3"),
        "shapes[0] (big): kind is 3; it must be a str like its default 'plain'.",
    ),
    "shape without a name": (('name = "big"\n', ""), "shapes[0] (without a name) lacks name."),
    "bad dtype": (
        ('dtype = "float32"', 'dtype = "flot32"'),
        "shapes[1] (small): dtype is 'flot32'; it must be one of float16, bf",
    ),
    "bad scale": (('scale = "small"', 'scale = "tiny"'), "shapes.1.scale is 'tiny': input should be 'small' or 'full'."),
    "unknown operation": (('"ladder"', '"lader"'), "operation: There is no operation 'lader'. Did you mean 'ladder'?"),
    "operation that is no name": (('"ladder"', "7"), "operation: There is no operation '7'."),
    "unknown baseline": (('"three"', '"thre"'), "baseline: ladder has no variant 'thre'. Did you mean 'three'?"),
    "unknown variant": (
        ("controls", 'variants = ["too"]\ncontrols'),
        "variants: ladder has no variant 'too'. Did you mean 'two'?",
    ),
    "unknown control": (('["product"]', '["produkt"]'), "controls: ladder has no control 'produkt'. Did you mean 'product'?"),
    "duplicate variant": (("controls", 'variants = ["two", "two"]\ncontrols'), "variants has 'two' more than once"),
    "duplicate shape": (('name = "small"', 'name = "big"'), "shapes has 'big' more than once"),
    "empty directions": (('["forward", "forward_backward"]', "[]"), "directions is empty"),
    "bad direction": (
        ('["forward", "forward_backward"]', '["backward"]'),
        "directions.0 is 'backward': input should be 'forward'",
    ),
    "direction of a shape alone": (
        ('["forward", "forward_backward"]\n\n[[shapes]]', '["forward"]\n\n[[shapes]]\ndirections = ["forward_backward"]'),
        "directions of big has 'forward_backward', which the study does not have; add it there.",
    ),
    "direction of a shape twice": (
        ('kind = "odd"', 'directions = ["forward", "forward"]'),
        "directions of big has 'forward' more than once",
    ),
    "direction that does not run at a shape": (
        ('kind = "odd"', 'directions = ["forward_backward"]'),
        "criterion 'faster': direction is 'forward', which does not run at big; add it there.",
    ),
    "too few rounds": (("controls", "rounds = 1\ncontrols"), "rounds is 1: input should be greater than or equal to 3."),
    "a name that is no file name": (('"mine"', '"a/b"'), "name is 'a/b'; it names files"),
    "invalid TOML": (
        ('question = "Is it?"', "question = Is it?"),
        "this is not valid TOML: Invalid value (at line 3, column 12)",
    ),
    "misspelt key of a criterion": (
        ("at_least", "atleast"),
        "criteria[0] (faster) has an unknown key 'atleast'. Did you mean 'at_least'?",
    ),
    "no bound": (("at_least = 1.3", ""), "criteria[0] (faster) has none of at_least, at_most and equals; it needs exactly one."),
    "two bounds": (
        ("at_least = 1.3", "at_least = 1.3\nat_most = 2"),
        "has more than one of at_least, at_most and equals; it needs exactly one.",
    ),
    "bound that is no number": (("1.3", '"1.3"'), "at_least is '1.3'; it must be a number above 0."),
    "bound of zero": (("1.3", "0"), "at_least is 0; it must be a number above 0."),
    "bound that is not finite": (("1.3", "nan"), "at_least is nan; it must be a number above 0."),
    "missing of": (("of = { launches = [1, 2] }", ""), "criteria[0] (faster) lacks of."),
    "unknown measure": (('"speedup"', '"speed"'), "criteria.0.measure is 'speed': input should be 'speedup'"),
    "unknown shape": (('at = "big"', 'at = "bug"'), "criterion 'faster': at names the unknown shape 'bug'. Did you mean 'big'?"),
    "no shape": (('at = "big"', "at = []"), "criterion 'faster': at is empty"),
    "duplicate at": (('at = "big"', 'at = ["big", "big"]'), "criterion 'faster': at has 'big' more than once"),
    "in_at_least beyond the shapes": (
        ('at = "big"', 'at = "big"\nin_at_least = 2'),
        "in_at_least is 2; it must lie between 1 and its 1",
    ),
    "selector of unknown variant": (("{ launches = [1, 2] }", '"on"'), "of is 'on', no variant or control. Did you mean 'one'?"),
    "selector of unknown tag": (
        ("launches = [1", "lunches = [1"),
        "asks for the tag 'lunches', which no variant has. Did you mean 'launches'?",
    ),
    "selector of nothing": (("[1, 2]", "[4]"), "matches no variant of the study; in their tags launches is 1, 2, 3, None."),
    "unknown over": (('at = "big"', 'at = "big"\nover = "fore"'), "over is 'fore', no variant or control."),
    "control backward": (
        ('at = "big"', 'at = "big"\nover = "product"\ndirection = "forward_backward"'),
        "controls are timed forward only",
    ),
    "bad regime": (('at = "big"', 'at = "big"\nregime = "hot"'), "criteria.0.regime is 'hot'"),
    "error over something": (('"speedup"', '"error"\nover = "two"'), "an error is judged against the oracle; leave over out."),
    "error from below": (('"speedup"', '"error"'), "an error is bounded from above; use at_most."),
    "bytes over the least over something": (
        ('"speedup"', '"dram_bytes_over_least"\nover = "two"'),
        "bytes are compared with the least; leave over out.",
    ),
    "bytes over the least from below": (('"speedup"', '"dram_bytes_over_least"'), "are bounded from above; use at_most."),
    "launches over something": (('"speedup"', '"launches"\nover = "two"'), "launches are counted; leave over out."),
    "launches from below": (('"speedup"', '"launches"'), "a number of launches is bounded from above; use at_most."),
    "barriers over something": (('"speedup"', '"barriers"\nover = "two"'), "barriers are counted; leave over out."),
    "barriers from below": (('"speedup"', '"barriers"'), "a number of barriers is bounded from above; use at_most."),
    "a time exactly": (("at_least = 1.3", "equals = 2"), "equals is for counted measures (launches, barriers); use at_least"),
    "a part of a launch": (
        ('"speedup"\nof = { launches = [1, 2] }\nat = "big"\nat_least', '"launches"\nof = "one"\nequals'),
        "equals is 1.3; it must be an integer of at least 0.",
    ),
    "mean of barriers": (
        ('"speedup"\nof = { launches = [1, 2] }\nat = "big"\nat_least', '"barriers"\nof = "one"\ncombine = "geomean"\nat_most'),
        "a count that must be exact, or may be 0, has no geometric mean; leave combine out.",
    ),
    "steps in a row of what is no step": (
        ("controls", 'regimes = ["cold", "served"]\ncontrols'),
        "regimes has 'served', which is for consecutive steps; ladder has no loop of steps.",
    ),
    "other regime that is not timed": (
        ('at = "big"', 'at = "big"\nover_regime = "served"'),
        "over_regime is 'served', which is not among the study's regimes; add it there.",
    ),
    "other regime of a time alone": (
        ('"speedup"\nof = { launches = [1, 2] }\nat = "big"\nat_least', '"time"\nover_regime = "warm"\nof = "one"\nat_most'),
        "over_regime is for times; leave it out, or use one of speedup, time_ratio as the measure.",
    ),
    "time from below": (('"speedup"', '"time"'), "a time is bounded from above; use at_most."),
    "floor of something else": (
        ('"speedup"', '"time_over_floor"\nover = "two"'),
        "a time is compared with its roofline bound; leave over out.",
    ),
    "floor from below": (
        ('"speedup"', '"time_over_floor"'),
        "a time over its roofline bound is bounded from above; use at_most.",
    ),
    "floor of warm calls": (
        (
            '"speedup"\nof = { launches = [1, 2] }\nat = "big"\nat_least',
            '"time_over_floor"\nregime = "warm"\nof = "one"\nat_most',
        ),
        "roofline bounds assume that data lies in memory, not in caches",
    ),
    "floor at another shape": (
        (
            '"speedup"\nof = { launches = [1, 2] }\nat = "big"\nat_least',
            '"time_over_floor"\nover_at = "big"\nof = "one"\nat_most',
        ),
        "over_at is for times; leave it out, or use one of speedup, time_ratio as the measure.",
    ),
    "unknown way to combine": (('at = "big"', 'combine = "mean"'), "criteria.0.combine is 'mean': input should be 'each'"),
    "mean of one shape": (('at = "big"', 'at = "big"\ncombine = "geomean"'), "a geometric mean needs two shapes or more"),
    "mean of some shapes": (
        ('at = "big"', 'at = ["big", "small"]\ncombine = "geomean"\nin_at_least = 1'),
        "a geometric mean is taken over all shapes; leave in_at_least or combine out.",
    ),
    "mean of errors": (
        ('"speedup"\nof = { launches = [1, 2] }\nat = "big"\nat_least', '"error"\nof = "one"\ncombine = "geomean"\nat_most'),
        "of errors the largest counts, not their mean; leave combine out.",
    ),
    "share of work at one shape": (('at = "big"', 'at = "big"\nper = ["N"]'), "per is for times at two shapes; name the other"),
    "bytes at two shapes": (
        ('"speedup"', '"dram_bytes_ratio"\nover_at = "big"'),
        "over_at is for times; leave it out, or use one of speedup, time_ratio as the measure.",
    ),
    "unknown other shape": (
        ('at = "big"', 'at = "big"\nover_at = "bug"'),
        "over_at names the unknown shape 'bug'. Did you mean 'big'?",
    ),
    "another shape of another scale": (('at = "big"', 'at = "big"\nover_at = "small"'), "so they never run together."),
    "unknown size": (
        ('at = "big"', 'at = "big"\nover_at = "big"\nper = ["T"]'),
        "per names no size 'T'. Known: N, V.",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake_is_named_with_its_file_and_what_would_be_right(written, name):
    (right, wrong), message = MISTAKES[name]
    assert right in GOOD
    path = written(GOOD.replace(right, wrong, 1))
    with pytest.raises(StudyError, match=re.escape(message)) as raised:
        load_study(path)
    assert str(raised.value).startswith(f"{path}: ")


def edited(*changes):
    text = GOOD
    for right, wrong in changes:
        assert right in text
        text = text.replace(right, wrong)
    return text


@pytest.mark.parametrize(("changes", "message"), [
    ([('controls = ["product"]\n', ""), ("{ launches = [1, 2] }", '"product"')], "is the control 'product', which is not among"),
    ([("controls", 'variants = ["two"]\ncontrols'), ("{ launches = [1, 2] }", '"one"')], "'one', which is not among the study's"),
    ([('directions = ["forward", "forward_backward"]\n', ""), ('at = "big"', 'direction = "forward_backward"')], "direction is"),
    ([("controls", 'regimes = ["warm"]\ncontrols')], "regime is 'cold', which is not among the study's regimes; add it there."),
    ([(GOOD[GOOD.index("[[shapes]]"):], "")], "the study lacks shapes."),
    ([(GOOD[GOOD.index("[[shapes]]"):], "shapes = []")], "shapes is []: tuple should have at least 1 item"),
    ([(GOOD[GOOD.index("[[shapes]]"):], "[shapes]\nN = 1")], "shapes must be tables, each beginning with [[shapes]]."),
    ([(GOOD[GOOD.index("[[criteria]]"):], GOOD[GOOD.index("[[criteria]]"):] * 2)], "criteria has 'faster' more than once"),
])  # fmt: skip
def test_mistakes_that_take_two_places(written, changes, message):
    with pytest.raises(StudyError, match=re.escape(message)):
        load_study(written(edited(*changes)))


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StudyError, match="cannot be read"):
        load_study(path)


@pytest.fixture
def folders(tmp_path, monkeypatch, written):
    here, other = tmp_path / "here", tmp_path / "other"
    for folder in (here / "studies", other):
        folder.mkdir(parents=True)
    (here / "studies" / "mine.toml").write_text(GOOD)
    (other / "mine.toml").write_text(GOOD.replace("Is it?", "Is it not?"))
    (other / "theirs.toml").write_text(GOOD)
    (other / "broken.toml").write_text("name = ")
    monkeypatch.chdir(here)
    monkeypatch.setenv("ONELAUNCH_STUDIES", str(other))
    return here, other


def test_built_in_studies_are_found_beside_the_project_s_own(folders, tmp_path):
    assert find_study("040-linear-rnn")[1].operation == "linear_rnn"
    assert {"mine", "theirs", "040-linear-rnn"} <= {entry.name for entry in list_studies()}
    (folders[0] / "studies" / "040-linear-rnn.toml").write_text(GOOD)
    assert find_study("040-linear-rnn")[1].operation == "ladder"  # the project's own comes first


def test_a_folder_of_studies_that_is_not_there_is_told_once(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("ONELAUNCH_STUDIES", f"{tmp_path / 'missing'}:{folders[1]}")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        assert find_study("theirs")[0] == folders[1] / "theirs.toml"
        list_studies()
    (notice,) = told
    assert notice.category is FolderNotice
    assert str(tmp_path / "missing") in str(notice.message)
    assert "ONELAUNCH_STUDIES" in str(notice.message)


NAMES = {
    "empty": "",
    "newline": "a\nb",
    "NUL": "a\0b",
    "escape": "a\x1b[2Jb",
    "quote": 's" onload="x',
    "tag": "<script>",
    "dollar": "$x_{$",
    "backslash": "a\\b",
    "space at the end": "a ",
    "direction": "a\u202eb",
    "beyond ASCII": "Gr\u00f6\u00dfe",
    "81 letters": "x" * 81,
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize(("old", "key"), [('name = "big"', "shapes[0]"), ('name = "faster"', "criteria[0]")])
def test_a_name_that_could_be_read_as_more_than_a_name_is_refused(written, name, old, key):
    text = GOOD.replace('at = "big"\n', "").replace(old, f"name = {json.dumps(name)}")
    with pytest.raises(StudyError) as told:
        load_study(written(text))
    assert f"{key}: name is " in str(told.value)
    assert "letters" in str(told.value)
    assert not UNSAFE.search(str(told.value))


@pytest.mark.parametrize(("old", "new"), [('kind = "odd"', 'kind = "\\u001b[2J"'), ("[1, 2]", '[1, "<script>"]')])
def test_texts_of_options_and_selectors_follow_the_rule_of_names(written, old, new):
    with pytest.raises(StudyError, match="letters") as told:
        load_study(written(GOOD.replace(old, new)))
    assert not UNSAFE.search(str(told.value))


@pytest.mark.parametrize("name", ["..", "a..b", "../up", "/abs", "", ".hidden", "a b", "x" * 81])
def test_the_name_of_a_study_is_that_of_a_file(written, name):
    with pytest.raises(StudyError, match="it names files"):
        load_study(written(GOOD.replace('name = "mine"', f"name = {json.dumps(name)}")))


def test_the_names_that_studies_have_are_allowed(written):
    for name in ("4x2048x256x64", "it's at most 5 us/token, all (of 3)", "decay=-inf 50%", "a_b.c+d:e*f"):
        assert load_study(written(GOOD.replace('name = "faster"', f'name = "{name}"'))).criteria[0].name == name


@pytest.mark.parametrize("key", ["question", "notes"])
def test_prose_has_no_control_characters_but_line_breaks_and_tabs(written, key):
    text = GOOD.replace('question = "Is it?"\n', "") if key == "question" else GOOD
    assert load_study(written(f'{key} = "Gr\u00f6\u00dfe \u2265 3?\\n\\tyes"\n{text}'))
    with pytest.raises(StudyError, match=f"{key} is .*no control characters") as told:
        load_study(written(f'{key} = "\\u001b[2J"\n{text}'))
    assert not UNSAFE.search(str(told.value))


def test_a_byte_order_mark_is_read_over(tmp_path):
    path = tmp_path / "bom.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_study(path).name == "mine"


def test_sizes_beyond_those_of_tensors_are_refused(written):
    with pytest.raises(StudyError, match=r"shapes\[0\] \(big\): N is 10+; it must be at most 9223372036854775807"):
        load_study(written(GOOD.replace("N = 4", f"N = {10**30}")))


def test_what_is_no_study_file_is_refused_and_never_waited_for(tmp_path):
    for path in (Path("/dev/zero"), tmp_path):
        with pytest.raises(StudyError, match="no regular file"):
            load_study(path)
    huge = tmp_path / "huge.toml"
    with huge.open("wb") as file:
        file.truncate(300 << 20)
    with pytest.raises(StudyError, match="bytes"):
        load_study(huge)
    for name in ("a\0b", "x" * 5000, "a\0b/c.toml"):
        with pytest.raises(UnknownStudy):
            find_study(name)


def test_studies_are_found_by_name_here_first(folders):
    path, study = find_study("mine")
    assert (path.as_posix(), study.question) == ("studies/mine.toml", "Is it?")
    assert find_study("theirs")[0] == folders[1] / "theirs.toml"


def test_studies_are_found_by_path(folders):
    assert find_study(folders[1] / "mine.toml")[1].question == "Is it not?"
    assert find_study(str(folders[1] / "mine.toml"))[1].question == "Is it not?"


def test_an_unknown_study_names_the_known_ones(folders):
    known = r"Known: 039-chunkwise-gla, 040-linear-rnn, .*broken, .*mine, theirs\."
    with pytest.raises(UnknownStudy, match=rf"There is no study 'mene'\. Did you mean 'mine'\? {known}"):
        find_study("mene")
    with pytest.raises(UnknownStudy, match=r"no/such\.toml"):
        find_study("no/such.toml")
    with pytest.raises(UnknownStudy):
        load_study(folders[0] / "nothing.toml")


def test_a_broken_study_is_listed_with_its_problem_and_raised_when_asked_for(folders):
    listed: dict[str, Any] = {entry.name: entry for entry in list_studies()}
    assert [name for name, entry in listed.items() if entry.path.parent in (Path("studies"), folders[1])] == [
        *("broken", "mine", "theirs"),
    ]
    assert listed["broken"].study is None
    assert "not valid TOML" in listed["broken"].problem
    assert listed["mine"].study.question == "Is it?"
    with pytest.raises(StudyError):
        find_study("broken")


def test_a_criterion_at_two_shapes_has_two_sides(written):
    other = GOOD.replace('name = "small"\nscale = "small"', 'name = "small"')
    text = other.replace('at = "big"', 'at = "big"\nover = "two"\nover_at = "small"\nper = ["N", "V"]')
    study = load_study(written(text))
    big, small = study.shapes
    assert study.sides(study.criteria[0], big) == (({"launches": [1, 2]}, big), ("two", small))
    alone = Criterion(name="e", measure="error", of="one", at_most=1)
    assert study.sides(alone, big) == (("one", big),)


def test_keys_that_came_later_leave_older_digests_as_they_were(written):
    """A default of a new key may not make a stored study look as if its criteria had moved."""
    (faster,) = load_study(written()).criteria
    assert set(faster.model_dump()) == {
        *("name", "measure", "of", "over", "at", "in_at_least", "direction", "regime", "at_least", "at_most"),
    }
    told = faster.model_copy(update={"combine": "geomean", "decides": False})
    assert set(told.model_dump()) - set(faster.model_dump()) == {"combine", "decides"}
    assert Criterion.model_validate_json(told.model_dump_json()) == told


def test_our_own_studies_are_all_readable(pytestconfig, monkeypatch):
    monkeypatch.chdir(pytestconfig.rootpath)
    problems = {entry.name: entry.problem for entry in list_studies() if entry.study is None}
    assert problems == {}
    assert "040-linear-rnn" in [entry.name for entry in list_studies()]


def test_a_study_and_its_file_have_one_name(pytestconfig, monkeypatch):
    monkeypatch.chdir(pytestconfig.rootpath)
    for entry in list_studies():
        assert entry.study is not None
        assert entry.study.name == entry.name
