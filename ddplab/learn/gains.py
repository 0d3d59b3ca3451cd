"""Gains: how long an emulated iteration takes before and after a rung, in virtual time, and a picture of it."""

from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from ..conformance.class_under_test import NotSupportedError, Subject
from ..conformance.timing_and_overlap import MS, Network, emulated
from ..demo import EXAMPLE, GBIT_PER_S, HOP_NS, RANKS, TRACE
from ..reference.errors import RankError
from ..reference.trace import Trace
from ..simulator import Prediction
from ..simulator.engines.timeline import Timeline
from .checks import Stepping
from .rungs import RUNGS

NETWORK = Network(EXAMPLE, RANKS, HOP_NS, GBIT_PER_S * 1e9 / 8)
WIDTH = 60
"""Columns of an iteration's picture."""
SHADES = "█▒"


@cache
def model(*, registered_backwards: bool = False) -> Trace:
    """Return ResNet-50 as recorded on a V100; its layers may be registered in reverse."""
    trace = Trace.load(TRACE)
    if not registered_backwards:
        return trace
    (rank,) = trace.ranks
    iterations = tuple(each.model_copy(update={"ready_ns": each.ready_ns[::-1]}) for each in rank.iterations)
    workload = trace.workload.model_copy(update={"parameters": trace.workload.parameters[::-1]})
    return Trace(workload=workload, ranks=(rank.model_copy(update={"iterations": iterations}),))


def iteration(
    subject: Subject, *, registered_backwards: bool = False, sharded: bool = False, **settings: Any
) -> Prediction | None:
    """Emulate an iteration of ResNet-50; None if the class does not run in virtual time with these settings.

    Copies and launches count as free. `sharded`: a sharded Adam steps. Without a cap, the class has its own.
    """
    stepping: Any = Stepping(subject) if sharded else subject
    trace = model(registered_backwards=registered_backwards)
    with suppress(RankError, NotSupportedError, ValueError):
        return emulated(stepping, trace, NETWORK, **{"bucket_cap_mb": None} | settings)
    return None


def picture_of(timeline: Timeline) -> str:
    """Draw when rank 0 computes and when the network is busy, as two rows of text; collectives have two shades."""
    spans = [span for span in timeline.spans() if span.rank == 0 and span.kind not in ("wait", "straggler", "queued")]
    collectives = sorted((span.start_ns, span.end_ns) for span in spans if span.stream == "comm")
    computes = [(span.start_ns, span.end_ns, SHADES[0]) for span in spans if span.stream == "compute"]
    network = [(*span, SHADES[number % 2]) for number, span in enumerate(collectives)]
    whole_ns = timeline.iteration_ns
    return f"  computes  {_bar(computes, whole_ns)}\n  network   {_bar(network, whole_ns)}"


def _bar(spans: Iterable[tuple[int, int, str]], whole_ns: int) -> str:
    """Draw spans, each with its character; one shorter than half of a column is left out."""
    bar = ""
    for start_ns, end_ns, shade in spans:
        start, end = (round(WIDTH * ns / whole_ns) for ns in (start_ns, end_ns))
        bar = bar.ljust(start) + shade * (end - start)
    return bar


class Gain(NamedTuple):
    """An emulated iteration before and after a rung."""

    sentence: str  #: milliseconds before and after, as text
    picture: str = ""  #: the iteration after the rung, from one average to the next; empty if nothing was emulated
    plain_ms: float | None = None  #: of the class without any setting; None if it does not run in virtual time


def gain(subject: Subject, number: int, before_ms: float | None) -> Gain:
    """Emulate an iteration of a class that has passed a rung, whose number counts from 1, before and after it.

    `before_ms` is that of the class as it passed the rung before; None: unknown.
    """
    rung, now = RUNGS[number - 1], iteration(subject)
    plain_ms = None if now is None else now.iteration_ns / MS
    backwards = rung.gain.registered_backwards
    if rung.gain.sharded:
        before_ms, now = plain_ms, iteration(subject, sharded=True)
    if rung.gain.before is not None:
        before = iteration(subject, registered_backwards=backwards, **rung.gain.before)
        before_ms = None if before is None else before.iteration_ns / MS
        now = iteration(subject, registered_backwards=backwards, **rung.gain.after)
    if now is None:
        return Gain("this class does not run in virtual time, so nothing was timed", plain_ms=plain_ms)
    now_ms = now.iteration_ns / MS
    change = f"{now_ms:.1f} ms"
    if before_ms is not None:
        change = f"{before_ms:.1f} -> {change} ({now_ms - before_ms:+.1f})"
    sentence = "; ".join(filter(None, [f"an emulated iteration of {EXAMPLE}: {change}", rung.gain.note]))
    return Gain(sentence, picture_of(now.timeline), plain_ms)
