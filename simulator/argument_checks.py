"""Checks: that `predict` and `sweep` are given what they take; a mistake is one line that names the argument.

Each raises ValueError, as everything does here that a caller can mend.
"""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from reference.schema import Schema
from reference.trace import Trace

from .fabric import Fabric
from .schedule.comm_hooks import CommHook, named_hook
from .schedule.policy import Policy
from .workload.variation import Straggler, Variation

FABRIC = "load one with Fabric.load(path), or make one of several with Fabric.merged(...)"
TRACE = "load one with Trace.load(path)"


def check_prediction(
    trace: object, fabric: object, policy: object, variation: object, stragglers: object, inputs: object
) -> None:
    """What `predict_policy` takes beside the world size."""
    _check_kind("trace", trace, Trace, TRACE)
    _check_kind("fabric", fabric, Fabric, FABRIC)
    _check_settings(policy, variation, stragglers)
    if inputs is not None:
        _check_inputs(inputs)


def check_sweep(
    traces: object, fabrics: object, policy: object, variation: object, stragglers: object, **axes: object
) -> None:
    """What `sweep` takes; `axes` are those of which there are several."""
    for name, one in _by_name("trace", traces):
        _check_kind(name, one, Trace, TRACE)
    for name, one in _by_name("fabric", fabrics):
        _check_kind(name, one, Fabric, FABRIC)
    _check_settings(policy, variation, stragglers)
    for name, values in axes.items():
        if isinstance(values, str | Schema) or not isinstance(values, Iterable):
            raise ValueError(f"{name}: expected several in a list, got {reprlib.repr(values)}; write [...] around it")


def check_world_size(world_size: Any) -> None:
    """That many ranks can be."""
    if not _is_whole(world_size):
        raise ValueError(f"world_size: expected a whole number of ranks, got {world_size!r}")
    if world_size < 1:
        raise ValueError(f"world_size: expected at least 1, got {world_size}")


def checked_hook(hook: object) -> CommHook:
    """A comm hook, made already or by its name."""
    if isinstance(hook, str):
        return named_hook(hook)
    if not isinstance(hook, CommHook):
        raise ValueError(f"hook: expected a CommHook or the name of one, such as 'fp16', got {reprlib.repr(hook)}")
    return hook


def overruled(policy: Policy) -> dict[str, str]:
    """Axes of a sweep about which the policy leaves no choice, each with the field that decides in its place."""
    if policy.plan is not None:
        return {"bucket_cap_mb": "plan", "order": "plan"}
    return {} if policy.bucket_cap_mb_list is None else {"bucket_cap_mb": "bucket_cap_mb_list"}


def _check_settings(policy: object, variation: object, stragglers: object) -> None:
    _check_kind("policy", policy, Policy, "make one with Policy(...)")
    _check_kind("variation", variation, Variation, "make one, such as Variation(kind='fitted')")
    if not isinstance(stragglers, Sequence) or isinstance(stragglers, str):
        raise ValueError(
            f"stragglers: expected a list of Straggler, got {reprlib.repr(stragglers)}; write [...] around one"
        )
    for number, straggler in enumerate(stragglers):
        _check_kind(f"stragglers[{number}]", straggler, Straggler, "make one with Straggler(rank=..., factor=...)")


def _check_inputs(inputs: object) -> None:
    if not isinstance(inputs, Sequence | np.ndarray) or isinstance(inputs, str):
        raise ValueError(f"inputs: expected a list of numbers of batches, one a rank, got {reprlib.repr(inputs)}")
    for rank, batches in enumerate(inputs):
        if not _is_whole(batches):
            raise ValueError(f"inputs[{rank}]: expected a whole number of batches, got {batches!r}")


def _by_name(name: str, one_or_several: object) -> Iterable[tuple[str, object]]:
    """Arguments that are one thing, or several by name."""
    if isinstance(one_or_several, Mapping):
        return [(f"{name}[{key!r}]", one) for key, one in one_or_several.items()]
    return [(name, one_or_several)]


def _check_kind(name: str, value: object, kind: type, cure: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name}: expected a {kind.__name__}, got {reprlib.repr(value)}; {cure}")


def _is_whole(number: object) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool)
