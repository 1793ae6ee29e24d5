"""Tests of the arguments that ``gla`` refuses and its messages, of empty inputs, of dtypes, and of functions with fla's names.

``assert_near`` bounds the norm of each error, relative to that of the expected values; ``results`` returns a variant's results
and gradients by name. ``arguments_of(GLA)`` makes float32 arguments with B = 2, T = 9, H = 2, K = 20 and V = 16, unless others
are given.

``prose.raises`` is ``pytest.raises`` that also compares the message with the entry of this test in tests/snapshots/prose.txt. A
test fails if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is
gone.

``pytorch_variants`` are the variants of plain PyTorch.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onelaunch.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    OneLaunchError,
    ShapeError,
    ValueRangeError,
    VariantUnsupported,
)
from onelaunch.ops import chunk_gla, chunk_simple_gla, fused_recurrent_gla, fused_recurrent_simple_gla, gla
from onelaunch.ops.gla.contract import under_autocast
from tests.ops.cases import GLA, arguments_of, assert_near, pytorch_variants, results
from tests.prose import Prose

# Wrong calls


@pytest.fixture
def refused(prose: Prose) -> Callable[..., Any]:
    """Return a function that expects a call to raise an error, with the message recorded in tests/snapshots/prose.txt.

    It takes the class of the error, a regular expression that the message must contain (mostly the name of the argument), the
    function to call, and keyword arguments that replace those of a valid call.
    """

    def call(error: Any, named: str, /, function: Any = gla, **changes: Any) -> Any:
        names = {"g": "gk"} if function is fused_recurrent_gla else {}
        arguments = {names.get(name, name): value for name, value in arguments_of(GLA, initial_state=True).items()}
        with prose.raises(error, match=rf"(?<!\w){named}(?!\w)") as caught:
            function(**arguments | changes)
        assert isinstance(caught.value, OneLaunchError)
        # If the pattern is the name of an argument, an error with the attribute ``argument`` must hold it there too.
        assert not named.isidentifier() or named in getattr(caught.value, "argument", named)
        assert "\n" not in str(caught.value)
        return caught.value

    return call


@pytest.mark.parametrize("shape", [(9, 2, 20), (20,), (), (1, 2, 9, 2, 20)])
@pytest.mark.parametrize("argument", ["q", "k", "v", "gv"])
def test_wrong_rank(argument, shape, refused):
    assert refused(ShapeError, argument, **{argument: -torch.ones(shape)}).argument == argument


@pytest.mark.parametrize("shape", [(2, 9), (20,), (), (1, 2, 9, 2, 20)])
def test_a_log_decay_of_neither_layout(shape, refused):
    refused(ShapeError, "g", g=-torch.ones(shape))


@pytest.mark.parametrize(
    ("argument", "shape"),
    [
        ("k", (2, 9, 2, 24)),
        ("k", (2, 8, 2, 20)),
        ("v", (1, 9, 2, 16)),
        ("v", (2, 2, 9, 16)),
        ("g", (2, 9, 2, 16)),
        ("g", (2, 2, 9)),
        ("gv", (2, 9, 2, 20)),
    ],
)
def test_mismatched_sizes(argument, shape, refused):
    refused(ShapeError, argument, **{argument: -torch.ones(shape)})


def test_a_number_of_heads_that_cannot_be_shared(refused):
    """Heads of keys may be shared evenly: 3 of them do not divide among 2 of queries. test_gla_heads.py has all such errors."""
    refused(ShapeError, "k", k=torch.ones(2, 9, 3, 20))


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        (15, 16, "q"),
        (513, 16, "q"),
        (16, 15, "v"),
        (16, 513, "v"),
    ],
)
def test_heads_too_narrow_or_too_wide(keys, values, message, prose):
    with prose.raises(ShapeError, match=message):
        gla(**arguments_of(GLA, K=keys, V=values))


def test_the_remedies_in_errors_about_head_sizes_work():
    """Keys or values of large heads may be split over two calls, and those of small heads padded with zeros."""
    arguments = arguments_of(GLA, T=20, K=32, V=32)
    expected, _ = gla(**arguments)
    q, k, v, g = (arguments[name] for name in "qkvg")
    parts = [gla(q[..., part], k[..., part], v, g[..., part], scale=32**-0.5)[0] for part in (slice(0, 16), slice(16, 32))]
    assert_near({"o": parts[0] + parts[1]}, {"o": expected}, 1e-6)
    parts = [gla(q, k, v[..., part], g)[0] for part in (slice(0, 16), slice(16, 32))]
    assert_near({"o": torch.cat(parts, -1)}, {"o": expected}, 1e-6)
    padded = [torch.nn.functional.pad(x, (0, 8)) for x in (q, k, v, g)]
    assert_near({"o": gla(*padded, scale=32**-0.5)[0][..., :32]}, {"o": expected}, 1e-6)


@pytest.mark.parametrize("state_v_first", [False, True])
def test_initial_state_of_wrong_shape(state_v_first, refused):
    want = (2, 2, 16, 20) if state_v_first else (2, 2, 20, 16)
    turned = (*want[:2], want[3], want[2])
    for shape in (turned, (3, *want[1:]), (2, 1, *want[2:]), want[1:]):
        refused(ShapeError, "initial_state", initial_state=torch.zeros(shape), state_v_first=state_v_first)
    gla(**arguments_of(GLA) | {"initial_state": torch.zeros(want), "state_v_first": state_v_first})


def test_initial_state_counts_packed_sequences(prose):
    arguments = arguments_of(GLA, B=1, lengths=(4, 0, 5)) | {"initial_state": torch.zeros(1, 2, 20, 16)}
    with prose.raises(ShapeError, match="initial_state"):
        gla(**arguments)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float64, torch.complex64])
def test_queries_of_an_unsupported_dtype(dtype, refused):
    refused(DTypeError, "q", q=torch.ones(2, 9, 2, 20).to(dtype))


@pytest.mark.parametrize("argument", ["k", "v"])
def test_keys_and_values_have_the_dtype_of_queries(argument, refused):
    value = arguments_of(GLA)[argument].half()
    refused(DTypeError, argument, **{argument: value})


@pytest.mark.parametrize("argument", ["g", "gv"])
def test_log_decays_are_of_the_dtype_of_queries_or_float32(argument, prose):
    arguments = arguments_of(GLA, dtype="float16", value_gate=True)
    gla(**arguments | {argument: arguments[argument].float()})
    with prose.raises(DTypeError, match=argument):
        gla(**arguments | {argument: arguments[argument].bfloat16()})


def test_initial_state_of_another_dtype(refused):
    refused(DTypeError, "initial_state", initial_state=torch.zeros(2, 2, 20, 16, dtype=torch.float16))


@pytest.mark.parametrize("argument", ["q", "k", "v", "g", "gv", "initial_state", "cu_seqlens"])
def test_an_argument_that_is_not_a_tensor(argument, refused):
    refused(ArgumentError, argument, **{argument: [0, 9]})


@pytest.mark.parametrize("argument", ["k", "v", "g", "gv", "initial_state", "cu_seqlens"])
def test_mixed_devices(argument, prose):
    arguments = arguments_of(GLA, B=1, lengths=(4, 5), value_gate=True, initial_state=True)
    arguments[argument] = arguments[argument].to("meta")
    with prose.raises(DeviceError, match=argument):
        gla(**arguments)


@pytest.mark.parametrize("argument", ["g", "gv"])
@pytest.mark.parametrize(("value", "said"), [(0.25, "0.25"), (float("inf"), "inf")])
def test_an_invalid_log_decay_value(argument, value, said, prose):
    arguments = arguments_of(GLA, value_gate=True)
    arguments[argument][1, 4, 1, 3] = value
    arguments[argument][0, 0, 0, 0] = math.nan  # does not hide it
    for _ in range(2):  # cached checks cover facts such as shapes, not values
        with prose.raises(ValueRangeError, match=argument):
            gla(**arguments)


@pytest.mark.parametrize("scale", ["1", True, torch.ones(()), (1.0,)])
def test_a_scale_that_is_not_a_finite_number(scale, refused):
    refused(ArgumentError, "scale", scale=scale)


def test_a_mistake_is_named_at_every_call():
    arguments = arguments_of(GLA)
    gla(**arguments)
    for name, value in {"v": arguments["v"].double(), "g": arguments["g"].to("meta"), "k": arguments["k"][..., :16]}.items():
        for _ in range(2):
            with pytest.raises((ShapeError, DTypeError, DeviceError), match=rf"^{name} "):
                gla(**(arguments | {name: value}))


def test_cache_keys_of_checks_distinguish_calls():
    arguments = arguments_of(GLA)
    plain = GLA.bind(**arguments).query()
    assert GLA.bind(**arguments).query() is plain
    arguments["k"].requires_grad_()
    assert GLA.bind(**arguments).query() == plain._replace(grad=True)
    with torch.no_grad():
        assert GLA.bind(**arguments).query() == plain
    without_decay = GLA.bind(**(arguments | {"g": None})).query()
    per_head = GLA.bind(**(arguments | {"g": arguments["g"][..., 0]})).query()
    value_gate = GLA.bind(**(arguments | {"gv": -torch.ones_like(arguments["v"])})).query()
    assert without_decay.flags == per_head.flags == ("scalar_decay",)
    assert value_gate.flags == ("value_gate",)


@pytest.mark.parametrize("options", [{}, {"decay_per": "head"}, {"value_gate": True}, {"decay_per": "head", "value_gate": True}])
def test_the_query_of_a_case_knows_how_the_state_decays(options):
    case = GLA.case("float16", B=2, T=9, H=2, K=20, V=16, **options)
    arguments = arguments_of(GLA, dtype="float16", **options)
    assert GLA.bind(**arguments).query() == GLA.query(case, "cpu")


# Empty inputs are not an error


@pytest.mark.parametrize("lengths", [None, (0, 0)])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("variant", ["auto", "recurrent"])
def test_no_steps(variant, grad, lengths):
    """The state passes through unchanged, and so does its gradient."""
    sizes: dict[str, Any] = {"B": 1 if lengths else 2, "T": 0, "lengths": lengths}
    arguments = arguments_of(GLA, **sizes, initial_state=True, final_state=True, grad=grad)
    found = results(GLA, arguments, variant)
    assert found["o"].shape == (sizes["B"], 0, 2, 16)
    assert torch.equal(found["final_state"], arguments["initial_state"])
    assert found["final_state"].data_ptr() != arguments["initial_state"].data_ptr()
    if grad:
        assert found["grad initial_state"].all()
        assert found["grad q"].shape == (sizes["B"], 0, 2, 20)
    without = gla(**arguments | {"initial_state": None}, variant=variant)
    assert not without[1].any()
    assert without[0].requires_grad == grad


def test_no_steps_are_left_to_the_loop(prose):
    with prose.raises(VariantUnsupported):
        gla(**arguments_of(GLA, T=0), variant="chunked")


def test_a_batch_may_have_more_sequences_than_a_grid_has_rows():
    """A grid of the kernels has one dimension, in which it may be larger than the 65535 CTAs of the others."""
    pytest.importorskip("triton", reason="the kernels are Triton's")
    query = GLA.query(GLA.case(torch.float16, B=8192, T=1, H=1, K=128, V=128), "cuda:0", grad=False)
    assert [GLA.get(name).why_not(query) for name in ("fused", "stepwise")] == [None, None]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("empty", ["B", "H"])
@pytest.mark.parametrize("variant", ["auto", *pytorch_variants(GLA)])
def test_no_batch_and_no_heads(variant, empty, grad):
    arguments = arguments_of(GLA, **{empty: 0}, initial_state=True, final_state=True, grad=grad)
    found = results(GLA, arguments, variant)
    batch, heads = (0, 2) if empty == "B" else (2, 0)
    assert found["o"].shape == (batch, 9, heads, 16)
    assert found["final_state"].shape == (batch, heads, 20, 16)


# Results


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("variant", pytorch_variants(GLA))
def test_results_have_the_promised_dtypes_and_shapes(variant, dtype):
    arguments = arguments_of(GLA, dtype=dtype, initial_state=True, final_state=True)
    o, final = gla(**arguments, variant=variant)
    assert (o.dtype, o.shape) == (arguments["v"].dtype, arguments["v"].shape)
    assert (final.dtype, final.shape) == (torch.float32, (2, 2, 20, 16))
    turned = arguments | {"initial_state": arguments["initial_state"].mT, "state_v_first": True}
    assert gla(**turned, variant=variant)[1].shape == (2, 2, 16, 20)
    assert gla(**arguments | {"output_final_state": False}, variant=variant)[1] is None


@pytest.mark.parametrize("variant", pytorch_variants(GLA))
def test_offsets_may_be_int64(variant):
    arguments = arguments_of(GLA, B=1, lengths=(4, 0, 5), grad=True, final_state=True)
    wide = {**arguments, "cu_seqlens": arguments["cu_seqlens"].long()}
    assert_near(results(GLA, wide, variant), results(GLA, arguments, variant), 0)


# Functions with fla's names


each_name = pytest.mark.parametrize(
    "function",
    [chunk_gla, chunk_simple_gla, fused_recurrent_gla, fused_recurrent_simple_gla],
    ids=lambda function: function.__name__,
)
PER_HEAD = (chunk_simple_gla, fused_recurrent_simple_gla)
"""Functions with one decay per head. tests/ops/test_fla_names.py compares signatures with fla's."""


