"""Tests of ``gla_layer``'s variant "one_launch" without a GPU: its kernel's own source on an emulated one, and refused calls.

``use_host`` of ``gla_layer_step_host.py`` lets the variant's launches run on the emulated GPU, which delays CTAs, warps and
copies at random, by a seed. ``judge`` is the verification gate: it compares results with the float64 oracle, and also asks for
unchanged inputs, results in memory of their own, and more.

``prose(text)`` compares a test's texts, in the order of its calls, with its entries in tests/snapshots/prose.txt. A test fails
if it does not compare one of its entries, and ``tests/test_prose.py`` if the test or the parameter of an entry is gone.

``libraries`` is a folder in which a test run compiles each library once. ``assert_ok`` requires a verdict of the gate to be
right.
A test marked ``thorough`` does not run in ``make test``, and one marked ``every`` with --architectures=every alone.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from onelaunch import dispatch
from onelaunch.device.architectures import HOPPER_SHARED_BYTES
from onelaunch.errors import VariantUnsupported
from onelaunch.operation import Query
from onelaunch.ops.gla_layer import configure_step, launch_step
from onelaunch.ops.gla_layer.configure_step import StepConfig, config_of
from onelaunch.ops.gla_layer.launch_step import StepInputs
from onelaunch.ops.gla_layer.variants import one_launch
from onelaunch.workbench.verify import judge
from onelaunch.workbench.verify.poison import poisoned
from tests.decode.host_machine import needs_compiler, needs_watch
from tests.devices import HOPPERS, forget, pretend
from tests.ops.cases import assert_ok
from tests.ops.gla_layer_cases import GLA_LAYER
from tests.ops.gla_layer_step_host import use_host

VARIANT = GLA_LAYER.get("one_launch")
STATES = {"initial_state": True, "final_state": True}

CASES: dict[str, dict[str, Any]] = {  # sizes and options, and the SMs of the emulated GPU
    "a_step": {"sms": 4, "B": 1, "T": 1, "D": 128, "H": 2, "K": 64, "V": 64, **STATES},
    "three_sequences": {"sms": 4, "B": 3, "T": 1, "D": 192, "H": 2, "K": 128, "V": 128, **STATES},
    "sixteen_sequences": {"sms": 4, "B": 16, "T": 1, "D": 128, "H": 2, "K": 128, "V": 64, **STATES},
    "most_rows": {"sms": 4, "B": 64, "T": 1, "D": 1024, "H": 1, "K": 64, "V": 64, **STATES},
    "sixteen_steps": {"sms": 4, "B": 1, "T": 16, "D": 128, "H": 2, "K": 64, "V": 128, **STATES},
    "most_steps": {"sms": 8, "B": 1, "T": 64, "D": 128, "H": 4, "K": 64, "V": 64, **STATES},
    "steps_of_sequences": {"sms": 8, "B": 5, "T": 7, "D": 320, "H": 4, "K": 64, "V": 128, **STATES},
    "groups_of_sequences": {"sms": 8, "B": 9, "T": 2, "D": 128, "H": 2, "K": 32, "V": 32, **STATES},
    "nine_first_steps": {"sms": 8, "B": 9, "T": 1, "D": 128, "H": 2, "K": 128, "V": 128, "final_state": True},
    "no_initial_state": {"sms": 2, "B": 2, "T": 9, "D": 128, "H": 2, "K": 128, "V": 128, "final_state": True},
    "no_states": {"sms": 4, "B": 2, "T": 1, "D": 64, "H": 2, "K": 64, "V": 64, "rank": 5, "normalizer": 3.0, "eps": 0.5},
    "a_rank_over_all_ctas": {"sms": 4, "B": 2, "T": 2, "D": 64, "H": 4, "K": 32, "V": 32, "rank": 70, **STATES},
    "a_decay_per_head": {"sms": 8, "B": 4, "T": 3, "D": 192, "H": 3, "K": 128, "V": 128, "decay_per": "head", **STATES},
    "a_float32_norm": {"sms": 4, "B": 1, "T": 1, "D": 128, "H": 2, "K": 64, "V": 64, "norm_weight": "float32"},
    "large_values": {"sms": 2, "B": 1, "T": 2, "D": 64, "H": 1, "K": 128, "V": 256, "initial_state": True},
    "many_ctas_per_head": {"sms": 16, "B": 1, "T": 1, "D": 512, "H": 1, "K": 32, "V": 64, **STATES},
    "few_sequences": {"sms": 8, "B": 3, "T": 1, "D": 192, "H": 1, "K": 64, "V": 64, **STATES},
    "two_sequences_a_cta": {"sms": 16, "B": 16, "T": 1, "D": 128, "H": 2, "K": 64, "V": 64, **STATES},
    "a_second_sequence_for_some": {"sms": 16, "B": 11, "T": 1, "D": 1088, "H": 2, "K": 64, "V": 64, "final_state": True},
    "slabs_of_x": {"sms": 2, "B": 33, "T": 1, "D": 1152, "H": 2, "K": 32, "V": 32, **STATES},
    "slabs_of_both": {"sms": 32, "B": 9, "T": 4, "D": 1088, "H": 8, "K": 32, "V": 128},
}  # fmt: skip


THOROUGH = ("sixteen_sequences", "steps_of_sequences", "a_decay_per_head", "slabs_of_x")
MARKED = [
    pytest.param(
        name, marks=() if name == "three_sequences" else getattr(pytest.mark, "thorough" if name in THOROUGH else "every")
    )
    for name in CASES
]


@pytest.fixture
def supported(monkeypatch):
    """Let the variant run on a CPU, for which it is not made."""
    monkeypatch.setattr(VARIANT, "_supports", [])


def called(**given: Any) -> Any:
    """Return a checked call on the CPU with random arguments in bfloat16."""
    case = GLA_LAYER.case("bfloat16", **{name: value for name, value in given.items() if name != "sms"})
    return GLA_LAYER.bind(**GLA_LAYER.make_inputs(case, torch.device("cpu"), 0).arguments)


@needs_compiler
@pytest.mark.usefixtures("supported")
@pytest.mark.parametrize("name", MARKED)
def test_results_and_states_pass_the_gate(name, libraries, monkeypatch):
    sizes = dict(CASES[name])
    use_host(monkeypatch, libraries, sizes.pop("sms"))
    case = GLA_LAYER.case("bfloat16", name=name, **sizes)
    assert_ok(judge(GLA_LAYER, case, variant="one_launch"), GLA_LAYER, case, "one_launch")


@needs_compiler
def test_results_do_not_depend_on_who_comes_first(libraries, monkeypatch):
    host = use_host(monkeypatch, libraries, CASES["three_sequences"]["sms"])
    call, found = called(**CASES["three_sequences"]), []
    for host.seed in (1, 2):
        found.append(launch_step.run(StepInputs.of(call)))
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


@needs_compiler
@pytest.mark.usefixtures("supported")
@pytest.mark.parametrize("name", ["three_sequences", pytest.param("a_step", marks=pytest.mark.every)])
def test_launches_that_overlap_pass_the_gate(name, libraries, monkeypatch):
    """The emulated GPU runs one launch after the other; this is the code of two CTAs on an SM, which have fewer stages each."""
    sizes, found = dict(CASES[name]), []

    def overlapping(*given: Any, **options: Any) -> Any:
        usual, fields = config_of(*given, **options), {"overlap": True, "ahead": 3, "resident": 2}
        assert isinstance(usual, StepConfig)
        # Copies of the states of three sequences leave too few stages of half an SM.
        config = configure_step.with_settings(usual, **fields) or configure_step.with_settings(usual, **fields, copied=False)
        assert config is not None
        found.append(config)
        return config

    use_host(monkeypatch, libraries, sizes.pop("sms"))
    monkeypatch.setattr(launch_step, "config_of", overlapping)
    case = GLA_LAYER.case("bfloat16", name=name, **sizes)
    assert_ok(judge(GLA_LAYER, case, variant="one_launch"), GLA_LAYER, case, "one_launch")
    assert found
    for config in found:
        assert 2 * (configure_step.shared_bytes_of(config) + 1024) <= HOPPER_SHARED_BYTES + 1024
        assert configure_step.unwatched_of(config)[1] < configure_step.unwatched_of(replace(config, resident=1))[1]


def configure(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> list[StepConfig]:
    """Replace fields of all configurations; return a list to which those of launches are added."""
    found: list[StepConfig] = []

    def replaced(*given: Any, **options: Any) -> Any:
        config = configure_step.with_settings(config_of(*given, **options), **fields)  # pyrefly: ignore[bad-argument-type]
        assert config is not None
        found.append(config)
        return config

    monkeypatch.setattr(launch_step, "config_of", replaced)
    return found


EARLY = ["two_sequences_a_cta", "a_second_sequence_for_some"]
BULK = ["sixteen_sequences", "most_rows", "slabs_of_x", "nine_first_steps"]
COPIED = ["three_sequences", "a_step", "groups_of_sequences", "no_states", "many_ctas_per_head", "sixteen_steps"]


@needs_compiler
@pytest.mark.usefixtures("supported")
@pytest.mark.parametrize("name", [COPIED[0], *(pytest.param(name, marks=pytest.mark.every) for name in COPIED[1:])])
def test_states_that_are_copied_early_give_the_same_bits(name, libraries, monkeypatch):
    call, found = called(**CASES[name]), []
    use_host(monkeypatch, libraries, CASES[name]["sms"])
    for copied in (False, True):
        configured = configure(monkeypatch, copied=copied)
        found.append(launch_step.run(StepInputs.of(call)))
        assert [config.copied for config in configured] == [copied]
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


@needs_compiler
@pytest.mark.usefixtures("supported")
@pytest.mark.parametrize("name", [*BULK[:1], *(pytest.param(name, marks=pytest.mark.every) for name in BULK[1:])])
def test_states_that_are_stored_from_the_ring_pass_the_gate(name, libraries, monkeypatch):
    sizes = dict(CASES[name])
    use_host(monkeypatch, libraries, sizes.pop("sms"))
    configured = configure(monkeypatch, bulk=True, proxy_fences=True)
    case = GLA_LAYER.case("bfloat16", name=name, **sizes)
    assert_ok(judge(GLA_LAYER, case, variant="one_launch"), GLA_LAYER, case, "one_launch")
    assert all(config.by_sequence for config in configured)


@needs_compiler
@pytest.mark.parametrize("name", [BULK[0], *(pytest.param(name, marks=pytest.mark.every) for name in BULK[1:])])
def test_pairs_that_share_operands_give_the_same_bits(name, libraries, monkeypatch):
    call, found = called(**CASES[name]), []
    host = use_host(monkeypatch, libraries, CASES[name]["sms"])
    for paired, paired_x in ((False, False), (True, False), (True, True)):
        configured = configure(monkeypatch, paired=paired, paired_x=paired_x)
        for host.seed in (1, 2):
            found.append(launch_step.run(StepInputs.of(call)))
        assert {config.cluster for config in configured} == {1 + paired}
    for each in found[1:]:
        assert all(torch.equal(first, second) for first, second in zip(found[0], each, strict=True))


@needs_compiler
@pytest.mark.usefixtures("supported")
@pytest.mark.parametrize("bulk", [True, pytest.param(False, marks=pytest.mark.every)])
@pytest.mark.parametrize("name", ["few_sequences", pytest.param("a_step", marks=pytest.mark.every)])
def test_whole_sequences_may_be_fewer_than_the_ctas_of_a_head(name, bulk, libraries, monkeypatch):
    sizes = dict(CASES[name])
    use_host(monkeypatch, libraries, sizes.pop("sms"))
    configured = configure(monkeypatch, **configure_step.FEW_BY_SEQUENCE, bulk=bulk, resident=2)
    case = GLA_LAYER.case("bfloat16", name=name, **sizes)
    assert_ok(judge(GLA_LAYER, case, variant="one_launch"), GLA_LAYER, case, "one_launch")
    assert configured
    assert all(config.members > case.sizes["B"] for config in configured)


@needs_compiler
@pytest.mark.parametrize(
    "fields", [{}, pytest.param({"paired": True, "paired_x": True, "proxy_fences": True}, marks=pytest.mark.every)]
)
@pytest.mark.parametrize("name", [EARLY[0], pytest.param(EARLY[1], marks=pytest.mark.every)])
def test_first_sequences_that_are_published_early_give_the_same_bits(name, fields, libraries, monkeypatch):
    call, found = called(**CASES[name]), []
    host = use_host(monkeypatch, libraries, CASES[name]["sms"])
    for early in (False, True):
        configured = configure(monkeypatch, early=early, **fields)
        for host.seed in (1, 2):
            found.append(launch_step.run(StepInputs.of(call)))
        assert {config.publishes_early for config in configured} == {early}
    for each in found[1:]:
        assert all(torch.equal(first, second) for first, second in zip(found[0], each, strict=True))


@needs_compiler
@pytest.mark.every
def test_first_sequences_that_are_read_before_all_are_published_are_wrong(libraries, monkeypatch):
    call, wrong = called(**CASES[EARLY[0]]), 0
    configure(monkeypatch, early=True)
    with monkeypatch.context() as unchanged:
        use_host(unchanged, libraries, CASES[EARLY[0]]["sms"])
        right, _ = launch_step.run(StepInputs.of(call))
    change = ("return load_acquire(a.counters + 32 * (HEADS + 1)) >= (u32)CTAS;", "return true;")
    host = use_host(monkeypatch, libraries, CASES[EARLY[0]]["sms"], change=change)
    for host.seed in range(1, 5):
        with poisoned():
            out, _ = launch_step.run(StepInputs.of(call))
        wrong += not torch.equal(out, right)
    assert wrong


@needs_compiler
@pytest.mark.every
@pytest.mark.parametrize(
    "change",
    [("box % 2 == cta_index() % 2", "box % 2 == 0"), ("cluster_sync();  //", "syncthreads();  //")],
    ids=["half", "start"],
)
def test_pairs_need_both_halves_and_to_begin_together(change, libraries, monkeypatch):
    call, wrong = called(**CASES["sixteen_sequences"]), 0
    configure(monkeypatch, paired=True, paired_x=True)
    with monkeypatch.context() as unchanged:
        use_host(unchanged, libraries, CASES["sixteen_sequences"]["sms"])
        right, _ = launch_step.run(StepInputs.of(call))
    host = use_host(monkeypatch, libraries, CASES["sixteen_sequences"]["sms"], change=change, timeout_cycles=1 << 24)
    host.strict = False
    for host.seed in range(1, 5):
        with poisoned():
            out, _ = launch_step.run(StepInputs.of(call))
        wrong += host.trapped > 0 or not torch.equal(out, right)
    assert wrong


@needs_watch
@pytest.mark.every
@pytest.mark.parametrize(
    ("name", "fields"),
    [(BULK[0], {"bulk": True, "paired": True, "paired_x": True}), (EARLY[0], {"early": True})],
    ids=["pairs", "early"],
)
def test_settings_of_whole_sequences_have_no_races(name, fields, libraries, monkeypatch):
    host = use_host(monkeypatch, libraries, CASES[name]["sms"], watched=True)
    configured = configure(monkeypatch, **fields)
    launch_step.run(StepInputs.of(called(**CASES[name])))
    assert configured
    assert not host.races


@needs_compiler
@pytest.mark.every
def test_a_stage_that_is_given_back_before_its_state_is_stored_spoils_it(libraries, monkeypatch):
    call, wrong = called(**CASES["most_rows"]), 0
    configure(monkeypatch, bulk=True)
    with monkeypatch.context() as unchanged:
        use_host(unchanged, libraries, CASES["most_rows"]["sms"])
        _, right = launch_step.run(StepInputs.of(call))
    change = ("    tma_store_wait_group_read<PENDING>();\n", "")
    host = use_host(monkeypatch, libraries, CASES["most_rows"]["sms"], change=change)
    for host.seed in range(1, 5):
        wrong += not torch.equal(launch_step.run(StepInputs.of(call))[1], right)
    assert wrong


@needs_compiler
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["a_step", "sixteen_sequences"])
def test_a_launch_that_overlaps_has_other_bytes_before_it_has_waited(name, libraries, monkeypatch):
    """Memory holds what the launch before writes only after ``griddepcontrol.wait``, without which results are wrong."""
    call, found = called(**CASES[name]), []
    for change in (None, ("if constexpr (OVERLAP) griddepcontrol_wait();", "")):
        with monkeypatch.context() as local:
            host = use_host(local, libraries, CASES[name]["sms"], change=change)
            host.strict = False
            found.append(launch_step.run(StepInputs.of(call))[0])
    assert bool(found[0].isfinite().all())
    assert not torch.equal(*found)


@needs_compiler
@pytest.mark.thorough
def test_a_launch_that_lacks_a_cta_traps_instead_of_hanging(libraries, monkeypatch):
    host = use_host(monkeypatch, libraries, CASES["three_sequences"]["sms"], timeout_cycles=1 << 24)
    host.lost = 1
    launch_step.run(StepInputs.of(called(**CASES["three_sequences"])))
    assert host.trapped > 0


@needs_compiler
@pytest.mark.every
def test_profile_markers_follow_each_other(libraries, monkeypatch):
    host = use_host(monkeypatch, libraries, CASES["a_step"]["sms"])
    call = called(**CASES["a_step"])
    phases = configure_step.MARKERS
    markers = torch.full((4, phases + configure_step.ARRIVALS, 2), -1)
    plain, marked = launch_step.run(StepInputs.of(call)), launch_step.run(StepInputs.of(call), markers)
    assert host.trapped == 0
    assert all(torch.equal(first, second) for first, second in zip(plain, marked, strict=True))
    assert (markers[:, :phases] >= 0).all()
    assert (markers[:, :phases].diff(dim=1) >= 0).all()
    chunks = markers[:, phases:]
    chunks = chunks[:, : int((chunks[0, :, 0] >= 0).sum())]  # of 40 that are noted
    assert chunks.shape[1] >= 6
    assert (chunks.diff(dim=1) >= 0).all()


@needs_watch
@pytest.mark.every
@pytest.mark.parametrize("name", ["three_sequences", "steps_of_sequences", "slabs_of_x"])
def test_shared_memory_has_no_races(name, libraries, monkeypatch):
    host = use_host(monkeypatch, libraries, CASES[name]["sms"], watched=True)
    launch_step.run(StepInputs.of(called(**CASES[name])))
    assert not host.races


@needs_watch
@pytest.mark.every
def test_a_missing_barrier_is_found(libraries, monkeypatch):
    change = ("  c.sync();\n}\n// Return exp(logsigmoid(z) / normalizer).", "}\n// Return exp(logsigmoid(z) / normalizer).")
    host = use_host(monkeypatch, libraries, CASES["three_sequences"]["sms"], watched=True, change=change)
    launch_step.run(StepInputs.of(called(**CASES["three_sequences"])))
    assert host.races


WAITS = {  # a wait between CTAs, and what takes its place; and a case whose launch has it
    "words_of_a_head": ("if (all) return true;", "return true;", "three_sequences"),
    "words_of_sequences": ("if constexpr (TAGGED) await_words(v, has, load);", "", "sixteen_sequences"),
    "count_of_a_head": ("if constexpr (!TAGGED) c.await(c.head, MEMBERS);", "c.sync();", "steps_of_sequences"),
    "count_of_all": ("c.await(HEADS, CTAS);", "c.sync();", "no_initial_state"),
    "count_of_all_with_few_rows": ("c.await(HEADS, CTAS);", "c.sync();", "many_ctas_per_head"),
    "count_of_all_by_sequences": ("return load_acquire(c.counter(HEADS)) >= (u32)CTAS;", "return true;", "sixteen_sequences"),
}  # fmt: skip


@needs_compiler
@pytest.mark.every
@pytest.mark.parametrize("name", WAITS)
def test_a_missing_wait_between_ctas_gives_wrong_results(name, libraries, monkeypatch):
    wait, instead, case = WAITS[name]
    call, wrong = called(**CASES[case]), 0
    with monkeypatch.context() as unchanged:
        use_host(unchanged, libraries, CASES[case]["sms"])
        right, _ = launch_step.run(StepInputs.of(call))
    host = use_host(monkeypatch, libraries, CASES[case]["sms"], change=(wait, instead))
    host.strict = False
    for host.seed in range(1, 5):
        with poisoned():  # buffers hold NaN, and not what an earlier launch has left in the same memory
            out, _ = launch_step.run(StepInputs.of(call))
        wrong += not torch.equal(out, right)
    assert wrong


def configurations() -> list[StepConfig]:
    """Return the configurations of calls of many sizes, on GPUs of 132 and of 16 SMs."""
    sizes = itertools.product(
        (1, 3, 16, 64), (1, 4), (64, 1536, 4096), (1, 8, 12, 16, 32), (32, 128, 256), (32, 64, 256), (16, None, 7)
    )
    found = [
        config_of(*each[:-1], each[-1], float_norm=True, sms=sms)
        for each, sms in itertools.product(sizes, (132, 16))
        if each[0] * each[1] <= configure_step.MOST_ROWS
    ]
    return [config for config in found if isinstance(config, StepConfig)]


def test_gated_o_is_published_early_only_where_the_ring_holds_the_output_weight():
    sizes = {"heads": 1, "keys": 64, "values": 64, "rank": 16, "float_norm": False, "sms": 8}
    for width, fits in ((1024, True), (4096, False)):
        usual = config_of(16, 1, width, **sizes)
        assert isinstance(usual, StepConfig)
        assert replace(usual, early=True).publishes_early
        assert (configure_step.with_settings(usual, early=True) is not None) is fits


def test_every_configuration_fits_into_shared_memory_and_on_the_gpu():
    found = configurations()
    assert len(found) > 1000
    for config in found:
        offset, barriers = configure_step.unwatched_of(config)
        assert configure_step.shared_bytes_of(config) <= HOPPER_SHARED_BYTES
        assert offset % 8 == 0
        assert (barriers - 6) // 2 >= configure_step.FEWEST_STAGES
        assert config.ctas <= 132


def query(dtype: torch.dtype = torch.bfloat16, flags: tuple[str, ...] = (), **sizes: int) -> Query:
    """Return the dispatch key of a call on a GPU, of a step of one sequence unless ``sizes`` say otherwise."""
    extent = {"B": 1, "T": 1, "D": 2048, "H": 16, "K": 128, "V": 128, **sizes}
    return Query("gla_layer", "cuda:0", dtype, tuple(extent.values()), flags=flags)


REFUSED = {
    "float16": query(torch.float16),
    "convolutions": query(flags=("convolved",)),
    "many_rows": query(B=65),
    "no_steps": query(T=0),
    "odd_heads": query(K=80),
    "odd_width": query(D=2000),
    "more_heads_than_sms": query(H=133),
    "large_states": query(H=64, K=256, V=256),
    "large_heads_and_many_rows": query(H=66, T=64),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_calls_are_refused_with_the_reason(name, prose):
    prose(one_launch.can_divide(REFUSED[name]))
    assert one_launch.can_divide(query()) is None


def test_without_a_hopper_gpu_and_with_gradients_it_is_refused(prose):
    prose(VARIANT.why_not(query()._replace(device="cpu")))
    prose(VARIANT.why_not(query()._replace(grad=True)))


@pytest.fixture(params=["H20", "H100 PCIe", "H100", "H200", "all SMs"])
def hopper(request, monkeypatch):
    """Name of a pretended Hopper GPU for queries. The package has tables of an H100 and an H200, the latter without it."""
    yield pretend(HOPPERS[request.param], monkeypatch)
    monkeypatch.undo()
    forget()


MODELS = {
    "measured": {"D": 2048, "H": 16, "K": 128, "V": 128},
    "narrow": {"D": 1024, "H": 8, "K": 128, "V": 128},
    "wide": {"D": 4096, "H": 32, "K": 128, "V": 128},
    "large_heads": {"D": 2048, "H": 8, "K": 256, "V": 256},
}


def taken_by(device: str, batch: int, length: int, **sizes: Any) -> str:
    """Return the name of the variant that ``auto`` takes for a call from a state into a state in bfloat16."""
    case = GLA_LAYER.case("bfloat16", B=batch, T=length, **(MODELS["measured"] | STATES | sizes))
    return dispatch.choose(GLA_LAYER.query(case, device, grad=False)).name


@pytest.mark.parametrize("hopper", ["H100"], indirect=True)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (1, 4), (1, 16), (4, 4)])
def test_auto_takes_it_where_it_was_measured_to_be_the_fastest(batch, length, hopper):
    assert taken_by(hopper, batch, length) == "one_launch"
    assert taken_by(hopper, 1, 1, decay_per="head") == "one_launch"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("decay_per", ["channel", "head"])
@pytest.mark.parametrize("states", [True, False])
def test_auto_takes_it_for_no_more_rows_than_it_pays(states, decay_per, model, hopper):
    """The nearest measured call may be one of few rows, at which it is faster."""
    options = {**MODELS[model], "decay_per": decay_per, "initial_state": states, "final_state": states}
    calls = [(33, 1), (64, 1), (1, 17), (1, 32), (2, 32), (4, 16), (8, 8), (16, 4), (32, 2), (1, 64)]
    assert "one_launch" not in {taken_by(hopper, batch, length, **options) for batch, length in calls}


@pytest.mark.parametrize("hopper", ["H100"], indirect=True)
def test_auto_does_not_take_it_for_decays_of_a_high_rank(hopper):
    """By name such a call runs if shared memory has room, which the dispatch key does not tell."""
    assert taken_by(hopper, 1, 1, rank=16) == "one_launch"
    assert taken_by(hopper, 1, 1, rank=17) != "one_launch"
    case = GLA_LAYER.case("bfloat16", B=1, T=1, **MODELS["measured"], rank=17, **STATES)
    assert VARIANT.why_not(GLA_LAYER.query(case, hopper, grad=False)) is None


@pytest.mark.parametrize("sizes", [{"B": 33}, {"T": 17}, {"flags": ("high_rank",)}], ids=["rows", "steps", "rank"])
def test_the_reason_why_auto_leaves_it_out_names_the_limit(sizes, prose):
    prose(VARIANT.why_by_name(query(**sizes)))
    assert VARIANT.why_by_name(query()) is None


def test_a_rank_that_leaves_too_little_shared_memory_is_refused():
    with pytest.raises(VariantUnsupported, match="rank"):
        StepInputs.of(called(B=1, T=1, D=64, H=1, K=256, V=256, rank=512)).config()
