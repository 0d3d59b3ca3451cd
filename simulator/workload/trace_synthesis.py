"""Synthesis: traces made from operations and data sheets instead of recordings.

`synthesize` makes a trace from a model alone, or from a model and measured times of its step or of parts of it.
`rescale` converts a recorded trace to another device, interval by interval, and keeps its variation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import inf
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...reference.files.writing import milliseconds
from ...reference.trace import WIDEST_BOUND, Iteration, RankTrace, Trace, Workload
from ..catalogue import RESCALED_FROM
from .compute_times import Floats
from .roofline import CONVOLUTIONS, EAGER_PACE_ERROR, Device, Operation, Operations, built_in_operations, data_sheets

WINOGRAD = 2.25
"""Times as many multiplications as a convolution of 3 x 3 needs at least, by Winograd's algorithm, which libraries
use without tensor cores (Lavin and Gray, arXiv 1509.09308)."""
MOST_REACHED = 0.85
"""Part of the peak arithmetic rate that no step exceeds: the best of 446 measured ones reaches 0.84."""
DOUBTFUL = 3
"""Multiple of the time by name above which a measured step is doubtful. Of 446 published steps, the longest takes 2.1
times as long as the steps of other models let expect (`validation/measured_utilisation.py`)."""
LONGEST = 100
"""Multiple of the roofline time, or of the host's, above which a measured time has another unit. The slowest of 446
measured steps takes 5.9 times as long."""
OF_OPERATIONS = ("model", "parameters", "buffers", "torch_version", "batch", "input_shape", "tokens", "flops")
"""Fields of operations that a trace of them has too."""


def synthesize(
    operations: Operations,
    device: Device,
    *,
    step_ns: int | None = None,
    forward_ns: int | None = None,
    backward_ns: int | None = None,
    optimizer_ns: int | None = None,
) -> Trace:
    """Make a trace of one iteration of one rank, without communication.

    Measured times include all waiting for the host. All other times are roofline times on `device`, with the measured
    ceilings of its generation, but no kernel starts before the host has launched it: with many small kernels, the
    host's pace determines the times. The trace's `compute_bounds` state how far these times may be off; if a measured
    step is doubtful, they contain both it and the time by name.

    Each gradient gets an additional nanosecond, so that gradients of one operation keep their order in the trace.

    The measured times are those of the iteration, of its forward pass, of its backward pass with the loss, and of the
    optimiser step. If the measured parts leave more of `step_ns` than the roofline time of the other parts, their
    forward and backward pass are lengthened; otherwise all of these are shortened.

    Raises:
        ValueError: No operation takes any time, the measured parts are longer than `step_ns`, or less than one
            nanosecond per gradient remains for the backward pass.
    """
    count = len(operations.gradients)
    measured = {"forward": forward_ns, "backward": backward_ns, "optimizer": optimizer_ns}
    least_ns = sum(count if ns is None and part == "backward" else ns or 0 for part, ns in measured.items())
    for name, ns, least in ("backward_ns", backward_ns, count), ("step_ns", step_ns, least_ns):
        if ns is not None and ns < least:
            sums = "one nanosecond per gradient" if least == count else "the measured parts together"
            raise ValueError(f"{name}: expected at least {least} ns ({sums}), got {ns} ns; check the measured times")
    gaps = [gradient.operations for gradient in operations.gradients]
    intervals = [operations.forward, operations.loss, *gaps, operations.tail, operations.step]
    times_ns = np.array([device.time_ns(interval) for interval in intervals])
    if not times_ns.any():
        raise ValueError(f"operations: expected operations that take time on {device.name}, got none")
    kernels = [sum(operation.kernels for operation in interval) for interval in intervals]
    by_name_ns = _paced(times_ns, kernels, device.pace_ns, np.zeros(len(times_ns), bool))[-1]
    doubt = 0.0 if step_ns is None or device.generation is None else step_ns / by_name_ns
    times_ns, known = _with_measured(times_ns, measured, step_ns)

    def ends_ns(roofline: float = 1.0, pace: float = 1.0) -> list[float]:
        return _paced(np.where(known, times_ns, roofline * times_ns), kernels, pace * device.pace_ns, known)

    elapsed, slow_host = ends_ns(), 1 + EAGER_PACE_ERROR
    low, high = device.bounds(operations)
    shortest_ns = _arithmetic_ns([one for interval in intervals for one in interval], device) / MOST_REACHED
    low_ns, high_ns = max(shortest_ns, ends_ns(low, 1 / slow_host)[-1]), ends_ns(high, slow_host)[-1]
    if doubt > DOUBTFUL:
        low_ns = by_name_ns
    end_ns = round(elapsed[-1]) + count if step_ns is None else step_ns
    moments = [min(round(ns), end_ns - count) for ns in elapsed]
    ready = [moment + number for number, moment in enumerate(moments[2:-2], start=1)]
    by_index = dict(zip(operations.ready_order, ready, strict=True))
    iteration = Iteration(
        forward_start_ns=0,
        forward_end_ns=moments[0],
        backward_start_ns=moments[1],
        backward_end_ns=moments[-2] + count,
        optimizer_start_ns=moments[-2] + count,
        optimizer_end_ns=moments[-1] + count,
        end_ns=end_ns,
        host_bound_ns=round(elapsed[-1] - ends_ns(pace=0)[-1]),
        synchronized=False,
        ready_ns=tuple(by_index[index] for index in range(count)),
    )
    given = {"step": step_ns, **measured}
    scaled = ", ".join(f"{name} of {milliseconds(ns, '.3f')} ms" for name, ns in given.items() if ns is not None)
    if doubt > DOUBTFUL:
        scaled += f"; the step takes {doubt:.2g} times its usual time: check unit, batch and precision"
    origin = "its roofline" if device.generation is None else "measured utilisation"
    workload = Workload(
        **{name: getattr(operations, name) for name in OF_OPERATIONS},
        memory=operations.memory,
        source="module",
        device="meta",
        device_name=f"{device.name} by {origin}{', scaled to a measured ' * bool(scaled)}{scaled}",
        backend=None,
        world_size=1,
        flops_per_s=device.flops_per_s,
        memory_bytes_per_s=device.bytes_per_s,
        compute_bounds=_bounds(elapsed[-1], min(elapsed[-1], low_ns), high_ns),
    )
    return Trace(workload=workload, ranks=(RankTrace(rank=0, iterations=(iteration,)),))


def check_measured(operations: Operations, device: Device, measured_ns: Mapping[str, int]) -> None:
    """Refuse measured times that the arithmetic alone exceeds at the device's peak rate, or of another order.

    The times are arguments of `synthesize`, such as `step_ns`.

    Raises:
        ValueError: A time is too short or too long.
    """
    passes = {"forward_ns": operations.forward, "backward_ns": (*operations.loss, *operations.backward)}
    passes["step_ns"] = (*passes["forward_ns"], *passes["backward_ns"], *operations.step)
    for name, ns in measured_ns.items():
        done = passes.get(name, ())
        least_ns = _arithmetic_ns(done, device)
        usual_ns = max(device.time_ns(done), device.pace_ns * sum(one.kernels for one in done))
        if not done or least_ns <= ns <= usual_ns * LONGEST:
            continue
        least, most = milliseconds(least_ns, ".3g"), milliseconds(usual_ns * LONGEST, ".3g")
        limit = f"at least {least} ms, which the arithmetic takes at the peak rate of {device.name}"
        if ns > least_ns:
            limit = f"at most {most} ms, {LONGEST:,} times the time on {device.name}"
        raise ValueError(
            f"{name.removesuffix('_ns')}: expected {limit}, got {milliseconds(ns, '.4g')} ms; check the unit, the "
            "batch, the device and its precision, such as h100-bf16"
        )


def _arithmetic_ns(operations: Sequence[Operation], device: Device) -> float:
    """Return how long operations take at least, at the peak arithmetic rate of a device."""
    saved = WINOGRAD if device.precision == "fp32" else 1.0
    flops = sum(one.flops / (saved if one.kind in CONVOLUTIONS else 1.0) for one in operations)
    return 1e9 * flops / device.flops_per_s


def _with_measured(
    times_ns: Floats, measured: Mapping[str, int | None], step_ns: int | None
) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the times of all intervals, scaled to the measured ones, and which of them are known.

    If the step was measured, all are. What remains of the step goes to the passes that were not measured, because the
    optimiser reads and writes memory in sequence, which reaches the peak bandwidth; matrix products seldom reach
    their peak. If the step is too short for all roofline times, the optimiser shares.

    Args:
        times_ns: Of forward, loss, each gradient, tail and optimiser.
        measured: Nanoseconds of the parts, with one for each gradient. None: not measured.
        step_ns: Nanoseconds of the step, likewise.
    """
    last, gradients = len(times_ns) - 1, len(times_ns) - 4
    times_ns, known = times_ns.copy(), np.zeros(len(times_ns), bool)
    parts = {"forward": slice(0, 1), "backward": slice(1, last), "optimizer": slice(last, None)}
    for name, ns in measured.items():
        if ns is not None:
            times_ns[parts[name]] = _scaled(times_ns[parts[name]], ns - gradients * (name == "backward"))
            known[parts[name]] = True
    if step_ns is not None:
        passes = ~known
        passes[last] = False
        remaining_ns = step_ns - gradients - times_ns[~passes].sum()
        longer = passes if 0 < times_ns[passes].sum() < remaining_ns else ~known
        times_ns[longer] = _scaled(times_ns[longer], step_ns - gradients - times_ns[~longer].sum())
        known[:] = True
    return times_ns, known


