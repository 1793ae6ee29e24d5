"""CPU seconds of the tests: a table by file with the longest tests, and a budget for all of them together.

On a shared machine, elapsed time grows several times over. The CPU seconds of a test, with those of the processes that it
starts, stay the same. ``conftest.py`` registers :class:`Durations` for every run of pytest. ``make test`` asks for the table, and
``.ci/run`` sets the budget.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

LONGEST = 30
"""Number of tests that the table lists by their CPU seconds, after the sums by file."""


def add_options(parser: pytest.Parser) -> None:
    """Add this module's options to pytest's."""
    parser.addoption("--durations-table", type=Path, help="write CPU seconds by file, and the longest tests, to this file")
    parser.addoption(
        "--cpu-budget", type=float, help="fail where the tests take more CPU seconds together, those marked `extra` not counted"
    )


class Durations:
    """Plugin that adds CPU seconds to each report in the process of the test, and sums them where the reports arrive.

    With xdist these are two processes: a worker sends its reports, with the attributes ``cpu`` and ``extra``, to the main
    process. Tests with the marker ``extra``, such as those that compile every configuration of a kernel, are summed separately.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.path: Path | None = config.getoption("durations_table")
        self.budget: float | None = config.getoption("cpu_budget")
        self.before = cpu_seconds()
        self.spent: Counter[str] = Counter()
        self.extra = 0.0

    def pytest_runtest_logstart(self) -> None:
        self.before = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        now = cpu_seconds()
        report.cpu, self.before = now - self.before, now
        report.extra = item.get_closest_marker("extra") is not None
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, "cpu"):  # xdist makes this report for a worker that crashed
            return
        if report.extra:
            self.extra += report.cpu
        else:
            self.spent[report.nodeid] += report.cpu

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if is_worker(session.config):
            return
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(self.table(), encoding="utf-8")
        if self.over() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(self.total())
        if self.over():
            terminalreporter.write_line(
                f"That is over the budget of {self.budget:.0f} CPU seconds; see the longest tests.", red=True
            )

    def over(self) -> bool:
        """Return whether the tests without the marker ``extra`` exceed the budget."""
        return self.budget is not None and self.spent.total() > self.budget

    def total(self) -> str:
        extra = f", without the {self.extra:.0f} of the tests marked `extra`" if self.extra else ""
        return f"{len(self.spent)} tests took {self.spent.total():.0f} CPU seconds{extra}."

    def table(self) -> str:
        files: Counter[str] = Counter()
        for test, seconds in self.spent.items():
            files[test.split("::")[0]] += seconds
        tables = [files.most_common(), self.spent.most_common(LONGEST)]
        lines = [[f"{seconds:8.1f}  {name}" for name, seconds in each] for each in tables]
        return "\n".join([self.total(), "", *lines[0], "", f"The {LONGEST} longest tests:", *lines[1], ""])


def is_worker(config: pytest.Config) -> bool:
    """Return whether this process is an xdist worker, which leaves the summary to the main process."""
    return hasattr(config, "workerinput")


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its child processes that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)
