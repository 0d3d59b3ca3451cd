"""Delayed all-reduces: some parameters leave the buckets, and are averaged together when one gradient arrives.

torch: `delay_all_reduce_named_params` and `param_to_hook_all_reduce`. Unlike torch's, the all-reduce is over when the
backward pass ends, and passes inside `no_sync` average nothing.
"""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..autograd_hooks import accumulators, not_traced
from ..bucketing import ONE_BUCKET, assign_buckets
from ..constructor_arguments import Options
from ..parameters import bucket_key, sparse_parameters
from ..recording.reducer_observer import Future
from .view_and_sparse_buckets import ViewBucket

_engine: Any = torch.autograd.Variable._execution_engine


class DelayedAllReduce:
    """Averages gradients in one all-reduce per dtype and device, launched when the trigger's gradient has arrived.

    All ranks must compute the trigger's gradient at the same place among the gradients of the other parameters,
    because the all-reduce is launched between those of the buckets. By then the gradients of `parameters`, of which
    the trigger may be one, must be complete. Gradients are views of the flat buffers.
    """

    def __init__(self, parameters: list[nn.Parameter], trigger: nn.Parameter, group: dist.ProcessGroup) -> None:
        self.parameters = parameters
        # On a GPU, autograd makes the stream of a node wait for the gradient. All nodes are made here, on one stream,
        # and held; so when the trigger's gradient has arrived, that stream has waited for all others.
        self._accumulators = accumulators([*self.parameters, trigger])
        self.set_group(group)
        this = weakref.proxy(self)
        hook = trigger.register_post_accumulate_grad_hook(not_traced(lambda _trigger: this._launch()))
        weakref.finalize(self, hook.remove)

    def set_group(self, group: dist.ProcessGroup) -> None:
        """Average over other ranks from now on, in new buffers: collectives under way may still write into others.

        A backward pass that is under way is forgotten.
        """
        self._group = group
        self._wanted: bool | None = None  # None: gradients stay local; False: those of this forward pass are averaged
        self._in_flight: list[Future] = []
        sizes_bytes = [parameter.nbytes for parameter in self.parameters]
        together = assign_buckets(sizes_bytes, [ONE_BUCKET], keys=list(map(bucket_key, self.parameters)))
        self._buckets = [ViewBucket(indices, [self.parameters[i] for i in indices]) for indices in together]

    def forward_done(self, *, averaging: bool) -> None:
        """Average in the coming backward pass or, under `no_sync`, leave gradients local.

        Raises RuntimeError if an exception ended the last backward pass after the all-reduce was launched.
        """
        if self._in_flight and self._group.size() > 1:
            raise RuntimeError(
                f"rank {self._group.rank()}: an exception ended the last backward pass after its delayed "
                "all-reduce was launched, so the ranks may have issued different collectives. Start again from a "
                "checkpoint, on all ranks"
            )
        self._in_flight.clear()
        self._wanted = True if averaging else None

    @torch.no_grad()
    def _launch(self) -> None:
        if self._wanted is None:
            return
        if not self._wanted:
            raise RuntimeError(
                f"rank {self._group.rank()}: a second backward pass after one forward pass reached the "
                "parameter whose gradient launches the delayed all-reduce; its gradients would not be averaged. Run "
                "all but the last under no_sync()"
            )
        self._wanted = False
        self._absent = [parameter for parameter in self.parameters if parameter.grad is None]
        for bucket in self._buckets:
            bucket.reset()
            bucket.put(range(len(bucket.indices)))
            bucket.pack(1.0 / self._group.size())
            self._in_flight.append(bucket.all_reduce(self._group))
        self._versions = [bucket.buffer._version for bucket in self._buckets]
        _engine.queue_callback(self._finish)

    @not_traced
    def _finish(self) -> None:
        """At the end of the backward pass: wait (on CUDA: the current stream waits), and set missing gradients."""
        in_flight, self._in_flight = self._in_flight, []
        for future in in_flight:
            future.wait()
        changed = self._versions != [bucket.buffer._version for bucket in self._buckets]
        if changed or any(parameter.grad is not None for parameter in self._absent):
            raise RuntimeError(
                f"rank {self._group.rank()}: param_to_hook_all_reduce: gradients of delayed parameters "
                "arrived after that of this parameter, so incomplete ones were averaged. Choose a parameter that is "
                "used before all delayed ones in forward, so that its gradient is the last"
            )
        for bucket in self._buckets:
            bucket.copy_out()


def resolve_delayed(module: nn.Module, options: Options) -> dict[str, nn.Parameter]:
    """The parameters to delay by name; a parameter with several names has all of them.

    Raises ValueError if only one of the two arguments is given; a name is not that of the parameter; a parameter is
    frozen or has sparse gradients; or the trigger gets no gradient.
    """
    named, trigger = options.delay_all_reduce_named_params, options.param_to_hook_all_reduce
    if (named is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time: got only "
            + ("param_to_hook_all_reduce" if named is None else "delay_all_reduce_named_params")
        )
    if named is None or trigger is None:
        return {}
    if not trigger.requires_grad or not trigger.is_leaf:
        raise ValueError(
            "param_to_hook_all_reduce: expected a parameter that requires a gradient, got another tensor"
        )
    own = dict(nn.Module.named_parameters(module, remove_duplicate=False))
    sparse = sparse_parameters(module)
    for name, parameter in named:
        if own.get(name) is not parameter:
            has = "another parameter of that name" if name in own else "no parameter of that name"
            raise ValueError(
                f"delay_all_reduce_named_params: expected pairs from module.named_parameters(), got {name!r} with a "
                f"parameter that is not the module's; the module has {has}"
            )
        if not parameter.requires_grad or name in sparse:
            what = "has sparse gradients" if name in sparse else "requires no gradient"
            raise ValueError(f"delay_all_reduce_named_params: {name} {what}; leave it out of the list")
    chosen = {parameter for _, parameter in named}
    return {name: parameter for name, parameter in own.items() if parameter in chosen}
