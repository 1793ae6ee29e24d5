"""A model's weights: what a checkpoint holds, checked against the configuration, each tensor read once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from onelaunch import checks
from onelaunch.decode.config import ModelConfig
from onelaunch.errors import ArgumentError, CheckpointError, ShapeError, listing
from onelaunch.operation import Bundle

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Files of a checkpoint in one piece, and of one in several."""

FLOATS = ("BF16", "F16", "F32", "F64")
"""Dtypes of tensors that are what they say; others are quantized."""


@dataclass(frozen=True, eq=False)
class LayerWeights(Bundle):
    """One layer's tensors in Hugging Face's layout: a projection is ``[outputs, inputs]``.

    ``H`` is the hidden size, ``Q`` and ``K`` the channels of all query and of all key heads, ``D`` those of a head, ``I`` the
    intermediate size.
    """

    input_layernorm: torch.Tensor
    """``[H]``"""
    q_proj: torch.Tensor
    """``[Q, H]``"""
    k_proj: torch.Tensor
    """``[K, H]``"""
    v_proj: torch.Tensor
    """``[K, H]``"""
    o_proj: torch.Tensor
    """``[H, Q]``"""
    q_norm: torch.Tensor
    """``[D]``"""
    k_norm: torch.Tensor
    """``[D]``"""
    post_attention_layernorm: torch.Tensor
    """``[H]``"""
    gate_proj: torch.Tensor
    """``[I, H]``"""
    up_proj: torch.Tensor
    """``[I, H]``"""
    down_proj: torch.Tensor
    """``[H, I]``"""
    q_bias: torch.Tensor | None = None
    """``[Q]``; biases only with ``attention_bias``."""
    k_bias: torch.Tensor | None = None
    """``[K]``"""
    v_bias: torch.Tensor | None = None
    """``[K]``"""
    o_bias: torch.Tensor | None = None
    """``[H]``"""


@dataclass(frozen=True, eq=False)
class Weights(Bundle):
    """All tensors of a model, with the configuration that says their shapes."""

    config: ModelConfig
    embed_tokens: torch.Tensor
    """``[V, H]``"""
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    """``[H]``"""
    untied_head: torch.Tensor | None = None
    """``[V, H]``; ``None`` where the head is the embedding's matrix."""

    @property
    def lm_head(self) -> torch.Tensor:
        """``[V, H]``: the head's matrix, its own or the embedding's."""
        return self.embed_tokens if self.untied_head is None else self.untied_head

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.device

    def check(self) -> None:
        """That every tensor is as the configuration says, and lies as kernels read it.

        Raises:
            ArgumentError: one is missing, or not contiguous.
            ShapeError, DTypeError, DeviceError: naming the tensor, what it is and what it has to be.
        """
        tensors = self.tensors()
        for name, _, shape in parts(self.config):
            what, tensor = f"weights.{name}", checks.tensor(f"weights.{name}", tensors.get(name))
            if tuple(tensor.shape) != shape:
                raise ShapeError(what, got=tensor.shape, want=f"{list(shape)} by the model's configuration")
            checks.dtype(what, tensor, (self.config.dtype,), ", the dtype of their configuration")
            checks.device(what, tensor, self.device)
            if not tensor.is_contiguous():
                raise ArgumentError(f"{what} is not contiguous; use weights.map(torch.Tensor.contiguous).")

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor once, by name: ``layers.0.q_proj``."""
        own = super().tensors()
        for number, layer in enumerate(self.layers):
            own |= {f"layers.{number}.{name}": tensor for name, tensor in layer.tensors().items()}
        return own

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The same with a function applied to each tensor; a head that is tied stays so."""
        tensors = from_tensors(self.config, {name: function(tensor) for name, tensor in self.tensors().items()})
        return replace(self, **{each.name: getattr(tensors, each.name) for each in fields(tensors)})


