"""Training steps in a file of torch's profiler: when each gradient, all-reduce, copy and phase took place.

With a GPU, times are those of the GPU, which may run tens of milliseconds behind the host: an operation took place
when the activities ran that the host launched inside it. Without a GPU, they are those of the host.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from reference.errors import TraceError

from .events import Activity, HostOperation, ProfilerFile, Thread

STEP = "ProfilerStep#"
FORWARD = "DistributedDataParallel.forward"
NODE = "autograd::engine::evaluate_function: "
ACCUMULATE = "torch::autograd::AccumulateGrad"
PACK = "torch::distributed::reducer::mul_out"
COPY_OUT = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
OPTIMIZER = "Optimizer.step#"
COLLECTIVE_CALL = "record_param_comms"
ALL_REDUCE_CALLS = ("c10d::allreduce_", "c10d::allreduce_coalesced_")
ALL_REDUCE_RUNS = re.compile(r"\w+:all_?reduce(_coalesced)?$")
"""Names that torch and its reducer give to operations.

The last is `nccl:all_reduce` with NCCL and RCCL, inside the call, and `gloo:all_reduce` on the thread that runs it.
"""
ELEMENT_BYTES = {
    **dict.fromkeys(("float", "int", "int32"), 4),
    **dict.fromkeys(("double", "long", "long int", "int64"), 8),
    **dict.fromkeys(("half", "bfloat16", "c10::half", "c10::bfloat16"), 2),
    **dict.fromkeys(("byte", "char", "bool", "signed char", "unsigned char", "int8", "uint8"), 1),
}
"""Bytes of one element, by the names of element types in the file, in lower case."""

MOST_ELEMENTS = 2**50
"""Most elements of a tensor; more are damage."""
MOST_NESTED = 8
"""Most calls that begin between a call and one inside it."""

Span = tuple[int, int]
"""Start and end, in nanoseconds from the first event of the file."""


class Gradient(NamedTuple):
    """The accumulation of one gradient.

    Attributes:
        ready_ns: When it was computed.
        shape: Its shape, if it was noted.
        dtype: Name of its element type, if it was noted.
        hooks: The operation inside which the reducer's hook ran.
    """

    ready_ns: int
    shape: tuple[int, ...] | None
    dtype: str | None
    hooks: HostOperation


class AllReduce(NamedTuple):
    """An all-reduce.

    Attributes:
        issued_ns: When the host called it.
        start_ns: When it began to run; it then also waits for the other ranks.
        end_ns: When it ended.
        size_bytes: Bytes of its message, if they are known.
        dtype: Name of its element type, if it was noted.
        gradients: Number of gradients of the step that were accumulated when it was called, the one in whose hook it
            was called included.
        in_hook: Whether the hook of a gradient called it, as torch's reducer does.
    """

    issued_ns: int
    start_ns: int
    end_ns: int
    size_bytes: int | None
    dtype: str | None
    gradients: int
    in_hook: bool


class Copy(NamedTuple):
    """A copy of one gradient out of its bucket: its start and end, and its bytes if they are known."""

    start_ns: int
    end_ns: int
    size_bytes: int | None


@dataclass(frozen=True)
class Step:
    """One training step; moments in nanoseconds from the first event of the file.

    Attributes:
        start_ns: When the step began and the one before was over.
        forward_end_ns: End of the forward pass.
        backward_start_ns: Start of the loss and the backward pass.
        gradients: In the order in which they were accumulated.
        all_reduces: In the order in which they were called.
        copies: Copies out of buckets, in the order in which they were called.
        optimizer: Start and end of the optimiser step, if there is one.
        end_ns: End of the step.
        computing_ns: Time in the backward pass in which the GPU computed; of the whole pass without a GPU.
        host_bound_ns: Time in the step in which the GPU waited for the host to launch something; 0 without a GPU.
        backward_host_bound_ns: The part of `host_bound_ns` in the backward pass.
    """

    start_ns: int
    forward_end_ns: int
    backward_start_ns: int
    gradients: tuple[Gradient, ...]
    all_reduces: tuple[AllReduce, ...]
    copies: tuple[Copy, ...]
    optimizer: Span | None
    end_ns: int
    computing_ns: int
    host_bound_ns: int
    backward_host_bound_ns: int

    @property
    def last_ready_ns(self) -> int:
        """When the last gradient was ready."""
        return max(gradient.ready_ns for gradient in self.gradients)

    @property
    def buckets(self) -> tuple[AllReduce, ...]:
        """The all-reduces that the reducer called from the hooks of gradients."""
        return tuple(one for one in self.all_reduces if one.in_hook)


def read_steps(file: ProfilerFile) -> list[Step]:
    """Return the training steps of a file; steps without a gradient are left out.

    Raises:
        TraceError: There is no training step; the message says what is missing.
    """
    windows = _windows(file)
    reader = _Reader(file)
    steps = [step for step in reader.steps(windows) if step is not None]
    if not steps:
        raise TraceError(
            f"{file.path}: expected events named {ACCUMULATE}, one for each gradient, got none in {len(windows)} "
            "steps; profile training steps, with ProfilerActivity.CPU among the activities"
        )
    return steps


class Window(NamedTuple):
    """A step on the host: its start, the start of the next one, and its end, which may come a little earlier."""

    start_ns: int
    next_ns: int
    end_ns: int


def _windows(file: ProfilerFile) -> list[Window]:
    """Return the steps on the host."""
    marks = [one for one in file.operations if one.name.startswith(STEP)]
    forwards = file.by_name.get(FORWARD, [])
    starts = [one.start_ns for one in marks]
    several = any(count > 1 for count in Counter(bisect_right(starts, one.start_ns) for one in forwards).values())
    if marks and not several:
        edges = [*starts, marks[-1].end_ns]
        ends = [one.end_ns for one in marks]
        return [
            Window(start, after, min(end, after)) for (start, after), end in zip(pairwise(edges), ends, strict=True)
        ]
    if forwards:
        edges = [*(one.start_ns for one in forwards), max(one.end_ns for one in file.operations)]
    else:
        steps = [one.end_ns for one in file.operations if one.name.startswith(OPTIMIZER)]
        edges = [min((one.start_ns for one in file.operations), default=0), *steps]
    if len(edges) < 2:
        raise TraceError(
            f"{file.path}: expected training steps, got no event named {STEP}N, {FORWARD} or {OPTIMIZER}...; call "
            "`step()` of the profiler after each training step, with a schedule"
        )
    return [Window(start, after, after) for start, after in pairwise(edges)]


class _Reader:
    """Finds the parts of steps in one file."""

    def __init__(self, file: ProfilerFile) -> None:
        self._file = file
        self._computing = [one for one in file.activities if not one.communicates]
        self._collectives = [one for one in file.activities if one.communicates]
        self._on_gpu = bool(self._computing)
        self._launches = [one.launched_ns for one in self._computing]
        self._collective_launches = [one.launched_ns for one in self._collectives]
        self._stream = _busiest_stream(self._computing)
        self._by_thread: dict[Thread, tuple[list[int], list[Activity]]] = {}
        for one in self._computing:
            launches, activities = self._by_thread.setdefault(one.thread, ([], []))
            launches.append(one.launched_ns)
            activities.append(one)
        self._starts = {name: [one.start_ns for one in ops] for name, ops in file.by_name.items()}
        self._nodes = [one.start_ns for one in file.operations if one.name.startswith((NODE, ACCUMULATE))]

    def steps(self, windows: Sequence[Window]) -> Iterator[Step | None]:
        """Read the step in each of these windows; None: no gradient was accumulated in it.

        A step begins when the host begins it and the GPU is done with the one before, and ends likewise.
        """
        done_ns = 0
        for window in windows:
            start_ns = max(window.start_ns, done_ns)
            done_ns = max([done_ns, *(one.end_ns for one in self._launched_on_stream(*window[:2]))])
            yield self._step(window, start_ns, max(start_ns, window.end_ns, done_ns))

    def _step(self, window: Window, start_ns: int, end_ns: int) -> Step | None:
        gradients = list(self._gradients(window, start_ns))
        if not gradients:
            return None
        divide_ns = self._end_of_forward(window)
        forward = [one.end_ns for one in self._launched_on_stream(window.start_ns, divide_ns)]
        backward = self._launched_on_stream(divide_ns, window.next_ns)
        on_gpu = self._on_gpu
        if on_gpu:
            forward_end_ns = max([start_ns, *forward])
            backward_start_ns = max(forward_end_ns, min((one.start_ns for one in backward), default=0))
        else:
            forward_end_ns = max(start_ns, divide_ns)
            backward_start_ns = self._first_node_ns(forward_end_ns)
        gradients = [one._replace(ready_ns=max(one.ready_ns, backward_start_ns)) for one in gradients]
        last_ready_ns = max(one.ready_ns for one in gradients)
        packing = self._launched_inside(self._named(PACK, window))
        computing = [(one.start_ns, one.end_ns) for one in backward if one not in packing]
        waits = self._waits_for_host(start_ns, window)
        return Step(
            start_ns=start_ns,
            forward_end_ns=forward_end_ns,
            backward_start_ns=backward_start_ns,
            gradients=tuple(gradients),
            all_reduces=tuple(self._all_reduces(window, gradients)),
            copies=tuple(self._copies(window)),
            optimizer=self._optimizer(window),
            end_ns=end_ns,
            computing_ns=_inside(computing, backward_start_ns, last_ready_ns)
            if on_gpu
            else last_ready_ns - backward_start_ns,
            host_bound_ns=_inside(waits, start_ns, end_ns),
            backward_host_bound_ns=_inside(waits, backward_start_ns, last_ready_ns),
        )

    # Parts of a step

    def _gradients(self, window: Window, start_ns: int) -> Iterator[Gradient]:
        inner = self._named(ACCUMULATE, window)
        outer = self._named(NODE + ACCUMULATE, window)
        if len(outer) != len(inner):
            outer = inner
        for hooks, one in zip(outer, inner, strict=True):
            shape, dtype = _shape_and_dtype(one)
            ready_ns = one.end_ns
            if self._on_gpu:
                launches, activities = self._by_thread.get(hooks.thread, ([], []))
                place = bisect_left(launches, hooks.start_ns) - 1
                is_of_step = place >= 0 and launches[place] >= window.start_ns
                ready_ns = activities[place].end_ns if is_of_step else max(start_ns, hooks.start_ns)
            yield Gradient(ready_ns, shape, dtype, hooks)

    def _end_of_forward(self, window: Window) -> int:
        """Return the end of the forward pass on the host: that of DDP, or where the first node's backward begins."""
        forwards = self._named(FORWARD, window)
        return forwards[-1].end_ns if forwards else self._first_node_ns(window.start_ns)

    def _first_node_ns(self, start_ns: int) -> int:
        """Return when the host began with the first node of a backward pass from `start_ns` on."""
        return self._nodes[min(bisect_left(self._nodes, start_ns), len(self._nodes) - 1)]

    def _all_reduces(self, window: Window, gradients: Sequence[Gradient]) -> Iterator[AllReduce]:
        accumulated = [one.hooks.start_ns for one in gradients]
        calls = [one for name in ALL_REDUCE_CALLS for one in self._named(name, window)]
        runs = [one for name in self._starts if ALL_REDUCE_RUNS.match(name) for one in self._named(name, window)]
        described = self._named(COLLECTIVE_CALL, window)
        calls, runs = (sorted(some, key=lambda one: one.start_ns) for some in (calls or runs, runs or calls))
        for call, run in zip(calls, _paired(calls, runs), strict=True):
            first = bisect_left(self._collective_launches, call.start_ns)
            last = bisect_right(self._collective_launches, call.end_ns)
            ran = [one for one in self._collectives[first:last] if one.thread == call.thread]
            count = bisect_right(accumulated, call.start_ns)
            in_hook = count > 0 and gradients[count - 1].hooks.contains(call.thread, call.start_ns)
            start_ns, end_ns = run.start_ns, run.end_ns
            if ran:
                start_ns, end_ns = min(one.start_ns for one in ran), max(one.end_ns for one in ran)
            elif self._on_gpu:  # a group of one rank runs nothing
                start_ns = end_ns = max([call.start_ns, *(one.ready_ns for one in gradients[:count])])
            size_bytes, dtype = _message(run, described) or (self._copied_before(call), None)
            yield AllReduce(call.start_ns, start_ns, end_ns, size_bytes, dtype, count, in_hook)

    def _copied_before(self, call: HostOperation) -> int | None:
        """Return the bytes of the copy launched last before a call: functional collectives copy their input."""
        launches, activities = self._by_thread.get(call.thread, ([], []))
        place = bisect_left(launches, call.start_ns) - 1
        return activities[place].size_bytes if place >= 0 and "memcpy" in activities[place].kind else None

    def _copies(self, window: Window) -> Iterator[Copy]:
        for call in self._named(COPY_OUT, window):
            ran = self._launched_inside([call])
            start_ns = min((one.start_ns for one in ran), default=call.start_ns)
            end_ns = max((one.end_ns for one in ran), default=call.end_ns)
            sizes = [one.size_bytes for one in ran if one.size_bytes]
            size_bytes, _ = _message(call, ()) or (None, None)
            yield Copy(start_ns, end_ns, sizes[0] if sizes else size_bytes)

    def _optimizer(self, window: Window) -> Span | None:
        names = [name for name in self._starts if name.startswith(OPTIMIZER)]
        calls = [one for name in names for one in self._named(name, window)]
        if not calls:
            return None
        if not self._on_gpu:
            return min(one.start_ns for one in calls), max(one.end_ns for one in calls)
        ran = [one for one in self._launched_inside(calls) if one.stream == self._stream]
        return (min(one.start_ns for one in ran), max(one.end_ns for one in ran)) if ran else None

    def _waits_for_host(self, start_ns: int, window: Window) -> list[Span]:
        """Return the times in which the GPU had nothing to do because the host had not launched the next activity."""
        waits, done_ns = [], start_ns
        for one in self._launched_on_stream(*window[:2]):
            if done_ns < min(one.start_ns, one.launching_ns):
                waits.append((done_ns, min(one.start_ns, one.launching_ns)))
            done_ns = max(done_ns, one.end_ns)
        return waits

    # Lookups

    def _named(self, name: str, window: Window) -> list[HostOperation]:
        starts = self._starts.get(name, [])
        return self._file.by_name.get(name, [])[
            bisect_left(starts, window.start_ns) : bisect_left(starts, window.next_ns)
        ]

    def _launched_on_stream(self, start_ns: int, end_ns: int) -> list[Activity]:
        """Return what the host launched from `start_ns` on and before `end_ns` on the stream that computes."""
        first, last = bisect_left(self._launches, start_ns), bisect_left(self._launches, end_ns)
        return [one for one in self._computing[first:last] if one.stream == self._stream]

    def _launched_inside(self, operations: Iterable[HostOperation]) -> set[Activity]:
        """Return what the threads of these operations launched inside them."""
        found = set()
        for operation in operations:
            launches, activities = self._by_thread.get(operation.thread, ([], []))
            found.update(
                activities[bisect_left(launches, operation.start_ns) : bisect_right(launches, operation.end_ns)]
            )
        return found


