"""Launches of the decode kernels: what a model needs on its device, made once, and tokens from it."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch

from onelaunch import folders, nvrtc
from onelaunch.decode.codegen.emit import KINDS, source
from onelaunch.decode.codegen.layout import THREADS, Tuning, launch_of, layout_of
from onelaunch.decode.model.cache import KVCache
from onelaunch.decode.model.config import SIZES, ModelConfig
from onelaunch.decode.model.sampling import Sampler
from onelaunch.decode.model.weights import Weights
from onelaunch.decode.plan.check import Room, check
from onelaunch.decode.plan.packing import pack
from onelaunch.decode.plan.phases import PRODUCTS, ROUNDS, Phase, Plan
from onelaunch.decode.plan.rungs import plan_for
from onelaunch.decode.runtime.engines import Arriving, InTurn
from onelaunch.decode.runtime.memory import ERROR, OUT_OF_RANGE, Constants, Memory
from onelaunch.errors import ArgumentError, DecodeOverflow, DecodeStalled
from onelaunch.hardware import HOPPER_SHARED_BYTES, processors, room_for

REGISTERS = 168
"""Of a thread, at most: nine warps share the registers of four partitions."""

DRAWN = (ROUNDS, 0, ROUNDS)
"""Rounds of tokens in a row that are checked: how many they take depends on what the logits are."""

GRAPHS = 4
"""Captured steps that are kept for each model: caches that lie elsewhere."""


def checked_plan(config: ModelConfig, rung: str, ctas: int, tuning: Tuning) -> Plan:
    """A rung's plan for a device with so many processors; raises :class:`onelaunch.errors.PlanError` if it is not sound there."""
    _check(_planned(config), rung, ctas, tuning)
    return plan_for(config, rung, ctas)


PLANNED = tuple(name for name in SIZES if name != "max_position_embeddings")
"""What plans look at of a configuration."""

PROVED_BY = (
    "plan/builder.py",
    "plan/check.py",
    "model/config.py",
    "codegen/layout.py",
    "runtime/kernels.py",
    "plan/phases.py",
    "plan/rungs.py",
)
"""What a plan, its room and the proof are made by."""


def _planned(config: ModelConfig) -> ModelConfig:
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

    _prove((config, rung, ctas, tuning, HOPPER_SHARED_BYTES), proof)


@functools.lru_cache(maxsize=64)
def _check_drawn(config: ModelConfig, rung: str, ctas: int) -> None:
    """The same of tokens that are drawn; once a text is, for it takes as long again."""
    _prove((config, rung, ctas, DRAWN), lambda: check(*(plan_for(config, rung, ctas, rounds=rounds) for rounds in DRAWN)))


def _prove(what: tuple[object, ...], proof: Callable[[], None]) -> None:
    """A proof takes a second: that there is one is kept in the cache folder, for these files of code."""
    code = [nvrtc.read("onelaunch.decode", file) for file in PROVED_BY]
    proved = folders.cache_folder() / "plans" / hashlib.sha256(repr((code, what)).encode()).hexdigest()[:32]
    if folders.kept(proved) is not None:
        return
    proof()
    folders.keep(proved, b"")


def room_of(plan: Plan, tuning: Tuning, ctas: int) -> Room:
    """What a plan's launch needs, on a device with so many processors."""
    return Room(THREADS, REGISTERS, layout_of(plan, tuning).bytes, ctas)


