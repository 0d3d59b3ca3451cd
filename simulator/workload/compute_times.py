"""Compute times: how long each rank computes and when its gradients are ready, recorded and sampled.

These are times of computation alone. The engines add slow-downs and waiting.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod
from statistics import NormalDist
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ...reference.bucketing import optimizer_shards
from ...reference.files.value_ranges import MILLION, as_int64
from ...reference.trace import BucketLayout, Buffer, Iteration, Parameter, Trace
from ..fabric.cost_curves import BAND, NORMAL_HALF_BAND
from .variation import Straggler, Variation

Nanoseconds = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ComputeTimes:
    """Times of iterations without communication, in nanoseconds from the start of each iteration.

    All arrays have the same leading axes: iterations, ranks, both, or none for one iteration of one rank.
    """

    forward_ns: Nanoseconds  #: end of the forward pass
    ready_ns: Nanoseconds  #: when each gradient is ready, by parameter index along the last axis
    unused: NDArray[np.bool_]
    """Whether each parameter gets no gradient, likewise. Its `ready_ns` is that of the first gradient, which is when
    the reducer marks unused parameters."""
    backward_end_ns: Nanoseconds  #: end of the backward pass
    step_ns: Nanoseconds
    """Duration of everything after the backward pass: the optimiser step, and all else up to the next iteration."""
    optimizer_ns: Nanoseconds
    """Duration of the optimiser step, which is part of `step_ns`; iterations under `no_sync` skip it."""

    @property
    def compute_ns(self) -> Nanoseconds:
        """Duration of the iteration without any communication."""
        return self.backward_end_ns + self.step_ns

    def __getitem__(self, index: Any) -> Self:
        """Select ranks or iterations with a numpy index along the leading axes."""
        return type(self)(*(getattr(self, field.name)[index] for field in fields(self)))

    def scaled(self, factors: Floats) -> Self:
        """Multiply each rank's times by its factor; `factors` has the leading axes. Factors of 1 change no bit."""
        if (factors == 1).all():
            return self

        def scale(ns: Nanoseconds) -> Nanoseconds:
            if ns.dtype == np.bool_:
                return ns
            return as_int64(ns * factors.reshape(factors.shape + (1,) * (ns.ndim - factors.ndim)))

        return type(self)(*(scale(getattr(self, field.name)) for field in fields(self)))  # type: ignore[arg-type]

    @classmethod
    def combined(cls, join: Callable[[list[Any]], Any], several: Sequence[Self]) -> Self:
        """Join compute times along a new first axis (`np.stack`) or along theirs (`np.concatenate`)."""
        return cls(*(join([getattr(one, field.name) for one in several]) for field in fields(cls)))


@dataclass(frozen=True, slots=True)
class CycleTimes(ComputeTimes):
    """Times of the last iteration of each cycle, which synchronises, and of the iterations before it."""

    before_ns: Nanoseconds
    """Duration of each preceding iteration of the cycle, which run under `no_sync`, along the last axis."""
    some_unused: NDArray[np.bool_]  #: whether some parameter gets no gradient in the whole cycle
    joined: NDArray[np.bool_]
    """Whether the rank has run out of inputs before each iteration of the cycle, along the last axis."""
    undisturbed_ns: Nanoseconds
    """Duration of the whole cycle if the rank were alone and as fast as usual, see `IterationSampler`; 0 for
    iterations that the rank has no inputs for."""


@dataclass(frozen=True, slots=True)
class RecordedModel:
    """The part of a trace that a prediction uses: the model, and the compute times of every recorded rank."""

    parameters: tuple[Parameter, ...]  #: by parameter index
    buffers: tuple[Buffer, ...]  #: in the order in which they are broadcast
    layout: BucketLayout | None
    """Buckets of rank 0's last recorded iteration; None: recorded without communication, or not recorded."""
    has_communication: bool
    """Whether the trace was recorded with communication, so that its times already include packing, launches,
    broadcasts and slow-downs."""
    includes_copy_out: bool
    """Whether the copies out of buckets count as part of `ComputeTimes.step_ns`. On a GPU they all come after the
    backward pass, because the host launches them after the last bucket."""
    ready_order: tuple[int, ...]
    """Parameter indices in the order in which gradients became ready in rank 0's last recorded iteration. The rebuild
    assigns buckets in this order."""
    never_used: frozenset[int]  #: parameter indices that got no gradient in any recorded iteration
    compute_times: tuple[ComputeTimes, ...]  #: one entry per recorded rank; the first axis of each is the iterations


