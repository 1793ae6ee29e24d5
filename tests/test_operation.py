"""Tests of the registry: facts of an operation and its variants, errors for wrong names and cases, costs, copies, and caches.

The fixture ``scale`` registers the toy operation ``scale(x, factor=2.0)`` of ``tests/toys.py`` for one test. It has the
variants ``loop``, ``vector`` (preferred, for at most 1000 elements), ``no_backward`` and ``elsewhere``, which no call can use.
``prose`` and ``prose.raises`` compare wording with the test's entries in ``tests/snapshots/prose.txt``. A test fails if it does
not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``make_scale`` registers ``scale``. A test marked ``thorough`` does not run in ``make test``.
"""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys

import pytest
import torch

from onelaunch.errors import ArgumentError, UnknownOperation, UnknownVariant
from onelaunch.launch.build import KernelBuild
from onelaunch.operation import Cost, Query, find_operation, names_of, operation, operations, parse_dtype, remembered
from onelaunch.workbench.verify.calls import Candidate, Inputs
from tests.toys import make_scale


def test_calling_an_operation_is_calling_the_function(scale):
    x = torch.arange(4.0)
    assert torch.equal(scale(x, 2.0), 2 * x)
    assert torch.equal(scale(x, 2.0, variant="loop"), 2 * x)


def test_an_operation_keeps_the_name_and_docstring_of_its_function(scale):
    assert scale.name == "scale"
    assert scale.__doc__ == "Multiply a vector by a number."
    assert repr(scale) == "<operation scale: loop, vector, no_backward, elsewhere>"


def test_a_registered_operation_is_found_and_listed(scale):
    assert find_operation("scale") is scale
    assert scale in list(operations())


def test_the_operations_of_the_package_are_registered():
    assert {"gated_scan", "gla", "linear_rnn"} <= {found.name for found in operations()}


def test_an_unknown_operation_suggests_the_nearest(scale, prose):
    with prose.raises(UnknownOperation, match="'scael'"):
        find_operation("scael")


def test_two_operations_cannot_share_a_name(scale, prose):
    with prose.raises(ArgumentError, match="'scale'"):
        make_scale()


def test_two_variants_cannot_share_a_name(scale, prose):
    with prose.raises(ArgumentError, match="'loop'"):
        scale.variant("loop")(lambda call: call)


def test_a_variant_has_tags_and_a_summary_from_its_docstring(scale):
    loop = scale.get("loop")
    assert loop.tags == {"launches": None, "gemm": "none"}
    assert loop.launches is None
    assert scale.get("vector").launches == 1
    assert loop.summary == "Multiply one element after the other."
    assert repr(loop) == "<variant scale.loop>"


def test_an_unknown_variant_suggests_the_nearest(scale, prose):
    with prose.raises(UnknownVariant, match="'vectro'"):
        scale.get("vectro")


@pytest.mark.parametrize(
    ("variant", "query", "reason"),
    [
        ("loop", Query("scale", "cpu", torch.float32, (8,)), None),
        ("elsewhere", Query("scale", "cuda:0", torch.float32, (8,)), "needs a quantum computer"),
        ("elsewhere", Query("scale", "quantum", torch.float32, (8,)), None),
        ("vector", Query("scale", "cpu", torch.float32, (1001,)), "takes at most 1000 elements"),
        ("no_backward", Query("scale", "cpu", torch.float32, (8,), grad=True), "has no backward pass"),
        ("no_backward", Query("scale", "cpu", torch.float32, (8,)), None),
    ],
)
def test_a_variant_says_why_it_cannot_run(scale, variant, query, reason):
    assert scale.get(variant).why_not(query) == reason


def test_the_first_predicate_that_refuses_gives_the_reason(scale):
    @scale.get("elsewhere").supports
    def _(query):
        return "needs more patience"

    elsewhere = scale.get("elsewhere")
    assert elsewhere.why_not(Query("scale", "cpu", torch.float32, (8,))) == "needs a quantum computer"
    assert elsewhere.why_not(Query("scale", "quantum", torch.float32, (8,))) == "needs more patience"


def test_variants_for_a_device(scale):
    """The device type ``quantum`` is made up, so that one variant runs nowhere else."""
    assert scale.variants_for("cpu") == ["loop", "vector", "no_backward"]
    assert scale.variants_for("quantum") == ["loop", "vector", "no_backward", "elsewhere"]


def test_a_variant_lists_its_kernels_for_an_architecture(scale):
    vector = scale.get("vector")
    assert vector.builds("sm_90a") == []

    @vector.kernels
    def _(architecture):
        yield KernelBuild(f"scale_{architecture}", None, {}, {})

    assert [build.name for build in vector.builds("sm_90a")] == ["scale_sm_90a"]


