"""Which of a module's tensors data parallelism is about, in the order that gives them their index."""

import torch
from torch import Tensor, nn

from .trace import Buffer, Parameter


def ignored_names(module: nn.Module) -> frozenset[str]:
    """Names of parameters and buffers that the module asks to be left alone (torch's attribute for it)."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name in registration order; one that is shared counts once, by its first name."""
    ignored = ignored_names(module)
    found: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and name not in ignored:
            found.setdefault(parameter, name)
    return {name: parameter for parameter, name in found.items()}


def synchronized_tensors(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name, trainable or not, but for the ignored ones."""
    ignored = ignored_names(module)
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor for name, tensor in named if name not in ignored}


def synchronized_buffers(module: nn.Module) -> dict[str, Tensor]:
    """All buffers by name, but for the ignored ones."""
    ignored = ignored_names(module)
    return {name: buffer for name, buffer in module.named_buffers() if name not in ignored}


def sparse_parameters(module: nn.Module) -> set[str]:
    """Names of the trainable parameters whose gradient will be a sparse tensor."""
    sparse = {
        id(submodule.weight)
        for submodule in module.modules()
        if isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse
    }
    return {name for name, parameter in trainable_parameters(module).items() if id(parameter) in sparse}


def described_parameters(module: nn.Module) -> tuple[Parameter, ...]:
    """The trainable parameters as a trace tells of them."""
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
    """The buffers, but for the ignored ones, as a trace tells of them."""
    return tuple(
        Buffer(name=name, dtype=dtype_name(buffer), size_bytes=size_bytes(buffer))
        for name, buffer in synchronized_buffers(module).items()
    )


def dtype_name(tensor: Tensor) -> str:
    """The element type's name in traces: "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def size_bytes(tensor: Tensor) -> int:
    """Bytes of the tensor's elements, whatever its strides."""
    return tensor.numel() * tensor.element_size()


def bucket_key(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    """What tensors must share to share a bucket."""
    return tensor.dtype, tensor.device
