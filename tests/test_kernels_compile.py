"""Tests that every kernel of every variant compiles without spills and with the intended matrix instructions.

The kernels in the table ``SPILLS`` are the exceptions. By default each kernel is compiled in one configuration for two
architectures. With ``--architectures=all``, as in continuous integration, it is compiled for all architectures, and with
``--architectures=every`` in every configuration.

``keep_inspections`` caches what compilers and the disassembler return, if a folder is named for it. A test marked ``extra``
counts in no budget of time.
"""

from __future__ import annotations

import functools
import itertools
import os

import pytest

from onelaunch import cuda
from onelaunch.device.architectures import CHECKED
from onelaunch.launch.build import CudaBuild
from onelaunch.operation import find_operation, operations
from onelaunch.workbench.inspection import inspect_build
from tests.kept import keep_inspections

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Flag that Triton's interpreter runs kernels, which then cannot be compiled. ``conftest.py`` leaves this file out in such runs,
unless the command names it."""

ARCHITECTURES = {"one": ("sm_90a",), "two": ("sm_90a", "sm_80"), "all": CHECKED, "every": CHECKED}
"""Architectures that every kernel is compiled for, by the value of the option ``--architectures``.

``tests/launch/test_launch.py`` uses them too.
"""


KEPT_AS_A_LESSON = "experiment 039's loop over chunks holds the whole state in registers: an ablation, kept as measured"
SPILLS = {
    "gla-sequential-forward": (CHECKED, KEPT_AS_A_LESSON),
    "gla-pipelined-forward": (CHECKED, KEPT_AS_A_LESSON),
    "gla-fused-gradients, decay per head": (
        ("sm_80", "sm_90a", "gfx942"),
        "float32 states in three parts; smaller tiles spill as well (12 accesses on gfx942)",
    ),
    "gla-fused-gradients, decay per channel": (("gfx942",), "6 accesses; its cause was not looked into"),
    "gla-fused-chunk_state, decay per head (1)": (("sm_100a",), "16 accesses in bfloat16; its cause was not looked into"),
    "gla-fused-chunk_state, decay per head (2)": (("sm_100a",), "80 accesses with float32 states; its cause was not looked into"),
    "gla-fused-chunk_state, decay per head (3)": (("sm_100a",), "4 accesses with float32 states; its cause was not looked into"),
    "gla-fused-gradients, 4 heads of q and k": (
        ("sm_80", "sm_90a", "gfx942"),
        "as with all heads: float32 states in three parts (82 accesses on sm_90a, 48 on sm_80, 11 on gfx942)",
    ),
    "gla-fused-gradients, 4 heads of k, v and g": (("gfx942",), "17 accesses; its cause was not looked into"),
    "gla-fused-chunk_state, 4 heads of q and k (1)": (("sm_100a",), "16 accesses, as with all heads and a decay per head"),
    "gla-fused-chunk_state, 4 heads of q and k (2)": (("sm_100a",), "80 accesses, as with all heads and a decay per head"),
    "gla-fused-chunk_state, 4 heads of q and k (3)": (("sm_100a",), "4 accesses, as with all heads and a decay per head"),
    "gla-fused-chunk_state, 4 heads of k, v and g": (("gfx942",), "9 accesses; its cause was not looked into"),
    "gla-hopper_tf32-chunk_state, K = V = 128, decay per channel (1)": (("sm_90a",), "22 accesses, 20 with float16 inputs"),
    "gla-hopper_tf32-chunk_state, K = V = 128, decay per channel, states, T whole (1)": (
        ("sm_90a",),
        "37 accesses, 20 with float16 inputs, whose outputs leave by TMA",
    ),
    "gla-hopper_tf32-chunk_state, K = V = 128, decay per channel, states, T whole (3)": (
        ("sm_90a",),
        "32 accesses, 39 with float16 inputs",
    ),
    "gla-hopper_tf32-gradients, K = V = 128, decay per channel": (("sm_90a",), "4 accesses, as with float16 inputs"),
    "gla-hopper_tf32-chunk_state, K = V = 256, decay per head, states, T in parts (1)": (
        ("sm_90a",),
        "10 accesses; their cause was not looked into",
    ),
    "gla-hopper_tf32-chunk_state, K = V = 256, decay per head, states, T in parts (3)": (
        ("sm_90a",),
        "2 accesses; their cause was not looked into",
    ),
    "projections-wide_activated-activation_gradients, heads of 100, M = 4095, kept": (
        ("sm_80",),
        "2 accesses; its cause was not looked into",
    ),
    "rms_norm-fused-long_rows_gradients, float32 rows of 16384, rstd kept": (
        ("sm_80", "sm_90a", "sm_100a"),
        "8 accesses (4 on sm_100a): a thread holds 32 elements of two rows beside sums that go through it",
    ),
}
"""Kernels known to spill, with the architectures and the reason.

