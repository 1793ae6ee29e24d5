"""Tests of the arguments that ``projections`` refuses, named as the caller knows them, and of its dispatch key and layout.

``made()`` makes float32 arguments with B = 2, T = 9, D = 40, H = 3, K = 20 and V = 12, unless others are given.
``of_every_kind()`` makes arguments with x ``[2, 5, 12]`` and the segments ``EVERY``: q, k, gate, decay and gk, of the widths
20, 15, 14, 3 and 18.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in
``tests/snapshots/prose.txt``. A test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test
or the parameter of an entry is gone.

``CASES`` are the probes of ``projections`` and longer cases, by name. ``case_of`` returns a case by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onelaunch.errors import ArgumentError, DeviceError, DTypeError, OneLaunchError, ShapeError, UnknownVariant
from onelaunch.operation import names_of
from onelaunch.ops import Segment, projections
from onelaunch.ops.projections.contract import layout_in
from onelaunch.ops.projections.layout import layout_of, read_layout
from tests.ops.projections_cases import CASES, EVERY, PROJECTIONS, case_of, made, of_every_kind
from tests.prose import Prose


@pytest.fixture
def refused(prose: Prose) -> Callable[..., None]:
    """Return a function that expects a call to raise an error, with the message recorded in tests/snapshots/prose.txt.

    It takes the class of the error, a regular expression that the message must contain (mostly the name of the argument), the
    function to call, and its arguments.
    """

    def call(error: Any, named: str, function: Any = projections, /, *args: Any, **kwargs: Any) -> None:
        with prose.raises(error, match=rf"(?<!\w){named}(?!\w)") as caught:
            function(*args, **kwargs)
        assert isinstance(caught.value, OneLaunchError)
        # If the pattern is the name of an argument, an error with the attribute ``argument`` must hold it there too.
        assert not named.isidentifier() or named in getattr(caught.value, "argument", named)
        assert "\n" not in str(caught.value)

    return call


# Segments


def test_a_segment_is_a_value():
    one, other = Segment("q", 4, 16, "l2norm"), Segment("q", 4, 16, "l2norm")
    assert one == other
    assert hash(one) == hash(other)
    assert one.width == 64
    assert one.shape == (4, 16)
    assert Segment("decay", 4, 1, "sigmoid").shape == (4,)
    with pytest.raises(AttributeError):
        one.heads = 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("q", 0, 4), "'q'"),
        (("q", 2, 4.0), "'q'"),
        (("q", True, 4), "'q'"),
        (("q", 2, 4, "swish"), "'q'"),
        (("q", 2, 4, "l2nrom"), "'l2norm'"),
        (("g", 2, 4, "logsigmoid", 0.0), "'g'"),
        (("g", 2, 4, "logsigmoid", float("inf")), "'g'"),
        (("g", 2, 4, "sigmoid", 16.0), "'g'"),
        (("g", 2, 4, "none", 1.0, 1), "'g'"),
        (("", 2, 4), "name"),
        ((3, 2, 4), "name"),
    ],
)
def test_a_wrong_segment_is_refused(given, message, refused):
    refused(ArgumentError, message, Segment, *given)


@pytest.mark.parametrize("segment", [*EVERY, Segment("a", 3, 2, "logsigmoid", normalizer=0.3)], ids=lambda each: each.code)
def test_a_segments_code_holds_all_but_its_name(segment):
    assert Segment.read(segment.name, segment.code) == segment


@pytest.mark.parametrize("code", ["", "4", "4x", "axb", "4x5x6", "4x5:logsigmoid/x", "4x5:silu:sigmoid", "4x5:silu:bias:bias"])
def test_an_invalid_code_is_refused(code, refused):
    refused(ArgumentError, "", Segment.read, "q", code)


# Layouts


def test_segments_have_offsets_in_the_packed_result():
    """The segments are q (l2norm), k (bias), gate (silu, bias), decay and gk (bias), of the widths 20, 15, 14, 3 and 18.

    ``row`` counts rows of the weight, and ``column`` columns of the result, where segments begin at multiples of 8. ``norm``
    counts normalized heads, ``kept`` columns of saved inputs of SiLU, and ``bias`` elements of the bias.
    """
    layout = layout_of(EVERY)
    assert [span.row for span in layout.spans] == [0, 20, 35, 49, 52]
    assert [span.column for span in layout.spans] == [0, 24, 40, 56, 64]
    assert [span.norm for span in layout.spans] == [0, None, None, None, None]
    assert [span.kept for span in layout.spans] == [None, None, 0, None, None]
    assert [span.bias for span in layout.spans] == [None, 0, 15, None, 29]
    assert (layout.rows, layout.pitch, layout.gradient_pitch) == (70, 88, 72)
    assert (layout.norms, layout.kept, layout.biases) == (2, 16, 47)
    assert layout_of(EVERY) is layout


def test_a_layout_is_restored_from_its_code():
    layout = layout_of(EVERY)
    again = read_layout(layout.code)
    assert again.code == layout.code
    assert [span.segment.name for span in again.spans] == ["s0", "s1", "s2", "s3", "s4"]
    unnamed = [(span.row, span.column, span.norm, span.kept, span.bias) for span in again.spans]
    assert unnamed == [(span.row, span.column, span.norm, span.kept, span.bias) for span in layout.spans]


def test_splitting_a_packed_result_returns_views_of_its_columns():
    layout = layout_of(EVERY)
    packed = torch.arange(3.0 * layout.pitch).view(3, layout.pitch)
    for part, span in zip(layout.cut(packed), layout.spans, strict=True):
        assert part.shape == (3, *span.segment.shape)
        assert torch.equal(part.reshape(3, -1), packed[:, span.column : span.column + span.segment.width])
        assert part.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()


# Calls


def test_segments_of_a_wrong_total_width_are_refused_with_both_numbers(refused):
    given = of_every_kind()
    refused(ShapeError, "weight", **{**given, "weight": given["weight"][1:]})


def test_wrong_shapes_are_named(refused):
    given = of_every_kind()
    x, weight, bias = given["x"], given["weight"], given["bias"]
    refused(ShapeError, "x", **{**given, "x": x[0, 0]})
    refused(ShapeError, "weight", **{**given, "weight": weight[:, 0]})
    refused(ShapeError, "weight", **{**given, "weight": weight[:, 1:]})
    refused(ShapeError, "bias", **{**given, "bias": bias[1:]})
    refused(ShapeError, "bias", **{**given, "bias": bias[:, None]})


def test_a_missing_or_superfluous_bias_is_named(refused):
    given = of_every_kind()
    refused(ArgumentError, "bias", **{**given, "bias": None})
    without = (Segment("v", 7, 10),)
    refused(ArgumentError, "bias", **{**given, "segments": without})


def test_wrong_dtypes_and_devices_are_named(refused):
    given = of_every_kind()
    refused(DTypeError, "x", **{**given, "x": given["x"].double()})
    refused(
        DTypeError,
        "weight",
        **{**given, "weight": given["weight"].half()},
    )
    refused(DTypeError, "bias", **{**given, "bias": given["bias"].bfloat16()})
    refused(DeviceError, "weight", **{**given, "weight": given["weight"].to("meta")})
    refused(ArgumentError, "weight", **{**given, "weight": [1.0]})
    refused(UnknownVariant, "'wyde'", **given, variant="wyde")


def test_wrong_segments_are_named(refused):
    given = of_every_kind()
    refused(ArgumentError, "segments", **{**given, "segments": EVERY[0]})
    refused(ArgumentError, "segments", **{**given, "segments": "2x10"})
    refused(ArgumentError, "segments", **{**given, "segments": []})
    refused(ArgumentError, "", **{**given, "segments": [EVERY[0], "k"]})
    refused(ArgumentError, "'q'", **{**given, "segments": [EVERY[0], EVERY[0]]})


@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf"), "small", None, True])
def test_a_wrong_eps_is_named(eps, refused):
    refused(ArgumentError, "eps", **of_every_kind(), eps=eps)


def test_segments_may_be_a_list():
    given = of_every_kind()
    expected = projections(**given)
    for one, other in zip(projections(**{**given, "segments": list(EVERY)}), expected, strict=True):
        assert torch.equal(one, other)


# Dispatch and cases


@pytest.mark.parametrize("grad", [False, True])
def test_a_case_and_its_call_have_the_same_query(grad):
    for name in CASES:
        case = case_of(name)
        given = made(grad=grad, **CASES[name])
        assert PROJECTIONS.bind(**given).query() == PROJECTIONS.query(case, "cpu", grad=grad), name


def test_a_query_holds_all_of_the_segments_but_their_names():
    given = of_every_kind()
    query = PROJECTIONS.bind(**given).query()
    assert query.sizes == (2, 5, 12, 2, 10, 7)  # B, T, D; heads of the first segment, and their size; head size of the third
    assert layout_in(query).code == layout_of(EVERY).code
    assert PROJECTIONS.bind(**{**given, "x": given["x"][0]}).query().sizes == (1, 5, 12, 2, 10, 7)
    assert PROJECTIONS.bind(**{**given, "x": given["x"][None]}).query().sizes == (2, 5, 12, 2, 10, 7)
    renamed = tuple(Segment(f"other{i}", s.heads, s.head_size, s.activation, s.normalizer, s.bias) for i, s in enumerate(EVERY))
    assert PROJECTIONS.bind(**{**given, "segments": renamed}).query() == query


def test_results_are_named_after_segments():
    assert names_of(PROJECTIONS.outputs, made()) == ("q", "k", "v", "gate", "decay")
    assert names_of(PROJECTIONS.outputs, made(segments="gla")) == ("q", "k", "v", "gate", "gk")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segments": "retention"}, "'retention'"),
        ({"gate": "relu"}, "'relu'"),
        ({"segments": "2x3:swish"}, "'s0'"),
        ({"H": 0}, "'q'"),
    ],
)
def test_a_case_of_unknown_segments_is_refused(changes, message, refused):
    refused(ArgumentError, message, made, **changes)
