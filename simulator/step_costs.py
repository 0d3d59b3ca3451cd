"""Step costs: the duration of each step and each collective of a schedule, for a fabric and a world size."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..reference.files.value_ranges import YEAR_NS, as_int64
from ..reference.trace import Trace
from .engines.timeline import EngineInput
from .fabric import Fabric, Linear, LinkShare, Processor
from .schedule.comm_hook_messages import CommHook, Noop, Transport
from .schedule.policy import Policy
from .schedule.schedule import Compute, ComputeKind, Condition, IterationSchedule
from .workload.compute_times import CycleTimes, IterationSampler, Nanoseconds, RecordedModel, times_without_slow_down

Buckets = Sequence[Sequence[int]]
"""Parameter indices by bucket, in launch order."""
SHADOWED: frozenset[ComputeKind] = frozenset(
    ("unsynchronized", "rebuild", "compress", "launch", "recompress", "decompress")
)
"""Computing steps in a cycle before whose last iteration the rank has run out of inputs under Join.

In that iteration the rank contributes zeros to every bucket.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleCosts:
    """A schedule with all costs except the compute times of the ranks."""

    untimed: EngineInput  #: the schedule and the costs of its collectives, on a rank whose steps take no time
    same_ns: dict[Compute, int]  #: duration of each step whose duration is equal on all ranks
    pack_ns: Nanoseconds  #: duration of copying each bucket's gradients into it; shape [buckets]
    relative_errors: NDArray[np.float64]  #: see `Fabric.relative_errors`; shape [2, collectives]
    step_errors: dict[str, tuple[tuple[ComputeKind, ...], float]]
    """The relative error, in both directions, of steps of some kinds, by the name of their cost."""
    unexplained: float  #: the same for the whole iteration
    spread: float
    """Half-width of the 90 % interval of iterations as a fraction of their median, if a training run on this number
    of ranks was measured. 0: from the variation of the recorded iterations and the errors of the costs."""
    slow_down_bounds: tuple[float, float]
    """The slow-down of computing at the low, and at the high, end of its error band."""
    assumed: tuple[str, ...]  #: see `Fabric.assumed`

    def engine_input(self, sampler: IterationSampler, times: CycleTimes, chosen: Any = ...) -> EngineInput:
        """Combine the costs with compute times of the `chosen` cycles, whose axis comes first in the durations."""
        launch_ns, packed_ns = self._launches(times)
        pass_ns = np.concatenate([times.forward_ns[..., None], launch_ns, times.backward_end_ns[..., None]], axis=-1)
        pieces_ns = np.diff(pass_ns)  # the backward pass up to each launch, and from the last one to its end
        rank_ns: dict[Compute, Nanoseconds] = {
            Compute("forward"): times.forward_ns,
            Compute("backward"): pieces_ns[..., -1],
            Compute("step"): times.step_ns,
        }
        for number in range(times.before_ns.shape[-1]):
            rank_ns[Compute("unsynchronized", iteration=number)] = times.before_ns[..., number]
        for bucket in range(len(self.pack_ns)):
            rank_ns[Compute("backward", bucket)] = pieces_ns[..., bucket]
            rank_ns[Compute("pack", bucket)] = packed_ns[..., bucket]
        steps = self.untimed.schedule.steps
        duration_ns = np.empty((*times.forward_ns.shape, len(steps)), np.int64)
        for place, step in enumerate(steps):
            duration_ns[..., place] = rank_ns[step] if step in rank_ns else self.same_ns[step]
        longest_ns = duration_ns.sum(axis=-1, dtype=float).max() + self.untimed.cost_ns.sum(dtype=float)
        if longest_ns > YEAR_NS:
            raise ValueError(
                f"expected cycles of sync_every iterations to take at most a year, got {longest_ns:.3g} ns of "
                "computing and collectives; check the costs of the fabric, factors and `sync_every`"
            )
        joined = times.joined[..., -1]
        own = np.array([step.kind not in SHADOWED for step in steps])
        duration_ns[joined[..., None] & own] = 0
        meets = {
            Condition("without_inputs", iteration): times.joined[..., iteration]
            for iteration in range(times.joined.shape[-1])
        }
        meets[Condition("with_unused")] = times.some_unused & ~joined
        meets[Condition("all_used")] = ~meets[Condition("with_unused")]
        return replace(
            self.untimed,
            duration_ns=duration_ns[chosen],
            ranks=tuple(sampler.ranks.tolist()),
            represented_by=sampler.represented_by,
            meets={condition: ranks[chosen] for condition, ranks in meets.items()},
        )

    def _launches(self, times: CycleTimes) -> tuple[Nanoseconds, Nanoseconds]:
        """Return when each bucket is launched, and the packing time since the previous launch; shapes [..., buckets].

        A bucket is packed as soon as it is full, and launched when all earlier buckets are full too. (A module that
        FSDP2 averages is packed when it is launched.) Of gradients that are ready at the same time, those of unused
        parameters come first, then those with lower indices.
        """
        schedule = self.untimed.schedule
        members = np.concatenate([np.array(bucket) for bucket in schedule.buckets])
        first = np.cumsum([0, *map(len, schedule.buckets[:-1])])
        ready_ns = times.ready_ns
        if schedule.launches_at_the_end:  # all gradients count as ready in order of their indices
            ready_ns = np.broadcast_to(times.backward_end_ns[..., None], ready_ns.shape)
        full = np.maximum.reduceat(ready_ns[..., members], first, axis=-1)
        launch = np.maximum.accumulate(full, axis=-1)
        if schedule.launches_last_at_the_end:
            launch[..., -1] = times.backward_end_ns
        if schedule.launches_last_at_the_end or (full[..., 1:] > full[..., :-1]).all():
            return launch, np.broadcast_to(self.pack_ns, full.shape)
        # Twice the time leaves a bit for the order at equal times: 0 for unused parameters, which come first, else 1.
        counts_later = ready_ns if schedule.launches_at_the_end else 2 * ready_ns + ~times.unused
        place = counts_later.argsort(axis=-1, kind="stable").argsort(axis=-1, kind="stable")
        turn = np.maximum.reduceat(place[..., members], first, axis=-1)  # of packing
        last_turn = np.maximum.accumulate(turn, axis=-1)
        packed = np.zeros_like(full)
        for bucket, pack_ns in enumerate(self.pack_ns.tolist()):
            piece = (last_turn < turn[..., bucket, None]).sum(axis=-1)  # the first launch after the packing
            packed += pack_ns * (np.arange(len(schedule.buckets)) == piece[..., None])
        return launch, packed


