"""Schedule: what every rank does in an iteration, step by step; the same for all, only durations differ.

A rank computes, launches collectives and waits for them. Collectives are numbered in the order in which all ranks
launch them. The order of steps is that of `reference.reducer`: gradients come, a full bucket is packed, buckets are
launched strictly in their order, and after the backward pass each is waited for and copied out.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

ComputeKind = Literal[
    "unsynchronized", "rebuild", "forward", "search", "backward", "pack", "compress", "launch", "recompress",
    "decompress", "copy_out", "step",
]  # fmt: skip
CollectiveKind = Literal["join", "order", "broadcast", "all_reduce", "second_all_reduce", "bitmap"]
Transport = Literal["all_reduce", "all_gather", "broadcast"]


class Compute(NamedTuple):
    """The rank computes; for how long is told by `EngineInput.duration_ns`."""

    kind: ComputeKind
    bucket: int | None = None
    iteration: int = 0
    """Which of those under `no_sync`."""


class Launch(NamedTuple):
    """The rank issues a collective and goes on."""

    collective: int


class Wait(NamedTuple):
    """The rank waits until a collective is done."""

    collective: int


Instruction = Compute | Launch | Wait

BROADCASTS_IN_FLIGHT = 2
"""Of the pieces of a model's tensors, as in `reference.broadcast`."""
BUCKET_STEPS: tuple[ComputeKind, ...] = ("backward", "pack", "compress", "launch")
"""What a rank computes until it issues a bucket's collective."""
SKIPPED_STEPS = BUCKET_STEPS[:2]
"""The same of a bucket that is never sent."""


class Collective(NamedTuple):
    """What all ranks do together: `transport` of `size_bytes`, `bucket` is None where it carries no gradients."""

    kind: CollectiveKind
    bucket: int | None
    transport: Transport
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Instructions, and the collectives that they launch and wait for, in launch order."""

    instructions: tuple[Instruction, ...]
    collectives: tuple[Collective, ...]

    @property
    def steps(self) -> list[Compute]:
        """All computing, in order: the columns of `EngineInput.duration_ns`."""
        return [instruction for instruction in self.instructions if isinstance(instruction, Compute)]


class Message(NamedTuple):
    """What one bucket sends: one collective, or two where the second depends on the first (PowerSGD)."""

    transport: Transport
    first_bytes: int
    second_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """What an iteration consists of besides its forward pass, its backward pass and its step.

    Attributes:
        messages: What each bucket sends, in launch order; None: nothing (the hook keeps it).
        skipped: Buckets that are packed, but never sent (`skip_all_reduce_unused_params`).
        local_iterations: How many under `no_sync` go before.
        rebuild_bytes: The order of readiness that rank 0 tells all; None: no rebuild.
        join_bytes: The count of ranks that still have inputs, added up under Join; as much tells before the forward
            pass whether any of them averages; None: no Join.
        source_bytes: The rank whose buffers count, agreed on under Join; None: no Join, or no buffers.
        buffer_bytes: Buffers that rank 0 broadcasts before the forward pass, in pieces of one dtype.
        searches: Whether the graph is searched for unused parameters.
        bitmap_bytes: The map of used parameters, added up after the last launch; None: none.
        leaves_some_out: Whether parameters are unused: then the map is needed before anything is copied out.
    """

    messages: tuple[Message | None, ...]
    skipped: frozenset[int] = frozenset()
    local_iterations: int = 0
    rebuild_bytes: int | None = None
    join_bytes: int | None = None
    source_bytes: int | None = None
    buffer_bytes: tuple[int, ...] = ()
    searches: bool = False
    bitmap_bytes: int | None = None
    leaves_some_out: bool = False


class JoinEnd(NamedTuple):
    """What is sent once no rank has inputs: the count, whose model it is, and that, in pieces of one dtype."""

    join_bytes: int
    source_bytes: int
    model_bytes: tuple[int, ...]


def build_schedule(outline: Outline) -> Schedule:
    """The steps of an iteration in their order."""
    writer = _Writer()
    for number in range(outline.local_iterations):
        _before_forward(writer, outline, number)
        writer.compute("unsynchronized", iteration=number)
    _before_forward(writer, outline, outline.local_iterations)
    writer.compute("forward")
    if outline.searches:
        writer.compute("search")
    awaited = _launch_buckets(writer, outline)
    if outline.bitmap_bytes is not None:
        bitmap = writer.launch(Collective("bitmap", None, "all_reduce", outline.bitmap_bytes))
    writer.compute("backward")
    if outline.bitmap_bytes is not None and outline.leaves_some_out:
        writer.wait(bitmap)
    for bucket, collective in enumerate(awaited):
        if collective is not None:
            writer.wait(collective)
        if bucket not in outline.skipped:
            writer.compute("decompress", bucket)
            writer.compute("copy_out", bucket)
    if outline.bitmap_bytes is not None and not outline.leaves_some_out:
        writer.wait(bitmap)
    writer.compute("step")
    return Schedule(tuple(writer.instructions), tuple(writer.collectives))


def build_join_end(outline: JoinEnd) -> Schedule:
    """What ranks do under Join once all have run out of inputs."""
    writer = _Writer()
    for size in (outline.join_bytes, outline.source_bytes):
        writer.wait(writer.launch(Collective("join", None, "all_reduce", size)))
    _broadcast(writer, outline.model_bytes)
    return Schedule(tuple(writer.instructions), tuple(writer.collectives))


class _Writer:
    """Appends instructions, and numbers collectives as they are launched."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.collectives: list[Collective] = []

    def compute(self, kind: ComputeKind, bucket: int | None = None, iteration: int = 0) -> None:
        self.instructions.append(Compute(kind, bucket, iteration))

    def launch(self, collective: Collective) -> int:
        self.collectives.append(collective)
        self.instructions.append(Launch(len(self.collectives) - 1))
        return len(self.collectives) - 1

    def wait(self, number: int) -> None:
        self.instructions.append(Wait(number))


