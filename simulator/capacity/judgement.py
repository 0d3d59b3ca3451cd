"""Judgement: what predictions mean for a buyer, by one rule and in the same sentences for every command.

Whether a question is answered, which configuration is fastest and which tie with it, what limits an iteration, what
an efficiency needs, whether measured iterations contradict the model, what makes an interval wide, and how often
intervals of other systems held.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import ceil, floor, inf, isfinite, log10
from typing import NamedTuple

from ...reference.files.writing import milliseconds
from ..fabric import Fabric
from ..fabric.extrapolation import USUAL_NODE
from ..fabric.fabric import CHECK_LINKS, OUT_OF_ORDER
from ..inputs_with_default_costs import Inputs
from ..predicted_iteration import SPREAD, Prediction, ties_of
from ..prediction import System
from ..workload.compute_times import LEAST_RECORDED
from .limits import BUCKETS, Limits, Needs, NetworkNeed
from .memory import MemoryUse, Optimizer
from .scaling import LEAST_GAIN, Band, Knee, NextMeasurement, Offer, Question, Size, cheapest, rank_of

HELD = {
    "names alone": "30 of 54",
    "a step, one node": "39 of 39",
    "a step, new clusters": "19 of 22",
    "fewer GPUs": "18 of 24",
}
"""How many published or later measured iterations were in the predicted range, by what was given; the table of
docs/accuracy.md says which."""
SHOWN_SHARE = 0.1
"""Least part of the interval's squared width that is worth a word."""
CENT = 0.01
LARGEST = 3
"""Causes of a limit that are named without details."""
NARROWER = {
    "collectives": "give a log of `all_reduce_perf -b 1M -e 64M` on this network as the fabric, best of as many GPUs",
    "device speeds": "record on several GPUs",
    "slowest rank": f"record {LEAST_RECORDED} iterations or more, on several GPUs",
    "compute times": "measure a step on one GPU: --step-ms, or --measured 1:TIME with a trace or a doubtful step",
    "iterations": "record more iterations on a quiet machine",
    **dict.fromkeys(("copies", "launches", "slow-downs"), "run `ddplab calibrate` on the GPUs"),
    "unexplained": "measure an iteration on a few GPUs",
    SPREAD: "run `ddplab validate` again while nothing else runs",
}
"""How the interval becomes narrower, by what makes it wide."""


def ranking(predictions: Sequence[Prediction]) -> tuple[int, tuple[int, ...]]:
    """Return the place of the fastest prediction, and those of all that tie with it (`ties_of`), fast ones first."""
    order = sorted(range(len(predictions)), key=lambda place: predictions[place].iteration_ns)
    tied = ties_of(predictions)
    return order[0], tuple(place for place in order[1:] if tied[place])


def contradiction_sentence(prediction: Prediction, fabric: Fabric) -> str:
    """Say that measured iterations contradict the model, and what to check; "" if they do not."""
    given = " given the others" if len(prediction.anchors) > 1 else ""
    parts = [
        f"{milliseconds(one.measured_ns, ',.1f')} ms on {gpus(one.world_size)}, predicted "
        f"{milliseconds(one.predicted_ns, ',.1f')} ms ({one.surprise:+.0f} standard deviations{given})"
        for one in prediction.contradictions
    ]
    advice = "check that batch, precision and device are those of the measured run"
    slow = (one.world_size for one in prediction.contradictions if one.measured_ns > OUT_OF_ORDER * one.predicted_ns)
    if any(ranks > 1 and not inside_one_node(fabric, ranks) for ranks in slow):
        advice = f"the network may be out of order: {CHECK_LINKS}"
    return f"the measured iterations contradict the model: {'; '.join(parts)}; {advice}" if parts else ""


def coverage_words(systems: Iterable[tuple[System, int]]) -> str:
    """Say how often ranges held that were predicted from what was given for these systems and numbers of GPUs."""
    given = dict.fromkeys(_given(system.inputs, world_size) for system, world_size in systems)
    counts = "; ".join(f"{kind} {HELD.get(kind, 'not tested')}" for kind in given)
    return f"90 % ranges (held: {counts})"


