"""Static check of a plan: proves the absence of races and deadlocks before anything is launched.

It proves that every read follows the writes that it needs, that nothing is overwritten while it may still be read, that a
spin on flag-in-data words cannot take an old word for a new one, and that all CTAs, which wait for each other, can be
resident.

The check follows vector clocks over a few tokens and layers: ``known[c, d]`` is the last time at which CTA c is certain that CTA
d had finished. A wait that may end too early, or never, is an error. The edge before a phase is ``grid`` (a grid barrier),
``flags`` (semaphores per key head), ``data`` (flag-in-data words) or ``none``, which adds no knowledge. A plan is ``separate`` if
each phase is a launch.
Source: Fidge (1988), Mattern (1989).

``decode/runtime/proofs.py`` calls :func:`check` before a kernel is loaded, and once more before the first sampled token, unless
the cache folder records that the same check succeeded. The megakernel's variants ask :func:`check_residency` whether they can
run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onelaunch.decode.plan.phases import Assignment, Buffer, Phase, Plan, Slice
from onelaunch.device.architectures import HOPPER_SHARED_BYTES
from onelaunch.errors import PlanError

LAYERS = 3
"""Number of layers that are checked: the first, which reads the embedding, the last, and one that has both neighbours."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources that each CTA of a launch needs, and those of the device."""

    threads: int
    """Number of threads of a CTA."""
    registers: int
    """Number of 32-bit registers of a thread."""
    shared_bytes: int
    """Bytes of shared memory of a CTA."""
    sms: int
    """Number of SMs."""
    shared_limit: int = HOPPER_SHARED_BYTES
    """Largest number of bytes of shared memory that one CTA may use."""
    registers_limit: int = 1 << 16
    """Number of 32-bit registers of an SM."""


def check(*tokens: Plan, resources: Resources | None = None) -> None:
    """Raise :class:`PlanError` with the reason unless a plan is sound.

    Args:
        tokens: Plan of each of a few consecutive tokens: one plan, which is repeated, or its versions: for lengths with
            more and fewer KV splits, or for sampled tokens with more and fewer passes of the radix selection.
        resources: Resources that a CTA needs and the device has; without them, residency is not checked.
    """
    plan = tokens[0]
    if resources is not None:
        check_residency(plan, resources)
    for each in dict.fromkeys(tokens):
        _check_assignments(each)
    if plan.separate:
        return  # Launches on one stream are ordered.
    tokens = tokens if len(tokens) > 1 else (plan,) * 4  # so each of a buffer's two copies is used twice
    clocks = _Clocks(plan)
    for number, each in enumerate(tokens):
        clocks.begin_token(number)
        for layer, phase in each.instances(min(plan.config.num_hidden_layers, LAYERS)):
            clocks.follow(phase, layer, f"token {number}, layer {layer}")


def check_residency(plan: Plan, resources: Resources) -> None:
    """Raise :class:`PlanError` unless all CTAs can be resident: the part of :func:`check` about the device's resources.

    A variant calls it alone, to tell whether it can run on a device. ``decode/runtime/proofs.py`` calls :func:`check` later,
    before the kernel of the plan runs.
    """
    if resources.shared_bytes > resources.shared_limit:
        needed = f"{resources.shared_bytes} bytes of shared memory"
        raise PlanError(plan.level, f"a CTA needs {needed}; there are {resources.shared_limit}")
    if resources.threads * resources.registers > resources.registers_limit:
        needed = f"{resources.threads} threads of {resources.registers} registers"
        raise PlanError(plan.level, f"a CTA needs {needed}; an SM has {resources.registers_limit}")
    by_memory = resources.shared_limit // max(resources.shared_bytes, 1)
    by_registers = resources.registers_limit // (resources.threads * resources.registers)
    resident = resources.sms * min(by_memory, by_registers)
    if not plan.separate and plan.ctas > resident:
        raise PlanError(plan.level, f"{plan.ctas} CTAs wait for each other; only {resident} can be resident")


