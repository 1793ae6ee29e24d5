"""Prefill by CUDA graphs: PyTorch's forward pass for a whole prompt, captured once per size and replayed.

In eager mode the host takes 18 to 25 ms to launch the forward pass of 28 to 36 layers, and by estimate the device runs short
prompts in a fifth of that. A pass is captured for a number of tokens (:data:`SIZES`), and a shorter prompt is padded at its
end: attention is causal, so the padding changes no result. Only the order of sums in a matrix product may depend on the
number of rows.

A *pass* here is the prefill for one number of tokens. Its capture consists of several graphs if the device needs long for it, so
that a cancelled request ends between two of them. The first prompt of a size is prefilled by the same pass in eager mode, since a
capture takes several times as long; :meth:`PromptPasses.prepare` captures ahead. Both launch the same kernels with the same
shapes, so a prompt has the same logits whichever prefills it. ``engines.py`` prefills with passes, and ``models.py`` keeps
those that are captured.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F

from onelaunch.decode.model.cache import KVCache
from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.forward import Rotation, embed, logits_of, plain_add_and_norm, run_layers
from onelaunch.decode.model.weights import ModelWeights, elements
from onelaunch.decode.plan.packing import as_operands
from onelaunch.decode.runtime.graphs import CaptureSite, capture_on_new_stream
from onelaunch.decode.runtime.models import MODELS
from onelaunch.decode.runtime.packed import PackedWeights
from onelaunch.decode.runtime.packed_prompts import logits_by_stream, run_layers_by_stream
from onelaunch.decode.runtime.products import StreamProducts
from onelaunch.errors import FallbackNotice

SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
"""Numbers of tokens for which passes are captured, so that from 256 on at most a fifth of the rows are padding."""

_MOST_FLOPS = 8e12
"""FLOPs of matrix products in a prompt, above which the host launches ahead of the device and padding would only cost time.

At 400 TFLOP/s, an estimate, they take 20 ms.
"""

_CAPACITIES = (512, 2048)
"""Capacities, in positions, of the caches that passes write to. All passes for at most that many tokens share one."""

_NEVER = -(1 << 62)
"""Count of prompts that marks a size whose pass did not fit into memory, so that it is never captured again."""

MOST_TOKENS = 512
"""Most tokens of a pass that multiplies by a stream itself, on Hopper GPUs; others copy its matrices and multiply with cuBLAS.

A copy takes the same time at any length, and cuBLAS is faster where products are the bound. On an H100 the matrices of a layer of
Qwen3-8B took 0.19 ms in place of 0.47 for 128 tokens, and 0.39 in place of 0.59 for 512 (notebook of decoding).
"""

_GRAPH_FLOPS, _GRAPH_BYTES = 1.2e12, 8e9
"""Most FLOPs and bytes of weights of one graph: about 3 ms of a Hopper GPU each, by estimate. A graph has at least one layer."""


class _Between(NamedTuple):
    """Results of a graph of a pass that the next graph reads."""

    hidden: torch.Tensor
    """Residual stream ``[size, H]``, its channels in the order of operands if the pass multiplies by the stream itself."""
    rotations: list[Rotation]
    """Rotations of each layer."""


@dataclass(frozen=True)
class CapturedPass:
    """Forward pass for a number of tokens as CUDA graphs, with the memory that they read and write."""

    tokens: torch.Tensor
    """Tokens ``[size]``, those of a prompt at the beginning."""
    last: torch.Tensor
    """Index of the prompt's last token, ``[1]``."""
    cache: KVCache
    """Keys and values of the tokens."""
    logits: torch.Tensor
    """Logits ``[V]`` after the prompt's last token."""
    replays: tuple[Callable[[], None], ...]
    """Functions that enqueue the graphs, in their order."""

    @classmethod
    def of(cls, weights: ModelWeights, size: int, cache: KVCache, site: CaptureSite) -> CapturedPass:
        """Capture the pass of a model for ``size`` tokens, which writes to an empty cache, at a model's site."""
        with torch.inference_mode(mode=False):  # replays outside of inference mode could not write to inference tensors
            tokens, last = (torch.zeros(count, dtype=torch.int64, device=weights.device) for count in (size, 1))
        between: _Between | None = None
        logits, replays = tokens.new_empty(0), []
        for layers in graphs_of(weights.config, size, unpacked=_copies_matrices(weights, size)):
            step = functools.partial(_run_part, weights, tokens, last, cache, between, layers, None)
            graph, (between, logits) = capture_on_new_stream(step, weights.device, warm_up=True, site=site)
            replays.append(graph.replay)
        return cls(tokens, last, cache, logits, tuple(replays))

    def replay(
        self, weights: ModelWeights, prompt: torch.Tensor, cache: KVCache, pace: Callable[[], None]
    ) -> tuple[torch.Tensor, KVCache]:
        """Enqueue the pass of a prompt ``[T]``, and return what :func:`onelaunch.decode.model.forward.prefill` returns."""
        length = len(prompt)
        self.tokens[:length] = prompt
        self.tokens[length:] = 0
        self.last.fill_(length - 1)
        with weights.exclusive():
            for enqueue in self.replays:
                pace()
                enqueue()
        return self.logits.clone(), _filled(cache, self.cache, length)


