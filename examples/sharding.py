"""The ranks of ``train_lm.py`` under torchrun: their mesh, the model's shards and distributed checkpoints.

    torchrun --nproc-per-node 8 examples/train_lm.py --size 350m --tensor-parallel 2 --fsdp    # 4 groups of 2 GPUs
    torchrun --nproc-per-node 8 examples/train_lm.py --size 350m --context-parallel 4 --fsdp --length 65536

``train_lm.py`` makes a :class:`Sharding` of its options, and asks it for what differs between ranks. All but the context is
PyTorch: a DeviceMesh, tensor parallelism by ``parallelize_module``, FSDP2, and ``torch.distributed.checkpoint``. The ranks that
share heads get the same tokens. Those that share a context get the same rows of a batch, and each other tokens of them. Each
group of such ranks gets other rows.
"""

from __future__ import annotations

import argparse
import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from onelaunch.nn.parallel import separate_weights, tensor_parallel_plan
from onelaunch.parallel import context


def shard_heads(model: nn.Module, mesh: Any) -> None:
    """Shard the model of ``train_lm.py`` by heads and channels, and the tokens between layers by time.

    Every parameter becomes a DTensor on the mesh, as an optimizer needs it. T must be a multiple of the number of ranks.
    """
    plan = tensor_parallel_plan(model, input_layouts=Shard(1), output_layouts=Shard(1))
    plan["model.embeddings"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    for name, module in model.named_modules():
        if name.endswith("norm") and ".attn." not in name and isinstance(module, nn.RMSNorm):
            plan[name] = SequenceParallel(use_local_output=True)
    plan["lm_head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate(), use_local_output=False)
    parallelize_module(model, mesh, plan)


class Sharding:
    """Ranks of a run, in groups of ``context_parallel`` times ``tensor_parallel``. One process needs no torchrun.

    The ``tensor_parallel`` ranks share the heads of each layer, the ``context_parallel`` the tokens of each sequence.

    Args:
        options: Arguments of ``train_lm.py``.
        device: Device of the run; with GPUs each rank takes that of its ``LOCAL_RANK``.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.ranks, self.rank = (int(os.environ.get(name, least)) for name, least in (("WORLD_SIZE", "1"), ("RANK", "0")))
        self.fsdp, self.device = options.fsdp, device
        heads, self.parts = options.tensor_parallel, options.context_parallel
        both = f"--tensor-parallel is {heads} and --context-parallel {self.parts}"
        if (heads > 1 or self.parts > 1 or self.fsdp) and "RANK" not in os.environ:
            command = "torchrun --nproc-per-node N examples/train_lm.py ..."
            raise SystemExit(f"--fsdp, --tensor-parallel and --context-parallel need torchrun: {command}")
        if self.ranks % (heads * self.parts):
            raise SystemExit(f"{both}; their product must divide the number of processes, {self.ranks}.")
        self.shares = self.ranks // heads  # of the tokens of a batch
        self.groups = self.shares // self.parts
        if self.ranks > heads and not self.fsdp:
            raise SystemExit(f"{both}, with {self.ranks} processes: add --fsdp, which adds up the gradients.")
        if options.impl == "fla" or options.compile:
            raise SystemExit("Several processes need --impl onelaunch, without --compile.")
        self.mesh = None
        if "RANK" in os.environ:
            if device.type == "cuda":
                self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
                torch.cuda.set_device(self.device)
            if not distributed.is_initialized():
                backend = "nccl" if device.type == "cuda" else "gloo"
                distributed.init_process_group(backend, timeout=timedelta(minutes=10))
            shape, names = (self.groups, self.parts, heads), ("data", "context", "tensor")
            self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
            self.shards = self.mesh["data", "context"]._flatten("shards")  # noqa: SLF001 - FSDP2's ranks, each with other tokens
            self.mesh._flatten("all")  # noqa: SLF001 - so that DTensors sum the gradient's norm over all ranks at once

    def apply(self, model: nn.Module, length: int, *, mixed: bool) -> None:
        """Shard a model by heads, sequences of ``length`` tokens by their slices, then parameters by FSDP2.

        With ``mixed``, parameters are gathered in bfloat16, and gradients summed in float32.
        """
        separate_weights(model)  # so that checkpoints have the same names with any number of ranks
        if self.mesh is None:
            return
        if self.mesh["tensor"].size() > 1:
            shard_heads(model, self.mesh["tensor"])
        blocks = list(model.get_submodule("model.layers").children())
        if self.parts > 1:
            slices = context(self.mesh["context"], length // self.parts, device=self.device)
            for block in blocks:
                block.context = slices  # pyrefly: ignore[bad-argument-type]
        if not self.fsdp:
            return
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
        for block in (*blocks, model):
            fully_shard(block, mesh=self.shards, mp_policy=policy)

    def part(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the tokens of a batch ``[B, T]`` that this rank trains with: rows of its group, of which it may have a slice."""
        if self.mesh is None:
            return batch
        steps = self.parts * self.mesh["tensor"].size()
        if len(batch) % self.groups or batch.shape[1] % steps:
            said = f"--batch and --length are {len(batch)} and {batch.shape[1]}"
            raise SystemExit(f"{said}; they must be multiples of {self.groups} groups and of {steps} processes with other steps.")
        rows = batch.chunk(self.groups)[self.mesh["data"].get_local_rank()]
        return rows.chunk(self.parts, dim=1)[self.mesh["context"].get_local_rank()]

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the mean of the ranks' losses, without a gradient. Ranks that share heads have the same one."""
        if self.mesh is None:
            return loss.detach()
        total = loss.detach().clone()
        distributed.all_reduce(total, group=self.shards.get_group())
        return total / self.shares

    def save(self, folder: Path, state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write a checkpoint, each rank its shards. It replaces the last one when it is complete."""
        new, last = folder / "checkpoint.tmp", folder / "checkpoint"
        tensors, moments = get_state_dict(model, optimizer)
        whole = {**state, "model": tensors, "optimizer": moments}
        checkpoint.save(whole, checkpoint_id=str(new), no_dist=self.mesh is None)
        if self.rank == 0:
            shutil.rmtree(last, ignore_errors=True)
            new.rename(last)
        if self.mesh is not None:
            distributed.barrier()

    def load(self, folder: Path, state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Load a checkpoint of any number of ranks into the model and optimizer; return the rest, by the keys of ``state``."""
        tensors, moments = get_state_dict(model, optimizer)
        whole: dict[str, Any] = {**state, "model": tensors, "optimizer": moments}
        checkpoint.load(whole, checkpoint_id=str(folder / "checkpoint"), no_dist=self.mesh is None)
        set_state_dict(model, optimizer, model_state_dict=whole.pop("model"), optim_state_dict=whole.pop("optimizer"))
        return whole

    def whole_state(self, model: nn.Module) -> dict[str, Any]:
        """Return a state dict of whole tensors on the CPU; it is empty on the ranks other than 0."""
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    @staticmethod
    def whole(value: torch.Tensor) -> torch.Tensor:
        """Return a DTensor as a plain tensor, on every rank."""
        return value.full_tensor() if isinstance(value, DTensor) else value