def _check_assignments(plan: Plan) -> None:
    """Raise for errors in work assignments that no order of phases can repair.

    They are: not one assignment per CTA; words outside of a buffer; additions to words that are not sums; two writers of a word
    in a phase; a tagged word that a phase does not write; and a flag-in-data word that is read but not waited for.
    """
    for phase in plan.phases():
        if len(phase.assignments) != plan.ctas:
            raise PlanError(plan.level, f"phase {phase.name} has {len(phase.assignments)} assignments for {plan.ctas} CTAs")
        counts: dict[str, np.ndarray] = {}
        for cta, assignment in enumerate(phase.assignments):
            for slice_ in (*assignment.reads, *assignment.writes, *assignment.adds, *assignment.polls):
                if not 0 <= slice_.begin <= slice_.end <= _buffer(plan, slice_).words:
                    raise PlanError(
                        plan.level, f"{_who(phase, cta)} names words {slice_.begin} to {slice_.end} of {slice_.buffer}"
                    )
            if any(not _buffer(plan, slice_).sums for slice_ in assignment.adds):
                raise PlanError(plan.level, f"{_who(phase, cta)} adds to words that are not sums")
            if phase.edge == "data":
                _check_polls(plan, phase, cta, assignment)
            for slice_ in assignment.writes:
                count = counts.setdefault(slice_.buffer, np.zeros(_buffer(plan, slice_).words, np.int32))
                count[slice_.begin : slice_.end] += 1
        for name, count in counts.items():
            if count.max(initial=0) > 1:
                raise PlanError(plan.level, f"word {int(count.argmax())} of {name} has two writers in phase {phase.name}")
            if plan.buffer(name).tagged and count.min(initial=1) < 1:
                missing = int(count.argmin())
                raise PlanError(plan.level, f"word {missing} of {name} is tagged but not written in every use, by {phase.name}")


def _check_polls(plan: Plan, phase: Phase, cta: int, assignment: Assignment) -> None:
    """Raise unless a CTA spins on every flag-in-data word that it reads: a tag says nothing about any other word."""
    for slice_ in assignment.reads:
        if (_buffer(plan, slice_).tagged or _buffer(plan, slice_).counts) and slice_ not in assignment.polls:
            raise PlanError(plan.level, f"{_who(phase, cta)} reads words of {slice_.buffer} that it does not wait for")


def _buffer(plan: Plan, slice_: Slice) -> Buffer:
    """Return the buffer of a slice."""
    for buffer in plan.buffers:
        if buffer.name == slice_.buffer:
            return buffer
    raise PlanError(plan.level, f"there is no buffer {slice_.buffer!r}")


def _embedded(phase: Phase, slice_: Slice, layer: int) -> bool:
    """Return whether the embedding row is read in place of the residual stream, in the first layer."""
    return layer == 0 and slice_.buffer == "hidden" and phase.op in ("norm", "qkv")


def _who(phase: Phase, cta: int) -> str:
    """Return the subject of an error message."""
    return f"CTA {cta} in phase {phase.name}"


def _unsure(known: np.ndarray, writer: np.ndarray, written: np.ndarray) -> list[bool]:
    """Return for each CTA whether it is not certain that some writes are finished, by the clocks ``known``."""
    return np.any(known[:, writer] < written, axis=1).tolist()


class _State:
    """Accesses to one buffer: last and previous writer of each word with their times, and each CTA's last read and addition.

    ``read`` and ``added`` are ``[word, CTA]``, so that the words of a slice are contiguous.
    """

    def __init__(self, words: int, ctas: int) -> None:
        self.writer, self.written, self.writer_before, self.written_before = (np.zeros(words, np.int32) for _ in range(4))
        self.read, self.added = (np.zeros((words, ctas), np.int32) for _ in range(2))
        self.count = np.zeros(words, np.int32)
        """Number of additions to each word since it was written."""


@dataclass(slots=True)
class _Past:
    """Last and previous writers of a slice's words with their times, one entry per run of words with equal ones."""

    writer: np.ndarray
    written: np.ndarray
    writer_before: np.ndarray
    written_before: np.ndarray


@dataclass(slots=True)
class _Awaited:
    """Flag-in-data words that CTAs spin on in the current phase."""

    knew: np.ndarray
    """Join of the clocks that the writers had when they finished; for sums that count, of the CTAs that added."""
    stale: list[bool]
    """Flags of the CTAs that were not certain before the phase that the previous epoch's writes were over."""


