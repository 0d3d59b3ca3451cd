"""Training steps in a file of torch's profiler: when each gradient, all-reduce, copy and phase took place.

With a GPU, times are those of the GPU, which may run tens of milliseconds behind the host: an operation took place
when the activities ran that the host launched inside it. Without a GPU, they are those of the host.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from operator import attrgetter
from statistics import fmean
from typing import Any, NamedTuple

from ...reference.errors import TraceError
from .profiler_events import Activity, HostOperation, Item, ProfilerFile, Thread, grouped

# Names that torch and its reducer give to operations

STEP = "ProfilerStep#"
FORWARD = "DistributedDataParallel.forward"
SHARDED = re.compile(r"FSDP::all_gather|FSDP::post_backward_reduce|FullyShardedDataParallel\b")
NODE = "autograd::engine::evaluate_function: "
ACCUMULATE = "torch::autograd::AccumulateGrad"
PACK = "torch::distributed::reducer::mul_out"
COPY_OUT = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
OPTIMIZER = "Optimizer.step#"
COLLECTIVE_CALL = "record_param_comms"
ALL_REDUCE_CALLS = ("c10d::allreduce_", "c10d::allreduce_coalesced_")
COLLECTIVE = re.compile(r"(?:nccl|rccl|xccl|hccl|gloo|ucc|mpi):(\w+)$")
"""A collective that runs: inside its call with NCCL and RCCL, on another thread with Gloo."""
ALL_REDUCE = re.compile(r"all_?reduce(_coalesced)?$")
ELEMENT_BYTES = {
    **dict.fromkeys(("float", "float32", "int", "int32"), 4),
    **dict.fromkeys(("double", "float64", "long", "long int", "int64"), 8),
    **dict.fromkeys(("half", "float16", "bfloat16", "c10::half", "c10::bfloat16"), 2),
    **dict.fromkeys(("byte", "char", "bool", "signed char", "unsigned char", "int8", "uint8"), 1),
}
"""Bytes of one element, by the names of element types in the file, in lower case."""
INTEGERS = frozenset(name for name in ELEMENT_BYTES if "int" in name or "long" in name)
"""Element types that gradients never have."""
LONG_START = 1.5
"""Multiple of the longest other step above which what precedes the first mark is more than a step."""
MOST_BUSY = 1.2
"""Largest ratio of the kernels' time to that of their stream; they may overlap slightly, and reach 0.98 in files."""
MOST_ELEMENTS = 2**50
"""Most elements of a tensor; more are damage."""
MOST_NESTED = 8
"""Most calls that begin between a call and one inside it."""

Span = tuple[int, int]
"""Start and end, in nanoseconds from the first event of the file."""

Moment = Callable[[Any], int]
START: Moment = attrgetter("start_ns")
LAUNCH: Moment = attrgetter("launch_start_ns")
THREAD: Callable[[Any], Thread] = attrgetter("thread")


class AccumulatedGradient(NamedTuple):
    """The accumulation of one gradient; None: not recorded."""

    ready_ns: int  #: when it was computed
    shape: tuple[int, ...] | None
    dtype: str | None
    hooks: HostOperation  #: inside which the reducer's hook ran


class ProfiledAllReduce(NamedTuple):
    """An all-reduce."""

    issued_ns: int  #: when the host called it
    start_ns: int  #: from then on it also waits for the other ranks
    end_ns: int
    size_bytes: int | None  #: None: unknown
    dtype: str | None  #: None: not recorded
    gradients: int  #: of the step, accumulated when it was called; includes the one in whose hook it was called
    in_hook: bool  #: whether the hook of a gradient called it, as torch's reducer does


class Copy(NamedTuple):
    """A copy of one gradient out of its bucket: its start and end, and its bytes if they are known."""

    start_ns: int
    end_ns: int
    size_bytes: int | None


