"""Snapshot of the wording of messages and pages. A test asserts types, fields and behaviour, and passes the words to ``prose``.

The file is ``tests/snapshots/prose.txt``. The key of an entry is the test's node id with its parameters. The second text of a
test has `` # 2`` behind it, and so on in the order of the calls. A text with a name of its own has the test function and `` #
name``. After a deliberate change of words, ``pytest --update-prose`` writes the entries of the tests that ran, drops those
without a test and those that a passed test did not compare, and the diff of that file is reviewed. ``conftest.py`` imports the
fixture ``prose`` for all tests. ``test_prose.py`` fails where an entry has no test, so that the entries of a removed test or
parameter must be removed too.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import onelaunch
from onelaunch.device import hardware
from onelaunch.wording import in_a_line

ROOT = Path(__file__).parents[1]
SNAPSHOT = ROOT / "tests" / "snapshots" / "prose.txt"
INDENT = "    "
UPDATE = "--update-prose"


def add_options(parser: pytest.Parser) -> None:
    """Add this module's option to pytest's."""
    parser.addoption(
        UPDATE, action="store_true", help="run tests of wording alone, and write what they find to tests/snapshots/prose.txt"
    )


def read(path: Path) -> dict[str, str]:
    """Return the entries of a snapshot file as texts by key. Consecutive keys share the text below them."""
    entries: dict[str, str] = {}
    for block in (
        re.findall(r"(?:^\S.*\n)+(?:(?: .*)?\n)*", path.read_text(encoding="utf-8"), re.MULTILINE) if path.exists() else ()
    ):
        keys = [line for line in block.splitlines() if line and not line.startswith(INDENT)]
        text = "\n".join(line.removeprefix(INDENT) for line in block.splitlines()[len(keys) :]).strip("\n")
        entries.update(dict.fromkeys(keys, text))
    return entries


def written(entries: Mapping[str, str]) -> str:
    """Return the content of a snapshot file: sorted by key, with indented texts.

    Consecutive keys of one test function with equal texts stand above one copy of the text.
    """
    blocks: list[tuple[list[str], str]] = []
    for key in sorted(entries, key=in_order):
        keys, text = blocks[-1] if blocks else ([], "")
        if keys and text == entries[key] and function(keys[0]) == function(key):
            keys.append(key)
        else:
            blocks.append(([key], entries[key]))
    return "\n".join(
        "\n".join([*keys, *(f"{INDENT}{line}".rstrip() for line in text.split("\n"))]) + "\n" for keys, text in blocks
    )


def lines_with(text: str, *words: str) -> list[str]:
    """Return the lines of a text that contain all of the words, with runs of blanks reduced to one.

    Tests of commands and of documents compare such lines of a long output alone.
    """
    return [" ".join(line.split()) for line in text.splitlines() if all(word in line for word in words)]


def function(key: str) -> str:
    """Return the node id of the test function that a key names, without parameters."""
    return key.partition(" # ")[0].partition("[")[0]


def in_order(key: str) -> list[list[tuple[bool, int, str]]]:
    """Return the sort key of an entry: the test function, then the number or name, then the parameters."""
    test, _, name = key.partition(" # ")
    return [
        [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"([0-9]+)", text)]
        for text in (function(key), name, test)
    ]


def plain(text: str) -> str:
    """Return the text as it is stored, with control characters escaped and without trailing blanks."""
    shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "replace").decode() for c in text)
    return "\n".join(line.rstrip() for line in shown.split("\n")).strip("\n")


class Snapshot:
    """Entries of one snapshot file, compared with or replaced by the texts that tests find. The class is a pytest plugin.

    Args:
        path: Snapshot file.
        update: Whether to write the file at the end of the session instead of comparing texts.

    Attributes:
        entries: Texts of the file by key.
        found: Texts that tests have compared so far, by key.
        stale: Keys of entries that passed tests should have compared, and did not.
        collected: Node ids of the collected tests; empty if the command selects parameters of tests.
    """

    def __init__(self, path: Path = SNAPSHOT, *, update: bool = False) -> None:
        self.path, self.update = path, update
        self.entries = read(path)
        self.found: dict[str, str] = {}
        self.stale: set[str] = set()
        self.collected: set[str] = set()

    def check(self, key: str, text: str) -> None:
        """Compare a text with the entry of its key, or store it for the end of the session in an update."""
        text = plain(text)
        assert text, f"{key} compares an empty text"
        if self.found.setdefault(key, text) != text:
            pytest.fail(f"{key} compares two different texts:\n{difference(self.found[key], text)}")
        if self.update:
            return
        if key not in self.entries:
            pytest.fail(f"{self.path.name} has no entry {key!r}; run this test with {UPDATE}, and review:\n{text}")
        if self.entries[key] != text:
            pytest.fail(
                f"{key} differs from {self.path.name}; if the change is intended, run this test with {UPDATE}, and review:\n"
                f"{difference(self.entries[key], text)}"
            )

    def finish(self, node: str) -> None:
        """Fail a passed test if the file has entries of it that it did not compare."""
        left = {key for key in self.entries if key == node or key.startswith(f"{node} # ")} - set(self.found)
        # A named entry is shared by all parameters of its function, so this test need not have compared it.
        left = {key for key in left if "[" in key or key.rpartition(" # ")[2].isdigit() or " # " not in key}
        if left and not self.update:
            pytest.fail(f"{self.path.name} has entries that this test did not compare: {sorted(left)}; run it with {UPDATE}")
        self.stale |= left

    def without_a_test(self) -> set[str]:
        """Return keys of entries whose test function is missing, or was collected without the entry's parameters."""
        functions = {function(node) for node in self.collected}
        return {key for key in self.entries if gone(key) or (function(key) in functions and not self.asked_by(key))}

    def asked_by(self, key: str) -> bool:
        """Return whether a collected test may compare this entry. Any test of the function may compare a named one."""
        node, _, name = key.partition(" # ")
        return node in self.collected or (bool(name) and not name.isdigit())

    @pytest.hookimpl(tryfirst=True)  # before pytest deselects tests by -m and -k, whose entries are not stale
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if not any("[" in argument for argument in config.args):  # with selected parameters, the entries of others are not stale
            self.collected = {item.nodeid for item in items}
        if self.update:
            others = [item for item in items if "prose" not in getattr(item, "fixturenames", ())]
            config.hook.pytest_deselected(items=others)
            items[:] = [item for item in items if "prose" in getattr(item, "fixturenames", ())]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        self.finish(item.nodeid)
        return result

    def pytest_sessionfinish(self) -> None:
        if self.update:
            dropped = self.stale | self.without_a_test()
            kept = {key: text for key, text in self.entries.items() if key not in dropped}
            self.path.write_text(written({**kept, **self.found}), encoding="utf-8")


