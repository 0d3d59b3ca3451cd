"""Questions and answers: which layout, network and straggler the reader has chosen, and the simulated iteration.

Both are JSON documents. `InteractiveIteration.answer` answers a question with `simulator.predict`. The Annotated DDP,
a page without a kernel, computes the same answers in the browser.
"""

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ddplab.reference.bucketing import Order
from ddplab.reference.trace import Trace
from ddplab.simulator.engines.timeline import Timeline
from ddplab.simulator.fabric import Fabric
from ddplab.simulator.predicted_iteration import Prediction
from ddplab.simulator.prediction import predict
from ddplab.simulator.results.breakdown import exposed_intervals
from ddplab.simulator.schedule.policy import Policy
from ddplab.simulator.schedule.schedule import Compute, buckets_of
from ddplab.simulator.workload.compute_times import Nanoseconds, RecordedModel, recorded_model
from ddplab.simulator.workload.variation import Straggler

ORDERS: tuple[Order, ...] = ("ready", "reverse", "forward")
"""Orders in which the reader can fill the buckets."""


class Choices(NamedTuple):
    """Values that the reader can choose."""

    bucket_caps_mb: tuple[float, ...] = (1, 2, 5, 10, 15, 25, 50, math.inf)  # in MiB; infinity: one bucket
    gbit_per_s: tuple[float, ...] = (1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 100, 200, 400)
    world_sizes: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128, 256)
    most_straggling: float = 2.0  # largest factor on the compute times of the straggler, which is the last rank


EVERY_CHOICE = Choices()
PARTS = {
    "exposed_ns": ("exposed_comm",),
    "computation_ns": ("forward", "backward", "optimizer"),
    "copies_ns": ("copies",),
    "launches_ns": ("launch",),
    "slowdown_ns": ("slowdown",),
    "stragglers_ns": ("stragglers",),
}
"""Parts of an answer, each with those of `Prediction.breakdown` that it contains; all others are 0."""


class Start(NamedTuple):
    """Values that are chosen at the start."""

    bucket_cap_mb: float = 25
    gbit_per_s: float = 25
    world_size: int = 16
    order: Order = "ready"


class Question(NamedTuple):
    """A question of the reader."""

    plan: tuple[tuple[int, ...], ...]  # parameter indices by bucket, in launch order
    world_size: int
    gbit_per_s: float
    factor: float  # compute times of the last rank as a multiple of those recorded; 1: no straggler

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Question":
        """Read a question from its JSON document; a field that is missing or of another type is a ValueError."""
        try:
            plan = tuple(tuple(int(index) for index in bucket) for bucket in document["plan"])
            return cls(plan, int(document["world_size"]), float(document["gbit_per_s"]), float(document["factor"]))
        except (KeyError, TypeError, ValueError) as error:
            fields = ", ".join(cls._fields)
            raise ValueError(f"question: expected {fields}, got {dict(document)}: {error!r}") from None


