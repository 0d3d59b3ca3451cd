"""Synthesis: traces made from operations and data sheets instead of recordings.

`synthesize` makes a trace from a model alone, or from a model and one measured step time. `rescale` converts a
recorded trace to another device, interval by interval, and keeps its variation.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from reference.files.reading import one_line_errors
from reference.trace import Iteration, RankTrace, Trace, Workload

from .roofline import Device, Operation, Operations

OF_OPERATIONS = ("model", "parameters", "buffers", "torch_version", "batch", "input_shape")
"""Fields of operations that a trace of them has too."""
BY_ROOFLINE = " by its roofline"
"""Follows the device's name in traces whose times come from its data sheet alone."""


@one_line_errors()
def synthesize(operations: Operations, device: Device, *, step_ns: int | None = None) -> Trace:
    """Make a trace of one iteration of one rank, without communication, from the roofline times on `device`.

    No kernel starts before the host has launched it: with many small kernels, the host's pace determines the times.

    Each gradient gets an additional nanosecond, so that gradients of one operation keep their order in the trace.

    Args:
        operations: Operations of the model.
        device: Data sheet of the device.
        step_ns: Measured duration of the iteration, which includes all waiting for the host. If it is longer than the
            roofline time, forward and backward pass are lengthened; otherwise all intervals are shortened. None: the
            roofline time, which real kernels seldom reach.

    Raises:
        ValueError: No operation takes any time, or `step_ns` is less than one nanosecond per gradient.
    """
    count = len(operations.gradients)
    gaps = [gradient.operations for gradient in operations.gradients]
    intervals = [operations.forward, operations.loss, *gaps, operations.tail, operations.step]
    times = [device.time_ns(interval) for interval in intervals]
    if not any(times):
        raise ValueError(f"operations: expected operations that take time on {device.name}, got none")
    if step_ns is None:
        kernels = [sum(operation.kernels for operation in interval) for interval in intervals]
        elapsed = _paced(times, kernels, device.pace_ns)
        duration_ns = round(elapsed[-1]) + count
    else:
        elapsed, duration_ns = list(accumulate(_lengthened(times, step_ns - count))), step_ns
    if duration_ns < count:
        raise ValueError(f"step_ns: expected at least {count}, one nanosecond per gradient, got {step_ns}")
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
    workload = Workload(
        **{name: getattr(operations, name) for name in OF_OPERATIONS},
        source="module",
        device="meta",
        device_name=f"{device.name}{BY_ROOFLINE}{scaled}",
        backend=None,
        world_size=1,
    )
    return Trace(workload=workload, ranks=(RankTrace(rank=0, iterations=(iteration,)),))


def _paced(times_ns: Sequence[float], kernels: Sequence[int], pace_ns: int) -> list[float]:
    """Return when each interval ends, if the host launches one kernel every `pace_ns` from the start on.

    An interval ends after the previous one and its own kernels, but not before its last kernel was launched and has
    run. Kernels of one interval count as equally long.
    """
    launched, ended = 0.0, 0.0
    ends = []
    for ns, count in zip(times_ns, kernels, strict=True):
        launched += count * pace_ns
        ended = max(ended + ns, launched + ns / count) if count else ended + ns
        ends.append(ended)
    return ends


def _lengthened(times_ns: Sequence[float], duration_ns: int) -> list[float]:
    """Lengthen all intervals but the last, the optimiser's, in proportion, so that the sum is `duration_ns`.

    The optimiser reads and writes memory in sequence, which reaches the peak bandwidth; matrix products seldom reach
    their peak.
    """
    *passes, optimizer = times_ns
    passes_ns, available_ns = sum(passes), duration_ns - optimizer
    if not passes_ns or available_ns <= passes_ns:
        return list(times_ns)
    return [*(ns * (available_ns / passes_ns) for ns in passes), optimizer]


