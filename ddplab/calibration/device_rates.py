"""Measures the peak rates of a processor or GPU and returns them as a data sheet for the roofline model."""

import platform
import time
from collections.abc import Callable

import torch

from simulator.workload.roofline import Device

_SIZES = {"cpu": (1024, 1 << 24), "cuda": (8192, 1 << 28)}
"""Rows of the matrices and elements of the vectors; a GPU is busy with them much longer than with their launch."""
_REPEATS = 10


def measure_device(
    name: str | None = None, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Device:
    """Measure FLOPs per second and bytes per second, in about a second.

    The result serves as the old device in `rescale` for traces recorded on this machine. It is valid for the number
    of threads that torch uses now.

    Args:
        name: Name of the result. None: that of the GPU, or the architecture of the processor.
        device: The processor or a GPU. None: the processor.
        dtype: Type of the elements.
    """
    where = device or torch.device("cpu")
    on_gpu = where.type == "cuda"
    rows, elements = _SIZES[where.type]
    matrix = torch.randn(rows, rows, device=where, dtype=dtype)  # GPUs multiply constants faster
    ones, sums = (torch.ones(elements, device=where, dtype=dtype) for _ in range(2))

    product_s = _fastest_s(lambda: matrix @ matrix, where)
    addition_s = _fastest_s(lambda: torch.add(ones, sums, out=sums), where)
    usual = torch.cuda.get_device_name(where) if on_gpu else platform.processor() or platform.machine()
    return Device(
        name=name or usual,
        flops_per_s=2 * rows**3 / product_s,
        bytes_per_s=3 * elements * ones.element_size() / addition_s,
    )


def _fastest_s(action: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of several calls, which other programs disturbed least."""
    return min(_once_s(action, device) for _ in range(_REPEATS))


def _once_s(action: Callable[[], object], device: torch.device) -> float:
    start = _settled(device)
    action()
    return _settled(device) - start


def _settled(device: torch.device) -> float:
    """Return the time once the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