@dataclass(slots=True)
class _Readable:
    """Words that CTAs read in the current phase."""

    state: _State
    early: list[bool]
    """Flags of the CTAs that are not certain that the writes are finished."""
    late: list[bool] | None
    """Flags of the CTAs that are not certain that the additions are finished; ``None`` if the words are not sums."""


class _Clocks:
    """Vector clocks of all CTAs, and the state of all buffers."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.time = self.token = 0
        self.known = np.zeros((plan.ctas, plan.ctas), np.int32)
        """``[c, d]``: the last time at which CTA c is certain that CTA d had finished."""
        self.history: list[np.ndarray] = [self.known.copy()]
        """Copy of ``known`` after each phase, by time."""
        self.states: dict[tuple[str, int, int], _State] = {}
        # Caches by the slices that are read in the current phase; several CTAs often read the same.
        self.pasts: dict[Slice, _Past] = {}
        self.awaited: dict[Slice, _Awaited] = {}
        self.readable: dict[Slice, _Readable] = {}
        self.begun = self.known
        """Copy of ``known`` at the start of the token. Keys and values that are prefetched can rely on nothing later."""
        self.arrivals: dict[int, tuple[int, list[int]]] = {}
        """Time of the last increment of each counter, and the CTAs that made it."""

    def begin_token(self, number: int) -> None:
        """Note the start of a token."""
        self.token, self.begun = number, self.known.copy()

    def follow(self, phase: Phase, layer: int, where: str) -> None:
        """Follow one phase: its synchronization, its reads, its writes and additions, and what is known at its end."""
        self.time += 1
        for cache in (self.pasts, self.awaited, self.readable):
            cache.clear()
        if phase.edge == "grid":
            self.known[:] = np.maximum(self.known, self.known.max(axis=0))
        else:
            before = self.known.copy()
            for cta, assignment in enumerate(phase.assignments):
                self.known[cta] = np.maximum(before[cta], self._waited(phase, cta, assignment, layer, where))
        for cta, assignment in enumerate(phase.assignments):
            for slice_ in assignment.reads:
                self._read(phase, cta, slice_, layer, where)
        for cta, assignment in enumerate(phase.assignments):
            for slice_ in assignment.writes:
                self._write(phase, cta, slice_, layer, where)
            for slice_ in assignment.adds:
                self._add(phase, cta, slice_, layer, where)
        self.known[np.diag_indices(self.plan.ctas)] = self.time
        self.history.append(self.known.copy())
        incremented: dict[int, list[int]] = {}
        for cta, assignment in enumerate(phase.assignments):
            for counter in assignment.arrives:
                incremented.setdefault(counter, []).append(cta)
        self.arrivals.update({counter: (self.time, ctas) for counter, ctas in incremented.items()})

    def _waited(self, phase: Phase, cta: int, assignment: Assignment, layer: int, where: str) -> np.ndarray:
        """Return the clock that a CTA learns from the synchronization before its assignment."""
        learnt = np.zeros(self.plan.ctas, np.int32)
        if phase.edge == "flags":
            for wait in assignment.awaits:
                time, ctas = self.arrivals.get(wait.counter, (0, []))
                if wait.arrivals != len(ctas):
                    wanted = f"waits for {wait.arrivals} arrivals at counter {wait.counter}, at which {len(ctas)} CTAs arrive"
                    raise PlanError(self.plan.level, f"{_who(phase, cta)} {wanted} ({where})")
                for other in ctas:
                    learnt = np.maximum(learnt, self.history[time][other])
        if phase.edge == "data":
            for slice_ in assignment.polls:
                if _embedded(phase, slice_, layer):
                    continue
                learnt = np.maximum(learnt, self._polled(phase, cta, slice_, layer, where))
        return learnt

    def _polled(self, phase: Phase, cta: int, slice_: Slice, layer: int, where: str) -> np.ndarray:
        """Return the joined clock of all CTAs that wrote, or added to, the flag-in-data words that a CTA spins on.

        An epoch is one use of a buffer, in one layer of one token. The CTA must be certain that the writes of the previous
        epoch are over: a tag of two bits tells only a few epochs apart, and a count restarts.
        """
        awaited = self.awaited.get(slice_)
        if awaited is None:
            awaited = self.awaited[slice_] = self._look_at_polls(phase, cta, slice_, layer, where)
        if awaited.stale[cta]:
            stale = f"may take a word of {slice_.buffer} of an old use for a new one: it does not follow every use"
            raise PlanError(self.plan.level, f"{_who(phase, cta)} {stale} ({where})")
        return awaited.knew

    def _look_at_polls(self, phase: Phase, cta: int, slice_: Slice, layer: int, where: str) -> _Awaited:
        """Return what holds for every CTA that spins on a slice in this phase, of which ``cta`` is the first.

        No CTA has learnt anything in this phase before it asks for its own flag.
        """
        buffer, state = _buffer(self.plan, slice_), self._state(slice_, layer)
        if not (buffer.tagged or buffer.counts):
            raise PlanError(
                self.plan.level, f"{_who(phase, cta)} waits for words of {slice_.buffer}, which has no tags ({where})"
            )
        past = self._past(state, slice_)
        if buffer.counts:
            self._counted(phase, cta, slice_, layer, where)
        elif not past.written.all():
            raise PlanError(
                self.plan.level, f"{_who(phase, cta)} waits for words of {slice_.buffer} that nobody writes ({where})"
            )
        writer, written = (past.writer, past.written) if buffer.counts else (past.writer_before, past.written_before)
        writers = enumerate(state.added[slice_.begin : slice_.end].max(axis=0, initial=0))
        pairs = writers if buffer.counts else zip(past.writer, past.written, strict=True)
        knew = [self.history[time][writer] for writer, time in pairs]
        return _Awaited(np.max([np.zeros(self.plan.ctas, np.int32), *knew], axis=0), _unsure(self.known, writer, written))

    def _counted(self, phase: Phase, cta: int, slice_: Slice, layer: int, where: str) -> None:
        """Raise unless words have exactly the additions that are waited for.

        With fewer, the spin would never end. With more, it would end only if it saw a word at exactly that number.
        """
        wanted, counts = self.plan.additions(layer), self._state(slice_, layer).count[slice_.begin : slice_.end]
        if (wrong := counts != wanted).any():
            problem = f"waits for {wanted} additions to a word of {slice_.buffer}, which has {int(counts[wrong.argmax()])}"
            raise PlanError(self.plan.level, f"{_who(phase, cta)} {problem} ({where})")

    def _read(self, phase: Phase, cta: int, slice_: Slice, layer: int, where: str) -> None:
        """Raise unless all writes of a slice are certain to be finished; note the read."""
        readable = self.readable.get(slice_)
        if readable is None:
            if _embedded(phase, slice_, layer):
                return
            readable = self.readable[slice_] = self._look_at_reads(phase, cta, slice_, layer, where)
        if readable.early[cta]:
            past = self._past(readable.state, slice_)
            writer = int(past.writer[(self._known_of(slice_)[cta, past.writer] < past.written).argmax()])
            problem = (
                f"reads words {slice_.begin} to {slice_.end} of {slice_.buffer} before CTA {writer} has written them for certain"
            )
            raise PlanError(self.plan.level, f"{_who(phase, cta)} {problem} ({where})")
        if readable.late is not None and readable.late[cta]:
            self._follows_sums(phase, cta, "reads", slice_, readable.state, where)
        readable.state.read[slice_.begin : slice_.end, cta] = self.time

    def _look_at_reads(self, phase: Phase, cta: int, slice_: Slice, layer: int, where: str) -> _Readable:
        """Return what holds for every CTA that reads a slice in this phase, of which ``cta`` is the first.

        All have learnt what they learn in this phase, and writes and additions follow later.
        """
        state, sums = self._state(slice_, layer), _buffer(self.plan, slice_).sums
        past = self._past(state, slice_)
        # The first rows of the cache are the caller's, and sums begin as zero.
        if not past.written.all() and slice_.buffer != "cache" and not sums:
            raise PlanError(self.plan.level, f"{_who(phase, cta)} reads words of {slice_.buffer} that nobody writes ({where})")
        added = state.added[slice_.begin : slice_.end].max(axis=0, initial=0)
        late = (self.known < added).any(axis=1).tolist() if sums else None
        return _Readable(state, _unsure(self._known_of(slice_), past.writer, past.written), late)

    def _known_of(self, slice_: Slice) -> np.ndarray:
        """Return the clocks on which a read can rely, ``[c, d]``."""
        return self.begun if self.plan.kv_through_ring and slice_.buffer == "cache" else self.known

    def _follows_sums(self, phase: Phase, cta: int, what: str, slice_: Slice, state: _State, where: str) -> None:
        """Raise unless all additions to sums are certain to be finished."""
        if not _buffer(self.plan, slice_).sums:
            return
        if (late := self.known[cta] < state.added[slice_.begin : slice_.end].max(axis=0, initial=0)).any():
            problem = f"{what} sums of {slice_.buffer} to which CTA {int(late.argmax())} may still add"
            raise PlanError(self.plan.level, f"{_who(phase, cta)} {problem} ({where})")

    def _add(self, phase: Phase, cta: int, slice_: Slice, layer: int, where: str) -> None:
        """Raise unless the words were cleared, and all earlier reads of the sums have finished; note the addition.

        Other additions may come before or after. Sums that count may be read in between, by CTAs that wait for that number of
        additions; these reads must have finished too.
        """
        state, at = self._state(slice_, layer), slice(slice_.begin, slice_.end)
        read = state.read[at].max(axis=0, initial=0)
        others = np.where(np.arange(self.plan.ctas) == cta, 0, read)
        if read.any() and not _buffer(self.plan, slice_).counts:
            problem = f"adds to sums of {slice_.buffer} that were read and not cleared since"
        elif (late := self.known[cta] < others).any():
            problem = f"adds to sums of {slice_.buffer} that CTA {int(late.argmax())} may still read"
        elif (self.known[cta, state.writer[at]] < state.written[at]).any():
            problem = f"adds to sums of {slice_.buffer} before they are cleared for certain"
        else:
            state.added[at, cta] = self.time
            state.count[at] += 1
            return
        raise PlanError(self.plan.level, f"{_who(phase, cta)} {problem} ({where})")

    def _write(self, phase: Phase, cta: int, slice_: Slice, layer: int, where: str) -> None:
        """Raise unless all earlier reads, writes and additions of a slice have finished; note the write."""
        state = self._state(slice_, layer)
        at = slice(slice_.begin, slice_.end)
        read = state.read[at]  # a view, in which reads are cleared below
        # In the same phase, other positions of the cache are written than are read.
        last = (np.where(read == self.time, 0, read) if slice_.buffer == "cache" else read).max(axis=0, initial=0)
        last[cta] = 0
        if (late := self.known[cta] < last).any():
            problem = f"overwrites words of {slice_.buffer} that CTA {int(late.argmax())} may still read"
            raise PlanError(self.plan.level, f"{_who(phase, cta)} {problem} ({where})")
        writer, written = state.writer[at], state.written[at]
        if (late := (writer != cta) & (self.known[cta, writer] < written)).any():
            problem = f"may overtake CTA {int(writer[late.argmax()])}, which writes the same words of {slice_.buffer} before"
            raise PlanError(self.plan.level, f"{_who(phase, cta)} {problem} ({where})")
        self._follows_sums(phase, cta, "clears", slice_, state, where)
        read[read != self.time] = 0  # those of this phase are the writer's own, or of other positions of the cache
        state.added[at] = 0
        state.count[at] = 0
        state.writer_before[at], state.written_before[at] = state.writer[at], state.written[at]
        state.writer[at], state.written[at] = cta, self.time

    def _state(self, slice_: Slice, layer: int) -> _State:
        """Return the state of a slice's buffer, for this layer and token."""
        buffer = _buffer(self.plan, slice_)
        key = (slice_.buffer, layer if buffer.per_layer else 0, self.token % buffer.copies)
        if key not in self.states:
            self.states[key] = _State(buffer.words, self.plan.ctas)
        return self.states[key]

    def _past(self, state: _State, slice_: Slice) -> _Past:
        """Return the past accesses to a slice that is read, from the phase's cache if another CTA has read it."""
        if slice_ not in self.pasts:
            at = slice(slice_.begin, slice_.end)
            table = np.stack([state.writer[at], state.written[at], state.writer_before[at], state.written_before[at]])
            new = np.ones(table.shape[1], np.bool_)
            new[1:] = (table[:, 1:] != table[:, :-1]).any(axis=0)
            self.pasts[slice_] = _Past(*table[:, new])
        return self.pasts[slice_]
