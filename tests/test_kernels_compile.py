"""Every kernel of every variant compiles for every architecture: no spills, and the matrix instructions that were meant."""

from __future__ import annotations

import os

import pytest

from onelaunch.operation import find_operation, operations
from onelaunch.workbench.inspection import CHECKED, inspect_build

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BUILDS = [
    pytest.param(build, architecture, id=f"{operation.name}-{variant.name}-{build.name}-{architecture}")
    for operation in operations()
    for variant in operation.variants.values()
    for architecture in CHECKED
    for build in ([] if INTERPRETED else variant.builds(architecture))
]


@pytest.mark.parametrize(("build", "architecture"), BUILDS)
def test_a_kernel_compiles_without_problems(build, architecture):
    found = inspect_build(build, architecture)
    assert found.ok, found.problems


@pytest.mark.parametrize("operation", ["gated_scan", "linear_rnn"])
@pytest.mark.parametrize("architecture", CHECKED)
def test_the_kernels_are_there_to_be_checked(operation, architecture):
    """A variant tagged as Triton's that lists no kernels would slip through unchecked."""
    listed = {variant.name: variant.builds(architecture) for variant in find_operation(operation).variants.values()}
    assert any(listed.values())
    if operation == "linear_rnn":
        assert listed["fused_chunked"]
        assert any(build.matrix for build in listed["fused_chunked"])
