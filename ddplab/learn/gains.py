"""Gains: how long an emulated iteration takes before and after a rung, in virtual time."""

from functools import cache
from typing import Any

from reference.errors import RankError
from reference.trace import Trace

from ..conformance.class_under_test import NotSupportedError, Subject
from ..conformance.overlap import MS, Network, schedule_of
from ..validation.demo import TRACE
from .rungs import Rung

NETWORK = Network("8 V100s over 10 Gbit/s", 8, 20_000, 1.25e9)


@cache
def model(*, registered_backwards: bool = False) -> Trace:
    """Return ResNet-50 as recorded on a V100; its layers may be registered in reverse."""
    trace = Trace.load(TRACE)
    if not registered_backwards:
        return trace
    (rank,) = trace.ranks
    iterations = tuple(one.model_copy(update={"ready_ns": one.ready_ns[::-1]}) for one in rank.iterations)
    workload = trace.workload.model_copy(update={"parameters": trace.workload.parameters[::-1]})
    return Trace(workload=workload, ranks=(rank.model_copy(update={"iterations": iterations}),))


def iteration_ms(subject: Subject, *, registered_backwards: bool = False, **settings: Any) -> float | None:
    """Emulate an iteration of ResNet-50; None if the class does not run in virtual time with these settings.

    Copies and launches count as free.
    """
    trace = model(registered_backwards=registered_backwards)
    try:
        schedule = schedule_of(subject, trace, NETWORK, **{"bucket_cap_mb": 25.0} | settings)
    except (RankError, NotSupportedError, ValueError):
        return None
    return schedule.iteration_ns / MS


def gain(subject: Subject, rung: Rung, before_ms: float | None) -> tuple[str, float | None]:
    """Return one line on what a rung has won, and the milliseconds of the class without any setting.

    Args:
        subject: A class that has passed the rung.
        rung: The rung.
        before_ms: Milliseconds of the class as it passed the rung before. None: unknown.
    """
    plain = iteration_ms(subject)
    backwards = rung.gain.registered_backwards
    now = plain
    if rung.gain.before is not None:
        before_ms = iteration_ms(subject, registered_backwards=backwards, **rung.gain.before)
        now = iteration_ms(subject, registered_backwards=backwards, **rung.gain.after)
    if now is None:
        return "this class does not run in virtual time, so nothing was timed", plain
    change = f"{now:.1f} ms" if before_ms is None else f"{before_ms:.1f} -> {now:.1f} ms ({now - before_ms:+.1f})"
    note = f"; {rung.gain.note}" if rung.gain.note else ""
    return f"an emulated iteration of ResNet-50 on {NETWORK.name}: {change}{note}", plain
