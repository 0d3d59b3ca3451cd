"""Costs: what each step of a schedule takes, and the plain numbers that an engine simulates."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reference.trace import Trace

from ..fabric import Fabric, Processor, Slowdowns, slowdowns_of
from ..workload.compute_times import ComputeTimes
from .comm_hooks import gradient_bytes
from .policy import Policy, join_end_of, outline_of
from .schedule import Collective, Compute, ComputeKind, Schedule, Transport, build_join_end, build_schedule

Nanoseconds = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInput:
    """An iteration to simulate.

    Ranks that do the same at the same moments are simulated once, however many they are.

    Attributes:
        schedule: What every rank does.
        duration_ns: Duration of each computing step at full speed; shape [ranks, steps of the schedule]. The closed
            form also takes further leading axes, one iteration each.
        ranks: The number of each simulated rank.
        represented_by: For every rank the simulated rank that behaves the same; shape [world size]. None: every rank
            is simulated.
        cost_ns: Each collective when it has the fabric to itself; shape [collectives], or with axes before.
        queues: The process group of each collective; those of one group start in their order.
        concurrency: Collectives of one group that run at the same time.
        sharing: By collective, how many times as long it takes with one other beside it; each further adds as much.
        slowdowns: How many times as long computing takes while collectives run, and they while a rank computes;
            of several that run, computing feels the mean. None: neither feels the other.
        lingers_ns: How long computing feels the last collective once that is done, if no other follows before.
    """

    schedule: Schedule
    duration_ns: Nanoseconds
    ranks: tuple[int, ...]
    represented_by: NDArray[np.int64] | None = None
    cost_ns: Nanoseconds
    queues: tuple[int, ...]
    concurrency: int = 1
    sharing: tuple[float, ...]
    slowdowns: Slowdowns | None = None
    lingers_ns: int = 0

    def alike(self) -> dict[int, list[int]]:
        """Which ranks do as each of the simulated ones does, itself among them."""
        if self.represented_by is None:
            return {rank: [rank] for rank in self.ranks}
        alike: dict[int, list[int]] = {rank: [] for rank in self.ranks}
        for rank, simulated in enumerate(self.represented_by.tolist()):
            alike[simulated].append(rank)
        return alike

    @property
    def is_fluid(self) -> bool:
        """Whether speeds depend on what else runs."""
        return self.slowdowns is not None or (self.most_running > 1 and max(self.sharing, default=1.0) > 1)

    @property
    def most_running(self) -> int:
        """Collectives that can run at the same time."""
        return self.concurrency * len(set(self.queues))


SHADOWED: frozenset[ComputeKind] = frozenset(("rebuild", "compress", "launch", "recompress", "decompress"))
"""What a rank computes that has run out of inputs: it sends zeros in every bucket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleCosts:
    """Everything about an iteration that is the same on all ranks.

    Attributes:
        policy: What the reducer is told.
        buckets: Parameter indices by bucket, in launch order.
        schedule: What every rank does.
        same_ns: How long those steps take that take equally long on all ranks.
        pack_ns: Copying each bucket's gradients into it.
        cost_ns: Each collective when it has the fabric to itself; shape [..., collectives].
        sharing: By collective, how many times as long it takes with one other beside it.
        slowdowns: How much collectives and computing slow each other down; None: not at all.
        fabric: What the prices are from.
    """

    policy: Policy
    buckets: tuple[tuple[int, ...], ...]
    schedule: Schedule
    same_ns: dict[Compute, int]
    pack_ns: Nanoseconds
    cost_ns: Nanoseconds
    sharing: tuple[float, ...]
    slowdowns: Slowdowns | None
    fabric: Fabric

    def engine_input(
        self, work: ComputeTimes, ranks: Sequence[int], joined: NDArray[np.bool_] | None = None
    ) -> EngineInput:
        """The iteration with these ranks' work.

        Args:
            work: Its last leading axis is the ranks; any before it are jobs, for the closed form.
            ranks: Their numbers.
            joined: Who has run out of inputs and shadows the others, by the axes of `work`; None: nobody has.
        """
        duration_ns = self._durations(work)
        if joined is not None:
            own = np.array([step.kind not in SHADOWED for step in self.schedule.steps])
            duration_ns[joined[..., None] & own] = 0
        return EngineInput(
            schedule=self.schedule,
            duration_ns=duration_ns,
            ranks=tuple(ranks),
            cost_ns=self.cost_ns,
            queues=tuple(number % self.policy.process_groups for number in range(len(self.schedule.collectives))),
            concurrency=self.fabric.concurrency,
            sharing=self.sharing,
            slowdowns=self.slowdowns,
            lingers_ns=self.fabric.processor.lingers_ns,
        )

    def _durations(self, work: ComputeTimes) -> Nanoseconds:
        """By step of the schedule along a new last axis."""
        launch, packed = self._launches(work)
        before = np.concatenate([work.forward_ns[..., None], launch], axis=-1)
        pieces = np.diff(np.concatenate([before, work.backward_end_ns[..., None]], axis=-1))
        rank_ns: dict[Compute, Nanoseconds] = {
            Compute("forward"): work.forward_ns,
            Compute("backward"): pieces[..., -1],
            Compute("step"): work.step_ns,
        }
        for number in range(work.before_ns.shape[-1]):
            rank_ns[Compute("unsynchronized", iteration=number)] = work.before_ns[..., number]
        for bucket in range(len(self.buckets)):
            rank_ns[Compute("backward", bucket)] = pieces[..., bucket]
            rank_ns[Compute("pack", bucket)] = packed[..., bucket]
        steps = self.schedule.steps
        durations = np.empty((*work.forward_ns.shape, len(steps)), np.int64)
        for place, step in enumerate(steps):
            durations[..., place] = rank_ns[step] if step in rank_ns else self.same_ns[step]
        return durations

    def _launches(self, work: ComputeTimes) -> tuple[Nanoseconds, Nanoseconds]:
        """When each bucket is launched, and what is packed from the launch before it to its own; [..., buckets].

        A bucket is packed as soon as it is full; it is launched when all before it are full too.
        """
        if self.policy.launches_at_the_end:  # all are packed, then all launched
            launch = np.repeat(work.backward_end_ns[..., None], len(self.buckets), axis=-1)
            packed = np.zeros_like(launch)
            packed[..., 0] = self.pack_ns.sum()
            return launch, packed
        members = np.concatenate([np.array(bucket) for bucket in self.buckets])
        first = np.cumsum([0, *map(len, self.buckets[:-1])])
        full = np.maximum.reduceat(work.ready_ns[..., members], first, axis=-1)
        launch = np.maximum.accumulate(full, axis=-1)
        if (launch == full).all():
            return launch, np.broadcast_to(self.pack_ns, full.shape)
        turn = full.argsort(axis=-1, kind="stable").argsort(axis=-1, kind="stable")  # of packing
        last_turn = np.maximum.accumulate(turn, axis=-1)
        packed = np.zeros_like(full)
        for bucket, pack_ns in enumerate(self.pack_ns.tolist()):
            piece = (last_turn < turn[..., bucket, None]).sum(axis=-1)  # the first launch that comes after
            packed += pack_ns * (np.arange(len(self.buckets)) == piece[..., None])
        return launch, packed