@one_line_errors()
def rescale(trace: Trace, operations: Operations, old: Device, new: Device) -> Trace:
    """Convert a recorded trace to another device.

    Every recorded interval is multiplied by the ratio of the roofline times of its operations on `new` and on `old`,
    so differences between iterations and between ranks are kept. If gradients became ready in another order than in
    `operations`, each keeps its own operations. An interval of the backward pass without operations is multiplied by
    the ratio of the whole backward pass. Gradients that became ready one after the other stay in this order.

    Args:
        trace: A trace recorded on `old`, without communication.
        operations: Operations of the recorded model.
        old: The device of the recording.
        new: The device to convert to.

    Raises:
        ValueError: The trace was recorded with communication, which does not depend on the device, or the operations
            are not those of its model; the message names the field, the expected and the actual value.
    """
    _check_match(trace.workload, operations)
    factors = _factors(operations, old, new)
    renamed = f"{trace.workload.device_name}, rescaled from {old.name} to {new.name}"
    ranks = []
    for rank in trace.ranks:
        clock = _Clock(rank.iterations[0].forward_start_ns)
        iterations = tuple(_rescale_iteration(iteration, clock, factors) for iteration in rank.iterations)
        ranks.append(rank.model_copy(update={"iterations": iterations}))
    workload = trace.workload.model_copy(update={"device_name": renamed})
    return Trace(workload=workload, layouts=trace.layouts, ranks=tuple(ranks))


class _Factors(NamedTuple):
    """Ratio of the time on the new device to that on the old device, by interval; `gradients` by parameter index."""

    forward: float
    loss: float
    gradients: tuple[float, ...]
    tail: float
    step: float


def _factors(operations: Operations, old: Device, new: Device) -> _Factors:
    def factor(interval: Sequence[Operation], otherwise: float) -> float:
        before = old.time_ns(interval)
        return new.time_ns(interval) / before if before else otherwise

    whole = factor((*operations.forward, *operations.loss, *operations.backward, *operations.step), 1.0)
    backward = factor(operations.backward, whole)
    gradients = sorted(operations.gradients, key=lambda gradient: gradient.parameter)
    return _Factors(
        forward=factor(operations.forward, whole),
        loss=factor(operations.loss, backward),
        gradients=tuple(factor(gradient.operations, backward) for gradient in gradients),
        tail=factor(operations.tail, backward),
        step=factor(operations.step, whole),
    )


class _Clock:
    """Converts the recorded times of a rank in chronological order; intervals above 0 become at least 1 ns long."""

    def __init__(self, start_ns: int) -> None:
        self._old_ns = self._new_ns = start_ns

    def until(self, moment_ns: int, factor: float) -> int:
        """Convert a recorded time, which must not be earlier than that of the previous call."""
        interval_ns = moment_ns - self._old_ns
        self._old_ns = moment_ns
        self._new_ns += max(round(interval_ns * factor), min(interval_ns, 1))
        return self._new_ns


def _rescale_iteration(old: Iteration, clock: _Clock, factors: _Factors) -> Iteration:
    ready = list(old.ready_ns)
    # The clock only moves forward, so the calls below must be in chronological order.
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
            f"trace: workload.source: expected 'module', a trace of computation alone, got {workload.source!r}; "
            "communication does not become faster with the device: record the plain module"
        )
    compared: list[tuple[str, object, object]] = []
    if None not in (workload.batch, operations.batch):
        compared.append(("batch", workload.batch, operations.batch))
    compared.append(("parameters", len(workload.parameters), len(operations.parameters)))
    for index, (recorded, counted) in enumerate(zip(workload.parameters, operations.parameters, strict=False)):
        compared += [
            (f"parameters[{index}].{name}", getattr(recorded, name), getattr(counted, name))
            for name in ("name", "shape", "dtype")
        ]
    for field, expected, seen in compared:
        if seen != expected:
            raise ValueError(
                f"operations: {field}: expected {expected!r}, as in the trace, got {seen!r}; "
                "measure the operations of the model that was recorded, with its batch"
            )
