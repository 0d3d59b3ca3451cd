"""Anchoring: iterations measured on a few ranks correct the prediction for other numbers of ranks, and narrow it.

The interval of a prediction comes from named causes, such as the rate of the network. Each cause is taken as a
normally distributed error of the logarithm of the iteration time. The errors of one cause at two numbers of ranks
that are d doublings apart have a correlation of exp(-d / `CORRELATED_DOUBLINGS`), or of 1 if each rank causes them by
itself (`OF_ONE_RANK`). Given the measured times, the error
at another number of ranks has the conditional mean and variance of that distribution (kriging; Rasmussen and
Williams, "Gaussian Processes for Machine Learning", equations 2.23 and 2.24).
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..reference.files.writing import milliseconds
from .fabric.cost_curves import NORMAL_HALF_BAND

CORRELATED_DOUBLINGS = 6.0
"""Doublings of the number of ranks over which the correlation of an error falls to 1/e. On the systems of part (i) of
the score (`validation/`), 3, 6 and 12 give mean errors between 2.0 and 2.2 % on several nodes; 6 the least bias."""
OF_ONE_RANK = frozenset({"compute times", "copies", "launches"})
"""Causes whose error is the same on any number of ranks, because none of them needs another rank."""
MEASUREMENT_DEVIATION = 0.01
"""Standard deviation of a measured median over its true value; repeats of the published runs differ by 0.2 to 2 %."""
CONTRADICTION = 1.96
"""Standard deviations beyond which a measurement contradicts the model: one in twenty does so by chance."""
FAR = 3.0
"""Standard deviations beyond which no limit and no need follow from the model."""
AS_LONG = 1.1
"""Multiple of the trace's time on one rank up to which a measured one may be of another run on the same device."""
LONGEST = 100.0
"""Multiple of a predicted time above which a measured one has another unit."""


class Expected(NamedTuple):
    """The prediction for one number of ranks."""

    ranks: int
    iteration_ns: int
    causes_ns: Mapping[str, tuple[float, float]]
    """See `Prediction.causes_ns`; without the variation of the iterations, which does not move their median."""
    compute_ns: int = 0  #: see `Prediction.compute_ns`
    compute_errors: Mapping[str, tuple[float, float]] = MappingProxyType({})  #: see `Prediction.compute_errors`

    @property
    def least_ns(self) -> float:
        """Shortest iteration that noise and the errors of computation explain: one that waits for nothing."""
        below = {cause: reach / max(1, self.compute_ns) for cause, (reach, _) in self.causes_ns.items()}
        below |= {cause: error for cause, (error, _) in self.compute_errors.items()}
        noise = 2 * MEASUREMENT_DEVIATION**2
        noise += sum((below.get(cause, 0.0) / NORMAL_HALF_BAND) ** 2 for cause in ("device speeds", "slowest rank"))
        shortest = self.compute_ns * (1 - min(1.0, below.get("compute times", 0.0)))
        return float(shortest * (1 - CONTRADICTION * noise**0.5))

    @property
    def most_ns(self) -> float:
        """Longest iteration that is not far from this one."""
        variance = MEASUREMENT_DEVIATION**2 + sum(one**2 for one in self.deviations().values())
        return float(self.iteration_ns * max(AS_LONG, np.exp(FAR * variance**0.5)))

    def deviations(self) -> dict[str, float]:
        """Return the standard deviation of the logarithm of the iteration time by cause."""
        usual_ns = max(1, self.iteration_ns)
        return {cause: _deviation(np.array(both) / usual_ns) for cause, both in self.causes_ns.items()}

    def of_efficiency(self) -> dict[str, float]:
        """Return by how much more than the iteration computation alone becomes longer by a standard deviation."""
        errors = {cause: _deviation(np.array(both)) for cause, both in self.compute_errors.items()}
        return {cause: errors.get(cause, 0.0) - deviation for cause, deviation in self.deviations().items()}


def _deviation(reach: NDArray[np.float64]) -> float:
    return float(np.log1p(reach).mean()) / NORMAL_HALF_BAND


