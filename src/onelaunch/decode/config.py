"""What a model is, apart from its weights: the Qwen3 dense family as Hugging Face's ``config.json`` describes it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from onelaunch.errors import CheckpointError, ModelConfigError, UnsupportedModel, listing

ARCHITECTURES = {"Qwen3ForCausalLM": "qwen3"}
"""Architectures that are supported, and what ``model_type`` calls each."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

CONTEXT = 32_768
"""Positions of a model whose file does not say."""


@dataclass(frozen=True)
class LinearScaling:
    """Angles of position ``p`` become those of ``p / factor``. Source: Chen et al. (2023), position interpolation."""

    factor: float


@dataclass(frozen=True)
class YarnScaling:
    """Low frequencies are interpolated, high ones kept, those between blended. Source: Peng et al. (2023), YaRN."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """What cosine and sine are multiplied with; ``None`` for ``0.1 ln(factor) + 1``."""
    truncate: bool = True
    """Whether the ends of the blend are rounded to whole channels."""


@dataclass(frozen=True)
class Llama3Scaling:
    """Wavelengths beyond the original context are divided by ``factor``, short ones kept, with a smooth passage."""

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float


RopeScaling: TypeAlias = LinearScaling | YarnScaling | Llama3Scaling
KINDS: dict[str, type[RopeScaling]] = {"linear": LinearScaling, "yarn": YarnScaling, "llama3": Llama3Scaling}


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of one model. Hashable. Names are those of Hugging Face's configuration.

    Raises:
        ModelConfigError: naming the field, what it is and what it has to be.
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
    """The context: positions that the cache may grow to."""
    tie_word_embeddings: bool = False
    """Whether the head multiplies with the embedding's matrix."""
    attention_bias: bool = False
    """Whether the projections of attention add a bias."""
    dtype: torch.dtype = torch.bfloat16
    """Of weights, cache and activations: bfloat16, float16 or float32."""
    eos_token_ids: tuple[int, ...] = ()
    """Each ends a text."""
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in SIZES:
            _check(name, getattr(self, name), int, at_least=1)
        for name in ("rms_norm_eps", "rope_theta"):
            _check(name, getattr(self, name), float, at_least=float(name == "rope_theta"), without_end=name == "rope_theta")
        if self.num_attention_heads % self.num_key_value_heads:
            want = f"a divisor of num_attention_heads = {self.num_attention_heads}"
            raise ModelConfigError("num_key_value_heads", got=self.num_key_value_heads, want=want)
        if self.head_dim % 2:
            raise ModelConfigError("head_dim", got=self.head_dim, want="even, since rotary embeddings turn pairs of channels")
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ModelConfigError(name, got=getattr(self, name), want="true or false")
        if self.dtype not in DTYPES.values():
            raise ModelConfigError("dtype", got=self.dtype, want=f"one of {listing(DTYPES)}")
        for token in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                want = f"within 0..{self.vocab_size - 1}, an integer"
                raise ModelConfigError("eos_token_id or bos_token_id", got=token, want=want)

    @property
    def query_size(self) -> int:
        """Channels of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Channels of all key heads, or of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def queries_per_key(self) -> int:
        """Query heads that share a key head."""
        return self.num_attention_heads // self.num_key_value_heads

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """From the contents of a ``config.json``, of the older layout (``rope_scaling``, ``torch_dtype``) or the newer
        (``rope_parameters``, ``dtype``).

        Raises:
            UnsupportedModel: for another architecture, or a feature of it that is not here; says what is supported.
            ModelConfigError: naming the field.
        """
        _check_architecture(values)
        known: dict[str, Any] = {name: values[name] for name in (*SIZES, *PLAIN) if values.get(name) is not None}
        known.setdefault("head_dim", 128)  # the family's, for files that leave it out
        if missing := [name for name in SIZES if name not in known and name not in DEFAULTED]:
            raise ModelConfigError(missing[0], got="missing", want="given in the configuration")
        name = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
        rope = values.get(name) or {}
        if not isinstance(rope, Mapping):
            raise ModelConfigError(name, got=rope, want="an object")
        rope = dict(rope)
        if (theta := rope.pop("rope_theta", None)) is not None:
            known["rope_theta"] = theta
        for name in ("rms_norm_eps", "rope_theta"):
            if isinstance(known.get(name), int):
                known[name] = float(known[name])
        known["rope_scaling"] = _scaling(rope, known.get("max_position_embeddings", CONTEXT))
        dtype = str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype not in DTYPES:
            raise ModelConfigError("dtype", got=dtype, want=f"one of {listing(DTYPES)}")
        return cls(**known, dtype=DTYPES[dtype], eos_token_ids=_tokens(values.get("eos_token_id")))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> ModelConfig:
        """From a folder's ``config.json``; the ends of a text also from its ``generation_config.json``, where there is one.

        Raises:
            CheckpointError: when there is no such file, or it is no JSON.
            UnsupportedModel, ModelConfigError: as :meth:`from_dict`.
        """
        values = read_json(Path(folder) / "config.json")
        if (ends := read_generation(folder).get("eos_token_id")) is not None:
            values["eos_token_id"] = ends
        return cls.from_dict(values)


SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip
"""Fields that count something."""

DEFAULTED = ("max_position_embeddings",)
"""Those of them that a file may leave out."""

FLAGS = ("tie_word_embeddings", "attention_bias")

PLAIN = ("rms_norm_eps", "rope_theta", *FLAGS, "bos_token_id")
"""Fields that a file gives as they are."""

Value = TypeVar("Value", int, float)


def _check(name: str, value: object, kind: type[Value], *, at_least: float, without_end: bool = False) -> None:
    right = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool) and abs(value) < math.inf
    if right and (value > at_least if without_end else value >= at_least):  # pyrefly: ignore[unsupported-operation]
        return
    noun = "an integer" if kind is int else "a number"
    raise ModelConfigError(name, got=value, want=f"{noun} {'above' if without_end else 'of at least'} {at_least:g}")


def _check_architecture(values: Mapping[str, Any]) -> None:
    """Raise unless this is a dense Qwen3 with full attention and plain weights."""
    names, kind = _names(values, "architectures"), values.get("model_type")
    if (names and names[0] not in ARCHITECTURES) or (not names and kind not in ARCHITECTURES.values()):
        raise UnsupportedModel(f"architecture {(names[0] if names else kind)!r}", supported=ARCHITECTURES)
    if values.get("quantization_config"):
        raise UnsupportedModel("quantized weights", supported=DTYPES)
    if values.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {values['hidden_act']!r}", supported=("silu",))
    counts = [values.get(name) or 0 for name in ("max_window_layers", "num_hidden_layers")]
    sliding = values.get("use_sliding_window") and not (all(isinstance(each, int) for each in counts) and counts[0] >= counts[1])
    layers = set(_names(values, "layer_types"))
    if layers - {"full_attention"} or (not layers and sliding):
        raise UnsupportedModel("attention over a sliding window", supported=("full attention",))


def _names(values: Mapping[str, Any], field: str) -> list[str]:
    names = values.get(field) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelConfigError(field, got=names, want="a list of names")
    return names


def _scaling(values: Mapping[str, Any], context: int) -> RopeScaling | None:
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
    for name, value in given.items():
        if name == "truncate":
            if not isinstance(value, bool):
                raise ModelConfigError("rope_scaling.truncate", got=value, want="true or false")
        else:
            _check(f"rope_scaling.{name}", value, float, at_least=0, without_end=True)
    if given.get("factor", 1) < 1:
        raise ModelConfigError("rope_scaling.factor", got=given["factor"], want="a number of at least 1")
    if kind == "yarn" and (unknown := [name for name in ("mscale", "mscale_all_dim") if values.get(name) is not None]):
        raise ModelConfigError(f"rope_scaling.{unknown[0]}", got=values[unknown[0]], want="left out: no Qwen3 has it")
    try:
        return made(**given)
    except TypeError:
        missing = next(name for name in fields if name not in given)
        raise ModelConfigError(f"rope_scaling.{missing}", got="missing", want=f"given for rope_type {kind!r}") from None


def _tokens(value: object) -> tuple[int, ...]:
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in tokens):
        raise ModelConfigError("eos_token_id", got=value, want="an integer or a list of them")
    return tuple(tokens)


def read_generation(folder: str | Path) -> dict[str, Any]:
    """What a folder's ``generation_config.json`` holds; nothing where there is none."""
    path = Path(folder) / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        CheckpointError: there is no such file, or no object in it.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read: {problem.strerror or problem}") from None
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"{path} is not JSON: {problem}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return values