def _given(inputs: Inputs, world_size: int) -> str:
    if inputs.measured:
        return "fewer GPUs"
    workload, topology = inputs.trace.workload, inputs.fabric.topology
    if workload.device == "cpu" or inputs.fabric.library == "gloo":
        return "processors"
    if workload.compute_bounds != (1.0, 1.0):
        return "a doubtful step" if workload.doubt else "names alone"
    node = USUAL_NODE if topology is None else topology.levels[0].size
    return "a step, one node" if world_size <= node else "a step, new clusters"


def limit_sentence(limits: Limits, *, details: bool = True) -> str:
    """Return what limits an iteration, and how much shorter it would be without each cause.

    Without details, only the largest causes are named.
    """
    whole = max(1, limits.now.iteration_ns)
    if limits.why_unknown:
        return f"limit on {gpus(limits.world_size)}: {limits.limit}, because {limits.why_unknown}"
    shares = sorted(((ns / whole, name) for name, ns in limits.saved_ns.items()), reverse=True)
    causes = [f"{name} {share:.0%}" for share, name in shares if share >= 0.005 and name not in BUCKETS]
    words = ", ".join(causes if details else causes[:LARGEST])
    buckets = ", ".join(f"{name} {share:.0%}" for share, name in shares if share >= 0.015 and name in BUCKETS)
    own = f", {limits.saved_ns[limits.limit] / whole:.0%}" if limits.limit in BUCKETS else ""
    parts = [f"limit on {gpus(limits.world_size)}: {limits.limit}{own}"]
    parts += [f"{'the iteration would be ' * details}shorter without: {words}"] if words else []
    parts += [f"parts of the network's time: {buckets}"] if buckets and details else []
    return "; ".join(parts)


def network_sentence(limits: Limits, need: NetworkNeed) -> str:
    """Return how fast the links must be, if the model explains the measured iterations."""
    if limits.why_unknown:
        return f"which links would suffice does not follow, because {limits.why_unknown}"
    where = inside_one_node(limits.system.inputs.fabric, limits.world_size)
    return f"{_at_the_median(limits, need.target)}{need.sentence()}{where}"


def _at_the_median(limits: Limits, target: float) -> str:
    """Say of what follows for an efficiency that it is for the median, and whether the efficiency itself is open."""
    low, high = limits.now.efficiency_interval
    return f"{f'whether {100 * target:.3g}% is reached is open; ' * (low < target <= high)}at the median, "


def inside_one_node(fabric: Fabric, world_size: int) -> str:
    """Say that these GPUs do not use the network between nodes; "" if they do."""
    levels = () if fabric.topology is None else fabric.topology.levels
    if len(levels) < 2 or world_size > (levels[0].members or 1):
        return ""
    return f"; the network between nodes is not used by {gpus(world_size)} in one node"


def needs_sentence(limits: Limits, needs: Needs, target: float, batch: int, largest: int | None) -> str:
    """Return how far one thing alone must change for an efficiency; `largest` is the largest batch that fits."""
    has = limits.now.efficiency >= target
    asked = f"an efficiency of {100 * target:.3g}% on {gpus(limits.world_size)}"
    if limits.why_unknown:
        return f"{asked}: what it needs does not follow, because {limits.why_unknown}"
    asked = f"{_at_the_median(limits, target)}{asked}"
    parts = []
    if needs.rate is not None and needs.rate.multiple is not None:
        parts.append(needs.rate.links)
    if needs.latency is not None:
        times = f"{needs.latency:,.0f}" if needs.latency >= 100 else f"{needs.latency:.2g}"
        parts.append(f"latencies {times} times as long")
    needed = None if needs.batch is None or has else max(1, round(needs.batch * batch))
    if needed is not None and (largest is None or needed <= largest):
        parts.append(f"a batch of {needed:,} per GPU")
    if needs.accumulated is not None and not has:
        parts.append(f"accumulation over {needs.accumulated} iterations")
    if not parts:
        nothing = ": no rate, latency, batch that fits or accumulation alone suffices"
        return f"{asked}{' is reached' if has else nothing}"
    where = inside_one_node(limits.system.inputs.fabric, limits.world_size)
    one_of = f"{' either' if has else ' one'} of:" if len(parts) > 1 else ""
    return f"{asked} {'would remain with' if has else 'needs'}{one_of} {'; '.join(parts)}{where}"


