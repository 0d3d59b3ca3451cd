"""Emulate: the iteration time of the real reducer on an emulated device and a modelled network, in virtual time.

Nothing sleeps, and the result depends on the arguments only. In virtual time the real reducer and the schedule that
`predict` simulates take the same time to the nanosecond.
"""

import gc
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any, Unpack

import numpy as np
from pydantic import InstanceOf, SkipValidation
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from ..reference.data_parallel import DistributedDataParallel
from ..reference.trace import Trace
from ..simulator.argument_checks import Batches, Ranks, Stragglers, checked
from ..simulator.engines.event_replay import Cluster, CollectiveCost
from ..simulator.engines.timeline import Timeline
from ..simulator.fabric import Fabric, Linear, LinkShare
from ..simulator.inputs_with_default_costs import complete
from ..simulator.predicted_iteration import Prediction, place_of_median, summarize
from ..simulator.prediction import no_overlap_ns
from ..simulator.schedule.comm_hook_messages import CommHook, named_hook
from ..simulator.schedule.policy import Policy, PolicySettings
from ..simulator.schedule.schedule import (
    Collective,
    Compute,
    Instruction,
    IterationSchedule,
    LaunchCollective,
    buckets_of,
)
from ..simulator.step_costs import counted_as_free, price, price_collectives, rebucketed
from ..simulator.workload.compute_times import IterationSampler, recorded_model
from ..simulator.workload.variation import RECORDED, Variation
from .emulated_device import IterationTimes
from .fsdp2_replicate import replicate_modules
from .modelled_network import CollectiveMessage, ModelledCollective, ModelledGroup, ModelledNetwork, run_on_network
from .virtual_streams import virtual_streams
from .virtual_time import LogEntry, VirtualRank, VirtualTime
from .virtual_training import Label, RankTraining, TrainingPlan, ddp_arguments

REDUCERS: dict[str, Callable[..., nn.Module]] = {
    "ddplab": DistributedDataParallel,
    "torch": TorchDistributedDataParallel,
    "replicate": replicate_modules,
}


@checked
def emulate(
    trace: InstanceOf[Trace],
    fabric: InstanceOf[Fabric],
    *,
    world_size: Ranks,
    reducer: SkipValidation[str | Callable[..., nn.Module]] = "ddplab",
    policy: InstanceOf[Policy] | None = None,
    variation: InstanceOf[Variation] = RECORDED,
    stragglers: Stragglers = (),
    inputs: Batches | None = None,
    assume: bool = True,
    **settings: Unpack[PolicySettings],
) -> Prediction:
    """Run a real reducer in virtual time and report its iteration time.

    Arguments are those of `predict`; `inputs` requires the phase "steady". Ranks with equal compute times and inputs
    are emulated once, so a class whose ranks act by their number needs a trace with one recorded rank for each.

    `reducer` is the class that averages gradients: "ddplab", "torch", or a class with the constructor of torch's
    `DistributedDataParallel`; or, with grouping="module", "replicate" (`replicate_modules`) or a function like it.
    Copies and launches count as free unless the reducer is ddplab's. A class may use NCCL's collectives (reductions
    SUM, AVG, MAX, MIN) and barriers of the default process group.

    Returns:
        The answer of `predict` with the emulated times. The interval contains 90 % of the emulated iterations.
        `buckets` is empty if the class does not report them. Between two launches, the timeline shows the waits of
        all ranks in one order.

    Raises:
        ValueError: As for `predict`; or the reducer does not offer a setting.
        RankError: A rank raised an error, the ranks wait for each other, or they launch different collectives.
    """
    how: dict[str, Any] = {"stragglers": stragglers, "inputs": inputs, "assume": assume, "settings": settings}
    completed = complete(trace, fabric, policy=policy, variation=variation, **how)
    policy, make = completed.policy, _class_of(reducer)
    if policy.grouping == "module" and (_is_ours(make) or make is TorchDistributedDataParallel):
        raise ValueError("reducer: expected 'replicate' with grouping='module', because DDP averages buckets")
    if policy.grouping != "module" and make is replicate_modules:
        raise ValueError("grouping: expected 'module' with the reducer 'replicate', which has no buckets")
    if not _is_ours(make) and (policy.plan is not None or policy.order != "ready"):
        raise ValueError("order: expected 'ready' and no plan, because only ddplab's reducer takes a plan")
    if _is_ours(make) and policy.grouping == "fusion":
        raise ValueError("grouping: expected 'buckets', because ddplab's reducer copies every gradient, got 'fusion'")
    if inputs is not None and policy.phase != "steady":
        raise ValueError(f"phase: expected 'steady' with inputs, got {policy.phase!r}")
    _check_hook(policy.hook)
    model = recorded_model(trace, **policy.recorded_as(world_size))
    fabric = emulated_fabric(completed.fabric, make)
    model, charged = rebucketed(trace, model, fabric, buckets_of(policy, model))
    sampler = IterationSampler(
        model.compute_times, world_size, completed.variation, stragglers, inputs, sync_every=policy.sync_every
    )
    plan = None if policy.plan is None and policy.order == "ready" else buckets_of(policy, model)
    try:
        inspect.signature(make).bind(None, **ddp_arguments(make, policy, plan))
    except TypeError as error:
        raise ValueError(
            f"reducer: expected a class with the constructor of torch's DistributedDataParallel, got {make}: {error}"
        ) from None
    if model.has_communication:  # the recorded forward passes include the broadcasts
        policy = policy.model_copy(update={"broadcast_buffers": False})
    recorded = model.compute_times  # the last iteration of rank 0 has the ready order of the rebuild
    training = TrainingPlan(
        workload=trace.workload,
        policy=policy,
        plan=plan,
        reducer=make,
        hook=policy.hook.charged(charged.processor.hooks, world_size),
        processor=charged.processor,
        warm_up={rank: IterationTimes.of_rank(recorded[rank % len(recorded)][-1]) for rank in sampler.ranks.tolist()},
        cycles=sampler.count,
        times=_times_of_cycles(sampler),
        inputs=inputs,
    )
    emulation = _Emulation(training, charged, world_size, sampler)
    emulation.run()
    timelines = [emulation.timelines[cycle] for cycle in range(sampler.count)]
    latency_ns = np.array([one.iteration_ns for one in timelines])
    alone_ns = np.concatenate([sampler.alone_ns(sampler.draw([cycle])) for cycle in range(sampler.count)])
    serial_ns = np.array([no_overlap_ns(one.engine_input.duration_ns, one.engine_input.cost_ns) for one in timelines])
    end = emulation.timelines.get("join end")
    return Prediction(
        **summarize(np.stack([latency_ns, alone_ns, serial_ns]) / policy.sync_every),
        median=timelines[place_of_median(latency_ns)],
        buckets=emulation.buckets,
        epoch_end_ns=0 if end is None else end.iteration_ns,
        counted_as_free=counted_as_free(policy, fabric),
        assumed=completed.assumed,
    )


