"""Variation: how the compute times of simulated iterations and ranks differ from the recorded ones."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy.special import ndtr, ndtri

from reference.schema import Settings

from .compute_times import ComputeTimes, Nanoseconds, concatenate, scaled

Kind = Literal["recorded", "resampled", "correlated", "fitted"]


class Variation(Settings):
    """How the iterations that are predicted come from those that were recorded."""

    kind: Kind = Field(
        default="recorded",
        description="how iterations are drawn, a name: `recorded`, each as it was, rank r as recorded rank r modulo "
        "their number; `resampled`, every rank whole iterations; `correlated`, every rank each gap of gradients, "
        "neighbours alike; `fitted`, every rank's typical one times a lognormal factor; from the trace's iterations",
    )
    iterations: int = Field(
        default=200, ge=1, description="how many to draw, a count (`recorded` has as many as there are); the user's"
    )
    correlation: float | None = Field(
        default=None,
        ge=-1,
        le=1,
        description="of neighbouring gaps, from -1 to 1 (iterations slow as a whole); None: as in the trace",
    )
    seed: int = Field(default=0, ge=0, description="decides all draws, no unit; the user's choice")


class Straggler(Settings):
    """A rank that computes more slowly than was recorded."""

    rank: int | None = Field(
        default=None, ge=0, description="which, a rank, None: another one in each iteration; the user's question"
    )
    factor: float = Field(
        ge=1, allow_inf_nan=False, description="its computation's time, a multiple of the recorded; a slow node's log"
    )


Floats = NDArray[np.float64]


class GapSampler:
    """One recorded rank's iterations as gaps between gradients, each with the distribution that was recorded.

    Neighbouring gaps are tied by a Gaussian copula of first order: normal scores follow z' = c z + sqrt(1 - c^2) e.

    Args:
        work: The iterations.
        correlation: c. None: as alike as neighbours were in the recording.
    """

    def __init__(self, work: ComputeTimes, correlation: float | None) -> None:
        moments = np.sort(work.ready_ns, axis=-1)
        edges = np.column_stack([work.forward_ns, moments, work.backward_end_ns])
        durations = np.column_stack([work.forward_ns, np.diff(edges, axis=-1), work.step_ns])
        self._order = work.ready_ns[-1].argsort(kind="stable")
        self._sorted = np.sort(durations, axis=0)
        self._optimizer_ns = work.optimizer_ns[-1]
        self._correlation = lag_one_correlation(durations) if correlation is None else correlation

    def draw(self, rng: np.random.Generator, count: int) -> ComputeTimes:
        """Iterations of as many ranks, each its own."""
        gaps = self._sorted.shape[1]
        scores = rng.standard_normal((count, gaps))
        for gap in range(1, gaps):
            scores[:, gap] *= np.sqrt(1 - self._correlation**2)
            scores[:, gap] += self._correlation * scores[:, gap - 1]
        durations = _quantiles(self._sorted, ndtr(scores))
        moments = np.cumsum(durations[:, :-1], axis=-1)
        ready = np.empty((count, len(self._order)), np.int64)
        ready[:, self._order] = moments[:, 1:-1]
        step = durations[:, -1]
        optimizer = np.minimum(self._optimizer_ns, step)
        before = np.zeros((*step.shape, 0), np.int64)
        return ComputeTimes(moments[:, 0], ready, moments[:, -1], step, optimizer, before)


def _quantiles(ordered: Nanoseconds, levels: Floats) -> Nanoseconds:
    """Of each column of sorted values, the one at its level between 0 and 1, interpolated."""
    place = levels * (len(ordered) - 1)
    below = np.floor(place).astype(np.int64)
    above = np.minimum(below + 1, len(ordered) - 1)
    columns = np.arange(ordered.shape[1])  # the last axis of `levels`
    low, high = ordered[below, columns], ordered[above, columns]
    return np.rint(low + (high - low) * (place - below)).astype(np.int64)


def lag_one_correlation(durations: Nanoseconds) -> float:
    """How alike neighbouring gaps are, by the normal scores of their ranks over the iterations (0: one iteration).

    Gaps that never vary say nothing.
    """
    count = len(durations)
    if count < 3:
        return 0.0
    ranks, backwards = (some.argsort(axis=0, kind="stable").argsort(axis=0) for some in (durations, durations[::-1]))
    scores = ndtri(((ranks + backwards[::-1]) / 2 + 0.5) / count)  # equal durations have one rank, their mean
    pairs = scores.any(axis=0)[:-1] & scores.any(axis=0)[1:]
    before, after = scores[:, :-1][:, pairs], scores[:, 1:][:, pairs]
    spread = float(np.sqrt((before**2).sum() * (after**2).sum()))
    return float(np.clip((before * after).sum() / spread, -1, 1)) if spread else 0.0


class IterationSampler:
    """The work of all ranks, iteration by iteration.

    Ranks that always do the same are drawn once.

    Args:
        recorded: Iterations by recorded rank.
        world_size: Number of ranks; those recorded are repeated in turn.
        variation: How iterations come about.
        stragglers: Slow ranks.
        inputs: Batches of each rank, under Join; None: all have as many as there are iterations.
        sync_every: Iterations in a cycle, of which only the last synchronises; each has a draw of its own.

    Attributes:
        ranks: The numbers of the ranks that are drawn.
        represented_by: For every rank the number of the drawn one that does the same; shape [world size].
        count: How many iterations there are; of longer cycles, how many of those.
        parameters: How many parameters they have.

    Raises:
        ValueError: A straggler that is no rank, or not one number of inputs for each rank.
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
    ) -> None:
        _check(world_size, stragglers, inputs)
        self._variation, self._stragglers = variation, stragglers
        self._inputs = None if inputs is None else np.array(inputs)
        at_random = any(straggler.rank is None for straggler in stragglers)
        if variation.kind == "recorded" and not at_random:
            self.ranks, self.represented_by = _fold(world_size, len(recorded), stragglers, inputs)
        else:
            self.ranks = self.represented_by = np.arange(world_size)
        recorded = recorded[:world_size]
        counts = np.array([len(work.forward_ns) for work in recorded])
        self.count = int(counts.min()) if variation.kind == "recorded" else variation.iterations
        if inputs is not None:
            self.count = max(inputs)
        self._sync_every = sync_every
        self.count = max(1, self.count // sync_every)
        source = self.ranks % len(recorded)
        self._pool = concatenate(recorded)
        self.parameters = self._pool.ready_ns.shape[-1]
        self._counts, self._first = counts[source], (np.cumsum(counts) - counts)[source]
        self._typical = np.array([_typical(work) for work in recorded])[source]
        self._spread = np.array([np.log(np.maximum(work.compute_ns, 1)).std() for work in recorded])[source]
        self._recorded, self._source = recorded, source

    @property
    def identity(self) -> tuple[int, ...]:
        """Equal for draws, of one trace and variation, whose work is the same."""
        return tuple(self.ranks.tolist())

    def work(self, number: int) -> ComputeTimes:
        """Compute times of `ranks` in the last iteration of a cycle, by the cycle's number."""
        last = (number + 1) * self._sync_every - 1
        before = [self._local_ns(iteration) for iteration in range(number * self._sync_every, last)]
        work = self._one(last)
        return replace(work, before_ns=np.stack(before, axis=-1)) if before else work

    def _local_ns(self, number: int) -> Nanoseconds:
        """Of an iteration under `no_sync`; the optimiser waits for the end of the cycle."""
        work = self._one(number)
        return np.where(self._joined(number), 0, work.compute_ns - work.optimizer_ns)

    def _one(self, number: int) -> ComputeTimes:
        rng = np.random.default_rng([self._variation.seed, number])
        work = self._varied(number, rng)
        for straggler in self._stragglers:
            slow = int(rng.integers(len(self.ranks))) if straggler.rank is None else straggler.rank
            work = scaled(work, np.where(self.ranks == slow, straggler.factor, 1.0))
        return work

    def joined(self, number: int) -> NDArray[np.bool_]:
        """Which of `ranks` have run out of inputs before the last iteration of a cycle."""
        return self._joined((number + 1) * self._sync_every - 1)

    def _joined(self, number: int) -> NDArray[np.bool_]:
        return np.zeros(len(self.ranks), bool) if self._inputs is None else self._inputs[self.ranks] <= number

    def _varied(self, number: int, rng: np.random.Generator) -> ComputeTimes:
        kind = self._variation.kind
        if kind == "recorded":
            return self._pool[self._first + number % self._counts.min()]
        if kind == "resampled":
            return self._pool[self._first + rng.integers(self._counts)]
        if kind == "fitted":
            factors = np.exp(rng.standard_normal(len(self.ranks)) * self._spread)
            return scaled(self._pool[self._first + self._typical], factors)
        drawn = [gaps.draw(rng, int((self._source == rank).sum())) for rank, gaps in enumerate(self._gaps)]
        return concatenate(drawn)[self._source.argsort(kind="stable").argsort()]

    @cached_property
    def _gaps(self) -> list[GapSampler]:
        return [GapSampler(work, self._variation.correlation) for work in self._recorded]


def _check(world_size: int, stragglers: Sequence[Straggler], inputs: Sequence[int] | None) -> None:
    for number, straggler in enumerate(stragglers):
        if straggler.rank is not None and straggler.rank >= world_size:
            raise ValueError(f"stragglers[{number}].rank: expected a rank below {world_size}, got {straggler.rank}")
    if inputs is not None and (len(inputs) != world_size or min(inputs) < 0 or max(inputs) < 1):
        raise ValueError(
            f"inputs: expected {world_size} numbers of batches, one a rank, not all 0 and none negative; got {inputs}"
        )


def _fold(
    world_size: int, recorded: int, stragglers: Sequence[Straggler], inputs: Sequence[int] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first of all ranks with the same recording, slow-downs and inputs; and for every rank its first."""
    turns = -(-world_size // recorded)
    kind = np.tile(np.arange(recorded), turns)[:world_size]
    if not stragglers and inputs is None:
        return kind[:recorded], kind
    slow = np.array([straggler.rank for straggler in stragglers], np.int64)
    kind[slow] = recorded + slow  # of its own
    if inputs is not None:
        kind = kind * (max(inputs) + 1) + np.array(inputs)
    _, first, place = np.unique(kind, return_index=True, return_inverse=True)
    return np.sort(first), first[place]


def _typical(work: ComputeTimes) -> int:
    """The iteration whose computation is the median."""
    return int(work.compute_ns.argsort(kind="stable")[len(work.compute_ns) // 2])
