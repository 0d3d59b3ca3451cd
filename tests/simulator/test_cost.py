"""Cost: prices from a file, the cheapest and the fastest offer, and a verdict only where the intervals decide."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator import Fabric
from ddplab.simulator.capacity.judgement import verdict
from ddplab.simulator.capacity.memory import MemoryUse
from ddplab.simulator.capacity.plan import plan
from ddplab.simulator.capacity.scaling import (
    Offer,
    Price,
    Question,
    at_most,
    cheapest,
    fastest,
    front,
    offer_of,
    read_prices,
)

from ..explore import examples
from ..strategies import iteration, trace_of

EXAMPLE = Path(__file__).parents[2] / "docs" / "prices.example.csv"
HEADER = "system,per_gpu_hour,currency,source,date\n"
LINE = "aws-p4d,1.50,USD,a page,2026-11-25\n"


@pytest.fixture(scope="module")
def size():
    trace = trace_of([[iteration(100, (500,), 500, 0)]], (8,))
    return plan(trace, Fabric.from_alpha_beta(0, 1e9), world_sizes=[2]).offers[0].size


HOURS_COST_WIDTH_AND_MEMORY = st.tuples(
    st.floats(1, 1e3), st.floats(1, 1e3), st.floats(1, 3), st.sampled_from(["yes", "yes", "no", "open"])
)
GIB = 2**30
HELD = {"yes": (1, 2), "no": (50, 60), "open": (30, 60)}
"""GiB in use at the peak, at least and at most, by whether that fits into 40."""


def memory(answer):
    low, high = (size * GIB for size in HELD[answer])
    return MemoryUse({}, low, (low, high), 40 * GIB, 1, on_gpu=True, has_run=False)


@examples(25)
@given(st.lists(HOURS_COST_WIDTH_AND_MEMORY, min_size=1, max_size=6), st.floats(1, 1e3), st.floats(1, 1e3))
def test_no_offer_beats_those_on_the_front_and_the_choices_surely_keep_the_limits(size, made, deadline, budget):
    question = Question(samples=1.0, deadline_hours=deadline, budget=budget)
    all_offers = []
    for number, (hours, cost, width, fits) in enumerate(made):
        takes, costs = ((one / width, one * width) for one in (hours, cost))
        answers = {"deadline": at_most(takes, deadline), "budget": at_most(costs, budget), "memory": fits}
        fast = size._replace(samples_per_s=1 / hours)
        held = {"sgd": memory(fits)}
        assert offer_of("a", fast, Question(), None, held).answers == {"memory": fits}
        all_offers.append(Offer(str(number), fast, hours, takes, cost, costs, answers, held))
    chosen = front(all_offers)
    possible = [one for one in all_offers if one.answer != "no"]
    for one in possible:
        others = [other for other in all_offers if other is not one]
        assert not front([*others, one._replace(cost=None, cost_band=None)]), (
            "one without a price may be the cheapest"
        )
    for one in possible:
        beaten = any((b.hours, b.cost) <= (one.hours, one.cost) and b.cost <= one.cost for b in chosen)
        assert beaten, "an offer on the front is at least as fast and as cheap"
    for a in chosen:
        assert a.answer != "no"
        assert not any(b.hours < a.hours and b.cost < a.cost for b in possible)
    surely = [one for one in all_offers if one.hours_band[1] <= deadline and one.cost_band[1] <= budget]
    surely = [one for one in surely if one.answers["memory"] == "yes"]
    never = [
        one
        for one in all_offers
        if one.hours_band[0] > deadline or one.cost_band[0] > budget or one.answers["memory"] == "no"
    ]
    fits = {one.answers["memory"] for one in all_offers}
    untargeted = verdict(Question(samples=1.0), all_offers)
    assert untargeted.answer == ("no" if fits == {"no"} else "")
    assert ("whether it fits is open" in untargeted.sentence) == ("yes" not in fits and "open" in fits)
    answer = verdict(question, all_offers)
    if surely:
        assert cheapest(all_offers).cost == min(one.cost for one in surely)
        assert fastest(all_offers).hours == min(one.hours for one in surely)
        assert answer.answer == "yes"
        smaller = [one for one in all_offers if one.answer == "open" and one.cost < cheapest(all_offers).cost]
        assert (f"{len(smaller)} cheaper may suffice" in answer.sentence) == bool(smaller)
        assert (f"cheapest of {len(surely)} choices" in answer.sentence) == (len(surely) > 1)
        ties = sum(one.cost_band[0] <= cheapest(all_offers).cost_band[1] for one in surely) - 1
        assert (f"{ties} may cost as little" in answer.sentence) == bool(ties)
    else:
        assert cheapest(all_offers) is fastest(all_offers) is None
        assert answer.answer == ("no" if len(never) == len(all_offers) else "open")


def test_the_example_is_marked_as_one():
    assert "NOT a list of prices" in EXAMPLE.read_text()
    assert all("invented" in price.source for price in read_prices(EXAMPLE))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("system,price\n", "expected the columns system,per_gpu_hour"),
        (
            HEADER + "aws-p4d,cheap,USD,a page,2026-11-25\n",
            "price 1: per_gpu_hour: expected a price above 0, such as 2.50",
        ),
        (HEADER + "aws-p4d,-1,USD,a page,2026-11-25\n", "price 1: per_gpu_hour"),
        (HEADER + "aws-p4d,3-2,USD,a page,2026-11-25\n", "price 1: per_gpu_hour: expected a price above 0, such as"),
        (HEADER + "aws-p4d,1,dollars,a page,2026-11-25\n", "price 1: currency"),
        (HEADER + "aws-p4d,1,USD,a page,today\n", "price 1: date"),
        (HEADER + "aws-p4d,1,USD,a page\n", "price 1: expected 5 values"),
        (HEADER + LINE + LINE, "price 2: expected one price for each system"),
        (HEADER + LINE + "dgx-h100,1,EUR,a page,2026-11-25\n", "expected one currency, got EUR, USD"),
    ],
)
def test_a_wrong_price_is_one_line_with_its_place(tmp_path, text, message):
    path = tmp_path / "prices.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_prices(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_hours_and_cost_follow_from_the_throughput(size):
    price = Price(system="a", per_gpu_hour=2.0, currency="USD", source="a test", date="2026-01-01")
    offer = offer_of("a", size, Question(samples=7.2e12), price)
    dearer = offer_of("a", size, Question(samples=7.2e12), Price(**{**price.model_dump(), "per_gpu_hour": "2.0-3"}))
    assert (dearer.cost_band[0], dearer.cost_band[1] / offer.cost_band[1]) == (offer.cost_band[0], 1.5)
    of_tokens = offer_of("a", size._replace(tokens=8), Question(), price)
    assert of_tokens.cost == pytest.approx(offer.cost * 1e6 / 8 / 7.2e12)
    assert of_tokens.hours is None
    assert offer.hours == pytest.approx(7.2e12 / size.samples_per_s / 3600)
    assert offer.cost == pytest.approx(offer.hours * 2 * 2.0)
    assert offer.answer == "yes", "nothing was asked"
    iteration_h = size.prediction.iteration_ns / 3600e9
    each = size.samples_per_s * 3600 * iteration_h
    for samples, iterations in ((1e-9, 1), (each, 1), (1.1 * each, 2), (7 * each, 7)):
        assert offer_of("a", size, Question(samples=samples), None).hours == pytest.approx(iterations * iteration_h)


@pytest.mark.parametrize(
    "price", [-1.0, 0, math.nan, math.inf, (3.0, 2.0), (0.0, 1.0), (1.0, 2.0, 3.0), "1e400", "2-3-4"]
)
def test_a_price_that_cannot_be_is_refused_in_one_line(price):
    about = {"currency": "USD", "source": "a test", "date": "2026-01-01"}
    with pytest.raises(ValueError, match="per_gpu_hour: expected a price above 0, such as"):
        Price(system="a", per_gpu_hour=price, **about)
    assert Price(system="a", per_gpu_hour=(1.5, 2), **about).per_gpu_hour == (1.5, 2.0)
