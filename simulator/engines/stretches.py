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
        waits: How many waits there are.
    """

    def __init__(self, script: Script) -> None:
        steps = [*script.instructions, None]
        self.stops: list[Launch | Wait | None] = [step for step in steps if not isinstance(step, Compute)]
        self.waits = sum(isinstance(step, Wait) for step in steps)
        self._is_stop = np.array([not isinstance(step, Compute) for step in steps])
        self._is_wait = np.array([isinstance(step, Wait) for step in steps])
        self._waits_before = self._is_wait.cumsum() - self._is_wait
        self._last = (~self._is_stop).cumsum()  # of the steps of `work_ns`, up to and with each instruction
        self._first = self._at_last_wait(self._last[None, self._is_wait])[0]

    def computed_by_stop(self, work_ns: Nanoseconds) -> Nanoseconds:
        """What each rank has computed by each stop since its last wait; shape [ranks, stops].

        Args:
            work_ns: How long each computing step takes, as in `Job.work_ns`.
        """
        return _sums(work_ns, self._first[self._is_stop], self._last[self._is_stop])

    def ends(self, waited_ns: Nanoseconds, work_ns: Nanoseconds, computation: WorkClock) -> Nanoseconds:
        """When each rank was done with each instruction.

        Args:
            waited_ns: When each wait was over; shape [ranks, waits].
            work_ns: How long each computing step takes, as in `Job.work_ns`.
            computation: The clock by which all ranks computed.
        """
        computed_ns = _sums(work_ns, self._first, self._last)
        end_ns = computation.moments(self._at_last_wait(waited_ns), computed_ns)
        end_ns[:, self._is_wait] = waited_ns
        return end_ns[:, :-1]

    def _at_last_wait(self, at_waits: Nanoseconds) -> Nanoseconds:
        """By instruction, what was at the last wait before it; 0 where there was none."""
        at_start = np.zeros((len(at_waits), 1), np.int64)
        return np.concatenate([at_start, at_waits], axis=1)[:, self._waits_before]


stretches_of = lru_cache(maxsize=8)(Stretches)
"""The same for all iterations that follow one script."""


def _sums(numbers: Nanoseconds, first: Nanoseconds, last: Nanoseconds) -> Nanoseconds:
    """Of each row from each of the places `first` to that before `last`."""
    up_to = np.zeros((len(numbers), numbers.shape[1] + 1), np.int64)
    numbers.cumsum(axis=1, out=up_to[:, 1:])
    sums: Nanoseconds = up_to[:, last] - up_to[:, first]
    return sums
