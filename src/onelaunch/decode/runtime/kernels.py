"""Compilation and loading of the decode kernels, and the sessions that own a loaded kernel and its buffers.

The megakernel's engines and its variants of ``decode_step`` call :func:`session_for`. The variants also call :func:`kernels_of`,
for the builds that the inspector compiles, and :func:`builds_on`, for those that a study compiles ahead. A plan is ``separate``
if each phase is a launch.
"""

from __future__ import annotations

import torch

from onelaunch.decode.codegen.emit import KINDS, source
from onelaunch.decode.codegen.layout import THREADS, Tuning, launch_of, layout_of
from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.weights import ModelWeights
from onelaunch.decode.plan.levels import plan_for
from onelaunch.decode.plan.packing import division, pack
from onelaunch.decode.plan.phases import CHUNK, PRODUCTS, Phase, Plan
from onelaunch.decode.runtime.memory import Constants, Memory
from onelaunch.decode.runtime.models import MODELS
from onelaunch.decode.runtime.packed import PackedWeights
from onelaunch.decode.runtime.proofs import check_sampling, checked_plan
from onelaunch.decode.runtime.session import Session
from onelaunch.device.hardware import memory_bytes_per_cycle, processors, room_for
from onelaunch.launch.build import CudaBuild, build_of_kernel
from onelaunch.launch.launch import CudaKernel, CudaLaunch, Mma

_FAST_MEMORY = 2000.0
"""Bytes of memory per cycle of the SMs between those of an H100 SXM and of an H200, for which settings were measured."""

_PACE_MARGIN = 1.2
"""Factor by which all CTAs together may begin copies faster than memory delivers, where each has its own pace.

With it the pace is 1060 cycles on an H100 SXM and 730 on an H200. Measured, 1050 of 700 to 1400 was the fastest on the first, and
700 of 500 to 1100 on the second.
"""


def tuning_of(plan: Plan, device: torch.device) -> Tuning:
    """Return the settings with which a plan's kernel streams weights on a GPU, by its memory's bytes per cycle.

    They are those of plans whose output projection is split over heads (``streaming``). Other plans have the defaults.
    """
    rate = memory_bytes_per_cycle(device)
    if rate is None or plan.blocks is None:
        return Tuning()
    pace = round(CHUNK * plan.ctas / (_PACE_MARGIN * rate), -1)
    # More copies in flight than two, and chunks ahead in L2, were measured on H100s only (docs/notebook/decode.md).
    return Tuning(pace=int(pace)) if rate > _FAST_MEMORY else Tuning(pace=int(pace), flight=3, l2_chunks=8)


def kernels_of(plan: Plan, tuning: Tuning | None = None) -> dict[Phase | None, CudaKernel]:
    """Return the kernels of a plan by phase. The key is ``None`` for a plan of one kernel.

    A plan with a launch per phase has a kernel for each operation, under the last phase with that operation; the kernel depends
    on the phase by its operation only.
    """
    tuning = tuning or Tuning()
    phases: tuple[Phase | None, ...] = tuple({phase.op: phase for phase in plan.phases()}.values()) if plan.separate else (None,)
    return {
        phase: CudaKernel(
            source(plan, tuning, phase), KINDS, threads=THREADS, shared_bytes=layout_of(plan, tuning).bytes,
            # CTAs of a single launch wait for each other, so all must be resident. Launches per phase overlap each other.
            cooperative=not plan.separate, overlap=plan.separate,
            mma=Mma.WARP if phase is None or phase.op in PRODUCTS else Mma.NONE,
        )
        for phase in phases
    }  # fmt: skip


def _settled(config: ModelConfig, level: str, device: torch.device, tuning: Tuning | None) -> tuple[Plan, Tuning]:
    """Return the plan of a level for a GPU, proved sound there, and its settings, by default those of :func:`tuning_of`."""
    ctas = processors(device)
    tuning = tuning or tuning_of(plan_for(config, level, ctas), device)
    return checked_plan(config, level, ctas, tuning), tuning


def builds_on(config: ModelConfig, level: str, device: torch.device) -> list[CudaBuild]:
    """Return the kernels that a session of a model compiles on a GPU. They need none of the model's weights.

    Their plan is proved sound first, as :func:`make_session` does, so that another process finds the proof in the cache folder.

    Raises:
        PlanError: the plan cannot run on this device.
    """
    plan, tuning = _settled(config, level, device, None)
    return [build_of_kernel(kernel, phase.name if phase else level) for phase, kernel in kernels_of(plan, tuning).items()]