@dataclass(frozen=True)
class ProfiledStep:
    """One training step; moments in nanoseconds from the first event of the file."""

    name: str  #: number of the step in the file
    on_gpu: bool  #: whether the moments are those of a GPU
    start_ns: int  #: when the step had begun and the one before was over
    forward_end_ns: int
    backward_start_ns: int  #: start of the loss
    gradients: tuple[AccumulatedGradient, ...]  #: as they were accumulated
    all_reduces: tuple[ProfiledAllReduce, ...]  #: as they were called
    other_collectives: dict[str, int]  #: number of each kind
    copies: tuple[Copy, ...]  #: out of buckets, as they were called
    optimizer: Span | None  #: None: no optimiser step
    end_ns: int
    computing_ns: int  #: time in the backward pass in which the GPU computed; of the whole pass without a GPU
    host_bound_ns: int  #: time in which the GPU waited for the host to launch something; 0 without a GPU
    backward_host_bound_ns: int  #: the part of it in the backward pass

    @property
    def last_ready_ns(self) -> int:
        """When the last gradient was ready."""
        return max(gradient.ready_ns for gradient in self.gradients)

    @property
    def buckets(self) -> tuple[ProfiledAllReduce, ...]:
        """The all-reduces of gradients that the reducer called from hooks; the bitmap of unused ones is none."""
        return tuple(one for one in self.all_reduces if one.in_hook and (one.dtype or "").lower() not in INTEGERS)


def read_steps(file: ProfilerFile, notes: list[str]) -> list[ProfiledStep]:
    """Return the training steps of a file; steps without a gradient are left out, with a note."""
    if sharded := next((name for name in file.by_name if SHARDED.match(name)), None):
        raise TraceError(
            f"{file.path}: expected training under DistributedDataParallel or of a plain module, got FSDP (events "
            f"named {sharded}), whose all-gathers and reduce-scatters are not simulated; profile the plain module"
        )
    processes = {one.thread[0] for one in file.by_name.get(ACCUMULATE, ())}
    marks = Counter(one.name for one in file.operations if one.name.startswith(STEP) and one.end_ns > one.start_ns)
    if len(processes) > 1 or max(marks.values(), default=1) > 1:
        raise TraceError(
            f"{file.path}: expected the events of one rank, each once, got processes with gradients: {len(processes)}"
            f", marks of one step: {max(marks.values(), default=0)}; give the file that each rank's profiler wrote"
        )
    for (_, stream), ran in grouped(file.activities, attrgetter("stream")).items():
        (first_ns, last_ns), busy_ns = _extent(ran), sum(one.end_ns - one.start_ns for one in ran)
        if busy_ns > MOST_BUSY * (last_ns - first_ns):
            raise TraceError(
                f"{file.path}: expected what a GPU stream ran one after another, got {busy_ns / 1e6:.1f} ms in "
                f"{(last_ns - first_ns) / 1e6:.1f} ms of stream {stream}; give each `dur` in microseconds"
            )
    windows = _windows(file)
    steps = [step for step in _Reader(file).steps(windows) if step is not None]
    if not steps:
        raise TraceError(
            f"{file.path}: expected events named {ACCUMULATE}, one for each gradient, got none in {len(windows)} "
            "steps; profile training with ProfilerActivity.CPU and no CUDA graph (--set cuda_graph=true predicts one)"
        )
    if without := len(windows) - len(steps):
        notes.append(f"{file.path.name}: {without} of {len(windows)} steps have no gradient; left out")
    return steps


class Window(NamedTuple):
    """A step on the host: its start, the start of the next one, its end, which may be earlier, and its name."""

    start_ns: int
    next_ns: int
    end_ns: int
    name: str


def _windows(file: ProfilerFile) -> list[Window]:
    """Return the steps on the host; a file without marks of steps is a TraceError."""
    if marks := [one for one in file.operations if one.name.startswith(STEP) and one.end_ns > one.start_ns]:
        ends = [*(one.start_ns for one in marks[1:]), marks[-1].end_ns]
        return [
            Window(mark.start_ns, end, min(mark.end_ns, end), mark.name.removeprefix(STEP))
            for mark, end in zip(marks, ends, strict=True)
        ]
    if forwards := _outermost(file.by_name.get(FORWARD, [])):
        edges = [*(one.start_ns for one in forwards), max(one.end_ns for one in file.operations)]
    else:
        steps = [one.end_ns for one in file.operations if one.name.startswith(OPTIMIZER)]
        edges = [min((one.start_ns for one in file.operations), default=0), *steps]
        others_ns = [after - start for start, after in pairwise(steps)]
        if others_ns and edges[1] - edges[0] > LONG_START * max(others_ns):
            edges = steps
    if len(edges) < 2:
        raise TraceError(
            f"{file.path}: expected training steps, got no event named {STEP}N, {FORWARD} or {OPTIMIZER}...; call "
            "`step()` of the profiler after each training step, in a schedule of one cycle (repeat=1)"
        )
    return [Window(start, after, after, str(number)) for number, (start, after) in enumerate(pairwise(edges))]