def _scaled(times_ns: Floats, sum_ns: float) -> Floats:
    """Multiply times by one factor so that they have this sum; equal times if all are 0."""
    whole = times_ns.sum()
    return times_ns * (sum_ns / whole) if whole else np.full(len(times_ns), sum_ns / max(1, len(times_ns)))


def _bounds(usual_ns: float, low_ns: float, high_ns: float) -> tuple[float, float]:
    """Return two durations as multiples of the usual one, for `Workload.compute_bounds`."""
    if not usual_ns:
        return 1.0, 1.0
    return max(1 / WIDEST_BOUND, low_ns / usual_ns), min(WIDEST_BOUND, high_ns / usual_ns)


def _paced(times_ns: Floats, kernels: Sequence[int], pace_ns: float, known: NDArray[np.bool_]) -> list[float]:
    """Return when each interval ends, if the host launches one kernel every `pace_ns` from the start on.

    An interval ends after the previous one and its own kernels, but not before its last kernel was launched and has
    run. Kernels of one interval count as equally long. Known times include the waiting for the host.
    """
    launched, ended = 0.0, 0.0
    ends = []
    for ns, count, is_known in zip(times_ns.tolist(), kernels, known.tolist(), strict=True):
        launched += count * pace_ns
        ended = max(ended + ns, launched + ns / count) if count and not is_known else ended + ns
        if is_known:
            launched = min(launched, ended)
        ends.append(ended)
    return ends