def test_a_variants_builds_function_chooses_its_architectures(scale):
    @scale.variant("listed", architectures=("hopper",))
    def listed(call):
        return (call.x,)

    @listed.kernels
    def _(architecture):
        return [KernelBuild(f"scale_{architecture}", None, {}, {})]

    assert [build.name for build in listed.builds("sm_90a")] == ["scale_sm_90a"]


def test_names_of_results_are_fixed_or_depend_on_the_call(scale):
    assert names_of(scale.outputs, {"x": None}) == ("y",)

    def names(arguments):
        return tuple(f"part{index}" for index in range(arguments["parts"]))

    # A candidate is a call that verification judges by the names of its results.
    cut = Candidate("cut", lambda x, parts: x.chunk(parts), names)
    for parts in (2, 3):
        answer = cut(Inputs({"x": torch.arange(6.0), "parts": parts}))
        assert list(answer) == [f"part{index}" for index in range(parts)]
        assert all(torch.equal(part, torch.arange(6.0).chunk(parts)[index]) for index, part in enumerate(answer.values()))


def test_a_query_knows_its_device_type_and_direction():
    query = Query("scale", "cuda:1", torch.float16, (8,))
    assert (query.device_type, query.direction) == ("cuda", "forward")
    assert query._replace(grad=True).direction == "forward_backward"


def test_a_case_is_made_of_sizes_and_options(scale):
    case = scale.case("float16", N=8, decay="strong")
    assert (case.sizes, case.dtype, case.options) == ({"N": 8}, torch.float16, {"decay": "strong"})
    assert str(case) == "N8-float16-decay=strong"
    assert str(scale.case(torch.float32, name="small", N=8)) == "small"
    assert scale.option(case, "decay") == "strong"
    assert scale.option(scale.case("float32", N=8), "decay") == "model"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"N": -1},
        {"N": 2.5},
        {"N": True},
        {"N": 8, "decai": "strong"},
    ],
)
def test_a_wrong_case_is_refused(scale, given, prose):
    with pytest.raises(ArgumentError) as caught:
        scale.case("float16", **given)
    prose(caught.value)


def test_a_dtype_is_read_from_its_name(prose):
    assert parse_dtype("bfloat16") is parse_dtype(torch.bfloat16) is torch.bfloat16
    with prose.raises(ArgumentError, match="'flaot16'"):
        parse_dtype("flaot16")
    with prose.raises(ArgumentError):
        parse_dtype("int8")


def test_the_same_seed_makes_the_same_inputs(scale):
    case = scale.case("float32", N=16)
    first, again, other = (scale.make_inputs(case, torch.device("cpu"), seed) for seed in (1, 1, 2))
    assert first.differentiable == ("x",)
    assert torch.equal(first.arguments["x"], again.arguments["x"])
    assert not torch.equal(first.arguments["x"], other.arguments["x"])


def test_oracle_and_cost_are_computed_through_the_operation(scale):
    (y,) = scale.reference(x=torch.ones(3, dtype=torch.float64), factor=3.0)
    assert y.tolist() == [3.0, 3.0, 3.0]
    assert scale.cost(scale.case("float16", N=10)) == Cost(10, 40, 1)  # FLOPs, bytes, launches
    assert scale.cost(scale.case("float32", N=10), scale.get("loop")).launches is None


def test_costs_add_up_and_an_unknown_number_of_launches_stays_unknown():
    assert Cost(1, 2, 3) + Cost(10, 20, 30) == Cost(11, 22, 33)
    assert (Cost(1, 2, None) + Cost(10, 20, 30)).launches is None
    assert Cost(1, 2, written=1) + Cost(10, 20, written=5) == Cost(11, 22, written=6)
    assert (Cost(1, 2) + Cost(10, 20, written=5)).written is None


def test_a_cost_of_zero_is_valid():
    assert Cost(0, 0, 0, written=0) + Cost(0, 0, 0, written=0) == Cost(0, 0, 0, written=0)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("flops", {"flops": -1}),
        ("bytes", {"bytes": -512}),
        ("bytes", {"bytes": math.nan}),
        ("bytes", {"bytes": math.inf}),
        ("bytes", {"bytes": None}),
        ("flops", {"flops": "7"}),
        ("launches", {"launches": -1}),
        ("written", {"written": -1}),
        ("written", {"written": 9}),
    ],
)
def test_an_impossible_cost_is_refused_by_field(field, wrong, prose):
    with prose.raises(ArgumentError, match=field) as caught:
        Cost(**{"flops": 1, "bytes": 8, "launches": 1, **wrong})
    assert caught.value.field == field
    assert isinstance(caught.value, ValueError)


def test_an_operation_without_a_part_says_which_is_missing(scale, prose):
    scale._oracle = None
    with prose.raises(NotImplementedError, match="'scale'"):
        scale.reference(x=torch.ones(1))


