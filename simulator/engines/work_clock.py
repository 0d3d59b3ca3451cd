"""Work clocks: how long something takes whose speed changes while it is under way."""

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import ceil
from operator import itemgetter

import simpy

ROUNDING_NS = 1e-6
"""What sums of floating point numbers may be off by."""


class WorkClock:
    """Shows how much work each of those that go at one speed has done so far, and wakes them when theirs is done.

    All of them share the clock, so a change of speed costs the same however many they are.

    Args:
        env: The simulation; its time is in nanoseconds.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._slowdown = 1.0
        self._shown_ns = 0.0
        self._read_at_ns = 0
        self._changes: list[tuple[float, int, float]] = [(0.0, 0, 1.0)]  # of speed: work shown, moment, slow-down
        self._waiting: list[tuple[float, int, simpy.Event]] = []
        self._entered = 0
        self._alarm: simpy.Timeout | None = None

    def after(self, work_ns: int) -> simpy.Event:
        """An event for when this much work, in nanoseconds at full speed, will have been done from now on."""
        self.read()
        event = self._env.event()
        self._entered += 1
        heappush(self._waiting, (self._shown_ns + work_ns, self._entered, event))
        if self._waiting[0][2] is event:
            self._set_alarm()
        return event

    def slow_down(self, factor: float) -> None:
        """From now on work takes `factor` times as long as at full speed."""
        if factor != self._slowdown:
            self._changes.append((self.read(), self._read_at_ns, factor))
            self._slowdown = factor
            self._set_alarm()

    def read(self) -> float:
        """How much work, in nanoseconds at full speed, each has done that was there from the start."""
        self._shown_ns += (self._env.now - self._read_at_ns) / self._slowdown
        self._read_at_ns = int(self._env.now)
        return self._shown_ns

    def moments(self, shown_ns: float, steps_ns: Sequence[int]) -> list[int]:
        """When steps ended, one after the other, the first of which began with the clock at `shown_ns`."""
        return [self._when(shown_ns + done) for done in accumulate(steps_ns)]

    def _when(self, shown_ns: float) -> int:
        """The moment at which the clock showed this, which must not be later than it was last read."""
        place = -1  # mostly, speed has not changed since
        if shown_ns < self._changes[place][0]:
            place = bisect_right(self._changes, shown_ns, key=itemgetter(0)) - 1
        shown_then_ns, moment, slowdown = self._changes[place]
        return min(self._read_at_ns, moment + ceil((shown_ns - shown_then_ns) * slowdown - ROUNDING_NS))

    def _set_alarm(self) -> None:
        """For whoever is done first; an alarm that was set before rings in vain."""
        if self._waiting:
            left_ns = self._waiting[0][0] - self._shown_ns - ROUNDING_NS
            self._alarm = self._env.timeout(max(0, ceil(left_ns * self._slowdown)))
            self._alarm.callbacks.append(self._ring)

    def _ring(self, alarm: simpy.Event) -> None:
        if alarm is not self._alarm:
            return
        self.read()
        while self._waiting and self._waiting[0][0] <= self._shown_ns + ROUNDING_NS:
            heappop(self._waiting)[2].succeed()
        self._set_alarm()
