"""Tests of float8 and NVFP4 matrices: decoding, quantization, layouts of codes and scales, checkpoints, and invalid input.

NVFP4 has 4-bit codes, two per byte, a float8 scale (e4m3) for each block of 16 channels, and one float32 scale for the matrix
(``global_scale``). ``decode`` leaves the latter out, ``dequantize`` does not. ``swizzle`` reorders scales as cuBLAS reads them:
in atoms of 128 rows by 4 blocks.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in tests/snapshots/prose.txt. A
test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is
gone.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onelaunch.errors import ArgumentError, CheckpointError, DeviceError, DTypeError, ShapeError, ValueRangeError
from onelaunch.formats import (
    Fp8Tensor,
    NVFP4Tensor,
    dequantize_nvfp4,
    load_nvfp4,
    quantize_fp8,
    quantize_nvfp4,
    save_nvfp4,
    swizzle,
    unswizzle,
)

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of the codes 0 to 7. Codes 8 to 15 are the same with a minus sign."""
NAN_SCALES = (0x7F, 0xFF)
"""The bytes that are NaN as a float8 scale."""


def every_product() -> NVFP4Tensor:
    """Return each of the 16 codes with each of the 254 finite scales, one block per scale."""
    scales = torch.tensor([byte for byte in range(256) if byte not in NAN_SCALES], dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | (codes[1::2] << 4)).expand(254, 8).contiguous()
    return NVFP4Tensor(packed, scales[:, None].contiguous())


def made(rows: int = 8, channels: int = 64, seed: int = 0, **given) -> NVFP4Tensor:
    """Return a random matrix in NVFP4. ``given`` is passed to ``quantize_nvfp4``."""
    generator = torch.Generator().manual_seed(seed)
    return quantize_nvfp4(torch.randn(rows, channels, generator=generator), **given)


def same(one: NVFP4Tensor, other: NVFP4Tensor) -> bool:
    """Return whether two matrices have equal numbers, whatever their codes and scales."""
    return torch.equal(one.dequantize(torch.float64), other.dequantize(torch.float64))


def test_the_low_nibble_of_a_byte_is_the_first_code():
    codes = torch.zeros(1, 8, dtype=torch.uint8)
    codes[0, 0], codes[0, 1] = 0x21, 0x9F
    scales = torch.ones(1, 1).to(torch.float8_e4m3fn)
    assert NVFP4Tensor(codes, scales).decode(torch.float32)[0, :4].tolist() == [0.5, 1.0, -6.0, -0.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_code_times_every_scale_is_exact(dtype):
    tensor = every_product()
    signed = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.float64)
    expected = tensor.scales.double() * signed
    assert torch.equal(tensor.decode(dtype).double(), expected)
    assert expected.unique().numel() == 475  # few, since many products are equal, such as 2 * 1 and 1 * 2
    assert expected[expected > 0].min() == 2**-10  # the code 0.5 times the smallest scale


def test_representable_nvfp4_values_round_trip_exactly():
    tensor = every_product()
    again = quantize_nvfp4(tensor.dequantize(), global_scale=1.0)
    assert same(tensor, again)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**31), st.sampled_from([1.0, 0.37, 2.0**-12, 1e-6, 1234.5]))
def test_checkpoints_round_trip_exactly(seed, global_scale):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (4, 24), generator=generator, dtype=torch.uint8)
    bytes_ = torch.randint(0, 0x7F, (4, 3), generator=generator, dtype=torch.uint8)
    tensor = NVFP4Tensor(codes, bytes_.view(torch.float8_e4m3fn), torch.tensor(global_scale))
    again = quantize_nvfp4(tensor.dequantize(), global_scale=global_scale)
    assert torch.equal(again.dequantize(), tensor.dequantize())


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("tie", "even"), [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)]
)
def test_quantization_rounds_to_nearest_even(tie, even, sign):
    exact = [*VALUES, *(-value for value in VALUES[1:])]  # with these values no other scale is as good
    found = quantize_nvfp4(torch.tensor([[sign * tie, *exact]]), global_scale=1.0).dequantize()[0]
    assert found.tolist() == [sign * even, *exact]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31), st.sampled_from([1e-8, 1e-3, 1.0, 3e4]))
