"""Witness: when the code under test issues collectives and when they are done, without a change to that code."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch.distributed as dist

from .samples import clock_ns


@dataclass
class Sighting:
    """One collective.

    Attributes:
        issued_ns: When it was asked for.
        done_ns: When this rank had its result. None: not yet.
    """

    issued_ns: int
    done_ns: int | None = None
    _told: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    def finish(self) -> None:
        """It is done now."""
        self.done_ns = clock_ns()
        self._told.set()

    def wait(self) -> int:
        """Block until it is done, and return when that was."""
        if self.done_ns is None:
            self._told.wait()
        assert self.done_ns is not None
        return self.done_ns


@contextmanager
def witnessed(*names: str) -> Iterator[list[Sighting]]:
    """Note every call of these functions of `torch.distributed` within the block, in the order of the calls.

    For code that looks them up when it calls them (`dist.all_reduce`). What follows in a `then` of a collective's
    future may run just before the witness notes its end, on another thread: so `Sighting.wait` before reading that.
    """
    originals = {name: getattr(dist, name) for name in names}
    sightings: list[Sighting] = []
    try:
        for name, original in originals.items():
            setattr(dist, name, _noting(original, sightings))
        yield sightings
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _noting(collective: Callable[..., Any], sightings: list[Sighting]) -> Callable[..., Any]:
    @wraps(collective)
    def noting(*args: Any, **kwargs: Any) -> Any:
        sighting = Sighting(clock_ns())
        sightings.append(sighting)
        work = collective(*args, **kwargs)
        if work is None:  # it was not asynchronous
            sighting.finish()
        else:
            work.get_future().add_done_callback(lambda _: sighting.finish())
        return work

    return noting
