"""Measures the peak rates of a processor or GPU and returns them as a data sheet for the roofline model."""

import platform
from collections.abc import Callable

import torch
from torch.utils.benchmark import Timer

from ..simulator.workload.roofline import Device

_SIZES = {"cpu": (1024, 1 << 24), "cuda": (8192, 1 << 28)}
"""Rows of the matrices and elements of the vectors; a GPU is busy with them much longer than with their launch."""
_REPEATS = 5


def measure_device(device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Device:
    """Measure FLOPs per second and bytes per second, in about a second.

    The result serves as the old device in `rescale` for traces recorded on this machine. It is valid for the number
    of threads that torch uses now. Its name is that of the GPU, or the architecture of the processor.
    """
    where = device or torch.device("cpu")
    rows, elements = _SIZES[where.type]
    matrix = torch.randn(rows, rows, device=where, dtype=dtype)  # GPUs multiply constants faster
    ones, sums = (torch.ones(elements, device=where, dtype=dtype) for _ in range(2))
    product_s = _fastest_s(lambda: matrix @ matrix)
    addition_s = _fastest_s(lambda: torch.add(ones, sums, out=sums))
    on_gpu, moved_bytes = where.type == "cuda", 3 * elements * ones.element_size()
    name = torch.cuda.get_device_name(where) if on_gpu else platform.processor() or platform.machine()
    return Device(name=name, flops_per_s=2 * rows**3 / product_s, bytes_per_s=moved_bytes / addition_s)


def _fastest_s(action: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several calls, which other programs disturbed least."""
    timer = Timer("action()", globals={"action": action}, num_threads=torch.get_num_threads())  # waits for a GPU
    return min(timer.timeit(1).mean for _ in range(_REPEATS))
