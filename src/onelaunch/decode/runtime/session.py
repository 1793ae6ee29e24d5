"""A decode session: device memory that requests and streams share, and the errors that launches leave in it.

All launches of a loaded kernel write to one set of buffers. The session decides which sequence the buffers belong to, orders
the work of several streams, and raises the error of a launch once a copy of its state has arrived on the host. No launch waits
for the device: only :meth:`Pending.wait` does, and the functions that say so.
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
from onelaunch.errors import ArgumentError, DecodeOverflow, DecodeStalled, LogitsNotFinite

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

GRAPHS = 4
"""Captured steps kept by a session, one for each cache that sequences use."""


class Kernel(Protocol):
    """A plan's kernel, loaded on a device."""

    @property
    def plan(self) -> Plan: ...

    def launch(self, arguments: list[torch.Tensor | None], capacity: int, count: int, position: int) -> None:
        """Enqueue the launches of ``count`` tokens from ``position`` on, or, for -1, from where the last launch ended."""
        ...

    def prove_sampling(self) -> None:
        """Raise :class:`~onelaunch.errors.PlanError` unless the plan is sound for sampled tokens too."""
        ...


class StreamOrder:
    """Order of the work that several streams do in the same device memory.

    Args:
        device: Device of the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Stream | None = None

    def join(self) -> None:
        """Make later work on the current stream wait for the work on the stream that joined before.

        The caller holds a lock until its work is enqueued. Nothing happens while the current stream is captured: whoever replays
        the graph decides where it runs.
        """
        if self._device.type != "cuda":
            return
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                return
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current


class Pending:
    """Copies on their way to the host, with the errors that they show once they are there.

    The copies hold what the work enqueued on the current stream so far produces, and nothing of what is enqueued later.

    Args:
        device: Device that the copies come from.
        tokens: Tokens to copy.
        logits: Logits ``[V]`` to test for NaN and infinity. Any token drawn from such logits would be arbitrary, and might be an
            end token.
        session: Session whose error word is copied too.
        step: Pending state of the step that made the logits; its error comes first.

    Attributes:
        tokens: Copy of the tokens on the host, pinned where the device is a GPU. Work enqueued after this object was made may
            read it; the host may after :meth:`wait`.
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
        probe = None if logits is None else logits.sum()  # one kernel; not finite if any logit is not
        self.tokens = None if tokens is None else _to_host(tokens)
        self._state = None if session is None else _to_host(session.memory.state)
        self._probe = None if probe is None else _to_host(probe)
        # A session keeps its last step's pending state: a reference back would keep both, and the buffers, until Python collects
        # garbage.
        self._session = None if session is None else weakref.ref(session)
        self._plan = "" if session is None else session.kernel.plan.rung
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
            DecodeStalled: a launch gave up waiting.
            DecodeOverflow: a sum left the range of its words.
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
    """Return the exception of an error word of the kernel's state."""
    return DecodeOverflow(plan) if error == OUT_OF_RANGE else DecodeStalled(plan)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host that is enqueued on the current stream."""
    pinned = tensor.device.type == "cuda"
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned).copy_(tensor, non_blocking=True)


class Session:
    """Owner of a kernel's device memory: it orders streams, gives sequences their turns and keeps deferred errors.

    Args:
        kernel: Loaded kernel.
        memory: Its buffers.

    Attributes:
        lock: Re-entrant lock of the buffers. Hold it over several steps whose error no other sequence may clear.
        active: Identity of the sequence whose state the buffers hold, which does not keep its cache alive; ``None`` if they hold
            nobody's, such as after :meth:`step`.
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
        """Return logits ``[V]`` float32 after a token ``[1]`` int64 at position ``cache.length``, whose cache row is written.

        The buffers are no sequence's afterwards. Nothing here waits for the device: the error of a step is raised by
        :attr:`last_step`, or by the first later step that finds it on the host.

        Raises:
            DecodeStalled, DecodeOverflow: an earlier step failed.
        """
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with self.lock:
            if self.last_step is not None and not capturing and self.last_step.arrived():
                self.last_step.wait()
            self.active = None
            self.order.join()
            if not self.kernel.plan.separate or capturing:
                logits = self._logits()
                self.kernel.launch(self.memory.arguments(cache, logits, token), cache.capacity, 1, cache.length)
            else:
                self.bind(cache.length, token)
                logits = self.launch(cache, 1, None).clone()
            if not capturing:
                self.last_step = Pending(self.device, session=self)
            return logits

    def sequence(self, cache: KVCache, token: torch.Tensor, sampler: Sampler | None = None) -> Sequence:
        """Return the state of a sequence that takes turns at this session's buffers; see :class:`Sequence`."""
        return Sequence(self, cache, token, sampler)

    def barriers(self, token: torch.Tensor, cache: KVCache) -> int:
        """Return how many grid barriers a :meth:`step` passed, by the counter that each CTA increments; wait for the step.

        Raises:
            DecodeStalled, DecodeOverflow: the step, or an earlier one, failed.
        """
        with self.lock:
            before = int(self.memory.counters[0])
            self.step(token, cache)
            self.check()
            increments = (int(self.memory.counters[0]) - before) % 2**32  # the counter runs on over launches, and wraps
            return -(-increments // self.kernel.plan.ctas)

    def check(self) -> None:
        """Wait for the device and raise the error that it has.

        Raises:
            DecodeStalled, DecodeOverflow: a launch failed.
        """
        if error := int(self.memory.state[ERROR]):
            self.reset()
            raise _failure(error, self.kernel.plan.rung)

    def reset(self) -> None:
        """Reset the buffers after the error of a launch, so that the next launch starts anew."""
        with self.lock:
            self.order.join()
            self.memory.reset()
            self.active = self.last_step = None

    def bind(self, position: int, token: torch.Tensor, identity: object = None) -> None:
        """Write a position and the token ``[1]`` there to the buffers, which belong to the sequence of that identity from now on.

        The caller holds :attr:`lock` and has joined :attr:`order`, as for :meth:`launch`.
        """
        self.memory.state[:1].fill_(position)
        self.memory.tokens[position : position + 1].copy_(token, non_blocking=True)
        self.active = identity

    def launch(self, cache: KVCache, count: int, sampler: Sampler | None) -> torch.Tensor:
        """Enqueue ``count`` tokens of the sequence that is bound and return the last one's logits ``[V]`` float32.

        The tokens are in ``memory.tokens``, by position. A plan of a launch per phase takes the largest logit only.

        Raises:
            ArgumentError: the plan cannot sample as asked.
        """
        if sampler is not None:
            if self.kernel.plan.separate and not sampler.sampling.plain:
                raise ArgumentError(f"sampler is not None; {self.kernel.plan.rung!r} takes the likeliest token only.")
            if not sampler.sampling.greedy:
                self.kernel.prove_sampling()
        if not self.kernel.plan.separate:
            logits = torch.empty(self._vocabulary, dtype=torch.float32, device=self.device)
            self.kernel.launch(self.memory.arguments(cache, logits, sampler=sampler), cache.capacity, count, -1)
            return logits
        key = (cache.keys.data_ptr(), cache.values.data_ptr(), cache.capacity)
        graph, logits = self._graphs.get(key, functools.partial(self.captured, cache))
        for _ in range(count):
            graph.replay()
        return logits

    def captured(self, cache: KVCache) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Capture a step that goes on from where the one before ended; return the graph and its logits."""
        logits = self._logits()

        def step() -> torch.Tensor:
            self.kernel.launch(self.memory.arguments(cache, logits), cache.capacity, 1, -1)
            return logits

        return capture_on_new_stream(step, self.device)

    def _logits(self) -> torch.Tensor:
        return torch.empty(self._vocabulary, dtype=torch.float32, device=self.device)


class Sequence:
    """Decoding state of one request between its launches. A ``with`` block is one turn at the session's buffers.

    Within the block the buffers are this sequence's, and no other thread enqueues work on them::

        with sequence:
            sequence.step(16)
            pending = sequence.copy_tokens()
        tokens = pending.wait()

    Args:
        session: Session that the sequence takes turns at.
        cache: Keys and values of all positions before ``token``.
        token: Newest token ``[1]``, at position ``cache.length``.
        sampler: Rules for the next tokens, with the tokens seen so far; ``None`` takes the largest logit.

    Attributes:
        cache: Cache of the positions so far. Assign a larger one before a turn that needs it.
        token: Newest token, on the device or in pinned memory of the host.
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
            if session.active is not self._identity:  # the first turn, or another sequence had one in between
                session.bind(self.cache.length, self.token, self._identity)
        except BaseException:
            session.lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._session.lock.release()

    def step(self, count: int) -> torch.Tensor:
        """Enqueue ``count`` tokens, for which the cache has room, and return the last one's logits ``[V]`` float32.

        Raises:
            ArgumentError: the plan cannot sample as asked.
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
            self.token = pending.tokens[-1:]  # may still be on its way; what reads it is enqueued behind the copy
        return pending
