"""A module's synchronised parameters and buffers, in the order of the parameter index."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from .trace import Buffer, Parameter

INTEGERS = {4: torch.int32, 8: torch.int64}
"""Element types of integers, by their size in bytes."""


def ignored_names(module: nn.Module) -> frozenset[str]:
    """Names of the parameters and buffers that are not synchronised (torch's `_ddp_params_and_buffers_to_ignore`)."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def trainable_parameters(module: nn.Module, *, without: Collection[str] = ()) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, in registration order; a shared parameter counts once, under its first name.

    Args:
        module: The module.
        without: Names that are left out, beside the ignored ones.
    """
    ignored = ignored_names(module) | set(without)
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


def described_parameters(module: nn.Module) -> tuple[Parameter, ...]:
    """Descriptions of the trainable parameters, for a trace."""
    sparse = sparse_parameters(module)
    return tuple(
        Parameter(
            name=name,
            shape=tuple(parameter.shape),
            dtype=dtype_name(parameter),
            size_bytes=size_bytes(parameter),
            sparse=name in sparse,
        )
        for name, parameter in trainable_parameters(module).items()
    )


def described_buffers(module: nn.Module) -> tuple[Buffer, ...]:
    """Descriptions of the buffers, except the ignored ones, for a trace."""
    return tuple(
        Buffer(name=name, dtype=dtype_name(buffer), size_bytes=size_bytes(buffer))
        for name, buffer in synchronized_buffers(module).items()
    )


def dtype_name(tensor: Tensor) -> str:
    """Name of the element type as in traces, for example "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def size_bytes(tensor: Tensor) -> int:
    """Size of the tensor's elements, which does not depend on its strides."""
    return tensor.numel() * tensor.element_size()


def dense_strides(tensor: Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element; the other strides have no meaning."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def bucket_key(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    """Key of a tensor: tensors in one bucket have the same dtype and device."""
    return tensor.dtype, tensor.device
