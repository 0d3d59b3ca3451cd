"""Synthesis: traces that nobody recorded, from operations and data sheets.

`synthesize` needs a model alone, or one measured step time with it; `rescale` takes a recorded trace to another
device, stretch by stretch, and keeps the variation that was recorded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from reference.trace import Iteration, RankTrace, Trace, Workload

from .roofline import Device, Operation, Operations


def synthesize(operations: Operations, device: Device, *, step_ns: int | None = None) -> Trace:
    """One iteration of one rank, without communication, as the roofline of `device` has it.

    Every gradient gets a nanosecond of its own beyond its roofline time, so that gradients of one operation keep
    their order in a trace.

    Args:
        operations: Of the model.
        device: Its rates decide the proportions.
        step_ns: How long the iteration takes, where that was measured. Where it is longer than the data sheet has
            it, forward and backward pass are stretched; else all is shortened. None: as the data sheet has it,
            at peak rates, which real kernels seldom reach.

    Raises:
        ValueError: No operation takes any time, or `step_ns` is too short to tell the gradients apart.
    """
    count = len(operations.gradients)
    gaps = [gradient.operations for gradient in operations.gradients]
    stretches = [operations.forward, operations.loss, *gaps, operations.tail, operations.step]
    times = [device.time_ns(stretch) for stretch in stretches]
    if not any(times):
        raise ValueError(f"operations: expected some that take time on {device.name}, got none")
    duration_ns = round(sum(times)) + count if step_ns is None else step_ns
    if duration_ns < count:
        raise ValueError(f"step_ns: expected at least {count}, a nanosecond for every gradient, got {step_ns}")
    elapsed = list(accumulate(_slowed(times, duration_ns - count)))
    moments = [round((duration_ns - count) * (ns / elapsed[-1])) for ns in elapsed]
    ready = [moment + number for number, moment in enumerate(moments[2:-2], start=1)]
    by_index = dict(zip(operations.ready_order, ready, strict=True))
    iteration = Iteration(
        forward_start_ns=0,
        forward_end_ns=moments[0],
        backward_start_ns=moments[1],
        backward_end_ns=moments[-2] + count,
        optimizer_start_ns=moments[-2] + count,
        optimizer_end_ns=duration_ns,
        end_ns=duration_ns,
        synchronized=False,
        ready_ns=tuple(by_index[index] for index in range(count)),
    )
    scaled = "" if step_ns is None else f", scaled to a measured step of {step_ns / 1e6:.3f} ms"
    return Trace(
        workload=_workload(operations, f"{device.name} by its roofline{scaled}"),
        ranks=(RankTrace(rank=0, iterations=(iteration,)),),
    )


def _slowed(times_ns: Sequence[float], duration_ns: int) -> list[float]:
    """Times of all stretches, the passes as much longer as it takes to fill `duration_ns`.

    The optimiser, the last of them, streams through memory, which reaches the peak; matrix products seldom do.
    """
    *passes, optimizer = times_ns
    work, room = sum(passes), duration_ns - optimizer
    if not work or room <= work:
        return list(times_ns)
    return [*(ns * (room / work) for ns in passes), optimizer]


def rescale(trace: Trace, operations: Operations, old: Device, new: Device) -> Trace:
    """The trace as it would have been on another device.

    Every recorded stretch of time is multiplied by how much longer the roofline of `new` makes its operations
    than that of `old`; so iterations and ranks keep their differences. Gradients may have come in another order
    than in `operations`: each brings its own operations with it. A stretch without operations is multiplied as
    the backward pass is as a whole. No two moments fall together that were apart.

    Args:
        trace: Recorded on `old`, computation alone.
        operations: Of the model that was recorded.
        old: The device that it was recorded on.
        new: The device wanted.

    Raises:
        ValueError: The trace was recorded with communication, which another device leaves as it is, or the
            operations are not those of its model; the message names the field, what was expected and seen.
    """
    _check_match(trace.workload, operations)
    factors = _Factors.of(operations, old, new)
    renamed = f"{trace.workload.device_name}, rescaled from {old.name} to {new.name}"
    return Trace(
        workload=trace.workload.model_copy(update={"device_name": renamed}),
        layouts=trace.layouts,
        ranks=tuple(
            rank.model_copy(update={"iterations": _rescale_all(rank.iterations, factors)}) for rank in trace.ranks
        ),
    )


@dataclass(frozen=True, slots=True)
class _Factors:
    """How much longer each stretch takes on the new device; of gradients by parameter index."""

    forward: float
    loss: float
    gradients: tuple[float, ...]
    tail: float
    step: float

    @classmethod
    def of(cls, operations: Operations, old: Device, new: Device) -> Self:
        def factor(stretch: Sequence[Operation], otherwise: float) -> float:
            before = old.time_ns(stretch)
            return new.time_ns(stretch) / before if before else otherwise

        whole = factor((*operations.forward, *operations.loss, *operations.backward, *operations.step), 1.0)
        backward = factor(operations.backward, whole)
        gradients = {gradient.parameter: gradient.operations for gradient in operations.gradients}
        return cls(
            forward=factor(operations.forward, whole),
            loss=factor(operations.loss, backward),
            gradients=tuple(factor(gradients[index], backward) for index in range(len(gradients))),
            tail=factor(operations.tail, backward),
            step=factor(operations.step, whole),
        )


class _Clock:
    """Walks through a rank's recorded moments and tells the new ones; stretches keep at least a nanosecond."""

    def __init__(self, start_ns: int) -> None:
        self._old_ns = self._new_ns = start_ns

    def until(self, moment_ns: int, factor: float) -> int:
        """The new moment for a recorded one, at or after the last."""
        stretch = moment_ns - self._old_ns
        self._old_ns = moment_ns
        self._new_ns += max(round(stretch * factor), min(stretch, 1))
        return self._new_ns


