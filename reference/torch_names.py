"""The names of torch's reducer, which scripts, client libraries and torch's own functions call: `ddp.reducer`."""

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .backward_exceptions import missing
from .backward_pass import Expecting, Idle
from .features.join import ranks_present

if TYPE_CHECKING:
    from .recording.reducer_observer import Future
    from .reducer import Reducer


class TorchNames:
    """A reducer with the methods of torch's, most of them private; all other attributes are the reducer's own."""

    def __init__(self, reducer: "Reducer") -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _set_forward_pass_work_handle(self, work: dist.Work, use_static_world_size: bool) -> None:  # noqa: FBT001
        self._reducer.count_ranks = None if use_static_world_size else partial(ranks_present, work)

    def _rebuild_buckets(self) -> bool:
        before = self.buckets.rebuilt
        self._reducer.rebuild_if_due()
        return bool(self.buckets.rebuilt and not before)

    def _push_all_rebuilt_params(self) -> None:
        self._reducer.ready_order = self.ready_order or list(range(len(self.parameters)))

    def _delay_all_reduce(self) -> None:
        """Average now what has arrived of a pass that waits for more; what has not counts as unused."""
        reducer = self._reducer
        if isinstance(reducer.state, Expecting) and reducer.state.reduction.begun:
            reduction = reducer.state.reduction
            reducer.mark_ready(reduction, missing(reducer))
            reducer.finish(reduction)
            reducer.state = Idle()

    def _install_post_backward_futures(self, futures: "Sequence[Future]") -> None:
        self._reducer.after_backward += futures

    def _get_local_used_map(self) -> Any:
        return self.tracker.used  # only trackers of unused parameters have a map

    def _ddp_graph_static(self) -> bool:
        return self._reducer.tracker.is_static

    _remove_autograd_hooks = property(attrgetter("_reducer.detach"))
    _check_reducer_finalized = property(attrgetter("_reducer.check_finished"))

    def _run_comm_hook(self, bucket: Any) -> Any:
        hook = self._reducer.hook
        return hook.hook(hook.state, bucket) if hook is not None else self._run_allreduce_hook(bucket)

    def _run_allreduce_hook(self, bucket: Any) -> Any:
        return dist.all_reduce(bucket.buffer(), group=self.group, async_op=True).get_future()
