"""Gradients: when each is ready in a recorded backward pass, and the trace of an iteration made from that."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from reference.trace import Iteration, Parameter, RankTrace, Trace, Workload

from .training_case import Repeat

DATA = Path(__file__).parent / "data"
READY = "ready_ms_"


@dataclass(frozen=True)
class Gradient:
    """One gradient; `ready_ms` counts from the start of each recorded iteration, which its last gradient ends."""

    name: str
    elements: int
    ready_ms: tuple[float, ...]

    def later(self, by_ms: Sequence[float], name: str) -> "Gradient":
        """The same of another layer, later."""
        moments = tuple(ready + later for ready, later in zip(self.ready_ms, by_ms, strict=True))
        return Gradient(name, self.elements, moments)


Gradients = tuple[Gradient, ...]
"""In the order in which they become ready."""


def read_gradients(name: str) -> Gradients:
    """A file of `validation/data`: columns name, elements, ready_ms_1, ready_ms_2, ...

    Raises:
        ValueError: It is missing or malformed; one line, which names the file, the line and the reason.
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
            gradients.append(Gradient(row["name"], int(row["elements"]), ready))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: line {number}: expected name, elements, {READY}1, ...: {error}") from None
    if not gradients or not gradients[0].ready_ms:
        raise ValueError(f"{path}: expected gradients with at least one column {READY}1, got none")
    return tuple(gradients)


def repeated(gradients: Gradients, repeat: Repeat) -> Gradients:
    """A deeper model: each copy of the block takes as long as the block, and forward as much as backward does.

    The block's time runs from the last gradient before it to its own last. How forward and backward are to each
    other is read from the curve: the first gradient comes at the end of the one and the start of the other.

    Raises:
        ValueError: No block of that name, or it comes first, where its start is not known.
    """
    places = [place for place, gradient in enumerate(gradients) if gradient.name.startswith(f"{repeat.block}.")]
    if not places or places[0] == 0:
        raise ValueError(f"repeat.block: expected a block with gradients before it, got {repeat.block!r}")
    first, last = places[0], places[-1]
    steps = range(len(gradients[0].ready_ms))
    block_ms = [gradients[last].ready_ms[step] - gradients[first - 1].ready_ms[step] for step in steps]
    share = [_forward_share(gradients, step) for step in steps]
    forward_ms = [repeat.times * block_ms[step] * share[step] for step in steps]
    deeper = [gradient.later(forward_ms, gradient.name) for gradient in gradients[: last + 1]]
    for copy in range(1, repeat.times + 1):
        by_ms = [forward_ms[step] + copy * block_ms[step] for step in steps]
        deeper += [gradient.later(by_ms, f"{gradient.name}+{copy}") for gradient in gradients[first : last + 1]]
    by_ms = [forward_ms[step] + repeat.times * block_ms[step] for step in steps]
    return (*deeper, *(gradient.later(by_ms, gradient.name) for gradient in gradients[last + 1 :]))


def _forward_share(gradients: Gradients, step: int) -> float:
    forward, end = gradients[0].ready_ms[step], gradients[-1].ready_ms[step]
    return forward / (end - forward)


def trace_of(gradients: Gradients, step_ns: float) -> Trace:
    """The recorded iterations, all stretched by one factor so that their median takes `step_ns`.

    Parameters are numbered against the order of readiness, as a model that registers its layers in forward order has
    them. Whatever precedes the first gradient counts as the forward pass.
    """
    steps = range(len(gradients[0].ready_ms))
    factor = step_ns / median(gradients[-1].ready_ms)
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
