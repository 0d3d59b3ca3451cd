"""Options of torch's DDP class: versions of torch differ, and tests that compare with it pass only what it takes."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

TAKEN = frozenset(inspect.signature(DistributedDataParallel).parameters)
"""Names of the arguments that torch's class takes in this version."""
NEWER = {"batched_grad_copy", "forward_sync_buffers"}
"""Arguments that torch 2.11 lacks, the oldest version that ddplab works with."""


def takes(options: Iterable[str]) -> bool:
    """Whether torch's class takes all of these arguments that are not in every version."""
    return TAKEN.issuperset(NEWER.intersection(options))


def taken(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments that torch's class takes."""
    return {name: value for name, value in options.items() if takes([name])}
