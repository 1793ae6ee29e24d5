"""The function ``accelerate``: recognize the modules of a model, then replace the forward of all of them or of none.

Without a model, ``fla_hooks.py`` does its work.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import nn

from onelaunch.errors import ArgumentError
from onelaunch.integrations.fla_hooks import FunctionReport, accelerate_functions
from onelaunch.integrations.forward import Forward
from onelaunch.integrations.known import accelerated, recognize
from onelaunch.integrations.report import Refused, Replaced, Report
from onelaunch.integrations.storage import Owners


@overload
def accelerate(model: None = None) -> FunctionReport: ...


@overload
def accelerate(model: nn.Module) -> Report: ...


def accelerate(model: nn.Module | None = None) -> Report | FunctionReport:
    """Let operations of onelaunch compute the layers of a model that they know, or, without a model, calls of fla's functions.

    Known are fla's ``GatedLinearAttention``, ``SimpleGatedLinearAttention``, ``HGRNAttention``, ``HGRN2Attention``, ``GatedMLP``
    and ``RMSNorm`` (release 0.6), and the MLPs of Llama, Mistral, Qwen2 and Qwen3 in transformers (4.51 and later, below 6). A
    call of fla's ``RMSNorm`` stays with fla unless measured times say that ours is faster, as for fla's functions below.

    The forward of each such module is replaced on the module object. Modules, parameters, their names, hooks on the module, the
    optimizer and the state dict stay as they are, so checkpoints can be exchanged both ways. Weights that are multiplied with the
    same input are moved into adjacent parts of one buffer, and each parameter becomes a view of its part; eager calls then
    multiply them as one weight, as long as they stay adjacent. Call this function before CUDA graphs are captured, and before
    DDP or FSDP wraps the model.

    A call of a module that the operation cannot run, for example with padding, runs the original forward. The report counts these
    calls. A second call of ``accelerate`` leaves replaced modules as they are; weights that are no longer adjacent, for example
    after ``Module.to``, are moved together again.

    Without a model, functions of fla (release 0.6) are hooked for the whole process: ``chunk_gla``, ``fused_recurrent_gla``,
    ``chunk_simple_gla``, ``fused_recurrent_simple_gla``, ``fused_chunk_simple_gla``, ``chunk_hgrn`` and
    ``fused_recurrent_hgrn``. Our function runs a call where measured times say that it is faster than fla's on this device, or
    on the Hopper GPU whose times ``auto`` borrows here. Every other call goes to fla's function, and the report counts it with
    the reason. A second call changes nothing.

    Args:
        model: Any ``torch.nn.Module``; it may hold no known module. ``None`` hooks fla's functions.

    Returns:
        A :class:`~onelaunch.integrations.Report`, or a :class:`~onelaunch.integrations.FunctionReport` without a model. Its
        ``undo()``, or the end of a ``with`` block, restores the model or fla's functions.

    Raises:
        ArgumentError: ``model`` is not a module, or the call is inside ``torch.inference_mode``. Without a model: fla is not
            installed, or its release is not supported. An error while weights are moved, such as one for lack of memory, or
            while functions are hooked, is passed on, and nothing stays replaced.
    """
    if model is None:
        return accelerate_functions()
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model is {type(model).__name__}; it must be a torch.nn.Module.")
    if torch.is_inference_mode_enabled():
        raise ArgumentError(
            "model cannot be accelerated inside torch.inference_mode, in which parameters cannot be moved; call accelerate first."
        )
    found: list[Replaced] = []
    already: list[Replaced] = []
    refused: list[Refused] = []
    unseen: set[int] = set()  # modules that a replaced module around them does not call; it comes before them
    for name, module in model.named_modules():
        kind = type(module).__qualname__
        if id(module) in unseen:
            continue
        if (earlier := accelerated(module)) is not None and earlier.module is module:
            already.append(Replaced(name, module, kind, earlier.operation, earlier))
            unseen.update(id(child) for _, child in earlier.not_called())
        elif isinstance(new := recognize(module), Forward):
            found.append(Replaced(name, module, kind, new.operation, new))
            unseen.update(id(child) for _, child in new.not_called())
        elif new is not None:
            refused.append(Refused(name, kind, new))
    _replace(model, [each.by for each in found], [each.by for each in already])
    return Report(found, already, refused)


def _replace(model: nn.Module, forwards: list[Forward], earlier: list[Forward]) -> None:
    """Move weights together and replace the forward of each module; undo all of it if one fails.

    Weights of modules that an ``earlier`` call replaced are moved together again, for example after ``Module.to``.
    """
    owners = Owners(model)
    try:
        for each in forwards:
            each.module.forward = each.forward
            each.lay(owners)
        for each in earlier:
            each.lay(owners)
    except BaseException:
        for each in forwards:
            each.restore()
        raise
