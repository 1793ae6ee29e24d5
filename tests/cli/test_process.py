"""The command line as a process: what it imports, where it writes, and how it ends."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from onelaunch.cli.application import Commands
from onelaunch.cli.study.application import Studies

ONELAUNCH = f"{shlex.quote(sys.executable)} -m onelaunch"


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], env=os.environ | environment, capture_output=True, encoding="utf-8", check=False, timeout=120
    )


@pytest.mark.parametrize("group", [Commands, Studies])
def test_the_summary_of_a_command_is_the_first_sentence_of_its_help(group):
    for name, command in group.table.items():
        assert group.load(name).get_short_help_str(limit=1000) == command.summary, name


@pytest.mark.parametrize("arguments", ["--version", "--help", "study --help", "--mistyped", "stduy", "study lsit"])
def test_what_runs_nothing_does_not_wait_for_pytorch(arguments):
    code = f"import sys; sys.argv = ['onelaunch', *{arguments.split()}]\nfrom onelaunch.cli.main import app\n"
    code += "try:\n    app()\nexcept SystemExit:\n    print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True, timeout=120)
    assert ended.stdout.splitlines()[-1] == "False"


def test_a_reader_that_goes_away_ends_a_command_silently():
    ended = shell(f"{ONELAUNCH} study list | true; echo ${{PIPESTATUS[0]}}")
    assert ended.stdout.strip() in ("141", "0")  # 0 where all was written before the reader went
    assert ended.stderr == ""


def test_a_full_disk_below_stdout_is_named():
    ended = shell(f"{ONELAUNCH} study list > /dev/full")
    assert ended.returncode == 1
    assert ended.stderr.strip() == "error: stdout cannot be written: No space left on device. Redirect it to another file."


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_terminal_without_some_characters_ends_no_command(encoding, tmp_path):
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
    for command in ("study list", "study show sizes --device cpu", "study show 'Größe≥'"):
        ended = subprocess.run(
            ["bash", "-c", f"{ONELAUNCH} {command}"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONIOENCODING": encoding},
            capture_output=True,
            encoding="latin-1",  # reads any bytes
            check=False,
            timeout=120,
        )
        assert ended.returncode == (2 if "≥" in command else 0)
        assert "Traceback" not in ended.stderr
        assert "\\u2265" in ended.stdout or "≥" in command


def test_python_without_the_extra_says_what_to_install():
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


def test_a_notice_of_ours_is_one_line(call, here, monkeypatch):
    monkeypatch.setenv("ONELAUNCH_STUDIES", str(here / "nowhere\x1b[2J"))
    answer = call("study", "list")
    assert answer.code == 0
    assert answer.raw_err.count("\n") == 1
    assert answer.err.startswith("warning: $ONELAUNCH_STUDIES names ")
    assert "\x1b" not in answer.raw_err


def test_commands_end_with_their_error_s_exit_code(call):
    for arguments, code in (
        (("generate", "x", "--model", "tinny"), 2),
        (("doctor", "--device", "gpu"), 2),
        (("inspect", "linear_rnn", "--arch", "foo"), 2),
        (("study", "show", "nothing"), 2),
        (("study", "show", "toy-study", "--at", "nowhere"), 2),
        (("explain", "linear_rn", "--shape", "B=1"), 2),
        (("explain", "linear_rnn", "--shape", "B=1"), 2),
        (("study", "report", "nowhere.json"), 2),
        (("study", "report", "studies/toy-study.toml"), 1),
    ):
        answer = call(*arguments)
        assert answer.code == code, arguments
        assert "error: " in answer.err
