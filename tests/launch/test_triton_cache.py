"""Tests of a cache folder of Triton that cannot be written: kernels are compiled in memory, with one notice in a process.

``prose`` compares wording with the test's entry in ``tests/snapshots/prose.txt``. A test fails if it does not compare one of
its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone. ``machine`` replaces the GPU's driver
by a stand-in. ``vectors`` returns random vectors. ``forget_kernels`` drops compiled kernels from memory. ``call`` launches the
kernels ``NAMES``.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch

from onelaunch.errors import CacheNotice
from onelaunch.launch import triton_cache, workspace
from tests.launch.first import forget_kernels, machine, vectors  # noqa: F401 - a fixture
from tests.launch.test_first_call import NAMES, call

triton = pytest.importorskip("triton", reason="the tests compile kernels of Triton")


@pytest.fixture
def manager(monkeypatch):
    """Restore the class that manages Triton's caches after a test."""
    monkeypatch.setitem(vars(triton.knobs.cache), "manager_class", None)


@pytest.fixture(params=["a file in its place", "a file system without files", "a file above it"])
def unwritable(request, machine, manager, monkeypatch, tmp_path):  # noqa: F811
    """Set a cache folder that cannot be written, by the superuser either."""
    file = tmp_path / "file"
    file.write_text("")
    folder = {
        "a file in its place": file,
        "a file system without files": Path("/proc/onelaunch"),
        "a file above it": file / "cache",
    }[request.param]
    if folder.parts[1] == "proc" and not Path("/proc/self").exists():
        pytest.skip("this system has no /proc")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    return folder


@pytest.mark.parametrize("jobs", [1, 4])
def test_kernels_are_compiled_in_memory_with_one_notice(unwritable, machine, monkeypatch, jobs):  # noqa: F811
    monkeypatch.setenv("ONELAUNCH_COMPILE_JOBS", str(jobs))

    def calls():
        call(vectors()[0].requires_grad_(), grad=True).sum().backward()
        call(torch.randn(256, dtype=torch.float64))

    with pytest.warns(CacheNotice, match="TRITON_CACHE_DIR") as said:
        calls()
    assert len([each for each in said if each.category is CacheNotice]) == 1
    assert machine.launched == ["double_kernel", "square_kernel", "slope_kernel", "double_kernel", "square_kernel"]
    assert sorted(set(machine.names)) == NAMES
    assert len(machine.names) == 5


def test_the_notice_names_the_folder_and_a_remedy(machine, manager, monkeypatch, tmp_path, prose):  # noqa: F811
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with prose.warns(CacheNotice, match="cannot be written"):
        call(*vectors())


def test_a_read_only_cache_is_read(machine, manager, monkeypatch, tmp_path):  # noqa: F811
    """The superuser may write everywhere, so the test replaces the functions by which Triton makes files and folders."""
    folder = tmp_path / "triton"
    call(*vectors())
    before = sorted(folder.rglob("*"))
    forget_kernels()
    machine.compiled.clear()
    refuse_writes_to(folder, monkeypatch)

    def calls():
        call(*vectors())
        call(torch.randn(256, dtype=torch.float64))

    with pytest.warns(CacheNotice) as said:
        calls()
    assert len(said) == 1
    assert machine.names == ["double_kernel", "square_kernel"]  # those for float64
    assert sorted(folder.rglob("*")) == before


def refuse_writes_to(folder, monkeypatch):
    """Let functions that make files and folders raise the error of a read-only file system inside a folder."""
    make, opened = os.mkdir, os.open

    def refused(path):
        if str(path).startswith(str(folder)):
            raise OSError(30, "Read-only file system", str(path))

    def mkdir(path, *args, **kwargs):
        if not Path(path).is_dir():
            refused(path)
        return make(path, *args, **kwargs)

    def open_(path, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            refused(path)
        return opened(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(os, "open", open_)


def test_an_error_that_does_not_come_from_the_cache_is_raised(machine, manager, monkeypatch):  # noqa: F811
    def fail(*_):
        raise FileNotFoundError(2, "No such file or directory", "ptxas")

    monkeypatch.setattr(machine, "get_current_target", fail)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FileNotFoundError, match="ptxas"):
            call(*vectors())


def test_a_cache_of_the_users_own_class_is_left_alone(machine, manager, monkeypatch, tmp_path):  # noqa: F811
    from triton.runtime.cache import FileCacheManager

    class Own(FileCacheManager):
        pass

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(triton.knobs.cache, "manager_class", Own)
    with pytest.raises(OSError, match="file"):
        call(*vectors())


def test_a_driver_that_cannot_write_its_code_is_asked_again(machine, manager, monkeypatch, tmp_path):  # noqa: F811
    """A workspace may be the first to ask for Triton's driver, which compiles C code into the cache folder."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    asked = []

    def stream(device):
        asked.append(device)
        if len(asked) == 1:
            raise NotADirectoryError(20, "Not a directory", str(tmp_path / "file" / "key"))
        return 5

    monkeypatch.setattr(machine, "get_current_stream", stream)
    with pytest.warns(CacheNotice):
        assert workspace._stream(torch.device("cuda", 0)) == 5


def test_a_folder_that_can_be_written_gives_no_notice(machine, manager):  # noqa: F811
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        triton_cache.ensure_writable()
    assert triton.knobs.cache.manager_class is None
