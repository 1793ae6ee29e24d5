"""Tests of ``fused_few_rows``, the variant of ``linear_rnn`` for steps of decoding: interpreted, and on a GPU.

``CASES`` are calls of at most 64 rows B T by name. ``assert_forward_correct`` compares a call with the oracle, and fills new
memory with NaN first. A CPU counts as a GPU of 132 SMs with 64 KiB of shared memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onelaunch import dispatch
from onelaunch.errors import VariantUnsupported
from onelaunch.launch import workspace
from onelaunch.operation import Query
from onelaunch.ops import linear_rnn
from onelaunch.ops.linear_rnn import configure_few_rows, launch_few_rows
from onelaunch.ops.linear_rnn.configure_few_rows import MOST_ROWS, config_of
from onelaunch.ops.linear_rnn.reference import READ_TILE
from onelaunch.workbench.verify import Judge, judge_control, judge_outputs, run_probes
from onelaunch.workbench.verify.calls import Candidate
from onelaunch.workbench.verify.poison import poisoned
from tests.devices import HOPPERS, forget, pretend
from tests.ops.cases import (
    LINEAR_RNN,
    NO_STATES,
    STATES,
    arguments_of,
    assert_near,
    assert_ok,
    assert_same_bits_beside_other_work_and_in_graphs,
)

pytest.importorskip("triton", reason="launches import their kernels, which import Triton")

VARIANT = "fused_few_rows"
NAMES = ("y", "final_state")

CASES: dict[str, dict[str, Any]] = {
    "one_of_everything": {"B": 1, "T": 1, "D": 1, "V": 1, **STATES},
    "a_step": {"B": 1, "T": 1, "D": 200, "V": 80, **STATES},
    "a_step_without_states": {"B": 1, "T": 1, "D": 64, "V": 32, **NO_STATES},
    "no_multiples_of_tiles": {"B": 5, "T": 3, "D": 101, "V": 19, "decay": "mixed", **STATES},
    "decays_of_minus_infinity": {"B": 2, "T": 8, "D": 40, "V": 48, "decay": "forget", **STATES},
    "decays_of_zero": {"B": 3, "T": 1, "D": 40, "V": 24, "decay": "zero", "log_decay_dtype": "float32", **STATES},
    "no_gate": {"B": 3, "T": 5, "D": 72, "V": 40, "gate": False, **STATES},
    "no_initial_state": {"B": 2, "T": 6, "D": 72, "V": 40, "initial_state": False, "final_state": True},
    "32_rows": {"B": 8, "T": 4, "D": 300, "V": 70, "log_decay_dtype": "float32", **STATES},
    "64_steps": {"B": 1, "T": 64, "D": 300, "V": 33, "decay": "strong", **STATES},
    "two_parts": {"B": 3, "T": 2, "D": 4100, "V": 40, **STATES},
    "more_blocks_than_buffers": {"B": 1, "T": 1, "D": 9000, "V": 20, **STATES},
    "packed": {"B": 1, "T": 40, "D": 24, "V": 20, "lengths": (0, 5, 0, 0, 34, 1, 0), "decay": "mixed", **STATES},
    "packed_without_states": {"B": 1, "T": 20, "D": 24, "V": 20, "lengths": (20,), **NO_STATES},
    "packed_final_states_alone": {
        "B": 1, "T": 9, "D": 24, "V": 20, "lengths": (0, 8, 1, 0), "initial_state": False, "final_state": True,
    },
}  # fmt: skip

_JUDGE = Judge()
"""Cache of reference outputs."""


def assert_forward_correct(dtype: str, device: torch.device | str = "cpu", **given: Any) -> None:
    """Require the results of a call to pass the gate, and to be written in whole."""
    case = LINEAR_RNN.case(dtype, **given)
    truth = _JUDGE.reference(LINEAR_RNN, case, device=torch.device(device), direction="forward")
    inputs = truth.inputs.clone()
    with poisoned():
        answer = Candidate.variant(LINEAR_RNN, VARIANT)(inputs)
    assert_ok(judge_outputs(truth, answer), LINEAR_RNN, case, VARIANT)


def called(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the results by name."""
    found = linear_rnn(**arguments, variant=VARIANT)
    return dict(zip(NAMES, found if isinstance(found, tuple) else (found,), strict=False))


