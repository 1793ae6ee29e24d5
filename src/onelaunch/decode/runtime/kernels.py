"""Loading of the decode kernels: compiled for a plan, loaded on a device, and made into a session with its buffers."""

from __future__ import annotations

import torch

from onelaunch import cuda
from onelaunch.decode.codegen.emit import KINDS, source
from onelaunch.decode.codegen.layout import THREADS, Tuning, launch_of, layout_of
from onelaunch.decode.model.weights import Weights
from onelaunch.decode.plan.packing import pack
from onelaunch.decode.plan.phases import PRODUCTS, Phase, Plan
from onelaunch.decode.runtime.memory import Constants, Memory
from onelaunch.decode.runtime.models import MODELS
from onelaunch.decode.runtime.proofs import check_sampling, checked_plan
from onelaunch.decode.runtime.session import Session
from onelaunch.device.hardware import processors, room_for


class StepKernel:
    """Kernel of a plan, compiled and loaded; for a plan of a launch per phase, one kernel for each phase.

    Args:
        plan: Plan, checked for the device.
        tuning: Settings of the ring of weight chunks.
        device: NVIDIA GPU.

    Raises:
        CompilerMissing, CompileError, DriverError: as :func:`onelaunch.cuda.load`.
    """

    def __init__(self, plan: Plan, tuning: Tuning, device: torch.device) -> None:
        self.plan = plan
        alone: tuple[Phase | None, ...] = plan.phases() if plan.separate else (None,)
        self._functions = {
            phase and phase.op: cuda.load(
                source(plan, tuning, phase), device, KINDS, threads=THREADS, shared_bytes=layout_of(plan, tuning).bytes,
                cooperative=not plan.separate, overlap=plan.separate,
            )
            for phase in alone
        }  # fmt: skip
        self._sampling_proved = False

    def launch(self, arguments: list[torch.Tensor | None], capacity: int, count: int, position: int) -> None:
        """Enqueue the launches of some tokens on the current stream.

        Args:
            arguments: Tensors as :meth:`onelaunch.decode.runtime.memory.Memory.arguments` returns them.
            capacity: Capacity of the cache, in positions.
            count: Number of tokens; 1 for a plan of a launch per phase.
            position: Position of the first token, or -1 for the one where the last launch ended.
        """
        if not self.plan.separate:
            self._functions[None]((self.plan.ctas, 1, 1), *arguments, capacity, count, position, 0)
            return
        for layer, phase in self.plan.instances():
            _, ctas = launch_of(self.plan, phase)
            self._functions[phase.op]((ctas, 1, 1), *arguments, capacity, 1, position, layer)

    def prove_sampling(self) -> None:
        """Raise :class:`~onelaunch.errors.PlanError` unless the plan is sound for sampled tokens too."""
        if not self._sampling_proved:
            check_sampling(self.plan.config, self.plan.rung, self.plan.ctas)
            self._sampling_proved = True


def make_session(weights: Weights, rung: str, tuning: Tuning | None = None) -> Session:
    """Return a new session of a model: weights repacked, kernel compiled and loaded, buffers allocated.

    Args:
        weights: Weights on an NVIDIA GPU.
        rung: Name from :data:`onelaunch.decode.plan.rungs.RUNGS`.
        tuning: Settings of the ring of weight chunks.

    Raises:
        PlanError: the plan cannot run on this device.
        DeviceMemoryError: there is no room for the weights a second time.
        CompilerMissing, CompileError, DriverError: as :func:`onelaunch.cuda.load`.
    """
    tuning, device = tuning or Tuning(), weights.device
    plan = checked_plan(weights.config, rung, processors(device), tuning)
    constants = _constants(weights, plan)
    with room_for("what the CTAs of a launch tell each other", device):
        memory = Memory(plan, constants, weights.config.max_position_embeddings, stamps=tuning.stamps)
    return Session(StepKernel(plan, tuning, device), memory)


@torch.inference_mode(mode=False)
@torch.no_grad()
def session_for(weights: Weights, rung: str) -> Session:
    """Return the session of a rung for a model, kept as long as the weights exist. Weights written to since are repacked."""
    with MODELS.making:
        sessions = MODELS.kernels(weights).sessions
        if rung not in sessions:
            sessions[rung] = make_session(weights, rung)
        return sessions[rung]


def _constants(weights: Weights, plan: Plan) -> Constants:
    """Return the repacked weights of a plan; plans that cut a model's matrices alike share them."""
    key = (
        plan.ctas,
        plan.blocks,
        *(phase.shares[cta].units for phase in plan.phases() for cta in range(plan.ctas) if phase.op in PRODUCTS),
    )
    kept = MODELS.kernels(weights).constants
    if key not in kept:
        with room_for("the weights in the order of their use", weights.device):
            # Another object of the same tensors: what is kept for a model must not keep the model itself alive.
            own, stream = weights.map(lambda tensor: tensor), pack(weights, plan)
            kept[key] = plan, Constants.of(own, stream, weights.config.max_position_embeddings)
    return kept[key][1]
