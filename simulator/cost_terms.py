"""Terms of the model: what each adds to a prediction, where its value comes from, and how to leave it out."""

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, NamedTuple

from ..reference.trace import Trace
from .fabric import Fabric, Linear
from .predicted_iteration import Prediction
from .prediction import predict
from .schedule.policy import Policy
from .workload.default_gpu_costs import assume_gpu
from .workload.variation import RECORDED, Variation

NEXT_TO_NOTHING = 1e-6
"""`scale` of a fabric whose collectives are left out: the least that it may be."""


class Inputs(NamedTuple):
    """What a prediction computes from, beside the trace."""

    fabric: Fabric
    variation: Variation
    policy: Policy

    def with_processor(self, **changed: object) -> "Inputs":
        """Return a copy with these processor costs changed."""
        return self._replace(fabric=self.fabric.with_processor(**changed))

    def with_variation(self, **changed: object) -> "Inputs":
        """Return a copy with these fields of the variation changed."""
        return self._replace(variation=self.variation.model_copy(update=changed))


class Term(NamedTuple):
    """A term of the model.

    Attributes:
        without: Returns the inputs of a prediction without the term.
        causes: Causes of the interval's width that come from the term; see `Prediction.causes_ns`.
        evidence: The source of its usual value.
    """

    without: Callable[[Inputs], Inputs]
    causes: tuple[str, ...]
    evidence: str


TERMS = {
    "collectives": Term(
        lambda inputs: inputs._replace(fabric=inputs.fabric.model_copy(update={"scale": NEXT_TO_NOTHING})),
        ("collectives",),
        "the fabric; for described links, NCCL's own cost model and logs of nccl-tests of eight systems",
    ),
    "buffers": Term(
        lambda inputs: inputs._replace(policy=inputs.policy.model_copy(update={"broadcast_buffers": False})),
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
}
"""The terms by name, from the network to the ranks."""


class Effect(NamedTuple):
    """What a term does to a prediction.

    Attributes:
        term: Its name in `TERMS`.
        adds_ns: The median iteration minus that without the term. Terms overlap in time, so the sum over all terms
            is not the time that data parallelism adds.
        origin: See `origins`.
        width: Part of the interval's squared width that comes from the term, from 0 to 1.
        evidence: The source of its usual value, if that was assumed.
    """

    term: str
    adds_ns: int
    origin: str
    width: float
    evidence: str


def leave_out(names: Iterable[str], inputs: Inputs) -> Inputs:
    """Return the inputs of a prediction without these terms.

    Raises:
        ValueError: A name is not in `TERMS`.
    """
    names = list(names)
    if unknown := [name for name in names if name not in TERMS]:
        raise ValueError(f"expected some of {', '.join(TERMS)}; got {', '.join(unknown)}")
    return reduce(lambda rest, name: TERMS[name].without(rest), names, inputs)


def origins(trace: Trace, given: Inputs, used: Inputs, world_size: int) -> dict[str, str]:
    """Return where each value of a prediction comes from, by term and for `computation`.

    An origin is "measured", "described" (by the user, or by a data sheet), "extrapolated" from measured world sizes,
    "assumed", or "none" if the term has no effect.

    Args:
        trace: The trace.
        given: What the user gave.
        used: The same, completed by `assume_gpu`.
        world_size: Number of ranks.
    """
    known = used.fabric.origin(world_size)
    found = {"computation": "measured" if trace.workload.compute_bounds == (1.0, 1.0) else "assumed"}
    for name, term in TERMS.items():
        if term.without(used) == used:
            found[name] = "none"
        elif name in ("collectives", "buffers"):
            found[name] = known
        elif name in ("device_spread", "jitter"):
            before, after = getattr(given.variation, name), getattr(used.variation, name)
            found[name] = "assumed" if before != after else "measured" if after is None else "described"
        elif term.without(given) == given:
            found[name] = "assumed"
        else:
            found[name] = "measured" if used.fabric.all_reduce else "described"
    if not trace.workload.buffers:
        found["buffers"] = "none"
    return found


def explain(
    trace: Trace,
    fabric: Fabric,
    *,
    world_size: int,
    policy: Policy | None = None,
    variation: Variation = RECORDED,
    without: Iterable[str] = (),
    **settings: Any,
) -> list[Effect]:
    """Predict an iteration without each of its terms in turn.

    Args:
        trace: As for `predict`.
        fabric: As for `predict`; on a GPU, costs that it does not have take their usual values.
        world_size: As for `predict`.
        policy: As for `predict`. None: the default settings.
        variation: As for `predict`.
        without: Terms to leave out of all predictions.
        settings: Further arguments of `predict`, but no fields of `Policy`.

    Returns:
        One row for each term that has an effect on the inputs, in the order of `TERMS`.

    Raises:
        ValueError: As for `predict`, or a term to leave out is not known.
    """
    given = Inputs(fabric, variation, policy or Policy())
    completed = assume_gpu(trace, fabric, variation)
    used = leave_out(without, Inputs(completed.fabric, completed.variation, given.policy))

    def predicted(inputs: Inputs) -> Prediction:
        how = {"policy": inputs.policy, "variation": inputs.variation, "assume": False, **settings}
        return predict(trace, inputs.fabric, world_size=world_size, **how)

    whole, origin_of = predicted(used), origins(trace, given, used, world_size)
    return [
        Effect(
            term=name,
            adds_ns=whole.iteration_ns - predicted(term.without(used)).iteration_ns,
            origin=origin_of[name],
            width=sum(whole.shares_of_width.get(cause, 0.0) for cause in term.causes),
            evidence=term.evidence if origin_of[name] == "assumed" else "",
        )
        for name, term in TERMS.items()
        if origin_of[name] != "none"
    ]
