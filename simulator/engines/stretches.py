"""Stretches: a script cut at its waits. In between a rank computes without pause, so only waits need events."""

from functools import lru_cache

import numpy as np

from ..iteration.job import Nanoseconds
from ..iteration.script import Compute, Launch, Script, Wait
from .work_clock import WorkClock


class Stretches:
    """What lies between the waits of a script.

    Attributes:
        stops: Its launches and waits, then None, the end.
        is_stop: Which instructions are stops; the end is one more.
        waits: How many waits there are.
    """

    def __init__(self, script: Script) -> None:
        steps = [*script.instructions, None]
        self.stops: list[Launch | Wait | None] = [step for step in steps if not isinstance(step, Compute)]
        self.is_stop = np.array([not isinstance(step, Compute) for step in steps])
        is_wait = np.array([isinstance(step, Wait) for step in steps])
        self.waits = len(is_wait.nonzero()[0])
        self._is_wait, self._waits_before = is_wait, is_wait.cumsum() - is_wait

    def computed(self, work_ns: Nanoseconds) -> Nanoseconds:
        """What each rank has computed since its last wait, up to and with each instruction, and by the end.

        Args:
            work_ns: How long each computing step takes, as in `Job.work_ns`.
        """
        done_ns = np.zeros((len(work_ns), len(self.is_stop)), np.int64)
        done_ns[:, ~self.is_stop] = work_ns
        done_ns = done_ns.cumsum(axis=1)
        return done_ns - self._at_last_wait(done_ns[:, self._is_wait])

    def ends(self, waited_ns: Nanoseconds, computed_ns: Nanoseconds, computation: WorkClock) -> Nanoseconds:
        """When each rank was done with each instruction.

        Args:
            waited_ns: When each wait was over; shape [ranks, waits].
            computed_ns: As `computed` returns it.
            computation: The clock by which all ranks computed.
        """
        end_ns = computation.moments(self._at_last_wait(waited_ns), computed_ns)
        end_ns[:, self._is_wait] = waited_ns
        return end_ns[:, :-1]

    def _at_last_wait(self, at_waits: Nanoseconds) -> Nanoseconds:
        """By instruction, what was at the last wait before it; 0 where there was none."""
        at_start = np.zeros((len(at_waits), 1), np.int64)
        return np.concatenate([at_start, at_waits], axis=1)[:, self._waits_before]


stretches_of = lru_cache(maxsize=8)(Stretches)
"""The same for all iterations that follow one script."""
