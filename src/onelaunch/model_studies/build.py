"""Models of a study, their optimizer, and one training step; and the gradient of the same model in plain PyTorch.

Models of the kind ``gla``, their text and their loss come from the example ``train_lm.py``, so that a study trains what a user
can train by hand. The weights depend on the seed alone, so all variants of a model begin with the same ones.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import onelaunch
from onelaunch.errors import StudyError
from onelaunch.integrations import accelerate
from onelaunch.integrations.report import Report
from onelaunch.model_studies.declare import NORM_EPS, LanguageModel
from onelaunch.operation.sources import installed_version
from onelaunch.ops.gla_layer import gla_layer

PACKAGES = {"gla": "fla", "llama": "transformers"}
"""Package that has the baseline, by the kind of a model."""


@functools.cache
def example() -> ModuleType:
    """Return the example ``train_lm.py`` as a module: from the package of a wheel, or from the checkout.

    Raises:
        StudyError: It is in neither.
    """
    package = Path(onelaunch.__file__).parent
    places = [root / "examples" / "train_lm.py" for root in (package, package.parents[1])]
    path = next((path for path in places if path.is_file()), None)
    if path is None:
        raise StudyError(places[0], "models are made by this example, and it is not there", advice="Install onelaunch again.")
    spec = importlib.util.spec_from_file_location("onelaunch_train_lm", path)
    assert spec is not None  # noqa: S101 - the name ends in .py
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses looks up the module of a class
    spec.loader.exec_module(module)
    return module


def why_not(model: LanguageModel, variant: str, device: torch.device) -> tuple[str, str] | None:
    """Return the status and the reason if a variant cannot run on a device, or ``None``."""
    package = PACKAGES[model.kind]
    if variant == "layers":
        return None
    if package == "fla" and device.type == "cpu":
        return "unsupported", "fla's kernels do not run on a CPU"
    if installed_version(package) is None:
        return "not_installed", f"needs the package {package}"
    return None


ROUNDINGS = {"bfloat16": 2.0**-9, "autocast": 2.0**-9, "float32": 2.0**-24}
"""Relative size of one rounding in a step, by the precision of a model; autocast rounds weights and products to bfloat16."""

SIGNS = 20_000
"""Seed of the signs of :func:`perturb`, to which the index of the control is added."""


def perturb(module: nn.Module, size: float, index: int = 0) -> None:
    """Multiply each weight of a module by 1 + size or 1 - size, with random signs that are the same for every run of an index.

    The products are computed in float64 and rounded to the dtype of the weights once.
    """
    generator = torch.Generator().manual_seed(SIGNS + index)
    with torch.no_grad():
        for each in module.parameters():
            signs = 2 * torch.randint(2, each.shape, generator=generator, dtype=torch.int8) - 1
            each.copy_(each.double() * (1 + size * signs.double()))


HEAD_NORM = "g_norm_swish_gate"
"""Name of the norm of the heads' outputs in a layer of gated linear attention, of fla and of ours."""


def set_head_eps(module: nn.Module, eps: float) -> None:
    """Set the epsilon of the norms of heads' outputs in a model of the kind ``gla``, before it is accelerated.

    fla's configuration has one epsilon for all norms, so it is set on the modules: fla's norm reads its own ``eps`` in each call,
    and a layer of onelaunch its ``norm_eps``.
    """
    layers: list[Any] = [each for each in module.modules() if hasattr(each, HEAD_NORM)]
    if not layers:
        raise ValueError(f"no module of the model has a norm {HEAD_NORM}")
    for layer in layers:
        getattr(layer, HEAD_NORM).eps = eps
        if hasattr(layer, "norm_eps"):
            layer.norm_eps = eps


