"""CUDA devices mapped to the CPU, so that tests written for GPUs run unchanged on machines without one."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed
from torch.utils._pytree import tree_map

CPU = torch.device("cpu")


class CudaOnCpu(TorchFunctionMode):
    """Every device argument that names a GPU, as string, number or object, becomes the CPU."""

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.cuda:
            return args[0]
        if function in (torch.Tensor.to, torch._C._nn._parse_to):
            args = tuple(CPU if type(argument) is int else argument for argument in args)
        if type(kwargs.get("device")) is int:
            kwargs["device"] = CPU
        args, kwargs = tree_map(_to_cpu, (args, kwargs))
        return function(*args, **kwargs)


class NoStream(nullcontext):
    """A CUDA stream that does nothing, because CPU operations have finished when the call returns."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        super().__init__()

    def wait_stream(self, _other: Any) -> None:
        """Return at once: all operations before have finished."""


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return CPU
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


def lift_gpu_skips() -> None:
    """Make tests run that require more GPUs than there are; call this before importing them."""

    def skip_nothing(*_args: Any, **_options: Any) -> Callable:
        return lambda test: test

    common_distributed.skip_if_lt_x_gpu = skip_nothing
    common_distributed.nccl_skip_if_lt_x_gpu = skip_nothing
    common_distributed.skip_if_no_gpu = lambda test: test


def replace_cuda_calls() -> None:
    """Replace the functions of `torch.cuda` that the tests call by functions that do nothing."""
    torch.cuda.set_device = lambda *_args, **_options: None
    torch.cuda.synchronize = lambda *_args, **_options: None
    torch.cuda.device = lambda *_args, **_options: nullcontext()
    torch.cuda.device_count = lambda: 8
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False  # which, like the next, asks the driver in CUDA builds
    torch.accelerator.synchronize = lambda *_args: None
    torch.Stream = NoStream
    torch.accelerator.current_stream = NoStream
