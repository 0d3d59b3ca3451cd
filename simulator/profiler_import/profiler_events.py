"""Events of a file of torch's profiler: what the host called, and what the GPU ran because of it.

The profiler writes Chrome's trace format. A call of the GPU's runtime and the activity that it launched (a kernel, a
copy, a memset) have the same correlation id. So every activity has two times: when the host launched it, and when the
GPU ran it. The names of the categories differ between versions of torch and vendors of GPUs; they are matched by the
words that all of them have in common.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from ...reference.errors import TraceError
from ...reference.files.reading import in_one_line, read_bytes
from ...reference.trace import VERSION_FIELD

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)

ON_A_GPU = re.compile(r"cudnn|miopen|cublas|nccl:|rccl:|^cuda[A-Z]|^hip[A-Z]|_flash_attention|_efficient_attention")
"""In the name of an operation that only a GPU runs."""
RANK = re.compile(r"rank[-_.]?(\d{1,6})", re.IGNORECASE)
"""In the name of a file that does not hold its rank."""
LONGEST_US = 1e12
"""Longest time between two events of a file, in microseconds, a million seconds; more is damage."""
RUNTIME = re.compile("runtime|driver")
"""In the category of a call of the GPU's runtime, such as `cuda_runtime`."""
ACTIVITIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"})
"""Categories of what a GPU runs."""
HOST_OPERATIONS = frozenset({"cpu_op", "user_annotation", "operator"})
"""Categories of operators and annotations on the host."""
MOST_EARLY_NS = 10**6
"""Nanoseconds between a kernel and a later call that launched it, above which the clocks differ; 0 in real files."""
COMMUNICATION = re.compile("ccl", re.IGNORECASE)
"""In the name of a kernel of a communication library: NCCL, RCCL, MSCCL, oneCCL, HCCL."""


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
    deviceProperties: list[dict[str, Any]] | None = None  # noqa: N815
    distributedInfo: dict[str, Any] | None = None  # noqa: N815
    baseTimeNanoseconds: Any = None  # noqa: N815
    host_name: Any = None


HANDLER_NAME = re.compile(r"(.+)_\d+\.\d+\.pt\.trace\.json")
"""Names that `torch.profiler.tensorboard_trace_handler` gives to files: the host, the process, and a time."""
Thread = tuple[int | float | str | None, int | float | str | None]
"""Process and thread."""
Stream = tuple[str, str]
"""Device and stream."""


class HostOperation(NamedTuple):
    """An operator or an annotation on the host; times in nanoseconds from the first event of the file."""

    name: str
    thread: Thread
    start_ns: int
    end_ns: int
    arguments: RawArguments


class Activity(NamedTuple):
    """A kernel, a copy or a memset on the GPU; times in nanoseconds from the first event of the file."""

    name: str
    kind: str  #: category in the file, in lower case
    stream: Stream
    start_ns: int
    end_ns: int
    launch_start_ns: int  #: of the call on the host
    launch_end_ns: int
    thread: Thread  #: the host thread that launched it
    size_bytes: int | None  #: of a copy, if recorded
    shape: str  #: grid and block; kernels of one name and shape do the same work

    @property
    def communicates(self) -> bool:
        """Whether it belongs to a communication library."""
        return self.kind == "kernel" and COMMUNICATION.search(self.name) is not None


