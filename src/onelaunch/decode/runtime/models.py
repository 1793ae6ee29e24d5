"""Registry of the objects that the runtime makes once per model: repacked weights, sessions, and captured steps.

``kernels.py`` keeps repacked weights and sessions in ``MODELS``. The variants ``captured`` and ``compiled`` of ``decode_step``
keep their CUDA graphs in it.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch

from onelaunch.decode.model.weights import ModelWeights
from onelaunch.decode.plan.phases import Plan
from onelaunch.decode.runtime.graphs import CaptureSite, GraphCache
from onelaunch.decode.runtime.memory import Constants
from onelaunch.decode.runtime.order import StreamOrder
from onelaunch.decode.runtime.session import Session

Captured = TypeVar("Captured")

_GRAPHS = 32
"""Captured PyTorch steps to keep for a model: one for each variant, attention window and cache that sequences use, and one for
each size of prompts.
"""


class PreparedKernels:
    """Repacked weights and sessions of a model's kernels on its device.

    After a write to the weights they are repacked in place, since CUDA graphs hold the addresses.

    Args:
        weights: Weights whose shapes and dtypes match their configuration; all must be contiguous.

    Attributes:
        constants: Plan and repacked weights, by the key of a division of the matrices among CTAs.
        sessions: Session of each optimization level, by its name.

    Raises:
        ArgumentError, ShapeError, DTypeError, DeviceError: the weights do not match, and the kernels would misread them.
    """

    def __init__(self, weights: ModelWeights) -> None:
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
        """Return how often PyTorch wrote to the tensors in place: the sum of their version counters.

        Inference tensors have no version counter, so writes to them are not noticed.
        """
        return sum([tensor._version for tensor in self._tensors if not tensor.is_inference()])  # noqa: SLF001


class CapturedSteps(Generic[Captured]):
    """PyTorch steps that were captured as CUDA graphs for a model.

    Sequences may replay the same graph, in the same memory. So replays are enqueued under a lock, and replays on different
    streams run in that order.

    Args:
        device: Device of the weights.

    Attributes:
        lock: Lock held from the search for a step until its replay is enqueued.
        order: Stream order of the replays.
        graphs: Captured steps.
        site: Stream and memory pool of the captures.
        seen: Number of prompts by the size of the captured pass that would read them; see ``prompts.py``.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.Lock()
        self.order = StreamOrder(device)
        self.site = CaptureSite(device)
        self.graphs: GraphCache[Captured] = GraphCache(_GRAPHS)
        self.seen: Counter[int] = Counter()


class Models:
    """Registry of prepared kernels and captured steps. The key is a model's weights; an entry exists as long as they do.

    Attributes:
        making: Re-entrant lock held while kernels are prepared. Without it, two threads that start at once would repack the
            weights twice.
    """

    def __init__(self) -> None:
        self.making = threading.RLock()
        self._kernels: WeakKeyDictionary[ModelWeights, PreparedKernels] = WeakKeyDictionary()
        self._captured: WeakKeyDictionary[ModelWeights, CapturedSteps[Any]] = WeakKeyDictionary()

    def kernels(self, weights: ModelWeights) -> PreparedKernels:
        """Return a model's prepared kernels, repacked if the weights changed. The caller holds :attr:`making`."""
        found = self._kernels.get(weights)
        if found is None:
            found = self._kernels[weights] = PreparedKernels(weights)
        found.renew()
        return found

    def captured(self, weights: ModelWeights) -> CapturedSteps[Any]:
        """Return the captured steps of a model."""
        found = self._captured.get(weights)  # no lock: two threads that come here at once get one object from ``setdefault``
        return self._captured.setdefault(weights, CapturedSteps(weights.device)) if found is None else found

    def discard(self, weights: ModelWeights) -> None:
        """Drop a model's entries. Only tests call it; otherwise they go with the weights."""
        with self.making:
            self._kernels.pop(weights, None)
            self._captured.pop(weights, None)


MODELS = Models()
"""Registry of this process."""
