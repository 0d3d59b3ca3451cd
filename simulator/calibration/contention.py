"""Contention: how much computation and collectives slow each other down, by size of message and number in flight."""

from itertools import product

import torch
import torch.distributed as dist

from reference import models
from reference.bucketing import MIB
from reference.launch import report_progress
from reference.parameters import size_bytes, trainable_parameters

from ..fabric import CONCURRENCY
from .collectives import affordable
from .samples import Contest, clock_ns, time_ns
from .stream import Messages, Stream

SIZES_BYTES = [64 * 1024, MIB, 8 * MIB]
"""Small ones cost wake-ups, large ones memory's bandwidth; larger ones do as the largest."""
ROUNDS = 5
"""At most; fewer where a case takes long."""
PASSES = 2
"""As many passes as that take alone, collectives that are beside computation would take alone."""
LEAST_COLLECTIVES, MOST_COLLECTIVES = 4, 400

Case = tuple[int, int]
"""Bytes of a message, and how many are in flight."""


def time_contention(
    rank: int, _world_size: int, model: str, rounds: int = ROUNDS
) -> dict[Case, tuple[Contest, Contest]]:
    """Times of this rank's passes through the model, forward and backward, and of its collectives, by case.

    A round has each case once, between passes alone: the machine's speed drifts.
    """
    rival = _Rival(model)
    sizes = [size for size in SIZES_BYTES if size <= rival.gradient_bytes] or [rival.gradient_bytes]
    cases = list(product(sizes, sorted({1, CONCURRENCY[dist.get_backend()]})))
    contests = {case: (Contest([], []), Contest([], [])) for case in cases}
    rival.compute_alone()  # the first touch of every gradient does not count
    due, begun_ns = rounds, clock_ns()
    for number in range(rounds):
        if number == 1:
            due = affordable((clock_ns() - begun_ns) // len(cases), rounds)
        if number == due:
            break
        if rank == 0:
            report_progress("calibrating slow-downs", number, due)
        before = rival.compute_alone()
        for case, (passes, collectives) in contests.items():
            reduced, reduced_together, computed_together = rival.contend(*case, pass_ns=before)
            after = rival.compute_alone()
            passes.alone.append([before, after])
            passes.together.append(computed_together)
            collectives.alone.append([reduced])
            collectives.together.append([reduced_together])
            before = after
    return contests


class _Rival:
    """A model's computation, and the collectives that are in its way."""

    def __init__(self, model: str) -> None:
        self._module, self._loss_fn = models.build(model)
        self.gradient_bytes = sum(map(size_bytes, trainable_parameters(self._module).values())) // 4 * 4
        self._messages = Messages(self.gradient_bytes)

    def compute_alone(self) -> int:
        """Nanoseconds of a pass, all ranks at once."""
        dist.barrier()
        return time_ns(self._compute)

    def contend(self, size: int, running: int, *, pass_ns: int) -> tuple[int, int, list[int]]:
        """Nanoseconds of a collective alone, of one beside computation, and of passes beside collectives."""
        about_ns, _ = self._stream(LEAST_COLLECTIVES, size, running)
        of_a_pass = torch.tensor(min(max(LEAST_COLLECTIVES, pass_ns // about_ns), MOST_COLLECTIVES))
        dist.all_reduce(of_a_pass, op=dist.ReduceOp.MAX)
        alone_ns, _ = self._stream(int(of_a_pass), size, running)
        together_ns, passes = self._stream(PASSES * int(of_a_pass), size, running, computes=True)
        return alone_ns, together_ns, passes[:-1] or passes  # the last pass ran alone for a part

    def _stream(self, count: int, size: int, running: int, *, computes: bool = False) -> tuple[int, list[int]]:
        dist.barrier()
        stream = Stream(self._messages.of(size, count), at_a_time=1 if running == 1 else None)
        passes = []
        while computes and stream.running:
            passes.append(time_ns(self._compute))
        return stream.wait() // count, passes

    def _compute(self) -> None:
        self._module.zero_grad()
        self._loss_fn(self._module).backward()