@dataclass(frozen=True)
class ProfilerFile:
    """One file of torch's profiler, of one rank; None: not recorded."""

    path: Path
    gpu: str | None
    rank: int | None
    world_size: int | None
    backend: str | None  #: for collectives
    host: str | None  #: whose clock the times are of
    first_ns: int  #: of the first event, on the clock of the host
    operations: Sequence[HostOperation]  #: by start; of two that start together, the longer first
    activities: Sequence[Activity]  #: by launch
    lost: int  #: activities left out, because their launch was not recorded
    lost_until_ns: Mapping[Stream, int]
    """By stream, the end of those that ran before all others: the GPU was behind its host when the file began."""

    @cached_property
    def by_name(self) -> dict[str, list[HostOperation]]:
        """Operations by name, each in the order of `operations`."""
        return grouped(self.operations, lambda one: one.name)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items by key, each group in the order of `items`."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


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
    name_of = lru_cache(maxsize=None)(in_one_line)
    calls: dict[int, HostOperation] = {}
    launches = 0
    operations: list[HostOperation] = []
    ran: list[tuple[RawEvent, str, tuple[int, int]]] = []
    first_us, spans = _spans(path, events)
    for event, span in zip(events, spans, strict=True):
        category, event.name = (event.cat or "").lower(), name_of(event.name or "")
        if category in ACTIVITIES:
            ran.append((event, category, span))
            continue
        operation = HostOperation(event.name, (event.pid, event.tid), *span, event.args or NO_ARGUMENTS)
        if category in HOST_OPERATIONS:
            operations.append(operation)
        elif RUNTIME.search(category) and event.args is not None:
            launches += "launch" in operation.name.lower()
            if correlation := _positive(event.args.correlation):
                calls[correlation] = operation
    operations.sort(key=lambda one: (one.start_ns, -one.end_ns))
    activities = sorted(_launched(ran, calls), key=lambda one: (one.launch_start_ns, one.start_ns))
    if not ran:
        launches = launches or sum(ON_A_GPU.search(one.name) is not None for one in operations)
    if (launches or ran) and 2 * len(activities) <= len(ran):
        raise TraceError(
            f"{path}: expected what the GPU ran, each with the correlation id of its launch, got {launches} "
            f"launches, {len(ran)} activities of the GPU and {len(activities)} with such an id; profile with "
            "ProfilerActivity.CUDA and ProfilerActivity.CPU, and export the file again"
        )
    ids = {_positive((event.args or NO_ARGUMENTS).correlation) for event, *_ in ran}
    silent = sum("launch" in calls[one].name.lower() for one in calls.keys() - ids)
    if 10 * silent > launches:  # none is silent in real files
        raise TraceError(
            f"{path}: expected what each of {launches} launches ran on the GPU, got nothing of {silent}, as if a "
            "stream was lost (ROCm/rocm-systems#1327), so times would be too short; profile again"
        )
    early_ns = max((one.launch_start_ns - one.start_ns for one in activities), default=0)
    if early_ns > MOST_EARLY_NS:
        raise TraceError(
            f"{path}: expected what the GPU ran after the call that launched it, got {early_ns / 1e6:.1f} ms before "
            "it: the clocks of the GPU and of its host differ; profile again, or record a trace (ddplab record)"
        )
    info = raw.distributedInfo or {}
    in_name = RANK.search(path.name)
    rank, backend = info.get("rank", int(in_name[1]) if in_name else None), info.get("backend")
    used = {event.args.device for event, *_ in ran if event.args and isinstance(event.args.device, int)}
    named = HANDLER_NAME.match(path.name)
    groups = [one.arguments.group_size for one in operations if isinstance(one.arguments.group_size, int)]
    return ProfilerFile(
        path=path,
        gpu=_gpu_name(raw.deviceProperties or [], used),
        rank=rank if isinstance(rank, int) and rank >= 0 else None,
        world_size=_positive(max([*groups, _positive(info.get("world_size")) or 0])),
        backend=in_one_line(backend) if isinstance(backend, str) else None,
        host=in_one_line(raw.host_name) if isinstance(raw.host_name, str) else named[1] if named else None,
        first_ns=(_positive(raw.baseTimeNanoseconds) or 0) + round(first_us * 1e3),
        operations=operations,
        activities=activities,
        lost=len(ran) - len(activities),
        lost_until_ns=_lost_until(ran, activities),
    )


def _lost_until(
    ran: Iterable[tuple[RawEvent, str, tuple[int, int]]], activities: Sequence[Activity]
) -> dict[Stream, int]:
    """Return when the activities had ended that ran before the first with a launch, by stream."""
    by_stream = grouped(activities, lambda one: one.stream)
    first_ns = {stream: min(one.start_ns for one in some) for stream, some in by_stream.items()}
    until_ns = dict.fromkeys(first_ns, 0)
    for event, _, (start_ns, end_ns) in ran:
        stream = _stream(event.args or NO_ARGUMENTS)
        if start_ns < first_ns.get(stream, 0):
            until_ns[stream] = max(until_ns[stream], end_ns)
    return until_ns


def _stream(arguments: RawArguments) -> Stream:
    return str(arguments.device), str(arguments.stream)


NO_ARGUMENTS = RawArguments()


def _reason(error: Exception, data: bytes) -> str:
    if not data.strip():
        return "an empty file"
    if VERSION_FIELD in data:
        return "a trace of ddplab, which `ddplab predict` takes"
    return str(error).splitlines()[0].rpartition(", got ")[2]  # msgspec also says what it expected


def _spans(path: Path, events: Sequence[RawEvent]) -> tuple[float, list[tuple[int, int]]]:
    """Return the start of the first event as in the file, and start and end of each in nanoseconds from there."""
    try:
        starts = [float(event.ts) for event in events]  # type: ignore[arg-type]  # None raises TypeError
        durations = [float(event.dur or 0.0) for event in events]
    except (TypeError, ValueError):
        raise TraceError(f"{path}: expected a number as `ts` and `dur` of every event; export it again") from None
    first = min(starts)
    if not all(0 <= span < LONGEST_US - (start - first) for start, span in zip(starts, durations, strict=True)):
        raise TraceError(f"{path}: expected events of 0 us or longer in a million seconds, got others; export again")
    return first, [
        (round((start - first) * 1e3), round((start - first + duration) * 1e3))
        for start, duration in zip(starts, durations, strict=True)
    ]


def _launched(
    ran: Iterable[tuple[RawEvent, str, tuple[int, int]]], calls: Mapping[int, HostOperation]
) -> Iterator[Activity]:
    for event, kind, span in ran:
        arguments = event.args or NO_ARGUMENTS
        call = calls.get(_positive(arguments.correlation) or 0)
        if call is not None:
            size = arguments.bytes if isinstance(arguments.bytes, int) else None
            shape = f"{arguments.grid} {arguments.block}"
            moments = *span, call.start_ns, call.end_ns
            yield Activity(event.name or "", kind, _stream(arguments), *moments, call.thread, size, shape)


def _positive(number: object) -> int | None:
    return number if isinstance(number, int) and number > 0 else None


def _gpu_name(devices: Sequence[dict[str, Any]], used: set[int]) -> str | None:
    """Return the name of the first device that ran something, or of the first device."""
    names = [(index not in used, device.get("name")) for index, device in enumerate(devices)]
    named = [(idle, name) for idle, name in names if isinstance(name, str) and name]
    return in_one_line(min(named, key=lambda one: one[0])[1]) if named else None