def _busiest_stream(activities: Iterable[Activity]) -> tuple[int | str | None, int | str | None] | None:
    busy: Counter[tuple[int | str | None, int | str | None]] = Counter()
    for one in activities:
        if one.kind == "kernel":
            busy[one.stream] += one.end_ns - one.start_ns
    return busy.most_common(1)[0][0] if busy else None


def _inside(spans: Sequence[Span], start_ns: int, end_ns: int) -> int:
    """Return how much of the time from `start_ns` to `end_ns` these spans cover together."""
    covered, done_ns = 0, start_ns
    for start, end in sorted(spans):
        covered += max(0, min(end, end_ns) - max(start, done_ns))
        done_ns = max(done_ns, min(end, end_ns))
    return covered


def _shape_and_dtype(operation: HostOperation) -> tuple[tuple[int, ...] | None, str | None]:
    """Return shape and element type of an operation's first input, if they were noted."""
    dims, types = operation.arguments.dims, operation.arguments.types
    dtype = types[0] if isinstance(types, list) and types and isinstance(types[0], str) else ""
    if not dtype or not (isinstance(dims, list) and dims and isinstance(dims[0], list)):
        return None, None
    if not all(isinstance(size, int) and size >= 0 for size in dims[0]) or prod(dims[0]) > MOST_ELEMENTS:
        return None, None
    return tuple(dims[0]), dtype


