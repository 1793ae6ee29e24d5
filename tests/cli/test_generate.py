"""Tests of ``onelaunch generate``: the bundled model ``tiny`` works at once, and each mistake is reported in one line.

The fixtures are those of ``conftest.py``. ``call`` runs ``onelaunch`` with arguments in this process and returns its exit
``code``, its stdout (``out`` with single blanks, ``raw`` unchanged) and its stderr (``err``, ``raw_err``). ``prose`` compares a
text with its entry in tests/snapshots/prose.txt, whose key is the node id of the test. A test fails if it does not compare one
of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from onelaunch.decode.generate import Model
from onelaunch.decode.runtime.engines import TorchEngine

pytest.importorskip("tokenizers", reason="needs the extra decode")


def test_the_bundled_model_continues_a_text(call):
    answer = call("generate", "def main(", "-n", 12, "--device", "cpu")
    assert answer.code == 0
    expected = Model.from_pretrained("tiny", device="cpu").generate("def main(", max_new_tokens=12).text
    assert answer.raw == f"def main({expected}\n"
    assert "12 tokens" in answer.err
    assert "ended: length" in answer.err


def test_options_are_passed_to_the_model(call):
    choices = ["--temperature", 0.9, "--top-k", 50, "--top-p", 0.95, "--min-p", 0.01, "--repetition-penalty", 1.1, "--seed", 3]
    answer = call("generate", "import ", "--no-echo", "-n", 30, "--stop", "\n", "--stop", "zzz", "--dtype", "float32", *choices)
    expected = Model.from_pretrained("tiny", device="cpu", dtype="float32").generate(
        "import ", max_new_tokens=30, stop=["\n", "zzz"], temperature=0.9, top_k=50, top_p=0.95, min_p=0.01,
        repetition_penalty=1.1, seed=3,
    )  # fmt: skip
    assert answer.raw == f"{expected.text}\n"
    assert f"ended: {expected.finish}" in answer.err


def test_ctrl_c_keeps_the_output_and_adds_a_message(call, monkeypatch):
    """The engine is interrupted after two tokens."""
    whole = TorchEngine.run

    def interrupted(self, request):
        made = whole(self, request)
        yield next(made)
        yield next(made)
        raise KeyboardInterrupt

    expected = Model.from_pretrained("tiny", device="cpu").generate("def main(", max_new_tokens=2).text
    monkeypatch.setattr(TorchEngine, "run", interrupted)
    answer = call("generate", "def main(", "--device", "cpu")
    assert (answer.code, answer.raw) == (130, f"def main({expected}\n")
    assert "2 tokens" in answer.err
    assert "interrupted" in answer.err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--model", "nothing-here"], 2),
        (["--model", "tinny"], 2),
        (["-n", 0], 2),
        (["--temperature", -1], 2),
        (["--variant", "egaer"], 2),
        (["--variant", "captured", "--device", "cpu"], 1),
        (["--chat"], 1),  # the bundled model has no chat template
        (["--model", "nothing-here", "--top-p", 7], 2),
        (["--model", "a" * 5000], 2),
    ],
)  # fmt: skip
def test_mistakes_are_reported_in_one_line(call, arguments, code, prose):
    if "--chat" in arguments:
        pytest.importorskip("transformers", reason="needs the extra decode")
    answer = call("generate", "def main(", *arguments)
    assert answer.code == code
    prose(answer.err[answer.err.index("error: ") :])
    assert not answer.out.strip() or "--chat" in arguments


@pytest.mark.parametrize(
    ("redirected", "options", "code"),  # text before and after the command, in a shell
    [
        pytest.param("printf 'caf\\351' |", "-", 2, id="bytes"),
        pytest.param("", "- <&-", 2, id="no stdin", marks=pytest.mark.thorough),
        pytest.param("", "x >&-", 1, id="no stdout", marks=pytest.mark.thorough),
        pytest.param("", "x >/dev/full", 1, id="full", marks=pytest.mark.thorough),
        pytest.param("PYTHONIOENCODING=ascii", "'\u00e9 = ' >/dev/null", 0, id="ascii", marks=pytest.mark.thorough),
    ],
)  # fmt: skip
def test_unusable_input_and_output_are_reported_in_one_line(redirected, options, code, prose):
    command = f"{redirected} {shlex.quote(sys.executable)} -m onelaunch generate --device cpu -n 2 --ignore-end {options}"
    answer = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout) == (code, "")
    if code:
        prose(answer.stderr)
    else:
        assert "2 tokens" in answer.stderr
    assert "Traceback" not in answer.stderr
