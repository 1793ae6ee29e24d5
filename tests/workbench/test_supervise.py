"""Tests of studies that are measured in a supervised child process: variants that end it, runs that are stopped, and bad luck.

The helpers are those of ``runs.py``: ``study`` declares ``toy_sum`` at the shapes ``first`` and ``second`` with the baseline
``eager`` and ``parallel``. Variants that end their process are registered for a test, which the child, a fork, knows too.
``prose`` compares a text with its entry in tests/snapshots/prose.txt, whose key is the node id of the test. A test fails if it
does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``quick`` is a fixture that makes runs fast in an empty folder, for every test of the file. ``FASTER`` asks that ``parallel`` is
faster. ``FEWER`` asks that ``parallel`` moves fewer bytes. ``slow_light`` returns made-up peaks. ``statuses`` returns the status
of each variant at a shape. ``interrupted_at`` presses Ctrl-C at a shape. ``counting`` replaces the counter of DRAM bytes.
``at_count`` of ``rogues_timing.py`` makes a variant that acts in a chosen call, such as by ending the process. A test
marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from onelaunch.errors import MeasuringFailed, ResultBusy, ResultMismatch, StudyError
from onelaunch.workbench.measure import ahead, timing
from onelaunch.workbench.options import WHOLE, Part
from onelaunch.workbench.result import Result
from onelaunch.workbench.run import ResultUnsaved, Steps, _alone, partial_path
from onelaunch.workbench.study import Criterion
from onelaunch.workbench.supervise import child, job, parent
from onelaunch.workbench.supervise.child import read_turn, write_turn
from onelaunch.workbench.supervise.job import Turn
from tests.workbench.rogues_timing import at_count, registered
from tests.workbench.runs import FASTER, FEWER, counting, interrupted_at, quick, run, slow_light, statuses, steps, study
from tests.workbench.toy import parallel

__all__ = ["quick"]  # an automatic fixture: an empty working directory, short samples, no warm-up

if sys.platform != "linux":
    pytest.skip("the child of these tests must be forked, to know their variants", allow_module_level=True)


def supervised(declared, **more):
    """Run a study in a supervised child, and return its result."""
    return run(declared, **({"in_process": False, "call_limit": 60.0} | more))


def with_rogue(function, **more):
    """Run the study with a variant ``rogue`` beside the others, and return the result."""
    with registered(rogue=function):
        return supervised(study(FASTER, variants=("eager", "rogue", "parallel")), **more)


def rest_is_complete(result, shapes=("first", "second")):
    """Return whether the other variants have all their rounds at every shape."""
    cells = [result.cell(shape, name) for shape in shapes for name in ("eager", "parallel")]
    return not result.interrupted and all(cell.status == "ok" and len(cell.timing("cold").rounds) == 3 for cell in cells)


def test_a_child_measures_what_the_process_itself_measures(tmp_path):
    told = []
    result = supervised(study(FASTER, controls=("product",)), on_progress=told.append, save_to=tmp_path / "r.json")
    assert statuses(result) == {"eager": "ok", "parallel": "ok", "product": "ok"}
    assert rest_is_complete(result)
    assert result.decision is not None
    assert Result.load(tmp_path / "r.json") == result
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    assert {step.step for step in told} >= {"verify", "time"}
    assert result.provenance.timing_seed > 0


@pytest.mark.parametrize(
    ("end", "said"),
    [
        pytest.param(lambda: os._exit(0), "exit code 0", id="os._exit(0)", marks=pytest.mark.thorough),
        pytest.param(lambda: os._exit(3), "exit code 3", id="os._exit(3)", marks=pytest.mark.thorough),
        pytest.param(lambda: (faulthandler.disable(), ctypes.string_at(0)), "SIGSEGV", id="segmentation fault"),
        pytest.param(
            lambda: os.kill(os.getpid(), signal.SIGKILL), "lack of memory", id="killed for memory", marks=pytest.mark.thorough
        ),
    ],
)
@pytest.mark.parametrize("count", [pytest.param(1, id="verified"), pytest.param(30, id="timed", marks=pytest.mark.thorough)])
def test_a_variant_that_ends_its_process_gets_a_status_and_the_rest_goes_on(end, said, count, prose):
    result = with_rogue(at_count(count, end))
    rogue = result.cell("first", "rogue")
    assert rogue.status == "crashed"
    assert said in rogue.reason
    assert not rogue.timings
    assert rest_is_complete(result)
    assert any("rogue" in note and said in note for note in result.notes)
    if count == 1:
        prose([rogue.reason, *(note for note in result.notes if "rogue" in note)])


def test_processes_that_a_measuring_process_leaves_are_ended_with_it(tmp_path):
    """They may be processes that compile, which would go on while the next process measures."""
    left = tmp_path / "left"

    def end():
        left.write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        os._exit(3)

    assert statuses(with_rogue(at_count(1, end)))["rogue"] == "crashed"
    state = Path(f"/proc/{left.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z", "without a parent that reaps it, it may be a zombie"


def test_processes_that_a_measuring_process_leaves_are_ended_after_its_result(tmp_path, monkeypatch):
    """After Ctrl-C processes may still compile. The child has often exited when its parent has read the result."""
    left, read = tmp_path / "left", parent._read

    def leave():
        left.write_text(str(subprocess.Popen(["sleep", "600"]).pid))

    def slowly(text):
        time.sleep(0.3)
        return read(text)

    monkeypatch.setattr(parent, "_read", slowly)
    with_rogue(at_count(1, leave))
    state = Path(f"/proc/{left.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z", "without a parent that reaps it, it may be a zombie"


def test_sys_exit_in_a_variant_is_its_status_in_either_process():
    for in_process in (True, False):
        result = with_rogue(at_count(1, lambda: sys.exit(0)), in_process=in_process, save_to=Path(f"{in_process}.json"))
        assert result.cell("first", "rogue").status == "crashed"
        assert "sys.exit(0)" in result.cell("first", "rogue").reason
        assert rest_is_complete(result)


def test_a_call_that_hangs_is_ended_and_the_variant_is_not_tried_again(prose):
    start = time.monotonic()
    result = with_rogue(at_count(1, lambda: time.sleep(1000)), call_limit=1.5)
    assert time.monotonic() - start < 60
    assert [result.cell(shape, "rogue").status for shape in ("first", "second")] == ["timed_out", "timed_out"]
    assert 1.5 < result.spent.device_seconds < result.spent.wall_seconds  # the call that was ended is in both
    assert rest_is_complete(result)
    prose([result.cell(shape, "rogue").reason for shape in ("first", "second")])


def test_a_criterion_on_a_variant_that_ended_its_process_ends_in_debug():
    asked = Criterion(name="rogue is fast", measure="speedup", of="rogue", at="first", at_least=1.1)
    with registered(rogue=at_count(1, lambda: os._exit(1))):
        result = supervised(study(asked, variants=("eager", "rogue")))
    assert result.outcomes[0].status == "not_measured"
    assert result.decision.kind == "debug"
    assert any("ended the process that measured it" in reason for reason in result.decision.because)


def test_two_variants_may_end_the_process_one_after_the_other():
    with registered(rogue=at_count(1, lambda: os._exit(1)), second_rogue=at_count(30, lambda: os._exit(2))):
        result = supervised(study(FASTER, variants=("eager", "rogue", "second-rogue", "parallel")))
    assert statuses(result) == {"eager": "ok", "rogue": "crashed", "second-rogue": "crashed", "parallel": "ok"}
    assert rest_is_complete(result)


def test_finished_shapes_are_not_measured_again_after_a_crash(tmp_path):
    """Each measurement of a case leaves a file, since the child's memory is gone."""

    def measure(operation, case, *args, **more):
        (tmp_path / f"{case.name}-{len(list(tmp_path.glob('*-*')))}").touch()
        if case.name == "second" and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            more["on_turn"]("parallel", control=False, step="timed (cold)")
            os._exit(1)
        return timing.measure(operation, case, *args, **more)

    result = supervised(study(FASTER), steps=steps(measure=measure), save_to=tmp_path / "r.json")
    assert len(list(tmp_path.glob("first-*"))) == 1
    assert statuses(result, "second") == {"eager": "ok", "parallel": "crashed"}
    assert statuses(result, "first") == {"eager": "ok", "parallel": "ok"}


