"""Explain: why a prediction and its measurement differ, in nanoseconds, by part and by bucket.

Prediction and measurement become timelines of one schedule. Each has a fixed duration for every step of every rank
and for every collective, whatever the cause; a replay of them gives the same iteration again. The causes of an error
are found by replacing the predicted durations of one kind after the other by the measured ones. After each
replacement the iteration is simulated again: a longer step that hides behind the network costs nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Self, get_args

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from reference.bucketing import cap_name
from reference.files import value_ranges
from simulator.engines.engine_choice import simulate
from simulator.engines.engine_input import EngineInput
from simulator.engines.timeline import Timeline
from simulator.fabric import LinkShare
from simulator.plot_colours import COMPUTATION, EXPOSED, INK
from simulator.schedule.schedule import Compute, ComputeKind, LaunchCollective, Wait
from simulator.workload.compute_times import Nanoseconds

from .reducer_step_times import SAMPLES_FILE, Iterations, MomentKind, StepMoment, from_samples
from .validation_report import Configuration, ValidationReport, predict_one, share_folder

STEPS: dict[str, tuple[ComputeKind, ...]] = {
    "forward": ("unsynchronized", "forward"),
    "gaps between gradients": ("search", "backward"),
    "packing": ("pack",),
    "launch": ("compress", "launch"),
    "copy-out": ("decompress", "copy_out"),
    "optimiser": ("step",),
}
"""The kinds of computing steps in each part. What a comm hook computes before its collective counts as launch.
What it computes afterwards is predicted as copy-out, but measured as in flight: its future completes later."""
WAITS = ("broadcast", "slowest rank", "queue", "in flight", "waking up")
"""The other parts: waiting for broadcasts of buffers and, for the collective of a bucket, until the last rank has
launched it, until the process group has a free slot, until it is over, and until the reducer has been woken.

