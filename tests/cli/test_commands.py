"""Tests of ``onelaunch explain``, ``inspect`` and ``doctor``, and of properties of every command.

The fixtures are those of ``conftest.py``. ``call`` runs ``onelaunch`` with arguments in this process and returns its exit
``code``, its stdout (``out`` with single blanks, ``raw`` unchanged) and its stderr (``err``, ``raw_err``). The automatic
fixtures ``here`` (an empty working directory with one study) and ``known_ceilings`` (stored peaks of the CPU) prepare each
test. ``prose`` compares a text with its entry in tests/snapshots/prose.txt, whose key is the node id of the test. A test fails
if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``lines_with`` returns the lines of an output that hold some words. A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from onelaunch import __version__, dispatch
from onelaunch.cli import doctor
from onelaunch.cli import inspection as inspect_module
from onelaunch.cli.arguments import parse_case
from onelaunch.device.hardware import describe
from onelaunch.device.tools import find_ncu
from onelaunch.errors import ArgumentError, InspectionError
from onelaunch.operation import find_operation, operations
from onelaunch.operation.entry_points import Plugin
from onelaunch.workbench.inspection import Inspection
from tests.ops.cases import OPERATIONS
from tests.prose import lines_with

# Sizes of a call of linear_rnn.
SHAPE = "B=1,T=64,D=32,V=32"
COMMANDS = [
    (),
    ("generate",),
    ("explain",),
    ("inspect",),
    ("prebuild",),
    ("tune",),
    ("doctor",),
    ("report",),
    ("study",),
    *(("study", name) for name in ("list", "show", "run", "models", "report", "judge", "compare", "pack", "import", "adopt")),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(call, command):
    answer = call(*command, "--help")
    assert answer.code == 0
    assert "Usage:" in answer.out
    assert command in ((), ("study", "list")) or "onelaunch " in answer.out  # the help contains an example


def test_version(call):
    answer = call("--version")
    assert (answer.code, answer.out) == (0, f"onelaunch {__version__}")


def test_an_unknown_command(call):
    answer = call("explian")
    assert answer.code == 2
    assert "explian" in answer.err


def test_explain_names_the_choice_and_a_reason_for_every_other_variant(call):
    answer = call("explain", "linear_rnn", "--shape", SHAPE, "--dtype", "float32", "--device", "cpu")
    operation = find_operation("linear_rnn")
    query = operation.query(operation.case("float32", B=1, T=64, D=32, V=32), "cpu")
    assert answer.code == 0
    assert f"{dispatch.choose(query).name} runs:" in answer.out
    for name, variant in operation.variants.items():
        assert name in answer.out
        if reason := variant.why_not(query):
            assert f"{name} cannot run {reason}" in answer.out


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_explain_knows_every_operation(call, operation, prose):
    """``OPERATIONS`` are the recurrences, such as linear_rnn. Their default with gradients on a CPU is ``chunked``."""
    shape = ",".join(f"{dimension}=32" for dimension in operation.dimensions)
    answer = call("explain", operation.name, "--shape", shape, "--dtype", "float32", "--device", "cpu", "--grad")
    assert answer.code == 0
    choice = answer.raw.strip().splitlines()[1]
    assert "chunked" in choice
    prose(choice)
    assert all(name in answer.out for name in operation.variants)


def test_explain_takes_options_that_change_what_can_run(call):
    shape = "B=1,T=100,H=2,K=64,V=64,decay_per=head,value_gate=true"
    operation = find_operation("gla")
    case = parse_case(operation, shape, "float32")
    assert operation.query(case, "cpu").flags == ("scalar_decay", "value_gate")
    answer = call("explain", "gla", "--shape", shape, "--device", "cpu")
    assert answer.code == 0


def test_explain_shows_measured_times_and_puts_the_fastest_first(call, monkeypatch, prose):
    operation = find_operation("linear_rnn")
    query = operation.query(operation.case("float16", B=1, T=64, D=32, V=32), "cpu", grad=True)
    # Made-up explanation of the dispatcher; microseconds are those of a measured table.
    standings = (
        dispatch.Standing("eager", chosen=False, reason_against=None, microseconds=90.0, times_slower=9.0),
        dispatch.Standing("semi_fused", chosen=False, reason_against="needs a GPU", microseconds=None, times_slower=None),
        dispatch.Standing("chunked", chosen=True, reason_against=None, microseconds=10.0, times_slower=1.0),
    )
    asked = []
    monkeypatch.setattr(
        dispatch,
        "explain",
        lambda query: (
            asked.append(query)
            or dispatch.Explanation(
                query, "chunked", "fastest measured at T=64", standings, faster=(dispatch.Faster("semi_fused", "it took 1 us"),)
            )
        ),
    )
    answer = call("explain", "linear_rnn", "--shape", SHAPE, "--grad", "--device", "cpu")
    assert asked == [query]
    prose(answer.out)
    assert "chunked runs 10.0 µs 1.00x" in answer.out
    assert "eager could run 90.0 µs 9.00x" in answer.out
    assert answer.out.index("chunked runs 10.0") < answer.out.index("eager could run") < answer.out.index("semi_fused cannot run")


@pytest.mark.parametrize(
    "arguments",
    [
        ("linear_rn", "--shape", SHAPE),
        ("linear_rnn", "--shape", "B=1,T=64"),
        ("linear_rnn", "--shape", "B=1,T=64,D=32,W=32"),
        ("linear_rnn", "--shape", "B=1,T=x,D=32,V=32"),
        ("linear_rnn", "--shape", "B=1,T=1.5,D=32,V=32"),
        ("linear_rnn", "--shape", "B=1,T=-4,D=32,V=32"),
        ("linear_rnn", "--shape", f"B=1,T={10**400},D=32,V=32"),
        ("linear_rnn", "--shape", "B1,T=64"),
        ("linear_rnn", "--shape", "B=1,B=2"),
        ("linear_rnn", "--shape", ""),
        ("linear_rnn", "--shape", SHAPE, "--dtype", "float61"),
        ("gla", "--shape", "B=1,T=64,K=32,V=32"),
        ("gla", "--shape", "B=1,T=64,H=2,K=8,V=32"),
    ],
)
def test_explain_refuses_what_is_wrong_in_one_line(call, arguments, prose):
    answer = call("explain", *arguments)
    assert answer.code == 2
    prose(answer.err)
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    "operation",
    [each for each in operations() if each.__module__.startswith("onelaunch.")],  # other tests register operations of theirs
    ids=lambda operation: operation.name,
)
def test_explain_without_a_shape_takes_a_typical_call_and_lists_how_to_name_one(call, operation):
    """``decode_step`` lists no typical calls on a CPU, so its typical call on a GPU is explained there."""
    kind = "cpu" if operation.typical_cases("cpu") else "cuda"
    first, *_ = cases = operation.typical_cases(kind)
    answer = call("explain", operation.name, "--device", "cpu")
    assert answer.code == 0, answer.err
    chosen = dispatch.choose(operation.query(first, "cpu")).name
    assert f"a typical call of {operation.name}, the first of those" in answer.out
    assert str(first) in answer.out
    assert f"{chosen} runs:" in answer.out
    shown = [line.split() for line in answer.raw.splitlines() if line.startswith("  onelaunch explain ")]
    assert [replace(case, name="") for case in cases] == [parse_case(operation, line[4], line[6]) for line in shown]


def test_explain_without_a_shape_takes_a_given_dtype(call):
    answer = call("explain", "swiglu", "--device", "cpu", "--dtype", "bfloat16")
    assert (answer.code, "M128-N512-K256-bfloat16" in answer.out) == (0, True)
    assert call("explain", "swiglu", "--device", "cpu", "--dtype", "float61").code == 2


def test_explain_names_what_is_missing_where_no_call_is_typical(call, monkeypatch, prose):
    monkeypatch.setattr(find_operation("linear_rnn"), "_typical", None)
    answer = call("explain", "linear_rnn")
    assert answer.code == 2
    prose(answer.err)


def test_a_shape_may_hold_options_of_the_operation(prose):
    operation = find_operation("linear_rnn")
    name, default = next((name, value) for name, value in operation.options.items() if isinstance(value, bool))
    case = parse_case(operation, f" B=1, T=64 ,D=32,V=32,{name}={str(not default).lower()}", "float32")
    assert case.sizes == {"B": 1, "T": 64, "D": 32, "V": 32}
    assert operation.option(case, name) is (not default)
    with prose.raises(ArgumentError):
        parse_case(operation, f"B=1,{name}x=true", "float32")


def made(variant: str, problems: tuple[str, ...] = ()) -> Inspection:
    """Return a made-up inspection of a kernel ``scan``: 128 registers, a spill per problem, 2 KiB shared, 8 HGMMA of 900."""
    return Inspection(variant, "scan", "sm_90a", 128, len(problems), 0, 2048, {"HGMMA": 8}, 900, problems, {"ptx": "text of ptx"})


def test_inspect_shows_the_compilers_output(call, here, monkeypatch, prose):
    asked = []

    def inspect_operation(operation, architecture, variants):
        asked.append((operation.name, architecture, variants))
        return [made("fused_chunked")]

    monkeypatch.setattr(inspect_module, "inspect_operation", inspect_operation)
    answer = call("inspect", "linear_rnn", "--arch", "sm_90a", "--variant", "fused_chunked", "--assembly", "asm")
    assert answer.code == 0
    assert asked == [("linear_rnn", "sm_90a", ["fused_chunked"])]
    assert "fused_chunked scan 128 0 0 B 2.00 KiB 8 HGMMA 900 ok" in answer.out
    assert (here / "asm" / "fused_chunked.scan.sm_90a.ptx").read_text() == "text of ptx"
    everything = call("inspect", "linear_rnn")
    assert asked[1] == ("linear_rnn", "sm_90a", None)  # the default architecture, and all variants
    prose(everything.out)


def test_inspect_fails_when_a_kernel_has_a_problem(call, monkeypatch, prose):
    monkeypatch.setattr(inspect_module, "inspect_operation", lambda *_: [made("semi_fused", ("spills registers: 4 accesses",))])
    answer = call("inspect", "linear_rnn")
    assert answer.code == 1
    prose(answer.out)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("linear_rn",), 2),
        (("linear_rnn", "--variant", "fused_chunkd"), 2),
        (("linear_rnn", "--arch", "sm_91"), 2),
    ],
)
def test_inspect_refuses_what_is_wrong_in_one_line(call, arguments, code, prose):
    answer = call("inspect", *arguments)
    assert answer.code == code
    prose(answer.err)


def test_debug_shows_the_whole_error(call):
    with pytest.raises(InspectionError):
        call("--debug", "inspect", "linear_rnn", "--arch", "sm_91")


def test_doctor_lists_installed_and_missing_parts_with_their_use(call, known_ceilings, prose):
    answer = call("doctor", "--device", "cpu")
    assert answer.code == 0
    prose(lines_with(answer.raw, "peaks", "cpu"))
    assert "Measuring" not in answer.err
    assert known_ceilings.measured_at in answer.out
    assert str(torch.__version__) in answer.out
    for thing in ("triton", "NVRTC", "C++ compiler", "ncu", "nvidia-ml-py", "NVIDIA driver", "fla"):
        assert re.search(rf"{re.escape(thing)} (ok|missing) ", answer.out), thing


def test_doctor_announces_a_measurement_only_if_it_measures(call, known_ceilings, monkeypatch, prose):
    faster = replace(known_ceilings, read_bytes_per_second=3e12)
    monkeypatch.setattr("onelaunch.device.peaks.measure", lambda device: faster)
    answer = call("doctor", "--device", "cpu", "--refresh")
    prose(answer.err)
    assert "3.00 TB/s" in answer.out
    answer = call("doctor", "--device", "cpu")
    assert "Measuring" not in answer.err
    assert "3.00 TB/s" in answer.out


def test_doctor_reports_a_busy_device(call, known_ceilings, monkeypatch, prose):
    assert "busy" not in call("doctor", "--device", "cpu").out
    busy = replace(known_ceilings, spread={"copy": 0.01, "read": 5.74})
    monkeypatch.setattr("onelaunch.device.peaks.measure", lambda device: busy)
    prose(lines_with(call("doctor", "--device", "cpu", "--refresh", width=300).raw, "busy"))
    assert "busy" in call("doctor", "--device", "cpu").out


@pytest.mark.parametrize(
    ("plugin", "unwanted"),
    [
        (Plugin("mine", "m", "p 1", "OSError: " + 999 * "x"), 300 * "x"),
        (Plugin("mine", "m", "p 1", "OSError: \x1b[31mred\u202e"), "\x1b"),
        (Plugin("mi\x1bne", "m\x07", "p\x9b 1"), "\x07"),
        (Plugin("mine", "m", "None None"), "None"),
        (Plugin("mine", "m", "p None"), "None"),
        (Plugin("mine", "m", "p 1.0"), "None"),
        (Plugin("mine", "m", "an unknown distribution"), "None"),
    ],
)
def test_doctor_truncates_and_escapes_messages_of_plugins(monkeypatch, plugin, unwanted, prose):
    ((name, _, text),) = doctor._plugins([plugin])
    prose(f"{name} {text}")
    assert unwanted not in f"{name} {text}"


def test_doctor_can_skip_the_measurement(call, monkeypatch):
    monkeypatch.setattr("onelaunch.cli.doctor.ceilings", lambda *_, **__: pytest.fail("measured"))
    assert "Measured peaks" not in call("doctor", "--no-measure").out


def test_doctor_states_remedies_for_missing_parts(call, monkeypatch, prose):
    monkeypatch.setattr("shutil.which", lambda _: None)
    answer = call("doctor", "--no-measure")
    prose(lines_with(answer.raw, "g++"))


def words_of_needs() -> set[str]:
    """Return every word that doctor must show unbroken.

    They are those of the table of requirements: name and purpose of each, and its remedy where it is missing.
    """
    texts = (f"{need.name} {'' if need.look() else need.remedy} {need.purpose}" for need in doctor.NEEDS)
    return {word for text in texts for word in text.split()}


def shown(text: str) -> set[str]:
    """Return the words of an output, without parentheses."""
    return {word.strip("()") for word in text.split()}


@pytest.mark.parametrize("width", [80, 60, 40])
def test_doctor_breaks_no_word_on_a_narrow_terminal(call, monkeypatch, width):
    long = replace(describe("cpu"), name="A Processor With A Long Name 9B14 96-Core")
    monkeypatch.setattr(doctor, "describe", lambda _: long)
    answer = call("doctor", "--device", "cpu", width=width)
    assert {word.strip("()") for word in words_of_needs()} <= shown(answer.raw)
    if width == 80:
        assert set(long.name.split()) <= shown(answer.raw)
        # The text begins behind 29 columns. A word longer than the rest makes a line longer than the terminal is wide.
        longest = max(len(word) for word in words_of_needs())
        assert max(len(line.rstrip()) for line in answer.raw.splitlines()) <= max(80, 29 + longest)


def test_doctor_does_not_widen_a_column_for_one_long_word(call):
    """The name of a driver's setting once reduced the other column to three letters."""
    lines = call("doctor", "--no-measure", width=80).raw.splitlines()
    needs = lines[next(index for index, line in enumerate(lines) if "Requirements" in line) :]
    assert sum(len(line.strip()) > 40 for line in needs) > len(doctor.NEEDS) / 2
    assert len(needs) < 2.5 * len(doctor.NEEDS)


