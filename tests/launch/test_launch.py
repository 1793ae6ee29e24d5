"""Tests that calls launch the kernels that CI compiles and ``inspect`` shows, for every variant of every operation.

Kernels are found by recording: an example call of a variant runs on fake tensors of a pretended GPU, and its launches are listed
instead of executed (:func:`record`). :func:`observe` lists launches that are also executed.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
import torch

import onelaunch
from onelaunch.device.architectures import CHECKED, find_architecture
from onelaunch.device.hardware import capability
from onelaunch.launch.build import build_of
from onelaunch.launch.imitation import imitate, observe, record
from onelaunch.launch.launch import CudaLaunch, Launch
from onelaunch.operation import operations
from onelaunch.operation.examples import recorded_launches
from tests.test_kernels_compile import ARCHITECTURES

SOURCES = Path(onelaunch.__file__).parent

pytest.importorskip("triton")


def our_own():
    """Return the operations of this package. Other tests register toy operations."""
    return [operation for operation in operations() if operation.__module__.startswith("onelaunch.")]


def with_examples():
    """Return the variants that list example calls, from which their kernels are recorded."""
    return [variant for operation in our_own() for variant in operation.variants.values() if variant.listed_examples()]


def own_variants():
    """Return the variants with kernels of our own: they declare their launches, and need no package of another library."""
    return [
        variant
        for operation in our_own()
        for variant in operation.variants.values()
        if variant.launches is not None and variant.capabilities.requires is None
    ]


@pytest.mark.parametrize("variant", own_variants(), ids=repr)
def test_every_variant_with_own_kernels_lists_them(variant, pytestconfig):
    # A variant that names no architectures has kernels for all that are checked.
    made_for = variant.capabilities.architectures or CHECKED
    for architecture in ARCHITECTURES[pytestconfig.getoption("architectures")]:
        assert bool(variant.builds(architecture)) == (architecture in made_for)


@pytest.mark.parametrize("variant", with_examples(), ids=repr)
def test_a_recorded_call_launches_no_more_kernels_than_its_variant_declares(variant):
    architecture = (variant.capabilities.architectures or ("sm_90a",))[0]
    examples = [example for example in variant.listed_examples() if architecture in (example.architectures or (architecture,))]
    for example in examples:
        launches = recorded_launches(variant, example, architecture)
        assert launches
        if example.direction == "forward":  # the declared launches include PyTorch's own products
            assert len(launches) <= variant.capabilities.launches


def launching_calls(path):
    """Return lines of a module that launch a Triton kernel, ``kernel[grid](...)``, or load a CUDA C++ kernel."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Subscript) and ast.unparse(function.value).endswith("_kernel"):
            yield node.lineno
        if isinstance(function, ast.Attribute) and ast.unparse(function) in ("cuda.load", "module.load"):
            yield node.lineno


def test_kernels_are_launched_in_one_place_only():
    launched = {
        str(path.relative_to(SOURCES)): list(launching_calls(path))
        for path in SOURCES.rglob("*.py")
        if path.relative_to(SOURCES).parts[0] not in ("launch", "cuda", "device")  # measured peaks are in a layer below launches
    }
    assert {path: lines for path, lines in launched.items() if lines} == {}


def test_the_search_finds_launches(tmp_path):
    (tmp_path / "module.py").write_text("kernels.scan_kernel[(1,)](x)\nlaunch.cuda.load(s)\ncuda.load(source, device)\n")
    assert list(launching_calls(tmp_path / "module.py")) == [1, 3]


def test_a_fake_launch_does_nothing():
    class Refuse:
        __name__ = "refuse_kernel"

        def run(self, *arguments, grid, warmup):
            raise AssertionError("launched")

    launch = Launch(Refuse(), (1,), None)
    with imitate():
        launch.run()
    with pytest.raises(AssertionError, match="launched"):
        launch.run()


def test_launches_are_recorded_in_order_and_executed():
    made = []

    class Kernel:
        __name__ = "noted_kernel"

        def run(self, *arguments, grid, warmup, **constants):
            made.append((grid, arguments, constants))

    kernel = Kernel()
    with observe() as launches:
        Launch(kernel, (1,), 1, BLOCK=2).run()
        Launch(kernel, (3, 4), 5).run()
    assert [launch.grid for launch in launches] == [(1,), (3, 4)]
    assert made == [((1,), (1,), {"BLOCK": 2}), ((3, 4), (5,), {})]
    Launch(kernel, (1,)).run()
    assert len(launches) == 2