class Kernels:
    """A model, ready to be run by one rung of the ladder: weights repacked, kernel compiled and loaded.

    Launches follow each other, also from several streams. Texts may take turns: each looks, with :attr:`lock` held, whether it is
    still the :attr:`owner`, and places itself again where it is not.

    Attributes:
        owner: whose text the last launch or :meth:`place` left; ``None`` for nobody's, such as after a :meth:`step`.
        lock: held from that look until what the launch made is on its way.

    Args:
        weights: on an NVIDIA GPU.
        rung: a name of :data:`onelaunch.decode.plan.rungs.RUNGS`.
        tuning: of the ring.

    Raises:
        PlanError: the plan cannot run on this device.
        DeviceMemoryError: there is no room for the weights a second time.
        CompilerMissing, CompileError, DriverError: as :func:`onelaunch.nvrtc.load`.
    """

    def __init__(self, weights: Weights, rung: str, tuning: Tuning | None = None) -> None:
        tuning = tuning or Tuning()
        self.weights = weights.map(lambda tensor: tensor)  # another object: what is kept by a model must not keep it alive
        self.device = weights.device
        self.plan = checked_plan(weights.config, rung, processors(weights.device), tuning)
        constants = _constants(weights, self.plan)
        with room_for("what the CTAs of a launch tell each other", self.device):
            self.memory = Memory(self.plan, constants, weights.config.max_position_embeddings, stamps=tuning.stamps)
        alone: tuple[Phase | None, ...] = self.plan.phases() if self.plan.separate else (None,)
        self._functions = {
            phase and phase.op: nvrtc.load(
                source(self.plan, tuning, phase), self.device, KINDS, threads=THREADS,
                shared_bytes=layout_of(self.plan, tuning).bytes, cooperative=not self.plan.separate, overlap=self.plan.separate,
            )
            for phase in alone
        }  # fmt: skip
        self.owner: object = None
        self.lock = threading.RLock()
        self._turns = InTurn(self.device)
        self._noted: Arriving | None = None
        self._graphs: OrderedDict[tuple[int, int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = OrderedDict()

    def step(self, token: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Logits ``[V]`` float32 after a token ``[1]`` int64 at position ``cache.length``, whose row of the cache is written.

        The text that was placed is nobody's afterwards. Nothing here waits for the device: a launch that gave up is seen by
        :meth:`note`, or by the first step that finds the news there.

        Raises:
            DecodeStalled: an earlier step gave up.
        """
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with self.lock:
            if self._noted is not None and not capturing and self._noted.arrived():
                self.note()()
            self.owner = None
            self._turns.take()
            if not self.plan.separate or capturing:
                logits = torch.empty(self.weights.config.vocab_size, dtype=torch.float32, device=self.device)
                self._launch(self.memory.arguments(cache, logits, token), cache, 1, cache.length)
            else:
                self.place(cache.length, token)
                logits = self.tokens(cache, 1).clone()
            if not capturing:
                self._noted = Arriving(self.memory.state)
            return logits

    def note(self) -> Callable[[], None]:
        """What waits until the last step is done, and raises :class:`DecodeStalled` if it gave up."""
        noted = self._noted

        def heed() -> None:
            if noted is not None:
                self.check(*noted.wait())

        return heed

    def barriers(self, token: torch.Tensor, cache: KVCache) -> int:
        """Barriers over the grid that a :meth:`step` met at, by the counter that every CTA bumps at each; waits for it.

        Raises:
            DecodeStalled: the step, or an earlier one, gave up.
        """
        with self.lock:
            before = int(self.memory.counters[0])
            self.step(token, cache)
            self.check()
            bumps = (int(self.memory.counters[0]) - before) % 2**32  # it goes on over launches, and around
            return -(-bumps // self.plan.ctas)

    def place(self, position: int, token: torch.Tensor, owner: object = None) -> None:
        """Says where a text stands, and whose it is: its position, and the token ``[1]`` there."""
        self._turns.take()
        self.memory.state[:1].fill_(position)
        self.memory.tokens[position : position + 1].copy_(token, non_blocking=True)
        self.owner = owner

    def tokens(self, cache: KVCache, count: int, sampler: Sampler | None = None) -> torch.Tensor:
        """Makes so many tokens from where the last launch or :meth:`place` left the text.

        They stand in ``memory.tokens``, by position. The cache has room for them.

        Args:
            cache: of the positions before.
            count: of tokens.
            sampler: how they are chosen, and what it has seen of the text, to which they are added; ``None`` for the likeliest,
                which is all that a plan of a launch for each phase knows.

        Returns:
            the logits ``[V]`` of the last one, as the model gives them.

        Raises:
            ArgumentError: the plan knows no such choice.
        """
        if self.plan.separate and sampler is not None and not sampler.sampling.plain:
            raise ArgumentError(f"sampler is not None; {self.plan.rung!r} takes the likeliest token only.")
        if sampler is not None and not sampler.sampling.greedy:
            _check_drawn(_planned(self.weights.config), self.plan.rung, self.plan.ctas)
        self._turns.take()
        if not self.plan.separate:
            logits = torch.empty(self.weights.config.vocab_size, dtype=torch.float32, device=self.device)
            self._launch(self.memory.arguments(cache, logits, sampler=sampler), cache, count, -1)
            return logits
        graph, logits = self._captured(cache)
        for _ in range(count):
            graph.replay()
        return logits

    def check(self, state: torch.Tensor | None = None) -> None:
        """Raises :class:`DecodeStalled` if a wait was given up, :class:`DecodeOverflow` if a sum left what its words hold.

        The next launch then begins anew.

        Args:
            state: a copy of ``memory.state`` on the host; by default what the device has once all is done.
        """
        if error := int((self.memory.state if state is None else state)[ERROR]):
            with self.lock:
                self._turns.take()
                self.memory.reset()
                self.owner = self._noted = None
            raise DecodeOverflow(self.plan.rung) if error == OUT_OF_RANGE else DecodeStalled(self.plan.rung)

    def _launch(self, arguments: list[torch.Tensor | None], cache: KVCache, count: int, position: int) -> None:
        if not self.plan.separate:
            self._functions[None]((self.plan.ctas, 1, 1), *arguments, cache.capacity, count, position, 0)
            return
        for layer, phase in self.plan.instances():
            _, ctas = launch_of(self.plan, phase)
            self._functions[phase.op]((ctas, 1, 1), *arguments, cache.capacity, 1, position, layer)

    def _captured(self, cache: KVCache) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """A step as a graph that goes on from where the one before left the text, and its logits."""
        key = (cache.keys.data_ptr(), cache.values.data_ptr(), cache.capacity)
        if key not in self._graphs:
            logits = torch.empty(self.weights.config.vocab_size, dtype=torch.float32, device=self.device)
            graph = torch.cuda.CUDAGraph()
            # by default, a stream of the device that captured first, and an error for what any other thread does meanwhile
            stream = torch.cuda.Stream(self.device)
            with torch.cuda.device(self.device), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._launch(self.memory.arguments(cache, logits), cache, 1, -1)
            self._graphs[key] = graph, logits
            while len(self._graphs) > GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key]


class _Made:
    """What was made for a model's weights. Once they are written to it is made anew, but where it lies: a CUDA graph that holds a
    step has its addresses.
    """

    def __init__(self, weights: Weights) -> None:
        weights.check()
        self.tensors = tuple(weights.tensors().values())
        self.written = self.writes()
        self.constants: dict[tuple[object, ...], tuple[Plan, Constants]] = {}
        self.kernels: dict[str, Kernels] = {}

    def renew(self) -> None:
        if (writes := self.writes()) == self.written:
            return
        for plan, constants in self.constants.values():
            constants.renew(plan)
        self.written = writes

    def writes(self) -> int:
        """How often PyTorch wrote to the tensors in place: what was repacked before is not what they hold since."""
        return sum([tensor._version for tensor in self.tensors if not tensor.is_inference()])  # noqa: SLF001


_MADE: WeakKeyDictionary[Weights, _Made] = WeakKeyDictionary()

_MAKING = threading.Lock()
"""Two threads that begin at once would repack a model twice."""


def _made(weights: Weights) -> _Made:
    """Of these weights as they are now."""
    found = _MADE.get(weights)
    if found is None:
        found = _MADE[weights] = _Made(weights)
    found.renew()
    return found


def _constants(weights: Weights, plan: Plan) -> Constants:
    """Repacked once for all plans that cut a model's matrices alike."""
    key = (
        plan.ctas,
        plan.blocks,
        *(phase.shares[cta].units for phase in plan.phases() for cta in range(plan.ctas) if phase.op in PRODUCTS),
    )
    kept = _made(weights).constants
    if key not in kept:
        with room_for("the weights in the order of their use", weights.device):
            stream = pack(weights, plan)
            constants = Constants.of(weights.map(lambda tensor: tensor), stream, weights.config.max_position_embeddings)
            kept[key] = plan, constants
    return kept[key][1]


@torch.inference_mode(mode=False)
@torch.no_grad()
def kernels_for(weights: Weights, rung: str) -> Kernels:
    """The kernels of a rung for a model, kept as long as the model. Once its weights were written to they are packed again."""
    with _MAKING:
        kept = _made(weights).kernels
        if rung not in kept:
            kept[rung] = Kernels(weights, rung)
        return kept[rung]
