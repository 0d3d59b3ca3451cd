"""Plan: how many of which GPU on which network; what limits them, what they cost, and what to measure next."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, Any, Unpack

from pydantic import Field, InstanceOf

from ...reference.trace import Trace
from ..argument_checks import Listed, Measured, Ranks, Stragglers, checked, one_or_several
from ..cost_terms import origins
from ..fabric import Fabric
from ..inputs_with_default_costs import complete
from ..prediction import System
from ..schedule.policy import Policy, PolicySettings
from ..workload.trace_synthesis import batches_of
from ..workload.variation import RECORDED, Variation
from .judgement import Verdict, contradiction_sentence, verdict, width_sentence
from .limits import TARGET, Change, Limits, Needs
from .memory import MemoryUse, Optimizer, memory_use, optimizers_of, remedies
from .scaling import NextMeasurement, Offer, Price, Question, Scaling, cheapest, fastest, front, offer_of

Several = Mapping[str, Any]
Fraction = Annotated[float, Field(gt=0, le=1)]
Amount = Annotated[float, Field(gt=0, le=1e18, allow_inf_nan=False)]


@dataclass(frozen=True)
class SystemPlan:
    """The plan of one system. What is computed when it is first asked for takes up to a few dozen predictions."""

    scaling: Scaling  #: the predictions by number of GPUs
    offers: tuple[Offer, ...]  #: the same with duration, cost and answers
    at: int  #: number of GPUs on which limits, changes and next measurements are computed
    target: float  #: the efficiency of `needs`

    @property
    def name(self) -> str:
        """Name of the system."""
        return self.scaling.system.name

    @cached_property
    def limits(self) -> Limits:
        """What limits the system."""
        return Limits(self.scaling.system, self.at)

    @cached_property
    def needs(self) -> Needs:
        """How far one thing alone must change for the target efficiency."""
        return self.limits.needs(self.target)

    @cached_property
    def changes(self) -> list[Change]:
        """What other settings would give, the fastest first."""
        return self.limits.changes()

    @cached_property
    def next_measurement(self) -> NextMeasurement:
        """What to measure next."""
        return self.scaling.next_measurement(self.at)

    @property
    def memory(self) -> Mapping[Optimizer, MemoryUse]:
        """What training holds on each GPU, and whether it fits, by the optimisers that may be used."""
        return next(one.memory for one in self.offers if one.size.world_size == self.at)

    @property
    def sensitivity(self) -> str:
        """What makes the interval wide, in words; "" if it is that measured iterations contradict the model."""
        prediction = self.scaling.system.at(self.at)
        return "" if prediction.contradictions else width_sentence(prediction.shares_of_width)

    def to_json(self) -> dict[str, Any]:
        """Return the plan of the system as part of `CapacityPlan.to_json`."""
        inputs, prediction = self.scaling.system.inputs, self.scaling.system.at(self.at)
        rate = self.needs.rate
        measure, whole_ns = self.next_measurement, max(1, prediction.iteration_ns)
        return {
            "system": self.name,
            "model": inputs.trace.workload.model,
            "device": inputs.trace.workload.device_name,
            "fabric": inputs.fabric.source,
            "batch": self.scaling.batch,
            "tokens": inputs.trace.workload.tokens,
            "total_batch": self.scaling.total_batch,
            "knee": self.scaling.knee.world_size,
            "knee_earliest": self.scaling.knee.earliest,
            "knee_latest": self.scaling.knee.latest,
            "at": self.at,
            "contradiction": contradiction_sentence(prediction, inputs.fabric),
            "limit": self.limits.limit,
            "saved_ns": self.limits.saved_ns,
            "breakdown_ns": prediction.breakdown,
            "target_efficiency": self.target,
            "needed_rate_multiple": None if rate is None else rate.multiple,
            "needed_bus_gb_per_s": None if rate is None else rate.needed_gb_per_s,
            "bus_gb_per_s": None if rate is None else rate.bus_gb_per_s,
            "message_bytes": None if rate is None else rate.message_bytes,
            "needed_latency_multiple": self.needs.latency,
            "needed_batch_multiple": self.needs.batch,
            "needed_accumulation": self.needs.accumulated,
            "changes": [one._asdict() | {"ratio": one.iteration_ns / whole_ns} for one in self.changes],
            "fits": {name: use.answer for name, use in self.memory.items()},
            "memory": {name: asdict(use) | {"band_bytes": list(use.band_bytes)} for name, use in self.memory.items()},
            "shares_of_width": prediction.shares_of_width,
            "sensitivity": self.sensitivity,
            "measure_world_sizes": list(measure.world_sizes),
            **{name: width for name, width in measure._asdict().items() if name != "world_sizes"},
            "origins": origins(inputs, self.at),
            "assumed": list(prediction.assumed),
        }


@dataclass(frozen=True)
class CapacityPlan:
    """How many of which GPU on which network."""

    question: Question  #: what was asked
    systems: tuple[SystemPlan, ...]  #: the plan of each system
    asked: tuple[Offer, ...]  #: the offers that the verdict is about
    verdict: Verdict  #: the answer in a sentence; its `answer` is "open" if an interval is wider than the decision
    prices: tuple[Price, ...] = ()  #: the prices of the systems that have one

    @property
    def offers(self) -> list[Offer]:
        """Every system on every number of GPUs."""
        return [offer for one in self.systems for offer in one.offers]

    @property
    def front(self) -> list[Offer]:
        """The asked offers that may suffice, and than which no other is faster and cheaper, the fastest first."""
        return front(self.asked)

    @property
    def cheapest(self) -> Offer | None:
        """The cheapest of the asked offers that surely keep all limits; without prices, the one with fewest GPUs."""
        return cheapest(self.asked) if self.question.has_target else None

    @property
    def fastest(self) -> Offer | None:
        """The fastest of the asked offers that surely keep all limits."""
        return fastest(self.asked) if self.question.has_target else None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON document; docs/predict.md describes the fields.

        Times of iterations are in nanoseconds, those of a run in hours, efficiencies are fractions.
        """
        on_front = {(one.system, one.size.world_size) for one in self.front}
        return {
            "question": self.question._asdict(),
            "currency": self.prices[0].currency if self.prices else None,
            "prices": [price.model_dump(mode="json") for price in self.prices],
            "answer": self.verdict.answer,
            "verdict": self.verdict.sentence,
            "cheapest": _named(self.cheapest),
            "fastest": _named(self.fastest),
            "sizes": [
                _offer_json(offer, one.scaling) | {"on_front": (one.name, offer.size.world_size) in on_front}
                for one in self.systems
                for offer in one.offers
            ],
            "systems": [one.to_json() for one in self.systems],
        }


