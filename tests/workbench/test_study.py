"""Tests of study files: keys, mistakes, names and text, folders, and digests.

The operation is the made-up ``ladder`` of ``ladder.py``, with sizes N and V, the options ``kind`` and ``masked``, and variants
of one, two and three launches. ``prose`` compares a message with its entry in tests/snapshots/prose.txt, which holds the test's
id. If a test or one of its parameters is removed, its entry must be removed too, or tests/test_prose.py fails.
"""

from __future__ import annotations

import json
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
    """Return a function that writes a study file and returns its path."""

    def write(text=GOOD, name="mine.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_a_study_is_read_with_sizes_separated_from_options(written):
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
    assert "directions" not in whole.shapes[0].model_dump()  # studies of older results keep their digests at the default
    assert study.shapes[0].model_dump()["directions"] == ("forward",)


def test_queries_of_a_study(written):
    """Check which variants and shapes a criterion stands for, the names of a study's variants, and its digest."""
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


# Mistakes by name: a text of ``GOOD``, and what replaces its first occurrence.
MISTAKES = {
    "misspelt key": ('baseline = "three"', 'basline = "three"'),
    "missing key": ('baseline = "three"', ""),
    "misspelt key of a shape": ('kind = "odd"', 'knd = "odd"'),
    "misspelt size": ("N = 4", "M = 4"),
    "missing size": ("N = 4\n", ""),
    "unknown name to skip": ('kind = "odd"', 'skip = ["two", "produkt"]'),
    "size of a wrong type": ("N = 4", 'N = "4"'),
    "negative size": ("N = 4", "N = -4"),
    "option of a wrong type": ('kind = "odd"', "kind = 3"),
    "shape without a name": ('name = "big"\n', ""),
    "bad dtype": ('dtype = "float32"', 'dtype = "flot32"'),
    "bad scale": ('scale = "small"', 'scale = "tiny"'),
    "unknown operation": ('"ladder"', '"lader"'),
    "operation that is no name": ('"ladder"', "7"),
    "unknown baseline": ('"three"', '"thre"'),
    "unknown variant": ("controls", 'variants = ["too"]\ncontrols'),
    "unknown control": ('["product"]', '["produkt"]'),
    "duplicate variant": ("controls", 'variants = ["two", "two"]\ncontrols'),
    "duplicate shape": ('name = "small"', 'name = "big"'),
    "empty directions": ('["forward", "forward_backward"]', "[]"),
    "bad direction": ('["forward", "forward_backward"]', '["backward"]'),
    "direction of a shape alone": (
        '["forward", "forward_backward"]\n\n[[shapes]]',
        '["forward"]\n\n[[shapes]]\ndirections = ["forward_backward"]',
    ),
    "direction of a shape twice": ('kind = "odd"', 'directions = ["forward", "forward"]'),
    "direction that does not run at a shape": ('kind = "odd"', 'directions = ["forward_backward"]'),
    "too few rounds": ("controls", "rounds = 1\ncontrols"),
    "a name that is no file name": ('"mine"', '"a/b"'),
    "invalid TOML": ('question = "Is it?"', "question = Is it?"),
    "misspelt key of a criterion": ("at_least", "atleast"),
    "no bound": ("at_least = 1.3", ""),
    "two bounds": ("at_least = 1.3", "at_least = 1.3\nat_most = 2"),
    "bound that is no number": ("1.3", '"1.3"'),
    "bound of zero": ("1.3", "0"),
    "bound that is not finite": ("1.3", "nan"),
    "missing of": ("of = { launches = [1, 2] }", ""),
    "unknown measure": ('"speedup"', '"speed"'),
    "unknown shape": ('at = "big"', 'at = "bug"'),
    "no shape": ('at = "big"', "at = []"),
    "duplicate at": ('at = "big"', 'at = ["big", "big"]'),
    "in_at_least beyond the shapes": ('at = "big"', 'at = "big"\nin_at_least = 2'),
    "selector of unknown variant": ("{ launches = [1, 2] }", '"on"'),
    "selector of unknown tag": ("launches = [1", "lunches = [1"),
    "selector of nothing": ("[1, 2]", "[4]"),
    "unknown over": ('at = "big"', 'at = "big"\nover = "fore"'),
    # Controls run forward only.
    "control backward": ('at = "big"', 'at = "big"\nover = "product"\ndirection = "forward_backward"'),
    "bad regime": ('at = "big"', 'at = "big"\nregime = "hot"'),
    "error over something": ('"speedup"', '"error"\nover = "two"'),
    "error from below": ('"speedup"', '"error"'),
    "bytes over the least over something": ('"speedup"', '"dram_bytes_over_least"\nover = "two"'),
    "bytes over the least from below": ('"speedup"', '"dram_bytes_over_least"'),
    "launches over something": ('"speedup"', '"launches"\nover = "two"'),
    "launches from below": ('"speedup"', '"launches"'),
    "barriers over something": ('"speedup"', '"barriers"\nover = "two"'),
    "barriers from below": ('"speedup"', '"barriers"'),
    "a time exactly": ("at_least = 1.3", "equals = 2"),
    "a part of a launch": ('"speedup"\nof = { launches = [1, 2] }\nat = "big"\nat_least', '"launches"\nof = "one"\nequals'),
    "mean of barriers": (
        '"speedup"\nof = { launches = [1, 2] }\nat = "big"\nat_least',
        '"barriers"\nof = "one"\ncombine = "geomean"\nat_most',
    ),
    # ``served`` times consecutive steps, for which the operation registers no loop.
    "steps in a row of what is no step": ("controls", 'regimes = ["cold", "served"]\ncontrols'),
    "other regime that is not timed": ('at = "big"', 'at = "big"\nover_regime = "served"'),
    "other regime of a time alone": (
        '"speedup"\nof = { launches = [1, 2] }\nat = "big"\nat_least',
        '"time"\nover_regime = "warm"\nof = "one"\nat_most',
    ),
    "time from below": ('"speedup"', '"time"'),
    "floor of something else": ('"speedup"', '"time_over_floor"\nover = "two"'),
    "floor from below": ('"speedup"', '"time_over_floor"'),
    "floor of warm calls": (
        '"speedup"\nof = { launches = [1, 2] }\nat = "big"\nat_least',
        '"time_over_floor"\nregime = "warm"\nof = "one"\nat_most',
    ),
    "floor at another shape": (
        '"speedup"\nof = { launches = [1, 2] }\nat = "big"\nat_least',
        '"time_over_floor"\nover_at = "big"\nof = "one"\nat_most',
    ),
    "unknown way to combine": ('at = "big"', 'combine = "mean"'),
    "mean of one shape": ('at = "big"', 'at = "big"\ncombine = "geomean"'),
    "mean of some shapes": ('at = "big"', 'at = ["big", "small"]\ncombine = "geomean"\nin_at_least = 1'),
    "mean of errors": (
        '"speedup"\nof = { launches = [1, 2] }\nat = "big"\nat_least',
        '"error"\nof = "one"\ncombine = "geomean"\nat_most',
    ),
    # ``per`` divides times at two shapes by their sizes, so it needs ``over_at``, the other shape.
    "share of work at one shape": ('at = "big"', 'at = "big"\nper = ["N"]'),
    "bytes at two shapes": ('"speedup"', '"dram_bytes_ratio"\nover_at = "big"'),
    "unknown other shape": ('at = "big"', 'at = "big"\nover_at = "bug"'),
    "another shape of another scale": ('at = "big"', 'at = "big"\nover_at = "small"'),
    "unknown size": ('at = "big"', 'at = "big"\nover_at = "big"\nper = ["T"]'),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake_is_named_with_its_file_and_the_remedy(written, name, prose):
    right, wrong = MISTAKES[name]
    assert right in GOOD
    path = written(GOOD.replace(right, wrong, 1))
    with prose.raises(StudyError) as raised:
        load_study(path)
    assert str(raised.value).startswith(f"{path}: ")


def edited(*changes):
    """Return ``GOOD`` with each text replaced by another."""
    text = GOOD
    for right, wrong in changes:
        assert right in text
        text = text.replace(right, wrong)
    return text


# A criterion on a control or variant that the study leaves out, on a direction or regime that does not run; no shapes; two
# criteria of one name.
@pytest.mark.parametrize("changes", [
    [('controls = ["product"]\n', ""), ("{ launches = [1, 2] }", '"product"')],
    [("controls", 'variants = ["two"]\ncontrols'), ("{ launches = [1, 2] }", '"one"')],
    [('directions = ["forward", "forward_backward"]\n', ""), ('at = "big"', 'direction = "forward_backward"')],
    [("controls", 'regimes = ["warm"]\ncontrols')],
    [(GOOD[GOOD.index("[[shapes]]"):], "")],
    [(GOOD[GOOD.index("[[shapes]]"):], "shapes = []")],
    [(GOOD[GOOD.index("[[shapes]]"):], "[shapes]\nN = 1")],
    [(GOOD[GOOD.index("[[criteria]]"):], GOOD[GOOD.index("[[criteria]]"):] * 2)],
])  # fmt: skip
def test_mistakes_that_involve_two_places(written, changes, prose):
    with prose.raises(StudyError):
        load_study(written(edited(*changes)))


def test_a_binary_file_is_refused(tmp_path, prose):
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with prose.raises(StudyError):
        load_study(path)


@pytest.fixture
def folders(tmp_path, monkeypatch, written):
    """Make a project's folder with one study, and a folder of ``$ONELAUNCH_STUDIES`` with three; return both."""
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


def test_built_in_studies_are_found_in_addition_to_the_projects_own(folders, tmp_path):
    assert find_study("040-linear-rnn")[1].operation == "linear_rnn"
    assert {"mine", "theirs", "040-linear-rnn"} <= {entry.name for entry in list_studies()}
    (folders[0] / "studies" / "040-linear-rnn.toml").write_text(GOOD)
    assert find_study("040-linear-rnn")[1].operation == "ladder"  # the project's own study takes precedence


def test_a_missing_folder_of_studies_is_reported_once(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("ONELAUNCH_STUDIES", f"{tmp_path / 'missing'}:{folders[1]}")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        assert find_study("theirs")[0] == folders[1] / "theirs.toml"
        list_studies()
    (notice,) = told
    assert notice.category is FolderNotice
    assert str(tmp_path / "missing") in str(notice.message)
    assert "ONELAUNCH_STUDIES" in str(notice.message)


# Names that are refused. "direction" is the character that reverses the text after it.
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
def test_a_name_with_special_characters_is_refused(written, name, old, key):
    text = GOOD.replace('at = "big"\n', "").replace(old, f"name = {json.dumps(name)}")
    with pytest.raises(StudyError) as told:
        load_study(written(text))
    assert f"{key}: name is " in str(told.value)
    assert "letters" in str(told.value)
    assert not UNSAFE.search(str(told.value))


@pytest.mark.parametrize(("old", "new"), [('kind = "odd"', 'kind = "\\u001b[2J"'), ("[1, 2]", '[1, "<script>"]')])
def test_texts_of_options_and_selectors_follow_the_rule_of_names(written, old, new, prose):
    with prose.raises(StudyError) as told:
        load_study(written(GOOD.replace(old, new)))
    assert not UNSAFE.search(str(told.value))


@pytest.mark.parametrize("name", ["..", "a..b", "../up", "/abs", "", ".hidden", "a b", "x" * 81])
def test_the_name_of_a_study_must_be_a_valid_file_name(written, name, prose):
    with prose.raises(StudyError):
        load_study(written(GOOD.replace('name = "mine"', f"name = {json.dumps(name)}")))


def test_existing_study_names_are_allowed(written):
    for name in ("4x2048x256x64", "it's at most 5 us/token, all (of 3)", "decay=-inf 50%", "a_b.c+d:e*f"):
        assert load_study(written(GOOD.replace('name = "faster"', f'name = "{name}"'))).criteria[0].name == name


@pytest.mark.parametrize("key", ["question", "notes"])
def test_prose_allows_no_control_characters_but_line_breaks_and_tabs(written, key, prose):
    """A study's question and notes are free text, in which only control characters are refused."""
    text = GOOD.replace('question = "Is it?"\n', "") if key == "question" else GOOD
    assert load_study(written(f'{key} = "Gr\u00f6\u00dfe \u2265 3?\\n\\tyes"\n{text}'))
    with prose.raises(StudyError, match=key) as told:
        load_study(written(f'{key} = "\\u001b[2J"\n{text}'))
    assert not UNSAFE.search(str(told.value))


def test_a_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "bom.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_study(path).name == "mine"


def test_sizes_beyond_those_of_tensors_are_refused(written, prose):
    with prose.raises(StudyError, match="9223372036854775807"):
        load_study(written(GOOD.replace("N = 4", f"N = {10**30}")))


def test_a_special_file_is_refused_without_waiting(tmp_path, prose):
    for path in (Path("/dev/zero"), tmp_path):
        with prose.raises(StudyError):
            load_study(path)
    huge = tmp_path / "huge.toml"
    with huge.open("wb") as file:
        file.truncate(300 << 20)
    with prose.raises(StudyError):
        load_study(huge)
    for name in ("a\0b", "x" * 5000, "a\0b/c.toml"):
        with pytest.raises(UnknownStudy):
            find_study(name)


def test_studies_are_found_by_name_in_this_folder_first(folders):
    path, study = find_study("mine")
    assert (path.as_posix(), study.question) == ("studies/mine.toml", "Is it?")
    assert find_study("theirs")[0] == folders[1] / "theirs.toml"


def test_studies_are_found_by_path(folders):
    assert find_study(folders[1] / "mine.toml")[1].question == "Is it not?"
    assert find_study(str(folders[1] / "mine.toml"))[1].question == "Is it not?"


def test_an_unknown_study_names_the_known_ones(folders, prose):
    with prose.raises(UnknownStudy, match=r"'mene'.*broken, .*mine, .*theirs"):
        find_study("mene")
    with pytest.raises(UnknownStudy, match=r"no/such\.toml"):
        find_study("no/such.toml")
    with pytest.raises(UnknownStudy):
        load_study(folders[0] / "nothing.toml")


def test_a_broken_study_is_listed_with_its_problem_and_raises_when_loaded(folders):
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


def test_later_keys_do_not_change_older_digests(written):
    """The default of a new key must not make the criteria of a stored study appear changed."""
    (faster,) = load_study(written()).criteria
    assert set(faster.model_dump()) == {
        *("name", "measure", "of", "over", "at", "in_at_least", "direction", "regime", "at_least", "at_most"),
    }
    # ``combine`` and ``decides`` are later keys, which are left out at their default.
    told = faster.model_copy(update={"combine": "geomean", "decides": False})
    assert set(told.model_dump()) - set(faster.model_dump()) == {"combine", "decides"}
    assert Criterion.model_validate_json(told.model_dump_json()) == told


def test_all_committed_studies_are_readable(pytestconfig, monkeypatch):
    monkeypatch.chdir(pytestconfig.rootpath)
    problems = {entry.name: entry.problem for entry in list_studies() if entry.study is None}
    assert problems == {}
    assert "040-linear-rnn" in [entry.name for entry in list_studies()]


def test_a_study_is_named_like_its_file(pytestconfig, monkeypatch):
    monkeypatch.chdir(pytestconfig.rootpath)
    for entry in list_studies():
        assert entry.study is not None
        assert entry.study.name == entry.name