def _run_in_eager_mode(
    weights: ModelWeights, size: int, prompt: torch.Tensor, cache: KVCache, pace: Callable[[], None]
) -> tuple[torch.Tensor, KVCache]:
    """Launch the pass of a prompt ``[T]`` op by op, and return what :meth:`CapturedPass.replay` returns, bit for bit."""
    length, config = len(prompt), weights.config
    tokens, last = F.pad(prompt, (0, size - length)), torch.full((1,), length - 1, device=weights.device)
    padded = KVCache.empty(config, size, weights.device)
    _, logits = _run_part(weights, tokens, last, padded, None, range(config.num_hidden_layers), pace)
    return logits, _filled(cache, padded, length)


def _filled(cache: KVCache, padded: KVCache, length: int) -> KVCache:
    """Copy the first ``length`` positions of a pass's cache to a request's, and return that with its new length."""
    cache.keys[:, :, :length] = padded.keys[:, :, :length]
    cache.values[:, :, :length] = padded.values[:, :, :length]
    return cache.with_length(length)


def _run_part(
    weights: ModelWeights,
    tokens: torch.Tensor,
    last: torch.Tensor,
    cache: KVCache,
    between: _Between | None,
    layers: range,
    pace: Callable[[], None] | None,
) -> tuple[_Between, torch.Tensor]:
    """Run some layers of a pass, with the embedding before the first and the LM head after the last.

    The logits are empty if the last layer is not among them. ``pace`` is that of
    :func:`onelaunch.decode.model.forward.prefill`; a capture has none.
    """
    hidden, rotations = between or embed(weights, tokens, 0)
    if (products := _products_of(weights, len(tokens))) is not None:
        hidden = hidden if between else as_operands(hidden)
        hidden = run_layers_by_stream(weights, products, hidden, rotations, cache, layers, _add_and_norm, pace)
    else:
        hidden = run_layers(weights, hidden, rotations, cache, layers, add_and_norm=_add_and_norm, pace=pace)
    logits = hidden.new_empty(0)
    if layers.stop == weights.config.num_hidden_layers:
        newest = hidden.index_select(0, last)
        logits = (logits_of(weights, newest) if products is None else logits_by_stream(weights, products, newest))[0]
    return _Between(hidden, rotations), logits


def _products_of(weights: ModelWeights, size: int) -> StreamProducts | None:
    """Return the products with a model's stream that a pass for ``size`` tokens makes, or ``None`` if it takes plain matrices."""
    return weights.products if isinstance(weights, PackedWeights) and size <= MOST_TOKENS else None


def _copies_matrices(weights: ModelWeights, size: int) -> bool:
    """Return whether a pass for ``size`` tokens copies the matrices out of a stream."""
    return weights.unpacks and _products_of(weights, size) is None