@pytest.fixture
def many_parts(monkeypatch):
    """Divide slices into parts of 1 KiB."""
    monkeypatch.setattr(configure_few_rows, "_PART_BYTES", 1 << 10)
    config_of.cache_clear()
    yield
    config_of.cache_clear()


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("width", "channels"), [(64, 2048), (45, 1030), (1, 1)])
@pytest.mark.parametrize("turned", [False, True])
def test_the_launch_that_reads_the_weight_alone_reads_all_of_it(width, channels, dtype, turned):
    weight = torch.randn((channels, width) if turned else (width, channels)).to(dtype)
    weight = weight.mT if turned else weight
    rows, columns = READ_TILE
    found = launch_few_rows.weight_alone(weight, rows, columns)
    expected = [[tile.double().sum() for tile in band.split(columns, 1)] for band in weight.split(rows)]
    assert found.dtype is dtype
    torch.testing.assert_close(found, torch.tensor(expected).to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [{"D": 2048, "V": 2048}, {"D": 1000, "V": 1500}], ids=["whole_tiles", "parts_of_tiles"])
def test_reading_the_weight_alone_is_correct_on_a_gpu(sizes):
    case = LINEAR_RNN.case("bfloat16", B=1, T=1, **sizes, **STATES)
    assert_ok(judge_control(LINEAR_RNN, case, "weight_alone", device="cuda"), LINEAR_RNN, case, "weight_alone")


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_results_are_correct(name, dtype):
    assert_forward_correct(dtype, **CASES[name])


@pytest.mark.interpret
@pytest.mark.parametrize(
    "name", ["a_step", "no_multiples_of_tiles", "decays_of_minus_infinity", "no_gate", "two_parts", "packed"]
)
def test_the_product_in_a_launch_of_its_own_is_correct(name):
    case = LINEAR_RNN.case("float16", **CASES[name])
    assert_ok(_JUDGE.judge(LINEAR_RNN, case, variant="semi_fused_few_rows"), LINEAR_RNN, case, "semi_fused_few_rows")


@pytest.mark.interpret
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16, 17, 33, 64])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_any_number_of_rows_is_correct(rows, dtype):
    assert_forward_correct(dtype, B=rows, T=1, D=130, V=36, **STATES)


@pytest.mark.interpret
@pytest.mark.usefixtures("many_parts")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["two_parts", "32_rows", "packed", "more_blocks_than_buffers"])
def test_sums_of_many_parts_are_correct(name, dtype):
    given = CASES[name] | {"D": 3000}
    rows, size = given["B"] * given["T"], 2 if dtype == "float16" else 4
    assert config_of(rows, 3000, given["V"], size, 132, 64 << 10).parts >= 10
    assert_forward_correct(dtype, **given)


@pytest.mark.interpret
@pytest.mark.usefixtures("many_parts")
def test_equal_calls_give_equal_bits_and_leave_the_counters_zero():
    arguments = arguments_of(LINEAR_RNN, dtype="float16", B=4, T=1, D=3000, V=70, **STATES)
    config = config_of(4, 3000, 70, 2, 132, 64 << 10)
    assert config.parts > 10
    first = called(arguments)
    for _ in range(3):
        assert not workspace.counters(torch.device("cpu"), config.slices).any()
        assert_near(called(arguments), first, 0.0)


@pytest.mark.interpret
def test_a_sequence_with_nan_leaves_the_others_alone():
    """The scan is over the rows of all sequences, so a product of a decay of 0 and a foreign state would not do."""
    arguments = arguments_of(LINEAR_RNN, B=4, T=3, D=20, V=20, **STATES)
    right = called(arguments)
    arguments["x"][1] = float("nan")
    arguments["initial_state"][2] = float("inf")
    found = called(arguments)
    for name in NAMES:
        assert torch.equal(found[name][[0, 3]], right[name][[0, 3]])
        assert not found[name][1].isfinite().any()


@pytest.mark.interpret
def test_steps_that_pass_the_state_on_equal_one_call():
    arguments = arguments_of(LINEAR_RNN, B=3, T=7, D=50, V=30, **STATES)
    whole, state, outputs = called(arguments), arguments["initial_state"], []
    for t in range(7):
        step = {name: arguments[name][:, t : t + 1] for name in ("x", "log_decay", "gate")}
        y, state = linear_rnn(**step, weight=arguments["weight"], initial_state=state, output_final_state=True, variant=VARIANT)
        outputs.append(y)
    assert_near({"y": torch.cat(outputs, 1), "final_state": state}, whole, 2e-6)


@pytest.mark.interpret
def test_strides_do_not_matter():
    """Columns apart, rows of one matrix, and steps before sequences in memory give the bits of contiguous tensors."""
    arguments = arguments_of(LINEAR_RNN, dtype="float16", B=3, T=2, D=48, V=32, **STATES)
    right = called(arguments)
    apart = dict(arguments)
    apart["weight"] = arguments["weight"].t().contiguous().t()
    apart["x"] = torch.cat([arguments["x"], arguments["x"]], -1)[..., :48]
    apart["log_decay"] = arguments["log_decay"].transpose(0, 1).contiguous().transpose(0, 1)
    apart["gate"] = arguments["gate"].repeat_interleave(2, -1)[..., ::2]
    assert_near(called(apart), right, 0.0)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["a_step", "no_multiples_of_tiles", "32_rows", "two_parts", "packed"])
