"""Streams and events in virtual time, for a reducer that overlaps by streams, as FSDP2 does.

On a GPU, waiting for a collective inside of a stream does not hold the host up, but what comes later in the stream.
On the CPU torch's streams do nothing, so FSDP2 would wait for each all-reduce in the backward pass. Here a collective
that is waited for in a side stream is noted, and the rank waits when its own stream waits for the side stream.
What a side stream computes takes no time, and happens at once: before the all-reduces that it should follow.
"""

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any
from unittest import mock

import torch

USERS = ("_fsdp_collectives", "_fsdp_param_group", "_fsdp_state")
"""The modules of FSDP2 that ask for the streams of a device."""

_local = threading.local()


class Event:
    """Marks what a stream waits for so far."""

    def __init__(self, pending: Sequence["torch.futures.Future[Any]"] = ()) -> None:
        self.pending = tuple(pending)

    def record(self, stream: "Stream | None" = None) -> None:
        """Mark what a stream waits for; None: the current one."""
        self.pending = tuple((stream or current_stream()).pending)


class Stream:
    """A side stream of a rank; `pending` has the results of collectives that it waits for."""

    def __init__(self, priority: int = 0) -> None:
        self.pending: list[torch.futures.Future[Any]] = []

    def wait(self, future: "torch.futures.Future[Any]", *_limit: Any) -> None:
        """Wait for a result before anything else that the stream does."""
        self.pending.append(future)

    def wait_event(self, event: "Event | Stream") -> None:
        """Wait for what an event marks, or another stream waits for."""
        for future in tuple(event.pending):
            self.wait(future)

    wait_stream = wait_event

    def record_event(self) -> Event:
        """Mark what the stream waits for so far."""
        return Event(self.pending)


class _Computation(Stream):
    """The stream of the rank's own computation, which waits in virtual time."""

    def wait(self, future: Any, *limit: Any) -> None:
        future.wait(*limit)


COMPUTATION = _Computation()


def current_stream(_device: Any = None) -> Stream:
    """The stream of this rank's thread."""
    return getattr(_local, "stream", COMPUTATION)


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    """Make a stream the current one."""
    before, _local.stream = current_stream(), chosen
    try:
        yield
    finally:
        _local.stream = before


@contextmanager
def virtual_streams() -> Iterator[None]:
    """Give FSDP2 these streams in place of those of the CPU; does nothing if this torch has another FSDP2."""
    this = sys.modules[__name__]
    with ExitStack() as patches:
        for name in USERS:
            with suppress(ImportError, AttributeError):
                user = import_module(f"torch.distributed.fsdp._fully_shard.{name}")
                patches.enter_context(mock.patch.object(user, "_get_device_handle", return_value=this))
        yield