def parts(config: ModelConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Of every tensor that a model has: its name here, its name in a checkpoint, its shape."""
    H, Q, K = config.hidden_size, config.query_size, config.key_value_size
    I, D, V = config.intermediate_size, config.head_dim, config.vocab_size
    yield "embed_tokens", "model.embed_tokens.weight", (V, H)
    yield "norm", "model.norm.weight", (H,)
    if not config.tie_word_embeddings:
        yield "untied_head", "lm_head.weight", (V, H)
    attention = {"q": (Q, H), "k": (K, H), "v": (K, H), "o": (H, Q)}
    in_attention = {f"{name}_proj": (f"{name}_proj.weight", shape) for name, shape in attention.items()}
    in_attention |= {f"{name}_norm": (f"{name}_norm.weight", (D,)) for name in "qk"}
    if config.attention_bias:
        in_attention |= {f"{name}_bias": (f"{name}_proj.bias", shape[:1]) for name, shape in attention.items()}
    for number in range(config.num_hidden_layers):
        here, there = f"layers.{number}", f"model.layers.{number}"
        for name, (file_name, shape) in in_attention.items():
            yield f"{here}.{name}", f"{there}.self_attn.{file_name}", shape
        for name, shape in {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}.items():
            yield f"{here}.{name}", f"{there}.mlp.{name}.weight", shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{here}.{name}", f"{there}.{name}.weight", (H,)


def from_tensors(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> Weights:
    """Weights of tensors by their names here, as :meth:`Weights.tensors` gives them."""
    names = [field.name for field in fields(LayerWeights)]
    layers = [
        LayerWeights(**{name: tensors[key] for name in names if (key := f"layers.{number}.{name}") in tensors})
        for number in range(config.num_hidden_layers)
    ]
    return Weights(config, tensors["embed_tokens"], tuple(layers), tensors["norm"], tensors.get("untied_head"))


def load_weights(folder: str | Path, config: ModelConfig, device: torch.device | str = "cpu") -> Weights:
    """The weights of a Hugging Face folder: ``model.safetensors``, or the files that ``model.safetensors.index.json`` names.

    Every shape is checked before anything is read; then each tensor is read once, straight to the device, in ``config.dtype``.

    Raises:
        CheckpointError: a file is missing, truncated or no safetensors file, lacks a tensor, or has one that is quantized, or for
            which the configuration has no place; names file and tensor.
        ShapeError: a tensor's shape is not what the configuration says; names file and tensor.
    """
    folder = Path(folder)
    wanted = list(parts(config))
    homes = _homes(folder, [file_name for _, file_name, _ in wanted])
    with ExitStack() as opened:
        files: dict[Path, Any] = {}
        for path in dict.fromkeys(homes.values()):
            files[path] = opened.enter_context(_opened(path, device))
        held = {path: frozenset(file.keys()) for path, file in files.items()}
        for _, file_name, shape in wanted:
            path = homes[file_name]
            if file_name not in held[path]:
                raise CheckpointError(f"{path} has no tensor {file_name!r}")
            found = files[path].get_slice(file_name)
            if tuple(found.get_shape()) != shape:
                want = f"{list(shape)} by the model's configuration"
                raise ShapeError(f"{file_name} of {path}", got=found.get_shape(), want=want)
            if found.get_dtype() not in FLOATS:
                raise CheckpointError(f"{file_name} of {path} is {found.get_dtype()}; weights must be one of {listing(FLOATS)}")
        _check_rest(config, held, {file_name for _, file_name, _ in wanted})
        tensors = {name: files[homes[file_name]].get_tensor(file_name).to(config.dtype) for name, file_name, _ in wanted}
    return from_tensors(config, tensors)


def _check_rest(config: ModelConfig, held: Mapping[Path, frozenset[str]], wanted: set[str]) -> None:
    """Raise where a file has tensors of the model that the configuration has no place for: the text would be another model's."""
    free = {"lm_head.weight"} if config.tie_word_embeddings else set()  # some write a tied head too
    for path, names in held.items():
        rest = sorted(name for name in names - wanted - free if name.startswith("model.") or name == "lm_head.bias")
        if rest := [name for name in rest if not name.endswith("rotary_emb.inv_freq")]:
            more = f" and {len(rest) - 1} more tensors" if len(rest) > 1 else ""
            raise CheckpointError(f"{path} has {rest[0]}{more}, for which the model's configuration has no place")


def random_weights(config: ModelConfig, seed: int = 0, device: torch.device | str = "cpu") -> Weights:
    """Weights drawn so that activations stay of unit scale; the same seed gives the same values on a device.

    Matrices have variance 1 / inputs, the factors of norms lie around 1, biases around 0.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    tensors = {}
    for name, _, shape in parts(config):
        drawn = torch.randn(shape, generator=generator, device=device, dtype=config.dtype)
        if "norm" in name:
            tensors[name] = drawn.mul_(0.1).add_(1)
        else:
            tensors[name] = drawn.mul_(0.1 if len(shape) == 1 else 1 / math.sqrt(shape[-1]))
    return from_tensors(config, tensors)


def _homes(folder: Path, names: list[str]) -> dict[str, Path]:
    """The file of each tensor."""
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}")
        return dict.fromkeys(names, folder / SINGLE)
    index = folder / INDEX
    try:
        table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        homes = {name: folder / table[name] for name in names if name in table}
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise CheckpointError(f"{index} is not an index of weights: {problem!r}") from None
    if missing := [name for name in names if name not in homes]:
        raise CheckpointError(f"{index} names no file for {missing[0]!r}")
    if lost := [path for path in homes.values() if not path.is_file()]:
        raise CheckpointError(f"{lost[0]} is missing, which {INDEX} names")
    return homes


def _opened(path: Path, device: torch.device | str) -> Any:
    """The file's header, read; as a context, which closes the file."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise CheckpointError("weights are read by safetensors, which is not here: pip install 'onelaunch[decode]'") from None
    try:
        return safe_open(str(path), framework="pt", device=str(device))
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(f"{path} cannot be read, as if missing or truncated: {problem}") from problem
