"""Tests of ``tools/measure_on_gpus.py`` on a machine without a GPU, with short Python commands in place of measurements.

Those of ``measurements.toml`` check that its studies, tests, tools, tasks and options exist.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from itertools import pairwise

import pytest
import typer

from onelaunch.cli.application import application
from onelaunch.model_studies.continued import select
from onelaunch.model_studies.declare import find_model_study
from onelaunch.model_studies.tasks import KINDS, tasks_of
from onelaunch.rank_studies.declare import find_rank_study
from onelaunch.workbench.study.read import find_study
from tools import measure_on_gpus, measurement_queue
from tools.measure_on_gpus import main, read
from tools.measurement_queue import Margins, Measurement, Queue

NOTE = """
import pathlib, sys, time
name, seconds, words = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
begun = time.monotonic()
time.sleep(seconds)
pathlib.Path(name).write_text(" ".join(map(str, [begun, time.monotonic(), *words])))
"""
"""Program that sleeps, then writes when it began and ended, and its further arguments, into the file it is given."""

STUBBORN = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
"""Program that ignores SIGINT."""


def python(program, *words):
    return ("python", "-c", program, *words)


def note(name, seconds=0.3, **options):
    """Return a measurement that takes some seconds, and writes its times, GPU and seconds left into a file of its name."""
    return Measurement(name, python(NOTE, f"{{out}}/{name}", str(seconds), "{gpu}", "{left}"), 60, **options)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    """Look at the running measurements more often, so that the tests take less time."""
    monkeypatch.setattr(measurement_queue, "POLL_SECONDS", 0.02)


@pytest.fixture
def interruptible():
    """Let processes that a test starts receive SIGINT: they would ignore it if this process does, as in a shell's background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def run(tmp_path, interruptible):
    """Return a function that runs measurements on some GPUs, and returns their outcomes by name."""

    def run(measurements, gpus=1, seconds=100.0, margins=None):
        found = Queue(measurements, gpus, tmp_path, time.monotonic() + seconds, margins).run()
        return {each.name: each for each in found}

    return run


@pytest.fixture
def times(tmp_path):
    """Return a function that reads when measurements began and ended."""
    return lambda *names: [tuple(map(float, (tmp_path / name).read_text().split()[:2])) for name in names]


def test_measurements_run_one_after_the_other_in_their_order_on_one_gpu(run, times):
    outcomes = run([note("b", 0.05), note("a", 0.05), note("c", 0.05)])
    assert [(each.name, each.state, each.code, each.good) for each in outcomes.values()] == [
        (name, "ended", 0, True) for name in "bac"
    ]
    assert all(before[1] <= after[0] for before, after in pairwise(times("b", "a", "c")))


def test_measurements_run_side_by_side_each_on_a_gpu_of_its_own(run, times, tmp_path):
    run([note("a", 0.8), note("b", 0.8)], gpus=2)
    a, b = times("a", "b")
    assert max(a[0], b[0]) < min(a[1], b[1])
    assert [(tmp_path / name).read_text().split()[2] for name in "ab"] == ["0", "1"]


@pytest.mark.parametrize("gpus", [2, "all"])
def test_one_that_needs_several_gpus_waits_for_them_and_holds_back_those_behind_it(gpus, run, times):
    run([note("first", 0.3), note("wide", 0.05, gpus=gpus), note("last", 0.05)], gpus=2)
    first, wide, last = times("first", "wide", "last")
    assert first[1] <= wide[0]
    assert wide[1] <= last[0]


def test_quiet_ones_run_beside_quiet_ones_alone(run, times):
    run([note("a", 0.05), note("q", 0.8, quiet=True), note("r", 0.8, quiet=True), note("b", 0.05)], gpus=4)
    a, q, r, b = times("a", "q", "r", "b")
    assert a[1] <= min(q[0], r[0])
    assert max(q[0], r[0]) < min(q[1], r[1])
    assert max(q[1], r[1]) <= b[0]


