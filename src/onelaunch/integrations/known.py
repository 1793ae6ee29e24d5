"""Classes of other libraries that ``accelerate`` knows, by qualified name, and the releases for which that holds.

Neither fla nor transformers is imported: a model that holds one of their modules has imported it.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from typing import Any, NamedTuple

from torch import nn

from onelaunch.integrations.forward import Forward
from onelaunch.integrations.gla_layers import GlaLayer, SimpleGlaLayer
from onelaunch.integrations.hgrn_layers import Hgrn2Layer, HgrnLayer
from onelaunch.integrations.norms import FlaNorm
from onelaunch.integrations.swiglu_mlps import FlaMlp, SwigluMlp


class Library(NamedTuple):
    """Library whose modules are replaced."""

    name: str
    package: str
    """Top package, whose ``__version__`` is read."""
    distributions: tuple[str, ...]
    """Names on the package index, whose version is read where the package has none."""
    least: tuple[int, ...]
    """First supported release."""
    below: tuple[int, ...]
    """First release that is not supported, since it has not been looked at."""

    def refusal(self) -> str | None:
        """Return why the installed release is not supported, or ``None``."""
        version = self._version()
        numbers = tuple([int(each) for each in re.findall(r"\d+", version or "")[:2]])
        if numbers and self.least <= numbers < self.below:
            return None
        said = "has no version that can be read" if not numbers else f"is {version}"
        supported = f"from {_dotted(self.least)} up to, but not including, {_dotted(self.below)}"
        return f"{self.name} {said}; supported are releases {supported}"

    def _version(self) -> str | None:
        version = getattr(sys.modules.get(self.package), "__version__", None)
        if isinstance(version, str):
            return version
        found = [each for name in self.distributions for each in importlib.metadata.distributions(name=name)]
        return found[0].version if found else None


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


FLA = Library("fla", "fla", ("fla-core", "flash-linear-attention"), (0, 6), (0, 7))
TRANSFORMERS = Library("transformers", "transformers", ("transformers",), (4, 51), (6, 0))
LIBRARIES = (FLA, TRANSFORMERS)

KNOWN: dict[str, tuple[Library, type[Forward]]] = {
    "fla.layers.gla.GatedLinearAttention": (FLA, GlaLayer),
    "fla.layers.simple_gla.SimpleGatedLinearAttention": (FLA, SimpleGlaLayer),
    "fla.layers.hgrn.HGRNAttention": (FLA, HgrnLayer),
    "fla.layers.hgrn2.HGRN2Attention": (FLA, Hgrn2Layer),
    "fla.modules.mlp.GatedMLP": (FLA, FlaMlp),
    "fla.modules.norm.layernorm.RMSNorm": (FLA, FlaNorm),
    "transformers.models.llama.modeling_llama.LlamaMLP": (TRANSFORMERS, SwigluMlp),
    "transformers.models.mistral.modeling_mistral.MistralMLP": (TRANSFORMERS, SwigluMlp),
    "transformers.models.qwen2.modeling_qwen2.Qwen2MLP": (TRANSFORMERS, SwigluMlp),
    "transformers.models.qwen3.modeling_qwen3.Qwen3MLP": (TRANSFORMERS, SwigluMlp),
}
"""Replacement of each class, by the module and the name of the class."""

_GEGLU = re.compile(r"transformers\.models\.gemma\w*\.modeling_\w+\.\w+MLP$")


def names_of(module: nn.Module) -> list[str]:
    """Return the qualified names of a module's class and of its base classes, in method resolution order."""
    return [f"{each.__module__}.{each.__qualname__}" for each in type(module).__mro__]


def accelerated(module: nn.Module) -> Forward | None:
    """Return the object that replaced a module's forward, or ``None``."""
    owner = getattr(vars(module).get("forward"), "__self__", None)
    return owner if isinstance(owner, Forward) else None


def recognize(module: nn.Module) -> Forward | str | None:
    """Return the replacement of a module's forward, the reason why there is none, or ``None`` for a module of no interest."""
    names = names_of(module)
    name = next((each for each in names if each in KNOWN), None)
    if name is None:
        return _reason_for_unknown(module, names)
    library, kind = KNOWN[name]
    if (reason := library.refusal()) is not None:
        return reason
    known = type(module).__mro__[names.index(name)]
    if (reason := _forward_refusal(module, known)) is not None:
        return reason
    reasons = list(dict.fromkeys(kind.refusals(module)))
    return "; ".join(reasons) if reasons else kind(module)


def _forward_refusal(module: nn.Module, known: Any) -> str | None:
    """Return why the forward of a module is not the one of its known class, or ``None``."""
    if "forward" in vars(module):
        return "its forward was replaced by another library"
    if type(module).forward is not known.forward:
        return f"{type(module).__qualname__} has a forward of its own"
    if known.forward.__module__ != known.__module__:
        return f"{known.__qualname__}.forward was replaced by {known.forward.__module__}"
    return None


def _reason_for_unknown(module: nn.Module, names: list[str]) -> str | None:
    """Return why a module that looks like one of interest is not replaced, or ``None`` for any other module."""
    if any(_GEGLU.match(each) for each in names):
        return "it computes GeGLU (a gate with GELU); onelaunch.ops.swiglu has SiLU alone"
    if names[0].startswith("fla.layers."):
        return "there is no replacement for this layer"
    if all(isinstance(getattr(module, name, None), nn.Module) for name in ("gate_proj", "up_proj", "down_proj")):
        return "it has the projections of a gated MLP, but its class is not known"
    return None