def test_a_process_that_dies_while_no_variant_runs_is_tried_again_and_then_the_shape_is_given_up(tmp_path, prose):
    def measure(operation, case, *args, **more):
        if case.name == "first":
            os.kill(os.getpid(), signal.SIGKILL)
        return timing.measure(operation, case, *args, **more)

    def telling(*args, **more):
        more["on_progress"]("verify", 0, 1)
        return measure(*args, **more)

    result = supervised(study(FASTER), steps=steps(measure=telling))
    assert set(statuses(result, "first").values()) == {"crashed"}
    assert set(statuses(result, "second").values()) == {"ok"}
    prose([result.cell("first", "eager").reason, *(note for note in result.notes if "SIGKILL" in note)])


def test_a_process_that_dies_before_it_measures_is_an_error(prose):
    with prose.raises(MeasuringFailed):
        supervised(study(FASTER), steps=steps(ceilings=lambda device: os._exit(9)))


def test_errors_of_the_child_are_raised_in_the_parent():
    run(study(), steps=interrupted_at("begin", "second"))
    with pytest.raises(ResultMismatch, match=r"toy-study\.json.*force=True") as told:
        supervised(study(), resume=True, rounds=4)
    assert told.value.advice

    class Local(Exception):
        pass

    def fail(device):
        raise Local("only here")

    with pytest.raises(MeasuringFailed, match="only here"):
        supervised(study(), force=True, steps=steps(ceilings=fail))


