"""Device rates: what this machine's processor gives, measured."""

import platform
import time
from collections.abc import Callable

import torch

from ..workload.roofline import NS_PER_S, Device

_MATRIX = 1024
_VECTOR = 1 << 24
_CHAIN = 200
_REPEATS = 10


def measure_device(name: str | None = None) -> Device:
    """Rates of this machine's processor, in float32 and with the threads that torch has now; about a second.

    What `rescale` needs as the device that a trace was recorded on.

    Args:
        name: What to call it. None: the architecture.
    """
    matrix = torch.ones(_MATRIX, _MATRIX)
    ones, sums = torch.ones(_VECTOR), torch.ones(_VECTOR)

    def chain() -> None:
        link = torch.ones(1, requires_grad=True)
        for _ in range(_CHAIN):
            link = link.tanh()
        link.backward()

    product_s = _time_s(lambda: matrix @ matrix)
    addition_s = _time_s(lambda: torch.add(ones, sums, out=sums))
    return Device(
        name=name or platform.processor() or platform.machine(),
        flops_per_s=2 * _MATRIX**3 / product_s,
        bytes_per_s=3 * _VECTOR * ones.element_size() / addition_s,
        launch_ns=round(_time_s(chain) * NS_PER_S / (2 * _CHAIN)),
        source=f"measured with {torch.get_num_threads()} threads of torch {torch.__version__}",
    )


def _time_s(work: Callable[[], object]) -> float:
    """Seconds of one run, the fastest of several: a machine at its best, whoever else uses it."""
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
