"""Cost: time and money for a number of samples, by system and number of GPUs, and which of them to choose."""

import csv
import os
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, StringConstraints

from ...reference.files.reading import Settings, read_text
from .scaling import Band, Size

Answer = Literal["yes", "no", "open"]
"""Whether a limit is kept: `open` if it lies inside the interval."""


class Price(Settings):
    """The price of a system.

    Attributes:
        system: Name of the system, such as a node of the catalogue.
        per_gpu_hour: Price of one GPU for an hour.
        currency: Its currency, such as USD.
        source: Where the price comes from.
        date: Day on which it was valid, such as 2026-11-25.
    """

    system: Annotated[str, StringConstraints(min_length=1)]
    per_gpu_hour: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
    currency: Annotated[str, StringConstraints(pattern=r"^[A-Z]{3}$")]
    source: Annotated[str, StringConstraints(min_length=1)]
    date: Annotated[str, StringConstraints(pattern=r"^\d{4}-\d{2}-\d{2}$")]


COLUMNS = tuple(Price.model_fields)


def read_prices(path: str | os.PathLike[str]) -> list[Price]:
    """Read prices from a CSV file with the columns of `Price`; lines that start with # are comments.

    Raises:
        ValueError: The file cannot be read, a column or value is wrong, a system occurs twice, or currencies differ.
    """
    lines = [line for line in read_text(path).splitlines() if line.strip() and not line.startswith("#")]
    rows = csv.DictReader(StringIO("\n".join(lines)), restkey="more")
    if tuple(rows.fieldnames or ()) != COLUMNS:
        raise ValueError(f"{path}: expected the columns {','.join(COLUMNS)}, got {','.join(rows.fieldnames or ())}")
    prices: dict[str, Price] = {}
    for number, row in enumerate(rows, start=1):
        try:
            if "more" in row or None in row.values():
                raise ValueError(f"expected {len(COLUMNS)} values")
            fields: dict[str, Any] = {**row, "per_gpu_hour": float(row["per_gpu_hour"])}
            price = Price(**fields)
        except ValueError as error:
            raise ValueError(f"{path}: price {number}: {error}") from None
        if price.system in prices:
            raise ValueError(
                f"{path}: price {number}: expected one price for each system, got two for {price.system}"
            )
        prices[price.system] = price
    if len(currencies := {price.currency for price in prices.values()}) > 1:
        raise ValueError(f"{path}: expected one currency, got {', '.join(sorted(currencies))}")
    return list(prices.values())


class Offer(NamedTuple):
    """A system on a number of GPUs, for the samples of a training run.

    Attributes:
        system: Name of the system.
        size: The predictions.
        hours: Duration of the run. None: no number of samples was given.
        hours_band: Both ends of its 90 % interval.
        cost: Price of all GPUs for this time. None: no price is known.
        cost_band: Both ends of its 90 % interval.
        answers: Whether the duration is within the deadline (`deadline`), the cost within the budget (`budget`), and
            the efficiency at least the one asked for (`efficiency`); of each that was asked.
    """

    system: str
    size: Size
    hours: float | None
    hours_band: Band | None
    cost: float | None
    cost_band: Band | None
    answers: Mapping[str, Answer]

    @property
    def answer(self) -> Answer:
        """`no` if one answer is, else `open` if one answer is, else `yes`."""
        given = set(self.answers.values())
        return "no" if "no" in given else "open" if "open" in given else "yes"


class Question(NamedTuple):
    """What is asked of a plan.

    Attributes:
        samples: Samples to train on, over all epochs.
        deadline_hours: Longest duration.
        budget: Largest cost.
        efficiency: Least efficiency, from 0 to 1.
    """

    samples: float | None = None
    deadline_hours: float | None = None
    budget: float | None = None
    efficiency: float | None = None


def offer_of(system: str, size: Size, question: Question, price: Price | None) -> Offer:
    """Return duration, cost and answers for one number of GPUs."""
    hours = hours_band = cost = cost_band = None
    if question.samples is not None:
        low, high = size.samples_per_s_band
        hours = question.samples / size.samples_per_s / 3600
        hours_band = question.samples / high / 3600, question.samples / low / 3600
        if price is not None:
            per_hour = price.per_gpu_hour * size.world_size
            cost, cost_band = hours * per_hour, (hours_band[0] * per_hour, hours_band[1] * per_hour)
    answers: dict[str, Answer] = {}
    if question.deadline_hours is not None and hours_band is not None:
        answers["deadline"] = at_most(hours_band, question.deadline_hours)
    if question.budget is not None and cost_band is not None:
        answers["budget"] = at_most(cost_band, question.budget)
    if question.efficiency is not None:
        low, high = size.prediction.efficiency_interval
        answers["efficiency"] = at_most((-high, -low), -question.efficiency)
    return Offer(system, size, hours, hours_band, cost, cost_band, answers)


def at_most(band: Band, limit: float) -> Answer:
    """Return whether a value in this interval is at most `limit`."""
    low, high = band
    return "yes" if high <= limit else "no" if low > limit else "open"


def front(offers: Sequence[Offer]) -> list[Offer]:
    """Return the offers than which no other is both faster and cheaper (Pareto), the fastest first."""
    priced = [(one.hours, one.cost, one) for one in offers if one.hours is not None and one.cost is not None]
    chosen: list[Offer] = []
    least = float("inf")
    for _hours, cost, one in sorted(priced, key=lambda entry: entry[:2]):
        if cost < least:
            chosen.append(one)
            least = cost
    return chosen


def cheapest(offers: Sequence[Offer]) -> Offer | None:
    """Return the cheapest offer whose answers are all `yes`, or the one with fewest GPUs if prices are not known."""
    kept = [one for one in offers if one.answer == "yes"]
    return min(kept, key=lambda one: (one.cost or 0.0, one.size.world_size), default=None)


def fastest(offers: Sequence[Offer]) -> Offer | None:
    """Return the fastest offer whose answers are all `yes`."""
    kept = [one for one in offers if one.answer == "yes"]
    return max(kept, key=lambda one: one.size.samples_per_s, default=None)