def recorded_model(
    trace: Trace, *, unused_allowed: bool = False, shards: int = 1, cuda_graph: bool = False
) -> RecordedModel:
    """Extract the model and its compute times from a trace.

    In a trace recorded with communication, the backward pass counts as ended when everything is computed, because the
    rest of the pass is waiting for all-reduces.

    Args:
        trace: Any recording.
        unused_allowed: Whether parameters may have got no gradient.
        shards: Number of ranks among which the optimiser is divided; its step then takes that of the largest shard.
        cuda_graph: Whether no kernel waits for the host: the iteration is shorter by this wait, all parts alike.

    Raises:
        ValueError: A parameter got no gradient, and `unused_allowed` is False.
    """
    workload = trace.workload
    has_communication = workload.source != "module"
    never_used = frozenset(range(len(workload.parameters)))
    own = largest_shard([prod(one.shape) for one in workload.parameters], shards)
    compute_times = []
    for rank in trace.ranks:
        iterations = []
        for number, iteration in enumerate(rank.iterations):
            unused = frozenset(index for index, moment in enumerate(iteration.ready_ns) if moment is None)
            if unused and not unused_allowed:
                names = [workload.parameters[index].name for index in sorted(unused)]
                raise ValueError(
                    f"trace: rank {rank.rank}, iteration {number}: {', '.join(names[:5])}"
                    f"{', ...' if len(names) > 5 else ''} got no gradient, so the bucket would never be launched; "
                    "pass find_unused_parameters=True, as the training must, or record an iteration in which every "
                    "parameter takes part"
                )
            never_used &= unused
            times = _times_of(iteration, has_communication=has_communication, own=own)
            waited = (iteration.host_bound_ns or 0) / max(1, iteration.duration_ns)
            iterations.append(times.scaled(np.array(max(0.0, 1 - waited * cuda_graph))))
        compute_times.append(ComputeTimes.combined(np.stack, iterations))
    first_rank = trace.ranks[0].iterations
    copies_after = any((one.copied_out_ns or 0) > each.backward_end_ns for each in first_rank for one in each.buckets)
    last = first_rank[-1]
    moments = {index: moment for index, moment in enumerate(last.ready_ns) if moment is not None}
    return RecordedModel(
        parameters=workload.parameters,
        buffers=workload.buffers,
        layout=trace.layouts[last.layout] if has_communication and last.layout is not None else None,
        has_communication=has_communication,
        includes_copy_out=has_communication and copies_after,
        ready_order=tuple(sorted(moments, key=moments.__getitem__)),
        never_used=never_used,
        compute_times=tuple(compute_times),
    )


def times_without_slow_down(trace: Trace, model: RecordedModel, slow_down: float) -> tuple[ComputeTimes, ...]:
    """Return the compute times of a trace with communication as if no collective had slowed computation down.

    While an all-reduce of a bucket was in flight, from its launch or the end of the one before to its own end,
    computation counts as slowed by this factor.
    """
    every_rank = []
    for rank, times in zip(trace.ranks, model.compute_times, strict=True):
        iterations = []
        for number, recorded in enumerate(rank.iterations):
            one = times[number]
            edges_ns, alone_ns = [int(one.forward_ns)], [float(one.forward_ns)]
            layout = () if recorded.layout is None else trace.layouts[recorded.layout]
            for bucket in recorded.buckets[: len(layout)]:
                start_ns = max(edges_ns[-1], bucket.launched_ns - recorded.forward_start_ns)
                end_ns = max(start_ns, bucket.done_ns - recorded.forward_start_ns)
                alone_ns.append(alone_ns[-1] + start_ns - edges_ns[-1])
                alone_ns.append(alone_ns[-1] + (end_ns - start_ns) / slow_down)
                edges_ns += [start_ns, end_ns]
            last_ns = max(edges_ns[-1], int(one.backward_end_ns)) + 1
            alone_ns.append(alone_ns[-1] + last_ns - edges_ns[-1])
            edges_ns.append(last_ns)
            ready, end = (as_int64(np.interp(ns, edges_ns, alone_ns)) for ns in (one.ready_ns, one.backward_end_ns))
            iterations.append(replace(one, ready_ns=ready, backward_end_ns=end))
        every_rank.append(ComputeTimes.combined(np.stack, iterations))
    return tuple(every_rank)


