"""Tests of the user's folders: their locations, a cache that cannot be written, users without a home folder, and locks.

``folders.keep`` writes a file of the cache and returns whether it could; ``folders.kept`` reads one, or returns ``None``.
``prose.warns`` is ``pytest.warns`` that also compares the message with the test's entry in ``tests/snapshots/prose.txt``. A
test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is
gone.

``thorough_but`` marks all parameters but the named ones ``thorough``: they do not run in ``make test``.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
import warnings
from pathlib import Path

import platformdirs
import pytest

from onelaunch import folders
from onelaunch.errors import CacheNotice
from tests.thorough import thorough_but
from tests.toys import MADE_UP_PEAKS


@pytest.fixture(autouse=True)
def forget():
    """Forget the temporary folder in use and the warnings of unwritable folders, as in a process that has just started."""
    folders._temporary.cache_clear()
    folders._UNWRITABLE.clear()
    yield
    folders._temporary.cache_clear()
    folders._UNWRITABLE.clear()


def in_a_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python process with only the given environment, and with PYTHONPATH as it is here."""
    environment = {"PYTHONPATH": ":".join(sys.path), **environment}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path / "own"))
    assert folders.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("ONELAUNCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert folders.cache_folder() == tmp_path / "xdg" / "onelaunch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert folders.cache_folder() == tmp_path / "home" / ".cache" / "onelaunch"


def test_the_tables_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("ONELAUNCH_TABLES", str(tmp_path / "own"))
    assert folders.tables_folder() == tmp_path / "own"
    monkeypatch.delenv("ONELAUNCH_TABLES")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    assert folders.tables_folder() == tmp_path / "xdg" / "onelaunch" / "tables"


def test_naming_folders_does_not_create_them(monkeypatch, tmp_path):
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ONELAUNCH_TABLES", str(tmp_path / "tables"))
    folders.cache_folder(), folders.tables_folder()
    assert list(tmp_path.iterdir()) == []


def test_cache_files_are_stored_and_replaced_atomically(tmp_path):
    path = tmp_path / "a" / "b"
    assert folders.kept(path) is None
    assert folders.keep(path, b"first")
    assert folders.keep(path, b"second")
    assert folders.kept(path) == b"second"
    assert [each.name for each in path.parent.iterdir()] == ["b"]


def test_an_unwritable_folder_gives_one_warning_with_a_remedy(tmp_path, prose):
    (tmp_path / "file").write_text("where the folder would be")
    path = tmp_path / "file" / "entry"
    with prose.warns(CacheNotice, match="ONELAUNCH_CACHE") as said:
        assert not folders.keep(path, b"first")
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not folders.keep(path, b"again")
        assert folders.kept(path) is None


def test_a_cache_folder_that_cannot_be_written_gives_one_warning_for_all_that_is_kept_there(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("where the folder would be")
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path / "file" / "cache"))

    def keep_all():
        return [folders.keep(folders.cache_folder() / name, b"data") for name in ("cubins/a", "cubins/b", "peaks/a", "proofs/a")]

    with pytest.warns(CacheNotice, match=r"file/cache cannot be written") as said:
        assert keep_all() == [False] * 4
    assert len(said) == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_read_only_folder_gives_a_warning(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.warns(CacheNotice):
        assert not folders.keep(tmp_path / "cache" / "entry", b"")
    tmp_path.chmod(0o700)


# Program that looks folders up, caches an entry and reads it, as a user whose id has no entry in the password database.
HOMELESS = """
import os, pwd, warnings
def nobody(*_):
    raise KeyError("no such user")
pwd.getpwuid = nobody
from onelaunch import folders
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(3):
        print(folders.cache_folder())
        print(folders.tables_folder())
print(len(said), said[0].category.__name__ if said else "")
folders.keep(folders.cache_folder() / "entry", b"kept")
print(folders.kept(folders.cache_folder() / "entry"))
"""


def test_a_user_without_home_and_without_an_entry_gets_a_private_folder(tmp_path):
    answer = in_a_process(HOMELESS, TMPDIR=str(tmp_path))
    assert answer.returncode == 0, answer.stderr
    *said, warned, kept = answer.stdout.splitlines()
    private = tmp_path / f"onelaunch-{os.getuid()}"
    assert set(said) == {str(private), str(private / "tables")}
    assert warned == "1 CacheNotice"
    assert kept == "b'kept'"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


def test_xdg_folders_are_honoured_without_a_home(tmp_path):
    answer = in_a_process(HOMELESS, XDG_CACHE_HOME=str(tmp_path / "cache"), XDG_DATA_HOME=str(tmp_path / "data"))
    assert answer.returncode == 0, answer.stderr
    *said, warned, kept = answer.stdout.splitlines()
    assert set(said) == {str(tmp_path / "cache/onelaunch"), str(tmp_path / "data/onelaunch/tables")}
    assert warned == "0 "
    assert kept == "b'kept'"


@pytest.mark.parametrize("problem", ["open to others", "a link", "a file"])
def test_an_unsafe_temporary_folder_is_not_used(monkeypatch, tmp_path, problem):
    monkeypatch.setattr(folders.tempfile, "tempdir", str(tmp_path))
    known = tmp_path / f"onelaunch-{os.getuid()}"
    if problem == "open to others":
        known.mkdir()
        known.chmod(0o777)
    elif problem == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        known.symlink_to(tmp_path / "elsewhere")
    else:
        known.write_text("")
    with pytest.warns(CacheNotice):
        found = folders._temporary()
    assert found != known
    assert found.parent == tmp_path
    assert stat.S_IMODE(found.stat().st_mode) == 0o700


@pytest.mark.parametrize("answer", [RuntimeError("no home"), KeyError("no user"), "~/.cache/onelaunch"])
def test_answers_of_platformdirs_without_a_home_are_handled(monkeypatch, tmp_path, answer, prose):
    monkeypatch.setattr(folders.tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("ONELAUNCH_CACHE")

    def ask(*_, **__):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(platformdirs, "user_cache_dir", ask)
    with prose.warns(CacheNotice, mask={r"onelaunch-\d+": "onelaunch-<user>"}):
        assert folders.cache_folder().parent == tmp_path


COMMANDS = (
    ["doctor", "--device", "cpu"],
    ["study", "show", "040-linear-rnn", "--device", "cpu"],
)


@pytest.mark.slow
@pytest.mark.parametrize("command", thorough_but(COMMANDS[1], of=COMMANDS), ids=" ".join)
def test_commands_work_with_an_unwritable_cache(command, tmp_path):
    (tmp_path / "file").write_text("where the folder would be")
    environment = {**os.environ, "ONELAUNCH_CACHE": str(tmp_path / "file"), "PYTHONPATH": ":".join(sys.path)}
    code = f"{MADE_UP_PEAKS}\nimport sys; sys.argv = ['onelaunch', *{command}]\nfrom onelaunch.cli.main import app; app()"
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr.count("cannot be written") == 1
    assert "ONELAUNCH_CACHE" in answer.stderr


def test_no_temporary_file_is_left_in_the_cache(tmp_path: Path):
    folders.keep(tmp_path / "entry", b"x" * 1000)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["entry"]


# Program that adds 1 to the number in a file, slowly. Without the lock, processes would read the same number.
COUNT = """
import sys, time
from pathlib import Path
from onelaunch import folders
with folders.process_lock(Path(sys.argv[1]), "count"):
    file = Path(sys.argv[1]) / "number"
    number = int(file.read_text()) if file.exists() else 0
    time.sleep(0.2)
    file.write_text(str(number + 1))
"""


def test_processes_enter_a_locked_region_one_at_a_time(tmp_path):
    environment = {"PYTHONPATH": ":".join(sys.path)}
    running = [subprocess.Popen([sys.executable, "-c", COUNT, str(tmp_path)], env=environment) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert (tmp_path / "number").read_text() == "3"


def test_a_region_is_entered_even_if_its_lock_is_unavailable(tmp_path, monkeypatch):
    """First the lock's folder cannot be created. Then the lock is held longer than the longest wait, here 0.05 s."""
    (tmp_path / "file").write_text("in the way")
    with folders.process_lock(tmp_path / "file" / "folder", "any"):
        pass
    monkeypatch.setattr(folders, "LOCK_SECONDS", 0.05)
    with folders.process_lock(tmp_path, "held"), folders.process_lock(tmp_path, "held"):
        entered = True
    assert entered


def test_an_error_in_a_region_releases_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "LOCK_SECONDS", 5.0)
    with pytest.raises(RuntimeError, match="inside"), folders.process_lock(tmp_path, "held"):
        raise RuntimeError("inside")
    begin = time.monotonic()
    with folders.process_lock(tmp_path, "held"):
        assert time.monotonic() - begin < 4
