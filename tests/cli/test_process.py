"""Tests of the command line as a process: its imports, its output streams, and its exit codes.

The fixtures are those of ``conftest.py``. ``call`` runs ``onelaunch`` with arguments in this process and returns its exit
``code``, its stdout (``out`` with single blanks, ``raw`` unchanged) and its stderr (``err``, ``raw_err``). The automatic
fixture ``here`` makes the working directory an empty folder, ``tmp_path``, with the study studies/toy-study.toml. ``prose``
compares a text with its entry in tests/snapshots/prose.txt, whose key is the node id of the test. A test fails if it does not
compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

A test marked ``thorough`` does not run in ``make test``. ``thorough_but`` marks all parameters but the named ones ``thorough``.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

from onelaunch.cli.application import Commands
from onelaunch.cli.study.application import Studies
from tests.thorough import thorough_but

# Command lines that run nothing.
ARGUMENTS = ("--version", "--help", "study --help", "--mistyped", "stduy", "study lsit")
# The command in a shell.
ONELAUNCH = f"{shlex.quote(sys.executable)} -m onelaunch"


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command line of bash, with these environment variables in addition."""
    return subprocess.run(
        ["bash", "-c", command], env=os.environ | environment, capture_output=True, encoding="utf-8", check=False, timeout=120
    )


@pytest.mark.parametrize("group", [Commands, Studies])
def test_the_summary_of_a_command_is_the_first_sentence_of_its_help(group):
    """The table of a group holds the summaries, so that ``--help`` need not import the commands."""
    for name, command in group.table.items():
        assert group.load(name).get_short_help_str(limit=1000) == command.summary, name


@pytest.mark.parametrize("arguments", thorough_but("study --help", "--mistyped", of=ARGUMENTS))
def test_commands_that_run_nothing_do_not_import_pytorch(arguments):
    code = f"import sys; sys.argv = ['onelaunch', *{arguments.split()}]\nfrom onelaunch.cli.main import app\n"
    code += "try:\n    app()\nexcept SystemExit:\n    print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True, timeout=120)
    assert ended.stdout.splitlines()[-1] == "False"


@pytest.mark.thorough
def test_a_closed_pipe_ends_a_command_silently():
    ended = shell(f"{ONELAUNCH} study list | true; echo ${{PIPESTATUS[0]}}")
    # 141 is 128 + SIGPIPE.
    assert ended.stdout.strip() in ("141", "0")  # 0 if everything was written before the reader closed the pipe
    assert ended.stderr == ""


def test_a_full_disk_under_stdout_is_reported(prose):
    ended = shell(f"{ONELAUNCH} study list > /dev/full")
    assert ended.returncode == 1
    prose(ended.stderr.strip())


@pytest.mark.thorough
@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_limited_character_set_does_not_end_a_command(encoding, tmp_path):
    text = """
name = "sizes"
question = "Größe ≥ 3 µs?"
operation = "linear_rnn"
baseline = "eager"
[[shapes]]
name = "first"
scale = "small"
B = 1
T = 8
D = 16
V = 16
"""
    (tmp_path / "studies" / "sizes.toml").write_text(text, encoding="utf-8")
    # One process runs all commands, because each would import PyTorch. The last is an error about an unknown study.
    commands = [["study", "list"], ["study", "show", "sizes", "--device", "cpu"], ["study", "show", "Größe≥"]]
    ended = subprocess.run(
        [sys.executable, "-c", f"commands = {commands!a}\n{ONE_AFTER_ANOTHER}"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONIOENCODING": encoding},
        capture_output=True,
        encoding="latin-1",  # latin-1 decodes any bytes
        check=False,
        timeout=120,
    )
    assert "Traceback" not in ended.stderr
    listed, shown, unknown = re.findall(r"(.*?)<exit code (\d)>\n", ended.stdout, re.DOTALL)
    assert [listed[1], shown[1], unknown[1]] == ["0", "0", "2"]
    # The character ≥ of the question is written as an escape.
    assert "\\u2265" in listed[0]
    assert "\\u2265" in shown[0]
    assert "error: " in ended.stderr


ONE_AFTER_ANOTHER = """
import sys
from onelaunch.cli.main import app
from onelaunch.device import quick_look
quick_look.implausible = lambda device, found: ""  # the peaks are made up; measuring them takes seconds
for arguments in commands:
    sys.argv = ["onelaunch", *arguments]
    try:
        app()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    print(f"<exit code {code}>")
"""


def test_python_without_the_extra_gives_the_install_command():
    """An extra is a set of optional packages, here those of the workbench, of which pydantic is one."""
    code = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "pydantic" else find(name, package)
try:
    from onelaunch.workbench.verify import judge
except ImportError as error:
    print(type(error).__name__, error)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True, timeout=120)
    assert ended.stdout.startswith("ExtraMissing onelaunch.workbench needs pydantic.")
    assert 'pip install "onelaunch[workbench]"' in ended.stdout


def test_a_notice_is_one_line(call, here, monkeypatch):
    """A folder of studies that does not exist gives a warning. Its name holds a terminal escape code."""
    monkeypatch.setenv("ONELAUNCH_STUDIES", str(here / "nowhere\x1b[2J"))
    answer = call("study", "list")
    assert answer.code == 0
    assert answer.raw_err.count("\n") == 1
    assert answer.err.startswith("warning: $ONELAUNCH_STUDIES names ")
    assert "\x1b" not in answer.raw_err


def test_commands_exit_with_the_code_of_their_error(call):
    for arguments, code in (
        (("generate", "x", "--model", "tinny"), 2),
        (("doctor", "--device", "gpu"), 2),
        (("inspect", "linear_rnn", "--arch", "foo"), 2),
        (("study", "show", "nothing"), 2),
        (("study", "show", "toy-study", "--at", "nowhere"), 2),
        (("explain", "linear_rn", "--shape", "B=1"), 2),
        (("explain", "linear_rnn", "--shape", "B=1"), 2),
        (("study", "report", "nowhere.json"), 2),
        (("study", "report", "studies/toy-study.toml"), 1),  # the file exists, but is no result
    ):
        answer = call(*arguments)
        assert answer.code == code, arguments
        assert "error: " in answer.err
