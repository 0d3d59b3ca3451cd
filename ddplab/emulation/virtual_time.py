"""Virtual time: ranks run real code, one thread each, on a clock that jumps from event to event.

Only one thread runs at a time: a rank, until it computes or waits, or the thread that called `run`, which processes
the next event of the cluster and resumes the ranks that this event wakes. So two runs do the same in the same order.
"""

import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from ..reference.errors import RankError, RanksUnmatchedError
from ..reference.recording.reducer_observer import Future
from ..simulator.engines.event_replay import PROGRESS_BITS, Cluster
from ..simulator.schedule.schedule import Compute, Instruction, LaunchCollective, Wait

Result = TypeVar("Result")

TURN_TIMEOUT_S = 10.0
"""Longest real time between two waits of a rank."""
END_TIMEOUT_S = 1.0
"""How long to wait for a rank's thread after a failure; a thread that is blocked outside of Python never ends."""
CORES = os.cpu_count() or 1  # asked once: the answer takes longer than a short turn


def patient(limit_s: float) -> float:
    """Return a time limit for the present load: longer if more threads want to run than the machine has cores."""
    return limit_s * max(1.0, os.getloadavg()[0] / CORES)


class NoTurnError(RankError):
    """A rank has not come back: it computes for long, or waits where virtual time cannot see it."""


class TimedOutError(RuntimeError):
    """A collective took longer than a rank waits for it; the message is that of Gloo."""


class RanksEndedError(BaseException):
    """Ends the threads of all ranks after one has failed; no `Exception`, so `except Exception` does not catch it."""


class LogEntry(NamedTuple):
    """An instruction that a rank has executed, when it ended, and for computing its duration at full speed."""

    instruction: Instruction
    end_ns: int  #: from the last common start of the ranks
    duration_ns: int = 0


class VirtualRank:
    """One rank's view of virtual time; its methods are called by the rank's own thread."""

    def __init__(self, rank: int, time: "VirtualTime[Any]") -> None:
        self.rank = rank
        self.log: list[LogEntry] = []  #: what the rank has done since the ranks last started together
        self._time = time
        self._progress = 0
        self.thread: threading.Thread | None = None
        self.may_run: SimpleQueue[None] = SimpleQueue()  #: gets an entry when the rank's turn begins
        self.blocked_on = ""  #: what the rank waits for; empty while it runs

    def compute(self, duration_ns: int, step: Compute) -> None:
        """Compute for this long at full speed; longer while collectives slow computation down."""
        if not duration_ns:
            return
        self._progress += duration_ns << PROGRESS_BITS
        done = self._time.cluster.computation.reaches(self._progress)
        done.callbacks.append(lambda _event: self._time.runnable.append(self))
        self._block("computing")
        self.log.append(LogEntry(step, self._time.cluster.now_ns, duration_ns))

    def launched(self, number: int) -> None:
        """Log the launch of a collective."""
        self.log.append(LogEntry(LaunchCollective(number), self._time.cluster.now_ns))

    def wait(self, number: int | None, future: Future, what: str, limit_ns: int = 0) -> None:
        """Wait for a collective, or for what its callbacks compute: until the future is done.

        `number` is None if the result depends on no collective; `what` names it in error messages. Raises
        TimedOutError after `limit_ns`; 0: never.
        """
        if number is None and future.done():
            return
        if not future.done():
            waiting = [self]  # until the future or the limit wakes the rank

            def wake(_: Any) -> None:
                self._time.runnable.extend(waiting)
                waiting.clear()

            future.add_done_callback(wake)
            if limit_ns:
                self._time.cluster.env.timeout(limit_ns).callbacks.append(wake)
            self._block(what)
        self._progress = self._time.cluster.computation.progress()
        if not future.done():
            raise TimedOutError("Operation timed out!")
        if number is not None:
            self.log.append(LogEntry(Wait(number), self._time.cluster.now_ns))

    def start_together(self) -> None:
        """Wait for all ranks; then all start at time 0."""
        self._time.arrived.append(self)
        self._block("the other ranks, to start an iteration together")
        self._progress = 0

    def _block(self, what: str) -> None:
        if self._time.failure is None and threading.current_thread() is not self.thread:
            cause = "a callback of a collective may launch collectives, but not wait or compute"
            self._time.failure = RankError(self.rank, f"rank {self.rank}: {cause}")
        if self._time.failure is not None:
            raise RanksEndedError
        self.blocked_on = what
        self._time.turn_is_over.put(None)
        self.may_run.get()
        self.blocked_on = ""
        if self._time.failure is not None:
            raise RanksEndedError


