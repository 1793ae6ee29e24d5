"""Tests of Hopper GPUs other than those that were measured: other numbers of SMs, no table of times, less shared memory.

The GPUs are pretended (``tests/devices.py``). Launches are recorded on fake tensors instead of run, so the tests see grids and
work assignments, but no results. No kernel that waits for other CTAs needs more of them to be resident than the device can hold
at once: stream-K and the look-back wait for CTAs that started earlier, clusters are resident as a whole, and only the decode
megakernel's CTAs all wait for each other, for which its plan is checked and its launch is cooperative.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

pytest.importorskip("triton", reason="without Triton, kernels refuse every call")
pytest.importorskip("numpy", reason="without NumPy, the variants of decode_step by the megakernel refuse every call")

from onelaunch import dispatch
from onelaunch.decode import ModelConfig
from onelaunch.decode.codegen.layout import Tuning
from onelaunch.decode.plan.check import check
from onelaunch.decode.plan.levels import LEVELS, plan_for
from onelaunch.decode.runtime.proofs import resources_of
from onelaunch.decode.step.variants.megakernel import not_resident
from onelaunch.dispatch import choice, measured
from onelaunch.errors import PlanError
from onelaunch.operation import Example, Query, find_operation, operations
from onelaunch.operation.examples import recorded_launches
from onelaunch.ops.projections import launch_hopper
from onelaunch.ops.projections.configure_hopper import cluster_tiles, config_for, configuration, counts
from onelaunch.ops.projections.contract import layout_in
from onelaunch.ops.projections.variants.hopper import MULTICAST
from onelaunch.ops.swiglu.configure_hopper import Formats, partition_of, tile_count
from onelaunch.ops.swiglu.configure_hopper import configuration as swiglu_configuration
from tests.devices import HOPPERS, forget, pretend

PROJECTIONS = find_operation("projections")
WIDE = {"B": 8, "T": 4096, "D": 2048, "H": 16, "K": 128, "V": 128}
"""Sizes of the chain of projections in front of a GLA layer."""

QWEN = ModelConfig(151_936, 1024, 3072, 28, 16, 8, 128, tie_word_embeddings=True)
COUNTS = sorted({device.processors for device in HOPPERS.values()} | {7, 66})
"""Numbers of SMs: those of the GPUs, and of parts of a GPU that a process may be limited to."""

ROWS = [key for path in measured.TABLES.glob("nvidia-*.json") for key in measured.read(path)[2]]
"""Identities of all rows of the package's tables."""


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that pretends a GPU of ``HOPPERS`` and returns its name for queries."""
    yield lambda name, **more: pretend(HOPPERS[name], monkeypatch, **more)
    monkeypatch.undo()
    forget()


def own_variants():
    """Return the variants of ours that launch kernels on a Hopper GPU and list example calls."""
    return [
        variant
        for operation in operations()
        if operation.__module__.startswith("onelaunch.")
        for variant in operation.variants.values()
        if variant.launches is not None and variant.capabilities.requires is None
        if "sm_90a" in (variant.capabilities.architectures or ("sm_90a",)) and variant.listed_examples()
    ]


# Launches on GPUs with other numbers of SMs


@pytest.mark.parametrize("name", ["H20", *[pytest.param(each, marks=pytest.mark.every) for each in ("H100 PCIe", "all SMs")]])
def test_every_variant_has_launches(name, gpu):
    """The example calls of all variants are recorded; on an H20, which each run of the tests pretends, the first of each."""
    gpu(name)
    for variant in own_variants():
        examples = [each for each in variant.listed_examples() if "sm_90a" in (each.architectures or ("sm_90a",))]
        for example in examples[: None if name != "H20" else 1]:
            launches = recorded_launches(variant, example, "sm_90a")
            assert launches
            assert all(0 < size < 1 << 31 for launch in launches for size in launch.grid)


PERSISTENT = {
    ("swiglu", "persistent"): ({"M": 8192, "N": 4096, "K": 7168}, 1),
    ("linear_rnn", "fused_hopper"): ({"B": 8, "T": 4096, "D": 2048, "V": 2048}, 1),
    ("projections", "epilogue_persistent"): (WIDE, 1),
    ("projections", "cluster"): (WIDE, 2),
}
"""Sizes with more tiles than any GPU has SMs, and the CTAs of a cluster, by operation and variant."""


@pytest.mark.parametrize("name", HOPPERS)
@pytest.mark.parametrize(("operation", "variant"), PERSISTENT)
def test_a_persistent_launch_has_a_cta_for_every_sm(operation, variant, name, gpu):
    gpu(name)
    (sizes, cluster), known = PERSISTENT[operation, variant], find_operation(operation)
    (launch,) = recorded_launches(known.get(variant), Example(known.case("bfloat16", **sizes)), "sm_90a")
    assert launch.grid[0] == HOPPERS[name].processors // cluster * cluster


SWIGLU_SHAPES = [(1, 4096, 7168), (64, 4096, 7168), (128, 4096, 7168), (256, 3072, 4096), (512, 3072, 7168), (8192, 64, 64)]


@pytest.mark.parametrize("nvfp4", [False, True])
@pytest.mark.parametrize("variant", ["persistent", "stream_k", "small_m"])
def test_work_units_of_swiglu_cover_all_k_blocks(variant, nvfp4):
    formats = Formats(torch.bfloat16, torch.bfloat16, nvfp4=nvfp4)
    for sms, shape in itertools.product(COUNTS, SWIGLU_SHAPES):
        config = swiglu_configuration(variant, shape, formats, sms)
        partition, tiles = partition_of(config, shape, sms), tile_count(config, *shape[:2])
        assert 1 <= partition.units <= sms
        if config.schedule == "split_k_cluster":  # both CTAs of a cluster have a half of one tile's k-blocks
            assert partition.units == 2 * tiles
        if config.schedule == "stream_k":
            granules = partition.units * partition.unit_granules + partition.longer_units
            assert granules * partition.granule == tiles * -(-shape[2] // config.k_block)
            assert partition.unit_granules >= 1


@pytest.mark.parametrize("multicast", MULTICAST.values())
def test_tiles_of_projections_are_computed_once(multicast):
    """A cluster takes one tile per round, rotated by three tiles each round; see ``for_each_static`` in ``scheduler.cuh``."""
    layout = layout_in(PROJECTIONS.query(PROJECTIONS.case("bfloat16", **WIDE), "cpu"))
    for sms, rows in itertools.product(COUNTS, [1, 100, 1024, 32768]):
        for config in (
            configuration(layout, rows, 2048, torch.bfloat16, sms, multicast),
            config_for(layout, 256, torch.bfloat16, multicast),
        ):
            tiles = cluster_tiles(config, rows, len(list(counts(layout, config.b_rows))))
            ctas = launch_hopper.ctas_of(layout, config, rows, sms)
            stride = ctas // config.cluster
            assert 1 <= ctas <= sms
            assert ctas == stride * config.cluster
            taken = Counter(
                tile
                for cluster, turn in itertools.product(range(stride), range(-(-tiles // stride)))
                if (tile := turn * stride + (cluster + 3 * turn) % stride) < tiles
            )
            assert taken == Counter(range(tiles))


# Plans of the decode megakernel


@pytest.mark.parametrize("sms", COUNTS)
def test_all_ctas_of_a_decoding_plan_are_resident_and_share_all_tiles(sms):
    """The vocabulary has 18992 tiles of 8 tokens, and the two matrices of the gate and of up 768 tiles in all."""
    for level in LEVELS:
        assert not_resident(level, QWEN, sms) is None
        phases = plan_for(QWEN, level, sms).phases()
        assert {len(phase.assignments) for phase in phases} == {sms}
        tiles = {phase.op: sum(each.units for each in phase.assignments) for phase in phases}
        assert (tiles["lm_head"], tiles["gate_up"]) == (18992, 768)


@pytest.mark.parametrize("sms", [7, 78, *[pytest.param(each, marks=pytest.mark.every) for each in COUNTS if each not in (7, 78)]])
@pytest.mark.parametrize("level", ["fused_phases", "streaming"])
def test_decoding_plans_for_other_numbers_of_sms_are_sound(level, sms):
    short, plan = plan_for(QWEN, level, sms, 1), plan_for(QWEN, level, sms)
    check(short, plan, plan, short, resources=resources_of(plan, Tuning(), sms))


def test_a_plan_for_more_ctas_than_can_be_resident_is_refused():
    """Another process that limits this one to fewer SMs is seen in the number of SMs. A cooperative launch is refused, too."""
    plan = plan_for(QWEN, "streaming", 132)
    with pytest.raises(PlanError, match="132 CTAs wait for each other; only 131"):
        check(plan, resources=resources_of(plan, Tuning(), 131))


# The choice on GPUs without a table


def query_of(key, device):
    """Return the query of a row of a table on a device."""
    operation, sizes = find_operation(key.operation), dict(key.sizes)
    ordered = tuple(sizes[name] for name in operation.dimensions)
    return Query(key.operation, device, getattr(torch, key.dtype), ordered, key.direction == "forward_backward", key.flags)


@pytest.mark.parametrize(
    ("name", "step"), [("H20", 4), *[pytest.param(each, 1, marks=pytest.mark.every) for each in ("H100 PCIe", "GH200")]]
)
def test_auto_takes_the_order_of_another_hopper_gpu_and_says_so(name, step, gpu):
    """At calls that were measured on another GPU, the choice is one that ``auto`` may make, and no time is given as its own.

    Every call is asked about, or with ``step`` 4 every fourth one.
    """
    device, keys = gpu(name), ROWS[step // 2 :: step]
    lent = 0
    for key in keys:
        query = query_of(key, device)
        variant, found = dispatch.choose(query), dispatch.explain(query)
        assert found.chosen == variant.name
        assert variant.why_not(query) is None
        assert variant.capabilities.automatic
        assert choice.is_trusted(variant, query)
        assert {each.microseconds for each in found.standings} == {None}
        assert found.table is None
        row, able = choice.borrowed_for(variant.operation, query), choice.able(variant.operation, query)
        first = next(each for each in variant.operation.preference(query) if each in able)
        assert ("whose table gives the order of variants on Hopper GPUs" in found.because) is (row is not None)
        if row is None:
            assert variant.name == first
            continue
        assert row.device in found.because
        assert row.microseconds[variant.name] <= choice.TIE * min(row.microseconds.values())
        lent += 1
    assert lent > len(keys) // 2


def test_a_hopper_gpu_with_less_shared_memory_runs_portable_kernels(gpu):
    """Kernels for Hopper are configured for all 227 KiB of an SM. They refuse, and ``auto`` takes another variant."""
    device = gpu("H100", shared_bytes=100 << 10)
    refused = Counter()
    for key in ROWS[::2]:
        query = query_of(key, device)
        assert dispatch.choose(query).capabilities.architectures is None
        for each in dispatch.explain(query).standings:
            refused[each.variant] += "232448 bytes of shared memory" in (each.reason_against or "")
    hopper = [each for each in own_variants() if each.capabilities.architectures == ("sm_90a",)]
    assert all(refused[each.name] for each in hopper)