HOST_BOUND = 0.1
"""Fraction of a step in which the GPU waits for the host above which the run counts as host-bound."""


def host_bound(trace: Trace) -> float:
    """Return the fraction of the recorded iterations in which the GPU waited for its host; 0 if not recorded."""
    iterations = [one for rank in trace.ranks for one in rank.iterations]
    return sum(one.host_bound_ns or 0 for one in iterations) / max(1, sum(one.duration_ns for one in iterations))


def largest_shard(elements: Sequence[int], shards: int) -> float:
    """Return the part of all elements that the largest of `optimizer_shards` has."""
    sums = [sum(elements[index] for index in shard) for shard in optimizer_shards(elements, shards)]
    return max(sums) / sum(sums) if any(sums) else 1.0


def _times_of(recorded: Iteration, *, has_communication: bool, own: float) -> ComputeTimes:
    start = recorded.forward_start_ns
    first = min((moment for moment in recorded.ready_ns if moment is not None), default=recorded.backward_start_ns)
    ready = np.array([first if moment is None else moment for moment in recorded.ready_ns], dtype=np.int64)
    backward_end = end_of_computation_ns(recorded, with_communication=has_communication)
    whole = (recorded.optimizer_end_ns or 0) - (recorded.optimizer_start_ns or 0)
    optimizer = round(own * whole)
    return ComputeTimes(
        forward_ns=np.int64(recorded.forward_end_ns - start),  # type: ignore[arg-type]  # an array without axes
        ready_ns=ready - start,
        unused=np.array([moment is None for moment in recorded.ready_ns]),
        backward_end_ns=np.int64(backward_end - start),  # type: ignore[arg-type]
        step_ns=np.int64(recorded.end_ns - recorded.backward_end_ns - whole + optimizer),  # type: ignore[arg-type]
        optimizer_ns=np.int64(optimizer),  # type: ignore[arg-type]
    )


def end_of_computation_ns(recorded: Iteration, *, with_communication: bool) -> int:
    """When the backward pass had computed everything: its end, without the wait for collectives."""
    if not with_communication:
        return recorded.backward_end_ns
    if recorded.computed_ns is not None:
        return recorded.computed_ns
    return max((moment for moment in recorded.ready_ns if moment is not None), default=recorded.backward_end_ns)


CELLS = 4_000_000
"""Durations simulated at a time, to limit memory: 32 MB of int64."""
SEED = 0
"""Seed of all random numbers."""


