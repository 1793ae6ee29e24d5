"""Tests of the operations' probes: the edge cases on which every variant is judged before its times count.

``run_probes`` is the step of a study's run that judges a variant on them.

``pytorch_variants`` are the variants of plain PyTorch. ``assert_ok`` requires a verdict of the gate to be right. A test marked
``thorough`` does not run in ``make test``, one marked ``interpret`` runs in Triton's interpreter, with TRITON_INTERPRET=1, and
one marked ``extra`` counts in no budget of time.
"""

from __future__ import annotations

import functools

import pytest
import torch

from onelaunch.dispatch.capture import compiler_missing
from onelaunch.errors import OneLaunchError
from onelaunch.operation import Operation, operations
from onelaunch.workbench.verify import Judge, run_probes
from onelaunch.workbench.verify.probes import Prepared
from tests.ops.cases import GATED_SCAN, LINEAR_RNN, SHORT, assert_ok, pytorch_variants

NAMES = ["decode_step", "gated_scan", "gla", "gla_layer", "linear_rnn", "output_chain", "projections", "rms_norm", "swiglu"]
NEED_A_GPU = {"captured", "graph", "packed", "packed_states"}
"""Variants without launches of their own that no CPU can run."""


@pytest.fixture(autouse=True)
def one_thread():
    """Compute with one thread: the tensors are small, and threads that wait for each other take several times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def judge() -> Judge:
    """Return one judge for all tests, so that the variants of an operation share its references."""
    return Judge()


def operation_of(name):
    return next(each for each in operations() if each.name == name)


def cpu_variants():
    """Return the pairs of an operation's name and a variant in plain PyTorch that runs on a CPU."""
    return [
        (each.name, name)
        for each in operations()
        if each.name in NAMES
        for name in pytorch_variants(each)
        if name not in NEED_A_GPU
    ]


def test_every_operation_lists_probes():
    ours = [each.name for each in operations() if each.__module__.startswith("onelaunch.")]
    assert ours == NAMES
    assert all(operation_of(name).listed_probes() for name in ours)


class Chosen(Operation):
    """Operation that lists only some of its probes: those for which ``chosen`` returns true."""

    def __init__(self, operation, chosen):
        vars(self).update(vars(operation))
        self._chosen = chosen

    def listed_probes(self):
        return [each for each in super().listed_probes() if self._chosen(each)]


def is_plain(probe):
    """Return whether a probe is a case without an empty dimension, as the operation has drawn it."""
    return not (probe.prepare or probe.refused or 0 in probe.case.sizes.values())


@pytest.mark.parametrize(("operation", "variant"), cpu_variants())
def test_variants_in_pytorch_meet_every_probe(operation, variant):
    """The tests of each operation judge these variants at every plain probe, by the same gate and in both directions.

    ``module`` of ``gla_layer`` is an exception: its tests judge it at four cases of their own.
    """
    others = Chosen(operation_of(operation), lambda probe: not is_plain(probe))
    report = run_probes(judge(), others, variant)
    assert report.failed == ()
    assert report.met
    # A probe that every variant refused would test nothing. The first variant takes all that the contract takes.
    if variant == next(name for each, name in cpu_variants() if each == operation):
        assert report.refused == sum(probe.refused for probe in others.listed_probes())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "decode_step"])
def test_a_transposed_probe_has_the_values_of_its_case_in_other_strides(name):
    operation = operation_of(name)
    probe = next(each for each in operation.listed_probes() if str(each) == "transposed")
    plain = operation.make_inputs(probe.case, torch.device("cpu"), 0).arguments
    found = Prepared(operation, probe).make_inputs(probe.case, torch.device("cpu"), 0).arguments
    tensors = {key: value for key, value in plain.items() if isinstance(value, torch.Tensor)}
    assert all(torch.equal(found[key], value) for key, value in tensors.items())
    assert any(found[key].stride() != value.stride() for key, value in tensors.items())


@pytest.mark.parametrize("name", NAMES)
def test_the_contract_refuses_a_tensor_on_another_device(name):
    operation = operation_of(name)
    probe = next(each for each in operation.listed_probes() if each.refused)
    arguments = Prepared(operation, probe).make_inputs(probe.case, torch.device("cpu"), 0).arguments
    with pytest.raises(OneLaunchError, match=r"device|meta"):
        operation(**arguments)


WHOLE_GATE = ("packed_many_short", "packed_final_state_alone")
"""Probes of packed sequences at which the whole gate judges interpreted kernels, although other tests make one call."""


