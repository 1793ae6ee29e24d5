"""Fuzz tests of study files, results, tables and model folders: an onelaunch error or none, no stray writes, no hang.

Studies, results and tables are about ``ladder`` of ``tests/workbench/ladder.py``, an operation that has costs but never runs.

Each test starts from a valid file, puts hostile values in some places of it and sometimes damages its bytes. It then reads the
file and does everything that a command would do with it, except measuring or generating.

A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import copy
import io
import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

import onelaunch
from onelaunch import dispatch
from onelaunch.decode.generate import Model
from onelaunch.decode.model.weights import random_weights
from onelaunch.device.hardware import describe
from onelaunch.dispatch import measured
from onelaunch.errors import OneLaunchError
from onelaunch.operation import find_operation
from onelaunch.workbench.adopt import adopt
from onelaunch.workbench.decide.decision import concluded
from onelaunch.workbench.report import markdown, write_report
from onelaunch.workbench.report.terminal import show
from onelaunch.workbench.result import Result
from onelaunch.workbench.run import default_path
from onelaunch.workbench.study import Criterion
from onelaunch.workbench.study.plan import plan_study
from onelaunch.workbench.study.read import load_study
from tests.decode import models
from tests.workbench import ladder

SLOWEST = timedelta(seconds=10)
"""Time limit of one example of Hypothesis."""

few = settings(
    max_examples=250,
    derandomize=True,
    database=None,
    deadline=SLOWEST,
    suppress_health_check=list(HealthCheck),
)

fewer = settings(few, max_examples=150)
"""Settings in ``make test`` for examples that take long."""

# Values that a reader may not expect: numbers, other types, words of the formats, markup, control characters, and paths.
HOSTILE = (
    *(0, -1, 1, 3, 2**31, 2**63, 10**30, 10**400, -(10**30), 0.0, -0.5, 1e-320, 1e308, math.nan, math.inf, -math.inf),
    *(None, True, False, [], {}, [[]], [1, "a", None], {"a": {"b": []}}, {"": 0}),
    *("", " ", "NaN", "Infinity", "auto", "eager", "float16", "forward", "cold", "x" * 3000, "9" * 5000),
    *("<script>alert(1)</script>", 's" onload="alert(1)" x="', "$x_{$", "\\frac{", "a|b", "`a`", "[a](javascript:b)", "&lt;"),
    *("\x1b[2J", "a\nb", "\x00", "\r", "\u202eabc", "\ud800", "\u2028", "\x9b31m", "é" * 200),
    *("..", "../../escaped", "/", "~"),
    *("a/../../escaped", "{outside}/escaped", "{outside}", "C:\\escaped", "model.safetensors"),
)

Mutation = tuple[int, int, int]
"""One change of a tree: index of the changed place modulo their number, kind of change, and index into ``HOSTILE``."""

mutations = st.lists(
    st.tuples(st.integers(0, 2**20), st.integers(0, 5), st.integers(0, len(HOSTILE) - 1)), min_size=1, max_size=3
)
# Damage of a file's bytes, in some of the examples: kind, relative place, and bytes to insert; see damage().
damages = st.one_of(st.none(), st.none(), st.none(), st.tuples(st.integers(0, 4), st.floats(0, 1), st.binary(max_size=12)))


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Return all (container, key) pairs of a tree of dictionaries and lists."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in entries:
        yield tree, key
        yield from places(value)


def nested(depth: int) -> Any:
    """Return lists in lists, ``depth`` of them."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def mutate(tree: Any, chosen: list[Mutation], outside: Path) -> Any:
    """Return a copy of the tree, changed in some places.

    A place gets a hostile value or deeply nested lists, or it is removed, its key is renamed, or its list item is repeated.
    ``{outside}`` in a hostile value becomes a folder that must not be written to.
    """
    tree = copy.deepcopy(tree)
    for at, how, which in chosen:
        everywhere = list(places(tree))
        if not everywhere:
            return tree
        owner, key = everywhere[at % len(everywhere)]
        value = HOSTILE[which]
        if how >= 4:  # a hostile value of the same kind passes more checks
            alike = [each for each in HOSTILE if _kind(each) is _kind(owner[key])]
            value = alike[which % len(alike)]
        value = copy.deepcopy(value)  # later changes may be made inside it
        if isinstance(value, str):
            value = value.replace("{outside}", str(outside))
        if how == 0:
            del owner[key]
        elif how == 1 and isinstance(owner, dict):
            owner[str(value)] = owner.pop(key)
        elif how == 2 and isinstance(owner, list):
            owner.extend([copy.deepcopy(owner[key])] * 2)
        elif how == 3 and which % 4 == 0:
            owner[key] = nested(120)
        else:
            owner[key] = value
    return tree