def test_ctrl_c_in_the_parent_ends_the_child_with_what_was_measured_and_resume_goes_on():
    def stop(step):
        if step.shape == "second" and step.step == "verify":
            raise KeyboardInterrupt

    slow = steps(measure=lambda operation, case, *args, **more: _slowly(case, operation, *args, **more))
    result = supervised(study(FASTER), on_progress=stop, steps=slow)
    assert result.interrupted
    assert statuses(result, "first") == {"eager": "ok", "parallel": "ok"}
    assert set(statuses(result, "second").values()) == {"interrupted"}
    again = supervised(study(FASTER), resume=True)
    assert rest_is_complete(again)
    assert again.cell("first", "parallel") == result.cell("first", "parallel")
    assert again.provenance.timing_seed == result.provenance.timing_seed


def _slowly(case, operation, *args, **more):
    more["on_progress"]("verify", 0, 1)
    for _ in range(200 if case.name == "second" else 0):
        time.sleep(0.05)  # as a run with many rounds; an interruption comes between two of them
    return timing.measure(operation, case, *args, **more)


def test_a_variant_that_raises_keyboard_interrupt_ends_the_run_as_before():
    def stop():
        raise KeyboardInterrupt

    result = with_rogue(at_count(1, stop))
    assert result.interrupted
    assert result.cell("first", "rogue").status == "interrupted"


def test_ctrl_c_ends_a_child_that_waits_for_processes_that_compile(monkeypatch):
    """It need not be killed, which would lose what it has not told its parent."""
    monkeypatch.setattr(parent, "INTERRUPT_SECONDS", 60.0)

    class Pool(ThreadPoolExecutor):
        """Stand-in for processes that make one call and never end the next."""

        def __init__(self, *_, **__):
            super().__init__(1)
            self.made = 0

        def submit(self, *_):
            future, self.made = Future(), self.made + 1
            if self.made == 1:
                future.set_result(ahead.Done(1.0))
            return future

    def stop(step):
        raise KeyboardInterrupt

    monkeypatch.setattr(ahead, "ProcessPoolExecutor", Pool)
    began = time.monotonic()
    assert supervised(study(FASTER), processes=2, on_progress=stop).interrupted
    assert time.monotonic() - began < 30