@pytest.mark.thorough
def test_doctors_output_in_a_file_is_complete(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    with (tmp_path / "doctor.txt").open("w") as file:
        subprocess.run([sys.executable, "-m", "onelaunch", "doctor", "--no-measure"], stdout=file, env=environment, check=True)
    assert {word.strip("()") for word in words_of_needs()} <= shown((tmp_path / "doctor.txt").read_text(encoding="utf-8"))


def test_doctor_searches_the_profiler_like_studies(call, monkeypatch, tmp_path):
    """ncu is not in the search path, but below ``$CUDA_HOME``."""
    program = tmp_path / "cuda" / "bin" / "ncu"
    program.parent.mkdir(parents=True)
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert find_ncu() == str(program)
    assert f"ncu ok {program}" in call("doctor", "--no-measure").out


# Runs a command as if a package were not installed.
WITHOUT = """
import sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Gone())
from onelaunch.cli.main import app
sys.argv = ["onelaunch", {command!r}]
app()
"""


@pytest.mark.parametrize("package", ["typer", "rich", "pydantic", "matplotlib", "jinja2"])
def test_a_missing_extra_is_reported_in_one_line_with_the_remedy(package, prose):
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(package=package, command="--version")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 1
    prose(ended.stderr.strip())
    assert not ended.stdout


@pytest.mark.thorough
def test_generate_does_not_import_the_dependencies_of_studies():
    code = "import sys; sys.argv = ['onelaunch', 'generate', '--help']\nfrom onelaunch.cli.main import app\n"
    # Modules that other commands import when they run.
    late = "{'matplotlib', 'jinja2', 'onelaunch.workbench', 'onelaunch.ops', 'triton'}"
    code += f"try:\n    app()\nexcept SystemExit:\n    print({late} & sys.modules.keys())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout.splitlines()[-1] == "set()"


def test_an_unknown_command_suggests_the_nearest(call):
    answer = call("generaet", "def main(")
    assert answer.code == 2
    assert "'generate'" in answer.err


def test_a_missing_module_of_our_own_is_not_blamed_on_the_extra():
    """PyTorch is a dependency of every installation, so that installing the extra would not help."""
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(package="torch", command="doctor")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "onelaunch[workbench]" not in ended.stderr
    assert "'torch'" in ended.stderr


def test_unexpected_errors_are_not_hidden(call, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(inspect_module, "inspect_operation", fail)
    with pytest.raises(ZeroDivisionError):
        call("inspect", "linear_rnn")
