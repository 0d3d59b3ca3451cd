"""Verification of a plan: torch's default buckets and the plan train in turns, to measure the gain.

There are three ways, from exact to noisy: in virtual time, on emulated devices by the clock, and by real training.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter
from torch import nn

from reference.data_parallel import DistributedDataParallel
from reference.launch import Progress, RankPool, no_progress
from reference.trace import Trace
from simulator.fabric import Fabric
from simulator.prediction import predict
from simulator.schedule.comm_hook_messages import NO_HOOK
from simulator.schedule.policy import Policy
from simulator.schedule.schedule import buckets_of
from simulator.workload.compute_times import recorded_model

from ..calibration.repeated_timing import interval_of_median, median_ns
from ..emulation.emulate import emulate, emulated_fabric
from ..emulation.time_dilation import ORIGINAL, ScaleModel
from ..emulation.virtual_training import ddp_arguments
from .machine_conditions import Conditions
from .training_runs import MEASURED_ITERATIONS, TargetRun, Turn, measure_configurations
from .validate_emulated import EmulatedRanks

TURNS = 8
"""Turns of default and plan: with 8 or more, a single outlier leaves the 90 % interval of the gain as it is."""
TRAINED = ("bucket_cap_mb", "broadcast_buffers", "gradient_as_bucket_view", "hook")
"""Fields of `Policy` that may differ from their defaults where real ranks train."""


@dataclass(frozen=True, kw_only=True)
class TrainedTimes:
    """Predicted and measured iteration times of one bucket assignment, in nanoseconds.

    Attributes:
        predicted_ns: Predicted median.
        times_ns: Measured iterations, by turn.
    """

    predicted_ns: int
    times_ns: tuple[tuple[int, ...], ...]

    @property
    def measured_ns(self) -> int:
        """Median of all measured iterations."""
        return median_ns(chain.from_iterable(self.times_ns))

    @property
    def quartiles_ns(self) -> tuple[int, int]:
        """First and third quartile of all measured iterations."""
        low, high = np.quantile(list(chain.from_iterable(self.times_ns)), [0.25, 0.75])
        return round(low), round(high)

    def to_json(self) -> dict[str, Any]:
        """Return all fields and summaries."""
        return {
            "predicted_ns": self.predicted_ns,
            "measured_ns": self.measured_ns,
            "quartiles_ns": list(self.quartiles_ns),
            "times_ns": [list(turn) for turn in self.times_ns],
        }


@dataclass(frozen=True, kw_only=True)
class GainCheck:
    """Predicted and measured gain of a plan over torch's default under one reducer.

    A gain is the part of the default's iteration time that the plan saves: 0.02 is 2 % faster, and a negative gain is
    a loss.

    Attributes:
        reducer: The class that trained: "ddplab" or "torch".
        default: Times of torch's default buckets.
        plan: Times of the plan; turn for turn, it trained right before or after the default.
    """

    reducer: str
    default: TrainedTimes
    plan: TrainedTimes

    @property
    def predicted_gain(self) -> float:
        """Gain of the predicted medians."""
        return _gain(self.default.predicted_ns, self.plan.predicted_ns)

    @property
    def gains(self) -> list[float]:
        """Gain of each turn, of the medians of its iterations."""
        pairs = zip(self.default.times_ns, self.plan.times_ns, strict=True)
        return [_gain(statistics.median(default), statistics.median(plan)) for default, plan in pairs]

    @property
    def measured_gain(self) -> float:
        """Median of `gains`."""
        return statistics.median(self.gains)

    @property
    def gain_interval(self) -> tuple[float, float] | None:
        """Interval that contains the true median gain with at least 90 %; None if there are too few turns."""
        return interval_of_median(self.gains)

    def to_json(self) -> dict[str, Any]:
        """Return all fields and summaries."""
        interval = self.gain_interval
        return {
            "reducer": self.reducer,
            "predicted_gain": self.predicted_gain,
            "measured_gain": self.measured_gain,
            "gain_interval": None if interval is None else list(interval),
            "default": self.default.to_json(),
            "plan": self.plan.to_json(),
        }


def _gain(default_ns: float, plan_ns: float) -> float:
    return 1 - plan_ns / max(1, default_ns)


@dataclass(frozen=True, kw_only=True)
class PlanVerification:
    """What a verification measured; times are those of the original.

    Attributes:
        how: In virtual time, by the clock on emulated devices, or with real computation.
        world_size: Number of ranks.
        checks: One for each reducer that trained.
        scale_model: The scale model of emulated devices. None: nothing was scaled.
        conditions: Conditions of the measurement on emulated devices. None: other ways.
    """

    how: Literal["virtual", "clock", "train"]
    world_size: int
    checks: tuple[GainCheck, ...]
    scale_model: ScaleModel | None = None
    conditions: Conditions | None = None

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        document: dict[str, Any] = {"how": self.how, "world_size": self.world_size}
        document["checks"] = [check.to_json() for check in self.checks]
        for name, kind in (("scale_model", ScaleModel), ("conditions", Conditions)):
            value = getattr(self, name)
            document[name] = None if value is None else TypeAdapter(kind).dump_python(value)
        return document


@dataclass(frozen=True, kw_only=True)
class PlannedTraining:
    """The plan to verify, with all that training and prediction need.

    Attributes:
        trace: The recorded computation.
        world_size: Number of ranks.
        policy: Settings of the reducer that default and plan have in common.
        buckets: The plan: parameter indices in launch order.
        caps_mb: Bucket caps in MiB with which torch's class makes these buckets after its rebuild. None: no list
            does, and torch's class does not train.
    """

    trace: Trace
    world_size: int
    policy: Policy
    buckets: Sequence[Sequence[int]]
    caps_mb: Sequence[float] | None

    @cached_property
    def default(self) -> Policy:
        """Torch's default buckets."""
        return self._with(bucket_cap_mb=None)

    @cached_property
    def plan(self) -> Policy:
        """The plan's buckets, as given to ddplab's reducer."""
        return self._with(plan=tuple(map(tuple, self.buckets)))

    @cached_property
    def caps(self) -> Policy | None:
        """The plan's buckets, as given to torch's class."""
        return None if self.caps_mb is None else self._with(bucket_cap_mb_list=tuple(self.caps_mb))

    def _with(self, **buckets: Any) -> Policy:
        return Policy(**(dict(self.policy) | buckets))

    @property
    def default_as_plan(self) -> Policy:
        """Torch's default buckets after the rebuild, given explicitly, because a scale model rounds sizes."""
        return self._with(plan=tuple(map(tuple, buckets_of(self.default, recorded_model(self.trace)))))

    def check_trainable(self) -> None:
        """Raise a ValueError if real ranks cannot train the policy."""
        for name, field in Policy.model_fields.items():
            if name not in TRAINED and (value := getattr(self.policy, name)) != field.default:
                raise ValueError(
                    f"{name}: expected {field.default!r} where real ranks train, got {value!r}; "
                    "verify the plan in virtual time"
                )


