"""Variants of ``gla`` in Triton, and how PyTorch sees them.

One pair of operators carries them all: ``onelaunch::gla_forward`` and ``onelaunch::gla_backward``. What is kept between them are
the inputs alone.
"""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.launch.build import KernelBuild
from onelaunch.launch.operator import Operator
from onelaunch.operation import Query
from onelaunch.operation.requirements import cannot_scan
from onelaunch.ops.gla.contract import GlaCall, gla

Results = tuple[torch.Tensor, torch.Tensor]
Optional = torch.Tensor | None


def run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    scale: float,
    want_final: bool,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o, and the final state (no elements if it is not wanted), by the variant of this name."""
    from onelaunch.ops.gla import hopper_launch, launch

    if kernel == "stepwise":
        call = launch.Attention.of(q, k, v, g, None, offsets, scale)
        sequences = call.sequences._replace(initial=launch.in_either_order(initial))
        return launch.step(call._replace(sequences=sequences), want_final=want_final)
    call = launch.Attention.of(q, k, v, g, initial, offsets, scale)
    if kernel == "hopper":
        return hopper_launch.forward(call), launch.empty_final(call, wanted=False)
    if kernel == "fused":
        return launch.forward(call, want_final=want_final)
    return launch.walk(call, want_final=want_final, ahead=kernel == "pipelined")


def run_backward(
    do: torch.Tensor,
    dfinal: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    initial: torch.Tensor | None,
    offsets: torch.Tensor | None,
    scale: float,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v, g and the initial state (no elements where there is none), by the variant of this name."""
    from onelaunch.ops.gla import hopper_launch, launch

    call = launch.Attention.of(q, k, v, g, initial, offsets, scale)
    return hopper_launch.backward(call, do) if kernel == "hopper" else launch.backward(call, do, dfinal)


