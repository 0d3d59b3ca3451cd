"""Memory: bytes on each GPU that data parallelism needs, by what holds them."""

from typing import Literal, get_args

from reference.trace import Trace

from ..schedule.policy import Policy

Optimizer = Literal["sgd", "momentum", "adam"]
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
STATES: dict[Optimizer, int] = {"sgd": 0, "momentum": 1, "adam": 2}
"""Tensors that an optimiser of torch keeps for each parameter, in the parameter's element type."""


def memory_bytes(trace: Trace, policy: Policy, optimizer: Optimizer) -> dict[str, int | None]:
    """Return the bytes on each GPU by what holds them.

    Activations are None, because traces do not record them. Buckets take no memory of their own if gradients are
    views of them (`gradient_as_bucket_view`).
    """
    parameters = sum(one.size_bytes for one in trace.workload.parameters)
    return {
        "parameters": parameters,
        "buffers": sum(one.size_bytes for one in trace.workload.buffers),
        "gradients": parameters,
        "buckets": 0 if policy.gradient_as_bucket_view else parameters,
        "optimizer": STATES[optimizer] * parameters,
        "activations": None,
    }