def _add_and_norm(
    hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add and normalize as :func:`~onelaunch.decode.model.forward.plain_add_and_norm` does, by one launch of ``rms_norm``."""
    from onelaunch.ops import rms_norm  # only a capture needs the operations

    if update is None:
        return plain_add_and_norm(hidden, update, weight, eps)
    normed, total = rms_norm(update, weight, hidden, eps=eps)
    assert total is not None  # noqa: S101 - there was a residual
    return normed, total


def size_of(config: ModelConfig, tokens: int) -> int | None:
    """Return the size of the pass for a prompt, in tokens, or ``None`` if it is prefilled in eager mode."""
    size = next((each for each in SIZES if each >= tokens), None)
    if size is None or size > config.max_position_embeddings or _flops(config, size) > _MOST_FLOPS:
        return None
    return size


def graphs_of(config: ModelConfig, size: int, *, unpacked: bool = False) -> list[range]:
    """Return the layers of each graph of a pass; ``unpacked`` says that it copies the matrices out of a stream first."""
    layers, weights_bytes = config.num_hidden_layers, config.dtype.itemsize * _elements_of_layers(config)
    weights_bytes *= 3 if unpacked else 1  # the copy reads and writes them
    graphs = math.ceil(max(_flops(config, size) / _GRAPH_FLOPS, weights_bytes / _GRAPH_BYTES))
    graphs = min(max(graphs, 1), layers)
    return [range(index * layers // graphs, (index + 1) * layers // graphs) for index in range(graphs)]


def _flops(config: ModelConfig, size: int) -> float:
    """Return the FLOPs of the matrix products of a pass; the LM head multiplies one row."""
    return 2.0 * size * _elements_of_layers(config)


def _elements_of_layers(config: ModelConfig) -> int:
    """Return the number of elements of all matrices in layers."""
    tables = 1 if config.tie_word_embeddings else 2
    return elements(config, matrices_only=True) - tables * config.vocab_size * config.hidden_size


class PromptPasses:
    """Captured passes of a model on a GPU.

    Args:
        weights: Weights of the model. The passes read them in place; nothing here keeps them alive.
    """

    def __init__(self, weights: ModelWeights) -> None:
        self._steps = MODELS.captured(weights)

    def take(self, config: ModelConfig, tokens: int) -> bool:
        """Return whether passes prefill prompts of ``tokens`` tokens. It depends on nothing that was prefilled before."""
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        return not capturing and size_of(config, tokens) is not None

    def copies_matrices(self, weights: ModelWeights, tokens: int) -> bool:
        """Return whether the pass for a prompt of ``tokens`` tokens, for which :meth:`take` returns ``True``, copies matrices."""
        size = size_of(weights.config, tokens)
        assert size is not None  # noqa: S101 - `take` was asked
        return _copies_matrices(weights, size)

    def prefill(
        self, weights: ModelWeights, prompt: torch.Tensor, cache: KVCache, pace: Callable[[], None]
    ) -> tuple[torch.Tensor, KVCache]:
        """Prefill a prompt, and return its logits ``[V]`` and its cache.

        The first prompt of a size is prefilled in eager mode, and so is every one if there is too little memory for a capture.

        Args:
            weights: Weights of the model.
            prompt: Tokens ``[T]`` int64 on the weights' device, for whose number :meth:`take` returns ``True``.
            cache: Empty cache with room for them.
            pace: Function to call before each graph, or each half of a layer, which may wait, or raise to end the work here.
        """
        size = size_of(weights.config, len(prompt))
        assert size is not None  # noqa: S101 - `take` was asked
        with self._steps.lock:
            self._steps.seen[size] += 1
            captured = self._get(weights, size) if self._steps.seen[size] > 1 else None
            if captured is not None:
                return captured.replay(weights, prompt, cache, pace)
        return _run_in_eager_mode(weights, size, prompt, cache, pace)

    def prepare(self, weights: ModelWeights, most: int = 512) -> None:
        """Capture the passes of all sizes up to ``most`` tokens, so that no prompt of theirs waits for a capture."""
        for size in SIZES:
            if size <= most and size_of(weights.config, size) == size:
                with self._steps.lock:
                    if self._get(weights, size) is None:
                        return
                    self._steps.seen[size] = max(self._steps.seen[size], 1)

    def _get(self, weights: ModelWeights, size: int) -> CapturedPass | None:
        """Return the pass for a number of tokens, captured if there is none, or ``None`` if there is too little memory.

        The caller holds the lock. What is enqueued from here on follows the work of other streams on the model's passes, since a
        capture runs the pass once.
        """
        self._steps.order.join()
        config, graphs = weights.config, self._steps.graphs
        capacity = next(each for each in _CAPACITIES if each >= size)
        try:
            with torch.inference_mode(mode=False):
                cache = graphs.get(
                    ("prompts", capacity), lambda: KVCache.empty(config, _within(capacity, config), weights.device)
                )
            with weights.exclusive():  # no other stream may wait for the stream of a capture
                return graphs.get(("prompt", size), functools.partial(CapturedPass.of, weights, size, cache, self._steps.site))
        except torch.OutOfMemoryError:
            self._steps.seen[size] = _NEVER
            notice = f"There is too little memory to capture the prefill of {size} tokens as CUDA graphs; it runs in eager mode."
            warnings.warn(notice, FallbackNotice, stacklevel=3)
            return None


def _within(capacity: int, config: ModelConfig) -> int:
    """Return a capacity that the model's context allows."""
    return min(capacity, config.max_position_embeddings)
