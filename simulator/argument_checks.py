"""Argument checks of `predict` and `sweep`.

Each check raises ValueError with a one-line message that names the argument.
"""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from reference.files.reading import Schema
from reference.files.value_ranges import MILLION
from reference.trace import Trace

from .fabric import Fabric
from .interval import Engine
from .schedule.policy import Policy, PolicySettings
from .workload.compute_times import Straggler, Variation

FABRIC = "load one with Fabric.load(path), or combine several with Fabric.merged(...)"
TRACE = "load one with Trace.load(path)"


def checked_policy(policy: Policy | None, settings: PolicySettings) -> Policy:
    """Return the policy, made from `settings` if `policy` is None.

    Raises:
        ValueError: Both were given, a setting has an invalid value, or `policy` is not a Policy.
        TypeError: A setting is not a field of `Policy`.
    """
    if unknown := [name for name in settings if name not in Policy.model_fields]:
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}; settings are {', '.join(Policy.model_fields)}")
    if policy is None:
        return Policy(**settings)
    _check_kind("policy", policy, Policy, "make one with Policy(...)")
    if settings:
        raise ValueError(f"policy: expected either a policy or settings, got both; also given: {', '.join(settings)}")
    return policy


def check_prediction(
    trace: object,
    fabric: object,
    world_size: object,
    policy: Policy,
    *,
    variation: object,
    stragglers: object,
    inputs: object,
    engine: object,
) -> None:
    """Check the arguments of `predict` other than the settings of the policy, and that they fit the policy."""
    _check_kind("trace", trace, Trace, TRACE)
    _check_kind("fabric", fabric, Fabric, FABRIC)
    _check_variation(variation, stragglers)
    if inputs is not None:
        _check_inputs(inputs)
        if policy.skip_all_reduce_unused_params:
            raise ValueError(
                "inputs: expected None with skip_all_reduce_unused_params, which the reducer refuses under Join"
            )
    check_world_size(world_size)
    if engine not in get_args(Engine):
        raise ValueError(f"engine: expected one of {', '.join(get_args(Engine))}, got {engine!r}")


def check_sweep(traces: object, fabrics: object, *, variation: object, stragglers: object, **axes: object) -> None:
    """Check the arguments of `sweep` other than the settings of the policy; `axes` are lists of values by name."""
    for name, one in _by_name("trace", traces):
        _check_kind(name, one, Trace, TRACE)
    for name, one in _by_name("fabric", fabrics):
        _check_kind(name, one, Fabric, FABRIC)
    _check_variation(variation, stragglers)
    for name, values in axes.items():
        if isinstance(values, str | Schema) or not isinstance(values, Iterable):
            raise ValueError(f"{name}: expected a list of values, got {reprlib.repr(values)}; write [...] around it")


def check_world_size(world_size: Any) -> None:
    """Check that the world size is a whole number of at least 1."""
    if not _is_whole(world_size):
        raise ValueError(f"world_size: expected a whole number of ranks, got {world_size!r}")
    if world_size < 1:
        raise ValueError(f"world_size: expected at least 1, got {world_size}")
    if world_size > MILLION:
        raise ValueError(f"world_size: expected at most {MILLION}, got {world_size}")


def overruled(policy: Policy) -> dict[str, str]:
    """Return the axes of a sweep that have no effect under this policy, each with the field that overrides it."""
    if policy.plan is not None:
        return {"bucket_cap_mb": "plan", "order": "plan"}
    return {} if policy.bucket_cap_mb_list is None else {"bucket_cap_mb": "bucket_cap_mb_list"}


def _check_variation(variation: object, stragglers: object) -> None:
    _check_kind("variation", variation, Variation, "make one with Variation(...)")
    if not isinstance(stragglers, Sequence) or isinstance(stragglers, str):
        raise ValueError(
            f"stragglers: expected a list of Straggler, got {reprlib.repr(stragglers)}; write [...] around one"
        )
    for number, straggler in enumerate(stragglers):
        _check_kind(f"stragglers[{number}]", straggler, Straggler, "make one with Straggler(rank=..., factor=...)")


def _check_inputs(inputs: object) -> None:
    if not isinstance(inputs, Sequence | np.ndarray) or isinstance(inputs, str):
        raise ValueError(
            f"inputs: expected a list with the number of batches of each rank, got {reprlib.repr(inputs)}"
        )
    for rank, batches in enumerate(inputs):
        if not _is_whole(batches):
            raise ValueError(f"inputs[{rank}]: expected a whole number of batches, got {batches!r}")


def _by_name(name: str, one_or_several: object) -> Iterable[tuple[str, object]]:
    """Return an argument, or each value of a mapping, with the name to use in messages."""
    if isinstance(one_or_several, Mapping):
        return [(f"{name}[{key!r}]", one) for key, one in one_or_several.items()]
    return [(name, one_or_several)]


def _check_kind(name: str, value: object, kind: type, cure: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name}: expected a {kind.__name__}, got {reprlib.repr(value)}; {cure}")


def _is_whole(number: object) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool)