class InteractiveIteration:
    """One recorded iteration, the values that the reader can choose for it, and the answers to questions about it.

    The arguments are those of `InteractiveTimeline`.

    Raises:
        ValueError: The order at the start is none of `ORDERS`, or the trace has no prediction, for example because a
            parameter got no gradient.
    """

    def __init__(
        self,
        trace: Trace,
        fabric: Callable[[float], Fabric],
        *,
        title: str,
        choices: Choices,
        start: Start,
    ) -> None:
        if start.order not in ORDERS:
            raise ValueError(f"order: expected one of {', '.join(ORDERS)}, got {start.order!r}")
        self.trace, self.fabric, self.title = of_median_iterations(trace), fabric, title
        self.start = start
        self.choices = choices._replace(
            bucket_caps_mb=tuple(sorted({*choices.bucket_caps_mb, start.bucket_cap_mb})),
            gbit_per_s=tuple(sorted({*choices.gbit_per_s, start.gbit_per_s})),
            world_sizes=tuple(sorted({*choices.world_sizes, start.world_size})),
        )
        self.predict(self.first_question)

    @cached_property
    def model(self) -> RecordedModel:
        """The recorded model."""
        return recorded_model(self.trace)

    @property
    def first_question(self) -> Question:
        """The question about the start values, without a straggler."""
        plan = self._buckets(self.start.order, self.start.bucket_cap_mb)
        return Question(tuple(map(tuple, plan)), self.start.world_size, self.start.gbit_per_s, 1.0)

    def predict(self, question: Question) -> Prediction:
        """Predict the iteration that a question is about."""
        late = (Straggler(rank=question.world_size - 1, factor=question.factor),) if question.factor > 1 else ()
        fabric = self.fabric(question.gbit_per_s)
        settings: dict[str, Any] = {"world_size": question.world_size, "plan": question.plan, "stragglers": late}
        return predict(self.trace, fabric, assume=False, **settings)

    def answer(self, question: Question, prediction: Prediction) -> dict[str, object]:
        """Return the prediction for a question as a JSON document; all times are nanoseconds from the start.

        - *iteration_ns*, *exposed_ns*: `iteration_ns` and `exposed_comm_ns` of `Prediction`
        - *parts*: the parts of the slowest rank's iteration in `PARTS`, which add up to it
        - *collectives*: `[bucket, launched by all ranks, start, end]` of each; the bucket is None for a broadcast
        - *exposed*: `[start, end]` of the times for which the slowest rank waits while a collective runs
        - *ranks*: the ranks to show: the slowest, or an ordinary one and the straggler. Each has its number `rank`,
          its `spans` `[kind, bucket, start, end]`, and `ready_ns`, when each gradient is ready
        """
        timeline = prediction.timeline
        starts, ends = timeline.start_ns.tolist(), timeline.done_ns.tolist()
        launched = timeline.launched_ns.max(axis=0, initial=0).tolist()
        collectives = timeline.engine_input.schedule.collectives
        return {
            "iteration_ns": prediction.iteration_ns,
            "exposed_ns": prediction.exposed_comm_ns,
            "parts": {part: sum(prediction.breakdown[one] for one in ones) for part, ones in PARTS.items()},
            "collectives": [
                [collective.bucket, *moments]
                for collective, *moments in zip(collectives, launched, starts, ends, strict=True)
            ],
            "exposed": exposed_intervals(timeline),
            "ranks": [self._rank(question, prediction, row) for row in _shown_rows(timeline, question)],
        }

    def document(self) -> dict[str, object]:
        """Return everything that the widget shows before the first answer, as a JSON document."""
        caps = self.choices.bucket_caps_mb
        return {
            "title": self.title,
            "names": [parameter.name for parameter in self.trace.workload.parameters],
            "sizes_bytes": self.trace.sizes_bytes,
            "scenes": ORDERS,
            "cap": ["one bucket" if math.isinf(cap) else f"{cap:g} MiB" for cap in caps],
            "gbit": [f"{gbit:g} Gbit/s" for gbit in self.choices.gbit_per_s],
            "gpus": [str(world_size) for world_size in self.choices.world_sizes],
            "most_straggling": self.choices.most_straggling,
            "layouts": [[self._buckets(order, cap) for cap in caps] for order in ORDERS],
            "start": {
                "scene": ORDERS.index(self.start.order),
                "cap": caps.index(self.start.bucket_cap_mb),
                "gbit": self.choices.gbit_per_s.index(self.start.gbit_per_s),
                "gpus": self.choices.world_sizes.index(self.start.world_size),
                "factor": 1,
            },
        }

    def _buckets(self, order: Order, cap_mb: float) -> list[list[int]]:
        return buckets_of(Policy(order=order, bucket_cap_mb=cap_mb), self.model)

    def _rank(self, question: Question, prediction: Prediction, row: int) -> dict[str, object]:
        rank = prediction.timeline.engine_input.ranks[row]
        times = self.model.compute_times[rank % len(self.model.compute_times)][0]
        if question.factor > 1 and rank == question.world_size - 1:
            times = times.scaled(np.array(question.factor))
        spans = [span for span in prediction.spans if span.rank == rank and span.stream == "compute"]
        return {
            "rank": rank,
            "spans": [[span.kind, span.bucket, span.start_ns, span.end_ns] for span in spans],
            "ready_ns": simulated_ready_ns(prediction.timeline, row, times.forward_ns, times.ready_ns).tolist(),
        }


def of_median_iterations(trace: Trace) -> Trace:
    """Return a trace with one iteration of each rank, the one of median duration."""
    ranks = []
    for rank in trace.ranks:
        by_duration = sorted(rank.iterations, key=lambda iteration: iteration.duration_ns)
        ranks.append(rank.model_copy(update={"iterations": (by_duration[len(by_duration) // 2],)}))
    return trace.model_copy(update={"ranks": tuple(ranks)})


def simulated_ready_ns(timeline: Timeline, row: int, forward_ns: Nanoseconds, ready_ns: Nanoseconds) -> Nanoseconds:
    """Return when each gradient is ready on a simulated rank, where copies and slow-downs delay the computation.

    `forward_ns` and `ready_ns`, of shape [parameters], are those of computation alone.
    """
    computed = [(one.kind, begin, end) for one, begin, end in timeline.executed(row) if isinstance(one, Compute)]
    durations = timeline.engine_input.duration_ns[row].tolist()
    pieces = [(ns, *moments) for ns, (kind, *moments) in zip(durations, computed, strict=True) if kind == "backward"]
    alone, begins, ends = np.array(pieces).T
    after = int(forward_ns) + np.cumsum(alone)
    piece = np.searchsorted(after, ready_ns)  # the first piece of the backward pass that does not end earlier
    stretch = (ends - begins)[piece] / np.maximum(1, alone)[piece]
    simulated: Nanoseconds = ends[piece] - np.rint((after[piece] - ready_ns) * stretch).astype(np.int64)
    return simulated


def _shown_rows(timeline: Timeline, question: Question) -> list[int]:
    """Return the rows of an ordinary rank and of the straggler, or that of the slowest rank."""
    if question.factor <= 1:
        return [timeline.slowest_row]
    ranks = timeline.engine_input.ranks
    late = ranks.index(question.world_size - 1)
    return [*[row for row in range(len(ranks)) if row != late][:1], late]