The end of a collective of a model that computes is not read (see `Watch`); there, waking up counts as in flight.
"""
PARTS = (
    "broadcast", "forward", "gaps between gradients", "packing", "launch",
    "slowest rank", "queue", "in flight", "waking up", "copy-out", "optimiser",
)  # fmt: skip
"""All parts, which add up to the iteration of the slowest rank, in the order of an iteration."""
CAUSES = tuple(part for part in PARTS if part not in ("slowest rank", "queue"))
"""The parts that can be a cause; the others follow from them."""

DONE_ALREADY_NS = 100_000
"""A rank that waits for less found the collective done. If all ranks did, and its end was not read, the collective
counts as in flight for as long as predicted, but at most until the last rank would have waited for it."""

MOMENT_OF_STEP: dict[ComputeKind, MomentKind] = {
    "forward": "forward_computed",
    "pack": "packed",
    "compress": "launching",
    "launch": "launched",
    "decompress": "woken",
    "copy_out": "copied_out",
    "step": "ended",
}
"""The moment at which each kind of step ends; the backward pass up to a bucket ends when packing it begins."""


class NotWatchedError(ValueError):
    """A configuration has collectives whose parts `Watch` does not measure."""


def measured_timelines(predicted: Timeline, iterations_by_rank: Sequence[Iterations]) -> list[Timeline]:
    """Return the timeline of each measured iteration, with the schedule of a prediction of the same configuration.

    Raises:
        NotWatchedError: The schedule has collectives other than broadcasts and one all-reduce per bucket.
    """
    for collective in predicted.engine_input.schedule.collectives:
        if collective.kind not in ("broadcast", "all_reduce"):
            raise NotWatchedError(
                f"explain: expected only collectives of kind broadcast and all_reduce, got {collective.kind}; its "
                "parts are not measured"
            )
    return [_measured_timeline(predicted, ranks) for ranks in zip(*iterations_by_rank, strict=True)]


def _measured_timeline(predicted: Timeline, ranks: Sequence[Sequence[StepMoment]]) -> Timeline:
    engine_input = predicted.engine_input
    schedule = engine_input.schedule
    moments = [{(one.kind, one.bucket): one.ns for one in of_rank} for of_rank in ranks]
    end_ns = np.array([_ends(engine_input, of_rank) for of_rank in moments], np.int64)
    launches = [place for place, one in enumerate(schedule.instructions) if isinstance(one, LaunchCollective)]
    waits = {one.collective: place for place, one in enumerate(schedule.instructions) if isinstance(one, Wait)}
    start_ns, done_ns = np.zeros((2, len(schedule.collectives)), np.int64)
    free_ns: dict[int, list[int]] = {queue: [0] * engine_input.concurrency for queue in engine_input.queues}
    for number, collective in enumerate(schedule.collectives):
        slots = free_ns[engine_input.queues[number]]
        start = max(int(end_ns[:, launches[number]].max()), slots.pop(0))
        woken = end_ns[:, waits[number]].tolist()
        before = end_ns[:, max(0, waits[number] - 1)].tolist()
        read = [ns for of_rank in moments if (ns := of_rank.get(("done", collective.bucket))) is not None]
        if len(read) < len(moments):
            read = [end for end, begin in zip(woken, before, strict=True) if end - begin > DONE_ALREADY_NS]
        expected = start + int(predicted.done_ns[number] - predicted.start_ns[number])
        done_ns[number] = max(start, min(max(read), max(woken)) if read else min(expected, max(before)))
        start_ns[number] = start
        slots.append(int(done_ns[number]))
        slots.sort()
    is_step = [isinstance(one, Compute) for one in schedule.instructions]
    elapsed_ns = np.diff(end_ns, axis=1, prepend=0)[:, is_step]
    measured = replace(
        engine_input,
        duration_ns=elapsed_ns,
        ranks=tuple(range(len(ranks))),
        represented_by=None,
        cost_ns=done_ns - start_ns,
        meets={condition: np.zeros(len(ranks), bool) for condition in engine_input.meets},
    )
    return Timeline(measured, end_ns, start_ns, done_ns)


def _ends(engine_input: EngineInput, moments: Mapping[tuple[MomentKind, int | None], int]) -> list[int]:
    """Return when a rank ended each instruction; one without a moment ends with the one before.

    Buckets that were packed before an earlier bucket was full count as packed together with that one, as predicted.
    """
    ends, now = [], 0
    collectives = engine_input.schedule.collectives
    for instruction in engine_input.schedule.instructions:
        key: tuple[MomentKind, int | None] | None = None
        if isinstance(instruction, Wait):
            bucket = collectives[instruction.collective].bucket
            key = ("buffers_received", None) if bucket is None else ("woken", bucket)
        elif isinstance(instruction, Compute) and instruction.kind == "backward":
            bucket = instruction.bucket
            key = ("backward_computed", None) if bucket is None else ("packing", bucket)
        elif isinstance(instruction, Compute) and instruction.kind in MOMENT_OF_STEP:
            key = (MOMENT_OF_STEP[instruction.kind], instruction.bucket)
        moment = now if key is None else moments.get(key, now)
        if key is not None and key[0] == "packing":
            moment -= _packing_ns(moments, now, moment)
        now = max(now, moment)
        ends.append(now)
    return ends


def _packing_ns(moments: Mapping[tuple[MomentKind, int | None], int], start_ns: int, end_ns: int) -> int:
    """Return the time that a rank spent on packing between two moments."""
    return sum(
        moments[("packed", bucket)] - ns
        for (kind, bucket), ns in moments.items()
        if kind == "packing" and start_ns <= ns < end_ns and ("packed", bucket) in moments
    )


@dataclass(frozen=True)
class FixedDurations:
    """The durations of an iteration that do not depend on what else runs.

    Attributes:
        engine_input: The iteration; one row for each rank.
        step_ns: Of each computing step; shape [ranks, steps].
        in_flight_ns: Of each collective; shape [collectives].
        waking_ns: From the end of a collective until a rank that waits for it goes on; shape [ranks, collectives].
    """

    engine_input: EngineInput
    step_ns: Nanoseconds
    in_flight_ns: Nanoseconds
    waking_ns: Nanoseconds

    @classmethod
    def of(cls, timeline: Timeline) -> Self:
        """Read the durations off a timeline."""
        engine_input = timeline.engine_input
        instructions = engine_input.schedule.instructions
        ranks, represented_by = engine_input.ranks, engine_input.represented_by
        rows = [ranks.index(rank) for rank in (ranks if represented_by is None else represented_by.tolist())]
        end_ns = timeline.end_ns[rows]
        elapsed_ns = np.diff(end_ns, axis=1, prepend=0)
        is_step = [isinstance(one, Compute) for one in instructions]
        waking_ns = np.zeros((len(rows), len(engine_input.schedule.collectives)), np.int64)
        for place, one in enumerate(instructions):
            if isinstance(one, Wait):
                since_done_ns = end_ns[:, place] - timeline.done_ns[one.collective]
                waking_ns[:, one.collective] = np.clip(since_done_ns, 0, elapsed_ns[:, place])
        fixed = replace(
            engine_input,
            ranks=tuple(range(len(rows))),
            represented_by=None,
            sharing=(LinkShare(),) * len(engine_input.queues),
            slow_down=1.0,
            meets={condition: met[rows] for condition, met in engine_input.meets.items()},
        )
        return cls(fixed, elapsed_ns[:, is_step], timeline.done_ns - timeline.start_ns, waking_ns)

    def iteration_ns(self) -> int:
        """Simulate the iteration; return its duration."""
        step_ns = self.step_ns.copy()
        column = 0
        for one in self.engine_input.schedule.instructions:  # a rank that is being woken does not compute
            if isinstance(one, Wait):
                step_ns[:, column] += self.waking_ns[:, one.collective]
            elif isinstance(one, Compute):
                column += 1
        frozen = replace(self.engine_input, duration_ns=step_ns, cost_ns=self.in_flight_ns)
        return simulate(frozen, "auto").iteration_ns

    def with_part(self, part: str, other: Self) -> Self:
        """Return a copy with the durations of one part taken from another iteration of the same schedule."""
        if part == "waking up":
            return replace(self, waking_ns=other.waking_ns)
        if part in STEPS:
            taken = np.array([step.kind in STEPS[part] for step in self.engine_input.schedule.steps])
            return replace(self, step_ns=np.where(taken, other.step_ns, self.step_ns))
        kind = "broadcast" if part == "broadcast" else "all_reduce"
        of_kind = np.array([one.kind == kind for one in self.engine_input.schedule.collectives], bool)
        return replace(self, in_flight_ns=np.where(of_kind, other.in_flight_ns, self.in_flight_ns))


def part_times(timeline: Timeline) -> dict[str, int]:
    """Divide the iteration of the slowest rank into `PARTS`, in nanoseconds; they add up to it."""
    engine_input = timeline.engine_input
    part_of = {kind: part for part, kinds in STEPS.items() for kind in kinds}
    launched_ns = timeline.launched_ns.max(axis=0, initial=0).tolist()
    parts = dict.fromkeys(PARTS, 0)
    start = 0
    for instruction, end in zip(
        engine_input.schedule.instructions, timeline.end_ns[timeline.slowest_row].tolist(), strict=True
    ):
        if isinstance(instruction, Compute):
            parts[part_of[instruction.kind]] += end - start
        elif isinstance(instruction, Wait):
            number = instruction.collective
            if engine_input.schedule.collectives[number].kind == "broadcast":
                parts["broadcast"] += end - start
            else:
                moments = (launched_ns[number], int(timeline.start_ns[number]), int(timeline.done_ns[number]), end)
                reached = [start, *(min(max(start, moment), end) for moment in moments)]
                for part, (begin, stop) in zip(WAITS[1:], pairwise(reached), strict=True):
                    parts[part] += max(0, stop - begin)
        start = end
    return parts


def bucket_times(timeline: Timeline) -> pd.DataFrame:
    """Return a table by bucket: when the last rank had packed it, launched it and so on, since the start."""
    schedule = timeline.engine_input.schedule
    ends = timeline.end_ns.max(axis=0).tolist()
    steps = {one: end for one, end in zip(schedule.instructions, ends, strict=True) if isinstance(one, Compute)}
    launched = timeline.launched_ns.max(axis=0, initial=0).tolist()
    rows = [
        {
            "bucket": one.bucket,
            "packed_ns": steps[Compute("pack", one.bucket)],
            "launched_ns": launched[number],
            "start_ns": int(timeline.start_ns[number]),
            "done_ns": int(timeline.done_ns[number]),
            "copied_out_ns": steps[Compute("copy_out", one.bucket)],
        }
        for number, one in enumerate(schedule.collectives)
        if one.kind == "all_reduce"
    ]
    return pd.DataFrame(rows).set_index("bucket")


@dataclass(frozen=True)
class Explanation:
    """Why a prediction and its measurement differ; all times in nanoseconds.

    Attributes:
        predicted_ns: Predicted iteration.
        measured_ns: Median of the measured iterations by the clock. Causes, parts and buckets are means over the one
            or two iterations in the middle.
        causes_ns: By cause, how much longer the iteration becomes when the measured durations replace the predicted
            ones, after the causes before it.
        not_explained_ns: What remains; the causes and this add up to the difference.
        predicted_parts_ns: `part_times` of the prediction, as `measured_parts_ns` of the measurement.
        buckets: `bucket_times` of the prediction (`predicted_` before each name) and measurement (`measured_`).
    """

    model: str
    configuration: Configuration
    predicted_ns: int
    measured_ns: float
    causes_ns: dict[str, float]
    not_explained_ns: float
    predicted_parts_ns: dict[str, int]
    measured_parts_ns: dict[str, float]
    buckets: pd.DataFrame

    @property
    def name(self) -> str:
        """Cap, order and, unless it is none, hook."""
        cap_mb, order, hook = astuple(self.configuration)
        return ", ".join([cap_name(cap_mb), f"{order} order", *[hook] * (hook != "none")])

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted_ns / self.measured_ns - 1

    @property
    def main_cause(self) -> tuple[str, float]:
        """The cause that contributes most to the error, and its nanoseconds; "not explained" counts as one."""
        sign = 1 if self.measured_ns >= self.predicted_ns else -1
        causes = {**self.causes_ns, "not explained": self.not_explained_ns}
        return max(causes.items(), key=lambda one: sign * one[1])

    def to_json(self) -> dict[str, Any]:
        """Return all fields, with those of the configuration; the buckets are a list of rows."""
        fields = {"model": self.model, **self.configuration.to_json(), **vars(self)}
        del fields["configuration"]
        return {**fields, "error": self.error, "buckets": self.buckets.to_dict("records")}


def causes_of(predicted: Timeline, measured: Timeline) -> dict[str, int]:
    """Return by how much each cause changes the iteration, and what remains under "not explained"; nanoseconds.

    Parts are replaced in the order of an iteration. If two parts only matter together, the later one is named.
    """
    now, target = FixedDurations.of(predicted), FixedDurations.of(measured)
    reached_ns, causes = predicted.iteration_ns, {}
    for part in CAUSES:
        now = now.with_part(part, target)
        iteration_ns = now.iteration_ns()
        causes[part] = iteration_ns - reached_ns
        reached_ns = iteration_ns
    return {**causes, "not explained": measured.iteration_ns - reached_ns}


def explain(
    predicted: Timeline,
    iterations_by_rank: Sequence[Iterations],
    configuration: Configuration,
    *,
    model: str,
    dilation: float = 1.0,
) -> Explanation:
    """Explain one configuration, from the timeline of the predicted median iteration and what each rank did.

    All times are divided by `dilation`: how many times slower the iterations ran than what they stand for.

    Raises:
        NotWatchedError: See `measured_timelines`.
    """
    timelines = sorted(measured_timelines(predicted, iterations_by_rank), key=attrgetter("iteration_ns"))
    timelines = timelines[(len(timelines) - 1) // 2 : len(timelines) // 2 + 1]  # their mean is the median
    causes = _mean([causes_of(predicted, one) for one in timelines], dilation)
    means = pd.concat(map(bucket_times, timelines)).groupby("bucket").mean()
    buckets = (bucket_times(predicted) / dilation).add_prefix("predicted_")
    buckets = buckets.join((means / dilation).add_prefix("measured_")).reset_index()
    return Explanation(
        model=model,
        configuration=configuration,
        predicted_ns=round(predicted.iteration_ns / dilation),
        measured_ns=float(np.mean([one.iteration_ns for one in timelines])) / dilation,
        not_explained_ns=causes.pop("not explained"),
        causes_ns=causes,
        predicted_parts_ns={part: round(ns / dilation) for part, ns in part_times(predicted).items()},
        measured_parts_ns=_mean([part_times(one) for one in timelines], dilation),
        buckets=buckets,
    )


def _mean(times_ns: Sequence[Mapping[str, int]], dilation: float) -> dict[str, float]:
    return {name: float(np.mean([one[name] for one in times_ns])) / dilation for name in times_ns[0]}


class ExplainedRun(NamedTuple):
    """Explanations in the order of the report, and a sentence with the reason for each configuration left out."""

    explanations: list[Explanation]
    left_out: list[str]


def explain_run(folder: Path) -> ExplainedRun:
    """Explain every configuration of a run of `validate`, from the files in its folder.

    The predictions are computed again, from the trace and the fabric file from which they were computed at first.

    Raises:
        ValueError: A file is missing or damaged, or no configuration can be explained.
    """
    report = ValidationReport.load(folder)
    samples = _read_samples(folder)
    by_configuration = dict(iter(samples.groupby(["model", "cap_mb", "order", "hook"])))
    inputs = {model: report.inputs(folder, model) for model in {row.model for row in report.rows}}
    explanations, left_out = list[Explanation](), list[str]()
    for row in report.rows:
        own = by_configuration.get((row.model, row.cap_mb, row.order, row.hook), samples[:0])
        turns = [from_samples(turn) for _, turn in own.groupby("turn", sort=True)]
        if not turns:
            raise ValueError(
                f"{folder / SAMPLES_FILE}: expected samples of {cap_name(row.cap_mb)} {row.order}, got none; "
                "run `ddplab validate` again"
            )
        by_rank = _by_rank(turns, folder / SAMPLES_FILE)
        trace, fabric = inputs[row.model]
        predicted = predict_one(trace, fabric, row.configuration.in_model(report.scale), len(by_rank))
        try:
            explanation = explain(
                predicted.timeline, by_rank, row.configuration, model=row.model, dilation=report.scale.dilation
            )
        except NotWatchedError as error:
            left_out.append(f"left out {cap_name(row.cap_mb)} {row.order}, {row.hook}: {error}")
            continue
        if abs(explanation.predicted_ns - row.predicted_ns) > 1:
            raise ValueError(
                f"{folder}: {explanation.name}: expected the prediction of report.json, "
                f"{row.predicted_ns / 1e6:.3f} ms, got {explanation.predicted_ns / 1e6:.3f} ms; the files are of "
                "different runs or versions, so run `ddplab validate` again"
            )
        explanations.append(explanation)
    if not explanations:
        raise ValueError(f"{folder}: no configuration can be explained; {left_out[0]}")
    return ExplainedRun(explanations, left_out)


SAMPLE_TYPES = {
    **dict.fromkeys(("model", "order", "hook", "moment"), "str"),
    **dict.fromkeys(("turn", "iteration", "rank", "ns", "bucket"), "Int64"),
    "cap_mb": "float64",
}
"""Columns of the samples that are read, with their types."""


def _read_samples(folder: Path) -> pd.DataFrame:
    path = folder / SAMPLES_FILE
    if not path.exists() and (share := share_folder(folder, 1)).exists():
        raise ValueError(
            f"{path}: a run with several calibrations has its samples in a folder for each of them; "
            f"run `ddplab explain {share}`"
        )
    try:
        samples = pd.read_parquet(path)
        with np.errstate(invalid="ignore"):  # pandas refuses numbers that a cast changes
            samples = samples.astype(SAMPLE_TYPES)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read: {error.strerror or error}; run `ddplab validate` again, because earlier "
            "versions kept no samples"
        ) from None
    except KeyError:
        missing = next(name for name in SAMPLE_TYPES if name not in samples.columns)
        raise ValueError(
            f"{path}: expected the columns {', '.join(SAMPLE_TYPES)}, got none named {missing}"
        ) from None
    except (ValueError, TypeError, OverflowError) as error:  # includes pyarrow's errors
        raise ValueError(f"{path}: expected samples as `ddplab validate` writes them, got {error}") from None
    if samples[["turn", "iteration", "rank", "ns"]].isna().any(axis=None):
        raise ValueError(f"{path}: expected a turn, iteration, rank and ns in each row; run `ddplab validate` again")
    unknown = samples.loc[~samples["moment"].isin(get_args(MomentKind)), "moment"].tolist()
    outside = samples.loc[~samples["ns"].between(-value_ranges.YEAR_NS, value_ranges.YEAR_NS), "ns"].tolist()
    if wrong := [*unknown, *outside]:
        raise ValueError(
            f"{path}: expected the moments {', '.join(get_args(MomentKind))} within a year, got {wrong[0]!r}; "
            "run `ddplab validate` again"
        )
    return samples


def _by_rank(turns: Sequence[Sequence[Iterations]], path: Path) -> list[Iterations]:
    counts = {len(ranks) for ranks in turns}, {len(iterations) for ranks in turns for iterations in ranks}
    if any(len(some) != 1 for some in counts):
        ranks, iterations = (" or ".join(map(str, sorted(some))) for some in counts)
        raise ValueError(
            f"{path}: expected equally many ranks in each turn and iterations of each rank, got {ranks} ranks and "
            f"{iterations} iterations; run `ddplab validate` again"
        )
    return [tuple(chain(*of_rank)) for of_rank in zip(*turns, strict=True)]


def draw_waterfall(explanation: Explanation, ax: Axes) -> Axes:
    """Draw the way from the predicted to the measured iteration, one bar for each cause, in ms; return the axes."""
    causes = {**explanation.causes_ns, "not explained": explanation.not_explained_ns}
    labels = ["predicted", *causes, "measured"]
    reached = explanation.predicted_ns / 1e6
    ax.axhline(reached, color=INK, linewidth=0.6, linestyle=":")
    ax.plot(0, reached, "D", color=INK, markersize=6)
    for place, ns in enumerate(causes.values(), start=1):
        ax.bar(place, ns / 1e6, bottom=reached, color=EXPOSED if ns > 0 else COMPUTATION, width=0.7)
        ax.plot([place - 0.35, place + 1.35], [reached + ns / 1e6] * 2, color=INK, linewidth=0.6)
        ax.annotate(
            f"{ns / 1e6:+.2f}", (place, max(reached, reached + ns / 1e6)), (0, 3),
            textcoords="offset points", ha="center", fontsize=7,
        )  # fmt: skip
        reached += ns / 1e6
    ax.plot(len(labels) - 1, explanation.measured_ns / 1e6, "o", color=INK, markersize=6)
    ax.use_sticky_edges = False  # bars would otherwise cut off the markers at the ends
    ax.margins(y=0.2)
    ax.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize=8)
    ax.set_ylabel("iteration, ms")
    ax.spines[["top", "right"]].set_visible(False)
    return ax
