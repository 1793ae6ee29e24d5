"""Tests of ``onelaunch tune``, which measures variants on this machine and writes the user's table, from which ``auto`` chooses.

``call`` runs ``onelaunch`` in this process and returns the exit ``code``, stdout (``out``) and stderr (``err``). The automatic
fixtures of ``conftest.py`` prepare each test: short samples, made-up peaks, and an empty working directory ``here``.

The fixture ``scale`` registers the toy operation ``scale`` of ``tests/toys.py``. Its variant ``loop`` multiplies one element
after the other, and at :data:`SIZE` elements takes a hundred times as long as ``vector``. The fixture ``slow_first`` makes
``loop`` the first in the order of preference, so that only measured times make ``auto`` take ``vector``. ``choice`` tells what
``auto`` takes, and why.

``prose`` compares a text with its entry in tests/snapshots/prose.txt, whose key is the node id of the test. A test fails if it
does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from onelaunch import dispatch
from onelaunch.dispatch import measured
from onelaunch.errors import ArgumentError, TableNotice
from onelaunch.operation import Case, operations
from onelaunch.workbench import running, tune
from onelaunch.workbench.result import Result
from tests.workbench.rogues_timing import at_count

SIZE = 300
"""Number of elements of the calls that are tuned."""

SHAPE = ("--shape", f"N={SIZE}", "--dtype", "float32", "--device", "cpu")
QUICK = ("--rounds", "7", "--time-cap", "1", "--in-process")
FORWARD = ("--direction", "forward")

forked = pytest.mark.skipif(sys.platform != "linux", reason="the child is forked on Linux alone")


@pytest.fixture(autouse=True)
def table(tmp_path, monkeypatch):
    """Return the user's folder of tables, empty at first. Tables that the process has cached are dropped."""
    monkeypatch.setenv("ONELAUNCH_TABLES", str(tmp_path / "tables"))
    forget()
    yield tmp_path / "tables"
    forget()


@pytest.fixture
def slow_first(scale):
    """Make ``loop`` the first in the order of preference of ``scale``, ``vector`` its only rival, and return the operation."""
    scale.defaults["cpu"] = ("loop", "vector")
    del scale.variants["no_backward"]  # about as fast as vector
    forget()
    return scale


def forget():
    """Read tables again, as a process does that has just started."""
    measured.forget()
    dispatch.forget()


def choice(scale, size=SIZE, *, grad=False):
    """Return the explanation of the variant that ``auto`` takes for so many elements."""
    forget()
    return dispatch.explain(scale.query(scale.case("float32", N=size), "cpu", grad=grad))


def stored(table):
    """Return the content of the only table in the folder."""
    (path,) = table.glob("*.json")
    return path, json.loads(path.read_text())


def change(table, **parts):
    """Change parts of all rows of the table, as another version of the software or of a variant would have written them."""
    path, content = stored(table)
    for row in content["rows"]:
        row.update(parts)
    path.write_text(json.dumps(content))


def test_a_table_written_by_tune_changes_what_auto_takes(call, table, slow_first):
    assert choice(slow_first).chosen == "loop"
    answer = call("tune", "scale", *SHAPE, *QUICK, width=200)
    assert answer.code == 0, answer.err
    path, _ = stored(table)
    assert f"N={SIZE}, float32 forward loop vector" in answer.out
    assert "Changed: 2 of 2 calls." in answer.out
    assert f"Written: {path}" in answer.out
    assert choice(slow_first).chosen == choice(slow_first, grad=True).chosen == "vector"
    assert slow_first(torch.ones(SIZE)).tolist() == [2.0] * SIZE


def test_explain_names_whose_table_spoke(call, table, slow_first):
    call("tune", "scale", *SHAPE, *FORWARD, *QUICK)
    told = choice(slow_first)
    date = stored(table)[1]["rows"][0]["run"][:10]
    assert told.whose == f"your own table of {date}, written by onelaunch tune"
    assert told.whose in told.because
    answer = call("explain", "scale", *SHAPE, width=200)
    assert answer.out.count(f"{told.whose}") == 2
    change(table, by="")  # as study adopt writes rows
    assert choice(slow_first).whose == f"your own table of {date}, written by onelaunch study adopt"


def test_a_row_holds_what_it_was_measured_with(call, table, slow_first):
    call("tune", "scale", *SHAPE, *FORWARD, *QUICK)
    (row,) = stored(table)[1]["rows"]
    assert row["by"] == "onelaunch tune"
    assert row["software"]["torch"] == str(torch.__version__)
    assert row["code"].keys() == row["microseconds"].keys() == {"loop", "vector"}
    assert row["unsupported"] == ["elsewhere"]
    assert row["noise"] >= 1.01


