"""Variants of ``decode_step`` by the megakernel, on Hopper GPUs: one per optimization level of :data:`LEVELS`.

The plan of a level says which CTA computes what in each phase of a token, and how phases are ordered; the kernel is generated
from it. Each level is registered as a variant at the end of this module, with the engine that decodes whole requests with it.

The dispatcher, studies and tests find registered variants by name. Tags and capabilities: ``fuses`` names what one launch
computes, a whole ``token``, or nothing with a launch per phase. ``barriers``, ``in_a_row``, ``engine``, ``engine_bytes``,
``load``, ``load_bytes`` and ``prompt_steps`` are functions that ``decode/step/capabilities.py`` explains. Of a level,
``separate`` says that each phase is a launch, and ``summed`` that the output projection is split over heads.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import torch

from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.request import Engine
from onelaunch.decode.model.weights import ModelWeights
from onelaunch.decode.plan.levels import LEVELS, plan_for, unsupported
from onelaunch.decode.plan.packing import packing_bytes, stream_bytes
from onelaunch.decode.runtime.engines import KernelEngine
from onelaunch.decode.runtime.packed import builds_of_copies, packed_bytes
from onelaunch.decode.runtime.products import builds_of_products, takes
from onelaunch.decode.step.contract import DecodeCall, Results, decode_step
from onelaunch.decode.step.reference import config_of
from onelaunch.device.architectures import find_architecture
from onelaunch.device.hardware import processors
from onelaunch.device.tools import package_installed
from onelaunch.errors import InspectionError, PlanError
from onelaunch.launch.build import Build, CudaBuild, build_of_kernel
from onelaunch.operation import Case, Query
from onelaunch.operation.requirements import needs_hopper

_ARCHITECTURES = ("sm_90a",)
"""Architectures that the kernels are compiled for."""

_PREFILL_LAYER_SECONDS, _LAUNCH_SECONDS, _WEIGHT_BYTES_PER_SECOND = 0.7e-3, 0.1e-3, 4e12
"""Seconds that a host needs for a layer of PyTorch's prefill, seconds of a launch, and bytes of weights read per second.

Measured on an H200 and its host. With them, :func:`prompt_steps` is a tenth to a quarter less than the prompt length at which
prefill becomes faster, for each of four models.
"""

_PASS_LAYER_SECONDS = 0.115e-3
"""Seconds that a device needs for a layer of a captured pass (``runtime/prompts.py``), besides those of the weights: 45 launches.

On an H100 passes for 16 tokens take 3.73 ms for Qwen3-0.6B, 2.46 for Llama-3.2-1B and 9.99 for Qwen3-8B; by this number
they take 3.5, 2.5 and 8.2.
"""

_COPY_BYTES_PER_SECOND = 3e12
"""Bytes read and written per second by the kernel that copies matrices out of the stream; predicted, not measured yet."""


def run(level: str, call: DecodeCall) -> Results:
    """Run one token: in a launch of its own, or with ``graph`` in a launch per phase."""
    from onelaunch.decode.runtime.kernels import session_for  # imports NumPy, which importing the variants does not need

    return call.results(session_for(call.weights, level).step(call.token, call.cache))


def count_barriers(level: str, call: DecodeCall) -> int:
    """Return the number of grid barriers of one token, by the kernel's own counter."""
    from onelaunch.decode.runtime.kernels import session_for

    return session_for(call.weights, level).barriers(call.token, call.cache)


