"""Variants of ``decode_step`` by the megakernel: one for each rung of :mod:`onelaunch.decode.plan.rungs`, on Hopper GPUs."""

from __future__ import annotations

import functools

import torch

from onelaunch import cuda
from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.request import Engine
from onelaunch.decode.model.weights import Weights
from onelaunch.decode.plan.packing import packing_bytes, stream_bytes
from onelaunch.decode.plan.rungs import RUNGS, plan_for, unsupported
from onelaunch.decode.runtime.engines import KernelEngine
from onelaunch.decode.step.contract import DecodeCall, Results, decode_step
from onelaunch.device.hardware import is_hopper, processors
from onelaunch.device.tools import package_installed
from onelaunch.errors import PlanError
from onelaunch.launch.build import Build, CudaBuild
from onelaunch.operation import Query

ARCHITECTURES = ("sm_90a",)

LAYER, LAUNCH, RATE = 0.7e-3, 0.1e-3, 4e12
"""Seconds that the host takes for a layer of PyTorch's prefill, seconds of a launch, and weight bytes per second in the kernel.

Measured on an H200 and its host. With them, :func:`prompt_steps` lies a tenth to a quarter below the prompt length at which the
times of four models cross.
"""


def run(rung: str, call: DecodeCall) -> Results:
    """Run one token."""
    from onelaunch.decode.runtime.kernels import session_for  # with NumPy, which only those need who run kernels

    return call.results(session_for(call.weights, rung).step(call.token, call.cache))


def count_barriers(rung: str, call: DecodeCall) -> int:
    """Return the number of grid barriers of one token, by the kernel's own counter."""
    from onelaunch.decode.runtime.kernels import session_for

    return session_for(call.weights, rung).barriers(call.token, call.cache)


def run_in_a_row(rung: str, call: DecodeCall, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``count`` greedy tokens ``[N]`` from one launch, or one graph replay each, and the logits ``[V]`` of the last."""
    from onelaunch.decode.runtime.kernels import session_for

    with session_for(call.weights, rung).sequence(call.cache, call.token) as sequence:
        logits = sequence.step(count)
        return sequence.tokens().long(), logits


def make_engine(rung: str, weights: Weights) -> Engine:
    """Return the engine of a rung."""
    return KernelEngine(weights, rung)


def needs_hopper(query: Query) -> str | None:
    """Return why the kernels, which use Hopper's instructions, cannot run."""
    if query.device_type != "cuda" or not is_hopper(torch.device(query.device)):
        return "needs an NVIDIA GPU of compute capability 9.0"
    return cuda.missing()


def config_in(query: Query) -> ModelConfig:
    """Return the configuration of a query's model, as far as plans depend on it."""
    layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary, _ = query.sizes
    return ModelConfig(
        vocabulary, hidden, intermediate, layers, heads, kv_heads, head_dim,
        tie_word_embeddings="tied" in query.flags, attention_bias="bias" in query.flags, dtype=query.dtype,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def not_resident(rung: str, config: ModelConfig, ctas: int) -> str | None:
    """Return why a rung's CTAs cannot all be resident on a device with ``ctas`` SMs, or ``None``.

    Residency alone depends on the device. The order of a plan's phases is proved when the session of that rung is made.
    """
    from onelaunch.decode.codegen.layout import Tuning
    from onelaunch.decode.plan.check import check_room
    from onelaunch.decode.runtime.proofs import room_of

    plan = plan_for(config, rung, ctas)
    try:
        check_room(plan, room_of(plan, Tuning(), ctas))
    except PlanError as error:
        return f"has no sound plan here: {error.problem}"
    return None


def needs_numpy(_: Query) -> str | None:
    """Return why the check of plans, which uses NumPy, cannot run."""
    return None if package_installed("numpy") else "needs numpy: pip install 'onelaunch[decode]'"


def has_a_plan(rung: str, query: Query) -> str | None:
    """Return why there is no plan: sizes that the kernels are not written for, or CTAs that cannot all be resident."""
    config = config_in(query)
    return unsupported(config) or not_resident(rung, config, processors(torch.device(query.device)))


def prompt_steps(rung: str, config: ModelConfig) -> int:
    """Return the longest prompt that single launches read before the host has launched PyTorch's prefill.

    A process that reads no longer prompt does not load cuBLAS either, which takes a tenth of a second.
    """
    if RUNGS[rung].separate:
        return 0
    step = LAUNCH + stream_bytes(config, summed=RUNGS[rung].summed) / RATE
    return int(config.num_hidden_layers * LAYER / step)


BUILT = {
    "Qwen3-0.6B": ModelConfig(151_936, 1024, 3072, 28, 16, 8, 128, tie_word_embeddings=True),
    "small and untied": ModelConfig(1000, 128, 384, 2, 4, 1, 32),
}
"""Configurations that kernels are compiled for in CI."""

PROCESSORS = 132
"""SMs of the GPU that kernels are compiled for in CI."""


def builds(rung: str, architecture: str) -> list[Build]:
    """Return the builds of a rung: for a model of usual size, and for ``streaming`` also for a small one."""
    from onelaunch.decode.codegen.emit import source
    from onelaunch.decode.codegen.layout import THREADS, Tuning, layout_of
    from onelaunch.decode.plan.phases import PRODUCTS

    if architecture not in ARCHITECTURES:
        return []
    found: list[Build] = []
    for name, config in BUILT.items():
        plan = plan_for(config, rung, PROCESSORS)
        if rung != "streaming" and name != "Qwen3-0.6B":
            continue
        phases = {phase.op: phase for phase in plan.phases()}.values() if plan.separate else (None,)
        for phase in phases:
            said, weights = f"{name}, {phase.name}" if phase else name, phase is None or phase.op in PRODUCTS
            shared = layout_of(plan, Tuning()).bytes
            found.append(CudaBuild(said, source(plan, None, phase), THREADS, shared, matrix=weights, by_warps=weights))
    return found


for name, rung in RUNGS.items():
    variant = decode_step.variant(
        name, launches=None if rung.separate else 1, fuses=() if rung.separate else ("token",), backward=False,
        architectures=ARCHITECTURES, barriers=functools.partial(count_barriers, name),
        in_a_row=functools.partial(run_in_a_row, name),
        engine=functools.partial(make_engine, name), engine_bytes=functools.partial(packing_bytes, summed=rung.summed),
        prompt_steps=functools.partial(prompt_steps, name),
    )(functools.wraps(run)(functools.partial(run, name)))  # fmt: skip
    variant.summary = rung.summary
    variant.supports(needs_hopper)
    variant.supports(needs_numpy)
    variant.supports(functools.partial(has_a_plan, name))
    variant.kernels(functools.partial(builds, name))