def fake_forward(
    q: Any, k: Any, v: Any, g: Any, initial: Any, offsets: Any, scale: Any, want_final: Any, kernel: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the results of :func:`run_forward`."""
    sequences = q.shape[0] if offsets is None else offsets.shape[0] - 1
    extent = (sequences, q.shape[2], q.shape[3], v.shape[3]) if want_final else (0,)
    final = q.new_empty(extent, dtype=torch.float32)
    if kernel == "stepwise":
        from onelaunch.ops.gla import launch

        final = launch.final_like(launch.in_either_order(initial), final)
    return torch.empty(v.shape, dtype=v.dtype, device=v.device), final


def fake_backward(
    do: Any, dfinal: Any, q: Any, k: Any, v: Any, g: Any, initial: Any, offsets: Any, scale: Any, kernel: Any
) -> tuple[torch.Tensor, ...]:
    """Room for the results of :func:`run_backward`."""
    gradients = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v, g)]
    dinitial = q.new_empty(0 if initial is None else initial.shape, dtype=torch.float32)
    return *gradients, dinitial


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """The tensors among the inputs."""
    *tensors, ctx.scale, ctx.want_final, ctx.kernel = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, backward: Any, do: Optional, dfinal: Optional) -> tuple[Optional, ...]:
    """Of every input of :func:`run_forward`."""
    q, k, v, g, initial, offsets = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do
    dfinal = dfinal if ctx.want_final else None
    *found, dinitial = backward(do, dfinal, q, k, v, g, initial, offsets, ctx.scale, ctx.kernel)
    return *found, None if initial is None else dinitial, None, None, None, None


backward = Operator("gla_backward", run_backward, fake=fake_backward)
forward = Operator("gla_forward", run_forward, fake=fake_forward, save=save, gradients=gradients, backward=backward, outputs=2)


def attend(call: GlaCall, kernel: str) -> Results:
    """o and the final state by the variant of this name, differentiable."""
    return forward(
        call.q, call.k, call.v, call.g, call.initial_state, call.cu_seqlens, call.scale, call.output_final_state, kernel,
        grad=call.query().grad,
    )  # fmt: skip


BACKWARD: dict[str, Any] = {"chunk": 64, "backward_launches": 4, "backward_hands": ("rounded_states", "rounded_states")}
"""The backward pass of all of them: two walks that leave a state per chunk, and two kernels that take all chunks at once."""


@gla.variant("fused", launches=2, fuses=("decay", "scores"), hands=("rounded_states",), **BACKWARD)
def fused(call: GlaCall) -> Results:
    """A walk that leaves a state per chunk, then all chunks at once, for any decay; keeps nothing but the inputs."""
    return attend(call, "fused")


@gla.variant("sequential", launches=1, fuses=("decay", "scores", "states"), hands=(), **BACKWARD)
def sequential(call: GlaCall) -> Results:
    """One launch along time, load after product after load: the write-up's baseline. Its backward pass is that of ``fused``."""
    return attend(call, "sequential")


@gla.variant("pipelined", launches=1, fuses=("decay", "scores", "states"), hands=(), **BACKWARD)
def pipelined(call: GlaCall) -> Results:
    """The same, double-buffered by hand: the next chunk's loads in registers. The write-up's loser, kept as the lesson it is."""
    return attend(call, "pipelined")


@gla.variant("stepwise", launches=1, fuses=("decay", "states"), hands=(), **BACKWARD)
def stepwise(call: GlaCall) -> Results:
    """One launch, a step at a time in float32: for decoding and a few steps. Its backward pass is that of ``fused``."""
    return attend(call, "stepwise")


FEW_STEPS_CPU, SMALL_STATE = 4, 1 << 16
"""Most steps for which the loop over time is preferred on a CPU where nothing was measured; and, beyond a single step, the most
elements that the states of all sequences and heads may have together."""

FEW_STEPS = 16
"""So few steps are done in a loop before two launches over a chunk of 64 have begun."""


@gla.prefers
def by_length(query: Query) -> tuple[str, ...]:
    """Return the variants for a few steps, as decoding takes them: chunks of 64 steps would be mostly padding.

    On a CPU (AMD EPYC, one thread, float32, forward with states, medians of 40 interleaved rounds) one step takes ``recurrent``
    0.12 ms and ``chunked`` 0.33 at one head of 16 channels, 0.45 and 2.4 ms at 16 heads of 128, and 3.2 and 7.7 ms at eight times
    that. The loop copies the states once a step: four steps take 0.39 and 0.65 ms at 4 heads of 64 channels, but 34 and 8.5 ms at
    128 heads of 128.
    """
    if query.grad:
        return ()
    batch, steps, heads, keys, values = query.sizes
    if query.device_type == "cpu":
        few = steps == 1 or (steps <= FEW_STEPS_CPU and batch * heads * keys * values <= SMALL_STATE)
        return ("recurrent",) if few and "packed" not in query.flags else ()
    return ("stepwise",) if query.device_type == "cuda" and steps <= FEW_STEPS else ()


@fused.supports
@sequential.supports
@pipelined.supports
@stepwise.supports
def no_value_gate(query: Query) -> str | None:
    """The kernels let the state decay along keys alone."""
    return "takes no gate on values" if "value_gate" in query.flags else None


@sequential.supports
@pipelined.supports
def holds_the_state(query: Query) -> str | None:
    """A program of these holds all keys of a state."""
    from onelaunch.ops.gla.launch import WALKED_KEYS

    if query.sizes[3] > WALKED_KEYS:
        return f"needs K of at most {WALKED_KEYS}: it holds the state in registers"
    return None


for _variant in (fused, sequential, pipelined, stepwise):
    _variant.supports(cannot_scan)


FLAGS = {
    "EVEN": True, "SCALAR": False, "PACKED": False, "FIRST": False, "LAST": False, "STEPS": 0, "PARTS": 2, "LIMIT": 40.0,
    "LARGEST": None, "PRECISION": "bf16x6", "EXACT": False,
}  # fmt: skip
"""Constants of a plain training call in bfloat16: no packing, no given states."""


def build(name: str, kernel: Any, tiles: Any, *, matrix: bool = True, exact: tuple[str, ...] = (), **flags: Any) -> KernelBuild:
    """A kernel as such a call launches it; ``exact`` names tensors that are float32."""
    given = {"BK": tiles.keys, "BV": tiles.values, "STAGES": tiles.stages, **FLAGS, **flags}
    given |= {key: None for key in ("first", "last") if not given[key.upper()]} | {"offsets": None}
    constants = {key: value for key, value in given.items() if key in kernel.arg_names}
    numbers = {"scale": "fp32", "T": "i32", "H": "i32", "sequences": "i32", "first": "*fp32", "last": "*fp32"}
    numbers |= dict.fromkeys(exact, "*fp32")
    signature = {}
    for argument in kernel.arg_names:
        wide = argument in ("K", "V") or "stride" in argument
        found = "i32:16" if wide else numbers.get(argument, "*bf16")
        signature[argument] = "constexpr" if argument in constants else found
    return KernelBuild(
        name, kernel, signature, constants, num_warps=tiles.warps, num_stages=tiles.stages, matrix=matrix, by_warps=matrix
    )


def family_of(architecture: str) -> str:
    """Which tiles a device of this architecture takes, see ``launch.family``."""
    return "warps" if architecture.startswith(("sm_8", "sm_9")) else "other"


def backward_builds(architecture: str) -> list[KernelBuild]:
    """The backward pass of all of them, for each kind of decay."""
    from onelaunch.ops.gla import backward_kernels, kernels, launch

    family, states = family_of(architecture), ("states", "dstates")
    carry, read = launch.carry_tiles(128, 128, family), launch.read_tiles(128, 128, family)
    gradients, kernel = launch.gradient_tiles(128, 128, family), backward_kernels.gradients_kernel
    return [
        build("carry", kernels.carry_kernel, carry, REVERSE=False),
        build("carry_back", kernels.carry_kernel, carry, REVERSE=True),
        build("read_back", kernels.read_kernel, read, TRANSPOSED=True),
        build("gradients", kernel, gradients),
        build("gradients, decay per head", kernel, gradients, SCALAR=True, exact=states),
    ]


@fused.kernels
def _(architecture: str) -> list[KernelBuild]:
    from onelaunch.ops.gla import kernels, launch

    tiles = launch.read_tiles(128, 128, family_of(architecture))
    return [build("read", kernels.read_kernel, tiles, TRANSPOSED=False), *backward_builds(architecture)]


def walk_build(*, ahead: bool) -> KernelBuild:
    """The single launch along time."""
    from onelaunch.ops.gla import launch, walk_kernels

    tiles = launch.walk_tiles(64, 64)
    name = "walk, loads ahead" if ahead else "walk"
    return build(name, walk_kernels.walk_kernel, tiles, BS=min(tiles.keys, 16), STATE_PARTS=2, AHEAD=ahead)


@sequential.kernels
def _(architecture: str) -> list[KernelBuild]:
    return [walk_build(ahead=False), *backward_builds(architecture)]


@pipelined.kernels
def _(architecture: str) -> list[KernelBuild]:
    return [walk_build(ahead=True), *backward_builds(architecture)]


@stepwise.kernels
def _(architecture: str) -> list[KernelBuild]:
    from onelaunch.ops.gla import launch, step_kernels

    steps = [
        build(
            f"step, K = {keys}", step_kernels.step_kernel, launch.step_tiles(keys, keys),
            matrix=False, FIRST=True, LAST=True, state_stride_v=1,
        )
        for keys in (128, 512)
    ]  # fmt: skip
    return [*steps, *backward_builds(architecture)]
