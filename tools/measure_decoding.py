"""Measure the time per token of models of several families, and how far their logits are from float32's, with its provenance.

    python tools/measure_decoding.py --model Llama-3.2-1B --json

For each model of :data:`MODELS`, with random weights in bfloat16, and each variant the script reads a prompt of 32 tokens and
decodes 127 greedy tokens behind it: once with one launch for all tokens, if the variant can, and once with a step per token, both
by events on the device. It is the setting of a public comparison of Llama-3.2-1B at batch 1. The script then feeds 127 given
tokens one by one and compares the logits with those of the same weights in float32: the mean Kullback-Leibler divergence, and the
mean negative log-likelihood that a variant gives to the token that float32 finds likeliest. ``eager`` is PyTorch in bfloat16.

The script is run by hand on an otherwise idle GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from onelaunch.decode import KVCache, ModelConfig, Weights, decode_step, random_weights
from onelaunch.decode.model.forward import forward, logits_of, prefill
from onelaunch.decode.step import capabilities
from onelaunch.decode.step.contract import bind
from tools.measure_first_call import provenance
from tools.model_shapes import SHAPES

MODELS = (
    "Llama-3.2-1B", "Llama-3.2-3B", "Qwen2.5-0.5B", "Qwen2.5-1.5B", "SmolLM2-135M", "SmolLM2-360M", "Mistral-7B", "SmolLM3-3B",
    "Qwen3-0.6B",
)  # fmt: skip
"""Models of :data:`~tools.model_shapes.SHAPES` that are measured unless others are named."""

PROMPT, TOKENS = 32, 127
"""Tokens of the prompt, and tokens that are decoded behind it."""

RUNS = 9
"""Timed runs, of which the median is taken; one more comes before."""


@torch.no_grad()
def measure(name: str, variants: Iterable[str], device: torch.device) -> list[dict[str, Any]]:
    """Return a record for each variant of a model."""
    config = SHAPES[name]
    weights = random_weights(config, 0, device)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab_size, (PROMPT + TOKENS,), generator=generator).to(device)
    expected = _exact_logits(weights, tokens)
    found = []
    for variant in variants:
        one_launch, steps = _one_launch(weights, tokens, variant), _steps(weights, tokens, variant)
        record: dict[str, Any] = {"model": name, "variant": variant, "weights_bytes": _read_bytes(config)}
        record["one_launch_us"] = None if one_launch is None else _microseconds(one_launch, device)
        record["steps_us"] = _microseconds(steps, device)
        found.append({**record, **_fidelity(_given_tokens(weights, tokens, variant), expected), **provenance(device)})
    return found


def _read_bytes(config: ModelConfig) -> int:
    """Return the bytes of weights that a token reads at least."""
    given: dict[str, Any] = {
        "layers": config.num_hidden_layers, "hidden": config.hidden_size, "intermediate": config.intermediate_size,
        "heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads, "head_dim": config.head_dim,
        "vocabulary": config.vocab_size, "tied": config.tie_word_embeddings, "bias": config.attention_bias,
        "no_output_bias": config.attention_bias and not config.output_bias, "no_qk_norm": not config.qk_norm,
    }  # fmt: skip
    case = decode_step.case("bfloat16", **given, position=0)
    row = 2 * config.num_hidden_layers * config.key_value_size * config.dtype.itemsize
    return int(decode_step.cost(case).bytes) - row - 4 * config.vocab_size


def _prompted(weights: Weights, tokens: torch.Tensor) -> tuple[torch.Tensor, KVCache]:
    """Return the logits after the prompt, and its cache, with room for all tokens."""
    return prefill(weights, tokens[:PROMPT], KVCache.empty(weights.config, len(tokens) + 1, tokens.device))


def _one_launch(weights: Weights, tokens: torch.Tensor, variant: str) -> Callable[[], object] | None:
    """Return a function that decodes all tokens by one call, or ``None`` if the variant makes single steps only."""
    if (in_a_row := capabilities.in_a_row(decode_step.get(variant))) is None:
        return None
    logits, cache = _prompted(weights, tokens)
    call = bind(logits.argmax(keepdim=True), weights, cache)
    return lambda: in_a_row(call, TOKENS)


def _steps(weights: Weights, tokens: torch.Tensor, variant: str) -> Callable[[], object]:
    """Return a function that decodes all tokens, one step after another, without waiting for the device."""
    logits, begin = _prompted(weights, tokens)
    first = logits.argmax(keepdim=True)

    def run() -> object:
        token, cache = first, begin
        for _ in range(TOKENS):
            token = decode_step(token, weights, cache, variant=variant)[0].argmax(keepdim=True)
            cache = cache.with_length(cache.length + 1)
        return token

    return run


def _microseconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the median microseconds per token of several runs, by events on a GPU, else by the host's clock."""
    times = []
    for _ in range(RUNS + 1):
        if device.type != "cuda":
            begun = time.perf_counter()
            run()
            times.append(1e6 * (time.perf_counter() - begun) / TOKENS)
            continue
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / TOKENS)
    return statistics.median(times[1:])


