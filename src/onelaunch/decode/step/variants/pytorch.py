"""Variants of ``decode_step`` in PyTorch: op by op, compiled, and replayed as one CUDA graph.

``compiled`` and ``captured`` use one shape for many positions: attention runs over a window of the cache that covers the
position, a power of two or the whole cache, and a mask hides the rest. A captured graph reads and writes the caller's weights
and cache in place.

The dispatcher, studies and tests find registered variants by name. Tags: ``fuses`` names the steps that share a kernel, and
``maker`` the author of the kernels; studies select variants by tags. ``yardstick`` marks the PyTorch baseline, whose error sets
the tolerance, and ``backward=False`` says that a variant has no backward pass. Other keywords are capabilities, which the class
``Capabilities`` of ``onelaunch.operation`` explains.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch.nn import functional as F

from onelaunch.decode.model.forward import forward, logits_of, mlp, project_qkv, rms_norm, upcast
from onelaunch.decode.model.rope import layer_rotations
from onelaunch.decode.model.weights import LayerWeights, ModelWeights
from onelaunch.decode.runtime.graphs import CaptureSite, capture_on_new_stream
from onelaunch.decode.runtime.models import MODELS
from onelaunch.decode.step.contract import DecodeCall, Results, decode_step
from onelaunch.dispatch.capture import compile_static, compiler_missing
from onelaunch.operation import Case, Query

_SMALLEST_WINDOW = 256
"""Smallest attention window, in positions; a smaller one saves no time that can be measured."""

_LAYER_FIELDS = tuple(field.name for field in fields(LayerWeights))
"""Names of a layer's tensors, in the order in which :func:`layer_step` gets them: as a tuple, since it may be compiled."""

Part = Callable[..., torch.Tensor]
"""Type of :func:`layer_step` and :func:`head_step`, as written or compiled by ``torch.compile``."""


@decode_step.variant("eager", launches=None, fuses=(), maker="pytorch", yardstick=True, backward=False)
def eager(call: DecodeCall) -> Results:
    """Run PyTorch op by op, with attention over the filled positions only: the baseline of the other variants."""
    return call.results(logits_of(call.weights, forward(call.weights, call.token, call.cache))[0])


@decode_step.variant("captured", launches=None, fuses=(), maker="pytorch", backward=False)
def captured(call: DecodeCall) -> Results:
    """Replay PyTorch's kernels as one CUDA graph, with attention over a window of the cache; nothing is compiled."""
    return call.results(_replay(call, layer_step, head_step))


@decode_step.variant(
    "compiled", launches=None, recompiles=True, fuses=("norms", "rotation", "gate"), maker="pytorch", backward=False
)
def compiled(call: DecodeCall) -> Results:
    """Compile a layer with torch.compile, over a window of the cache; on a GPU all layers are replayed as one CUDA graph."""
    return call.results(_replay(call, compile_static(layer_step), compile_static(head_step)))


compiled.supports(compiler_missing)


@captured.supports
def needs_cuda(query: Query) -> str | None:
    """Return why CUDA graphs cannot be used, or ``None``."""
    return None if query.device_type == "cuda" else "needs a CUDA device"


def window_of(position: int, capacity: int) -> int:
    """Return how many positions of the cache a step at ``position`` attends to, including those that the mask hides."""
    return min(capacity, max(_SMALLEST_WINDOW, 1 << position.bit_length()))


@eager.kernels_of_case
@captured.kernels_of_case
def nothing_compiled(case: Case, device: torch.device) -> tuple[()]:
    """Return no kernels: PyTorch's own are compiled already."""
    return ()


@compiled.smaller
def one_layer(case: Case) -> Case:
    """Return a case of one layer whose steps compile what those of the given case do.

    All layers run the same compiled function, and a tied LM head the same as one of its own. Positions before the middle of the
    smallest window compile alike, also for the 128 tokens in a row of a study: their caches and windows have the smallest sizes.
    """
    first = case.sizes["position"] < _SMALLEST_WINDOW // 2
    sizes = {**case.sizes, "layers": 1} | ({"position": 0} if first else {})
    options = {name: value for name, value in case.options.items() if name not in ("tied", "unrotated", "rope_theta")}
    return replace(case, sizes=sizes, options=options, name="")


# One step with the position as a tensor