def _named(offer: Offer | None) -> dict[str, Any] | None:
    return None if offer is None else {"system": offer.system, "world_size": offer.size.world_size}


def _offer_json(offer: Offer, scaling: Scaling) -> dict[str, Any]:
    size, prediction = offer.size, offer.size.prediction
    figures = {
        "iteration_ns": (prediction.iteration_ns, prediction.interval_ns),
        "efficiency": (prediction.efficiency, prediction.efficiency_interval),
        "samples_per_s": (size.samples_per_s, size.samples_per_s_band),
        "mfu": (size.mfu, size.mfu_band),
        "hours": (offer.hours, offer.hours_band),
        "cost": (offer.cost, offer.cost_band),
    }
    row: dict[str, Any] = {
        "system": offer.system,
        "world_size": size.world_size,
        "compute_ns": prediction.compute_ns,
        "exposed_comm_ns": prediction.exposed_comm_ns,
    }
    for name, (value, both) in figures.items():
        row[name] = value
        row[f"{name}_low"], row[f"{name}_high"] = both or (None, None)
    answers = {f"answer_{name}": offer.answers.get(name) for name in ("deadline", "budget", "efficiency", "memory")}
    return {**row, "strong_samples_per_s": scaling.strong_samples_per_s(size.world_size), **answers}


