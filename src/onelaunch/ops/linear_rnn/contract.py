"""The operation ``linear_rnn``: its definition, its arguments and their checks; those of the scan are ``gated_scan``'s.

Users and the layer ``LinearRNN`` call :func:`linear_rnn`; the variants take a :class:`LinearRNNCall`. ``reference.py``,
``cost.py``, ``probes.py``, ``variants`` and the ablation register their parts with the operation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from onelaunch import checks, dispatch
from onelaunch.checks import Facts
from onelaunch.operation import SUM_OF_PRODUCTS, Query, Shapes, operation, remembered
from onelaunch.operation.autocast import autocast
from onelaunch.ops.gated_scan.contract import ScanCall, ScanFacts, check_scan_values, gated_scan, scan_facts
from onelaunch.ops.gated_scan.slices import ScanRules, described, scan_across
from onelaunch.parallel import Context, Described, entered, offsets_of


class LinearRNNCall(NamedTuple):
    """Checked arguments of :func:`linear_rnn`, with the shapes and dtypes stated there, and the dispatch key of the call."""

    x: torch.Tensor
    weight: torch.Tensor
    log_decay: torch.Tensor
    gate: torch.Tensor | None
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    output_final_state: bool
    key: Query

    def query(self) -> Query:
        """Return the dispatch key."""
        return self.key

    def project(self) -> torch.Tensor:
        """Return ``x @ weight`` by PyTorch (cuBLAS on NVIDIA GPUs), rounded to the dtype of ``x``."""
        return self.x @ self.weight

    def scan_call(self, v: torch.Tensor) -> ScanCall:
        """Return the call of ``gated_scan`` that remains once ``v = x @ weight`` is computed."""
        _, device, dtype, (batch, length, _, channels), grad, flags = self.key
        key = Query("gated_scan", device, dtype, (batch, length, channels), grad, flags)
        return ScanCall(v, self.log_decay, self.gate, self.initial_state, self.cu_seqlens, self.output_final_state, key)


def bind(
    x: torch.Tensor,
    weight: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor | None = None,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    sliced: bool = False,
) -> LinearRNNCall:
    """Check the arguments and return the call; raises the errors that :func:`linear_rnn` lists.

    ``sliced`` says that the offsets are those of all ranks' steps.
    """
    checks.flag("output_final_state", output_final_state)
    x_facts, weight_facts = checks.facts("x", x), checks.facts("weight", weight)
    scan = scan_facts(log_decay, gate, initial_state, cu_seqlens, output_final_state)
    key = _key(x_facts, weight_facts, scan)
    check_scan_values(log_decay, None if sliced else cu_seqlens)
    return LinearRNNCall(x, weight, log_decay, gate, initial_state, cu_seqlens, output_final_state, key)


@remembered
def _key(x: Facts, weight: Facts, scan: ScanFacts) -> Query:
    """Make all checks that need no values, and return the dispatch key; both are cached by these facts."""
    checks.rank("x", x, "[B, T, D]")
    checks.dtype("x", x, checks.FLOATS)
    checks.rank("weight", weight, "[D, V]")
    batch, length, width = x.shape
    channels = weight.shape[1]
    checks.shape("weight", weight, (width, channels), "[D, V]", f"x {list(x.shape)}")
    checks.dtype("weight", weight, (x.dtype,), ", the dtype of x")
    checks.device("weight", weight, x.device)
    scan.check("x", x, (batch, length, channels))
    return scan.query("linear_rnn", x, (batch, length, width, channels), weight)


@operation(
    dimensions=("B", "T", "D", "V"),
    outputs=("y", "final_state"),
    bind=bind,
    planned=True,
    # Options of a case, from which reference.py makes inputs. Then the variants to prefer where nothing was measured.
    options={
        "decay": "model",
        "lengths": None,
        "initial_state": False,
        "final_state": False,
        "log_decay_dtype": None,
        "gate": True,
    },
    # Among equally fast ones at a measured call, a kernel of ours comes before a variant that compiles anew for other sizes.
    defaults={"cuda": ("fused_chunked", "semi_fused", "fused_few_rows", "chunked", "eager"), "cpu": ("chunked", "eager")},
    # Float32 results of 16-bit calls into which the projection enters, a sum of products of 16-bit numbers.
    stated_errors=dict.fromkeys(("final_state", "grad log_decay"), SUM_OF_PRODUCTS),
)
def linear_rnn(
    x: torch.Tensor,
    weight: torch.Tensor,
    log_decay: torch.Tensor,
    gate: torch.Tensor | None = None,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    mesh: Any = None,
    variant: str = dispatch.AUTO,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Run one linear-RNN layer: project, scan with decay, gate.

        v = x @ weight;  s_t = exp(log_decay_t) * s_{t-1} + v_t;  y_t = s_t * silu(gate_t)

    Without a gate the results are the states, ``y_t = s_t``. Differentiable in every floating-point argument, through ``y`` and
    through the final state.

    Args:
        x: ``[B, T, D]`` float16, bfloat16 or float32.
        weight: ``[D, V]``, dtype of ``x``.
        log_decay: ``[B, T, V]``, at most 0, dtype of ``x`` or float32. ``-inf`` resets the state.
        gate: ``[B, T, V]``, dtype of ``x``. Default: none.
        initial_state: ``[N, V]`` float32, ``N = B`` or the number of packed sequences. Default: zeros.
        output_final_state: whether to return the state after the last step of every sequence.
        cu_seqlens: ``[N + 1]`` int32 or int64 offsets of sequences packed into one batch entry, from 0 to T, never decreasing
            (equal neighbours are an empty sequence); needs ``B = 1``. On a GPU the host reads them only in PyTorch's
            loop over steps and if ``ONELAUNCH_CHECK_VALUES=1``.
        mesh: DeviceMesh of one dimension, process group or :class:`onelaunch.parallel.Context` over whose ranks the steps are
            spread, in the order of ranks. Tensors hold this rank's T steps, any number of them; offsets and states are those of
            all sequences. A collective call; ``docs/parallel.md`` says who holds what. Default: this process has all steps.
        variant: a name from ``linear_rnn.variants``, or ``"auto"`` for the fastest variant measured near this call.

    Returns:
        ``y [B, T, V]`` in the dtype of ``x``, and ``s_T [N, V]`` float32 if ``output_final_state``. The state is float32
        throughout.

    Raises:
        ShapeError, DTypeError, DeviceError, PackingError, ValueRangeError, ArgumentError: an argument is invalid; the message
            names it, what it was and what it must be.
        UnknownVariant: there is no variant of that name.
        VariantUnsupported: the named variant cannot run this call; the message says why, and which variants can.

    Source: experiment 040; single-pass scan with decoupled look-back after Merrill and Garland (2016).
    """
    x, log_decay, weight, *rest = autocast(x, log_decay, weight, *(() if gate is None else (gate,)))
    gate = rest[0] if rest else None
    if mesh is not None:

        def describe() -> Described:
            call = bind(
                x, weight, log_decay, gate, initial_state=initial_state, output_final_state=output_final_state,
                cu_seqlens=offsets_of(mesh, cu_seqlens), sliced=True,
            )  # fmt: skip
            return described(call.key, call, variant)

        def run(context: Context, call: LinearRNNCall) -> Any:
            rules = ScanRules(linear_rnn, gated_scan, call.key, variant)
            return scan_across(context, rules, (x, weight, log_decay, gate), initial_state, output_final_state)

        return entered(mesh, cu_seqlens, describe, run)
    call = bind(
        x,
        weight,
        log_decay,
        gate,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
    y, final_state = dispatch.run(linear_rnn, call, variant)
    return (y, final_state) if output_final_state else y


@linear_rnn.shapes
def result_shapes(call: LinearRNNCall) -> Shapes:
    """Return the shapes of ``y [B, T, V]`` and, if requested, of ``final_state [N, V]``."""
    batch, length, _, channels = call.key.sizes
    sequences = batch if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    return (batch, length, channels), (sequences, channels) if call.output_final_state else None
