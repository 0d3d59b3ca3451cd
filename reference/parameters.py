"""Which of a module's tensors data parallelism is about, in the order that gives them their index."""

import torch
from torch import Tensor, nn


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name in registration order; one that is shared counts once, by its first name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def sparse_parameters(module: nn.Module) -> set[str]:
    """Names of the parameters whose gradient will be a sparse tensor."""
    return {
        f"{prefix}.weight".lstrip(".")
        for prefix, submodule in module.named_modules()
        if isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse
    }


def size_bytes(tensor: Tensor) -> int:
    """Bytes of the tensor's elements, whatever its strides."""
    return tensor.numel() * tensor.element_size()


def bucket_key(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    """What tensors must share to share a bucket."""
    return tensor.dtype, tensor.device