@checked
def plan(
    trace: Annotated[Trace | Mapping[str, Trace], one_or_several(Trace)],
    fabric: Annotated[Fabric | Mapping[str, Fabric], one_or_several(Fabric)],
    *,
    world_sizes: Annotated[Sequence[Ranks], Listed],
    asked: Annotated[Sequence[Ranks], Listed] | None = None,
    batch: Annotated[int, Field(ge=1)] | None = None,
    total_batch: Annotated[int, Field(ge=1)] | None = None,
    samples: Amount | None = None,
    deadline_hours: Amount | None = None,
    budget: Amount | None = None,
    efficiency: Fraction | None = None,
    prices: Sequence[InstanceOf[Price]] = (),
    optimizer: Optimizer | None = None,
    policy: InstanceOf[Policy] | None = None,
    variation: InstanceOf[Variation] = RECORDED,
    stragglers: Stragglers = (),
    measured: Measured | None = None,
    assume: bool = True,
    rebatched: Mapping[str, Callable[[float], Any]] | None = None,
    **settings: Unpack[PolicySettings],
) -> CapacityPlan:
    """Plan a training run: throughput and efficiency by number of GPUs, the knee, limits, costs and measurements.

    A *system* is a trace on a fabric. All numbers of GPUs have the same batch on each GPU (weak scaling); the
    throughput with a fixed total is given beside.

    Args:
        trace: The trace of all systems, or one for each by name.
        fabric: The fabric of all systems, or one for each by name. If both are several, they have the same names.
        world_sizes: Numbers of GPUs to predict; the knee is looked for among them.
        asked: Numbers of GPUs that the question is about. None: all of `world_sizes`.
        batch: Samples per GPU and iteration of the traces. None: as the trace says, or 1 if it does not.
        total_batch: Samples on all GPUs and iteration for strong scaling. None: those on the fewest GPUs.
        samples: Samples to train on, over all epochs.
        deadline_hours: Longest duration of the training.
        budget: Largest cost, in the currency of the prices.
        efficiency: Least efficiency that is asked for; 0.9 where improvements are computed, if None.
        prices: Prices of the systems by name; see `cost.read_prices`.
        optimizer: Whose states the memory contains: "sgd", "momentum", "adam" or, with states and a copy of the
            parameters in float32, "adam-fp32". None: not known, so that training fits only if it does with each.
        policy: As for `predict`.
        variation: As for `predict`.
        stragglers: Slow ranks; those that a number of GPUs does not have are left out there.
        measured: As for `predict`; for one system.
        assume: As for `predict`.
        rebatched: By system, a function that returns the trace with a multiple of its batch. None, or another
            system: the times of forward and backward pass are in proportion to the batch.
        settings: Fields of `Policy`, as for `predict`.

    Raises:
        ValueError: As for `predict`; the names of traces and fabrics differ; no numbers of GPUs; measured times of
            several systems; a deadline or budget without `samples`, or a budget without the price of a system.
        TypeError: A keyword argument is not a field of `Policy`.
    """
    policy = Policy.given(policy, settings)
    question = Question(samples, deadline_hours, budget, efficiency)
    pairs = _paired(trace, fabric)
    by_system = {price.system: price for price in prices}
    if not world_sizes or not pairs or asked == []:
        raise ValueError(
            "world_sizes: expected at least one number of GPUs that all systems can have, and a system, got none"
        )
    if measured and len(pairs) > 1:
        raise ValueError(f"measured: expected one system, that of the measured runs, got {len(pairs)}; plan it alone")
    _check(question, {name: one for name, (one, _) in pairs.items()}, batch, by_system)
    sizes = sorted({*world_sizes, *(asked or ())})
    chosen = set(asked or sizes)
    systems = []
    for name, (one_trace, one_fabric) in pairs.items():
        how: dict[str, Any] = {"stragglers": stragglers, "measured": measured, "assume": assume}
        inputs = complete(one_trace, one_fabric, policy=policy, variation=variation, **how)
        system = System(inputs, name, (rebatched or {}).get(name) or batches_of(one_trace))
        each = batch or one_trace.workload.batch or 1
        scaling = Scaling(system, sizes, each, total_batch or each * sizes[0])
        price, used = by_system.get(name), optimizers_of(one_trace, optimizer)
        memory = {
            shards: {one: memory_use(one_trace, policy, one, shards) for one in used}
            for shards in set(map(policy.shards_on, sizes))
        }
        offers = []
        for one in scaling.sizes:
            offer = offer_of(name, one, question, price, memory[policy.shards_on(one.world_size)])
            if offer.answers.get("memory") == "no":
                offer = offer._replace(instead=remedies(one_trace, policy, used, one.world_size))
            offers.append(offer)
        systems.append((scaling, tuple(offers)))
    about = tuple(offer for _, offers in systems for offer in offers if offer.size.world_size in chosen)
    given = {one.system.name: one.system.inputs.trace.workload for one, _ in systems if not measured}
    by_names = [name for name, of in given.items() if of.compute_bounds != (1.0, 1.0) and not of.doubt]
    answer = verdict(question, about, by_names)
    decided = answer.offer if answer.answer else None
    return CapacityPlan(
        question=question,
        systems=tuple(
            SystemPlan(scaling, offers, at=_studied(scaling, chosen, decided), target=efficiency or TARGET)
            for scaling, offers in systems
        ),
        asked=about,
        verdict=answer,
        prices=tuple(by_system[name] for name in pairs if name in by_system),
    )