def test_a_control_is_registered_separately_from_the_variants(scale):
    @scale.control("copy", oracle=lambda x, factor: x, cost=lambda case: Cost(0, 8, 1))
    def copy(call):
        """Copy the input."""
        return call.x.clone()

    assert scale.controls["copy"].summary == "Copy the input."
    assert "copy" not in scale.variants
    assert math.isclose(scale.controls["copy"].cost(scale.case("float16", N=1)).bytes, 8)


@pytest.mark.thorough
def test_modules_of_the_package_are_imported_on_access():
    code = """
import onelaunch, sys
print("onelaunch.ops" in sys.modules, onelaunch.errors.ShapeError.__name__, onelaunch.ops.gla.name, "ops" in dir(onelaunch))
print(hasattr(onelaunch, "nothing"), hasattr(onelaunch, "_private"))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "False ShapeError gla True\nFalse False\n"


@pytest.mark.parametrize("name", ["../evil", "<script>", "", "1st", "x" * 65, "a b", "a\nb", None, "auto"])
def test_a_variants_name_must_be_safe_for_files_and_reports(scale, name, prose):
    with prose.raises(ArgumentError):
        scale.variant(name)(lambda call: (call.x,))
    with prose.raises(ArgumentError):
        scale.control(name, oracle=lambda x, factor: x, cost=lambda case: Cost(0, 0))(lambda call: call.x)


@pytest.mark.parametrize("wrong", [{"dimensions": ("B", "B")}, {"dimensions": "BT"}, {"outputs": "y"}, {"bind": None}], ids=str)
def test_an_operation_with_wrong_parts_is_refused_at_its_definition(scale, wrong, prose):
    def broken():
        """Stand for an operation."""

    facts = {"dimensions": ("N",), "outputs": ("y",), "bind": print, "options": {}, "defaults": {}}
    with prose.raises(ArgumentError, match=next(iter(wrong))):
        operation(**facts | wrong)(broken)


def test_an_operation_is_copied_and_pickled_by_name():
    """A model that holds an operation is deep-copied by wrappers of optimizers, and pickled by ``torch.save`` and ``spawn``."""
    gla = find_operation("gla")
    module = torch.nn.Linear(2, 2)
    module.op, module.variant = gla, gla.get("chunked")
    again = copy.deepcopy(module)
    assert again.op is gla
    assert again.variant is gla.get("chunked")
    stored = pickle.dumps((gla, gla.get("chunked"), gla.variants["recurrent"]))
    assert pickle.loads(stored) == (gla, gla.get("chunked"), gla.get("recurrent"))
    assert copy.copy(gla) is gla


@pytest.mark.thorough
def test_a_pickled_operation_is_found_in_a_process_that_has_not_imported_it(tmp_path):
    stored = tmp_path / "operation.pickle"
    stored.write_bytes(pickle.dumps(find_operation("swiglu")))
    code = f"import pickle, pathlib; print(pickle.loads(pathlib.Path({str(stored)!r}).read_bytes()).name)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "swiglu\n"


@pytest.mark.parametrize("error", [KeyError("size"), SystemExit(5), ValueError("\x1b[2J")], ids=["raise", "exit", "escape"])
def test_a_predicate_that_fails_means_that_the_variant_cannot_run(scale, error):
    @scale.get("vector").supports
    def _(query):
        raise error

    query = Query("scale", "cpu", torch.float32, (8,))
    assert "\x1b" not in scale.get("vector").why_not(query)
    assert f"raised {type(error).__name__}" in scale.get("vector").why_not(query)
    assert scale(torch.ones(2)).tolist() == [2.0, 2.0]  # the next variant computes it


@pytest.mark.parametrize("answer", [True, "", 0])
def test_a_predicates_answer_of_a_wrong_type_is_refused(scale, answer):
    scale.get("vector").supports(lambda query: answer)
    assert f"returned {answer!r}" in scale.get("vector").why_not(Query("scale", "cpu", torch.float32, (8,)))


def test_a_cache_keeps_results_and_not_errors():
    asked = []

    @remembered
    def half(number: int) -> int:
        """Return half of an even number."""
        asked.append(number)
        if number % 2:
            raise ValueError(f"{number} is odd")
        return number // 2

    assert [half(4), half(4), half(6)] == [2, 2, 3]
    for _ in range(2):
        with pytest.raises(ValueError, match="5 is odd"):
            half(5)
    assert asked == [4, 6, 5, 5]
    assert half.__doc__ == "Return half of an even number."


def test_torch_compile_traces_cached_functions(recwarn):
    """Dynamo warns about caches that it traces through, and symbolic sizes are not hashable."""
    torch.compiler.reset()

    @remembered
    def doubled(size: int) -> int:
        return 2 * size

    compiled = torch.compile(lambda x: x * doubled(x.shape[0]), backend="eager", fullgraph=True, dynamic=True)
    for size in (3, 4, 5):
        assert torch.equal(compiled(torch.ones(size)), torch.full((size,), 2.0 * size))
    assert not recwarn.list
