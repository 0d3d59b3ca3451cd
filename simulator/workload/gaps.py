"""Gaps: iterations that differ from each other gap by gap, neighbours alike."""

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from .work import Nanoseconds, Work

Floats = NDArray[np.float64]


class Gaps:
    """One recorded rank's iterations as gaps between gradients, each with the distribution that was recorded.

    Neighbouring gaps are tied by a Gaussian copula of first order: normal scores follow z' = c z + sqrt(1 - c^2) e.

    Args:
        work: The iterations.
        correlation: c. None: as alike as neighbours were in the recording.
    """

    def __init__(self, work: Work, correlation: float | None) -> None:
        moments = np.sort(work.ready_ns, axis=-1)
        edges = np.column_stack([work.forward_ns, moments, work.backward_end_ns])
        durations = np.column_stack([work.forward_ns, np.diff(edges, axis=-1), work.step_ns])
        self._order = work.ready_ns[-1].argsort(kind="stable")
        self._sorted = np.sort(durations, axis=0)
        self._optimizer_ns = work.optimizer_ns[-1]
        self._correlation = lag_one_correlation(durations) if correlation is None else correlation

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
        optimizer = np.minimum(self._optimizer_ns, step)
        before = np.zeros((*step.shape, 0), np.int64)
        return Work(moments[:, 0], ready, moments[:, -1], step, optimizer, before)


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
