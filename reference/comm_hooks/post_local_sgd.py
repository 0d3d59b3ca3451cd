"""Post-local SGD: average gradients over all ranks at first, later only within small groups or not at all.

Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020 (arXiv 1808.07217), section 3.
Once averaging is local, the training script must average their parameters every H optimiser steps, for example with
`torch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from .allreduce import average, noop
from .interface import HookState


@dataclass(eq=False, repr=False)
class PostLocalSGDState(HookState):
    """Settings of post-local SGD: when averaging becomes local, and over which ranks.

    Args:
        process_group: The ranks to average over at first. None: all.
        subgroup: The ranks to average over later. None: the ranks of the same machine, one for each accelerator.
        start_localSGD_iter: The number of iterations before averaging becomes local (the paper's t').
        post_local_gradient_allreduce: Whether to average gradients within `subgroup`. False: not at all.
    """

    GROUPS: ClassVar[tuple[str, ...]] = ("process_group", "subgroup")

    subgroup: dist.ProcessGroup | None
    start_localSGD_iter: int  # noqa: N815 - torch's name
    post_local_gradient_allreduce: bool = True


def post_local_sgd(state: PostLocalSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average over `state.process_group` before `state.start_localSGD_iter`, then over `state.subgroup`."""
    local = state.iter >= state.start_localSGD_iter  # H(t) = 1 if t <= t', else H: the paper's section 3
    state.iter += bucket.is_last()
    if not local:
        return average(bucket.buffer(), state.process_group)
    if not state.post_local_gradient_allreduce:
        return noop(state, bucket)
    if state.subgroup is None:
        state.subgroup = _ranks_of_this_machine()
    return average(bucket.buffer(), state.subgroup)


def _ranks_of_this_machine() -> dist.ProcessGroup:
    if not torch.accelerator.is_available():
        raise ValueError(
            "post-local SGD: expected a subgroup, got None: without accelerators the number of ranks on a "
            "machine is unknown. Pass a subgroup, for example from torch.distributed.new_subgroups(group_size)"
        )
    group: dist.ProcessGroup = dist.new_subgroups()[0]
    return group