def test_a_transposed_weight_gives_the_same_bits_and_is_not_copied(name, dtype, monkeypatch):
    """The layer ``nn.LinearRNN`` multiplies by the transposed weight of a ``torch.nn.Linear``."""
    from onelaunch.ops.linear_rnn import launch_few_rows

    arguments = {"gate": None, **arguments_of(LINEAR_RNN, dtype=dtype, **CASES[name])}
    right, weights, launch = called(arguments), [], launch_few_rows.Launch
    arguments["weight"] = arguments["weight"].t().contiguous().t()

    def noted(*given: Any, **options: Any) -> Any:
        weights.append(given[3].data_ptr())
        return launch(*given, **options)

    monkeypatch.setattr(launch_few_rows, "Launch", noted)
    assert_near(called(arguments), right, 0.0)
    assert weights == [arguments["weight"].data_ptr()]


@pytest.mark.interpret
def test_rows_too_far_apart_for_offsets_of_32_bits_are_copied(monkeypatch):
    from onelaunch.ops.linear_rnn import launch_few_rows

    arguments = arguments_of(LINEAR_RNN, dtype="float16", B=3, T=2, D=48, V=32, **STATES)
    right = called(arguments)
    arguments["weight"] = torch.cat([arguments["weight"], arguments["weight"]], -1)[:, :32]
    monkeypatch.setattr(launch_few_rows, "_FARTHEST", 1)
    assert_near(called(arguments), right, 0.0)
    arguments["weight"] = arguments["weight"].t().contiguous().t()
    assert_near(called(arguments), right, 0.0)


@pytest.mark.interpret
def test_the_probes_that_have_few_rows_pass():
    case = LINEAR_RNN.case("float16", B=2, T=7, D=24, V=20)
    probes = [each for each in LINEAR_RNN.listed_probes() if 0 < each.case.sizes["B"] * each.case.sizes["T"] <= MOST_ROWS]
    assert len(probes) >= 6
    assert LINEAR_RNN.get(VARIANT).why_not(LINEAR_RNN.query(case, "cpu", grad=False)) is None
    report = run_probes(_JUDGE, LINEAR_RNN, VARIANT, torch.device("cpu"), probes=probes)
    assert report.failed == ()


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("given", "grad", "reason"),
    [
        ({"B": 65, "T": 1}, False, "at most 64 rows"),
        ({"B": 5, "T": 13}, False, "not 65"),
        ({"B": 0, "T": 1}, False, "at least one element"),
        ({"B": 2, "T": 1}, True, "no backward pass"),
    ],
    ids=["sequences", "steps", "empty", "gradients"],
)
def test_calls_that_the_kernel_cannot_run_are_refused(given, grad, reason):
    with pytest.raises(VariantUnsupported, match=reason):
        linear_rnn(**arguments_of(LINEAR_RNN, **given, grad=grad), variant=VARIANT)


@pytest.mark.interpret
def test_rows_of_too_many_columns_are_refused():
    case = LINEAR_RNN.case("float16", B=1, T=1, D=(1 << 24) + 1, V=16)
    assert "16777216 columns" in (LINEAR_RNN.get(VARIANT).why_not(LINEAR_RNN.query(case, "cpu", grad=False)) or "")


@pytest.fixture
def h100(monkeypatch):
    """Name of a pretended H100 for queries. The package's table has times of D = V = 2048 and 1024 on it."""
    yield pretend(HOPPERS["H100"], monkeypatch)
    monkeypatch.undo()
    forget()


def query_of(device: str, batch: int, length: int, width: int = 2048) -> Query:
    """Return the dispatch key of a call from a state into a state in bfloat16."""
    case = LINEAR_RNN.case("bfloat16", B=batch, T=length, D=width, V=width, **STATES)
    return LINEAR_RNN.query(case, device, grad=False)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (4, 1), (16, 1), (1, 16), (4, 4)])
def test_auto_takes_it_up_to_16_rows(batch, length, h100):
    """Torch.compile's variant, which comes next, took 1.4 to 1.6 times as long, and would compile anew for other sizes."""
    assert dispatch.choose(query_of(h100, batch, length)).name == VARIANT


@pytest.mark.parametrize(
    ("batch", "length", "taken"),
    [(64, 1, "compiled"), (1, 64, "semi_fused"), (4, 16, "semi_fused"), (1, 17, "semi_fused"), (2, 32, "semi_fused")],
)
def test_auto_takes_it_for_no_more_rows_than_it_pays(batch, length, taken, h100):
    """At 64 rows others were measured to be faster. At 17 to 64 rows of several steps near calls do not say that it is."""
    assert dispatch.choose(query_of(h100, batch, length)).name == taken