class Anchor(NamedTuple):
    """The effect of one measurement on a prediction."""

    world_size: int  #: number of ranks of the measurement
    measured_ns: int  #: measured median iteration time
    predicted_ns: int  #: the same, predicted without measurements
    moved: float  #: factor on the predicted time that is due to this measurement
    surprise: float
    """Distance between measured and predicted time, without or with the other measurements, whichever is larger, in
    standard deviations of their difference."""

    @property
    def contradicts(self) -> bool:
        """Whether the distance is larger than chance explains."""
        return abs(self.surprise) > CONTRADICTION

    @property
    def is_far(self) -> bool:
        """Whether the model explains so little that neither limits nor needs follow from it."""
        return abs(self.surprise) > FAR

    def sentence(self) -> str:
        """Return the effect as a sentence."""
        measured, predicted = (f"{milliseconds(ns, ',.1f')} ms" for ns in (self.measured_ns, self.predicted_ns))
        moved = f"measured {measured} on {self.world_size} rank{'s' * (self.world_size > 1)}, predicted {predicted}: "
        moved += f"changes the prediction by {self.moved - 1:+.1%}"
        if self.contradicts:
            moved += f"; it contradicts the model ({self.surprise:+.1f} standard deviations)"
        advice = ": check that trace, fabric and settings are those of the measured run"
        return moved + advice * (self.contradicts and not self.is_far)  # else `plan` and `predict` say why


class Correction(NamedTuple):
    """What measured iterations change of a prediction."""

    factor: float  #: factor on the median
    narrowing: float  #: factor on the width of the interval that comes from errors of the costs
    by_cause: Mapping[str, float]  #: factor on the reach of each cause
    of_efficiency: float
    """Factor on the width of the efficiency's interval. Either computation or communication may be the part of a
    measured iteration that is longer than predicted, so it narrows less."""
    anchors: tuple[Anchor, ...]


def correct(
    target: Expected, measured_ns: Sequence[int], expected: Sequence[Expected], usual: Expected | None = None
) -> Correction:
    """Correct a prediction by measured median iterations, given the predictions for the same numbers of ranks.

    If a measurement is over `CONTRADICTION` standard deviations off, the interval is widened in proportion. `usual`
    is the target with the settings of the measured runs, if it has others.

    Raises:
        ValueError: A measurement cannot be one of this computation.
    """
    for ns, one in zip(measured_ns, expected, strict=True):
        _check_possible(ns, one, dict(zip([each.ranks for each in expected], measured_ns, strict=True)).get(1))
    by_cause = covariances_of([target, *expected])
    covariance = sum(by_cause.values(), start=np.zeros((1 + len(expected), 1 + len(expected))))
    of_target, shared, among = covariance[0, 0], covariance[0, 1:], covariance[1:, 1:]
    known = np.linalg.inv(among + MEASUREMENT_DEVIATION**2 * np.eye(len(expected)))
    surprise = np.log([ns / max(1, one.iteration_ns) for ns, one in zip(measured_ns, expected, strict=True)])
    weights = known @ shared
    alone = surprise / np.sqrt(np.diag(among) + MEASUREMENT_DEVIATION**2)
    weighed = known @ surprise
    beside_others = weighed / np.sqrt(np.diag(known))
    scores = np.where(np.abs(alone) > np.abs(beside_others), alone, beside_others)
    wider = max(1.0, float(np.abs(scores).max(initial=0)) / CONTRADICTION)
    moves = _bounded(usual or target, expected, among @ weighed, weights * surprise)
    anchors = (
        Anchor(one.ranks, ns, one.iteration_ns, float(np.exp(moved)), float(score))
        for one, ns, moved, score in zip(expected, measured_ns, moves, scores, strict=True)
    )
    narrowing = _left(of_target, weights @ shared) * wider
    left = {cause: _left(one[0, 0], weights @ one[0, 1:]) for cause, one in by_cause.items()}
    whole = sum(left[cause] ** 2 * one[0, 0] for cause, one in by_cause.items())
    of_each = narrowing * (of_target / whole) ** 0.5 if whole else 1.0  # together, the causes give the interval
    deviations, effects = target.deviations(), target.of_efficiency()
    ratios = {cause: effects[cause] / one for cause, one in deviations.items() if one}
    seen = (ratio * by_cause[cause][0, 1:] for cause, ratio in ratios.items())
    seen_of_it = sum(seen, start=np.zeros(len(expected)))
    return Correction(
        factor=float(np.exp(moves.sum())),
        narrowing=narrowing,
        by_cause={cause: of_each * part for cause, part in left.items()},
        of_efficiency=_left(sum(one**2 for one in effects.values()), seen_of_it @ known @ seen_of_it) * wider,
        anchors=tuple(anchors),
    )


