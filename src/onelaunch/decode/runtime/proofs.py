"""Proofs of plans for a device: that a plan is sound is checked before its kernel runs, and kept in the cache folder."""

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
from onelaunch.decode.plan.check import Room, check
from onelaunch.decode.plan.phases import ROUNDS, Plan
from onelaunch.decode.plan.rungs import RUNGS, plan_for
from onelaunch.device.architectures import HOPPER_SHARED_BYTES

REGISTERS = 168
"""Most registers of a thread: nine warps share the registers of an SM's four partitions."""

SAMPLED = (ROUNDS, 0, ROUNDS)
"""Radix-select passes of the tokens in a row whose sampling is checked; how many a token takes depends on its logits."""

PLANNED = tuple(name for name in SIZES if name != "max_position_embeddings")
"""Fields of a configuration that plans depend on."""

IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t]+(onelaunch\.decode[\w.]*|\.)", re.MULTILINE)
"""Pattern of an import of a module of decoding."""


def checked_plan(config: ModelConfig, rung: str, ctas: int, tuning: Tuning) -> Plan:
    """Return the plan of a rung for a device with ``ctas`` SMs.

    Raises:
        PlanError: the plan is not sound there.
    """
    _check(_planned(config), rung, ctas, tuning)
    return plan_for(config, rung, ctas)


def check_sampling(config: ModelConfig, rung: str, ctas: int) -> None:
    """Raise :class:`~onelaunch.errors.PlanError` unless a rung's plan is sound for sampled tokens.

    It takes as long as the check of greedy tokens, so it runs when the first token is sampled.
    """
    _check_sampling(_planned(config), rung, ctas)


def room_of(plan: Plan, tuning: Tuning, ctas: int) -> Room:
    """Return what a plan's launch needs, on a device with ``ctas`` SMs."""
    return Room(THREADS, REGISTERS, layout_of(plan, tuning).bytes, ctas)


def _planned(config: ModelConfig) -> ModelConfig:
    """Return a configuration that equals all others with the same plans."""
    return ModelConfig(**{name: getattr(config, name) for name in PLANNED})


@functools.lru_cache(maxsize=64)
def _check(config: ModelConfig, rung: str, ctas: int, tuning: Tuning) -> None:
    def proof() -> None:
        plan, short = plan_for(config, rung, ctas), plan_for(config, rung, ctas, 1)
        plans = (plan,) * 4 if plan.splits == 1 else (short, plan, plan, short)
        if plan.joined > 1:
            between = plan_for(config, rung, ctas, plan.splits)
            plans = (short, between, plan, between, between, short)
        check(*plans, room=room_of(plan, tuning, ctas))

    _prove((config, rung, RUNGS[rung], ctas, tuning, HOPPER_SHARED_BYTES), proof)


@functools.lru_cache(maxsize=64)
def _check_sampling(config: ModelConfig, rung: str, ctas: int) -> None:
    def proof() -> None:
        check(*(plan_for(config, rung, ctas, rounds=rounds) for rounds in SAMPLED))

    _prove((config, rung, RUNGS[rung], ctas, SAMPLED), proof)


def _prove(subject: tuple[object, ...], proof: Callable[[], None]) -> None:
    """Run a proof, unless one of the same subject by the same code is in the cache folder. A proof takes a second."""
    key = hashlib.sha256(repr((sorted(proof_sources().items()), subject)).encode()).hexdigest()[:32]
    proved = folders.cache_folder() / "plans" / key
    if folders.kept(proved) is not None:
        return
    proof()
    folders.keep(proved, b"")


def proof_sources() -> dict[str, str]:
    """Return the source of each module of decoding that a proof depends on, by module name.

    The list is followed from this module's own imports, so that a module that moves or a new helper cannot be left out. An import
    of a package brings all of its modules.
    """
    sources: dict[str, str] = {}
    waiting = {__name__}
    while waiting:
        name = waiting.pop()
        sources[name] = source = source_of(name)
        for imported in IMPORT.findall(source):
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
