"""Tests of ``onelaunch.files``: which files are read, and that files are replaced atomically.

``folders.kept`` reads a file of the cache, and ``write_text`` writes a file of the workbench; both use it. ``prose.raises``
compares the message of an error with the test's entry in ``tests/snapshots/prose.txt``. A test fails if it does not compare one
of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.
"""

from __future__ import annotations

import os
import stat
import threading

import pytest

from onelaunch import files, folders
from onelaunch.errors import OutputUnwritable
from onelaunch.workbench.files import write_text


def test_a_regular_file_is_read_up_to_a_size(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert files.read_bytes(tmp_path / "file", 5) == b"12345"
    with pytest.raises(files.FileTooLarge):
        files.read_bytes(tmp_path / "file", 4)


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a folder", "nothing"])
def test_special_files_are_refused_at_once(tmp_path, kind, prose):
    path = tmp_path / "entry"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a folder":
        path.mkdir()
    with prose.raises(OSError):
        files.read_bytes(path)
    assert folders.kept(path) is None


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_new_file_has_the_permissions_of_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_text(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask


def test_writing_does_not_touch_the_umask_of_other_threads(tmp_path, monkeypatch):
    touched = []
    monkeypatch.setattr(os, "umask", lambda mask: touched.append((mask, threading.get_ident())) or 0o022)
    write_text(tmp_path / "file", "text")
    assert not touched


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_new(tmp_path, monkeypatch, call, prose):
    (tmp_path / "file").write_bytes(b"old")

    def full(*_, **__):
        raise OSError(28, "No space left on device")  # ENOSPC

    if call == "write":
        monkeypatch.setattr(os, "fdopen", lambda handle, _: os.close(handle) or full())
    else:
        monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (files.Path, "replace")), full)
    with prose.raises(OutputUnwritable):
        write_text(tmp_path / "file", "new")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("file", b"old")]
