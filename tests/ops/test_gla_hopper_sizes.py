"""Tests of the variant "hopper" of ``gla`` with heads that do not fill the tiles of its kernels, which TMA pads with zeros.

``assert_correct`` judges results and gradients against the float64 reference. Tests without a GPU check how sizes are padded, how
tensors are described to TMA, and that kernels of padded sizes compile without spilled registers.

``device`` is the first GPU, or the CPU. ``assert_near`` bounds the norm of each error, relative to that of the expected values. A
test marked ``thorough`` does not run in ``make test``, and one marked ``every`` runs with ``--architectures=every`` alone.
``ALL_FORMS`` are the options with an initial and a final state and with float32 log-decays. ``made`` returns random arguments on
the GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onelaunch.device.architectures import pretended
from onelaunch.operation import Direction, Example
from onelaunch.operation.examples import builds_for_case, recorded_builds
from onelaunch.ops.gla.configure_hopper import Segments
from onelaunch.ops.gla.padding import KEYS, key_panels, padded_keys, padded_values, value_groups
from onelaunch.workbench.inspection import inspect_build
from tests.ops.cases import GLA, assert_correct, assert_near, results
from tests.ops.gla_layer_cases import GLA_LAYER
from tests.ops.test_gla_hopper import ALL_FORMS, FORMS, each_layout, gpu, made, on_hopper

SIZES = [
    (16, 16), (16, 128), (24, 40), (32, 32), (32, 96), (48, 48), (48, 320), (64, 80), (80, 64), (80, 144), (96, 16), (96, 96),
    (96, 512), (112, 48), (112, 128), (128, 72), (128, 192), (160, 48), (160, 144), (192, 128), (192, 320), (256, 16), (256, 144),
    (256, 512),
]  # fmt: skip
"""Sizes K and V of heads, of which at least one is not that of a tile, except for the last pair."""

each_size = pytest.mark.parametrize(("keys", "values"), SIZES)
few_sizes = pytest.mark.parametrize(("keys", "values"), [(32, 48), (80, 144), (96, 96), (112, 320)])


@gpu
@on_hopper
@each_layout
@each_size
def test_results_and_gradients_are_correct(keys, values, per, device):
    case = GLA.case("bfloat16", B=2, T=200, H=3, K=keys, V=values, decay_per=per)
    assert_correct(GLA, case, "hopper", device)


@gpu
@on_hopper
@each_layout
@each_size
def test_states_packed_sequences_and_float32_decays_are_correct(keys, values, per, device):
    wide = per == "head" or keys <= 128  # with wider heads the variant refuses float32 log-decays per channel
    given = ALL_FORMS if wide else {"initial_state": True, "final_state": True}
    case = GLA.case("bfloat16", B=1, T=330, H=2, K=keys, V=values, decay_per=per, lengths=(0, 50, 0, 79, 1, 200, 0), **given)
    assert_correct(GLA, case, "hopper", device)


@gpu
@on_hopper
@each_layout
@few_sizes
@pytest.mark.parametrize("decay", ["weak", "strong", "forget", "mixed", "zero"])
def test_every_kind_of_decay(decay, keys, values, per, device):
    case = GLA.case("bfloat16", B=1, T=200, H=2, K=keys, V=values, decay=decay, decay_per=per, **ALL_FORMS)
    assert_correct(GLA, case, "hopper", device)


@gpu
@on_hopper
@each_layout
@few_sizes
@pytest.mark.parametrize("segments", [2, 5])
def test_any_number_of_time_segments(segments, keys, values, per, device, monkeypatch):
    from onelaunch.ops.gla import launch_hopper

    monkeypatch.setattr(launch_hopper, "pass_segments", lambda *_: Segments(segments))
    for lengths in (None, (5, 0, 290, 30)):
        case = GLA.case("bfloat16", B=1, T=325, H=2, K=keys, V=values, decay_per=per, lengths=lengths, **ALL_FORMS)
        assert_correct(GLA, case, "hopper", device)


@gpu
@on_hopper
@each_layout
def test_segment_sums_of_padded_heads_may_stop_early(per, device):
    """Padding never decays, so tests for decays of 0 leave it out. Results show sums that stop too early, not those too late."""
    arguments = made(device, B=1, T=16000, H=2, K=96, V=80, decay="strong", decay_per=per, grad=True)
    found, expected = (results(GLA, arguments, name) for name in ("hopper", "fused"))
    assert_near(found, expected, 1e-2)


@gpu
@on_hopper
@pytest.mark.parametrize(("keys", "values"), [(24, 40), (80, 144), (192, 320)])
def test_results_in_float16_are_correct(keys, values, device):
    arguments = made(device, dtype="float16", T=200, K=keys, V=values, initial_state=True, final_state=True)
    with torch.no_grad():
        found, expected = (GLA(**arguments, variant=name) for name in ("hopper", "recurrent"))
    assert_near(dict(zip(("o", "final"), found, strict=True)), dict(zip(("o", "final"), expected, strict=True)), 2e-3)


@gpu
@on_hopper
@each_layout
def test_nothing_is_written_beyond_a_head(per, device):
    """Rows of dq, dk and dv are columns of a matrix here; the other columns keep what they held, also behind cut-off chunks."""
    from onelaunch.ops.gla import launch, launch_hopper

    batch, length, heads, keys, values = 2, 100, 3, 80, 144
    arguments = made(device, B=batch, T=length, H=heads, K=keys, V=values, decay_per=per)
    call = launch.Attention.of(*(arguments[name] for name in "qkvg"), None, None, 1.0)
    widths = [heads * keys, heads * keys, heads * values]
    full = torch.full((batch, length, sum(widths) + 8), 7.0, dtype=torch.bfloat16, device=device)
    q, k, v, rest = full.split([*widths, 8], dim=2)
    into = launch.Into(*(each.unflatten(2, (heads, -1)) for each in (q, k, v)))
    do = torch.randn_like(arguments["v"])
    found, expected = launch_hopper.backward(call, do, into), launch_hopper.backward(call, do)
    assert (rest == 7.0).all()
    for name in "qkvg":
        assert torch.equal(getattr(found, name), getattr(expected, name))


@gpu
@on_hopper
@each_layout
def test_inputs_may_be_columns_of_a_matrix_or_strided(per, device):
    """Steps are a pitch apart that is no multiple of a head's size; their first bytes are aligned as TMA wants, or are not."""
    for heads in (1, 3):
        arguments = made(device, B=1, T=300, H=heads, K=80, V=48, decay_per=per, grad=True)
        expected = results(GLA, arguments, "hopper")
        for channels, first in ((200, 8), (200, 13)):
            other = dict(arguments)
            for name in "qkv":
                size = arguments[name].shape[3]
                wide = torch.full((*arguments[name].shape[:2], heads * size + channels), torch.nan, device=device).bfloat16()
                view = wide[..., first : first + heads * size].unflatten(2, (heads, size))
                other[name] = view.copy_(arguments[name].detach()).requires_grad_()
            assert_near(results(GLA, other, "hopper"), expected, 0)


