"""Proofs that a plan is sound on a device. They run before its kernel does. The process and the cache folder keep their success.

``kernels.py`` calls it for each plan that it loads, and again before the first sampled token. The megakernel's variants ask
:func:`resources_of`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import pkgutil
import re
from collections.abc import Callable

from onelaunch import folders
from onelaunch.decode.codegen.layout import THREADS, Tuning, layout_of
from onelaunch.decode.model.config import SIZES, ModelConfig
from onelaunch.decode.plan.check import Resources, check
from onelaunch.decode.plan.levels import LEVELS, plan_for
from onelaunch.decode.plan.phases import ROUNDS, Plan
from onelaunch.device.architectures import HOPPER_SHARED_BYTES

_REGISTERS = 168
"""Most registers per thread.

Nine warps are distributed over the four partitions of an SM, so that one partition hosts three: 16,384 / 96 threads, rounded
down to a multiple of eight.
"""

SAMPLED = (ROUNDS, 0, ROUNDS)
"""Numbers of radix-select passes of the consecutive tokens in the sampling check.

A token's number depends on its logits, so the most and the fewest are checked one after the other.
"""

_PLANNED = (*(name for name in SIZES if name != "max_position_embeddings"), "qk_norm")
"""Fields of a configuration on which plans depend. Without norms of heads, CTAs exchange no sums of their squares."""

_IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t]+(onelaunch\.decode[\w.]*|\.)", re.MULTILINE)
"""Pattern of an import of a module of :mod:`onelaunch.decode`, also of a relative one."""


def checked_plan(config: ModelConfig, level: str, ctas: int, tuning: Tuning) -> Plan:
    """Return the plan of an optimization level for a device with ``ctas`` SMs, after it was proved sound.

    Raises:
        PlanError: the plan is not sound on such a device.
    """
    _check(_planned(config), level, ctas, tuning)
    return plan_for(config, level, ctas)


def check_sampling(config: ModelConfig, level: str, ctas: int) -> None:
    """Raise :class:`~onelaunch.errors.PlanError` unless a level's plan is sound for sampled tokens.

    The check takes as long as that of greedy tokens, so it runs only when the first token is sampled.
    """
    _check_sampling(_planned(config), level, ctas)


def resources_of(plan: Plan, tuning: Tuning, ctas: int) -> Resources:
    """Return the resources that a plan's launch needs, and those of a device with ``ctas`` SMs.

    The megakernel's variants call it too, to tell whether they can run on a device.
    """
    return Resources(THREADS, _REGISTERS, layout_of(plan, tuning).bytes, ctas)


def _planned(config: ModelConfig) -> ModelConfig:
    """Return a configuration reduced to the fields on which plans depend, so that models with the same plans share a proof."""
    return ModelConfig(**{name: getattr(config, name) for name in _PLANNED})


@functools.lru_cache(maxsize=64)
def _check(config: ModelConfig, level: str, ctas: int, tuning: Tuning) -> None:
    """Prove the plan of greedy tokens.

    The number of KV splits in use depends on the position. The proof therefore follows consecutive tokens with few (``short``)
    and with many splits, in both orders, and with ``query_merge`` also with the number in ``between``.
    """

    def proof() -> None:
        plan, short = plan_for(config, level, ctas), plan_for(config, level, ctas, 1)
        plans = (plan,) * 4 if plan.splits == 1 else (short, plan, plan, short)
        if plan.query_merge > 1:
            between = plan_for(config, level, ctas, plan.splits)
            plans = (short, between, plan, between, between, short)
        check(*plans, resources=resources_of(plan, tuning, ctas))

    _prove((config, level, LEVELS[level], ctas, tuning, HOPPER_SHARED_BYTES), proof)


@functools.lru_cache(maxsize=64)
def _check_sampling(config: ModelConfig, level: str, ctas: int) -> None:
    """Prove the plan of sampled tokens."""

    def proof() -> None:
        check(*(plan_for(config, level, ctas, rounds=rounds) for rounds in SAMPLED))

    _prove((config, level, LEVELS[level], ctas, SAMPLED), proof)


def _prove(subject: tuple[object, ...], proof: Callable[[], None]) -> None:
    """Run a proof, unless the cache folder records one of the same subject by the same code. A proof takes about a second."""
    key = hashlib.sha256(repr((sorted(proof_sources().items()), subject)).encode()).hexdigest()[:32]
    record = folders.cache_folder() / "plans" / key
    if folders.kept(record) is not None:
        return
    proof()
    folders.keep(record, b"")


def proof_sources() -> dict[str, str]:
    """Return the source of each module of :mod:`onelaunch.decode` on which a proof depends, by module name.

    The modules are found by following imports from this module, so that a module that moves or a new helper cannot be left out.
    An import of a package counts as an import of all its modules.
    """
    sources: dict[str, str] = {}
    waiting = {__name__}
    while waiting:
        name = waiting.pop()
        sources[name] = source = source_of(name)
        for imported in _IMPORT.findall(source):
            waiting |= _modules(name.rpartition(".")[0] if imported == "." else imported)
        waiting -= sources.keys()
    return sources


def source_of(module: str) -> str:
    """Return the source of a module."""
    spec = importlib.util.find_spec(module)
    source = spec.loader.get_source(module) if spec is not None and hasattr(spec.loader, "get_source") else None
    if source is None:
        raise ImportError(f"the source of {module} is not here", name=module)
    return source


def _modules(name: str) -> set[str]:
    """Return a module's name, and the names of all modules that a package holds."""
    spec = importlib.util.find_spec(name)
    places = None if spec is None else spec.submodule_search_locations
    return {name}.union(*(_modules(f"{name}.{each.name}") for each in pkgutil.iter_modules(places or ())))
