"""Tests of plug-ins of other packages: each is loaded separately, and none can break the library.

A plug-in is an entry point of the group ``onelaunch.plugins``. It is loaded at the first look-up of an operation. The fixture
``scale`` registers the toy operation ``scale(x, factor=2.0)`` of ``tests/toys.py`` for one test. It has the variants ``loop``,
``vector`` (preferred, for at most 1000 elements), ``no_backward`` and ``elsewhere``, which no call can use. ``prose.warns`` is
``pytest.warns`` that also compares the message with the test's entry in ``tests/snapshots/prose.txt``. A test fails if it does
not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import threading
import warnings

import pytest
import torch

from onelaunch import operation
from onelaunch.cli import doctor
from onelaunch.errors import ArgumentError, PluginWarning
from onelaunch.operation import entry_points as loading
from onelaunch.operation import find_operation, operations, registry
from onelaunch.workbench.result import Result
from tests.toys import MADE_UP_PEAKS


class Entry:
    """An entry point of the package ``acme-kernels`` 1.2 that calls ``act()`` when it is loaded, and counts its loads."""

    value = "acme.variants"

    def __init__(self, name, act):
        self.name, self.act, self.loads = name, act, 0
        self.dist = type("Distribution", (), {"name": "acme-kernels", "version": "1.2"})

    def load(self):
        self.loads += 1
        self.act()


@pytest.fixture
def announce(monkeypatch, scale):
    """Return a function whose arguments become the plug-ins that installed packages announce. None has been loaded then."""
    real = importlib.metadata.entry_points

    def announced(*entries):
        def entry_points(**asked):
            return list(entries) if asked == {"group": "onelaunch.plugins"} else real(**asked)

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
        loading.forget()

    yield announced
    loading.forget()


def test_a_plugin_is_loaded_once(announce):
    entry = Entry("mine", lambda: None)
    announce(entry)
    find_operation("scale")
    list(operations())
    assert entry.loads == 1
    assert operation.plugins() == (loading.Plugin("mine", "acme.variants", "acme-kernels 1.2"),)


def test_a_plugin_lists_what_it_registered(announce, scale):
    def act():
        scale.variant("acme", launches=1)(lambda call: (call.x * call.factor,))

    announce(Entry("mine", act), Entry("other", lambda: None))
    assert [each.adds for each in operation.plugins()] == [("scale.acme",), ()]
    ((name, status, text), _) = doctor._plugins(operation.plugins())
    assert (name, status) == ("mine", "ok")
    assert "scale.acme" in text
    assert "acme-kernels 1.2" in text


@pytest.mark.parametrize("what", ["variant", "run", "operation", "oracle", "preference", "defaults", "removed"])
def test_a_plugin_that_replaces_what_others_registered_is_left_out(announce, scale, what, prose):
    """Otherwise calls would give its results under the names of others, with the ordinary reasons in ``explain``."""
    vector, run, oracle, preference = scale.get("vector"), scale.get("vector").run, scale._oracle, scale._preference

    def act():
        if what == "variant":
            del scale.variants["vector"]
            scale.variant("vector", launches=1)(lambda call: (0 * call.x,))
        elif what == "run":
            vector.run = lambda call: (0 * call.x,)
        elif what == "operation":
            registry._REGISTRY["scale"] = find_operation("gla")
        elif what == "oracle":
            scale._oracle = lambda **arguments: (0 * arguments["x"],)
        elif what == "preference":
            scale.prefers(lambda query: ("loop",))
        elif what == "defaults":
            scale.defaults["cpu"] = ("loop", "vector")
        else:
            del scale.variants["vector"]

    announce(Entry("greedy", act))
    with prose.warns(PluginWarning):
        assert find_operation("scale") is scale
    assert scale.get("vector") is vector
    assert (vector.run, scale._oracle, scale._preference) == (run, oracle, preference)
    assert scale(torch.ones(2)).tolist() == [2.0, 2.0]


def raising(error):
    """Return a function that raises an error."""

    def act(**_):
        raise error

    return act


class Mute(Exception):
    """Error whose message cannot be obtained."""

    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no such\nchip"), ImportError("acme"), SystemExit(3), ArgumentError("x"), BaseException("odd"), Mute()],
    ids=lambda error: type(error).__name__,
)
def test_a_broken_plugin_gives_one_warning_and_the_others_are_loaded(announce, scale, error):
    good = Entry("good", lambda: scale.variant("acme", launches=1)(lambda call: (call.x * call.factor,)))
    announce(Entry("broken", raising(error)), good)
    with pytest.warns(PluginWarning) as caught:
        assert scale(torch.ones(2)).tolist() == [2.0, 2.0]
    assert find_operation("gla").name == "gla"
    assert list(operations())
    (warning,) = [each.message for each in caught]
    assert (warning.name, warning.distribution) == ("broken", "acme-kernels 1.2")
    assert "\n" not in str(warning)
    assert good.loads == 1
    assert "acme" in scale.variants
    assert [each.problem is None for each in operation.plugins()] == [False, True]


def test_registrations_of_a_broken_plugin_are_undone(announce, scale, prose):
    def act():
        scale.variant("half", launches=1)(lambda call: (call.x,))
        operation.operation(dimensions=(), outputs=(), bind=lambda: None, options={}, defaults={})(half_done)
        raise ValueError("then it failed")

    def half_done():
        """Stand for an operation without an oracle."""

    announce(Entry("broken", act))
    with prose.warns(PluginWarning):
        names = [each.name for each in operations()]
    assert "half_done" not in names
    assert "half" not in scale.variants


def test_changes_of_an_operation_by_a_broken_plugin_are_undone(announce, scale):
    oracle = scale._oracle

    def act():
        scale.get("vector").supports(lambda query: "gone")
        scale.oracle(lambda **arguments: 42)
        scale.shapes(lambda call: ((1,),))
        raise ValueError("then it failed")

    announce(Entry("broken", act))
    with pytest.warns(PluginWarning):
        find_operation("gla")
    assert scale._oracle is oracle
    assert scale(torch.ones(2), variant="vector").tolist() == [2.0, 2.0]


def test_ctrl_c_is_raised_while_a_plugin_is_loaded(announce):
    announce(Entry("slow", raising(KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        find_operation("gla")


def test_unreadable_metadata_gives_one_warning(announce, scale, monkeypatch):
    announce()
    monkeypatch.setattr(importlib.metadata, "entry_points", raising(TypeError("missing 1 required positional argument")))
    with pytest.warns(PluginWarning, match="positional argument"):
        assert scale(torch.ones(2)).tolist() == [2.0, 2.0]
    assert [each.problem is None for each in operation.plugins()] == [False]


def test_a_plugin_may_ask_for_operations_while_it_is_loaded(announce):
    seen = []
    announce(Entry("curious", lambda: seen.append(find_operation("gla").name)))
    find_operation("scale")
    assert seen == ["gla"]


def test_concurrent_threads_load_a_plugin_once(announce):
    entry = Entry("slow", lambda: threading.Event().wait(0.05))
    announce(entry)
    threads = [threading.Thread(target=find_operation, args=("gla",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert entry.loads == 1


@pytest.mark.thorough
def test_onelaunchs_own_names_are_registered_before_plugins():
    code = """