def _paired(calls: Sequence[HostOperation], runs: Sequence[HostOperation]) -> list[HostOperation]:
    """Return for each call what ran: the first run of as many elements, as two threads may begin in another order."""
    if len(runs) != len(calls):
        return list(calls)
    waiting, paired = list(runs), []
    for call in calls:
        elements = _elements(call)
        place = next((place for place, run in enumerate(waiting) if _elements(run) == elements), 0)
        paired.append(waiting.pop(place))
    return paired


def _elements(operation: HostOperation) -> int | None:
    """Return the number of elements of the first input, a tensor or a list of tensors, if it was noted."""
    dims = operation.arguments.dims
    shapes = dims[0] if isinstance(dims, list) and dims and isinstance(dims[0], list) else None
    if shapes is None:
        return None
    several = shapes if all(isinstance(shape, list) for shape in shapes) else [shapes]
    if not all(isinstance(size, int) for shape in several for size in shape):
        return None
    return sum(prod(shape) for shape in several)


def _message(call: HostOperation, described: Sequence[HostOperation]) -> tuple[int, str] | None:
    """Return bytes and element type of a collective's message, from its own inputs or the call that contains it."""
    shape, dtype = _shape_and_dtype(call)
    if shape is not None and dtype is not None and dtype.lower() in ELEMENT_BYTES:
        return prod(shape) * ELEMENT_BYTES[dtype.lower()], dtype
    place = bisect_right(described, call.start_ns, key=lambda one: one.start_ns)
    for one in reversed(described[max(0, place - MOST_NESTED) : place]):
        noted = one.arguments
        if one.contains(call.thread, call.start_ns) and noted.elements is not None and noted.dtype is not None:
            each = ELEMENT_BYTES.get(noted.dtype.lower())
            return None if each is None else (noted.elements * each, noted.dtype)
    return None