def verify_in_virtual_time(training: PlannedTraining, fabric: Fabric, **how: Any) -> PlanVerification:
    """Run both real reducers in virtual time, where they take the predicted time to the nanosecond.

    Args:
        training: The plan.
        fabric: Costs of collectives, and processor costs. Copies and launches of torch's class count as free.
        how: Further arguments of `predict`: variation, stragglers and assume.

    Raises:
        ValueError: As for `emulate`.
        RankError: As for `emulate`.
    """
    checks = []
    for reducer, plan in (("ddplab", training.plan), ("torch", training.caps)):
        if plan is None:
            continue
        costs = emulated_fabric(fabric, reducer)
        times = []
        for policy in (training.default, plan):
            arguments: dict[str, Any] = {"world_size": training.world_size, "policy": policy, **how}
            emulated = emulate(training.trace, costs, reducer=reducer, **arguments)
            predicted = predict(training.trace, costs, **arguments)
            times.append(TrainedTimes(predicted_ns=predicted.iteration_ns, times_ns=((emulated.iteration_ns,),)))
        checks.append(GainCheck(reducer=reducer, default=times[0], plan=times[1]))
    return PlanVerification(how="virtual", world_size=training.world_size, checks=tuple(checks))


def verify_by_the_clock(
    training: PlannedTraining,
    pool: RankPool,
    *,
    out: Path,
    scale: ScaleModel = ORIGINAL,
    turns: int = TURNS,
    modelled: Fabric | None = None,
    on_progress: Progress = no_progress,
) -> PlanVerification:
    """Train ddplab's reducer on emulated devices, over real links or a modelled network.

    The predictions are computed before the training, from costs that are calibrated on the same ranks.

    Args:
        training: The plan.
        pool: The ranks to train on; the rate of their links is that of the scale model.
        out: Folder for the files of `EmulatedRanks.calibrate`.
        scale: The scale model that runs.
        turns: Turns of default and plan.
        modelled: Costs of the original's collectives for a `modelled_network`. None: the network is real.
        on_progress: Called with each step's name, the parts done and all parts.

    Raises:
        ConditionsError: The machine is too slow or too busy, so there is no result.
        RankError: A rank failed.
        ValueError: Real ranks cannot train the policy, or some parameter got no gradient.
    """
    training.check_trainable()
    ranks = EmulatedRanks.calibrate(
        pool,
        scale.trace(training.trace, turns * MEASURED_ITERATIONS),
        [training.default_as_plan, training.plan],
        out=out,
        scale=scale,
        modelled=modelled,
        on_progress=on_progress,
    )
    return verify_on_emulated_ranks(training, ranks, scale=scale, turns=turns, on_progress=on_progress)


