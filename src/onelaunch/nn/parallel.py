"""Tensor parallelism: the heads or channels of each layer of ``onelaunch.nn`` divided among the ranks of a mesh.

Users pass :func:`tensor_parallel_plan`, or a :class:`TensorParallel` for one layer, to PyTorch's ``parallelize_module``. A
sharded layer calls the same operations as before, with fewer heads. Its parameters are DTensors, of which a call reads the local
parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

from onelaunch.errors import ArgumentError, ShapeError
from onelaunch.nn.convolution import ShortConvolution
from onelaunch.nn.forget import ForgetGateLayer
from onelaunch.nn.linear_rnn import LinearRNN
from onelaunch.nn.norm import RMSNorm
from onelaunch.nn.packed import PackedModule
from onelaunch.nn.swiglu import SwiGLU

CALLED = (LinearRNN, SwiGLU)
"""Layers that call their output projection as a module. The others pass its weight to an operation."""

BOUND_AT = 5
"""Position of the argument ``lower_bound`` in a call of HGRN's layers."""


class LocalParts:
    """Placement of a layer's parameters on a mesh, for :class:`onelaunch.nn.packed.PackedModule`.

    Args:
        mesh: One-dimensional mesh.
        partial: Flag that each rank computes a part of the gradient of a replicated parameter, so that the parts are summed.
    """

    def __init__(self, mesh: DeviceMesh, *, partial: bool = True) -> None:
        self.mesh, self.partial = mesh, partial

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a DTensor; a plain tensor is returned as it is."""
        if not isinstance(parameter, DTensor):
            return parameter
        if self.partial and parameter.placements[0].is_replicate():
            # Going back, the redistribution changes a partial gradient into a replicated one: it adds the ranks' parts.
            return parameter.redistribute(placements=parameter.placements).to_local(grad_placements=[Partial()])
        return parameter.to_local()

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean over the ranks; its gradients, of which each rank has a part, are summed."""
        total = DTensor.from_local(value, self.mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
        return total.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]) / self.mesh.size()


class TensorParallel(ParallelStyle):
    """Style for ``parallelize_module`` that divides the heads or channels of a layer of ``onelaunch.nn`` among the ranks.

    The projections and the short convolutions are sharded by rows: each rank has whole heads of queries, keys, values, gate and
    decay. The output projection is sharded by columns, and the outputs are summed over the ranks. The first factor of a low-rank
    decay, and the weight of a norm per head, are on every rank. A norm over all channels (HGRN, HGRN2) takes the mean over all
    ranks. An :class:`onelaunch.nn.RMSNorm` is computed by every rank for the tokens that it has.

    Packed weights become separate parameters (:func:`separate_weights`), and each of these a DTensor with the shape of the
    unsharded one. So a checkpoint made with ``torch.distributed.checkpoint`` loads into a layer on any number of ranks.
    Attributes with sizes, such as ``num_heads``, and the states in a :class:`onelaunch.nn.Cache` become those of one rank.

    Args:
        input_layouts: placement of the input ``[B, T, D]`` over the ranks: ``Replicate()``, where every rank passes all of it, or
            ``Shard(1)``, where each passes its part of T, and T is a multiple of the number of ranks. Default: ``Replicate()``.
        output_layouts: placement of the output, as for ``input_layouts``. The output is a plain tensor, this rank's part.

    Raises:
        ArgumentError: a layout is another one. When the style is applied: the mesh has several dimensions; the module is no layer
            of ``onelaunch.nn`` or is sharded already; or the number of ranks does not divide the number of heads (with
            ``num_kv_heads`` also that of keys and values) or of channels. It is raised on every rank before any communication.

    Source: Shoeybi et al., Megatron-LM (2019), for columns and rows of an MLP and of attention by heads.
    """

    def __init__(self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None) -> None:
        super().__init__()
        self.input_layouts = _checked("input_layouts", input_layouts)
        self.output_layouts = _checked("output_layouts", output_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shard a layer; ``parallelize_module`` calls it."""
        if device_mesh.ndim != 1:
            names = device_mesh.mesh_dim_names or ()
            raise ArgumentError(f"The mesh has {device_mesh.ndim} dimensions {names}; take one of them, such as mesh['tp'].")
        if not isinstance(module, (PackedModule, RMSNorm)):
            known = "a layer of onelaunch.nn (attention, linear RNN, SwiGLU or RMSNorm)"
            raise ArgumentError(f"The module is a {type(module).__name__}; this style takes {known}.")
        if module.shards is not None:
            raise ArgumentError(f"The {type(module).__name__} is sharded already; apply a style once.")
        if isinstance(module, RMSNorm):
            module.shards = LocalParts(device_mesh, partial=self.input_layouts.is_shard())
            self._distribute(module, "weight", Replicate(), device_mesh)
            return module
        check_divisible(module, device_mesh.size())
        return self._shard(module, device_mesh)

    def _shard(self, module: PackedModule, mesh: DeviceMesh) -> nn.Module:
        """Shard the parameters of a layer, and have its inputs and outputs communicated."""
        module.separate_weights()
        row_wise = f"{module.row_wise}.weight"
        for name in [name for name, _ in module.named_parameters()]:
            whole = Replicate() if name in module.replicated else Shard(0)
            self._distribute(module, name, Shard(1) if name == row_wise else whole, mesh)
        module.take_share(mesh.size())
        module.shards = LocalParts(mesh)
        for each in module.children():
            if isinstance(each, ShortConvolution):
                each.shards = module.shards
        if isinstance(module, CALLED):
            projection = module.get_submodule(module.row_wise)
            RowwiseParallel(output_layouts=self.output_layouts)._apply(projection, mesh)  # noqa: SLF001 - as PyTorch calls it
        else:
            module.register_forward_hook(lambda _module, _args, result: self._outputs(result, mesh))
        first = "x" if isinstance(module, SwiGLU) else "hidden_states"
        module.register_forward_pre_hook(
            lambda module, args, kwargs: self._inputs(module, first, args, kwargs, mesh), with_kwargs=True
        )
        return module

    def _distribute(self, module: nn.Module, name: str, placement: Placement, mesh: DeviceMesh) -> None:
        """Replace a parameter, if the module has it, by a DTensor."""
        owner = module.get_submodule(name.rpartition(".")[0])
        last = name.rpartition(".")[2]
        parameter = getattr(owner, last)
        if parameter is not None:
            sharded = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=self.src_data_rank)
            owner.register_parameter(last, nn.Parameter(sharded, requires_grad=parameter.requires_grad))

    def _inputs(self, module: nn.Module, first: str, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh) -> Any:
        """Return a call's arguments with the whole input, whose gradients are summed, and this rank's part of the lower bound."""
        if args:
            args = (self._gathered(args[0], mesh), *args[1:])
        elif first in kwargs:
            kwargs = {**kwargs, first: self._gathered(kwargs[first], mesh)}
        if isinstance(module, ForgetGateLayer) and len(args) > BOUND_AT:
            args = (*args[:BOUND_AT], _own_channels(module, args[BOUND_AT], mesh), *args[BOUND_AT + 1 :])
        elif isinstance(module, ForgetGateLayer) and "lower_bound" in kwargs:
            kwargs = {**kwargs, "lower_bound": _own_channels(module, kwargs["lower_bound"], mesh)}
        return args, kwargs

    def _gathered(self, x: Any, mesh: DeviceMesh) -> Any:
        """Return the whole input; the gradient of each rank is a part of its gradient. The layer refuses what is no tensor."""
        if not isinstance(x, torch.Tensor):
            return x
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [self.input_layouts], run_check=False)
        return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def _outputs(self, result: tuple[torch.Tensor, None, Any], mesh: DeviceMesh) -> tuple[torch.Tensor, None, Any]:
        """Return a call's results with the output summed over the ranks."""
        total = DTensor.from_local(result[0], mesh, [Partial()], run_check=False)
        return total.redistribute(placements=[self.output_layouts]).to_local(), *result[1:]


def _checked(argument: str, layout: Placement | None) -> Placement:
    """Return the layout of an input or output; raise :class:`ArgumentError` if it is none that layers take."""
    if layout is None:
        return Replicate()
    if isinstance(layout, Replicate) or layout == Shard(1):
        return layout
    raise ArgumentError(f"{argument} is {layout!r}; it must be Replicate() or Shard(1), the dimension of time.")


def _own_channels(module: ForgetGateLayer, bound: Any, mesh: DeviceMesh) -> Any:
    """Return this rank's part of a lower bound ``[C]`` that every rank has. The layer refuses what is no tensor."""
    if not isinstance(bound, torch.Tensor):
        return bound
    channels = mesh.size() * next(each.width for each in module.segments if each.name == "f")
    if bound.shape != (channels,):
        raise ShapeError("lower_bound", got=bound.shape, want=f"[C] with C = {channels} channels of the forget gate on all ranks")
    whole = bound if isinstance(bound, DTensor) else DTensor.from_local(bound, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(0)]).to_local()