def gone(key: str) -> bool:
    """Return whether the test function of a key no longer exists, or no longer uses the name of the entry."""
    file, _, test = function(key).partition("::")
    name = key.partition(" # ")[2]
    source = source_of(file)
    return re.search(rf"^\s*def {test.rpartition('::')[2]}\(", source, re.MULTILINE) is None or (
        bool(name) and not name.isdigit() and f'"{name}"' not in source
    )


@lru_cache
def source_of(file: str) -> str:
    """Return the source of a test file, or an empty string if it does not exist."""
    return (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""


def difference(recorded: str, found: str) -> str:
    """Return a unified diff of two texts."""
    return "\n".join(difflib.unified_diff(recorded.split("\n"), found.split("\n"), "recorded", "found", lineterm=""))


class Prose:
    """Comparison of one test's texts with their entries, in the order of the calls.

    Args:
        snapshot: Entries to compare with.
        node: Node id of the test.
        masks: Regular expressions of text that differs between runs, with their replacements.
    """

    def __init__(self, snapshot: Snapshot, node: str, masks: Mapping[str, str]) -> None:
        self.snapshot, self.node, self.masks = snapshot, node, masks
        self.count = 0

    def __call__(self, text: object, *, name: str = "", mask: Mapping[str, str] | None = None) -> None:
        """Compare a text with its entry.

        Args:
            text: Text to compare, or an object that is converted by ``str``. Items of a list or tuple become lines.
            name: Name of the entry within the test function, shared by its parameters. By default entries are numbered per test.
            mask: Further regular expressions with replacements, applied before those of the fixture.
        """
        assert text is not None, "None is not a text"
        said = "\n".join(map(str, text)) if isinstance(text, (list, tuple)) else str(text)
        for pattern, stand_in in {**(mask or {}), **self.masks}.items():
            said = re.sub(pattern, stand_in, said)
        if name:
            key = f"{self.node.partition('[')[0]} # {name}"
        else:
            self.count += 1
            key = self.node if self.count == 1 else f"{self.node} # {self.count}"
        self.snapshot.check(key, said)

    @contextmanager
    def raises(self, error: Any, match: str = "", *, foreign: bool = False, **how: Any) -> Iterator[pytest.ExceptionInfo]:
        """Expect an error as ``pytest.raises`` does, and compare its message.

        Args:
            error: Class of the error, or a tuple of classes.
            match: Regular expression of a name or value that the message must contain.
            foreign: Whether to mask the message of another library's error that caused this one. It changes with versions.
            how: Keyword arguments of :meth:`__call__`.
        """
        with pytest.raises(error, match=match or None) as caught:
            yield caught
        said, cause = str(caught.value), caught.value.__cause__ or caught.value.__context__
        if foreign:
            assert cause is not None, "no other error caused this one"
            assert in_a_line(cause) in said
            said = said.replace(in_a_line(cause), f"<{type(cause).__name__}>")
        self(said, **how)

    @contextmanager
    def warns(self, warning: type[Warning], match: str = "", **how: Any) -> Iterator[pytest.WarningsRecorder]:
        """Expect a warning as ``pytest.warns`` does, and compare the first message of its class.

        ``how`` holds keyword arguments of :meth:`__call__`.
        """
        with pytest.warns(warning, match=match or None) as record:
            yield record
        self(next(one.message for one in record if issubclass(one.category, warning)), **how)


@pytest.fixture
def prose(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prose:
    """Return the comparison with the snapshot file for this test. Text that depends on the machine or the run is masked."""
    base = re.escape(str(tmp_path_factory.getbasetemp()))
    masks = {
        rf"{base}/[\w-]+": "<tmp>",
        re.escape(str(Path(onelaunch.__file__).parent)): "<package>",
        re.escape(str(ROOT)): "<root>",
        re.escape(hardware.describe("cpu").table) + r"(?=\.json\b)": "<cpu>",
        r"\b0x[0-9a-f]{6,}\b": "<address>",
        r"\b(?=[0-9]*[a-f])[0-9a-f]{12}\b": "<digest>",
        r"These can: [\w, ]+": "These can: <variants>",
        r"Known: [\w, ]*\blinear_rnn\b[\w, ]*": "Known: <operations>",
    }
    return Prose(request.config.pluginmanager.get_plugin("prose"), request.node.nodeid, masks)


def register(config: pytest.Config) -> None:
    """Read the snapshot file and register it as a plugin."""
    update = config.getoption("update_prose")
    if update and (getattr(config.option, "numprocesses", None) or hasattr(config, "workerinput")):
        raise pytest.UsageError(f"{UPDATE} works in one process: leave out -n")
    config.pluginmanager.register(Snapshot(update=update), "prose")