def rescale(
    trace: Trace, operations: Operations, old: Device, new: Device, *, new_operations: Operations | None = None
) -> Trace:
    """Convert a recorded trace to another device.

    Every recorded interval is multiplied by the ratio of the roofline times of its operations on `new` and on `old`,
    so differences between iterations and between ranks are kept. If gradients became ready in another order than in
    `operations`, each keeps its own operations. An interval of the backward pass without operations is multiplied by
    the ratio of the whole backward pass. Gradients that became ready one after the other stay in this order.

    No kernel ends before the host has launched it, so a step that waits for its host is not shorter on a faster
    device. The host counts as no slower than the one that launched the recorded iteration. A recording on another
    device says no more of `new` than its name does, so the `compute_bounds` are at least as wide as by name.

    `operations` are those of the recorded model on `old`, the device of the recording, and `new_operations` those on
    `new`, if `new` computes under another autocast; None: the same.

    Raises:
        ValueError: The trace was recorded with communication, which does not depend on the device, or the operations
            are not those of its model; the message names the field, the expected and the actual value.
    """
    changed = operations if new_operations is None else new_operations
    for counted in (operations, changed):
        _check_match(trace.workload, counted)
    intervals = _intervals(operations, old, changed, new)

    slow_host = 1 + EAGER_PACE_ERROR
    factors = 1.0, 1 / slow_host, slow_host
    ranks, *extremes = (_rescaled_ranks(trace, intervals, new.pace_ns * factor) for factor in factors)
    low, high = trace.workload.compute_bounds
    error = 1.0 if new == old else 1 + new.error(changed)
    multiples = min(low, 1 / error), max(high, error)
    update = {
        "device_name": f"{new.name}{RESCALED_FROM}{trace.workload.device_name}",
        "flops_per_s": new.flops_per_s,
        "memory_bytes_per_s": new.bytes_per_s,
        "compute_bounds": _bounds(_duration_ns(ranks), *map(mul, multiples, map(_duration_ns, extremes))),
    }
    return Trace(workload=trace.workload.model_copy(update=update), layouts=trace.layouts, ranks=ranks)