@pytest.mark.interpret
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("packed", [False, True], ids=["unusual", "packed"])
@pytest.mark.parametrize("variant", ["fused", pytest.param("separate", marks=pytest.mark.every)])
def test_interpreted_kernels_meet_the_probes_of_the_scan(variant, packed):
    """The kernels' tests make one call per plain probe in ``SHORT``, and apply the whole gate at one dense case."""
    chosen = Chosen(
        GATED_SCAN,
        lambda probe: (
            str(probe) in WHOLE_GATE if packed else not (is_plain(probe) and str(probe) in SHORT) and str(probe) not in WHOLE_GATE
        ),
    )
    report = run_probes(judge(), chosen, variant)
    assert report.failed == ()
    assert report.met


@pytest.mark.parametrize("operation", [GATED_SCAN, LINEAR_RNN], ids=str)
def test_compiled_scans_refuse_one_channel_on_a_cpu(operation):
    """TorchInductor's code for a CPU returned values from memory that nobody wrote, as a probe found."""
    one, two = ({**dict.fromkeys(operation.dimensions, 1), "T": 33, "V": channels} for channels in (1, 2))
    variant = operation.get("compiled")
    assert "one channel" in variant.why_not(operation.query(operation.case("float32", **one), "cpu"))
    assert "one channel" not in (variant.why_not(operation.query(operation.case("float32", **two), "cpu")) or "")


FORMS = ("forgets_everything", "no_sequences")
"""Probes that are compiled in every run of `make check`, in training.

The first has several chunks of steps, of which the last is not full, and decays of -inf. The other forms that a compiled scan
with a gate can have are compiled with few steps by ``test_gated_scan.py``, in a fifth of the time. With ``--architectures=every``
all probes that the compiled scan takes are compiled, in training too.
"""

REFUSED = {"one_step_one_channel", "forgets_nothing", "no_steps"}
"""Probes that the compiled scan refuses on a CPU: those of one channel or no step."""


def pytest_generate_tests(metafunc):
    """Take the probes of ``FORMS``; with ``--architectures=every``, take all that the compiled scan takes, with gradients.

    Each is compiled for many seconds, so that each is a test of its own and they run side by side.
    """
    if "compiled_probe" not in metafunc.fixturenames:
        return
    pairs = [(name, "forward_backward") for name in FORMS]
    cases = [pytest.param(*pair) for pair in pairs]
    if metafunc.config.getoption("architectures") == "every":
        taken = [str(probe) for probe in GATED_SCAN.listed_probes() if not probe.refused and str(probe) not in REFUSED]
        others = [(name, "forward_backward") for name in taken if name not in FORMS]
        cases += [pytest.param(*pair, marks=pytest.mark.extra) for pair in others]
    metafunc.parametrize(("compiled_probe", "direction"), cases)


@pytest.mark.thorough
@pytest.mark.slow
def test_compiled_expressions_meet_the_probes_of_the_scan(compiled_probe, direction):
    probe = next(each for each in GATED_SCAN.listed_probes() if str(each) == compiled_probe)
    if reason := compiler_missing(GATED_SCAN.query(probe.case, "cpu")):
        pytest.skip(reason)
    torch.compiler.reset()
    verdict = judge().judge(Prepared(GATED_SCAN, probe), probe.case, variant="compiled", directions=(direction,))
    assert_ok(verdict, GATED_SCAN, probe.case, "compiled")


def test_the_compiled_scan_takes_all_probes_but_those_of_one_channel_or_no_step():
    probes = [probe for probe in GATED_SCAN.listed_probes() if not probe.refused]
    if reason := compiler_missing(GATED_SCAN.query(probes[0].case, "cpu")):
        pytest.skip(reason)
    why_not = GATED_SCAN.get("compiled").why_not
    assert {str(probe) for probe in probes if why_not(GATED_SCAN.query(probe.case, "cpu"))} == REFUSED
    assert set(FORMS) <= {str(probe) for probe in probes} - REFUSED


def automatic_variants(recompiles):
    """Return operation and name of each variant that ``auto`` may choose and that is, or is not, compiled anew for a probe."""
    return [
        (each, name)
        for each in NAMES
        for name, variant in operation_of(each).variants.items()
        if variant.capabilities.automatic and variant.capabilities.recompiles is recompiles
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(("operation", "variant"), automatic_variants(recompiles=False))
def test_all_variants_meet_the_probes_on_a_gpu(operation, variant):
    assert run_probes(judge(), operation_of(operation), variant, torch.device("cuda:0")).failed == ()


@pytest.mark.gpu
@pytest.mark.slow  # all probes of a variant together take up to ten minutes, mostly of TorchInductor
@pytest.mark.parametrize(
    ("operation", "variant", "probe"),
    [
        pytest.param(each, name, probe, id=f"{each}-{name}-{probe}")
        for each, name in automatic_variants(recompiles=True)
        for probe in operation_of(each).listed_probes()
    ],
)
def test_variants_that_are_compiled_anew_meet_each_probe_on_a_gpu(operation, variant, probe):
    report = run_probes(judge(), operation_of(operation), variant, torch.device("cuda:0"), probes=[probe])
    assert report.failed == ()
