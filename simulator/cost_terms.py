"""Terms of the model: what each adds to a prediction, where its value comes from, and how to leave it out."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Annotated, NamedTuple

from pydantic import InstanceOf

from ..reference.trace import Trace
from .argument_checks import Batches, Listed, Ranks, Stragglers, checked
from .fabric import Fabric, Linear
from .inputs_with_default_costs import Inputs, complete, costs_sentence, spread_sentence
from .prediction import predicted
from .schedule.policy import Policy
from .workload.variation import RECORDED, Variation

NEXT_TO_NOTHING = 1e-6
"""`scale` of a fabric whose collectives are left out: the least that it may be."""


class Term(NamedTuple):
    """A term of the model."""

    without: Callable[[Inputs], Inputs]  #: returns the inputs of a prediction without the term
    causes: tuple[str, ...]  #: causes of the interval's width that come from the term; see `Prediction.causes_ns`
    evidence: str  #: the source of its usual value


TERMS = {
    "collectives": Term(
        lambda inputs: inputs._replace(fabric=inputs.fabric.model_copy(update={"scale": NEXT_TO_NOTHING})),
        ("collectives",),
        "the fabric; for described links, NCCL's own cost model and logs of nccl-tests of eight systems",
    ),
    "buffers": Term(
        lambda inputs: inputs.with_policy(broadcast_buffers=False),
        (),
        "the trace's buffers, which rank 0 broadcasts before each forward pass",
    ),
    "copies": Term(
        lambda inputs: inputs.with_processor(pack=Linear(), copy_out=Linear()),
        ("copies",),
        "a profile of DDP on 2 A100s (HolisticTraceAnalysis)",
    ),
    "launches": Term(
        lambda inputs: inputs.with_processor(launch_ns=0),
        ("launches",),
        "DDP on 1 V100 with few and many buckets (pytorch/pytorch, benchmarks/distributed/ddp)",
    ),
    "stalls": Term(
        lambda inputs: inputs.with_processor(stall_ns=0),
        (),  # the error of launches is that of both
        "DDP on 2 to 16 V100s with few and many buckets (pytorch/pytorch, benchmarks/distributed/ddp)",
    ),
    "slow_downs": Term(
        lambda inputs: inputs.with_processor(slow_down=1.0, slow_down_error=0.0),
        ("slow-downs",),
        "computation beside collectives on A100, H100, MI210 and MI250 (arXiv 2507.03114)",
    ),
    "device_spread": Term(
        lambda inputs: inputs.with_variation(device_spread=0.0),
        ("device speeds",),
        "speeds of GPUs of one model in five clusters (arXiv 2208.11035)",
    ),
    "jitter": Term(
        lambda inputs: inputs.with_variation(jitter=0.0),
        ("slowest rank", "iterations"),
        "iterations of one GPU in training (ByteDance-Seed/StragglerAnalysis)",
    ),
    "stragglers": Term(lambda inputs: inputs._replace(stragglers=()), (), "the slow ranks that were given"),
}
"""The terms by name, from the network to the ranks."""

SLOW_RANKS = ("device_spread", "jitter", "stragglers")
"""Terms that slow some ranks down."""
TERMS_OF_PARTS = {
    **dict.fromkeys(("unsynchronized", "forward", "backward", "optimizer", "stragglers"), SLOW_RANKS),
    "copies": ("buffers", "copies"),
    "launch": ("launches", "stalls"),
    "slowdown": ("slow_downs",),
    "exposed_comm": ("collectives", "buffers"),
}
"""Terms that lengthen a part of `Prediction.breakdown`. Settings, and measured iterations, give the other parts."""


class Effect(NamedTuple):
    """What a term does to a prediction."""

    term: str  #: its name in `TERMS`
    adds_ns: int
    """The median iteration minus that without the term. Terms overlap in time, so the sum over all terms is not the
    time that data parallelism adds."""
    origin: str  #: see `origins`
    width: float  #: part of the interval's squared width that comes from the term, from 0 to 1
    evidence: str  #: the source of its usual value, if that was assumed


def leave_out(names: Iterable[str], inputs: Inputs) -> Inputs:
    """Return the inputs of a prediction without these terms.

    Raises:
        ValueError: A name is not in `TERMS`.
    """
    names = list(names)
    if unknown := [name for name in names if name not in TERMS]:
        raise ValueError(f"expected some of {', '.join(TERMS)}; got {', '.join(unknown)}")
    rest = reduce(lambda rest, name: TERMS[name].without(rest), names, inputs)
    told = [
        (costs_sentence(one.trace, one.fabric.processor), spread_sentence(one.given[1], one.variation))
        for one in (inputs, rest)
    ]
    words = dict(zip(*told, strict=True))  # what was left out is not assumed
    return rest._replace(assumed=tuple(word for one in inputs.assumed if (word := words.get(one, one))))


def origins(inputs: Inputs, world_size: int, *others: Inputs) -> dict[str, str]:
    """Return where each value of a prediction comes from, by term and for `computation`.

    An origin is "measured", "described" (by the user, or by a data sheet), "extrapolated" from measured world sizes,
    "assumed", or "none" if the term has no effect. What is assumed may have it in one of `others`, of other settings.
    """
    known, workload = inputs.fabric.origin(world_size), inputs.trace.workload
    fabric, variation = inputs.given
    given = inputs._replace(fabric=fabric, variation=variation)

    def ends_ns(one: Inputs) -> tuple[int, ...]:
        return (made := predicted(one, world_size)).iteration_ns, *made.interval_ns

    found = {"computation": "measured" if workload.compute_bounds == (1.0, 1.0) or workload.doubt else "assumed"}
    for name, term in TERMS.items():
        if term.without(inputs) == inputs or (name == "buffers" and not workload.buffers):
            found[name] = "none"
        elif name in ("collectives", "buffers"):
            found[name] = known
        elif name in ("device_spread", "jitter"):
            before, after = getattr(variation, name), getattr(inputs.variation, name)
            found[name] = "assumed" if before != after else "measured" if after is None else "described"
        elif term.without(given) == given:
            found[name] = "assumed"
        else:
            found[name] = "measured" if inputs.fabric.all_reduce and name != "stragglers" else "described"
        if found[name] == "assumed" and all(ends_ns(one) == ends_ns(term.without(one)) for one in (inputs, *others)):
            found[name] = "none"
    return found


def assumed_with_effect(inputs: Inputs, origins: Mapping[str, str]) -> tuple[str, ...]:
    """Return what is assumed of the terms that have an effect, by their `origins`."""
    return leave_out([name for name, origin in origins.items() if origin == "none"], inputs).assumed


@checked
def explain(
    trace: InstanceOf[Trace],
    fabric: InstanceOf[Fabric],
    *,
    world_size: Ranks,
    policy: InstanceOf[Policy] | None = None,
    variation: InstanceOf[Variation] = RECORDED,
    without: Annotated[Sequence[str], Listed] = (),
    stragglers: Stragglers = (),
    inputs: Batches | None = None,
) -> list[Effect]:
    """Predict an iteration without each of its terms in turn, and in all predictions without those in `without`.

    The other arguments are those of `predict`. On a GPU, costs that the fabric does not have take their usual values.

    Returns:
        One row for each term that has an effect on the inputs, in the order of `TERMS`.

    Raises:
        ValueError: As for `predict`, or a term to leave out is not known.
    """
    given = complete(trace, fabric, policy=policy, variation=variation, stragglers=stragglers, inputs=inputs)
    return effects(leave_out(without, given), world_size)


def effects(inputs: Inputs, world_size: int) -> list[Effect]:
    """Do as `explain`, with complete inputs."""
    whole, origin_of = predicted(inputs, world_size), origins(inputs, world_size)
    return [
        Effect(
            term=name,
            adds_ns=whole.iteration_ns - predicted(term.without(inputs), world_size).iteration_ns,
            origin=origin_of[name],
            width=sum(whole.shares_of_width.get(cause, 0.0) for cause in term.causes),
            evidence=term.evidence if origin_of[name] == "assumed" else "",
        )
        for name, term in TERMS.items()
        if origin_of[name] != "none"
    ]