def measure_sentence(limits: Limits, measure: NextMeasurement, step: str = "--step-ms") -> str:
    """Return what to measure next on GPUs that the buyer has, the cheapest first; "" if nothing narrows the range."""
    if limits.why_unknown:
        return ""
    world_size, message = limits.world_size, limits.message_bytes / 2**20
    sizes = " and ".join(f"{one:,}" for one in measure.world_sizes)
    widths = {
        f"a step on one GPU ({step})": measure.width_with_step,
        f"iterations on {sizes} GPUs (--measured)": measure.width_with_sizes if sizes else None,
        f"all-reduces of {message:.0f} MB on {world_size:,}": measure.width_with_messages,
    }
    now = f"±{measure.width:.0%}"
    after = {what: f"±{width:.0%}" for what, width in widths.items() if width is not None}
    parts = [f"{what}, {width}" for what, width in after.items() if width != now]
    return f"measure next, to narrow {now} on {gpus(world_size)}: {'; '.join(parts)}" if parts else ""


def width_sentence(shares: Mapping[str, float]) -> str:
    """Say what makes an interval wide, by its `Prediction.shares_of_width`, and what to do; "" if nothing does."""
    causes = [f"{cause} ({share:.0%})" for cause, share in shares.items() if share >= SHOWN_SHARE]
    if not causes:
        return ""
    return f"the width of the interval comes from {', '.join(causes)}; to narrow it, {NARROWER[next(iter(shares))]}"


# The answer to the question of a plan


class Verdict(NamedTuple):
    """The answer."""

    answer: str  #: "yes", "no", "open" if an interval is wider than the decision, or "" if nothing was asked
    sentence: str  #: the answer in words
    offer: Offer  #: the offer that the sentence is about


def verdict(question: Question, offers: Sequence[Offer], by_names: Collection[str] = ()) -> Verdict:
    """Answer a question, given the systems and numbers of GPUs among which to choose, at least one.

    What does not fit into a GPU's memory is "no", whatever was asked; what may not fit is never "yes". The answer
    says if no step was measured on a system: those in `by_names`.
    """
    answer = _answered(question, offers, by_names)
    tokens = answer.offer.size.tokens
    length = "" if tokens is None else f"; sequences of {tokens:,} tokens"
    return answer._replace(sentence=f"{answer.sentence}{length}")


def _answered(question: Question, offers: Sequence[Offer], by_names: Collection[str]) -> Verdict:
    if not question.has_target:
        return _fastest_that_fits(offers)
    chosen = cheapest(offers)
    if chosen is not None:
        yes = "yes, by names alone" if chosen.system in by_names else "yes"
        sentence = f"{yes}: {_offered(chosen)}{_among(chosen, offers)}: {_because(question, chosen)}"
        return Verdict("yes", sentence, chosen)
    still_open = [one for one in offers if one.answer == "open"]
    nearest = min(still_open or offers, key=lambda one: (_shortfall(question, one), rank_of(one, offers)))
    if not still_open:
        many = "not enough" if len(offers) == 1 else f"the nearest of {len(offers)} choices, not enough"
        return Verdict("no", f"no: {_offered(nearest)}, {many}: {_because(question, nearest)}", nearest)
    return Verdict("open", f"{_offered(nearest)}: {_because(question, nearest)}", nearest)