class IterationSampler:
    """Generates the compute times of all ranks, iteration by iteration.

    Of ranks whose compute times are always equal, only one is sampled.

    With `device_spread`, an iteration waits for the slowest of `world_size` normally distributed devices. All others
    are faster, so only the last rank is slowed. Speeds of devices persist: in all iterations it is as slow as in the
    median cluster, and `error_bands` has the other clusters.

    A rank is *undisturbed* if it is no straggler and not slower than its recording, the mean of all devices.

    Args:
        recorded: Recorded iterations by rank, as `RecordedModel.compute_times`.
        world_size: Number of ranks; recorded ranks are repeated in turn.
        variation: How iterations are generated from recorded ones.
        stragglers: Slow ranks.
        inputs: Number of batches of each rank under Join. None: every rank has a batch in every iteration.
        sync_every: Iterations per cycle, of which only the last synchronises; each is sampled separately.
        compute_bounds: Multiples of the compute times between which nine in ten true ones lie.

    Attributes:
        ranks: The sampled ranks.
        represented_by: For every rank, the sampled rank with equal compute times; shape [world size].
        count: Number of cycles; equal to the number of iterations if `sync_every` is 1.
        sync_every: As given.
        error_bands: What is not known of the cluster, by name: factors on the compute times of `ranks`, from the
            median iteration to both ends of the band that holds 90 % of clusters; shape of each [ranks].
        compute_errors: Of these, the relative errors below and above that all ranks have alike, by name.
        parameters: Number of parameters.

    Raises:
        ValueError: The rank of a straggler does not exist, `inputs` does not have one number for each rank, or no
            rank has enough batches for one cycle.
    """

    def __init__(
        self,
        recorded: Sequence[ComputeTimes],
        world_size: int,
        variation: Variation,
        stragglers: Sequence[Straggler] = (),
        inputs: Sequence[int] | None = None,
        *,
        sync_every: int = 1,
        compute_bounds: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        check_stragglers(world_size, stragglers)
        _check_inputs(world_size, inputs, sync_every)
        self._variation, self._stragglers = variation, stragglers
        self._inputs = None if inputs is None else np.array(inputs)
        self._world_size, self.sync_every = world_size, sync_every
        self._compute_bounds = compute_bounds
        self._recorded = recorded[:world_size]
        differ = variation.device_spread > 0 and world_size > 1
        is_typical = variation.kind == "slowest" and (differ or world_size > len(recorded))
        self._slowest = world_size - 1 if differ or is_typical else None
        has_jitter = len(self._recorded_ratios) > 0 if variation.jitter is None else variation.jitter > 0
        self._slowest_varies = is_typical and has_jitter

        slow = {straggler.rank for straggler in stragglers}
        is_random = variation.kind not in ("recorded", "slowest") or None in slow
        self._varies = is_random or self._slowest_varies
        self.ranks = self.represented_by = np.arange(world_size)
        if not is_random:
            unlike = sorted(rank for rank in slow | {self._slowest} if rank is not None)
            self.ranks, self.represented_by = _distinct_ranks(world_size, len(recorded), unlike, inputs)
        self.error_bands = self._error_bands()
        self.compute_errors = {
            name: (1 - float(low[0]), float(high[0]) - 1)
            for name, (low, high) in self.error_bands.items()
            if name != "slowest rank"
        }

        self._source = self.ranks % len(self._recorded)
        self._pool = ComputeTimes.combined(np.concatenate, self._recorded)
        self.parameters = self._pool.ready_ns.shape[-1]
        counts = np.array([len(times.forward_ns) for times in self._recorded])
        self._counts, self._first = counts[self._source], (np.cumsum(counts) - counts)[self._source]

        self.count = max(1, self._iterations(int(counts.min()), is_typical=is_typical) // sync_every)
        durations = self.count * sync_every * len(self.ranks) * self.parameters
        if self._varies and durations > MOST_DURATIONS:
            raise ValueError(
                f"variation: expected at most {MOST_DURATIONS:,} gradients (iterations x ranks x parameters) to "
                f"sample, got {durations:,}; give fewer iterations or ranks, or kind=recorded"
            )

    def _iterations(self, recorded: int, *, is_typical: bool) -> int:
        """Number of iterations to sample; `recorded`: the fewest that a rank recorded."""
        if self._inputs is not None:
            return int(self._inputs.max())
        if is_typical:
            return (SLOWEST_ITERATIONS if self._varies else 1) * self.sync_every
        if self._variation.kind in ("recorded", "slowest"):
            return recorded
        return self._variation.iterations

    def distinct(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return one cycle of each set of equal cycles, and for every cycle the index of its set."""
        every = np.arange(self.count)
        if self._varies:
            return every, every
        start = every * self.sync_every
        alike = [start % self._counts.min()]
        if self._inputs is not None:  # the ranks that have run out of inputs before the cycle, or within
            batches = np.unique(self._inputs)
            ended = np.searchsorted(batches, start, "right")
            ends_within = np.searchsorted(batches, start + self.sync_every, "left") > ended
            alike += [ended, np.where(ends_within, start, -1)]
        _, first, place = np.unique(np.stack(alike, axis=-1), axis=0, return_index=True, return_inverse=True)
        return first, place.reshape(-1)

    def draw(self, cycles: Iterable[int]) -> CycleTimes:
        """Sample these cycles, given by number; shape [cycles, `ranks`].

        Iterations under `no_sync` have no optimiser step; parameters that they use count as used in the cycle.
        """
        every = self.sync_every
        numbers = np.add.outer(np.fromiter(cycles, np.int64) * every, np.arange(every))
        shape = len(numbers), len(self.ranks)
        inputs = np.full(len(self.ranks), np.inf) if self._inputs is None else self._inputs[self.ranks]
        joined = inputs[:, None] <= numbers[:, None]
        before_ns, undisturbed_ns = np.empty((*shape, every - 1), np.int64), np.zeros(shape, np.int64)
        unused = np.ones(self.parameters, bool)
        for place in range(every):
            undisturbed, factors = self._draw_undisturbed(numbers[:, place])
            times, alone_ns = undisturbed.scaled(factors), undisturbed.compute_ns
            if place < every - 1:
                alone_ns = alone_ns - undisturbed.optimizer_ns
                before_ns[..., place] = np.where(joined[..., place], 0, times.compute_ns - times.optimizer_ns)
            undisturbed_ns += np.where(joined[..., place], 0, alone_ns)
            unused = unused & times.unused
        last = (getattr(times, field.name) for field in fields(times))
        return CycleTimes(*last, before_ns, unused.any(axis=-1), joined, undisturbed_ns)  # type: ignore[call-arg]

    def in_batches(self, cycles: Sequence[int], instructions: int) -> Iterator[CycleTimes]:
        """Sample these cycles, as many at a time as fit into memory with a schedule of so many instructions."""
        at_a_time = max(1, CELLS // (len(self.ranks) * max(instructions, self.parameters)))
        for first in range(0, len(cycles), at_a_time):
            yield self.draw(cycles[first : first + at_a_time])

    def alone_ns(self, cycles: CycleTimes) -> Floats:
        """Return how long undisturbed ranks would take for each cycle alone, mean over all ranks; shape [cycles]."""
        represented = np.searchsorted(self.ranks, self.represented_by)
        return np.average(cycles.undisturbed_ns, axis=-1, weights=np.bincount(represented))

    def draw_iteration(self, number: int) -> ComputeTimes:
        """Sample one iteration of all ranks; the times depend on `number` only, not on earlier calls."""
        times, factors = self._draw_undisturbed(np.array(number))
        return times.scaled(factors)

    def _draw_undisturbed(self, numbers: NDArray[np.int64]) -> tuple[ComputeTimes, Floats]:
        """Sample iterations of undisturbed ranks, and how many times as long each rank takes; shape [..., ranks]."""
        kind, each = self._variation.kind, (*numbers.shape, 1)
        is_random = kind in ("resampled", "fitted") or any(one.rank is None for one in self._stragglers)
        generators = [np.random.default_rng([SEED, one]) for one in numbers.reshape(-1).tolist()] if is_random else []

        def drawn(draw: Callable[[np.random.Generator], Any], *, of_each: int) -> NDArray[Any]:
            return np.array([draw(rng) for rng in generators]).reshape(*numbers.shape, of_each)

        factors = np.ones((*numbers.shape, len(self.ranks)))
        if self._slowest is not None:
            levels = (0.5 + numbers * GOLDEN) % 1
            slowest = np.array([self._slowest_factor(level) for level in levels.reshape(-1).tolist()]).reshape(each)
            factors = np.where(self.ranks == self._slowest, slowest, 1.0)
        if kind == "resampled":
            place = drawn(lambda rng: rng.integers(self._counts), of_each=len(self.ranks))
        elif kind == "fitted" or (kind == "slowest" and self._slowest is not None):
            place = np.broadcast_to(self._fitted[0], factors.shape)
        else:
            place = np.broadcast_to((numbers % self._counts.min())[..., None], factors.shape)
        times = self._pool[self._first + place]
        if kind == "fitted":
            normal = drawn(lambda rng: rng.standard_normal(len(self.ranks)), of_each=len(self.ranks))
            times = times.scaled(np.exp(normal * self._fitted[1]))
        for straggler in self._stragglers:
            slow: Any = straggler.rank
            if slow is None:
                slow = drawn(lambda rng: rng.integers(len(self.ranks)), of_each=1)
            factors = factors * np.where(self.ranks == slow, straggler.factor, 1.0)
        return times, factors

    def _slowest_factor(self, level: float = 0.5, *, cluster: float = 0.5, errors: float = 0.0) -> float:
        """Return the compute time of the slowest rank as a multiple of the median rank's.

        Args:
            level: Quantile of the iterations, which vary with `slowest`.
            cluster: Quantile of the clusters, whose devices' speeds persist. Both are independent.
            errors: By how many times its error the spread is larger.
        """
        variation = self._variation
        assumed = (1 + SPREAD_ERROR) ** errors
        device = assumed * variation.device_spread * slowest_of(self._world_size, cluster)
        if not self._slowest_varies:
            iteration = 0.0
        elif variation.jitter is not None:
            iteration = assumed * variation.jitter * slowest_of(self._world_size, level)
        else:  # the slowest of as many recorded iterations, drawn at random
            highest = np.quantile(self._recorded_ratios, level ** (1 / self._world_size), method="inverted_cdf")
            iteration = max(0.0, float(highest) - 1)
        return 1 + float(np.hypot(device, iteration))

    def _error_bands(self) -> dict[str, tuple[Floats, Floats]]:
        """Return `error_bands`; the slowest device of the cluster and the errors of its spread are independent."""
        bands = {}
        variation, same = self._variation, np.ones(len(self.ranks))
        if self._compute_bounds != (1.0, 1.0):
            low, high = self._compute_bounds
            bands["compute times"] = same * low, same * high
        if error := NORMAL_HALF_BAND * variation.device_spread:
            bands["device speeds"] = same * (1 - error), same * (1 + error)
        if self._slowest is not None:
            usual = self._slowest_factor()
            ends = []
            for side in (-1, 1):
                other_cluster = self._slowest_factor(cluster=(1 + side * BAND) / 2) - usual
                assumed_wrongly = self._slowest_factor(errors=side) - usual if variation.kind == "slowest" else 0.0
                change = side * float(np.hypot(other_cluster, assumed_wrongly)) / usual
                ends.append(np.where(self.ranks == self._slowest, 1 + change, 1.0))
            bands["slowest rank"] = ends[0], ends[1]
        return bands

    @cached_property
    def _recorded_ratios(self) -> Floats:
        """Compute times of the recorded iterations as multiples of their rank's median; empty if there are few."""
        of_ranks = [times.compute_ns / max(1, np.median(times.compute_ns)) for times in self._recorded]
        ratios: Floats = np.concatenate(of_ranks)
        return ratios if len(ratios) >= LEAST_RECORDED else ratios[:0]

    @cached_property
    def _fitted(self) -> tuple[NDArray[np.int64], Floats]:
        """By rank: index of the iteration with the median compute time, standard deviation of their logarithms."""
        compute_ns = [times.compute_ns for times in self._recorded]
        typical = np.array([ns.argsort(kind="stable")[len(ns) // 2] for ns in compute_ns])
        spread = np.array([np.log(np.maximum(ns, 1)).std() for ns in compute_ns])
        return typical[self._source], spread[self._source]


def check_stragglers(world_size: int, stragglers: Sequence[Straggler]) -> None:
    """Raise ValueError if the rank of a straggler does not exist."""
    for number, straggler in enumerate(stragglers):
        if straggler.rank is not None and straggler.rank >= world_size:
            raise ValueError(f"stragglers[{number}].rank: expected a rank below {world_size}, got {straggler.rank}")


def _check_inputs(world_size: int, inputs: Sequence[int] | None, sync_every: int) -> None:
    if inputs is None:
        return
    if len(inputs) != world_size or min(inputs) < 0 or max(inputs) < 1:
        expected = f"expected {world_size} numbers of batches, one per rank, not all 0 and none negative"
        raise ValueError(f"inputs: {expected}; got {inputs}")
    if max(inputs) > MILLION:
        raise ValueError(f"inputs: expected at most {MILLION} batches, got {max(inputs)}")
    if max(inputs) < sync_every:
        raise ValueError(
            f"inputs: expected a rank with at least {sync_every} batches, because gradients are averaged every "
            f"{sync_every} iterations; got {inputs}"
        )


MOST_DURATIONS = 500_000_000
"""Gradients that are sampled at most, which takes minutes."""
SLOWEST_ITERATIONS = 101
"""Iterations of `slowest`, which vary only in the slowest rank: enough for a 99th percentile."""
SPREAD_ERROR = 1.0
"""Relative error of `device_spread` and `jitter` with `slowest`: nine in ten clusters have half to twice as much."""
LEAST_RECORDED = 20
"""Recorded iterations that tell how one rank varies."""
GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, without their whole part, fill the range from 0 to 1 evenly, however many there are."""


def slowest_of(count: int, level: float) -> float:
    """Return the largest of `count` standard normal variables at a quantile of its distribution.

    Never negative: the slowest device is not faster than the recorded one.
    """
    return max(0.0, NormalDist().inv_cdf(level ** (1 / count)))


def _distinct_ranks(
    world_size: int, recorded: int, slow: Sequence[int], inputs: Sequence[int] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first of each set of ranks with equal times and inputs, and for every rank the first of its set."""
    kind = np.arange(world_size) % recorded
    kind[slow] = recorded + np.array(slow, np.int64)  # unlike any other rank
    if inputs is not None:
        kind = kind * (max(inputs) + 1) + np.array(inputs)
    _, first, place = np.unique(kind, return_index=True, return_inverse=True)
    return np.sort(first), first[place]