class VirtualTime(Generic[Result]):
    """The clock of all simulated ranks.

    Whenever the ranks start together, `make_cluster` makes the cluster on which they compute and communicate, so each
    iteration starts at time 0.
    """

    def __init__(self, make_cluster: Callable[[], Cluster], ranks: Sequence[int]) -> None:
        self._make_cluster = make_cluster
        self.cluster = make_cluster()
        self.ranks = [VirtualRank(rank, self) for rank in ranks]
        self.failure: BaseException | None = None  #: the first error that a rank raised
        #: Called before a new cluster is made, after everything on the old one has ended.
        self.on_restart: Callable[[], None] = lambda: None
        self.runnable: deque[VirtualRank] = deque()  #: ranks that run next, each in its turn
        self.arrived: list[VirtualRank] = []
        self.turn_is_over: SimpleQueue[None] = SimpleQueue()
        self._results: dict[int, Result] = {}

    def run(self, body: Callable[[VirtualRank], Result]) -> list[Result]:
        """Run `body` on every rank, each in a thread of its own; returns the results in order of the ranks.

        Raises RankError if a rank raised an error, all ranks wait, or a rank has not come back in time.
        """
        for rank in self.ranks:
            name = f"rank {rank.rank}"
            rank.thread = threading.Thread(target=self._live, args=(rank, body), name=name, daemon=True)
            self.runnable.append(rank)
            rank.thread.start()
        try:
            while len(self._results) < len(self.ranks) and self.failure is None:
                self._advance()
        except BaseException as error:
            self.failure = self.failure or error
            raise
        finally:
            for rank in self.ranks:
                rank.may_run.put(None)
            for rank in self.ranks:
                if rank.thread is not None and rank.thread.is_alive():
                    rank.thread.join(timeout=END_TIMEOUT_S)
        if self.failure is not None:
            raise self.failure
        return [self._results[rank.rank] for rank in self.ranks]

    def _advance(self) -> None:
        while self.runnable and self.failure is None:
            rank = self.runnable.popleft()
            rank.may_run.put(None)
            limit_s = patient(TURN_TIMEOUT_S)
            try:
                self.turn_is_over.get(timeout=limit_s)
            except Empty:
                frame = sys._current_frames().get(rank.thread.ident or 0) if rank.thread else None
                stack = "".join(traceback.format_stack(frame)[-3:])
                cause = f"rank {rank.rank} has not come back for {limit_s:.3g} s; in virtual time a reducer may "
                cause += "wait only for its process group, not for other threads or in C++."
                raise NoTurnError(rank.rank, cause, traceback=stack) from None
        if self.failure is not None or len(self._results) == len(self.ranks):
            return
        if len(self.arrived) == len(self.ranks) - len(self._results):
            self.cluster.env.run()  # collectives that no rank waits for
            self.on_restart()
            self.cluster = self._make_cluster()
            self.runnable.extend(sorted(self.arrived, key=lambda rank: rank.rank))
            self.arrived.clear()
            return
        if self.cluster.env.peek() == inf:
            does = {one.rank: f"wait for {one.blocked_on}" if one.blocked_on else "have ended" for one in self.ranks}
            told = [f"ranks {[one for one in does if does[one] == it]} {it}" for it in dict.fromkeys(does.values())]
            raise RanksUnmatchedError(self.ranks[0].rank, f"no rank can go on: {'; '.join(told)}")
        self.cluster.env.step()

    def _live(self, rank: VirtualRank, body: Callable[[VirtualRank], Result]) -> None:
        rank.may_run.get()
        try:
            if self.failure is None:
                self._results[rank.rank] = body(rank)
        except RanksEndedError:
            pass
        except BaseException as error:  # noqa: BLE001 - `run` raises it
            if self.failure is None:
                cause = f"{type(error).__name__}: {error}"
                kind = RanksUnmatchedError if isinstance(error, RanksUnmatchedError) else RankError
                self.failure = kind(rank.rank, f"rank {rank.rank} failed in virtual time: {cause}")
                self.failure.__cause__ = error
        finally:
            self.turn_is_over.put(None)