def test_no_block_has_a_larger_error_than_with_its_maximum_at_6(seed, size):
    generator = torch.Generator().manual_seed(seed)
    # The usual quantization gives each block the scale at which its largest number becomes 6, the largest code.
    values = torch.randn(3, 64, generator=generator) * size
    tensor = quantize_nvfp4(values)
    shared = float(tensor.global_scale)
    blocks = (values / shared).unflatten(1, (-1, 16))
    usual = (blocks.abs().amax(2, keepdim=True) / 6).to(torch.float8_e4m3fn).float()
    table = torch.tensor([*VALUES, *(-value for value in VALUES[1:])])
    nearest = table[(blocks[..., None] / usual[..., None] - table).abs().argmin(-1)] * usual
    error = ((tensor.dequantize() / shared).unflatten(1, (-1, 16)) - blocks).square().sum(2)
    allowed = (nearest - blocks).square().sum(2)
    assert (error <= allowed * (1 + 1e-5) + 1e-12).all()  # tolerance: the sum of squares is taken in another order


def test_blocks_of_zeros_and_of_nan_are_preserved():
    values = torch.randn(2, 48)
    values[0, :16] = 0
    values[1, 20] = torch.nan
    found = quantize_nvfp4(values).dequantize()
    assert not found[0, :16].any()
    assert found[1, 16:32].isnan().all()
    assert found[1, :16].isfinite().all()
    assert found[0].isfinite().all()


