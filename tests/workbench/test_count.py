"""Tests of counting DRAM bytes: the table that ncu writes, the command line for it, and the fallback without it.

``toy_case`` returns a small case of ``toy_sum``, the operation of ``toy.py``, with sizes B, T and V, in float32 by default.
``prose`` compares a text with its entry in tests/snapshots/prose.txt, whose key is the node id of the test. A test fails if it
does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.
"""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
import torch

from onelaunch.operation import Cost
from onelaunch.workbench.measure import count, count_child, rotation
from tests.workbench.toy import toy_case, toy_sum

TABLE = (Path(__file__).parent / "fixtures" / "ncu_raw.csv").read_text()
"""Output of ncu: kernels of the requests 0 (two calls of two kernels each), 1 and 10, and one outside of every NVTX range."""


def test_bytes_are_summed_over_the_kernels_of_each_range():
    sums = count.parse(TABLE)
    assert set(sums) == {0, 1, 10}
    assert sums[0] == count.Counted(read=2 * (4_325_376 + 3_145_728), written=4 * 1_048_576, kernels=4)
    assert sums[1] == count.Counted(read=6_324_224, written=1_048_608, kernels=1)


def test_kernels_outside_every_range_do_not_count():
    assert all(found.read < 20e6 for found in count.parse(TABLE).values())
    without = "\n".join(line for line in TABLE.splitlines() if "unrelated_kernel" not in line)
    assert without != TABLE
    assert count.parse(without) == count.parse(TABLE)


def test_units_are_read_from_the_table():
    kilo = TABLE.replace('"byte","byte","ns","byte"', '"Kbyte","byte","ns","byte"')
    assert kilo != TABLE
    assert count.parse(kilo)[1].read == pytest.approx(6_324_224_000)
    # A count of another unit than bytes is refused.
    with pytest.raises(count.CountFailed, match="sector"):
        count.parse(TABLE.replace('"byte","byte","ns","byte"', '"sector","byte","ns","byte"'))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", ""),
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters",
            "ERR_NVGPUCTRPERM",
        ),
        (TABLE.replace("dram__bytes_write.sum", "something_else"), "no dram__bytes_write.sum"),
        (TABLE.replace('"6,324,224"', '"n/a"'), "'n/a'"),
    ],
)
def test_an_unreadable_table_is_refused_with_the_reason(text, why, prose):
    with prose.raises(count.CountFailed, match=why):
        count.parse(text)


def test_the_command_keeps_clocks_and_caches_and_profiles_only_the_ranges():
    arguments = count.command("ncu", Path("log.csv"), Path("requests.json"), 2)
    text = " ".join(arguments)
    assert "--clock-control none --cache-control none" in text
    assert "--nvtx-include onelaunch_count_0/ --nvtx-include onelaunch_count_1/" in text
    assert "dram__bytes_read.sum,dram__bytes_write.sum" in text
    assert "--launch-count" in arguments  # the number of profiled kernels is limited
    assert arguments[-4:] == [sys.executable, "-m", "onelaunch.workbench.measure.count_child", "requests.json"]


def test_on_a_cpu_bytes_are_computed_and_marked_so():
    case = toy_case()
    found = count.count(toy_sum, case, "parallel")
    assert (found.source, found.total) == ("analytic", toy_sum.cost(case, toy_sum.get("parallel")).bytes)
    assert "NVIDIA" in found.note
    control = count.count(toy_sum, case, "product", control=True)
    assert control.total == toy_sum.controls["product"].cost(case).bytes


def test_analytic_traffic_is_the_cost():
    assert count.analytic(Cost(flops=1, bytes=12, launches=1)).total == 12


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """Return a function that installs a shell script as ncu in the search path, on a machine with a PyTorch for NVIDIA GPUs."""

    def install(script: str) -> None:
        path = tmp_path / "ncu"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setattr(torch.version, "hip", None)

    return install


def counted(timeout_seconds: float = 20.0):
    """Return the traffic of ``parallel`` (request 0) and ``eager`` (request 1), counted by whatever ncu is installed.

    No GPU is needed: the scripts of :func:`fake_ncu` do not start the process that would use it.
    """
    requests = [count.Request(toy_case(), "parallel"), count.Request(toy_case(), "eager")]
    return count.count_all(toy_sum, requests, device="cuda", timeout_seconds=timeout_seconds)