def test_a_child_that_does_not_end_after_ctrl_c_is_killed(monkeypatch):
    monkeypatch.setattr(parent, "INTERRUPT_SECONDS", 0.5)

    def stop(step):
        if step.shape == "second":
            raise KeyboardInterrupt

    def deaf(operation, case, *args, **more):
        if case.name == "second":
            more["on_progress"]("time", 0, 1)
            while True:
                with contextlib.suppress(KeyboardInterrupt):
                    time.sleep(0.05)
        return timing.measure(operation, case, *args, **more)

    result = supervised(study(FASTER), on_progress=stop, steps=steps(measure=deaf))
    assert result.interrupted
    assert statuses(result, "first") == {"eager": "ok", "parallel": "ok"}


@pytest.mark.thorough
def test_the_child_ends_with_its_parent(tmp_path):
    code = f"""
import os, sys, threading, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.workbench import runs, toy
def measure(*args, **more):
    open("child", "w").write(str(os.getpid()))
    time.sleep(100)
def kill():
    while not (os.path.exists("child") and open("child").read()):
        time.sleep(0.05)
    os.kill(os.getpid(), 9)
threading.Thread(target=kill, daemon=True).start()
runs.run(runs.study(), steps=runs.steps(measure=measure), in_process=False)
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=120, check=False)
    pid = int((tmp_path / "child").read_text())
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z":
            return  # it has ended, and the process that inherited it does not ask for its exit status
        time.sleep(0.1)
    pytest.fail("the child goes on without a parent")


# A new interpreter


@pytest.mark.thorough
def test_a_new_interpreter_imports_the_modules_that_registered_the_variants(monkeypatch):
    monkeypatch.setattr(parent, "start_method", lambda device: "spawn")
    result = supervised(study(FASTER, rounds=3), steps=Steps(ceilings=slow_light))
    assert not any("without supervision" in note for note in result.notes)
    assert set(statuses(result)) == {"eager", "parallel"}


@pytest.mark.parametrize("what", ["steps", pytest.param("variant", marks=pytest.mark.thorough)])
def test_what_a_new_interpreter_cannot_know_is_measured_in_this_process(what, monkeypatch, prose):
    monkeypatch.setattr(parent, "start_method", lambda device: "spawn")
    with registered(homemade=parallel):
        given = {} if what == "steps" else {"steps": Steps(ceilings=slow_light)}  # `runs.steps` holds local functions
        result = supervised(study(FASTER, variants=("eager", "parallel", "homemade")), **given)
    assert result.cell("first", "homemade").status in ("ok", "invalid")
    assert result.cell("first", "homemade").timings
    prose(
        [note for note in result.notes if "without supervision" in note],
        mask={r"supervision: .*[Pp]ickle.*": "supervision: <why>"},
    )


def test_the_child_is_forked_only_for_a_cpu_without_cuda(monkeypatch):
    assert parent.start_method("cpu") == "fork"
    assert parent.start_method("cuda:0") == "spawn"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert parent.start_method("cpu") == "spawn"


def test_a_turn_can_be_read_at_any_time():
    shared = bytearray(child.TURN_BYTES)
    assert read_turn(shared) == (0.0, None)
    turn = Turn("first", "forward", "größer", control=False, step="timed (cold)")
    write_turn(shared, turn)
    began, found = read_turn(shared)
    assert found == turn
    assert 0 <= time.monotonic() - began < 10
    write_turn(shared, None)
    assert read_turn(shared)[1] is None


# Bad luck with the result


def test_a_second_run_of_one_result_is_refused_before_it_measures(tmp_path, prose):
    path = tmp_path / "r.json"
    ready, done = threading.Event(), threading.Event()

    def hold():
        with _alone(path):
            ready.set()
            done.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    ready.wait(60)
    try:
        with prose.raises(ResultBusy, mask={r"/\S*/r\.json": "<path>"}):
            run(study(), save_to=path, steps=steps(measure=lambda *_, **__: pytest.fail("measured")))
    finally:
        done.set()
        other.join()
    run(study(), save_to=path)


@pytest.mark.parametrize("force", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_result_that_another_run_has_written_meanwhile_is_kept_and_so_is_this_one(force, tmp_path, prose):
    path = tmp_path / "r.json"

    def measure(*args, **more):
        path.write_text("another run's")
        return timing.measure(*args, **more)

    with prose.raises(ResultUnsaved, mask={r"/\S*/r\.json": "<path>"}) as told:
        run(study(), save_to=path, force=force, steps=steps(measure=measure))
    assert path.read_text() == "another run's"
    assert Result.load(told.value.rescued) == told.value.result


def test_a_run_needs_no_folder_for_its_lock(tmp_path, monkeypatch):
    """A file stands where the cache folder would be made. Two runs of one result are then told apart at their end alone."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path / "file" / "cache"))
    result = run(study(), save_to=tmp_path / "r.json")
    assert Result.load(tmp_path / "r.json") == result


