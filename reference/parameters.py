"""A module's synchronised parameters and buffers, in the order of the parameter index."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

INTEGERS = {4: torch.int32, 8: torch.int64}
"""Element types of integers, by their size in bytes."""


class Slot(NamedTuple):
    """A parameter under one of its names in one module."""

    module: nn.Module
    name: str
    parameter: nn.Parameter


def slots(module: nn.Module, parameters: Iterable[nn.Parameter]) -> list[Slot]:
    """All slots of `module` that hold one of `parameters`."""
    wanted = set(parameters)
    return [
        Slot(part, name, parameter)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None and parameter in wanted
    ]


@dataclass(frozen=True)
class ModuleTensors:
    """The tensors of a module that ranks synchronise, by name, as of the moment when the module is wrapped.

    `parameters` are trainable or not, `sparse` names those whose gradients are sparse tensors, `bucketed` are those
    that are not delayed, and `slots` are the places of the trainable ones, `frozen` of the others.
    """

    trainable: dict[str, nn.Parameter]
    bucketed: dict[str, nn.Parameter]
    sparse: set[str]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    slots: list[Slot]
    frozen: list[Slot]


def module_tensors(module: nn.Module, delayed: dict[str, nn.Parameter]) -> ModuleTensors:
    """Read the tensors of a module, without the ignored ones; see `delayed_all_reduce` for `delayed`."""
    trainable = trainable_parameters(module)
    bucketed = {name: parameter for name, parameter in trainable.items() if name not in delayed}
    parameters = synchronized_tensors(module, with_buffers=False)
    places = slots(module, trainable.values())
    frozen = slots(module, (p for p in parameters.values() if isinstance(p, nn.Parameter) and not p.requires_grad))
    sparse, buffers = sparse_parameters(module), synchronized_buffers(module)
    return ModuleTensors(trainable, bucketed, sparse, parameters, buffers, places, frozen)


def ignored_names(module: nn.Module) -> frozenset[str]:
    """Names of the parameters and buffers that are not synchronised (torch's `_ddp_params_and_buffers_to_ignore`)."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, in registration order; a shared parameter counts once, under its first name."""
    ignored = ignored_names(module)
    found: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and name not in ignored:
            found.setdefault(parameter, name)
    return {name: parameter for parameter, name in found.items()}


def synchronized_tensors(module: nn.Module, *, with_buffers: bool = True) -> dict[str, Tensor]:
    """All parameters, trainable or not, and buffers by name, except the ignored ones."""
    ignored = ignored_names(module)
    named = [*module.named_parameters(), *(module.named_buffers() if with_buffers else ())]
    return {name: tensor for name, tensor in named if name not in ignored}


def synchronized_buffers(module: nn.Module) -> dict[str, Tensor]:
    """All buffers by name, except the ignored ones."""
    ignored = ignored_names(module)
    return {name: buffer for name, buffer in module.named_buffers() if name not in ignored}


def sparse_parameters(module: nn.Module) -> set[str]:
    """Names of the trainable parameters whose gradients are sparse tensors."""
    sparse = {
        id(submodule.weight)
        for submodule in module.modules()
        if isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse
    }
    return {name for name, parameter in trainable_parameters(module).items() if id(parameter) in sparse}


def dtype_name(tensor: Tensor) -> str:
    """Name of the element type as in traces, for example "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def dense_strides(tensor: Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element; the other strides have no meaning."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def bucket_key(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    """Key of a tensor: tensors in one bucket have the same dtype and device."""
    return tensor.dtype, tensor.device