def price_schedule(schedule: IterationSchedule, fabric: Fabric, policy: Policy, world_size: int) -> ScheduleCosts:
    """Compute the cost of every step and every collective of a schedule under this policy.

    The processor costs of `fabric` are without those that the model's times include; see `charged_fabric`.
    """
    processor = fabric.processor
    hook = policy.hook.charged(processor.hooks, world_size)
    parameters = sum(map(len, schedule.buckets))
    same_ns = {
        Compute("rebuild"): processor.rebuild_ns,
        Compute("search"): round(processor.search_ns_per_parameter * parameters),
        Compute("copy_out"): sum(map(processor.copy_out, schedule.buffer_bytes)),
        Compute("launch"): processor.launch_ns,  # of a broadcast after the step, which holds up no computation
    }
    steps, sent = frozenset(schedule.steps), as_int64([one.size_bytes for one in schedule.collectives])
    for unshard in (one for one in steps if one.kind == "unshard"):
        same_ns[unshard] = sum(processor.copy_out(size) for sizes in schedule.gradient_bytes for size in sizes)
    by_module = policy.grouping == "module"
    copied = [sizes if policy.grouping != "fusion" or len(sizes) > 1 else () for sizes in schedule.gradient_bytes]
    for bucket, sizes in enumerate(schedule.gradient_bytes):
        copy_out_ns = 0 if policy.gradient_as_bucket_view else sum(map(processor.copy_out, copied[bucket]))
        same_ns |= {
            Compute("compress", bucket): hook.compress(sum(sizes)),
            Compute("launch", bucket): processor.launch_on(world_size),
            Compute("recompress", bucket): hook.recompress(sum(sizes)),
            Compute("decompress", bucket): hook.decompress(sum(sizes)),
            Compute("copy_out", bucket): copy_out_ns,
        }
    # FSDP2 copies the gradients of a module at once into a flat tensor, then into the one that is reduced.
    packs = [2 * processor.pack(sum(sizes)) if by_module else sum(map(processor.pack, sizes)) for sizes in copied]
    priced = {step: ns for step, ns in same_ns.items() if step in steps}
    return ScheduleCosts(
        untimed=price_collectives(schedule, fabric, world_size),
        same_ns=dict(zip(priced, as_int64(list(priced.values())).tolist(), strict=True)),
        pack_ns=as_int64(packs),
        relative_errors=fabric.relative_errors(sent, world_size),
        step_errors={
            "copies": (("unshard", "pack", "copy_out"), processor.copy_error),
            "launches": (("launch",), processor.launch_error),
        },
        unexplained=processor.unexplained * sqrt(log2(world_size)),
        spread=fabric.iteration_spread(world_size),
        slow_down_bounds=(processor.slowed(-1).slow_down, processor.slowed(1).slow_down),
        assumed=fabric.assumed(sent, world_size),
    )


