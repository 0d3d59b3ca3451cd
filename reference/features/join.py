"""Join support: a rank that has run out of inputs matches the collectives of the ranks that continue.

`Join` is torch's, so `with Join([ddp, optimizer, mine]):` also accepts torch's `ZeroRedundancyOptimizer` and
user-defined `Joinable` classes.
"""

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..backward_pass import Idle
from ..broadcast import send_buffers_if_due, send_state
from ..message_sizes import JOIN_RANK_BYTES
from ..parameters import INTEGERS

if TYPE_CHECKING:
    from ..module_wrapper import DataParallel
    from ..reducer import Reducer


class UnevenInputsHook(JoinHook):
    """Matches every collective of the iterations that other ranks still run (torch: `_DDPJoinHook`)."""

    def __init__(self, ddp: "DataParallel") -> None:
        super().__init__()
        self._ddp = ddp

    def main_hook(self) -> None:
        """Match one forward and backward pass, collective by collective, in the order of a real pass."""
        ddp = self._ddp
        ddp._reducer.rebuild_if_due()
        send_buffers_if_due(ddp, after_forward=False, candidate=False)
        averaging = ddp._check_global_requires_backward_grad_sync(is_joined_rank=True)
        send_buffers_if_due(ddp, after_forward=True, candidate=False)
        ddp.require_forward_param_sync = averaging
        if averaging:
            match_backward(ddp._reducer)

    def post_hook(self, is_last_joiner: bool) -> None:  # noqa: FBT001 - torch's signature
        """Give all ranks the model of a rank that had inputs to the end."""
        self._ddp._sync_final_model(is_last_joiner)


def match_backward(reducer: "Reducer") -> None:
    """Match the collectives of the other ranks' backward pass with buckets of zeros."""
    reducer.iterations += 1
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
    reducer.state = Idle()  # a forward pass that still waits is over
    reducer.note_ready_order([])


class JoinableModule(Joinable):
    """Join support. `DataParallel` supplies the attributes below."""

    module: torch.nn.Module
    _reducer: "Reducer"
    process_group: dist.ProcessGroup
    device: torch.device
    forward_sync_buffers: bool
    require_backward_grad_sync: bool  #: False inside `no_sync()`
    require_forward_param_sync: bool  #: whether the next forward pass sends buffers: the last one was synchronised
    _has_buffers: bool

    join = TorchDDP.join
    """Context in which ranks may run out of inputs at different times: torch's method, with torch's arguments.

    With `divide_by_initial_world_size=False`, averages are over the ranks with inputs, provided that the module has
    no comm hook and comes first in the list that `Join` is given.
    """
    join_device = TorchDDP.join_device
    join_process_group = TorchDDP.join_process_group

    def join_hook(self, **kwargs: Any) -> UnevenInputsHook:
        """The hook that a rank without inputs runs; takes `divide_by_initial_world_size` as `join` does.

        Raises NotImplementedError with `skip_all_reduce_unused_params` or delayed all-reduces.
        """
        if self._reducer.delayed is not None:
            raise NotImplementedError(
                "delay_all_reduce_named_params is not supported under Join: a rank without inputs cannot know "
                "between which buckets the others launch the delayed all-reduce. Construct the module without it"
            )
        if self._reducer.options.skip_all_reduce_unused_params:
            raise NotImplementedError(
                "skip_all_reduce_unused_params is not supported under Join: a rank without inputs cannot know which "
                "buckets the others skip. Construct the module without it"
            )
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return UnevenInputsHook(cast("DataParallel", self))

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool:  # noqa: FBT001 - torch's
        """Whether any rank averages in the coming backward pass; ranks with inputs do not wait for the answer."""
        wanted = not is_joined_rank and torch.is_grad_enabled() and self.require_backward_grad_sync
        ranks = torch.full((1,), float(wanted), device=self.device)  # on CUDA the host does not wait
        work = dist.all_reduce(ranks, group=self.process_group, async_op=True)
        if not is_joined_rank:
            self._ranks_averaging = ranks  # kept alive until it has been sent
            return wanted
        work.wait()
        return bool(ranks.item())

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:  # noqa: FBT001
        """The highest `input_rank` of the ranks whose `rank_cond` is true."""
        rank = torch.tensor([input_rank if rank_cond else -1], dtype=INTEGERS[JOIN_RANK_BYTES], device=self.device)
        dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=self.process_group)
        return int(rank.item())

    def _sync_final_model(self, is_last_joiner: bool) -> None:  # noqa: FBT001
        """Give all ranks the model of one that had inputs to the end."""
        source = self._authoritative_rank = self._find_common_rank(self.process_group.rank(), is_last_joiner)
        send_state(self.module, self.process_group, source=source, with_buffers=self.forward_sync_buffers)


def ranks_present(presence: dist.Work) -> int:
    """Wait for Join's count of the ranks that have inputs, and return it."""
    presence.wait()
    return int(presence.get_future().value()[0].item())
