"""Weights of a model: the tensors of a checkpoint, checked against its configuration and read once each.

``decode/generate.py`` loads checkpoints with it, and cases of ``decode_step`` make random weights; users do both by
``onelaunch.decode``. The forward pass, the variants of ``decode_step``, the packing for the kernels and the decode runtime read
the tensors. ``decode/generate.py`` and the cost of ``decode_step`` count the numbers of a model by :func:`elements`.
"""

from __future__ import annotations

import abc
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from onelaunch import checks
from onelaunch.decode.model.arguments import device_of, instance, integer
from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.files import INDEX_BYTES, entry, folder_path, read_json
from onelaunch.decode.model.sampling import LARGEST_SEED
from onelaunch.errors import ArgumentError, CheckpointError, ShapeError
from onelaunch.operation import Bundle
from onelaunch.wording import in_a_line, listing, shown

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
"""File of a checkpoint that is not sharded, and index file of a sharded one."""

_SUFFIX = ".safetensors"
"""Suffix that every weight file must have. Other formats, such as pickles, are never opened."""

FLOATS = ("BF16", "F16", "F32", "F64")
"""Dtypes of unquantized weights, by their safetensors names."""

LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
"""Pattern of the start of a layer's tensor names in a checkpoint."""


class Reader(Protocol):
    """Function that reads tensors of a model one by one."""

    def __call__(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Return rows ``begin`` to ``end`` of a tensor by its name in :meth:`Weights.tensors`, by default all, in any dtype."""
        ...


@dataclass(frozen=True, eq=False)
class LayerWeights(Bundle):
    """One layer's tensors in Hugging Face's layout: a projection is ``[outputs, inputs]``.

    ``H`` is the hidden size, ``Q`` and ``K`` the channels of all query and of all key heads, ``D`` those of a head, ``I`` the
    intermediate size.
    """

    input_layernorm: torch.Tensor
    """Factors of the RMS norm before attention, ``[H]``."""
    q_proj: torch.Tensor
    """Projection to queries, ``[Q, H]``."""
    k_proj: torch.Tensor
    """Projection to keys, ``[K, H]``."""
    v_proj: torch.Tensor
    """Projection to values, ``[K, H]``."""
    o_proj: torch.Tensor
    """Projection of attention's output, ``[H, Q]``."""
    post_attention_layernorm: torch.Tensor
    """Factors of the RMS norm before the MLP, ``[H]``."""
    gate_proj: torch.Tensor
    """Projection to the MLP's gate, ``[I, H]``."""
    up_proj: torch.Tensor
    """Projection to the MLP's values, ``[I, H]``."""
    down_proj: torch.Tensor
    """Projection of the MLP's output, ``[H, I]``."""
    q_norm: torch.Tensor | None = None
    """Factors of the RMS norm of each query head, ``[D]``; only models with ``qk_norm`` have them."""
    k_norm: torch.Tensor | None = None
    """Factors of the RMS norm of each key head, ``[D]``."""
    q_bias: torch.Tensor | None = None
    """Bias of the queries, ``[Q]``; only models with ``attention_bias`` have biases."""
    k_bias: torch.Tensor | None = None
    """Bias of the keys, ``[K]``."""
    v_bias: torch.Tensor | None = None
    """Bias of the values, ``[K]``."""
    o_bias: torch.Tensor | None = None
    """Bias of attention's output, ``[H]``; only models with ``output_bias`` as well have it."""


class ModelWeights(Bundle, abc.ABC):
    """Weights of a model in some form: plain (:class:`Weights`), or packed for a kernel (``decode/runtime/packed.py``).

    The forward pass reads them by the methods below. Tensors that :meth:`layer` and :meth:`head_rows` return may lie in a buffer
    that the next call overwrites, so their readers enqueue all work on them before, within :meth:`exclusive`.
    """

    if TYPE_CHECKING:  # fields of the subclasses; a dataclass would take the properties for their defaults

        @property
        def config(self) -> ModelConfig:
            """Configuration of the model."""
            ...

        @property
        def embed_tokens(self) -> torch.Tensor:
            """Embedding, one row for each token, ``[V, H]``."""
            ...

        @property
        def norm(self) -> torch.Tensor:
            """Factors of the RMS norm before the LM head, ``[H]``."""
            ...

    unpacks: ClassVar[bool] = False
    """Flag that :meth:`layer` copies the matrices into a buffer."""

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.device

    @abc.abstractmethod
    def layer(self, number: int, ahead: int | None = None) -> LayerWeights:
        """Return the tensors of a layer. ``ahead`` is the layer that will be asked for next, if that is known."""

    @abc.abstractmethod
    def vectors(self, number: int) -> dict[str, torch.Tensor]:
        """Return the norm factors and biases of a layer by their names in :class:`LayerWeights`; no buffer is involved."""

    @abc.abstractmethod
    def head_rows(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the matrix of the LM head in pieces: the first row and the rows ``[R, H]``, which :meth:`layer` overwrites."""

    def exclusive(self) -> AbstractContextManager[object]:
        """Return a context in which other threads and streams leave the buffer alone; threads may enter it again."""
        return nullcontext()

    def check(self) -> None:
        """Raise unless every tensor is as the kernels assume."""

    def alias(self) -> Self:
        """Return another object with the same tensors. Caches hold it, so that they do not keep the model itself alive."""
        return replace(self)  # pyrefly: ignore[bad-argument-type]  # subclasses are dataclasses


@dataclass(frozen=True, eq=False)
class Weights(ModelWeights):
    """All tensors of a model, with the configuration that gives their shapes: ``V`` tokens, hidden size ``H``.

    As a :class:`~onelaunch.operation.Bundle` it is one argument of ``decode_step``, of which the workbench copies, casts and
    compares all tensors.
    """

    config: ModelConfig
    embed_tokens: torch.Tensor
    """Embedding, one row for each token, ``[V, H]``."""
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    """Factors of the RMS norm before the LM head, ``[H]``."""
    untied_head: torch.Tensor | None = None
    """LM head, ``[V, H]``; ``None`` if it is tied to the embedding."""

    def __post_init__(self) -> None:
        count = instance("config", self.config, ModelConfig).num_hidden_layers
        if not isinstance(self.layers, tuple) or len(self.layers) != count:
            got = f"has {len(self.layers)} elements" if isinstance(self.layers, tuple) else f"is {type(self.layers).__name__}"
            raise ArgumentError(f"layers {got}; it must be a tuple of {count} LayerWeights, one for each of num_hidden_layers.")

    @property
    def lm_head(self) -> torch.Tensor:
        """Matrix of the LM head, ``[V, H]``: the embedding if they are tied."""
        return self.embed_tokens if self.untied_head is None else self.untied_head

    def layer(self, number: int, ahead: int | None = None) -> LayerWeights:
        """Return the tensors of a layer."""
        del ahead
        return self.layers[number]

    def vectors(self, number: int) -> dict[str, torch.Tensor]:
        """Return the norm factors and biases of a layer by their names in :class:`LayerWeights`."""
        return {name: tensor for name, tensor in self.layers[number].tensors().items() if tensor.dim() == 1}

    def head_rows(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the whole matrix of the LM head."""
        yield 0, self.lm_head

    def check(self) -> None:
        """Raise unless every tensor has the shape and dtype of the configuration and is contiguous, as the kernels assume.

        Raises:
            ArgumentError: a tensor is missing, or not contiguous.
            ShapeError, DTypeError, DeviceError: a tensor is wrong; the message names it, its value and what it must be.
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
        """Return every tensor once, by the name of its field, such as ``layers.0.q_proj``."""
        own = super().tensors()
        for number, layer in enumerate(self.layers):
            own |= {f"layers.{number}.{name}": tensor for name, tensor in layer.tensors().items()}
        return own

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return these weights with ``function`` applied to each tensor; a tied LM head stays tied."""
        tensors = from_tensors(self.config, {name: function(tensor) for name, tensor in self.tensors().items()})
        return replace(self, **{each.name: getattr(tensors, each.name) for each in fields(tensors)})  # a subclass stays one


def parts(config: ModelConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield the field name, the checkpoint name and the shape of every tensor of a model."""
    H, Q, K = config.hidden_size, config.query_size, config.key_value_size
    I, D, V = config.intermediate_size, config.head_dim, config.vocab_size
    yield "embed_tokens", "model.embed_tokens.weight", (V, H)
    yield "norm", "model.norm.weight", (H,)
    if not config.tie_word_embeddings:
        yield "untied_head", "lm_head.weight", (V, H)
    attention = {"q": (Q, H), "k": (K, H), "v": (K, H), "o": (H, Q)}
    in_attention = {f"{name}_proj": (f"{name}_proj.weight", shape) for name, shape in attention.items()}
    if config.qk_norm:
        in_attention |= {f"{name}_norm": (f"{name}_norm.weight", (D,)) for name in "qk"}
    if config.attention_bias:
        biased = "qkvo" if config.output_bias else "qkv"
        in_attention |= {f"{name}_bias": (f"{name}_proj.bias", attention[name][:1]) for name in biased}
    for number in range(config.num_hidden_layers):
        here, there = f"layers.{number}", f"model.layers.{number}"
        for name, (file_name, shape) in in_attention.items():
            yield f"{here}.{name}", f"{there}.self_attn.{file_name}", shape
        for name, shape in {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}.items():
            yield f"{here}.{name}", f"{there}.mlp.{name}.weight", shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{here}.{name}", f"{there}.{name}.weight", (H,)


def from_tensors(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> Weights:
    """Return the weights made of named tensors; the names are those of :meth:`Weights.tensors`."""
    names = [field.name for field in fields(LayerWeights)]
    layers = [
        LayerWeights(**{name: tensors[key] for name in names if (key := f"layers.{number}.{name}") in tensors})
        for number in range(config.num_hidden_layers)
    ]
    return Weights(config, tensors["embed_tokens"], tuple(layers), tensors["norm"], tensors.get("untied_head"))


def elements(config: ModelConfig, *, matrices_only: bool = False) -> int:
    """Return the number of elements of a model's weights, or of its matrices alone."""
    # One layer stands for all, so that the time does not depend on a number of layers that an untrusted file gives.
    shapes = [(name, shape) for name, _, shape in parts(replace(config, num_hidden_layers=1, unrotated_layers=()))]
    return sum(
        math.prod(shape) * (config.num_hidden_layers if name.startswith("layers.") else 1)
        for name, shape in shapes
        if len(shape) == 2 or not matrices_only
    )


def check_header(folder: str | Path, config: ModelConfig) -> None:
    """Raise unless a folder's files hold the tensors of a configuration. Only the files' headers are read.

    Raises:
        CheckpointError: The same errors as those of :func:`load_weights`.
    """
    with ExitStack() as opened:
        _open_checked(folder_path("folder", folder), config, torch.device("cpu"), opened)


def load_weights(folder: str | Path, config: ModelConfig, device: torch.device | str = "cpu") -> Weights:
    """Read the weights of a Hugging Face folder.

    They are in ``model.safetensors``, or in the shards that ``model.safetensors.index.json`` names.

    Every name, shape and dtype is checked by the files' headers before anything is read or allocated, so that a configuration
    of absurd size is refused at once. Then each tensor is read once, directly to the device, in ``config.dtype``.

    Args:
        folder: Folder of the checkpoint. Its index may name files of this folder only.
        config: Configuration that the tensors must match.
        device: Device on which the tensors are placed.

    Raises:
        ArgumentError: an argument is of the wrong type.
        CheckpointError: a file is missing, truncated, no safetensors file or not in the folder; a tensor is missing, quantized
            or of another shape; or the files hold a tensor that the configuration lacks. The message names file and tensor.
    """
    folder, where = folder_path("folder", folder), device_of("device", device)
    instance("config", config, ModelConfig)
    with reader_of(folder, config, where) as read:
        tensors = {name: read(name).to(config.dtype) for name, _, _ in parts(config)}
    return from_tensors(config, tensors)


@contextmanager
def reader_of(folder: Path, config: ModelConfig, device: torch.device) -> Iterator[Reader]:
    """Open the files of a checkpoint, check their headers, and return the function that reads a tensor, in the file's dtype.

    Raises:
        CheckpointError: The same errors as those of :func:`load_weights`.
    """
    with ExitStack() as opened:
        files = _open_checked(folder, config, device, opened)
        names = {name: file_name for name, file_name, _ in parts(config)}

        def read(name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
            file = files[names[name]]
            if (begin, end) == (0, None):
                return file.get_tensor(names[name])
            return file.get_slice(names[name])[begin:end]

        yield read


def _open_checked(folder: Path, config: ModelConfig, device: torch.device, opened: ExitStack) -> dict[str, Any]:
    """Open a folder's files, check their headers, and return the open file of each tensor by its checkpoint name."""
    single = entry(folder, _SINGLE)
    if single.is_file():
        files = {single: opened.enter_context(_opened(single, device))}
        file_of, missing = dict.fromkeys(files[single].keys(), single), f"{single} has no tensor"
    else:
        file_of, missing = _indexed(folder), f"{folder / _INDEX} names no file for"
        files = {}
    _check_layers(folder, config, file_of)
    wanted = list(parts(config))
    for _, file_name, _ in wanted:
        if file_name not in file_of:
            raise CheckpointError(f"{missing} {file_name!r}")
    for path in dict.fromkeys(file_of[file_name] for _, file_name, _ in wanted):
        if path not in files:
            if not path.is_file():
                raise CheckpointError(f"{path} is missing, which {_INDEX} names")
            files[path] = opened.enter_context(_opened(path, device))
    names_in = {path: frozenset(file.keys()) for path, file in files.items()}
    for _, file_name, shape in wanted:
        path = file_of[file_name]
        if file_name not in names_in[path]:
            raise CheckpointError(f"{path} has no tensor {file_name!r}")
        found = files[path].get_slice(file_name)
        if tuple(found.get_shape()) != shape:
            said = f"has shape {shown(tuple(found.get_shape()))}; it must be {list(shape)} by the model's configuration"
            raise CheckpointError(f"{file_name} of {path} {said}")
        if found.get_dtype() not in FLOATS:
            raise CheckpointError(f"{file_name} of {path} is {found.get_dtype()}; weights must be one of {listing(FLOATS)}")
    _check_rest(config, names_in, {file_name for _, file_name, _ in wanted})
    return {file_name: files[file_of[file_name]] for _, file_name, _ in wanted}


def _check_layers(folder: Path, config: ModelConfig, names: Iterable[str]) -> None:
    """Raise if the configuration has more layers than the checkpoint, before anything loops over an absurd number of them."""
    there = {int(found[1]) for name in names if (found := LAYER.match(name))}
    if config.num_hidden_layers > len(there):
        raise CheckpointError(
            f"num_hidden_layers of the model's configuration is {config.num_hidden_layers:,}, and {folder} holds tensors of "
            f"{len(there)} layers"
        )


def _check_rest(config: ModelConfig, names_in: Mapping[Path, frozenset[str]], wanted: set[str]) -> None:
    """Raise if a file has tensors that the configuration lacks: such a model would compute something else."""
    free = {"lm_head.weight"} if config.tie_word_embeddings else set()  # some checkpoints store a tied head as well
    for path, names in names_in.items():
        rest = sorted(name for name in names - wanted - free if name.startswith("model.") or name == "lm_head.bias")
        # Older checkpoints store the RoPE frequencies, which follow from the configuration.
        if rest := [name for name in rest if not name.endswith("rotary_emb.inv_freq")]:
            more = f" and {len(rest) - 1} more tensors" if len(rest) > 1 else ""
            raise CheckpointError(f"{path} has {shown(rest[0])}{more}, for which the model's configuration has no place")


def random_weights(config: ModelConfig, seed: int = 0, device: torch.device | str = "cpu") -> Weights:
    """Return random weights that keep activations at unit scale; the same seed gives the same values on a device.

    Elements are normal. Those of matrices have the variance 1 / (number of columns). The factors of norms have mean 1, biases
    have mean 0, and both have the standard deviation 0.1.

    Raises:
        ArgumentError: an argument is of the wrong type.
    """
    instance("config", config, ModelConfig)
    device = device_of("device", device)
    generator = torch.Generator(device=device).manual_seed(integer("seed", seed, 0, LARGEST_SEED))
    tensors = {}
    for name, _, shape in parts(config):
        drawn = torch.randn(shape, generator=generator, device=device, dtype=config.dtype)
        if "norm" in name:
            tensors[name] = drawn.mul_(0.1).add_(1)
        else:
            tensors[name] = drawn.mul_(0.1 if len(shape) == 1 else 1 / math.sqrt(shape[-1]))
    return from_tensors(config, tensors)


def _indexed(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor by a folder's index, each checked to be an entry of the folder."""
    index = entry(folder, _INDEX)
    if not index.is_file():
        pickled = next((each.name for each in folder.glob("*.bin") if each.name.startswith("pytorch_model")), "")
        convert = (
            f"; {pickled} is a pickle, which is not read: write it again with save_pretrained of transformers" if pickled else ""
        )
        raise CheckpointError(f"{folder} has neither {_SINGLE} nor {_INDEX}{convert}")
    table = read_json(index, INDEX_BYTES).get("weight_map")
    if not isinstance(table, dict):
        raise CheckpointError(f"{index} is not an index of weights: its weight_map is {shown(table)}; it must be an object")
    found: dict[str, Path] = {}
    paths: dict[str, Path] = {}  # each file is checked once, though the index names it for many tensors
    for tensor, name in table.items():
        if not isinstance(name, str) or name not in paths:
            path = entry(folder, name, named_by=str(index), suffix=_SUFFIX)
            paths[path.name] = path
        found[tensor] = paths[name]
    return found


def _opened(path: Path, device: torch.device) -> Any:
    """Open a file, read its header, and return a context manager that closes the file."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise CheckpointError("weights are read by safetensors, which is not here: pip install 'onelaunch[decode]'") from None
    try:
        return safe_open(str(path), framework="pt", device=str(device))
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(f"{path} cannot be read, as if missing or truncated: {in_a_line(problem)}") from problem
