"""Tests that moved modules and renamed attributes are still found under their old names, with a warning that names the new one.

``MOVED`` gives the new module of each old one. ``PARTS`` gives the further new modules of an old module that was split.
"""

from __future__ import annotations

import importlib
import pickle
import sys

import pytest

from onelaunch.moved import MOVED, PARTS


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_name_gives_the_attributes_of_the_new_module(old, monkeypatch):
    new = importlib.import_module(MOVED[old])
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=MOVED[old]):
        module = importlib.import_module(old)
    names = [name for name in vars(new) if not name.startswith("_")]
    assert names
    assert all(getattr(module, name) is getattr(new, name) for name in names)


def test_a_name_missing_from_the_new_module_raises_attribute_error(monkeypatch):
    monkeypatch.delitem(sys.modules, "onelaunch.builds", raising=False)
    with pytest.warns(DeprecationWarning, match="build"):
        module = importlib.import_module("onelaunch.builds")
    with pytest.raises(AttributeError):
        module.nothing_of_this_name  # noqa: B018


def test_other_names_are_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("onelaunch.never_was")


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("onelaunch.decode.engine", "Engine", "onelaunch.decode"),
        ("onelaunch.decode.engine", "TorchEngine", "onelaunch.decode.runtime.engines"),
        ("onelaunch.decode.plan.rungs", "LEVELS", "onelaunch.decode.plan.levels"),
        ("onelaunch.decode.rungs", "plan_for", "onelaunch.decode.plan"),
        ("onelaunch.decode.sampling", "Sampling", "onelaunch.decode"),
        ("onelaunch.decode.text", "TextCodec", "onelaunch.decode"),
        ("onelaunch.hardware", "HOPPER_SHARED_BYTES", "onelaunch.device.architectures"),
        ("onelaunch.nvrtc", "OPTIONS", "onelaunch.cuda.compiler"),
        ("onelaunch.peaks", "read_kernels", "onelaunch.device.read_rate"),
        ("onelaunch.workbench.criteria", "Finding", "onelaunch.workbench.decide.judging"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_name_of_a_split_module_is_found_in_its_new_module(old, name, new):
    assert getattr(importlib.import_module(old), name) is getattr(importlib.import_module(new), name)


@pytest.mark.parametrize("old", sorted(PARTS))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_split_module_reports_missing_names(old):
    module = importlib.import_module(old)
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        module.nothing_of_this_name  # noqa: B018


KEPT = {
    "onelaunch.dispatch": "AUTO CONFIRMED TIE Explanation Standing check_results choose explain pick run",
    "onelaunch.errors": "UNSAFE did_you_mean escaped in_a_line listing shown",
    "onelaunch.operation": "Bundle Case Control Cost Loop Query Reading Variant fixed parse_dtype",
    "onelaunch.workbench.inspection": "ARCHITECTURES CHECKED Architecture find_architecture inspect_operation",
}
"""Names that the reference documentation of an earlier version listed, by module."""


@pytest.mark.parametrize("module", sorted(KEPT))
def test_documented_modules_keep_their_names(module):
    present = importlib.import_module(module)
    assert [name for name in KEPT[module].split() if not hasattr(present, name)] == []


def test_functions_named_by_pickles_of_the_last_version_exist():
    """A pickle holds no operation, but a call of a function that finds it by the name of its module and its own."""
    stored = {
        "linear_rnn": b"conelaunch.operation\n_operation_by_name\n(Vonelaunch.ops.linear_rnn.contract\nVlinear_rnn\ntR.",
        "eager": b"conelaunch.operation\n_variant_by_name\n(Vonelaunch.ops.linear_rnn.contract\nVlinear_rnn\nVeager\ntR.",
    }
    assert {name: pickle.loads(data).name for name, data in stored.items()} == {name: name for name in stored}


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("onelaunch.decode.plan.builder", "Rung", "Level"),
        ("onelaunch.decode.plan.levels", "RUNGS", "LEVELS"),
        ("onelaunch.workbench.verify", "judge_answer", "judge_outputs"),
        ("onelaunch.workbench.verify.calls", "Callee", "Candidate"),
        ("onelaunch.workbench.verify.calls", "Answer", "OutputTensors"),
        ("onelaunch.workbench.verify.reference", "Truth", "Reference"),
    ],
)
def test_a_renamed_attribute_is_found_by_its_old_name_with_a_warning(module, old, new):
    found = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        assert getattr(found, old) is getattr(found, new)


@pytest.mark.parametrize("module", ["onelaunch.decode.plan.rungs", "onelaunch.decode.rungs"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_renamed_attribute_is_found_in_a_moved_module(module):
    """The table of optimization levels was renamed together with its module."""
    levels = importlib.import_module("onelaunch.decode.plan.levels")
    assert importlib.import_module(module).RUNGS is levels.LEVELS
    assert importlib.import_module(module).Rung is levels.Level


def test_a_name_that_was_never_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'never_was'"):
        importlib.import_module("onelaunch.workbench.verify").never_was  # noqa: B018
