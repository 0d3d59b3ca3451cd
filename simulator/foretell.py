"""Foretell: what is said of target runs before they are made; from a trace and a fabric, and nothing else."""

from collections.abc import Sequence
from functools import cache

from reference.trace import Trace

from .fabric import Fabric, Processor
from .iteration.comm_hook import named_hook
from .iteration.policy import Policy
from .prediction import Prediction, predict_policy
from .report import Configuration, Foretold, Reference


def policy_of(configuration: Configuration) -> Policy:
    """What the reducer is told in that configuration."""
    return Policy(bucket_cap_mb=configuration.cap_mb, order=configuration.order, hook=named_hook(configuration.hook))


def predict_one(trace: Trace, fabric: Fabric, configuration: Configuration, world_size: int) -> Prediction:
    """The prediction for one configuration."""
    return predict_policy(trace, fabric, world_size, policy_of(configuration))


def foretell(
    trace: Trace, fabric: Fabric, configurations: Sequence[Configuration], world_size: int
) -> list[Foretold]:
    """The prediction for each configuration, the naive replay's, and what the reference takes."""
    all_gradients_ns = fabric.all_reduce_ns(sum(trace.sizes_bytes), world_size)
    naive = fabric.model_copy(update={"processor": Processor(), "concurrency": 1, "sharing": ()})

    def foretell_one(configuration: Configuration) -> Foretold:
        prediction = predict_one(trace, fabric, configuration, world_size)

        @cache
        def with_slower_network(factor: float) -> int:
            return predict_one(trace, fabric.scaled(factor), configuration, world_size).iteration_ns

        return Foretold(
            prediction,
            naive_overlap_ns=predict_one(trace, naive, configuration, world_size).iteration_ns,
            reference=Reference(prediction.compute_ns, all_gradients_ns),
            with_slower_network=with_slower_network,
        )

    return [foretell_one(configuration) for configuration in configurations]
