"""Measures the peak rates of this machine's processor and returns them as a data sheet for the roofline model."""

import platform
import timeit
from collections.abc import Callable

import torch

from simulator.workload.roofline import NS_PER_S, Device

_MATRIX = 1024
_VECTOR = 1 << 24
_CHAIN = 200
_REPEATS = 10


def measure_device(name: str | None = None) -> Device:
    """Measure FLOPs per second, bytes per second and time per operation in float32, in about a second.

    The result serves as the old device in `rescale` for traces recorded on this machine. It is valid for the number
    of threads that torch uses now. Its name is by default the architecture of the processor.
    """
    matrix = torch.ones(_MATRIX, _MATRIX)
    ones, sums = torch.ones(_VECTOR), torch.ones(_VECTOR)

    def chain() -> None:
        link = torch.ones(1, requires_grad=True)
        for _ in range(_CHAIN):
            link = link.tanh()
        link.backward()

    product_s = _fastest_s(lambda: matrix @ matrix)
    addition_s = _fastest_s(lambda: torch.add(ones, sums, out=sums))
    return Device(
        name=name or platform.processor() or platform.machine(),
        flops_per_s=2 * _MATRIX**3 / product_s,
        bytes_per_s=3 * _VECTOR * ones.element_size() / addition_s,
        launch_ns=round(_fastest_s(chain) * NS_PER_S / (2 * _CHAIN)),
        source=f"measured with {torch.get_num_threads()} threads of torch {torch.__version__}",
    )


def _fastest_s(action: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several calls, which other programs disturbed least."""
    return min(timeit.repeat(action, number=1, repeat=_REPEATS))
