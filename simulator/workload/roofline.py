"""Roofline: the operations of a model, and the time that a device needs for them according to its data sheet.

An iteration is divided at the moments that a trace records, so every interval of a trace has its operations:

    forward | loss | gradient | gradient | ... | tail | step

`loss` holds the operations between the module's output and the gradient of that output. Each `gradient` holds the
operations of the backward pass from the previous gradient until this one is ready.

The time of a kernel is the time of its arithmetic at the device's peak rate or of its bytes at the peak bandwidth,
whichever is longer (Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model for
multicore architectures", CACM 52(4)). Kernels seldom reach either peak. For devices of the catalogue, the rates are
therefore those that published training steps reached. A measured step time is more accurate.

These parts of the rates are products of terms, by kind of operation, generation of the device and precision.
`python -m validation.measured_utilisation --write` fits the terms and their errors to 421 published steps and 25 that
`make gpu` measured, and writes them into the file beside this module. A term that was not measured changes nothing.

Operations of the built-in models are in a file too, so that a prediction from names needs neither torch nor a count:
by model, then by element type of autocast, the fields of `Operations`. A test compares the file with a count, and
`python -m validation.count_built_in_models` writes it again.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import gcd, prod
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import from_json

from ...reference.files.reading import Schema, read_bytes, read_schema
from ...reference.files.value_ranges import Batch, Bytes, BytesPerS, Count, Flops, FlopsPerS, Nanoseconds
from ...reference.trace import Buffer, Length, Parameter, StepMemory
from ..catalogue import Precision, read_catalogue, unknown

CEILINGS_FILE = Path(__file__).with_name("measured_ceilings.json")

OperationKind = Literal["conv", "grouped", "depthwise", "matmul", "attention", "memory"]
"""Kind of an operation: a convolution with one, several or as many groups as channels, a matrix product, fused
attention, and anything without arithmetic that counts."""
CONVOLUTIONS: tuple[OperationKind, ...] = ("conv", "grouped", "depthwise")
Unmeasured = Literal["cell", "model", "device", "generation", "family"]
"""What errors were measured without: steps of one model on one device in one precision, of a model, of a device, of
a generation of devices, or of models of one design."""
SAME_SIZE = 0.01
"""Models of a family whose numbers of parameters differ by no more than this part are one model."""


class MeasuredCeilings(Schema):
    """Contents of the file."""

    steps: int  #: number of published steps
    logs: dict[str, float]  #: logarithms of the terms
    generations: dict[str, str]  #: generation of each device, by its name
    families: dict[str, tuple[int, ...]]  #: numbers of parameters of the measured models, by family
    errors: dict[Unmeasured, float] = Field(min_length=5)
    """Half-width of the interval that contains nine in ten steps which were left out of the fit, as a part of the
    prediction: +30 % and 1/1.3 are 0.3."""

    def part(self, terms: tuple[str, ...]) -> float:
        """Return the part of a peak rate that operations with these terms reach."""
        return math.exp(sum(self.logs.get(term, 0.0) for term in terms))

    def error(self, model: str, parameters: int, generation: str, *, is_listed: bool) -> float:
        """Return the half-width of the interval, the widest of all that apply to what was not measured.

        A word of a model's name begins with its family; `is_listed`: whether the device is one of the catalogue.
        """
        words = re.split(r"[^a-z0-9]+", model.lower())
        families = (one for one in self.families if any(word.startswith(one) for word in words))
        counts = [count for one in families for count in self.families[one]]
        unknown: list[Unmeasured] = ["cell"]
        if not any(abs(count / parameters - 1) <= SAME_SIZE for count in counts):
            unknown.append("model" if counts else "family")
        if not is_listed:
            unknown.append("device" if generation in self.generations.values() else "generation")
        return max(self.errors[one] for one in unknown)


def arithmetic_terms(kind: str, generation: str, precision: str) -> tuple[str, ...]:
    """Return the terms of the part of the peak arithmetic rate."""
    return generation, kind, f"{kind}, {_width(precision) if precision in AUTOCAST else precision}"


def memory_terms(
    kind: str, generation: str, precision: str, *, channels_last: bool = False, fused: str = "no"
) -> tuple[str, ...]:
    """Return the terms of the part of the memory's bandwidth.

    `channels_last`: whether convolutions run on channels-last tensors; `fused`: what fuses element-wise operations,
    "no", "jit", "compile" or "kernels".
    """
    terms = ["memory", f"memory, {generation}", f"memory, {_width(precision)}", f"memory of {kind}"]
    if kind in CONVOLUTIONS and precision in AUTOCAST and not channels_last:
        terms.append("memory, contiguous")
    return (*terms, f"memory, fused: {fused}") if fused != "no" else tuple(terms)


def _width(precision: str) -> str:
    return "16 bit" if precision in AUTOCAST else "32 bit"


@cache
def measured_ceilings() -> MeasuredCeilings:
    """Return the contents of the file."""
    return read_schema(MeasuredCeilings, CEILINGS_FILE, what="a file of measured ceilings")


@cache
def parts_reached(
    kind: OperationKind, generation: str, precision: str, *, channels_last: bool
) -> tuple[float, float]:
    """Return the parts of the peak arithmetic rate and of the memory's bandwidth that operations of a kind reach."""
    measured = measured_ceilings()
    return (
        measured.part(arithmetic_terms(kind, generation, precision)),
        measured.part(memory_terms(kind, generation, precision, channels_last=channels_last)),
    )


