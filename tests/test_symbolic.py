"""Tests of decisions about calls with symbolic sizes: the ranges in which they hold, and their guards."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)

from onelaunch.dispatch import decided, note_sizes, within
from onelaunch.errors import VariantUnsupported


def symbolic(*hints: int):
    """Return symbolic sizes with these hints, and their environment."""
    environment = ShapeEnv()
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(hints))
    fake = FakeTensorMode(shape_env=environment).from_tensor(torch.empty(hints), symbolic_context=dynamic)
    return tuple(fake.shape), environment


def ranges(decide, *hints: int) -> list[tuple[int, int | None]]:
    """Return the ranges in which a decision holds, all sizes symbolic; ``None`` for a range without an end."""
    sizes, _ = symbolic(*hints)
    note_sizes(sizes)
    decision = decided(decide)
    assert within(sizes, decision) == decide(hints)
    return [(int(low or 0), int(high) if high else None) for low, high in (each.split(":") for each in decision.split(" ")[1:])]


def test_known_sizes_have_no_ranges():
    note_sizes((3, 1000))
    assert decided(lambda sizes: f"v{sizes[0]}") == "v3"
    assert within((3, 1000), "v3") == "v3"


@pytest.mark.parametrize("hint", [17, 100, 999, 1000])
def test_a_range_ends_where_the_decision_changes(hint):
    assert ranges(lambda sizes: "few" if sizes[0] <= 16 else "some" if sizes[0] <= 1000 else "many", hint) == [(17, 1000)]


def test_a_decision_that_never_changes_has_no_ends():
    assert ranges(lambda sizes: "any", 5, 70) == [(0, None), (0, None)]


def test_a_limit_of_a_product_holds_at_the_ends_of_both_ranges():
    (low, batch), (_, length) = ranges(lambda sizes: "small" if sizes[0] * sizes[1] <= 1 << 31 else "large", 4, 2048)
    assert low == 0
    assert batch * length <= 1 << 31
    assert batch >= 64
    assert length >= 1 << 15


def test_sizes_that_a_variant_refuses_are_outside():
    def decide(sizes):
        if sizes[0] < 64:
            raise VariantUnsupported("scan", "wide", reason="needs 64 steps", instead=())
        return "wide"

    assert ranges(decide, 64) == [(64, None)]
    note_sizes((63,))
    with pytest.raises(VariantUnsupported):
        decided(decide)


def test_a_decision_by_divisibility_holds_for_the_hint_alone():
    assert ranges(lambda sizes: "whole" if sizes[0] % 64 == 0 else "padded", 128) == [(128, 128)]


def test_guards_are_those_of_the_range():
    (size,), environment = symbolic(100)
    note_sizes((size,))
    within((size,), decided(lambda sizes: str(16 < sizes[0] <= 1000)))
    found = environment.bound_sympy(size.node.expr)
    assert (found.lower, found.upper) == (17, 1000)
    assert not environment.replacements


def test_a_size_that_depends_on_data_is_not_decided():
    size = ShapeEnv().create_unbacked_symint()
    with pytest.raises(GuardOnDataDependentSymNode):
        note_sizes((size,))


def constant() -> str:
    return decided(lambda sizes: "few" if sizes[0] <= 32 else "many")


# As torch.compiler.assume_constant_result: Dynamo calls it while it traces, and takes the string as a constant.
vars(constant)["_dynamo_marked_constant"] = True


def test_dynamo_compiles_once_for_each_decision():
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")

    def function(x: torch.Tensor) -> torch.Tensor:
        note_sizes(x.shape)
        return x + 1 if within(x.shape, constant()) == "few" else x + 2

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for rows, added, compilations in ((4, 1, 1), (20, 1, 1), (100, 2, 2), (5000, 2, 2), (30, 1, 2)):
        assert torch.equal(compiled(torch.zeros(rows, 20)), torch.full((rows, 20), float(added)))
        assert counter.frame_count == compilations
