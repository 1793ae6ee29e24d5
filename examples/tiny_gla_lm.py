"""Train a small language model made of ``onelaunch.nn`` layers for some seconds, then generate text with it.

    python examples/tiny_gla_lm.py [--steps 120] [--device cuda]

The model maps bytes to logits of the next byte, through blocks of norm, gated linear attention, norm and SwiGLU. The training
text is the standard library's ``os.py``. Generation reads the prompt in one call. After that each step uses the recurrent
states in a ``Cache``, whose size does not depend on the length of the sequence. ``onelaunch.nn`` provides layers and no
framework: the whole model is the classes ``Block`` and ``Model`` below. The documentation shows these, and
``tests/test_examples.py`` runs the script.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from onelaunch.device import hardware
from onelaunch.nn import Cache, GatedLinearAttention, SwiGLU

WIDTH, HEADS, LAYERS = 96, 2, 2
"""Channels between the blocks, heads of each block, and number of blocks."""

BATCH, LENGTH = 16, 128
"""Sequences in a training step, and bytes in each."""

TEMPERATURE = 0.6
"""Divisor of the logits when bytes are sampled."""


class Block(nn.Module):
    """Block of gated linear attention and a SwiGLU MLP, each with a norm before it and a residual connection."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(WIDTH)
        self.attn = GatedLinearAttention(hidden_size=WIDTH, num_heads=HEADS, layer_idx=layer_idx)
        self.mlp_norm = nn.RMSNorm(WIDTH)
        self.mlp = SwiGLU(WIDTH)

    def forward(self, x: torch.Tensor, cache: Cache | None) -> torch.Tensor:
        """Return the block's output for ``x``; both have shape ``[B, T, WIDTH]``."""
        mixed, _, _ = self.attn(self.attn_norm(x), past_key_values=cache, use_cache=cache is not None)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """Model from bytes to logits of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Block(index) for index in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, text: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """Return logits ``[B, T, 256]`` for the bytes ``text [B, T]``; with a cache, continue from its states."""
        x = self.embeddings(text)
        for layer in self.layers:
            x = layer(x, cache)
        return self.lm_head(self.norm(x))


def train(model: Model, text: torch.Tensor, steps: int) -> list[float]:
    """Train the model, and return the loss of each step in bits per byte."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,))
        rows = torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item() / math.log(2))
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:4d}   {losses[-1]:.2f} bits per byte", flush=True)
    return losses


@torch.no_grad()
def write(model: Model, prompt: bytes, count: int) -> bytes:
    """Continue a prompt by sampling ``count`` bytes at :data:`TEMPERATURE`."""
    device, cache = next(model.parameters()).device, Cache()
    logits = model(torch.tensor([list(prompt)], device=device), cache)
    written = bytearray()
    for _ in range(count):
        following = torch.multinomial(F.softmax(logits[:, -1] / TEMPERATURE, -1), 1)
        written.append(int(following))
        logits = model(following, cache)
    return bytes(written)


def main() -> None:
    """Read the arguments, train the model, and print a continuation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:0...")
    arguments = parser.parse_args()
    device = hardware.resolve(arguments.device)
    torch.manual_seed(0)
    text = torch.tensor(list(Path(os.__file__).read_bytes()), device=device)
    model = Model().to(device)
    start = time.perf_counter()
    losses = train(model, text, arguments.steps)
    seconds = time.perf_counter() - start
    print(f"{arguments.steps} steps on {device} in {seconds:.1f} s: {losses[0]:.2f} -> {losses[-1]:.2f} bits per byte")
    prompt = b"    def "
    print((prompt + write(model, prompt, 80)).decode(errors="replace"))


if __name__ == "__main__":
    main()