def price_collectives(schedule: IterationSchedule, fabric: Fabric, world_size: int) -> EngineInput:
    """Compute the cost of every collective of a schedule, on one rank whose steps take no time."""
    collectives = schedule.collectives
    shares = (LinkShare(),) * len(collectives)
    if fabric.concurrency > 1:
        shares = tuple(fabric.link_share(collective.size_bytes, world_size) for collective in collectives)
    return EngineInput(
        schedule=schedule,
        duration_ns=np.zeros((1, len(schedule.steps)), np.int64),
        ranks=(0,),
        represented_by=np.zeros(1, np.int64),
        cost_ns=price([(one.transport, one.size_bytes) for one in collectives], fabric, world_size),
        concurrency=fabric.concurrency,
        sharing=shares,
        slow_down=fabric.processor.slow_down,
    )


def charged_fabric(fabric: Fabric, model: RecordedModel, buckets: Buckets) -> Fabric:
    """Return the fabric without the costs that the model's compute times already include.

    Times recorded with communication include the copies into buckets, which are as many in any buckets, and the
    launches of the recorded buckets. The launches of further `buckets` are charged, spread evenly over all.
    """
    if not model.has_communication:
        return fabric
    processor = fabric.processor
    recorded = model.layout or buckets  # buckets that are not known count as those to predict
    before, after = len(recorded), max(len(recorded), len(buckets))
    changes = list(map(set, recorded)) != list(map(set, buckets))
    return fabric.with_processor(
        pack=Linear(),
        launch_ns=processor.launch_ns - processor.launch_ns * before // after,
        stall_ns=processor.stall_ns - processor.stall_ns * before // after,
        slow_down=processor.slow_down if changes else 1.0,
        slow_down_error=processor.slow_down_error if changes else 0.0,
        copy_out=Linear() if model.includes_copy_out else processor.copy_out,
    )


def rebucketed(trace: Trace, model: RecordedModel, fabric: Fabric, buckets: Buckets) -> tuple[RecordedModel, Fabric]:
    """Return the model and the costs to charge if training uses these buckets; see `charged_fabric`.

    With other buckets than the recorded ones, collectives slow computation down at other times. So the slow-down
    leaves the recorded times, and the engine adds that of the new collectives. With the recorded buckets it stays.
    """
    charged = charged_fabric(fabric, model, buckets)
    if model.has_communication and charged.processor.slow_down > 1:
        model = replace(model, compute_times=times_without_slow_down(trace, model, fabric.processor.slow_down))
    return model, charged


def counted_as_free(policy: Policy, fabric: Fabric) -> tuple[str, ...]:
    """Return one sentence for each kind of cost that is unknown and counts as zero."""
    hook, processor = policy.hook, fabric.processor
    sentences = []
    if processor == Processor(hooks=processor.hooks):
        sentences.append("the fabric has no processor costs, so copies, launches and slow-downs count as free")
    if not (type(hook) in (CommHook, Noop) or hook.has_costs or hook.measured_in(processor.hooks)):
        cure = f"measure it with `ddplab calibrate --hook {hook.name}`"
        sentences.append(f"the hook {hook.name} was not measured, so its computation counts as free; {cure}")
    return tuple(sentences)


def price(messages: Sequence[tuple[Transport, int]], fabric: Fabric, world_size: int) -> Nanoseconds:
    """Return the duration of each message while nothing else runs; shape [messages]."""
    transports = np.array([transport for transport, _ in messages], dtype=object)
    sizes = as_int64([size for _, size in messages])
    cost_ns = np.zeros(len(messages), np.int64)
    several = {"all_reduce": fabric.all_reduce_costs_ns, "all_gather": fabric.all_gather_costs_ns}
    for transport, costs_ns in several.items():
        if (sent := transports == transport).any():
            cost_ns[sent] = costs_ns(sizes[sent], world_size)
    for place in np.flatnonzero(transports == "broadcast"):
        cost_ns[place] = fabric.broadcast_ns(int(sizes[place]), world_size)
    return cost_ns
