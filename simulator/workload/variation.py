"""Variation: how iterations and ranks differ, drawn from what was recorded.

A draw is the work of all ranks in one iteration. The same seed gives the same draws.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy.special import ndtr, ndtri

from reference.records import Record

from .work import Nanoseconds, Work, concatenate

Kind = Literal["recorded", "resampled", "correlated", "fitted"]
Floats = NDArray[np.float64]


class Variation(Record):
    """How the iterations that are predicted come from those that were recorded."""

    kind: Kind = Field(
        default="recorded",
        description="`recorded`: each iteration as it was, rank r as recorded rank r modulo their number; "
        "`resampled`: every rank draws whole iterations; `correlated`: every rank draws each gap between gradients, "
        "neighbours alike; `fitted`: every rank's typical iteration times a lognormal factor",
    )
    iterations: int = Field(default=200, ge=1, description="to draw; `recorded` takes as many as there are")
    correlation: float | None = Field(
        default=None,
        ge=-1,
        le=1,
        description="of neighbouring gaps, for `correlated`: 1 makes iterations slow as a whole; None: the trace's",
    )
    seed: int = Field(default=0, description="of all draws")


class Straggler(Record):
    """A rank that computes more slowly than was recorded."""

    rank: int | None = Field(default=None, ge=0, description="which; None: another one in each iteration, at random")
    factor: float = Field(ge=1, allow_inf_nan=False, description="how many times as long its computation takes")


class Draws:
    """The work of all ranks, iteration by iteration.

    Ranks that always do the same are drawn once.

    Args:
        recorded: Iterations by recorded rank.
        world_size: Number of ranks; those recorded are repeated in turn.
        variation: How iterations come about.
        stragglers: Slow ranks.
        inputs: Batches of each rank, under Join; None: all have as many as there are iterations.

    Attributes:
        ranks: The numbers of the ranks that are drawn; others do as one of these.
        count: How many iterations there are.
        parameters: How many parameters they have.

    Raises:
        ValueError: A straggler that is no rank, or not one number of inputs for each rank.
    """

    def __init__(
        self,
        recorded: Sequence[Work],
        world_size: int,
        variation: Variation,
        stragglers: Sequence[Straggler] = (),
        inputs: Sequence[int] | None = None,
    ) -> None:
        _check(world_size, stragglers, inputs)
        self._variation, self._stragglers = variation, stragglers
        self._inputs = None if inputs is None else np.array(inputs)
        at_random = any(straggler.rank is None for straggler in stragglers)
        self.ranks = np.arange(world_size)
        if variation.kind == "recorded" and not at_random:
            self.ranks = _unlike(world_size, len(recorded), stragglers, inputs)
        counts = np.array([len(work.forward_ns) for work in recorded])
        self.count = int(counts.min()) if variation.kind == "recorded" else variation.iterations
        if inputs is not None:
            self.count = max(inputs)
        source = self.ranks % len(recorded)
        self._pool = concatenate(recorded)
        self.parameters = self._pool.ready_ns.shape[-1]
        self._counts, self._first = counts[source], (np.cumsum(counts) - counts)[source]
        self._typical = np.array([_typical(work) for work in recorded])[source]
        self._spread = np.array([np.log(np.maximum(work.compute_ns, 1)).std() for work in recorded])[source]
        self._gaps = {rank: _Gaps(work, variation.correlation) for rank, work in enumerate(recorded)}
        self._members = {rank: np.flatnonzero(source == rank) for rank in self._gaps}

    @property
    def identity(self) -> tuple[int, ...]:
        """Equal for draws, of one trace and variation, whose work is the same."""
        return tuple(self.ranks.tolist())

    def work(self, number: int) -> Work:
        """Work of `ranks` in an iteration, by its number."""
        rng = np.random.default_rng([self._variation.seed, number])
        work = self._varied(number, rng)
        for straggler in self._stragglers:
            slow = int(rng.integers(len(self.ranks))) if straggler.rank is None else straggler.rank
            work = _scaled(work, np.where(self.ranks == slow, straggler.factor, 1.0))
        return work

    def joined(self, number: int) -> NDArray[np.bool_]:
        """Which of `ranks` have run out of inputs before an iteration."""
        return np.zeros(len(self.ranks), bool) if self._inputs is None else self._inputs[self.ranks] <= number

    def _varied(self, number: int, rng: np.random.Generator) -> Work:
        kind = self._variation.kind
        if kind == "recorded":
            return self._pool[self._first + number % self._counts.min()]
        if kind == "resampled":
            return self._pool[self._first + rng.integers(self._counts)]
        if kind == "fitted":
            factors = np.exp(rng.standard_normal(len(self.ranks)) * self._spread)
            return _scaled(self._pool[self._first + self._typical], factors)
        drawn = [self._gaps[rank].draw(rng, len(members)) for rank, members in self._members.items()]
        return concatenate(drawn)[np.concatenate(list(self._members.values())).argsort()]


class _Gaps:
    """One recorded rank's iterations as gaps between gradients, each with the distribution that was recorded.

    Neighbouring gaps are tied by a Gaussian copula of first order: normal scores follow z' = c z + sqrt(1 - c^2) e.
    """

    def __init__(self, work: Work, correlation: float | None) -> None:
        moments = np.sort(work.ready_ns, axis=-1)
        edges = np.column_stack([work.forward_ns, moments, work.backward_end_ns])
        durations = np.column_stack([work.forward_ns, np.diff(edges, axis=-1), work.step_ns])
        self._order = work.ready_ns[-1].argsort(kind="stable")
        self._sorted = np.sort(durations, axis=0)
        self._optimizer_ns = work.optimizer_ns[-1]
        self._correlation = _lag_one(durations) if correlation is None else correlation

    def draw(self, rng: np.random.Generator, count: int) -> Work:
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
        return Work(moments[:, 0], ready, moments[:, -1], step, np.minimum(self._optimizer_ns, step))


def _check(world_size: int, stragglers: Sequence[Straggler], inputs: Sequence[int] | None) -> None:
    for number, straggler in enumerate(stragglers):
        if straggler.rank is not None and straggler.rank >= world_size:
            raise ValueError(f"stragglers[{number}].rank: expected a rank below {world_size}, got {straggler.rank}")
    if inputs is not None and (len(inputs) != world_size or min(inputs) < 0 or max(inputs) < 1):
        raise ValueError(
            f"inputs: expected {world_size} numbers of batches, one a rank, not all 0 and none negative; got {inputs}"
        )


def _unlike(
    world_size: int, recorded: int, stragglers: Sequence[Straggler], inputs: Sequence[int] | None
) -> NDArray[np.int64]:
    """The first of all ranks that have the same recording, the same slow-downs and as many inputs."""
    if not stragglers and inputs is None:
        return np.arange(min(world_size, recorded))
    slow = {straggler.rank for straggler in stragglers}
    first: dict[tuple[int, int | None, int | None], int] = {}
    for rank in range(world_size):
        key = (rank % recorded, rank if rank in slow else None, None if inputs is None else inputs[rank])
        first.setdefault(key, rank)
    return np.array(sorted(first.values()))


def _typical(work: Work) -> int:
    """The iteration whose computation is the median."""
    return int(work.compute_ns.argsort(kind="stable")[len(work.compute_ns) // 2])


def _scaled(work: Work, factors: Floats) -> Work:
    """Every rank's computation times its factor."""

    def scale(ns: Nanoseconds) -> Nanoseconds:
        return np.rint(ns * factors.reshape(factors.shape + (1,) * (ns.ndim - factors.ndim))).astype(np.int64)

    return Work(
        scale(work.forward_ns),
        scale(work.ready_ns),
        scale(work.backward_end_ns),
        scale(work.step_ns),
        scale(work.optimizer_ns),
    )


def _quantiles(ordered: Nanoseconds, levels: Floats) -> Nanoseconds:
    """Of each column of sorted values, the one at its level between 0 and 1, interpolated."""
    place = levels * (len(ordered) - 1)
    below = np.floor(place).astype(np.int64)
    above = np.minimum(below + 1, len(ordered) - 1)
    columns = np.arange(ordered.shape[1])  # the last axis of `levels`
    low, high = ordered[below, columns], ordered[above, columns]
    return np.rint(low + (high - low) * (place - below)).astype(np.int64)


def _lag_one(durations: Nanoseconds) -> float:
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
