"""Train a small linear RNN to continue Python source text in well under half a minute on two CPU cores.

    python examples/train_text.py [--steps 200] [--device cuda]

The training text is the standard library's ``os.py``. Two layers of ``onelaunch.ops.linear_rnn`` mix information over time, with
decays and gates that depend on the input. Generation passes only the state of each layer from one byte to the next.
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
from onelaunch.ops import linear_rnn

WIDTH, CHANNELS, LAYERS = 96, 128, 2
"""Channels between the layers, channels of the state of each layer, and number of layers."""

BATCH, LENGTH = 16, 128
"""Sequences in a training step, and bytes in each."""


class Layer(nn.Module):
    """Layer of norm, linear RNN and output projection, with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, CHANNELS) / math.sqrt(WIDTH))
        self.decay = nn.Linear(WIDTH, CHANNELS)
        self.gate = nn.Linear(WIDTH, CHANNELS)
        self.out = nn.Linear(CHANNELS, WIDTH, bias=False)
        nn.init.uniform_(self.decay.bias, -5.0, 0.0)  # spreads the decays of the channels from long to short memory

    def forward(self, x: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output ``[B, T, WIDTH]`` and the state ``[B, CHANNELS]`` after ``x``, from the given state or from zeros."""
        z = self.norm(x)
        log_decay = -F.softplus(self.decay(z))
        y, state = linear_rnn(z, self.weight, log_decay, self.gate(z), initial_state=state, output_final_state=True)
        return x + self.out(y), state


class Model(nn.Module):
    """Model from bytes to logits of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor, states: list[torch.Tensor] | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return logits ``[B, T, 256]`` for the bytes ``text [B, T]``, and the state of each layer after them."""
        x, left = self.embedding(text), []
        for index, layer in enumerate(self.layers):
            x, state = layer(x, states[index] if states else None)
            left.append(state)
        return self.head(x), left


def train(model: Model, text: torch.Tensor, steps: int) -> list[float]:
    """Train the model, and return the loss of each step in bits per byte."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,))
        rows = torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])
        logits, _ = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item() / math.log(2))
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step:4d}   {losses[-1]:.2f} bits per byte", flush=True)
    return losses


@torch.no_grad()
def write(model: Model, prompt: bytes, count: int) -> bytes:
    """Continue a prompt by the most likely byte, ``count`` times."""
    device = next(model.parameters()).device
    logits, states = model(torch.tensor([list(prompt)], device=device))
    written = bytearray()
    for _ in range(count):
        following = logits[:, -1:].argmax(-1)
        written.append(int(following))
        logits, states = model(following, states)
    return bytes(written)


def main() -> None:
    """Read the arguments, train the model, and print a continuation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
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