def emulated_fabric(fabric: Fabric, reducer: str | Callable[..., nn.Module]) -> Fabric:
    """Return the fabric with the processor costs that an emulation of this reducer charges.

    Only ddplab's reducer reports its copies and launches, so these count as free for all others.
    """
    if _is_ours(_class_of(reducer)):
        return fabric
    return fabric.with_processor(
        pack=Linear(), copy_out=Linear(), launch_ns=0, stall_ns=0, search_ns_per_parameter=0.0, rebuild_ns=0
    )


def _is_ours(make: Callable[..., nn.Module]) -> bool:
    return isinstance(make, type) and issubclass(make, DistributedDataParallel)


def _class_of(reducer: str | Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    if callable(reducer):
        return reducer
    if reducer not in REDUCERS:
        raise ValueError(f"reducer: expected {', '.join(REDUCERS)} or a class, got {reducer!r}")
    return REDUCERS[reducer]


def _check_hook(hook: CommHook) -> None:
    """Check that the real hook of this name does what the modelled hook does."""
    if type(hook) is CommHook:
        return
    free = dict.fromkeys(("compress", "recompress", "decompress"), Linear())
    with suppress(ValueError):
        if hook.model_copy(update=free) == named_hook(hook.name).model_copy(update=free):
            return
    raise ValueError(f"hook: expected one that its name describes, such as 'power_sgd:4', got {hook!r}")


def _times_of_cycles(sampler: IterationSampler) -> Callable[[int, int], list[IterationTimes]]:
    """Return a function from a rank and a cycle to its iterations; all but the last skip the optimiser step."""
    row_of = {rank: row for row, rank in enumerate(sampler.ranks.tolist())}
    every = sampler.sync_every
    draw = lru_cache(maxsize=every)(sampler.draw_iteration)

    def of_cycle(rank: int, cycle: int) -> list[IterationTimes]:
        numbers = range(cycle * every, (cycle + 1) * every)
        return [IterationTimes.of_rank(draw(one)[row_of[rank]], optimizes=one == numbers[-1]) for one in numbers]

    return of_cycle


class _Emulation:
    """One run of all simulated ranks; `timelines` has, by label, what they did between two common starts."""

    def __init__(self, training: TrainingPlan, fabric: Fabric, world_size: int, sampler: IterationSampler) -> None:
        self.timelines: dict[Label, Timeline] = {}
        self._training, self._fabric, self._world_size, self._sampler = training, fabric, world_size, sampler
        cluster = partial(Cluster, concurrency=fabric.concurrency, slow_down=fabric.processor.slow_down)
        self._time: VirtualTime[None] = VirtualTime(cluster, sampler.ranks.tolist())
        self._network = ModelledNetwork(self._time, sampler.represented_by.tolist(), cache(self._cost_of))
        self._time.on_restart = self._collect
        self._ranks: dict[int, RankTraining] = {}

    def run(self) -> None:
        with new_garbage_collected():
            try:
                with virtual_streams() if self._training.policy.grouping == "module" else nullcontext():
                    run_on_network(self._time, self._network, self._train)
                self.buckets = tuple(map(tuple, next(iter(self._ranks.values())).buckets))
            finally:
                self._ranks.clear()

    def _train(self, rank: VirtualRank, group: ModelledGroup) -> None:
        self._ranks[rank.rank] = training = RankTraining(rank, group, self._training)
        training.run()

    def _cost_of(self, message: CollectiveMessage) -> CollectiveCost:
        size = message.size_bytes
        return CollectiveCost(
            cost_ns=int(price([message[:2]], self._fabric, self._world_size)[0]),
            sharing=LinkShare() if self._fabric.concurrency == 1 else self._fabric.link_share(size, self._world_size),
        )

    def _collect(self) -> None:
        """Keep what the ranks did since the last common start, if it is measured."""
        launched = self._network.restart()
        label = next(iter(self._ranks.values())).label
        if label is not None:
            logs = {one.rank: one.log for one in self._time.ranks}
            collectives = [self._collective(number, one) for number, one in enumerate(launched)]
            schedule, end_ns, duration_ns = observed_schedule(list(logs.values()), collectives)
            untimed = price_collectives(schedule, self._fabric, self._world_size)
            engine_input = replace(
                untimed, duration_ns=duration_ns, ranks=tuple(logs), represented_by=self._sampler.represented_by
            )
            start_ns = np.array([one.running.start_ns for one in launched], np.int64)
            done_ns = np.array([one.running.done_ns for one in launched], np.int64)
            self.timelines[label] = Timeline(engine_input, end_ns, start_ns, done_ns)
        for one in self._time.ranks:
            one.log = []

    def _collective(self, number: int, launched: ModelledCollective) -> Collective:
        kinds = [training.kinds[number] for training in self._ranks.values() if number in training.kinds]
        kinds.sort(key=lambda one: one[0] == "join")  # a rank without inputs does not learn the kind
        return Collective(*kinds[0], launched.message.transport, launched.message.size_bytes)


def observed_schedule(
    logs: Sequence[Sequence[LogEntry]], collectives: Sequence[Collective]
) -> tuple[IterationSchedule, Any, Any]:
    """Make one schedule of what all ranks did.

    All ranks launch the same collectives in the same order. Between two launches the schedule has every instruction
    that any rank executed there; it takes no time on ranks that did not.

    Returns:
        The schedule; when each rank ended each instruction, in nanoseconds, shape [ranks, instructions]; and the
        duration of each computing step at full speed, shape [ranks, steps].
    """
    pieces = [_between_launches(log, collectives) for log in logs]
    instructions: list[Instruction] = []  # with at least one step, because an iteration may take no time at all
    ends: list[list[int]] = [[] for _ in logs]
    durations: list[list[int]] = [[] for _ in logs]
    now = [0] * len(logs)
    for number in range(len(collectives) + 1):
        activities = [piece[number] for piece in pieces]
        if number == len(collectives):
            activities[0].setdefault(Compute("step"), (0, 0))
        else:
            activities[-1][LaunchCollective(number)] = 0, 0  # after all that any rank has executed
        for instruction in dict.fromkeys(one for activity in activities for one in activity):
            instructions.append(instruction)
            for row, activity in enumerate(activities):
                elapsed_ns, duration_ns = activity.get(instruction, (0, 0))
                now[row] += elapsed_ns
                ends[row].append(now[row])
                if isinstance(instruction, Compute):
                    durations[row].append(duration_ns)
    schedule = IterationSchedule(tuple(instructions), tuple(collectives))
    return schedule, np.array(ends, np.int64), np.array(durations, np.int64).reshape(len(logs), -1)


def _between_launches(
    log: Sequence[LogEntry], collectives: Sequence[Collective]
) -> list[dict[Instruction, tuple[int, int]]]:
    """Return a rank's instructions before each launch and after the last: elapsed nanoseconds, and at full speed."""
    pieces: list[dict[Instruction, tuple[int, int]]] = [{}]
    before_ns = 0
    for entry in log:
        elapsed_ns, before_ns = entry.end_ns - before_ns, entry.end_ns
        if isinstance(entry.instruction, LaunchCollective):
            bucket = collectives[entry.instruction.collective].bucket
            pieces[-1] = {  # the backward pass up to the launch of a bucket belongs to this bucket
                one._replace(bucket=bucket) if isinstance(one, Compute) and one.kind == "backward" else one: activity
                for one, activity in pieces[-1].items()
            }
            pieces.append({})
            continue
        elapsed_before_ns, computed_ns = pieces[-1].get(entry.instruction, (0, 0))
        pieces[-1][entry.instruction] = elapsed_before_ns + elapsed_ns, computed_ns + entry.duration_ns
    return pieces


@contextmanager
def new_garbage_collected() -> Iterator[None]:
    """Collect the garbage among objects made inside: models and reducers hold each other, so they would stay.

    Older objects are frozen meanwhile; a collection that visits them all takes a third of a second.
    """
    freezes = not gc.get_freeze_count()  # otherwise the caller has frozen objects
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if freezes:
            gc.unfreeze()
