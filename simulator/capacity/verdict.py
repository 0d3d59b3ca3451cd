"""Verdict: the answer to the question of a plan in one sentence, or that the intervals do not decide it."""

from collections.abc import Sequence
from typing import NamedTuple

from .cost import Offer, Question, cheapest
from .digits import band, percent
from .scaling import LEAST_GAIN, Knee


class Verdict(NamedTuple):
    """The answer.

    Attributes:
        answer: "yes", "no", "open" if an interval is wider than the decision, or "" if nothing was asked.
        sentence: The answer in words.
        offer: The offer that the sentence is about.
    """

    answer: str
    sentence: str
    offer: Offer


def verdict(question: Question, offers: Sequence[Offer]) -> Verdict:
    """Answer a question.

    Args:
        question: What was asked.
        offers: The systems and numbers of GPUs among which to choose; at least one.
    """
    if not offers[0].answers:
        best = max(offers, key=lambda one: one.size.samples_per_s)
        return Verdict("", _described(best), best)
    chosen = cheapest(offers)
    if chosen is not None:
        choice = ", enough" if len(offers) == 1 else _how_chosen(offers)
        return Verdict("yes", f"yes: {gpus(chosen)}{choice}: {_because(question, chosen)}", chosen)
    still_open = [one for one in offers if one.answer == "open"]
    nearest = max(still_open or offers, key=lambda one: one.size.samples_per_s)
    if not still_open:
        many = "not enough" if len(offers) == 1 else f"the fastest of {len(offers)} choices, not enough"
        return Verdict("no", f"no: {gpus(nearest)}, {many}: {_because(question, nearest)}", nearest)
    return Verdict("open", f"{gpus(nearest)}: {_because(question, nearest)}", nearest)


def gpus(offer: Offer) -> str:
    """Return system and number of GPUs in words."""
    count = offer.size.world_size
    return f"{count:,} GPU{'s' * (count > 1)} of {offer.system}"


def knee_sentence(knee: Knee, largest: int) -> str:
    """Return the knee and its band in words.

    Args:
        knee: The knee.
        largest: Largest number of GPUs that was predicted.
    """
    adds_less = f"the next step adds less than {LEAST_GAIN:.0%} of its share"
    if knee.world_size is None:
        doubt = f"; given the errors of the costs, {knee.earliest:,} GPUs may be the knee" if knee.earliest else ""
        return f"no knee up to {largest:,} GPUs: each step adds at least {LEAST_GAIN:.0%} of its share{doubt}"
    last = f"beyond {largest:,}" if knee.latest is None else f"{knee.latest:,}"
    is_sure = knee.earliest == knee.world_size == knee.latest
    return f"knee at {knee.world_size:,} GPUs{'' if is_sure else f' ({knee.earliest:,} to {last})'}: {adds_less}"


def _how_chosen(offers: Sequence[Offer]) -> str:
    priced = all(one.cost is not None for one in offers)
    return f", the {'cheapest' if priced else 'fewest'} of {len(offers)} choices that surely suffice"


def _described(offer: Offer) -> str:
    size = offer.size
    sentence = (
        f"{gpus(offer)} process {band(*size.samples_per_s_band)} samples/s at an efficiency of "
        f"{percent(*size.efficiency_band)}"
    )
    return sentence + (f", in {band(*offer.hours_band, unit=' h')}" if offer.hours_band else "")


def _because(question: Question, offer: Offer) -> str:
    """Compare the interval of what was asked with its limit."""
    parts = []
    if "deadline" in offer.answers and offer.hours_band is not None:
        parts.append(f"{band(*offer.hours_band, unit=' h')} for a deadline of {question.deadline_hours:,.4g} h")
    if "budget" in offer.answers and offer.cost_band is not None:
        parts.append(f"a cost of {band(*offer.cost_band)} for a budget of {question.budget:,.8g}")
    if "efficiency" in offer.answers:
        target = 100 * (question.efficiency or 0)
        parts.append(f"an efficiency of {percent(*offer.size.efficiency_band)} for a target of {target:.3g} %")
    return "; ".join(parts)