def verify_on_emulated_ranks(
    training: PlannedTraining,
    ranks: EmulatedRanks,
    *,
    scale: ScaleModel,
    turns: int = TURNS,
    on_progress: Progress = no_progress,
) -> PlanVerification:
    """Train default and plan on ranks that are calibrated for them; see `verify_by_the_clock`."""
    policies = training.default_as_plan, training.plan
    world_size = ranks.pool.world_size
    predicted_ns = [
        predict(ranks.predicted_from, ranks.fabric, world_size=world_size, policy=policy, assume=False).iteration_ns
        for policy in policies
    ]

    def train(runs: Sequence[TargetRun], turn: int) -> list[list[Turn]]:
        return ranks.train(runs, turn, f"training emulated devices, turn {turn + 1} of {turns}", on_progress)

    runs = [TargetRun(_our_arguments(policy), policy.hook.name) for policy in policies]
    measured = train_alternately(train, runs, turns)
    conditions = ranks.check_conditions(chain(*chain(*measured)))
    default, plan = (
        TrainedTimes(
            predicted_ns=scale.original_ns(ns),
            times_ns=tuple(tuple(map(scale.original_ns, of_ranks[0].measurement.times_ns)) for of_ranks in of_run),
        )
        for ns, of_run in zip(predicted_ns, measured, strict=True)
    )
    return PlanVerification(
        how="clock",
        world_size=world_size,
        checks=(GainCheck(reducer="ddplab", default=default, plan=plan),),
        scale_model=scale,
        conditions=conditions,
    )


def verify_by_training(
    training: PlannedTraining,
    pool: RankPool,
    model: str,
    fabric: Fabric,
    *,
    turns: int = TURNS,
    on_progress: Progress = no_progress,
) -> PlanVerification:
    """Train a real model on real ranks, with ddplab's reducer and, without a comm hook, with torch's class.

    Trace and fabric should have been recorded and calibrated on these ranks. The machine's speed drifts, so the times
    may differ from the predicted ones by more than the gain, of which each turn measures both sides.

    Args:
        training: The plan.
        pool: The ranks to train on.
        model: The model of the trace, as `Trainer` takes it.
        fabric: Costs to predict from.
        turns: Turns of default and plan.
        on_progress: Called with each step's name, the parts done and all parts.

    Raises:
        RankError: A rank failed.
        ValueError: Real ranks cannot train the policy.
    """
    training.check_trainable()
    hook = training.policy.hook.name
    policies = training.default, training.plan
    runs = [TargetRun(_our_arguments(policy), hook) for policy in policies]
    if hook == NO_HOOK.name and training.caps is not None:
        of_torch = partial(ddp_arguments, nn.parallel.DistributedDataParallel, plan=None)
        torchs = map(of_torch, (training.default, training.caps))
        runs = [run._replace(torchs_arguments=arguments) for run, arguments in zip(runs, torchs, strict=True)]
    predicted_ns = [
        predict(training.trace, fabric, world_size=pool.world_size, policy=policy).iteration_ns for policy in policies
    ]

    def train(runs: Sequence[TargetRun], turn: int) -> list[list[Turn]]:
        word = f"training {model}, turn {turn + 1} of {turns}"
        return pool.run(measure_configurations, model, runs, word, on_progress=on_progress)

    measured = train_alternately(train, runs, turns)
    checks = []
    for reducer, field in (("ddplab", "times_ns"), ("torch", "torchs_ns")):
        default, plan = (
            TrainedTimes(
                predicted_ns=ns, times_ns=tuple(getattr(of_ranks[0].measurement, field) for of_ranks in of_run)
            )
            for ns, of_run in zip(predicted_ns, measured, strict=True)
        )
        if all(default.times_ns):
            checks.append(GainCheck(reducer=reducer, default=default, plan=plan))
    return PlanVerification(how="train", world_size=pool.world_size, checks=tuple(checks))


def train_alternately(
    train: Callable[[Sequence[TargetRun], int], Sequence[Sequence[Turn]]], runs: Sequence[TargetRun], turns: int
) -> list[list[tuple[Turn, ...]]]:
    """Train all runs once in each turn; every other turn in reverse order, so that a drift of the speed cancels.

    Args:
        train: Trains one turn of the given runs, of this number; returns what each rank measured in each of them.
        runs: The runs.
        turns: Number of turns.

    Returns:
        What all ranks measured in each turn, by run.
    """
    measured: list[list[tuple[Turn, ...]]] = [[] for _ in runs]
    for turn in range(turns):
        places = range(len(runs))[:: -1 if turn % 2 else 1]
        by_rank = train([runs[place] for place in places], turn)
        for place, of_ranks in zip(places, zip(*by_rank, strict=True), strict=True):
            measured[place].append(of_ranks)
    return measured


def _our_arguments(policy: Policy) -> dict[str, Any]:
    return ddp_arguments(DistributedDataParallel, policy, policy.plan)
