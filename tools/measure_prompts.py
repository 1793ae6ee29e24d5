"""Measure the time from a prompt to the logits after it, op by op and by captured passes, and print it with its provenance.

    python tools/measure_prompts.py --packed --json

For each model of :data:`MODELS`, with random weights, and each length the script takes the wall time from the call until the
device has finished: the median of several reads, each with new tokens and an empty cache that is made before. The capture of a
size is measured apart, once. A length that no earlier read had shows whether a pass serves every length of its size. Peak memory
is that of the device beside the weights, with all passes captured. With ``--packed`` the weights are the stream of the variant
``streaming`` alone, as ``Model.from_pretrained`` loads them: the matrices are copied out of it, or passes of at most
``--from-stream`` tokens multiply by it.

The script is run by hand on an otherwise idle GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from onelaunch.decode.model.cache import KVCache
from onelaunch.decode.model.config import ModelConfig
from onelaunch.decode.model.forward import prefill
from onelaunch.decode.model.weights import ModelWeights, parts, random_weights
from onelaunch.decode.plan.levels import plan_for
from onelaunch.decode.runtime import prompts
from onelaunch.decode.runtime.packed import PackedWeights, packed_from
from onelaunch.decode.runtime.prompts import PromptPasses, size_of
from onelaunch.device.hardware import processors
from tools.measure_first_call import provenance
from tools.model_shapes import SHAPES

MODELS = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Llama-3.2-1B")
"""Models of :data:`~tools.model_shapes.SHAPES` that are measured unless others are named."""

LENGTHS = (16, 64, 128, 500, 512, 1000, 2048)
"""Numbers of tokens. 500 and 512 share a pass."""

READS = 9
"""Reads of a length, of which the median is taken."""


@torch.no_grad()
def measure(name: str, device: torch.device, *, packed: bool = False) -> list[dict[str, Any]]:
    """Return a record for each length of a model."""
    config = SHAPES[name]
    weights = random_packed(config, device) if packed else random_weights(config, 0, device)
    weights_bytes = _allocated(device)
    passes = PromptPasses(weights) if device.type == "cuda" else None
    found = []
    for length in LENGTHS:
        op_by_op, error = _median(lambda tokens, cache: prefill(weights, tokens, cache), config, length, device), None
        record: dict[str, Any] = {"model": name, "packed": packed, "tokens": length, "op_by_op_ms": op_by_op}
        if packed:
            record["from_stream"] = prompts.MOST_TOKENS
        if passes is not None and size_of(config, length) is not None:
            for key in ("first_ms", "capture_ms"):  # a size's first prompt is prefilled in eager mode, its second captures
                begun = time.perf_counter()
                _prefill_by_pass(passes, weights)(_tokens(config, length, 0, device), KVCache.empty(config, length, device))
                torch.cuda.synchronize(device)
                record[key] = 1e3 * (time.perf_counter() - begun)
            record["pass_ms"] = _median(_prefill_by_pass(passes, weights), config, length, device)
            error = _difference(passes, weights, config, length, device)
        found.append({**record, "difference": error})
    extra = _allocated(device) - weights_bytes
    return [{**each, "bytes_beside_weights": extra, **provenance(device)} for each in found]


def random_packed(config: ModelConfig, device: torch.device) -> PackedWeights:
    """Return random weights packed for the variant ``streaming``, made tensor by tensor, so that they exist once at any time."""
    shapes = {name: shape for name, _, shape in parts(config)}
    generator = torch.Generator(device).manual_seed(0)

    def read(name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        shape = (len(range(*slice(begin, end).indices(shapes[name][0]))), *shapes[name][1:])
        drawn = torch.randn(shape, generator=generator, device=device, dtype=config.dtype)
        return drawn.mul_(0.1).add_(1) if "norm" in name else drawn.div_(math.sqrt(shape[-1]))

    return packed_from(read, plan_for(config, "streaming", processors(device)), device)


def _prefill_by_pass(passes: PromptPasses, weights: ModelWeights) -> Callable[[torch.Tensor, KVCache], Any]:
    """Return the function that prefills a prompt by its pass."""
    return lambda tokens, cache: passes.prefill(weights, tokens, cache, lambda: None)


def _median(read: Callable[[torch.Tensor, KVCache], Any], config: ModelConfig, length: int, device: torch.device) -> float:
    """Return the median milliseconds of a read, over :data:`READS` of them after a first one."""
    times = []
    for number in range(READS + 1):
        tokens, cache = _tokens(config, length, number, device), KVCache.empty(config, length, device)
        _finish(device)
        begun = time.perf_counter()
        read(tokens, cache)
        _finish(device)
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times[1:])


def _difference(passes: PromptPasses, weights: ModelWeights, config: ModelConfig, length: int, device: torch.device) -> float:
    """Return the norm-wise difference of the logits of a pass from those of launches op by op."""
    tokens = _tokens(config, length, 99, device)
    ours = _prefill_by_pass(passes, weights)(tokens, KVCache.empty(config, length, device))[0]
    plain = prefill(weights, tokens, KVCache.empty(config, length, device))[0]
    return float((ours - plain).norm() / plain.norm())


def _tokens(config: ModelConfig, length: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return random tokens ``[length]``."""
    return torch.randint(0, config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).to(device)


def _finish(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocated(device: torch.device) -> int:
    """Return the bytes that PyTorch holds on the device, free blocks of its cache included."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def listing(measured: list[dict[str, Any]]) -> str:
    """Return the lines that show measurements."""
    lines = [f"{'model':14} {'tokens':>6}  op by op  captured     first   capture  difference  (ms)"]
    for each in measured:
        shown = [
            f"{each[key]:8.2f}" if each.get(key) is not None else "       -" for key in ("pass_ms", "first_ms", "capture_ms")
        ]
        difference = "-" if each["difference"] is None else f"{each['difference']:.1e}"
        lines.append(f"{each['model']:14} {each['tokens']:6}  {each['op_by_op_ms']:8.2f}  {'  '.join(shown)}  {difference:>10}")
    return "\n".join(lines)


def main() -> None:
    """Measure the models that were asked for, and print lines or JSON, one record a line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model", action="append", choices=sorted(SHAPES), help=f"model to measure; by default {', '.join(MODELS)}"
    )
    parser.add_argument("--device", default="cuda:0", help="device of the model")
    parser.add_argument("--packed", action="store_true", help="keep the weights once, as the stream of the variant streaming")
    parser.add_argument("--from-stream", type=int, default=prompts.MOST_TOKENS, help="most tokens multiplied by the stream")
    parser.add_argument("--json", action="store_true", help="print JSON lines, and the table on stderr")
    given = parser.parse_args()
    prompts.MOST_TOKENS = given.from_stream
    measured = []
    for name in given.model or MODELS:
        measured += measure(name, torch.device(given.device), packed=given.packed)
        if given.device.startswith("cuda"):
            torch.cuda.empty_cache()
    (sys.stderr if given.json else sys.stdout).write(listing(measured) + "\n")
    if given.json:
        sys.stdout.writelines(json.dumps(each) + "\n" for each in measured)


if __name__ == "__main__":
    main()