def slow_down_beside_collectives(file: ProfilerFile) -> tuple[float, int] | None:
    """Return how many times as long kernels take while a collective runs, and the number of kernels compared.

    Kernels of one name and shape are compared. None: no kernel ran both beside a collective and alone.
    """
    collectives = sorted((one.start_ns, one.end_ns) for one in file.activities if one.communicates)
    starts = np.array([start for start, _ in collectives])
    ends = np.maximum.accumulate(np.array([end for _, end in collectives])) if collectives else starts
    alone: dict[str, list[int]] = {}
    beside: dict[str, list[int]] = {}
    for one in file.activities:
        if one.kind != "kernel" or one.communicates:
            continue
        before = int(np.searchsorted(starts, one.start_ns, side="right")) - 1
        key = f"{one.name} {one.shape}"
        if before >= 0 and ends[before] >= one.end_ns:
            beside.setdefault(key, []).append(one.end_ns - one.start_ns)
        elif (before < 0 or ends[before] <= one.start_ns) and not (
            before + 1 < len(starts) and starts[before + 1] < one.end_ns
        ):
            alone.setdefault(key, []).append(one.end_ns - one.start_ns)
    common = [key for key in beside if key in alone and any(alone[key])]
    if not common:
        return None
    shared_ns = sum(sum(beside[key]) for key in common)
    alone_ns = sum(float(np.mean(alone[key])) * len(beside[key]) for key in common)
    return shared_ns / alone_ns, sum(len(beside[key]) for key in common)