class StepKernel:
    """Compiled and loaded kernel of a plan; for a plan with a launch per phase, one kernel for each operation.

    Args:
        plan: Plan that was checked for the device.
        tuning: Settings of the ring of weight chunks, of polling and of profile markers.
        device: NVIDIA GPU.

    Raises:
        CompilerMissing, CompileError, DriverError: the kernel cannot be compiled or loaded, see :func:`onelaunch.cuda.load`.
    """

    def __init__(self, plan: Plan, tuning: Tuning, device: torch.device) -> None:
        self.plan = plan
        self._device = device
        # By operation; ``None`` is the key of the only kernel of a plan without a launch per phase.
        self._kernels = {phase and phase.op: kernel for phase, kernel in kernels_of(plan, tuning).items()}
        for kernel in self._kernels.values():
            kernel.on(device)  # loads the kernel now, before a graph that contains it is captured
        self._sampling_proved = False  # spares a look-up at each sampled launch: check_sampling keeps its results too

    def launch(self, arguments: list[torch.Tensor | None], capacity: int, count: int, position: int) -> None:
        """Enqueue the launches of ``count`` tokens on the current stream.

        Args:
            arguments: Tensors as :meth:`onelaunch.decode.runtime.memory.Memory.arguments` returns them.
            capacity: Capacity of the cache, in positions.
            count: Number of tokens; 1 for a plan with a launch per phase.
            position: Position of the first token, or -1 to continue where the last launch ended.
        """
        if not self.plan.separate:
            grid = (self.plan.ctas, 1, 1)
            layer = 0  # not read: only a launch per phase is told its layer
            CudaLaunch(self._kernels[None], self._device, grid, *arguments, capacity, count, position, layer).run()
            return
        for layer, phase in self.plan.instances():
            _, ctas = launch_of(self.plan, phase)
            kernel = self._kernels[phase.op]
            CudaLaunch(kernel, self._device, (ctas, 1, 1), *arguments, capacity, 1, position, layer).run()

    def prove_sampling(self) -> None:
        """Raise :class:`~onelaunch.errors.PlanError` unless the plan is sound for sampled tokens too."""
        if not self._sampling_proved:
            check_sampling(self.plan.config, self.plan.level, self.plan.ctas)
            self._sampling_proved = True


def make_session(weights: ModelWeights, level: str, tuning: Tuning | None = None) -> Session:
    """Repack a model's weights, compile and load the kernel, allocate its buffers, and return the session that owns them.

    Each call makes a new session; :func:`session_for` caches them. If several threads may make sessions of a model, the caller
    holds ``MODELS.making``.

    Args:
        weights: Weights on an NVIDIA GPU.
        level: Optimization level, a name from :data:`onelaunch.decode.plan.levels.LEVELS`.
        tuning: Settings of the ring of weight chunks, of polling and of profile markers; by default :func:`tuning_of` the device.

    Raises:
        PlanError: the plan cannot run on this device.
        ArgumentError, ShapeError, DTypeError, DeviceError: a weight does not match the model's configuration.
        DeviceMemoryError: the device has no memory left for a second copy of the weights or for the buffers.
        CompilerMissing, CompileError, DriverError: the kernel cannot be compiled or loaded, see :func:`onelaunch.cuda.load`.
    """
    device = weights.device
    plan, tuning = _settled(weights.config, level, device, tuning)
    constants = _constants(weights, plan)
    with room_for("the buffers through which CTAs exchange data", device):
        memory = Memory(plan, constants, weights.config.max_position_embeddings, markers=tuning.stamps)
    return Session(StepKernel(plan, tuning, device), memory)


@torch.inference_mode(mode=False)  # cached tensors must be usable outside of inference mode too
@torch.no_grad()
def session_for(weights: ModelWeights, level: str) -> Session:
    """Return the cached session of an optimization level for a model.

    It is kept as long as the weights exist. Weights that were written to since the last call are repacked.
    """
    with MODELS.making:
        sessions = MODELS.kernels(weights).sessions
        if level not in sessions:
            sessions[level] = make_session(weights, level)
        return sessions[level]


def _constants(weights: ModelWeights, plan: Plan) -> Constants:
    """Return the repacked weights of a plan. Plans that divide the matrices among CTAs in the same way share them."""
    key = division(plan)
    cached = MODELS.kernels(weights).constants
    if key not in cached:
        context, own = weights.config.max_position_embeddings, weights.alias()  # the model itself would be kept alive
        if isinstance(own, PackedWeights) and division(own.plan) == key:
            cached[key] = plan, Constants.of(own, own.stream, context)
        else:
            with room_for("a second copy of the weights, in the order in which CTAs stream them", weights.device):
                cached[key] = plan, Constants.of(own, pack(weights, plan), context)
    return cached[key][1]
