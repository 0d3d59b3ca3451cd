"""Work clocks: how long something takes whose speed changes while it is under way."""

from heapq import heappop, heappush
from math import ceil

import numpy as np
import simpy

from ..iteration.job import Nanoseconds

ROUNDING_NS = 1e-3
"""What sums of floating point numbers may be off by, in iterations of minutes."""


class WorkClock:
    """Shows how much work each of those that go at one speed has done so far, and wakes them when theirs is done.

    All of them share the clock, so a change of speed costs the same however many they are. Work is in nanoseconds at
    full speed.

    Args:
        env: The simulation; its time is in nanoseconds.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._shown_ns, self._changed_ns, self._slowdowns = [0.0], [int(env.now)], [1.0]  # at each change of speed
        self._waiting: list[tuple[float, int, simpy.Event]] = []
        self._entered = 0
        self._alarm: simpy.Timeout | None = None

    def read(self) -> float:
        """How much work each has done that was there from the start."""
        return self._shown_ns[-1] + (self._env.now - self._changed_ns[-1]) / self._slowdowns[-1]

    def when(self, shown_ns: float) -> simpy.Event:
        """An event for when the clock will show this, which must not be less than it shows now."""
        event = self._env.event()
        self._entered += 1
        heappush(self._waiting, (shown_ns, self._entered, event))
        if self._waiting[0][2] is event:
            self._set_alarm()
        return event

    def slow_down(self, factor: float) -> None:
        """From now on work takes `factor` times as long as at full speed."""
        if factor != self._slowdowns[-1]:
            self._shown_ns.append(self.read())
            self._changed_ns.append(int(self._env.now))
            self._slowdowns.append(factor)
            self._set_alarm()

    def moments(self, start_ns: Nanoseconds, work_ns: Nanoseconds) -> Nanoseconds:
        """When work was done that began at `start_ns`, all of it before now.

        The sums are those of `read` and `_moment`, term by term, so moments are those of events to the nanosecond.
        """
        shown_ns, changed_ns, slowdowns = map(np.array, (self._shown_ns, self._changed_ns, self._slowdowns))
        at = changed_ns.searchsorted(start_ns, side="right") - 1
        done_ns = shown_ns[at] + (start_ns - changed_ns[at]) / slowdowns[at] + work_ns
        at = shown_ns.searchsorted(done_ns, side="right") - 1
        later_ns = np.ceil((done_ns - shown_ns[at]) * slowdowns[at] - ROUNDING_NS)
        moments: Nanoseconds = changed_ns[at] + later_ns.astype(np.int64)
        return moments

    def _moment(self, shown_ns: float) -> int:
        """When the clock will show this if speed does not change."""
        return self._changed_ns[-1] + ceil((shown_ns - self._shown_ns[-1]) * self._slowdowns[-1] - ROUNDING_NS)

    def _set_alarm(self) -> None:
        """For whoever is done first; an alarm that was set before rings in vain."""
        if self._waiting:
            self._alarm = self._env.timeout(max(0, self._moment(self._waiting[0][0]) - self._env.now))
            self._alarm.callbacks.append(self._ring)

    def _ring(self, alarm: simpy.Event) -> None:
        if alarm is not self._alarm:
            return
        while self._waiting and self._moment(self._waiting[0][0]) <= self._env.now:
            heappop(self._waiting)[2].succeed()
        self._set_alarm()