def _run_in_a_row(level: str, call: DecodeCall, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``count`` greedy tokens ``[N]`` from one launch, or one graph replay each, and the logits ``[V]`` of the last."""
    from onelaunch.decode.runtime.kernels import session_for

    with session_for(call.weights, level).sequence(call.cache, call.token) as sequence:
        logits = sequence.step(count)
        return sequence.tokens().long(), logits


def make_engine(level: str, weights: ModelWeights) -> Engine:
    """Return the engine of an optimization level."""
    return KernelEngine(weights, level)


def load(level: str, folder: Path, config: ModelConfig, device: torch.device) -> ModelWeights:
    """Return the weights of a checkpoint, packed for the plan of a level on this device; they exist once there."""
    from onelaunch.decode.runtime.packed import load_packed

    return load_packed(folder, config, device, plan_for(config, level, processors(device)))


def _config_in(query: Query) -> ModelConfig:
    """Return the configuration of a query's model: the fields on which plans depend."""
    layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary, _ = query.sizes
    return ModelConfig(
        vocabulary, hidden, intermediate, layers, heads, kv_heads, head_dim,
        tie_word_embeddings="tied" in query.flags, attention_bias="bias" in query.flags, dtype=query.dtype,
        output_bias="no_output_bias" not in query.flags, qk_norm="no_qk_norm" not in query.flags,
        unrotated_layers=(0,) if "unrotated" in query.flags else (),
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def not_resident(level: str, config: ModelConfig, ctas: int) -> str | None:
    """Return why a plan's CTAs cannot all be resident on a device with ``ctas`` SMs, or ``None``.

    Only this part of the check compares the plan with the device's resources. The ordering of the plan's phases is proved later,
    when its session is made.
    """
    from onelaunch.decode.codegen.layout import Tuning
    from onelaunch.decode.plan.check import check_residency
    from onelaunch.decode.runtime.proofs import resources_of

    plan = plan_for(config, level, ctas)
    try:
        check_residency(plan, resources_of(plan, Tuning(), ctas))
    except PlanError as error:
        return f"has no sound plan here: {error.problem}"
    return None


def _needs_numpy(_: Query) -> str | None:
    """Return why the check of plans, which uses NumPy, cannot run, or ``None``."""
    return None if package_installed("numpy") else "needs numpy: pip install 'onelaunch[decode]'"


def has_a_plan(level: str, query: Query) -> str | None:
    """Return why there is no plan, or ``None``: the kernels do not take the model, or the CTAs cannot all be resident."""
    config = _config_in(query)
    return unsupported(config) or not_resident(level, config, processors(torch.device(query.device)))


def prompt_steps(level: str, config: ModelConfig, *, captured: bool = False, unpacked: bool = False) -> int:
    """Return the longest prompt, in tokens, that single launches read before the host has launched PyTorch's prefill.

    With ``captured`` it is the longest that they read before the device has run the captured pass; with ``unpacked`` that pass
    first copies the matrices of each layer out of the stream.

    A process whose prompts are all that short does not load cuBLAS either, which takes a tenth of a second.
    """
    if LEVELS[level].separate:
        return 0
    stream, layers = stream_bytes(config, summed=LEVELS[level].summed), config.num_hidden_layers
    weights = stream / _WEIGHT_BYTES_PER_SECOND
    copies = 2 * stream / _COPY_BYTES_PER_SECOND if unpacked else 0.0  # beside the launches
    other = max(layers * _PASS_LAYER_SECONDS, copies) + weights if captured else layers * _PREFILL_LAYER_SECONDS
    return int(other / (_LAUNCH_SECONDS + weights))


BUILT = {
    "Qwen3-0.6B": ModelConfig(151_936, 1024, 3072, 28, 16, 8, 128, tie_word_embeddings=True),
    "small and untied": ModelConfig(
        1000, 160, 416, 4, 6, 2, 32, qk_norm=False, attention_bias=True, output_bias=False, unrotated_layers=(3,)
    ),
}
"""Configurations for which ``onelaunch inspect``, ``onelaunch prebuild`` and CI compile kernels, by their name in listings.

The second has what Qwen3-0.6B lacks: biases, layers that do not rotate, and sizes that are no multiple of 256.
"""


def builds(level: str, architecture: str) -> list[Build]:
    """Return the builds of a level: for Qwen3-0.6B, and for ``streaming`` also for a small untied model.

    Raises:
        InspectionError: NumPy is not installed.
    """
    if architecture not in _ARCHITECTURES:
        return []
    if not package_installed("numpy"):
        raise InspectionError("The plans of the megakernel need NumPy. Install it with: pip install 'onelaunch[decode]'.")
    from onelaunch.decode.runtime.kernels import kernels_of  # imports NumPy

    found: list[Build] = []
    for name, config in BUILT.items():
        if level != "streaming" and name != "Qwen3-0.6B":
            continue
        plan = plan_for(config, level, find_architecture(architecture).processors)
        for phase, kernel in kernels_of(plan).items():
            found.append(build_of_kernel(kernel, f"{name}, {phase.name}" if phase else name))
        if level == "streaming":
            copies = builds_of_copies(plan, architecture)
            products = builds_of_products(plan, architecture) if takes(plan) else []
            found += [replace(build, name=f"{name}, {build.name}") for build in copies + products]
    return found


def kernels_of_case(level: str, case: Case, device: torch.device) -> list[CudaBuild]:
    """Return the kernels of a level that a call of a case compiles on a GPU."""
    from onelaunch.decode.runtime.kernels import builds_on  # imports NumPy

    return builds_on(config_of(case), level, device)


# wraps gives each partial function the module of run. By functools, its own module, the dispatcher would take it for a variant of
# another package. Predicates are asked in order: has_a_plan, which imports NumPy and builds a plan, comes last.
for level, options in LEVELS.items():
    variant = decode_step.variant(
        level, launches=None if options.separate else 1, fuses=() if options.separate else ("token",), backward=False,
        architectures=_ARCHITECTURES, barriers=functools.partial(count_barriers, level),
        in_a_row=functools.partial(_run_in_a_row, level),
        engine=functools.partial(make_engine, level), engine_bytes=functools.partial(packing_bytes, summed=options.summed),
        load=functools.partial(load, level), load_bytes=functools.partial(packed_bytes, summed=options.summed),
        prompt_steps=functools.partial(prompt_steps, level),
    )(functools.wraps(run)(functools.partial(run, level)))  # fmt: skip
    variant.summary = options.summary
    variant.supports(needs_hopper)
    variant.supports(_needs_numpy)
    variant.supports(functools.partial(has_a_plan, level))
    variant.kernels(functools.partial(builds, level))
    variant.kernels_of_case(functools.partial(kernels_of_case, level))
