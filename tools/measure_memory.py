"""Measure the device memory of a model from its load to its texts, with random weights, and print it with its provenance.

    python tools/measure_memory.py --model Qwen3-8B --json

For each model of ``tools/model_shapes.py`` the script makes weights tensor by tensor, in the form that the variant
``streaming`` loads, captures the passes of prompts as a server does at its start, and generates behind prompts of several
lengths. It reports the most bytes of PyTorch's tensors and of its allocator at any time in each of these steps, all relative to
the weights' bytes. The caches of keys and values are named apart.

The script is run by hand on a GPU that no other process uses.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from onelaunch.decode.model.request import Request
from onelaunch.decode.model.weights import elements
from onelaunch.decode.runtime.engines import make_engine
from onelaunch.device.hardware import processors
from tools.measure_first_call import provenance
from tools.measure_prompts import random_packed
from tools.model_shapes import SHAPES

PROMPTS = (20, 500, 2000)
"""Lengths of the prompts, in tokens."""

TOKENS = 64
"""Tokens that are generated behind each prompt."""


def measure(name: str, device: torch.device) -> dict[str, Any]:
    """Return the record of a model on a GPU of compute capability 9."""
    config = SHAPES[name]
    begun = torch.cuda.memory_reserved(device)
    record: dict[str, Any] = {"model": name, "weights_bytes": elements(config) * config.dtype.itemsize}
    record["load"], weights = _peaks(lambda: random_packed(config, device), device, begun)
    engine: Any = make_engine(weights, "streaming")
    record["passes"], _ = _peaks(engine.prepare, device, begun)
    for length in PROMPTS:
        prompt = tuple(number % config.vocab_size for number in range(length))

        def generate(prompt: tuple[int, ...] = prompt) -> list[int]:
            return list(engine.run(Request(prompt, TOKENS)))

        record[f"generate_{length}"], _ = _peaks(generate, device, begun)
    position = 2 * config.num_hidden_layers * config.key_value_size * config.dtype.itemsize
    return {**record, "cache_bytes_per_position": position, "sms": processors(device), **provenance(device)}


def _peaks(run: Callable[[], Any], device: torch.device, begun: int) -> tuple[dict[str, int], Any]:
    """Return the most bytes of tensors and of the allocator while a function runs, and the function's result."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = run()
    torch.cuda.synchronize(device)
    tensors, allocator = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return {"tensors_bytes": tensors, "allocator_bytes": allocator - begun}, result


def listing(measured: list[dict[str, Any]]) -> str:
    """Return the lines that show measurements."""
    lines = [f"{'model':14} {'step':14} {'tensors':>8} {'allocator':>9}  (of the weights' bytes)"]
    for each in measured:
        for step, peaks in each.items():
            if isinstance(peaks, dict) and "tensors_bytes" in peaks:
                shares = [peaks[key] / each["weights_bytes"] for key in ("tensors_bytes", "allocator_bytes")]
                lines.append(f"{each['model']:14} {step:14} {shares[0]:8.3f} {shares[1]:9.3f}")
    return "\n".join(lines)


def main() -> None:
    """Measure the models that were asked for, and print lines or JSON, one record a line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", action="append", choices=sorted(SHAPES), help="model to measure; Qwen3-8B without it")
    parser.add_argument("--device", default="cuda:0", help="device of the model")
    parser.add_argument("--json", action="store_true", help="print JSON lines, and the table on stderr")
    given = parser.parse_args()
    measured = []
    for name in given.model or ["Qwen3-8B"]:
        measured.append(measure(name, torch.device(given.device)))
        torch.cuda.empty_cache()
    (sys.stderr if given.json else sys.stdout).write(listing(measured) + "\n")
    if given.json:
        sys.stdout.writelines(json.dumps(each) + "\n" for each in measured)


if __name__ == "__main__":
    main()