@pytest.mark.parametrize(
    "parts", [{"software": {"torch": "1.0"}}, {"code": {"vector": "an older digest"}}], ids=["software", "code"]
)
def test_a_stale_row_is_ignored_with_one_notice(call, table, slow_first, parts, prose):
    call("tune", "scale", *SHAPE, *FORWARD, *QUICK)
    change(table, **parts)
    versions = {str(torch.__version__).replace("+", r"\+"): "<version>", r"cpu-[\w-]+\.json": "<table>"}
    with prose.warns(TableNotice, match="onelaunch tune", mask=versions) as told:
        assert choice(slow_first).chosen == "loop"
        dispatch.forget()
        assert dispatch.choose(slow_first.query(slow_first.case("float32", N=SIZE + 1), "cpu")).name == "loop"
    assert len(told) == 1
    answer = call("tune", "scale", "--show", "--device", "cpu", width=250)
    assert "some times" in answer.out
    assert call("tune", "scale", *SHAPE, *FORWARD, *QUICK).code == 0  # tuning again mends it
    assert choice(slow_first).chosen == "vector"


def test_variants_within_the_noise_count_as_equally_fast(call, table, slow_first):
    call("tune", "scale", *SHAPE, *FORWARD, *QUICK)
    change(table, microseconds={"loop": 10.5, "vector": 10.0}, noise=1.01)
    assert choice(slow_first).chosen == "vector"
    change(table, noise=1.06)
    told = choice(slow_first)
    assert told.chosen == "loop"
    assert "at most 6% slower (the noise of these times)" in told.because


def interrupt_after_the_first_call(monkeypatch):
    """Press Ctrl-C once the first call is measured."""
    keep = running.Run.save_partial

    def keep_and_interrupt(self):
        keep(self)
        if len(self.finished) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(running.Run, "save_partial", keep_and_interrupt)