FIND_THE_LOG = 'while [ "$1" != --log-file ]; do shift; done; log="$2"'
FIND_THE_FOLDER = 'folder=$(dirname "$log")'
"""Shell commands that set ``log`` and ``folder`` to the file and the folder in which the caller expects the outputs."""


def test_counted_bytes_are_divided_by_the_number_of_calls(fake_ncu, prose):
    fixture = Path(__file__).parent / "fixtures" / "ncu_raw.csv"
    report = '{"0": {"calls": 2, "sets": 40}, "1": {"error": "RuntimeError: it fell over"}}'
    fake_ncu(f"{FIND_THE_LOG}; {FIND_THE_FOLDER}; cp {fixture} $log; echo '{report}' > $folder/report.json")
    first, second = counted()
    assert (first.source, first.read, first.written) == ("ncu", 4_325_376 + 3_145_728, 2 * 1_048_576)
    prose(first.note)
    assert second.source == "analytic"
    assert "it fell over" in second.note


def test_without_permission_bytes_are_computed_and_the_reason_is_kept(fake_ncu):
    fake_ncu(f"{FIND_THE_LOG}; echo '==ERROR== ERR_NVGPUCTRPERM - no permission' > $log; exit 1")
    for found in counted():
        assert found.source == "analytic"
        assert "ERR_NVGPUCTRPERM" in found.note


def test_a_profiler_that_hangs_is_terminated(fake_ncu, prose):
    fake_ncu("sleep 60")
    for found in counted(timeout_seconds=0.3):
        assert found.source == "analytic"
        assert "0.3 s" in found.note
        prose(found.note)


def test_without_a_profiler_bytes_are_computed(monkeypatch):
    monkeypatch.setattr(count, "find_ncu", lambda: None)
    assert all("not installed" in found.note for found in counted())


@pytest.mark.gpu
@pytest.mark.ncu
def test_counted_bytes_are_near_the_minimum():
    case = toy_case(B=16, T=2048, V=1024)  # 128 MiB in, 128 MiB out, more than any cache
    found = count.count(toy_sum, case, "parallel", device="cuda")
    assert found.source == "ncu", found.note
    least = toy_sum.cost(case, toy_sum.get("parallel")).bytes
    assert 0.9 * least <= found.total <= 8 * least


def test_the_profiled_process_calls_each_request_inside_its_range(tmp_path, monkeypatch):
    """The child process runs here on a CPU. The functions that mark ranges of the GPU are replaced and append to ``events``."""
    events = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("wait"))
    monkeypatch.setattr(rotation, "CACHES", 0.05)  # fewer input sets, but more than the least number, two
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", events.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: events.append("end"))
    monkeypatch.setattr(count_child, "KERNELS", 200)  # calls are made until about this number of operators, but at least one
    requests = [
        count.Request(toy_case(T=300), "eager"),
        count.Request(toy_case(), "raises"),
        count.Request(toy_case(B=64, T=64, V=64), "parallel", "forward_backward"),
        count.Request(toy_case(T=2000), "eager", "forward_backward"),
        count.Request(toy_case(), "product", control=True),
    ]
    report = tmp_path / "report.json"
    given = count._specification(toy_sum, requests, torch.device("cpu"), 0, report)
    (tmp_path / "requests.json").write_text(json.dumps(given))
    count_child.main(tmp_path / "requests.json")
    outcomes = json.loads(report.read_text())
    assert outcomes["0"]["calls"] == 1, "its 300 steps exceed KERNELS, so it is called only once"
    assert "fell over" in outcomes["1"]["error"]
    assert outcomes["2"]["calls"] > 1
    assert "too many" in outcomes["3"]["error"]  # its 2000 steps are more operators than a call may have
    assert outcomes["4"]["sets"] >= outcomes["4"]["calls"] > 1
    assert [event for event in events if event.startswith("onelaunch")] == [f"onelaunch_count_{index}" for index in (0, 2, 4)]
    assert events[:4] == ["wait", "onelaunch_count_0", "wait", "end"], "kernels have to end inside their range"
