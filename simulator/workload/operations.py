"""Operations: what a model needs of a device, layer by layer, before any device is known.

An iteration is cut where the recorder notes the time, so that every stretch of a trace has its operations:

    forward │ loss │ gradient │ gradient │ ... │ tail │ step

`loss` is what comes between the module's output and that output's gradient; each gradient has what the backward
pass does from the one before it until it is ready.
"""

import os
from collections.abc import Iterable
from math import gcd
from typing import Self

from pydantic import Field, model_validator

from reference.files import write_whole
from reference.records import Record, read_record
from reference.trace import Buffer, Parameter


class Operation(Record):
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


class Gradient(Record):
    """What the backward pass does from the gradient before this one until this one is ready.

    None at all is usual: the layer's other gradient came out of the same operations.
    """

    parameter: int = Field(ge=0, description="parameter index")
    operations: tuple[Operation, ...]


class Operations(Record):
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
        write_whole(path, (self.model_dump_json() + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` wrote.

        Raises:
            ValueError: The file is missing, not JSON or inconsistent; the message names file, field, reason.
        """
        return read_record(cls, path, what="an operations file", cure="measure the model again")


def sgd_step(parameters: Iterable[Parameter]) -> tuple[Operation, ...]:
    """A step of SGD without momentum: parameter and gradient are read, the parameter is written.

    One kernel, as optimisers that take all parameters at once have few.
    """
    size = sum(parameter.size_bytes for parameter in parameters)
    return (Operation(flops=0, bytes_moved=3 * size),)