def synthesize_batch(operations: Operations, device: Device, step_ns: float | None, multiple: float) -> Trace:
    """Make the trace of operations with a multiple of the batch; a measured step changes as the roofline does."""
    scaled = operations if multiple == 1 else operations.with_batch(multiple)
    if step_ns is None:
        return synthesize(scaled, device)
    before, after = (_duration_ns(synthesize(one, device).ranks) for one in (operations, scaled))
    return synthesize(scaled, device, step_ns=round(step_ns * (after / before)))


def batches_of(trace: Trace, *, has_step: bool = True) -> Callable[[float], Trace] | None:
    """Return what makes a trace with a multiple of its batch, if `synthesize` made it of a built-in model.

    The trace alone does not show where the host's pace would limit another batch; the model's operations do.
    `has_step`: whether the step may have been measured.
    """
    workload, sheets = trace.workload, data_sheets().values()
    device = next((one for one in sheets if workload.device_name.startswith(f"{one.name} by ")), None)
    known = device and workload.batch and built_in_operations(workload.model, device.autocast)
    if not (device and workload.batch and known and known.batch):
        return None
    operations = known if known.batch == workload.batch else known.with_batch(workload.batch / known.batch)
    steps_ns = (None, trace.ranks[0].iterations[0].end_ns)[: 1 + has_step]
    ways = (partial(synthesize_batch, operations, device, step_ns) for step_ns in steps_ns)
    return next((made for made in ways if made(1.0) == trace), None)


def with_batch(trace: Trace, multiple: float) -> Trace:
    """Convert a trace to a multiple of its batch on each device, as if passes took a time in proportion to the batch.

    What `synthesize` made of a built-in model's operations alone is made again. Otherwise the optimiser step stays.
    Small batches take longer than that, because kernels fill a device less and the host may limit it; the trace's
    `compute_bounds` contain that they take as long as the recorded batch.

    Raises:
        ValueError: The trace was recorded with communication, which does not depend on the batch.
    """
    _check_module(trace.workload)
    if (made := batches_of(trace, has_step=False)) is not None:
        return made(multiple)
    passes = _Interval(multiple)
    gradients = (passes,) * len(trace.workload.parameters)
    intervals = _Intervals(forward=passes, loss=passes, gradients=gradients, tail=passes, step=_Interval(1.0))
    ranks = _rescaled_ranks(trace, intervals, 0.0)
    batch = trace.workload.batch and max(1, round(trace.workload.batch * multiple))
    memory = trace.workload.memory and trace.workload.memory.with_batch(batch or 1)
    flops = trace.workload.flops and round(trace.workload.flops * multiple)
    low, high = trace.workload.compute_bounds
    bounds = _bounds(1.0, min(low, low / multiple), max(high, high / multiple))
    words = f"; passes of batch {trace.workload.batch} scaled to {batch}" * bool(batch)
    update = {"batch": batch, "memory": memory, "flops": flops, "input_shape": None, "compute_bounds": bounds}
    workload = trace.workload.model_copy(update=update | {"device_name": f"{trace.workload.device_name}{words}"})
    return Trace(workload=workload, layouts=trace.layouts, ranks=ranks)


def _rescaled_ranks(trace: Trace, intervals: "_Intervals", pace_ns: float) -> tuple[RankTrace, ...]:
    return tuple(
        rank.model_copy(update={"iterations": tuple(_rescaled(rank.iterations, intervals, pace_ns))})
        for rank in trace.ranks
    )


def _duration_ns(ranks: Sequence[RankTrace]) -> int:
    return sum(iteration.duration_ns for rank in ranks for iteration in rank.iterations)


class _Interval(NamedTuple):
    """Ratio of an interval's time on the new device to that on the old one, and the kernels to launch in it."""

    factor: float
    kernels: int = 0


class _Intervals(NamedTuple):
    """The intervals of an iteration; `gradients` by parameter index."""

    forward: _Interval
    loss: _Interval
    gradients: tuple[_Interval, ...]
    tail: _Interval
    step: _Interval