def test_ctrl_c_keeps_the_finished_calls_and_resume_measures_the_rest(call, table, slow_first, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_after_the_first_call(patch)
        answer = call("tune", "scale", *SHAPE, *QUICK)
    assert answer.code == 130
    assert "--resume measures the rest" in answer.err
    assert "not measured yet" in answer.out
    assert [row["direction"] for row in stored(table)[1]["rows"]] == ["forward"]
    assert (choice(slow_first).chosen, choice(slow_first, grad=True).chosen) == ("vector", "loop")
    first = stored(table)[1]["rows"][0]["microseconds"]
    assert call("tune", "scale", *SHAPE, *QUICK, "--resume").code == 0
    rows = stored(table)[1]["rows"]
    assert [row["direction"] for row in rows] == ["forward", "forward_backward"]
    assert rows[0]["microseconds"] == first  # not measured again
    assert choice(slow_first, grad=True).chosen == "vector"


def test_resume_begins_anew_where_the_calls_or_the_code_are_others(call, table, slow_first, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_after_the_first_call(patch)
        call("tune", "scale", *SHAPE, *QUICK)
    other = ("--shape", "N=200", "--dtype", "float32", "--device", "cpu")
    answer = call("tune", "scale", *other, *FORWARD, *QUICK, "--resume")
    assert answer.code == 0
    assert "cannot be resumed: study" in answer.err
    assert "The tuning begins anew." in answer.err
    monkeypatch.setattr(tune, "run_study", lambda *_, **__: pytest.fail("a finished tuning is measured again"))
    assert call("tune", "scale", *other, *FORWARD, *QUICK, "--resume").code == 0


def test_no_call_begins_after_the_time_limit(call, table, slow_first, prose):
    answer = call("tune", "scale", *SHAPE, *QUICK, "--time-limit", "0.1", width=200)  # the first call takes longer
    assert answer.code == 0
    assert [row["direction"] for row in stored(table)[1]["rows"]] == ["forward"]
    prose(answer.raw.splitlines()[-1])
    assert call("tune", "scale", *SHAPE, *QUICK, "--resume").code == 0
    assert len(stored(table)[1]["rows"]) == 2


@forked
def test_a_variant_that_ends_its_process_costs_only_its_own_times(call, table, slow_first):
    slow_first.variant("rogue", launches=1)(at_count(1, lambda: os._exit(3)))
    answer = call("tune", "scale", *SHAPE, *FORWARD, "--rounds", "7", "--time-cap", "1")
    assert answer.code == 0, answer.err
    (row,) = stored(table)[1]["rows"]
    assert "rogue" not in row["microseconds"]
    assert choice(slow_first).chosen == "vector"


def test_a_dry_run_lists_the_typical_calls_and_measures_nothing(call, table, slow_first, prose):
    slow_first.typical(lambda device: [slow_first.case("float32", N=3), slow_first.case("float32", N=2000)])
    answer = call("tune", "scale", "--device", "cpu", "--dry-run", width=200)
    assert answer.code == 0
    assert not table.exists()
    lines = [line for line in answer.raw.splitlines() if "(" not in line and "Table:" not in line]
    prose("\n".join(line.rstrip() for line in lines))


def test_show_and_remove_are_about_the_rows_of_tune_alone(call, table, slow_first):
    call("tune", "scale", *SHAPE, *FORWARD, *QUICK)
    path, content = stored(table)
    adopted = {**content["rows"][0], "sizes": {"N": 7}, "by": "onelaunch study adopt"}
    path.write_text(json.dumps({**content, "source": [*content["source"], "a study"], "rows": [*content["rows"], adopted]}))
    shown = call("tune", "scale", "--show", "--device", "cpu", width=200)
    assert f"scale N={SIZE}, float32 forward vector" in shown.out
    assert "N=7" not in shown.out
    assert f"Removed: 1 row of {path}" in call("tune", "scale", "--remove", "--device", "cpu", width=200).out
    assert [row["sizes"] for row in stored(table)[1]["rows"]] == [{"N": 7}]
    assert stored(table)[1]["source"] == ["a study"]
    assert "has written no times for scale" in call("tune", "scale", "--show", "--device", "cpu", width=200).out
    assert not list((table / tune.FOLDER).rglob("*.json"))


@pytest.mark.parametrize("text", ["{", '{"device": "Another", "source": [], "rows": []}'], ids=["damaged", "another device"])
def test_a_table_that_cannot_take_the_times_is_an_error_before_anything_is_measured(call, table, slow_first, text, monkeypatch):
    monkeypatch.setattr(tune, "run_study", lambda *_, **__: pytest.fail("it is measured"))
    where = tune.prepare(slow_first, [slow_first.case("float32", N=SIZE)], ("forward",), "cpu")
    where.table.parent.mkdir()
    where.table.write_text(text)
    answer = call("tune", "scale", *SHAPE, *QUICK)
    assert answer.code in (1, 2)
    assert where.table.name in answer.err
    assert where.table.read_text() == text


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("scale", "--all"),
        ("--all", "--shape", "N=3"),
        ("scale",),
        ("scale", "--shape", "M=3"),
        ("scale", "--shape", "N=3,decay=other"),
        ("scale", "--shape", "N=3", "--dry-run", "--show"),
        ("scal", "--show"),
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_refused_in_one_line(call, scale, arguments, prose):
    answer = call("tune", *arguments, "--device", "cpu")
    assert answer.code == 2
    prose(answer.err)
    assert "Traceback" not in answer.err


def test_every_operation_lists_typical_calls_that_can_be_tuned():
    for operation in operations():
        if not operation.__module__.startswith("onelaunch."):
            continue
        for device_type in ("cuda", "cpu"):
            cases = operation.typical_cases(device_type)
            assert cases or (operation.name, device_type) == ("decode_step", "cpu")
            if cases:
                tuning = tune.prepare(operation, cases, ("forward", "forward_backward"), "cpu")  # plans them, and runs nothing
                assert {shape.name for shape in tuning.study.shapes} <= {tune.name_of(case) for case in cases}
                assert [shape.sizes for shape in tuning.study.shapes] == [dict(case.sizes) for case in cases]


def test_typical_calls_of_another_operation_are_refused(scale, prose):
    scale.typical(lambda device: [Case("other", {"N": 3}, torch.float32)])
    with prose.raises(ArgumentError):
        scale.typical_cases("cpu")


# An operation of a package outside the repository

OPERATION = '''
"""Operation ``add_one``: x + 1, by a slow variant, which is preferred, and a fast one."""
from dataclasses import dataclass

import torch

from onelaunch import dispatch
from onelaunch.operation import Cost, Query, Reading, operation

ran = []


@dataclass(frozen=True)
class AddCall:
    x: torch.Tensor

    def query(self):
        return Query("add_one", str(self.x.device), self.x.dtype, tuple(self.x.shape), self.x.requires_grad)


@operation(dimensions=("N",), outputs=("y",), bind=AddCall, options={}, defaults={"cpu": ("slow", "fast")})
def add_one(x, *, variant=dispatch.AUTO):
    """Add one to each element."""
    (y,) = dispatch.run(add_one, AddCall(x), variant)
    return y


@add_one.oracle
def oracle(x):
    return (x + 1,)


@add_one.inputs
def inputs(case, device, generator):
    return Reading({"x": torch.randn(case.sizes["N"], device=device, generator=generator).to(case.dtype)}, ("x",))


@add_one.costs
def cost(case, variant, direction):
    return Cost(case.sizes["N"], 2 * case.dtype.itemsize * case.sizes["N"], 1)


@add_one.queries
def query(case, device, grad):
    return Query("add_one", device, case.dtype, (case.sizes["N"],), grad)


@add_one.typical
def typical(device):
    yield add_one.case("float32", N=1000)


@add_one.variant("slow", yardstick=True)
def slow(call):
    """Add to one element after the other."""
    ran.append("slow")
    return (torch.stack([element + 1 for element in call.x]),)


@add_one.variant("fast", launches=1)
def fast(call):
    """Add to all elements at once."""
    ran.append("fast")
    return (call.x + 1,)
'''

STUDY = """
name = "acme-study"
question = "Is one addition faster than many?"
operation = "add_one"
baseline = "slow"
rounds = 7
regimes = ["cold"]

[[shapes]]
name = "only"
scale = "small"
dtype = "float32"
N = 1000

[[criteria]]
name = "faster"
measure = "speedup"
of = "fast"
at_least = 2.0
"""

# Runs commands one after another in a process, with made-up peaks and short samples, and without plots, which would take seconds.
COMMANDS = """
import sys
import torch._dynamo  # once, and not in every forked child
from onelaunch.cli.main import app
from onelaunch.device import peaks, quick_look
from onelaunch.device.hardware import Ceilings
from onelaunch.workbench.measure import sampling, timing
from onelaunch.workbench.report import page
page.plots = lambda result: ()
quick_look.implausible = lambda device, found: ""
known = Ceilings(1e12, {"float32": 1e13}, 1e-6, "2026-11-20T12:00:00+00:00", peaks.software("cpu"), 2e12, {"copy": 0.01})
peaks.remember("cpu", known)
timing.WARM_UP_SECONDS["cpu"] = 0.0
sampling.CACHES, sampling.CPU_SAMPLE_SECONDS = 0, 1e-4
explain = "explain add_one --shape N=1000 --dtype float32 --device cpu"
for line in (explain, "study run acme-study --device cpu", "tune add_one --device cpu --direction forward --rounds 7", explain):
    sys.argv = ["onelaunch", *line.split()]
    try:
        app()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    print(f"<exit code {code}>", flush=True)
"""

CALL = """
import torch, acme_add
from onelaunch.operation import find_operation
assert find_operation("add_one")(torch.ones(1000)).tolist() == [2.0] * 1000
print(acme_add.ran)
"""


@forked
def test_an_operation_and_a_study_of_another_package_are_studied_tuned_and_dispatched(table, here):
    """The distribution lies on the path, as pip leaves one. A new process then calls ``auto``."""
    site = here / "site"
    (site / "acme_studies").mkdir(parents=True)
    (site / "acme_add.py").write_text(OPERATION, encoding="utf-8")
    (site / "acme_studies" / "acme-study.toml").write_text(STUDY, encoding="utf-8")
    facts = site / "acme_add-1.2.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-add\nVersion: 1.2\n", encoding="utf-8")
    (facts / "entry_points.txt").write_text("[onelaunch.plugins]\nadd = acme_add\n", encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), *sys.path]),
        "ONELAUNCH_COMMIT": "abc1234",
        "ONELAUNCH_STUDIES": str(site / "acme_studies"),
        "COLUMNS": "250",
    }

    def process(code):
        ended = subprocess.run(
            [sys.executable, "-c", code], cwd=here, env=environment, capture_output=True, encoding="utf-8", check=False
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    said = process(COMMANDS)
    assert said.count("<exit code 0>") == 4, said
    before, studied, tuned, after = said.split("<exit code 0>\n")[:4]
    assert "slow runs: it is the first in add_one's order of preference" in before
    result = Result.load(here / "results" / "cpu" / "acme-study.json")
    assert {cell.variant: cell.status for cell in result.cells} == {"slow": "ok", "fast": "ok"}
    assert result.provenance.variants["fast"].distribution == "acme-add 1.2"
    assert "acme-study" in studied
    assert "Changed: 1 of 1 call." in tuned
    assert "fast runs: it is the fastest of our variants" in after
    assert "written by onelaunch tune" in after
    assert process(CALL) == "['fast']\n"
