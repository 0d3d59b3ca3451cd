"""Scaling: throughput and efficiency by number of GPUs, the knee, and what to measure for a narrower interval.

The knee is where more GPUs begin to add little.
"""

import csv
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from itertools import accumulate, combinations, pairwise
from math import ceil, exp, inf
from operator import mul
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator

from ...reference.files.reading import SHORT, Schema, read_text
from ..anchoring import covariance_of
from ..fabric.cost_curves import NORMAL_HALF_BAND
from ..predicted_iteration import Prediction
from ..prediction import System
from .memory import MemoryUse, Optimizer

Band = tuple[float, float]
"""Both ends of an interval that holds nine in ten true values."""
LEAST_GAIN = 0.8
"""Part of its share that a step to more GPUs must add; a step that adds less begins at the knee. The share of a
doubling is the throughput before the doubling."""


class Size(NamedTuple):
    """Training on one number of GPUs, with the same batch on each of them (weak scaling)."""

    world_size: int  #: number of GPUs
    prediction: Prediction
    samples_per_s: float  #: samples per second on all GPUs
    samples_per_s_band: Band  #: both ends of its 90 % interval
    tokens: int | None  #: length of a sample's sequence; None: the model takes no tokens
    mfu: float | None
    """Part of the GPUs' peak rate that the model's arithmetic reaches (model FLOPs utilisation), without what
    checkpoints repeat. None: not counted."""
    mfu_band: Band | None  #: both ends of its 90 % interval


class Knee(NamedTuple):
    """Where the next step to more GPUs adds less than `LEAST_GAIN` of its share."""

    world_size: int | None  #: number of GPUs before that step; None: every step adds enough
    earliest: int | None  #: the same if every step adds as little as its 90 % interval allows; None: likewise
    latest: int | None  #: the same if every step adds as much as its interval allows; None: likewise


class NextMeasurement(NamedTuple):
    """What to measure next."""

    width: float  #: half of the interval of the iteration over its median, now
    world_sizes: tuple[int, ...]
    """The one or two numbers of GPUs whose measured iterations narrow the interval most. Empty: none is smaller."""
    width_with_sizes: float  #: expected width after measuring these
    width_with_messages: float | None
    """Expected width after measuring all-reduces of the largest bucket on as many GPUs. None: the buyer has fewer."""
    width_with_step: float | None
    """Expected width after measuring a step on one GPU. None: it was measured."""