def _outermost(operations: Iterable[HostOperation]) -> list[HostOperation]:
    """Return the operations that are in no other one: a module in DDP may hold another in DDP."""
    found: list[HostOperation] = []
    for one in operations:
        if not found or one.start_ns >= found[-1].end_ns or one.thread != found[-1].thread:
            found.append(one)
    return found


def _within(items: Sequence[Item], first_ns: int, last_ns: int, moment: Moment) -> Sequence[Item]:
    """Return the items from `first_ns` to `last_ns`, both included; the items are in the order of their moments."""
    return items[bisect_left(items, first_ns, key=moment) : bisect_right(items, last_ns, key=moment)]


def _begun(operations: Sequence[HostOperation], window: "Window") -> Sequence[HostOperation]:
    """Return those that begin in a step; the operations are in the order of their starts."""
    return _within(operations, window.start_ns, window.next_ns - 1, START)


def _latest(items: Sequence[Item], moment_ns: int, moment: Moment) -> Item | None:
    """Return the last item at `moment_ns` or before; the items are in the order of their moments."""
    place = bisect_right(items, moment_ns, key=moment)
    return items[place - 1] if place else None


class _Reader:
    """Finds the parts of steps in one file."""

    def __init__(self, file: ProfilerFile) -> None:
        self._file = file
        computing = [one for one in file.activities if not one.communicates]
        self._on_gpu = bool(computing)
        kernels = grouped((one for one in computing if one.kind == "kernel"), attrgetter("stream"))
        busy_ns = {stream: sum(one.end_ns - one.start_ns for one in some) for stream, some in kernels.items()}
        self._stream = max(busy_ns, key=busy_ns.__getitem__, default=None)
        self._on_stream = [one for one in computing if one.stream == self._stream]
        self._by_thread = grouped(computing, THREAD)
        self._collectives = grouped((one for one in file.activities if one.communicates), THREAD)
        self._packing = frozenset(self._launched_inside(file.by_name.get(PACK, [])))
        self._producing = grouped((one for one in computing if one not in self._packing), THREAD)
        self._nodes = [one.start_ns for one in file.operations if one.name.startswith((NODE, ACCUMULATE))]
        self._optimizers = [one for one in file.operations if one.name.startswith(OPTIMIZER)]
        kinds = {name: match[1] for name in file.by_name if (match := COLLECTIVE.match(name))}
        self._all_reduce_runs = [one for one in file.operations if ALL_REDUCE.match(kinds.get(one.name, ""))]
        self._other_kinds = {name: kind for name, kind in kinds.items() if not ALL_REDUCE.match(kind)}
        self._other_collectives = [one for one in file.operations if one.name in self._other_kinds]

    def steps(self, windows: Sequence[Window]) -> Iterator[ProfiledStep | None]:
        """Read the step in each of these windows; None: no gradient was accumulated in it.

        A step begins when the host begins it and the GPU is done with the one before, and ends likewise.
        """
        earlier = _within(self._on_stream, 0, windows[0].start_ns - 1, LAUNCH)
        lost_until_ns = 0 if self._stream is None else self._file.lost_until_ns[self._stream]
        done_ns = max([lost_until_ns, *(one.end_ns for one in earlier)])
        for window in windows:
            start_ns = max(window.start_ns, done_ns)
            launched = _within(self._on_stream, window.start_ns, window.next_ns - 1, LAUNCH)
            done_ns = max([done_ns, *(one.end_ns for one in launched)])
            yield self._step(window, start_ns, max(start_ns, window.end_ns, done_ns))

    def _step(self, window: Window, start_ns: int, end_ns: int) -> ProfiledStep | None:
        gradients = list(self._gradients(window, start_ns))
        if not gradients:
            return None
        if (passes := self._backward_passes(window, gradients)) > 1:
            raise TraceError(
                f"{self._file.path}: expected one backward pass in each step, got {passes} in step {window.name}; "
                "call `step()` of the profiler after each backward pass"
            )
        forwards = self._named(window, FORWARD)
        if forwards and gradients[0].hooks.start_ns < max(one.start_ns for one in forwards):
            raise TraceError(
                f"{self._file.path}: expected all forward passes of a step before its backward pass, got a gradient "
                f"before the last {FORWARD} of step {window.name}, as with two wrappers (a GAN), or an evaluation in "
                "the step; profile one wrapper, and call `step()` of the profiler after each optimiser step"
            )
        divide_ns = max(one.end_ns for one in forwards) if forwards else self._first_node_ns(window.start_ns)
        backward = _within(self._on_stream, divide_ns, window.next_ns - 1, LAUNCH)
        if self._on_gpu:
            computing = [(one.start_ns, one.end_ns) for one in backward if one not in self._packing]
            forward = _within(self._on_stream, window.start_ns, divide_ns - 1, LAUNCH)
            forward_end_ns = max([start_ns, *(one.end_ns for one in forward)])
            backward_start_ns = max(forward_end_ns, min((one.start_ns for one in backward), default=0))
        else:
            forward_end_ns = max(start_ns, divide_ns)
            backward_start_ns = self._first_node_ns(forward_end_ns)
            computing = [(backward_start_ns, max(one.ready_ns for one in gradients))]
        gradients = [one._replace(ready_ns=max(one.ready_ns, backward_start_ns)) for one in gradients]
        last_ready_ns = max(one.ready_ns for one in gradients)
        waits = self._waits_for_host(start_ns, window)
        others = Counter(self._other_kinds[one.name] for one in _begun(self._other_collectives, window))
        return ProfiledStep(
            name=window.name,
            on_gpu=self._on_gpu,
            start_ns=start_ns,
            forward_end_ns=forward_end_ns,
            backward_start_ns=backward_start_ns,
            gradients=tuple(gradients),
            all_reduces=tuple(self._all_reduces(window, gradients)),
            other_collectives=others,
            copies=tuple(self._copies(window)),
            optimizer=self._optimizer(window),
            end_ns=end_ns,
            computing_ns=_inside(computing, backward_start_ns, last_ready_ns),
            host_bound_ns=_inside(waits, start_ns, end_ns),
            backward_host_bound_ns=_inside(waits, backward_start_ns, last_ready_ns),
        )

    # Parts of a step

    def _gradients(self, window: Window, start_ns: int) -> Iterator[AccumulatedGradient]:
        """Yield the gradients; the reducer's own copies into buckets, launched in between, compute none."""
        hooks_of = grouped(self._named(window, NODE + ACCUMULATE), THREAD)
        for one in self._named(window, ACCUMULATE):
            hooks = _latest(hooks_of.get(one.thread, ()), one.start_ns, START)
            if hooks is None or hooks.end_ns < one.end_ns:
                hooks = one
            ready_ns = one.end_ns
            if self._on_gpu:
                producer = _latest(self._producing.get(one.thread, ()), hooks.start_ns - 1, LAUNCH)
                is_of_step = producer is not None and producer.launch_start_ns >= window.start_ns
                ready_ns = producer.end_ns if producer is not None and is_of_step else max(start_ns, hooks.start_ns)
            yield AccumulatedGradient(ready_ns, *_shape_and_dtype(one), hooks)

    def _backward_passes(self, window: Window, gradients: Sequence[AccumulatedGradient]) -> int:
        """Return the number of backward passes: between two of them, the training script computes by itself.

        Gradients of several passes come in blocks of equal shapes.
        """
        threads = {one.thread for one in _begun(self._optimizers, window)}
        first, last = gradients[0].hooks.start_ns, gradients[-1].hooks.start_ns
        done_ns, edges = first, list[int]()
        for one in _within(self._file.operations, first, last - 1, START):
            if one.thread not in threads or one.start_ns < done_ns:
                continue  # on another thread, or inside an operation
            done_ns = one.end_ns
            if one.name.startswith(("aten::", FORWARD)):  # a forward pass may compute the loss
                edges.append(one.start_ns)
        blocks = grouped(gradients, lambda gradient: bisect_right(edges, gradient.hooks.start_ns))
        shapes = {tuple(str(gradient.shape) for gradient in block) for block in blocks.values()}
        return len(blocks) if len(shapes) == 1 else 1

    def _first_node_ns(self, start_ns: int) -> int:
        """Return when the host began with the first node of a backward pass from `start_ns` on."""
        return self._nodes[min(bisect_left(self._nodes, start_ns), len(self._nodes) - 1)]

    def _all_reduces(self, window: Window, gradients: Sequence[AccumulatedGradient]) -> Iterator[ProfiledAllReduce]:
        accumulated = [one.hooks.start_ns for one in gradients]
        hooks_of = grouped((one.hooks for one in gradients), THREAD)
        calls = self._named(window, *ALL_REDUCE_CALLS)
        runs = _begun(self._all_reduce_runs, window)
        described = self._named(window, COLLECTIVE_CALL)
        calls, runs = (sorted(some, key=START) for some in (calls or runs, runs or calls))
        for call, run in zip(calls, _paired(calls, runs), strict=True):
            ran = _within(self._collectives.get(call.thread, ()), call.start_ns, call.end_ns, LAUNCH)
            count = bisect_right(accumulated, call.start_ns)
            hooks = _latest(hooks_of.get(call.thread, ()), call.start_ns, START)
            in_hook = hooks is not None and hooks.end_ns >= call.start_ns
            start_ns, end_ns = _extent(ran or [run])
            if self._on_gpu and not ran and run.thread == call.thread:  # not on a thread of Gloo's
                self._check_alone(window, call)
                start_ns = end_ns = max([call.start_ns, *(one.ready_ns for one in gradients[:count])])
            # Functional collectives copy their input before the call.
            copy = _latest(self._by_thread.get(call.thread, ()), call.start_ns - 1, LAUNCH)
            copied = copy.size_bytes if copy is not None and "memcpy" in copy.kind else None
            size_bytes, dtype = _message(run, described) or _message(call, ()) or (copied, None)
            yield ProfiledAllReduce(call.start_ns, start_ns, end_ns, size_bytes, dtype, count, in_hook)

    def _check_alone(self, window: Window, call: HostOperation) -> None:
        """Refuse an all-reduce of several ranks that ran nothing on the GPU; in a group of one, nothing runs."""
        ranks = self._file.world_size
        if ranks is not None and ranks > 1:
            raise TraceError(
                f"{self._file.path}: expected a kernel of each all-reduce of {ranks} ranks, got none of one in step "
                f"{window.name}, whose call took {(call.end_ns - call.start_ns) / 1e6:.1f} ms on the host: a "
                "communication library that blocks the host (oneCCL), or whose kernels have no correlation id, "
                "leaves no time of its own; profile one rank alone, or record a trace (ddplab record)"
            )

    def _copies(self, window: Window) -> Iterator[Copy]:
        for call in self._named(window, COPY_OUT):
            ran = self._launched_inside([call])
            sizes = [one.size_bytes for one in ran if one.size_bytes]
            size_bytes, _ = _message(call, ()) or (None, None)
            yield Copy(*_extent(ran or [call]), sizes[0] if sizes else size_bytes)

    def _optimizer(self, window: Window) -> Span | None:
        calls = _begun(self._optimizers, window)
        ran = [one for one in self._launched_inside(calls) if one.stream == self._stream] if self._on_gpu else calls
        return _extent(ran) if ran else None

    def _waits_for_host(self, start_ns: int, window: Window) -> list[Span]:
        """Return the times in which the GPU had nothing to do because the host had not launched the next activity."""
        waits, done_ns = [], start_ns
        for one in _within(self._on_stream, window.start_ns, window.next_ns - 1, LAUNCH):
            if done_ns < min(one.start_ns, one.launch_end_ns):
                waits.append((done_ns, min(one.start_ns, one.launch_end_ns)))
            done_ns = max(done_ns, one.end_ns)
        return waits

    # Lookups

    def _named(self, window: Window, *names: str) -> list[HostOperation]:
        """Return the operations of these names that begin in a step, name by name."""
        found = (self._file.by_name.get(name, ()) for name in names)
        return [one for some in found for one in _begun(some, window)]

    def _launched_inside(self, operations: Iterable[HostOperation]) -> list[Activity]:
        """Return what the threads of these operations launched inside them."""
        launches = ((self._by_thread.get(one.thread, ()), one) for one in operations)
        return [ran for some, one in launches for ran in _within(some, one.start_ns, one.end_ns, LAUNCH)]


