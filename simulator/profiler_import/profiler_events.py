"""Events of a file of torch's profiler: what the host called, and what the GPU ran because of it.

The profiler writes Chrome's trace format. A call of the GPU's runtime and the activity that it launched (a kernel, a
copy, a memset) have the same correlation id. So every activity has two times: when the host launched it, and when the
GPU ran it. The names of the categories differ between versions of torch and vendors of GPUs; they are matched by the
words that all of them have in common.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from reference.errors import TraceError
from reference.files.reading import read_bytes
from reference.trace import VERSION_FIELD

LONGEST_US = 1e12
"""Longest time between two events of a file, in microseconds; more is damage."""
RUNTIME = re.compile("runtime|driver")
"""In the category of a call of the GPU's runtime, such as `cuda_runtime`."""
ACTIVITIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"})
"""Categories of what a GPU runs."""
HOST_OPERATIONS = frozenset({"cpu_op", "user_annotation", "operator"})
"""Categories of operators and annotations on the host."""
COMMUNICATION = re.compile("ccl", re.IGNORECASE)
"""In the name of a kernel of a communication library: NCCL, RCCL, MSCCL, oneCCL, HCCL."""


class RawDevice(msgspec.Struct):
    """A GPU in the file."""

    name: Any = None


class RawDistributed(msgspec.Struct):
    """The process group in the file."""

    backend: Any = None
    rank: Any = None
    world_size: Any = None


class RawArguments(msgspec.Struct, gc=False):
    """The arguments of an event that are read."""

    correlation: Any = None
    stream: Any = None
    device: Any = None
    bytes: Any = None
    grid: Any = None
    block: Any = None
    dims: Any = msgspec.field(default=None, name="Input Dims")
    types: Any = msgspec.field(default=None, name="Input type")
    elements: Any = msgspec.field(default=None, name="In msg nelems")
    dtype: Any = None
    group_size: Any = msgspec.field(default=None, name="Group size")


class RawEvent(msgspec.Struct, gc=False):
    """An event in the file; times in microseconds."""

    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: int | float | str | None = None
    tid: int | float | str | None = None
    ts: float | str | None = None
    dur: float | str | None = None
    args: RawArguments | None = None


class RawFile(msgspec.Struct):
    """The parts of the file that are read."""

    traceEvents: list[RawEvent]  # noqa: N815  # the field's name in the file
    deviceProperties: list[RawDevice] | None = None  # noqa: N815
    distributedInfo: RawDistributed | None = None  # noqa: N815


Thread = tuple[int | float | str | None, int | float | str | None]
"""Process and thread."""
Stream = tuple[str, str]
"""Device and stream."""


@dataclass(frozen=True, slots=True)
class HostOperation:
    """An operator or an annotation on the host.

    Attributes:
        name: Its name.
        thread: The thread that ran it.
        start_ns: Its start, in nanoseconds from the first event of the file.
        end_ns: Its end.
        arguments: What the profiler noted of it.
    """

    name: str
    thread: Thread
    start_ns: int
    end_ns: int
    arguments: RawArguments

    def contains(self, thread: Thread, moment_ns: int) -> bool:
        """Return whether this thread was inside the operation at this moment."""
        return self.thread == thread and self.start_ns <= moment_ns <= self.end_ns


@dataclass(frozen=True, slots=True)
class Activity:
    """A kernel, a copy or a memset on the GPU.

    Attributes:
        name: Its name.
        kind: Its category in the file, in lower case.
        stream: The stream that ran it.
        start_ns: Its start, in nanoseconds from the first event of the file.
        end_ns: Its end.
        launch_start_ns: Start of the call that launched it.
        launch_end_ns: End of that call.
        thread: The host thread that launched it.
        size_bytes: Bytes of a copy, if they were noted.
        shape: Grid and block of a kernel, as text; kernels of one name and shape do the same work.
    """

    name: str
    kind: str
    stream: Stream
    start_ns: int
    end_ns: int
    launch_start_ns: int
    launch_end_ns: int
    thread: Thread
    size_bytes: int | None
    shape: str

    @property
    def communicates(self) -> bool:
        """Whether it belongs to a communication library."""
        return self.kind == "kernel" and COMMUNICATION.search(self.name) is not None


@dataclass(frozen=True)
class ProfilerFile:
    """One file of torch's profiler, of one rank.

    Attributes:
        path: The file.
        gpu: Name of the GPU; None if there was none or it was not noted.
        rank: This rank, if it was noted.
        world_size: Number of ranks, if it was noted.
        backend: Name of the backend for collectives, if it was noted.
        operations: Operators and annotations of the host, by start; of two that start together, the longer first.
        activities: What the GPU ran, by launch.
        lost: Number of activities of which no launch was noted; they are left out.
    """

    path: Path
    gpu: str | None
    rank: int | None
    world_size: int | None
    backend: str | None
    operations: Sequence[HostOperation]
    activities: Sequence[Activity]
    lost: int

    @cached_property
    def by_name(self) -> dict[str, list[HostOperation]]:
        """Operations by name, each in the order of `operations`."""
        named: dict[str, list[HostOperation]] = {}
        for one in self.operations:
            named.setdefault(one.name, []).append(one)
        return named