def test_explanations_say_why_auto_leaves_it_out(h100, prose):
    answer = dispatch.explain(query_of(h100, 1, 20))
    (standing,) = (each for each in answer.standings if each.variant == VARIANT)
    assert standing.reason_against is None
    prose(standing.held_back)


def test_explanations_by_another_gpus_times_say_so_too(monkeypatch):
    """An H200 without times of its own follows the order at the nearest call on an H100, where this variant was the fastest."""
    device = pretend(HOPPERS["H200"], monkeypatch)
    because = dispatch.explain(query_of(device, 1, 20)).because
    monkeypatch.undo()
    forget()
    assert "at B=1, T=16" in because
    assert f"{VARIANT} was faster there, but is left out" in because


def test_among_equally_fast_variants_it_comes_before_one_that_compiles_anew_for_other_sizes(h100):
    names = LINEAR_RNN.preference(query_of(h100, 1, 1))
    assert names.index("semi_fused") < names.index(VARIANT) < names.index("compiled")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("channels", [1, 64, 100, 2048, 2560, 4096, 16384])
@pytest.mark.parametrize("width", [1, 64, 1000, 2048, 8192])
def test_parts_cover_the_weight_and_buffers_fit(width, channels, size):
    for rows in range(1, MOST_ROWS + 1):
        for sms, shared in ((132, 227 << 10), (108, 163 << 10), (304, 64 << 10)):
            config = config_of(rows, width, channels, size, sms, shared)
            assert config.rows >= rows
            assert config.slices * config.columns >= channels > (config.slices - 1) * config.columns
            length = config.blocks * config.inner
            assert config.parts * length >= width > (config.parts - 1) * length
            block = config.inner * (config.columns + (0 if config.vector else config.rows)) * size
            assert (config.stages - 1) * block <= shared
            assert config.vector or config.inner // config.warps >= 16, "a matrix instruction takes 16 rows of the weight"
            assert config.parts == 1 or config.slices * config.parts <= sms


def test_a_step_of_2048_channels_takes_one_slice_per_sm_and_loads_it_at_once():
    for rows, slices, parts in ((1, 128, 1), (16, 128, 1), (32, 64, 2), (64, 64, 2)):
        config = config_of(rows, 2048, 2048, 2, 132, 227 << 10)
        assert (config.slices, config.parts) == (slices, parts)
        assert config.stages - 1 == config.blocks or rows == 64


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_results_are_correct_on_a_gpu(name, dtype, device):
    assert_forward_correct(dtype, device, **CASES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 4, 16, 32, 64])
def test_wide_layers_are_correct_on_a_gpu(rows, dtype, device):
    for given in ({"B": rows, "T": 1}, {"B": 1, "T": rows}):
        for sizes in ({"D": 2048, "V": 2048}, {"D": 4096, "V": 4096}, {"D": 1024, "V": 2560}):
            assert_forward_correct(dtype, device, **given, **sizes, **STATES)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 4, 16, 32, 64])
def test_a_transposed_weight_gives_near_results_on_a_gpu(rows, dtype, device):
    for sizes in ({"D": 2048, "V": 2048}, {"D": 1024, "V": 2560}, {"D": 260, "V": 100}):
        case = LINEAR_RNN.case(dtype, B=rows, T=1, **sizes, **STATES)
        arguments = LINEAR_RNN.make_inputs(case, device, 0).arguments
        right = called(arguments)
        found = called(arguments | {"weight": arguments["weight"].t().contiguous().t()})
        assert_near({"y": found["y"].double()}, {"y": right["y"].double()}, 2**-8 if dtype != "float32" else 1e-6)
        assert_near({"final": found["final_state"]}, {"final": right["final_state"]}, 1e-6)


@pytest.mark.gpu
def test_the_probes_pass_on_a_gpu(device):
    assert run_probes(_JUDGE, LINEAR_RNN, VARIANT, device).failed == ()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 32, 64])
def test_bits_are_the_same_beside_other_work_and_in_graphs(rows, device):
    case = LINEAR_RNN.case("bfloat16", B=rows, T=1, D=2048, V=2048, **STATES)
    arguments = LINEAR_RNN.make_inputs(case, device, 0).arguments
    assert_same_bits_beside_other_work_and_in_graphs(lambda: linear_rnn(**arguments, variant=VARIANT), device)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 32])
def test_replayed_calls_equal_the_first(rows, device):
    """The third call with the same facts is replayed from a plan (``onelaunch/launch/planned.py``), counters included."""
    case = LINEAR_RNN.case("bfloat16", B=rows, T=1, D=2048, V=2048, **STATES)
    arguments = LINEAR_RNN.make_inputs(case, device, 0).arguments
    first = called(arguments)
    for _ in range(5):
        assert_near(called(arguments), first, 0.0)
