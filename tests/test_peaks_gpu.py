"""Tests of measured peaks on a GPU: reads are no slower than copies, read kernels read every byte, and repeats agree.

A survey holds the samples of every method of every quantity. A peak is a rate per second: of bytes, FLOPs or launches.

``own_cache`` is the tests' own cache folder, in place of the user's.
"""

from __future__ import annotations

import pytest
import torch

from onelaunch import cuda
from onelaunch.device import hardware, peaks, read_rate

pytestmark = pytest.mark.gpu

GPU = "cuda:0"
compiled = pytest.mark.skipif(cuda.missing() is not None, reason=f"{cuda.missing()}")


@pytest.fixture(scope="module")
def surveys():
    """Measure everything three times."""
    return [peaks.survey(GPU) for _ in range(3)]


def test_three_repeats_agree_within_three_per_cent(surveys):
    best = [peaks.fastest(survey) for survey in surveys]
    ranges = {name: [each[name].peak for each in best] for name in ("copy", "read")}
    assert all(max(rates) / min(rates) <= 1.03 for rates in ranges.values()), ranges


def test_reading_is_at_least_as_fast_as_copying(surveys):
    for best in map(peaks.fastest, surveys):
        assert best["read"].peak >= best["copy"].peak


def test_the_peaks_are_plausible(surveys):
    best = peaks.fastest(surveys[0])
    assert 1e11 < best["copy"].peak < 1e14
    assert best["float16"].peak > best["float32"].peak
    assert 1e-7 < 1 / best["launch"].peak < 1e-4
    assert ("float8_e4m3fn" in best) == hardware.multiplies_float8(torch.device(GPU))


@compiled
def test_kernels_of_this_project_are_among_the_methods_on_a_hopper(surveys):
    if not hardware.is_hopper(torch.device(GPU)):
        pytest.skip("needs a Hopper GPU")
    methods = {probe.method for probe in surveys[0] if probe.quantity == "read"}
    assert "read_vectors" in methods
    # Each ring is timed with two assignments of chunks to CTAs: interleaved and contiguous.
    assert sum(method.startswith("read_bulk") for method in methods) == 2 * len(read_rate.RINGS)


@compiled
@pytest.mark.parametrize("mebibytes", [1, 3, 100, 257])
def test_the_kernels_read_every_word(mebibytes):
    words = torch.randint(-(2**31), 2**31 - 1, (mebibytes << 18,), dtype=torch.int32, device=GPU)
    expected = read_rate.checksum(words)
    assert expected == int(words.cpu().numpy().astype("int64").sum()) % 2**32
    kernels = read_rate.read_kernels(words)
    assert "read_vectors" in kernels
    if hardware.is_hopper(torch.device(GPU)):
        assert len(kernels) == 1 + 2 * len(read_rate.RINGS)
    for name, run in kernels.items():
        for _ in range(3):
            assert read_rate.checksum(run()) == expected, name
    words[-1] += 1  # the last word is included
    words[0] += 1
    for name, run in kernels.items():
        assert read_rate.checksum(run()) == (expected + 2) % 2**32, name


def test_measured_peaks_are_stored_with_a_small_spread(own_cache):
    found = peaks.ceilings(GPU, refresh=True)
    assert peaks.stored(GPU) == found
    assert found.read_bytes_per_second is not None
    assert found.spread is not None
    assert {"copy", "read", "launch", "float16"} <= found.spread.keys()
    assert all(spread <= 0.1 for spread in found.spread.values()), found.spread