def check_divisible(module: PackedModule, ranks: int) -> None:
    """Raise :class:`ArgumentError` if the number of ranks does not divide a layer's heads or channels."""
    for name, size in module.sizes_to_divide().items():
        if size % ranks:
            said = f"{name} of {type(module).__name__} is {size}; it must be a multiple of {ranks}"
            raise ArgumentError(f"{said}, the number of ranks of the mesh, each of which takes whole heads or channels.")


def tensor_parallel_plan(
    model: nn.Module, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None
) -> dict[str, ParallelStyle]:
    """Return styles for all layers of ``onelaunch.nn`` in a model, as ``parallelize_module(model, mesh, plan)`` takes them.

    Other modules, such as embeddings, are left to the caller, who adds PyTorch's styles for them to the plan. So is
    :class:`onelaunch.nn.RMSNorm` unless ``input_layouts`` is ``Shard(1)``.

    Args:
        model: module to search; a layer of ``onelaunch.nn`` gets the name ``""``, which ``parallelize_module`` takes for itself.
        input_layouts: see :class:`TensorParallel`.
        output_layouts: see :class:`TensorParallel`; not of a norm, whose output is placed as its input.

    Returns:
        Styles by the modules' names. It is empty if there is no such layer.

    Raises:
        ArgumentError: a layout is another one.
    """
    style = TensorParallel(input_layouts=input_layouts, output_layouts=output_layouts)
    kinds = (PackedModule, RMSNorm) if style.input_layouts.is_shard() else (PackedModule,)
    return {name: style for name, module in model.named_modules() if isinstance(module, kinds)}


def separate_weights(model: nn.Module) -> nn.Module:
    """Make the parts of a model's packed weights parameters of their own, with their names in its state dict; return the model.

    Results and state dicts stay the same. Do this before ``fully_shard``: the functions of
    ``torch.distributed.checkpoint.state_dict`` need parameters with the names of the state dict, and an optimizer's state then
    has those names too. Tensor parallelism does the same, so that a checkpoint continues with any combination of the two.

    Args:
        model: model with layers of ``onelaunch.nn``. Make the optimizer afterwards.

    Raises:
        ArgumentError: a packed weight has been sharded before.
    """
    for module in model.modules():
        if isinstance(module, PackedModule):
            module.separate_weights()
    return model
