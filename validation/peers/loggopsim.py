"""LogGOPSim ("our trace in LogGOPSim"): https://github.com/spcl/LogGOPSim, BSD with an acknowledgement.

What it models: processes that compute, send and receive, as a schedule in its language GOAL lists them. A message
takes a latency and a time per byte, and occupies its sender's and its receiver's adapter; all links are equal, and
messages share no other resource. It has no slow-down of computation beside collectives and no copies.

What we gave it: for each GPU a process that computes until a bucket is ready and tells a second process, which runs
the ring all-reduces of all buckets, one after the other, each send by itself, as its authors' generator of schedules
does. Two processes, because an operation here waits for the start of one on another processor of its process, not
for the end. Computation, ready times and buckets are ours. The network is NCCL's ring as in `astra_sim`: the rate of
its slowest link, the mean latency of its hops. No overhead of a message is known (o and g are 0), and no message
waits for its receiver (S is as large as it can be). Broadcasts of buffers are left out. If the known step is that of
several GPUs, LogGOPSim's ratio of the two steps is applied to it.

A ring sends 2 (n - 1) messages from each of n GPUs for every bucket: rows with more than 128 GPUs are left out.

Needs make, g++, gengetopt, re2c and libgraphviz-dev.
"""

import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

from ..board import Row
from . import checkout, run
from .buckets_and_links import NO_LINKS, PARTS, Computation, Ring, computation_of, links_of, ring_of

URL = "https://github.com/spcl/LogGOPSim"
REVISION = "76451de16546c7ea39651c183cbc532f4a3457c0"
MOST_GPUS = 128
MOST_TICKS = 2**31 - 1
"""LogGOPSim's parameters are integers of 32 bits, so a tick is as short as lets the latency fit."""
TICKS_PER_NS = 10_000
"""At most; ten thousand of them in an hour still fit into 64 bits."""


def method(row: Row) -> float:
    """Return the predicted milliseconds of an iteration; no interval.

    Raises:
        ValueError: The row has no links between GPUs, or too many GPUs.
        RuntimeError: LogGOPSim cannot be fetched or built, or fails on the row.
    """
    if row.part not in PARTS:
        raise ValueError(NO_LINKS)
    if row.gpus > MOST_GPUS:
        raise ValueError(f"more than {MOST_GPUS} GPUs: a schedule lists every send")
    computation = computation_of(row)
    predicted_ms = _simulated_ms(computation, ring_of(links_of(row)))
    if row.known_gpus == 1:
        return predicted_ms
    return row.known_ms * predicted_ms / _simulated_ms(computation, ring_of(links_of(row, row.known_gpus)))


def schedule(computation: Computation, ring: Ring, ticks_per_ns: int) -> Iterator[str]:
    """Yield the lines of a schedule in GOAL: processes 0 to n - 1 communicate, n to 2 n - 1 compute."""
    yield f"num_ranks {2 * ring.gpus}"
    told_ns = [bucket.ready_ns - round(ring.latency_s * 1e9) for bucket in computation.buckets]
    told_ns = [max(0, ns) for ns in [*told_ns, computation.backward_ns - round(ring.latency_s * 1e9)]]
    last = len(computation.buckets)  # number of the last message, which tells the end of the backward pass
    for gpu in range(ring.gpus):
        yield f"rank {gpu} {{"
        before, after = (gpu - 1) % ring.gpus, (gpu + 1) % ring.gpus
        received = ""
        for number, bucket in enumerate(computation.buckets):
            yield f"told{number}: recv 1b from {ring.gpus + gpu} tag {number}"
            chunk = max(1, round(bucket.size_bytes / ring.gpus))
            for step in range(2 * (ring.gpus - 1)):
                sent, next_received = f"send{number}x{step}", f"recv{number}x{step}"
                yield f"{sent}: send {chunk}b to {after} tag {number}"
                yield f"{next_received}: recv {chunk}b from {before} tag {number}"
                if step == 0:
                    yield f"{sent} requires told{number}"
                if received:
                    yield f"{sent} requires {received}"
                    yield f"{next_received} requires {received}"  # else messages meet receives in any order
                received = next_received
        yield f"told{last}: recv 1b from {ring.gpus + gpu} tag {last}"
        yield f"end: calc {(computation.end_ns - computation.backward_ns) * ticks_per_ns}"
        yield f"end requires told{last}"
        yield f"end requires {received}"
        yield "}"
    for gpu in range(ring.gpus):
        yield f"rank {ring.gpus + gpu} {{"
        for number, (begin_ns, end_ns) in enumerate(pairwise([0, *told_ns])):
            yield f"calc{number}: calc {(end_ns - begin_ns) * ticks_per_ns}"
            yield f"tell{number}: send 1b to {gpu} tag {number}"
            yield f"tell{number} requires calc{number}"
            if number:
                yield f"calc{number} requires tell{number - 1}"
        yield "}"


def _simulated_ms(computation: Computation, ring: Ring) -> float:
    ticks_per_ns = max(1, min(TICKS_PER_NS, int(MOST_TICKS / max(1.0, ring.latency_s * 1e9))))
    options = {
        "L": round(ring.latency_s * 1e9 * ticks_per_ns),
        "G": round(1e9 / ring.bytes_per_s * ticks_per_ns),
        "S": MOST_TICKS,
        **dict.fromkeys("ogO", 0),
    }
    with TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "schedule.goal").write_text("\n".join([*schedule(computation, ring, ticks_per_ns), ""]))
        run(str(folder_of_programs() / "txt2bin"), "-i", "schedule.goal", "-o", "schedule.bin", cwd=here)
        words = [word for name, value in options.items() for word in (f"--LogGOPS_{name}", str(value))]
        program = str(folder_of_programs() / "LogGOPSim")
        return finished_ms(run(program, "-f", "schedule.bin", "--batchmode", *words, cwd=here), ticks_per_ns)


def finished_ms(log: str, ticks_per_ns: int) -> float:
    """Return the milliseconds of the process that ends last from LogGOPSim's output."""
    ended = re.search(r"Maximum finishing time at host \d+: (\d+)", log)
    if ended is None:
        raise RuntimeError(f"LogGOPSim: expected the time of the last host, got {log.strip()[-200:]!r}")
    return int(ended[1]) / ticks_per_ns / 1e6


@cache
def folder_of_programs() -> Path:
    """Fetch and build LogGOPSim once, in seconds; return the folder with its programs."""
    folder = checkout(URL, REVISION, "loggopsim") / "src" / "LogGOPSim"
    if not (folder / "LogGOPSim").exists():
        if missing := [name for name in ("make", "g++", "gengetopt", "re2c") if which(name) is None]:
            packages = "make g++ gengetopt re2c libgraphviz-dev"
            raise RuntimeError(f"LogGOPSim: no {' and no '.join(missing)}; run `apt-get install {packages}`")
        print("LogGOPSim: building, some seconds", file=sys.stderr)
        run("make", "CXXFLAGS=-std=c++11 -O3", "LDFLAGS=-lcgraph", cwd=folder)
    return folder
