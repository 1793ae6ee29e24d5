"""Tests of the functions that find optional packages and tools."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from onelaunch.device.tools import find_ncu, package_installed


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("torch", True),
        ("torch.nn", True),
        ("torch.no_such_module", False),
        ("sys.path", False),  # sys is no package
        ("no_such_package", False),
        ("no_such_package.part", False),
    ],
)
def test_installed_and_missing_packages_are_told_apart(name, here):
    assert package_installed(name) is here


def test_no_parent_package_is_imported(tmp_path, monkeypatch):
    """This matters for ``fla.layers``: importing ``fla`` takes ten seconds, which a first call would wait for."""
    (tmp_path / "slow_parent" / "part").mkdir(parents=True)
    (tmp_path / "slow_parent" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "slow_parent" / "part" / "__init__.py").touch()
    (tmp_path / "slow_parent" / "part" / "leaf.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert package_installed("slow_parent.part")
    assert package_installed("slow_parent.part.leaf")
    assert not package_installed("slow_parent.part.leaf.twig")
    assert "slow_parent" not in sys.modules


def test_a_module_without_a_specification_is_not_installed(monkeypatch):
    module = ModuleType("made_by_hand")
    module.__spec__ = None
    monkeypatch.setitem(sys.modules, "made_by_hand", module)
    assert not package_installed("made_by_hand")


def program(folder: Path) -> str:
    """Make a folder with an executable file ``ncu``, and return the file's path."""
    folder.mkdir(parents=True)
    path = folder / "ncu"
    path.write_text("")
    path.chmod(0o755)
    return str(path)


def test_the_profiler_is_searched_on_the_path_then_in_cuda_folders(monkeypatch, tmp_path):
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    second = program(tmp_path / "second" / "bin")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "second"))
    assert find_ncu() == second
    first = program(tmp_path / "first" / "bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "first"))
    assert find_ncu() == first
    on_path = program(tmp_path / "path")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert find_ncu() == on_path
    Path(first).chmod(0o644)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert find_ncu() == second  # the first candidate is not executable