def test_at_its_limit_one_is_interrupted_and_killed_later(run):
    polite = Measurement("polite", python("import time; print('waits', flush=True); time.sleep(60)"), 1.0)
    stubborn = Measurement("stubborn", python(STUBBORN), 1.0)
    outcomes = run([polite, stubborn], gpus=2, margins=Margins(kill=1.5))
    assert {(each.state, each.good) for each in outcomes.values()} == {("stopped", False)}
    assert outcomes["polite"].code == -signal.SIGINT
    assert outcomes["polite"].tail[-1] == "KeyboardInterrupt"
    assert outcomes["stubborn"].code == -signal.SIGKILL
    assert outcomes["stubborn"].tail == ("deaf",)
    assert 1.0 <= outcomes["polite"].seconds < 2.5 <= outcomes["stubborn"].seconds < 10


def test_sigint_reaches_children_of_onelaunch_but_no_compiler_and_nothing_is_left(run, tmp_path):
    """A child in a session of its own, as torchrun starts ranks, is killed with the others."""
    child = (
        "import pathlib, sys, time\n"
        "try:\n    pathlib.Path(sys.argv[2]).touch(); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    pathlib.Path(sys.argv[2]).write_text('interrupted')"
    )
    parent = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"child = [sys.executable, '-c', {child!r}]\n"
        "restored = {'preexec_fn': lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}\n"
        "for words, options in [(['onelaunch.child', 'ours'], {}), (['compiler', 'other'], {}),\n"
        "                       (['rank', 'apart'], {'start_new_session': True})]:\n"
        "    started = subprocess.Popen(child + words, cwd=sys.argv[1], **restored, **options)\n"
        "    print(started.pid, flush=True)\n"
        "time.sleep(60)"
    )
    outcomes = run([Measurement("family", python(parent, "{out}"), 1.5)], margins=Margins(kill=0.5))
    assert outcomes["family"].code == -signal.SIGKILL
    assert {name: (tmp_path / name).read_text() for name in ("ours", "other", "apart")} == {
        "ours": "interrupted", "other": "", "apart": "",
    }  # fmt: skip
    pids = set(map(int, outcomes["family"].tail))
    assert len(pids) == 3
    deadline = time.monotonic() + 5
    while running := {each.pid for each in measurement_queue.processes() if each.pid in pids and any(each.words[0])}:
        assert time.monotonic() < deadline, running
        time.sleep(0.05)


def test_before_the_deadline_running_ones_are_stopped_and_nothing_starts(run):
    outcomes = run([note("long", 60), note("next", 0.05)], seconds=1.5, margins=Margins(start=0.5, stop=0.5, kill=5.0))
    assert (outcomes["long"].state, outcomes["next"].state) == ("stopped", "not started")
    assert 1.0 <= outcomes["long"].seconds < 5
    assert str(outcomes["next"]) == "next: not started"


def test_nothing_starts_with_fewer_than_40_seconds_left(run):
    assert run([note("a")], seconds=39.5)["a"].state == "not started"


def test_left_is_what_the_deadline_and_the_limit_leave_less_the_start(run, tmp_path):
    run([note("a", 0.0)], seconds=82.5)
    assert (tmp_path / "a").read_text().split()[3] in ("39", "40")  # 82.5 - 30 - 12, or a little less
    run([note("b", 0.0)], seconds=1000)
    assert (tmp_path / "b").read_text().split()[3] == "48"  # its limit of 60, less 12


def test_exit_codes_of_success_are_declared(run):
    ends = {name: Measurement(name, python("raise SystemExit(130)"), 60, codes=codes) for name, codes in CODES.items()}
    outcomes = run(list(ends.values()))
    assert {name: (each.state, each.code, each.good) for name, each in outcomes.items()} == {
        "plain": ("ended", 130, False), "part": ("ended", 130, True),
    }  # fmt: skip


