"""Measured ceilings: which part of a data sheet's rates operations of a kind reach, by published training steps.

The logarithm of a part is a sum of terms, by name: that of the kind, of the device's generation, of the precision.
`python -m validation.measured_utilisation --write` fits the terms and the errors to 421 published steps and 25 that
`make gpu` measured, and writes them into the file beside this module. A term that was not measured changes nothing.
"""

import math
import re
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from ...reference.files.reading import Schema, read_schema

FILE = Path(__file__).with_name("measured_ceilings.json")

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
    """Contents of the file.

    Attributes:
        steps: Number of published steps.
        logs: Logarithms of the terms.
        generations: Generation of each device, by its name.
        families: Numbers of parameters of the measured models, by family.
        errors: Half-width of the interval that contains nine in ten steps which were left out of the fit, as a part
            of the prediction: +30 % and 1/1.3 are 0.3.
    """

    steps: int
    logs: dict[str, float]
    generations: dict[str, str]
    families: dict[str, tuple[int, ...]]
    errors: dict[Unmeasured, float] = Field(min_length=5)

    def part(self, terms: tuple[str, ...]) -> float:
        """Return the part of a peak rate that operations with these terms reach."""
        return math.exp(sum(self.logs.get(term, 0.0) for term in terms))

    def error(self, model: str, parameters: int, generation: str, *, is_listed: bool) -> float:
        """Return the half-width of the interval, the widest of all that apply to what was not measured.

        Args:
            model: Name of the model; its family is the one with which a word of the name begins.
            parameters: Number of parameters.
            generation: Generation of the device.
            is_listed: Whether the device is one of the catalogue.
        """
        words = re.split(r"[^a-z0-9]+", model.lower())
        counts = [
            count
            for one, several in self.families.items()
            if any(w.startswith(one) for w in words)
            for count in several
        ]
        unknown: list[Unmeasured] = ["cell"]
        if not any(abs(count / parameters - 1) <= SAME_SIZE for count in counts):
            unknown.append("model" if counts else "family")
        if not is_listed:
            unknown.append("device" if generation in self.generations.values() else "generation")
        return max(self.errors[one] for one in unknown)


def arithmetic_terms(kind: str, generation: str, precision: str) -> tuple[str, ...]:
    """Return the terms of the part of the peak arithmetic rate."""
    return generation, kind, f"{kind}, {_width(precision) if _is_short(precision) else precision}"


def memory_terms(
    kind: str, generation: str, precision: str, *, channels_last: bool = False, fused: str = "no"
) -> tuple[str, ...]:
    """Return the terms of the part of the memory's bandwidth.

    Args:
        kind: Kind of the operations.
        generation: Generation of the device.
        precision: Precision of the arithmetic, such as bf16.
        channels_last: Whether convolutions run on channels-last tensors.
        fused: What fuses element-wise operations: "no", "jit", "compile" or "kernels".
    """
    terms = ["memory", f"memory, {generation}", f"memory, {_width(precision)}", f"memory of {kind}"]
    if kind in CONVOLUTIONS and _is_short(precision) and not channels_last:
        terms.append("memory, contiguous")
    return (*terms, f"memory, fused: {fused}") if fused != "no" else tuple(terms)


def _is_short(precision: str) -> bool:
    return precision in ("fp16", "bf16")


def _width(precision: str) -> str:
    return "16 bit" if _is_short(precision) else "32 bit"


@cache
def measured_ceilings() -> MeasuredCeilings:
    """Return the contents of the file."""
    return read_schema(MeasuredCeilings, FILE, what="a file of measured ceilings")


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
