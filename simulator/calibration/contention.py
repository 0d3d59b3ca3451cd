"""Contention: how much computation and collectives slow each other down."""

import threading

import torch
import torch.distributed as dist

from reference import models
from reference.bucketing import MIB

from .collectives import all_reduce
from .samples import Contest, median_ns, time_ns

ROUNDS = 3
ROUND_S = 0.6
"""How long both run together in a round, at least."""
PASSES = 2
"""As many passes as that take alone, at least."""
MESSAGE_BYTES = 8 * MIB

Times = tuple[list[int], list[int]]
"""Nanoseconds of passes and of collectives."""


def time_contention(_rank: int, _world_size: int, model: str) -> tuple[Contest, Contest]:
    """Times of this rank's computation and of its collectives, alone and together.

    In a round a thread issues a fixed number of all-reduces one after the other, while this one computes forward
    and backward passes for as long as they last. Before and after, both run alone: the machine's speed drifts.
    """
    rival = _Rival(model)
    rival.alone()  # the first touch of every buffer does not count
    alone, together = [rival.alone()], []
    ((passes, collectives),) = alone
    lasting_ns = max(ROUND_S * 1e9, PASSES * median_ns(passes))
    count = torch.tensor(lasting_ns / (2 * median_ns(collectives))).ceil()
    dist.broadcast(count, 0)  # all ranks must issue equally many
    for _ in range(ROUNDS):
        together.append(rival.together(int(count)))
        alone.append(rival.alone())
    of_passes, of_collectives = (
        Contest([times[kind] for times in alone], [times[kind] for times in together]) for kind in (0, 1)
    )
    return of_passes, of_collectives


class _Rival:
    """A model's computation, and the collectives that are in its way."""

    def __init__(self, model: str) -> None:
        self._module, self._loss_fn = models.build(model)
        self._message = torch.ones(MESSAGE_BYTES // 4)

    def alone(self) -> Times:
        """One after the other, all ranks at the same."""
        dist.barrier()
        computed = [time_ns(self._compute) for _ in range(2)]
        dist.barrier()
        return computed, [time_ns(self._reduce) for _ in range(6)]

    def together(self, count: int) -> Times:
        """`count` collectives, and computation for as long as they last."""
        computed: list[int] = []
        reduced: list[int] = []
        thread = threading.Thread(target=lambda: reduced.extend(time_ns(self._reduce) for _ in range(count)))
        dist.barrier()
        thread.start()
        while thread.is_alive():
            computed.append(time_ns(self._compute))
        return computed[:-1] or computed, reduced  # the last pass ran alone for a part

    def _compute(self) -> None:
        self._module.zero_grad()
        self._loss_fn(self._module).backward()

    def _reduce(self) -> None:
        all_reduce([self._message])