def _intervals(before: Operations, old: Device, after: Operations, new: Device) -> _Intervals:
    def interval(earlier: Sequence[Operation], later: Sequence[Operation], otherwise: float) -> _Interval:
        old_ns = old.time_ns(earlier)
        factor = new.time_ns(later) / old_ns if old_ns else otherwise
        return _Interval(factor, sum(operation.kernels for operation in later))

    everything, changed = ((*some.forward, *some.loss, *some.backward, *some.step) for some in (before, after))
    whole = interval(everything, changed, 1.0).factor
    backward = interval(before.backward, after.backward, whole).factor
    earlier, later = ({one.parameter: one.operations for one in some.gradients} for some in (before, after))
    return _Intervals(
        forward=interval(before.forward, after.forward, whole),
        loss=interval(before.loss, after.loss, backward),
        gradients=tuple(interval(earlier[index], later[index], backward) for index in range(len(earlier))),
        tail=interval(before.tail, after.tail, backward),
        step=interval(before.step, after.step, whole),
    )


class _Clock:
    """Converts the recorded times of a rank in chronological order; intervals above 0 become at least 1 ns long.

    In each iteration the host launches one kernel every `pace_ns`, and intervals wait for their kernels.
    """

    def __init__(self, start_ns: int) -> None:
        self._old_ns = self._new_ns = start_ns
        self._launched_ns = self._pace_ns = 0.0

    def begin(self, moment_ns: int, pace_ns: float) -> int:
        """Convert the start of an iteration."""
        start_ns = self.until(moment_ns, _Interval(1.0))
        self._launched_ns, self._pace_ns = start_ns, pace_ns
        return start_ns

    def until(self, moment_ns: int, interval: _Interval) -> int:
        """Convert a recorded time, which must not be earlier than that of the previous call."""
        interval_ns = moment_ns - self._old_ns
        self._old_ns = moment_ns
        self._launched_ns += interval.kernels * self._pace_ns
        if interval_ns:  # moments that were equal stay equal
            self._new_ns = max(self._new_ns + max(round(interval_ns * interval.factor), 1), round(self._launched_ns))
        return self._new_ns


def _rescaled(recorded: Sequence[Iteration], intervals: _Intervals, pace_ns: float) -> Iterator[Iteration]:
    """Convert the iterations of a rank."""
    clock = _Clock(recorded[0].forward_start_ns)
    idle = _Interval(intervals.step.factor)
    for old in recorded:
        ready = list(old.ready_ns)
        gradients = sorted((moment, index) for index, moment in enumerate(ready) if moment is not None)
        computed = [
            (old.forward_end_ns, intervals.forward),
            (old.backward_start_ns, intervals.loss),
            *((moment, intervals.gradients[index]) for moment, index in gradients),
            (old.backward_end_ns, intervals.tail),
        ]
        slowest_ns = _slowest_pace_ns(old.forward_start_ns, [*computed, (old.end_ns, intervals.step)])
        # The clock only moves forward, so these calls must be in chronological order.
        forward_start = clock.begin(old.forward_start_ns, min(pace_ns, slowest_ns))
        forward_end, backward_start, *moments, backward_end = (clock.until(*one) for one in computed)
        for (_, index), moment in zip(gradients, moments, strict=True):
            ready[index] = moment
        optimizer = (old.optimizer_start_ns, old.optimizer_end_ns)
        optimizer_start, optimizer_end = (None if ns is None else clock.until(ns, idle) for ns in optimizer)
        yield Iteration(
            forward_start_ns=forward_start,
            forward_end_ns=forward_end,
            backward_start_ns=backward_start,
            ready_ns=tuple(ready),
            backward_end_ns=backward_end,
            optimizer_start_ns=optimizer_start,
            optimizer_end_ns=optimizer_end,
            end_ns=clock.until(old.end_ns, intervals.step),
            synchronized=old.synchronized,
            layout=old.layout,
        )


def _slowest_pace_ns(start_ns: int, steps: Sequence[tuple[int, _Interval]]) -> float:
    """Return the pace of a host that just kept up with a recorded iteration, given its intervals and their ends."""
    kernels = accumulate(interval.kernels for _, interval in steps)
    paces = ((ns - start_ns) / count for (ns, _), count in zip(steps, kernels, strict=True) if count)
    return min(paces, default=inf)


def _check_module(workload: Workload) -> None:
    if workload.source != "module":
        raise ValueError(
            f"trace: workload.source: expected 'module', a trace of computation alone, got {workload.source!r}; "
            "communication does not become faster with the device: record the plain module"
        )


def _check_match(workload: Workload, operations: Operations) -> None:
    _check_module(workload)
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
