"""Clocks that recordings and logs read: the host's, and a GPU's through events on its streams.

The host runs ahead of a GPU, so the host's clock shows when work was launched, not when it ran. `DeviceClock` records
an event on the current stream instead. The reading has its time once the GPU has reached the event; until then nobody
waits for it.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .reducer_observer import Future

ANCHOR_MS = 100.0
"""An event that is further from the anchor than this becomes the anchor. `elapsed_time` is a 32-bit float, which at
this distance is exact to 4 ns."""


@dataclass(slots=True, eq=False)
class DeviceReading:
    """A reading of a device's clock; `ns` is None until the clock has settled it."""

    ns: int | None = None


Reading = int | DeviceReading
"""Nanoseconds on the host's clock, at once or once the clock has settled the reading."""


class HostClock:
    """Reads the host's clock: every reading is an int, in nanoseconds."""

    on_device = False  #: whether readings are moments of a device, which may lie after the host's
    uncertainty_ns = 0  #: how far a reading may be from the host's clock

    def __init__(self, host_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.now = host_ns

    def when_done(self, future: Future, take: Callable[[Reading], None]) -> None:
        """Pass the moment at which a collective is done to `take`."""
        future.add_done_callback(lambda _future: take(self.now()))

    def settle(self, *, wait: bool = False) -> None:
        """Do nothing: readings have their times from the start."""


class DeviceClock:
    """Reads a device's clock, in nanoseconds on the host's axis, the clock `host_ns`.

    Events are settled in the order in which the host recorded them, each by its distance from the *anchor*, an event
    whose time is known. Settled events are recorded again for later readings, so there are as many events as readings
    that the device has not reached, and `spare` ones. Only the constructor and `settle(wait=True)` block the host.

    Args:
        new_event: Makes an event.
        current_stream: Returns the current stream.
        host_ns: The host's clock.
        spare: Number of events that the constructor makes, and of readings that `settle` leaves unless it waits. To
            settle one takes two calls of CUDA, which delay a host that sets the pace of the training.
        aside: Within it, a stream of the clock's own is the current one.
    """

    on_device = True

    def __init__(
        self,
        new_event: Callable[[], torch.Event],
        current_stream: Callable[[], Any],
        host_ns: Callable[[], int] = time.perf_counter_ns,
        spare: int = 0,
        aside: AbstractContextManager[object] = nullcontext(),  # noqa: B008 - it has no state
    ) -> None:
        self._new_event, self._current_stream = new_event, current_stream
        self._spare, self._aside = spare, aside
        self._free = [new_event() for _ in range(spare)]
        for event in self._free:  # CUDA makes an event when it is recorded first
            event.record(current_stream())
        self._pending: deque[tuple[DeviceReading, torch.Event]] = deque()
        self._anchor = new_event()
        for _ in range(2):  # the second time the stream is idle, so the device reaches the event at once
            before_ns = host_ns()
            self._anchor.record(current_stream())
            self._anchor.synchronize()
            after_ns = host_ns()
        self._anchor_ns = (before_ns + after_ns) // 2
        self.uncertainty_ns = (after_ns - before_ns + 1) // 2  # of this anchor; the clocks may drift apart later

    def now(self) -> DeviceReading:
        """Record an event on the current stream; never waits for the device."""
        event = self._free.pop() if self._free else self._new_event()
        event.record(self._current_stream())
        reading = DeviceReading()
        self._pending.append((reading, event))
        return reading

    def when_done(self, future: Future, take: Callable[[Reading], None]) -> None:
        """Pass the moment at which a collective is done to `take`, once its future is; a failed one has no moment.

        NCCL's futures are done when the work is launched. Their callbacks run on streams of torch's pool, and an
        event there holds up the training: 60 us a bucket on an H200. A stream of the clock's own does not.
        """
        if not future.done():
            future.add_done_callback(lambda _future: take(self.now()))
            return
        with self._aside, suppress(Exception):  # whoever waits for the collective reports its error
            future.wait()
            take(self.now())

    def settle(self, *, wait: bool = False) -> None:
        """Give readings their times and reuse their events.

        Stops at the first event that the device has not reached, and leaves the last `spare` readings; with `wait`,
        blocks until the device has reached every event.
        """
        while len(self._pending) > (0 if wait else self._spare):
            reading, event = self._pending[0]
            if wait:
                event.synchronize()
            elif not event.query():
                return
            self._pending.popleft()
            elapsed_ms = self._anchor.elapsed_time(event)
            reading.ns = self._anchor_ns + round(elapsed_ms * 1e6)
            if elapsed_ms > ANCHOR_MS:
                event, self._anchor = self._anchor, event
                self._anchor_ns = reading.ns
            self._free.append(event)


Clock = HostClock | DeviceClock


def clock_of(device: torch.device, host_ns: Callable[[], int] = time.perf_counter_ns, *, spare: int = 0) -> Clock:
    """The clock by which work on a device is timed; see `DeviceClock` for `spare`."""
    if device.type != "cuda":
        return HostClock(host_ns)
    return DeviceClock(
        partial(torch.Event, device=device, enable_timing=True),
        partial(torch.accelerator.current_stream, device),  # the current device may be another one
        host_ns,
        spare,
        torch.cuda.stream(torch.cuda.Stream(device)),
    )


def nanoseconds(reading: Reading) -> int | None:
    """The time of a reading; None: its clock has not settled it."""
    return reading if isinstance(reading, int) else reading.ns
