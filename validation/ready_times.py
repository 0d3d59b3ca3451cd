"""Recorded ready times of gradients: read from a file, extended to a deeper model, turned into a trace."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median

from ddplab.reference.trace import Iteration, Parameter, RankTrace, Trace, Workload

from .cases import RepeatedBlock

DATA = Path(__file__).parent / "data"
READY = "ready_ms_"


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter.

    Attributes:
        name: Name of the parameter.
        elements: Number of elements.
        ready_ms: When the gradient is ready in each recorded iteration, in milliseconds from the start of the
            iteration. The last gradient ends the iteration.
    """

    name: str
    elements: int
    ready_ms: tuple[float, ...]

    def delayed(self, by_ms: Sequence[float], name: str) -> "Gradient":
        """A gradient of the same size that is ready later, by one delay for each iteration."""
        ready_ms = tuple(ready + delay for ready, delay in zip(self.ready_ms, by_ms, strict=True))
        return Gradient(name, self.elements, ready_ms)


Gradients = tuple[Gradient, ...]
"""In ready order."""


def read_gradients(name: str) -> Gradients:
    """Read a CSV file of `validation/data` with the columns name, elements, ready_ms_1, ready_ms_2, ...

    Raises:
        ValueError: The file is missing or malformed. The message is one line with file, line number and reason.
    """
    path = DATA / name
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
    gradients = []
    for number, row in enumerate(rows, start=2):
        try:
            ready = tuple(float(row[column]) for column in row if column.startswith(READY))
            if not all(0 < ms < inf for ms in ready):
                raise ValueError(f"expected finite times above 0, got {ready}")
            gradients.append(Gradient(row["name"], int(row["elements"]), ready))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: line {number}: expected name, elements, {READY}1, ...: {error}") from None
    if not gradients or not gradients[0].ready_ms:
        raise ValueError(f"{path}: expected at least one gradient and a column {READY}1")
    return tuple(gradients)


def repeat_block(gradients: Gradients, repeat: RepeatedBlock) -> Gradients:
    """Gradients of a deeper model, in which a block of the recorded model occurs `repeat.times` more often.

    Each copy prolongs the backward pass by the time from the last gradient before the block to the last gradient of
    the block. It prolongs the forward pass in proportion. The ratio of both passes follows from the ready times: the
    first gradient is ready at the end of the forward pass and the start of the backward pass.

    Raises:
        ValueError: There is no block of this name, or no gradient before it, so that its start is unknown.
    """
    places = [place for place, gradient in enumerate(gradients) if gradient.name.startswith(f"{repeat.block}.")]
    if not places or places[0] == 0:
        raise ValueError(f"repeat.block: expected a block with gradients before it, got {repeat.block!r}")
    first, last = places[0], places[-1]
    steps = range(len(gradients[0].ready_ms))
    block_ms = [gradients[last].ready_ms[step] - gradients[first - 1].ready_ms[step] for step in steps]
    forward_ms = [repeat.times * block_ms[step] * _forward_share(gradients, step) for step in steps]
    deeper = [gradient.delayed(forward_ms, gradient.name) for gradient in gradients[: last + 1]]
    for copy in range(1, repeat.times + 1):
        by_ms = [forward_ms[step] + copy * block_ms[step] for step in steps]
        deeper += [gradient.delayed(by_ms, f"{gradient.name}+{copy}") for gradient in gradients[first : last + 1]]
    by_ms = [forward_ms[step] + repeat.times * block_ms[step] for step in steps]
    return (*deeper, *(gradient.delayed(by_ms, gradient.name) for gradient in gradients[last + 1 :]))


def _forward_share(gradients: Gradients, step: int) -> float:
    """Duration of the forward pass divided by that of the backward pass."""
    forward, end = gradients[0].ready_ms[step], gradients[-1].ready_ms[step]
    return forward / (end - forward)


def trace_of(gradients: Gradients, iteration_ns: float) -> Trace:
    """A trace of the recorded iterations, scaled by one factor so that their median takes `iteration_ns`.

    Parameters are numbered in reverse ready order, which is the registration order of a model that registers its
    layers in forward order. The time before the first gradient counts as the forward pass.
    """
    steps = range(len(gradients[0].ready_ms))
    factor = iteration_ns / median(gradients[-1].ready_ms)
    registered = gradients[::-1]
    iterations, start = [], 0
    for step in steps:
        ready = tuple(start + round(gradient.ready_ms[step] * factor) for gradient in registered)
        iterations.append(
            Iteration(
                forward_start_ns=start,
                forward_end_ns=min(ready),
                backward_start_ns=min(ready),
                backward_end_ns=max(ready),
                end_ns=max(ready),
                synchronized=False,
                ready_ns=ready,
            )
        )
        start = max(ready)
    return Trace(workload=_workload(registered), ranks=(RankTrace(rank=0, iterations=tuple(iterations)),))


def _workload(registered: Sequence[Gradient]) -> Workload:
    parameters = tuple(
        Parameter(name=gradient.name, shape=(gradient.elements,), dtype="float32", size_bytes=4 * gradient.elements)
        for gradient in registered
    )
    return Workload(
        model="published",
        source="module",
        parameters=parameters,
        device="cuda",
        device_name="published",
        backend=None,
        world_size=1,
        torch_version="unknown",
    )
