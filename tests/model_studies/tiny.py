"""Tiny study of models for a CPU, with a stand-in of plain PyTorch for fla's model, whose kernels need a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from onelaunch.model_studies import build
from onelaunch.model_studies.declare import ModelStudy
from tests.integrations.standins import GatedLinearAttention, GatedMLP

CPU = torch.device("cpu")

STUDY = {
    "name": "tiny-study",
    "question": "Is it faster?",
    "rounds": 3,
    "models": [
        {
            "name": "tiny",
            "kind": "gla",
            "scale": "small",
            "width": 32,
            "heads": 2,
            "layers": 1,
            "vocabulary": 64,
            "batch": 2,
            "length": 12,
            "precision": "float32",
            "activities": ["training", "forward"],
            "steps": 20,
            "seeds": [0, 1],
            "gradient_length": 8,
        }
    ],
    "criteria": [
        {"name": "faster", "measure": "speedup", "model": "tiny", "at_least": 0.001},
        {"name": "memory", "measure": "peak_memory_ratio", "model": "tiny", "at_most": 0.9},
        {"name": "first", "measure": "first_step_seconds", "model": "tiny", "at_most": 30},
        {"name": "losses", "measure": "loss_distance", "model": "tiny", "at_most": 0.005},
        {"name": "end", "measure": "final_loss_ratio", "model": "tiny", "at_most": 1.005},
        {"name": "gradient", "measure": "gradient_error_ratio", "model": "tiny", "of": "layers", "at_most": 100},
    ],
}


def study(**changes):
    """Return the study, with changed keys of its model."""
    (model,) = STUDY["models"]
    return ModelStudy.model_validate({**STUDY, "models": [{**model, **changes}]})


def measuring(**changes):
    """Return the study without criteria, with changed keys of its model."""
    (model,) = STUDY["models"]
    return ModelStudy.model_validate({**STUDY, "models": [{**model, **changes}], "criteria": []})


class Block(nn.Module):
    """Block of fla's model."""

    def __init__(self, size):
        super().__init__()
        self.attn_norm = nn.RMSNorm(size.width, eps=build.NORM_EPS)
        head = size.width // size.heads
        self.attn = GatedLinearAttention(
            size.width, num_heads=size.heads, head_k_dim=head, head_v_dim=head, norm_eps=build.NORM_EPS
        )
        self.mlp_norm = nn.RMSNorm(size.width, eps=build.NORM_EPS)
        self.mlp = GatedMLP(size.width, 256)

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))[0]
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """Model with the parameter names and the call of fla's."""

    def __init__(self, size):
        super().__init__()
        self.model = nn.Module()
        self.model.embeddings = nn.Embedding(size.vocabulary, size.width)
        self.model.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.model.norm = nn.RMSNorm(size.width, eps=build.NORM_EPS)
        self.lm_head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, input_ids, labels=None, use_cache=None):
        x = self.model.embeddings(input_ids)
        for layer in self.model.layers:
            x = layer(x)
        logits = self.lm_head(self.model.norm(x))
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(logits=logits, loss=loss)


class Text:
    """Short text in place of Python's standard library."""

    def __init__(self, vocabulary, device):
        self.digest = "a short text"
        self.train = torch.randint(vocabulary, (64,), generator=torch.Generator().manual_seed(5), dtype=torch.uint8).to(device)
