"""The operation ``gated_scan``: its definition, its arguments and their checks.

Users call :func:`gated_scan`, and ``functions.py`` binds and runs calls under fla's names. The variants take a :class:`ScanCall`.
``linear_rnn`` makes one too, and uses :class:`ScanFacts`, :func:`scan_facts` and :func:`check_scan_values`. ``reference.py``,
``cost.py``, ``probes.py`` and ``variants`` register their parts with the operation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from onelaunch import checks, dispatch
from onelaunch.checks import Facts
from onelaunch.launch.tape import check_always
from onelaunch.operation import Query, Shapes, fixed, operation, remembered, state_flags
from onelaunch.operation.autocast import autocast
from onelaunch.ops.gated_scan.slices import ScanRules, described, scan_across
from onelaunch.parallel import Context, Described, entered, offsets_of


class ScanCall(NamedTuple):
    """Checked arguments of :func:`gated_scan`, with the shapes and dtypes stated there, and the dispatch key of the call."""

    v: torch.Tensor
    log_decay: torch.Tensor
    gate: torch.Tensor | None
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    output_final_state: bool
    key: Query

    def query(self) -> Query:
        """Return the dispatch key."""
        return self.key


class ScanNames(NamedTuple):
    """Names that a caller has for the arguments of a scan, for messages."""

    first: str = "v"
    """Name of the argument that :func:`gated_scan` calls ``v``."""
    log_decay: str = "log_decay"
    channels: str = "V"
    """Letter of the number of channels."""

    @property
    def extent(self) -> str:
        """Layout of a tensor with a value for every step and channel."""
        return f"[B, T, {self.channels}]"


_OWN_NAMES = ScanNames()
"""Names that ``gated_scan`` and ``linear_rnn`` have for their arguments."""


def bind(
    v: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor | None = None,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    names: ScanNames = _OWN_NAMES,
    sliced: bool = False,
) -> ScanCall:
    """Check the arguments and return the call; raises the errors that :func:`gated_scan` lists.

    ``names`` are the caller's names of the arguments. ``sliced`` says that the offsets are those of all ranks' steps.
    """
    checks.flag("output_final_state", output_final_state)
    scan = scan_facts(log_decay, gate, initial_state, cu_seqlens, output_final_state, names)
    key = _key(checks.facts(names.first, v), scan)
    check_scan_values(log_decay, None if sliced else cu_seqlens, names.log_decay)
    return ScanCall(v, log_decay, gate, initial_state, cu_seqlens, output_final_state, key)


@remembered
def _key(v: Facts, scan: ScanFacts) -> Query:
    """Make all checks that need no values, and return the dispatch key; both are cached by these facts."""
    first, _, _ = scan.names
    checks.rank(first, v, scan.names.extent)
    checks.dtype(first, v, checks.FLOATS)
    batch, length, channels = v.shape
    scan.check(first, v, (batch, length, channels))
    return scan.query("gated_scan", v, (batch, length, channels))


class ScanFacts(NamedTuple):
    """Facts about the arguments that all operations with a gated scan share. Hashable; none depends on the tensors' values."""

    log_decay: Facts
    gate: Facts | None
    initial_state: Facts | None
    cu_seqlens: Facts | None
    output_final_state: bool
    grad_enabled: bool
    names: ScanNames = _OWN_NAMES

    def check(self, first_name: str, first: Facts, extent: tuple[int, int, int]) -> None:
        """Raise unless shapes, dtypes and devices fit the operation's first argument: v, or x of ``linear_rnn``.

        Args:
            first_name: Name of that argument, for messages.
            first: Facts about it.
            extent: Sizes ``(B, T, V)`` that log_decay and gate must have.
        """
        batch, _, channels = extent
        because = f"{first_name} {list(first.shape)}"
        like_first = f", the dtype of {first_name}"
        layout, state_layout = self.names.extent, f"[N, {self.names.channels}]"
        for name, value, dtypes in (
            (self.names.log_decay, self.log_decay, (first.dtype, torch.float32)),
            ("gate", self.gate, (first.dtype,)),
        ):
            if value is None:
                continue
            checks.rank(name, value, layout)
            checks.shape(name, value, extent, layout, because)
            checks.dtype(name, value, tuple(dict.fromkeys(dtypes)), like_first if len(dtypes) == 1 else "")
            checks.device(name, value, first.device)
        sequences, offsets, initial = batch, self.cu_seqlens, self.initial_state
        if offsets is not None:
            checks.device("cu_seqlens", offsets, first.device)
            checks.packing(offsets, batch)
            sequences = offsets.shape[0] - 1
        if initial is not None:
            checks.rank("initial_state", initial, state_layout)
            if tuple(initial.shape) != (sequences, channels):  # else the message would specialize a traced N
                said = f"{sequences} sequences and {because}"
                checks.shape("initial_state", initial, (sequences, channels), state_layout, said)
            checks.dtype("initial_state", initial, (torch.float32,))
            checks.device("initial_state", initial, first.device)

    def query(self, operation: str, first: Facts, sizes: tuple[int, ...], *others: Facts) -> Query:
        """Return the dispatch key of a call with these arguments, its first argument and ``others``, such as a weight."""
        grad = self.grad_enabled and checks.grad_wanted(first, *others, self.log_decay, self.gate, self.initial_state)
        flags = state_flags(self.cu_seqlens is not None, self.initial_state is not None, self.output_final_state)
        flags += gate_flags(self.gate is not None)
        return Query(operation, str(first.device), first.dtype, fixed(*sizes, free=2), grad, flags)


def gate_flags(gated: bool) -> tuple[str, ...]:
    """Return the dispatch key's flags about the gate: none for a call with a gate. ``reference.py`` calls it for cases."""
    return () if gated else ("no_gate",)


