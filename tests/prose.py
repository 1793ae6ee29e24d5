"""Wording of messages and pages, kept in one file: a test asserts types, fields and behaviour, and hands the words to ``prose``.

The file is ``tests/snapshots/prose.txt``. After a deliberate change of words, ``pytest --update-prose`` writes the entries of the
tests that ran, and the diff of that file is reviewed.
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
    """Return the entries of a snapshot file: texts by key. Keys above one text share it."""
    entries: dict[str, str] = {}
    for block in (
        re.findall(r"(?:^\S.*\n)+(?:(?: .*)?\n)*", path.read_text(encoding="utf-8"), re.MULTILINE) if path.exists() else ()
    ):
        keys = [line for line in block.splitlines() if line and not line.startswith(INDENT)]
        text = "\n".join(line.removeprefix(INDENT) for line in block.splitlines()[len(keys) :]).strip("\n")
        entries.update(dict.fromkeys(keys, text))
    return entries


def written(entries: Mapping[str, str]) -> str:
    """Return the text of a snapshot file: sorted by key, texts indented, keys of one test with the same text above it."""
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
    """Return the lines of a text that hold all of the words: what of a page a test is about. Blanks are single."""
    return [" ".join(line.split()) for line in text.splitlines() if all(word in line for word in words)]


def function(key: str) -> str:
    """Return the node id of the test function that a key names, without parameters."""
    return key.partition(" # ")[0].partition("[")[0]


def in_order(key: str) -> list[list[tuple[bool, int, str]]]:
    """Return what keys are sorted by: the test function, the number or name, the parameters."""
    test, _, name = key.partition(" # ")
    return [
        [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"([0-9]+)", text)]
        for text in (function(key), name, test)
    ]


def plain(text: str) -> str:
    """Return the text as it is stored: control characters escaped, no blanks at the ends of lines."""
    shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "replace").decode() for c in text)
    return "\n".join(line.rstrip() for line in shown.split("\n")).strip("\n")


class Snapshot:
    """Entries of one snapshot file, compared with or replaced by the texts that tests find. It is a plugin of pytest."""

    def __init__(self, path: Path = SNAPSHOT, *, update: bool = False) -> None:
        self.path, self.update = path, update
        self.entries = read(path)
        self.found: dict[str, str] = {}
        self.stale: set[str] = set()
        self.collected: set[str] = set()

    def check(self, key: str, text: str) -> None:
        """Compare a text with the entry of its key, or keep it for the end of the session."""
        text = plain(text)
        assert text, f"{key} is asked about an empty text"
        if self.found.setdefault(key, text) != text:
            pytest.fail(f"{key} is asked about two texts:\n{difference(self.found[key], text)}")
        if self.update:
            return
        if key not in self.entries:
            pytest.fail(f"{self.path.name} has no entry {key!r}; run this test with {UPDATE}, and review:\n{text}")
        if self.entries[key] != text:
            pytest.fail(
                f"{key} is worded otherwise in {self.path.name}; where that is meant, run this test with {UPDATE}, and review:\n"
                f"{difference(self.entries[key], text)}"
            )

    def finish(self, node: str) -> None:
        """Look, after a test that passed, for entries of it that it did not ask for."""
        left = {key for key in self.entries if key == node or key.startswith(f"{node} # ")} - set(self.found)
        left = {key for key in left if "[" in key or key.rpartition(" # ")[2].isdigit() or " # " not in key}
        if left and not self.update:
            pytest.fail(f"{self.path.name} has entries that this test did not ask for: {sorted(left)}; run it with {UPDATE}")
        self.stale |= left

    def without_a_test(self) -> set[str]:
        """Return keys of entries whose test function is no longer there, or was collected without their parameters."""
        functions = {function(node) for node in self.collected}
        return {key for key in self.entries if gone(key) or (function(key) in functions and not self.asked_by(key))}

    def asked_by(self, key: str) -> bool:
        """Return whether a collected test may ask for this entry."""
        node, _, name = key.partition(" # ")
        return node in self.collected or (bool(name) and not name.isdigit())

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if not any("[" in argument for argument in config.args):  # else parameters were picked, and others are not gone
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
    """Return whether the test that a key names is no longer in the tests, or the name that its text was given."""
    file, _, test = function(key).partition("::")
    name = key.partition(" # ")[2]
    source = source_of(file)
    return re.search(rf"^\s*def {test.rpartition('::')[2]}\(", source, re.MULTILINE) is None or (
        bool(name) and not name.isdigit() and f'"{name}"' not in source
    )


@lru_cache
def source_of(file: str) -> str:
    """Return the source of a test file, empty where there is none."""
    return (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""


def difference(recorded: str, found: str) -> str:
    """Return a unified diff of two texts."""
    return "\n".join(difflib.unified_diff(recorded.split("\n"), found.split("\n"), "recorded", "found", lineterm=""))


class Prose:
    """The words of one test, in the order in which it asks about them.

    Args:
        snapshot: the entries to compare with.
        node: the test's node id.
        masks: regular expressions of what differs between runs, and what stands for it.
    """

    def __init__(self, snapshot: Snapshot, node: str, masks: Mapping[str, str]) -> None:
        self.snapshot, self.node, self.masks = snapshot, node, masks
        self.count = 0

    def __call__(self, text: object, *, name: str = "", mask: Mapping[str, str] | None = None) -> None:
        """Compare a text with its entry.

        Args:
            text: what is printed of it is compared; lines of a list or tuple stand below each other.
            name: key of the entry within the test function, shared by its parameters; by default they are numbered in each test.
            mask: more regular expressions to replace, tried before those of the fixture.
        """
        assert text is not None, "None is no text"
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
            error: class of the error, or several.
            match: regular expression of a name or value that the message must have.
            foreign: replace the words of the other libraries' error that led to this one, which change with their versions.
            how: keywords of a call.
        """
        with pytest.raises(error, match=match or None) as caught:
            yield caught
        said, cause = str(caught.value), caught.value.__cause__ or caught.value.__context__
        if foreign:
            assert cause is not None, "no other error led to this one"
            assert in_a_line(cause) in said
            said = said.replace(in_a_line(cause), f"<{type(cause).__name__}>")
        self(said, **how)

    @contextmanager
    def warns(self, warning: type[Warning], match: str = "", **how: Any) -> Iterator[pytest.WarningsRecorder]:
        """Expect a warning as ``pytest.warns`` does, and compare the first message of its class; keywords are those of a call."""
        with pytest.warns(warning, match=match or None) as record:
            yield record
        self(next(one.message for one in record if issubclass(one.category, warning)), **how)


@pytest.fixture
def prose(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prose:
    """Compare a text with its entry in the snapshot file; what depends on the machine or the run is masked."""
    base = re.escape(str(tmp_path_factory.getbasetemp()))
    masks = {
        rf"{base}/[\w-]+": "<tmp>",
        re.escape(str(Path(onelaunch.__file__).parent)): "<package>",
        re.escape(str(ROOT)): "<root>",
        r"\b0x[0-9a-f]{6,}\b": "<address>",
        r"\b(?=[0-9]*[a-f])[0-9a-f]{12}\b": "<digest>",
        r"These can: [\w, ]+": "These can: <variants>",
        r"Known: [\w, ]*\blinear_rnn\b[\w, ]*": "Known: <operations>",
    }
    return Prose(request.config.pluginmanager.get_plugin("prose"), request.node.nodeid, masks)


def register(config: pytest.Config) -> None:
    """Read the snapshot file, and take part in the run of each test."""
    update = config.getoption("update_prose")
    if update and (getattr(config.option, "numprocesses", None) or hasattr(config, "workerinput")):
        raise pytest.UsageError(f"{UPDATE} works in one process: leave out -n")
    config.pluginmanager.register(Snapshot(update=update), "prose")