def test_gla_takes_only_keywords_after_the_log_decay():
    parameters = inspect.signature(gla).parameters.values()
    positional = [each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional == ["q", "k", "v", "g"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("variant", ["auto", "recurrent"])
def test_each_name_computes_the_operation(variant, packed):
    options = {"initial_state": True, "final_state": True, "scale": 0.3, "state_v_first": True, "value_gate": True}
    arguments = arguments_of(GLA, B=1, T=70, lengths=(3, 0, 67) if packed else None, **options)
    gv, per_head = arguments.pop("gv"), arguments["g"][..., 0]
    rest = {name: value for name, value in arguments.items() if name != "g"} | {"variant": variant}
    for found, expected in (
        (chunk_gla(g=arguments["g"], **rest), gla(g=arguments["g"], **rest)),
        (chunk_simple_gla(g=per_head, **rest), gla(g=per_head, **rest)),
        (chunk_simple_gla(**rest), gla(**rest)),
        (fused_recurrent_gla(gk=arguments["g"], **rest), gla(g=arguments["g"], **rest)),
        (fused_recurrent_gla(gk=arguments["g"], gv=gv, **rest), gla(g=arguments["g"], gv=gv, **rest)),
        (fused_recurrent_gla(gv=gv, **rest), gla(gv=gv, **rest)),
        (fused_recurrent_gla(**rest), gla(**rest)),
    ):
        assert found[1].shape == (3 if packed else 1, 2, 16, 20)
        assert_near(dict(enumerate(found)), dict(enumerate(expected)), 0)


def test_positional_arguments_have_flas_order():
    arguments = arguments_of(GLA, T=70, initial_state=True)
    q, k, v, g, state = (arguments[name] for name in ("q", "k", "v", "g", "initial_state"))
    expected = dict(enumerate(gla(q, k, v, g, scale=0.3, initial_state=state, output_final_state=True)))
    assert_near(dict(enumerate(chunk_gla(q, k, v, g, 0.3, state, True))), expected, 0)  # noqa: FBT003
    assert_near(dict(enumerate(fused_recurrent_gla(q, k, v, g, None, 0.3, state, True))), expected, 0)  # noqa: FBT003
    expected = dict(enumerate(gla(q, k, v, g[..., 0], scale=0.3, initial_state=state, output_final_state=True)))
    assert_near(dict(enumerate(chunk_simple_gla(q, k, v, g[..., 0], None, 0.3, state, True))), expected, 0)  # noqa: FBT003


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_constant_decay_per_head(dtype):
    arguments = arguments_of(GLA, T=70, dtype=dtype, final_state=True, decay_per="head")
    arguments.pop("g")
    gamma = torch.tensor([-0.02, -3.0], requires_grad=True)
    full = gamma.detach().expand(2, 70, 2).contiguous().requires_grad_()
    found, expected = chunk_simple_gla(g_gamma=gamma, **arguments), gla(g=full, **arguments)
    assert_near({n: x.detach() for n, x in enumerate(found)}, {n: x.detach() for n, x in enumerate(expected)}, 0)
    ours, theirs = (
        torch.autograd.grad(sum(x.float().square().sum() for x in outputs), [leaf])[0]
        for outputs, leaf in ((found, gamma), (expected, full))
    )
    assert_near({"gamma": ours}, {"gamma": theirs.sum((0, 1))}, 1e-5)
    assert_near(
        {"o": chunk_simple_gla(g_gamma=gamma.detach().bfloat16(), **arguments)[0]},
        {"o": gla(g=gamma.detach().bfloat16().float().expand(2, 70, 2), **arguments)[0]},
        0,
    )


def test_a_wrong_decay_per_head_is_named(prose):
    q, k, v = (arguments_of(GLA)[name] for name in "qkv")
    with prose.raises(ArgumentError, match="g_gamma"):
        chunk_simple_gla(q, k, v, g=-torch.ones(2, 9, 2), g_gamma=-torch.ones(2))
    for value, error, message in (
        (-torch.ones(3), ShapeError, "g_gamma"),
        (-torch.ones(2, 2), ShapeError, "g_gamma"),
        (-torch.ones(2, device="meta"), DeviceError, "g_gamma"),
        (-torch.ones(2, dtype=torch.int32), DTypeError, "g_gamma"),
        (torch.tensor([-1.0, 0.5]), ValueRangeError, "g_gamma"),
        (-0.5, ArgumentError, "g_gamma"),
    ):
        with prose.raises(error, match=message):
            chunk_simple_gla(q, k, v, g_gamma=value)


@each_name
def test_errors_name_the_argument_as_the_caller_does(function, refused):
    gate = {"gk": "gk"}.get(next(name for name in inspect.signature(function).parameters if name in ("g", "gk")), "g")
    wrong = -torch.ones((2, 9, 2, 20) if function in PER_HEAD else (2, 9, 2))
    refused(ShapeError, gate, function, **{gate: wrong})
    right = wrong[..., 0].clone() if function in PER_HEAD else -torch.ones(2, 9, 2, 20)
    right[0, 0, 0] = 0.5
    refused(ValueRangeError, rf"^{gate} holds 0.5", function, **{gate: right})


def test_chunk_gla_needs_a_log_decay(refused):
    refused(ArgumentError, "g", chunk_gla, g=None)


def each_sequence_flipped(x: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """Return x ``[1, T, ...]``, or ``[B, T, ...]`` with one pair of bounds, with the steps of every sequence reversed."""
    return torch.cat([x[:, start:end].flip(1) for start, end in itertools.pairwise(bounds)], 1)


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("lengths", [None, (30, 0, 5, 35)])
def test_reverse_goes_through_every_sequence_from_its_end(lengths, state_v_first):
    arguments = arguments_of(
        GLA, B=1 if lengths else 2, T=70, lengths=lengths, value_gate=True, state_v_first=state_v_first,
        initial_state=True, final_state=True, grad=True,
    )  # fmt: skip
    bounds = [0, *itertools.accumulate(lengths or (70,))]
    steps = ("q", "k", "v", "g", "gv")
    flipped = {name: each_sequence_flipped(arguments[name], bounds) if name in steps else x for name, x in arguments.items()}
    o, expected_state = gla(**flipped)
    expected = (each_sequence_flipped(o, bounds), expected_state)
    named = {"gk" if name == "g" else name: value for name, value in arguments.items()}
    found = fused_recurrent_gla(**named, reverse=True)
    assert_near({n: x.detach() for n, x in enumerate(found)}, {n: x.detach() for n, x in enumerate(expected)}, 1e-6)
    leaves = [arguments[name] for name in (*steps, "initial_state")]
    ours, theirs = (dict(enumerate(torch.autograd.grad(sum(x.square().sum() for x in y), leaves))) for y in (found, expected))
    assert_near(ours, theirs, 1e-5)
    assert not torch.allclose(found[0], fused_recurrent_gla(**named)[0])


def test_older_and_additional_keywords_of_fla(prose, refused):
    arguments = arguments_of(GLA, B=1, lengths=(4, 5), final_state=True)
    per_head = arguments | {"g": arguments["g"][..., 0]}
    expected = dict(enumerate(chunk_simple_gla(**per_head)))
    offsets = arguments["cu_seqlens"]
    for extra in ({"chunk_size": 32}, {"chunk_size": None}, {"head_first": False}, {"cu_seqlens_cpu": offsets}):
        assert_near(dict(enumerate(chunk_simple_gla(**per_head, **extra))), expected, 0)
    assert_near(dict(enumerate(chunk_gla(**arguments, cu_seqlens_cpu=offsets))), dict(enumerate(gla(**arguments))), 0)
    per_head.pop("state_v_first")
    with prose.warns(DeprecationWarning, match="transpose_state_layout") as caught:
        turned = chunk_simple_gla(**per_head, transpose_state_layout=True)
    assert caught[0].filename == __file__
    assert turned[1].shape == (2, 2, 16, 20)
    for extra, error, message in (
        ({"chunk_size": 48}, ValueRangeError, "chunk_size"),
        ({"chunk_size": 0}, ValueRangeError, r"^chunk_size is 0; "),
        ({"head_first": True}, ArgumentError, "head_first"),
        ({"chunk_sice": 32}, ArgumentError, "'chunk_sice'"),
        ({"transpose_state_layout": True, "state_v_first": True}, ArgumentError, "transpose_state_layout"),
    ):
        with prose.raises(error, match=message):
            chunk_simple_gla(**per_head, **extra)
    with prose.raises(ArgumentError, match="'chunk_size'"):
        fused_recurrent_gla(*(arguments[name] for name in "qkv"), chunk_size=32)
    for function in (chunk_gla, chunk_simple_gla):
        refused(ArgumentError, "cu_seqlens_cpu", function, cu_seqlens_cpu=offsets)


@each_name
def test_flas_names_under_autocast(function):
    arguments = arguments_of(GLA, T=20)
    gate = "gk" if function is fused_recurrent_gla else "g"
    g = arguments["g"][..., 0] if function in PER_HEAD else arguments["g"]
    q, k, v = (arguments[name] for name in "qkv")
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = function(q, k, v, **{gate: g})
    low = (x.bfloat16() for x in (q, k, v))
    assert torch.equal(o, function(*low, **{gate: g})[0])
    assert o.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("given", "kept"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)]
)
def test_autocast_keeps_log_decays_of_its_own_dtype(given, kept):
    """A model's gate makes such log-decays. They stay in autocast's dtype, so that kernels for 16-bit log-decays may run."""
    arguments = arguments_of(GLA, T=20)
    q, k, v, g = (arguments[name] for name in "qkvg")
    with torch.autocast("cpu", torch.bfloat16):
        found = under_autocast(q, k, v, g.to(given), None)
    assert [x.dtype for x in found[:3]] == [torch.bfloat16] * 3
    assert found[3].dtype is kept
    assert found[4] is None
