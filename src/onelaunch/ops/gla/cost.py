"""FLOPs and bytes of ``gla``: the least that any implementation needs, and those of each variant.

The workbench plans studies with it and computes roofline bounds from it, and ``gla_layer`` adds it to its own cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onelaunch.operation import Case, Cost, Direction, Variant, launch_count
from onelaunch.operation.inputs import packed_lengths
from onelaunch.ops.gla.contract import gla
from onelaunch.ops.gla.heads import Heads
from onelaunch.ops.gla.padding import aligned_size, padded_keys, padded_values
from onelaunch.ops.gla.reference import heads_of

INTERMEDIATES = (
    "cumulated",
    "states",
    "rounded_states",
    "rounded_state_gradients",
    "second_terms",
    "scores",
    "partial_outputs",
    "partial_gradients",
    "partial_value_gradients",
    "repeated",
    "aligned",
    "bare_results",
    "kept_states",
    "float16_copies",
    "float16_gradient",
    "float16_states",
)
"""Intermediates that launches may pass to each other through memory, each written and read once.

A variant's tag ``hands`` lists those of its forward pass, ``backward_hands`` those of its backward pass (by default the same).
Its tag ``chunk`` is the number of steps per chunk. Intermediates are float32 unless stated otherwise here. The tag ``padded``
says that states are stored with the sizes of padding.py. FLOPs never count products of padding.

- ``cumulated``: the log-decays summed within chunks, as large as ``g``;
- ``states``: a ``[K, V]`` state for every chunk and head, or where heads share a state for every head of these;
- ``rounded_states``: the same in the inputs' dtype;
- ``rounded_state_gradients``: the gradient of a state for every chunk and head of the output, in the inputs' dtype;
- ``second_terms``: a second 16-bit term, of the rounding error, of each ``rounded_states`` if there is one decay per head or if
  log-decays are float32, and of each ``rounded_state_gradients`` if float32 log-decays are one per channel;
- ``scores``: a ``[chunk, chunk]`` matrix for every chunk and head of the output;
- ``partial_outputs``: an ``o`` before the last addition (in the backward pass gradients of q or k, counted at the size of o);
- ``partial_gradients``: dq, dk and dg of every head of the output, of those that share a head of q, k or g;
- ``partial_value_gradients``: what every head of the output gives to dv if heads share v, and to the gradient of an initial
  state if heads share that;
- ``repeated``: copies of q, k, v and the log-decays that have fewer heads than the output, in their dtypes, with all heads;
- ``aligned``: copies of q, k, v, log-decays per channel and o (or of their gradients) in heads of a multiple of 8 channels, of
  those whose heads have another size;
- ``bare_results``: dq of every head of the output without the term of each step itself, and o likewise if values decay; what
  every key channel gives to the gradient of one decay per head, and every head to that of shared log-decays of values;
- ``kept_states``: a state of every 64th step, of every 16th with float32 inputs, for every head of the output;
- ``float16_copies``: float16 copies of q, k and v. That these are read twice to make them is not counted: the caches may hold
  them;
- ``float16_gradient``: a float16 copy of the gradient of o;
- ``float16_states``: two 16-bit terms of a state for every chunk and head, and of its gradient; one of this with one decay per
  head.
