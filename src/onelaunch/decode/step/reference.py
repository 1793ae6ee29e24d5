"""Oracle of ``decode_step``, and the models and caches on which variants are judged.

A :class:`~onelaunch.operation.Case` gives sizes, dtype and options. The workbench and the tests make the arguments of a call
from it, and compare the results of each variant with the oracle's. ``cost.py`` takes the configuration of a case from here.
"""

from __future__ import annotations

import torch

from onelaunch.decode.model.cache import KVCache, rounded
from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.forward import forward, logits_of
from onelaunch.decode.model.weights import Weights, random_weights
from onelaunch.decode.step.contract import Results, decode_step, key_of
from onelaunch.operation import Case, Query, Reading

_CONTEXT = 40_960
"""Context, in positions, of the models that cases describe: that of the Qwen3 family. A later position extends it."""


@decode_step.oracle
def reference(token: torch.Tensor, weights: Weights, cache: KVCache) -> Results:
    """Run the model in plain PyTorch, in the dtype of the weights; as the oracle it gets float64 weights."""
    hidden = forward(weights, token, cache)
    return logits_of(weights, hidden)[0], cache.keys[:, :, cache.length], cache.values[:, :, cache.length]


@decode_step.queries
def make_query(case: Case, device: str, grad: bool) -> Query:
    """Return the dispatch key of a case. No variant supports a query that asks for gradients."""
    return key_of(config_of(case), case.sizes["position"], device)._replace(grad=grad)


@decode_step.inputs
def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Reading:
    """Return a random token, random weights, and a cache of unit scale; no argument takes a gradient.

    Unfilled rows of the cache hold numbers of the same scale, so that a variant which reads them fails.
    """
    config, position = config_of(case), case.sizes["position"]
    seed = int(torch.randint(2**31, (1,), generator=generator, device=device))
    shape = (config.num_hidden_layers, config.num_key_value_heads, rounded(position + 1, config), config.head_dim)
    keys, values = (torch.randn(shape, generator=generator, device=device, dtype=config.dtype) for _ in range(2))
    token = torch.randint(config.vocab_size, (1,), generator=generator, device=device)
    return Reading(
        {"token": token, "weights": random_weights(config, seed, device), "cache": KVCache(keys, values, position)}, ()
    )


def config_of(case: Case) -> ModelConfig:
    """Return the configuration of the model that a case describes."""
    layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary, position = (
        case.sizes[name] for name in decode_step.dimensions
    )
    interval = decode_step.option(case, "unrotated")  # every so many layers, one does not rotate
    return ModelConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=decode_step.option(case, "rope_theta"),
        max_position_embeddings=max(_CONTEXT, position + 1),
        tie_word_embeddings=decode_step.option(case, "tied"),
        attention_bias=decode_step.option(case, "bias"),
        output_bias=not decode_step.option(case, "no_output_bias"),
        qk_norm=not decode_step.option(case, "no_qk_norm"),
        unrotated_layers=tuple(range(interval - 1, layers, interval)) if interval else (),
        dtype=case.dtype,
    )