def _kind(value: Any) -> type:
    """Return the type of a value; an integer counts as a float, since most checks take either."""
    return float if type(value) is int else type(value)


def damage(content: bytes, how: tuple[int, float, bytes] | None) -> bytes:
    """Truncate a file's content, insert bytes, prefix a byte-order mark, repeat its end, or prefix thousands of brackets."""
    if how is None:
        return content
    kind, where, noise = how
    cut = int(where * len(content))
    return (
        content[:cut],
        content[:cut] + noise + content[cut:],
        b"\xef\xbb\xbf" + content,
        content + content[cut:],
        noise + b"[" * 20_000 + content,
    )[kind]


def as_toml(value: Any) -> str:
    """Return a value as inline TOML. A value that TOML cannot express becomes text that no reader accepts."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {as_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if isinstance(value, float):
        return str(value)
    return json.dumps(value)


def toml_file(tree: Any) -> bytes:
    return "\n".join(f"{json.dumps(key)} = {as_toml(value)}" for key, value in tree.items()).encode("utf-8", "surrogatepass")


def json_file(tree: Any) -> bytes:
    return json.dumps(tree).encode("utf-8", "surrogatepass")


class Box:
    """Folders of one test: ``inside`` may be written and lies in ``outside``, which may not; ``given`` holds the input files."""

    def __init__(self, root: Path) -> None:
        self.outside, self.inside, self.given = root / "outside", root / "outside" / "inside", root / "given"
        for folder in (self.inside, self.given):
            folder.mkdir(parents=True)
        (self.outside / "sentinel").write_text("precious", encoding="utf-8")

    def seen(self) -> dict[str, bytes | None]:
        """Return everything that lies outside the writable folder."""
        found = (path for path in self.outside.rglob("*") if self.inside not in (path, *path.parents))
        return {str(path): path.read_bytes() if path.is_file() else None for path in found}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Let only onelaunch errors pass, and require that nothing is written outside the writable folder."""
        before = self.seen()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except OneLaunchError:
            pass
        finally:
            after = self.seen()
            for path in self.inside.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert after == before


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Box:
    return Box(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture(autouse=True)
def within_the_box(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test in the folder that may be written, with the tables of ``given`` as the user's."""
    monkeypatch.chdir(box.inside)
    monkeypatch.setenv("ONELAUNCH_TABLES", str(box.given / "tables"))


STUDY = {
    "name": "ladder-study",
    "question": "Is one launch enough?",
    "operation": "ladder",
    "baseline": "three",
    "variants": ["three", "two", "one"],
    "controls": ["product"],
    "directions": ["forward", "forward_backward"],
    "regimes": ["cold", "warm"],
    "rounds": 5,
    "notes": "A write-up reported **1.6x**.",
    "shapes": [
        {"name": "mega", "dtype": "float16", "scale": "full", "N": 1000, "V": 1000, "kind": "odd", "skip": ["two"]},
        {"name": "tiny", "dtype": "float32", "scale": "small", "N": 10, "V": 10, "directions": ["forward"]},
    ],
    "criteria": [
        {"name": "faster", "measure": "speedup", "of": {"launches": [1, 2]}, "over": "three", "at": "mega", "at_least": 1.3},
        {"name": "exact", "measure": "error", "of": "one", "at": ["mega", "tiny"], "in_at_least": 1, "at_most": 1e-3},
        {"name": "few", "measure": "launches", "of": "one", "at": "tiny", "equals": 1, "decides": False},
    ],
}


@few
@given(chosen=mutations, how=damages)
def test_study_files(box: Box, chosen: list[Mutation], how: Any) -> None:
    path = box.given / "study.toml"
    path.write_bytes(damage(toml_file(mutate(STUDY, chosen, box.outside)), how))
    with box.watched():
        study = load_study(path)
        study.digest()
        assert box.inside in default_path(study, "cpu").resolve().parents
        for scale in ("small", "full"):
            plan_study(study, ladder.RATES, "cpu", scale)


def stored() -> dict[str, Any]:
    """Return a small result: two shapes, three variants, and criteria of every kind of measure."""
    faster = Criterion(name="faster", measure="speedup", of={"launches": [1, 2]}, at="mega", at_least=1.3)
    fewer = Criterion(name="fewer bytes", measure="dram_bytes_ratio", of="one", at="mega", at_least=1.2)
    exact = Criterion(name="exact", measure="error", of="one", at="mega", at_most=1e-3)
    near = Criterion(name="near", measure="time_over_floor", of="one", at=("mega",), at_most=3)
    declared = ladder.study(faster, fewer, exact, near, notes="A write-up reported **1.6x**.")
    cells = (
        *(ladder.ok_cell(name, time, rounds=3, peak=1 << 20) for name, time in (("three", 20.0), ("one", 9.0), ("product", 5.0))),
        ladder.ok_cell("one", 7.0, of=ladder.TINY, rounds=3, counted=4e6),
        ladder.bad_cell("two", "incorrect", "y differs"),
    )
    return json.loads(concluded(ladder.measured(declared, *cells, notes=("In three rounds.",))).model_dump_json())


RESULT = stored()


@fewer
@given(chosen=mutations, how=damages)
def test_results(box: Box, chosen: list[Mutation], how: Any) -> None:
    check_result(box, chosen, how)


@pytest.mark.every
@few
@given(chosen=mutations, how=damages)
def test_many_results(box: Box, chosen: list[Mutation], how: Any) -> None:
    check_result(box, chosen, how)


def check_result(box: Box, chosen: list[Mutation], how: Any) -> None:
    """Read a changed result, and make its reports, its decision and its table."""
    path = box.given / "result.json"
    path.write_bytes(damage(json_file(mutate(RESULT, chosen, box.outside)), how))
    with box.watched():
        result = Result.load(path)
        printed = io.StringIO()
        show(result, Console(file=printed, width=100), full=True)
        assert "\x1b" not in printed.getvalue()
        pages = [markdown.render(result)]
        if chosen[0][0] % 5 == 0:  # whole reports in a fifth of the examples only, because plots take most of the time
            written = write_report(result, box.inside / "report")
            assert Result.load(written["json"]) == result
            pages.append(written["html"].read_text(encoding="utf-8"))
        for page in pages:
            assert "<script>alert" not in page
            assert ' onload="alert' not in page
        concluded(result)
        adopt([result], box.inside / "tables")


TABLE = {
    "device": "A CPU",
    "source": ["ladder-study of 2026-11-20"],
    "rows": [
        {
            "operation": "ladder",
            "direction": "forward",
            "dtype": "float32",
            "flags": ["odd"],
            "sizes": {"N": 10, "V": 10},
            "microseconds": {"three": 5.0, "one": 3.0},
        },
        {
            "operation": "ladder",
            "direction": "forward",
            "dtype": "float32",
            "sizes": {"N": 20, "V": 10},
            "microseconds": {"one": 4.0},
        },
    ],
}


def forget() -> None:
    """Discard cached tables, because a process reads each table once."""
    for module in (measured, dispatch):
        for found in vars(module).values():
            if callable(clear := getattr(found, "cache_clear", None)):
                clear()


@pytest.fixture
def _no_tables_are_kept() -> Iterator[None]:
    """Discard the tables of the test at its end, so that later tests do not see them."""
    yield
    forget()


@pytest.mark.usefixtures("_no_tables_are_kept")
@few
@given(chosen=mutations, how=damages)
def test_tables(box: Box, chosen: list[Mutation], how: Any) -> None:
    folder = box.given / "tables"
    folder.mkdir(exist_ok=True)
    device = describe("cpu")
    table = mutate(TABLE | {"device": device.name}, chosen, box.outside)
    for name in {device.slug, device.table}:  # ``cpu``, as older versions named the table of every CPU, and this CPU's own
        (folder / f"{name}.json").write_bytes(damage(json_file(table), how))
    forget()
    operation = find_operation("ladder")
    with box.watched():
        for sizes in ({"N": 10, "V": 10}, {"N": 15, "V": 12}):
            query = operation.query(operation.case("float32", **sizes), "cpu")
            assert dispatch.choose(query).name in operation.variants
            assert dispatch.explain(query).because
    with box.watched():  # adopt a new result into the existing table
        (box.inside / "some-gpu.json").write_bytes(damage(json_file(table), how))
        adopt([Result.model_validate(RESULT)], box.inside)


@pytest.fixture(scope="module")
def model_folder(box: Box) -> Path:
    """Write a tiny model with two files of weights and the bundled tokenizer, without the tokens that the model does not have."""
    pytest.importorskip("safetensors", reason="needs the extra decode")
    pytest.importorskip("tokenizers", reason="needs the extra decode")
    folder = models.write(box.given / "model", random_weights(models.SMALL), shards=2)
    bundled = Path(onelaunch.__file__).parent / "decode" / "tiny"
    tokenizer = json.loads((bundled / "tokenizer.json").read_text(encoding="utf-8"))
    kept = {text: number for text, number in tokenizer["model"]["vocab"].items() if number < models.SMALL.vocab_size}
    tokenizer["model"] |= {"vocab": kept, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(bundled / name, folder / name)
    return folder


@few
@given(which=st.integers(0, 6), chosen=mutations, how=damages)
def test_model_folders(box: Box, model_folder: Path, which: int, chosen: list[Mutation], how: Any) -> None:
    folder = box.given / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model_folder, folder)
    # The index ``which`` chooses the file to change; the configuration is chosen most often.
    names = ("config.json", "config.json", "config.json", "tokenizer.json", "generation_config.json")
    name = (*names, "model.safetensors.index.json", "model-0.safetensors")[which]
    content = (folder / name).read_bytes()
    if name.endswith(".json"):
        content = json_file(mutate(json.loads(content), chosen, box.outside))
    else:
        # Weights are always damaged, at least by truncation.
        how = how or (0, chosen[0][0] / 2**20, b"")
    (folder / name).write_bytes(damage(content, how))
    with box.watched():
        model = Model.from_pretrained(folder, device="cpu")
        assert model.config.num_hidden_layers < 100  # more would have no weights in the folder


def test_the_unmutated_files_are_valid(box: Box, model_folder: Path) -> None:
    path = box.given / "valid"
    path.write_bytes(toml_file(STUDY))
    assert load_study(path).name == "ladder-study"
    assert Result.model_validate(RESULT).decision is not None
    assert Model.from_pretrained(model_folder, device="cpu").config.num_hidden_layers == models.SMALL.num_hidden_layers


def test_the_box_detects_other_errors_and_stray_writes(box: Box) -> None:
    def hit() -> None:
        (box.outside / "escaped").write_text("", encoding="utf-8")

    def wrong() -> None:
        raise KeyError("no error of ours")

    escapes: tuple[Callable[[], None], ...] = (hit, wrong)
    for escape in escapes:
        with pytest.raises((AssertionError, KeyError)), box.watched():
            escape()
    (box.outside / "escaped").unlink()