class Trainer:
    """A variant of a model on a device, with its optimizer.

    Args:
        model: Declaration of the model.
        variant: Name of the variant.
        device: Device that it is moved to.
        seed: Seed of the weights.
        perturbation: Size of :func:`perturb`; 0 leaves the weights as they are.
        index: Index of the control, for :func:`perturb`.
        drawn_there: Whether the weights are drawn on the device, which takes seconds less for a large model than on the CPU. The
            same seed then gives other weights on another device.
        eps: Epsilon of the norms of heads' outputs, for :func:`set_head_eps`. That of all other norms is :data:`NORM_EPS`.

    Attributes:
        module: The model. It is in training mode.
        report: Report of ``accelerate`` for the variant ``accelerated``, else ``None``.
        optimizer: AdamW, fused on a GPU.
    """

    def __init__(
        self,
        model: LanguageModel,
        variant: str,
        device: torch.device,
        seed: int = 0,
        perturbation: float = 0.0,
        index: int = 0,
        *,
        drawn_there: bool = False,
        eps: float = NORM_EPS,
    ) -> None:
        self.model, self.variant, self.device = model, variant, device
        dtype = torch.bfloat16 if model.precision == "bfloat16" else torch.float32
        with device if drawn_there else contextlib.nullcontext():
            module = _module(model, variant, seed)
        if eps != NORM_EPS:
            set_head_eps(module, eps)
        if perturbation:
            perturb(module, perturbation, index)  # in float32, before weights are rounded to the model's dtype
        self.module = module.to(device, dtype).train()
        self.report: Report | None = accelerate(self.module) if variant == "accelerated" else None
        matrices = [each for each in self.module.parameters() if each.dim() > 1]
        vectors = [each for each in self.module.parameters() if each.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=model.rate, betas=(0.9, 0.95), fused=device.type == "cuda")

    def autocast(self) -> torch.autocast:
        """Return the autocast of the model's precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.model.precision == "autocast")

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the next tokens of ``rows [B, T]``, in nats."""
        with self.autocast():
            if self.model.kind == "gla":
                return example().loss_of(self.module, rows, "onelaunch" if self.variant == "layers" else "fla")
            return self.module(input_ids=rows, labels=rows, use_cache=False).loss

    def step(self, rows: torch.Tensor) -> torch.Tensor:
        """Train one step without clipping, and return the loss without waiting for the device."""
        loss = self.loss(rows)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def logits(self, rows: torch.Tensor, **more: Any) -> Any:
        """Return what the model returns for token ids, without gradients."""
        with torch.no_grad(), self.autocast():
            return self.module(rows, **more)


def random_rows(model: LanguageModel, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Return random token ids ``[batch, length]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.vocabulary, (model.batch, model.length), generator=generator).to(device)


def _module(model: LanguageModel, variant: str, seed: int) -> nn.Module:
    """Return a new model on PyTorch's default device, in float32."""
    if model.kind == "llama":
        return _llama(model, seed)
    shape = {name: getattr(model, name) for name in ("width", "heads", "layers", "vocabulary", "batch", "length", "rate")}
    return example().build("onelaunch" if variant == "layers" else "fla", example().Size(**shape), seed)


def _llama(model: LanguageModel, seed: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=model.width,
        intermediate_size=model.intermediate or 4 * model.width,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads or model.heads,
        vocab_size=model.vocabulary,
        max_position_embeddings=max(model.length, 2048),
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def plain_loss(
    weights: Mapping[str, torch.Tensor], model: LanguageModel, rows: torch.Tensor, eps: float = NORM_EPS
) -> torch.Tensor:
    """Return the loss of a model of the kind ``gla`` in plain PyTorch, in the dtype of the weights.

    The layers are the definition of ``gla_layer``, with a loop over time.

    Args:
        weights: The parameters by their names in a state dict.
        model: The model's declaration.
        rows: Token ids ``[B, T]``.
        eps: Epsilon of the norms of heads' outputs. That of all other norms is :data:`NORM_EPS`.
    """

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], NORM_EPS)

    x = F.embedding(rows, weights["model.embeddings.weight"])
    for index in range(model.layers):
        name = f"model.layers.{index}"
        attn, mlp = f"{name}.attn", f"{name}.mlp"
        projections = ("q_proj", "k_proj", "v_proj", "g_proj", "gk_proj.0")
        out, _ = gla_layer.reference(
            x=norm(x, f"{name}.attn_norm"),
            in_proj_weight=torch.cat([weights[f"{attn}.{each}.weight"] for each in projections]),
            gk_weight=weights[f"{attn}.gk_proj.1.weight"],
            gk_bias=weights[f"{attn}.gk_proj.1.bias"],
            norm_weight=weights[f"{attn}.g_norm_swish_gate.weight"],
            w_out=weights[f"{attn}.o_proj.weight"],
            heads=model.heads,
            eps=eps,
        )
        assert out is not None  # noqa: S101 - the first result is always there
        x = x + out
        h = norm(x, f"{name}.mlp_norm")
        gated = F.silu(h @ weights[f"{mlp}.gate_proj.weight"].mT) * (h @ weights[f"{mlp}.up_proj.weight"].mT)
        x = x + gated @ weights[f"{mlp}.down_proj.weight"].mT
    logits = norm(x, "model.norm") @ weights["lm_head.weight"].mT
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
