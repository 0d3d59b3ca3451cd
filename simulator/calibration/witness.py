"""Witness: when the code under test issues collectives and when they are done, without a change to that code."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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

    def finish(self) -> None:
        """It is done now."""
        self.done_ns = clock_ns()


@contextmanager
def witnessed(*names: str) -> Iterator[list[Sighting]]:
    """Note every call of these functions of `torch.distributed` within the block, in the order of the calls.

    For code that looks them up when it calls them (`dist.all_reduce`) and goes on in a `then` of the collective's
    future, as everything in `reference` does: what the witness notes at its end comes before any `then`.
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
