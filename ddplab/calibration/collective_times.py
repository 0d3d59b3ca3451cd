"""Measures collectives by message size: all-reduces alone, all-reduces two at a time, and broadcasts."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import models
from ..reference.launch import rank_device, report_progress
from ..reference.parameters import trainable_parameters
from ..reference.recording.device_clock import Reading
from ..simulator.fabric import CONCURRENCY
from .repeated_timing import clock_ns, in_ns, meet, of_slowest_rank, read_clock, share_clock, time_ns

BUDGET_NS = 1_500_000_000
"""Time budget for the repetitions of one measurement; exceeded only to reach `LEAST_REPEATS`."""
LEAST_REPEATS = 3
SHORTEST_QUEUE, LONGEST_QUEUE = 4, 16
"""Queue length for measuring two all-reduces at a time: as many as fit into the largest message, within limits.

In training, a queue is as long as there are buckets, and the first messages of a queue are faster than the others,
because an idle link lets a burst pass.
"""

Samples = dict[str, dict[int, list[int]]]
"""Nanoseconds by measurement and message size: `all_reduce` and `broadcast` alone; `two`, an all-reduce beside one of
its size, and `beside_larger`, beside one of the next larger size, where the backend runs two at a time."""


def time_collectives(rank: int, world_size: int, sizes_bytes: Sequence[int], repeats: int) -> Samples:
    """Time collectives of these ascending sizes repeatedly; drop the first time of each.

    Repetitions of all sizes are interleaved, so that a drift of the machine's speed affects every size alike. A size
    that takes long, as on a slow link, is repeated as `BUDGET_NS` allows, but at least `LEAST_REPEATS` times.
    """
    messages = partial(adjacent_messages, torch.ones(2 * sizes_bytes[-1] // 4, device=rank_device()))
    queued = {size: min(max(SHORTEST_QUEUE, sizes_bytes[-1] // size), LONGEST_QUEUE) for size in sizes_bytes}
    larger = dict(pairwise(sizes_bytes))
    measurements: dict[str, Callable[[int], int]] = {
        "all_reduce": lambda size: last_to_last_ns(dist.all_reduce, *messages(size, 1)),
        "two": lambda size: two_at_a_time_ns(messages(size, queued[size])),
        "beside_larger": lambda size: beside_larger_ns(size, *messages(larger[size], 2)),
        "broadcast": lambda size: last_to_last_ns(dist.broadcast, *messages(size, 1), 0),
    }
    beside = sizes_bytes if CONCURRENCY[dist.get_backend()] > 1 else ()
    sizes_of = {"two": beside, "beside_larger": beside[:-1]}
    times: Samples = {name: {size: [] for size in sizes_of.get(name, sizes_bytes)} for name in measurements}
    repeats_of = dict.fromkeys(sizes_bytes, repeats)
    for done in range(repeats + 1):
        share_clock(rank, world_size)
        if rank == 0:
            report_progress("calibrating collectives", done, repeats + 1)
        for size in (size for size in sizes_bytes if done <= repeats_of[size]):
            taken_ns = 0
            for name in (name for name in measurements if size in times[name]):
                meet()
                times[name][size].append(measurements[name](size))
                taken_ns += times[name][size][-1] * (queued[size] if name == "two" else 1)
            if done == 0:
                repeats_of[size] = affordable_repeats(taken_ns, repeats)
    return {name: {size: taken[1:] for size, taken in by_size.items()} for name, by_size in times.items()}


def two_at_a_time_ns(messages: list[Tensor]) -> int:
    """Return the nanoseconds of one all-reduce while two run at a time; equal on all ranks.

    An all-reduce ends when its last rank has the result. Ranks end one all-reduce up to several milliseconds apart,
    and in another order than the next, so the time between two ends on one rank may be longer than on all together.
    """
    queue = AllReduceQueue(messages)
    queue.wait()
    return 2 * steady_ns_per_all_reduce(of_slowest_rank(queue.ends_ns), 2)


def steady_ns_per_all_reduce(ends_ns: Sequence[int], in_flight: int) -> int:
    """Return the mean nanoseconds between the ends of successive all-reduces, without the first `in_flight`."""
    return (ends_ns[-1] - ends_ns[in_flight - 1]) // (len(ends_ns) - in_flight)


def beside_larger_ns(size_bytes: int, message: Tensor, larger: Tensor) -> int:
    """Return the nanoseconds of an all-reduce of the first `size_bytes` of `message` beside one of `larger`.

    Both start at once; the time is that of the slowest rank, equal on all ranks.
    """
    start = clock_ns()
    works = [dist.all_reduce(one, async_op=True) for one in (larger, message[: size_bytes // 4])]
    ends = []
    for work in reversed(works):
        assert work is not None
        work.wait()
        ends.append(clock_ns())
    last_start, last_end = of_slowest_rank([start, ends[0]])
    return last_end - last_start


def last_to_last_ns(action: Callable[..., object], *arguments: object) -> int:
    """Return the nanoseconds of `action(*arguments)`, from the last rank's call to the last rank's end.

    The result is equal on all ranks. Ranks do not finish a collective at the same time: the time on one rank would be
    too short, because in training the next iteration's collectives wait for the rank that finished last. The clocks
    of GPUs differ by more than a small collective takes. They have just met, so all start at once.
    """
    if rank_device().type == "cuda":
        return of_slowest_rank([time_ns(action, *arguments)])[0]
    start = clock_ns()
    action(*arguments)
    last_start, last_end = of_slowest_rank([start, clock_ns()])
    return last_end - last_start


def affordable_repeats(once_ns: int, repeats: int, budget_ns: int = BUDGET_NS) -> int:
    """Return how many repetitions of `once_ns` fit into `budget_ns` on all ranks: `LEAST_REPEATS` to `repeats`."""
    affordable = torch.tensor(min(repeats, max(LEAST_REPEATS, budget_ns // max(1, once_ns))), device=rank_device())
    dist.all_reduce(affordable, op=dist.ReduceOp.MIN)
    return int(affordable)


def within_budget(repeats: int, budget_ns: int = BUDGET_NS) -> Iterator[int]:
    """Yield 0, and then 1, 2, ... up to as many repetitions of what the caller did at first as are affordable."""
    start_ns = clock_ns()
    yield 0
    yield from range(1, 1 + affordable_repeats(clock_ns() - start_ns, repeats, budget_ns))


def gradient_bytes(_rank: int, _world_size: int, model: str) -> int:
    """Return the bytes of all gradients of a model, which runs once: a mistake in it ends the command here."""
    module, loss_fn = models.build(model)
    models.run_batch(model, module, loss_fn)
    return sum(one.nbytes for one in trainable_parameters(module).values())


class AllReduceQueue:
    """All-reduces of messages that are all issued at once, in this order; all ranks create equal queues.

    So issues a reducer whose network is slower than its computation; the backend runs as many as it can.
    """

    def __init__(self, messages: Sequence[Tensor]) -> None:
        self._start_ns = clock_ns()
        self._results: list[torch.futures.Future[Any]] = []
        self._ends: list[torch.futures.Future[int]] = []
        for message in messages:
            work = dist.all_reduce(message, async_op=True)
            assert work is not None
            self._results.append(work.get_future())
            self._ends.append(self._results[-1].then(lambda _: clock_ns()))  # in a thread of the backend

    def wait(self) -> None:
        """Block until all all-reduces have finished; raise the error of one that failed."""
        torch.futures.wait_all([*self._results, *self._ends])

    @property
    def ends_ns(self) -> list[int]:
        """When the all-reduces finished on this rank, in ascending order, by `clock_ns`."""
        return sorted(end.value() for end in self._ends)

    def ns_per_all_reduce(self, until_ns: float = float("inf")) -> int:
        """Return the mean nanoseconds between the ends of successive all-reduces.

        All-reduces that end after `until_ns` are left out, except the first.
        """
        counted = [end for end in self.ends_ns if end <= until_ns] or self.ends_ns[:1]
        return (counted[-1] - self._start_ns) // len(counted)


class GpuAllReduceQueue:
    """As `AllReduceQueue`, on a GPU, where NCCL runs one after the other and its callbacks show no ends.

    A further stream waits for each of them, and has an event after it.
    """

    def __init__(self, messages: Sequence[Tensor]) -> None:
        self._start = read_clock()
        works = [dist.all_reduce(message, async_op=True) for message in messages]
        self._ends: list[Reading] = []
        with torch.cuda.stream(torch.cuda.Stream()) as self._waiting:
            for work in works:
                assert work is not None
                work.wait()
                self._ends.append(read_clock())

    def wait(self) -> None:
        """Let the current stream wait until all all-reduces have finished."""
        torch.cuda.current_stream().wait_stream(self._waiting)

    def ns_per_all_reduce(self, until_ns: float = float("inf")) -> int:
        """As of `AllReduceQueue`."""
        start_ns, *ends_ns = in_ns(self._start, *self._ends)
        counted = [end for end in ends_ns if end <= until_ns] or ends_ns[:1]
        return (counted[-1] - start_ns) // len(counted)


def adjacent_messages(memory: Tensor, size_bytes: int, count: int) -> list[Tensor]:
    """Return `count` adjacent float32 views of `size_bytes`, as buckets are; after its end, start again."""
    elements = size_bytes // 4
    places = max(1, len(memory) // elements)
    return [memory[elements * (n % places) :][:elements] for n in range(count)]