USUAL = (1.2, 6.0)
"""Usual times of iterations, as multiples of the roofline time at the peak rates, on devices without a generation."""


class Operation(Schema):
    """One kernel, or the sum of several kernels of one kind with the same FLOPs per byte.

    The roofline time of such a sum equals the sum of the single times on every device, because kernels of one ratio
    lie on the same side of the ridge; see `merge`.
    """

    flops: Flops  #: floating-point operations, multiplication and addition counting as two; by formula
    bytes_moved: Bytes  #: bytes that must be read and written, each tensor once; from shapes
    kernels: Count = 1  #: number of kernels, a count
    kind: OperationKind = "matmul"  #: kind of the kernels
    channels_last: bool = False  #: whether a convolution's images are channels-last


def merge(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Add up operations of one kind and FLOPs-to-bytes ratio; the result takes the same time on every device."""
    groups: dict[tuple[object, ...], list[Operation]] = {}
    for operation in operations:
        divisor = gcd(operation.flops, operation.bytes_moved) or 1
        ratio = operation.flops // divisor, operation.bytes_moved // divisor
        groups.setdefault((*ratio, operation.kind, operation.channels_last), []).append(operation)
    merged = []
    for group in groups.values():
        sums = {name: sum(getattr(one, name) for one in group) for name in ("flops", "bytes_moved", "kernels")}
        merged.append(Operation(**(dict(group[0]) | sums)))
    return tuple(merged)


class GradientOperations(Schema):
    """Operations of the backward pass from the previous gradient until this one is ready.

    Often empty, because the operations for the layer's previous gradient also computed this one.
    """

    parameter: int = Field(ge=0)  #: parameter index
    operations: tuple[Operation, ...]


class Operations(Schema):
    """Operations of one iteration of a model; the module's docstring defines the intervals."""

    model: str
    batch: Batch | None = None  #: samples per iteration, where known
    input_shape: tuple[Length, ...] | None = None  #: shape of the input, where known
    tokens: Length | None = None  #: length of a sample's sequence, where the input has numbers of tokens
    torch_version: str
    parameters: tuple[Parameter, ...] = Field(min_length=1)
    buffers: tuple[Buffer, ...] = ()
    forward: tuple[Operation, ...]
    loss: tuple[Operation, ...] = ()
    gradients: tuple[GradientOperations, ...]  #: of every parameter, in ready order
    tail: tuple[Operation, ...] = ()
    step: tuple[Operation, ...]  #: operations of the optimiser step
    memory: StepMemory | None = None  #: what a step holds, where it was counted

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
        """Parameter indices in the order in which their gradients become ready."""
        return tuple(gradient.parameter for gradient in self.gradients)

    @property
    def backward(self) -> tuple[Operation, ...]:
        """All operations of the backward pass except those of the loss."""
        return (*(operation for gradient in self.gradients for operation in gradient.operations), *self.tail)

    @property
    def flops(self) -> int:
        """Floating-point operations of the passes, without those that checkpoints repeat.

        The backward pass of a matrix product or convolution has twice those of the forward pass.
        """
        passes = (*self.forward, *self.loss), self.backward
        forward, backward = (sum(one.flops for one in operations) for operations in passes)
        return forward + min(backward, 2 * forward)

    def with_batch(self, multiple: float) -> Self:
        """Return the operations with a multiple of the batch: passes compute and move that many times as much.

        Weights are moved once whatever the batch, so for a small multiple the bytes are slightly too few, and for a
        large one too many. The optimiser step and the number of kernels stay.
        """

        def scaled(one: Operation) -> Operation:
            work = {"flops": round(one.flops * multiple), "bytes_moved": round(one.bytes_moved * multiple)}
            return one.model_copy(update=work)

        gradients = tuple(
            one.model_copy(update={"operations": tuple(map(scaled, one.operations))}) for one in self.gradients
        )
        passes = {name: tuple(map(scaled, getattr(self, name))) for name in ("forward", "loss", "tail")}
        batch = self.batch and max(1, round(self.batch * multiple))
        memory = self.memory and self.memory.with_batch(batch or 1)
        update = {**passes, "gradients": gradients, "batch": batch, "memory": memory, "input_shape": None}
        return self.model_copy(update=update)


TENSORS_PER_KERNEL = 64
"""Parameters that one kernel of torch's SGD updates at most (ATen/native/cuda/MultiTensorApply.cuh, depth 2)."""


def sgd_step(parameters: Sequence[Parameter]) -> tuple[Operation, ...]:
    """Return the operations of SGD without momentum, which reads parameters and gradients and writes parameters."""
    size = sum(parameter.size_bytes for parameter in parameters)
    kernels = -(-len(parameters) // TENSORS_PER_KERNEL)
    return (Operation(flops=0, bytes_moved=3 * size, kernels=kernels, kind="memory"),)


class Device(Schema):
    """Peak rates of a processor, and what its kernels cost."""

    name: str
    """name written into traces, with the precision, no unit; chosen by the user"""
    flops_per_s: FlopsPerS
    """peak rate of matrix products and convolutions in the precision used, floating-point operations per second; from
    the data sheet (the rate without sparsity), or from timing a large product"""
    bytes_per_s: BytesPerS
    """peak memory bandwidth, bytes per second; from the data sheet, or from timing a large addition"""
    pace_ns: Nanoseconds = 0
    """time in which the host launches one kernel, nanoseconds; hidden while the device is behind its host, and known
    to a factor of 1.8; from a step of a small batch, divided by its kernels"""
    generation: str | None = None
    """GPU generation, such as Hopper, whose measured ceilings limit the rates; with another name, the mean of all
    generations does (None: kernels reach the rates); chosen by the user"""
    precision: Precision = "fp32"
    """precision of the arithmetic; with bf16 and fp16, float32 models compute under autocast; chosen by the user"""

    @property
    def autocast(self) -> Literal["bfloat16", "float16"] | None:
        """Element type in which torch.autocast computes. None: that of the parameters."""
        return AUTOCAST.get(self.precision)

    def time_ns(self, operations: Iterable[Operation]) -> float:
        """Return the time of the operations if they run one after the other, in nanoseconds."""
        return sum(self._kernel_ns(one) for one in operations)

    def _kernel_ns(self, one: Operation) -> float:
        arithmetic = memory = 1.0
        if self.generation is not None:
            arithmetic, memory = parts_reached(
                one.kind, self.generation, self.precision, channels_last=one.channels_last
            )
        return 1e9 * max(one.flops / self.flops_per_s / arithmetic, one.bytes_moved / self.bytes_per_s / memory)

    def bounds(self, operations: Operations) -> tuple[float, float]:
        """Return the multiples of `time_ns` between which nine in ten true times of an iteration lie."""
        if self.generation is None:
            return 1.0, USUAL[1]
        error = self.error(operations)
        return 1 / (1 + error), 1 + error

    def error(self, operations: Operations) -> float:
        """Return the relative error of what a device of this generation reaches; None counts as one not measured."""
        parameters = sum(prod(one.shape) for one in operations.parameters)
        is_listed = self in data_sheets().values()
        return measured_ceilings().error(operations.model, parameters, self.generation or "", is_listed=is_listed)


EAGER_PACE_NS, EAGER_PACE_ERROR = 45_000, 0.8
"""Pace of eager torch by operation, autograd and Python included, and its relative error. Published steps divided by
the operations that `ddplab.operation_counter` counts: 73 us in the only step that waits for its host in a profile of
ResNet-50 on one V100 (HolisticTraceAnalysis, ns_resolution_trace), 71 us or less for ResNet-152 with 32 images on
each of 8 A100s (willgpaik/pytorch-ddp-scaling-benchmark), 56 us or less for ResNet-50 with 32 images on an A100
(mvsjober/ml-benchmarks). CUDA graphs and `torch.compile` launch faster."""
AUTOCAST: dict[Precision, Literal["bfloat16", "float16"]] = {"bf16": "bfloat16", "fp16": "float16"}
"""Element type of autocast by the precision of a data sheet."""
PRECISIONS: dict[str, tuple[Precision, ...]] = {
    "float32": ("tf32", "fp32"),
    "bfloat16": ("bf16",),
    "float16": ("fp16",),
}
"""Precisions in which GPUs compute with elements of a type, the preferred one first."""


@cache
def data_sheets() -> dict[str, Device]:
    """Return the data sheets of the catalogue by name and precision, such as h100-bf16.

    Rates are dense. With bf16 and fp16, models of float32 parameters compute under autocast.
    """
    return {
        f"{name}-{precision}": Device(
            name=f"{entry.product}, {precision}",
            flops_per_s=float(round(rate * 1e12)),
            bytes_per_s=entry.memory.gb_per_s * 1e9,
            pace_ns=EAGER_PACE_NS,
            generation=measured_ceilings().generations.get(name, "unknown"),
            precision=precision,
        )
        for name, entry in read_catalogue().devices.items()
        if entry.peaks is not None
        for precision, rate in entry.peaks.tflops.items()
    }


def with_precision(name: str, dtype: str) -> str:
    """Return the name of a device's data sheet with the precision of a model: h100 becomes h100-tf32 for float32.

    Other names that `find_device` takes are returned as they are. `dtype` is the element type in which the model
    computes, such as "float32", the only one whose precision autocast changes.

    Raises:
        ValueError: The device, or its data sheet, computes in no precision of this type.
    """
    name = read_catalogue().device_like(name) or name
    entry, sheets, own = read_catalogue().devices.get(name), data_sheets(), PRECISIONS.get(dtype, ())
    if name not in sheets and (entry is None or entry.peaks is None):
        return name
    for one in [name] if name in sheets else [f"{name}-{precision}" for precision in own]:
        if one in sheets and (dtype == "float32" or sheets[one].precision in own):
            return one
    cure = "convert the parameters, or give a data sheet (.json)"
    raise ValueError(f"device: expected one that computes with parameters of {dtype}, got {name!r}; {cure}")


def find_device(name: str) -> Device:
    """Find a device by the name and precision of a data sheet in the catalogue, or by the path of a JSON file.

    Raises:
        ValueError: Neither a name in the catalogue nor a path that ends in .json; or an invalid file.
    """
    if name.endswith(".json"):
        return read_schema(Device, name, what="a data sheet")
    name = read_catalogue().device_like(name) or name
    if name in data_sheets():
        return data_sheets()[name]
    if name in read_catalogue().devices:
        if given := ", ".join(one for one in data_sheets() if one.startswith(f"{name}-")):
            raise ValueError(
                f"device: expected one with a precision, got {name!r}, of which the catalogue has {given}"
            )
        cure = "make a trace on such a GPU (ddplab record, or ddplab import of a profile)"
        raise ValueError(
            f"device: expected a GPU whose steps can be told by name, got {name!r}, of which the catalogue has no "
            f"training that shows what part of its peak rates it reaches; {cure}"
        )
    names = [*(one for one, entry in read_catalogue().devices.items() if entry.peaks), *data_sheets()]
    raise ValueError(unknown("device", name, names, others="a data sheet's .json file or"))


# The operations of the built-in models

OPERATIONS_FILE = Path(__file__).with_name("built_in_operations.json.gz")
PARAMETERS_DTYPE = "none"
"""Key of the operations without autocast."""


@cache
def _counted() -> Mapping[str, Mapping[str, Any]]:
    counted: Mapping[str, Mapping[str, Any]] = from_json(read_bytes(OPERATIONS_FILE))
    return counted


def counted_models() -> list[str]:
    """Return the names of the models in the file."""
    return list(_counted())


def name_of_model(name: str) -> str:
    """Return the name in the file that differs in capitals and hyphens only, as in GPT-2; without one, `name`."""

    def plain(one: str) -> str:
        return re.sub(r"[^a-z0-9.:/]", "", one.lower())

    return next((known for known in _counted() if plain(known) == plain(name)), name)


def built_in_operations(model: str, autocast: str | None = None) -> Operations | None:
    """Return the operations of a built-in model as `ddplab.operation_counter` counted them; None: not in the file.

    `autocast`: element type of torch.autocast, "bfloat16" or "float16"; None: no autocast.
    """
    of_model = _counted().get(name_of_model(model), {})
    if autocast in AUTOCAST.values() and autocast not in of_model:
        autocast = None  # without parameters in float32, a model computes as without autocast
    counted = of_model.get(autocast or PARAMETERS_DTYPE)
    return None if counted is None else Operations.model_validate_json(json.dumps(counted))
