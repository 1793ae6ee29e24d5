"""Tests of tensors prepared for TMA: the tensor itself if TMA can address it, a contiguous copy if not.

A copy does not help where the length of a row is not a multiple of 16 bytes.
"""

from __future__ import annotations

import pytest
import torch

from onelaunch.kernels.tma import addressable

MATRIX = torch.arange(8 * 64, dtype=torch.float16).reshape(8, 64)

# ``addressable`` keeps a tensor whose last dimension is contiguous, whose every other dimension steps over all of the next one by
# a multiple of 16 bytes, and whose address is a multiple of 16 bytes.
HEADS = torch.arange(4 * 80, dtype=torch.float16).reshape(4, 80)[:, 8:72].unflatten(1, (2, 32))  # [4, 2, 32], rows 80 apart

AS_THEY_LIE = {
    "whole": MATRIX,
    "some_rows": MATRIX[2:5],
    "columns_from_an_aligned_one": MATRIX[:, 8:],
    "every_other_row": MATRIX[::2],
    "one_row": MATRIX[3:4],
    "heads_of_wider_rows": HEADS,
    "channels_of_heads": HEADS[..., 8:24],
}

COPIED = {
    "columns_from_another": MATRIX[:, 1:],
    "every_other_column": MATRIX[:, ::2],
    "turned": MATRIX.T,
    "rows_that_are_one": MATRIX[:1].expand(4, -1),
    "a_row_of_such": MATRIX[:1].expand(4, -1)[:1],
    "rows_of_odd_length": torch.zeros(3, 9, dtype=torch.float16),
    "heads_before_rows": HEADS.transpose(0, 1),
    "heads_that_are_one": HEADS[:, :1].expand(-1, 2, -1),
    "heads_of_odd_length": torch.zeros(4, 2, 12, dtype=torch.float16),
}


@pytest.mark.parametrize("name", AS_THEY_LIE)
def test_supported_layouts_are_not_copied(name):
    assert addressable(AS_THEY_LIE[name]).data_ptr() == AS_THEY_LIE[name].data_ptr()


@pytest.mark.parametrize("name", COPIED)
def test_other_layouts_are_copied(name):
    given = COPIED[name]
    found = addressable(given)
    assert torch.equal(found, given)
    assert found.is_contiguous()
    assert found.data_ptr() != given.data_ptr()
