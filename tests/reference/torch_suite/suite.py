"""The tests themselves: torch's classes, made to run with any DDP class on CPU ranks."""

import inspect
import os
import re
from collections.abc import Callable
from typing import Any

os.environ.setdefault("BACKEND", "gloo")  # torch's tests read both when they are imported
os.environ.setdefault("WORLD_SIZE", "2")

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from . import cuda_on_cpu

cuda_on_cpu.lift_gpu_skips()

from torch.testing._internal.distributed import distributed_test

_Base = distributed_test.DistributedTest._DistTestBase
_BUILDS_DDP = re.compile(r"\bDistributedDataParallel\(")


class SmallImages(TorchFunctionMode):
    """Replaces 1000 x 1000 pixels, whose convolutions take an hour on two cores, by 32 x 32 pixels.

    The test concerns collectives, whose sizes depend on the parameters only.
    """

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is torch.ones and args == (1, 1, 1000, 1000):
            args = (1, 1, 32, 32)
        return function(*args, **(kwargs or {}))


class TorchTests(distributed_test.TestDistBackend, _Base):
    """torch's test case; an instance is one test on one rank."""


def names() -> list[str]:
    """Tests that build a DDP, themselves or by a helper method that they call."""
    return sorted(name for name in dir(_Base) if name.startswith("test_") and _builds_ddp(name, set()))


def _builds_ddp(name: str, seen: set[str]) -> bool:
    method = getattr(_Base, name, None)
    if name in seen or not inspect.isfunction(method):
        return False
    seen.add(name)
    source = inspect.getsource(inspect.unwrap(method))
    called = re.findall(r"self\.(_?\w+)\(", source)
    return bool(_BUILDS_DDP.search(source)) or any(_builds_ddp(helper, seen) for helper in called)


def use(ddp_class: type[nn.Module]) -> None:
    """Put `ddp_class`, without its GPU arguments, where tests look for torch's class."""

    class OnCpu(ddp_class):
        def __init__(
            self, module: nn.Module, device_ids: Any = None, output_device: Any = None, *args: Any, **options: Any
        ) -> None:
            super().__init__(module, None, None, *args, **options)

    OnCpu.__name__ = OnCpu.__qualname__ = ddp_class.__name__
    globals()[OnCpu.__name__] = OnCpu  # so that it pickles
    OnCpu.__module__ = __name__
    torch.nn.parallel.DistributedDataParallel = OnCpu
    distributed_test.DistributedDataParallel = OnCpu


def run(name: str, rank: int) -> None:
    """Run one test as one rank of the initialised process group; raises the errors of the test."""
    cuda_on_cpu.replace_cuda_calls()
    test = TorchTests(name)
    test.rank = rank
    test.file_name = ""
    with cuda_on_cpu.CudaOnCpu(), SmallImages():
        getattr(test, name)()