def _before_forward(writer: _Writer, outline: Outline, iteration: int) -> None:
    """Of any iteration of a cycle; the first, which follows a synchronised one, rebuilds and sends buffers."""
    if outline.join_bytes is not None:
        writer.launch(Collective("join", None, "all_reduce", outline.join_bytes))
    if iteration == 0 and outline.rebuild_bytes is not None:
        writer.wait(writer.launch(Collective("order", None, "broadcast", outline.rebuild_bytes)))
        writer.compute("rebuild")
    if iteration == 0 and outline.source_bytes is not None:
        writer.wait(writer.launch(Collective("join", None, "all_reduce", outline.source_bytes)))
    if iteration == 0:
        _broadcast(writer, outline.buffer_bytes)
    if outline.join_bytes is not None:
        writer.wait(writer.launch(Collective("join", None, "all_reduce", outline.join_bytes)))


def _broadcast(writer: _Writer, sizes_bytes: Sequence[int]) -> None:
    in_flight: deque[int] = deque()
    for size in sizes_bytes:
        if len(in_flight) == BROADCASTS_IN_FLIGHT:
            writer.wait(in_flight.popleft())
        in_flight.append(writer.launch(Collective("broadcast", None, "broadcast", size)))
    for collective in in_flight:
        writer.wait(collective)


def _launch_buckets(writer: _Writer, outline: Outline) -> list[int | None]:
    """Returns the collective after which each bucket holds its averages.

    A second collective follows the launch of the next bucket, the last one comes at once, as in `hooks.powersgd`.
    """
    awaited: list[int | None] = [None] * len(outline.messages)
    owing: list[tuple[int, Message]] = []
    for bucket, message in enumerate(outline.messages):
        for kind in SKIPPED_STEPS if bucket in outline.skipped else BUCKET_STEPS:
            writer.compute(kind, bucket)
        if message is None or bucket in outline.skipped:
            continue
        awaited[bucket] = writer.launch(Collective("all_reduce", bucket, message.transport, message.first_bytes))
        _launch_seconds(writer, owing, awaited)
        owing = [(bucket, message)] if message.second_bytes is not None else []
    _launch_seconds(writer, owing, awaited)
    return awaited


def _launch_seconds(writer: _Writer, owing: Sequence[tuple[int, Message]], awaited: list[int | None]) -> None:
    for bucket, message in owing:
        first = awaited[bucket]
        assert first is not None
        assert message.second_bytes is not None
        writer.wait(first)
        writer.compute("recompress", bucket)
        awaited[bucket] = writer.launch(
            Collective("second_all_reduce", bucket, message.transport, message.second_bytes)
        )
