"""Variants of ``decode_step`` by kernels of our own: the ladder of :mod:`onelaunch.decode.rungs`, on Hopper GPUs."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

import torch

from onelaunch.decode.config import ModelConfig
from onelaunch.decode.contract import DecodeCall, Results, decode_step
from onelaunch.decode.engine import Arriving, Engine, Request, TorchEngine, check_witness, witness
from onelaunch.decode.packing import packing_bytes, stream_bytes
from onelaunch.decode.rungs import RUNGS, plan_for, unsupported
from onelaunch.decode.sampling import Sampler
from onelaunch.decode.weights import Weights
from onelaunch.device.hardware import HOPPER_SMS, processors
from onelaunch.errors import PlanError
from onelaunch.kernels.hopper import needs_hopper
from onelaunch.launch.build import Build, CudaBuild
from onelaunch.operation import Query

if TYPE_CHECKING:
    from onelaunch.decode.launch import Kernels  # with NumPy, which only those need who run it

ARCHITECTURES = ("sm_90a",)

BATCH = 16
"""Tokens of a launch: the host then asks every few milliseconds."""


LAYER, LAUNCH, RATE = 0.7e-3, 0.1e-3, 4e12
"""Of a short prompt: seconds of a layer in PyTorch, bound by the host; seconds of a launch and bytes of weights a second in the
kernel. An H200 and its host were measured so; with them, :func:`prompt_steps` lies a tenth to a quarter below where the times of
four models cross.
"""


def run(rung: str, call: DecodeCall) -> Results:
    """One token."""
    from onelaunch.decode.launch import kernels_for

    return call.results(kernels_for(call.weights, rung).step(call.token, call.cache))


def count_barriers(rung: str, call: DecodeCall) -> int:
    """Over the grid, for one token, by the kernel's own counter."""
    from onelaunch.decode.launch import kernels_for

    return kernels_for(call.weights, rung).barriers(call.token, call.cache)


def run_in_a_row(rung: str, call: DecodeCall, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """So many tokens ``[N]``, always the likeliest, in one launch (of a graph, one replay each), and the logits of the last."""
    from onelaunch.decode.launch import kernels_for

    kernels = kernels_for(call.weights, rung)
    with kernels.lock:
        kernels.place(call.position, call.token)
        logits = kernels.tokens(call.cache, count)
        return kernels.memory.tokens[call.position + 1 : call.position + 1 + count].long(), logits


class KernelEngine(TorchEngine):
    """The prompt as :class:`TorchEngine` reads it; then tokens by the kernel alone, many in a launch, however they are chosen.

    A rung with a launch for each phase takes the likeliest; other choices go step by step there.
    """

    @torch.inference_mode(mode=False)  # what is kept for the next text must be of use to it too
    @torch.no_grad()
    def run(self, request: Request) -> Generator[int, None, None]:
        """See :class:`onelaunch.decode.engine.Engine`."""
        if RUNGS[self.variant].separate and not request.sampling.plain:
            yield from super().run(request)
            return
        kernels, text = self._kernels(), object()
        prompt = torch.tensor(request.prompt, device=self.weights.device)
        sampler = Sampler(request.sampling, prompt, self.config.vocab_size)
        steps = len(prompt) <= self._prompt_steps()
        with kernels.lock if steps else contextlib.nullcontext():  # no error of these steps is cleared before it is on its way
            logits, cache = self._read(prompt)
            last, made = sampler(logits, cache.length), 1
            state = kernels.memory.state if steps else torch.zeros_like(kernels.memory.state)
            batches = deque([Arriving(last, state, witness(logits))])
        while batches:
            while len(batches) < 2 and made < request.max_new_tokens:  # the device makes some while the host hands out others
                count = min(BATCH, request.max_new_tokens - made)
                cache = self._room(cache, cache.length + count)
                with kernels.lock:
                    if kernels.owner is not text:  # at first, or because another text came between
                        kernels.place(cache.length, last, text)
                    logits = kernels.tokens(cache, count, sampler)
                    cache, made = cache.with_length(cache.length + count), made + count
                    new = kernels.memory.tokens[cache.length + 1 - count : cache.length + 1]
                    batches.append(Arriving(new, kernels.memory.state, witness(logits)))
                last = batches[-1].copies[0][-1:]  # may be still on its way; whatever reads it on the device comes behind
            tokens, state, number = batches.popleft().wait()
            kernels.check(state)
            check_witness(number)
            for known in tokens.tolist():
                yield known
                if known in request.ends:
                    return

    def _kernels(self) -> Kernels:
        from onelaunch.decode import launch  # with NumPy

        return launch.kernels_for(self.weights, self.variant)

    def _note(self) -> Callable[[], None] | None:
        return self._kernels().note()


def make_engine(rung: str, weights: Weights) -> Engine:
    """The engine of a rung."""
    return KernelEngine(weights, rung)


def config_in(query: Query) -> ModelConfig:
    """The model of a query, as far as plans look at it."""
    layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary, _ = query.sizes
    return ModelConfig(
        vocabulary, hidden, intermediate, layers, heads, kv_heads, head_dim,
        tie_word_embeddings="tied" in query.flags, attention_bias="bias" in query.flags, dtype=query.dtype,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def not_resident(rung: str, config: ModelConfig, ctas: int) -> str | None:
    """Why a rung's CTAs cannot run all at once on a device with so many processors.

    That alone depends on the device; order is proved when a rung is asked for, at the making of its kernels, and not of all six.
    """
    from onelaunch.decode.check import check_room
    from onelaunch.decode.emit import Tuning
    from onelaunch.decode.launch import room_of

    plan = plan_for(config, rung, ctas)
    try:
        check_room(plan, room_of(plan, Tuning(), ctas))
    except PlanError as error:
        return f"has no sound plan here: {error.problem}"
    return None


def needs_numpy(_: Query) -> str | None:
    """The check of plans is made of it; PyTorch comes without."""
    return None if importlib.util.find_spec("numpy") else "needs numpy: pip install 'onelaunch[decode]'"


def has_a_plan(rung: str, query: Query) -> str | None:
    """Sizes that the kernels are written for, and CTAs that can all be resident."""
    config = config_in(query)
    return unsupported(config) or not_resident(rung, config, processors(torch.device(query.device)))


def prompt_steps(rung: str, config: ModelConfig) -> int:
    """Tokens of a prompt that the kernel reads, one in a launch, before the host has launched PyTorch's prefill.

    A process that reads no longer one does not wake cuBLAS either, which takes a tenth of a second.
    """
    if RUNGS[rung].separate:
        return 0
    step = LAUNCH + stream_bytes(config, summed=RUNGS[rung].summed) / RATE
    return int(config.num_hidden_layers * LAYER / step)


MODELS = {
    "Qwen3-0.6B": ModelConfig(151_936, 1024, 3072, 28, 16, 8, 128, tie_word_embeddings=True),
    "small and untied": ModelConfig(1000, 128, 384, 2, 4, 1, 32),
}
"""That builds are made for."""


def builds(rung: str, architecture: str) -> list[Build]:
    """The kernel of a rung for a model of usual size; that of ``streaming`` also for a small one."""
    from onelaunch.decode.emit import PRODUCTS, THREADS, Tuning, layout_of, source

    if architecture not in ARCHITECTURES:
        return []
    found: list[Build] = []
    for name, config in MODELS.items():
        plan = plan_for(config, rung, HOPPER_SMS)
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
