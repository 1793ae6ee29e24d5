"""Decode session: the owner of a kernel's device memory, which requests and CUDA streams share.

All launches of a loaded kernel use one set of buffers. The session records which sequence the buffers belong to, orders the work
of several streams, and raises the error of a launch once a copy of the kernel's state has arrived on the host. Enqueuing a
launch does not wait for the device, except to capture a graph first (plans with a launch per phase). :meth:`Pending.wait` waits,
and so do the functions whose docstrings say so. ``kernels.py`` makes sessions, and ``models.py`` keeps them; the megakernel's
engines and its variants of ``decode_step`` launch through them.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

import torch

from onelaunch.decode.model.cache import KVCache
from onelaunch.decode.model.sampling import Sampler
from onelaunch.decode.plan.phases import Plan
from onelaunch.decode.runtime.graphs import GraphCache, capture_on_new_stream
from onelaunch.decode.runtime.memory import ERROR, OUT_OF_RANGE, Memory
from onelaunch.decode.runtime.order import StreamOrder
from onelaunch.errors import ArgumentError, DecodeOverflow, DecodeStalled, LogitsNotFinite

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

GRAPHS = 4
"""Captured steps that a session keeps, one for each cache that sequences use."""


class Kernel(Protocol):
    """Kernel of a plan, loaded on a device."""

    @property
    def plan(self) -> Plan:
        """Plan of the kernel."""
        ...

    def launch(self, arguments: list[torch.Tensor | None], capacity: int, count: int, position: int) -> None:
        """Enqueue the launches of ``count`` tokens from ``position`` on; -1 continues where the last launch ended."""
        ...

    def prove_sampling(self) -> None:
        """Raise :class:`~onelaunch.errors.PlanError` unless the plan is sound for sampled tokens too."""
        ...


class Pending:
    """Deferred copies to the host, with the errors that they reveal when they arrive.

    The copies are enqueued on the current stream. They hold the results of the work enqueued before, and of nothing enqueued
    later.

    Args:
        device: Device of the tensors.
        tokens: Tokens to copy.
        logits: Logits ``[V]`` to test for NaN and infinity. A token drawn from such logits would be arbitrary, and might be an
            end token.
        session: Session whose error word is copied too.
        step: Pending state of the step that computed the logits; its error takes precedence.

    Attributes:
        tokens: Copy of the tokens on the host, pinned if the device is a GPU. Device work enqueued after the construction of
            this object may read it. The host may read it after :meth:`wait`.
    """

    __slots__ = ("_event", "_plan", "_probe", "_session", "_state", "_step", "tokens")

    def __init__(
        self,
        device: torch.device,
        tokens: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
        session: Session | None = None,
        step: Pending | None = None,
    ) -> None:
        probe = (
            None if logits is None else logits.sum()
        )  # a finite probe in one kernel: the sum is not finite if any logit is not
        self.tokens = None if tokens is None else to_host(tokens)
        self._state = None if session is None else to_host(session.memory.state)
        self._probe = None if probe is None else to_host(probe)
        # A session holds its last step's pending state. A strong reference back would be a cycle, which keeps both and the
        # buffers alive until Python's garbage collection.
        self._session = None if session is None else weakref.ref(session)
        self._plan = "" if session is None else session.kernel.plan.level
        self._step = step
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def arrived(self) -> bool:
        """Return whether the copies have arrived."""
        return self._event is None or self._event.query()

    def wait(self) -> list[int]:
        """Wait for the copies and return the tokens.

        Raises:
            DecodeStalled: a wait within a launch timed out.
            DecodeOverflow: a fixed-point sum left its range.
            LogitsNotFinite: a logit is NaN or infinite.
        """
        if self._event is not None:
            self._event.synchronize()
        if self._session is not None and self._state is not None and (error := int(self._state[ERROR])):
            if (session := self._session()) is not None:
                session.reset()
            raise _failure(error, self._plan)
        if self._step is not None:
            self._step.wait()
        if self._probe is not None and not math.isfinite(self._probe):
            raise LogitsNotFinite
        return [] if self.tokens is None else self.tokens.tolist()


def _failure(error: int, plan: str) -> DecodeOverflow | DecodeStalled:
    """Return the exception for an error word of the kernel's state."""
    return DecodeOverflow(plan) if error == OUT_OF_RANGE else DecodeStalled(plan)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Enqueue a copy to the host on the current stream, and return the host tensor."""
    pinned = tensor.device.type == "cuda"
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned).copy_(tensor, non_blocking=True)


class Session:
    """Owner of a kernel's device memory: it orders streams, binds sequences to the buffers, and holds deferred errors.

    Args:
        kernel: Loaded kernel.
        memory: Buffers of the kernel.

    Attributes:
        lock: Re-entrant lock of the buffers. Hold it over several steps if no other sequence may clear their error in between.
        active: Identity of the sequence whose state the buffers hold; it does not keep that sequence's cache alive. ``None`` if
            they hold no sequence's state, such as after :meth:`step`.
        last_step: Pending state of the last :meth:`step`; ``None`` before one and after an error.
    """

    def __init__(self, kernel: Kernel, memory: Memory) -> None:
        self.kernel, self.memory = kernel, memory
        self.device = memory.constants.weights.device
        self.lock = threading.RLock()
        self.active: object = None
        self.last_step: Pending | None = None
        self.order = StreamOrder(self.device)
        self._vocabulary = memory.constants.weights.config.vocab_size
        self._graphs: GraphCache[tuple[torch.cuda.CUDAGraph, torch.Tensor]] = GraphCache(GRAPHS)

    def step(self, token: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Enqueue one step and return its logits ``[V]`` float32; the token's cache row at ``cache.length`` is written.

        Afterwards the buffers belong to no sequence. Nothing here waits for the device but the capture of a graph. The error of a
        step is raised by :attr:`last_step`, or by the first later step that finds its copy on the host.

        Args:
            token: Token at position ``cache.length``, ``[1]`` int64.
            cache: Cache of the positions before, with room for one more.

        Raises:
            DecodeStalled, DecodeOverflow: an earlier step failed.
        """
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with self.lock:
            if self.last_step is not None and not capturing and self.last_step.arrived():
                self.last_step.wait()
            self.active = None
            self.order.join()
            # A plan with a launch per phase replays the graph of a step, except within the caller's capture: a replay cannot be
            # captured.
            if not self.kernel.plan.separate or capturing:
                logits = self._logits()
                self.kernel.launch(self.memory.arguments(cache, logits, token), cache.capacity, 1, cache.length)
            else:
                self.bind(cache.length, token)
                logits = self.launch(cache, 1, None).clone()  # the next replay overwrites the graph's own logits
            if not capturing:
                self.last_step = Pending(self.device, session=self)
            return logits

    def sequence(self, cache: KVCache, token: torch.Tensor, sampler: Sampler | None = None) -> Sequence:
        """Return a new sequence that shares this session's buffers; the arguments are those of :class:`Sequence`."""
        return Sequence(self, cache, token, sampler)

    def barriers(self, token: torch.Tensor, cache: KVCache) -> int:
        """Run a :meth:`step`, wait for it, and return its number of grid barriers, by the counter to which each CTA adds one.

        Raises:
            DecodeStalled, DecodeOverflow: the step, or an earlier one, failed.
        """
        with self.lock:
            before = int(self.memory.counters[0])
            self.step(token, cache)
            self.check()
            increments = (int(self.memory.counters[0]) - before) % 2**32  # the counter is not reset between launches, and wraps
            return -(-increments // self.kernel.plan.ctas)

    def check(self) -> None:
        """Wait for the device and raise the error in its state, if there is one.

        Raises:
            DecodeStalled, DecodeOverflow: a launch failed.
        """
        if error := int(self.memory.state[ERROR]):
            self.reset()
            raise _failure(error, self.kernel.plan.level)

    def reset(self) -> None:
        """Clear the buffers after the error of a launch, so that the next launch starts from a consistent state."""
        with self.lock:
            self.order.join()
            self.memory.reset()
            self.active = self.last_step = None

    def bind(self, position: int, token: torch.Tensor, identity: object = None) -> None:
        """Bind the buffers to a sequence: write its position and the token ``[1]`` at that position.

        The caller holds :attr:`lock` and has joined :attr:`order`, as for :meth:`launch`.
        """
        self.memory.state[:1].fill_(position)
        self.memory.tokens[position : position + 1].copy_(token, non_blocking=True)
        self.active = identity

    def launch(self, cache: KVCache, count: int, sampler: Sampler | None) -> torch.Tensor:
        """Enqueue ``count`` tokens of the bound sequence and return the last one's logits ``[V]`` float32.

        With a launch per phase, the logits are those of a captured graph, which its next replay overwrites.

        The tokens are written to ``memory.tokens``, by position. A plan with a launch per phase (``separate``) can only take the
        largest logit (``plain`` sampling).

        Raises:
            ArgumentError: the plan cannot sample with these parameters.
        """
        if sampler is not None:
            if self.kernel.plan.separate and not sampler.sampling.plain:
                raise ArgumentError(f"sampler is not None; {self.kernel.plan.level!r} takes the likeliest token only.")
            if not sampler.sampling.greedy:
                self.kernel.prove_sampling()
        if not self.kernel.plan.separate:
            logits = torch.empty(self._vocabulary, dtype=torch.float32, device=self.device)
            self.kernel.launch(self.memory.arguments(cache, logits, sampler=sampler), cache.capacity, count, -1)
            return logits
        # A graph holds addresses, not the cache: a later cache at the same place with the same capacity replays it.
        key = (cache.keys.data_ptr(), cache.values.data_ptr(), cache.capacity)
        graph, logits = self._graphs.get(key, functools.partial(self.captured, cache))
        for _ in range(count):
            graph.replay()
        return logits

    def captured(self, cache: KVCache) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Capture a step that continues where the previous one ended; return the graph and its logits."""
        logits = self._logits()

        def step() -> torch.Tensor:
            self.kernel.launch(self.memory.arguments(cache, logits), cache.capacity, 1, -1)
            return logits

        return capture_on_new_stream(step, self.device)

    def _logits(self) -> torch.Tensor:
        """Return memory for the logits of a step, ``[V]`` float32."""
        return torch.empty(self._vocabulary, dtype=torch.float32, device=self.device)


class Sequence:
    """Decoding state of one request between its launches.

    Sequences take turns at the session's buffers, one ``with`` block each. Within the block the buffers hold this sequence's
    state, and no other thread enqueues work on them::

        with sequence:
            sequence.step(16)
            pending = sequence.copy_tokens()
        tokens = pending.wait()

    Args:
        session: Session that owns the buffers.
        cache: Keys and values of all positions before ``token``.
        token: Newest token ``[1]``, at position ``cache.length``.
        sampler: Sampling parameters and the tokens seen so far; ``None`` takes the largest logit.

    Attributes:
        cache: Cache of the positions so far. Assign a larger one before a turn that needs it.
        token: Newest token, on the device or in pinned host memory.
    """

    __slots__ = ("_count", "_identity", "_logits", "_sampler", "_session", "cache", "token")

    def __init__(self, session: Session, cache: KVCache, token: torch.Tensor, sampler: Sampler | None = None) -> None:
        self.cache = cache
        self._session, self._sampler, self.token = session, sampler, token
        self._identity, self._count = object(), 0
        self._logits: torch.Tensor | None = None

    def __enter__(self) -> Self:
        session = self._session
        session.lock.acquire()
        try:
            session.order.join()
            if session.active is not self._identity:  # first turn, or another sequence used the buffers since
                session.bind(self.cache.length, self.token, self._identity)
        except BaseException:
            session.lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._session.lock.release()

    def step(self, count: int) -> torch.Tensor:
        """Enqueue ``count`` tokens, for which the cache must have room, and return the last one's logits ``[V]`` float32.

        Raises:
            ArgumentError: the plan cannot sample with these parameters.
        """
        self._logits = self._session.launch(self.cache, count, self._sampler)
        self.cache = self.cache.with_length(self.cache.length + count)
        self._count = count
        return self._logits

    def tokens(self) -> torch.Tensor:
        """Return the tokens of the last :meth:`step` on the device, ``[N]`` int32: a view that later launches overwrite."""
        end = self.cache.length + 1
        return self._session.memory.tokens[end - self._count : end]

    def copy_tokens(self) -> Pending:
        """Start the copy of the last :meth:`step`'s tokens to the host."""
        session, end = self._session, self.cache.length + 1
        pending = Pending(session.device, session.memory.tokens[end - self._count : end], self._logits, session)
        if pending.tokens is not None:
            self.token = pending.tokens[-1:]  # the copy may be pending, but all readers are enqueued after it
        return pending
