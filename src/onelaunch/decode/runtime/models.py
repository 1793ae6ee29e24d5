"""Registry of what the runtime makes once for a model: repacked weights, sessions and captured steps."""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch

from onelaunch.decode.model.weights import Weights
from onelaunch.decode.plan.phases import Plan
from onelaunch.decode.runtime.graphs import GraphCache
from onelaunch.decode.runtime.memory import Constants
from onelaunch.decode.runtime.session import Session, StreamOrder

Captured = TypeVar("Captured")

GRAPHS = 16
"""Captured steps of PyTorch kept for a model: one for each window of positions, and for each cache that sequences use."""


class PreparedKernels:
    """Everything that the kernels of a model need on its device.

    Once the weights are written to, it is made again at the same addresses, since CUDA graphs hold them.

    Args:
        weights: Weights, as their configuration says and contiguous.

    Attributes:
        constants: Plan and repacked weights, for each way to cut the matrices.
        sessions: Session of each rung.

    Raises:
        ArgumentError, ShapeError, DTypeError, DeviceError: kernels would misread the weights.
    """

    def __init__(self, weights: Weights) -> None:
        weights.check()
        self._tensors = tuple(weights.tensors().values())
        self._written = self._writes()
        self.constants: dict[tuple[object, ...], tuple[Plan, Constants]] = {}
        self.sessions: dict[str, Session] = {}

    def renew(self) -> None:
        """Repack the weights if they were written to."""
        if (writes := self._writes()) == self._written:
            return
        for plan, constants in self.constants.values():
            constants.renew(plan)
        self._written = writes

    def _writes(self) -> int:
        """Return how often PyTorch wrote to the tensors in place."""
        return sum([tensor._version for tensor in self._tensors if not tensor.is_inference()])  # noqa: SLF001


class CapturedSteps(Generic[Captured]):
    """Steps in PyTorch that are captured for a model. Sequences share their memory.

    Args:
        device: Device of the weights.

    Attributes:
        lock: Lock held from the search for a step until its replay is enqueued.
        order: Order of the streams that replay.
        graphs: Captured steps.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.Lock()
        self.order = StreamOrder(device)
        self.graphs: GraphCache[Captured] = GraphCache(GRAPHS)


class Models:
    """Registry of what is kept for models, by their weights and for as long as these exist.

    Attributes:
        making: Re-entrant lock held while something is made for a model's kernels. Without it, two threads that start at once
            would repack the weights twice.
    """

    def __init__(self) -> None:
        self.making = threading.RLock()
        self._kernels: WeakKeyDictionary[Weights, PreparedKernels] = WeakKeyDictionary()
        self._captured: WeakKeyDictionary[Weights, CapturedSteps[Any]] = WeakKeyDictionary()

    def kernels(self, weights: Weights) -> PreparedKernels:
        """Return what the kernels of a model need, made from what the weights hold now. The caller holds :attr:`making`."""
        found = self._kernels.get(weights)
        if found is None:
            found = self._kernels[weights] = PreparedKernels(weights)
        found.renew()
        return found

    def captured(self, weights: Weights) -> CapturedSteps[Any]:
        """Return the captured steps of a model."""
        found = self._captured.get(weights)
        return self._captured.setdefault(weights, CapturedSteps(weights.device)) if found is None else found

    def discard(self, weights: Weights) -> None:
        """Drop everything that is kept for a model."""
        with self.making:
            self._kernels.pop(weights, None)
            self._captured.pop(weights, None)


MODELS = Models()
"""Registry of this process."""
