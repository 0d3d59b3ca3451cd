"""Roofline: how long operations take on a device that is known by its data sheet.

A kernel takes as long as its arithmetic at the device's peak rate or its bytes at the peak bandwidth, whichever
is longer (Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model for multicore
architectures", CACM 52(4)), and a fixed cost. Kernels seldom reach either peak, so a time from a data sheet alone
is too short, often by half and more (caches and fused kernels, which save bytes, weigh less); a measured step time,
or the ratio of two devices, is closer to the truth.
"""

import os
from collections.abc import Iterable
from typing import Self

from pydantic import Field

from reference.records import Record, read_record

from .operations import Operation

NS_PER_S = 1_000_000_000


class Device(Record):
    """What a processor does at best; with `efficiency`, what it does in practice."""

    name: str = Field(description="what traces call it, precision included; no unit; chosen by the user")
    flops_per_s: float = Field(
        gt=0,
        allow_inf_nan=False,
        description="peak rate of matrix products and convolutions in the precision that they run in, "
        "floating-point operations a second; from the data sheet, without sparsity, or a large product, timed",
    )
    bytes_per_s: float = Field(
        gt=0,
        allow_inf_nan=False,
        description="peak rate of the memory, bytes a second; from the data sheet, or a large addition, timed",
    )
    launch_ns: int = Field(
        default=0,
        ge=0,
        description="what every kernel costs beyond arithmetic and bytes, nanoseconds; from a chain of tiny kernels, "
        "timed; no data sheet tells it",
    )
    efficiency: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="how much of both peaks is reached, a fraction; from a measured time, by which the roofline's "
        "is divided",
    )
    source: str = Field(default="", description="where the figures come from, no unit; from the user")

    def time_ns(self, operations: Iterable[Operation]) -> float:
        """How long the operations take, one after the other."""
        return sum(map(self._one_ns, operations))

    def _one_ns(self, operation: Operation) -> float:
        at_peak_s = max(operation.flops / self.flops_per_s, operation.bytes_moved / self.bytes_per_s)
        return at_peak_s / self.efficiency * NS_PER_S + operation.kernels * self.launch_ns

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a data sheet that was written by hand, as JSON.

        Raises:
            ValueError: The file is missing, not JSON or inconsistent; the message names file, field, reason.
        """
        return read_record(cls, path, what="a data sheet")


def find_device(name: str) -> Device:
    """The built-in data sheet of that name, or the JSON file that it leads to.

    Raises:
        ValueError: Neither.
    """
    if name in DEVICES:
        return DEVICES[name]
    if name.endswith(".json"):
        return Device.load(name)
    raise ValueError(f"device: expected {', '.join(DEVICES)} or a data sheet's .json file, got {name!r}")


def _sheet(name: str, bytes_per_s: float, flops_per_s: dict[str, float], source: str) -> dict[str, Device]:
    return {
        precision: Device(name=f"{name}, {precision}", flops_per_s=rate, bytes_per_s=bytes_per_s, source=source)
        for precision, rate in flops_per_s.items()
    }


_A100_RATES = {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12}
_SHEETS = {
    "v100": _sheet(
        "NVIDIA V100 SXM2",
        900e9,
        {"fp32": 15.7e12, "fp16": 125e12},
        "NVIDIA V100 Tensor Core GPU data sheet, 2020",
    ),
    "a100-40gb": _sheet("NVIDIA A100 SXM 40GB", 1555e9, _A100_RATES, "NVIDIA A100 Tensor Core GPU data sheet, 2020"),
    "a100-80gb": _sheet("NVIDIA A100 SXM 80GB", 2039e9, _A100_RATES, "NVIDIA A100 Tensor Core GPU data sheet, 2021"),
    "h100": _sheet(
        "NVIDIA H100 SXM",
        3.35e12,
        {"fp32": 66.9e12, "tf32": 494.7e12, "bf16": 989.4e12},
        "rates: NVIDIA H100 Tensor Core GPU Architecture white paper, 2022; bandwidth: H100 data sheet, 2023",
    ),
}
DEVICES: dict[str, Device] = {
    f"{name}-{precision}": device for name, sheet in _SHEETS.items() for precision, device in sheet.items()
}
"""Data sheets by name and precision. Rates are dense; the precision is the arithmetic's, while the bytes are those of
the model as it was measured: for bf16 throughout, measure a model whose parameters are bfloat16."""
