"""Event queue: actions and processes in order of time, in whole nanoseconds.

A process is a generator that yields signals, and goes on when each has arrived. Replays spend most of their time
here; on simpy a replay takes 1.7 times as long.
"""

from collections import deque
from collections.abc import Callable, Generator
from heapq import heappop, heappush
from typing import Any


class EventQueue:
    """Actions in order of time; simultaneous ones in the order in which they were entered. Processes start first.

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
        """Time of the next action or start of a process; None: there is none."""
        if self._starting:
            return self.now_ns
        return self._actions[0][0] if self._actions else None

    def at(self, time_ns: int, action: Callable[[Any], None], argument: Any = None) -> None:
        """Enter an action, which is called with the argument at a time that is not before `now_ns`."""
        self._entered += 1
        heappush(self._actions, (time_ns, self._entered, action, argument))

    def start(self, process: "Process") -> None:
        """Start a process at the current time, before any further action."""
        self._starting.append(process)

    def step(self) -> None:
        """Start the next process, or call the next action."""
        if self._starting:
            resume(self._starting.popleft())
        else:
            self.now_ns, _, action, argument = heappop(self._actions)
            action(argument)

    def run(self) -> None:
        """Start all processes and call all actions, including those entered meanwhile."""
        while self._starting or self._actions:
            self.step()


class Signal:
    """A signal that processes wait for; it arrives once.

    Args:
        queue: The event queue.

    Attributes:
        arrived: Whether the signal has arrived.
    """

    __slots__ = ("_actions", "_queue", "arrived")

    def __init__(self, queue: EventQueue) -> None:
        self._queue, self.arrived = queue, False
        self._actions: list[tuple[Callable[[Any], None], Any]] = []

    def then(self, action: Callable[[Any], None], argument: Any = None) -> None:
        """Call an action with the argument when the signal arrives; it must not have arrived yet."""
        self._actions.append((action, argument))

    def send(self) -> None:
        """Let the signal arrive at the current time, after all actions entered before; may be called once."""
        self._queue.at(self._queue.now_ns, self._arrive)

    def _arrive(self, _: None) -> None:
        self.arrived = True
        actions = self._actions
        del self._actions  # frees the processes, and makes `then` after the arrival an error
        for action, argument in actions:
            action(argument)


Process = Generator[Signal, None, None]


class Slots:
    """Slots that processes take in the order of their requests.

    Args:
        queue: The event queue.
        count: Number of slots.
    """

    __slots__ = ("_free", "_queue", "_waiting")

    def __init__(self, queue: EventQueue, count: int) -> None:
        self._queue, self._free = queue, count
        self._waiting: deque[Signal] = deque()

    def take(self) -> Signal:
        """Request a slot; the slot is taken when the returned signal arrives."""
        signal = Signal(self._queue)
        if self._free:
            self._free -= 1
            signal.send()
        else:
            self._waiting.append(signal)
        return signal

    def give_back(self) -> None:
        """Free a slot, or pass it to the process that has waited longest."""
        if self._waiting:
            self._waiting.popleft().send()
        else:
            self._free += 1


def resume(process: Process) -> None:
    """Run a process until it yields a signal that has not arrived, or ends."""
    for signal in process:
        if not signal.arrived:
            signal.then(resume, process)
            return
