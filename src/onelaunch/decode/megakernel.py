"""Variants of ``decode_step`` by kernels of our own: the ladder of :mod:`onelaunch.decode.rungs`, on Hopper GPUs."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING

import torch

from onelaunch import nvrtc
from onelaunch.decode.cache import KVCache
from onelaunch.decode.config import ModelConfig
from onelaunch.decode.contract import DecodeCall, Results, decode_step
from onelaunch.decode.engine import Engine, Request, TorchEngine
from onelaunch.decode.model import prefill
from onelaunch.decode.rungs import RUNGS, plan_for, unsupported
from onelaunch.decode.weights import Weights
from onelaunch.errors import PlanError
from onelaunch.hardware import is_hopper, processors
from onelaunch.operation import Build, CudaBuild, Query

if TYPE_CHECKING:
    from onelaunch.decode.launch import Kernels  # with NumPy, which only those need who run it

ARCHITECTURES = ("sm_90a",)

BATCH = 16
"""Tokens of a launch, when the likeliest is always taken: the host then asks every few milliseconds."""


def run(rung: str, call: DecodeCall) -> Results:
    """One token."""
    from onelaunch.decode.launch import kernels_for

    return call.results(kernels_for(call.weights, rung).step(call.token, call.cache))


class KernelEngine(TorchEngine):
    """Prefill by PyTorch; then the likeliest tokens by the kernel alone, many in a launch. Other choices go step by step."""

    @torch.no_grad()
    def run(self, request: Request) -> Generator[int, None, None]:
        """See :class:`onelaunch.decode.engine.Engine`."""
        if not request.sampling.greedy or request.sampling.repetition_penalty != 1:
            yield from super().run(request)
            return
        from onelaunch.decode.launch import kernels_for

        kernels = kernels_for(self.weights, self.variant)
        prompt = torch.tensor(request.prompt, device=self.weights.device)
        cache = self._room(KVCache.empty(self.config, len(prompt), self.weights.device), len(prompt))
        logits, cache = prefill(self.weights, prompt, cache)
        token = logits.argmax()[None]
        kernels.place(cache.length, token)
        batches, made = deque([_Batch(kernels, cache.length, 1)]), 1
        while batches:
            while len(batches) < 2 and made < request.max_new_tokens:  # the device makes some while the host hands out others
                count = min(BATCH, request.max_new_tokens - made)
                cache = self._room(cache, cache.length + count)
                kernels.tokens(cache, count)
                cache, made = cache.with_length(cache.length + count), made + count
                batches.append(_Batch(kernels, cache.length + 1 - count, count))
            for known in batches.popleft().wait():
                yield known
                if known in request.ends:
                    return


class _Batch:
    """Tokens on their way to the host, with the kernel's word whether all went well."""

    def __init__(self, kernels: Kernels, position: int, count: int) -> None:
        found = (kernels.memory.tokens[position : position + count], kernels.memory.state)
        self._kernels = kernels
        self._tokens, self._state = (torch.empty(len(each), dtype=each.dtype, pin_memory=True) for each in found)
        self._tokens.copy_(found[0], non_blocking=True)
        self._state.copy_(found[1], non_blocking=True)
        self._there = torch.cuda.Event()
        self._there.record(torch.cuda.current_stream(kernels.device))

    def wait(self) -> list[int]:
        """Raises :class:`onelaunch.errors.DecodeStalled`."""
        self._there.synchronize()
        self._kernels.check(self._state)
        return self._tokens.tolist()


def make_engine(rung: str, weights: Weights) -> Engine:
    """The engine of a rung."""
    return KernelEngine(weights, rung)


def needs_hopper(query: Query) -> str | None:
    """The kernels are made of that chip's instructions."""
    if query.device_type != "cuda" or not is_hopper(torch.device(query.device)):
        return "needs an NVIDIA GPU of compute capability 9.0"
    return nvrtc.missing()


def config_in(query: Query) -> ModelConfig:
    """The model of a query, as far as plans look at it."""
    layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary, _ = query.sizes
    return ModelConfig(
        vocabulary, hidden, intermediate, layers, heads, kv_heads, head_dim,
        tie_word_embeddings="tied" in query.flags, attention_bias="bias" in query.flags, dtype=query.dtype,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def what_plans_hold(rung: str, config: ModelConfig, ctas: int) -> str | None:
    """Why a rung has no sound plan for a model on a device with so many processors."""
    from onelaunch.decode.emit import Tuning
    from onelaunch.decode.launch import checked_plan

    try:
        checked_plan(config, rung, ctas, Tuning())
    except PlanError as error:
        return f"has no sound plan here: {error.problem}"
    return None


def has_a_plan(rung: str, query: Query) -> str | None:
    """Sizes that the kernels are written for, and CTAs that can all be resident."""
    config = config_in(query)
    return unsupported(config) or what_plans_hold(rung, config, processors(torch.device(query.device)))


MODELS = {
    "Qwen3-0.6B": ModelConfig(151_936, 1024, 3072, 28, 16, 8, 128, tie_word_embeddings=True),
    "small and untied": ModelConfig(1000, 128, 384, 2, 4, 1, 32),
}
"""That builds are made for."""

PROCESSORS = 132


def builds(rung: str, architecture: str) -> list[Build]:
    """The kernel of a rung for a model of usual size; the last of the ladder also for a small one."""
    from onelaunch.decode.emit import PRODUCTS, THREADS, Tuning, layout_of, source

    if architecture not in ARCHITECTURES:
        return []
    found: list[Build] = []
    for name, config in MODELS.items():
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
        architectures=ARCHITECTURES, barriers=plan_for(MODELS["Qwen3-0.6B"], name, PROCESSORS).barriers(),
        engine=functools.partial(make_engine, name),
    )(functools.wraps(run)(functools.partial(run, name)))  # fmt: skip
    variant.summary = rung.summary
    variant.supports(needs_hopper)
    variant.supports(functools.partial(has_a_plan, name))
    variant.kernels(functools.partial(builds, name))
