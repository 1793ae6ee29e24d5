"""Configurations of models: dense families as Hugging Face's ``config.json`` describes them.

``decode/generate.py`` reads the files of a model folder with it. All parts of decoding take the model's sizes from a
:class:`ModelConfig`, which ``onelaunch.decode`` exports; ``rope.py`` takes the scalings for long contexts from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from onelaunch.decode.model.families import family_of, unrotated_layers, window_of, with_defaults
from onelaunch.decode.model.files import entry, folder_path, read_json
from onelaunch.errors import ArgumentError, CheckpointError, ModelConfigError
from onelaunch.wording import listing, shown

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""Supported dtypes of weights, by the name that ``config.json`` gives."""

CONTEXT = 32_768
"""Context, in positions, of a model whose configuration does not give one."""

_LARGEST_SIZE = 2**31 - 1
"""Largest size and longest context: kernels count rows, channels and positions in 32-bit integers."""

_SCALES = (1e-6, float(_LARGEST_SIZE))
"""Smallest and largest number in a RoPE scaling. Between them no frequency overflows or becomes NaN."""


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: position ``p`` gets the angles of ``p / factor``. Source: Chen et al. (2023)."""

    factor: float


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: low frequencies are interpolated, high ones are kept, and those between are blended. Source: Peng et al. (2023)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    """Rotations over the original context from which on a frequency is kept."""
    beta_slow: float = 1.0
    """Rotations over the original context up to which a frequency is interpolated, that is, divided by ``factor``."""
    attention_factor: float | None = None
    """Factor of cosine and sine; ``None`` for ``0.1 ln(factor) + 1``."""
    truncate: bool = True
    """Flag to round the two ends of the blended range to whole channels."""


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's scaling: low frequencies are divided by ``factor``, high ones are kept, and those between are blended.

    Source: ``rope_type`` ``llama3`` of ``transformers``.
    """

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    """Rotations over the original context up to which a frequency is divided."""
    high_freq_factor: float
    """Rotations over the original context from which on a frequency is kept."""