def _shortfall(question: Question, offer: Offer) -> float:
    """Return how far an offer is from its limits, as a factor: that of the limit which it misses most.

    The worse end of the range counts if the answer is open, the better end if it is no.
    """
    end = 0 if offer.answer == "no" else 1
    missed = [1.0]
    if question.deadline_hours is not None and offer.hours_band is not None:
        missed.append(offer.hours_band[end] / question.deadline_hours)
    if question.budget is not None and offer.cost_band is not None:
        missed.append(offer.cost_band[end] / question.budget)
    if question.efficiency is not None:
        missed.append(question.efficiency / max(1e-9, offer.size.prediction.efficiency_interval[1 - end]))
    return inf if offer.answers.get("memory") == "no" else max(missed)


def _fastest_that_fits(offers: Sequence[Offer]) -> Verdict:
    """Describe the fastest offer that fits, or else may fit, and how many times faster than other systems it is."""
    best = max(offers, key=_nearness)
    if best.answers.get("memory") == "no":
        return Verdict("no", f"no: {_offered(best)}: {_memory_words(best)}", best)
    sentence = _described(best)
    by_system = {one.system: one for one in sorted(offers, key=_nearness) if one.answers.get("memory") != "no"}
    low, high = best.size.samples_per_s_band
    for name, other in by_system.items():
        if name != best.system:
            slowest, fastest = other.size.samples_per_s_band
            sentence += f"; {low / fastest:.2g} to {high / slowest:.2g} times as many as {_offered(other)}"
    if best.answers.get("memory") == "open":
        sentence += f"; whether it fits is open: {_memory_words(best)}"
    return Verdict("", sentence, best)


def _nearness(offer: Offer) -> tuple[int, float]:
    """Order offers by whether they fit, then by throughput, or by duration: a run has whole iterations."""
    faster = offer.size.samples_per_s if offer.hours is None else -offer.hours
    return ("no", "open", "yes").index(offer.answers.get("memory", "yes")), faster


def _among(chosen: Offer, offers: Sequence[Offer]) -> str:
    """Say how many choices surely suffice, and whether a cheaper or smaller one may."""
    if len(offers) == 1:
        return ", enough"
    many = sum(one.answer == "yes" for one in offers)
    is_priced = all(one.cost is not None for one in offers)
    rank, rather = ("cheapest", "cheaper") if is_priced else ("smallest", "smaller")
    sure = f"the {rank} of {many} choices whose whole range suffices"
    sure = sure if many > 1 else "the only choice whose whole range suffices"
    before = [one for one in offers if one.answer == "open" and rank_of(one, offers) < rank_of(chosen, offers)]
    others = [f"of {len(offers)}"] if many < len(offers) else []
    others += [f"{len(before)} {rather} may suffice"] if before else []
    sure_costs = [one.cost_band for one in offers if one is not chosen and one.answer == "yes"]
    ties = [cost for cost in sure_costs if cost and chosen.cost_band and cost[0] <= chosen.cost_band[1]]
    others += [f"{len(ties)} may cost as little"] if is_priced and ties else []
    return f", {sure}" + (f" ({'; '.join(others)})" if others else "")


def gpus(count: int) -> str:
    """Return a number of GPUs in words."""
    return f"{count:,} GPU{'s' * (count > 1)}"


def _offered(offer: Offer) -> str:
    return f"{gpus(offer.size.world_size)} of {offer.system}"


def knee_sentence(knee: Knee, largest: int) -> str:
    """Return the knee and its band in words; `largest` is the largest number of GPUs that was predicted."""
    adds_less = f"the next step adds less than {LEAST_GAIN:.0%} of its share"
    if knee.world_size is None:
        doubt = f"; given the errors of the costs, {gpus(knee.earliest)} may be the knee" if knee.earliest else ""
        return f"no knee up to {largest:,} GPUs: each step adds at least {LEAST_GAIN:.0%} of its share{doubt}"
    last = f"beyond {largest:,}" if knee.latest is None else f"{knee.latest:,}"
    is_sure = knee.earliest == knee.world_size == knee.latest
    return f"knee at {gpus(knee.world_size)}{'' if is_sure else f' ({knee.earliest:,} to {last})'}: {adds_less}"