"""


@gla.costs
def cost(case: Case, variant: Variant | None, direction: Direction) -> Cost:
    """Return the least cost: q, k, v, g in and o out; backward q, k, v, g, do in and four gradients out.

    That is 5 tensor passes forward, and 14 with the backward pass, which reads the inputs again. With a decay per head ``g`` is a
    K-th of a tensor; ``gv`` counts with g. A head that several heads of the output share moves once, and so does its gradient.
    Initial and final states, and their gradients, count if the call has them. A variant adds the intermediates between its
    launches, see :data:`INTERMEDIATES`.
    """
    tags: Mapping[str, Any] = {} if variant is None else variant.tags
    chunk = max(1, min(tags.get("chunk", 1), case.sizes["T"]))
    steps, heads = case.sizes["B"] * case.sizes["T"], heads_of(case)
    intermediates: tuple[str, ...] = tags.get("hands", ())
    if direction == "forward_backward":
        intermediates += tags.get("backward_hands", intermediates)
    stored = _stored_state(case, padded=tags.get("padded", False))
    intermediate_bytes = sum(_intermediate_bytes(what, case, heads, steps, chunk, stored) for what in intermediates)
    per_step, per_step_written = _bytes_per_step(case, heads, direction)
    ends, ends_written = _end_bytes(case, heads, direction)
    computed = heads.output, _computed_states(case, heads)
    flops = steps * _flops_per_step(case.sizes["K"], case.sizes["V"], *computed, 0 if variant is None else chunk, direction)
    return Cost(
        flops,
        steps * per_step + ends + 2 * intermediate_bytes,
        launch_count(variant, direction),
        written=steps * per_step_written + ends_written + intermediate_bytes,
    )


def _gate_bytes(case: Case) -> int:
    """Return the bytes of the log-decays of one step of one head."""
    item = 4 if gla.option(case, "log_decay_dtype") == "float32" else case.dtype.itemsize
    gates = case.sizes["K"] if gla.option(case, "decay_per") == "channel" else 1
    return item * (gates + (case.sizes["V"] if gla.option(case, "value_gate") else 0))


def _computed_states(case: Case, heads: Heads) -> int:
    """Return the number of heads whose states differ: without an initial state those of heads that share k, v and g are equal."""
    return heads.state if gla.option(case, "initial_state") else min(heads.g, heads.state)


def _bytes_per_step(case: Case, heads: Heads, direction: Direction) -> tuple[int, int]:
    """Return the bytes of one step of all heads, and those of them that are written."""
    keys, values, item = case.sizes["K"], case.sizes["V"], case.dtype.itemsize
    inputs = ((heads.q + heads.k) * keys + heads.v * values) * item + heads.g * _gate_bytes(case)
    output = heads.output * values * item
    if direction == "forward":
        return inputs + output, output
    return 2 * (inputs + output) + inputs, output + inputs  # do is as large as o; gradients are as large as the inputs


def _end_bytes(case: Case, heads: Heads, direction: Direction) -> tuple[int, int]:
    """Return the bytes of initial and final states, and those of them that are written.

    With their gradients the initial state moves three times, the final one twice; each is written once. Without them the backward
    pass reads the initial state again.
    """
    initial, final = bool(gla.option(case, "initial_state")), bool(gla.option(case, "final_state"))
    if direction == "forward":
        moves, written = initial + final, int(final)
    elif gla.option(case, "state_gradients"):
        moves, written = 3 * initial + 2 * final, initial + final
    else:
        moves, written = 2 * initial + final, int(final)
    state = 4 * _sequence_count(case) * heads.state * case.sizes["K"] * case.sizes["V"]
    return moves * state, written * state


def _stored_state(case: Case, *, padded: bool) -> int:
    """Return the elements of a state that launches pass to each other."""
    keys, values = case.sizes["K"], case.sizes["V"]
    return padded_keys(keys) * padded_values(keys, values) if padded else keys * values


def _sequence_count(case: Case) -> int:
    """Return the number of sequences of a case: its batch entries, or the packed sequences."""
    lengths = gla.option(case, "lengths")
    return int(case.sizes["B"]) if lengths is None else len(packed_lengths(case, lengths))


def _intermediate_bytes(what: str, case: Case, heads: Heads, steps: int, chunk: int, stored: int) -> int:
    """Return the bytes of one intermediate of :data:`INTERMEDIATES`; ``stored`` is the number of elements of a state."""
    keys, values, item = case.sizes["K"], case.sizes["V"], case.dtype.itemsize
    summed = keys if gla.option(case, "decay_per") == "channel" else 1
    state = _computed_states(case, heads) * -(-stored // chunk)
    if what in ("partial_gradients", "repeated"):
        shared = Heads(*(heads.output if count < heads.output else 0 for count in heads))
        if what == "repeated":
            return steps * (((shared.q + shared.k) * keys + shared.v * values) * item + shared.g * _gate_bytes(case))
        return steps * 4 * ((shared.q + shared.k) * keys + shared.g * summed)
    if what == "aligned":
        wide_keys, wide_values = aligned_size(keys), aligned_size(values)
        gates = 0 if summed == 1 else heads.g * (4 if gla.option(case, "log_decay_dtype") == "float32" else item)
        of_keys = wide_keys * ((heads.q + heads.k) * item + gates) if wide_keys > keys else 0
        return steps * (of_keys + (wide_values * (heads.v + heads.output) * item if wide_values > values else 0))
    if what == "float16_copies":
        return steps * 2 * ((heads.q + heads.k) * keys + heads.v * values)
    if what == "float16_gradient":
        return steps * 2 * heads.output * values
    if what == "float16_states":
        return steps * 2 * (2 * state + (1 if summed == 1 else 2) * heads.output * -(-stored // chunk))
    if what == "kept_states":
        return 4 * heads.output * -(-steps * keys * values // (16 if case.dtype.itemsize == 4 else 64))
    if what == "bare_results":
        gated = bool(gla.option(case, "value_gate"))
        per_channel = keys if summed == 1 else 0
        return steps * 4 * heads.output * (keys + per_channel + values * (gated + (gated and heads.g < heads.output)))
    if what == "partial_value_gradients":
        shares_state = gla.option(case, "initial_state") and heads.state < heads.output
        initial = _sequence_count(case) * heads.output * keys * values if shares_state else 0
        return 4 * (steps * (heads.output * values if heads.v < heads.output else 0) + initial)
    rounded = {"rounded_states": item * state, "rounded_state_gradients": item * heads.output * -(-stored // chunk)}
    wide, scalar = gla.option(case, "log_decay_dtype") == "float32", gla.option(case, "decay_per") == "head"
    second_states, second_gradients = wide or scalar, wide and not scalar
    per_step = {
        "cumulated": 4 * heads.g * summed,
        "states": 4 * state,
        **rounded,
        "second_terms": second_states * rounded["rounded_states"] + second_gradients * rounded["rounded_state_gradients"],
        "scores": 4 * heads.output * chunk,
        "partial_outputs": 4 * heads.output * values,
    }
    return steps * per_step[what]


def _flops_per_step(keys: int, values: int, output: int, state: int, chunk: int, direction: Direction) -> int:
    """Return the FLOPs of the matrix products for one step of all heads.

    Forward: ``k^T v`` into the state, ``q S``, then scores and their product with v; within a chunk they are causal, so half
    counts. Backward: ``q^T do`` into the gradient of the state, products with both states for dq, dk and dv, four products
    within the chunk, and the states and scores once more. ``chunk`` is 0 for the least cost: one step at a time, nothing
    computed twice. Products with keys and values alone count for each of ``state`` heads, whose states differ; those with queries
    or do for each of ``output`` heads.
    """
    flops = 2 * (state + output) * keys * values + output * chunk * (keys + values)
    if direction == "forward_backward":
        again = state * 2 * keys * values + output * chunk * keys if chunk else 0
        flops += 4 * (state + output) * keys * values + output * chunk * (2 * keys + 2 * values) + again
    return flops