def price_schedule(
    trace: Trace, fabric: Fabric, policy: Policy, buckets: Sequence[Sequence[int]], world_size: int, *, joins: bool
) -> ScheduleCosts:
    """Price an iteration of the trace's model.

    Args:
        trace: Of the model; its times play no part.
        fabric: What everything costs.
        policy: What the reducer is told.
        buckets: Parameter indices by bucket, in launch order.
        world_size: Number of ranks.
        joins: Whether they train under Join.
    """
    processor = fabric.processor
    sizes = [gradient_bytes(parameter, policy.sparse_density) for parameter in trace.workload.parameters]
    hook = policy.hook.charged(processor.hooks, world_size)
    schedule = build_schedule(outline_of(policy, trace, buckets, joins=joins))
    copies_out = not policy.gradient_as_bucket_view
    at_a_time = fabric.concurrency * policy.process_groups
    same_ns = {
        Compute("rebuild"): processor.rebuild_ns,
        Compute("search"): round(processor.search_ns_per_parameter * len(sizes)),
    }
    for number, bucket in enumerate(buckets):
        bucket_bytes = sum(sizes[index] for index in bucket)
        same_ns |= {
            Compute("compress", number): hook.compress(bucket_bytes),
            Compute("launch", number): processor.launch_ns,
            Compute("recompress", number): hook.recompress(bucket_bytes),
            Compute("decompress", number): hook.decompress(bucket_bytes),
            Compute("copy_out", number): copies_out * sum(processor.copy_out(sizes[index]) for index in bucket),
        }
    return ScheduleCosts(
        policy=policy,
        buckets=tuple(map(tuple, buckets)),
        schedule=schedule,
        same_ns=same_ns,
        pack_ns=np.array([sum(processor.pack(sizes[index]) for index in bucket) for bucket in buckets], np.int64),
        cost_ns=price(messages_of(schedule), fabric, world_size),
        sharing=_sharing(schedule.collectives, fabric, world_size, at_a_time),
        slowdowns=contention_of(schedule.collectives, processor, at_a_time),
        fabric=fabric,
    )