CODES = {"plain": (0,), "part": (0, 130)}


def test_a_command_that_cannot_start_ends_nothing_else(run):
    outcomes = run([Measurement("absent", ("no-such-command",), 60), note("next", 0.0)])
    assert (outcomes["absent"].state, outcomes["next"].state) == ("not started", "ended")
    assert "no-such-command" in outcomes["absent"].tail[0]


def test_logs_are_appended_and_the_summary_has_the_last_lines_of_this_run(run, tmp_path):
    run([Measurement("a", python("for each in range(6): print('first', each)"), 60)])
    outcomes = run([Measurement("a", python("print('second', end=2 * chr(10))"), 60)])
    assert outcomes["a"].tail == ("second",)
    log = (tmp_path / "logs" / "a.log").read_text()
    assert log.count("first") == 6 + 1  # the command is logged too
    assert log.count("GPUs 0: ") == log.count("--- ended with exit code 0 after ") == 2


def test_visible_gpus_are_counted_among_those_of_the_tool(run, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    show = python("import os, sys; print(sys.argv[1], os.environ['CUDA_VISIBLE_DEVICES'], os.environ.get('MORE'))", "{gpu}")
    others = [note("a", 0.5), Measurement("b", show, 60, gpus=2, visible=True, environment={"MORE": "1"})]
    assert run(others, gpus=3)["b"].tail == ("0 5,7 1",)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert run(others, gpus=3)["b"].tail == ("0 1,2 1",)


def test_output_becomes_a_result_only_if_the_run_ends_well(run, tmp_path):
    for words, code in (("first", 0), ("second", 1)):
        program = f"import sys; print('{words}'); print('to the log', file=sys.stderr); sys.exit({code})"
        outcomes = run([Measurement("a", python(program), 60, stdout="a.jsonl")])
        assert outcomes["a"].tail == ("to the log",)
        assert (tmp_path / "a.jsonl").read_text() == "first\n"


def test_files_that_exist_are_passed_by_also(run, tmp_path):
    (tmp_path / "one.json").touch()
    merge = Measurement("a", python("import sys; print(*sys.argv[1:])"), 60, also=("none.json", "one.json"))
    assert run([merge])["a"].tail == (f"--also {tmp_path / 'one.json'}",)


@pytest.fixture
def declared(tmp_path):
    """Return a function that writes a file of measurements and returns its path."""

    def write(text):
        path = tmp_path / "declared.toml"
        path.write_text(text)
        return path

    return write


PAIR = """
[commands]
say = ["python", "-c", "import sys; print(sys.argv[1:]); sys.exit(sys.argv[1] == 'bad')"]
[[measurements]]
name = "good"
seconds = 60
command = "say"
arguments = ["{name}"]
[[measurements]]
name = "bad"
gpus = 2
seconds = 60
command = "say"
arguments = ["{name}"]
"""


def test_the_summary_is_in_the_order_of_the_names_and_the_exit_code_tells(declared, tmp_path, capsys):
    options = ["--declared", str(declared(PAIR)), "--out", str(tmp_path / "out"), "--gpus", "2", "--seconds", "100"]
    assert main([*options, "good"]) == 0
    capsys.readouterr()
    assert main([*options, "bad", "good"]) == 1
    lines = [re.sub(r"\d+ s$", "0 s", line) for line in capsys.readouterr().out.splitlines() if not line.startswith("[")]
    assert lines == [
        "bad: ended, exit code 1, 0 s", "    ['bad']", "good: ended, exit code 0, 0 s", "    ['good']",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ugly"], "ugly is no measurement; known are good, bad"),
        (["good", "good"], "good is named twice"),
        (["bad", "--gpus", "1"], "bad needs 2 GPUs, and there are 1"),
        (["good", "--gpus", "0"], "the number of GPUs is 0"),
        ([], "at least one NAME"),
        (["good", "--from", "nowhere"], "nowhere"),
    ],
)
def test_errors_are_raised_before_anything_runs(words, said, declared, tmp_path, capsys):
    options = ["--declared", str(declared(PAIR)), "--out", str(tmp_path / "out"), "--gpus", "2", "--seconds", "100"]
    with pytest.raises(SystemExit) as ended:
        main([*options, *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PAIR.replace('"bad"\ngpus', '"good"\ngpus'), "good is declared twice"),
        (PAIR.replace("gpus", "cards"), "unknown key cards"),
        (PAIR.replace("gpus = 2", "gpus = 0"), "bad: gpus is 0"),
        (PAIR.replace("gpus = 2", 'gpus = "both"'), "bad: gpus is 'both'"),
        (PAIR.replace('command = "say"', 'command = "sing"'), "needs a name, a command and seconds"),
        (PAIR.replace("seconds = 60", ""), "needs a name, a command and seconds"),
    ],
)
def test_a_wrong_declaration_is_an_error(text, said, declared):
    with pytest.raises(ValueError, match=said):
        read(declared(text))