@dataclass(frozen=True)
class Scaling:
    """A system on several numbers of GPUs."""

    system: System
    world_sizes: Sequence[int]  #: numbers of GPUs, in ascending order
    batch: int  #: samples per GPU and iteration
    total_batch: int  #: samples on all GPUs and iteration for strong scaling

    @cached_property
    def sizes(self) -> tuple[Size, ...]:
        """The predictions, by number of GPUs."""
        return tuple(map(self._size, self.world_sizes))

    @cached_property
    def knee(self) -> Knee:
        """The knee and its band."""
        expected = [one.prediction.expected(one.world_size) for one in self.sizes]
        slower = [0.0]  # standard deviation of the logarithm of the iteration over the one before
        for pair in pairwise(expected):
            (first, shared), (_, second) = covariance_of(pair)
            slower.append(max(0.0, first + second - 2 * shared) ** 0.5)

        def found(half_widths: float) -> int | None:
            """Return the knee if every step takes this many half-widths of its interval longer."""
            ratios = accumulate((exp(half_widths * deviation) for deviation in slower), mul)
            times_ns = [ratio * one.iteration_ns for ratio, one in zip(ratios, expected, strict=True)]
            for (few, before_ns), (many, after_ns) in pairwise(zip(self.world_sizes, times_ns, strict=True)):
                gain = many / few * before_ns / max(1, after_ns) - 1
                if gain < LEAST_GAIN * (many / few - 1):
                    return few
            return None

        return Knee(found(0.0), found(NORMAL_HALF_BAND), found(-NORMAL_HALF_BAND))

    def next_measurement(self, world_size: int) -> NextMeasurement:
        """Choose what to measure for one number of GPUs, from the narrowing that iterations as predicted would give.

        Parts of a node may be measured, and the numbers of GPUs that are predicted. The buyer counts as having one
        node, or as many GPUs as were measured.
        """
        system, known = self.system, self.system.inputs.measured or {}
        whole, topology = system.at(world_size), system.inputs.fabric.topology
        node = 1 if topology is None else topology.levels[0].size
        owned = max([node, *known])
        is_measured = system.inputs.trace.workload.compute_bounds == (1.0, 1.0) or 1 in known  # one GPU alone
        candidates = {1, node // 4, node // 2, node, *self.world_sizes} - {0, *known, *[1] * is_measured}
        smaller = {ranks: system.at(ranks) for ranks in sorted(candidates) if ranks < world_size and ranks <= owned}
        narrowed = {
            some: _width(whole.anchored(world_size, {ranks: smaller[ranks].iteration_ns for ranks in some}, smaller))
            for some in combinations(smaller, min(2, len(smaller)))
            if some
        }
        width = _width(whole)
        left, best = min(((left, pair) for pair, left in narrowed.items()), default=(width, ()))

        def width_without(cause: str) -> float:
            return float(width * (1 - whole.shares_of_width.get(cause, 0.0)) ** 0.5)

        messages = width_without("collectives") if world_size <= owned else None
        return NextMeasurement(width, best, left, messages, None if is_measured else width_without("compute times"))

    def _size(self, world_size: int) -> Size:
        prediction = self.system.at(world_size)
        low_ns, high_ns = prediction.interval_ns
        samples, workload = self.batch * world_size * 1e9, self.system.inputs.trace.workload
        peak_ns = workload.flops and workload.flops_per_s and 1e9 * workload.flops / workload.flops_per_s
        return Size(
            world_size=world_size,
            prediction=prediction,
            samples_per_s=samples / max(1, prediction.iteration_ns),
            samples_per_s_band=(samples / max(1, high_ns), samples / max(1, low_ns)),
            tokens=workload.tokens,
            mfu=None if peak_ns is None else peak_ns / max(1, prediction.iteration_ns),
            mfu_band=None if peak_ns is None else (peak_ns / max(1, high_ns), peak_ns / max(1, low_ns)),
        )

    def strong_samples_per_s(self, world_size: int) -> float | None:
        """Return samples per second on all GPUs with the total batch (strong scaling).

        None: it has fewer samples than there are GPUs, or the trace was recorded with communication.
        """
        samples = self.total_batch
        multiple = samples / (self.batch * world_size)
        other = self.system.with_batch(multiple) if samples >= world_size else None
        if other is None:
            return None
        changed = None if multiple == 1 else self.system.inputs._replace(trace=other)
        return samples * 1e9 / max(1, self.system.at(world_size, changed).iteration_ns)


def _width(prediction: Prediction) -> float:
    low, high = prediction.interval_ns
    return (high - low) / 2 / max(1, prediction.iteration_ns)


# Time and money for a number of samples, and which offers to choose

Answer = Literal["yes", "no", "open"]
"""Whether a limit is kept: `open` if it lies inside the interval."""


class Price(Schema):
    """The price of a system."""

    system: str = Field(min_length=1)  #: name of the system, such as a node of the catalogue
    per_gpu_hour: Band  #: lowest and highest price of one GPU for an hour
    currency: str = Field(pattern=r"^[A-Z]{3}$")  #: its currency, such as USD
    source: str = Field(min_length=1)  #: where the price comes from
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")  #: day on which it was valid, such as 2026-11-25

    @field_validator("per_gpu_hour", mode="before")
    @classmethod
    def _both_ends(cls, price: Any) -> Band:
        """Read one price, or both ends of a range of prices, as numbers or as text such as 1.80-2.40."""
        ends = price.split("-") if isinstance(price, str) else price if isinstance(price, tuple) else [price]
        low = high = 0.0
        with suppress(ValueError):
            low, high = float(ends[0]), float(ends[-1])
        if len(ends) > 2 or not 0 < low <= high <= MOST_PRICE:
            raise ValueError(f"expected a price above 0, such as 2.50 or 1.80-2.40, got {SHORT.repr(price)}")
        return low, high


COLUMNS = tuple(Price.model_fields)
MOST_PRICE = 1e9
UNIT = 1e6
"""Samples or tokens whose cost is shown when no number of samples to train on is given."""


def read_prices(path: str | os.PathLike[str]) -> list[Price]:
    """Read prices from a CSV file with the columns of `Price`; lines that start with # are comments.

    Raises:
        ValueError: The file cannot be read, a column or value is wrong, a system occurs twice, or currencies differ.
    """
    lines = [line for line in read_text(path).splitlines() if line.strip() and not line.startswith("#")]
    reader = csv.DictReader(StringIO("\n".join(lines)), restkey="more")
    try:
        columns = tuple(reader.fieldnames or ())
        rows = list(reader) if columns == COLUMNS else []
    except csv.Error as error:
        raise ValueError(f"{path}: expected CSV, got {error}") from None
    if columns != COLUMNS:
        raise ValueError(f"{path}: expected the columns {','.join(COLUMNS)}, got {SHORT.repr(','.join(columns))}")
    prices: dict[str, Price] = {}
    for number, row in enumerate(rows, start=1):
        try:
            if "more" in row or None in row.values():
                raise ValueError(f"expected {len(COLUMNS)} values")
            fields: dict[str, Any] = {**row}
            price = Price(**fields)
            if price.system in prices:
                raise ValueError(f"expected one price for each system, got two for {price.system}")
        except ValueError as error:
            raise ValueError(f"{path}: price {number}: {error}") from None
        prices[price.system] = price
    if len(currencies := {price.currency for price in prices.values()}) > 1:
        raise ValueError(f"{path}: expected one currency, got {', '.join(sorted(currencies))}")
    return list(prices.values())


class Offer(NamedTuple):
    """A system on a number of GPUs, for the samples of a training run."""

    system: str  #: name of the system
    size: Size  #: the predictions
    hours: float | None  #: duration of the run; None: no number of samples was given
    hours_band: Band | None  #: both ends of its 90 % interval
    cost: float | None
    """Price of all GPUs for this time; without a number of samples, for a million samples or, where the model takes
    them, of tokens. None: no price is known."""
    cost_band: Band | None  #: both ends of its 90 % interval
    answers: Mapping[str, Answer]
    """Whether the duration is within the deadline (`deadline`), the cost within the budget (`budget`), and the
    efficiency at least the one asked for (`efficiency`), of each that was asked; and whether training fits on a GPU
    (`memory`), with each optimiser that may be used."""
    memory: Mapping[Optimizer, MemoryUse] = MappingProxyType({})
    """What training holds on each GPU, by the optimisers that may be used."""
    instead: Sequence[str] = ()  #: what would certainly fit where this does not
    currency: str | None = None  #: that of the cost

    @property
    def answer(self) -> Answer:
        """`no` if one answer is, else `open` if one answer is, else `yes`."""
        given = set(self.answers.values())
        return "no" if "no" in given else "open" if "open" in given else "yes"


class Question(NamedTuple):
    """What is asked of a plan."""

    samples: float | None = None  #: samples to train on, over all epochs
    deadline_hours: float | None = None  #: longest duration
    budget: float | None = None  #: largest cost
    efficiency: float | None = None  #: least efficiency, from 0 to 1

    @property
    def has_target(self) -> bool:
        """Whether there is anything to keep beside the memory of a GPU."""
        return any(one is not None for one in (self.deadline_hours, self.budget, self.efficiency))


def offer_of(
    system: str,
    size: Size,
    question: Question,
    price: Price | None,
    memory: Mapping[Optimizer, MemoryUse] = MappingProxyType({}),
) -> Offer:
    """Return duration, cost and answers for one number of GPUs."""
    hours = hours_band = cost = cost_band = None
    samples = UNIT / (size.tokens or 1)
    if question.samples is not None:  # a run has whole iterations, of which the last one may repeat samples
        of_one = size.samples_per_s * max(1, size.prediction.iteration_ns) / 1e9
        samples = max(1, ceil(round(question.samples / of_one, 6))) * of_one
    low, high = (samples / rate / 3600 for rate in reversed(size.samples_per_s_band))
    if question.samples is not None:
        hours, hours_band = samples / size.samples_per_s / 3600, (low, high)
    if price is not None:
        least, most = (per_hour * size.world_size for per_hour in price.per_gpu_hour)
        cost = samples / size.samples_per_s / 3600 * (least + most) / 2
        cost_band = low * least, high * most
    answers: dict[str, Answer] = {}
    if question.deadline_hours is not None and hours_band is not None:
        answers["deadline"] = at_most(hours_band, question.deadline_hours)
    if question.budget is not None and cost_band is not None:
        answers["budget"] = at_most(cost_band, question.budget)
    if question.efficiency is not None:
        low, high = size.prediction.efficiency_interval
        answers["efficiency"] = at_most((-high, -low), -question.efficiency)
    if any(one.world_size != size.world_size for one in size.prediction.contradictions):
        answers = dict.fromkeys(answers, "open")  # what the model says of other numbers of GPUs decides nothing
    if any(use.on_gpu for use in memory.values()):
        found = {use.answer for use in memory.values()}
        answers["memory"] = "yes" if found == {"fits"} else "no" if found == {"does not fit"} else "open"
    currency = None if price is None else price.currency
    return Offer(system, size, hours, hours_band, cost, cost_band, answers, memory, currency=currency)


def at_most(band: Band, limit: float) -> Answer:
    """Return whether a value in this interval is at most `limit`."""
    low, high = band
    return "yes" if high <= limit else "no" if low > limit else "open"


def front(offers: Sequence[Offer]) -> list[Offer]:
    """Return the offers that may suffice, and than which no other is both faster and cheaper, the fastest first.

    Empty if the time or the cost of one of them is not known: it may be the fastest or the cheapest.
    """
    fitting = sorted((one for one in offers if one.answer != "no"), key=lambda one: (one.hours or 0, one.cost or 0))
    costs = [one.cost for one in fitting if one.hours is not None and one.cost is not None]
    if len(costs) < len(fitting):
        return []
    least = accumulate(costs, min, initial=inf)  # of all faster ones
    return [one for one, cost, before in zip(fitting, costs, least, strict=False) if cost < before]


def cheapest(offers: Sequence[Offer]) -> Offer | None:
    """Return the cheapest offer whose answers are all `yes`, or the one with fewest GPUs if prices are not known."""
    return min((one for one in offers if one.answer == "yes"), key=lambda one: rank_of(one, offers), default=None)


def rank_of(offer: Offer, offers: Sequence[Offer]) -> tuple[float, int]:
    """Return the cost, which counts only if that of all `offers` is known, and the number of GPUs."""
    return (offer.cost or 0.0) if all(one.cost is not None for one in offers) else 0.0, offer.size.world_size


def fastest(offers: Sequence[Offer]) -> Offer | None:
    """Return the fastest offer whose answers are all `yes`."""
    return max((one for one in offers if one.answer == "yes"), key=lambda one: one.size.samples_per_s, default=None)