def _studied(scaling: Scaling, asked: set[int], answer: Offer | None) -> int:
    """Return the number of GPUs whose limits are computed: that of the question, or the one after the knee."""
    sizes = list(scaling.world_sizes)
    if len(asked) == 1:
        return next(iter(asked))
    if answer is not None:
        return answer.size.world_size
    knee = scaling.knee.world_size
    return sizes[-1] if knee is None else sizes[sizes.index(knee) + 1]


def _paired(trace: Trace | Several, fabric: Fabric | Several) -> dict[str, tuple[Trace, Fabric]]:
    if isinstance(trace, Trace):
        fabrics = {fabric.source or trace.workload.model: fabric} if isinstance(fabric, Fabric) else fabric
        return {name: (trace, one) for name, one in fabrics.items()}
    if isinstance(fabric, Fabric):
        return {name: (one, fabric) for name, one in trace.items()}
    if trace.keys() != fabric.keys():
        raise ValueError(f"trace: expected the names of the fabrics, {sorted(fabric)}, got {sorted(trace)}")
    return {name: (one, fabric[name]) for name, one in trace.items()}


def _check(question: Question, traces: Mapping[str, Trace], batch: int | None, prices: Mapping[str, Price]) -> None:
    for name in ("deadline_hours", "budget"):
        if getattr(question, name) is not None and question.samples is None:
            raise ValueError(f"{name}: expected `samples` with it, the samples to train on, got none")
    if question.budget is not None and (missing := [name for name in traces if name not in prices]):
        raise ValueError(f"budget: expected a price of every system, got none of {', '.join(missing)}")
    for name, trace in traces.items():
        if question.samples is not None and batch is None and trace.workload.batch is None:
            cure = "a callable may take `batch`, or its loss may have `.batch`; of a trace, give it (--batch)"
            raise ValueError(f"samples: expected a known batch of {trace.workload.model} on {name}, got none; {cure}")
    if len(currencies := {price.currency for price in prices.values()}) > 1:
        raise ValueError(f"prices: expected one currency, got {', '.join(sorted(currencies))}")
