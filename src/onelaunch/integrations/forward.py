"""Base class of the replaced forward passes: what they look at in a call, and when the original forward runs.

``swiglu_mlps.py``, ``fla_layers.py`` and ``norms.py`` derive from it, ``walk.py`` makes the objects and ``report.py`` reads them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.compiler import is_compiling

from onelaunch import checks
from onelaunch.integrations.storage import Owners, are_adjacent, lay, part, together
from onelaunch.nn.packed import child
from onelaunch.tracing import is_transformed


class Forward(ABC):
    """Forward pass that replaces the one of a module.

    The module's attribute ``forward`` is the bound method :meth:`forward` of this object. So ``copy.deepcopy`` and ``pickle`` of
    the module copy this object with it, and the copy reads the parameters of the copied module.
    """

    operation: ClassVar[str]
    """Name of the function of ``onelaunch.ops`` that is called."""

    projections: ClassVar[tuple[str, ...]]
    """Submodules whose weights are read directly. They must be plain ``torch.nn.Linear``, and are not called."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.fallbacks: Counter[str] = Counter()
        """Number of calls that ran the original forward, by reason."""
        self.why_not_laid: str | None = None
        """Reason why the weights were not moved into one buffer."""
        self._buffers: dict[int, int] = {}
        """Address of the buffer that each group was moved into, by the group's index."""
        self._unseen = [_Unseen(module, name, each) for name, each in self.not_called()]

    @classmethod
    @abstractmethod
    def refusals(cls, module: nn.Module) -> Iterator[str]:
        """Yield each reason why the forward of a module cannot be replaced."""

    @abstractmethod
    def not_called(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the submodules that the original forward calls and this one does not, by name."""

    @abstractmethod
    def groups(self) -> tuple[tuple[nn.Parameter, ...], ...]:
        """Return the weights that are multiplied with the same input, in the order that the operation takes them."""

    @abstractmethod
    def weights(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors that must have the dtype of the input."""

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""

    @abstractmethod
    def separately(self) -> str:
        """Return what a call does with weights that do not lie one behind the other."""

    def original(self, reason: str, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module's class, and count the call with its reason."""
        if not is_compiling():  # a changed count would make PyTorch compile again
            self.fallbacks[reason] += 1
        return type(self.module).forward(self.module, *args, **kwargs)

    def why_not(self, x: torch.Tensor) -> str | None:
        """Return why this call must run the original forward, or ``None``."""
        if type(x) is not torch.Tensor and type(x) is not nn.Parameter:
            return f"the input is a {type(x).__name__}"
        if (reason := self.why_changed()) is not None:
            return reason
        dtype = x.dtype
        known, alike = dtype in _FLOATS, True
        for weight in self.weights():
            if type(weight) is not nn.Parameter and type(weight) is not torch.Tensor:
                return f"a weight is a {type(weight).__name__}"
            if weight.dtype is not dtype:
                alike = False
                known = known and weight.dtype in _FLOATS
        if not known:
            return "the input or a weight is neither float16, bfloat16 nor float32"
        if not alike and not torch.is_autocast_enabled(x.device.type):
            return "the input and the weights differ in dtype"
        return "the call is inside a transform of torch.func" if is_transformed() else None

    def why_changed(self) -> str | None:
        """Return how a submodule that is not called differs from what it was when this object was made, or ``None``.

        Each call asks, so what PyTorch keeps is looked up here without calls of functions.
        """
        traced = is_compiling()  # Dynamo follows attributes of modules, not their dictionaries
        for each in self._unseen:
            module = each.module
            if traced:
                replaced = find(self.module, each.name) is not module
            else:
                replaced = False
                for parent, key, found in each.links:
                    if parent._modules.get(key) is not found:  # noqa: SLF001 - as onelaunch.nn.packed looks it up
                        replaced = True
            if replaced or "forward" in module.__dict__:
                return f"{each.name} was replaced"
            if type(module) is not each.kind:  # as FSDP2 does with each module that it is applied to
                return f"{each.name} is of the class {type(module).__name__} now"
            if not each.biased and module._parameters.get("bias") is not None:  # noqa: SLF001
                return f"{each.name} has a bias now"
            if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:  # noqa: SLF001
                return f"{each.name} has hooks"
        return None

    def lay(self, owners: Owners) -> None:
        """Move each group of weights into one buffer, unless it lies in one or cannot be moved."""
        self.why_not_laid = None
        for index, group in enumerate(self.groups()):
            if _adjacent(group):
                continue
            if (reason := owners.why_not(group, self._buffers.get(index))) is not None:
                self.why_not_laid = reason
                continue
            self._buffers[index] = lay(group)

    @property
    def runs(self) -> bool:
        """Flag that the module calls this forward: it was not restored, nor replaced by somebody else since."""
        return getattr(vars(self.module).get("forward"), "__self__", None) is self

    def restore(self) -> None:
        """Remove this forward from the module, so that the one of its class runs, and undo :meth:`lay`."""
        if not self.runs:
            return
        del self.module.forward
        for index, group in enumerate(self.groups()):
            if index in self._buffers and _adjacent(group):
                part(group)
        self._buffers.clear()

    def layout(self) -> str:
        """Return how the weights that share an input are multiplied in eager calls, as they lie now."""
        apart = [group for group in self.groups() if not _adjacent(group)]
        if not apart:
            return "as one weight"
        kinds = {type(each).__name__ for group in apart for each in group} - {"Parameter", "Tensor"}
        if kinds:
            why = f"each is a {min(kinds)}, whose shards are gathered into other memory in every call"
        else:
            why = self.why_not_laid or "they are no longer adjacent in memory"
        return f"{self.separately()}, since {why}"


class _Unseen:
    """Submodule that the original forward calls and the one in its place does not, as it was when it was seen."""

    def __init__(self, root: nn.Module, name: str, module: nn.Module) -> None:
        self.name, self.module, self.kind = name, module, type(module)
        self.biased = getattr(module, "bias", None) is not None
        self.links: list[tuple[nn.Module, str, nn.Module]] = []
        """Parent, key and child of each step from the root to the submodule, whose name may hold dots."""
        for key in name.split("."):
            found = child(root, key)
            self.links.append((root, key, found))
            root = found


_FLOATS = frozenset(checks.FLOATS)


def _adjacent(group: Sequence[torch.Tensor]) -> bool:
    """Return whether the tensors lie one behind the other; false for tensors without an address."""
    try:
        return are_adjacent(group)
    except (RuntimeError, NotImplementedError):
        return False


def find(module: nn.Module, name: str) -> Any:
    """Return a submodule by its name, which may hold dots, or ``None``."""
    found: Any = module
    try:
        for key in name.split("."):
            found = child(found, key)
    except AttributeError:
        return None
    return found


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors as one: over their own memory where they lie one behind the other, otherwise a copy made for this call."""
    whole = together(parts)
    return torch.cat(tuple(parts)) if whole is None else whole


def is_hooked(module: nn.Module) -> bool:
    """Return whether hooks would run if the module were called."""
    forward = module._forward_hooks or module._forward_pre_hooks  # noqa: SLF001 - PyTorch has no public names for these
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)  # noqa: SLF001


def linear_refusals(name: str, linear: object, *, bias: bool = False) -> Iterator[str]:
    """Yield each reason why the weight of a projection cannot be read directly.

    Args:
        name: Name of the projection in its module.
        linear: The projection.
        bias: Whether the operation adds a bias.
    """
    if type(linear) is not nn.Linear:
        kind = type(linear)
        found = "missing" if linear is None else f"a {kind.__module__}.{kind.__qualname__}"
        yield f"{name} is {found}, not a plain torch.nn.Linear (it may be quantized, sharded or adapted)"
        return
    if is_hooked(linear):
        yield f"{name} has hooks, which would not run"
    if "forward" in vars(linear):
        yield f"the forward of {name} was replaced by another library"
    if (linear.bias is not None) != bias:
        yield f"{name} has a bias, which the operation does not add" if linear.bias is not None else f"{name} has no bias"
    parameters = [("weight", linear.weight), *([("bias", linear.bias)] if linear.bias is not None else [])]
    for kind_of, parameter in parameters:
        yield from parameter_refusals(f"{name}.{kind_of}", parameter)


def parameter_refusals(name: str, parameter: object) -> Iterator[str]:
    """Yield the reason why an operation cannot read a parameter, if there is one."""
    if type(parameter) is not nn.Parameter:
        yield f"{name} is a {type(parameter).__name__}, not a plain torch.nn.Parameter (call accelerate before sharding)"
    elif parameter.is_meta:
        yield f"{name} is on the meta device; load the weights first"
    elif parameter.dtype not in _FLOATS:
        yield f"{name} is {str(parameter.dtype).removeprefix('torch.')}; it must be float16, bfloat16 or float32"
    elif parameter.is_inference():
        yield f"{name} was made in inference mode"
