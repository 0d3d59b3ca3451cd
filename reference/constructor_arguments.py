"""Options of a data-parallel module by the names of torch's arguments."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .bucketing import may_change


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a module was given at construction; see the arguments of `DistributedDataParallel`."""

    find_unused_parameters: bool = False
    skip_all_reduce_unused_params: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    batched_grad_copy: bool = False
    bucket_cap_mb: float | None = None
    bucket_cap_mb_list: Sequence[float] | None = None
    plan: Sequence[Sequence[int | str]] | None = None
    debug: bool = False
    device_ids: Sequence[int | torch.device] | None = None
    output_device: int | torch.device | None = None
    delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None
    param_to_hook_all_reduce: nn.Parameter | None = None
    lazy_bucket_allocation: bool = False
    require_manual_backward_finalization: bool = False  #: set between iterations

    @property
    def graph_may_change(self) -> bool:
        """Whether each iteration finds its own unused parameters; see `bucketing.may_change`."""
        return may_change(find_unused_parameters=self.find_unused_parameters, static_graph=self.static_graph)
