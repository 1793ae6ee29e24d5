"""Train the tiny Qwen3 checkpoint that ships with the package on the sources of Python's standard library.

    python tools/train_tiny_qwen3.py --out src/onelaunch/decode/tiny     # about 18 minutes on one CPU core

The script needs the extra ``decode``. It trains an instance of Hugging Face's class, so that the checkpoint has the layout of
their checkpoints. The seed is fixed. The training text is the standard library of the Python that runs the script. Weights are
stored in bfloat16. The model card, ``README.md`` in that folder, states the constants below; ``tests/decode/test_tiny_card.py``
compares them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

END = "<|endoftext|>"
"""Token between files, which marks the end of a text."""

VOCABULARY = 2048
"""Number of tokens in the vocabulary, including the end token and all bytes."""

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
"""Sizes of the model (1.25 million parameters): heads of 64 channels, and two query heads per key head as in Qwen3-0.6B."""

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "lib2to3", "__pycache__"}
"""Folders that are left out: tests, tables, ``lib2to3`` (removed in Python 3.13), and packages that do not belong to Python."""

LENGTH, BATCH = 512, 4
"""Number of tokens in a sequence, and number of sequences in a step."""

LEARNING_RATE, WARM_UP = 5e-3, 100
"""Largest learning rate, and the number of warm-up steps. After these the rate falls along a cosine, to 2 % of the largest."""

STEPS, SEED = 2500, 0
"""Default number of steps, and default seed: those of the checkpoint in the package."""


def sources() -> list[str]:
    """Return the contents of the standard library's files of 201 to 399,999 characters, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(root.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(root).parts)]
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in paths)
    return [text for text in texts if 200 < len(text) < 400_000]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which can encode any text without loss."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, max_token_length=16, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train(tokens: torch.Tensor, end: int, steps: int, seed: int) -> Qwen3ForCausalLM:
    """Train a model on random sections of the token sequence: matrices with Muon, embedding and norms with AdamW."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, eos_token_id=end, bos_token_id=None, use_cache=False, attn_implementation="sdpa", **SHAPE
    )
    model = Qwen3ForCausalLM(config)
    embedding = model.get_input_embeddings().weight
    matrices = [weight for weight in model.parameters() if weight.dim() > 1 and weight is not embedding]
    others = [weight for weight in model.parameters() if weight.dim() == 1 or weight is embedding]
    optimizers = [
        torch.optim.Muon(matrices, lr=LEARNING_RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    started, mean = time.monotonic(), math.log(VOCABULARY)
    for step in range(steps):
        rate = LEARNING_RATE * min((step + 1) / WARM_UP, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        at = torch.randint(len(tokens) - LENGTH - 1, (BATCH,))
        batch = torch.stack([tokens[start : start + LENGTH] for start in at.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        mean = 0.98 * mean + 0.02 * float(loss.detach())
        if step % 50 == 0 or step == steps - 1:
            sys.stdout.write(f"step {step:5d}  loss {mean:.3f}  {time.monotonic() - started:5.0f} s\n")
            sys.stdout.flush()
    return model


def write(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the model folder in the format of Hugging Face's libraries."""
    out.mkdir(parents=True, exist_ok=True)
    model.config.use_cache = True
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.7, top_p=0.95, eos_token_id=model.config.eos_token_id
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    (out / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")


def main() -> None:
    """Read the training text, train the tokenizer and the model, and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    texts = sources()
    tokenizer = train_tokenizer(texts)
    end = tokenizer.token_to_id(END)
    tokens = [token for encoding in tokenizer.encode_batch(texts) for token in (*encoding.ids, end)]
    sys.stdout.write(f"{len(texts)} files, {sum(map(len, texts)):,} characters, {len(tokens):,} tokens\n")
    write(train(torch.tensor(tokens), end, options.steps, options.seed), tokenizer, options.out)


if __name__ == "__main__":
    main()
