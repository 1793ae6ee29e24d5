"""Train a language model of gated linear attention on the source text of Python's standard library.

    python examples/train_lm.py                                   # minutes on a CPU, seconds per 1000 steps on a GPU
    python examples/train_lm.py --steps 1000 --resume             # continue from the last checkpoint
    python examples/train_lm.py --size 350m --compile --impl fla  # fla's own model, from the same initial weights

The model has the architecture and the parameter names of ``GLAForCausalLM`` of flash-linear-attention (fla) 0.6.0. With
``--impl onelaunch`` it is made of ``onelaunch.nn`` layers, by the classes ``Block``, ``Backbone`` and ``Model`` below. With
``--impl fla`` it is fla's class. Either loads the weights of the other (``--weights``).

A run writes to its folder (``--out``): ``log.jsonl`` with loss, gradient norm and seconds of each step, ``checkpoint.pt``,
``summary.json``, and the loss curve as ``loss.png``, or as ``loss.txt`` without matplotlib. At the end it prints a sample. Each
token of the sample is computed from the recurrent states of the layers, whose size does not depend on the length.

Batches depend only on the seed and the step, and the learning rate only on the step. So on a CPU a run that was stopped and
resumed gives the same bits as one that was not.

Under torchrun, ``--tensor-parallel`` divides the heads of each layer among processes, ``--context-parallel`` the tokens of each
sequence, and ``--fsdp`` the parameters, see ``sharding.py``. Any number of processes continues the checkpoint of another number.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import resource
import sysconfig
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from onelaunch.device import hardware
from onelaunch.nn import Cache, GatedLinearAttention, SwiGLU

NORM_EPS = 1e-6
"""Epsilon of all norms, the default of fla's ``GLAConfig``. The default of the layers, ours and fla's, is 1e-5."""

PIECE = re.compile(rb" ?[A-Za-z_]+|\n *|[0-9]+| +|.", re.DOTALL)
"""Pattern of the pieces that text is cut into: words with the space before them, indentation, numbers, other bytes."""

REPORT_EVERY = 10
"""Steps between two reads of the losses. A read waits for the device, so reading after each step would slow training down."""


@dataclass(frozen=True)
class Size:
    """Shape of a model, and the batch, sequence length and learning rate that it is trained with by default."""

    width: int
    heads: int
    layers: int
    vocabulary: int  # the 256 bytes, then the most frequent pieces of the training text
    batch: int
    length: int
    rate: float


SIZES = {
    "tiny": Size(width=96, heads=2, layers=2, vocabulary=256, batch=16, length=128, rate=4e-3),
    "30m": Size(width=512, heads=4, layers=8, vocabulary=256, batch=32, length=1024, rate=1e-3),
    "350m": Size(width=1024, heads=8, layers=20, vocabulary=32_000, batch=8, length=2048, rate=4e-4),
}
"""Models by name. The larger two have 30 and 344 million parameters, and heads of 128 channels."""


class Block(nn.Module):
    """Block of gated linear attention and a SwiGLU MLP, each with a norm before it and a residual connection."""

    recompute = False  # whether activations are computed again in the backward pass instead of kept
    context: Any = None  # slices of the sequences on other processes, set by sharding.py

    def __init__(self, size: Size, layer_idx: int) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(size.width, eps=NORM_EPS)
        heads = {"expand_k": 1.0, "num_heads": size.heads}
        self.attn = GatedLinearAttention(hidden_size=size.width, **heads, norm_eps=NORM_EPS, layer_idx=layer_idx)
        self.mlp_norm = nn.RMSNorm(size.width, eps=NORM_EPS)
        self.mlp = SwiGLU(size.width)

    def forward(self, x: torch.Tensor, cache: Cache | None) -> torch.Tensor:
        """Return the block's output for ``x``; both have shape ``[B, T, width]``."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.run, x, cache, use_reentrant=False)
        return self.run(x, cache)

    def run(self, x: torch.Tensor, cache: Cache | None) -> torch.Tensor:
        """Return the block's output; see :meth:`forward`."""
        x_normed = self.attn_norm(x)
        mixed, _, _ = self.attn(x_normed, past_key_values=cache, use_cache=cache is not None, mesh=self.context)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x))