def read_profiler_file(path: Path) -> ProfilerFile:
    """Read a file of torch's profiler: JSON in Chrome's format, gzipped or not.

    Raises:
        TraceError: The file is missing, damaged, or no file of the profiler; the message is one line.
    """
    try:
        data = read_bytes(path)
    except ValueError as error:
        raise TraceError(str(error)) from None
    try:
        raw = msgspec.json.decode(data, type=RawFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(
            f"{path}: expected the JSON of torch's profiler (`export_chrome_trace`), got {_reason(error, data)}; "
            "export it again"
        ) from None
    del data
    events = [event for event in raw.traceEvents if event.ph == "X" and event.name and event.cat]
    if not events:
        raise TraceError(
            f"{path}: expected events of torch's profiler, got {len(raw.traceEvents)} events and none with a "
            "category and a duration; profile some training steps"
        )
    spans = _spans(path, events)
    calls: dict[int, tuple[int, int, Thread]] = {}
    launches = 0
    operations: list[HostOperation] = []
    ran: list[tuple[RawEvent, str, tuple[int, int]]] = []
    for event, span in zip(events, spans, strict=True):
        category = (event.cat or "").lower()
        if category in ACTIVITIES:
            ran.append((event, category, span))
        elif category in HOST_OPERATIONS:
            thread = event.pid, event.tid
            operations.append(HostOperation(event.name or "", thread, *span, event.args or NO_ARGUMENTS))
        elif RUNTIME.search(category) and event.args is not None:
            launches += "launch" in (event.name or "").lower()
            if correlation := _positive(event.args.correlation):
                calls[correlation] = (*span, (event.pid, event.tid))
    operations.sort(key=lambda one: (one.start_ns, -one.end_ns))
    activities = list(_launched(ran, calls))
    if (launches or ran) and 2 * len(activities) <= len(ran):
        raise TraceError(
            f"{path}: expected what the GPU ran, each with the correlation id of its launch, got {launches} "
            f"launches, {len(ran)} activities of the GPU and {len(activities)} with such an id; profile with "
            "ProfilerActivity.CUDA and ProfilerActivity.CPU, and export the file again"
        )
    info = raw.distributedInfo or RawDistributed()
    used = {event.args.device for event, *_ in ran if event.args and isinstance(event.args.device, int)}
    groups = [one.arguments.group_size for one in operations if isinstance(one.arguments.group_size, int)]
    world_size = _positive(info.world_size) or _positive(max(groups, default=None))
    return ProfilerFile(
        path=path,
        gpu=_gpu_name(raw.deviceProperties or [], used),
        rank=info.rank if isinstance(info.rank, int) and info.rank >= 0 else None,
        world_size=world_size,
        backend=info.backend if isinstance(info.backend, str) else None,
        operations=operations,
        activities=activities,
        lost=len(ran) - len(activities),
    )


NO_ARGUMENTS = RawArguments()


def _reason(error: Exception, data: bytes) -> str:
    if not data.strip():
        return "an empty file"
    if VERSION_FIELD in data:
        return "a trace of ddplab, which `ddplab predict` takes"
    return str(error).splitlines()[0]


def _spans(path: Path, events: Sequence[RawEvent]) -> list[tuple[int, int]]:
    """Return start and end of each event, in nanoseconds from the first one."""
    try:
        starts = [float(event.ts) for event in events]  # type: ignore[arg-type]  # None raises TypeError
        durations = [max(0.0, float(event.dur or 0.0)) for event in events]
    except (TypeError, ValueError):
        raise TraceError(f"{path}: expected a number as `ts` and `dur` of every event; export it again") from None
    first = min(starts)
    if not max(map(float.__add__, starts, durations)) - first < LONGEST_US:  # also if a time is not a number
        raise TraceError(
            f"{path}: expected events within {LONGEST_US / 1e6:.0f} seconds, got some further apart; export it again"
        )
    return [
        (round((start - first) * 1e3), round((start - first + duration) * 1e3))
        for start, duration in zip(starts, durations, strict=True)
    ]


def _launched(
    ran: Iterable[tuple[RawEvent, str, tuple[int, int]]], calls: dict[int, tuple[int, int, Thread]]
) -> Iterable[Activity]:
    found = []
    for event, kind, (start_ns, end_ns) in ran:
        arguments = event.args or NO_ARGUMENTS
        call = calls.get(_positive(arguments.correlation) or 0)
        if call is not None:
            launch_start_ns, launch_end_ns, thread = call
            stream = str(arguments.device), str(arguments.stream)
            shape = f"{arguments.grid} {arguments.block}"
            moments = start_ns, end_ns, launch_start_ns, launch_end_ns
            size = arguments.bytes if isinstance(arguments.bytes, int) else None
            found.append(Activity(event.name or "", kind, stream, *moments, thread, size, shape))
    return sorted(found, key=lambda one: (one.launch_start_ns, one.start_ns))


def _positive(number: object) -> int | None:
    return number if isinstance(number, int) and number > 0 else None


def _gpu_name(devices: Sequence[RawDevice], used: set[int]) -> str | None:
    """Return the name of the first device that ran something, or of the first device."""
    named = [(index not in used, index, device.name) for index, device in enumerate(devices)]
    return next(
        (name for _, _, name in sorted(named, key=lambda one: one[:2]) if isinstance(name, str) and name), None
    )
