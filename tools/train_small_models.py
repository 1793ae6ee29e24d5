"""Train a small model of each family on a short text, for tests that compare 512 tokens with those of transformers.

    python tools/train_small_models.py --out tests/decode/small_models     # about ten minutes on one CPU core

A model has about 40,000 parameters and learns the Zen of Python (PEP 20, in the public domain) by heart, so that it is sure
of each next token, and rounding does not decide. It is an instance of transformers' class, trained in float32 and stored in
bfloat16. The heads are those of models that people run: 3, 7 or 4 query heads for a key head. Beside the weights,
``texts.json`` holds the greedy texts of transformers in float32 with the stored weights: 512 tokens after each of several
prompts, with the smallest difference of the two largest logits. Tokens are bytes of ASCII. The script needs the extra
``decode``; the seed is fixed.
"""

from __future__ import annotations

import argparse
import codecs
import json
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY, CONTEXT = 128, 1024
"""Tokens, the bytes of ASCII, and positions of each model."""

COMMON = {
    "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": True,
}  # fmt: skip
"""Fields of every configuration, unless a family has others."""

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
        "head_dim": 8, "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    },
    "Qwen2": {
        "hidden_size": 56, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 7, "num_key_value_heads": 1,
        "head_dim": 8,
    },
    "Mistral": {
        "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 8, "sliding_window": None, "tie_word_embeddings": False,
    },
    "SmolLM3": {
        "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 16, "no_rope_layer_interval": 3,
    },
}  # fmt: skip
"""Configurations by family; what the class is called begins with the family's name."""

PROMPTS = 12
"""Prompts of each model, of which texts are stored: sections of the text from different places, of 5 to 60 tokens."""

NEW_TOKENS = 512
"""Length of the stored texts, without the prompts."""

LENGTH, BATCH, STEPS = 640, 4, 1200
"""Number of tokens in a sequence, sequences in a step, and steps."""

LEARNING_RATE, WARM_UP = 6e-3, 100
"""Largest learning rate, and the number of warm-up steps. After these the rate falls along a cosine to 1 % of the largest."""


def text() -> torch.Tensor:
    """Return the Zen of Python as bytes, ``[N]`` int64."""
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()):  # the module prints its text
        import this
    return torch.tensor(list(codecs.decode(this.s, "rot13").encode("ascii") + b"\n\n"))


def train(family: str, tokens: torch.Tensor, steps: int) -> Any:
    """Train a model of a family on sections of the text, which follows itself without end."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **FAMILIES[family]}, use_cache=False)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    endless, started = tokens.repeat(2 + LENGTH // len(tokens)), time.monotonic()
    for step in range(steps):
        rate = min((step + 1) / WARM_UP, 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        at = torch.randint(len(tokens), (BATCH,))
        batch = torch.stack([endless[start : start + LENGTH] for start in at.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 200 == 0 or step == steps - 1:
            sys.stdout.write(f"{family} step {step:5d}  loss {float(loss.detach()):.3f}  {time.monotonic() - started:5.0f} s\n")
            sys.stdout.flush()
    return model


@torch.no_grad()
def texts_of(model: Any, tokens: torch.Tensor) -> list[dict[str, Any]]:
    """Return the greedy text of a model after each prompt, and the smallest difference of the two largest logits in it."""
    found = []
    for number in range(PROMPTS):
        start, length = number * len(tokens) // PROMPTS, 5 * (number + 1)
        prompt = tokens.repeat(2)[start : start + length][None]
        sequence = model.generate(prompt, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)
        top = model(sequence).logits[0, length - 1 : -1].topk(2).values
        margin = float((top[:, 0] - top[:, 1]).min())
        found.append({"prompt": prompt[0].tolist(), "text": sequence[0, length:].tolist(), "margin": round(margin, 3)})
    return found


def main() -> None:
    """Train the models and write their folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the models' folders")
    parser.add_argument("--family", action="append", choices=sorted(FAMILIES), help="family to train; all without it")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    tokens = text()
    for family in options.family or FAMILIES:
        folder = options.out / family.lower()
        shutil.rmtree(folder, ignore_errors=True)
        model = train(family, tokens, options.steps).to(torch.bfloat16)
        model.config.use_cache = True
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        stored = getattr(transformers, f"{family}ForCausalLM").from_pretrained(folder, dtype=torch.float32).eval()
        texts = texts_of(stored, tokens)
        (folder / "texts.json").write_text(json.dumps(texts, separators=(",", ":")) + "\n")
        sys.stdout.write(f"{family}: margins {sorted((each['margin'] for each in texts), reverse=True)}\n")


if __name__ == "__main__":
    main()
