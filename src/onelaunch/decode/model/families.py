"""Supported model families, and what a ``config.json`` of each declares: biases, norms of heads, rotation, sliding windows.

``config.py`` reads a configuration with it. No other part of decoding knows families: a :class:`ModelConfig` states the features.

Source: the configurations and models of ``transformers`` 5.23, whose defaults apply where a file leaves a field out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onelaunch.errors import ModelConfigError, UnsupportedModel
from onelaunch.wording import shown

_MOST_LAYERS = 65_536
"""Most layers for which a pattern of layers without rotation is written out, as the number comes from an untrusted file."""


@dataclass(frozen=True)
class Family:
    """Features that the name of an architecture implies."""

    model_type: str
    qk_norm: bool = False
    """Flag of a family whose queries and keys are normalised per head."""
    qkv_bias: bool | None = None
    """Flag of a family that always, or never, adds biases to queries, keys and values alone; ``None`` if files declare it.

    Where a file declares ``attention_bias``, attention's output gets a bias too.
    """
    unrotated: bool = False
    """Flag of a family in which some layers do not rotate queries and keys."""
    windowed: bool = False
    """Flag of a family in which ``sliding_window`` alone gives all layers a window, without ``use_sliding_window``."""
    window: int | None = None
    """Sliding window, in positions, of a file that does not have the field ``sliding_window``."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields that a file may leave out and that differ from those of :class:`ModelConfig`."""


ARCHITECTURES = {
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, defaults={"head_dim": 128}),
    "LlamaForCausalLM": Family("llama", windowed=True, defaults={"max_position_embeddings": 2048}),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True),
    "MistralForCausalLM": Family(
        "mistral",
        qkv_bias=False,
        windowed=True,
        window=4096,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131_072},
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        unrotated=True,
        defaults={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    ),
}
"""Supported architectures of ``config.json``, each with its family."""

_REFUSED = {
    "mlp_bias": (False,), "use_qk_norm": (False,), "num_experts": (0,), "num_local_experts": (0,), "n_routed_experts": (0,),
    "moe_intermediate_size": (0,), "logits_scaling": (1,), "logit_scale": (1,), "embedding_multiplier": (1,),
    "residual_multiplier": (1,), "attention_multiplier": (), "query_pre_attn_scalar": (), "attn_logit_softcapping": (),
    "final_logit_softcapping": (), "clip_qkv": (), "partial_rotary_factor": (1,), "attention_chunk_size": (),
}  # fmt: skip
"""Fields that change what a model computes and that no variant implements, each with the values that change nothing.

``null`` changes nothing in any of them.
"""


def family_of(values: Mapping[str, Any]) -> Family:
    """Return the family of a configuration, after a check that the configuration declares no feature that is not supported.

    Raises:
        UnsupportedModel: The architecture or a feature is not supported; the message names it.
        ModelConfigError: A field has a wrong type.
    """
    names, kind = _names(values, "architectures"), values.get("model_type")
    if names:
        found = ARCHITECTURES.get(names[0])
    else:
        found = next((each for each in ARCHITECTURES.values() if each.model_type == kind), None)
    if found is None:
        raise UnsupportedModel(f"architecture {shown(names[0] if names else kind)}", supported=ARCHITECTURES)
    if values.get("quantization_config"):
        raise UnsupportedModel("quantized weights", supported=("bfloat16", "float16", "float32"))
    if values.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {shown(values['hidden_act'])}", supported=("silu",))
    refused = dict(_REFUSED)
    if found.qkv_bias is not None and values.get("attention_bias") != found.qkv_bias:
        refused["attention_bias"] = (False,)
    for name, harmless in refused.items():
        if (value := values.get(name)) is not None and value not in harmless:
            raise UnsupportedModel(f"{name} = {shown(value)}", supported=("models without it",))
    return found


def window_of(values: Mapping[str, Any], family: Family) -> int | None:
    """Return the sliding window of a configuration, in positions, or ``None`` if all layers attend to all positions.

    Raises:
        UnsupportedModel: A layer's attention is neither full nor over a window of a given size.
    """
    # Without ``layer_types``, the layers from number ``max_window_layers`` on have a sliding window.
    counts = [values.get(name) or 0 for name in ("max_window_layers", "num_hidden_layers")]
    sliding = values.get("use_sliding_window") and not (all(isinstance(each, int) for each in counts) and counts[0] >= counts[1])
    layers = set(_names(values, "layer_types"))
    if other := sorted(layers - {"full_attention", "sliding_attention"}):
        raise UnsupportedModel(f"layers of type {shown(other[0])}", supported=("full attention",))
    window = values.get("sliding_window", family.window)
    slides = "sliding_attention" in layers or (not layers and sliding) or (family.windowed and window is not None)
    if not slides:
        return None
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise UnsupportedModel("attention over a sliding window", supported=("full attention",))
    return window


def unrotated_layers(values: Mapping[str, Any], family: Family) -> tuple[int, ...]:
    """Return the numbers of the layers that do not rotate queries and keys.

    Raises:
        ModelConfigError: The fields that describe them are wrong.
    """
    if not family.unrotated:
        return ()
    count, rotated, interval = (values.get(name) for name in ("num_hidden_layers", "no_rope_layers", "no_rope_layer_interval"))
    if not isinstance(count, int):
        return ()  # which is refused later
    if rotated is not None:
        if not isinstance(rotated, list) or len(rotated) < count or any(each not in (0, 1) for each in rotated):
            want = "a list of 0 (no rotation) or 1, one for each layer"
            raise ModelConfigError("no_rope_layers", got=rotated, want=want)
        return tuple(number for number, rotates in enumerate(rotated[: max(count, 0)]) if not rotates)
    interval = 4 if interval is None else interval
    if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
        raise ModelConfigError("no_rope_layer_interval", got=interval, want="an integer of at least 1")
    if count > _MOST_LAYERS:
        raise ModelConfigError("num_hidden_layers", got=count, want=f"at most {_MOST_LAYERS}, as not all layers are rotated")
    return tuple(range(interval - 1, count, interval))


def with_defaults(known: dict[str, Any], family: Family) -> None:
    """Add the family's values of fields that a file left out."""
    for name, value in family.defaults.items():
        known.setdefault(name, value)
    hidden, heads = known.get("hidden_size"), known.get("num_attention_heads")
    if isinstance(heads, int) and heads > 0:
        if family.model_type == "llama":
            known.setdefault("num_key_value_heads", heads)
        if isinstance(hidden, int):
            known.setdefault("head_dim", hidden // heads)


def _names(values: Mapping[str, Any], field: str) -> list[str]:
    """Return a field that must be a list of strings; a missing one is empty."""
    names = values.get(field) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelConfigError(field, got=names, want="a list of names")
    return names