def _described(offer: Offer) -> str:
    size = offer.size
    verb = "processes" if size.world_size == 1 else "process"
    efficiency = percent(*size.prediction.efficiency_interval)
    unit, rates = throughput(size)
    sentence = f"{_offered(offer)} {verb} {band(*rates)} {unit}/s at an efficiency of {efficiency}"
    if offer.hours_band is not None:
        return f"{sentence}, in {duration(*offer.hours_band)}"
    return sentence + (f", for {band(*offer.cost_band)} {cost_unit(offer)}" if offer.cost_band else "")


def throughput(size: Size) -> tuple[str, Band]:
    """Return what is counted in a second, tokens or samples, and both ends of the interval of how many."""
    low, high = size.samples_per_s_band
    return ("samples", (low, high)) if size.tokens is None else ("tokens", (size.tokens * low, size.tokens * high))


def cost_unit(offer: Offer) -> str:
    """Return the unit of an offer's cost, such as USD, or USD per million tokens if no samples were asked for."""
    return f"{offer.currency}" if offer.hours is not None else f"{offer.currency}/M {throughput(offer.size)[0]}"


def cost(offer: Offer, *, limit: float | None = None) -> str:
    """Return the cost of an offer; that of a run has figures from a cent on, or if its limit is less."""
    low, high = offer.cost_band or (inf, inf)
    words = "-" if low == inf else band(low, high, limit=limit)
    is_exact = low >= CENT or offer.hours is None or (limit or CENT) < CENT
    return words if is_exact else f"<{CENT}" + f"-{words.rpartition('-')[2]}" * (high >= CENT)


def _because(question: Question, offer: Offer) -> str:
    """Compare the interval of what was asked with its limit; of a "no", only what is missed."""
    parts = []
    told = {name for name, answer in offer.answers.items() if offer.answer != "no" or answer != "yes"}
    if "deadline" in told and offer.hours_band is not None:
        deadline = question.deadline_hours or 0.0
        words = f"{deadline:,.4g} h" if deadline >= 0.1 else duration(deadline, deadline)
        parts.append(f"{duration(*offer.hours_band, limit=deadline)} for a deadline of {words}")
    if "budget" in told and offer.cost_band is not None:
        costs = f"a cost of {cost(offer, limit=question.budget)} {offer.currency}"
        parts.append(f"{costs} for a budget of {question.budget:,.8g}")
    if "efficiency" in told:
        has = percent(*offer.size.prediction.efficiency_interval, limit=question.efficiency)
        parts.append(f"an efficiency of {has} for a target of {100 * (question.efficiency or 0):.3g} %")
    if offer.answers.get("memory", "yes") != "yes":
        parts.append(_memory_words(offer))
    return "; ".join(parts)


def _memory_words(offer: Offer) -> str:
    """Say what memory an offer needs of what a GPU has, by optimiser, and what fits instead."""
    by_answer: dict[str, list[Optimizer]] = {"fits": [], "unknown": [], "does not fit": []}
    for name, use in offer.memory.items():
        by_answer[use.answer].append(name)
    one = (by_answer["unknown"] or by_answer["does not fit"][:1])[-1]  # as in `memory_sentence`
    parts = [f"needs {memory_needed(offer.memory[one])} with {one}"]
    if offer.answers["memory"] == "no":
        of_each = " with each optimizer" if len(offer.memory) > 1 else ""
        return f"{parts[0]}; what fits{of_each}: {', '.join(offer.instead)}"
    parts += [f"{word} with {' or '.join(by_answer[word])}" for word in ("fits", "does not fit") if by_answer[word]]
    return ", ".join(parts)


