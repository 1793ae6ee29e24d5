"""Tests of measured peaks: sampled several times, cached per software version, and replaced by higher measurements.

The spread of a peak is the relative distance between the first and the third of its fastest samples. Above 0.2 the device
counts as busy. ``prose.warns`` is ``pytest.warns`` that also compares the message with the test's entry in
``tests/snapshots/prose.txt``. A test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test
or the parameter of an entry is gone.

A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
import warnings
import weakref
from dataclasses import asdict, replace

import pytest
import torch

from onelaunch import cuda
from onelaunch.device import hardware, peaks, quick_look, read_rate
from onelaunch.device.hardware import Ceilings
from onelaunch.device.peaks import Probe
from onelaunch.errors import BusyDeviceNotice, CacheNotice

SOFTWARE = peaks.software("cpu")
RATES = {"float32": 1e12, "float16": 1e12, "bfloat16": 1e12}
# Bytes copied per second, FLOPs per second by dtype, seconds of a launch, date, software, bytes read per second, and spreads.
FOUND = Ceilings(1e11, RATES, 1e-6, "2026-01-01T00:00:00+00:00", SOFTWARE, 1.2e11, {"copy": 0.02, "read": 0.01, "float32": 0.03})

compiled = pytest.mark.skipif(cuda.missing() is not None, reason=f"{cuda.missing()}")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Give the test an empty cache folder."""
    monkeypatch.setenv("ONELAUNCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def no_quick_look(monkeypatch):
    """Believe the made-up peaks in the cache, whatever this machine's are. The tests in ``test_quick_look.py`` compare them.

    The list of peaks that this process has looked at is the test's own, too.
    """
    monkeypatch.setattr(quick_look, "implausible", lambda device, found: "")
    monkeypatch.setattr(peaks, "_LOOKED_AT", {})


@pytest.fixture
def measurements(monkeypatch):
    """Replace measurements by ``FOUND``, and return the list of devices that they were asked for."""
    made = []

    def measure(device):
        made.append(device)
        return replace(FOUND, software=peaks.software(device))

    monkeypatch.setattr(peaks, "measure", measure)
    return made


# The cache


def test_peaks_are_measured_once(measurements):
    assert peaks.stored("cpu") is None
    first = peaks.ceilings("cpu")
    assert peaks.ceilings("cpu") == peaks.stored("cpu") == first
    assert measurements == ["cpu"]
    assert peaks.cache_path("cpu").exists()


def test_peaks_are_measured_again_when_asked(measurements):
    peaks.ceilings("cpu")
    peaks.ceilings("cpu", refresh=True)
    assert len(measurements) == 2


def test_two_versions_of_pytorch_keep_two_entries(measurements, monkeypatch):
    for version in ("torch 2.11, CPU", "torch 2.14, CPU", "torch 2.11, CPU", "torch 2.14, CPU"):
        monkeypatch.setattr(peaks, "software", lambda device, version=version: version)
        assert peaks.ceilings("cpu").software == version
    assert len(measurements) == 2


def test_two_models_of_cpu_keep_two_files(measurements, monkeypatch):
    here = peaks.describe("cpu")
    peaks.ceilings("cpu")
    monkeypatch.setattr(peaks, "describe", lambda device: replace(here, name="Another CPU"))
    peaks.ceilings("cpu")
    assert len(measurements) == 2
    assert peaks.cache_path("cpu").name == "ceilings-cpu-another-cpu.json"


def entry(**changes):
    """Return the content of a cache file with one entry: ``FOUND`` with changed or further keys."""
    return json.dumps({"entries": [{**asdict(FOUND), **changes}]})


@pytest.mark.parametrize(
    "stored",
    [
        "",
        "{",
        "[]",
        "7",
        '{"entries": 3}',
        '{"entries": [3, null]}',
        '{"entries": [{"copy_bytes_per_second": 1}]}',
        json.dumps(asdict(FOUND)),
        entry(matrix_flops_per_second=7),
        entry(copy_bytes_per_second=math.nan),
        entry(copy_bytes_per_second=0),
        entry(read_bytes_per_second=-1.0),
        entry(launch_seconds="1"),
        entry(spread={"copy": -1.0}),
        entry(more=1),
    ],
)
def test_an_invalid_cache_is_measured_again_with_one_notice(stored, measurements):
    path = peaks.cache_path("cpu")
    path.parent.mkdir(parents=True)
    path.write_text(stored)
    with pytest.warns(CacheNotice, match=re.escape(path.name)) as said:
        assert peaks.ceilings("cpu") == FOUND
    assert len(said) == 1
    assert measurements == ["cpu"]
    assert peaks.ceilings("cpu") == FOUND
    assert measurements == ["cpu"]


@pytest.mark.parametrize("stored", [entry(software="torch 0.4"), entry(matrix_flops_per_second={"float16": 1e12})])
def test_peaks_of_other_software_or_other_dtypes_are_measured_again_without_a_notice(stored, measurements):
    path = peaks.cache_path("cpu")
    path.parent.mkdir(parents=True)
    path.write_text(stored)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert peaks.ceilings("cpu") == FOUND
    assert measurements == ["cpu"]
    assert peaks.ceilings("cpu") == FOUND
    assert measurements == ["cpu"]


def test_a_pipe_in_place_of_the_cache_is_measured_again_and_replaced(measurements):
    """Reading the pipe once blocked forever."""
    path = peaks.cache_path("cpu")
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    with pytest.warns(CacheNotice, match="no regular file"):
        assert peaks.ceilings("cpu") == FOUND
    assert peaks.ceilings("cpu") == FOUND
    assert measurements == ["cpu"]
    assert path.is_file()


def test_cached_peaks_without_a_read_bandwidth_are_used(measurements):
    path = peaks.cache_path("cpu")
    path.parent.mkdir(parents=True)
    path.write_text(entry(read_bytes_per_second=None, spread=None))
    assert peaks.ceilings("cpu").read_bytes_per_second is None
    assert not measurements


def test_an_unwritable_cache_gives_a_warning(measurements, cache):
    cache.write_text("a file")
    with pytest.warns(CacheNotice, match="ONELAUNCH_CACHE"):
        assert peaks.ceilings("cpu") == FOUND
    assert peaks.ceilings("cpu") == FOUND
    assert measurements == ["cpu"]  # measured once by this process, although nothing was stored


# Samples


class Clock:
    """Scripted seconds of calls under load: one value per call in turn, the last one for all that follow."""

    def __init__(self, *seconds):
        self.seconds, self.asked = seconds, 0

    def __call__(self, run, calls):
        run()
        self.asked += 1
        return calls * self.seconds[min(self.asked, len(self.seconds)) - 1]


def sampled(clock, quantity="copy"):
    """Return a probe of one unit per call, sampled by a clock. The first two calls warm it up and set the calls per sample."""
    probe = Probe(quantity, "toy", 1.0, lambda: None)
    peaks.sample([probe], clock)
    return probe


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    """Leave out the pauses between rounds of samples."""
    monkeypatch.setattr(peaks, "PAUSE_SECONDS", 0.0)


def test_a_first_measurement_under_load_does_not_become_the_peak():
    """Seven rounds have a fifth of the rate or less and all differ, as under other load. Then the machine is free."""
    probe = sampled(Clock(0.01, 0.01, 0.09, 0.07, 0.05, 0.08, 0.06, 0.1, 0.11, 0.01))
    assert probe.peak == pytest.approx(100)
    assert probe.spread == pytest.approx(0)
    assert len(probe.rates) > peaks.LEAST_ROUNDS


def test_a_quiet_machine_needs_the_fewest_rounds():
    assert len(sampled(Clock(0.01)).rates) == peaks.LEAST_ROUNDS


def test_rounds_end_if_samples_never_agree():
    probe = sampled(Clock(*(0.01 * 1.2**index for index in range(100))))
    assert len(probe.rates) == peaks.MOST_ROUNDS
    assert probe.spread > peaks.SPREAD


def test_short_calls_are_repeated_within_a_sample():
    assert sampled(Clock(1e-4)).calls == 50  # a sample is to take 5 ms
    assert sampled(Clock(1.0)).calls == 1


def test_the_peak_is_that_of_the_fastest_method():
    slow, fast, other = (Probe("read", "slow", 1.0, lambda: None, rates=[1, 1, 1]) for _ in range(3))
    fast.rates, other.quantity = [2, 2, 2], "copy"
    assert peaks.fastest([slow, fast, other]) == {"read": fast, "copy": other}


def test_a_peak_does_not_rest_on_one_fast_sample():
    probe = sampled(Clock(0.01, 0.01, 0.01, 0.001, 0.01))
    assert probe.peak == pytest.approx(100)
    assert probe.spread == pytest.approx(9)


def test_a_method_with_one_fast_sample_is_not_the_fastest():
    lucky = Probe("read", "lucky", 1.0, lambda: None, rates=[1, 9, 1, 1])
    steady = Probe("read", "steady", 1.0, lambda: None, rates=[2, 2.1, 2, 1])
    assert peaks.fastest([lucky, steady]) == {"read": steady}
    assert steady.peak == 2.1


def test_rounds_end_at_the_time_limit():
    probe = Probe("copy", "toy", 1.0, lambda: None)
    peaks.sample([probe], Clock(*(0.01 * 1.2**index for index in range(100))), seconds=0)
    assert len(probe.rates) == peaks.AGREEING


# Bytes of the last-level cache, of free memory, and of the buffer: four caches, but between 64 MiB and 1 GiB, at most a quarter
# of the free memory, and at least 1 MiB.
@pytest.mark.parametrize(
    ("cache", "free", "wanted"),
    [
        (32 << 20, 64 << 30, 128 << 20),
        (1 << 20, 64 << 30, 64 << 20),
        (96 << 20, 64 << 30, 384 << 20),
        (512 << 20, 64 << 30, 1 << 30),
        (512 << 20, 1 << 30, 256 << 20),
        (32 << 20, 1 << 20, 1 << 20),
    ],
)
def test_the_buffer_of_a_cpu_is_larger_than_its_caches(monkeypatch, cache, free, wanted):
    here = peaks.describe("cpu")
    monkeypatch.setattr(peaks, "describe", lambda device: replace(here, cache_bytes=cache))
    monkeypatch.setattr(peaks, "free_memory", lambda device: free)
    assert peaks.buffer_bytes(torch.device("cpu")) == wanted


def test_free_memory_of_a_cpu_is_at_most_its_memory():
    assert 0 < peaks.free_memory(torch.device("cpu")) <= peaks.describe("cpu").memory_bytes


# The limit minus what is used, plus the used part that caches files and can be dropped; None is the machine's free memory.
@pytest.mark.parametrize(("limit", "wanted"), [("1000000", 1000000 - 700000 + 400000), ("600", 0), ("max", None), (None, None)])
def test_free_memory_respects_the_limit_of_a_cgroup(monkeypatch, tmp_path, limit, wanted):
    monkeypatch.setattr(hardware, "CONTROL_GROUP", tmp_path)
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text("700000\n")
        (tmp_path / "memory.stat").write_text("anon 300000\nfile 400000\n")
    free = peaks.free_memory(torch.device("cpu"))
    assert free == wanted if wanted is not None else free > 1000000


def test_a_survey_keeps_no_buffers(monkeypatch):
    """The functions of the memory probes hold the buffers, so these are freed if the functions are."""
    alive = []
    monkeypatch.setattr(peaks, "LEAST_ROUNDS", 1)
    monkeypatch.setattr(peaks, "MOST_ROUNDS", 1)
    monkeypatch.setattr(peaks, "_CPU_BUFFER_BYTES", (1 << 20, 1 << 20))  # their size does not matter here
    make = peaks._memory_probes

    def watched(device):
        probes = make(device)
        alive.extend(weakref.ref(probe.run) for probe in probes)
        return probes

    monkeypatch.setattr(peaks, "_memory_probes", watched)
    assert peaks.survey("cpu")
    gc.collect()
    assert alive
    assert not [each for each in alive if each() is not None]


@pytest.mark.filterwarnings("ignore::onelaunch.errors.BusyDeviceNotice")  # other tests may run at the same time
@pytest.mark.thorough
def test_a_measurement_of_the_cpu_gives_plausible_rates():
    found = peaks.measure("cpu")
    assert 1e8 < found.copy_bytes_per_second < 1e13
    assert 1e8 < found.read_bytes_per_second < 1e13
    assert set(found.matrix_flops_per_second) == {"float16", "bfloat16", "float32"}
    assert all(1e8 < rate < 1e15 for rate in found.matrix_flops_per_second.values())
    assert 1e-8 < found.launch_seconds < 1e-3
    assert set(found.spread) == {"copy", "read", "float32", "launch"}
    assert torch.__version__ in found.software


# A busy device

BUSY = replace(FOUND, read_bytes_per_second=3.23e10, spread={"copy": 0.02, "read": 5.74})
"""Peaks that one command stored on a loaded machine: rates of the fastest reads differed nearly sevenfold."""


def busy_survey(device):
    """Return samples of a device that was free in only one round: the spread of reads is 5.74, and of all else 0."""
    made = [Probe(quantity, "toy", 1.0, lambda: None, rates=[1.0] * 7) for quantity in ("copy", "float32", "launch")]
    return [*made, Probe("read", "toy", 1.0, lambda: None, rates=[1.0, 6.74, 1.0, 1.0])]


def test_a_busy_device_gives_one_warning(monkeypatch, prose):
    monkeypatch.setattr(peaks, "survey", busy_survey)
    peaks._warn_busy.cache_clear()
    with prose.warns(BusyDeviceNotice) as said:
        found = [peaks.measure("cpu") for _ in range(2)]
    assert len(said) == 1
    assert {each.read_bytes_per_second for each in found} == {1.0}
    assert peaks.unsteady(found[0]) == ["read"]


def test_a_quiet_device_gives_no_warning(monkeypatch, recwarn):
    steady = Probe("read", "toy", 1.0, lambda: None, rates=[1.0, 1.1, 1.19])
    monkeypatch.setattr(peaks, "survey", lambda device: [*busy_survey(device)[:3], steady])
    peaks._warn_busy.cache_clear()
    assert peaks.unsteady(peaks.measure("cpu")) == []
    assert not recwarn.list


def test_peaks_of_a_busy_device_are_measured_again_the_next_time(measurements):
    peaks.remember("cpu", BUSY)
    assert peaks.stored("cpu") is None
    assert peaks.ceilings("cpu") == FOUND == peaks.stored("cpu")
    assert measurements == ["cpu"]


@pytest.mark.parametrize("spread", [0.02, 0.2, 5.74])
def test_a_large_spread_of_a_cached_peak_does_not_protect_it(monkeypatch, spread):
    """A new peak must exceed the cached one by the spread of the new one, not by that of the cached one."""
    believed = replace(BUSY, spread={"copy": 0.02, "read": spread})
    monkeypatch.setattr(peaks, "measure", lambda device: FOUND)
    raised = peaks.remeasure("cpu", believed)
    assert raised.read_bytes_per_second == 1.2e11
    assert raised.spread == {"copy": 0.02, "read": 0.01}
    assert peaks.stored("cpu") == raised


@pytest.mark.parametrize(("rate", "taken"), [(1.2 * 1.04, False), (1.2 * 1.06, True)])
def test_a_new_peak_with_a_large_spread_must_be_five_percent_higher(rate, taken):
    fresh = replace(FOUND, read_bytes_per_second=rate * 1e11, spread={"copy": 0.02, "read": 0.5})
    assert peaks.higher(FOUND, fresh).read_bytes_per_second == (rate * 1e11 if taken else 1.2e11)


# Measured again


def test_higher_peaks_replace_cached_ones_and_are_stored(monkeypatch):
    slow = replace(FOUND, copy_bytes_per_second=2e10, spread={"copy": 0.04, "read": 0.01})
    peaks.remember("cpu", slow)
    monkeypatch.setattr(peaks, "measure", lambda device: replace(FOUND, measured_at="now"))
    raised = peaks.remeasure("cpu", slow)
    assert raised == replace(FOUND, measured_at="now", spread={"copy": 0.02, "read": 0.01})
    assert peaks.stored("cpu") == raised


@pytest.mark.parametrize("rate", [5e10, 1e11, 1.019e11])
def test_peaks_that_are_not_higher_by_more_than_the_spread_change_nothing(monkeypatch, rate):
    monkeypatch.setattr(peaks, "measure", lambda device: replace(FOUND, copy_bytes_per_second=rate))
    assert peaks.remeasure("cpu", FOUND) is FOUND
    assert peaks.stored("cpu") is None


def test_a_higher_peak_does_not_replace_others_by_lower_ones():
    fresh = replace(FOUND, copy_bytes_per_second=2e11, read_bytes_per_second=1e10, launch_seconds=1e-5)
    raised = peaks.higher(FOUND, fresh)
    assert raised.copy_bytes_per_second == 2e11
    assert (raised.read_bytes_per_second, raised.launch_seconds) == (FOUND.read_bytes_per_second, FOUND.launch_seconds)


def test_a_missing_read_bandwidth_is_added():
    assert peaks.higher(replace(FOUND, read_bytes_per_second=None, spread=None), FOUND).read_bytes_per_second == 1.2e11


# Kernels that measure the read bandwidth


@compiled
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
def test_the_vector_kernel_compiles(architecture):
    made = cuda.compile_now(read_rate.read_source("read_vectors"), architecture)
    assert made.cubin
    assert "ld.global.nc.L1::no_allocate.v4.u32" in made.ptx


@compiled
@pytest.mark.parametrize(("chunk", "stages"), read_rate.RINGS)
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_the_bulk_kernel_compiles(architecture, chunk, stages):
    made = cuda.compile_now(read_rate.read_source("read_bulk", chunk, stages), architecture)
    assert made.cubin
    assert "cp.async.bulk.shared::cluster.global" in made.ptx


def test_there_are_no_kernels_for_a_cpu():
    assert read_rate.read_kernels(torch.zeros(1024)) == {}


def test_the_checksum_is_the_sum_of_all_words():
    words = torch.tensor([2**31 - 1, 5, -(2**31), -1], dtype=torch.int32)
    assert read_rate.checksum(words) == 3
    assert read_rate.checksum(torch.full((8,), -1, dtype=torch.int32)) == 2**32 - 8