RopeScaling: TypeAlias = LinearScaling | YarnScaling | Llama3Scaling
KINDS: dict[str, type[RopeScaling]] = {"linear": LinearScaling, "yarn": YarnScaling, "llama3": Llama3Scaling}
"""Supported RoPE scalings, by their ``rope_type``."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one model, hashable.

    The names are those of Hugging Face's configuration; only ``eos_token_ids`` is called ``eos_token_id`` there.

    Raises:
        ModelConfigError: A field is wrong; the message names it, its value and what it must be.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = CONTEXT
    """Context: the largest number of positions of prompt and new tokens together.

    For a model with a sliding window, :meth:`from_dict` gives at most the window: up to there, attention is full.
    """
    tie_word_embeddings: bool = False
    """Flag of a model whose LM head uses the embedding's matrix."""
    attention_bias: bool = False
    """Flag of a model whose projections to queries, keys and values add a bias."""
    output_bias: bool = True
    """Flag of a model in which the projection of attention's output adds a bias too, if ``attention_bias`` is set."""
    qk_norm: bool = True
    """Flag of a model that normalises queries and keys per head."""
    unrotated_layers: tuple[int, ...] = ()
    """Ascending numbers of the layers that do not rotate queries and keys by their positions."""
    dtype: torch.dtype = torch.bfloat16
    """Dtype of weights, cache and activations: bfloat16, float16 or float32."""
    eos_token_ids: tuple[int, ...] = ()
    """End tokens: a sequence ends after the first of them."""
    bos_token_id: int | None = None
    """Token that stands for an empty prompt; ``None`` if the model has none."""

    def __post_init__(self) -> None:
        for name in SIZES:
            _check_size(name, getattr(self, name))
        _check_number("rms_norm_eps", self.rms_norm_eps, "a number of at least 0", lambda eps: eps >= 0)
        _check_number("rope_theta", self.rope_theta, "a number above 1", lambda theta: theta > 1)
        if self.num_attention_heads % self.num_key_value_heads:
            want = f"a divisor of num_attention_heads = {self.num_attention_heads}"
            raise ModelConfigError("num_key_value_heads", got=self.num_key_value_heads, want=want)
        if self.head_dim % 2:
            raise ModelConfigError("head_dim", got=self.head_dim, want="even, since rotary embeddings rotate pairs of channels")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ModelConfigError(name, got=getattr(self, name), want="true or false")
        _check_layer_numbers(self.unrotated_layers, self.num_hidden_layers)
        if self.dtype not in DTYPES.values():
            raise ModelConfigError("dtype", got=self.dtype, want=f"one of {listing(DTYPES)}")
        if self.rope_scaling is not None:
            _check_scaling(self.rope_scaling)
        if not isinstance(self.eos_token_ids, tuple):
            raise ModelConfigError("eos_token_ids", got=self.eos_token_ids, want="a tuple of integers")
        for token in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                want = f"within 0..{self.vocab_size - 1}, an integer"
                raise ModelConfigError("eos_token_id or bos_token_id", got=token, want=want)

    @property
    def query_size(self) -> int:
        """Number of channels of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Number of channels of all key heads together; the value heads have as many."""
        return self.num_key_value_heads * self.head_dim

    @property
    def queries_per_key(self) -> int:
        """Number of query heads that share a key head."""
        return self.num_attention_heads // self.num_key_value_heads

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Return the configuration that the contents of a ``config.json`` describe.

        It reads the older layout (``rope_scaling``, ``torch_dtype``) and the newer one (``rope_parameters``, ``dtype``).

        Raises:
            ArgumentError: ``values`` is no mapping.
            UnsupportedModel: the architecture, or a feature of the model, is not supported; the message lists what is.
            ModelConfigError: a field is missing or wrong; the message names it.
        """
        if not isinstance(values, Mapping):
            raise ArgumentError(f"values is {shown(values)}; it must be a mapping, such as the contents of a config.json.")
        family = family_of(values)
        known: dict[str, Any] = {name: values[name] for name in (*SIZES, *_PLAIN) if values.get(name) is not None}
        name = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
        rope = values.get(name) or {}
        if not isinstance(rope, Mapping):
            raise ModelConfigError(name, got=rope, want="an object")
        rope = {**rope}
        if rotated := rope.pop("partial_rotary_factor", None):
            _check_number(f"{name}.partial_rotary_factor", rotated, "1: all channels are rotated", lambda part: part == 1)
        if by_layer := [each for each in rope.values() if isinstance(each, Mapping)]:
            raise ModelConfigError(name, got=by_layer[0], want="the same for all layers")
        if (theta := rope.pop("rope_theta", None)) is not None:
            known["rope_theta"] = theta
        with_defaults(known, family)
        if missing := [name for name in SIZES if name not in known and name not in _DEFAULTED]:
            raise ModelConfigError(missing[0], got="missing", want="given in the configuration")
        for name in ("rms_norm_eps", "rope_theta"):
            # JSON may have an integer here. A huge one, which no float can hold, is left for the checks to refuse.
            if type(value := known.get(name)) is int and abs(value) <= _LARGEST_SIZE:
                known[name] = float(value)
        known["rope_scaling"] = _scaling(rope, known.get("max_position_embeddings", CONTEXT))
        if family.qkv_bias is not None:
            known |= {"attention_bias": family.qkv_bias, "output_bias": not family.qkv_bias}
        known |= {"qk_norm": family.qk_norm, "unrotated_layers": unrotated_layers(values, family)}
        context = known.setdefault("max_position_embeddings", CONTEXT)
        if (window := window_of(values, family)) is not None and isinstance(context, int) and context > 0:
            known["max_position_embeddings"] = min(context, window)
        dtype = values.get("dtype") or values.get("torch_dtype") or "float32"
        dtype = str(dtype) if isinstance(dtype, torch.dtype) else dtype
        if not isinstance(dtype, str) or (dtype := dtype.removeprefix("torch.")) not in DTYPES:
            raise ModelConfigError("dtype", got=dtype, want=f"one of {listing(DTYPES)}")
        return cls(**known, dtype=DTYPES[dtype], eos_token_ids=_tokens(values.get("eos_token_id")))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> ModelConfig:
        """Return the configuration in a model folder's ``config.json``.

        The end tokens of ``generation_config.json`` take precedence, if that file names any.

        Raises:
            ArgumentError: ``folder`` is neither a string nor a path.
            CheckpointError: a file is missing, too large or no JSON object.
            UnsupportedModel, ModelConfigError: as :meth:`from_dict`.
        """
        folder = folder_path("folder", folder)
        path = entry(folder, "config.json")
        if not path.exists():
            raise CheckpointError(
                f"{path} cannot be read: there is no such file. A model folder holds config.json, model.safetensors and "
                "tokenizer.json, as save_pretrained of transformers writes them"
            )
        values = read_json(path)
        if (ends := read_generation(folder).get("eos_token_id")) is not None:
            values["eos_token_id"] = ends
        return cls.from_dict(values)


SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip
"""Fields that must be positive integers. Decode plans depend on all but the context (``decode/runtime/proofs.py``)."""

_DEFAULTED = ("max_position_embeddings",)
"""Fields of :data:`SIZES` that a file may leave out."""

_FLAGS = ("tie_word_embeddings", "attention_bias", "output_bias", "qk_norm")
"""Fields that must be true or false."""

_PLAIN = ("rms_norm_eps", "rope_theta", "tie_word_embeddings", "attention_bias", "bos_token_id")
"""Further fields that a file has under the same names, all of which it may leave out."""


def _check_size(name: str, value: object) -> None:
    """Raise unless ``value`` is an integer from 1 to ``_LARGEST_SIZE``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelConfigError(name, got=value, want="an integer of at least 1")
    if value > _LARGEST_SIZE:
        raise ModelConfigError(name, got=value, want=f"an integer of at most {_LARGEST_SIZE}")