def _extent(ran: Sequence[HostOperation | Activity]) -> Span:
    """Return the first start and the last end."""
    return min(one.start_ns for one in ran), max(one.end_ns for one in ran)


def _inside(spans: Sequence[Span], start_ns: int, end_ns: int) -> int:
    """Return how much of the time from `start_ns` to `end_ns` these spans cover together."""
    covered, done_ns = 0, start_ns
    for start, end in sorted(spans):
        covered += max(0, min(end, end_ns) - max(start, done_ns))
        done_ns = max(done_ns, min(end, end_ns))
    return covered


# Messages


def _shape_and_dtype(operation: HostOperation) -> tuple[tuple[int, ...] | None, str | None]:
    """Return shape and element type of an operation's first input, if it is a tensor and they were noted."""
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
    waiting = grouped(runs, _elements)
    counts = list(map(_elements, calls))
    if Counter(counts) != Counter(map(_elements, runs)):
        return list(runs)
    return [waiting[count].pop(0) for count in counts]


def _elements(operation: HostOperation) -> int | None:
    """Return the number of elements of the first input, a tensor or a list of tensors, if it was noted."""
    dims = operation.arguments.dims
    if not (isinstance(dims, list) and dims and isinstance(dims[0], list)):
        return None
    several = dims[0] if all(isinstance(shape, list) for shape in dims[0]) else [dims[0]]
    if not all(isinstance(size, int) and 0 <= size <= MOST_ELEMENTS for shape in several for size in shape):
        return None
    return min(MOST_ELEMENTS, sum(map(prod, several)))