class Backbone(nn.Module):
    """Model without its head: embeddings, blocks and the last norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Block(size, index) for index in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=NORM_EPS)

    def forward(self, tokens: torch.Tensor, cache: Cache | None) -> torch.Tensor:
        """Return the last hidden states ``[B, T, width]`` of ``tokens [B, T]``."""
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x, cache)
        return self.norm(x)


class Model(nn.Module):
    """Model from tokens to logits of the next token."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = Backbone(size)
        self.lm_head = nn.Linear(size.width, size.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """Return logits ``[B, T, vocabulary]`` for ``tokens [B, T]``; with a cache, continue from its states."""
        return self.lm_head(self.model(tokens, cache))


class CrossEntropy(torch.autograd.Function):
    """Cross entropy that overwrites the logits with their gradient, as the loss of fla's model does.

    With 32,000 logits per token, copies of them in float32 would take more memory than all layers.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Return the sum over those ``targets [N]`` that are not negative, over ``count``; ``logits`` are ``[N, vocabulary]``."""
        total = torch.zeros((), device=logits.device)
        for part, wanted in zip(logits.split(2048), targets.split(2048), strict=True):
            used, at = (wanted >= 0)[:, None], wanted.clamp_min(0)[:, None]
            log_p = part.float().log_softmax(-1)
            total -= (log_p.gather(1, at) * used).sum()
            gradient = log_p.exp_().scatter_add_(1, at, -torch.ones_like(at, dtype=torch.float32))
            part.copy_(gradient.mul_(used / count))
        ctx.save_for_backward(logits.detach())  # sharded logits are views, which autograd lets nobody change in place
        return total / count

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of the logits."""
        return ctx.saved_tensors[0].mul_(gradients[0]), None, None


def loss_of(model: Callable[..., Any], rows: torch.Tensor, impl: str, sharding: Any = None) -> torch.Tensor:
    """Return the mean loss, in nats, of predicting each token of ``rows [B, T]`` from the tokens before it.

    With a ``sharding`` these are the rows of all processes, and the mean of their results is that loss.
    """
    if impl == "fla":
        return model(input_ids=rows, labels=rows).loss
    targets = F.pad(rows[:, 1:], (0, 1), value=-100)  # the last token of a row has no next one
    count = (targets >= 0).sum()
    if sharding is not None:
        rows, targets, count = sharding.part(rows), sharding.part(targets), count / sharding.shares
    logits = model(rows)
    if hasattr(logits, "to_local"):  # a DTensor that is whole on every rank
        logits = logits.to_local()
    return CrossEntropy.apply(logits.flatten(0, 1), targets.flatten(), count)  # pyrefly: ignore[bad-return]


def build(impl: str, size: Size, seed: int) -> nn.Module:
    """Return a new model on the CPU. For one seed, both implementations begin with the same weights."""
    torch.manual_seed(seed)
    model = Model(size)
    if impl == "onelaunch":
        return model
    try:
        from fla.models import GLAConfig, GLAForCausalLM
    except ImportError as problem:
        advice = "Run: pip install flash-linear-attention==0.6.0, or take --impl onelaunch."
        raise SystemExit(f"--impl fla cannot import fla: {problem}. {advice}") from problem
    shape = {"hidden_size": size.width, "num_heads": size.heads, "num_hidden_layers": size.layers, "vocab_size": size.vocabulary}
    theirs = GLAForCausalLM(GLAConfig(**shape, expand_k=1.0, norm_eps=NORM_EPS))
    theirs.load_state_dict(model.state_dict())
    return theirs


class Text:
    """Training text, held-out text (every twentieth file), and the vocabulary that cuts them into tokens."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        library = Path(sysconfig.get_paths()["stdlib"])
        unused = {"site-packages", "dist-packages", "test", "tests"}
        paths = sorted(path for path in library.rglob("*.py") if not unused & set(path.relative_to(library).parts))
        files = [path.read_bytes() for path in paths]
        held_out, train = b"\n".join(files[::20]), b"\n".join([file for at, file in enumerate(files) if at % 20])
        self.digest = hashlib.sha256(held_out + train).hexdigest()
        self.pieces = [bytes([byte]) for byte in range(256)]
        if vocabulary > len(self.pieces):
            counts = Counter(piece for piece in PIECE.findall(train) if len(piece) > 1)
            self.pieces += sorted(counts, key=lambda piece: (-counts[piece], piece))[: vocabulary - len(self.pieces)]
        self.ids = {piece: at for at, piece in enumerate(self.pieces)}
        self.train, self.held_out = self.encode(train).to(device), self.encode(held_out).to(device)
        self.bytes_per_token = len(held_out) / len(self.held_out)

    def encode(self, text: bytes) -> torch.Tensor:
        """Return the tokens of a text, uint8 if all pieces are bytes, else int32. An unknown piece becomes its bytes."""
        if len(self.pieces) == 256:
            return torch.frombuffer(bytearray(text), dtype=torch.uint8)
        tokens = array("i")
        for piece in PIECE.findall(text):
            token = self.ids.get(piece)
            tokens.extend(piece if token is None else (token,))
        return torch.tensor(tokens, dtype=torch.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens. Ids above the last piece, which no text has, are left out."""
        return b"".join([self.pieces[token] for token in tokens if token < len(self.pieces)]).decode(errors="replace")


def batch_of(tokens: torch.Tensor, count: int, length: int, seed: int, step: int) -> torch.Tensor:
    """Return the ``[count, length]`` tokens of a step, drawn by the seed and the step alone, on the device of ``tokens``."""
    generator = torch.Generator().manual_seed((seed << 32) + step)
    starts = torch.randint(len(tokens) - length, (count, 1), generator=generator)
    starts = starts.to(tokens.device, non_blocking=True)  # a blocking copy would wait for the steps before
    return tokens[starts + torch.arange(length, device=tokens.device)].long()


def peak_bytes(device: torch.device) -> int:
    """Return the largest number of bytes allocated on a GPU so far, or the largest resident size of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


class Run:
    """Training run: a model with its optimizer, text, log and folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.size = options, SIZES[options.size]
        self.device = hardware.resolve(options.device)
        self.folder = Path(options.out or f"runs/{options.size}-{options.impl}")
        self.sharding: Any = None
        asked = options.fsdp or options.tensor_parallel > 1 or options.context_parallel > 1
        if "RANK" in os.environ or asked or (self.folder / "checkpoint").exists():
            # Beside this file. One process that begins anew does not need it.
            from sharding import Sharding  # pyrefly: ignore[missing-import]

            self.sharding = Sharding(options, self.device)
            self.device = self.sharding.device
        self.writes = self.sharding is None or self.sharding.rank == 0
        self.checkpoint = self.folder / ("checkpoint.pt" if self.sharding is None else "checkpoint")
        if options.resume != self.checkpoint.exists():
            advice = "a checkpoint. Continue it with --resume, or name another folder with --out"
            raise SystemExit(f"{self.folder} has {'no checkpoint to resume' if options.resume else advice}.")
        self.batch, self.length = options.batch or self.size.batch, options.length or self.size.length
        self.rate = options.rate or self.size.rate
        low = "autocast" if self.device.type == "cuda" else "float32"
        self.precision = low if options.precision == "auto" else options.precision
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "autocast")
        self.model = build(options.impl, self.size, options.seed)
        if options.impl == "fla" and self.device.type == "cpu":
            raise SystemExit("--impl fla needs a GPU, since fla's kernels do not run on a CPU; take --impl onelaunch.")
        if options.weights:
            self.model.load_state_dict(torch.load(options.weights, map_location="cpu", weights_only=True)["model"])
        for block in self.model.modules():
            if isinstance(block, Block):
                block.recompute = options.recompute
        self.model.to(self.device, torch.bfloat16 if self.precision == "bfloat16" else torch.float32)
        if self.sharding is not None:
            self.sharding.apply(self.model, self.length, mixed=self.precision == "mixed")
        self.text = Text(self.size.vocabulary, self.device)
        matrices = [each for each in self.model.parameters() if each.dim() > 1]
        vectors = [each for each in self.model.parameters() if each.dim() <= 1]  # weights of norms, and biases
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=self.rate, betas=(0.9, 0.95), fused=self.device.type == "cuda")
        self.forward: Callable[..., Any] = torch.compile(self.model) if options.compile else self.model
        self.log: list[dict[str, float]] = []
        self.first_step_seconds = 0.0

    def settings(self) -> dict[str, Any]:
        """Return what must be the same in a checkpoint and in the run that continues it."""
        chosen = {name: getattr(self.options, name) for name in ("size", "impl", "seed", "warmup")}
        shape = {"batch": self.batch, "length": self.length, "precision": self.precision, "rate": self.rate}
        return {**chosen, **shape, "text": self.text.digest}

    def save(self, step: int) -> None:
        """Write the log and the checkpoint after ``step`` steps. The checkpoint replaces the last one when it is complete."""
        if self.writes:
            lines = "".join([json.dumps(entry) + "\n" for entry in self.log])
            (self.folder / "log.jsonl").write_text(lines, encoding="utf-8")
        state = {"step": step, "settings": self.settings()}
        if self.sharding is not None:
            self.sharding.save(self.folder, state, self.model, self.optimizer)
            return
        tensors = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, **tensors}, self.folder / "checkpoint.tmp")
        (self.folder / "checkpoint.tmp").replace(self.checkpoint)

    def load(self) -> int:
        """Load the checkpoint in the folder; return the number of steps that it has taken."""
        now = self.settings()
        if self.sharding is not None:
            state = self.sharding.load(self.folder, {"step": 0, "settings": dict(now)}, self.model, self.optimizer)
        else:
            state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        if changed := [f"{name} {value}" for name, value in state["settings"].items() if now[name] != value]:
            raise SystemExit(f"--resume needs the settings of the checkpoint in {self.folder}: {', '.join(changed)}.")
        if self.sharding is None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        lines = (self.folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
        self.log = [entry for entry in map(json.loads, lines) if entry["step"] < state["step"]]
        return state["step"]

    def step(self, step: int) -> torch.Tensor:
        """Train one step; return the loss and the norm of the gradient, ``[2]``, without waiting for the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, (step + 1) / max(self.options.warmup, 1))
        rows = batch_of(self.text.train, self.batch, self.length, self.options.seed, step)
        with self.autocast:
            loss = loss_of(self.forward, rows, self.options.impl, self.sharding)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.sharding is not None:
            loss, norm = self.sharding.mean(loss), self.sharding.whole(norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack((loss.detach().float(), norm.float()))

    def train(self) -> None:
        """Train from the start or from the checkpoint up to the wanted number of steps."""
        begin = self.load() if self.options.resume else 0
        self.folder.mkdir(parents=True, exist_ok=True)
        pending: list[torch.Tensor] = []
        since = time.perf_counter()
        for step in range(begin, self.options.steps):
            pending.append(self.step(step))
            save = (step + 1) % self.options.save_every == 0 or step + 1 == self.options.steps
            if step > begin and (step + 1) % REPORT_EVERY and not save:
                continue
            values = torch.stack(pending).tolist()  # waits for the device
            seconds = (time.perf_counter() - since) / len(values)
            self.first_step_seconds = self.first_step_seconds or seconds
            for at, (loss, norm) in enumerate(values, start=step + 1 - len(values)):
                self.log.append({"step": at, "loss": loss, "gradient_norm": norm, "seconds": seconds})
            speed, mebibytes = self.batch * self.length / seconds, peak_bytes(self.device) / 2**20
            text = f"loss {values[-1][0]:.4f}   {speed:9,.0f} tokens/s   peak {mebibytes:,.0f} MiB"
            if self.writes:
                print(f"step {step + 1:6d}   {text}", flush=True)
            if save:
                self.save(step + 1)
            pending, since = [], time.perf_counter()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss of four batches of held-out text, in nats per token."""
        batches = [batch_of(self.text.held_out, self.batch, self.length, 0, at) for at in range(4)]
        with self.autocast:
            if self.sharding is not None:
                losses = [self.sharding.mean(loss_of(self.model, rows, "onelaunch", self.sharding)) for rows in batches]
            else:
                losses = [loss_of(self.model, rows, self.options.impl) for rows in batches]
        return sum(loss.item() for loss in losses) / len(batches)

    @torch.no_grad()
    def sample(self, prompt: str, count: int, temperature: float = 0.6) -> str:
        """Continue a prompt by ``count`` sampled tokens. After the prompt, each call takes one token and the layers' states."""
        if self.sharding is not None:  # one process samples, with a model of its own
            state = self.sharding.whole_state(self.model)
            if not self.writes:
                return ""
            dtype = next(self.model.parameters()).dtype
            self.model = build("onelaunch", self.size, self.options.seed).to(self.device, dtype)
            self.model.load_state_dict(state)
        self.model.eval()
        generator = torch.Generator().manual_seed(self.options.seed)
        written = self.text.encode(prompt.encode()).tolist()
        following, cache = torch.tensor([written], device=self.device), Cache()
        for _ in range(count):
            with self.autocast:
                if self.options.impl == "fla":
                    result = self.model(following, past_key_values=cache or None, use_cache=True)
                    logits, cache = result.logits, result.past_key_values
                else:
                    logits = self.model(following, cache)
            chances = F.softmax(logits[0, -1].float().cpu() / temperature, -1)
            written.append(int(torch.multinomial(chances, 1, generator=generator)))
            following = torch.tensor([written[-1:]], device=self.device)
        return self.text.decode(written)

    def summary(self) -> dict[str, Any]:
        """Return the results of the run, and what it ran on."""
        held_out = self.held_out_loss()
        latest = self.log[-(len(self.log) + 1) // 2 :]
        return {
            **self.settings(),
            "model": asdict(self.size),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "device": hardware.describe(str(self.device)).name,
            "torch": torch.__version__,
            "compile": self.options.compile,
            "steps": len(self.log),
            "first_step_seconds": self.first_step_seconds,
            "tokens_per_second": self.batch * self.length / median([entry["seconds"] for entry in latest]),
            "peak_bytes": peak_bytes(self.device),
            "loss": self.log[-1]["loss"],
            "held_out_loss": held_out,
            "held_out_bits_per_byte": held_out / math.log(2) / self.text.bytes_per_token,
        }


def draw(losses: list[float], folder: Path) -> Path:
    """Draw the loss of each step to ``loss.png``, or to ``loss.txt`` without matplotlib; return the file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        points = losses[:: -(-len(losses) // 24)]
        lines = [f"{loss:8.3f} {'#' * round(60 * loss / max(points))}\n" for loss in points]
        (folder / "loss.txt").write_text("".join(lines), encoding="utf-8")
        return folder / "loss.txt"
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=0.8)
    axes.set(xlabel="step", ylabel="training loss (nats per token)")
    axes.grid(alpha=0.3)
    figure.savefig(folder / "loss.png", dpi=120)
    return folder / "loss.png"


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the arguments, train, and write and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--impl", choices=("onelaunch", "fla"), default="onelaunch", help="whose model is trained")
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:0...")
    said = "bfloat16: of parameters and optimizer too; auto: autocast to bfloat16 on a GPU, else float32"
    said += "; mixed: FSDP2's, parameters in bfloat16 and sums of gradients in float32"
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16", "autocast", "mixed"), default="auto", help=said)
    parser.add_argument("--steps", type=int, default=500, help="steps to have taken at the end")
    parser.add_argument("--batch", type=int, help="sequences in a step")
    parser.add_argument("--length", type=int, help="tokens of a sequence")
    parser.add_argument("--rate", type=float, help="learning rate after the warm-up")
    parser.add_argument("--warmup", type=int, default=20, help="steps in which the learning rate grows to --rate")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights, batches and sample")
    parser.add_argument("--out", help="folder of the run; default: runs/SIZE-IMPL")
    parser.add_argument("--weights", help="checkpoint, of either implementation, whose weights to start from")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in the folder")
    parser.add_argument("--save-every", type=int, default=500, help="steps between two checkpoints")
    parser.add_argument("--sample", type=int, default=200, help="tokens of the sample")
    parser.add_argument("--recompute", action="store_true", help="compute activations again in the backward pass")
    said = "processes that share the heads of a layer, under torchrun; each has its part of T between the layers"
    parser.add_argument("--tensor-parallel", type=int, default=1, help=said)
    said = "processes that share the tokens of a sequence, under torchrun with --fsdp"
    parser.add_argument("--context-parallel", type=int, default=1, help=said)
    parser.add_argument("--fsdp", action="store_true", help="shard parameters and batch over the other processes by FSDP2")
    options = parser.parse_args(arguments)
    for name in ("steps", "tensor_parallel", "context_parallel"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1.")
    if options.precision == "mixed" and not options.fsdp:
        parser.error("--precision mixed needs --fsdp, whose mixed precision it is.")
    run = Run(options)
    run.train()
    summary, sample = run.summary(), run.sample("def ", run.options.sample)
    if not run.writes:
        return
    (run.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    picture = draw([entry["loss"] for entry in run.log], run.folder)
    print(
        f"{summary['steps']} steps of {summary['parameters']:,} parameters on {summary['device']}: "
        f"loss {run.log[0]['loss']:.3f} -> {summary['loss']:.3f}, held out {summary['held_out_loss']:.3f} "
        f"({summary['held_out_bits_per_byte']:.2f} bits per byte), {summary['tokens_per_second']:,.0f} tokens/s; curve: {picture}"
    )
    if picture.suffix == ".txt":
        print(picture.read_text(encoding="utf-8"))
    print(sample)


if __name__ == "__main__":
    main()