def test_stored_results_are_copied_where_there_are_none(declared, tmp_path):
    source, out = tmp_path / "stored", tmp_path / "out"
    for name in ("a.json", "a.tuning", "models/m.json", "ranks/r.json", "serving.jsonl"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("stored")
    out.mkdir()
    (out / "a.json").write_text("newer")
    options = ["--declared", str(declared(PAIR)), "--gpus", "1", "--seconds", "100"]
    assert main([*options, "--out", str(out), "--from", str(source), "good"]) == 0
    found = {path.name: path.read_text() for path in out.iterdir() if path.is_file()}
    assert found == {"a.json": "newer", "a.tuning": "stored", "m.json": "stored", "r.json": "stored"}


def test_the_archive_holds_all_files_but_large_ones_and_states(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_on_gpus, "PACKED_BYTES", 100)
    out = tmp_path / "out"
    for name, size in {"a.json": 5, "large.bin": 101, "logs/a.log": 100, "m.state/caches/kernel": 5}.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(b"x" * size)
    (out / "pack.tar.gz").write_text("an earlier one")
    measure_on_gpus.pack(out, out / "pack.tar.gz")
    assert contents(out / "pack.tar.gz") == {"a.json": b"x" * 5, "logs/a.log": b"x" * 100}
    assert not (out / "pack.tar.gz.part").exists()


def contents(archive):
    with tarfile.open(archive) as opened:
        return {name: opened.extractfile(name).read() for name in opened.getnames()}


def test_results_are_packed_while_measurements_run(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_on_gpus, "PACK_SECONDS", 0.05)
    out, archive = tmp_path / "out", tmp_path / "pack.tar.gz"
    out.mkdir()
    (out / "first").touch()
    with measure_on_gpus.packing(out, archive):
        deadline = time.monotonic() + 10
        while not archive.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (out / "last").touch()
    assert {"first", "last"} <= contents(archive).keys()


def test_ctrl_c_stops_all_and_packs(declared, tmp_path, pytestconfig):
    text = '[[measurements]]\nname = "a"\nseconds = 60\ncommand = ["python", "-c", "import time; time.sleep(60)"]\n'
    path = declared(text + text.replace('"a"', '"b"'))
    out, archive = tmp_path / "out", tmp_path / "pack.tar.gz"
    command = [sys.executable, "-m", "tools.measure_on_gpus", "--declared", path, "--out", out, "--pack", archive]
    command += ["--gpus", "1", "--seconds", "100", "a", "b"]
    process = subprocess.Popen(command, cwd=pytestconfig.rootpath, stdout=subprocess.PIPE, text=True)
    while "start a" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    printed, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "a: stopped, exit code -2" in printed
    assert "b: not started" in printed
    assert list(contents(archive)) == ["logs/a.log"]


MEASUREMENTS = read()


def test_every_study_has_a_measurement_and_the_list_shows_them_all(pytestconfig, capsys):
    studies = {path.stem for path in (pytestconfig.rootpath / "studies").glob("*.toml")}
    assert studies <= MEASUREMENTS.keys()
    with pytest.raises(SystemExit) as ended:
        main(["--list"])
    assert ended.value.code == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == list(MEASUREMENTS)


@pytest.mark.parametrize("measurement", MEASUREMENTS.values(), ids=lambda each: each.name)
def test_a_declared_measurement_can_run(measurement, tmp_path, pytestconfig):
    """Its command names what exists, and its options are those of the program."""
    words = measurement.words([3], 500, tmp_path)
    assert words[0] == sys.executable
    assert not [word for word in words if "{" in word]
    assert measurement.seconds > measurement_queue.SETUP_SECONDS
    module, arguments = words[2], words[3:]
    if module == "torch.distributed.run":
        ranks = int(arguments[arguments.index("--nproc-per-node") + 1])
        assert (measurement.gpus, measurement.visible) == (ranks, True)
        assert ranks in find_rank_study("context-parallel").ranks
        module, arguments = "onelaunch", arguments[arguments.index("onelaunch") + 1 :]
    CHECKS[module.partition(".")[0]](module, arguments, pytestconfig)


def check_onelaunch(module, arguments, pytestconfig):
    """Parse a command of the package, and look for the study and the tasks that it names."""
    kind, command, context = arguments[1], typer.main.get_command(application), None
    while hasattr(command, "commands"):
        context = command.make_context("onelaunch", [], parent=context, resilient_parsing=True)
        _, command, arguments = command.resolve_command(context, arguments)
    context = command.make_context(command.name, arguments, parent=context)
    name = context.params["name"]
    if kind == "run":
        assert find_study(name)[1].name == name
    elif kind == "ranks":
        assert find_rank_study(name).name == name
    else:
        models = [model.name for model in find_model_study(name).at_scale("full")]
        tasks = {f"{model}/{kind}" for model in models for kind in KINDS}
        assert {*(context.params["only"] or ()), *(context.params["anew"] or ())} <= tasks


def check_pytest(module, arguments, pytestconfig):
    folder = pytestconfig.rootpath / arguments[-1]
    assert folder.is_file() or any(folder.glob("test_*.py"))


def check_tool(module, arguments, pytestconfig):
    """Parse the arguments as the tool does, and stop there."""
    tool = importlib.import_module(module)
    parse = tool.argparse.ArgumentParser.parse_args

    class Parsed(Exception):
        pass

    def parse_and_stop(parser, *_):
        parse(parser, arguments)
        raise Parsed

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tool.argparse.ArgumentParser, "parse_args", parse_and_stop)
        with pytest.raises(Parsed):
            tool.main()


CHECKS = {"onelaunch": check_onelaunch, "pytest": check_pytest, "tools": check_tool}


def test_parts_of_in_model_are_all_tasks_and_are_put_together():
    """Each task of the study belongs to one part, and times to parts that run while nothing compiles."""
    study = find_model_study("in-model")
    tasks = [task for model in study.at_scale("full") for task in tasks_of(study, model)]
    parts = {name: each for name, each in MEASUREMENTS.items() if name.startswith("in-model-")}
    found = {name: select(tasks, study, values_of("--only", each.command), "only") for name, each in parts.items()}
    assert sorted(task.key for part in found.values() for task in part) == sorted(task.key for task in tasks)
    assert {name: {task.task == "timed" for task in part} for name, part in found.items()} == {
        name: {each.quiet} for name, each in parts.items()
    }
    *merged, earlier = MEASUREMENTS["in-model"].also
    assert earlier == "in-model.json"
    assert sorted(merged) == sorted(f"{name}.json" for name in parts)


def values_of(option, words):
    return [value for word, value in pairwise(words) if word == option]