def _bounded(
    target: Expected, expected: Sequence[Expected], at_measured: NDArray[np.float64], moves: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the moves, of which one is changed if many ranks would be faster than few that were measured.

    Corrections fall with distance, as correlations do. Only where the model has many ranks faster may the answer, in
    proportion. Nothing changes if the target was measured, or if measurements deny each other.
    """
    ranks = np.array([one.ranks for one in expected])
    rises = np.log([max(1, one.iteration_ns) / max(1, target.iteration_ns) for one in expected])
    least = np.where(ranks < target.ranks, at_measured + np.minimum(rises, 0), -np.inf)
    most = np.where(ranks > target.ranks, at_measured + np.maximum(rises, 0), np.inf)
    if len(ranks) and target.ranks not in ranks and least.max() <= most.min():
        place = least.argmax() if moves.sum() < least.max() else most.argmin()
        moves[place] += np.clip(moves.sum(), least.max(), most.min()) - moves.sum()
    return moves


def _left(variance: Any, explained: Any) -> float:
    """Return the part of a standard deviation that is left, 1 if there was none."""
    return float(max(0.0, 1 - explained / variance) ** 0.5) if variance else 1.0


def _check_possible(ns: int, one: Expected, alone_ns: int | None) -> None:
    """Refuse a measurement that is shorter than computation alone, far longer on one rank, or of another order."""
    compute_ns = one.compute_ns if alone_ns is None or one.ranks == 1 else alone_ns
    least_ns = one.least_ns * compute_ns / max(1, one.compute_ns)
    least, alone, most = (milliseconds(each, ",.4g") for each in (least_ns, compute_ns, one.most_ns))
    if ns < least_ns:
        limit = f"at least {least} ms, the {alone} ms that one rank takes alone less noise"
    elif one.ranks == 1 and ns > one.most_ns:
        limit = f"at most {most} ms, the {alone} ms that one rank takes alone with copies and noise"
    elif ns > LONGEST * one.iteration_ns:
        limit = f"at most {LONGEST:g} times the predicted {milliseconds(one.iteration_ns, ',.4g')} ms"
    else:
        return
    raise ValueError(
        f"measured: expected {limit}, got {milliseconds(ns, ',.4g')} ms on {one.ranks} rank{'s' * (one.ranks > 1)}; "
        "check the unit, and that batch, precision and device are those of the trace; a model by name takes the step "
        "of one GPU as --step-ms"
    )


def covariance_of(expected: Sequence[Expected]) -> NDArray[np.float64]:
    """Return the covariance of the errors of several predictions, in logarithms of iteration times."""
    return sum(covariances_of(expected).values(), start=np.zeros((len(expected), len(expected))))


def covariances_of(expected: Sequence[Expected]) -> dict[str, NDArray[np.float64]]:
    """Return the part of `covariance_of` that each cause has."""
    doublings = np.log2([one.ranks for one in expected])
    correlation = np.exp(-np.abs(doublings[:, None] - doublings) / CORRELATED_DOUBLINGS)
    deviations = [one.deviations() for one in expected]
    covariances = {}
    for cause in sorted({cause for one in deviations for cause in one}):
        of_cause = np.array([one.get(cause, 0.0) for one in deviations])
        covariances[cause] = np.outer(of_cause, of_cause) * (1.0 if cause in OF_ONE_RANK else correlation)
    return covariances