An access is a load or store of local memory; on gfx942 it is a spilled register. A kernel that no longer spills fails its test,
so that it is removed here.
"""

SEEN = set()
"""Architectures and kernels that a test of this process has compiled. Other operations with the same kernels skip them."""


def distinct_builds(operation, architecture, seen, variants=None, *, every):
    """Return the kernels of an operation, each in one configuration, by the name of the first variant that launches it.

    Args:
        operation: Operation whose variants launch the kernels.
        architecture: Architecture to compile for.
        seen: Architectures and kernels to skip. Those found are added.
        variants: Variants of the operation, by default all.
        every: Whether to take every configuration of a kernel. Otherwise one is taken of those whose names differ only after a
            comma, as sizes do.
    """
    found = {}
    for variant in operation.variants.values() if variants is None else variants:
        for build in variant.builds(architecture):
            key = (architecture, build.key if every else kernel_of(build))
            if key not in seen:
                seen.add(key)
                name = f"{operation.name}-{variant.name}-{build.name}"
                assert name not in found, name
                found[name] = build
    return found


def kernel_of(build) -> tuple[object, str]:
    """Return the part of a build's identity that all configurations of a kernel share."""
    kernel = (build.source.name, build.source.entry) if isinstance(build, CudaBuild) else build.kernel.fn
    return kernel, build.name.split(",")[0]


@functools.cache
def first_builds(architecture: str) -> dict[str, dict[str, object]]:
    """Return the kernels of all operations, each in one configuration, by the operation and variant that launches it first.

    The result is the same in every process that runs tests, so that a kernel is compiled once, and under one name.
    """
    seen, found = set(), {}
    for operation in operations():
        for variant in operation.variants.values():
            found[f"{operation.name}-{variant.name}"] = distinct_builds(operation, architecture, seen, [variant], every=False)
    return found


def first_builds_of(name: str, architecture: str) -> dict[str, object]:
    """Return the kernels that a variant, ``name``, is the first to launch."""
    return first_builds(architecture)[name]


def pytest_generate_tests(metafunc):
    """Make one test per operation or variant and architecture, or one per configuration, so that these compile in parallel.

    Finding all kernels takes seconds in each process that collects tests. Therefore it is done at collection only in the last
    case.
    """
    if "builds" not in metafunc.fixturenames:
        return
    chosen, cases, seen = metafunc.config.getoption("architectures"), [], set()
    for architecture, operation in [] if INTERPRETED else itertools.product(ARCHITECTURES[chosen], operations()):
        if chosen == "every":
            for name, build in distinct_builds(operation, architecture, seen, every=True).items():
                make = functools.partial(dict, [(name, build)])
                cases.append(pytest.param(make, architecture, id=f"{name}-{architecture}", marks=pytest.mark.extra))
        elif chosen == "all":
            for variant in operation.variants.values():
                if variant._kernels is None and not variant.listed_examples():
                    continue  # launches no kernels of its own
                name = f"{operation.name}-{variant.name}"
                make = functools.partial(first_builds_of, name, architecture)
                cases.append(pytest.param(make, architecture, id=f"{name}-{architecture}", marks=pytest.mark.extra))
        else:
            make = functools.partial(distinct_builds, operation, architecture, SEEN, every=False)
            cases.append(pytest.param(make, architecture, id=f"{operation.name}-{architecture}"))
    metafunc.parametrize(("builds", "architecture"), cases)


def test_kernels_compile_without_problems(builds, architecture, monkeypatch):
    keep_inspections(monkeypatch)
    kernels, problems, left_out = builds(), {}, []
    for name, build in kernels.items():
        if isinstance(build, CudaBuild) and (reason := cuda.missing()):
            left_out.append(reason)
            continue
        found = inspect_build(build, architecture)  # lists spills, and matrix instructions that are missing or of the wrong kind
        spills = bool(found.problems) and all(problem.startswith("spills") for problem in found.problems)
        if architecture in SPILLS.get(name, ((), ""))[0]:
            if not spills:
                problems[name] = found.problems or "it no longer spills: take it out of the table"
        elif not found.ok:
            problems[name] = found.problems
    assert not problems, "\n".join(f"{name}: {problem}" for name, problem in problems.items())
    if kernels and len(left_out) == len(kernels):
        pytest.skip(left_out[0])


def test_no_architecture_is_forgotten():
    assert set(ARCHITECTURES["all"]) == set(CHECKED)
    assert set(ARCHITECTURES["one"]) < set(ARCHITECTURES["two"]) < set(CHECKED)


@pytest.mark.parametrize("architecture", CHECKED)
def test_the_single_launch_kernel_keeps_the_matrix_instructions(architecture):
    """Some build of ``fused_chunked`` demands matrix instructions. Otherwise no test would notice that they are missing."""
    assert any(build.matrix for build in find_operation("linear_rnn").get("fused_chunked").builds(architecture))