def _exact_logits(weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits ``[TOKENS, V]`` of the same weights in float32, after each token behind the prompt."""
    exact = weights.map(torch.Tensor.float)
    cache = KVCache.empty(weights.config, len(tokens), tokens.device, dtype=torch.float32)
    return logits_of(exact, forward(exact, tokens, cache)[PROMPT:])


def _given_tokens(weights: Weights, tokens: torch.Tensor, variant: str) -> torch.Tensor:
    """Return a variant's logits ``[TOKENS, V]`` after each of the given tokens behind the prompt."""
    _, cache = _prompted(weights, tokens)
    found = []
    for token in tokens[PROMPT:].split(1):
        found.append(decode_step(token, weights, cache, variant=variant)[0].clone())
        cache = cache.with_length(cache.length + 1)
    return torch.stack(found)


def _fidelity(found: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Return how far logits are from float32's: norm-wise error, KL divergence, and NLL of float32's likeliest tokens."""
    ours, exact = found.double().log_softmax(-1), expected.double().log_softmax(-1)
    likeliest = expected.argmax(-1, keepdim=True)
    return {
        "error": float((found - expected).norm() / expected.norm()),
        "kl": float((exact.exp() * (exact - ours)).sum(-1).mean()),
        "nll": float(-ours.gather(-1, likeliest).mean()),
        "nll_float32": float(-exact.gather(-1, likeliest).mean()),
    }


def listing(measured: list[dict[str, Any]]) -> str:
    """Return the lines that show measurements."""
    lines = [f"{'model':14} {'variant':14} one launch   a step each  TB/s  error    KL       NLL     (us per token)"]
    for each in measured:
        one, fastest = each["one_launch_us"], min(filter(None, (each["one_launch_us"], each["steps_us"])))
        shown = f"{one:10.1f}" if one is not None else "         -"
        rate = each["weights_bytes"] / fastest / 1e6
        close = f"{each['error']:.1e}  {each['kl']:.1e}  {each['nll']:.4f}"
        lines.append(f"{each['model']:14} {each['variant']:14} {shown}  {each['steps_us']:12.1f}  {rate:4.2f}  {close}")
    return "\n".join(lines)


def main() -> None:
    """Measure the models and variants that were asked for, and print lines or JSON, one record a line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model", action="append", choices=sorted(SHAPES), help=f"model to measure; by default {', '.join(MODELS)}"
    )
    parser.add_argument("--variant", action="append", choices=sorted(decode_step.variants), help="variant of decode_step")
    parser.add_argument("--device", default="cuda:0", help="device of the model")
    parser.add_argument("--json", action="store_true", help="print JSON lines, and the table on stderr")
    given = parser.parse_args()
    measured = []
    for name in given.model or MODELS:
        measured += measure(name, given.variant or ("streaming", "graph", "captured", "eager"), torch.device(given.device))
        if given.device.startswith("cuda"):
            torch.cuda.empty_cache()
    (sys.stderr if given.json else sys.stdout).write(listing(measured) + "\n")
    if given.json:
        sys.stdout.writelines(json.dumps(each) + "\n" for each in measured)


if __name__ == "__main__":
    main()
