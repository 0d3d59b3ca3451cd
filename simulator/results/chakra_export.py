"""Export of an iteration to Chakra execution traces, which ASTRA-sim reads: one file for each rank.

A file holds messages of Protocol Buffers, each after its length: `GlobalMetadata`, then a `Node` for each collective
and for the computation between launches and waits. Computation has its duration at full speed: the simulator that
reads the traces has to model what collectives take from it. Collectives have their size, and the duration of our
prediction, which ASTRA-sim (4f387bc) ignores except for broadcasts; each depends on the one before, unless several
may run at the same time. Schema, with the numbers below: schema/protobuf/et_def.proto of astra-sim/chakra at 214f2c5.
"""

from collections.abc import Iterable, Iterator

from ..engines.timeline import EngineInput
from ..schedule.schedule import Compute, LaunchCollective, Wait

COMP_NODE, COMM_COLL_NODE = 4, 7
COMM_TYPE = {"all_reduce": 0, "all_gather": 2, "broadcast": 5}
VARINT, LENGTH_DELIMITED = 0, 2  # types on the wire


def chakra_traces(iteration: EngineInput) -> Iterator[bytes]:
    """Yield the trace of each rank, in the order of the ranks."""
    rows = {rank: b"".join(_messages(iteration, row)) for row, rank in enumerate(iteration.ranks)}
    return (rows[simulated] for simulated in iteration.represented_by.tolist())


def _messages(given: EngineInput, row: int) -> Iterator[bytes]:
    """Yield the messages of the rank in this row. Rounding to microseconds does not accumulate over its nodes."""
    yield _delimited(_field(1, "0.0.4"))
    durations = iter(given.duration_ns[row].tolist())
    computed_ns = written_us = number = 0
    after: list[int] = []  # nodes that the next computation waits for
    collectives: list[int] = []  # nodes of collectives, in launch order
    for instruction in (*given.schedule.instructions, None):  # None: the end
        if isinstance(instruction, Compute):
            computed_ns += next(durations)
            continue
        if isinstance(instruction, Wait) and instruction.only and not given.meets[instruction.only][row]:
            continue
        if duration_us := round(computed_ns / 1000) - written_us:
            number, written_us = number + 1, written_us + duration_us
            yield _node(number, f"compute {number}", COMP_NODE, duration_us, after)
            after = [number]
        if isinstance(instruction, Wait):
            after.append(collectives[instruction.collective])
        elif isinstance(instruction, LaunchCollective):
            made, number = given.schedule.collectives[instruction.collective], number + 1
            duration_us = round(given.cost_ns[instruction.collective] / 1000)
            parents = [*after, *(collectives[-1:] if given.concurrency == 1 else ())]
            attributes = {"comm_type": COMM_TYPE[made.transport], "comm_size": made.size_bytes}
            yield _node(number, f"{made.kind} {number}", COMM_COLL_NODE, duration_us, parents, **attributes)
            collectives.append(number)


def _node(number: int, name: str, kind: int, duration_us: int, parents: Iterable[int], **attributes: int) -> bytes:
    fields = [_field(1, number), _field(2, name), _field(3, kind), _field(7, duration_us)]
    fields += [_field(5, parent) for parent in dict.fromkeys(parents)]
    fields += [_field(10, _field(1, name) + _field(9, value)) for name, value in attributes.items()]
    return _delimited(b"".join([*fields, _field(10, _field(1, "is_cpu_op") + _field(27, 0))]))


def _field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3 | VARINT) + _varint(value)
    return _varint(number << 3 | LENGTH_DELIMITED) + _delimited(value.encode() if isinstance(value, str) else value)


def _delimited(message: bytes) -> bytes:
    return _varint(len(message)) + message


def _varint(number: int) -> bytes:
    """Encode in groups of seven bits, the lowest first; all groups but the last have their top bit set."""
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + _varint(number >> 7)