def scan_facts(
    log_decay: torch.Tensor,
    gate: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    output_final_state: bool,
    names: ScanNames = _OWN_NAMES,
) -> ScanFacts:
    """Return the facts about the arguments of a call of an operation with a gated scan."""
    return ScanFacts(
        checks.facts(names.log_decay, log_decay),
        checks.optional_facts("gate", gate),
        checks.optional_facts("initial_state", initial_state),
        checks.optional_facts("cu_seqlens", cu_seqlens),
        output_final_state,
        torch.is_grad_enabled(),
        names,
    )


def check_scan_values(log_decay: torch.Tensor, cu_seqlens: torch.Tensor | None, name: str = _OWN_NAMES.log_decay) -> None:
    """Raise unless the values of the log-decay and of the offsets are valid; ``name`` is the caller's name of the log-decay.

    Values are read at every call on a CPU, one that is replayed from a tape included, and on GPUs only if
    ``ONELAUNCH_CHECK_VALUES=1``. Tracers and transforms have no values to read.
    """
    if cu_seqlens is not None:
        check_always(checks.offsets, cu_seqlens, log_decay.shape[1])
    check_always(checks.log_decay, log_decay, name)


@operation(
    dimensions=("B", "T", "V"),
    outputs=("y", "final_state"),
    bind=bind,
    planned=True,
    # Options of a case, from which reference.py makes inputs. Then the variants to prefer where nothing was measured.
    options={
        "decay": "model",
        "lengths": None,
        "initial_state": True,
        "final_state": True,
        "log_decay_dtype": None,
        "gate": True,
    },
    defaults={"cuda": ("fused", "chunked", "eager"), "cpu": ("chunked", "eager")},
)
def gated_scan(
    v: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor | None = None,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    mesh: Any = None,
    variant: str = dispatch.AUTO,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Run a decaying scan over time and gate its states: the recurrent half of a linear-RNN layer.

        s_t = exp(log_decay_t) * s_{t-1} + v_t;  y_t = s_t * silu(gate_t)        per channel

    Without a gate the results are the states, ``y_t = s_t``: the recurrence of HGRN, which :func:`chunk_hgrn` computes too.
    Differentiable in every floating-point argument, through ``y`` and through the final state.

    Args:
        v: ``[B, T, V]`` float16, bfloat16 or float32.
        log_decay: ``[B, T, V]``, at most 0, dtype of ``v`` or float32. ``-inf`` resets the state.
        gate: ``[B, T, V]``, dtype of ``v``. Default: none.
        initial_state: ``[N, V]`` float32, ``N = B`` or the number of packed sequences. Default: zeros.
        output_final_state: whether to return the state after the last step of every sequence.
        cu_seqlens: ``[N + 1]`` int32 or int64 offsets of sequences packed into one batch entry, from 0 to T, never decreasing
            (equal neighbours are an empty sequence); needs ``B = 1``. On a GPU the host reads them only in PyTorch's
            loop over steps and if ``ONELAUNCH_CHECK_VALUES=1``.
        mesh: DeviceMesh of one dimension, process group or :class:`onelaunch.parallel.Context` over whose ranks the steps are
            spread, in the order of ranks. Tensors hold this rank's T steps, any number of them; offsets and states are those of
            all sequences. A collective call; ``docs/parallel.md`` says who holds what. Default: this process has all steps.
        variant: a name from ``gated_scan.variants``, or ``"auto"`` for the fastest variant measured near this call.

    Returns:
        ``y [B, T, V]`` in the dtype of ``v``, and ``s_T [N, V]`` float32 if ``output_final_state``. The state is float32
        throughout.

    Raises:
        ShapeError, DTypeError, DeviceError, PackingError, ValueRangeError: an argument is invalid; the message names it, what
            it was and what it must be.
        UnknownVariant: there is no variant of that name.
        VariantUnsupported: the named variant cannot run this call; the message says why, and which variants can.

    Source: experiment 040; single-pass scan with decoupled look-back after Merrill and Garland (2016).
    """
    v, log_decay, gate = under_autocast(v, log_decay, gate)
    if mesh is not None:

        def describe() -> Described:
            call = bind(
                v, log_decay, gate, initial_state=initial_state, output_final_state=output_final_state,
                cu_seqlens=offsets_of(mesh, cu_seqlens), sliced=True,
            )  # fmt: skip
            return described(call.key, call, variant)

        def run(context: Context, call: ScanCall) -> Any:
            rules = ScanRules(gated_scan, gated_scan, call.key, variant)
            return scan_across(context, rules, (v, log_decay, gate), initial_state, output_final_state)

        return entered(mesh, cu_seqlens, describe, run)
    call = bind(v, log_decay, gate, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens)
    y, final_state = dispatch.run(gated_scan, call, variant)
    return (y, final_state) if output_final_state else y


def under_autocast(
    v: torch.Tensor, log_decay: torch.Tensor, gate: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the tensors as autocast has them: ``v`` and the gate in the autocast dtype, the log-decay in float32.

    :func:`gated_scan` and ``functions.py`` call it; ``linear_rnn`` casts its arguments by itself.
    """
    v, log_decay, *rest = autocast(v, log_decay, *(() if gate is None else (gate,)))
    return v, log_decay, rest[0] if rest else None


@gated_scan.shapes
def result_shapes(call: ScanCall) -> Shapes:
    """Return the shapes of ``y [B, T, V]`` and, if requested, of ``final_state [N, V]``."""
    batch, length, channels = call.key.sizes
    sequences = batch if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    return (batch, length, channels), (sequences, channels) if call.output_final_state else None