def price_join_end(trace: Trace, fabric: Fabric, policy: Policy, world_size: int) -> EngineInput:
    """What follows the last iteration of an epoch under Join; nobody computes anything."""
    schedule = build_join_end(join_end_of(policy, trace))
    return EngineInput(
        schedule=schedule,
        duration_ns=np.zeros((1, 0), np.int64),
        ranks=(0,),
        cost_ns=price(messages_of(schedule), fabric, world_size),
        queues=(0,) * len(schedule.collectives),
        concurrency=fabric.concurrency,
        sharing=_sharing(schedule.collectives, fabric, world_size, fabric.concurrency),
    )


def counted_as_free(policy: Policy, fabric: Fabric) -> tuple[str, ...]:
    """What would take time that nothing was told of; a sentence each."""
    hook, processor = policy.hook, fabric.processor
    said = []
    if processor == Processor(hooks=processor.hooks):
        said.append("the fabric has no costs of the processor: copies, launches and slow-downs count as free")
    if not (hook.is_free or hook.has_costs or hook.measured_in(processor.hooks)):
        cure = f"ddplab calibrate --hook {hook.name}"
        said.append(f"{hook.name} was not measured: what it computes counts as free ({cure})")
    return tuple(said)


def messages_of(schedule: Schedule) -> list[tuple[Transport, int]]:
    """What each collective sends, and how."""
    return [(collective.transport, collective.size_bytes) for collective in schedule.collectives]


def price(messages: Sequence[tuple[Transport, int]], fabric: Fabric, world_size: int) -> Nanoseconds:
    """What each message costs that has the fabric to itself."""
    transports = np.array([transport for transport, _ in messages], dtype=object)
    sizes = np.array([size for _, size in messages], np.int64)
    cost_ns = np.zeros(len(messages), np.int64)
    reduced, gathered = transports == "all_reduce", transports == "all_gather"
    if reduced.any():
        cost_ns[reduced] = fabric.all_reduce_costs_ns(sizes[reduced], world_size)
    if gathered.any():
        cost_ns[gathered] = fabric.all_gather_costs_ns(sizes[gathered], world_size)
    for place in np.flatnonzero(transports == "broadcast"):
        cost_ns[place] = fabric.broadcast_ns(int(sizes[place]), world_size)
    return cost_ns


def contention_of(collectives: Sequence[Collective], processor: Processor, at_a_time: int) -> Slowdowns | None:
    """How much these collectives and computing slow each other down, up to `at_a_time` of them in flight."""
    return slowdowns_of(processor.contention, [collective.size_bytes for collective in collectives], at_a_time)


def _sharing(collectives: Sequence[Collective], fabric: Fabric, world_size: int, at_a_time: int) -> tuple[float, ...]:
    if at_a_time == 1:
        return (1.0,) * len(collectives)
    return tuple(fabric.sharing_factor(collective.size_bytes, 2, world_size) for collective in collectives)
