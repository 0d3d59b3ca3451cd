"""Join support: a rank that has run out of inputs matches the collectives of the ranks that continue.

`Join`, `Joinable` and `JoinHook` are torch's, so `with Join([ddp, optimizer, mine]):` also accepts torch's
`ZeroRedundancyOptimizer` and user-defined `Joinable` classes.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from . import buffers
from .collectives import JOIN_RANK_BYTES
from .parameters import INTEGERS

__all__ = ["Join", "JoinHook", "Joinable", "JoinableModule", "UnevenInputsHook"]

if TYPE_CHECKING:
    from .module_wrapper import DataParallel
    from .reducer import Reducer
    from .reducer_options import Features


class UnevenInputsHook(JoinHook):
    """Matches every collective of the iterations that other ranks still run (torch: `_DDPJoinHook`)."""

    def __init__(self, ddp: "DataParallel") -> None:
        super().__init__()
        self._ddp = ddp

    def main_hook(self) -> None:
        """Match one forward and backward pass, collective by collective, in the order of a real pass."""
        ddp = self._ddp
        ddp.reducer.rebuild_if_due()
        buffers.send_if_due(ddp, after_forward=False, candidate=False)
        averaging = ddp.any_rank_averages()
        buffers.send_if_due(ddp, after_forward=True, candidate=False)
        ddp.require_forward_param_sync = averaging
        if averaging:
            match_backward(ddp.reducer)

    def post_hook(self, is_last_joiner: bool) -> None:  # noqa: FBT001 - torch's signature
        """Give all ranks the model of a rank that had inputs to the end."""
        self._ddp.sync_final_model(is_last_joiner=is_last_joiner)


def match_backward(reducer: "Reducer") -> None:
    """Match the collectives of the other ranks' backward pass with buckets of zeros."""
    last = len(reducer.buckets) - 1
    in_flight = {
        number: reducer.send(bucket.zeros(), number, is_last=number == last)
        for number, bucket in enumerate(reducer.buckets)
    }
    reducer.tracker.launched_all()
    for number in in_flight:
        reducer.wait(in_flight, number)
    reducer.tracker.untouched()
    reducer.wait_for_others()
    reducer.tracker.finished()
    reducer.matched()


class JoinableModule(Joinable):
    """Join support. `DataParallel` supplies the attributes below."""

    module: torch.nn.Module
    reducer: "Reducer"
    process_group: dist.ProcessGroup
    device: torch.device
    features: "Features"
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    send_state: Callable[..., None]
    delayed: Any

    join = TorchDDP.join
    """Context in which ranks may run out of inputs at different times: torch's method, with torch's arguments.

    With `divide_by_initial_world_size=False`, averages are over the ranks with inputs, provided that the module has
    no comm hook and comes first in the list that `Join` is given.
    """
    join_device = TorchDDP.join_device
    join_process_group = TorchDDP.join_process_group

    def join_hook(self, **kwargs: Any) -> UnevenInputsHook:
        """The hook that a rank without inputs runs; takes `divide_by_initial_world_size` as `join` does.

        Raises:
            NotImplementedError: With `skip_all_reduce_unused_params` or delayed all-reduces.
        """
        if self.delayed is not None:
            raise NotImplementedError(
                "delay_all_reduce_named_params is not supported under Join: a rank without inputs cannot know "
                "between which buckets the others launch the delayed all-reduce. Construct the module without it"
            )
        if self.features.skip_all_reduce_unused_params:
            raise NotImplementedError(
                "skip_all_reduce_unused_params is not supported under Join: a rank without inputs cannot know which "
                "buckets the others skip. Construct the module without it"
            )
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return UnevenInputsHook(cast("DataParallel", self))

    def rank_counter(self, presence: dist.Work) -> Callable[[], int] | None:
        """A function that returns the number of ranks that have inputs, which Join counts in `presence`.

        None: averages are over all ranks.
        """
        if self._divide_by_initial_world_size:
            return None

        def count() -> int:
            presence.wait()
            return int(presence.get_future().value()[0].item())

        return count

    def announce_averaging(self, *, wanted: bool) -> None:
        """On a rank with inputs: contribute to `any_rank_averages` of the others; does not wait for the result."""
        self._ranks_that_average = torch.full(
            (1,), float(wanted), device=self.device
        )  # on CUDA the host does not wait
        dist.all_reduce(self._ranks_that_average, group=self.process_group, async_op=True)

    def any_rank_averages(self) -> bool:
        """On a rank without inputs: whether any rank averages the gradients of the coming backward pass."""
        ranks = torch.zeros(1, device=self.device)
        dist.all_reduce(ranks, group=self.process_group)
        return bool(ranks.item())

    def agree_on_rank(self, *, candidate: bool) -> int:
        """The highest rank among the candidates."""
        mine = dist.get_rank(self.process_group) if candidate else -1
        rank = torch.tensor([mine], dtype=INTEGERS[JOIN_RANK_BYTES], device=self.device)
        dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=self.process_group)
        return int(rank.item())

    def sync_final_model(self, *, is_last_joiner: bool) -> None:
        """Give all ranks the model of one that had inputs to the end."""
        self._authoritative_rank = self.agree_on_rank(candidate=is_last_joiner)
        self.send_state(source=self._authoritative_rank, with_buffers=self.forward_sync_buffers)