def _message(call: HostOperation, described: Sequence[HostOperation]) -> tuple[int, str] | None:
    """Return bytes and element type of a collective's message, from its own inputs or the call that contains it."""
    shape, dtype = _shape_and_dtype(call)
    if shape is not None and dtype is not None and dtype.lower() in ELEMENT_BYTES:
        return prod(shape) * ELEMENT_BYTES[dtype.lower()], dtype
    place = bisect_right(described, call.start_ns, key=START)
    for one in reversed(described[max(0, place - MOST_NESTED) : place]):
        elements, name = one.arguments.elements, one.arguments.dtype
        contains = one.thread == call.thread and one.end_ns >= call.start_ns
        if contains and isinstance(elements, int) and isinstance(name, str):
            each = ELEMENT_BYTES.get(name.lower())
            return None if each is None or not 0 <= elements <= MOST_ELEMENTS else (elements * each, name)
    return None


def slow_down_beside_collectives(file: ProfilerFile) -> tuple[float, int] | None:
    """Return how many times as long kernels take while a collective runs, and the number of kernels compared.

    Kernels of one name and shape are compared. None: no kernel ran both beside a collective and alone.
    """
    collectives = sorted((one.start_ns, one.end_ns) for one in file.activities if one.communicates)
    starts = [start for start, _ in collectives]
    ends = list(accumulate((end for _, end in collectives), max))
    alone: dict[str, list[int]] = defaultdict(list)
    beside: dict[str, list[int]] = defaultdict(list)
    for one in file.activities:
        if one.kind != "kernel" or one.communicates:
            continue
        begun = bisect_right(starts, one.start_ns)
        busy_until_ns = ends[begun - 1] if begun else -1
        key = f"{one.name} {one.shape}"
        if busy_until_ns >= one.end_ns:
            beside[key].append(one.end_ns - one.start_ns)
        elif busy_until_ns <= one.start_ns and not any(start < one.end_ns for start in starts[begun : begun + 1]):
            alone[key].append(one.end_ns - one.start_ns)
    common = [key for key in beside if any(alone.get(key, ()))]
    if not common:
        return None
    shared_ns = sum(sum(beside[key]) for key in common)
    alone_ns = sum(fmean(alone[key]) * len(beside[key]) for key in common)
    return shared_ns / alone_ns, sum(len(beside[key]) for key in common)
