"""Contention: how much computation and collectives slow each other down, by size of message and number in flight."""

import torch
import torch.distributed as dist

from reference import models
from reference.bucketing import MIB
from reference.launch import report_progress
from reference.parameters import size_bytes, trainable_parameters

from ..fabric import CONCURRENCY
from .collectives import affordable
from .copies import pack
from .preparation import first_layout
from .samples import Contest, clock_ns, time_ns
from .stream import Messages, Stream

SIZES_BYTES = [64 * 1024, MIB, 8 * MIB]
"""Small ones cost wake-ups, large ones memory's bandwidth; larger ones do as the largest."""
ROUNDS, BUDGET_NS = 8, 30_000_000_000
"""At most so many rounds; fewer where all would take longer than that."""
PASSES = 2
"""Beside collectives, which alone would last twice as long as those passes do alone."""
LEAST_COLLECTIVES, MOST_COLLECTIVES = 4, 400

Case = tuple[int, int]
"""Bytes of a message, and how many are in flight."""


def time_contention(
    rank: int, _world_size: int, model: str, rounds: int = ROUNDS
) -> dict[Case, tuple[Contest, Contest]]:
    """Times of this rank's passes through the model and of its collectives, by case.

    A round has each case once, between passes alone: the machine's speed drifts.
    """
    rival = _Rival(model, dist.new_group())
    sizes = [size for size in SIZES_BYTES if size <= rival.gradient_bytes] or [rival.gradient_bytes]
    most = CONCURRENCY[dist.get_backend()]
    cases = list(dict.fromkeys([*((size, most) for size in sizes), (sizes[-1], 1)]))
    contests = {case: (Contest([], []), Contest([], [])) for case in cases}
    due, begun_ns = rounds, clock_ns()
    for number in range(rounds):
        if number == 1:
            due = affordable(clock_ns() - begun_ns, rounds, BUDGET_NS)
        if number == due:
            break
        if rank == 0:
            report_progress("calibrating slow-downs", number, due)
        before = rival.compute_alone()
        for case, (passes, collectives) in contests.items():
            reduced, reduced_together, computed_together = rival.contend(*case)
            after = rival.compute_alone()
            passes.alone.append([before, after])
            passes.together.append(computed_together)
            collectives.alone.append([reduced])
            collectives.together.append([reduced_together])
            before = after
    dist.destroy_process_group(rival.beside)
    return contests


class _Rival:
    """What a rank computes while collectives are in flight, and the collectives that are in its way.

    That is a backward pass, and copies into buckets and out of them. A forward pass, from which gradients come, goes
    before, but rarely meets a collective in training, so its time does not count.

    Args:
        model: As for `--model`.
        beside: Ranks that wait for each other through it wait for none of the collectives.
    """

    def __init__(self, model: str, beside: dist.ProcessGroup) -> None:
        self.beside = beside
        self._module, self._loss_fn = models.build(model)
        parameters = trainable_parameters(self._module)
        self._buckets = first_layout(self._module, parameters).buckets
        self.gradient_bytes = sum(map(size_bytes, parameters.values())) // 4 * 4
        self._messages = Messages(self.gradient_bytes)
        self.compute_alone()  # the first touch of every gradient does not count
        self._whole_ns = time_ns(self.compute_alone)

    def compute_alone(self) -> int:
        """Nanoseconds of a pass, up to the slowest rank's end."""
        dist.barrier()
        return self._compute()

    def contend(self, size: int, running: int) -> tuple[int, int, list[int]]:
        """Nanoseconds of a collective alone, of one beside computation, and of passes beside collectives."""
        about_ns = self._stream(LEAST_COLLECTIVES, size, running)[0]
        of_a_pass = torch.tensor(min(max(LEAST_COLLECTIVES, self._whole_ns // about_ns), MOST_COLLECTIVES))
        dist.all_reduce(of_a_pass, op=dist.ReduceOp.MAX)
        alone_ns = self._stream(int(of_a_pass), size, running)[0]
        return alone_ns, *self._stream(2 * PASSES * int(of_a_pass), size, running, passes=PASSES)

    def _stream(self, count: int, size: int, running: int, *, passes: int = 0) -> tuple[int, list[int]]:
        dist.barrier()
        stream = Stream(self._messages.of(size, count), at_a_time=1 if running == 1 else None)
        computed_ns = [self._compute() for _ in range(passes)]
        until_ns = clock_ns() if passes else float("inf")
        stream.wait()
        return stream.pace_ns(until_ns), computed_ns

    def _compute(self) -> int:
        """Nanoseconds up to the slowest rank's end, as in training.

        Collectives rarely slow all ranks equally: their threads take more of one core than of another for a while.
        Whoever is done sooner waits in training too, and leaves its core to the others.
        """
        self._module.zero_grad()
        loss = self._loss_fn(self._module)
        start = clock_ns()
        loss.backward()
        for bucket in self._buckets:
            bucket.reset()
            pack(bucket)
            bucket.copy_out()
        dist.barrier(self.beside)
        return clock_ns() - start