def test_a_folder_that_fills_up_during_a_supervised_run_loses_nothing(monkeypatch):
    from onelaunch.errors import OutputUnwritable
    from onelaunch.workbench.result import saved

    write = saved.write_text

    def full(path, text):
        if path == partial_path(Path("results/cpu/toy-study.json")):
            raise OutputUnwritable(path, "No space left on device")
        write(path, text)

    monkeypatch.setattr(saved, "write_text", full)
    result = with_rogue(at_count(30, lambda: os._exit(1)))
    assert rest_is_complete(result)
    assert any("No space left" in note for note in result.notes)


def test_a_control_named_like_a_variant_is_refused_before_anything_runs(monkeypatch, prose):
    from tests.workbench.toy import toy_sum

    monkeypatch.setitem(toy_sum.controls, "parallel", toy_sum.controls["product"])  # registration refuses the name
    with prose.raises(StudyError):
        run(study(controls=("parallel",)), steps=steps(measure=lambda *_, **__: pytest.fail("measured")))


@pytest.mark.thorough
def test_without_counters_finished_shapes_are_not_measured_again_on_resuming():
    """The criterion asks for bytes, which nothing counts here. The first shape was timed before Ctrl-C at the second."""
    first = run(study(FEWER), steps=interrupted_at("begin", "second"))
    measured = []

    def measure(operation, case, *args, **more):
        measured.append(case.name)
        return timing.measure(operation, case, *args, **more)

    result = run(study(FEWER), resume=True, steps=steps(measure=measure))
    assert measured == ["second"]
    assert result.cell("first", "parallel").timings == first.cell("first", "parallel").timings
    asked = []
    run(study(FEWER), force=True, steps=interrupted_at("begin", "second"))
    counted = run(study(FEWER), resume=True, steps=counting(asked))
    assert len(asked) == 1
    assert counted.cell("first", "parallel").traffic.source == "ncu"


def test_the_note_of_a_quick_run_gives_its_own_time_cap():
    notes = run(study(directions=("forward", "forward_backward")), quick=True, time_cap=1.5).notes
    assert any("each shape for 1.5 s only" in note for note in notes)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system sets no affinity")
def test_parts_of_a_run_keep_to_their_own_cores(monkeypatch):
    kept = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 1, 0, 2, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: kept.append(list(cores)))
    for part in (WHOLE, Part(0, 2), Part(1, 2), Part(5, 6)):
        job._keep_to_own_cores(part)
    assert kept == [[0, 1], [2, 3]], "neither a whole run nor one with fewer cores than parts is kept to any"