def _check_number(name: str, value: object, want: str, is_valid: Callable[[float], bool]) -> None:
    """Raise unless ``value`` is a finite number, within the range of a float, that passes ``is_valid``."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and is_valid(number):
            return
    raise ModelConfigError(name, got=value, want=want)


def _check_scaling(scaling: RopeScaling) -> None:
    """Raise unless a RoPE scaling gives finite frequencies."""
    if not isinstance(scaling, tuple(KINDS.values())):
        raise ModelConfigError("rope_scaling", got=scaling, want=f"one of {listing(kind.__name__ for kind in KINDS.values())}")
    least, most = _SCALES
    for name, value in vars(scaling).items():
        if name == "truncate":
            if not isinstance(value, bool):
                raise ModelConfigError("rope_scaling.truncate", got=value, want="true or false")
        elif value is not None or name != "attention_factor":
            want = f"a number above 0, from {least:g} to {most:g}"
            _check_number(f"rope_scaling.{name}", value, want, lambda number: least <= number <= most)
    if scaling.factor < 1:
        raise ModelConfigError("rope_scaling.factor", got=scaling.factor, want="a number of at least 1")
    if isinstance(scaling, Llama3Scaling) and scaling.high_freq_factor <= scaling.low_freq_factor:
        want = f"larger than low_freq_factor = {scaling.low_freq_factor:g}"
        raise ModelConfigError("rope_scaling.high_freq_factor", got=scaling.high_freq_factor, want=want)


def _check_layer_numbers(numbers: object, count: int) -> None:
    """Raise unless ``numbers`` is a tuple of ascending layer numbers below ``count``."""
    valid = isinstance(numbers, tuple) and all(type(each) is int and 0 <= each < count for each in numbers)
    if not valid or list(numbers) != sorted(set(numbers)):  # pyrefly: ignore[bad-argument-type]
        raise ModelConfigError("unrotated_layers", got=numbers, want=f"a tuple of ascending layer numbers below {count}")


def _scaling(values: Mapping[str, Any], context: int) -> RopeScaling | None:
    """Return the RoPE scaling that a configuration describes; its original context is ``context`` unless it gives another."""
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ModelConfigError("rope_scaling.rope_type", got=kind, want=f"one of {listing(('default', *KINDS))}")
    made = KINDS[kind]
    fields = made.__dataclass_fields__
    given = {name: values[name] for name in fields if values.get(name) is not None}
    if "original_max_position_embeddings" in fields:
        given.setdefault("original_max_position_embeddings", context)
    if kind == "yarn" and (unknown := [name for name in ("mscale", "mscale_all_dim") if values.get(name) is not None]):
        raise ModelConfigError(f"rope_scaling.{unknown[0]}", got=values[unknown[0]], want="left out: no supported model has it")
    try:
        return made(**given)
    except TypeError:
        missing = next(name for name in fields if name not in given)
        raise ModelConfigError(f"rope_scaling.{missing}", got="missing", want=f"given for rope_type {kind!r}") from None


def _tokens(value: object) -> tuple[int, ...]:
    """Return the end tokens that a configuration gives: none, one, or a list."""
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in tokens):
        raise ModelConfigError("eos_token_id", got=value, want="an integer or a list of them")
    return tuple(tokens)


def read_generation(folder: str | Path) -> dict[str, Any]:
    """Return the contents of a folder's ``generation_config.json``, or an empty dict if there is no such file."""
    path = entry(Path(folder), "generation_config.json")
    return read_json(path) if path.exists() else {}