def layer_step(
    weights: tuple[torch.Tensor | None, ...],
    head_dim: int,
    eps: float,
    hidden: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Apply a layer to the residual stream ``[1, H]`` float32; write keys and values ``[K, C, D]`` at ``position [1]``."""
    layer = LayerWeights(*weights)  # pyrefly: ignore[bad-argument-type]
    normed = rms_norm(hidden, layer.input_layernorm, eps)
    q, k, v = project_qkv(head_dim, eps, layer, normed, (cosine, sine))
    keys.index_copy_(1, position, k)
    values.index_copy_(1, position, v)
    window = mask.shape[-1]
    grouped = q.view(len(keys), -1, head_dim)  # the queries of a key head take the place of positions, so that no key is repeated
    attended = F.scaled_dot_product_attention(
        grouped[None], keys[None, :, :window], values[None, :, :window], attn_mask=mask, scale=1 / math.sqrt(head_dim)
    )
    hidden = hidden + F.linear(attended.reshape(1, -1), layer.o_proj, layer.o_bias)
    return hidden + mlp(eps, layer, hidden)


def head_step(hidden: torch.Tensor, norm: torch.Tensor, lm_head: torch.Tensor, eps: float) -> torch.Tensor:
    """Return logits ``[V]`` float32 of the residual stream ``[1, H]``."""
    return upcast(F.linear(rms_norm(hidden, norm, eps), lm_head)[0])


def step(
    layer: Part, head: Part, weights: ModelWeights, token: torch.Tensor, position: torch.Tensor, call: DecodeCall, window: int
) -> torch.Tensor:
    """Run one token through ``layer`` and ``head``, and return its logits ``[V]``.

    ``token`` and ``position`` are tensors ``[1]``, so that all shapes depend on the window alone and a captured graph can be
    replayed with other values in them. Only the cache is taken from ``call``.
    """
    config = weights.config
    embedded = F.embedding(token, weights.embed_tokens)
    hidden = upcast(embedded)
    rotations = layer_rotations(config, position, hidden.dtype)
    mask = (torch.arange(window, device=token.device) <= position).expand(config.queries_per_key, window)
    with weights.exclusive():
        for number, rotary in enumerate(rotations):
            keys, values, each = call.cache.keys[number], call.cache.values[number], weights.layer(number)
            tensors = tuple(getattr(each, name) for name in _LAYER_FIELDS)
            hidden = layer(tensors, config.head_dim, config.rms_norm_eps, hidden, keys, values, position, *rotary, mask)
        logits = [head(hidden, weights.norm, rows, config.rms_norm_eps) for _, rows in weights.head_rows()]
    return logits[0] if len(logits) == 1 else torch.cat(logits)


# Graph capture


@dataclass(frozen=True)
class CapturedStep:
    """Step as a CUDA graph, for one window and one address of the cache, with the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    token: torch.Tensor
    position: torch.Tensor
    logits: torch.Tensor

    @classmethod
    def of(cls, call: DecodeCall, layer: Part, head: Part, window: int, site: CaptureSite) -> CapturedStep:
        """Capture the step of a call, at the site of the model's captures."""
        with torch.inference_mode(mode=False):  # a step outside of inference mode could not write to inference tensors
            token, position = call.token.clone(), torch.full_like(call.token, call.position)
        run = functools.partial(step, layer, head, call.weights, token, position, call, window)
        graph, logits = capture_on_new_stream(run, call.token.device, warm_up=True, site=site)
        return cls(graph, token, position, logits)

    def replay(self, call: DecodeCall) -> torch.Tensor:
        """Enqueue the step of a call and return its logits."""
        self.token.copy_(call.token)
        self.position.fill_(call.position)
        self.graph.replay()
        return self.logits.clone()


def _replay(call: DecodeCall, layer: Part, head: Part) -> torch.Tensor:
    """Return the logits of a call by replaying a captured step.

    Without CUDA, or while the caller captures a graph, the step runs directly. A cache at the address of an earlier one, with
    the same capacity, replays the same graph.
    """
    window = window_of(call.position, call.cache.capacity)
    if call.token.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return step(layer, head, call.weights, call.token, torch.full_like(call.token, call.position), call, window)
    captured_steps = MODELS.captured(call.weights)
    # ``layer`` differs between the variants that share the model's captured steps.
    key = (layer, window, call.cache.capacity, call.cache.keys.data_ptr(), call.cache.values.data_ptr())
    with captured_steps.lock, call.weights.exclusive():
        captured_steps.order.join()  # before a capture too, which runs the step once
        capture = functools.partial(CapturedStep.of, call, layer, head, window, captured_steps.site)
        return captured_steps.graphs.get(key, capture).replay(call)