@pytest.mark.parametrize("rows", [0, 1, 128, 200])
@pytest.mark.parametrize("channels", [16, 64, 80])
def test_swizzling_preserves_the_scales(rows, channels):
    tensor = made(rows, channels) if rows else quantize_nvfp4(torch.zeros(0, channels))
    moved = tensor.swizzle()
    assert moved.swizzled
    assert moved.scales.shape == (-(-rows // 128) * 128, -(-channels // 64) * 4)
    assert torch.equal(moved.plain().scales.view(torch.uint8), tensor.scales.view(torch.uint8))
    assert same(moved, tensor)


def test_swizzled_scales_have_cublas_layout():
    rows, columns = 256, 12
    scales = torch.arange(rows * columns, dtype=torch.int32).remainder(251).to(torch.uint8).reshape(rows, columns)
    flat = swizzle(scales.view(torch.float8_e4m3fn)).view(torch.uint8).flatten()
    for row, column in itertools.product(range(0, rows, 7), range(columns)):
        atom = (row // 128) * (columns // 4) + column // 4
        assert flat[atom * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4] == scales[row, column]
    back = unswizzle(flat.view(torch.float8_e4m3fn).reshape(rows, columns), rows, columns)
    assert torch.equal(back.view(torch.uint8), scales)


@pytest.mark.parametrize("swizzled", [False, True])
def test_sliced_rows_are_views(swizzled):
    tensor = made(300, 64, swizzled=swizzled)
    part = tensor.rows(128, 300)
    assert part.codes.data_ptr() == tensor.codes[128:].data_ptr()
    assert torch.equal(part.dequantize(), tensor.dequantize()[128:])


@pytest.mark.parametrize(("start", "stop"), [(-172, 300), (128, 1000), (-44, None), (256, 100)])
def test_row_ranges_follow_slice_semantics(start, stop):
    for tensor in (made(300, 64), made(300, 64, swizzled=True), quantize_fp8(torch.randn(300, 64), per_row=True)):
        assert torch.equal(tensor.rows(start, stop).dequantize(), tensor.dequantize()[start:stop])


def test_swizzled_rows_are_not_cut_within_an_atom(prose):
    with prose.raises(ArgumentError):
        made(300, 64, swizzled=True).rows(100, 300)


@pytest.mark.parametrize("swizzled", [False, True])
def test_a_written_file_is_read_back(swizzled, tmp_path):
    weights = {"layers.0.gate_proj": made(40, 64, swizzled=swizzled), "layers.0.up_proj": every_product()}
    save_nvfp4(tmp_path / "w.safetensors", weights)
    for layer, weight in weights.items():
        assert same(load_nvfp4(tmp_path / "w.safetensors", layer), weight)


def test_both_common_checkpoint_layouts_are_read():
    weight = made(8, 32)
    ours = weight.state_dict("a")
    assert set(ours) == {"a.weight", "a.weight_scale", "a.weight_scale_2"}
    theirs = {"a.weight_packed": ours["a.weight"], "a.weight_scale": ours["a.weight_scale"]}
    theirs["a.weight_global_scale"] = (1 / ours["a.weight_scale_2"])[None]
    found = NVFP4Tensor.from_state_dict(theirs, "a").dequantize()
    assert torch.allclose(found, weight.dequantize(), rtol=1e-6, atol=0)  # tolerance: the reciprocal of a reciprocal, in float32


def test_values_beyond_the_largest_scale_saturate():
    for size in (1e10, 1e15, 3e38):
        tensor = quantize_nvfp4(torch.full((1, 16), size), global_scale=1e-5)
        assert torch.allclose(tensor.dequantize(), torch.tensor(6 * 448 * 1e-5))  # largest code, largest scale, global scale


@pytest.mark.parametrize("quantize", [quantize_fp8, quantize_nvfp4])
def test_values_too_small_for_any_scale_become_zero(quantize):
    values = torch.zeros(1, 16)
    values[0, 1] = 1e-43
    assert quantize(values).dequantize().abs().max() <= 1e-40


def test_a_weight_without_a_global_scale_is_read_back_from_a_file(tmp_path, prose):
    weight = every_product()
    save_nvfp4(tmp_path / "w.safetensors", {"a": weight, "b": weight})
    assert same(load_nvfp4(tmp_path / "w.safetensors", "a"), weight)
    assert same(load_nvfp4(tmp_path / "w.safetensors", "b"), weight)
    with prose.raises(CheckpointError, foreign=True):  # masks the library's part of the message
        save_nvfp4(tmp_path / "no" / "w.safetensors", {"a": weight})


@pytest.mark.parametrize("name", ["weight", "weight_scale", "weight_scale_2"])
def test_every_missing_tensor_is_named(name, prose):
    held = made(8, 32).state_dict("a")
    del held[f"a.{name}"]
    with prose.raises(CheckpointError, match=rf"'a\.{name}'"):
        NVFP4Tensor.from_state_dict(held, "a")


def test_a_missing_tensor_is_named(prose):
    held = made(8, 32).state_dict("layers.3.up_proj")
    del held["layers.3.up_proj.weight_scale"]
    with prose.raises(CheckpointError, match=r"up_proj\.weight_scale"):
        NVFP4Tensor.from_state_dict(held, "layers.3.up_proj")


def test_an_invalid_file_is_reported(tmp_path, prose):
    (tmp_path / "w.safetensors").write_bytes(b"nothing of the kind")
    for name in ("w.safetensors", "missing.safetensors"):
        with prose.raises(CheckpointError, match=name, foreign=True):
            load_nvfp4(tmp_path / name, "a")


def test_invalid_codes_and_scales_are_named(prose):
    codes, scales = made(8, 64).codes, made(8, 64).scales
    with prose.raises(ShapeError, match="codes"):
        NVFP4Tensor(codes[:, :30], scales)
    with prose.raises(ShapeError, match="scales"):
        NVFP4Tensor(codes, scales[:, :3])
    with prose.raises(ShapeError, match="128"):
        NVFP4Tensor(codes, scales, swizzled=True)
    with prose.raises(DTypeError, match="codes"):
        NVFP4Tensor(codes.int(), scales)
    with prose.raises(DTypeError, match="scales"):
        NVFP4Tensor(codes, scales.half())
    with pytest.raises(ShapeError, match="global_scale"):
        NVFP4Tensor(codes, scales, torch.ones(2))
    with prose.raises(DeviceError, match="scales"):
        NVFP4Tensor(codes, scales.to("meta"))
    with prose.raises(ArgumentError, match="codes"):
        NVFP4Tensor([1], scales)


@pytest.mark.parametrize(
    ("values", "given", "error", "said"),
    [
        (torch.ones(4, 24), {}, ShapeError, "16"),
        (torch.ones(16), {}, ShapeError, ""),
        (torch.ones(4, 16, dtype=torch.int32), {}, DTypeError, "values"),
        (torch.full((1, 16), torch.inf), {}, ValueRangeError, "infinities"),
        (torch.ones(1, 16), {"global_scale": 0.0}, ValueRangeError, "positive"),
        (torch.ones(1, 16), {"global_scale": torch.nan}, ValueRangeError, "positive"),
    ],
)
def test_values_that_cannot_be_quantized_are_refused_with_the_reason(values, given, error, said, prose):
    with prose.raises(error, match=said):
        quantize_nvfp4(values, **given)


@pytest.mark.parametrize("per_row", [False, True])
def test_float8_refuses_infinities_and_keeps_nan_to_itself(per_row, prose):
    values = torch.randn(3, 16)
    values[1, 2] = torch.inf
    with prose.raises(ValueRangeError):
        quantize_fp8(values, per_row=per_row)
    values[1, 2] = torch.nan
    tensor = quantize_fp8(values, per_row=per_row)
    assert tensor.dequantize().isnan().nonzero().tolist() == [[1, 2]]
    values[1, 2] = 0
    assert torch.equal(tensor.scale, quantize_fp8(values, per_row=per_row).scale)


@pytest.mark.parametrize("per_row", [False, True])
def test_float8_errors_are_within_half_a_unit_of_its_three_bits(per_row):
    values = torch.randn(6, 40) * torch.logspace(-3, 3, 6)[:, None]
    tensor = quantize_fp8(values, per_row=per_row)
    assert tensor.per_row is per_row
    off = (tensor.dequantize() - values).abs()
    smallest = tensor.scale * 2.0**-10  # half of the smallest subnormal number
    assert (off <= values.abs() * 2**-4 * (1 + 1e-6) + smallest).all()
    assert torch.equal(tensor.rows(2, 5).dequantize(), tensor.dequantize()[2:5])
    # The tolerance is for the largest value, divided by 448 and multiplied again in float32.
    assert torch.isclose(tensor.dequantize().abs().amax(), values.abs().amax(), rtol=1e-6)


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0, 0)])
def test_empty_matrices_are_quantized_to_empty_matrices(shape):
    values = torch.zeros(shape)
    for tensor in (
        quantize_fp8(values),
        quantize_fp8(values, per_row=True),
        quantize_nvfp4(values),
        quantize_nvfp4(values).swizzle(),
    ):
        assert tensor.dequantize().shape == shape


def test_a_float8_scale_of_another_shape_is_named(prose):
    with prose.raises(ShapeError, match="scale"):
        Fp8Tensor(torch.ones(4, 16).to(torch.float8_e4m3fn), torch.ones(3))
    with prose.raises(DTypeError, match="values"):
        Fp8Tensor(torch.ones(4, 16).half(), torch.ones(()))


def test_a_function_can_be_mapped_over_an_operands_tensors():
    tensor = made(8, 32, swizzled=True)
    assert set(tensor.tensors()) == {"codes", "scales", "global_scale"}
    copy = tensor.map(torch.clone)
    assert copy.swizzled
    assert copy.codes.data_ptr() != tensor.codes.data_ptr()
    assert copy.nbytes == 8 * 16 + 128 * 4 + 4  # codes, scales of a whole atom, global scale
    up = tensor.map(lambda value: value.double() if value.is_floating_point() else value)
    assert torch.allclose(up.dequantize(torch.float64), tensor.dequantize(torch.float64))
    assert torch.equal(dequantize_nvfp4(tensor), tensor.dequantize())