def memory_sentence(memory: Mapping[Optimizer, MemoryUse]) -> str:
    """Return whether training fits, by optimiser, with the figures of the one that decides for all named with it."""
    by_answer: dict[str, list[Optimizer]] = {}
    for name, use in memory.items():
        by_answer.setdefault(use.answer, []).append(name)
    parts = []
    for answer, names in by_answer.items():
        use = memory[names[0 if answer == "does not fit" else -1]]
        many = use.largest_batch if answer == "fits" else None
        largest = f"; {many:,} sample{'s certainly do' if many > 1 else ' certainly does'}" if many else ""
        parts.append(f"{answer} with {', '.join(names)} ({memory_needed(use)}{largest})")
    return f"memory: {'; '.join(parts)}"


def memory_needed(use: MemoryUse) -> str:
    """Return the memory that training needs, and what a GPU has, in words such as 96 to 127 GB of 84.6 GB."""
    low, high = use.band_bytes
    needed = f"{low / 1e9:.1f} or more" if high is None else f"{low / 1e9:.1f} to {high / 1e9:.1f}"
    has = "an unknown memory" if use.capacity_bytes is None else f"{use.capacity_bytes / 1e9:.1f} GB"
    return f"{needed} of {has}"


# Numbers in words, with no more digits than their interval carries
#
# The rule is that of the Particle Data Group ("Review of Particle Physics", Introduction, section 5.3): two digits of
# an error are shown if its first three digits are at most 354, else one. The error is half of the interval's width.


MOST_DIGITS = 3
"""Significant digits of a number whose interval is narrower than they show."""
LEAST_STEP = 0.01
"""The smallest last place of a number beside a limit, as a part of the distance between the two."""
TWO_DIGITS = 3.55
"""First digits of an error, as a number from 1 to 10, below which two digits of it are shown."""


def carried(value: float, low: float, high: float) -> str:
    """Return a number, rounded to the last digit that its interval carries."""
    return _written(value, _step(low, high, value), round)


def band(low: float, high: float, *, unit: str = "", limit: float | None = None) -> str:
    """Return an interval in words, such as 9,300-12,900; its ends, at least 0, are rounded outwards, as `carried`.

    Rounding carries no end to the `limit` with which the interval is compared, or beyond it.
    """
    first, last = (
        _written(end, _step_beside(limit, end, _step(low, high, end), rounded), rounded)
        for end, rounded in ((low, floor), (high, ceil))
    )
    return (first if first == last else f"{first}-{last}") + unit


def duration(low: float, high: float, *, limit: float | None = None) -> str:
    """Return an interval of hours in words, in a unit in which its end has few zeros; `limit` as for `band`."""
    unit, count = ("h", 1) if high >= 0.1 else ("min", 60) if 60 * high >= 0.1 else ("s", 3600)
    return band(count * low, count * high, unit=f" {unit}", limit=limit and count * limit)


def percent(low: float, high: float, *, limit: float | None = None) -> str:
    """Return an interval of fractions in percent; `limit` as for `band`."""
    return band(100 * low, 100 * high, unit=" %", limit=limit and 100 * limit)


def _step(low: float, high: float, value: float) -> float:
    """Return the value of the last place to show of a number in this interval; it has one digit at least."""
    first = 10.0 ** floor(log10(value)) if value > 0 and isfinite(value) else 0.0
    width = (high - low) / 2
    place = 10.0 ** floor(log10(width)) if width > 0 and isfinite(width) else 0.0
    if width < TWO_DIGITS * place:
        place /= 10
    return min(first, max(place, first / 10 ** (MOST_DIGITS - 1))) or place or 1.0


def _step_beside(limit: float | None, value: float, step: float, rounded: Callable[[float], int]) -> float:
    """Return the step, or one so much smaller that the value, rounded to it, stays on its side of the limit."""
    while limit is not None and isfinite(value) and step > LEAST_STEP * abs(value - limit) > 0:
        if (value - limit) * (rounded(round(value / step, 6)) * step - limit) > 0:
            break
        step /= 10
    return step


def _written(value: float, step: float, rounded: Callable[[float], int]) -> str:
    if not isfinite(value):
        return "unlimited"
    whole = rounded(round(value / step, 6))  # a quotient such as 8.999999999 is 9
    return f"{whole * step:,.{max(0, -floor(log10(step) + 1e-9))}f}"
