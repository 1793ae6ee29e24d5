"""Plans of an operator's forward pass by the place of the call in a tape, so that the facts of its tensors are not taken again.

A tape is replayed for tensors whose facts are known to be those of the recorded call. An operator that gets these very tensors
has the same plan every time, unless the plan depends on the distances of tensors in memory. Its :class:`CallSite`, which
``operator.py`` makes, keeps that plan once it has been recorded. Without one, each call takes the facts again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onelaunch.launch.plan import Device, Plan
from onelaunch.launch.planned import Planned


class CallSite:
    """Place in a tape at which an operator is called, with gradients, with tensors of the taped call itself.

    Args:
        apply: Function that applies the operator's autograd function to inputs, and to a call site or ``None``.
        planned: The operator's forward pass.
        inputs: Inputs of the recorded call, none of which holds tensors in a list.
    """

    __slots__ = ("_apply", "_plan", "_planned", "_positions")

    def __init__(self, apply: Callable[..., Any], planned: Planned[Any], inputs: tuple[Any, ...]) -> None:
        self._apply = apply
        self._planned = planned
        self._positions = tuple(at for at, each in enumerate(inputs) if isinstance(each, torch.Tensor))
        self._plan: Plan | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Return the operator's results, with autograd."""
        return self._apply(*inputs, self)

    def forward(self, inputs: tuple[Any, ...]) -> Any:
        """Return the results of the forward pass."""
        plan = self._plan
        if plan is not None and plan.index == Device.current():
            tensors = [inputs[at] for at in self._positions]
            return plan.replay(tensors, [each.data_ptr() for each in tensors])
        results = self._planned(*inputs)
        self._plan = self._planned.plan_for(inputs)
        return results