def _rescale_all(iterations: Sequence[Iteration], factors: _Factors) -> tuple[Iteration, ...]:
    clock = _Clock(iterations[0].forward_start_ns)
    return tuple(_rescale_iteration(iteration, clock, factors) for iteration in iterations)


def _rescale_iteration(old: Iteration, clock: _Clock, factors: _Factors) -> Iteration:
    ready = list(old.ready_ns)
    # The clock walks forwards: arguments below are in the order of time.
    forward_start = clock.until(old.forward_start_ns, 1.0)
    forward_end = clock.until(old.forward_end_ns, factors.forward)
    backward_start = clock.until(old.backward_start_ns, factors.loss)
    for moment, index in sorted((moment, index) for index, moment in enumerate(old.ready_ns) if moment is not None):
        ready[index] = clock.until(moment, factors.gradients[index])
    return Iteration(
        forward_start_ns=forward_start,
        forward_end_ns=forward_end,
        backward_start_ns=backward_start,
        ready_ns=tuple(ready),
        backward_end_ns=clock.until(old.backward_end_ns, factors.tail),
        optimizer_start_ns=_until(clock, old.optimizer_start_ns, factors.step),
        optimizer_end_ns=_until(clock, old.optimizer_end_ns, factors.step),
        end_ns=clock.until(old.end_ns, factors.step),
        synchronized=old.synchronized,
        layout=old.layout,
    )


def _until(clock: _Clock, moment_ns: int | None, factor: float) -> int | None:
    return None if moment_ns is None else clock.until(moment_ns, factor)


def _check_match(workload: Workload, operations: Operations) -> None:
    if workload.source != "module":
        raise ValueError(
            f"trace: workload.source: expected 'module', computation alone, got {workload.source!r}: communication "
            "does not become faster with the device; record the plain module"
        )
    expected: dict[str, object] = {"batch": workload.batch, "parameters": len(workload.parameters)}
    seen: dict[str, object] = {"batch": operations.batch, "parameters": len(operations.parameters)}
    for index, (recorded, counted) in enumerate(zip(workload.parameters, operations.parameters, strict=False)):
        for name in ("name", "shape", "dtype"):
            expected[f"parameters[{index}].{name}"] = getattr(recorded, name)
            seen[f"parameters[{index}].{name}"] = getattr(counted, name)
    if None in (workload.batch, operations.batch):
        del expected["batch"]
    for field, value in expected.items():
        if seen[field] != value:
            raise ValueError(
                f"operations: {field}: expected {value!r}, as in the trace, got {seen[field]!r}; "
                "measure the operations of the model that was recorded, with its batch"
            )


def _workload(operations: Operations, device_name: str) -> Workload:
    return Workload(
        model=operations.model,
        source="module",
        parameters=operations.parameters,
        buffers=operations.buffers,
        device="meta",
        device_name=device_name,
        backend=None,
        world_size=1,
        torch_version=operations.torch_version,
        batch=operations.batch,
    )
