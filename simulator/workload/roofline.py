"""Roofline: the operations of a model, and how long a device takes for them by its data sheet.

An iteration is cut where the recorder reads the clock, so every stretch of a trace has its operations:

    forward | loss | gradient | gradient | ... | tail | step

`loss` lies between the module's output and that output's gradient. Each gradient has the operations that the
backward pass runs from the previous gradient until this one is ready.

A kernel takes as long as its arithmetic at the device's peak rate or its bytes at the peak bandwidth, whichever
is longer (Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model for multicore
architectures", CACM 52(4)), plus a fixed cost. Kernels seldom reach either peak, so a time from a data sheet alone
is too short, often by half and more. A measured step time, or the ratio of two devices, is more accurate.
"""

import os
from collections.abc import Iterable
from math import gcd
from typing import Self

from pydantic import Field, model_validator

from reference.schema import Schema, read_schema, write_atomically
from reference.trace import Buffer, Parameter


class Operation(Schema):
    """One kernel, or several of the same FLOPs per byte taken together.

    Several of one ratio have the sum of their single roofline times on every device, because all of them lie on
    the same side of its ridge; see `merge`.
    """

    flops: int = Field(
        ge=0, description="floating-point operations, multiplication and addition counting as two; by formula"
    )
    bytes_moved: int = Field(ge=0, description="bytes that must be read and written, each tensor once; from shapes")
    kernels: int = Field(default=1, ge=1, description="how many kernels these are, a count")


def merge(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Fewer operations that take the same time on every device: those of one FLOPs-to-bytes ratio together."""
    groups: dict[tuple[int, int], list[Operation]] = {}
    for operation in operations:
        divisor = gcd(operation.flops, operation.bytes_moved) or 1
        ratio = operation.flops // divisor, operation.bytes_moved // divisor
        groups.setdefault(ratio, []).append(operation)
    return tuple(
        Operation(
            flops=sum(operation.flops for operation in group),
            bytes_moved=sum(operation.bytes_moved for operation in group),
            kernels=sum(operation.kernels for operation in group),
        )
        for group in groups.values()
    )


class Gradient(Schema):
    """What the backward pass does from the gradient before this one until this one is ready.

    None at all is usual: the layer's other gradient came out of the same operations.
    """

    parameter: int = Field(ge=0, description="parameter index")
    operations: tuple[Operation, ...]


class Operations(Schema):
    """What one iteration of a model needs; see the module's docstring."""

    model: str
    batch: int | None = Field(default=None, ge=1, description="samples per iteration, where known")
    torch_version: str
    parameters: tuple[Parameter, ...] = Field(min_length=1)
    buffers: tuple[Buffer, ...] = ()
    forward: tuple[Operation, ...]
    loss: tuple[Operation, ...] = ()
    gradients: tuple[Gradient, ...] = Field(description="of every parameter, in the order of readiness")
    tail: tuple[Operation, ...] = ()
    step: tuple[Operation, ...] = Field(description="the optimiser's")

    @model_validator(mode="after")
    def _every_parameter_once(self) -> Self:
        count = len(self.parameters)
        if sorted(self.ready_order) != list(range(count)):
            raise ValueError(
                f"gradients: expected each of the parameters 0 to {count - 1} once, got {list(self.ready_order)}"
            )
        return self

    @property
    def ready_order(self) -> tuple[int, ...]:
        """Parameter indices as their gradients become ready."""
        return tuple(gradient.parameter for gradient in self.gradients)

    @property
    def backward(self) -> tuple[Operation, ...]:
        """All operations of the backward pass, but for what belongs to the loss."""
        return (*(operation for gradient in self.gradients for operation in gradient.operations), *self.tail)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON."""
        write_atomically(path, (self.model_dump_json() + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` wrote.

        Raises:
            ValueError: The file is missing, not JSON or inconsistent; the message names file, field, reason.
        """
        return read_schema(cls, path, what="an operations file", cure="measure the model again")


def sgd_step(parameters: Iterable[Parameter]) -> tuple[Operation, ...]:
    """A step of SGD without momentum: parameter and gradient are read, the parameter is written.

    One kernel, as optimisers that take all parameters at once have few.
    """
    size = sum(parameter.size_bytes for parameter in parameters)
    return (Operation(flops=0, bytes_moved=3 * size),)


NS_PER_S = 1_000_000_000


class Device(Schema):
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
        return read_schema(cls, path, what="a data sheet")


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