import importlib.metadata, sys
class Entry:
    name, value, dist = "mine", "mine", None
    def load(self):
        print("onelaunch.ops" in sys.modules and "onelaunch.decode" in sys.modules)
real = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **asked: [Entry()] if asked == {"group": "onelaunch.plugins"} else real(**asked)
from onelaunch.operation import find_operation
find_operation("gla")
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True\n"


def test_every_command_works_with_an_installed_broken_plugin(tmp_path):
    """The distribution lies on the path, as pip leaves one, and its module raises."""
    (tmp_path / "acme_variants.py").write_text("raise RuntimeError('wrong driver')\n", encoding="utf-8")
    facts = tmp_path / "acme_kernels-1.2.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kernels\nVersion: 1.2\n", encoding="utf-8")
    (facts / "entry_points.txt").write_text("[onelaunch.plugins]\nmine = acme_variants\n", encoding="utf-8")
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
import torch
from onelaunch.ops import linear_rnn
from onelaunch.operation import plugins
one = torch.zeros(1, 2, 16)
print(linear_rnn(one, torch.zeros(16, 16), one, one).shape)
print(plugins()[0].distribution, "|", plugins()[0].problem)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "torch.Size([1, 2, 16])\nacme-kernels 1.2 | RuntimeError: wrong driver\n"
    assert ran.stderr.count("PluginWarning") == 1
    assert "Traceback" not in ran.stderr


@pytest.mark.thorough
def test_commands_and_studies_go_on_with_plugins_that_are_broken(tmp_path):
    """One plug-in's module does not exist; the predicate of the other's variant raises."""
    (tmp_path / "acme_variants.py").write_text(
        """
from onelaunch.ops import gated_scan

@gated_scan.variant("acme")
def acme(call):
    return None, None

@acme.supports
def raising(query):
    raise RuntimeError("no such chip")
""",
        encoding="utf-8",
    )
    facts = tmp_path / "acme_kernels-1.2.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kernels\nVersion: 1.2\n", encoding="utf-8")
    (facts / "entry_points.txt").write_text("[onelaunch.plugins]\nmine = acme_variants\ngone = acme_gone\n", encoding="utf-8")
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "small.toml").write_text(
        """
name = "small"
question = "Does it run?"
operation = "gated_scan"
baseline = "eager"
variants = ["eager", "chunked", "acme"]
rounds = 3

[[shapes]]
name = "tiny"
scale = "small"
dtype = "float32"
B = 1
T = 8
V = 4
""",
        encoding="utf-8",
    )

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "COLUMNS": "200"}
    ran = subprocess.run(
        [sys.executable, "-c", MADE_UP_PEAKS + COMMANDS],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.count("<exit code 0>") == 3, ran.stderr
    assert "Traceback" not in ran.stderr
    assert "acme_gone" in ran.stderr
    listed, _, told = ran.stdout.split("<exit code 0>\n")[:3]
    assert "small" in listed
    (path,) = (tmp_path / "results").rglob("small.json")
    result = Result.load(path)
    assert {cell.variant: cell.status for cell in result.cells} == {"eager": "ok", "chunked": "ok", "acme": "unsupported"}
    assert "no such chip" in result.cell("tiny", "acme").reason
    assert result.provenance.variants["acme"].distribution == "acme-kernels 1.2"
    assert {"gated_scan.acme", "ModuleNotFoundError"} <= set(re.findall(r"[\w.]+", told))


# Runs commands one after another in a process that has the plug-ins. Probes, plots and measured peaks would take seconds.
COMMANDS = """
import sys
from onelaunch.cli.main import app
from onelaunch.operation import find_operation
from onelaunch.workbench.report import page
page.plots = lambda result: ()
find_operation("gated_scan")._probes = None
for line in ("study list", "study run small --device cpu --time-cap 1", "doctor --device cpu --no-measure"):
    sys.argv = ["onelaunch", *line.split()]
    try:
        app()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    print(f"<exit code {code}>", flush=True)
"""


def test_without_plugins_there_is_no_warning(announce):
    announce()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_operation("gla")
    assert operation.plugins() == ()