# Without a GPU


@pytest.mark.parametrize(
    ("keys", "values", "padded", "groups"),
    [
        (16, 16, (64, 64), 1), (64, 64, (64, 64), 1), (72, 72, (128, 128), 2), (128, 128, (128, 128), 2),
        (80, 192, (128, 256), 2), (128, 320, (128, 384), 2), (136, 72, (256, 128), 1), (256, 512, (256, 512), 1),
        (192, 144, (256, 192), 1),
    ],
)  # fmt: skip
def test_sizes_are_padded_to_tiles(keys, values, padded, groups):
    assert (padded_keys(keys), padded_values(keys, values)) == padded
    assert value_groups(keys, values) == groups
    assert padded[1] % (64 * groups) == 0


def test_every_size_that_is_taken_fits():
    for keys in range(16, KEYS[-1] + 1, 8):
        assert keys <= 64 * key_panels(keys) <= padded_keys(keys) in KEYS
        for values in range(16, 513, 8):
            spare = padded_values(keys, values) - values
            assert 0 <= spare < 64 * value_groups(keys, values)


def described(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module of boxes, whose TMA descriptors become pairs of the described tensor and the box."""
    pytest.importorskip("triton", reason="launches import their kernels, which import Triton")
    from onelaunch.ops.gla import boxes

    monkeypatch.setattr(boxes, "described", lambda tensor, box: (tensor, box))
    return boxes


def test_heads_that_tiles_cover_are_described_as_a_matrix(monkeypatch):
    module = described(monkeypatch)
    x = torch.arange(2 * 5 * 3 * 128.0).view(2, 5, 3, 128)
    [(flat, box)] = module.boxes(module.Boxes(64, 64, 128), x)
    assert (flat.shape, box) == ((10, 384), [64, 64])
    assert flat.data_ptr() == x.data_ptr()


def test_other_heads_are_described_with_a_dimension_of_their_own(monkeypatch):
    module = described(monkeypatch)
    wide = torch.zeros(2, 5, 400, dtype=torch.bfloat16)
    x = wide[..., 16:256].unflatten(2, (3, 80))
    boxes = module.Boxes(64, 128, 128)
    [(flat, box)] = module.targets(boxes, x)
    assert (flat.shape, flat.stride(), box) == ((10, 3, 80), (400, 80, 1), [64, 1, 128])
    assert flat.data_ptr() == x.data_ptr()
    with pytest.raises(ValueError, match="TMA cannot write"):
        module.targets(boxes, wide[..., 13:253].unflatten(2, (3, 80)))


def test_a_single_head_may_have_any_stride(monkeypatch):
    module = described(monkeypatch)
    x = torch.zeros(2, 5, 80, dtype=torch.bfloat16).as_strided((2, 5, 1, 80), (400, 80, 7, 1))
    [(flat, _)] = module.targets(module.Boxes(64, 128, 128), x)
    assert flat.stride() == (80, 80, 1)


@pytest.mark.parametrize(("variant", "passes"), [("packed", 3), ("packed_states", 2)])
def test_layers_with_padded_heads_run_these_kernels(variant, passes):
    """One pass along time makes outputs, one makes states unless the first one has kept them, and one goes back."""
    pytest.importorskip("triton", reason="kernels are listed through Triton")
    example = Example(GLA_LAYER.case("bfloat16", B=32, T=2048, D=1024, H=12, K=96, V=80), "forward_backward")
    names = [each.name for each in recorded_builds(GLA_LAYER.get(variant), [example], "sm_90a")]
    assert sum("chunk_state" in name for name in names) == passes


def test_layers_whose_heads_tma_cannot_address_run_portable_kernels():
    """The layer calls the launches of ``hopper``, which copy no heads. Those of ``fused`` take any size."""
    pytest.importorskip("triton", reason="kernels are listed through Triton")
    case = GLA_LAYER.case("bfloat16", B=2, T=256, D=256, H=4, K=20, V=24)
    names = [each.name for each in recorded_builds(GLA_LAYER.get("packed"), [Example(case, "forward_backward")], "sm_90a")]
    assert any("chunk_output" in name for name in names), "an output kernel is launched by fused alone"
    query = GLA_LAYER.query(case, str(pretended("sm_90a")), grad=True)
    assert GLA_LAYER.get("packed").why_not(query) is None
    assert "hopper alone" in (GLA_LAYER.get("packed_states").why_not(query) or "")


@pytest.mark.parametrize("final_state", [False, True])
def test_kernels_for_heads_that_are_copied_are_listed(final_state):
    """``onelaunch prebuild`` runs the call on a pretended device, where some of PyTorch's operators do not work."""
    pytest.importorskip("triton", reason="kernels are listed through Triton")
    case = GLA.case("bfloat16", B=1, T=64, H=1, K=20, V=75, final_state=final_state)
    names = [each.name for each in recorded_builds(GLA.get("hopper"), [Example(case, "forward_backward")], "sm_90a")]
    assert sum("chunk_state" in name for name in names) == 3
    assert sum("gradients" in name for name in names) == 1


def inspected(direction: Direction, **given: Any) -> dict[str, Any]:
    """Compile the kernels of a call for Hopper, require that they have no problem, and return their inspections by name."""
    case = GLA.case("bfloat16", **{"B": 8, "T": 4096, "H": 36, **given})
    found = [inspect_build(each, "sm_90a") for each in builds_for_case(case, "sm_90a", [direction], ["hopper"])]
    assert all(each.ok for each in found), [(each.kernel, each.problems) for each in found]
    return {each.kernel: each for each in found}


@pytest.mark.thorough
def test_padded_kernels_compile_without_spills():
    assert len(inspected("forward", K=48, V=80, initial_state=True, final_state=True)) == 1


@pytest.mark.every
@pytest.mark.parametrize(
    ("keys", "values", "given"),
    [
        (32, 48, {}), (96, 144, {"decay_per": "head", **ALL_FORMS}), (112, 144, ALL_FORMS), (32, 96, ALL_FORMS),
        (192, 128, FORMS["states"]), (160, 48, {"decay_per": "head", **ALL_FORMS}),
    ],
)  # fmt: skip
def test_kernels_of_many_padded_sizes_compile_without_spills(keys, values, given):
    assert len(inspected("forward_backward", K=keys, V=values, **given)) == 4


@pytest.mark.every
@pytest.mark.parametrize(
    ("keys", "values", "given"),
    [
        (32, 32, {"decay_per": "head"}), (128, 128, {"decay_per": "head", **FORMS["states"]}), (256, 128, {"decay_per": "head"}),
        (64, 64, {}), (128, 128, FORMS["states"]), (128, 128, FORMS["float32_decay"]),
    ],
)  # fmt: skip
def test_kernels_that_recompute_states_compile_without_spills(keys, values, given):
    assert len(inspected("forward", K=keys, V=values, B=1, T=1024, H=8, **given)) == 1  # one launch, though heads are few


@pytest.mark.every
@pytest.mark.parametrize(("keys", "values", "per"), [(96, 80, "channel"), (32, 48, "channel"), (80, 144, "head")])
def test_kernels_of_padded_sizes_in_time_segments_compile_without_spills(keys, values, per):
    """With states the pass keeps two registers in local memory before its loop, also where heads fill tiles."""
    assert len(inspected("forward_backward", K=keys, V=values, decay_per=per, B=1, T=32768, H=12)) >= 6