@pytest.mark.parametrize(
    "index", [1, slice(1, 3), (slice(None), None, 2), (..., slice(0, 5, 2)), (None, ..., 1), (0, slice(2), -1)]
)
def test_recorded_calls_index_tensors_like_brackets(index):
    """Brackets would make the device current, which does not exist here."""
    expected = torch.empty(4, 3, 5)[index]
    with record("sm_90a") as (device, _):
        found = torch.empty(4, 3, 5, device=device)[index]
        assert (found.shape, found.stride()) == (expected.shape, expected.stride())
        assert found.storage_offset() == expected.storage_offset()
        found[...] = 1


def test_recorded_calls_make_tensors_of_numbers_without_the_device():
    """PyTorch with GPU support copies the numbers of ``torch.tensor`` to the device, which fails for one that is pretended."""
    with record("sm_90a") as (device, _):
        made = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
        numbers = torch.tensor([0.5])
    assert (made.shape, made.dtype, made.device) == ((3,), torch.int32, device)
    assert numbers.device.type == "cpu"


def test_recording_ends_if_the_call_raises():
    with pytest.raises(RuntimeError, match="inside"), record("sm_90a"):
        raise RuntimeError("inside")
    assert torch.empty(1).device.type == "cpu"
    assert type(torch.empty(1)) is torch.Tensor


@pytest.mark.parametrize("architecture", CHECKED)
def test_a_pretended_device_reports_facts_of_its_architecture(architecture):
    with record(architecture) as (device, launches):
        assert torch.empty(2, device=device).device == device
        assert capability(device) == find_architecture(architecture).capability
    assert launches == []


def facts(launch, architecture):
    """Return everything about a launch that determines its machine code, and its number of CTAs."""
    return build_of(launch, architecture, "").key, tuple(launch.grid)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", with_examples(), ids=repr)
def test_a_real_call_makes_the_recorded_launches(variant):
    """Triton's binder and the CUDA driver get the kernels, constants and grids of the call recorded on a pretended GPU."""
    device = torch.device("cuda", 0)
    major, minor = torch.cuda.get_device_capability(device)
    name = find_architecture(f"sm_{major}{minor}").name
    architecture = find_architecture(name)
    if torch.cuda.get_device_properties(device).multi_processor_count != architecture.processors:
        pytest.skip("this GPU has another number of SMs than its architecture's usual one")
    operation = variant.operation
    ran = 0
    for example in variant.listed_examples():
        grad = example.direction == "forward_backward"
        if name not in (example.architectures or (name,)):
            continue
        if variant.why_not(operation.query(example.case, "cuda:0", grad=grad)) is not None:
            continue
        expected = recorded_launches(variant, example, name)
        reading = operation.make_inputs(example.case, device, 0)
        # backward passes run in this thread, because launches are recorded per thread
        with observe() as launches, torch.set_grad_enabled(grad), torch.autograd.set_multithreading_enabled(False):
            if grad:
                for argument in example.wants or reading.differentiable:
                    reading.arguments[argument].requires_grad_()
            results = [each for each in variant.run(operation.bind(**reading.arguments)) if each is not None]
            if grad:
                torch.autograd.backward(results, [torch.ones_like(each) for each in results])
        torch.cuda.synchronize()
        # The backward passes of a composition follow all forward ones. A recorded call has each directly after its forward pass.
        assert Counter(facts(each, architecture) for each in launches) == Counter(facts(each, architecture) for each in expected)
        ran += 1
    if not ran:
        pytest.skip("none of the variant's examples can run on this device")


@pytest.mark.gpu
def test_triton_compiles_the_signature_of_a_build():
    """The build of a launch holds the signature, constants and attributes that Triton's launcher compiled."""
    from onelaunch.kernels.common.layout import cdiv
    from onelaunch.ops import gated_scan

    v, decay, gate = (torch.rand(2, 300, 80, device="cuda", dtype=torch.float16) for _ in range(3))
    with observe() as launches:
        gated_scan(v, -decay, gate, variant="fused")
    (launch,) = launches
    assert launch.grid[0] == cdiv(300, 64)
    compiled = launch.kernel[launch.grid](*launch.arguments, **launch.constants)
    major, minor = torch.cuda.get_device_capability()
    build = build_of(launch, find_architecture(f"sm_{major}{minor}"), "scan")
    assert dict(compiled.src.signature) == dict(build.signature)
    assert {key: repr(value) for key, value in compiled.src.constants.items()} == {
        key: repr(value) for key, value in build.constants.items()
    }
    assert {key: value for key, value in compiled.src.attrs.items() if value} == {
        key: value for key, value in build.attributes.items() if value
    }
    assert compiled.metadata.num_warps == build.num_warps


def test_a_cuda_launch_is_recorded():
    launch = CudaLaunch(object(), torch.device("cuda", 100), (1, 1, 1))
    with record("sm_90a") as (_, launches):
        launch.run()
    assert launches == [launch]
